//! Random-access reads by byte position, from an opened file or, in tests and fuzzing, from memory.

use super::checksum::Checksum;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::provenance::SourceFile;
use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Source of known length that is read by byte position.
pub trait ReadAt {
    /// Returns the length in bytes.
    fn nbytes(&self) -> u64;

    /// Fills `out` with the bytes that start at position `at`.
    ///
    /// # Errors
    /// The range reaches past the end, or reading fails.
    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()>;

    /// Reads `n` bytes from position `at` on. Checks the range first, so a range past the end allocates nothing.
    ///
    /// # Errors
    /// The range reaches past the end, or reading fails.
    fn read_vec(&self, at: u64, n: u64) -> Result<Vec<u8>> {
        let past_end = || {
            Error::corrupt(format!("found a file of {} bytes, expected {n} bytes from offset {at} on", self.nbytes()))
                .help("the file is truncated or damaged; get it again")
        };
        if at.checked_add(n).is_none_or(|end| end > self.nbytes()) {
            return Err(past_end());
        }
        let mut out = vec![0; usize::try_from(n).map_err(|_| past_end())?];
        self.read_at(at, &mut out)?;
        Ok(out)
    }
}

/// A weight file, read by position and never memory-mapped, so that memory use stays within the caller's buffers.
#[derive(Debug)]
pub struct InputFile {
    path: PathBuf,
    file: File,
    nbytes: u64,
    /// State of the file when it was opened.
    stamp: Stamp,
    /// Checksums that the file records of its entries (zip archives of `torch.save`), in file order.
    checksums: Vec<Checksum>,
}

/// Facts about a file that change with its content. Programs can set the modification time, but not the time at which
/// the system last changed the file or its metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp {
    /// Device and number of the file.
    id: (u64, u64),
    nbytes: u64,
    /// Modification time in seconds and nanoseconds.
    modified: (i64, i64),
    /// Time of the last change of content or metadata, in seconds and nanoseconds.
    changed: (i64, i64),
    links: u64,
}

impl Stamp {
    /// Takes the facts from the metadata of a file.
    pub fn of(metadata: &Metadata) -> Stamp {
        Stamp {
            id: (metadata.dev(), metadata.ino()),
            nbytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            links: metadata.nlink(),
        }
    }

    /// Returns true if the content may have changed between both states of a file. A name that was added or removed
    /// also changes the time of the last change, but not the content.
    pub fn may_differ_from(&self, later: &Stamp) -> bool {
        let named_anew = self.links != later.links;
        let Stamp { id, nbytes, modified, changed, .. } = self;
        (id, nbytes, modified) != (&later.id, &later.nbytes, &later.modified)
            || !named_anew && *changed != later.changed
    }

    /// Returns the time of the last change as text.
    pub fn time_of_change(&self) -> String {
        format!("{}.{:09}", self.changed.0, self.changed.1)
    }
}

impl InputFile {
    /// Opens a file.
    ///
    /// # Errors
    /// The file cannot be opened, or is not a regular file.
    pub fn open(path: &Path) -> Result<InputFile> {
        let (file, metadata) = files::open_with_metadata(path)?;
        let stamp = Stamp::of(&metadata);
        Ok(InputFile { path: path.to_path_buf(), file, nbytes: metadata.len(), stamp, checksums: Vec::new() })
    }

    /// Adds the checksums that the file records, in file order.
    pub(super) fn with_checksums(self, checksums: Vec<Checksum>) -> InputFile {
        InputFile { checksums, ..self }
    }

    /// Returns the checksums that the file records, in file order.
    pub(in crate::convert) fn checksums(&self) -> &[Checksum] {
        &self.checksums
    }

    /// Fails if the file has changed since it was opened, even if its modification time was set back, because data read
    /// before and after a change do not belong together. Replacing the file at the path by another file is not a
    /// change: reads still go to the opened file.
    ///
    /// # Errors
    /// The file was changed, or its metadata cannot be read.
    pub fn refuse_change(&self) -> Result<()> {
        let metadata = self.file.metadata().at(&self.path)?;
        if self.stamp.may_differ_from(&Stamp::of(&metadata)) { Err(changed_meanwhile(&self.path)) } else { Ok(()) }
    }

    /// Returns the state of the file when it was opened.
    pub fn stamp(&self) -> &Stamp {
        &self.stamp
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the length in bytes.
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Returns the file name without its directory.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Builds the provenance record of this file, which is stored in every output made from it.
    pub fn source_file(&self, sha256: String) -> SourceFile {
        SourceFile { name: self.name(), bytes: self.nbytes, sha256 }
    }
}

/// Builds the error for an input that was changed while it was read.
pub(in crate::convert) fn changed_meanwhile(path: &Path) -> Error {
    Error::corrupt("the file was changed while it was read")
        .at(path)
        .help("run the same command again when the file is complete")
}

impl ReadAt for InputFile {
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, at).at(&self.path)
    }
}

impl ReadAt for &[u8] {
    fn nbytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        let part = usize::try_from(at).ok().and_then(|at| self.get(at..)?.get(..out.len()));
        out.copy_from_slice(part.ok_or_else(|| Error::corrupt(format!("found no data at offset {at}")))?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_file_that_changes_is_noticed_and_one_that_is_replaced_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        std::fs::write(&path, [1; 8]).unwrap();
        let input = InputFile::open(&path).unwrap();
        std::fs::write(dir.path().join("new"), [2; 8]).unwrap();
        std::fs::rename(dir.path().join("new"), &path).unwrap();
        input.refuse_change().unwrap();
        assert_eq!(input.read_vec(0, 8).unwrap(), [1; 8]);
        let modified = |path: &Path| path.metadata().unwrap().modified().unwrap();
        let changes: [fn(&Path); 3] = [
            |path| {
                let file = File::options().append(true).open(path).unwrap();
                file.set_modified(file.metadata().unwrap().modified().unwrap() + Duration::from_secs(1)).unwrap();
            },
            |path| File::options().append(true).open(path).unwrap().set_len(9).unwrap(),
            |path| File::options().write(true).open(path).unwrap().write_all_at(&[3], 4).unwrap(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let input = InputFile::open(&path).unwrap();
            input.refuse_change().unwrap();
            let before = modified(&path);
            // The clock of the file system may advance in steps of some milliseconds.
            std::thread::sleep(Duration::from_millis(20));
            change(&path);
            if number > 0 {
                File::options().append(true).open(&path).unwrap().set_modified(before).unwrap();
            }
            let refused = input.refuse_change().unwrap_err().to_string();
            assert!(refused.contains("was changed while it was read"), "change {number}: {refused}");
        }
    }
}
