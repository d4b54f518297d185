//! `iec pack`: options, and the summary in words or JSON.

use crate::dry_run;
use crate::global::Global;
use crate::job::{JobArgs, finished_before, part_of};
use crate::names::{KEPT_OR_FLOAT, KeptOrFloat, named};
use crate::source::SourceArgs;
use iec::convert::pack::{self, PackOptions, PackSummary};
use iec::error::Result;
use iec::units::{human_bytes, human_count};
use std::path::PathBuf;

/// Arguments of `iec pack`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("source").required(true).args(["hf_dir", "hf_repo"]))]
#[command(after_help = "Examples:
  iec pack --hf-dir models/tinyllama --out-dir packs/tinyllama
  iec pack --hf-dir models/tinyllama --out-dir packs/tinyllama-q4 --q4-map q4_manifest.json
  iec pack --hf-repo openai/gpt-oss-20b --out-dir packs/gpt-oss-20b --dry-run
  iec pack --hf-dir models/gpt-oss-20b --out-dir packs/gpt-oss-20b --part 1/4

An interrupted pack continues when the same command is run again. Parts are put together by `iec merge`.")]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Directory of the new pack; created if it is missing
    #[arg(long, value_name = "DIR")]
    out_dir: PathBuf,
    /// Manifest that says which tensors are quantized and how (from `iec ptq`, `iec q4`, or rules as in manifests/)
    #[arg(long, value_name = "MANIFEST")]
    q4_map: Option<PathBuf>,
    /// Statistics of `iec calib` that the manifest was made with, if its methods need them
    #[arg(long, value_name = "STATS", requires = "q4_map")]
    calib: Option<PathBuf>,
    /// Float type of tensors that are not quantized; keep = the type in the checkpoint
    #[arg(long, value_parser = named(KEPT_OR_FLOAT), default_value = "keep")]
    dtype: KeptOrFloat,
    /// A tokenizer.json to put into the pack instead of the checkpoint's
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Replace a pack that is already there
    #[arg(long)]
    overwrite: bool,
    /// Print the plan: type of each tensor and the reason, sizes, disk space; write nothing
    #[arg(long, conflicts_with_all = ["part", "parts", "fresh"])]
    dry_run: bool,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let options = PackOptions {
        config: args.source.config.clone(),
        hf_dir: args.source.required()?,
        out_dir: args.out_dir,
        manifest: args.q4_map,
        calibration: args.calib,
        dtype: args.dtype,
        tokenizer: args.tokenizer,
        overwrite: args.overwrite,
        run: args.job.options()?,
    };
    if args.dry_run {
        return dry_run::print(&pack::dry_run(&options)?, &options.out_dir, args.json);
    }
    let summary = pack::pack(&options)?;
    global.summarize(describe(&summary), args.json, &summary)
}

/// Describes in words what was packed.
pub fn describe(s: &PackSummary) -> String {
    let PackSummary { architecture, tensors, quantized_tensors, bits_per_weight, wall_time_s, .. } = s;
    let (part, finished) = (part_of(&s.part), finished_before(s.resumed_tensors));
    let [before, after] = [s.bytes_in, s.bytes].map(human_bytes);
    let (weights, rate) = (human_count(s.weights), human_bytes((s.bytes_in as f64 / wall_time_s) as u64));
    let missing = match s.tokenizer {
        true => "",
        false => "\nnote: the checkpoint has no tokenizer.json; `iec run` will need one (`pack --tokenizer FILE`)",
    };
    let refused = if s.refused {
        "\nnote: the gate refused this quantization; its manifest was written with --force"
    } else {
        ""
    };
    format!(
        "packed {part}{architecture}: {tensors} tensors ({quantized_tensors} quantized{finished}), {weights} weights, \
         {before} -> {after}, {bits_per_weight:.2} bits per weight, {wall_time_s:.1} s, {rate}/s{missing}{refused}"
    )
}
