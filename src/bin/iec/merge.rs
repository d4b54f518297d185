//! `iec merge`: merges the results of the parts of a divided job.

use crate::global::Global;
use crate::{export_gguf, export_hf, import_gguf, pack, q4, unpack};
use iec::convert::merge::{Merged, merge};
use iec::error::{Error, Result};
use iec::job::RunOptions;
use iec::session::dedup::DedupOptions;
use std::path::{Path, PathBuf};

/// Arguments of `iec merge`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec pack --hf-dir models/llama --out-dir packs/llama --part 1/2
  iec pack --hf-dir models/llama --out-dir packs/llama --part 2/2
  iec merge --out-dir packs/llama

The result is what the same command without --part writes, byte for byte. docs/CLUSTER.md has scripts for Slurm and
Kubernetes.")]
pub struct Args {
    /// The --out-dir of the parts (for `q4 --append-attn` their --model-dir, for `export-gguf` the directory of --out)
    #[arg(long, value_name = "DIR")]
    out_dir: PathBuf,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let open_pack = |dir: &Path| DedupOptions::default().open_pack(dir).map_err(Error::while_opening_model);
    let (dir, json) = (&args.out_dir, args.json);
    match merge(dir, RunOptions::default(), open_pack)? {
        Merged::Pack(summary) => {
            pack::warn(&summary, global);
            global.summarize(pack::describe(&summary), json, &summary)
        }
        Merged::Q4(summary) => {
            q4::warn(&summary, global);
            global.summarize(q4::describe(&summary), json, &summary)
        }
        Merged::Append(summary) => global.summarize(q4::describe_append(&summary), json, &summary),
        Merged::Import(summary) => global.summarize(import_gguf::describe(&summary), json, &summary),
        Merged::Export(summary) => global.summarize(export_gguf::describe(&summary), json, &summary),
        Merged::ExportHf(summary) => global.summarize(export_hf::describe(&summary, dir), json, &summary),
        Merged::Unpack(summary) => global.summarize(unpack::describe(&summary, dir), json, &summary),
    }
}
