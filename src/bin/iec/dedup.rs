//! `iec dedup`: options, and the summary in words or JSON.

use crate::console;
use crate::global::Global;
use crate::names::{Named, named};
use iec::dedup::{self, Codec, EncodingBytes, FILE_NAMES, JSON_NAME, Measured, Summary, family, make};
use iec::error::{Error, Result};
use iec::output::stale;
use iec::units::human_bytes;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Arguments of `iec dedup`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("named").args(["pack", "model_dir"]))]
#[command(group = clap::ArgGroup::new("packs").required(true).multiple(true).args(["pack", "model_dir", "base"]))]
#[command(after_help = "Examples:
  iec dedup packs/tinyllama
  iec dedup packs/tinyllama --dry-run
  iec dedup packs/tinyllama --codec zstd --remove-original
  iec dedup packs/tinyllama-tuned --base packs/tinyllama --verify
  iec dedup --base packs/tinyllama packs/chat packs/code --remove-original
  iec inspect packs/tinyllama
  iec dedup --remove --model-dir packs/chat
  iec dedup --restore --model-dir packs/tinyllama --out-dir packs/tinyllama-again

Deduplication is lossless. The exponent bytes of floats are compressed, equal tensors and experts are stored once, and
tensors similar to another one are stored as differences. The four files model.dedup.* restore every byte of
model.ie.bin. The size depends on the weights: bf16 shrinks to 0.70 of its size, quantized weights hardly shrink.")]
pub struct Args {
    /// The pack
    #[arg(value_name = "PACK")]
    pack: Option<PathBuf>,
    /// The pack, as an option instead of the first argument
    #[arg(long, value_name = "DIR")]
    model_dir: Option<PathBuf>,
    /// Packs that the pack may resemble, such as the one that it was fine-tuned from. Afterwards the pack can be read
    /// only while they exist. Without a pack or --model-dir, the packs of --base are deduplicated as a family: the first
    /// one alone, each of the others as its differences from the first
    #[arg(long, value_name = "DIR", num_args = 1.., conflicts_with = "restore")]
    base: Vec<PathBuf>,
    /// `auto` decodes at about memory bandwidth, `zstd` is smallest, `none` only stores equal tensors once
    #[arg(long, value_parser = named(CODECS), default_value = "auto", conflicts_with = "restore")]
    codec: Codec,
    /// Level of zstd, 1 to 22; higher levels search for repetitions, which weights rarely have
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i32).range(1..=22), conflicts_with = "restore")]
    level: i32,
    /// Write the four files even if they are not smaller than model.ie.bin; by default such a pack is left unchanged
    #[arg(long, conflicts_with_all = ["restore", "remove", "dry_run"])]
    even_if_larger: bool,
    /// Encode and decode every tensor in memory on one thread and report size and speed; write nothing
    #[arg(
        long,
        conflicts_with_all = ["restore", "remove", "base", "verify", "remove_original"],
        requires = "named"
    )]
    dry_run: bool,
    /// Rebuild every tensor in memory and compare its hash; nothing else is done if model.ie.bin was removed
    #[arg(long)]
    verify: bool,
    /// Verify, then remove model.ie.bin; if it was removed already, only verify
    #[arg(long, conflicts_with = "restore")]
    remove_original: bool,
    /// Restore model.ie.bin
    #[arg(long)]
    restore: bool,
    /// Delete the pack; refused while other packs are rebuilt from it
    #[arg(long, conflicts_with_all = ["restore", "base", "verify", "remove_original"], requires = "named")]
    remove: bool,
    /// Directory that --restore writes the pack to [default: the directory of the pack]
    #[arg(long, value_name = "DIR", requires = "restore")]
    out_dir: Option<PathBuf>,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// The values of --codec.
const CODECS: &[Named<Codec>] =
    &[(Codec::Auto, &["auto"], ""), (Codec::None, &["none"], ""), (Codec::Zstd, &["zstd"], "")];

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    if !args.dry_run {
        args.named().into_iter().chain(&args.base).for_each(|dir| stale::remove(dir));
    }
    let Some(dir) = args.named() else { return run_family(&args, global) };
    if args.dry_run {
        return measure(dir, &args, global);
    }
    if args.remove {
        return remove(dir, &args, global);
    }
    if args.restore {
        return restore(dir, &args, global);
    }
    // After `--remove-original` was interrupted, the same command verifies what it has left.
    if (args.verify || args.remove_original) && dedup::is_reduced(dir)? {
        return verify(dir, &args, global);
    }
    let summary = reduce(dir, &args.base, &args, global)?;
    if args.json { console::print_json(&summary_json(&summary, &args)) } else { Ok(()) }
}

impl Args {
    fn named(&self) -> Option<&PathBuf> {
        self.pack.as_ref().or(self.model_dir.as_ref())
    }
}

/// Deduplicates the first pack of `--base` alone and the others against it. A pack whose binary was removed already is
/// only verified, and only with `--verify`.
fn run_family(args: &Args, global: &Global) -> Result<()> {
    let [base, members @ ..] = &args.base[..] else { unreachable!("clap requires --model-dir or --base") };
    if members.is_empty() {
        return Err(Error::usage("--base: found one pack and no --model-dir, expected at least two packs")
            .help("name the pack to deduplicate with --model-dir, or more packs after --base"));
    }
    let mut lines = Vec::new();
    for (i, dir) in args.base.iter().enumerate() {
        if dedup::is_reduced(dir)? {
            if args.verify {
                dedup::verify(dir)?;
            }
            global.note(format_args!("{}: already deduplicated", dir.display()));
            continue;
        }
        let summary = reduce(dir, if i == 0 { &[] } else { std::slice::from_ref(base) }, args, global)?;
        let mut line = summary_json(&summary, args);
        line["dir"] = json!(dir);
        lines.push(line);
    }
    let family = family::Member::family(base)?;
    let sum = |of: fn(&family::Member) -> u64| family.iter().map(of).sum::<u64>();
    let (original, kept) = (sum(|member| member.original_bytes), sum(family::Member::kept_bytes));
    let ratio = kept as f64 / original.max(1) as f64;
    let (packs, before, after) = (family.len(), human_bytes(original), human_bytes(kept));
    let line = json!({"made": lines, "family": family, "original_bytes": original, "kept_bytes": kept, "ratio": ratio});
    global.summarize(format_args!("{packs} packs: {after} of {before} before: {ratio:.4}"), args.json, &line)
}

/// Deduplicates one pack and, if the arguments say so, verifies the result and removes the binary of the pack.
fn reduce(dir: &Path, bases: &[PathBuf], args: &Args, global: &Global) -> Result<Summary> {
    let made = make::dedup(&make::MakeOptions {
        model_dir: dir.to_path_buf(),
        bases: bases.to_vec(),
        codec: args.codec,
        level: args.level,
        even_if_larger: args.even_if_larger,
    })?;
    if !made.summary.written {
        let (dir, before) = (dir.display(), human_bytes(made.summary.original_bytes));
        let store = human_bytes(made.summary.store_bytes);
        global.note(format_args!(
            "{dir}: nothing is gained, so the pack is left unchanged: the four files would have {store}, the pack has \
             {before}; `--even-if-larger` writes them nevertheless"
        ));
        return Ok(made.summary);
    }
    if args.remove_original {
        dedup::remove_original(dir)?;
    } else if args.verify {
        dedup::verify(dir)?;
    }
    note_summary(dir, &made.summary, args, global);
    for (base, why) in &made.unlisted {
        global.note(format_args!(
            "{}: could not be marked as needed by this pack, so do not delete it: {why}",
            base.display()
        ));
    }
    Ok(made.summary)
}

fn summary_json(summary: &Summary, args: &Args) -> Value {
    let mut line = json!(summary);
    line["verified"] = json!(summary.written && (args.verify || args.remove_original));
    line["removed_original"] = json!(summary.written && args.remove_original);
    line
}

fn note_summary(dir: &Path, summary: &Summary, args: &Args, global: &Global) {
    global.note(format_args!("encoding  kind      units      before       after  ratio"));
    for EncodingBytes { encoding, kind, units, original_bytes, stored_bytes } in &summary.parts {
        let ratio = *stored_bytes as f64 / (*original_bytes).max(1) as f64;
        let [before, after] = [*original_bytes, *stored_bytes].map(human_bytes);
        global.note(format_args!("{encoding:<9} {kind:<8} {units:>6} {before:>11} {after:>11}  {ratio:.3}"));
    }
    let proof = match (args.remove_original, args.verify) {
        (true, _) => "; every hash compared, model.ie.bin removed",
        (_, true) => "; every hash compared",
        _ => "",
    };
    let (dir, ratio) = (dir.display(), summary.ratio);
    let [before, after] = [summary.original_bytes, summary.stored_bytes].map(human_bytes);
    let files = FILE_NAMES.map(|name| name.trim_start_matches("model.dedup.")).join(", ");
    global.note(format_args!("{dir}: {after} in {JSON_NAME} and {files}, of {before} before: {ratio:.4}{proof}"));
}

fn measure(dir: &Path, args: &Args, global: &Global) -> Result<()> {
    let measured = dedup::measure(dir, args.codec, args.level)?;
    global.note("kind         before       after  ratio    encode    decode (one thread)");
    for Measured { kind, original_bytes, stored_bytes, ratio, encode_gb_per_s, decode_gb_per_s } in &measured {
        let [before, after] = [*original_bytes, *stored_bytes].map(human_bytes);
        global.note(format_args!(
            "{kind:<8} {before:>10} {after:>11}  {ratio:.4} {encode_gb_per_s:>6.2} GB/s {decode_gb_per_s:>4.2} GB/s"
        ));
    }
    if args.json { console::print_json(&json!({"kinds": measured})) } else { Ok(()) }
}

/// Verifies a deduplicated pack whose `model.ie.bin` was removed.
fn verify(dir: &Path, args: &Args, global: &Global) -> Result<()> {
    let bytes = dedup::verify(dir)?;
    let words = format!("{}: {} rebuilt, every hash compared", dir.display(), human_bytes(bytes));
    global.summarize(words, args.json, &json!({"verified_bytes": bytes, "verified": true}))
}

fn restore(dir: &Path, args: &Args, global: &Global) -> Result<()> {
    let out_dir = args.out_dir.as_deref().unwrap_or(dir);
    let bytes = dedup::restore(dir, out_dir)?;
    let words = format!("restored {} into {}, every hash compared", human_bytes(bytes), out_dir.display());
    global.summarize(words, args.json, &json!({"restored_bytes": bytes, "out_dir": out_dir, "verified": true}))
}

fn remove(dir: &Path, args: &Args, global: &Global) -> Result<()> {
    family::remove(dir)?;
    global.summarize(format_args!("{}: removed", dir.display()), args.json, &json!({"removed": dir}))
}
