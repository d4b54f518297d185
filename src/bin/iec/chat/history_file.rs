//! File with what the user typed in earlier conversations: one entry per line, with `\n` and `\\` for line breaks and
//! backslashes. Only its owner can read it. If the file cannot be read or written, one note says so, and the history is
//! kept in memory only.

use super::editor::HISTORY_ENTRIES;
use crate::console;
use crate::global::non_empty_variable;
use iec::error::{Context, Error, Result};
use iec::files;
use iec::output::AtomicFile;
use rustix::fs::OFlags;
use std::fs::{DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Size in bytes from which the file is shortened to the latest entries.
const SHORTENED_FROM: u64 = 1 << 20;
/// Largest accepted file in bytes.
const FILE_LIMIT: u64 = 64 << 20;

/// File of the history.
#[derive(Debug)]
pub struct HistoryFile {
    path: PathBuf,
    broken: bool,
}

/// Returns the path of the file: `iec/history` in XDG_STATE_HOME or ~/.local/state; `None` without a home directory.
pub fn default_path() -> Option<PathBuf> {
    let absolute = |name: &str| non_empty_variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    Some(state.join("iec/history"))
}

impl HistoryFile {
    /// Uses the file at `path`, which need not exist.
    pub fn new(path: PathBuf) -> HistoryFile {
        HistoryFile { path, broken: false }
    }

    /// Returns the latest entries, from the oldest.
    pub fn read(&mut self) -> Vec<String> {
        let read = || -> Result<Vec<String>> {
            let Some(found) = files::find(&self.path)? else { return Ok(Vec::new()) };
            let text = files::utf8(files::read_limited(&self.path, FILE_LIMIT)?).at(&self.path)?;
            let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
            let latest = &lines[lines.len().saturating_sub(HISTORY_ENTRIES)..];
            if found.len() > SHORTENED_FROM {
                let mut file = AtomicFile::create_private(&self.path)?;
                latest.iter().try_for_each(|line| writeln!(file, "{line}")).at(&self.path)?;
                file.commit()?;
            }
            Ok(latest.iter().map(|line| unescape(line)).collect())
        };
        read().unwrap_or_else(|e| {
            self.broken = true;
            unusable(&e);
            Vec::new()
        })
    }

    /// Adds an entry.
    pub fn append(&mut self, entry: &str) {
        if !self.broken
            && let Err(e) = append(&self.path, &format!("{}\n", escape(entry)))
        {
            self.broken = true;
            unusable(&e);
        }
    }
}

fn append(path: &Path, line: &str) -> Result<()> {
    if let Some(dir) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(dir).at(dir)?;
    }
    // A pipe or a link in the place of the file is refused.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let mut file = OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(flags).open(path).at(path)?;
    if !file.metadata().at(path)?.is_file() {
        return Err(Error::usage("found no regular file, expected one").at(path));
    }
    file.write_all(line.as_bytes()).at(path)
}

fn unusable(e: &Error) {
    console::note(format_args!("note: the history of typed lines is not kept: {e}"));
}

fn escape(entry: &str) -> String {
    entry.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "")
}

fn unescape(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('n') => out.push('\n'),
                Some(other) => out.push(other),
                None => out.push('\\'),
            },
            c if c.is_control() && c != '\t' => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn entries_are_read_as_they_were_added() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/iec/history");
        let mut file = HistoryFile::new(path.clone());
        let entries = ["one", "two\nlines", "back\\slash\\n", "é 猫"];
        assert!(file.read().is_empty());
        entries.iter().for_each(|entry| file.append(entry));
        assert_eq!(file.read(), entries);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    }

    #[test]
    fn a_long_file_is_shortened_to_its_latest_entries() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let lines: String = (0..HISTORY_ENTRIES + 10).map(|i| format!("{i} {}\n", "x".repeat(2000))).collect();
        std::fs::write(&path, lines).unwrap();
        let mut file = HistoryFile::new(path.clone());
        let entries = file.read();
        assert_eq!(entries.len(), HISTORY_ENTRIES);
        assert!(entries[0].starts_with("10 "));
        std::fs::write(&path, "a\n\x1b[2Jb\n\\").unwrap();
        assert_eq!(file.read(), ["a", "[2Jb", "\\"]);
    }

    #[test]
    fn what_is_no_file_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        assert!(append(&path, "x\n").is_err());
        std::fs::remove_file(&path).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(append(&path, "x\n").is_err());
    }
}
