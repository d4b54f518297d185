//! `iec export-hf`: writes a pack as a quantized checkpoint for vLLM, SGLang and transformers.

use crate::global::Global;
use crate::job::{JobArgs, finished_before, part_of};
use crate::names::{FLOAT, Named, named};
use crate::pack_arg::PackArg;
use iec::convert::export_hf::{ExportHfOptions, ExportHfSummary, HfFormat, export};
use iec::dtype::DType;
use iec::error::{Error, Result};
use iec::session::dedup::DedupOptions;
use iec::units::{human_bytes, parse_size};
use std::path::{Path, PathBuf};

/// Arguments of `iec export-hf`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec export-hf packs/llama-int4 --format compressed-tensors --dequantize --out-dir models/llama-w4a16
  iec export-hf packs/llama-int4 --format gptq --out-dir models/llama-gptq --max-shard-size 2GB
  iec export-hf packs/llama-bf16 --format fp8 --out-dir models/llama-fp8 --json

compressed-tensors and gptq keep the codes and scales of the pack; fp8 quantizes floats. Matrices that the format has
no equivalent for are refused by name. Groups of 32 weights, as in q4_0, run in vLLM only with kernels that accept this
group size (Marlin).")]
pub struct Args {
    #[command(flatten)]
    pack: PackArg,
    /// Directory of the new checkpoint; created if it is missing
    #[arg(long, value_name = "DIR")]
    out_dir: PathBuf,
    /// Format of the quantized matrices
    #[arg(long, value_parser = named(FORMATS))]
    format: HfFormat,
    /// Decode quantized tensors that the format has no equivalent for, which are refused without this option
    #[arg(long)]
    dequantize: bool,
    /// Float type of decoded tensors [default: the most frequent float type of the pack]
    #[arg(long, value_parser = named(FLOAT))]
    dtype: Option<DType>,
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

/// The values of --format.
const FORMATS: &[Named<HfFormat>] = &[
    (HfFormat::CompressedTensors, &["compressed-tensors", "ct"], "integers and MXFP4, with the codes of the pack"),
    (HfFormat::Gptq, &["gptq"], "symmetric integers of 4 or 8 bits, with the codes of the pack"),
    (HfFormat::Fp8, &["fp8"], "8-bit floats in blocks of 128 x 128, from floats"),
];

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let model_dir = args.pack.dir()?;
    let reader = DedupOptions::default().open_pack(&model_dir).map_err(Error::while_opening_model)?;
    let options = ExportHfOptions {
        model_dir,
        out_dir: args.out_dir.clone(),
        format: args.format,
        dequantize: args.dequantize,
        dtype: args.dtype,
        max_shard_bytes: args.max_shard_size,
        overwrite: args.overwrite,
        run: args.job.options()?,
    };
    let summary = export(&reader, &options)?;
    global.summarize(describe(&summary, &args.out_dir), args.json, &summary)
}

/// Describes in words what was exported.
pub fn describe(s: &ExportHfSummary, out_dir: &Path) -> String {
    let ExportHfSummary { architecture, format, tensors, quantized_modules, dtype, .. } = s;
    let (part, finished) = (part_of(&s.part), finished_before(s.resumed_tensors));
    let (bytes, files, dir) = (human_bytes(s.bytes), s.files.len(), out_dir.display());
    let text = format!(
        "exported {part}{architecture} as {format}: {tensors} matrices and tensors{finished}, {quantized_modules} of \
         them in codes, {bytes} in {files} files in {dir}"
    );
    let decoded = match s.dequantized.len() {
        0 => None,
        n => Some(format!("{n} tensors were quantized in the pack and are decoded to {dtype} first")),
    };
    decoded.iter().chain(&s.notes).fold(text, |text, note| format!("{text}\nnote: {note}"))
}
