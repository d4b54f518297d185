//! Journal of the finished tasks of a job, which survives a crash of the machine at any moment.
//!
//! A journal is text, one line per record: the first 16 hex digits of the SHA-256 of the JSON, a space, the JSON. The
//! first line is the [`Header`] of the job, the others are `{"task": …, "result": …}`. A line is valid when its digest
//! is right and all lines before it are valid. The invalid tail of an interrupted write is cut off, and its tasks are
//! repeated.
//!
//! A result is written only after its data was synced to disk. A sync after every tensor would take longer than
//! its conversion, so a separate thread syncs at intervals ([`Pace`]) while the work continues.

use crate::error::{Context, Error, Result};
use crate::files;
use crate::output::LockedFile;
use crate::resources::spawn_scoped;
use crate::sha256::{Digest, Sha256, hex};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Largest length of a journal in bytes; a hundred thousand tensors take about 20 MB.
const LIMIT: u64 = 1 << 30;

/// First line of a journal, which identifies the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Header {
    /// Program and version.
    pub iec: String,
    /// Fingerprint of inputs, options and version.
    pub fingerprint: String,
    /// State of the input files ([`super::Order::inputs`]).
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub inputs: String,
}

impl Header {
    /// Returns true if both belong to the same job. Parts may have read copies of the same files.
    pub fn is_of_job(&self, other: &Header) -> bool {
        (&self.iec, &self.fingerprint) == (&other.iec, &other.fingerprint)
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    task: String,
    result: Value,
}

/// Finished tasks and their results.
pub(super) type Finished = BTreeMap<String, Value>;

/// Interval at which finished work is made durable. A crash of the machine loses the work since the last sync.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Bytes of data between two syncs.
    pub bytes: u64,
    /// Longest time between two syncs while there are finished tasks to record.
    pub time: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { bytes: 256 << 20, time: Duration::from_secs(10) }
    }
}

/// An open journal, locked against other processes.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: LockedFile,
    finished: Finished,
    pace: Pace,
    state: Mutex<JournalState>,
    changed: Condvar,
}

/// Tasks that were finished since the last sync.
#[derive(Debug, Default)]
struct JournalState {
    lines: Vec<u8>,
    /// Bytes of data that the tasks in `lines` have written.
    bytes: u64,
    /// Bytes of data that are being synced.
    in_flight: u64,
    durable: usize,
    closing: bool,
    failed: bool,
}

impl Journal {
    /// Opens the journal at `path`, or creates it. A journal with another header is cleared.
    ///
    /// # Errors
    /// Another process has locked the journal, or it cannot be read or written.
    pub fn open(path: &Path, header: &Header, pace: Pace) -> Result<Journal> {
        let file = LockedFile::from(File::options().read(true).append(true).create(true).open(path).at(path)?);
        lock(&file, path)?;
        let (finished, valid) = match read(&file, path)? {
            Some((found, finished, valid)) if found == *header => (finished, valid),
            _ => (Finished::new(), 0),
        };
        file.set_len(valid).at(path)?;
        let journal = Journal {
            path: path.to_path_buf(),
            file,
            finished,
            pace,
            state: Mutex::default(),
            changed: Condvar::new(),
        };
        if valid == 0 {
            journal.write(&line(header)).at(path)?;
        }
        journal.lock_state().durable = journal.finished.len();
        Ok(journal)
    }

    /// Returns the tasks that were finished when the journal was opened.
    pub fn finished(&self) -> &Finished {
        &self.finished
    }

    /// Returns the number of tasks whose records are durable.
    pub fn durable(&self) -> usize {
        self.lock_state().durable
    }

    /// Records a finished task with `bytes` of written data. Waits while more than four times the bytes of [`Pace`] are
    /// not yet synced.
    ///
    /// # Errors
    /// The journal could not be written.
    pub fn record(&self, task: &str, result: &impl Serialize, bytes: u64) -> Result<()> {
        let result = serde_json::to_value(result).expect("results are plain data");
        let line = line(&Record { task: task.to_string(), result });
        let mut state = self.lock_state();
        // Without this wait, a slow disk could leave far more work unsynced than `pace` allows.
        while state.bytes + state.in_flight > self.pace.bytes.saturating_mul(4) && !state.failed && !state.closing {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.failed {
            return Err(Error::corrupt("the journal could not be written")
                .at(&self.path)
                .help("check the disk, and run the same command again"));
        }
        state.lines.extend_from_slice(&line);
        state.bytes += bytes.max(1);
        self.changed.notify_all();
        Ok(())
    }

    /// Runs `work` while another thread makes its records durable together with the files in `data`. On return all
    /// records are durable, whether `work` succeeded or not.
    pub fn keep<R>(&self, data: &[&File], work: impl FnOnce() -> Result<R>) -> Result<R> {
        self.lock_state().closing = false;
        std::thread::scope(|scope| {
            let keeper = spawn_scoped(scope, "iec-journal", || self.sync_now_and_then(data))?;
            let closing = Closing(self);
            let done = work();
            drop(closing);
            let kept = keeper.join().expect("the thread that syncs the journal does not panic").at(&self.path);
            kept.and(done)
        })
    }

    fn sync_now_and_then(&self, data: &[&File]) -> Result<()> {
        let mut last = Instant::now();
        loop {
            let mut state = self.lock_state();
            loop {
                let due = state.bytes >= self.pace.bytes || (state.bytes > 0 && last.elapsed() >= self.pace.time);
                if state.closing || due {
                    break;
                }
                let rest = self.pace.time.saturating_sub(last.elapsed()).max(Duration::from_millis(10));
                state = self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
            }
            let closing = state.closing;
            let lines = std::mem::take(&mut state.lines);
            state.in_flight = std::mem::take(&mut state.bytes);
            drop(state);
            let result = self.make_durable(&lines, data);
            last = Instant::now();
            let mut state = self.lock_state();
            state.failed |= result.is_err();
            state.in_flight = 0;
            state.durable += lines.iter().filter(|b| **b == b'\n').count();
            self.changed.notify_all();
            let more = !state.lines.is_empty();
            drop(state);
            result?;
            if closing && !more {
                return Ok(());
            }
        }
    }

    fn make_durable(&self, lines: &[u8], data: &[&File]) -> Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        data.iter().try_for_each(|file| file.sync_data())?;
        Ok(self.write(lines)?)
    }

    fn write(&self, lines: &[u8]) -> std::io::Result<()> {
        (&*self.file).write_all(lines)?;
        self.file.sync_data()
    }

    fn lock_state(&self) -> MutexGuard<'_, JournalState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Guard that signals the end of the work to the syncing thread when it is dropped, also after a panic.
struct Closing<'a>(&'a Journal);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.lock_state().closing = true;
        self.0.changed.notify_all();
    }
}

/// Returns the result of a task as type `T`; `None` when the task is not finished or its result has another form.
pub(super) fn result<T: DeserializeOwned>(finished: &Finished, task: &str) -> Option<T> {
    finished.get(task).and_then(|value| T::deserialize(value).ok())
}

/// Returns true when another process has locked the journal at `path`.
pub(super) fn in_use(path: &Path) -> bool {
    let file = files::open(path).map(LockedFile::from);
    file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Reads the header and the results of a journal without changing or locking it; `None` when its first line is not a
/// header. The journal may belong to another job.
pub(super) fn peek(path: &Path) -> Result<Option<(Header, Finished)>> {
    let file = files::open(path)?;
    Ok(read(&file, path)?.map(|(header, finished, _)| (header, finished)))
}

fn lock(file: &File, path: &Path) -> Result<()> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(Error::usage("another process is running this conversion")
            .at(path)
            .help("wait for it, or end it and run the same command again")),
        // Some network file systems have no locks; there the user must avoid concurrent runs.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
    }
}

fn read(file: &File, path: &Path) -> Result<Option<(Header, Finished, u64)>> {
    let mut bytes = Vec::new();
    file.take(LIMIT).read_to_end(&mut bytes).at(path)?;
    let mut lines = bytes.split_inclusive(|b| *b == b'\n').map_while(|line| Some((line.len() as u64, checked(line)?)));
    let Some((mut valid, header)) = lines.next() else { return Ok(None) };
    let Ok(header) = serde_json::from_slice::<Header>(header) else { return Ok(None) };
    let mut finished = Finished::new();
    for (len, text) in lines {
        let Ok(record) = serde_json::from_slice::<Record>(text) else { break };
        finished.insert(record.task, record.result);
        valid += len;
    }
    Ok(Some((header, finished, valid)))
}

/// Returns the JSON of a complete line whose digest is right.
fn checked(line: &[u8]) -> Option<&[u8]> {
    let (digest, rest) = line.split_at_checked(16)?;
    let text = rest.strip_prefix(b" ")?.strip_suffix(b"\n")?;
    (digest == short_digest(text).as_bytes()).then_some(text)
}

fn line(value: &impl Serialize) -> Vec<u8> {
    let text = serde_json::to_string(value).expect("records are plain data");
    format!("{} {text}\n", short_digest(text.as_bytes())).into_bytes()
}

fn short_digest(text: &[u8]) -> String {
    let mut digest = hex(Sha256::new_with_prefix(text));
    digest.truncate(16);
    digest
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(fingerprint: &str) -> Header {
        Header { iec: "test".into(), fingerprint: fingerprint.into(), inputs: String::new() }
    }

    fn open(path: &Path, fingerprint: &str) -> Result<Journal> {
        Journal::open(path, &header(fingerprint), Pace::default())
    }

    /// Writes a journal of five tasks and returns its bytes.
    fn written(path: &Path) -> Vec<u8> {
        let journal = open(path, "a").unwrap();
        let data = File::create(path.with_extension("data")).unwrap();
        let work = || (0..5).try_for_each(|i| journal.record(&format!("task {i}"), &(i, "ö\n"), 3));
        journal.keep(&[&data], work).unwrap();
        assert_eq!(journal.durable(), 5);
        std::fs::read(path).unwrap()
    }

    #[test]
    fn whatever_is_cut_off_or_damaged_only_the_lines_before_it_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let good = written(&path);
        for cut in (0..=good.len()).filter(|cut| cut % 5 == 0 || good[..*cut].ends_with(b"\n")) {
            let whole = good[..cut].iter().filter(|b| **b == b'\n').count();
            let mut damaged = good.clone();
            if cut < good.len() {
                damaged[cut] ^= 1;
            }
            for bytes in [&good[..cut], &damaged[..]] {
                std::fs::write(&path, bytes).unwrap();
                let journal = open(&path, "a").unwrap();
                assert_eq!(journal.finished().len(), whole.saturating_sub(1), "at {cut}");
                for (i, task) in journal.finished().keys().enumerate() {
                    let expected = (i as i32, "ö\n".to_string());
                    assert_eq!(result::<(i32, String)>(journal.finished(), task), Some(expected));
                }
                journal.keep(&[], || journal.record("again", &1, 1)).unwrap();
                let (_, finished) = peek(&path).unwrap().unwrap();
                assert_eq!(finished.len(), whole.saturating_sub(1) + 1);
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes in prop::collection::vec(any::<u8>(), 0..400), at in any::<prop::sample::Index>()) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("journal");
            // Arbitrary bytes as a whole file, and as the text of a line with a valid digest.
            let mut whole = line(&header("a"));
            let text = &bytes[at.index(bytes.len() + 1)..];
            whole.extend_from_slice(format!("{} ", short_digest(text)).as_bytes());
            whole.extend_from_slice(text);
            whole.push(b'\n');
            for file in [&bytes, &whole] {
                std::fs::write(&path, file).unwrap();
                let found = peek(&path).unwrap();
                prop_assert!(found.is_none_or(|(_, finished)| finished.is_empty()));
            }
        }
    }

    #[test]
    fn the_journal_of_something_else_is_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        written(&path);
        assert_eq!(open(&path, "b").unwrap().finished().len(), 0);
        assert_eq!(open(&path, "a").unwrap().finished().len(), 0);
        std::fs::write(&path, [0xff; 4096]).unwrap();
        assert_eq!(open(&path, "a").unwrap().finished().len(), 0);
    }

    #[test]
    fn two_processes_cannot_have_the_same_journal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let journal = open(&path, "a").unwrap();
        assert!(in_use(&path) && open(&path, "a").unwrap_err().to_string().contains("another process"));
        drop(journal);
        assert!(!in_use(&path) && open(&path, "a").is_ok());
    }

    #[test]
    fn records_survive_an_error_of_the_work() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let journal = open(&path, "a").unwrap();
        let failed = journal.keep(&[], || journal.record("one", &1, 1).and_then(|()| Err::<(), _>(Error::usage("no"))));
        assert_eq!(failed.unwrap_err().to_string(), "no");
        assert_eq!(peek(&path).unwrap().unwrap().1.len(), 1);
    }

    #[test]
    fn the_smallest_pace_makes_every_record_durable_soon() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let pace = Pace { bytes: 1, time: Duration::from_secs(3600) };
        let journal = Journal::open(&path, &header("a"), pace).unwrap();
        let work = || {
            for i in 0..50 {
                journal.record(&i.to_string(), &i, 10)?;
                // With a limit of one byte, each record waits until the ones before it are durable.
                assert!(journal.durable() >= i, "{i}");
            }
            Ok(())
        };
        journal.keep(&[], work).unwrap();
        assert_eq!(peek(&path).unwrap().unwrap().1.len(), 50);
    }
}
