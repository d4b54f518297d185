//! `iec import-gguf`: converts a GGUF file to a pack.

use crate::global::Global;
use crate::job::{JobArgs, finished_before, part_of};
use crate::names::{KEPT_OR_FLOAT, KeptOrFloat, named};
use iec::convert::gguf::{ImportOptions, ImportSummary, import};
use iec::error::Result;
use iec::units::{human_bytes, human_count};
use std::path::PathBuf;

/// Arguments of `iec import-gguf`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec import-gguf tinyllama-q4_0.gguf --out-dir packs/tinyllama-q4
  iec import-gguf Meta-Llama-3.1-8B.Q4_K_M.gguf --out-dir packs/llama --dtype bf16
  iec import-gguf gpt-oss-20b-00001-of-00002.gguf --out-dir packs/gpt-oss --json")]
pub struct Args {
    /// The GGUF file; of a split model the first one
    file: PathBuf,
    /// Directory of the new pack; created if it is missing
    #[arg(long, value_name = "DIR")]
    out_dir: PathBuf,
    /// Float type of tensors that are not quantized in the pack; keep = the type in the file, exact f32 for block types
    /// that packs do not have
    #[arg(long, value_parser = named(KEPT_OR_FLOAT), default_value = "keep")]
    dtype: KeptOrFloat,
    /// A tokenizer.json to use instead of the tokenizer in the file
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Replace a pack that is already there
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
    let options = ImportOptions {
        file: args.file,
        out_dir: args.out_dir,
        dtype: args.dtype,
        tokenizer: args.tokenizer,
        overwrite: args.overwrite,
        run: args.job.options()?,
    };
    let summary = import(&options)?;
    global.summarize(describe(&summary), args.json, &summary)
}

/// Describes in words what was imported.
pub fn describe(s: &ImportSummary) -> String {
    let ImportSummary { architecture, tensors, quantized_tensors, bits_per_weight, wall_time_s, .. } = s;
    let (part, finished) = (part_of(&s.part), finished_before(s.resumed_tensors));
    let ([before, after], weights) = ([s.bytes_in, s.bytes].map(human_bytes), human_count(s.weights));
    let mut text = format!(
        "imported {part}{architecture}: {tensors} tensors ({quantized_tensors} quantized as in the file{finished}), \
         {weights} weights, {before} -> {after}, {bits_per_weight:.2} bits per weight, {wall_time_s:.1} s"
    );
    if let Some(decoded) = s.decoded() {
        text += &format!("\nnote: {decoded}");
    } else if s.rounded_tensors > 0 {
        text += &format!("\nnote: {} tensors were rounded to the --dtype", s.rounded_tensors);
    }
    if !s.tokenizer {
        text += "\nnote: the file has no tokenizer; `iec run` will need one (`import-gguf --tokenizer FILE`)";
    }
    text
}
