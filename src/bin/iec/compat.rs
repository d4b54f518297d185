//! Options and variables that scripts of the predecessor pass and that have no effect here.
//!
//! Each is accepted and named once on stderr with the reason, so that scripts keep working and a setting without
//! effect is seen. docs/guide/predecessor.md has the table of all variables.

use crate::global::{Global, non_empty_variable};
use crate::variables::acts;
use clap::ValueEnum;

/// Common part of all notes of this module.
const NO_EFFECT: &str = "accepted, no effect on this backend";

const STREAMING: &str = "kernels prefetch at a fixed distance that was measured";
const REPORTS: &str = "use --report-root, --html and `iec inspect REPORT.jsonl --strict`";
const HUGGING_FACE: &str = "`iec verify` computes the reference itself, without Python";

/// Variables without effect, with the reason.
const VARIABLES: &[(&str, &str)] = &[
    ("IE_PREFETCH_DISTANCE", STREAMING),
    ("IE_NT_LOADS", STREAMING),
    ("IE_L3_BYTES", STREAMING),
    ("IE_NT_THRESHOLD_RATIO", STREAMING),
    ("IE_STREAM_BLOCK_BYTES", STREAMING),
    ("IE_REUSE_GUARD_WINDOWS", STREAMING),
    ("IE_TP_USE_AFFINITY", "use --affinity"),
    ("IE_DEDUP_MANIFEST", "a deduplicated pack has its own manifest; use --dedup DIR"),
    ("REPORT_PATH", REPORTS),
    ("STRICT_REPORT_PATH", REPORTS),
    ("REPORT_SCRIPT", REPORTS),
    ("REPORT_ARGS", REPORTS),
    ("HF_PY", HUGGING_FACE),
    ("HF_DEVICE", HUGGING_FACE),
    ("HF_CHECK_PROMPT", HUGGING_FACE),
];

/// Part of `--help` about these variables.
pub const VARIABLES_HELP: &str = "\
IE_PREFETCH_DISTANCE, IE_NT_LOADS, IE_L3_BYTES, IE_NT_THRESHOLD_RATIO, IE_STREAM_BLOCK_BYTES and IE_REUSE_GUARD_WINDOWS:
accepted, no effect on this backend. docs/guide/predecessor.md lists all variables of the predecessor.";

/// Options of the predecessor without effect.
#[derive(Debug, clap::Args)]
pub struct CompatArgs {
    /// Accepted, no effect on this backend: packs are stored in the layout that kernels read
    #[arg(
        help_heading = "Tuning",
        long,
        value_enum,
        value_name = "WHICH",
        env = "PRETRANSPOSE",
        default_value = "none"
    )]
    pretranspose: Pretranspose,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Pretranspose {
    None,
    Woh,
    Wxh,
    All,
}

impl CompatArgs {
    /// Prints a note to stderr about each given option or variable without effect, with the reason.
    pub fn note(&self, global: &Global) {
        if self.pretranspose != Pretranspose::None {
            global.note(format!("--pretranspose: {NO_EFFECT}: packs are stored in the layout that kernels read"));
        }
        for (name, why) in VARIABLES.iter().filter(|(name, _)| acts(name) && non_empty_variable(name).is_some()) {
            global.note(format!("{name}: {NO_EFFECT}: {why}"));
        }
    }
}
