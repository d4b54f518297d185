//! Runs a conversion. This is the only place where tasks are distributed to threads and parts, where finished tasks
//! are recorded, verified and reused, and where output is written and hashed.
//!
//! A [`Conversion`] is plain data: the output files with their lengths, and tasks with a name, a weight and the
//! sections of the files that they fill. Each command adds two functions: `make` produces the bytes of one item, and
//! `commit` gives the finished files their names. The bytes do not depend on the number of threads or parts.
//!
//! Every result is recorded in the journal of a [`Job`] with the SHA-256 of each section. A later run reads
//! the sections back and repeats each task whose hash differs. `iec merge` is the same run,
//! except that it copies the sections of the parts while it reads them back.

mod output;

pub(super) use output::TaskOutput;

use super::digest::hash_range;
use super::disk::Disk;
use super::source::checksum::Comparison;
use super::source::read_at::{InputFile, ReadAt};
use crate::error::{Context, Result};
use crate::job::{self, Command, DataFile, Found, Job, Order, Output, RunOptions, Share, deal};
use crate::output::AtomicFile;
use crate::progress;
use crate::progress::ProgressBar;
use crate::sha256::{Digest as _, Sha256, hex};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Complete plan of a conversion, made before the first byte is written.
pub(super) struct Conversion<'a> {
    /// Command that `iec merge` repeats.
    pub command: Command,
    /// Directory of the output.
    pub out_dir: &'a Path,
    /// Digest of everything that affects the bytes of the output.
    pub fingerprint: String,
    /// Name of the file that readers open first, for outputs that [`crate::output::swap`] replaces.
    pub lead: Option<&'a str>,
    /// Decides whether interrupted work of other commands in `out_dir` is removed once this output is complete.
    pub output: Output,
    /// Options of the user: part, `--fresh`, and interval of syncs.
    pub run: &'a RunOptions,
    /// Label of the progress bar.
    pub label: &'static str,
    /// Files that the tasks fill.
    pub files: Vec<DataFile>,
    /// All tasks, in the order in which they are started.
    pub tasks: Vec<Task<'a>>,
}

/// Unit of work: it is either finished or has to be done again from its start.
pub(super) struct Task<'a> {
    /// Unique name that identifies the task in the journal and in other parts.
    pub name: String,
    /// Cost relative to other tasks; only the balance between parts depends on it.
    pub weight: u64,
    /// Units by which the task advances the progress bar: bytes or weights.
    pub length: u64,
    /// True when the task itself uses all threads; such tasks run one after the other.
    pub parallel: bool,
    /// Input that must not change while the conversion runs.
    pub source: Option<&'a InputFile>,
    /// Work to do.
    pub work: Work<'a>,
}

/// Function that reads an input to its end and returns its digest; it advances the progress bar.
type Digest<'a> = Box<dyn Fn(&ProgressBar) -> Result<String> + Send + Sync + 'a>;

/// Kind of work of a task.
pub(super) enum Work<'a> {
    /// Makes item number `item`, which fills these sections.
    Make { item: usize, sections: Vec<Section> },
    /// Hashes an input.
    Hash(Digest<'a>),
}

/// Byte range of an output file.
#[derive(Debug, Clone)]
pub(super) struct Section {
    /// Index of the file in [`Conversion::files`].
    pub file: usize,
    /// Bytes of the file.
    pub range: Range<u64>,
}

/// Result of a finished task, as recorded in the journal.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Made<T> {
    /// SHA-256 of each section, or of the input.
    pub sha256: Vec<String>,
    /// Return value of `make`; `None` for inputs.
    pub value: Option<T>,
}

/// Return value of `make` where nothing but the bytes of the sections is recorded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct OnlyBytes {}

/// Results of all tasks of a run.
pub(super) struct Finished<T> {
    /// Results by item; `None` for items of other parts.
    pub items: Vec<Option<Made<T>>>,
    /// SHA-256 of each hashed input; `None` for inputs of other parts.
    pub inputs: Vec<Option<String>>,
    /// Number of items that were reused from an earlier run or from parts.
    pub resumed: usize,
    /// The part that this run made, if it was one.
    pub part: Option<String>,
}

impl<'a> Task<'a> {
    /// Creates a task that makes an item and fills these sections.
    pub fn make(item: usize, name: &str, weight: u64, sections: Vec<Section>) -> Task<'a> {
        let length = sections.iter().map(|s| s.range.end - s.range.start).sum();
        let work = Work::Make { item, sections };
        Task { name: format!("tensor {name}"), weight, length, parallel: false, source: None, work }
    }

    /// Marks the task as one that uses all threads itself.
    pub fn parallel(self) -> Task<'a> {
        Task { parallel: true, ..self }
    }

    /// Creates a task that hashes an input of `length` bytes.
    pub fn hash(
        name: String,
        length: u64,
        digest: impl Fn(&ProgressBar) -> Result<String> + Send + Sync + 'a,
    ) -> Task<'a> {
        Task { name, weight: length, length, parallel: false, source: None, work: Work::Hash(Box::new(digest)) }
    }

    /// Creates a task that hashes a whole input file and compares the checksums that the file records. The conversion
    /// is refused if the file changes while it runs.
    pub fn hash_file(file: &'a InputFile) -> Task<'a> {
        let digest = |bar: &ProgressBar| {
            let mut comparison = Comparison::new(file.checksums());
            let pass = |at: u64, bytes: &[u8]| comparison.pass(at, bytes).at(file.path());
            hash_range(0..file.nbytes(), bar, |at, out| file.read_at(at, out), pass)
        };
        Task { source: Some(file), ..Task::hash(format!("shard {}", file.name()), file.nbytes(), digest) }
    }

    fn sections(&self) -> &[Section] {
        match &self.work {
            Work::Make { sections, .. } => sections,
            Work::Hash(_) => &[],
        }
    }
}

impl<T> Finished<T> {
    /// Returns the SHA-256 of the first section of every finished item, for items of one section. Items of other parts
    /// are left out.
    pub fn digests(&self) -> Vec<String> {
        self.items.iter().flatten().flat_map(|made| made.sha256.first().cloned()).collect()
    }

    /// Returns the elements of `all` whose items this run made or reused; `all` has one element per item.
    pub fn made<'a, I>(&self, all: &'a [I]) -> impl Iterator<Item = &'a I> {
        all.iter().zip(&self.items).filter(|(_, made)| made.is_some()).map(|(one, _)| one)
    }
}

impl Conversion<'_> {
    /// Makes all items of this run. Unless the run is one of several parts, it then calls `commit`, which gives the
    /// files their names.
    ///
    /// # Errors
    /// `make`, `commit` or hashing an input fails, an input was changed, the output cannot be written, or parts are
    /// missing. Finished tasks are kept for the next run if the cause may be temporary.
    pub fn run<T: Serialize + DeserializeOwned + Send>(
        &self,
        make: impl Fn(usize, &mut TaskOutput<'_>) -> Result<T> + Sync,
        commit: impl FnOnce(&Job, Vec<AtomicFile>, &Finished<T>) -> Result<()>,
    ) -> Result<Finished<T>> {
        if self.output == Output::Alone {
            job::note_others(self.out_dir, &self.fingerprint);
        }
        let numbers = self.numbers();
        let inputs = self.inputs();
        let order = Order {
            fingerprint: &self.fingerprint,
            inputs: &inputs,
            command: &self.command,
            lead: self.lead,
            output: self.output,
            run: self.run,
        };
        let (job, files) = Job::open(self.out_dir, &order, &self.files, &self.ranges(&numbers))?;
        let outcome = self.work(&job, &files, &numbers, &make).and_then(|finished| {
            self.tasks.iter().filter_map(|task| task.source).try_for_each(InputFile::refuse_change)?;
            if finished.part.is_none() {
                self.fill_gaps(&files)?;
                commit(&job, files, &finished)?;
            }
            Ok(finished)
        });
        job.conclude(outcome)
    }

    /// Returns a digest of the times at which the system last changed the input files.
    fn inputs(&self) -> String {
        let mut hash = Sha256::new();
        for file in self.tasks.iter().filter_map(|task| task.source) {
            hash.update(file.stamp().time_of_change());
            hash.update(" ");
        }
        hex(hash)
    }

    /// Computes the disk space that the conversion needs, for a dry run.
    pub fn disk(&self) -> Result<Disk> {
        let needed = self.files.iter().map(|file| file.len).sum();
        let names: Vec<&str> = self.files.iter().map(|file| file.partial_name.as_str()).collect();
        Disk::new(self.out_dir, &self.fingerprint, needed, &names)
    }

    /// Returns for each task the number of the part that does it, when there are `count` parts.
    fn dealt(&self, count: usize) -> Vec<usize> {
        deal(&self.tasks.iter().map(|task| task.weight).collect::<Vec<_>>(), count)
    }

    /// Returns the indices of the tasks of this run.
    fn numbers(&self) -> Vec<usize> {
        match self.run.share {
            Share::Whole | Share::Merge(_) => (0..self.tasks.len()).collect(),
            Share::Part(part) => {
                let dealt = self.dealt(part.count);
                (0..self.tasks.len()).filter(|n| dealt[*n] == part.number).collect()
            }
        }
    }

    /// Lists for each file the ranges that this run fills.
    fn ranges(&self, numbers: &[usize]) -> Vec<Vec<Range<u64>>> {
        let of_file = |(number, file): (usize, &DataFile)| match self.run.share {
            Share::Whole | Share::Merge(_) => std::iter::once(0..file.len).collect(),
            Share::Part(_) => {
                let sections = numbers.iter().flat_map(|n| self.tasks[*n].sections());
                sections.filter(|s| s.file == number).map(|s| s.range.clone()).collect()
            }
        };
        self.files.iter().enumerate().map(of_file).collect()
    }

    fn work<T: Serialize + DeserializeOwned + Send>(
        &self,
        job: &Job,
        files: &[AtomicFile],
        numbers: &[usize],
        make: &Make<'_, T>,
    ) -> Result<Finished<T>> {
        if let Share::Merge(_) = self.run.share {
            self.refuse_missing(job)?;
        }
        let bar = progress::bytes(self.label, numbers.iter().map(|n| self.tasks[*n].length).sum());
        let running = Running {
            conversion: self,
            job,
            files,
            make,
            bar: &bar,
            stop: AtomicBool::new(false),
            resumed: AtomicUsize::new(0),
        };
        let data: Vec<_> = files.iter().map(AtomicFile::file).collect();
        let done = job.keep(&data, || {
            let mut done = running.all(numbers);
            done.sort_by_key(|(number, _)| *number);
            done.into_iter().map(|(number, made)| Ok((number, made?))).collect::<Result<Vec<_>>>()
        })?;
        Ok(self.collect(done, running.resumed.into_inner()))
    }

    fn collect<T>(&self, done: Vec<(usize, Made<T>)>, resumed: usize) -> Finished<T> {
        let part = match self.run.share {
            Share::Part(part) => Some(part.to_string()),
            Share::Whole | Share::Merge(_) => None,
        };
        let mut by_task: Vec<Option<Made<T>>> = Vec::new();
        by_task.resize_with(self.tasks.len(), || None);
        done.into_iter().for_each(|(number, made)| by_task[number] = Some(made));
        let mut finished = Finished { items: Vec::new(), inputs: Vec::new(), resumed, part };
        for (task, made) in self.tasks.iter().zip(by_task) {
            match task.work {
                Work::Hash(_) => finished.inputs.push(made.and_then(|made| made.sha256.into_iter().next())),
                Work::Make { item, .. } => {
                    if finished.items.len() <= item {
                        finished.items.resize_with(item + 1, || None);
                    }
                    finished.items[item] = made;
                }
            }
        }
        finished
    }

    /// Fails unless every task has a recorded result; the error lists the parts that lack results.
    fn refuse_missing(&self, job: &Job) -> Result<()> {
        if self.tasks.iter().all(|task| job.found::<serde_json::Value>(&task.name).next().is_some()) {
            return Ok(());
        }
        Err(job.missing(|count| {
            let names = self.tasks.iter().map(|task| task.name.clone());
            names.zip(self.dealt(count)).collect()
        }))
    }

    /// Writes the headers, and zeros between the sections, over anything that an earlier run left there.
    fn fill_gaps(&self, files: &[AtomicFile]) -> Result<()> {
        for (number, (file, opened)) in self.files.iter().zip(files).enumerate() {
            let sections = self.tasks.iter().flat_map(Task::sections).filter(|s| s.file == number);
            let mut ranges: Vec<_> = sections.map(|s| s.range.clone()).collect();
            ranges.sort_by_key(|range| range.start);
            let mut end = 0;
            for range in ranges.into_iter().chain(std::iter::once(file.len..file.len)) {
                let mut gap = vec![0; range.start.saturating_sub(end) as usize];
                if end == 0 {
                    gap[..file.header.len()].copy_from_slice(&file.header);
                }
                opened.write_at(&gap, end)?;
                end = end.max(range.end);
            }
        }
        Ok(())
    }
}

/// Function that makes the bytes of one item and returns the value to be recorded.
type Make<'a, T> = dyn Fn(usize, &mut TaskOutput<'_>) -> Result<T> + Sync + 'a;

/// State that all threads share.
struct Running<'a, T> {
    conversion: &'a Conversion<'a>,
    job: &'a Job,
    files: &'a [AtomicFile],
    make: &'a Make<'a, T>,
    bar: &'a ProgressBar,
    /// Set when a task has failed.
    stop: AtomicBool,
    resumed: AtomicUsize,
}

/// Indices of tasks with their results.
type Results<T> = Vec<(usize, Result<Made<T>>)>;

impl<T: Serialize + DeserializeOwned + Send> Running<'_, T> {
    fn all(&self, numbers: &[usize]) -> Results<T> {
        let is_parallel = |number: &usize| self.conversion.tasks[*number].parallel;
        let (parallel, single): (Vec<usize>, Vec<usize>) = numbers.iter().partition(|number| is_parallel(number));
        let each_thread = || {
            let next = AtomicUsize::new(0);
            rayon::broadcast(|_| self.one_by_one(&single, &next)).into_iter().flatten().collect::<Vec<_>>()
        };
        if parallel.is_empty() {
            return each_thread();
        }
        let (mut done, by_all) = rayon::join(each_thread, || self.one_by_one(&parallel, &AtomicUsize::new(0)));
        done.extend(by_all);
        done
    }

    /// Runs one task after the other until none is left or one has failed.
    fn one_by_one(&self, numbers: &[usize], next: &AtomicUsize) -> Results<T> {
        let mut done = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            let Some(number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            let made = self.one(*number);
            self.stop.fetch_or(made.is_err(), Ordering::Relaxed);
            done.push((*number, made));
        }
        done
    }

    /// Returns the result of one task: reuses that of an earlier run if there is a valid one, makes it otherwise.
    fn one(&self, number: usize) -> Result<Made<T>> {
        let task = &self.conversion.tasks[number];
        if let Some(made) = self.take_over(task)? {
            return Ok(made);
        }
        let made = match &task.work {
            Work::Hash(digest) => Made { sha256: vec![digest(self.bar)?], value: None },
            Work::Make { item, sections } => {
                let mut output = TaskOutput::new(self.files, sections, self.bar);
                let value = (self.make)(*item, &mut output)?;
                Made { sha256: output.finish(&task.name), value: Some(value) }
            }
        };
        self.job.record(&task.name, &made, task.length)?;
        Ok(made)
    }

    /// Reuses the result of a task that was finished before and whose data is in place; returns `None` when the task
    /// has to be run.
    fn take_over(&self, task: &Task<'_>) -> Result<Option<Made<T>>> {
        let mut damaged = None;
        for found in self.job.found::<Made<T>>(&task.name) {
            if self.read_back(task, &found)? {
                if found.part.is_some() {
                    self.job.record(&task.name, &found.result, task.length)?;
                }
                self.resumed.fetch_add(usize::from(found.result.value.is_some()), Ordering::Relaxed);
                return Ok(Some(found.result));
            }
            damaged = found.part.or(damaged);
        }
        match (damaged, &self.conversion.run.share) {
            (Some(part), Share::Merge(_)) => Err(Job::damaged(part)).tensor(&task.name),
            _ => Ok(None),
        }
    }

    /// Returns true when all sections match the hashes in the journal. Sections of a part are copied into the output
    /// files while they are read.
    fn read_back(&self, task: &Task<'_>, found: &Found<'_, Made<T>>) -> Result<bool> {
        let Work::Make { sections, .. } = &task.work else {
            self.bar.skip(task.length);
            return Ok(true);
        };
        if found.result.value.is_none() || found.result.sha256.len() != sections.len() {
            return Ok(false);
        }
        if sections.is_empty() {
            self.bar.skip(task.length);
        }
        for (Section { file, range }, expected) in sections.iter().zip(&found.result.sha256) {
            let (name, opened) = (&self.conversion.files[*file].partial_name, &self.files[*file]);
            let Some(data) = self.job.open_data(found, name, range.end) else { return Ok(false) };
            let copy = |at: u64, bytes: &[u8]| match found.part {
                Some(_) => opened.write_at(bytes, at),
                None => Ok(()),
            };
            let length = range.end - range.start;
            if hash_range(range.clone(), &ProgressBar::hidden(), data, copy)? != *expected {
                return Ok(false);
            }
            self.bar.skip(length);
        }
        Ok(true)
    }
}
