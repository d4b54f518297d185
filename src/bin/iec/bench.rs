//! `iec bench`: measures prefill, decode and latency.

use crate::compat;
use crate::console;
use crate::global::{Global, non_empty_variable};
use crate::model::ModelArgs;
use crate::report_args::ReportArgs;
use crate::verify;
use clap::builder::FalseyValueParser;
use iec::error::{Cause, Error, Result};
use iec::output::{Rules, Target};
use iec::report::measurement::bench::{BenchOptions, BenchPrompts, DraftImitation, bench};
use iec::report::measurement::compare::compare;
use iec::report::measurement::{Measurement, MeasurementLine};
use iec::report::table::Table;
use iec::session::{Session, Speculation, prompts};
use iec::trial::agreement::AgreementOptions;
use iec::units;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

/// Arguments of `iec bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{}\n\n{}\n\n\
The end-of-sequence token does not end a text here, so that every run generates the same number of tokens.\n\
ttft_s is the mean time per prompt from the start of its prefill to its first token. Latencies are the times between\n\
consecutive tokens of a text. effective_bandwidth_gbps is weights_bytes_per_token x tps_decode; with --batch it\n\
counts weights that are read once for all texts as if they were read for each.\n\n\
Examples:\n  \
iec bench packs/tinyllama --threads 2 --max-new 64\n  \
iec bench packs/tinyllama --prompt-len 512 --max-new 32 --runs 3\n  \
iec bench packs/tinyllama --runs 5 --profile --report-root reports\n  \
iec bench --compare reports/before.jsonl reports/after.jsonl\n  \
iec bench   # measures the embedded model", prompts::FILE_HELP, compat::VARIABLES_HELP))]
pub struct Args {
    /// Prompts to continue (forms: see below) [env: PROMPTS] [default: ten built-in prompts]
    #[arg(long, value_name = "FILE")]
    prompts_file: Option<PathBuf>,
    /// Continue this text only
    #[arg(id = "one_prompt", long = "prompt", value_name = "TEXT", conflicts_with_all = ["prompts_file", "prompt_len"])]
    prompt: Option<String>,
    /// Use synthetic prompts of N tokens, one per text of the batch, instead of --prompts-file or the built-in prompts
    #[arg(long, value_name = "N", value_parser = units::parse_count, conflicts_with = "prompts_file")]
    prompt_len: Option<usize>,
    /// Number of measured runs; each prints one line
    #[arg(long, value_name = "N", env = "RUNS", default_value_t = 1)]
    runs: usize,
    /// Number of passes over all prompts in one run
    #[arg(long, value_name = "N", env = "ROUNDS", default_value_t = 1)]
    rounds: usize,
    /// Number of prompts that are decoded together
    #[arg(long, value_name = "N", env = "BATCH", default_value_t = 1)]
    batch: usize,
    /// Tokens to generate per prompt
    #[arg(long, value_name = "N", value_parser = units::parse_count, env = "MAX_NEW", default_value_t = 64)]
    max_new: usize,
    /// Number of tokens that are generated before the first run and not measured
    #[arg(long, value_name = "N", value_parser = units::parse_count, env = "WARMUP_TOKENS", default_value_t = 8)]
    warmup: usize,
    /// Fill the KV cache of each text with N tokens before the measurement, to measure the speed at a long context
    #[arg(long, value_name = "N", value_parser = units::parse_count, default_value_t = 0)]
    depth: usize,
    /// Print one line for all runs together: sums, and percentiles of all latencies; its `run` is the number of runs
    #[arg(long)]
    aggregate: bool,
    /// Read this many more bytes of weights per generated token, to measure memory bandwidth; 0 reads none
    #[arg(long, value_name = "BYTES", env = "IE_BYTES_PER_TOKEN", default_value = "0", value_parser = bytes)]
    bytes_per_token: u64,
    /// Distance between the bytes that --bytes-per-token reads
    #[arg(long, value_name = "BYTES", env = "IE_STRIDE_BYTES", default_value = "64", value_parser = units::parse_size)]
    stride_bytes: u64,
    /// Check after each run that --bytes-per-token made all its reads (exit code 4 if not)
    #[arg(long, env = "IE_VERIFY_TOUCH", value_parser = FalseyValueParser::new())]
    verify_touch: bool,
    /// If no model is named, fail with exit code 3 instead of measuring the embedded model
    #[arg(long, env = "IE_REQUIRE_MODEL", value_parser = FalseyValueParser::new())]
    require_model: bool,
    /// Expected token ids (exit code 4 if others are generated): a trace of `iec run --trace-ids`, [[ids]] or
    /// {"prompt_id": [ids]}
    #[arg(long, value_name = "FILE", env = "EXPECTED_TOKENS")]
    expected_tokens: Option<PathBuf>,
    /// Measure what a drafter would save whose draft tokens are right with this probability, from 0 to 1: the texts are
    /// generated once before, and drafts are made from them. With --speculate mtp or draft, that model drafts, too, so
    /// that its time counts
    #[arg(long, value_name = "P", value_parser = share)]
    draft_acceptance: Option<f64>,
    /// Number of draft tokens per step with --draft-acceptance
    #[arg(long, value_name = "N", value_parser = units::parse_count, default_value_t = 3)]
    #[arg(requires = "draft_acceptance")]
    draft_tokens: usize,
    /// After the measurement, compare the measured texts with the checkpoint (--hf-dir) as `iec verify` does (exit code
    /// 4 if they differ)
    #[arg(long, env = "VERIFY", value_parser = FalseyValueParser::new())]
    verify: bool,
    /// The original checkpoint, for --verify
    #[arg(long, value_name = "DIR", env = "IEC_HF_DIR")]
    hf_dir: Option<PathBuf>,
    /// Measure the time of each stage of prefill and decode: a table, and `stages` in the JSON line
    #[arg(long)]
    profile: bool,
    #[command(flatten)]
    report: ReportArgs,
    /// Write the median of the runs into the table of a Markdown document, between the comments `iec bench: begin` and
    /// `iec bench: end`; a row with the same settings is replaced, and a file or table that is missing is made
    #[arg(long, value_name = "FILE")]
    performance_md: Option<PathBuf>,
    /// Compare two reports instead of measuring; say whether B is slower than A (exit code 4 if so)
    #[arg(long, num_args = 2, value_names = ["A.jsonl", "B.jsonl"],
          conflicts_with_all = ["prompts_file", "one_prompt", "prompt_len", "profile", "aggregate", "html",
                                "expected_tokens", "performance_md"])]
    compare: Option<Vec<PathBuf>>,
    /// Percent by which B may be slower than A without a failure
    #[arg(long, value_name = "PERCENT", default_value_t = 2.0, requires = "compare", value_parser = percent)]
    tolerance: f64,
    /// Print measurements as JSON lines also on a terminal (files and pipes always get them), and errors as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    model: ModelArgs,
}

fn percent(text: &str) -> std::result::Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>().ok();
    number.filter(|number| (0.0..=100.0).contains(number)).ok_or_else(|| "expected 0 to 100".to_string())
}

fn share(text: &str) -> std::result::Result<f64, String> {
    let number = text.trim().parse::<f64>().ok();
    number.filter(|number| (0.0..=1.0).contains(number)).ok_or_else(|| "expected 0 to 1".to_string())
}

fn bytes(text: &str) -> std::result::Result<u64, String> {
    if text == "0" { Ok(0) } else { units::parse_size(text) }
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    if let Some([a, b]) = args.compare.as_deref() {
        return print_comparison(a, b, args.tolerance / 100.0, global);
    }
    let comparison = args.comparison()?;
    args.report.prepare()?;
    let inputs = args.model.inputs().files([&args.prompts_file, &args.expected_tokens].into_iter().flatten());
    let rules = Rules { inputs: &inputs, overwrite: true, stdout: false };
    let document = args.performance_md.as_deref().map(|path| Target::check(path, rules)).transpose()?;
    let json = args.json || !std::io::stdout().is_terminal();
    let (mut session, options) = args.ready(global)?;
    let each = |line: &MeasurementLine| if json { console::print_json(line) } else { Ok(()) };
    let mut measurement = bench(&mut session, &options, each)?;
    args.report.save(&mut measurement, global)?;
    document.map_or(Ok(()), |document| measurement.merge_into(&document))?;
    let Measurement { lines, texts: generated, .. } = measurement;
    global.note(table(&lines));
    lines.iter().filter_map(|line| line.stages.as_ref()).for_each(|stages| global.note_stages(stages));
    let wrong = lines.iter().flat_map(|line| &line.prompts).filter(|prompt| prompt.expected_ok == Some(false)).count();
    match (wrong, args.expected_tokens) {
        (1.., Some(file)) => Err(Error::refused(format!("{wrong} texts differ from the expected tokens"))
            .at(file)
            .help("with --json, these texts have `expected_ok`: false, and `mismatch_index` is the first other token")),
        _ => Ok(()),
    }?;
    comparison.map_or(Ok(()), |comparison| {
        verify::after_bench(&mut session, &AgreementOptions { generated, ..comparison }, global)
    })
}

/// Runs the measurement of `args`; `each` is called with every line of the report as soon as it is measured.
pub fn measure(args: &Args, global: &Global, each: impl FnMut(&MeasurementLine) -> Result<()>) -> Result<Measurement> {
    let (mut session, options) = args.ready(global)?;
    bench(&mut session, &options, each)
}

fn print_comparison(a: &Path, b: &Path, tolerance: f64, global: &Global) -> Result<()> {
    let report = compare(a, b, tolerance)?;
    console::print_json(&report)?;
    global.note(report.table());
    report.notes().into_iter().for_each(|note| global.note(note));
    report.verdict()
}

impl Args {
    /// Returns the options of the comparison after the measurement, if one is wanted.
    fn comparison(&self) -> Result<Option<AgreementOptions>> {
        match &self.hf_dir {
            _ if !self.verify => Ok(None),
            Some(hf_dir) if self.model.is_named()? => verify::before_bench(&self.model, hf_dir.clone()).map(Some),
            _ => Err(Error::usage("--verify: found no pack and checkpoint to compare, expected both")
                .help("name them with --model-dir DIR and --hf-dir DIR (MODEL_DIR and HF_DIR)")),
        }
    }

    /// Opens the model, and checks the options of the measurement.
    fn ready(&self, global: &Global) -> Result<(Session, BenchOptions)> {
        let options = self.options()?;
        options.validate()?;
        let session = self.open(global)?;
        // With a progress bar, prompts would be read in smaller steps, and drawing would take part of the time.
        iec::progress::set_quiet(true);
        Ok((session, options))
    }

    /// Converts the arguments to the library's options of a measurement.
    fn options(&self) -> Result<BenchOptions> {
        let named = self.prompts_file.clone().or_else(|| non_empty_variable("PROMPTS").map(PathBuf::from));
        let prompts = match (&self.prompt, self.prompt_len, named) {
            (Some(text), ..) => BenchPrompts::Texts(vec![text.clone()]),
            (None, Some(tokens), _) => BenchPrompts::Synthetic(tokens),
            (None, None, Some(file)) => BenchPrompts::Texts(prompts::read(&file)?),
            (None, None, None) => BenchPrompts::Texts(prompts::built_in()),
        };
        Ok(BenchOptions {
            prompts,
            runs: self.runs,
            rounds: self.rounds,
            batch: self.batch,
            max_new: self.max_new,
            warmup: self.warmup,
            depth: self.depth,
            aggregate: self.aggregate,
            bytes_per_token: self.bytes_per_token,
            stride_bytes: self.stride_bytes,
            verify_touch: self.verify_touch,
            expected_tokens: self.expected_tokens.clone(),
            profile: self.profile,
            imitation: self.draft_acceptance.map(|acceptance| DraftImitation { acceptance, tokens: self.draft_tokens }),
        })
    }

    /// Opens the model named by the options, or the one in the current directory, or the embedded one.
    fn open(&self, global: &Global) -> Result<Session> {
        if self.model.is_named()? {
            return self.model.open(global, Speculation::Off);
        }
        if self.require_model {
            return Err(Error::new(Cause::Model("--require-model: no model is named".into()))
                .help("name a pack with --model-dir DIR or MODEL_DIR"));
        }
        global.note("no --model-dir: measuring the embedded model");
        self.model.open_embedded(global)
    }
}

fn table(lines: &[MeasurementLine]) -> Table {
    // The table fits 80 columns; the JSON line and the reports have all figures.
    let number = |value: Option<f64>| match value {
        None => "-".to_string(),
        Some(value) if value >= 1000.0 => format!("{value:.0}"),
        Some(value) => format!("{value:.2}"),
    };
    Table::of(
        lines.iter().enumerate(),
        &[
            ("run", &|(i, _)| (i + 1).to_string()),
            (">tokens", &|(_, line)| line.metrics.tokens_generated.to_string()),
            (">first ms", &|(_, line)| number(Some(line.metrics.ttft_s * 1e3))),
            (">prefill/s", &|(_, line)| number(Some(line.metrics.tps_prefill))),
            (">decode/s", &|(_, line)| number(Some(line.metrics.tps_decode))),
            (">p50 ms", &|(_, line)| number(line.metrics.latency_p50_ms)),
            (">p99 ms", &|(_, line)| number(line.metrics.latency_p99_ms)),
            (">GB/s", &|(_, line)| number(Some(line.metrics.effective_bandwidth_gbps))),
            (">peak MB", &|(_, line)| number(line.metrics.rss_peak_mb)),
        ],
    )
}
