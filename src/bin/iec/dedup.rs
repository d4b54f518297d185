//! `iec dedup`: options, and what became of the bytes in words or JSON.

use crate::global::Global;
use crate::units::human_bytes;
use iec::dedup::{Codec, FILE_NAMES, JSON_NAME, make};
use iec::error::Result;
use serde_json::json;
use std::path::PathBuf;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec dedup --model-dir packs/tinyllama
  iec dedup --model-dir packs/tinyllama --codec zstd --remove-original
  iec dedup --model-dir packs/tinyllama-tuned --base packs/tinyllama --verify
  iec dedup --restore --model-dir packs/tinyllama --out-dir packs/tinyllama-again

Nothing is lost: floats are taken apart into planes of which some take less room, equal tensors and experts are stored once, and
those near to another one as their differences. The four files model.dedup.* give back every byte of model.ie.bin; how small
they are depends on the weights: bf16 goes to 0.70 of its size, quantized weights stay nearly what they are.")]
pub struct Args {
    /// The pack
    #[arg(long, value_name = "DIR", env = "MODEL_DIR")]
    model_dir: PathBuf,
    /// A pack this one may be near to, such as the one it was tuned from; it is needed from then on. Repeatable
    #[arg(long, value_name = "DIR", conflicts_with = "restore")]
    base: Vec<PathBuf>,
    /// `auto` decodes at the speed of memory, `zstd` is smallest, `none` only leaves out what is equal
    #[arg(long, value_enum, default_value = "auto", conflicts_with = "restore")]
    codec: CodecName,
    /// Level of zstd, 1 to 22; higher ones look for repetitions, which weights rarely have
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i32).range(1..=22), conflicts_with = "restore")]
    level: i32,
    /// Rebuild everything in memory and compare every hash; all that happens where model.ie.bin is gone
    #[arg(long)]
    verify: bool,
    /// Remove model.ie.bin after that proof
    #[arg(long, conflicts_with = "restore")]
    remove_original: bool,
    /// Write model.ie.bin again
    #[arg(long)]
    restore: bool,
    /// Where --restore writes the pack [default: the directory of the pack]
    #[arg(long, value_name = "DIR", requires = "restore")]
    out_dir: Option<PathBuf>,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum CodecName {
    Auto,
    None,
    Zstd,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    if args.restore {
        return restore(&args, global);
    }
    if args.verify && !args.remove_original && make::is_reduced(&args.model_dir) {
        return verify(&args, global);
    }
    let summary = make::dedup(&make::Options {
        model_dir: args.model_dir.clone(),
        bases: args.base.clone(),
        codec: match args.codec {
            CodecName::Auto => Codec::Auto,
            CodecName::None => Codec::None,
            CodecName::Zstd => Codec::Zstd,
        },
        level: args.level,
    })?;
    if args.remove_original {
        make::remove_original(&args.model_dir)?;
    } else if args.verify {
        make::verify(&args.model_dir)?;
    }
    tell(&summary, &args, global);
    if args.json {
        let mut line = json!(summary);
        line["verified"] = json!(args.verify || args.remove_original);
        line["removed_original"] = json!(args.remove_original);
        println!("{line}");
    }
    Ok(())
}

fn tell(summary: &make::Summary, args: &Args, global: &Global) {
    global.note(format_args!("encoding  kind      units      before       after  ratio"));
    for part in &summary.parts {
        global.note(format_args!(
            "{:<9} {:<8} {:>6} {:>11} {:>11}  {:.3}",
            part.encoding,
            part.kind,
            part.units,
            human_bytes(part.original_bytes),
            human_bytes(part.stored_bytes),
            part.stored_bytes as f64 / part.original_bytes.max(1) as f64
        ));
    }
    let proof = match (args.remove_original, args.verify) {
        (true, _) => "; every hash compared, model.ie.bin removed",
        (_, true) => "; every hash compared",
        _ => "",
    };
    global.note(format_args!(
        "{}: {} in {JSON_NAME} and {}, of {} before: {:.4}{proof}",
        args.model_dir.display(),
        human_bytes(summary.stored_bytes),
        FILE_NAMES.map(|name| name.trim_start_matches("model.dedup.")).join(", "),
        human_bytes(summary.original_bytes),
        summary.ratio,
    ));
}

/// What is left to do where the binary is gone.
fn verify(args: &Args, global: &Global) -> Result<()> {
    let bytes = make::verify(&args.model_dir)?;
    global.note(format_args!("{}: {} rebuilt, every hash compared", args.model_dir.display(), human_bytes(bytes)));
    if args.json {
        println!("{}", json!({"verified_bytes": bytes, "verified": true}));
    }
    Ok(())
}

fn restore(args: &Args, global: &Global) -> Result<()> {
    let out_dir = args.out_dir.as_ref().unwrap_or(&args.model_dir);
    let bytes = make::restore(&args.model_dir, out_dir)?;
    global.note(format_args!("restored {} into {}, every hash compared", human_bytes(bytes), out_dir.display()));
    if args.json {
        println!("{}", json!({"restored_bytes": bytes, "out_dir": out_dir, "verified": true}));
    }
    Ok(())
}
