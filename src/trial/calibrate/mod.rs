//! Calibration: runs a model on texts and collects statistics of the inputs of its matrices, as a job that can
//! be interrupted and resumed, or divided into parts.
//!
//! The unit that is divided and stored is the sums of one shard of the windows ([`crate::calibration::shards`]) for one
//! layer. `store` reads and writes them, and `work` computes them and adds them up.

mod quantized;
mod store;
mod work;

use super::ModelSource;
use crate::calibration::CalibrationText;
use crate::calibration::file::Description;
use crate::calibration::shards::SHARDS;
use crate::convert::pack::{self, PackOptions};
use crate::convert::source::gguf::parts_of;
use crate::convert::source::kind::SourceKind;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::generate::text::{Tokenizer, tokenizer};
use crate::iebin::{BIN_NAME, Entry, IebinReader, JSON_NAME, Store, tensor_map};
use crate::job::{Command, Fingerprint, Job, Part, RecordedParts, RunOptions, this_version};
use crate::manifest::Manifest;
use crate::output::{DirLock, make_absolute};
use crate::progress;
use crate::runtime::calibrate::Windows;
use crate::runtime::{Engine, EngineOptions, Precision};
use crate::scheme::QuantSpec;
use crate::sha256::{Digest, Sha256, hex};
use quantized::Along;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use work::Work;

/// Name of the command in fingerprints, and in `command.json` of unfinished parts, from which `iec merge` repeats it.
pub const COMMAND: &str = "calib";

/// Options of a calibration.
#[derive(Debug, Clone, Serialize, Deserialize)]
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
    /// Path of a manifest that quantizes the matrices before each site.
    pub quantized: Option<PathBuf>,
    /// Largest memory for the products collected in one pass, in bytes.
    pub memory: u64,
    /// Number of threads of the engine.
    pub threads: usize,
    /// Options for saving and resuming the job, and its parts.
    #[serde(skip)]
    pub run: RunOptions,
}

impl CalibrationOptions {
    /// Returns the options that the parts of a calibration have recorded, for a run that merges them into a file in
    /// `out_dir`.
    ///
    /// # Errors
    /// The recorded options cannot be read.
    pub fn of_parts(parts: &RecordedParts, out_dir: &Path) -> Result<CalibrationOptions> {
        let options: CalibrationOptions = parts.options()?;
        let out = out_dir.join(parts.out_name().unwrap_or_default());
        Ok(CalibrationOptions { out, run: parts.run(), ..options })
    }

    /// Returns the files that are read in addition to the model.
    pub fn files(&self) -> impl Iterator<Item = &PathBuf> {
        self.texts.iter().chain(&self.tokenizer).chain(&self.model.config).chain(&self.quantized)
    }
}

/// Report of a finished calibration or of a part of one.
#[derive(Debug, Clone)]
pub struct Calibrated {
    /// Origin of the sums; the texts are the whole texts, also for a part.
    pub description: Description,
    /// Part that was collected; `None` for the whole.
    pub part: Option<Part>,
    /// Number of shards of this run.
    pub shards: usize,
    /// Number of tokens of this run; each is counted once per pass over the texts.
    pub tokens: u64,
    /// Number of these tokens that an interrupted run or parts had processed.
    pub known: u64,
    /// Number of bytes that a part stores until the parts are merged; 0 for the whole.
    pub part_bytes: u64,
}

/// Collects the statistics and writes them, collects one part of them, or merges the parts.
///
/// # Errors
/// A model or text cannot be read, the statistics cannot be written, or parts are missing or damaged.
pub fn calibrate(options: &CalibrationOptions) -> Result<Calibrated> {
    let mut repeatable = options.clone();
    let CalibrationOptions { model, tokenizer, texts, quantized, .. } = &mut repeatable;
    let optional = [tokenizer.as_mut(), model.config.as_mut(), quantized.as_mut()];
    make_absolute(texts.iter_mut().chain([&mut model.path]).map(Some).chain(optional))?;
    let command = Command::new(COMMAND, &repeatable);
    let job = Job::for_file(&command, &options.out, &options.run, |fingerprint| decide(options, fingerprint))?;
    let done = read_all(options, &job);
    job.conclude(done)
}

/// Adds all inputs that the statistics depend on to the fingerprint.
fn decide(options: &CalibrationOptions, fingerprint: &mut Fingerprint) -> Result<()> {
    let CalibrationOptions { hessian, window, max_tokens, .. } = options;
    fingerprint.field("options", format!("{hessian} {window} {max_tokens:?} {SHARDS}"));
    let mut files = options.texts.clone();
    let ModelSource { path, config } = &options.model;
    match SourceKind::of(path)? {
        SourceKind::Pack(json) => files.extend([json.with_file_name(BIN_NAME), json]),
        SourceKind::Gguf(file) => files.extend(parts_of(&file)),
        SourceKind::Checkpoint(path) => files.extend(files_of(&path)?),
    }
    files.extend(options.tokenizer.iter().chain(config).chain(&options.quantized).cloned());
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

fn read_all(options: &CalibrationOptions, job: &Job) -> Result<Calibrated> {
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
        quantized: None,
    };
    let opened = Opened { reader, engine_options, engine, windows, description };
    match &options.quantized {
        Some(manifest) => Along::new(job, options, opened, &Manifest::load(manifest)?)?.run(),
        None => {
            let Opened { engine, windows, description, .. } = opened;
            Work::new(job, engine, windows, options, description)?.run()
        }
    }
}

/// Opened model with the windows that it is to read.
struct Opened {
    reader: IebinReader,
    engine_options: EngineOptions,
    engine: Engine,
    windows: Windows,
    description: Description,
}

/// Packs the checkpoint or the GGUF file as it is, unless an interrupted run or another part has done so. Parts that
/// run at the same time wait until one of them has made the pack.
fn unchanged_pack(options: &CalibrationOptions, job: &Job) -> Result<PathBuf> {
    let out_dir = job.dir().join("pack");
    let _lock = DirLock::acquire(job.dir())?;
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
