//! `iec calib`: which model reads which text, where the statistics go, and what is told of them.

mod work;

use crate::global::Global;
use crate::job::Keeping;
use crate::source::SourceArgs;
use iec::calibration::file::Description;
use iec::calibration::{Calibration, CalibrationWriter};
use iec::error::{Context, Error, Result};
use iec::progress;
use iec::report::table::Table;
use iec::units::{human_bytes, parse_size};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["hf_dir", "hf_repo", "model_dir", "merge"]))]
#[command(after_help = "Examples:
  iec calib --model-dir packs/tinyllama-bf16 --text calibration.txt --out tinyllama.calib
  iec calib --hf-dir models/tinyllama --text books.txt --text code.txt --hessian --out tinyllama.calib
  iec calib --merge a.calib b.calib --out both.calib
  iec ptq --hf-dir models/tinyllama --out q4_manifest.json --bits 4 --calib tinyllama.calib

The text should be like what the model will read, and is never used to judge the result: half of its windows choose among
methods that were fitted on the other half. 50 000 tokens are plenty.")]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// A pack with float weights; it computes in the types it holds
    #[arg(long, value_name = "DIR")]
    model_dir: Option<PathBuf>,
    /// Add statistics of the same model that were gathered from different texts
    #[arg(long, value_name = "STATS", num_args = 2.., conflicts_with_all = ["text", "hessian", "fresh", "checkpoint_every"])]
    merge: Vec<PathBuf>,
    /// A text to read; repeatable
    #[arg(long, value_name = "FILE", required_unless_present = "merge")]
    text: Vec<PathBuf>,
    /// The statistics to write
    #[arg(long, value_name = "STATS")]
    out: PathBuf,
    /// Gather the products of all pairs of input channels, too, which method gptq needs
    #[arg(long)]
    hessian: bool,
    /// Tokens of a window, each of which is read as a text of its own
    #[arg(long, value_name = "N", default_value_t = 512)]
    window: usize,
    /// Read at most this many tokens of each text
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// What the products gathered at once may take; if those of all layers take more, the texts are read several times
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    memory: u64,
    /// Tokenizer, instead of tokenizer.json beside the model
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    keeping: Keeping,
    /// Print a summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let started = Instant::now();
    let (description, known) =
        if args.merge.is_empty() { work::read_texts(&args, global)? } else { (merge(&args)?, 0) };
    let stats = Calibration::open(&args.out)?;
    global.note(table(&stats).to_string().trim_end());
    let tokens: u64 = description.texts.iter().map(|text| text.tokens).sum();
    let (bytes, seconds) = (std::fs::metadata(&args.out).at(&args.out)?.len(), started.elapsed().as_secs_f64());
    global.note(format_args!(
        "wrote {}: {tokens} tokens, {}, {seconds:.1} s, {:.0} tokens/s",
        args.out.display(),
        human_bytes(bytes),
        tokens as f64 / seconds
    ));
    if known > 0 {
        global.note(format_args!("{known} of the tokens to read were read by a run that was interrupted"));
    }
    if args.json {
        let sites = stats.sites().count();
        println!(
            "{}",
            json!({"stats": args.out, "seal": stats.seal(), "tokens": tokens, "sites": sites,
            "bytes": bytes, "hessian": stats.sites().any(|site| site.products), "seconds": seconds, "taken_over_tokens": known,
            "description": description})
        );
    }
    Ok(())
}

/// Adds files.
fn merge(args: &Args) -> Result<Description> {
    let parts = args.merge.iter().map(|path| Calibration::open(path)).collect::<Result<Vec<_>>>()?;
    let (first, others) = parts.split_first().expect("two at least");
    let mut description = first.description().clone();
    for other in others {
        let found = other.description();
        if !other.sites().eq(first.sites()) {
            return Err(Error::usage(format!("its sites are not those of {}", first.path().display()))
                .at(other.path())
                .help("merge statistics of one model, all of them with --hessian or all without"));
        }
        if (&found.source, &found.precision, found.window)
            != (&description.source, &description.precision, description.window)
        {
            return Err(Error::usage(format!(
                "was made of another model, precision or window than {}",
                first.path().display()
            ))
            .at(other.path()));
        }
        if let Some(twice) = found.texts.iter().find(|text| description.texts.iter().any(|t| t.sha256 == text.sha256)) {
            return Err(Error::usage(format!("the text `{}` was read already", twice.name)).at(other.path()));
        }
        description.texts.extend(found.texts.iter().cloned());
    }
    let mut writer = CalibrationWriter::create(&args.out, &description, first.sites().cloned().collect())?;
    let bar = progress::items("merging", first.sites().count() as u64);
    for site in first.sites() {
        let mut sums = parts.iter().filter_map(|part| part.sums(&site.name));
        let mut total = sums.next().expect("its own site");
        sums.for_each(|sums| total.plus(&sums));
        writer.put(&total)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    writer.finish()?;
    Ok(description)
}

/// What was seen, by kind of site.
fn table(stats: &Calibration) -> Table {
    let mut table = Table::new(&["inputs of", ">sites", ">channels", ">rows each", ">never routed"]);
    let mut kinds: Vec<(String, usize, usize, f64, usize)> = Vec::new();
    for site in stats.sites() {
        let kind = site.name.rsplit('.').next().unwrap_or_default().to_string();
        let counts = stats.counts(&site.name);
        let (rows, unseen) =
            (counts.iter().sum::<f64>() / counts.len() as f64, counts.iter().filter(|n| **n == 0.0).count());
        match kinds.iter_mut().find(|(name, ..)| *name == kind) {
            Some((_, sites, _, _, never)) => (*sites, *never) = (*sites + 1, *never + unseen),
            None => kinds.push((kind, 1, site.cols, rows, unseen)),
        }
    }
    for (kind, sites, cols, rows, never) in kinds {
        table.row([kind, sites.to_string(), cols.to_string(), format!("{rows:.0}"), never.to_string()]);
    }
    table
}
