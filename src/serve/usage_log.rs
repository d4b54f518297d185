//! Tokens that keys used on the day since their use was last saved: the file `usage.log` in the state directory.
//!
//! ```text
//! {"model": "tiny", "key": "alice", "day_used": 10, "at": 1790000000}
//! ```
//!
//! `usage.json` is replaced from time to time only, because that waits for the disk. Whenever a request of a key with a
//! limit per day is accepted and when it ends, a line with the state of the key is appended here, which the system has
//! as soon as the call returns: it survives a process that is killed, though not a machine that loses power. A request
//! is accepted with all tokens that it may use. The last line of a key counts, unless `usage.json` is later.

use crate::error::{Context, Error, Result};
use crate::files;
use crate::strict_json;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Name of the file.
pub const FILE: &str = "usage.log";
/// Largest accepted file in bytes.
const FILE_LIMIT: u64 = 64 << 20;
/// Size in bytes from which on older lines are dropped.
const REWRITE: u64 = 4 << 20;

/// State of a key: tokens that its limit per day lacked, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DayUse {
    /// Tokens that the limit per day lacked.
    pub tokens: u64,
    /// Time, in whole seconds.
    pub at: SystemTime,
}

/// Last state of each model and key.
pub type States = HashMap<(String, String), DayUse>;

/// The file, open for new lines.
#[derive(Debug)]
pub struct UsageLog {
    path: PathBuf,
    state: Mutex<LogState>,
}

#[derive(Debug)]
struct LogState {
    file: File,
    bytes: u64,
    last: States,
}

impl UsageLog {
    /// Opens the file, whose lines `last` were read.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn open(path: &Path, last: States) -> Result<UsageLog> {
        // If the disk is full, lines are added once it is not full any more.
        let append = || File::options().append(true).create(true).mode(0o600).open(path).at(path);
        let file = rewritten(path, &last).or_else(|_| append())?;
        let bytes = file.metadata().at(path)?.len();
        Ok(UsageLog { path: path.to_path_buf(), state: Mutex::new(LogState { file, bytes, last }) })
    }

    /// Returns the state of a key that was recorded last.
    pub fn last(&self, model: &str, key: &str) -> Option<DayUse> {
        self.state().last.get(&(model.to_string(), key.to_string())).copied()
    }

    /// Records the state of a key. A failure is as harmless as a save of `usage.json` that fails: the next one counts.
    pub fn record(&self, model: &str, key: &str, tokens: u64, now: SystemTime) {
        let mut state = self.state();
        let day_use = DayUse { tokens, at: whole_seconds(now) };
        state.last.insert((model.to_string(), key.to_string()), day_use);
        let line = line(model, key, day_use);
        if state.file.write_all(line.as_bytes()).is_ok() {
            state.bytes += line.len() as u64;
        }
        if state.bytes > REWRITE {
            self.rewrite(&mut state);
        }
    }

    /// Drops what was recorded before `time`, because `usage.json` has it.
    pub fn drop_before(&self, time: SystemTime) {
        let mut state = self.state();
        state.last.retain(|_, day_use| day_use.at >= whole_seconds(time));
        self.rewrite(&mut state);
    }

    /// Replaces the file by one with the last line of each key.
    fn rewrite(&self, state: &mut LogState) {
        if let Ok(file) = rewritten(&self.path, &state.last) {
            state.bytes = file.metadata().map_or(0, |found| found.len());
            state.file = file;
        }
    }

    fn state(&self) -> MutexGuard<'_, LogState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes the lines beside the file, then in its place: a process that is killed loses none. Returns the file, open for
/// more lines.
fn rewritten(path: &Path, last: &States) -> Result<File> {
    let new = path.with_extension("log.new");
    // A file of an earlier run that was killed here.
    let _ = std::fs::remove_file(&new);
    let mut file = File::options().append(true).create_new(true).mode(0o600).open(&new).at(&new)?;
    let lines: String = last.iter().map(|((model, key), day_use)| line(model, key, *day_use)).collect();
    file.write_all(lines.as_bytes()).at(&new)?;
    std::fs::rename(&new, path).at(path)?;
    Ok(file)
}

fn line(model: &str, key: &str, day_use: DayUse) -> String {
    let at = day_use.at.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    format!("{}\n", json!({"model": model, "key": key, "day_used": day_use.tokens, "at": at}))
}

fn whole_seconds(time: SystemTime) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(time.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()))
}

/// Reads the lines of an earlier run. A last line that is incomplete is left out.
///
/// # Errors
/// The file cannot be read, or is damaged.
pub fn read(path: &Path) -> Result<States> {
    match files::exists(path)? {
        true => parse(&files::read_limited(path, FILE_LIMIT)?).at(path),
        false => Ok(States::default()),
    }
}

fn parse(text: &[u8]) -> Result<States> {
    let mut last = States::new();
    for (number, line) in text.lines().enumerate() {
        let Ok(line) = line else { return Err(damaged(number)) };
        let parsed = strict_json::parse(line.as_bytes()).ok().and_then(|object| entry(&object));
        match parsed {
            Some((name, day_use)) => _ = last.insert(name, day_use),
            None if !text.ends_with(b"\n") && number + 1 == text.lines().count() => {}
            None => return Err(damaged(number)),
        }
    }
    Ok(last)
}

fn entry(object: &Value) -> Option<((String, String), DayUse)> {
    let text = |name: &str| object.get(name)?.as_str().map(String::from);
    let at = UNIX_EPOCH.checked_add(Duration::from_secs(object.get("at")?.as_u64()?))?;
    Some(((text("model")?, text("key")?), DayUse { tokens: object.get("day_used")?.as_u64()?, at }))
}

fn damaged(number: usize) -> Error {
    Error::corrupt(format!("line {}: expected an object with model, key, day_used and at", number + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn open(dir: &Path) -> UsageLog {
        let path = dir.join(FILE);
        UsageLog::open(&path, read(&path).unwrap()).unwrap()
    }

    #[test]
    fn the_last_state_of_a_key_is_found_after_the_process_was_killed() {
        let home = tempfile::tempdir().unwrap();
        let log = open(home.path());
        log.record("m", "a", 5, at(100));
        log.record("m", "a", 7, at(101) + Duration::from_millis(900));
        log.record("n", "a", 9, at(102));
        // Nothing is closed or synced.
        std::mem::forget(log);
        std::fs::OpenOptions::new()
            .append(true)
            .open(home.path().join(FILE))
            .unwrap()
            .write_all(b"{\"model\": \"m\", \"ke")
            .unwrap();
        let log = open(home.path());
        assert_eq!(log.last("m", "a"), Some(DayUse { tokens: 7, at: at(101) }));
        assert_eq!((log.last("n", "a").map(|day| day.tokens), log.last("m", "b")), (Some(9), None));
        log.drop_before(at(102));
        assert_eq!((log.last("m", "a"), log.last("n", "a").is_some()), (None, true));
        log.record("m", "a", 1, at(103));
        drop(log);
        let log = open(home.path());
        assert_eq!(log.last("m", "a"), Some(DayUse { tokens: 1, at: at(103) }));
    }

    #[test]
    fn the_file_stays_small() {
        let home = tempfile::tempdir().unwrap();
        let log = open(home.path());
        let key = "k".repeat(4000);
        (0..3000).for_each(|i| log.record("m", &key, i, at(i)));
        assert!(std::fs::metadata(home.path().join(FILE)).unwrap().len() <= REWRITE + 8192);
        drop(log);
        assert_eq!(open(home.path()).last("m", &key).unwrap().tokens, 2999);
    }

    #[test]
    fn damaged_lines_are_refused() {
        let good = "{\"model\": \"m\", \"key\": \"a\", \"day_used\": 1, \"at\": 2}\n";
        assert_eq!(parse(good.as_bytes()).unwrap().len(), 1);
        for bad in
            ["\n", "{}\n", "[]\n", "{\"model\": \"m\", \"key\": \"a\", \"day_used\": -1, \"at\": 2}\n", "\u{fffd}\n"]
        {
            let error = parse([bad, good].concat().as_bytes()).unwrap_err().to_string();
            assert!(error.contains("line 1"), "{bad}: {error}");
        }
        assert!(parse(b"\xff\n").is_err());
    }
}
