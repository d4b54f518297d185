//! The scenarios: one command line with what exists before it. Each writing command of the program has at least one.

/// A command whose calls are disturbed, in a directory where other commands have prepared its inputs.
///
/// The directory holds `source` and `other`, two checkpoints of one shape with different weights, `adapter`, an adapter
/// for both, texts, questions, and `key.pem`.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    pub name: &'static str,
    /// The arguments, with single spaces between them.
    pub line: &'static str,
    /// Commands that are run before, undisturbed.
    pub before: &'static [&'static str],
    /// Commands that lead from the same initial state to a state that an interruption may leave: complete, but neither
    /// the old nor the new one.
    pub between: &'static [&'static str],
    /// Commands that are run after the command, in order to compare what it made. A command that makes an intermediate
    /// result has some; its directory of partial work may then exist until they are done.
    pub after: &'static [&'static str],
    /// Directories whose files change together. All other files change one by one.
    pub units: &'static [&'static str],
    /// Packs in which the command only notes that another pack needs them, or needs them no longer. It may continue if
    /// it cannot write the note; the next command that writes there removes what an interruption leaves.
    pub noted_in: &'static [&'static str],
}

impl Scenario {
    /// Returns the name of the command.
    pub fn command(&self) -> &'static str {
        self.line.split(' ').next().unwrap_or_default()
    }
}

const PACK: &str = "pack --hf-dir source --out-dir out";
const PACK_OTHER: &str = "pack --hf-dir other --out-dir out";
const DEDUP: &str = "dedup --even-if-larger --model-dir out";
const REMOVE_ORIGINAL: &str = "dedup --even-if-larger --remove-original --model-dir out";
const UNPACK_OTHER: &str = "unpack --model-dir other-pack --out-dir out --max-shard-size 30K";
const PACK_OTHER_ASIDE: &str = "pack --hf-dir other --out-dir other-pack";
const PACK_ASIDE: &str = "pack --hf-dir source --out-dir pack";
const EXPORT: &str = "export-gguf --model-dir pack --out model.gguf";
const FAMILY: &str = "dedup --even-if-larger --remove-original --base pack out";
const OUT: &[&str] = &["out"];
const RUN_SOURCE: &str = "run --model-dir source --prompt Once --max-new 2 --ignore-eos";
const RUN_STATE: &str = "run --model-dir pack --prompts-file text --max-new 2 --ignore-eos --state-dir state";
const RUN_STATE_OTHER: &str = "run --model-dir pack --prompts-file more --max-new 2 --ignore-eos --state-dir state";
/// Entry of the cache for `source`; its name has a hash, which `State` leaves out.
const ENTRY: &[&str] = &["cache/models/source"];

const fn scenario(name: &'static str, line: &'static str, before: &'static [&'static str]) -> Scenario {
    Scenario { name, line, before, between: &[], after: &[], units: OUT, noted_in: &[] }
}

/// All scenarios.
pub const SCENARIOS: &[Scenario] = &[
    scenario("pack", PACK, &[]),
    scenario("pack --overwrite", "pack --hf-dir source --out-dir out --overwrite", &[PACK_OTHER]),
    scenario(
        "pack --overwrite of a deduplicated pack",
        "pack --hf-dir source --out-dir out --overwrite",
        &[PACK_OTHER, DEDUP],
    ),
    scenario(
        "pack --q4-map",
        "pack --hf-dir source --out-dir out --q4-map map.json",
        &["ptq --hf-dir source --bits 8 --out map.json"],
    ),
    scenario("pack --bits", "pack --hf-dir source --out-dir out --bits 8", &[]),
    Scenario {
        after: &["pack --hf-dir source --out-dir out --part 2/2", "merge --out-dir out"],
        ..scenario("pack --part", "pack --hf-dir source --out-dir out --part 1/2", &[])
    },
    scenario("pack of an adapter", "pack adapter --base pack --out-dir out", &[PACK_ASIDE]),
    scenario(
        "pack of an adapter --overwrite",
        "pack adapter --base pack --out-dir out --overwrite",
        &[PACK_ASIDE, "pack adapter --base pack --out-dir out --dtype bf16"],
    ),
    scenario("q4", "q4 --hf-dir source --out-dir out", &[]),
    scenario("q4 --overwrite", "q4 --hf-dir source --out-dir out --overwrite", &["q4 --hf-dir other --out-dir out"]),
    scenario("q4 --append-attn", "q4 --append-attn --model-dir out", &[PACK]),
    scenario("ptq", "ptq --hf-dir source --bits 8 --out map.json", &[]),
    scenario("ptq --report", "ptq --hf-dir source --bits 8 --out map.json --report page.html", &[]),
    scenario(
        "ptq --overwrite --report",
        "ptq --hf-dir source --bits 8 --out map.json --report page.html --overwrite",
        &["ptq --hf-dir other --bits 8 --out map.json --report page.html"],
    ),
    scenario("simulate --out", "simulate --requests 20 --out page.html", &[]),
    scenario(
        "simulate --overwrite",
        "simulate --requests 20 --out page.html --overwrite",
        &["simulate --requests 10 --out page.html"],
    ),
    scenario("calib", "calib --hf-dir source --text text --window 64 --out statistics", &[]),
    Scenario {
        after: &["calib --hf-dir source --text text --window 64 --out statistics --part 2/2", "merge --out statistics"],
        ..scenario("calib --part", "calib --hf-dir source --text text --window 64 --out statistics --part 1/2", &[])
    },
    scenario(
        "calib --quantized",
        "calib --hf-dir source --text text --window 64 --quantized map.json --out statistics",
        &["ptq --hf-dir source --bits 4 --out map.json"],
    ),
    scenario(
        "calib --merge",
        "calib --merge one two --out statistics",
        &[
            "calib --hf-dir source --text text --window 64 --out one",
            "calib --hf-dir source --text more --window 64 --out two",
        ],
    ),
    scenario(
        "merge of pack",
        "merge --out-dir out",
        &["pack --hf-dir source --out-dir out --part 1/2", "pack --hf-dir source --out-dir out --part 2/2"],
    ),
    scenario(
        "merge of q4",
        "merge --out-dir out",
        &["q4 --hf-dir source --out-dir out --part 1/2", "q4 --hf-dir source --out-dir out --part 2/2"],
    ),
    scenario(
        "merge of q4 --append-attn",
        "merge --out-dir out",
        &[PACK, "q4 --append-attn --model-dir out --part 1/2", "q4 --append-attn --model-dir out --part 2/2"],
    ),
    scenario(
        "merge of calib",
        "merge --out statistics",
        &[
            "calib --hf-dir source --text text --window 64 --out statistics --part 1/2",
            "calib --hf-dir source --text text --window 64 --out statistics --part 2/2",
        ],
    ),
    scenario("dedup", DEDUP, &[PACK]),
    Scenario { between: &[DEDUP], ..scenario("dedup --remove-original", REMOVE_ORIGINAL, &[PACK]) },
    scenario("dedup --restore", "dedup --restore --model-dir out", &[PACK, REMOVE_ORIGINAL]),
    scenario(
        "dedup --restore --out-dir",
        "dedup --restore --model-dir pack --out-dir out",
        &[PACK_ASIDE, "dedup --even-if-larger --remove-original --model-dir pack"],
    ),
    scenario("dedup --remove", "dedup --remove --model-dir out", &[PACK, DEDUP]),
    Scenario {
        between: &[
            "dedup --even-if-larger --model-dir pack",
            "dedup --even-if-larger --remove-original --model-dir pack",
            "dedup --even-if-larger --base pack out",
            "dedup --even-if-larger --model-dir out --base pack",
        ],
        units: &["pack", "out"],
        noted_in: &["pack"],
        ..scenario("dedup of a family", FAMILY, &[PACK_ASIDE, PACK_OTHER])
    },
    Scenario {
        units: &["pack", "out"],
        noted_in: &["pack"],
        ..scenario("dedup --remove of a family", "dedup --remove --model-dir out", &[PACK_ASIDE, PACK_OTHER, FAMILY])
    },
    scenario("unpack", "unpack --model-dir pack --out-dir out", &[PACK_ASIDE]),
    scenario("unpack --max-shard-size", "unpack --model-dir pack --out-dir out --max-shard-size 30K", &[PACK_ASIDE]),
    scenario(
        "unpack --overwrite",
        "unpack --model-dir pack --out-dir out --overwrite",
        &[PACK_ASIDE, PACK_OTHER_ASIDE, UNPACK_OTHER],
    ),
    scenario("import-gguf", "import-gguf model.gguf --out-dir out", &[PACK_ASIDE, EXPORT]),
    scenario(
        "import-gguf --overwrite",
        "import-gguf model.gguf --out-dir out --overwrite",
        &[PACK_ASIDE, EXPORT, PACK_OTHER],
    ),
    scenario("export-gguf", EXPORT, &[PACK_ASIDE]),
    scenario(
        "export-gguf --overwrite",
        "export-gguf --model-dir pack --out model.gguf --overwrite",
        &[PACK_ASIDE, PACK_OTHER_ASIDE, "export-gguf --model-dir other-pack --out model.gguf"],
    ),
    scenario("export-hf", "export-hf --format fp8 --model-dir pack --out-dir out --max-shard-size 30K", &[PACK_ASIDE]),
    scenario(
        "export-hf --overwrite",
        "export-hf --format fp8 --model-dir pack --out-dir out --overwrite",
        &[PACK_ASIDE, PACK_OTHER_ASIDE, UNPACK_OTHER],
    ),
    scenario("synth", "synth --config source/config.json --seed 3 --out-dir out", &[]),
    scenario(
        "synth --overwrite",
        "synth --config source/config.json --seed 3 --out-dir out --overwrite",
        &["synth --config source/config.json --seed 4 --out-dir out"],
    ),
    scenario("tensor-map", "tensor-map --model-dir pack --out map.json", &[PACK_ASIDE]),
    scenario(
        "run --trace-ids",
        "run --model-dir pack --prompt Once --max-new 2 --ignore-eos --trace-ids trace",
        &[PACK_ASIDE],
    ),
    scenario(
        "run --report-root",
        "run --model-dir pack --prompt Once --max-new 2 --ignore-eos --report-root reports",
        &[PACK_ASIDE],
    ),
    scenario(
        "run --trace-ids --report-root",
        "run --model-dir pack --prompt Once --max-new 2 --ignore-eos --trace-ids trace --report-root reports",
        &[PACK_ASIDE],
    ),
    Scenario { units: ENTRY, ..scenario("run of a checkpoint", RUN_SOURCE, &[]) },
    Scenario {
        units: ENTRY,
        ..scenario(
            "run of a checkpoint in int8",
            "run --model-dir source --prompt Once --max-new 2 --ignore-eos --precision int8",
            &[],
        )
    },
    Scenario { units: &[], ..scenario("run --state-dir", RUN_STATE, &[PACK_ASIDE]) },
    Scenario {
        units: &[],
        ..scenario("run --state-dir with a page of another text", RUN_STATE, &[PACK_ASIDE, RUN_STATE_OTHER])
    },
    Scenario { units: ENTRY, ..scenario("rm", "rm --all", &[RUN_SOURCE]) },
    scenario(
        "bench --report-root",
        "bench --model-dir pack --prompt-len 4 --max-new 2 --warmup 0 --report-root reports --performance-md table.md",
        &[PACK_ASIDE],
    ),
    scenario("verify --out", "verify --hashes --model-dir pack --out report.json", &[PACK_ASIDE]),
    scenario(
        "verify --out --overwrite",
        "verify --hashes --model-dir pack --out report.json --overwrite",
        &[PACK_ASIDE, PACK_OTHER_ASIDE, "verify --hashes --model-dir other-pack --out report.json"],
    ),
    scenario("sign", "sign --model-dir pack --key key.pem --out pack.sig", &[PACK_ASIDE]),
    scenario("sign into the pack", "sign --model-dir pack --key key.pem", &[PACK_ASIDE]),
    scenario("sign --new-key", "sign --new-key new.pem", &[]),
    scenario("eval --details", "eval --model-dir pack --choices questions --details answers", &[PACK_ASIDE]),
    scenario("eval --kv-gate", "eval --model-dir pack --text text --ctx 64 --kv int8 --kv-gate", &[PACK_ASIDE]),
    scenario("man", "man --out-dir pages", &[]),
    scenario("man --overwrite", "man --out-dir pages --overwrite", &["man --out-dir pages"]),
];

/// Options that take a path which the command only reads. All other options with a path need a scenario.
pub const READ_PATHS: &[&str] = &[
    "calib",
    "chat-template",
    "config",
    "dedup",
    "exact-match",
    "expected-tokens",
    "few-shot",
    "gate-task",
    "gate-text",
    "grammar",
    "hf-dir",
    "json-schema",
    "key",
    "kl-ref",
    "load",
    "loglikelihood",
    "lora",
    "manifest",
    "model-bin",
    "model-dir",
    "model-json",
    "plan-text",
    "prompts-file",
    "rules",
    "signature",
    "suite",
    "tokenizer",
    "trace",
];

/// Commands that write no files, each with the command line that the test runs to show it.
pub const READ_ONLY: &[(&str, &str)] = &[
    ("inspect", "inspect --stats pack"),
    ("devices", "devices"),
    ("verify-source", "verify-source --hf-dir source"),
    ("list", "list"),
    ("show", "show source"),
    ("recipes", "recipes"),
    ("completions", "completions bash"),
];

/// Commands that no scenario runs, with the reason.
pub const LEFT_OUT: &[(&str, &str)] = &[
    ("chat", "it writes files only at requests of its user; chat::history writes them through output::AtomicFile"),
    (
        "serve",
        "it ends by a signal only; into --state-dir it writes pages as run does, and lists through output::AtomicFile",
    ),
    ("demo", "it calls the functions of pack, verify, ptq, q4, tensor-map, dedup, run and bench, which have scenarios"),
    ("pull", "it needs a server and the feature `hub`; tests/it/pull.rs cuts its transfers off"),
    ("help", "it prints"),
];
