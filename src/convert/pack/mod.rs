//! How is a checkpoint packed? Decide, reserve, fill, commit.
//!
//! [`plan`] decides the store of every tensor before a byte is read; that is also what a dry run tells. `work` fills the
//! binary, task by task, as a [`Job`] that can be interrupted, continued and shared among machines.

pub(crate) mod companions;
mod fill;
mod manifest_file;
pub mod plan;
mod work;

pub(super) use fill::refuse_overflow;

use super::layout;
use super::outlook::{Disk, Outlook, Row, source_bytes};
use super::{Aids, Checkpoint};
use crate::calibration::Calibration;
use crate::convert::guidance;
use crate::dtype::DType;
use crate::error::{Context, Error, Result};
use crate::iebin::dependants;
use crate::iebin::writer::{Layout, PlannedTensor, refuse_existing};
use crate::iebin::{self, BIN_NAME, DescriptionParts, IebinWriter, JSON_NAME};
use crate::job::{self, Command, DataFile, Fingerprint, Job, Order, Output, RunOptions, Share};
use crate::output::{self, absolute, refuse_within};
use crate::progress;
use crate::provenance::Quality;
use crate::provenance::Source;
use companions::Companions;
use manifest_file::ManifestFile;
use plan::{Item, Work};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;
use work::{Digests, Packing, Task, tasks_of};

/// Name of the command, as parts record it.
pub const COMMAND: &str = "pack";

/// What is packed, and how.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct PackOptions {
    /// The checkpoint.
    pub hf_dir: PathBuf,
    /// The configuration, instead of the checkpoint's `config.json`.
    pub config: Option<PathBuf>,
    /// Where the pack goes; made when missing.
    #[serde(skip)]
    pub out_dir: PathBuf,
    /// A quantization manifest.
    pub manifest: Option<PathBuf>,
    /// Statistics of the model's inputs, where the manifest's methods need them.
    #[serde(default)]
    pub calibration: Option<PathBuf>,
    /// The float type of tensors that are not quantized; `None` keeps each as it is.
    pub dtype: Option<DType>,
    /// A tokenizer.json that replaces the checkpoint's.
    pub tokenizer: Option<PathBuf>,
    /// Replace an existing pack.
    pub overwrite: bool,
    /// How the work is run; it does not show in the pack.
    #[serde(skip)]
    pub run: RunOptions,
}

impl PackOptions {
    /// The files that are read beside the checkpoint.
    fn inputs(&self) -> output::Inputs {
        output::Inputs::default()
            .files([&self.config, &self.manifest, &self.calibration, &self.tokenizer].into_iter().flatten())
    }
}

/// What was packed. For a part, everything but `architecture` is about the part.
#[derive(Debug, Clone, Serialize)]
pub struct PackSummary {
    /// Class name of the model.
    pub architecture: String,
    /// Which part; absent for a whole pack.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Number of tensors.
    pub tensors: usize,
    /// Of these, stored quantized.
    pub quantized_tensors: usize,
    /// Of these, taken over from an interrupted run or from parts.
    pub resumed_tensors: usize,
    /// Number of weights.
    pub parameters: u64,
    /// Bytes of all weight files read.
    pub bytes_in: u64,
    /// Bytes of the binary written.
    pub bytes_out: u64,
    /// Payload bits per weight, scales and padding included.
    pub bits_per_weight: f64,
    /// Wall time.
    pub seconds: f64,
    /// Source bytes per second / 10^6.
    pub mb_per_s: f64,
    /// False when the checkpoint has no tokenizer.json and none was given.
    pub tokenizer: bool,
}

/// Packs a checkpoint, or does one part of it, or puts its parts together.
///
/// # Errors
/// The checkpoint is damaged or not supported, the manifest does not fit it, or the output cannot be written. Nothing is
/// left under a final name then; what was finished before an interrupt or a failure of the disk is kept for the next run.
pub fn pack(options: &PackOptions) -> Result<PackSummary> {
    let start = Instant::now();
    let inputs = Inputs::open(options)?;
    let items = inputs.plan()?;
    for item in &items {
        let PlannedTensor { name, shape, .. } = &item.planned;
        progress::detail(2, || format!("{name} {shape:?}: stored as {}", item.stored_as()));
    }
    let decided = inputs.decide(&items)?;
    job::note_others(&options.out_dir, &decided.fingerprint);
    let tasks = tasks_of(&options.run.share, &inputs.checkpoint, &items, inputs.manifest.as_ref());
    let order = Order {
        fingerprint: &decided.fingerprint,
        command: Command::new(COMMAND, &inputs.repeatable()?),
        commit_point: JSON_NAME,
        output: Output::Alone,
        run: &options.run,
    };
    let bin =
        DataFile { name: BIN_NAME, len: decided.layout.total_bytes, ranges: ranges(options, &decided.layout, &tasks) };
    let (job, mut files) = Job::open(&options.out_dir, &order, &[bin])?;
    let writer = IebinWriter::resume(decided.layout, files.remove(0), job.dir());
    let outcome = inputs.fill(&items, writer, &job);
    let mut summary = job.conclude(outcome)?;
    summary.seconds = start.elapsed().as_secs_f64();
    summary.mb_per_s = summary.bytes_in as f64 / 1e6 / summary.seconds;
    Ok(summary)
}

/// What [`pack`] would do; nothing is written.
///
/// # Errors
/// As [`pack`], as far as it can be known before the work; a disk that is too full is no error here.
pub fn outlook(options: &PackOptions) -> Result<Outlook> {
    let inputs = Inputs::open(options)?;
    let items = inputs.plan()?;
    let decided = inputs.decide(&items)?;
    let row = |(item, entry): (&Item<'_>, &crate::iebin::Entry)| Row {
        name: entry.name.clone(),
        shape: entry.shape.clone(),
        source: item.tensor.kind.name(),
        stored: item.stored_as(),
        why: item.why.clone(),
        bytes_in: source_bytes(item.tensor.kind, item.tensor.elements()),
        bytes_out: entry.nbytes as u64,
    };
    let rows = items.iter().zip(&decided.layout.entries).map(row).collect();
    let disk = Disk::new(&options.out_dir, &decided.fingerprint, decided.layout.total_bytes, &[BIN_NAME])?;
    Ok(Outlook::new(rows, inputs.bytes_in(), Some(disk)))
}

/// What this run will fill: all of the binary, or the payloads of a part.
fn ranges(options: &PackOptions, layout: &Layout, tasks: &[Task]) -> Vec<std::ops::Range<u64>> {
    let payload = |task: &Task| match task {
        Task::Tensor(i) => {
            Some(layout.entries[*i].offset as u64..(layout.entries[*i].offset + layout.entries[*i].nbytes) as u64)
        }
        Task::Shard(_) | Task::ManifestFile(_) => None,
    };
    match options.run.share {
        Share::Part(_) => tasks.iter().filter_map(payload).collect(),
        Share::Whole | Share::Merge(_) => std::iter::once(0..layout.total_bytes).collect(),
    }
}

/// What is read.
struct Inputs<'a> {
    options: &'a PackOptions,
    checkpoint: Checkpoint,
    manifest: Option<ManifestFile>,
    calibration: Option<Calibration>,
    companions: Companions,
}

/// What is known before the work.
struct Decided {
    layout: Layout,
    fingerprint: String,
}

impl<'a> Inputs<'a> {
    fn open(options: &'a PackOptions) -> Result<Inputs<'a>> {
        refuse_within(&options.hf_dir, &options.out_dir).help("choose another --out-dir")?;
        let manifest = options.manifest.as_deref().map(ManifestFile::load).transpose()?;
        let document = manifest.as_ref().map(|m| m.manifest.document());
        let calibration = guidance::open(document, options.calibration.as_deref())?;
        let aids = Aids { config: options.config.as_deref(), manifest: manifest.as_ref().map(|m| &m.manifest) };
        let checkpoint = Checkpoint::open_with(&options.hf_dir, aids)?;
        let companions = companions::collect(&checkpoint, options.tokenizer.as_deref())?;
        Ok(Inputs { options, checkpoint, manifest, calibration, companions })
    }

    fn plan(&self) -> Result<Vec<Item<'_>>> {
        match &self.manifest {
            Some(m) => plan::plan(&self.checkpoint, self.options.dtype, Some(&m.manifest)).at(&m.path),
            None => plan::plan(&self.checkpoint, self.options.dtype, None),
        }
    }

    /// Lays the pack out, and refuses directories in which something would be lost.
    fn decide(&self, items: &[Item<'_>]) -> Result<Decided> {
        let layout = Layout::new(items.iter().map(|item| item.planned.clone()).collect())?;
        let fingerprint = self.fingerprint(items)?;
        if !job::was_torn(&self.options.out_dir, &fingerprint, JSON_NAME) {
            refuse_occupied(&self.options.out_dir, self.options.overwrite, &self.options.inputs())?;
        }
        Ok(Decided { layout, fingerprint })
    }

    /// Everything that decides about the bytes of the binary.
    fn fingerprint(&self, items: &[Item<'_>]) -> Result<String> {
        let mut fingerprint = Fingerprint::new(COMMAND);
        let config = serde_json::to_string(self.checkpoint.config()).expect("plain data always serializes");
        fingerprint.field("config", config);
        for shard in self.checkpoint.shards().files() {
            fingerprint.file(shard.path())?;
        }
        let mut finished = BTreeSet::new();
        for item in items {
            let (planned, position) = (&item.planned, item.tensor.position());
            fingerprint.field("tensor", format_args!("{planned:?} {position:?} {}", item.work.in_full()));
            if let Work::Packed(_, range) = &item.work {
                finished.extend([&range.bin, &range.scale_bin]);
            }
        }
        finished.into_iter().try_for_each(|path| fingerprint.file(path))?;
        fingerprint.field("calibration", self.calibration.as_ref().map_or("", Calibration::seal));
        if let Some(ManifestFile { manifest, .. }) = &self.manifest {
            fingerprint.field("manifest", String::from_utf8_lossy(&manifest.document().to_json()));
        }
        Ok(fingerprint.finish())
    }

    /// The options as another process can repeat them, wherever it is started.
    fn repeatable(&self) -> Result<PackOptions> {
        let options = self.options;
        let path = |path: &Option<PathBuf>| path.as_deref().map(absolute).transpose();
        Ok(PackOptions {
            hf_dir: absolute(&options.hf_dir)?,
            config: path(&options.config)?,
            manifest: path(&options.manifest)?,
            calibration: path(&options.calibration)?,
            tokenizer: path(&options.tokenizer)?,
            ..options.clone()
        })
    }

    fn fill(&self, items: &[Item<'_>], writer: IebinWriter, job: &Job) -> Result<PackSummary> {
        let share = &self.options.run.share;
        let manifest = self.manifest.as_ref();
        let calibration = self.calibration.as_ref();
        let packing =
            Packing { checkpoint: &self.checkpoint, items, writer: &writer, manifest, calibration, share, job };
        let Digests { tensors, shards, resumed } = packing.run()?;
        let mut summary = self.summary(items, &writer, &tensors);
        summary.resumed_tensors = resumed;
        if let Share::Part(part) = share {
            summary.part = Some(part.to_string());
            return Ok(summary);
        }
        let source = Source { repo: self.checkpoint.repo(), files: shards };
        manifest.map_or(Ok(()), |m| m.check_source(&source))?;
        let out_dir = &self.options.out_dir;
        let parts = DescriptionParts {
            model: Some(self.checkpoint.config().clone()),
            tokenizer: self.companions.has_tokenizer().then(|| companions::TOKENIZER.to_string()),
            source: Some(source),
            quality: manifest.and_then(|m| self.quality(m)),
            companions: self.companions.write(job)?,
            obsolete: if out_dir.join(JSON_NAME).exists() { self.companions.obsolete() } else { Vec::new() },
        };
        job.commit_begins()?;
        writer.finish(parts, tensors.into_iter().flatten().collect())?;
        Ok(summary)
    }

    /// What the manifest proves. The answers were measured of a model whose other tensors were kept as they are.
    fn quality(&self, manifest: &ManifestFile) -> Option<Quality> {
        let quality = manifest.manifest.document().quality()?;
        Some(Quality { evidence: quality.evidence.filter(|_| self.options.dtype.is_none()), ..quality })
    }

    fn summary(&self, items: &[Item<'_>], writer: &IebinWriter, done: &[Option<String>]) -> PackSummary {
        let entries = || writer.entries().iter().zip(done).filter(|(_, d)| d.is_some()).map(|(entry, _)| entry);
        let quantized = items.iter().zip(done).filter(|(item, d)| d.is_some() && item.is_quantized());
        let payload: u64 = entries().map(|e| e.nbytes as u64).sum();
        let parameters: u64 = entries().map(|e| e.elements() as u64).sum();
        let part = matches!(self.options.run.share, Share::Part(_));
        PackSummary {
            architecture: self.checkpoint.config().architecture.clone(),
            part: None,
            tensors: entries().count(),
            quantized_tensors: quantized.count(),
            resumed_tensors: 0,
            parameters,
            bytes_in: self.bytes_in(),
            bytes_out: if part { payload } else { writer.entries().last().map_or(0, |e| (e.offset + e.nbytes) as u64) },
            bits_per_weight: payload as f64 * 8.0 / parameters.max(1) as f64,
            seconds: 0.0,
            mb_per_s: 0.0,
            tokenizer: self.companions.has_tokenizer(),
        }
    }

    fn bytes_in(&self) -> u64 {
        self.checkpoint.shards().files().iter().map(|s| s.nbytes()).sum()
    }
}

/// Refuses to put a pack where files would be lost: among a checkpoint's weights, over a stranger's configuration, over
/// what the command itself reads, or over a pack that others are rebuilt from.
pub(super) fn refuse_occupied(dir: &Path, overwrite: bool, inputs: &output::Inputs) -> Result<()> {
    if layout::Layout::lies_in(dir) {
        let found = "holds a checkpoint, whose configuration a pack would replace";
        return Err(Error::usage(found).at(dir).help("choose another --out-dir"));
    }
    inputs.refuse_members(dir, &iebin::members())?;
    dependants::refuse_if_needed(dir)?;
    if overwrite {
        return Ok(());
    }
    refuse_existing(dir)?;
    match companions::NAMES.iter().map(|name| dir.join(name)).find(|path| path.exists()) {
        Some(path) => Err(Error::usage("exists already").at(path).help("add --overwrite or choose another --out-dir")),
        None => Ok(()),
    }
}
