//! Writes the quantized bytes of a model as a stream: codes, scales and a manifest that `pack --q4-map` takes over.
//!
//! `model.q4.bin` holds canonical codes, `model.q4.scales.fp16.bin` the scales of each tensor followed by its zero points
//! (scales are fp16 unless the entry says otherwise); `q4_manifest.expanded.json` says where each tensor lies and carries
//! the hashes of both. The three files appear together or not at all; the work is a [`Job`] that can be interrupted,
//! continued and shared among machines.

mod layout;
mod work;

use super::entry::blank_entry;
use super::ptq::created_by;
use super::select::{Selection, SelectionOptions};
use super::weights::Weights;
use crate::calibration::Calibration;
use crate::convert::guidance;
use crate::convert::outlook::{Disk, Outlook, Row, in_words};
use crate::error::{Context, Error, Result};
use crate::interrupt;
use crate::job::{self, Command, DataFile, Fingerprint, Job, Order, Output, RunOptions, Share};
use crate::manifest::{Document, Metrics, TensorEntry, VERSION};
use crate::output::{self, AtomicFile, absolute, refuse_within};
use crate::provenance::{Source, SourceFile};
use crate::quant_spec::QuantFields;
use layout::{Fate, Layout, Slot};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::iter::once;
use std::path::{Path, PathBuf};
use work::{Done, Writing, Written, mine};

/// Name of the command, as parts record it.
pub const COMMAND: &str = "q4";
/// File of the codes.
pub const CODES_NAME: &str = "model.q4.bin";
/// File of the scales and zero points.
pub const SCALES_NAME: &str = "model.q4.scales.fp16.bin";
/// File of the manifest.
pub const MANIFEST_NAME: &str = "q4_manifest.expanded.json";

/// What is quantized, and how.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Q4Options {
    /// The checkpoint.
    pub hf_dir: PathBuf,
    /// The configuration, instead of the checkpoint's `config.json`.
    pub config: Option<PathBuf>,
    /// Where the files go; made when missing.
    #[serde(skip)]
    pub out_dir: PathBuf,
    /// A manifest that decides instead of `fields`.
    pub manifest: Option<PathBuf>,
    /// Statistics of the model's inputs, where the manifest's methods need them.
    #[serde(default)]
    pub calibration: Option<PathBuf>,
    /// Scheme and parameters.
    pub fields: QuantFields,
    /// The output matrix, too.
    pub include_lm_head: bool,
    /// Rows read at once; the bytes do not depend on it.
    pub chunk_rows: Option<usize>,
    /// Replace existing files.
    #[serde(default)]
    pub overwrite: bool,
    /// How the work is run; it does not show in the files.
    #[serde(skip)]
    pub run: RunOptions,
}

/// What was written. For a part, the numbers are about the part, and there are no files yet.
#[derive(Debug, Clone, Serialize)]
pub struct Q4Summary {
    /// The manifest.
    pub manifest: PathBuf,
    /// Which part; absent for the whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Tensors quantized.
    pub tensors: usize,
    /// Of these, taken over from an interrupted run or from parts.
    pub resumed_tensors: usize,
    /// Their weights.
    pub weights: u64,
    /// Their bytes, scales and zero points included.
    pub bytes: u64,
    /// Bits per weight.
    pub bits_per_weight: f64,
    /// The two binaries.
    pub files: Vec<SourceFile>,
}

/// Quantizes every selected tensor, or those of one part, or puts parts together.
///
/// # Errors
/// Nothing is selected, a tensor cannot be quantized, the manifest was made from other weights, or the output exists or
/// cannot be written. Nothing is left under a final name then; what was finished before an interrupt or a failure of
/// the disk is kept for the next run.
pub fn write(options: &Q4Options) -> Result<Q4Summary> {
    let inputs = Inputs::open(options)?;
    let fingerprint = inputs.decide()?;
    job::note_others(&options.out_dir, &fingerprint);
    let order = Order {
        fingerprint: &fingerprint,
        command: Command::new(COMMAND, &inputs.repeatable()?),
        commit_point: MANIFEST_NAME,
        output: Output::Alone,
        run: &options.run,
    };
    let (job, files) = Job::open(&options.out_dir, &order, &inputs.data_files())?;
    let outcome = inputs.fill(files, &job);
    job.conclude(outcome)
}

/// What [`write()`] would do; nothing is written.
///
/// # Errors
/// As [`write()`], as far as it can be known before the work; a disk that is too full is no error here.
pub fn outlook(options: &Q4Options) -> Result<Outlook> {
    let inputs = Inputs::open(options)?;
    let row = |slot: &Slot| Row {
        name: slot.tensor.name.clone(),
        shape: slot.tensor.shape.clone(),
        source: slot.tensor.form.name(),
        stored: if slot.ranges().is_some() { in_words(&slot.quant.spec) } else { "-".to_string() },
        why: match &slot.fate {
            Fate::Stays(entry) => entry.reasons.join("; "),
            Fate::Quantized(_) => slot.quant.method.name().to_string(),
        },
        bytes_in: slot.tensor.nbytes(),
        bytes_out: slot.ranges().map_or(0, |ranges| ranges.nbytes()),
    };
    let needed = inputs.layout.codes_len + inputs.layout.scales_len;
    let disk = Disk::new(&options.out_dir, &inputs.decide()?, needed, &[CODES_NAME, SCALES_NAME])?;
    let bytes_in = inputs.weights.shards().iter().map(|s| s.nbytes()).sum();
    Ok(Outlook::new(inputs.layout.slots.iter().map(row).collect(), bytes_in, Some(disk)))
}

/// What is read, and what follows from it.
struct Inputs<'a> {
    options: &'a Q4Options,
    weights: Weights,
    selection: Selection,
    calibration: Option<Calibration>,
    layout: Layout,
}

impl<'a> Inputs<'a> {
    fn open(options: &'a Q4Options) -> Result<Inputs<'a>> {
        refuse_within(&options.hf_dir, &options.out_dir).help("choose another --out-dir")?;
        let selected = SelectionOptions {
            fields: options.fields,
            include_lm_head: options.include_lm_head,
            ..SelectionOptions::default()
        };
        let selection = Selection::new(selected, options.manifest.as_deref())?;
        let weights = Weights::open_checkpoint(&options.hf_dir, options.config.as_deref())?;
        let layout = Layout::new(&weights, &selection)?;
        let document = selection.manifest().map(|m| m.document());
        let calibration = guidance::open(document, options.calibration.as_deref())?;
        Ok(Inputs { options, weights, selection, calibration, layout })
    }

    /// The fingerprint of the work, unless files would be lost.
    fn decide(&self) -> Result<String> {
        let Q4Options { config, manifest, calibration, out_dir, overwrite, .. } = self.options;
        let names = [CODES_NAME, SCALES_NAME, MANIFEST_NAME];
        let read = output::Inputs::default().files([config, manifest, calibration].into_iter().flatten());
        read.refuse_members(out_dir, &names)?;
        // Without a manifest the other files belong to a run that was cut short.
        let there = out_dir.join(MANIFEST_NAME);
        if there.exists() && !overwrite {
            return Err(Error::usage("exists already").at(there).help("add --overwrite or choose another --out-dir"));
        }
        self.fingerprint()
    }

    /// Everything that decides about the bytes of the files.
    fn fingerprint(&self) -> Result<String> {
        let mut fingerprint = Fingerprint::new(COMMAND);
        self.weights.fingerprint(&mut fingerprint)?;
        for Slot { tensor, quant, fate } in &self.layout.slots {
            fingerprint.field("tensor", format_args!("{} {:?} {quant:?} {fate:?}", tensor.name, tensor.shape));
        }
        fingerprint.field("calibration", self.calibration.as_ref().map_or("", Calibration::seal));
        let rules = serde_json::to_string(&self.selection.document_rules()).expect("plain data always serializes");
        fingerprint.field("rules", rules);
        if let Some(manifest) = self.selection.manifest() {
            fingerprint.field("manifest", String::from_utf8_lossy(&manifest.document().to_json()));
        }
        Ok(fingerprint.finish())
    }

    /// The options as another process can repeat them, wherever it is started.
    fn repeatable(&self) -> Result<Q4Options> {
        let options = self.options;
        let path = |path: &Option<PathBuf>| path.as_deref().map(absolute).transpose();
        Ok(Q4Options {
            hf_dir: absolute(&options.hf_dir)?,
            config: path(&options.config)?,
            manifest: path(&options.manifest)?,
            calibration: path(&options.calibration)?,
            ..options.clone()
        })
    }

    fn data_files(&self) -> [DataFile; 2] {
        let Layout { slots, codes_len, scales_len } = &self.layout;
        let mine = mine(&self.options.run.share, &self.weights, &self.layout);
        let of_part = || slots.iter().zip(&mine).filter(|(_, mine)| **mine).filter_map(|(slot, _)| slot.ranges());
        let (codes, scales) = match self.options.run.share {
            Share::Part(_) => {
                (of_part().map(|r| r.codes.clone()).collect(), of_part().map(|r| r.scales_and_zeros()).collect())
            }
            Share::Whole | Share::Merge(_) => (once(0..*codes_len).collect(), once(0..*scales_len).collect()),
        };
        [
            DataFile { name: CODES_NAME, len: *codes_len, ranges: codes },
            DataFile { name: SCALES_NAME, len: *scales_len, ranges: scales },
        ]
    }

    fn fill(&self, files: Vec<AtomicFile>, job: &Job) -> Result<Q4Summary> {
        let [codes, scales]: [AtomicFile; 2] = files.try_into().expect("one file per request");
        let writing = Writing {
            weights: &self.weights,
            layout: &self.layout,
            calibration: self.calibration.as_ref(),
            codes: &codes,
            scales: &scales,
            chunk_rows: self.options.chunk_rows,
            share: &self.options.run.share,
            job,
        };
        let written = writing.run()?;
        let mut summary = self.summary(&written);
        if let Share::Part(part) = self.options.run.share {
            summary.part = Some(part.to_string());
            return Ok(summary);
        }
        let source = Some(Source { repo: self.weights.repo(), files: written.shards });
        refuse_other_source(&self.selection, source.as_ref())?;
        let [codes_sha256, scales_sha256] = written.files;
        let file = |name: &str, bytes, sha256| SourceFile { name: name.to_string(), bytes, sha256 };
        summary.files = vec![
            file(CODES_NAME, self.layout.codes_len, codes_sha256),
            file(SCALES_NAME, self.layout.scales_len, scales_sha256),
        ];
        let document = self.document(source, summary.files.clone(), &written.done)?;
        let mut manifest = job.atomic_file(MANIFEST_NAME)?;
        manifest.write_all(&document.to_json()).at(manifest.path())?;
        commit([codes, scales, manifest], job)?;
        Ok(summary)
    }

    fn document(&self, source: Option<Source>, files: Vec<SourceFile>, done: &[Option<Done>]) -> Result<Document> {
        let (defaults, rules) = self.selection.document_rules();
        let manifest = self.selection.manifest().map(|m| m.document());
        let mut tensors: BTreeMap<String, TensorEntry> = self.selection.kept_entries().collect();
        for (slot, done) in self.layout.slots.iter().zip(done) {
            tensors.insert(slot.tensor.name.clone(), self.entry(slot, done.as_ref())?);
        }
        Ok(Document {
            version: VERSION,
            created_by: Some(created_by()),
            source,
            defaults,
            rules,
            gate: manifest.and_then(|m| m.gate),
            calibration: manifest.and_then(|m| m.calibration.clone()),
            plan: manifest.and_then(|m| m.plan.clone()),
            evidence: manifest.and_then(|m| m.evidence.clone()),
            refused: manifest.is_some_and(|m| m.refused),
            files,
            tensors,
        })
    }

    fn entry(&self, slot: &Slot, done: Option<&Done>) -> Result<TensorEntry> {
        let ranges = match &slot.fate {
            Fate::Stays(entry) => return Ok((**entry).clone()),
            Fate::Quantized(ranges) => ranges,
        };
        let decided = self.selection.manifest().and_then(|m| m.document().tensors.get(&slot.tensor.name)).cloned();
        let entry = decided.map_or_else(|| blank_entry(&slot.tensor), Ok)?;
        Ok(TensorEntry {
            quant: Some(slot.quant),
            metrics: done.map(|d| Metrics { output_error: entry.metrics.and_then(|m| m.output_error), ..d.metrics }),
            packed: Some(ranges.to_json(&slot.quant)),
            ..entry
        })
    }

    fn summary(&self, written: &Written) -> Q4Summary {
        let done = || self.layout.slots.iter().zip(&written.done).filter(|(_, d)| d.is_some()).map(|(slot, _)| slot);
        let weights = done().map(|slot| slot.tensor.elements()).sum();
        let bytes = done().filter_map(|slot| slot.ranges()).map(|ranges| ranges.nbytes()).sum();
        Q4Summary {
            manifest: self.options.out_dir.join(MANIFEST_NAME),
            part: None,
            tensors: done().count(),
            resumed_tensors: written.resumed,
            weights,
            bytes,
            bits_per_weight: bytes as f64 * 8.0 / weights.max(1) as f64,
            files: Vec::new(),
        }
    }
}

/// A manifest from other weights would put its verdict on bytes it has not seen.
fn refuse_other_source(selection: &Selection, found: Option<&Source>) -> Result<()> {
    let Some(expected) = selection.manifest().and_then(|m| m.document().source.as_ref()) else { return Ok(()) };
    if Some(expected) == found {
        return Ok(());
    }
    Err(Error::corrupt("the manifest was made from other weights than this checkpoint holds")
        .help("make the manifest again with `iec ptq` from this checkpoint"))
}

/// Gives the files their names, the manifest last. An older manifest goes first, so that none ever describes files of
/// another run.
fn commit(files: [AtomicFile; 3], job: &Job) -> Result<()> {
    for file in &files {
        file.file().sync_all().at(file.path())?;
    }
    interrupt::check()?;
    job.commit_begins()?;
    remove_if_there(files[2].path())?;
    files.into_iter().try_for_each(AtomicFile::commit)
}

fn remove_if_there(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e).at(path),
        _ => Ok(()),
    }
}
