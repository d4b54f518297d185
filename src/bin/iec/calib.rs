//! `iec calib`: which model reads which text, where the statistics go, and what is told of them.

use crate::global::Global;
use crate::source::SourceArgs;
use crate::table::Table;
use crate::units::{human_bytes, parse_size};
use iec::calibration::file::Description;
use iec::calibration::{Calibration, CalibrationWriter, Text};
use iec::convert::pack::{self, PackOptions};
use iec::error::{Context, Error, Result};
use iec::iebin::{Entry, IebinReader, Store};
use iec::job::RunOptions;
use iec::progress;
use iec::runtime::calibrate::{self, Gather, Windows};
use iec::runtime::text::{Tokenizer, tokenizer};
use iec::runtime::{Engine, EngineOptions};
use iec::scheme::Scheme;
use iec::sha256::{Digest, Sha256, hex};
use serde_json::json;
use std::path::{Path, PathBuf};
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
    #[arg(long, value_name = "STATS", num_args = 2.., conflicts_with_all = ["text", "hessian"])]
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
    /// Print a summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let started = Instant::now();
    let description = if args.merge.is_empty() { read_texts(&args, global)? } else { merge(&args)? };
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
    if args.json {
        let sites = stats.sites().count();
        println!(
            "{}",
            json!({"stats": args.out, "seal": stats.seal(), "tokens": tokens, "sites": sites,
            "bytes": bytes, "hessian": stats.sites().any(|site| site.products), "seconds": seconds,
            "description": description})
        );
    }
    Ok(())
}

/// Gathers from texts; from a checkpoint through a pack of it that lives as long as it is read.
fn read_texts(args: &Args, global: &Global) -> Result<Description> {
    let Some(dir) = &args.model_dir else {
        let parent = args.out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let temporary = tempfile::Builder::new().prefix(".iec-calib-").tempdir_in(parent).at(parent)?;
        let pack = temporary.path().join("pack");
        pack::pack(&PackOptions {
            hf_dir: args.source.required()?,
            config: args.source.config.clone(),
            out_dir: pack.clone(),
            manifest: None,
            calibration: None,
            dtype: None,
            tokenizer: args.tokenizer.clone(),
            overwrite: false,
            run: RunOptions::default(),
        })?;
        return read_with(&pack, args, global);
    };
    read_with(dir, args, global)
}

fn read_with(dir: &Path, args: &Args, global: &Global) -> Result<Description> {
    let reader = IebinReader::open(dir).map_err(Error::while_opening_model)?;
    let quantized = |entry: &&Entry| matches!(entry.store, Store::Tiled(spec) if spec.scheme != Scheme::Mxfp4);
    if let Some(entry) = reader.entries().iter().find(quantized) {
        return Err(Error::usage("is quantized; what this pack computes is not what the original model does")
            .tensor(&entry.name)
            .at(dir)
            .help("pack the checkpoint without --q4-map, or name it with --hf-dir"));
    }
    let tokenizer = args.tokenizer.clone().unwrap_or_else(|| dir.join(tokenizer::FILE_NAME));
    let tokenizer = Tokenizer::open(&tokenizer)?;
    let options =
        EngineOptions { threads: global.threads()?, prefill_chunk: args.window.max(1), ..EngineOptions::default() };
    let mut engine = Engine::open(&reader, &options)?;
    let window = args.window.min(engine.context());
    let mut texts = Vec::new();
    let mut tokens = Vec::new();
    for path in &args.text {
        let (text, ids) = tokenize(path, &tokenizer, args.max_tokens)?;
        tokens.push(ids);
        texts.push(text);
    }
    let windows = Windows::new(&tokens, &tokenizer.encode("")?, window)?;
    let description = Description {
        created_by: format!("iec {}", env!("CARGO_PKG_VERSION")),
        source: reader.description.source.clone(),
        precision: engine.precision().name().to_string(),
        window: window as u64,
        texts,
    };
    let gather = Gather { products: args.hessian, memory: args.memory };
    let sites = calibrate::sites(engine.config(), args.hessian).into_iter().map(|(_, shape)| shape).collect();
    let passes = calibrate::passes(engine.config(), gather).len();
    let mut writer = CalibrationWriter::create(&args.out, &description, sites)?;
    let bar = progress::items("calibrating", (windows.tokens() * passes) as u64);
    calibrate::gather(&mut engine, &windows, gather, &|n| bar.inc(n as u64), &mut |sums| writer.put(sums))?;
    bar.finish_and_clear();
    writer.finish()?;
    Ok(description)
}

/// Reads a text; its description and its tokens, without those that only begin a text.
fn tokenize(path: &Path, tokenizer: &Tokenizer, most: Option<usize>) -> Result<(Text, Vec<u32>)> {
    let bytes = std::fs::read(path).at(path)?;
    let text = std::str::from_utf8(&bytes).map_err(|e| Error::corrupt(format!("is no UTF-8 text: {e}")).at(path))?;
    let mut ids = tokenizer.encode_plain(text)?;
    ids.truncate(most.unwrap_or(usize::MAX));
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let sha256 = hex(Sha256::new_with_prefix(&bytes));
    Ok((Text { name, sha256, tokens: ids.len() as u64 }, ids))
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
