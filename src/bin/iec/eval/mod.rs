//! `iec eval`: how well does a pack answer?

mod choice;
mod exact;
mod likelihood;
mod lines;
mod text;

use crate::global::Global;
use crate::model::{Model, ModelArgs, Speculate};
use iec::error::{Context, Error, Result};
use iec::eval::stats::Mean;
use iec::eval::windows::leading_token;
use iec::runtime::Precision;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["text", "loglikelihood", "choices", "exact_match"]))]
#[command(after_help = "\
Perplexity follows llama-perplexity: windows of 512 tokens (--ctx) that begin with the tokenizer's BOS, second halves scored.
The reference of --kl-ref reads the same windows beside the model, in fp32 where its pack holds floats.

Examples:
  iec eval --model-dir packs/llama-q4 --text heldout.txt
  iec eval --model-dir packs/llama-q4 --text heldout.txt --kl-ref packs/llama --json
  iec eval --model-dir packs/llama-q4 --choices hellaswag_val.jsonl --limit 1000
  iec eval --model-dir packs/llama-q4 --exact-match gsm8k_test.jsonl --few-shot five.txt --stop Question: --batch 16
  iec eval --model-dir packs/llama-q4 --loglikelihood requests.jsonl > answers.jsonl

docs/GUIDE.md has the forms of these files.")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Perplexity over the text of a file; --ctx is the length of a window [default: 512]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Pack of a reference, say the float model: KL divergence, agreement and differences of probabilities
    #[arg(long, value_name = "DIR", requires = "text")]
    kl_ref: Option<PathBuf>,
    /// Precision of the reference [default: fp32 where its pack holds floats, otherwise the fastest]
    #[arg(long, value_name = "P", requires = "kl_ref")]
    ref_precision: Option<Precision>,
    /// Score the first N windows only
    #[arg(long, value_name = "N", requires = "text")]
    windows: Option<usize>,
    /// Log-probability of continuations, for lm-evaluation-harness: JSON lines in, one JSON line out for each, in order
    #[arg(long, value_name = "FILE")]
    loglikelihood: Option<PathBuf>,
    /// Multiple choice (HellaSwag, ARC, or `query`, `choices`, `answer`): accuracy, raw and by length of the choice
    #[arg(long, value_name = "FILE")]
    choices: Option<PathBuf>,
    /// Tasks with one right result (GSM8K, or `prompt`, `answer`, `regex`), answered greedily
    #[arg(long, value_name = "FILE")]
    exact_match: Option<PathBuf>,
    /// Text of a file before every question: worked examples
    #[arg(long, value_name = "FILE", conflicts_with_all = ["text", "loglikelihood"])]
    few_shot: Option<PathBuf>,
    /// Only the first N questions
    #[arg(long, value_name = "N", conflicts_with_all = ["text", "loglikelihood"])]
    limit: Option<usize>,
    /// What the result looks like in an answer; the last match counts, its first group if it has one [default: a number]
    #[arg(long, value_name = "REGEX", requires = "exact_match")]
    regex: Option<String>,
    /// Most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 256, requires = "exact_match")]
    max_new: usize,
    /// Ends an answer; repeatable
    #[arg(long, value_name = "TEXT", requires = "exact_match")]
    stop: Vec<String>,
    /// Answers generated together
    #[arg(long, value_name = "N", default_value_t = 8, requires = "exact_match")]
    batch: usize,
    /// Write a JSON line per question
    #[arg(long, value_name = "FILE", conflicts_with_all = ["text", "loglikelihood"])]
    details: Option<PathBuf>,
    /// No BOS before contexts, as lm-evaluation-harness without add_bos_token
    #[arg(long, conflicts_with_all = ["text", "exact_match"])]
    no_bos: bool,
    /// Print the figures as one JSON line on stdout; answers of --loglikelihood are JSON lines anyway
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let mut model = args.model.open(global, Speculate::Off)?;
    match (&args.text, &args.loglikelihood, &args.choices, &args.exact_match) {
        (Some(file), ..) => text::run(&args, file, &mut model, global),
        (_, Some(file), ..) => likelihood::run(&args, file, &mut model, global),
        (_, _, Some(file), _) => choice::run(&args, file, &mut model, global),
        (_, _, _, Some(file)) => exact::run(&args, file, &mut model, global),
        _ => Err(Error::usage("nothing to evaluate").help("give --text, --choices, --exact-match or --loglikelihood")),
    }
}

impl Args {
    /// What stands before every question.
    fn shots(&self) -> Result<String> {
        self.few_shot.as_deref().map_or_else(|| Ok(String::new()), read_text)
    }
}

/// Makes tokens of a context and what may follow it.
struct Encoder {
    /// Stands before every context, if the tokenizer puts it there.
    bos: Option<u32>,
    /// Stands before a text without context: BOS, or what ended the text before.
    first: Option<u32>,
}

impl Encoder {
    fn new(args: &Args, model: &Model) -> Result<Encoder> {
        let leading = model.tokenizer.as_ref().map(leading_token).transpose()?.flatten();
        let config = model.engine.config();
        let first = leading.or(config.bos).or(config.eos.first().copied());
        Ok(Encoder { bos: leading.filter(|_| !args.no_bos), first })
    }

    /// What a text without context follows.
    fn first(&self) -> Result<u32> {
        self.first.ok_or_else(|| Error::usage("no context, and the model has no token that begins or ends a text"))
    }

    /// Both texts are encoded in one piece, so that tokens join as they do in a text, and cut where the context alone ends;
    /// spaces at the end of a context belong to what follows.
    fn pair(&self, model: &Model, context: &str, continuation: &str) -> Result<(Vec<u32>, Vec<u32>)> {
        let kept = context.trim_end();
        let continuation = format!("{}{continuation}", &context[kept.len()..]);
        let tokenizer = model.tokenizer()?;
        let before = tokenizer.encode_plain(kept)?;
        let whole = tokenizer.encode_plain(&format!("{kept}{continuation}"))?;
        // Where the end of the context joins what follows, the continuation keeps at least one token.
        let cut = before.len().min(whole.len().saturating_sub(1));
        let mut ids = Vec::from_iter(self.bos);
        ids.extend(&whole[..cut]);
        if ids.is_empty() {
            ids.push(self.first()?);
        }
        Ok((ids, whole[cut..].to_vec()))
    }
}

/// A share with its standard error, for people.
fn print_share(name: &str, share: Mean) {
    println!("{name:<20} {:>6.2} % ± {:.2} %", 100.0 * share.value, 100.0 * share.stderr);
}

/// What every report says about the model.
fn about(model: &Model) -> Value {
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

/// A file of text, refused when it is none.
fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).at(path)?;
    String::from_utf8(bytes)
        .map_err(|e| Error::corrupt(format!("byte {} is not UTF-8", e.utf8_error().valid_up_to())).at(path))
}
