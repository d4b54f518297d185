//! `iec merge`: puts together what the parts of a job array have made.

use crate::global::Global;
use crate::{pack, q4};
use iec::convert::merge::{Merged, merge};
use iec::error::Result;
use iec::job::RunOptions;
use std::path::PathBuf;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec pack --hf-dir models/llama --out-dir packs/llama --part 1/2
  iec pack --hf-dir models/llama --out-dir packs/llama --part 2/2
  iec merge --out-dir packs/llama

The result is what the same command without --part writes, byte for byte. docs/CLUSTER.md has scripts for Slurm and
Kubernetes.")]
pub struct Args {
    /// The --out-dir of the parts
    #[arg(long, value_name = "DIR")]
    out_dir: PathBuf,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    match merge(&args.out_dir, RunOptions::default())? {
        Merged::Pack(summary) => pack::report(&summary, args.json, global),
        Merged::Q4(summary) => q4::report(&summary, args.json, global),
    }
}
