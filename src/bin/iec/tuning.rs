//! The options that change how fast a model runs, and nothing else.

use crate::global::{Global, non_empty_variable};
use crate::names::{Named, named};
use clap::ValueEnum;
use iec::runtime::Residency;
use iec::runtime::cpu::place::{Affinity, Numa};
use iec::runtime::cpu::topology::{SYSTEM_ROOT, Topology};
use std::path::Path;

/// What an option says that is accepted because scripts pass it.
const NO_EFFECT: &str = "accepted, no effect on this backend";

/// Variables of streaming kernels. docs/PERFORMANCE.md has what each would gain: nothing.
const STREAMING: [&str; 6] = [
    "IE_PREFETCH_DISTANCE",
    "IE_NT_LOADS",
    "IE_L3_BYTES",
    "IE_NT_THRESHOLD_RATIO",
    "IE_STREAM_BLOCK_BYTES",
    "IE_REUSE_GUARD_WINDOWS",
];

/// What `--help` says about variables that have no option.
pub const VARIABLES_HELP: &str = "\
IE_PREFETCH_DISTANCE, IE_NT_LOADS, IE_L3_BYTES, IE_NT_THRESHOLD_RATIO, IE_STREAM_BLOCK_BYTES and IE_REUSE_GUARD_WINDOWS:
accepted, no effect on this backend (measured: docs/PERFORMANCE.md).";

/// Where threads run and when weights are read.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Tuning")]
pub struct TuningArgs {
    /// Bind each thread to a processor, whole cores first
    #[arg(long, value_parser = named(AFFINITIES), value_name = "HOW", env = "AFFINITY", default_value = "auto")]
    pub affinity: Affinity,
    /// none, interleave: memory from all nodes in turn, node:X: threads and memory on node X, or strict: on one node
    /// and nowhere else. Files that are cached already stay where they are
    #[arg(long, value_name = "POLICY", default_value = "none")]
    pub numa: Numa,
    /// When weights are read: on: all before the first token, off and auto: when they are computed with. A number of
    /// prompts to tokenize ahead is taken for auto: accepted, no effect on this backend
    #[arg(long, value_name = "on|off|auto|N", env = "PREFETCH", default_value = "auto", value_parser = parse_prefetch)]
    prefetch: Prefetch,
    /// Keep the weights locked in memory; implies --prefetch on
    #[arg(long)]
    pin: bool,
    /// Accepted, no effect on this backend: plain rows are multiplied as they lie
    #[arg(long, value_enum, value_name = "WHICH", env = "PRETRANSPOSE", default_value = "none")]
    pretranspose: Pretranspose,
}

/// The values of --affinity.
const AFFINITIES: &[Named<Affinity>] = &[
    (Affinity::Auto, &["auto"], "The system chooses"),
    (Affinity::Compact, &["compact"], "Fill a memory node before the next"),
    (Affinity::Scatter, &["scatter"], "The memory nodes in turn"),
];

/// A number of prompts is `None`.
#[derive(Debug, Clone, Copy)]
struct Prefetch(Option<Residency>);

fn parse_prefetch(text: &str) -> Result<Prefetch, String> {
    match text {
        "on" => Ok(Prefetch(Some(Residency::Whole))),
        "off" | "auto" => Ok(Prefetch(Some(Residency::OnDemand))),
        number if number.parse::<usize>().is_ok() => Ok(Prefetch(None)),
        _ => Err("expected on, off, auto or a number of prompts".into()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Pretranspose {
    None,
    Woh,
    Wxh,
    All,
}

impl TuningArgs {
    /// When weights come into memory.
    pub fn residency(&self) -> Residency {
        if self.pin { Residency::Locked } else { self.prefetch.0.unwrap_or(Residency::OnDemand) }
    }

    /// Notes on stderr about what was asked for and changes nothing.
    pub fn note_options_without_effect(&self, global: &Global) {
        if self.pretranspose != Pretranspose::None {
            global.note(format!("--pretranspose: {NO_EFFECT}"));
        }
        if self.prefetch.0.is_none() {
            global.note(format!("--prefetch with a number: {NO_EFFECT}; as auto"));
        }
        for name in STREAMING.into_iter().filter(|name| non_empty_variable(name).is_some()) {
            global.note(format!("{name}: {NO_EFFECT}"));
        }
        if self.numa != Numa::None && Topology::probe(Path::new(SYSTEM_ROOT)).nodes.len() < 2 {
            global.note(format!("--numa {}: this machine has one memory node, so it changes nothing", self.numa));
        }
    }
}
