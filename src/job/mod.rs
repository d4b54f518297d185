//! Resumable jobs: work that can be killed at any moment and continued later, on one machine or in parts on many.
//!
//! A job has named tasks, results that fit on one line, and data files whose layout is known before the first byte is
//! written. While it runs, everything is in a hidden directory in the output directory, named after the [`Fingerprint`]
//! of inputs, options and version:
//!
//! ```text
//! OUT_DIR/.iec-0123456789abcdef.partial/
//!     journal                     finished tasks of the whole job
//!     model.ie.bin                its data, at the final offsets
//!     part-2-of-8.journal         finished tasks of one part ([`Part`])
//!     part-2-of-8.model.ie.bin    sparse: only its own ranges are filled
//!     command.json                the command that `iec merge` repeats to complete the job
//! ```
//!
//! The same command run again finds the directory by its name. The record of a finished task is verified against the
//! data: if their hash differs from the recorded one, the task is done again. A run of the whole job also takes over
//! the finished tasks of parts; merging consists of nothing else.
//!
//! This module is independent of the kind of conversion. docs/FORMAT.md describes the files.

mod fingerprint;
mod journal;
mod order;
mod part;
mod partial;
mod recorded;

pub use fingerprint::Fingerprint;
pub use journal::Pace;
pub use order::{Command, DataFile, Order, Output, RunOptions, Share, this_version};
pub use part::{Part, deal};
pub use partial::any_has_begun_commit;
pub use recorded::RecordedParts;

use crate::error::{Cause, Context, Error, Result};
use crate::files;
use crate::output::{self, AtomicFile, OutDir, Rules, Target, stale, swap, write_atomically};
use crate::progress;
use journal::{Finished, Header, Journal};
use partial::PartFiles;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Name of the record that is written before files get their final names.
const COMMIT: &str = "commit";
/// Largest number of parts that an error message lists; it only counts the others.
const NAMED: usize = 8;
const COMMAND_NAME: &str = "command.json";

/// A running job.
#[derive(Debug)]
pub struct Job {
    dir: PathBuf,
    stem: String,
    journal: Journal,
    parts: Vec<PartFiles>,
    output: Output,
    out: OutDir,
    torn: bool,
    /// True once all data are written: an error after that is not caused by the data, so the partial work is kept.
    committing: AtomicBool,
}

/// Result of a finished task, and the location of its data.
#[derive(Debug)]
pub struct Found<'a, T> {
    /// The recorded result.
    pub result: T,
    /// The part that finished the task; `None` when an earlier run of the whole job, or of this part, finished it.
    pub part: Option<Part>,
    stem: &'a str,
}

impl Job {
    /// Begins or continues a job in `out_dir`, which is created if missing, and opens its data files. Checks that the
    /// disk has room for them. This run fills the `ranges` of each file. A file that is dropped before it is committed
    /// is not deleted, so that a later run can continue.
    ///
    /// # Errors
    /// The disk has too little space, another process runs the same job, or a file cannot be written.
    pub fn open(
        out_dir: &Path,
        order: &Order<'_>,
        files: &[DataFile],
        ranges: &[Vec<Range<u64>>],
    ) -> Result<(Job, Vec<AtomicFile>)> {
        let dir = dir_of(out_dir, order.fingerprint);
        let stem = match &order.run.share {
            Share::Part(part) => partial::stem(*part),
            Share::Merge(parts) if *parts != dir => return Err(changed_since(parts, order)),
            Share::Merge(_) | Share::Whole => String::new(),
        };
        if order.run.fresh {
            forget(out_dir, &dir, &stem, order.output);
        }
        let needed = ranges.iter().flatten().map(|r| r.end - r.start).sum();
        let there = files.iter().map(|f| output::occupied(&dir.join(format!("{stem}{}", f.partial_name)))).sum();
        output::require_space(out_dir, needed, there)?;
        let out = OutDir::make(out_dir)?;
        std::fs::create_dir_all(&dir).at(&dir)?;
        // Before the journal is opened, which clears it if the inputs may have changed since it was written.
        let torn = stem.is_empty() && was_torn(out_dir, order.fingerprint, order.lead, files.iter().map(|f| &*f.name));
        let (fingerprint, inputs) = (order.fingerprint.to_string(), order.inputs.to_string());
        let header = Header { iec: this_version(), fingerprint, inputs };
        let journal = Journal::open(&dir.join(format!("{stem}journal")), &header, order.run.pace)?;
        let parts = if stem.is_empty() { partial::part_files(&dir, &header)? } else { Vec::new() };
        let job =
            Job { dir, stem, journal, parts, output: order.output, out, torn, committing: AtomicBool::new(false) };
        // A journal that was cleared must still say so if this run is killed, too.
        let noted = match torn && !job.journal.finished().contains_key(COMMIT) {
            true => job.journal.keep(&[], || job.journal.record(COMMIT, &(), 0)),
            false => Ok(()),
        };
        match noted.and_then(|()| job.prepare(order, files, ranges)) {
            Ok(files) => Ok((job, files)),
            Err(e) => job.conclude(Err(e)),
        }
    }

    /// Begins or continues a job of a command whose output is the single file `out`. `decide` adds all values that
    /// determine the content of the file, except its name, to the fingerprint.
    ///
    /// # Errors
    /// The errors of [`Job::open`]; or the directory of `out` does not exist.
    pub fn for_file(
        command: &Command,
        out: &Path,
        run: &RunOptions,
        decide: impl FnOnce(&mut Fingerprint) -> Result<()>,
    ) -> Result<Job> {
        let dir = dir_of_file(out)?;
        let mut fingerprint = Fingerprint::for_file(&command.name, out);
        decide(&mut fingerprint)?;
        let order = Order {
            fingerprint: &fingerprint.finish(),
            inputs: "",
            command,
            lead: None,
            output: Output::AmongOthers,
            run,
        };
        Job::open(dir, &order, &[], &[]).map(|(job, _)| job)
    }

    fn prepare(&self, order: &Order<'_>, files: &[DataFile], ranges: &[Vec<Range<u64>>]) -> Result<Vec<AtomicFile>> {
        if let Share::Part(_) = order.run.share {
            if order.command.options.is_null() {
                return Err(Error::usage(
                    "--part: found a path that is not UTF-8 among the options, which command.json cannot record",
                )
                .at(self.out.path())
                .help("rename the file or directory, or leave out --part"));
            }
            let command = serde_json::to_vec(order.command).expect("a JSON value serializes");
            write_atomically(&self.dir.join(COMMAND_NAME), &command)?;
        }
        if self.torn {
            self.take_back(files);
        }
        let files =
            files.iter().zip(ranges).map(|(file, ranges)| self.data_file(file, ranges)).collect::<Result<_>>()?;
        // A power failure must not leave a journal without the data files whose tasks it lists.
        output::sync_dir(&self.dir)?;
        output::sync_dir(self.out.path())?;
        Ok(files)
    }

    /// Adds the partial names, as hard links, to files that got their final names before a commit was interrupted. They
    /// keep their final names, because the output may be complete. Without hard links the data are converted again.
    fn take_back(&self, files: &[DataFile]) {
        for file in files {
            let (named, unnamed) = (self.out.path().join(&file.name), self.data_path(&self.stem, &file.partial_name));
            let _ = std::fs::hard_link(named, unnamed);
        }
    }

    /// Returns true if a run of this job was killed while its files got their final names. Files that have these names
    /// were then written by this job and may be replaced.
    pub fn was_torn(&self) -> bool {
        self.torn
    }

    fn data_file(&self, file: &DataFile, ranges: &[Range<u64>]) -> Result<AtomicFile> {
        let path = self.data_path(&self.stem, &file.partial_name);
        let opened = File::options().read(true).write(true).create(true).truncate(false).open(&path).at(&path)?;
        output::reserve(&opened, file.len, ranges.iter().cloned()).at(&path)?;
        AtomicFile::resumable(opened, &path, &self.out.path().join(&file.name))
    }

    /// Writes a small output file that is complete except for its final name. It is written in the directory of partial
    /// work, so that a killed process leaves no part of it elsewhere.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn small_file(&self, name: &str, bytes: &[u8]) -> Result<AtomicFile> {
        let mut file = AtomicFile::create_in(&self.dir, &self.out.path().join(name))?;
        file.write_all(bytes).at(file.path())?;
        Ok(file)
    }

    /// Returns the directory of partial work, in which temporary files may be created.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the path of a file of this run in the directory of partial work; every part has its own.
    pub fn own_path(&self, name: &str) -> PathBuf {
        self.data_path(&self.stem, name)
    }

    /// Returns the recorded results of a task, first from the journal of this run, then from those of parts.
    pub fn found<'a, T: DeserializeOwned>(&'a self, task: &'a str) -> impl Iterator<Item = Found<'a, T>> {
        let own = journal::result(self.journal.finished(), task);
        let own = own.map(|result| Found { result, part: None, stem: self.stem.as_str() });
        let of_parts = move |p: &'a PartFiles| {
            let result = journal::result(&p.finished, task)?;
            Some(Found { result, part: Some(p.part), stem: p.stem.as_str() })
        };
        own.into_iter().chain(self.parts.iter().filter_map(of_parts))
    }

    /// Opens the data file that contains the data of a finished task, to be read by position; `None` when the file
    /// cannot be opened or is shorter than `end`.
    pub fn open_data<T>(
        &self,
        found: &Found<'_, T>,
        name: &str,
        end: u64,
    ) -> Option<impl Fn(u64, &mut [u8]) -> Result<()> + use<T>> {
        let path = self.data_path(found.stem, name);
        let (file, found) = files::open_with_metadata(&path).ok()?;
        (found.len() >= end).then_some(move |at, out: &mut [u8]| file.read_exact_at(out, at).at(&path))
    }

    /// Records a finished task whose `bytes` of data are written.
    pub fn record(&self, task: &str, result: &impl Serialize, bytes: u64) -> Result<()> {
        self.journal.record(task, result, bytes)
    }

    /// Runs `work`. Its records are made durable together with the files in `data`, at intervals and at the end.
    pub fn keep<R>(&self, data: &[&File], work: impl FnOnce() -> Result<R>) -> Result<R> {
        self.journal.keep(data, work)
    }

    /// Records that files get their final names from now on. If the run is interrupted after that, the next one
    /// uses the files that already have their final names.
    pub fn commit_begins(&self) -> Result<()> {
        self.committing.store(true, Ordering::Relaxed);
        self.journal.keep(&[], || self.journal.record(COMMIT, &(), 0))
    }

    /// Ends the run. Removes partial files when the whole job is complete, and with [`Output::Alone`] also those of
    /// other interrupted commands in this directory. After an error, keeps them if the next run can continue from them,
    /// and removes them otherwise.
    pub fn conclude<R>(self, outcome: Result<R>) -> Result<R> {
        let whole = self.stem.is_empty();
        match outcome {
            Ok(done) if !whole => Ok(done),
            Ok(done) => {
                let Job { dir, journal, output, out, .. } = self;
                // Network file systems do not remove a directory with open files in it.
                drop(journal);
                stale::give_up(&dir);
                partial::remove_idle(out.path(), output);
                Ok(done)
            }
            Err(e) if (is_passing(&e) || self.committing.load(Ordering::Relaxed)) && self.journal.durable() > 0 => {
                Err(e.resumable())
            }
            Err(e) => {
                partial::remove_run(&self.dir, &self.stem);
                Err(e)
            }
        }
    }

    /// Builds the error that lists the parts that must be run before the merge. For a given number of parts, `dealt`
    /// returns the name of every task and the number of its part.
    pub fn missing(&self, dealt: impl FnOnce(usize) -> Vec<(String, usize)>) -> Error {
        let counts = self.parts.iter().map(|p| p.part.count);
        let most_used =
            counts.max_by_key(|count| (self.parts.iter().filter(|p| p.part.count == *count).count(), *count));
        let Some(count) = most_used else {
            return Error::corrupt("found no finished part")
                .at(&self.dir)
                .help("run the parts (--part 1/N to N/N), then merge");
        };
        let mut unfinished = BTreeMap::<usize, (usize, String)>::new();
        for (task, number) in dealt(count) {
            if self.found::<Value>(&task).next().is_none() {
                unfinished.entry(number).or_insert((0, task)).0 += 1;
            }
        }
        let words = unfinished.iter().take(NAMED).map(|(number, (tasks, first))| match tasks {
            1 => format!("{number}/{count} (`{first}`)"),
            n => format!("{number}/{count} (`{first}` and {} more)", n - 1),
        });
        let words = words.collect::<Vec<_>>().join(", ");
        let more =
            if unfinished.len() > NAMED { format!(" and {} more", unfinished.len() - NAMED) } else { String::new() };
        Error::corrupt(format!("not finished: part {words}{more}"))
            .at(&self.dir)
            .help("run these parts again, then merge")
    }

    /// Builds the error for a part whose data do not match the hash in its journal.
    pub fn damaged(part: Part) -> Error {
        Error::corrupt(format!("the data of part {part} differ from the hashes in its journal"))
            .help(format!("run part {part} again with --fresh, then merge"))
    }

    fn data_path(&self, stem: &str, name: &str) -> PathBuf {
        self.dir.join(format!("{stem}{name}"))
    }
}

/// Removes partial work in `out_dir` whose output is complete, if no process uses it, and other remains of killed
/// processes.
pub fn remove_over(out_dir: &Path) {
    stale::remove(out_dir);
    partial::remove_idle(out_dir, Output::AmongOthers);
}

/// Checks an output as [`Target::check`] does. If it exists already, the job that made it may have been killed before
/// it removed its partial work, which is removed now.
///
/// # Errors
/// The same as for [`Target::check`].
pub fn check_target(path: &Path, rules: Rules<'_>) -> Result<Target> {
    Target::check(path, rules).inspect_err(|_| remove_over(output::directory_of(path)))
}

/// Returns the directory of an output file.
///
/// # Errors
/// The directory does not exist or cannot be read.
pub fn dir_of_file(out: &Path) -> Result<&Path> {
    let dir = output::directory_of(out);
    std::fs::read_dir(dir).at(dir)?;
    Ok(dir)
}

/// Returns the work that an earlier run of a job has left: the number of finished tasks, and the occupied bytes of
/// disk.
pub fn left_over(out_dir: &Path, fingerprint: &str, files: &[&str]) -> (usize, u64) {
    let dir = dir_of(out_dir, fingerprint);
    let tasks = match journal::peek(&dir.join("journal")) {
        Ok(Some((header, finished))) if header.fingerprint == fingerprint => finished.len(),
        _ => 0,
    };
    (tasks, files.iter().map(|name| output::occupied(&dir.join(name))).sum())
}

/// Returns true when a run of this job was killed while its `files` got their final names, or before it removed its
/// partial work. Files with final names then belong to this job.
pub fn was_torn<'a>(
    out_dir: &Path,
    fingerprint: &str,
    lead: Option<&str>,
    mut files: impl Iterator<Item = &'a str>,
) -> bool {
    let dir = dir_of(out_dir, fingerprint);
    let committing =
        |(header, finished): &(Header, Finished)| header.fingerprint == fingerprint && finished.contains_key(COMMIT);
    journal::peek(&dir.join("journal")).is_ok_and(|journal| journal.as_ref().is_some_and(committing))
        && (lead.is_some_and(|lead| swap::staged(&out_dir.join(lead)).as_ref() == Some(&dir))
            || files.any(|name| matches!(crate::files::exists(&dir.join(name)), Ok(false))))
}

fn dir_of(out_dir: &Path, fingerprint: &str) -> PathBuf {
    out_dir.join(partial::dir_name(fingerprint))
}

fn changed_since(parts: &Path, order: &Order<'_>) -> Error {
    let found =
        format!("found parts that were made from other input files, or by another version than {}", order.command.iec);
    Error::corrupt(found).at(parts).help("run all parts again, then merge")
}

/// Returns true for errors that the converted data did not cause, so that the next run may succeed.
fn is_passing(e: &Error) -> bool {
    matches!(e.cause(), Cause::Interrupted { .. } | Cause::Io(_) | Cause::OutOfMemory(_))
}

/// Discards earlier work for `--fresh`. A part removes only its own files. The whole job removes all partial work in
/// the directory that no process is using, or only its own if the directory also has other outputs.
fn forget(out_dir: &Path, dir: &Path, stem: &str, output: Output) {
    if stem.is_empty() && output == Output::Alone {
        partial::remove_idle(out_dir, output);
    } else if !journal::in_use(&dir.join(format!("{stem}journal"))) {
        partial::remove_run(dir, stem);
    }
}

/// Prints a note that interrupted work of another command is kept until this one is complete.
pub fn note_others(out_dir: &Path, fingerprint: &str) {
    for other in partial::others(out_dir, &dir_of(out_dir, fingerprint)) {
        progress::detail(0, || {
            let other = other.display();
            format!(
                "note: {other} holds an interrupted conversion of other files or with other options; it is not \
                 continued, and is removed when this one is complete, or at once with --fresh"
            )
        });
    }
}
