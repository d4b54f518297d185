//! Calibration: a float model reads texts, and statistics of the inputs of its matrices are collected, as a job that
//! can be interrupted and continued.
//!
//! Finished passes of the statistics lie in the job's directory and are taken over when they have the hash that the
//! journal records. Within a pass the sums are saved now and then as statistics of their own, where they are small:
//! without products.

use super::ModelSource;
use crate::calibration::file::{Description, SiteShape};
use crate::calibration::{Calibration, CalibrationWriter, Sums, Text};
use crate::convert::pack::{self, PackOptions};
use crate::error::{Context, Error, Result};
use crate::iebin::{BIN_NAME, Entry, IebinReader, JSON_NAME, Store};
use crate::job::{Fingerprint, Job, RunOptions, this_version};
use crate::output::AtomicFile;
use crate::progress;
use crate::runtime::calibrate::{self, Gather, Gathering, Windows};
use crate::runtime::text::{Tokenizer, tokenizer};
use crate::runtime::{Engine, EngineOptions};
use crate::sha256::{Digest, Sha256, hex};
use std::fs::File;
use std::path::{Path, PathBuf};

const COMMAND: &str = "calib";
/// Inputs that are summed between two saves, in multiples of what is saved.
const SAVED_SHARE: u64 = 256;

/// What is collected, from which model and texts, and where it goes.
#[derive(Debug, Clone)]
pub struct CalibrationOptions {
    /// The model.
    pub model: ModelSource,
    /// Replaces the tokenizer.json of the model.
    pub tokenizer: Option<PathBuf>,
    /// The texts.
    pub texts: Vec<PathBuf>,
    /// The statistics to write.
    pub out: PathBuf,
    /// Collect the products of all pairs of input channels, too (method gptq).
    pub hessian: bool,
    /// Tokens of a window.
    pub window: usize,
    /// Read at most this many tokens of each text.
    pub max_tokens: Option<usize>,
    /// Bytes that the products collected in one pass may take.
    pub memory: u64,
    /// Threads of the engine.
    pub threads: usize,
    /// How the job keeps what is finished.
    pub run: RunOptions,
}

/// Collects the statistics and writes them. Returns their description, and the number of tokens that an interrupted run
/// had read.
///
/// # Errors
/// A model or text cannot be read, the model is quantized, or the statistics cannot be written.
pub fn calibrate(options: &CalibrationOptions) -> Result<(Description, u64)> {
    let job = Job::for_file(COMMAND, &options.out, &options.run, |fingerprint| decide(options, fingerprint))?;
    let done = read_all(options, &job);
    job.conclude(done)
}

/// Adds everything that the statistics depend on.
fn decide(options: &CalibrationOptions, fingerprint: &mut Fingerprint) -> Result<()> {
    let CalibrationOptions { hessian, window, max_tokens, memory, .. } = options;
    fingerprint.field("options", format!("{hessian} {window} {max_tokens:?} {memory}"));
    let mut files = options.texts.clone();
    let config = match &options.model {
        ModelSource::Pack(dir) => {
            files.extend([JSON_NAME, BIN_NAME].map(|name| dir.join(name)));
            None
        }
        ModelSource::Checkpoint { hf_dir, config } => {
            files.extend(files_of(hf_dir)?);
            config.clone()
        }
    };
    files.extend(options.tokenizer.clone().into_iter().chain(config));
    files.iter().try_for_each(|file| fingerprint.file(file))
}

/// The files of a checkpoint.
fn files_of(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let entries = std::fs::read_dir(path).at(path)?.collect::<std::io::Result<Vec<_>>>().at(path)?;
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    Ok(files)
}

fn read_all(options: &CalibrationOptions, job: &Job) -> Result<(Description, u64)> {
    let dir = match &options.model {
        ModelSource::Pack(dir) => dir.clone(),
        ModelSource::Checkpoint { hf_dir, config } => float_pack(hf_dir, config.as_ref(), options, job)?,
    };
    let reader = IebinReader::open(&dir).map_err(Error::while_opening_model)?;
    refuse_quantized(&reader, &dir)?;
    let tokenizer = options.tokenizer.clone().unwrap_or_else(|| dir.join(tokenizer::FILE_NAME));
    let tokenizer = Tokenizer::open(&tokenizer)?;
    let engine_options =
        EngineOptions { threads: options.threads, prefill_chunk: options.window.max(1), ..EngineOptions::default() };
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
    let known = Work { job, engine, windows, description: &description, gather, save_every }.run(&options.out)?;
    Ok((description, known))
}

/// Packs the checkpoint as it is, unless an interrupted run has done so.
fn float_pack(hf_dir: &Path, config: Option<&PathBuf>, options: &CalibrationOptions, job: &Job) -> Result<PathBuf> {
    let out_dir = job.dir().join("pack");
    if !out_dir.join(JSON_NAME).exists() {
        pack::pack(&PackOptions {
            hf_dir: hf_dir.to_path_buf(),
            config: config.cloned(),
            out_dir: out_dir.clone(),
            tokenizer: options.tokenizer.clone(),
            ..PackOptions::default()
        })?;
    }
    Ok(out_dir)
}

fn refuse_quantized(reader: &IebinReader, dir: &Path) -> Result<()> {
    let quantized = |entry: &&Entry| matches!(entry.store, Store::Tiled(spec) if !spec.scheme.info().is_source_format);
    match reader.entries().iter().find(quantized) {
        Some(entry) => Err(Error::usage("is quantized; what this pack computes is not what the original model does")
            .tensor(&entry.name)
            .at(dir)
            .help("pack the checkpoint without --q4-map, or name it with --hf-dir")),
        None => Ok(()),
    }
}

/// Reads a text: its description and its tokens, without BOS.
fn tokenize(path: &Path, tokenizer: &Tokenizer, most: Option<usize>) -> Result<(Text, Vec<u32>)> {
    let bytes = std::fs::read(path).at(path)?;
    let text = std::str::from_utf8(&bytes).map_err(|e| Error::corrupt(format!("is no UTF-8 text: {e}")).at(path))?;
    let mut ids = tokenizer.encode_plain(text)?;
    ids.truncate(most.unwrap_or(usize::MAX));
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let sha256 = hex(Sha256::new_with_prefix(&bytes));
    Ok((Text { name, sha256, tokens: ids.len() as u64 }, ids))
}

/// The passes over the texts.
struct Work<'a> {
    job: &'a Job,
    engine: Engine,
    windows: Windows,
    description: &'a Description,
    gather: Gather,
    /// Bytes of inputs after which sums are saved, at least.
    save_every: u64,
}

impl Work<'_> {
    /// Writes the statistics to `out`; returns how many tokens an earlier run had read.
    fn run(mut self, out: &Path) -> Result<u64> {
        let sites = calibrate::sites(self.engine.config(), self.gather.products).into_iter().map(|(_, shape)| shape);
        let path = self.job.dir().join("statistics");
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).at(&path)?;
        let data = file.try_clone().at(&path)?;
        let file = AtomicFile::resumable(file, &path, out)?;
        let mut writer = CalibrationWriter::begin(file, self.description, sites.collect())?;
        let known = self.job.keep(&[&data], || self.passes(&mut writer))?;
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
                bar.inc(tokens);
                continue;
            }
            let before = self.restore(&mut gathering, number);
            known += before;
            bar.inc(before);
            self.read(&mut gathering, number, &bar)?;
            gathering.sums().try_for_each(|sums| writer.put(sums))?;
            let bytes = gathering.sites().map(SiteShape::nbytes).sum();
            self.job.record(&task, &writer.hash(), bytes)?;
        }
        Ok(known)
    }

    /// Reads what is left of a pass, and saves the sums now and then.
    fn read(&mut self, gathering: &mut Gathering, pass: usize, bar: &progress::ProgressBar) -> Result<()> {
        let size: u64 = gathering.sites().map(SiteShape::nbytes).sum();
        // A token meets few experts of a mixture; it is enough that saving is a small part of the work.
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

    /// Saves the sums under a name that holds the number of windows read, and removes the sums saved before.
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
        // An entry keeps the job's directory when the run is interrupted; the sums are found by their name.
        self.job.record(&format!("windows of pass {pass}"), &gathering.windows(), bytes)
    }

    /// The saved sums of a pass with the number of windows they cover; the largest number first.
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

    /// Takes over saved sums; returns the number of tokens they cover.
    fn restore(&self, gathering: &mut Gathering, pass: usize) -> u64 {
        for (windows, path) in self.saved(pass) {
            // The seal says whether the file is whole; one that is not is passed over.
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
