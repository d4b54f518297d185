//! The tensors of a pack and where their bytes are: in `model.ie.bin`, or in a store.

use super::description::JSON_NAME;
use super::store::Store;
use crate::error::Result;
use crate::iebin::{self, Entry};
use crate::mapped::MappedFile;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The tensors of a pack and its payloads, in `model.ie.bin` or deduplicated.
#[derive(Debug)]
pub struct Artifact {
    /// Where it lies.
    pub dir: PathBuf,
    entries: Vec<Entry>,
    bytes: Source,
}

#[derive(Debug)]
enum Source {
    Binary(Arc<MappedFile>),
    Store(Box<Store>),
}

impl Artifact {
    /// Opens the binary of a pack, or what it was deduplicated to where the binary is gone.
    ///
    /// # Errors
    /// Neither is there, or a number in a description is impossible.
    pub fn open(dir: &Path) -> Result<Artifact> {
        Artifact::open_below(dir, 0)
    }

    pub(super) fn open_below(dir: &Path, depth: usize) -> Result<Artifact> {
        let binary = dir.join(iebin::BIN_NAME);
        if binary.exists() || !dir.join(JSON_NAME).exists() {
            let reader = iebin::IebinReader::open(dir)?;
            let entries = reader.entries().to_vec();
            return Ok(Artifact { dir: dir.to_path_buf(), entries, bytes: Source::Binary(reader.bin().clone()) });
        }
        let store = Store::open_below(dir, depth)?;
        Ok(Artifact { dir: dir.to_path_buf(), entries: store.entries.clone(), bytes: Source::Store(Box::new(store)) })
    }

    /// All tensors.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Lets go of what was read.
    pub(crate) fn release(&self) {
        match &self.bytes {
            Source::Binary(file) => file.release(),
            Source::Store(store) => store.files.iter().for_each(|file| file.release()),
        }
    }

    /// Bytes `range` of tensor `i`.
    pub(crate) fn read(&self, i: usize, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let entry = &self.entries[i];
        match &self.bytes {
            Source::Binary(file) => {
                out.copy_from_slice(&file.bytes()[entry.offset..][..entry.nbytes][range]);
                Ok(())
            }
            Source::Store(store) => store.read(store.payload_of(i), range, out),
        }
    }
}
