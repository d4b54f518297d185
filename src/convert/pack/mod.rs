//! Packs a checkpoint, a GGUF file or another pack: plans, reserves disk space, writes, commits.
//!
//! [`plan`] decides how every tensor is stored before anything is read; a dry run prints the plan. The executor does
//! the work, so it can be interrupted, continued and divided among machines.

mod fill;
mod manifest_file;
pub mod plan;

use super::companions::Companions;
use super::dry_run::{DryRun, TensorRow};
use super::executor::{Conversion, Finished, Task};
use super::pack_output::{self, Totals, refuse_occupied};
use super::published::PublishedSummary;
use super::requantized::Requantized;
use super::source::kind::SourceKind;
use super::source::read_at::InputFile;
use super::{Checkpoint, CheckpointOptions};
use crate::calibration::Calibration;
use crate::convert::LeftOutPart;
use crate::convert::guidance;
use crate::dtype::DType;
use crate::error::Result;
use crate::iebin::writer::{self, Layout, PlannedTensor};
use crate::iebin::{self, DescriptionParts, Entry, JSON_NAME};
use crate::job::{Command, Fingerprint, Job, Output, RunOptions};
use crate::manifest::{Manifest, Metrics};
use crate::output::{self, AtomicFile, make_absolute};
use crate::progress;
use crate::provenance::Quality;
use crate::quant_spec::Method;
use fill::{Filled, fill};
pub use plan::PublishedForm;
use plan::{Choices, Encoding, PackItem};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Instant;

/// Name of the command in fingerprints, and in `command.json` of unfinished parts, from which `iec merge` repeats it.
pub const COMMAND: &str = "pack";

/// Options of [`pack()`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct PackOptions {
    /// Path of the model: a Hugging Face checkpoint, a pack, or a GGUF file.
    pub hf_dir: PathBuf,
    /// Configuration that replaces the checkpoint's `config.json`.
    pub config: Option<PathBuf>,
    /// Directory of the new pack; created if it is missing.
    #[serde(skip)]
    pub out_dir: PathBuf,
    /// Quantization manifest.
    pub manifest: Option<PathBuf>,
    /// Calibration statistics, for quantization methods of the manifest that need them.
    pub calibration: Option<PathBuf>,
    /// Float type of tensors that are not quantized; `None` keeps the type of each.
    pub dtype: Option<DType>,
    /// A tokenizer.json that replaces the checkpoint's.
    pub tokenizer: Option<PathBuf>,
    /// Form of matrices that are quantized in the checkpoint.
    #[serde(default)]
    pub published: PublishedForm,
    /// True to keep the layers of multi-token prediction.
    #[serde(default)]
    pub with_mtp: bool,
    /// True to replace an existing pack.
    pub overwrite: bool,
    /// Options of the run; the bytes of the pack do not depend on them.
    #[serde(skip)]
    pub run: RunOptions,
}

impl PackOptions {
    /// Returns the input files other than the checkpoint.
    fn inputs(&self) -> output::Inputs {
        output::Inputs::default()
            .files([&self.config, &self.manifest, &self.calibration, &self.tokenizer].into_iter().flatten())
    }
}

/// Result of [`pack()`]. For a part, everything but `architecture` refers to that part.
#[derive(Debug, Clone, Serialize)]
pub struct PackSummary {
    /// Class name of the model.
    pub architecture: String,
    /// The part that this run did; `None` for a complete pack.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of tensors that are stored quantized.
    pub quantized_tensors: usize,
    /// Number of tensors that were taken over from an interrupted run or from parts.
    pub resumed_tensors: usize,
    /// Number of weights.
    pub weights: u64,
    /// Bytes of all weight files read.
    pub bytes_in: u64,
    /// Bytes of the binary written.
    pub bytes: u64,
    /// Bits of the payloads per weight, including scales and padding.
    pub bits_per_weight: f64,
    /// Wall time in seconds.
    pub wall_time_s: f64,
    /// Bytes of weight files read per second of wall time, in MB (10^6 bytes).
    pub mb_per_s: f64,
    /// True when the pack has a tokenizer.json, from the checkpoint or from the options.
    pub tokenizer: bool,
    /// Files of the checkpoint from which the tokenizer.json was made; empty if it was copied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tokenizer_from: Vec<String>,
    /// True when the manifest is marked as refused by its gate.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub refused: bool,
    /// Format of a checkpoint that is quantized, and what the pack holds of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub published: Option<PublishedSummary>,
    /// Tensors that were quantized in the source and are quantized again, and the measured loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requantized: Option<Requantized>,
    /// Tensors of the checkpoint that do not belong to the language model and are not in the pack.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOutPart>,
}

/// Counts the tensors of a plan by what becomes of them; `None` for a checkpoint of floats.
fn summary_of(checkpoint: &Checkpoint, items: &[PackItem<'_>]) -> Option<PublishedSummary> {
    let published = checkpoint.published();
    let coded = || items.iter().filter(|item| item.tensor.is_coded());
    let kept = coded().filter(|item| matches!(item.work, Encoding::Codes(_))).count();
    Some(PublishedSummary {
        format: published.format()?,
        kept,
        converted: coded().count() - kept,
        activation_scales: published.has_activation_scales(),
    })
}

/// Packs a checkpoint or one part of it, or merges its parts.
///
/// # Errors
/// The checkpoint is damaged or not supported, the manifest does not fit it, or the output cannot be written. In
/// these cases no file has its final name; work that was finished before an interrupt or a disk error is kept for the
/// next run.
pub fn pack(options: &PackOptions) -> Result<PackSummary> {
    let start = Instant::now();
    let inputs = Inputs::open(options)?;
    let plan = inputs.plan()?;
    writer::recover(&options.out_dir)?;
    for item in &plan.items {
        let PlannedTensor { name, shape, .. } = &item.planned;
        progress::detail(2, || format!("{name} {shape:?}: stored as {}, {}", item.stored_as(), item.why));
    }
    let calibration = inputs.calibration.as_ref();
    let finished = inputs.conversion(&plan)?.run(
        |item, out| fill(&inputs.checkpoint, calibration, &plan.items[item], out),
        |job, files, finished| inputs.commit(&plan, job, files, finished),
    )?;
    let totals = Totals::new(&plan.layout, &finished);
    let requantized = plan.requantized(&finished);
    let wall_time_s = start.elapsed().as_secs_f64();
    Ok(PackSummary {
        architecture: inputs.checkpoint.config().architecture.clone(),
        part: finished.part,
        tensors: totals.tensors,
        quantized_tensors: totals.quantized,
        resumed_tensors: finished.resumed,
        weights: totals.weights,
        bytes_in: inputs.bytes_in(),
        bytes: totals.bytes,
        bits_per_weight: totals.bits_per_weight,
        wall_time_s,
        mb_per_s: inputs.bytes_in() as f64 / 1e6 / wall_time_s,
        tokenizer: inputs.companions.tokenizer().is_some(),
        tokenizer_from: inputs.companions.tokenizer_from(),
        refused: inputs.manifest.as_ref().is_some_and(|manifest| manifest.document().refused),
        published: summary_of(&inputs.checkpoint, &plan.items),
        requantized,
        left_out: inputs.checkpoint.left_out().to_vec(),
    })
}

/// Plans what [`pack()`] would do, without writing anything.
///
/// # Errors
/// The errors of [`pack()`] that are known before the work begins. A disk without enough free space is not an error
/// here.
pub fn dry_run(options: &PackOptions) -> Result<DryRun> {
    let inputs = Inputs::open(options)?;
    let plan = inputs.plan()?;
    let row = |(item, entry): (&PackItem<'_>, &Entry)| TensorRow {
        name: entry.name.clone(),
        shape: entry.shape.clone(),
        source: item.tensor.store_name(),
        stored: item.stored_as(),
        why: item.why.clone(),
        bytes_in: item.tensor.source_bytes(),
        bytes: entry.nbytes as u64,
    };
    let rows = plan.items.iter().zip(&plan.layout.entries).map(row).collect();
    let published = summary_of(&inputs.checkpoint, &plan.items);
    let plan = DryRun::new(rows, inputs.bytes_in(), Some(inputs.conversion(&plan)?.disk()?));
    let tokenizer_from = inputs.companions.tokenizer_from();
    Ok(DryRun { published, left_out: inputs.checkpoint.left_out().to_vec(), tokenizer_from, ..plan })
}

/// Opened inputs.
struct Inputs<'a> {
    options: &'a PackOptions,
    checkpoint: Checkpoint,
    manifest: Option<Manifest>,
    calibration: Option<Calibration>,
    companions: Companions,
}

/// Stored form of each tensor, and its position in the binary.
struct PackPlan<'a> {
    items: Vec<PackItem<'a>>,
    layout: Layout,
}

impl PackPlan<'_> {
    /// Summarizes the loss of the tensors that were quantized again.
    fn requantized(&self, done: &Finished<Filled>) -> Option<Requantized> {
        Requantized::of(
            requantized(done).map(|(item, metrics)| (&*self.layout.entries[item].name, metrics.relative_rms)),
        )
    }

    /// Returns the layout with the measured errors of the tensors that were quantized again. The manifest may have been
    /// made from other weights, such as the floats before the first quantization.
    fn measured_layout(&self, done: &Finished<Filled>) -> Layout {
        let mut layout = self.layout.clone();
        for (item, metrics) in requantized(done) {
            let entry = &mut layout.entries[item];
            let planned = entry.metrics.take().and_then(|found| serde_json::from_value::<Metrics>(found).ok());
            let output_error = planned.and_then(|planned| planned.output_error);
            entry.metrics = serde_json::to_value(Metrics { output_error, ..metrics }).ok();
        }
        layout
    }
}

/// Returns the tensors that were quantized again, each with the error that was measured.
fn requantized(done: &Finished<Filled>) -> impl Iterator<Item = (usize, Metrics)> {
    let made = done.items.iter().enumerate();
    made.filter_map(|(item, made)| Some((item, made.as_ref()?.value.as_ref()?.requantized?)))
}

impl<'a> Inputs<'a> {
    fn open(options: &'a PackOptions) -> Result<Inputs<'a>> {
        SourceKind::of(&options.hf_dir)?.refuse_output(&options.out_dir, &iebin::members())?;
        let manifest = options.manifest.as_deref().map(Manifest::load).transpose()?;
        let calibration = guidance::open(manifest.as_ref().map(Manifest::document), options.calibration.as_deref())?;
        let source = CheckpointOptions {
            config: options.config.as_deref(),
            manifest: manifest.as_ref(),
            with_mtp: options.with_mtp,
        };
        let checkpoint = Checkpoint::open_with(&options.hf_dir, source)?;
        let companions = checkpoint.companions(options.tokenizer.as_deref())?;
        manifest.iter().for_each(Manifest::note_refusal);
        if companions.tokenizer().is_none() {
            progress::detail(0, || {
                "note: the model has no tokenizer; `iec run` will need one (`pack --tokenizer FILE`)".into()
            });
        }
        Ok(Inputs { options, checkpoint, manifest, calibration, companions })
    }

    fn plan(&self) -> Result<PackPlan<'_>> {
        let manifest = self.manifest.as_ref();
        let choices = Choices { dtype: self.options.dtype, form: self.options.published };
        let items = plan::plan(&self.checkpoint, choices, manifest).map_err(|e| match manifest {
            Some(manifest) => e.at(manifest.path()),
            None => e,
        })?;
        let layout = Layout::new(items.iter().map(|item| item.planned.clone()).collect())?;
        Ok(PackPlan { items, layout })
    }

    /// Refuses directories in which files would be lost, and lists the work.
    fn conversion<'b>(&'b self, plan: &'b PackPlan<'_>) -> Result<Conversion<'b>> {
        let out_dir = &self.options.out_dir;
        let fingerprint = self.fingerprint(&plan.items)?;
        if !pack_output::was_torn(out_dir, &fingerprint) {
            self.occupied()?;
        }
        Ok(Conversion {
            command: Command::new(COMMAND, &self.repeatable()?),
            out_dir,
            fingerprint,
            lead: Some(JSON_NAME),
            output: Output::Alone,
            run: &self.options.run,
            label: "packing",
            files: vec![pack_output::binary(&plan.layout)],
            tasks: self.tasks(plan),
        })
    }

    /// Lists the tasks in the order of the tensors on disk, the hash of each shard before its tensors, or that of each
    /// tensor of a pack before the tensor. Data that one thread has read for the hash is then still in the page cache
    /// when another converts it.
    fn tasks<'b>(&'b self, plan: &'b PackPlan<'_>) -> Vec<Task<'b>> {
        let mut order: Vec<usize> = (0..plan.items.len()).collect();
        order.sort_by_key(|i| plan.items[*i].tensor.position());
        let mut tasks: Vec<Task<'_>> = self.manifest.iter().flat_map(manifest_file::tasks).collect();
        for number in 0..self.checkpoint.files().len() {
            tasks.extend(self.checkpoint.hashed_files().get(number).map(Task::hash_file));
            for i in order.iter().filter(|i| plan.items[**i].tensor.position().0 == number) {
                let (item, entry) = (&plan.items[*i], &plan.layout.entries[*i]);
                tasks.extend(self.checkpoint.check_task(item.tensor));
                tasks.push(Task::make(*i, &entry.name, weight(item), pack_output::section(entry)));
            }
        }
        tasks
    }

    /// Computes a hash of everything that determines the bytes of the binary.
    fn fingerprint(&self, items: &[PackItem<'_>]) -> Result<String> {
        let mut fingerprint = Fingerprint::new(COMMAND);
        self.checkpoint.fingerprint(&mut fingerprint)?;
        let mut finished = BTreeSet::new();
        for item in items {
            let (planned, position) = (&item.planned, item.tensor.position());
            fingerprint.field("tensor", format_args!("{planned:?} {position:?} {}", item.work.in_full()));
            if let Encoding::Packed(_, range) = &item.work {
                finished.extend([&range.bin, &range.scale_bin]);
            }
        }
        finished.into_iter().try_for_each(|path| fingerprint.file(path))?;
        fingerprint.field("calibration", self.calibration.as_ref().map_or("", Calibration::seal));
        if let Some(manifest) = &self.manifest {
            fingerprint.json("manifest", manifest.document());
        }
        Ok(fingerprint.finish())
    }

    /// Returns the options with absolute paths, so that a process with another working directory can repeat the
    /// command.
    fn repeatable(&self) -> Result<PackOptions> {
        let mut options = self.options.clone();
        let PackOptions { hf_dir, config, manifest, calibration, tokenizer, .. } = &mut options;
        make_absolute([Some(hf_dir), config.as_mut(), manifest.as_mut(), calibration.as_mut(), tokenizer.as_mut()])?;
        Ok(options)
    }

    fn commit(&self, plan: &PackPlan<'_>, job: &Job, files: Vec<AtomicFile>, done: &Finished<Filled>) -> Result<()> {
        let manifest_files = self.manifest.as_ref().map_or(0, |m| m.document().files.len());
        let source = self.checkpoint.source(&done.inputs[manifest_files..]);
        self.manifest.as_ref().map_or(Ok(()), |m| manifest_file::check_source(m, source.as_ref()))?;
        let parts = DescriptionParts {
            model: Some(self.checkpoint.config().clone()),
            source,
            published: self.checkpoint.quantized_source(),
            quality: self.quality(),
            ..pack_output::with_companions(&self.companions, job)?
        };
        pack_output::commit(job, files, &plan.measured_layout(done), done, parts, || self.occupied())
    }

    /// Fails when files would be lost in the output directory.
    fn occupied(&self) -> Result<()> {
        refuse_occupied(&self.options.out_dir, self.options.overwrite, &self.options.inputs())
    }

    /// Returns the quality that the manifest documents, or without a manifest that of the pack that is read. Its
    /// `evidence` was measured without `--dtype` and without corrections of statistics along a quantized model, so it
    /// is left out with these.
    fn quality(&self) -> Option<Quality> {
        let quality = match &self.manifest {
            Some(manifest) => manifest.document().quality(),
            None => self.checkpoint.pack().and_then(|reader| reader.description.quality.clone()),
        }?;
        let Quality { evidence, mut task_evidence, .. } = quality;
        let corrected = self.calibration.as_ref().is_some_and(|found| found.description().quantized.is_some());
        let is_measured = self.options.dtype.is_none() && !corrected;
        task_evidence.retain(|_| is_measured);
        Some(Quality { evidence: evidence.filter(|_| is_measured), task_evidence, ..quality })
    }

    fn bytes_in(&self) -> u64 {
        self.checkpoint.files().iter().map(InputFile::nbytes).sum()
    }
}

/// Returns the cost of an item, by which tasks are distributed to parts: bytes read, times the cost of converting a
/// byte relative to hashing it.
fn weight(item: &PackItem<'_>) -> u64 {
    let factor = match &item.work {
        Encoding::Copy | Encoding::Codes(_) | Encoding::Packed(..) => 2,
        Encoding::Convert(_) => 4,
        Encoding::Quantize(quant) if quant.method == Method::Rtn => 8,
        Encoding::Quantize(_) => 32,
    };
    item.tensor.source_bytes() * factor
}
