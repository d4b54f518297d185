//! `iec calib`: collects statistics of the inputs of a model's matrices, or merges such statistics.

use crate::console;
use crate::global::Global;
use crate::job::JobArgs;
use crate::source::SourceArgs;
use iec::calibration::file::Description;
use iec::calibration::shards::SHARDS;
use iec::calibration::{Calibration, merge};
use iec::error::{Context, Error, Result};
use iec::job::{RecordedParts, check_target};
use iec::output::{AtomicFile, Inputs, Rules, Target};
use iec::report::calibration::table;
use iec::trial::calibrate::{Calibrated, CalibrationOptions, calibrate};
use iec::units::{human_bytes, parse_size};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Arguments of `iec calib`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "iec calib [OPTIONS] <MODEL> --text <FILE> --out <STATS>")]
#[command(
    group = clap::ArgGroup::new("what").required(true).args(["checkpoint", "hf_dir", "hf_repo", "model_dir", "merge"])
)]
#[command(after_help = "Examples:
  iec calib --model-dir packs/tinyllama-bf16 --text calibration.txt --out tinyllama.calib
  iec calib models/tinyllama --text books.txt --text code.txt --hessian --out tinyllama.calib
  iec calib model.gguf --text calibration.txt --out model.calib
  iec calib --merge a.calib b.calib --out both.calib
  iec calib packs/tinyllama-bf16 --text calibration.txt --out tinyllama.calib --part 1/4
  iec merge --out tinyllama.calib
  iec ptq models/tinyllama --out q4_manifest.json --bits 4 --calib tinyllama.calib
  iec calib models/tinyllama --text books.txt --quantized q4_manifest.json --out tinyllama-q4.calib

The text should be like what the model will read. Keep another text for --gate-text: calibration text is never used to
judge the result. ptq fits each method on half of the windows and compares the methods on the other half. 50 000 tokens
are enough. --part divides the work among up to 16 machines; --memory and --threads may differ between them.")]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// A pack, as an option instead of the first argument; calibration computes in the types of its weights
    #[arg(long, value_name = "DIR")]
    model_dir: Option<PathBuf>,
    /// Merge statistics of the same model that were collected from different texts
    #[arg(
        long,
        value_name = "STATS",
        num_args = 2..,
        conflicts_with_all = ["text", "hessian", "part", "parts", "fresh", "checkpoint_every"]
    )]
    merge: Vec<PathBuf>,
    /// Calibration text; repeatable
    #[arg(long, value_name = "FILE", required_unless_present = "merge")]
    text: Vec<PathBuf>,
    /// File of the statistics; `-` is stdout
    #[arg(long, value_name = "STATS")]
    out: PathBuf,
    /// Replace statistics that are already there
    #[arg(long)]
    overwrite: bool,
    /// Collect the products of all pairs of input channels, too, which method gptq needs
    #[arg(long)]
    hessian: bool,
    /// Collect the statistics that each matrix sees after all matrices before it were quantized as this manifest of
    /// `iec ptq` says, and corrections that undo the errors of those. Only `iec pack` and `iec q4` read the result,
    /// together with this manifest
    #[arg(long, value_name = "MANIFEST", conflicts_with_all = ["merge", "part", "parts"])]
    quantized: Option<PathBuf>,
    /// Tokens per window; the model reads each window as a separate text
    #[arg(long, value_name = "N", default_value_t = 512)]
    window: usize,
    /// Read at most this many tokens of each text
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Memory for the products that are collected at once; if those of all layers take more, the texts are read several
    /// times
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    memory: u64,
    /// Tokenizer to use instead of the model's tokenizer.json
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Print a summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let read = args.text.iter().chain(&args.merge).chain(&args.tokenizer).chain(&args.quantized);
    let read = read.chain(&args.source.config);
    let inputs = args.source.add_to(Inputs::default().files(read), args.model_dir.as_ref())?;
    let target = check_target(&args.out, Rules { inputs: &inputs, overwrite: args.overwrite, stdout: !args.json })?;
    let report = StatisticsReport { started: Instant::now(), out: &args.out, json: args.json };
    let path = target.work_path();
    if args.merge.is_empty() {
        return report.collect(&args.options(&path, global)?, &target, global);
    }
    let description = merge(&args.merge, AtomicFile::create(&path)?.overwrite(args.overwrite))?;
    report.of_file(&description, 0, &target, global)
}

/// Merges the parts of a calibration whose output is in `out_dir`.
pub fn merge_parts(parts: &RecordedParts, out_dir: &Path, json: bool, global: &Global) -> Result<()> {
    let options = CalibrationOptions::of_parts(parts, out_dir)?;
    let overwrite = options.overwrite || parts.has_begun_commit();
    let options = CalibrationOptions { threads: global.threads(), overwrite, ..options };
    let inputs = Inputs::default().files(options.files());
    let rules = Rules { inputs: &inputs, overwrite: options.overwrite, stdout: false };
    let (out, target) = (&options.out, check_target(&options.out, rules)?);
    let options = CalibrationOptions { out: target.work_path(), ..options.clone() };
    StatisticsReport { started: Instant::now(), out, json }.collect(&options, &target, global)
}

/// Report of the command.
struct StatisticsReport<'a> {
    started: Instant,
    /// Output as the user named it.
    out: &'a Path,
    json: bool,
}

impl StatisticsReport<'_> {
    /// Collects or merges statistics and reports them.
    fn collect(&self, options: &CalibrationOptions, target: &Target, global: &Global) -> Result<()> {
        if options.run.share.part().is_some() && !target.is_file() {
            return Err(Error::usage("--part: found a stream as the output, expected a file")
                .at(self.out)
                .help("name a file with --out"));
        }
        let done = calibrate(options)?;
        match &done.part {
            Some(part) => self.of_part(&part.to_string(), &done, options.hessian, global),
            None => self.of_file(&done.description, done.known, target, global),
        }
    }

    fn of_part(&self, part: &str, done: &Calibrated, hessian: bool, global: &Global) -> Result<()> {
        let Calibrated { shards, tokens, known, part_bytes: bytes, .. } = done;
        let (seconds, size) = (self.started.elapsed().as_secs_f64(), human_bytes(*bytes));
        let rate = *tokens as f64 / seconds;
        global.note(format_args!(
            "collected part {part} of {}: {shards} of {SHARDS} shards, {tokens} tokens, {size}, {seconds:.1} s, \
             {rate:.0} tokens/s",
            self.out.display()
        ));
        note_known(*known, global);
        if !self.json {
            return Ok(());
        }
        console::print_json(&json!({"stats": self.out, "part": part, "shards": shards, "tokens": tokens,
            "bytes": bytes, "hessian": hessian, "wall_time_s": seconds, "taken_over_tokens": known,
            "description": done.description}))
    }

    fn of_file(&self, description: &Description, known: u64, target: &Target, global: &Global) -> Result<()> {
        let path = target.work_path();
        let stats = Calibration::open(&path)?;
        global.note(table(&stats).to_string().trim_end());
        let tokens: u64 = description.texts.iter().map(|text| text.tokens).sum();
        let (bytes, seconds) = (std::fs::metadata(&path).at(&path)?.len(), self.started.elapsed().as_secs_f64());
        global.note(format_args!(
            "wrote {}: {tokens} tokens, {}, {seconds:.1} s, {:.0} tokens/s",
            self.out.display(),
            human_bytes(bytes),
            tokens as f64 / seconds
        ));
        target.deliver()?;
        note_known(known, global);
        if !self.json {
            return Ok(());
        }
        let (seal, sites) = (stats.seal(), stats.sites().count());
        console::print_json(&json!({"stats": self.out, "seal": seal, "tokens": tokens, "sites": sites, "bytes": bytes,
            "hessian": stats.sites().any(|site| site.products), "wall_time_s": seconds, "taken_over_tokens": known,
            "description": description}))
    }
}

fn note_known(tokens: u64, global: &Global) {
    if tokens > 0 {
        global.note(format_args!("{tokens} tokens were already read by the interrupted run or by parts"));
    }
}

impl Args {
    fn options(&self, out: &Path, global: &Global) -> Result<CalibrationOptions> {
        Ok(CalibrationOptions {
            model: self.source.model(self.model_dir.as_ref())?,
            tokenizer: self.tokenizer.clone(),
            texts: self.text.clone(),
            out: out.to_path_buf(),
            overwrite: self.overwrite,
            hessian: self.hessian,
            quantized: self.quantized.clone(),
            window: self.window,
            max_tokens: self.max_tokens,
            memory: self.memory,
            threads: global.threads(),
            run: self.job.options()?,
        })
    }
}
