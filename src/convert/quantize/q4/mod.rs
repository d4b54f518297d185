//! Quantizes a model tensor by tensor and writes codes, scales and a manifest, which `pack --q4-map` reads.
//!
//! `model.q4.bin` holds canonical codes, `model.q4.scales.fp16.bin` the scales of each tensor followed by its zero
//! points (scales are fp16 unless the entry names another type). `q4_manifest.expanded.json` holds the offsets of
//! each tensor and the hashes of both files. The three files appear together or not at all. The work is a [`Job`] that
//! can be interrupted, continued and divided among machines.

mod layout;

use super::select::{OuterStorage, Selection, SelectionOptions};
use super::weights::{Tensor, Weights};
use crate::calibration::Calibration;
use crate::convert::digest::hash_file;
use crate::convert::dry_run::{DryRun, TensorRow, in_words};
use crate::convert::executor::{Conversion, Finished, Made, Task, TaskOutput};
use crate::convert::guidance;
use crate::convert::requantized::Requantized;
use crate::convert::source::kind::SourceKind;
use crate::error::{Context, Error, Result};
use crate::interrupt;
use crate::job::{self, Command, DataFile, Fingerprint, Job, Output, RunOptions, this_version};
use crate::manifest::{self, Document, Metrics, PackedJson, TensorEntry, Version};
use crate::output::{self, AtomicFile, DirLock, make_absolute, stale, swap};
use crate::progress;
use crate::provenance::{Source, SourceFile};
use crate::quant::stream::{self, CanonicalChunk, Stack};
use crate::quant_spec::QuantFields;
use layout::Q4Layout;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Time to quantize a tensor relative to the time to hash the same bytes; balances the parts of a run.
const QUANTIZE_FACTOR: u64 = 32;

/// Name of the command in fingerprints, and in `command.json` of unfinished parts, from which `iec merge` repeats it.
pub const COMMAND: &str = "q4";
/// File name of the codes.
pub const CODES_NAME: &str = "model.q4.bin";
/// File name of the scales and zero points.
pub const SCALES_NAME: &str = "model.q4.scales.fp16.bin";
/// File name of the manifest.
pub const MANIFEST_NAME: &str = manifest::EXPANDED_NAME;
/// Names of the three files.
const NAMES: [&str; 3] = [CODES_NAME, SCALES_NAME, MANIFEST_NAME];
/// The three files as an output that is replaced at once.
const OUTPUT: swap::OutputKind =
    swap::OutputKind { lead: MANIFEST_NAME, members: &[CODES_NAME, SCALES_NAME], obsolete: |_| Vec::new() };

/// Options of [`write()`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Q4Options {
    /// Path of the model: a Hugging Face checkpoint, a pack, or a GGUF file.
    pub hf_dir: PathBuf,
    /// Configuration that replaces the checkpoint's `config.json`.
    pub config: Option<PathBuf>,
    /// Output directory; it is created if it is missing.
    #[serde(skip)]
    pub out_dir: PathBuf,
    /// Manifest that selects tensors and their quantization; `fields` supplies the parameters that it does not set.
    pub manifest: Option<PathBuf>,
    /// File of calibration statistics, for quantization methods of the manifest that need them.
    pub calibration: Option<PathBuf>,
    /// Scheme and parameters of the quantization.
    pub fields: QuantFields,
    /// True to quantize the output matrix (LM head), too.
    pub include_lm_head: bool,
    /// Number of rows that are read at a time; the output bytes do not depend on it.
    pub chunk_rows: Option<usize>,
    /// True to replace existing files.
    #[serde(default)]
    pub overwrite: bool,
    /// Options of the run; the output bytes do not depend on them.
    #[serde(skip)]
    pub run: RunOptions,
}

/// Result of [`write()`]. For a part, the numbers refer to that part, and no files exist yet.
#[derive(Debug, Clone, Serialize)]
pub struct Q4Summary {
    /// Path of the manifest.
    pub manifest: PathBuf,
    /// The part that this run did; `None` for a complete run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Number of quantized tensors.
    pub tensors: usize,
    /// Number of tensors that were taken over from an interrupted run or from parts.
    pub resumed_tensors: usize,
    /// Number of weights in the quantized tensors.
    pub weights: u64,
    /// Bytes of the quantized tensors, including scales and zero points.
    pub bytes: u64,
    /// Bits per weight.
    pub bits_per_weight: f64,
    /// The files of codes and of scales.
    pub files: Vec<SourceFile>,
    /// Tensors that were quantized in the source and are quantized again, and the measured loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requantized: Option<Requantized>,
}

/// Quantizes all selected tensors or those of one part, or merges finished parts.
///
/// # Errors
/// Nothing is selected, a tensor cannot be quantized, the manifest was made from other weights, or the output cannot be
/// written. In these cases no file has its final name. Work that was finished before an interrupt or a disk error is
/// kept for the next run.
pub fn write(options: &Q4Options) -> Result<Q4Summary> {
    swap::recover(&options.out_dir, OUTPUT)?;
    let inputs = Q4Inputs::open(options)?;
    let make = |item: usize, out: &mut TaskOutput<'_>| inputs.make(&inputs.layout.tensors[item], out);
    let mut files = Vec::new();
    let finished = inputs.conversion()?.run(make, |job, opened, finished| {
        files = inputs.commit(job, opened, finished)?;
        Ok(())
    })?;
    Ok(inputs.summary(finished, files))
}

/// Lists what [`write()`] would do, without writing anything.
///
/// # Errors
/// The errors of [`write()`] that are known before the work begins. A disk without enough free space is not an error
/// here.
pub fn dry_run(options: &Q4Options) -> Result<DryRun> {
    let inputs = Q4Inputs::open(options)?;
    let row = |(tensor, entry): &(Tensor, TensorEntry)| TensorRow {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        source: tensor.store.name().to_string(),
        stored: entry.quant.map_or("-".to_string(), |quant| in_words(&quant.spec)),
        why: entry.quant.map_or_else(|| entry.reasons.join("; "), |quant| quant.method.name().to_string()),
        bytes_in: tensor.nbytes(),
        bytes: entry.packed.as_ref().map_or(0, PackedJson::nbytes),
    };
    let bytes_in = inputs.weights.bytes();
    let disk = inputs.conversion()?.disk()?;
    Ok(DryRun::new(inputs.layout.tensors.iter().map(row).collect(), bytes_in, Some(disk)))
}

/// Opened inputs, and the layout of the output that follows from them.
struct Q4Inputs<'a> {
    options: &'a Q4Options,
    weights: Weights,
    selection: Selection,
    calibration: Option<Calibration>,
    layout: Q4Layout,
}

impl<'a> Q4Inputs<'a> {
    fn open(options: &'a Q4Options) -> Result<Q4Inputs<'a>> {
        SourceKind::of(&options.hf_dir)?.refuse_output(&options.out_dir, &NAMES)?;
        // Without a manifest only the matrices of the layers are quantized, as the predecessor did.
        let others = if options.manifest.is_some() { OuterStorage::Chosen } else { OuterStorage::Kept };
        let selected = SelectionOptions {
            fields: options.fields,
            embedding: others,
            lm_head: if options.include_lm_head { OuterStorage::LikeLayers } else { others },
            ..SelectionOptions::default()
        };
        let selection = Selection::new(selected, options.manifest.as_deref())?;
        selection.manifest().into_iter().for_each(|manifest| manifest.note_refusal());
        let weights = Weights::open(&options.hf_dir, options.config.as_deref())?;
        selection.note_options_without_effect(&weights.tensors());
        let layout = Q4Layout::new(&weights, &selection)?;
        let document = selection.manifest().map(|m| m.document());
        let calibration = guidance::open(document, options.calibration.as_deref())?;
        Ok(Q4Inputs { options, weights, selection, calibration, layout })
    }

    /// Returns the fingerprint of the work.
    ///
    /// # Errors
    /// An input file would be overwritten, or a manifest exists already and `overwrite` is false.
    fn decide(&self) -> Result<String> {
        let Q4Options { config, manifest, calibration, out_dir, .. } = self.options;
        let read = output::Inputs::default().files([config, manifest, calibration].into_iter().flatten());
        read.refuse_members(out_dir, &NAMES)?;
        // Only the manifest is checked: without it, the other files belong to a run that was interrupted.
        let fingerprint = self.fingerprint()?;
        let torn = job::was_torn(out_dir, &fingerprint, Some(MANIFEST_NAME), [CODES_NAME, SCALES_NAME].into_iter());
        if !torn {
            self.occupied()?;
        }
        Ok(fingerprint)
    }

    /// Fails if there is a manifest already and `overwrite` is false.
    fn occupied(&self) -> Result<()> {
        stale::remove(&self.options.out_dir);
        let there = self.options.out_dir.join(MANIFEST_NAME);
        if there.symlink_metadata().is_ok() && !self.options.overwrite {
            return Err(Error::usage("exists already").at(there).help("add --overwrite or choose another --out-dir"));
        }
        Ok(())
    }

    /// Computes a hash of everything that determines the bytes of the output.
    fn fingerprint(&self) -> Result<String> {
        let mut fingerprint = Fingerprint::new(COMMAND);
        self.weights.fingerprint(&mut fingerprint)?;
        for (tensor, entry) in &self.layout.tensors {
            fingerprint.field("tensor", format_args!("{} {:?} {entry:?}", tensor.name, tensor.shape));
        }
        fingerprint.field("calibration", self.calibration.as_ref().map_or("", Calibration::seal));
        fingerprint.json("rules", &self.selection.document_rules());
        if let Some(manifest) = self.selection.manifest() {
            fingerprint.json("manifest", manifest.document());
        }
        Ok(fingerprint.finish())
    }

    /// Returns the options with absolute paths, so that a process with another working directory can repeat the
    /// command.
    fn repeatable(&self) -> Result<Q4Options> {
        let mut options = self.options.clone();
        let Q4Options { hf_dir, config, manifest, calibration, .. } = &mut options;
        make_absolute([Some(hf_dir), config.as_mut(), manifest.as_mut(), calibration.as_mut()])?;
        Ok(options)
    }

    fn conversion(&self) -> Result<Conversion<'_>> {
        let Q4Layout { tensors, codes_len, scales_len } = &self.layout;
        let items = tensors.iter().enumerate().filter_map(|(i, (tensor, entry))| {
            let sections = layout::sections(entry.packed.as_ref()?);
            Some(Task::make(i, &tensor.name, tensor.nbytes() * QUANTIZE_FACTOR, sections).parallel())
        });
        let written = tensors.iter().filter(|(_, entry)| entry.packed.is_some()).map(|(tensor, _)| tensor);
        Ok(Conversion {
            command: Command::new(COMMAND, &self.repeatable()?),
            out_dir: &self.options.out_dir,
            fingerprint: self.decide()?,
            lead: Some(MANIFEST_NAME),
            output: Output::Alone,
            run: &self.options.run,
            label: "quantizing",
            files: [(CODES_NAME, *codes_len), (SCALES_NAME, *scales_len)]
                .map(|(name, len)| DataFile::new(name, len, Vec::new()))
                .into(),
            tasks: items.chain(self.weights.hash_tasks(written)).collect(),
        })
    }

    /// Quantizes a tensor. Codes are written to the first section, scales and then zero points to the second.
    fn make(&self, (tensor, entry): &(Tensor, TensorEntry), out: &mut TaskOutput<'_>) -> Result<Metrics> {
        let quant = entry.quant.expect("tensors that stay as they are have no task");
        let (count, rows, cols) = tensor.matrices()?;
        let read = self.weights.corrected_rows(tensor, self.calibration.as_ref());
        let mut quantize = || {
            let inputs = guidance::inputs(self.calibration.as_ref(), &tensor.name, (count, cols), quant.method)?;
            let chunk_rows = self.options.chunk_rows;
            let stack = Stack { count, rows, cols, read: &read, chunk_rows, inputs: inputs.as_ref() };
            let mut zeros = Vec::new();
            let outcome = stream::quantize(quant, &stack, &mut |chunk: CanonicalChunk| {
                zeros.extend_from_slice(&chunk.zeros);
                out.append(0, &chunk.codes)?;
                out.append(1, &chunk.scales)
            })?;
            out.append(1, &zeros).map(|()| outcome.metrics)
        };
        quantize().tensor(&tensor.name)
    }

    /// Gives the files their final names in one step, so that the manifest never describes files of another run.
    fn commit(&self, job: &Job, files: Vec<AtomicFile>, finished: &Finished<Metrics>) -> Result<Vec<SourceFile>> {
        let source = self.weights.source(&finished.inputs);
        refuse_other_source(&self.selection, source.as_ref())?;
        let names = [(CODES_NAME, self.layout.codes_len), (SCALES_NAME, self.layout.scales_len)];
        let bar = progress::bytes("hashing", names.iter().map(|(_, len)| len).sum());
        let digest = |file: &AtomicFile, (name, bytes): (&str, u64)| -> Result<SourceFile> {
            let read = |at: u64, out: &mut [u8]| file.file().read_exact_at(out, at).at(file.path());
            Ok(SourceFile { name: name.to_string(), bytes, sha256: hash_file(bytes, &bar, read)? })
        };
        let (codes, scales) = rayon::join(|| digest(&files[0], names[0]), || digest(&files[1], names[1]));
        let listed = vec![codes?, scales?];
        let document = self.document(source, listed.clone(), &finished.items);
        let manifest = job.small_file(MANIFEST_NAME, &document.to_json())?;
        interrupt::check()?;
        job.commit_begins()?;
        let out_dir = &self.options.out_dir;
        let _lock = DirLock::acquire(out_dir)?;
        swap::settle(out_dir, OUTPUT)?;
        let allowed = || if job.was_torn() { Ok(()) } else { self.occupied() };
        swap::replace(out_dir, job.dir(), OUTPUT, files.into_iter().chain([manifest]).collect(), allowed)?;
        Ok(listed)
    }

    fn document(&self, source: Option<Source>, files: Vec<SourceFile>, done: &[Option<Made<Metrics>>]) -> Document {
        let (defaults, rules) = self.selection.document_rules();
        let manifest = self.selection.manifest().map(|m| m.document());
        let mut tensors: BTreeMap<String, TensorEntry> = self.selection.kept_entries().collect();
        for (number, (tensor, entry)) in self.layout.tensors.iter().enumerate() {
            let mut entry = entry.clone();
            if entry.packed.is_some() {
                let made = done.get(number).and_then(|made| made.as_ref()?.value);
                let output_error = entry.metrics.and_then(|m| m.output_error);
                entry.metrics = made.map(|m| Metrics { output_error, ..m });
            }
            tensors.insert(tensor.name.clone(), entry);
        }
        Document {
            version: Version::default(),
            created_by: Some(this_version()),
            source,
            defaults,
            rules,
            files,
            tensors,
            ..manifest.cloned().unwrap_or_default()
        }
    }

    /// Summarizes the loss of the tensors that were quantized in the source.
    fn requantized(&self, finished: &Finished<Metrics>) -> Option<Requantized> {
        let made = self.layout.tensors.iter().zip(&finished.items).filter(|((tensor, _), _)| tensor.is_coded);
        Requantized::of(
            made.filter_map(|((tensor, _), made)| Some((&*tensor.name, made.as_ref()?.value.as_ref()?.relative_rms))),
        )
    }

    fn summary(&self, finished: Finished<Metrics>, files: Vec<SourceFile>) -> Q4Summary {
        let made = || finished.made(&self.layout.tensors);
        let weights = made().map(|(tensor, _)| tensor.elements()).sum();
        let bytes = made().filter_map(|(_, entry)| entry.packed.as_ref()).map(PackedJson::nbytes).sum();
        Q4Summary {
            manifest: self.options.out_dir.join(MANIFEST_NAME),
            tensors: made().count(),
            resumed_tensors: finished.resumed,
            weights,
            bytes,
            bits_per_weight: bytes as f64 * 8.0 / weights.max(1) as f64,
            files,
            requantized: self.requantized(&finished),
            part: finished.part,
        }
    }
}

/// Refuses a manifest that was made from other weights, because its verdicts do not apply to this checkpoint.
fn refuse_other_source(selection: &Selection, found: Option<&Source>) -> Result<()> {
    let Some(manifest) = selection.manifest() else { return Ok(()) };
    match &manifest.document().source {
        Some(expected) if Some(expected) != found => {
            Err(Error::corrupt("found a manifest that was made from other weights than those of this model")
                .at(manifest.path())
                .help("make the manifest again with `iec ptq` from this model"))
        }
        _ => Ok(()),
    }
}
