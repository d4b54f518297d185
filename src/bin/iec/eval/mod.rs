//! `iec eval`: measures perplexity, KL divergence and accuracy on tasks.

mod tasks;

use crate::console;
use crate::global::Global;
use crate::model::ModelArgs;
use crate::names::offering;
use iec::error::{Error, Result};
use iec::eval::divergence::open_reference;
use iec::eval::tasks::{Encoder, loglikelihoods};
use iec::eval::windows::WINDOW;
use iec::eval::{Divergence, DraftQuality, Perplexity, Windows, divergence, draft_quality, perplexity};
use iec::files::{self, TEXT_LIMIT};
use iec::report::perplexity as shown;
use iec::runtime::{Engine, EngineOptions, Precision};
use iec::session::kv_gate::{KvVerdict, LIMIT_PERCENT};
use iec::session::{Session, Speculation};
use iec::sha256::{self, Digest, Sha256};
use iec::units::parse_count;
use serde_json::{Value, json};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Arguments of `iec eval`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "iec eval [OPTIONS] [MODEL] --text <FILE>")]
#[command(group = clap::ArgGroup::new("what").required(true)
    .args(["text", "suite", "choices", "exact_match", "loglikelihood"]))]
#[command(after_help = "\
Perplexity is computed as llama-perplexity does: over windows of 512 tokens (--ctx) that begin with the tokenizer's BOS;
the second half of each is scored. The reference of --kl-ref reads the same windows, in fp32 if its pack holds floats.

Examples:
  iec eval packs/llama-q4 --text heldout.txt
  iec eval packs/llama-q4 --text heldout.txt --kl-ref packs/llama --json
  iec eval packs/llama-q4 --text heldout.txt --ctx 2048 --kv int4 --kv-gate
  iec eval packs/qwen3.5 --text heldout.txt --mtp
  iec eval packs/llama-q4 --suite benchmarks --json > llama-q4.json
  iec eval packs/llama-q4 --suite benchmarks --run-code 'python3 -I' --code-timeout 5
  iec eval packs/llama-q4 --suite benchmarks --against packs/llama
  iec eval packs/llama-q4 --choices hellaswag_val.jsonl --limit 1000
  iec eval packs/llama-q4 --exact-match gsm8k_test.jsonl --few-shot five.txt --stop Question: --batch 16
  iec eval packs/llama-q4 --loglikelihood requests.jsonl > answers.jsonl

--suite reads HellaSwag, ARC, MMLU, GSM8K and HumanEval as published, and the forms of --choices and --exact-match. The
programs of HumanEval are written by the model: --run-code executes them, so its command must be a sandbox that you
trust. docs/guide/measuring.md describes the forms of these files, their prompts, and sandboxes.")]
pub struct Args {
    /// Measure perplexity over the text of a file, in windows of --ctx tokens (of 512 without --ctx)
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Pack of a reference model, such as the float model; measures KL divergence from it, agreement and differences of
    /// probabilities
    #[arg(long, value_name = "DIR", requires = "text")]
    kl_ref: Option<PathBuf>,
    /// Precision of the reference [default: fp32 if its pack holds floats, otherwise the fastest]
    #[arg(long, value_name = "P", requires = "kl_ref", hide_possible_values = true)]
    #[arg(value_parser = offering(PRECISIONS, str::parse::<Precision>))]
    ref_precision: Option<Precision>,
    /// Measure the layers of multi-token prediction, too: the perplexity by their first draft, and the share of drafts
    /// that the model accepts. For packs made with `iec pack --with-mtp`
    #[arg(long, requires = "text", conflicts_with_all = ["kl_ref", "kv_gate"])]
    mtp: bool,
    /// Score the first N windows only
    #[arg(long, value_name = "N", requires = "text")]
    windows: Option<usize>,
    /// Measure by how much the type of --kv raises the perplexity over that of the default type, and record it beside
    /// the pack. Above 0.5 %, exit code 4; all commands that run the model then refuse the type for this pack
    #[arg(long, requires_all = ["text", "kv"], conflicts_with = "kl_ref")]
    kv_gate: bool,
    /// Measure all files of benchmarks in a directory: HellaSwag, ARC, MMLU, GSM8K and HumanEval as published, and the
    /// files of --choices and --exact-match. Each file is recognized by its content
    #[arg(long, value_name = "DIR")]
    suite: Option<PathBuf>,
    /// Run the programs that the model writes for HumanEval with this command of `sh`, which gets a program on its
    /// standard input and passes it by exit status 0, in an empty directory. This executes code written by a model:
    /// name a sandbox, such as a container without network
    #[arg(long, value_name = "CMD", conflicts_with_all = ["text", "choices", "exact_match", "loglikelihood"])]
    run_code: Option<String>,
    /// Largest number of seconds that a program of --run-code may take
    #[arg(long, value_name = "SECONDS", default_value_t = 10, requires = "run_code")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    code_timeout: u64,
    /// Pack of a second model that answers the same questions, such as the float model: shows the difference of the
    /// accuracies (MODEL minus this one) with its 95 % interval, the numbers of questions that became right and wrong,
    /// and the p-value of McNemar's exact test
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["text", "loglikelihood"])]
    against: Option<PathBuf>,
    /// Compute log-probabilities of continuations for lm-evaluation-harness: reads JSON lines, prints one JSON line for
    /// each, in order
    #[arg(long, value_name = "FILE")]
    loglikelihood: Option<PathBuf>,
    /// Measure accuracy on multiple choice (HellaSwag, ARC, or fields `query`, `choices`, `answer`), raw and normalized
    /// by the length of the choice
    #[arg(long, value_name = "FILE")]
    choices: Option<PathBuf>,
    /// Measure accuracy on tasks with one right result (GSM8K, or fields `prompt`, `answer`, `regex`), answered
    /// greedily
    #[arg(long, value_name = "FILE")]
    exact_match: Option<PathBuf>,
    /// File with worked examples, put before every question
    #[arg(long, value_name = "FILE", conflicts_with_all = ["text", "loglikelihood", "suite"])]
    few_shot: Option<PathBuf>,
    /// Use the first N questions of each file only
    #[arg(long, value_name = "N", conflicts_with_all = ["text", "loglikelihood"])]
    limit: Option<usize>,
    /// Regular expression that finds the result in an answer of --exact-match, unless the task has a field `regex`. The
    /// last match counts, or the first group of that match [default: matches a number]
    #[arg(long, value_name = "REGEX", requires = "exact_match")]
    regex: Option<String>,
    /// Largest number of tokens of an answer
    #[arg(long, value_name = "N", value_parser = parse_count, default_value_t = 256, requires = "exact_match")]
    max_new: usize,
    /// Text that ends an answer; repeatable
    #[arg(long, value_name = "TEXT", requires = "exact_match")]
    stop: Vec<String>,
    /// Number of answers that are generated together
    #[arg(long, value_name = "N", default_value_t = 8, conflicts_with_all = ["text", "loglikelihood", "choices"])]
    batch: usize,
    /// Write a JSON line per question
    #[arg(long, value_name = "FILE", conflicts_with_all = ["text", "loglikelihood"])]
    details: Option<PathBuf>,
    /// Replace the file of --details if it is there
    #[arg(long, requires = "details")]
    overwrite: bool,
    /// Do not put a BOS before contexts, like lm-evaluation-harness without add_bos_token
    #[arg(long, conflicts_with_all = ["text", "exact_match"])]
    no_bos: bool,
    /// Print the figures as one JSON line on stdout; answers of --loglikelihood are JSON lines anyway
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    model: ModelArgs,
}

/// Words of `--ref-precision`.
const PRECISIONS: &[&str] = &["fp32", "bf16", "fp16", "int8w", "int8", "int4w", "int4"];

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    if args.text.is_none() && args.loglikelihood.is_none() {
        return tasks::run(&args, global);
    }
    // Measured first, so that only one engine is in memory at a time.
    let baseline = args.text.as_ref().filter(|_| args.kv_gate).map(|file| args.baseline(file, global)).transpose()?;
    let mut model = match args.kv_gate {
        true => args.model.open_to_measure_kv(global)?,
        false => args.model.open(global, Speculation::Off)?,
    };
    match (&args.text, &args.loglikelihood) {
        (Some(file), _) => args.text(file, &mut model, baseline.as_ref(), global),
        (_, Some(file)) => args.loglikelihood(file, &mut model, global),
        _ => Err(Error::usage("found nothing to measure")
            .help("give --text, --suite, --choices, --exact-match or --loglikelihood")),
    }
}

impl Args {
    /// Returns the type of the KV cache without --kv, and the perplexity with it.
    fn baseline(&self, file: &Path, global: &Global) -> Result<(String, Perplexity)> {
        let mut model = self.model.open_with_default_kv(global)?;
        let windows = self.windows(file, &files::read_text(file, TEXT_LIMIT)?, &model)?;
        Ok((model.engine.kv_type().to_string(), perplexity(&mut model.engine, &windows)?))
    }

    fn windows(&self, file: &Path, text: &str, model: &Session) -> Result<Windows> {
        let len = self.model.ctx.unwrap_or(WINDOW.min(model.engine.context()));
        Windows::of_text(model.tokenizer()?, text, len, self.windows).map_err(|e| e.at(file))
    }

    fn text(
        &self,
        file: &Path,
        model: &mut Session,
        baseline: Option<&(String, Perplexity)>,
        global: &Global,
    ) -> Result<()> {
        let text = files::read_text(file, TEXT_LIMIT)?;
        let options = EngineOptions {
            precision: self.ref_precision,
            threads: global.threads(),
            offload: self.model.device.offload()?,
            ..EngineOptions::default()
        };
        let reference = self.kl_ref.as_deref().map(|dir| open_reference(dir, model.tokenizer()?, options));
        let mut reference = reference.transpose()?;
        let windows = self.windows(file, &text, model)?;
        let begin = Instant::now();
        let (own, divergence, layers) = self.measure(model, reference.as_mut(), &windows)?;
        let seconds = begin.elapsed().as_secs_f64();
        let sha256 = sha256::hex(Sha256::new_with_prefix(&text));
        let verdict = baseline.map(|(kv, perplexity)| KvVerdict {
            kv: model.engine.kv_type().to_string(),
            baseline_kv: kv.clone(),
            precision: model.engine.precision().name().to_string(),
            perplexity: own.perplexity.value,
            baseline_perplexity: perplexity.perplexity.value,
            tokens_scored: windows.scored() as u64,
            text_sha256: sha256.clone(),
        });
        if self.json {
            let mut line = about(model);
            line["text"] = json!({"file": file.display().to_string(), "sha256": sha256});
            line["ctx"] = windows.window_len().into();
            line["windows"] = windows.count().into();
            line["tokens_scored"] = windows.scored().into();
            line["wall_time_s"] = seconds.into();
            line["perplexity"] = json!(own);
            if self.mtp {
                line["mtp"] = json!(layers);
            }
            if let Some(verdict) = &verdict {
                line["kv_gate"] = json!({"baseline_kv": verdict.baseline_kv, "passes": verdict.passes(),
                    "baseline_perplexity": verdict.baseline_perplexity, "increase_percent": verdict.increase_percent()});
            }
            if let (Some(found), Some(reference), Some(dir)) = (&divergence, &reference, &self.kl_ref) {
                line["reference"] = shown::reference(found, &dir.display().to_string(), reference.precision());
            }
            console::print_json(&line)?;
        } else {
            console::print(shown::table(&own, divergence.as_ref(), &layers))?;
        }
        let (count, scored, len) = (windows.count(), windows.scored(), windows.window_len());
        global.note(format_args!("{count} windows of {len} tokens, {scored} scored, in {seconds:.1} s"));
        verdict.map_or(Ok(()), |verdict| judge(model, verdict, global))
    }

    /// Returns the perplexity, the comparison with the reference, and how good the drafts of each layer are.
    fn measure(
        &self,
        model: &mut Session,
        reference: Option<&mut Engine>,
        windows: &Windows,
    ) -> Result<(Perplexity, Option<Divergence>, Vec<DraftQuality>)> {
        if let Some(reference) = reference {
            let found = divergence(&mut model.engine, reference, windows)?;
            return Ok((found.model, Some(found), Vec::new()));
        }
        if self.mtp {
            let mut predictors = model.engine.predictors(&model.reader)?;
            let (own, layers) = draft_quality(&mut model.engine, &mut predictors, windows)?;
            return Ok((own, None, layers));
        }
        Ok((perplexity(&mut model.engine, windows)?, None, Vec::new()))
    }

    fn loglikelihood(&self, file: &Path, model: &mut Session, global: &Global) -> Result<()> {
        let mut out = BufWriter::new(console::Stdout);
        let encoder = Encoder::new(model.engine.config(), model.tokenizer.as_ref(), !self.no_bos)?;
        let done = loglikelihoods(&mut model.engine, &encoder, file, |answer| Ok(writeln!(out, "{}", json!(answer))?))?;
        out.flush()?;
        let (requests, tokens, seconds) = (done.requests, done.tokens, done.seconds);
        global.note(format_args!("{requests} requests, {tokens} tokens scored, in {seconds:.1} s"));
        Ok(())
    }
}

/// Records the verdict about a type of the KV cache, and fails if it does not pass.
fn judge(model: &Session, verdict: KvVerdict, global: &Global) -> Result<()> {
    let KvVerdict { kv, baseline_kv, .. } = &verdict;
    let found = format!("{:+.3} % perplexity with --kv {kv} instead of {baseline_kv}", verdict.increase_percent());
    let passes = verdict.passes();
    let path = model.record_kv_verdict(verdict)?;
    global.note(format_args!("{found}; recorded in {}", path.display()));
    match passes {
        true => Ok(()),
        false => Err(Error::refused(format!("found {found}, expected at most +{LIMIT_PERCENT} %"))
            .help("use --kv int8 or the default; all commands that run this pack refuse the type now")),
    }
}

/// Returns the fields of the JSON line that describe the model and how it was run.
fn about(model: &Session) -> Value {
    json!({
        "model": model.name,
        "architecture": model.engine.config().architecture,
        "precision": model.engine.precision().name(),
        "kv": model.engine.kv_type().to_string(),
        "device": model.engine.device(),
        "threads": model.engine.threads(),
        "isa": model.engine.isa(),
    })
}
