//! `iec synth`: creates a checkpoint with the shapes of a real model and random weights.

use crate::global::Global;
use iec::convert::json::read_json;
use iec::convert::synth::{Plan, Tails, presets};
use iec::error::{Error, Result};
use iec::iebin::COMPANIONS;
use iec::output::Inputs;
use iec::units::{human_bytes, human_count, parse_size};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Returns the end of the help text.
fn models_and_examples() -> String {
    let models: Vec<&str> = presets::names().collect();
    format!(
        "Models for --like: {}\n\n\
         Examples:\n  \
         iec synth --like tinyllama-1.1b --out-dir synth/tinyllama\n  \
         iec synth --like gpt-oss-20b --layers 2 --out-dir synth/gpt-oss-2l\n  \
         iec synth --config my-model/config.json --out-dir synth/mine --seed 7 --max-shard-size 2G",
        models.join(", ")
    )
}

/// Arguments of `iec synth`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["like", "config"]))]
#[command(after_help = models_and_examples())]
pub struct Args {
    /// Published model whose shapes to use (listed below)
    #[arg(long, value_name = "MODEL")]
    like: Option<String>,
    /// Take the shapes from this Hugging Face config.json
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory to write; created if it is missing
    #[arg(long, value_name = "DIR")]
    out_dir: PathBuf,
    /// Use this many layers instead of the model's own
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Seed of the weights; the same seed gives the same bytes
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Draw weights with heavy tails and rows of very different scales, as in trained models, instead of normally
    /// distributed weights
    #[arg(long)]
    heavy_tails: bool,
    /// Write the layers of multi-token prediction, too, which `iec pack --with-mtp` keeps
    #[arg(long)]
    with_mtp: bool,
    /// Largest size of a weight file
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    max_shard_size: u64,
    /// Replace a checkpoint that is already there
    #[arg(long)]
    overwrite: bool,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let mut config = match (&args.like, &args.config) {
        (Some(name), _) => presets::config(name)?,
        (None, Some(path)) => read_json(path)?,
        (None, None) => return Err(Error::usage("one of --like and --config is needed")),
    };
    if let Some(layers) = args.layers {
        config = presets::with_layers(config, layers)?;
    }
    Inputs::default().files(&args.config).refuse_members(&args.out_dir, &COMPANIONS)?;
    let tails = if args.heavy_tails { Tails::Heavy } else { Tails::Light };
    let plan = Plan::new(config, args.max_shard_size, args.with_mtp)?.with_tails(tails);
    let (parameters, bytes) = (human_count(plan.parameters()), human_bytes(plan.nbytes()));
    global.note(format_args!("{parameters} parameters in {} tensors, {bytes}", plan.tensor_count()));
    let start = Instant::now();
    plan.write(&args.out_dir, args.seed, args.overwrite)?;
    let seconds = start.elapsed().as_secs_f64();
    let rate = human_bytes((plan.nbytes() as f64 / seconds) as u64);
    let report = json!({
        "out_dir": args.out_dir,
        "weights": plan.parameters(),
        "tensors": plan.tensor_count(),
        "bytes": plan.nbytes(),
        "files": plan.weight_files().collect::<Vec<_>>(),
        "seed": args.seed,
        "heavy_tails": args.heavy_tails,
        "wall_time_s": seconds,
    });
    let words = format!("{}: written in {seconds:.1} s ({rate}/s)", args.out_dir.display());
    global.summarize(words, args.json, &report)
}
