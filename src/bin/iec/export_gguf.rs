//! `iec export-gguf`: writes a pack as a GGUF file for llama.cpp.

use crate::global::Global;
use crate::job::{JobArgs, finished_before, part_of};
use crate::names::{KEPT_OR_FLOAT, KeptOrFloat, Named, named};
use crate::pack_arg::PackArg;
use iec::convert::gguf::{Dequantize, ExportOptions, ExportSummary, export};
use iec::error::{Error, Result};
use iec::session::dedup::DedupOptions;
use iec::units::human_bytes;
use std::path::PathBuf;

/// Arguments of `iec export-gguf`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec export-gguf packs/tinyllama-q4 --out tinyllama-q4_0.gguf
  iec export-gguf packs/gpt-oss-20b --out gpt-oss-20b.gguf --dtype f16
  iec export-gguf packs/llama-int4-affine --out llama.gguf --dequantize --dtype bf16")]
pub struct Args {
    #[command(flatten)]
    pack: PackArg,
    /// File to write; `-` is stdout
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Float type of matrices that are not quantized; keep = as the pack has them (vectors are always f32)
    #[arg(long, value_parser = named(KEPT_OR_FLOAT), default_value = "keep")]
    dtype: KeptOrFloat,
    /// Write quantized tensors as floats; needed = only those that GGML has no type for (refused without this option)
    #[arg(long, value_parser = named(DEQUANTIZE), value_name = "WHICH", num_args = 0..=1)]
    #[arg(default_missing_value = "needed")]
    dequantize: Option<Dequantize>,
    /// llama.cpp's name of the pre-tokenizer (`tokenizer.ggml.pre`), if it cannot be recognized
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
    /// Replace a file that is already there
    #[arg(long)]
    overwrite: bool,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// The values of --dequantize.
const DEQUANTIZE: &[Named<Dequantize>] = &[(Dequantize::Needed, &["needed"], ""), (Dequantize::All, &["all"], "")];

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    if args.json && args.out.as_os_str() == "-" {
        return Err(Error::usage("`--out -` and `--json` both write to stdout; use one of them"));
    }
    let model_dir = args.pack.dir()?;
    let reader = DedupOptions::default().open_pack(&model_dir).map_err(Error::while_opening_model)?;
    let options = ExportOptions {
        model_dir,
        out: args.out,
        dtype: args.dtype,
        dequantize: args.dequantize.unwrap_or_default(),
        pre: args.pre,
        overwrite: args.overwrite,
        run: args.job.options()?,
    };
    let summary = export(&reader, &options)?;
    global.summarize(describe(&summary), args.json, &summary)
}

/// Describes in words what was exported.
pub fn describe(s: &ExportSummary) -> String {
    let ExportSummary { architecture, tensors, wall_time_s, .. } = s;
    let (part, finished) = (part_of(&s.part), finished_before(s.resumed_tensors));
    let dequantized = Some(s.dequantized_tensors).filter(|n| *n > 0).map(|n| format!("{n} dequantized"));
    let types: Vec<String> = s.types.iter().map(|(kind, n)| format!("{n} {kind}")).chain(dequantized).collect();
    let (types, bytes) = (types.join(", "), human_bytes(s.bytes));
    let text =
        format!("exported {part}{architecture}: {tensors} tensors ({types}{finished}), {bytes}, {wall_time_s:.1} s");
    s.notes.iter().fold(text, |text, note| format!("{text}\nnote: {note}"))
}
