//! `iec eval`: how well does a pack answer?

mod text;

use crate::global::Global;
use crate::model::{Model, ModelArgs, Speculate};
use iec::error::{Context, Error, Result};
use iec::runtime::Precision;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["text"]))]
#[command(after_help = "\
Perplexity follows llama-perplexity: windows of 512 tokens (--ctx) that begin with the tokenizer's BOS, second halves scored.
The reference of --kl-ref reads the same windows beside the model, in fp32 where its pack holds floats.

Examples:
  iec eval --model-dir packs/llama-q4 --text heldout.txt
  iec eval --model-dir packs/llama-q4 --text heldout.txt --kl-ref packs/llama --json")]
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
    /// Print the figures as one JSON line on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let mut model = args.model.open(global, Speculate::Off)?;
    match &args.text {
        Some(file) => text::run(&args, file, &mut model, global),
        None => Err(Error::usage("nothing to evaluate").help("give --text FILE")),
    }
}

/// What every report says about the model.
fn about(model: &Model) -> Value {
    json!({
        "model": model.name,
        "architecture": model.engine.config().architecture,
        "precision": model.engine.precision().name(),
        "kv": model.engine.kv_type().to_string(),
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
