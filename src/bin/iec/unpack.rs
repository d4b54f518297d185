//! `iec unpack`: options, and the summary in words or JSON.

use crate::global::Global;
use crate::job::{JobArgs, finished_before, part_of};
use crate::names::{FLOAT, named, offering};
use crate::pack_arg::PackArg;
use iec::convert::adapter::Combination;
use iec::convert::unpack::{UnpackOptions, UnpackSummary, unpack};
use iec::dtype::DType;
use iec::error::{Error, Result};
use iec::session::adapters::AdapterSource;
use iec::session::dedup::DedupOptions;
use iec::units::{human_bytes, parse_size};
use std::path::{Path, PathBuf};

/// Arguments of `iec unpack`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec unpack packs/tinyllama --out-dir models/tinyllama-again
  iec unpack packs/gpt-oss-20b --out-dir models/gpt-oss-20b-again --max-shard-size 2GB
  iec unpack packs/tinyllama --lora adapters/poems:0.5 --out-dir models/tinyllama-poems
  iec unpack packs/tinyllama --lora adapters/poems --lora adapters/short --merge ties:0.5 --out-dir models/both
  iec unpack packs/tinyllama-q4 --out-dir models/tinyllama-rounded --dtype fp16 --json

Floats and MXFP4 tensors get the names and bytes that they have in the source. Tensors with other quantization
schemes are decoded to floats; the summary counts them.")]
pub struct Args {
    #[command(flatten)]
    pack: PackArg,
    /// Directory of the new checkpoint; created if it is missing
    #[arg(long, value_name = "DIR")]
    out_dir: PathBuf,
    /// Float type of decoded tensors [default: the most frequent float type of the pack]
    #[arg(long, value_parser = named(FLOAT))]
    dtype: Option<DType>,
    /// Merge an adapter (LoRA, DoRA) in a directory of PEFT into the weights, in f32; repeatable
    #[arg(long, value_name = "DIR[:SCALE]")]
    lora: Vec<AdapterSource>,
    /// Combination of several adapters: cat, linear or ties[:DENSITY]. cat adds their changes. The others combine the
    /// factors A and B of adapters of the same rank, as PEFT does; ties keeps the share DENSITY of the largest numbers
    /// of each factor (0.2 if it is left out)
    #[arg(long, value_name = "HOW", requires = "lora", default_value_t = Combination::Cat, hide_possible_values = true)]
    #[arg(value_parser = offering(&["cat", "linear", "ties"], str::parse::<Combination>))]
    merge: Combination,
    /// Largest size of a weight file
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
    let model_dir = args.pack.dir()?;
    let reader = DedupOptions::default().open_pack(&model_dir).map_err(Error::while_opening_model)?;
    let options = UnpackOptions {
        model_dir,
        out_dir: args.out_dir.clone(),
        dtype: args.dtype,
        combination: args.merge,
        adapters: args.lora.iter().map(|source| (source.dir.clone(), source.scale)).collect(),
        max_shard_bytes: args.max_shard_size,
        overwrite: args.overwrite,
        run: args.job.options()?,
    };
    let summary = unpack(&reader, &options)?;
    global.summarize(describe(&summary, &args.out_dir), args.json, &summary)
}

/// Describes in words what was unpacked.
pub fn describe(s: &UnpackSummary, out_dir: &Path) -> String {
    let UnpackSummary { architecture, tensors, dtype, .. } = s;
    let (part, finished) = (part_of(&s.part), finished_before(s.resumed_tensors));
    let (bytes, files, dir) = (human_bytes(s.bytes), s.files.len(), out_dir.display());
    let text = format!("unpacked {part}{architecture}: {tensors} tensors{finished}, {bytes} in {files} files in {dir}");
    match s.dequantized.len() {
        0 => text,
        n => format!(
            "{text}\nnote: {n} tensors were quantized in the pack and are decoded to {dtype}: they are not the source's \
             numbers"
        ),
    }
}
