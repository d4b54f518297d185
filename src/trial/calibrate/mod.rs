//! Calibration: runs a model on texts and collects statistics of the inputs of its matrices, as a job that can
//! be interrupted and resumed.
//!
//! Finished passes are stored in the job's directory and reused if they have the hash that the journal records.
//! Within a pass, the sums are saved periodically as a separate statistics file, unless they include the products of
//! input channels, which are too large for this.

use super::ModelSource;
use crate::calibration::file::{Description, SiteShape};
use crate::calibration::{Calibration, CalibrationText, CalibrationWriter, Sums};
use crate::convert::pack::{self, PackOptions};
use crate::convert::source::gguf::parts_of;
use crate::convert::source::kind::SourceKind;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::generate::text::{Tokenizer, tokenizer};
use crate::iebin::{BIN_NAME, Entry, IebinReader, JSON_NAME, Store, tensor_map};
use crate::job::{Fingerprint, Job, RunOptions, this_version};
use crate::output::AtomicFile;
use crate::progress;
use crate::runtime::calibrate::{self, Gather, Gathering, Windows};
use crate::runtime::{Engine, EngineOptions, Precision};
use crate::scheme::QuantSpec;
use crate::sha256::{Digest, Sha256, hex};
use std::fs::File;
use std::path::{Path, PathBuf};

const COMMAND: &str = "calib";
/// Least number of bytes of inputs that are summed between two saves, as a multiple of the bytes that a save writes.
const SAVED_SHARE: u64 = 256;

/// Options of a calibration.
#[derive(Debug, Clone)]
pub struct CalibrationOptions {
    /// Model to be calibrated.
    pub model: ModelSource,
    /// Path of a tokenizer that replaces the model's tokenizer.json.
    pub tokenizer: Option<PathBuf>,
    /// Calibration texts.
    pub texts: Vec<PathBuf>,
    /// Path of the statistics to write.
    pub out: PathBuf,
    /// True when an existing file of statistics may be replaced.
    pub overwrite: bool,
    /// True to collect the products of all pairs of input channels, too (method gptq).
    pub hessian: bool,
    /// Tokens per window.
    pub window: usize,
    /// Largest number of tokens of each text.
    pub max_tokens: Option<usize>,
    /// Largest memory for the products collected in one pass, in bytes.
    pub memory: u64,
    /// Number of threads of the engine.
    pub threads: usize,
    /// Options for saving and resuming the job.
    pub run: RunOptions,
}

/// Collects the statistics and writes them. Returns their description, and the number of tokens that an interrupted
/// run had processed.
///
/// # Errors
/// A model or text cannot be read, or the statistics cannot be written.
pub fn calibrate(options: &CalibrationOptions) -> Result<(Description, u64)> {
    let job = Job::for_file(COMMAND, &options.out, &options.run, |fingerprint| decide(options, fingerprint))?;
    let done = read_all(options, &job);
    job.conclude(done)
}

/// Adds all inputs that the statistics depend on to the fingerprint.
fn decide(options: &CalibrationOptions, fingerprint: &mut Fingerprint) -> Result<()> {
    let CalibrationOptions { hessian, window, max_tokens, memory, .. } = options;
    fingerprint.field("options", format!("{hessian} {window} {max_tokens:?} {memory}"));
    let mut files = options.texts.clone();
    let ModelSource { path, config } = &options.model;
    match SourceKind::of(path)? {
        SourceKind::Pack(json) => files.extend([json.with_file_name(BIN_NAME), json]),
        SourceKind::Gguf(file) => files.extend(parts_of(&file)),
        SourceKind::Checkpoint(path) => files.extend(files_of(&path)?),
    }
    files.extend(options.tokenizer.iter().chain(config).cloned());
    files.iter().try_for_each(|file| fingerprint.file(file))
}

/// Returns the files of a checkpoint directory, or `path` itself if it is a file.
fn files_of(path: &Path) -> Result<Vec<PathBuf>> {
    if !files::is_dir(path)? {
        return Ok(vec![path.to_path_buf()]);
    }
    let entries = std::fs::read_dir(path).at(path)?.collect::<std::io::Result<Vec<_>>>().at(path)?;
    let mut files: Vec<PathBuf> =
        entries.into_iter().map(|entry| entry.path()).filter(|path| matches!(files::is_file(path), Ok(true))).collect();
    files.sort();
    Ok(files)
}

fn read_all(options: &CalibrationOptions, job: &Job) -> Result<(Description, u64)> {
    let reader = match SourceKind::of(&options.model.path)? {
        SourceKind::Pack(_) if options.model.config.is_some() => {
            let found = "found --config with a pack, which has its own configuration";
            return Err(Error::usage(found).at(&options.model.path).help("leave --config out"));
        }
        SourceKind::Pack(json) => {
            let reader = IebinReader::open_files(&json, None).map_err(Error::while_opening_model)?;
            // Statistics of damaged weights would be recorded as those of the source.
            tensor_map::refuse_damage(&reader)?;
            reader
        }
        SourceKind::Gguf(_) | SourceKind::Checkpoint(_) => {
            IebinReader::open(&unchanged_pack(options, job)?).map_err(Error::while_opening_model)?
        }
    };
    let precision = wide_precision(&reader)?;
    let tokenizer = options.tokenizer.clone().unwrap_or_else(|| reader.path(tokenizer::FILE_NAME));
    let tokenizer = Tokenizer::open(&tokenizer)?;
    let engine_options = EngineOptions {
        threads: options.threads,
        prefill_chunk: options.window.max(1),
        precision: Some(precision),
        ..EngineOptions::default()
    };
    let engine = Engine::open(&reader, &engine_options)?;
    let window = options.window.min(engine.context());
    let read = |path: &PathBuf| tokenize(path, &tokenizer, options.max_tokens);
    let (texts, tokens) = options.texts.iter().map(read).collect::<Result<Vec<_>>>()?.into_iter().unzip();
    let tokens: Vec<Vec<u32>> = tokens;
    let windows = Windows::new(&tokens, &tokenizer.encode("")?, window)?;
    let description = Description {
        created_by: this_version(),
        source: reader.description.source.clone(),
        precision: engine.precision().name().to_string(),
        window: window as u64,
        texts,
    };
    let gather = Gather { products: options.hessian, memory: options.memory };
    let save_every = options.run.pace.bytes;
    let known = Work { job, engine, windows, description: &description, gather, save_every }.run(options)?;
    Ok((description, known))
}

/// Packs the checkpoint or the GGUF file as it is, unless an interrupted run has done so.
fn unchanged_pack(options: &CalibrationOptions, job: &Job) -> Result<PathBuf> {
    let out_dir = job.dir().join("pack");
    if !files::exists(&out_dir.join(JSON_NAME))? {
        let ModelSource { path: hf_dir, config } = options.model.clone();
        pack::pack(&PackOptions {
            hf_dir,
            config,
            out_dir: out_dir.clone(),
            tokenizer: options.tokenizer.clone(),
            ..PackOptions::default()
        })?;
    }
    Ok(out_dir)
}

/// Returns the precision that computes most accurately with the weights of a pack: activations are not rounded to 8
/// bits. Notes that quantized weights change the inputs of the matrices behind them, and so the statistics.
fn wide_precision(reader: &IebinReader) -> Result<Precision> {
    let is_quantized = |entry: &&Entry| matches!(entry.store, Store::Tiled(spec) if spec != QuantSpec::MXFP4);
    let quantized = reader.entries().iter().filter(is_quantized).count();
    if quantized > 0 {
        progress::detail(0, || {
            format!("note: {quantized} tensors are quantized; these are statistics of the quantized model")
        });
    }
    Ok(match Precision::resolve(None, reader)? {
        Precision::Int4 => Precision::Int4w,
        Precision::Int8 => Precision::Int8w,
        other => other,
    })
}

/// Reads a text; returns its description and its tokens without BOS.
fn tokenize(path: &Path, tokenizer: &Tokenizer, most: Option<usize>) -> Result<(CalibrationText, Vec<u32>)> {
    let text = files::read_to_string(path)?;
    let mut ids = tokenizer.encode_plain(&text)?;
    ids.truncate(most.unwrap_or(usize::MAX));
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let sha256 = hex(Sha256::new_with_prefix(&text));
    Ok((CalibrationText { name, sha256, tokens: ids.len() as u64 }, ids))
}

/// Calibration passes over the texts.
struct Work<'a> {
    job: &'a Job,
    engine: Engine,
    windows: Windows,
    description: &'a Description,
    gather: Gather,
    /// Smallest number of bytes of inputs between two saves of the sums.
    save_every: u64,
}

impl Work<'_> {
    /// Writes the statistics to `options.out`; returns the number of tokens that an earlier run had processed.
    fn run(mut self, options: &CalibrationOptions) -> Result<u64> {
        let sites = calibrate::sites(self.engine.config(), self.gather.products).into_iter().map(|(_, shape)| shape);
        let path = self.job.dir().join("statistics");
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).at(&path)?;
        let data = file.try_clone().at(&path)?;
        let file = AtomicFile::resumable(file, &path, &options.out)?.overwrite(options.overwrite);
        let mut writer = CalibrationWriter::begin(file, self.description, sites.collect())?;
        let known = self.job.keep(&[&data], || self.passes(&mut writer))?;
        self.job.commit_begins()?;
        writer.finish()?;
        Ok(known)
    }

    fn passes(&mut self, writer: &mut CalibrationWriter) -> Result<u64> {
        let passes = calibrate::passes(self.engine.config(), self.gather);
        let (tokens, mut known) = (self.windows.tokens() as u64, 0);
        let bar = progress::items("calibrating", tokens * passes.len() as u64);
        for (number, layers) in passes.into_iter().enumerate() {
            let task = format!("pass {number}");
            let mut gathering = Gathering::new(self.engine.config(), self.gather, layers);
            if let Some(found) = self.job.found::<String>(&task).next()
                && writer.take_over(gathering.sites().len(), &found.result)?
            {
                known += tokens;
                bar.skip(tokens);
                continue;
            }
            let before = self.restore(&mut gathering, number);
            known += before;
            bar.skip(before);
            self.read(&mut gathering, number, &bar)?;
            gathering.sums().try_for_each(|sums| writer.put(sums))?;
            let bytes = gathering.sites().map(SiteShape::nbytes).sum();
            self.job.record(&task, &writer.hash(), bytes)?;
        }
        Ok(known)
    }

    /// Processes the remaining windows of a pass, and saves the sums periodically.
    fn read(&mut self, gathering: &mut Gathering, pass: usize, bar: &progress::ProgressBar) -> Result<()> {
        let size: u64 = gathering.sites().map(SiteShape::nbytes).sum();
        // A token activates only a few experts of a mixture; the estimate only needs to keep the cost of saving
        // small.
        let each: u64 = gathering.sites().map(|site| 4 * site.cols as u64).sum();
        let (every, mut summed) = (self.save_every.max(SAVED_SHARE.saturating_mul(size)), 0);
        while let Some(tokens) = gathering.read(&mut self.engine, &self.windows)? {
            bar.inc(tokens as u64);
            summed += each * tokens as u64;
            if summed >= every && !self.gather.products {
                self.save(gathering, pass)?;
                summed = 0;
            }
        }
        Ok(())
    }

    /// Saves the sums in a file whose name includes the number of processed windows, and removes the sums saved
    /// before.
    fn save(&self, gathering: &Gathering, pass: usize) -> Result<()> {
        let before = self.saved(pass);
        let sites: Vec<SiteShape> = gathering.sites().cloned().collect();
        let bytes = sites.iter().map(SiteShape::nbytes).sum();
        let path = self.job.dir().join(format!("{}{}", saved_stem(pass), gathering.windows()));
        let mut writer = CalibrationWriter::create(&path, self.description, sites)?;
        gathering.sums().try_for_each(|sums| writer.put(sums))?;
        writer.finish()?;
        for (_, older) in before {
            std::fs::remove_file(&older).at(&older)?;
        }
        // A record in the journal keeps the job's directory when the run is interrupted; the sums are found by their
        // file name.
        self.job.record(&format!("windows of pass {pass}"), &gathering.windows(), bytes)
    }

    /// Returns the saved sums of a pass with the number of windows they cover, the largest number first.
    fn saved(&self, pass: usize) -> Vec<(usize, PathBuf)> {
        let entries = std::fs::read_dir(self.job.dir()).into_iter().flatten().flatten();
        let number = |entry: std::fs::DirEntry| {
            let name = entry.file_name();
            Some((name.to_str()?.strip_prefix(&saved_stem(pass))?.parse().ok()?, entry.path()))
        };
        let mut saved: Vec<(usize, PathBuf)> = entries.filter_map(number).collect();
        saved.sort_by(|a, b| b.cmp(a));
        saved
    }

    /// Restores saved sums; returns the number of tokens they cover.
    fn restore(&self, gathering: &mut Gathering, pass: usize) -> u64 {
        for (windows, path) in self.saved(pass) {
            // Incomplete files fail the check of the hash at their end (the seal) and are skipped.
            let Ok(saved) = Calibration::open(&path) else { continue };
            if saved.description() == self.description && saved.sites().eq(gathering.sites()) {
                let sums: Vec<Sums> = gathering.sites().filter_map(|site| saved.sums(&site.name)).collect();
                gathering.go_on(windows, sums);
                return self.windows.tokens_of(windows) as u64;
            }
        }
        0
    }
}

fn saved_stem(pass: usize) -> String {
    format!("pass-{pass}.windows-")
}
