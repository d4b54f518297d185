//! `iec inspect`: describes a checkpoint, pack, weight file, manifest or report.

use crate::console;
use crate::global::Global;
use iec::error::Result;
use iec::inspect::{Options, describe};
use std::path::PathBuf;

/// Arguments of `iec inspect`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    iec inspect model\n  \
    iec inspect --tensors hf/model-00001-of-00002.safetensors\n  \
    iec inspect tinyllama-q4_k_m.gguf\n  \
    iec inspect --strict reports/20261122T101500Z-tinyllama-int4.jsonl\n  \
    iec inspect --stats --json model | jq '.tensors[] | select(.stats.nan > 0)'")]
pub struct Args {
    /// Pack or checkpoint directory, model.ie.json, .safetensors or GGUF file, adapter directory, quantization
    /// manifest, or .jsonl report of `iec bench`
    path: PathBuf,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Read all weights: minimum, maximum, mean, standard deviation, zeros and NaN of every tensor
    #[arg(long)]
    stats: bool,
    /// Check the figures of a report: sums, rates, percentiles, expected tokens (exit code 4 if one is wrong)
    #[arg(long)]
    strict: bool,
    /// Print the result as one JSON line
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, _global: &Global) -> Result<()> {
    let Args { path, tensors, stats, strict, json } = args;
    let text = describe(&Options { path, tensors, stats, strict, json })?;
    if json { console::print_data(text) } else { console::print(text) }
}
