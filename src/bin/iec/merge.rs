//! `iec merge`: merges the results of the parts of a divided job.

use crate::global::Global;
use crate::{calib, export_gguf, export_hf, import_gguf, pack, q4, unpack};
use iec::convert::merge::{Merged, merge};
use iec::error::{Error, Result};
use iec::job::RecordedParts;
use iec::output::directory_of;
use iec::session::dedup::DedupOptions;
use iec::trial::calibrate;
use std::path::{Path, PathBuf};

/// Arguments of `iec merge`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "iec merge [OPTIONS] <--out-dir <DIR>|--out <FILE>>")]
#[command(after_help = "Examples:
  iec pack --hf-dir models/llama --out-dir packs/llama --part 1/2
  iec pack --hf-dir models/llama --out-dir packs/llama --part 2/2
  iec merge --out-dir packs/llama
  iec merge --out llama.calib                  # parts of `iec calib … --out llama.calib`

The result is what the same command without --part writes, byte for byte. docs/CLUSTER.md has scripts for Slurm and
Kubernetes.")]
pub struct Args {
    /// The --out-dir of the parts (for `q4 --append-attn` their --model-dir, for `export-gguf` and `calib` the
    /// directory of --out)
    #[arg(long, value_name = "DIR", required_unless_present = "out_file", conflicts_with = "out_file")]
    out_dir: Option<PathBuf>,
    /// The --out of the parts, for `calib` and `export-gguf`; its directory may have parts of other outputs, too
    #[arg(long = "out", alias = "output", id = "out_file", value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

impl Args {
    /// Returns the directory of the output.
    fn dir(&self) -> &Path {
        let of_file = self.out.as_deref().map_or(Path::new("."), directory_of);
        self.out_dir.as_deref().unwrap_or(of_file)
    }
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let open_pack = |dir: &Path| DedupOptions::default().open_pack(dir).map_err(Error::while_opening_model);
    let (dir, json) = (args.dir(), args.json);
    let parts = RecordedParts::find(dir, args.out.as_ref().and_then(|out| out.file_name()).map(Path::new))?;
    if parts.command.name == calibrate::COMMAND {
        return calib::merge_parts(&parts, dir, json, global);
    }
    match merge(&parts, dir, open_pack)? {
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
