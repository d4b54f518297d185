//! `iec unpack`: options, and the summary in words or JSON.

use crate::console;
use crate::global::Global;
use crate::job::{JobArgs, finished_before, part_of};
use crate::names::{FLOAT, named};
use iec::convert::unpack::{UnpackOptions, UnpackSummary, unpack};
use iec::dtype::DType;
use iec::error::{Error, Result};
use iec::units::{human_bytes, parse_size};
use std::path::{Path, PathBuf};

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec unpack --model-dir packs/tinyllama --out-dir models/tinyllama-again
  iec unpack --model-dir packs/gpt-oss-20b --out-dir models/gpt-oss-20b-again --max-shard-size 2GB
  iec unpack --model-dir packs/tinyllama-q4 --out-dir models/tinyllama-rounded --dtype fp16 --json

Floats and MXFP4 tensors come out byte for byte as the source had them, under its names. Tensors of other quantizations are
decoded to floats; the summary counts them.")]
pub struct Args {
    /// The pack
    #[arg(long, value_name = "DIR", env = "MODEL_DIR")]
    model_dir: PathBuf,
    /// Where the checkpoint goes; made when missing
    #[arg(long, value_name = "DIR")]
    out_dir: PathBuf,
    /// Float type of decoded tensors [default: what most floats of the pack are]
    #[arg(long, value_parser = named(FLOAT))]
    dtype: Option<DType>,
    /// Largest weight file
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    max_shard_size: u64,
    /// Replace a checkpoint that is already there
    #[arg(long)]
    overwrite: bool,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let reader =
        iec::session::dedup::DedupOptions::default().open_pack(&args.model_dir).map_err(Error::while_opening_model)?;
    let options = UnpackOptions {
        model_dir: args.model_dir,
        out_dir: args.out_dir.clone(),
        dtype: args.dtype,
        max_shard_bytes: args.max_shard_size,
        overwrite: args.overwrite,
        run: args.job.options()?,
    };
    report(&unpack(&reader, &options)?, &args.out_dir, args.json, global)
}

/// Prints what was unpacked.
pub fn report(summary: &UnpackSummary, out_dir: &Path, json: bool, global: &Global) -> Result<()> {
    global.note(format_args!(
        "unpacked {}{}: {} tensors{}, {} in {} files in {}",
        part_of(&summary.part),
        summary.architecture,
        summary.tensors,
        finished_before(summary.resumed_tensors),
        human_bytes(summary.bytes),
        summary.files.len(),
        out_dir.display()
    ));
    if !summary.dequantized.is_empty() {
        global.note(format_args!(
            "note: {} tensors were quantized in the pack and are decoded to {}: they are not the source's numbers",
            summary.dequantized.len(),
            summary.dtype
        ));
    }
    if json {
        console::print_json(summary)?;
    }
    Ok(())
}
