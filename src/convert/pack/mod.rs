//! How is a checkpoint packed? Decide, reserve, fill, commit.
//!
//! [`plan`] decides the store of every tensor before a byte is read. Then every worker thread takes one task after the
//! other, a tensor or the hash of a shard, and moves it chunk by chunk through its own buffers: memory is bounded by the
//! number of threads, and the bytes do not depend on it.

pub(crate) mod companions;
mod fill;
pub mod plan;

use super::layout::Layout;
use super::{Aids, Checkpoint};
use crate::dtype::DType;
use crate::error::{Context, Error, Result};
use crate::iebin::writer::PlannedTensor;
use crate::iebin::{DescriptionParts, IebinWriter, JSON_NAME, Source, SourceFile, Store};
use crate::manifest::Manifest;
use crate::{interrupt, progress};
use fill::Filler;
use indicatif::ProgressBar;
use plan::Item;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// What is packed, and how.
#[derive(Debug, Clone, Default)]
pub struct PackOptions {
    /// The checkpoint.
    pub hf_dir: PathBuf,
    /// The configuration, instead of the checkpoint's `config.json`.
    pub config: Option<PathBuf>,
    /// Where the pack goes; made when missing.
    pub out_dir: PathBuf,
    /// A quantization manifest.
    pub manifest: Option<PathBuf>,
    /// The float type of tensors that are not quantized; `None` keeps each as it is.
    pub dtype: Option<DType>,
    /// A tokenizer.json that replaces the checkpoint's.
    pub tokenizer: Option<PathBuf>,
    /// Replace an existing pack.
    pub overwrite: bool,
}

/// What was packed.
#[derive(Debug, Clone, Serialize)]
pub struct PackSummary {
    /// Class name of the model.
    pub architecture: String,
    /// Number of tensors.
    pub tensors: usize,
    /// Of these, stored quantized.
    pub quantized_tensors: usize,
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

/// Packs a checkpoint.
///
/// # Errors
/// The checkpoint is damaged or not supported, the manifest does not fit it, or the output cannot be written. Nothing is
/// left in `out_dir` then.
pub fn pack(options: &PackOptions) -> Result<PackSummary> {
    let start = Instant::now();
    refuse_occupied(&options.out_dir, options.overwrite)?;
    let manifest = options.manifest.as_deref().map(ManifestFile::load).transpose()?;
    let aids = Aids { config: options.config.as_deref(), manifest: manifest.as_ref().map(|m| &m.manifest) };
    let checkpoint = Checkpoint::open_with(&options.hf_dir, aids)?;
    let items = match &manifest {
        Some(m) => plan::plan(&checkpoint, options.dtype, Some(&m.manifest)).at(&m.path)?,
        None => plan::plan(&checkpoint, options.dtype, None)?,
    };
    for PlannedTensor { name, shape, store, .. } in items.iter().map(|item| &item.planned) {
        progress::detail(2, || format!("{name} {shape:?}: stored as {}", stored_as(store)));
    }
    let companions = companions::collect(&checkpoint, options.tokenizer.as_deref())?;
    let planned = items.iter().map(|item| item.planned.clone()).collect();
    let writer = IebinWriter::create(&options.out_dir, planned, options.overwrite)?;

    let job = Job { checkpoint: &checkpoint, items: &items, writer: &writer, manifest: manifest.as_ref() };
    let digests = job.run()?;
    let source = Source { repo: checkpoint.repo(), files: digests.shards };
    manifest.as_ref().map_or(Ok(()), |m| m.check_source(&source))?;
    let parts = DescriptionParts {
        model: Some(checkpoint.config().clone()),
        tokenizer: companions.has_tokenizer().then(|| companions::TOKENIZER.to_string()),
        source: Some(source),
        companions: companions.write(&options.out_dir)?,
        obsolete: if options.out_dir.join(JSON_NAME).exists() { companions.obsolete() } else { Vec::new() },
    };
    let entries = writer.finish(parts, digests.tensors)?;

    let payload: u64 = entries.iter().map(|e| e.nbytes as u64).sum();
    let parameters: u64 = entries.iter().map(|e| e.elements() as u64).sum();
    let bytes_in = checkpoint.shards().files().iter().map(|s| s.nbytes()).sum();
    let seconds = start.elapsed().as_secs_f64();
    Ok(PackSummary {
        architecture: checkpoint.config().architecture.clone(),
        tensors: entries.len(),
        quantized_tensors: items.iter().filter(|item| item.is_quantized()).count(),
        parameters,
        bytes_in,
        bytes_out: entries.last().map_or(0, |e| (e.offset + e.nbytes) as u64),
        bits_per_weight: payload as f64 * 8.0 / parameters as f64,
        seconds,
        mb_per_s: bytes_in as f64 / 1e6 / seconds,
        tokenizer: companions.has_tokenizer(),
    })
}

fn stored_as(store: &Store) -> &'static str {
    match store {
        Store::Plain(dtype) => dtype.name(),
        Store::Tiled(spec) => spec.scheme.name(),
    }
}

/// Refuses to put a pack where files would be lost: among a checkpoint's weights, or over a stranger's configuration.
fn refuse_occupied(dir: &Path, overwrite: bool) -> Result<()> {
    if Layout::lies_in(dir) {
        let found = "holds a checkpoint, whose configuration a pack would replace";
        return Err(Error::usage(found).at(dir).help("choose another --out-dir"));
    }
    match companions::NAMES.iter().map(|name| dir.join(name)).find(|path| path.exists()) {
        Some(path) if !overwrite && !dir.join(JSON_NAME).exists() => {
            Err(Error::usage("exists already").at(path).help("add --overwrite or choose another --out-dir"))
        }
        _ => Ok(()),
    }
}

/// A manifest and where it came from.
struct ManifestFile {
    path: PathBuf,
    manifest: Manifest,
}

impl ManifestFile {
    fn load(path: &Path) -> Result<ManifestFile> {
        Ok(ManifestFile { path: path.to_path_buf(), manifest: Manifest::load(path)? })
    }

    /// Refuses a manifest that was made from other weights, as far as it names them.
    fn check_source(&self, found: &Source) -> Result<()> {
        let Some(made_from) = &self.manifest.document().source else { return Ok(()) };
        for expected in &made_from.files {
            let Some(file) = found.files.iter().find(|f| f.name == expected.name) else { continue };
            let same_hash = expected.sha256.is_empty() || expected.sha256 == file.sha256;
            if file.bytes != expected.bytes || !same_hash {
                let found = format!("was made from another `{}` than the checkpoint has", file.name);
                return Err(Error::corrupt(found).at(&self.path).help("make the manifest again from this checkpoint"));
            }
        }
        Ok(())
    }
}

/// Everything the workers share.
struct Job<'a> {
    checkpoint: &'a Checkpoint,
    items: &'a [Item<'a>],
    writer: &'a IebinWriter,
    manifest: Option<&'a ManifestFile>,
}

/// One piece of work for one thread; each results in a SHA-256.
#[derive(Debug, Clone, Copy)]
enum Task {
    ManifestFile(usize),
    Shard(usize),
    Tensor(usize),
}

struct Digests {
    tensors: Vec<String>,
    shards: Vec<SourceFile>,
}

impl Job<'_> {
    fn run(&self) -> Result<Digests> {
        let tasks = self.tasks();
        let bar = progress::bytes("packing", self.total_bytes());
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let done: Vec<(usize, Result<String>)> = rayon::broadcast(|_| {
            let mut filler = Filler::new(self.checkpoint, self.writer, &bar);
            let mut done = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(task) = tasks.get(number) else { break };
                let result = self.perform(*task, &mut filler, &bar);
                if result.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
                done.push((number, result));
            }
            done
        })
        .into_iter()
        .flatten()
        .collect();
        bar.finish_and_clear();
        interrupt::check()?;
        self.collect(&tasks, done)
    }

    /// Tensors in the order in which they lie on disk, each shard's hash before its tensors: what one thread reads is
    /// still in the page cache for the other.
    fn tasks(&self) -> Vec<Task> {
        let files = self.manifest.map_or(0, |m| m.manifest.document().files.len());
        let mut order: Vec<usize> = (0..self.items.len()).collect();
        order.sort_by_key(|i| self.items[*i].tensor.position());
        let mut tasks: Vec<Task> = (0..files).map(Task::ManifestFile).collect();
        for shard in 0..self.checkpoint.shards().files().len() {
            tasks.push(Task::Shard(shard));
            let here = order.iter().filter(|i| self.items[**i].tensor.position().0 == shard);
            tasks.extend(here.map(|i| Task::Tensor(*i)));
        }
        tasks
    }

    fn total_bytes(&self) -> u64 {
        let payloads: usize = self.writer.entries().iter().map(|e| e.nbytes).sum();
        payloads as u64 + self.checkpoint.shards().files().iter().map(|s| s.nbytes()).sum::<u64>()
    }

    fn perform(&self, task: Task, filler: &mut Filler, bar: &ProgressBar) -> Result<String> {
        match task {
            Task::Tensor(i) => {
                let tensor = self.items[i].tensor;
                let source = self.checkpoint.shards().files()[tensor.position().0].path();
                filler.fill(i, &self.items[i]).tensor(&tensor.name).at(source)
            }
            Task::Shard(i) => {
                let shard = &self.checkpoint.shards().files()[i];
                fill::hash_file(shard.nbytes(), |at, out| shard.read_at(at, out), bar)
            }
            Task::ManifestFile(i) => self.manifest.map_or(Ok(String::new()), |m| m.check_file(i, bar)),
        }
    }

    fn collect(&self, tasks: &[Task], mut done: Vec<(usize, Result<String>)>) -> Result<Digests> {
        done.sort_by_key(|(number, _)| *number);
        let mut tensors = vec![String::new(); self.items.len()];
        let mut shards = Vec::new();
        for (number, result) in done {
            let sha256 = result?;
            match tasks[number] {
                Task::Tensor(i) => tensors[i] = sha256,
                Task::Shard(i) => {
                    let shard = &self.checkpoint.shards().files()[i];
                    let name = shard.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
                    shards.push(SourceFile { name, bytes: shard.nbytes(), sha256 });
                }
                Task::ManifestFile(_) => {}
            }
        }
        Ok(Digests { tensors, shards })
    }
}

impl ManifestFile {
    /// Hashes file number `i` of the manifest and compares.
    fn check_file(&self, i: usize, bar: &ProgressBar) -> Result<String> {
        use std::os::unix::fs::FileExt;
        let expected = &self.manifest.document().files[i];
        let path = self.path.parent().unwrap_or(Path::new("")).join(&expected.name);
        let file = std::fs::File::open(&path).at(&path)?;
        let bytes = file.metadata().at(&path)?.len();
        let sha256 = fill::hash_file(bytes, |at, out| file.read_exact_at(out, at).at(&path), bar)?;
        if bytes != expected.bytes || sha256 != expected.sha256 {
            let found = format!("{bytes} bytes with SHA-256 {sha256}, the manifest says {}", expected.sha256);
            return Err(Error::corrupt(found).at(&path).help("run `iec q4` again"));
        }
        Ok(sha256)
    }
}
