//! The tasks of a pack, dealt out to threads: tensors to fill, shards and manifest files to hash.
//!
//! Every worker thread takes one task after the other and moves it chunk by chunk through its own buffers: memory is
//! bounded by the number of threads, and the bytes do not depend on it. What an earlier run or a part has finished is
//! read back and compared instead of made.

use super::fill::{Filling, Scratch};
use super::manifest_file::ManifestFile;
use super::plan::{Item, Work};
use crate::calibration::Calibration;
use crate::convert::Checkpoint;
use crate::convert::digest::{hash_file, hash_range};
use crate::convert::outlook::source_bytes;
use crate::error::{Context, Error, Result};
use crate::iebin::{BIN_NAME, IebinWriter};
use crate::job::{Found, Job, Share, deal};
use crate::progress::{self, ProgressBar};
use crate::provenance::SourceFile;
use crate::quant_spec::Method;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Everything the workers share.
pub(super) struct Packing<'a> {
    pub checkpoint: &'a Checkpoint,
    pub items: &'a [Item<'a>],
    pub writer: &'a IebinWriter,
    pub manifest: Option<&'a ManifestFile>,
    pub calibration: Option<&'a Calibration>,
    pub share: &'a Share,
    pub job: &'a Job,
}

/// One piece of work for one thread; each results in a SHA-256.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    ManifestFile(usize),
    Shard(usize),
    Tensor(usize),
}

/// What the tasks of this run resulted in.
pub(super) struct Digests {
    /// Per tensor; `None` where it belongs to another part.
    pub tensors: Vec<Option<String>>,
    /// Of the shards of this run.
    pub shards: Vec<SourceFile>,
    /// Tensors that were taken over instead of made.
    pub resumed: usize,
}

/// Tensors that one thread fills at the same time, because two hashes together take little longer than one.
const TOGETHER: usize = 2;

/// What the threads share.
struct Shared<'a> {
    tasks: &'a [Task],
    bar: &'a ProgressBar,
    next: AtomicUsize,
    stop: AtomicBool,
}

impl Shared<'_> {
    /// The next task to do, unless there is none; a `second` one only while there are enough for all threads.
    fn next(&self, second: bool) -> Option<usize> {
        let spared = if second { rayon::current_num_threads() } else { 0 };
        if self.stop.load(Ordering::Relaxed) || self.next.load(Ordering::Relaxed) + spared >= self.tasks.len() {
            return None;
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        (number < self.tasks.len()).then_some(number)
    }

    /// The results of a thread whose last task failed; the others stop.
    fn failed<T>(&self, mut done: Vec<(usize, Result<T>)>, number: usize, error: Error) -> Vec<(usize, Result<T>)> {
        self.stop.store(true, Ordering::Relaxed);
        done.push((number, Err(error)));
        done
    }
}

/// The tasks of a whole pack. Tensors come in the order in which they lie on disk, each shard's hash before its tensors:
/// what one thread reads is still in the page cache for the other.
fn tasks(checkpoint: &Checkpoint, items: &[Item<'_>], manifest: Option<&ManifestFile>) -> Vec<Task> {
    let files = manifest.map_or(0, |m| m.manifest.document().files.len());
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|i| items[*i].tensor.position());
    let mut tasks: Vec<Task> = (0..files).map(Task::ManifestFile).collect();
    for shard in 0..checkpoint.shards().files().len() {
        tasks.push(Task::Shard(shard));
        let here = order.iter().filter(|i| items[**i].tensor.position().0 == shard);
        tasks.extend(here.map(|i| Task::Tensor(*i)));
    }
    tasks
}

/// All tasks with the number of the part that does them: dealt out by bytes, weighed by what is done with them.
fn dealt(
    count: usize,
    checkpoint: &Checkpoint,
    items: &[Item<'_>],
    manifest: Option<&ManifestFile>,
) -> Vec<(Task, usize)> {
    let tasks = tasks(checkpoint, items, manifest);
    let weight = |task: &Task| match task {
        Task::ManifestFile(i) => manifest.map_or(0, |m| m.manifest.document().files[*i].bytes),
        Task::Shard(i) => checkpoint.shards().files()[*i].nbytes(),
        Task::Tensor(i) => weight_of(&items[*i]),
    };
    let of = deal(&tasks.iter().map(weight).collect::<Vec<_>>(), count);
    tasks.into_iter().zip(of).collect()
}

/// The tasks of this run.
pub(super) fn tasks_of(
    share: &Share,
    checkpoint: &Checkpoint,
    items: &[Item<'_>],
    manifest: Option<&ManifestFile>,
) -> Vec<Task> {
    match share {
        Share::Part(part) => {
            let dealt = dealt(part.count, checkpoint, items, manifest);
            dealt.into_iter().filter(|(_, number)| *number == part.number).map(|(task, _)| task).collect()
        }
        Share::Whole | Share::Merge(_) => tasks(checkpoint, items, manifest),
    }
}

/// Bytes read, times what they cost against hashing alone. Only the balance of parts depends on the factors.
fn weight_of(item: &Item<'_>) -> u64 {
    let factor = match &item.work {
        Work::Copy | Work::Mxfp4 | Work::Packed(..) => 2,
        Work::Convert(_) => 4,
        Work::Quantize(quant) if quant.method == Method::Rtn => 8,
        Work::Quantize(_) => 32,
    };
    source_bytes(item.tensor.kind, item.tensor.elements()) * factor
}

impl Packing<'_> {
    pub fn run(&self) -> Result<Digests> {
        let tasks = tasks_of(self.share, self.checkpoint, self.items, self.manifest);
        if let Share::Merge(_) = self.share {
            self.refuse_missing(&tasks)?;
        }
        self.job.keep(&[self.writer.file()], || self.work(&tasks))
    }

    /// Names the parts whose work is not there.
    fn refuse_missing(&self, tasks: &[Task]) -> Result<()> {
        if tasks.iter().all(|task| self.job.found::<String>(&self.name(*task)).next().is_some()) {
            return Ok(());
        }
        Err(self.job.missing(|count| {
            let dealt = dealt(count, self.checkpoint, self.items, self.manifest);
            dealt.into_iter().map(|(task, number)| (self.name(task), number)).collect()
        }))
    }

    fn work(&self, tasks: &[Task]) -> Result<Digests> {
        let bar = progress::bytes("packing", tasks.iter().map(|task| self.nbytes(*task)).sum());
        let shared = Shared { tasks, bar: &bar, next: AtomicUsize::new(0), stop: AtomicBool::new(false) };
        let resumed = AtomicUsize::new(0);
        let done = rayon::broadcast(|_| self.work_one(&shared, &resumed)).into_iter().flatten().collect();
        bar.finish_and_clear();
        self.collect(tasks, done, resumed.into_inner())
    }

    /// One thread's part of the work: tasks and their results.
    fn work_one(&self, shared: &Shared<'_>, resumed: &AtomicUsize) -> Vec<(usize, Result<String>)> {
        let mut scratch = Scratch::default();
        let (mut numbers, mut fillings) = (Vec::new(), Vec::new());
        let mut done = Vec::new();
        loop {
            while fillings.len() < TOGETHER
                && let Some(number) = shared.next(!fillings.is_empty())
            {
                let task = shared.tasks[number];
                match (self.do_at_once(task, shared.bar, resumed), task) {
                    (Ok(None), Task::Tensor(i)) => {
                        numbers.push(number);
                        fillings.push(Filling::new(self, shared.bar, i));
                    }
                    (Ok(None), _) => unreachable!("only tensors are filled"),
                    (Ok(Some(sha256)), _) => done.push((number, Ok(sha256))),
                    (Err(e), _) => return shared.failed(done, number, e),
                }
            }
            if fillings.is_empty() {
                return done;
            }
            let mut i = 0;
            while i < fillings.len() {
                match fillings[i].step(&mut scratch) {
                    Ok(true) => i += 1,
                    Ok(false) => {
                        let (number, sha256) = (numbers.swap_remove(i), fillings.swap_remove(i).finish());
                        match self.record(shared.tasks[number], sha256) {
                            Ok(sha256) => done.push((number, Ok(sha256))),
                            Err(e) => return shared.failed(done, number, e),
                        }
                    }
                    Err(e) => return shared.failed(done, numbers[i], e),
                }
            }
            Filling::hash(&mut fillings);
        }
    }

    /// The result of a task that was finished before, with its data in place; `None` when it is to be made.
    fn take_over(&self, task: Task, bar: &ProgressBar, resumed: &AtomicUsize) -> Result<Option<String>> {
        let name = self.name(task);
        let mut damaged = None;
        for found in self.job.found::<String>(&name) {
            let Task::Tensor(i) = task else { return Ok(Some(found.result)) };
            if self.read_back(i, &found, bar)? {
                if found.part.is_some() {
                    self.job.record(&name, &found.result, self.nbytes(task))?;
                }
                resumed.fetch_add(1, Ordering::Relaxed);
                return Ok(Some(found.result));
            }
            damaged = found.part.or(damaged);
        }
        match (damaged, self.share) {
            (Some(part), Share::Merge(_)) => Err(Job::damaged(part)).tensor(&name),
            _ => Ok(None),
        }
    }

    /// True when the payload is where the journal says, with that hash; a part's is copied on the way.
    fn read_back(&self, i: usize, found: &Found<'_, String>, bar: &ProgressBar) -> Result<bool> {
        let entry = &self.writer.entries()[i];
        let range = entry.offset as u64..(entry.offset + entry.nbytes) as u64;
        let Some(data) = self.job.open_data(found, BIN_NAME, range.end) else { return Ok(false) };
        let copy = |at: u64, bytes: &[u8]| match found.part {
            Some(_) => self.writer.write_at(i, at as usize - entry.offset, bytes),
            None => Ok(()),
        };
        Ok(hash_range(range, bar, |at, out| data.read_at(at, out), copy)? == found.result)
    }

    /// The result of a task that needs no filling: one that was finished before, or hashes a file.
    fn do_at_once(&self, task: Task, bar: &ProgressBar, resumed: &AtomicUsize) -> Result<Option<String>> {
        if let Some(sha256) = self.take_over(task, bar, resumed)? {
            return Ok(Some(sha256));
        }
        let sha256 = match task {
            Task::Tensor(_) => return Ok(None),
            Task::Shard(i) => {
                let shard = &self.checkpoint.shards().files()[i];
                hash_file(shard.nbytes(), bar, |at, out| shard.read_at(at, out))?
            }
            Task::ManifestFile(i) => self.manifest.map_or(Ok(String::new()), |m| m.check_file(i, bar))?,
        };
        self.record(task, sha256).map(Some)
    }

    /// Notes that a task is finished.
    fn record(&self, task: Task, sha256: String) -> Result<String> {
        self.job.record(&self.name(task), &sha256, self.nbytes(task))?;
        Ok(sha256)
    }

    fn name(&self, task: Task) -> String {
        match task {
            Task::Tensor(i) => format!("tensor {}", self.items[i].planned.name),
            Task::Shard(i) => format!("shard {}", self.shard_name(i)),
            Task::ManifestFile(i) => format!("manifest file {i}"),
        }
    }

    fn shard_name(&self, i: usize) -> String {
        let path = self.checkpoint.shards().files()[i].path();
        path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Bytes that a task writes, or reads where it only hashes.
    fn nbytes(&self, task: Task) -> u64 {
        match task {
            Task::Tensor(i) => self.writer.entries()[i].nbytes as u64,
            Task::Shard(i) => self.checkpoint.shards().files()[i].nbytes(),
            Task::ManifestFile(i) => self.manifest.map_or(0, |m| m.manifest.document().files[i].bytes),
        }
    }

    fn collect(&self, tasks: &[Task], mut done: Vec<(usize, Result<String>)>, resumed: usize) -> Result<Digests> {
        done.sort_by_key(|(number, _)| *number);
        let mut tensors = vec![None; self.items.len()];
        let mut shards = Vec::new();
        for (number, result) in done {
            let sha256 = result?;
            match tasks[number] {
                Task::Tensor(i) => tensors[i] = Some(sha256),
                Task::Shard(i) => {
                    let bytes = self.checkpoint.shards().files()[i].nbytes();
                    shards.push(SourceFile { name: self.shard_name(i), bytes, sha256 });
                }
                Task::ManifestFile(_) => {}
            }
        }
        Ok(Digests { tensors, shards, resumed })
    }
}
