//! `iec q4`: options, and the summary in words or JSON.

use crate::dry_run;
use crate::global::Global;
use crate::job::JobArgs;
use crate::names::{Named, named};
use crate::source::SourceArgs;
use clap::builder::FalseyValueParser;
use iec::convert::quantize::append::{self, AppendOptions, AppendSummary};
use iec::convert::quantize::q4::{self, Q4Options, Q4Summary};
use iec::error::{Error, Result};
use iec::quant_spec::QuantFields;
use iec::scheme::{Granularity, Scheme};
use iec::units::{human_bytes, human_count};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Arguments of `iec q4`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "iec q4 [OPTIONS] <MODEL> --out-dir <DIR>")]
#[command(
    group = clap::ArgGroup::new("source")
        .required(true)
        .multiple(true)
        .args(["checkpoint", "hf_dir", "hf_repo", "append_attn"])
)]
#[command(after_help = "Examples:
  iec q4 models/tinyllama --out-dir q4/tinyllama
  iec q4 models/tinyllama --out-dir q4/tinyllama --manifest q4_manifest.json
  iec pack models/tinyllama --out-dir packs/tinyllama --q4-map q4/tinyllama/q4_manifest.expanded.json
  iec q4 model.gguf --out-dir q4/model --manifest q4_manifest.json
  iec q4 --append-attn --model-dir packs/gpt-oss-20b")]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Directory of model.q4.bin, model.q4.scales.fp16.bin and q4_manifest.expanded.json; created if it is missing
    #[arg(long, value_name = "DIR", required_unless_present = "append_attn", conflicts_with = "append_attn")]
    out_dir: Option<PathBuf>,
    /// Manifest that says which tensors are quantized and how (from `iec ptq`, or rules as in manifests/)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["scheme", "append_attn"])]
    manifest: Option<PathBuf>,
    /// Statistics of `iec calib` that the manifest was made with, if its methods need them
    #[arg(long, value_name = "STATS", requires = "manifest")]
    calib: Option<PathBuf>,
    /// Quantization scheme: q4_0 has blocks of 32, int4-row one scale per row [default: q4_0]
    #[arg(long, value_parser = named(SCHEMES), conflicts_with = "append_attn")]
    scheme: Option<(Scheme, Option<Granularity>)>,
    /// Rows that are read at once; limits memory and does not change the result [default: as many rows as fit about 1 MiB]
    #[arg(long, value_name = "N", env = "CHUNK_ROWS")]
    chunk_rows: Option<NonZeroUsize>,
    /// Quantize the output matrix, too
    #[arg(long, env = "IE_Q4_INCLUDE_LM_HEAD", value_parser = FalseyValueParser::new())]
    include_lm_head: bool,
    /// Rewrite the pack in --model-dir with its attention projections as q4_0, from --hf-dir or the pack's own floats
    #[arg(long, requires = "model_dir")]
    append_attn: bool,
    /// The pack that --append-attn rewrites
    #[arg(long, value_name = "DIR")]
    model_dir: Option<PathBuf>,
    /// Replace files that are already there
    #[arg(long, conflicts_with = "append_attn")]
    overwrite: bool,
    /// Print the plan: type of each tensor, sizes, disk space; write nothing
    #[arg(long, conflicts_with_all = ["append_attn", "part", "parts", "fresh"])]
    dry_run: bool,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// The schemes of --scheme with their group sizes.
const SCHEMES: &[Named<(Scheme, Option<Granularity>)>] =
    &[((Scheme::Int4, Some(Granularity::Row)), &["int4-row"], ""), ((Scheme::Q4_0, None), &["q4_0"], "")];

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    if args.append_attn {
        return append_attention(&args, global);
    }
    if args.model_dir.is_some() {
        return Err(Error::usage("--model-dir needs --append-attn"));
    }
    let Some(out_dir) = &args.out_dir else { return Err(Error::usage("--out-dir is needed")) };
    let fields = match args.scheme {
        None => QuantFields::default(),
        Some((scheme, group_size)) => QuantFields { scheme: Some(scheme), group_size, ..QuantFields::default() },
    };
    let options = Q4Options {
        hf_dir: args.source.required()?,
        config: args.source.config.clone(),
        out_dir: out_dir.clone(),
        manifest: args.manifest.clone(),
        calibration: args.calib.clone(),
        fields,
        include_lm_head: args.include_lm_head,
        chunk_rows: args.chunk_rows.map(NonZeroUsize::get),
        overwrite: args.overwrite,
        run: args.job.options()?,
    };
    if args.dry_run {
        return dry_run::print(&q4::dry_run(&options)?, out_dir, args.json);
    }
    let summary = q4::write(&options)?;
    warn(&summary, global);
    global.summarize(describe(&summary), args.json, &summary)
}

fn append_attention(args: &Args, global: &Global) -> Result<()> {
    let Some(model_dir) = &args.model_dir else { return Err(Error::usage("--append-attn needs --model-dir")) };
    if args.source.config.is_some() {
        return Err(Error::usage("--config cannot be used with --append-attn"));
    }
    let options = AppendOptions {
        model_dir: model_dir.clone(),
        hf_dir: args.source.path()?,
        include_lm_head: args.include_lm_head,
        chunk_rows: args.chunk_rows.map(NonZeroUsize::get),
        run: args.job.options()?,
    };
    let summary = append::append_attention(&options)?;
    global.summarize(describe_append(&summary), args.json, &summary)
}

/// Warns of tensors that are quantized twice.
pub fn warn(summary: &Q4Summary, global: &Global) {
    summary.requantized.iter().for_each(|found| global.note(found.warning()));
}

/// Describes in words what was rewritten.
pub fn describe_append(s: &AppendSummary) -> String {
    let (pack, matrices) = (s.model_dir.display(), s.tensors.len());
    match &s.part {
        Some(part) => format!("{pack}: part {part} has quantized {matrices} matrices"),
        None => format!("{pack}: quantized {matrices} matrices to q4_0"),
    }
}

/// Describes in words what was written.
pub fn describe(s: &Q4Summary) -> String {
    let Q4Summary { tensors, bits_per_weight, .. } = s;
    let part = s.part.as_ref().map_or(String::new(), |part| format!("part {part}, "));
    let before = Some(s.resumed_tensors).filter(|n| *n > 0).map(|n| format!(" ({n} finished before)"));
    let (manifest, before) = (s.manifest.display(), before.unwrap_or_default());
    let (weights, bytes) = (human_count(s.weights), human_bytes(s.bytes));
    format!(
        "{manifest}: {part}{tensors} tensors{before}, {weights} weights, {bytes}, {bits_per_weight:.2} bits per weight"
    )
}
