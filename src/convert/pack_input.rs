//! A pack as the input of a conversion.

use super::digest::hash_file;
use super::executor::Task;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::{BIN_NAME, Entry, IebinReader, JSON_NAME};
use crate::job::Fingerprint;
use crate::progress::ProgressBar;

/// Adds the files of a pack to `fingerprint`. The weights of a deduplicated pack without its binary are in other files,
/// which need not be added: the description of the pack contains the hashes of its tensors.
///
/// # Errors
/// A file of the pack is missing.
pub(super) fn fingerprint(reader: &IebinReader, fingerprint: &mut Fingerprint) -> Result<()> {
    fingerprint.file(&reader.path(JSON_NAME))?;
    let binary = reader.path(BIN_NAME);
    if files::exists(&binary)? { fingerprint.file(&binary) } else { Ok(()) }
}

/// Lists tasks that compare the payloads of selected tensors with their recorded hashes, so that damaged
/// data does not get into the output.
pub(super) fn check_tasks<'a>(
    reader: &'a IebinReader,
    select: impl Fn(&Entry) -> bool + 'a,
) -> impl Iterator<Item = Task<'a>> {
    reader.entries().iter().filter(move |entry| select(entry)).filter_map(move |entry| check_task(reader, entry))
}

/// Returns the task that compares a payload with its recorded hash; `None` if none is recorded.
pub(super) fn check_task<'a>(reader: &'a IebinReader, entry: &'a Entry) -> Option<Task<'a>> {
    entry.sha256.as_ref()?;
    let check = move |bar: &ProgressBar| {
        let found = hash_file(entry.nbytes as u64, bar, |at, out| reader.read(entry, at as usize, out))?;
        refuse_damage(reader, entry, &found).map(|()| found)
    };
    Some(Task::hash(format!("payload {}", entry.name), entry.nbytes as u64, check))
}

/// Fails if the SHA-256 `found` of a payload is not the recorded one.
pub(super) fn refuse_damage(reader: &IebinReader, entry: &Entry, found: &str) -> Result<()> {
    match &entry.sha256 {
        Some(expected) if expected != found => {
            Err(Error::corrupt(format!("found the SHA-256 {found}, expected the recorded {expected}"))
                .tensor(&entry.name)
                .help("the pack is damaged; restore it from a backup or make it again"))
            .at(reader.bin().map_or(reader.dir.as_path(), |bin| bin.path()))
        }
        _ => Ok(()),
    }
}
