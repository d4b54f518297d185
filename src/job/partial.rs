//! Manages the hidden directories of partial work that interrupted conversions and parts of a job leave.

use super::journal::{self, Finished, Header};
use super::part::Part;
use super::{COMMAND_NAME, COMMIT, Command, Output};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::output::{directory_of, stale, swap};
use std::path::{Path, PathBuf};

const PREFIX: &str = swap::PARTIAL.0;
const SUFFIX: &str = swap::PARTIAL.1;
const JOURNAL: &str = "journal";
/// Largest length of a recorded command in bytes.
const COMMAND_LIMIT: u64 = 1 << 20;

/// Finished tasks of one part and the prefix of its file names.
#[derive(Debug)]
pub(super) struct PartFiles {
    pub part: Part,
    pub stem: String,
    pub finished: Finished,
}

/// Directory of partial work.
#[derive(Debug)]
pub(super) struct Partial {
    /// Path of the directory.
    pub path: PathBuf,
    /// Command that completes the job; only parts record it.
    pub command: Option<Command>,
}

/// Returns all directories of partial work in `out_dir`.
///
/// # Errors
/// `out_dir` cannot be read, or a command in it is damaged.
pub(super) fn partials(out_dir: &Path) -> Result<Vec<Partial>> {
    let dirs = directories(out_dir).at(out_dir)?;
    dirs.into_iter().map(|path| Ok(Partial { command: read_command(&path.join(COMMAND_NAME))?, path })).collect()
}

pub(super) fn dir_name(fingerprint: &str) -> String {
    format!("{PREFIX}{}{SUFFIX}", &fingerprint[..16])
}

/// Returns the prefix of the file names of a part.
pub(super) fn stem(part: Part) -> String {
    format!("part-{}-of-{}.", part.number, part.count)
}

/// Returns the parts in `dir` whose journals belong to the same job, in order. Of a part that is still running, it
/// returns the tasks finished so far.
pub(super) fn part_files(dir: &Path, header: &Header) -> Result<Vec<PartFiles>> {
    let mut parts = Vec::new();
    for entry in std::fs::read_dir(dir).at(dir)? {
        let entry = entry.at(dir)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(part) = name.strip_suffix(JOURNAL).and_then(part_of_stem) else { continue };
        if let Some((found, finished)) = journal::peek(&entry.path())?
            && found.is_of_job(header)
        {
            parts.push(PartFiles { part, stem: stem(part), finished });
        }
    }
    parts.sort_by_key(|p| (p.part.count, p.part.number));
    Ok(parts)
}

fn part_of_stem(stem: &str) -> Option<Part> {
    let (number, count) = stem.strip_prefix("part-")?.strip_suffix('.')?.split_once("-of-")?;
    Part::new(number.parse().ok()?, count.parse().ok()?).ok()
}

/// Returns the directories of partial work in `out_dir` other than `own`.
pub(super) fn others(out_dir: &Path, own: &Path) -> Vec<PathBuf> {
    directories(out_dir).unwrap_or_default().into_iter().filter(|path| path != own).collect()
}

/// Returns true if the output directory holds partial work that was interrupted while files got their final names, or
/// afterwards. Files with final names may then belong to that work.
pub fn any_has_begun_commit(out_dir: &Path) -> bool {
    directories(out_dir).unwrap_or_default().iter().any(|dir| has_begun_commit(dir))
}

pub(super) fn has_begun_commit(dir: &Path) -> bool {
    matches!(journal::peek(&dir.join(JOURNAL)), Ok(Some((_, finished))) if finished.contains_key(COMMIT))
}

/// Removes the directories of partial work that no process is using: with [`Output::Alone`] all of them, otherwise only
/// those whose journals record that the output was complete ([`COMMIT`]).
pub(super) fn remove_idle(out_dir: &Path, output: Output) {
    for dir in directories(out_dir).unwrap_or_default() {
        let busy = names(&dir).iter().any(|name| name.ends_with(JOURNAL) && journal::in_use(&dir.join(name)));
        if !busy && !is_swapped(&dir) && (output == Output::Alone || has_begun_commit(&dir)) {
            stale::give_up(&dir);
        }
    }
}

/// Returns true when an output consists of files in this directory of partial work, because its swap was interrupted.
fn is_swapped(dir: &Path) -> bool {
    let entries = std::fs::read_dir(directory_of(dir)).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| swap::staged(&entry.path()).is_some_and(|staged| staged == *dir))
}

/// Removes the files of one run from `dir`, and `dir` itself when no files of other runs are left. `stem` is the prefix
/// of the files of a part, or empty for the whole job. Nothing is removed while an output consists of files in `dir`.
pub(super) fn remove_run(dir: &Path, stem: &str) {
    if is_swapped(dir) {
        return;
    }
    let is_part = |name: &str| name.split_inclusive('.').next().and_then(part_of_stem).is_some();
    let mut rest = names(dir);
    rest.retain(|name| {
        let ours = if stem.is_empty() { !is_part(name) && name != COMMAND_NAME } else { name.starts_with(stem) };
        !(ours && std::fs::remove_file(dir.join(name)).is_ok())
    });
    if rest.iter().all(|name| name == COMMAND_NAME) {
        let _ = std::fs::remove_dir_all(dir);
    }
}

fn directories(out_dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(out_dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let id = name.to_str().and_then(|n| n.strip_prefix(PREFIX)?.strip_suffix(SUFFIX));
        // Symbolic links are ignored, because this program creates only directories with such names.
        if id.is_some_and(|id| id.len() == 16) && entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn read_command(path: &Path) -> Result<Option<Command>> {
    let bytes = match files::read_limited(path, COMMAND_LIMIT) {
        Err(e) if e.is_not_found() => return Ok(None),
        bytes => bytes?,
    };
    let command = serde_json::from_slice(&bytes);
    command
        .map(Some)
        .map_err(|e| Error::corrupt(format!("not the record of a command: {e}")).at(path).help("run the parts again"))
}
