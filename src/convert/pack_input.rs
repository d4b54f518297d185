//! A pack as the input of a conversion.

use super::digest::hash_file;
use super::executor::Task;
use crate::error::{Context, Error, Result};
use crate::iebin::{BIN_NAME, IebinReader, JSON_NAME};
use crate::job::Fingerprint;
use crate::progress::ProgressBar;

/// Adds the files of a pack; one without its binary is rebuilt from others, and its description has the hashes.
///
/// # Errors
/// A file is not there any more.
pub(super) fn fingerprint(reader: &IebinReader, fingerprint: &mut Fingerprint) -> Result<()> {
    fingerprint.file(&reader.dir.join(JSON_NAME))?;
    let binary = reader.dir.join(BIN_NAME);
    if binary.exists() { fingerprint.file(&binary) } else { Ok(()) }
}

/// Compares every payload with its recorded hash, so that damage is not passed on.
pub(super) fn check_tasks(reader: &IebinReader) -> impl Iterator<Item = Task<'_>> {
    reader.entries().iter().filter_map(move |entry| {
        let expected = entry.sha256.as_ref()?;
        let check = move |bar: &ProgressBar| {
            let found = hash_file(entry.nbytes as u64, bar, |at, out| reader.read(entry, at as usize, out))?;
            if found == *expected {
                return Ok(found);
            }
            Err(Error::corrupt(format!("found the SHA-256 {found}, expected the recorded {expected}"))
                .tensor(&entry.name)
                .help("the pack is damaged; pack again"))
            .at(reader.bin().map_or(reader.dir.as_path(), |bin| bin.path()))
        };
        Some(Task::hash(format!("payload {}", entry.name), entry.nbytes as u64, check))
    })
}
