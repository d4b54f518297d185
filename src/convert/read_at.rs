//! Random-access reads by byte position, from an opened file or, in tests and fuzzing, from memory.

use super::checksum::Checksum;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::provenance::SourceFile;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

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
    /// Modification time when the file was opened.
    modified: SystemTime,
    /// Checksums that the file records of its entries (zip archives of `torch.save`), in file order.
    checksums: Vec<Checksum>,
}

impl InputFile {
    /// Opens a file.
    ///
    /// # Errors
    /// The file cannot be opened, or is not a regular file.
    pub fn open(path: &Path) -> Result<InputFile> {
        let (file, metadata) = files::open_with_metadata(path)?;
        let modified = metadata.modified().at(path)?;
        Ok(InputFile { path: path.to_path_buf(), file, nbytes: metadata.len(), modified, checksums: Vec::new() })
    }

    /// Adds the checksums that the file records, in file order.
    pub(super) fn with_checksums(self, checksums: Vec<Checksum>) -> InputFile {
        InputFile { checksums, ..self }
    }

    /// Returns the checksums that the file records, in file order.
    pub(super) fn checksums(&self) -> &[Checksum] {
        &self.checksums
    }

    /// Fails if the size or modification time of the file has changed since it was opened, because data read before
    /// and after a change do not belong together. Replacing the file at the path by another file is not a change:
    /// reads still go to the opened file.
    ///
    /// # Errors
    /// The file was changed, or its metadata cannot be read.
    pub fn refuse_change(&self) -> Result<()> {
        let metadata = self.file.metadata().at(&self.path)?;
        match metadata.len() == self.nbytes && metadata.modified().at(&self.path)? == self.modified {
            true => Ok(()),
            false => Err(Error::corrupt("the file was changed while it was read")
                .at(&self.path)
                .help("run the same command again when the file is complete")),
        }
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

impl ReadAt for InputFile {
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, at).at(&self.path)
    }
}

/// Returns true when the file at `path` begins with `magic`.
pub(super) fn begins_with<const N: usize>(path: &Path, magic: &[u8; N]) -> bool {
    let mut start = [0; N];
    files::open(path).is_ok_and(|file| file.read_exact_at(&mut start, 0).is_ok()) && start == *magic
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
        let input = InputFile::open(&path).unwrap();
        File::options()
            .append(true)
            .open(&path)
            .unwrap()
            .set_modified(input.modified + Duration::from_secs(1))
            .unwrap();
        assert!(input.refuse_change().unwrap_err().to_string().contains("was changed while it was read"));
        let input = InputFile::open(&path).unwrap();
        let modified = input.modified;
        let file = File::options().append(true).open(&path).unwrap();
        file.set_len(9).unwrap();
        file.set_modified(modified).unwrap();
        assert!(input.refuse_change().is_err());
    }
}
