//! `iec inspect`: the description of a checkpoint, pack, weight file or manifest.

use crate::console;
use crate::global::Global;
use iec::error::Result;
use iec::inspect::{Options, describe};
use std::path::PathBuf;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    iec inspect model\n  \
    iec inspect --tensors hf/model-00001-of-00002.safetensors\n  \
    iec inspect tinyllama-q4_k_m.gguf\n  \
    iec inspect --stats --json model | jq '.tensors[] | select(.stats.nan > 0)'")]
pub struct Args {
    /// A pack or checkpoint directory, model.ie.json, a .safetensors or GGUF file, or a quantization manifest
    path: PathBuf,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Read all weights: minimum, maximum, mean, deviation, zeros and NaN of every tensor
    #[arg(long)]
    stats: bool,
    /// Machine output on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, _global: &Global) -> Result<()> {
    let Args { path, tensors, stats, json } = args;
    console::print(describe(&Options { path, tensors, stats, json })?)
}
