//! Payloads of a pack read by position into buffers, so that memory does not grow with them: of the binary without mapping
//! it, or rebuilt where there is none.

use super::rebuild::Rebuild;
use super::{Entry, IebinReader};
use crate::error::{Context, Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Reads any bytes of any tensor.
#[derive(Debug)]
pub struct ByPosition<'a> {
    reader: &'a IebinReader,
    bytes: Source,
}

#[derive(Debug)]
enum Source {
    Binary(File, PathBuf),
    Rebuilt(Arc<dyn Rebuild>),
}

impl<'a> ByPosition<'a> {
    /// Of the tensors of this pack.
    ///
    /// # Errors
    /// Its binary cannot be opened any more.
    pub fn new(reader: &'a IebinReader) -> Result<ByPosition<'a>> {
        let bytes = match reader.rebuilt() {
            Some((source, _)) => Source::Rebuilt(source.clone()),
            None => {
                let path = reader.bin()?.path();
                Source::Binary(File::open(path).at(path)?, path.to_path_buf())
            }
        };
        Ok(ByPosition { reader, bytes })
    }

    /// What to name in messages about these bytes.
    pub fn path(&self) -> &Path {
        match &self.bytes {
            Source::Binary(_, path) => path,
            Source::Rebuilt(_) => &self.reader.dir,
        }
    }

    /// Fills `out` with the bytes of a tensor from byte `at` of its payload on.
    ///
    /// # Errors
    /// They lie outside, cannot be read, or what they are rebuilt from was changed.
    pub fn read(&self, entry: &Entry, at: usize, out: &mut [u8]) -> Result<()> {
        if at.checked_add(out.len()).is_none_or(|end| end > entry.nbytes) {
            let found = format!("{} bytes from {at} on lie outside of {}", out.len(), entry.nbytes);
            return Err(Error::corrupt(found).tensor(&entry.name));
        }
        match &self.bytes {
            Source::Binary(file, path) => file.read_exact_at(out, (entry.offset + at) as u64).at(path),
            Source::Rebuilt(source) => source.read(self.reader.place(entry)?, at..at + out.len(), out),
        }
    }
}
