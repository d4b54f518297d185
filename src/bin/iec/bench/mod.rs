//! `iec bench`: measures prefill, decode and latency. The timed window holds generation and work-touch, nothing else.

mod expected;
mod touch;

use crate::embedded;
use crate::global::Global;
use crate::model::{Model, ModelArgs, Speculate, variable};
use crate::report::{Line, Measured, Round};
use crate::results::entry::{Meta, Record};
use crate::results::{ReportArgs, Results, compare};
use crate::run::print_json;
use crate::{prompts, tuning};
use clap::builder::FalseyValueParser;
use iec::convert::pack::{PackOptions, pack};
use iec::error::{Cause, Error, Result};
use iec::iebin::JSON_NAME;
use iec::report::table::Table;
use iec::rng::Rng;
use iec::runtime::generate::{Options, Request, Session, generate};
use iec::units;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;
use touch::Touch;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{}\n\n{}\n\n\
The end-of-sequence token does not end a text here, so that every run generates the same number of tokens.\n\
ttft_s is the mean over the prompts, each from getting its slot to its first token. Latencies are the times between\n\
consecutive tokens of a text. effective_bandwidth_gbps is weights_bytes_per_token x tps_decode: with --batch, weights read once count for every text.\n\n\
Examples:\n  \
iec bench --model-dir packs/tinyllama --threads 2 --max-new 64\n  \
iec bench --model-dir packs/tinyllama --prompt-len 512 --max-new 32 --runs 3\n  \
iec bench --model-dir packs/tinyllama --runs 5 --profile --report-root reports\n  \
iec bench --compare reports/before.jsonl reports/after.jsonl\n  \
iec bench   # measures the embedded model", prompts::FILE_HELP, tuning::VARIABLES_HELP))]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompts to continue (forms: see below) [env: PROMPTS] [default: ten built-in prompts]
    #[arg(long, value_name = "FILE")]
    prompts_file: Option<PathBuf>,
    /// One synthetic prompt of N tokens per text of the batch, instead of prompts
    #[arg(long, value_name = "N", conflicts_with = "prompts_file")]
    prompt_len: Option<usize>,
    /// Measure so many times; each run prints one line
    #[arg(long, value_name = "N", env = "RUNS", default_value_t = 1)]
    runs: usize,
    /// Passes over all prompts in one run
    #[arg(long, value_name = "N", env = "ROUNDS", default_value_t = 1)]
    rounds: usize,
    /// Prompts decoded together
    #[arg(long, value_name = "N", env = "BATCH", default_value_t = 1)]
    batch: usize,
    /// Tokens to generate per prompt
    #[arg(long, value_name = "N", env = "MAX_NEW", default_value_t = 64)]
    max_new: usize,
    /// Tokens generated before the first run, outside of all measurements
    #[arg(long, value_name = "N", env = "WARMUP_TOKENS", default_value_t = 8)]
    warmup: usize,
    /// Tokens each text has read before the timed window: speed deep in a context
    #[arg(long, value_name = "N", default_value_t = 0)]
    depth: usize,
    /// Print one line for all runs together: sums, and percentiles of all latencies; `run` is then their number
    #[arg(long)]
    aggregate: bool,
    /// Work-touch inside the window: bytes of weights covered per generated token; 0 is none
    #[arg(long, value_name = "BYTES", env = "IE_BYTES_PER_TOKEN", default_value = "0", value_parser = bytes)]
    bytes_per_token: u64,
    /// Work-touch reads one byte every so many
    #[arg(long, value_name = "BYTES", env = "IE_STRIDE_BYTES", default_value = "64", value_parser = units::parse_size)]
    stride_bytes: u64,
    /// Check after each run that the work-touch made all its reads (exit code 4 if not)
    #[arg(long, env = "IE_VERIFY_TOUCH", value_parser = FalseyValueParser::new())]
    verify_touch: bool,
    /// Fail with exit code 3 instead of measuring the embedded model
    #[arg(long, env = "IE_REQUIRE_MODEL", value_parser = FalseyValueParser::new())]
    require_model: bool,
    /// Token ids that must come (exit code 4 if not): a trace of `iec run --trace-ids`, [[ids]] or {"prompt_id": [ids]}
    #[arg(long, value_name = "FILE")]
    expected_tokens: Option<PathBuf>,
    /// Tell what the stages of prefill and decode cost: a table, and `stages` in the JSON line
    #[arg(long)]
    profile: bool,
    #[command(flatten)]
    report: ReportArgs,
    /// Put the median of the runs into the table of a document, between its markers; the same work replaces its row
    #[arg(long, value_name = "FILE")]
    performance_md: Option<PathBuf>,
    /// Measure nothing: tell whether the measurements of B are slower than those of A (exit code 4 if so)
    #[arg(long, num_args = 2, value_names = ["A.jsonl", "B.jsonl"],
          conflicts_with_all = ["prompts_file", "prompt_len", "profile", "aggregate", "expected_tokens", "html", "performance_md"])]
    compare: Option<Vec<PathBuf>>,
    /// By so many percent B may be slower than A without being called so
    #[arg(long, value_name = "PERCENT", default_value_t = 2.0, requires = "compare", value_parser = percent)]
    tolerance: f64,
    /// Errors as JSON on stdout; measurements are JSON anyway
    #[arg(long)]
    pub json: bool,
}

fn percent(text: &str) -> std::result::Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>().map_err(|e| e.to_string())?;
    if (0.0..=100.0).contains(&number) { Ok(number) } else { Err("expected 0 to 100".into()) }
}

fn bytes(text: &str) -> std::result::Result<u64, String> {
    if text == "0" { Ok(0) } else { units::parse_size(text) }
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    if let Some([a, b]) = args.compare.as_deref() {
        return compare::compare(a, b, args.tolerance / 100.0, global);
    }
    args.report.prepare()?;
    let mut results = measure(&args, global, print_json)?;
    if let Some(page) = results.save(&args.report)? {
        global.note(format!("report: {}", page.display()));
    }
    args.performance_md.as_deref().map_or(Ok(()), |document| results.merge_into(document))?;
    let lines = results.lines;
    global.note(table(&lines));
    lines.iter().filter_map(|line| line.stages.as_ref()).for_each(|stages| global.note(stages.table()));
    let wrong = lines.iter().flat_map(|line| &line.prompts).filter(|prompt| prompt.expected_ok == Some(false)).count();
    match (wrong, args.expected_tokens) {
        (1.., Some(file)) => Err(Error::refused(format!("{wrong} texts differ from the expected tokens")).at(file)),
        _ => Ok(()),
    }
}

/// Measures as `args` say; `each` sees every line when it is there.
pub fn measure(args: &Args, global: &Global, mut each: impl FnMut(&Line) -> Result<()>) -> Result<Results> {
    args.check()?;
    // Keeps the embedded model's files until the end.
    let home = tempfile::tempdir()?;
    let mut model = args.open(home.path(), global)?;
    let begin = Instant::now();
    let prompts = args.prompts(&model)?;
    let encoding = begin.elapsed();
    let texts: Vec<String> = prompts.iter().map(|(text, _)| text.clone()).collect();
    let expected = match &args.expected_tokens {
        Some(file) => expected::read(file, &texts)?,
        None => Vec::new(),
    };
    // A progress bar would cut prompts into pieces and draw inside the window.
    iec::progress::set_quiet(true);
    let mut bench = Bench { args, prompts, touched: 0 };
    bench.warm_up(&mut model)?;
    model.engine.profile(args.profile);
    let meta = Meta::new("bench", &model, args.settings());
    let mut results = Results { meta, records: Vec::new(), lines: Vec::new() };
    let mut rounds = Vec::new();
    for run in 1..=args.runs {
        rounds.extend(bench.measure(&mut model)?);
        if !args.aggregate || run == args.runs {
            let measured = Measured {
                model: &model,
                prompts: &texts,
                rounds: &rounds,
                run,
                bytes_touched: bench.touched,
                bytes_per_token: args.bytes_per_token,
                sink: "touch",
                encoding,
                expected: &expected,
                with_text: false,
                logprobs: &[],
            };
            let line = measured.line();
            each(&line)?;
            results.lines.push(line);
            results.records.extend(Record::all(&measured));
            (rounds, bench.touched) = (Vec::new(), 0);
        }
    }
    model.tell_rebuilds();
    Ok(results)
}

impl Args {
    fn check(&self) -> Result<()> {
        let counts = [("runs", self.runs), ("rounds", self.rounds), ("batch", self.batch), ("max-new", self.max_new)];
        let zero = counts.iter().find(|(_, n)| *n == 0).map(|(name, _)| *name);
        let zero = zero.or((self.prompt_len == Some(0)).then_some("prompt-len"));
        zero.map_or(Ok(()), |name| Err(Error::usage(format!("--{name} 0; expected at least 1"))))
    }

    /// What was asked for, for reports.
    fn settings(&self) -> Map<String, Value> {
        let settings = json!({
            "batch": self.batch,
            "max_new": self.max_new,
            "prompt_len": self.prompt_len,
            "depth": self.depth,
            "runs": self.runs,
            "rounds": self.rounds,
            "warmup": self.warmup,
            "bytes_per_token": self.bytes_per_token,
            "stride_bytes": self.stride_bytes,
            "profile": self.profile,
        });
        settings.as_object().cloned().unwrap_or_default()
    }

    /// The model named, or one in the current directory, or the embedded one.
    fn open(&self, home: &Path, global: &Global) -> Result<Model> {
        self.model.device.offload()?;
        let named = self.model.model_json.is_some() || self.model.named_dir().is_some();
        if named || Path::new(JSON_NAME).exists() {
            return self.model.open(global, Speculate::Off);
        }
        if self.require_model {
            return Err(Error::new(Cause::Model("a model is required and none is named".into()))
                .help("name a pack with --model-dir DIR or MODEL_DIR"));
        }
        global.note("no --model-dir: measuring the embedded model");
        let (checkpoint, packed) = (home.join("checkpoint"), home.join("pack"));
        embedded::write_to(&checkpoint)?;
        pack(&PackOptions { hf_dir: checkpoint, out_dir: packed.clone(), ..PackOptions::default() })?;
        self.model.open_json(&packed.join(JSON_NAME), embedded::NAME.into(), global, Speculate::Off)
    }

    fn prompts(&self, model: &Model) -> Result<Vec<(String, Vec<u32>)>> {
        if let Some(tokens) = self.prompt_len {
            let synthetic = |i| (format!("synthetic {i} of {tokens} tokens"), random_ids(model, tokens, i as u64));
            return Ok((0..self.batch).map(synthetic).collect());
        }
        let named = self.prompts_file.clone().or_else(|| variable("PROMPTS").map(PathBuf::from));
        let texts = named.map_or_else(|| Ok(prompts::built_in()), |file| prompts::read(&file))?;
        let tokenizer = model.tokenizer()?;
        texts.into_iter().map(|text| tokenizer.encode(&text).map(|ids| (text, ids))).collect()
    }
}

/// Token ids of no meaning, the same every time.
fn random_ids(model: &Model, tokens: usize, seed: u64) -> Vec<u32> {
    let mut rng = Rng::new(seed);
    (0..tokens).map(|_| (rng.next_u64() % model.engine.config().vocab as u64) as u32).collect()
}

struct Bench<'a> {
    args: &'a Args,
    prompts: Vec<(String, Vec<u32>)>,
    touched: u64,
}

impl Bench<'_> {
    fn warm_up(&self, model: &mut Model) -> Result<()> {
        if self.args.warmup == 0 {
            return Ok(());
        }
        let request = Request { ids: self.prompts[0].1.clone(), max_new: self.args.warmup, ..Request::default() };
        let options = Options { tokenizer: None, batch: 1, eos: &[], show_special: false, keep_sessions: false };
        generate(&mut model.engine, &mut model.speculator, vec![request], &options, |_| Ok(())).map(|_| ())
    }

    fn measure(&mut self, model: &mut Model) -> Result<Vec<Round>> {
        let mut touch = Touch::new(model.reader.files()[0].clone(), self.args.bytes_per_token, self.args.stride_bytes);
        let rounds = (0..self.args.rounds).map(|_| self.round(model, &mut touch)).collect::<Result<Vec<_>>>()?;
        self.touched += touch.bytes();
        if self.args.verify_touch {
            let completions = rounds.iter().flat_map(|round| &round.outcome.completions);
            touch.verify(completions.map(|done| done.ids.len()).sum())?;
        }
        Ok(rounds)
    }

    fn round(&self, model: &mut Model, touch: &mut Touch) -> Result<Round> {
        let requests = self.requests(model)?;
        let options = Options {
            tokenizer: model.tokenizer.as_ref(),
            batch: self.args.batch,
            eos: &[],
            show_special: false,
            keep_sessions: false,
        };
        model.engine.take_gpu_time();
        let begin = Instant::now();
        let outcome = generate(&mut model.engine, &mut model.speculator, requests, &options, |_| {
            touch.token();
            Ok(())
        })?;
        Ok(Round { outcome, wall: begin.elapsed(), gpu: model.engine.take_gpu_time() })
    }

    /// The requests of a round; what --depth asks for is read here, outside the window, once for all of them.
    fn requests(&self, model: &mut Model) -> Result<Vec<Request>> {
        let before = random_ids(model, self.args.depth, u64::MAX);
        let session = Session::read(&mut model.engine, before.clone())?;
        let request = |(_, ids): &(String, Vec<u32>)| Request {
            ids: [&before[..], ids].concat(),
            max_new: self.args.max_new,
            session: Some(session.clone()),
            ..Request::default()
        };
        Ok(self.prompts.iter().map(request).collect())
    }
}

fn table(lines: &[Line]) -> Table {
    let columns = [
        "run",
        ">prompts",
        ">tokens",
        ">wall s",
        ">first ms",
        ">prefill/s",
        ">decode/s",
        ">true/s",
        ">p50 ms",
        ">p95 ms",
        ">p99 ms",
        ">GB/s",
        ">peak MB",
    ];
    let mut table = Table::new(&columns);
    let number = |value: Option<f64>| value.map_or("-".to_string(), |value| format!("{value:.2}"));
    for (i, line) in lines.iter().enumerate() {
        table.row([
            (i + 1).to_string(),
            line.prompts.len().to_string(),
            line.tokens_generated.to_string(),
            number(Some(line.wall_time_s)),
            number(Some(line.ttft_s * 1e3)),
            number(Some(line.tps_prefill)),
            number(Some(line.tps_decode)),
            number(Some(line.tps_true)),
            number(line.latency_p50_ms),
            number(line.latency_p95_ms),
            number(line.latency_p99_ms),
            number(Some(line.effective_bandwidth_gbps)),
            number(line.rss_peak_mb),
        ]);
    }
    table
}
