//! The tensors of a pack and where their bytes are: in `model.ie.bin`, or in a store.

use super::description::JSON_NAME;
use super::layout::Layout;
use super::store::Store;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::{self, Entry};
use crate::mapped::MappedFile;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum number of bases in a chain of packs in which each is the base of the one before.
const MOST_BASES: usize = 4;

/// The tensors of a pack and its payloads, in `model.ie.bin` or deduplicated.
#[derive(Debug)]
pub struct Artifact {
    /// Directory of the pack.
    pub dir: PathBuf,
    entries: Vec<Entry>,
    bytes: ArtifactSource,
}

/// The packs that are being opened, each a base of the one before.
#[derive(Debug, Clone, Default)]
pub(super) struct Chain(Vec<PathBuf>);

impl Chain {
    /// Returns the chain with one more pack.
    pub fn with(&self, dir: &Path) -> Result<Chain> {
        if self.0.len() > MOST_BASES {
            return Err(Error::corrupt(format!(
                "found a chain of more than {MOST_BASES} base packs, each the base of the one before"
            ))
            .at(dir)
            .help(
                "shorten the chain: run `iec dedup` with a --base that is itself a base of the present one \
                 (`iec inspect DIR` lists the bases of a pack)",
            ));
        }
        let mut chain = self.clone();
        chain.0.push(dir.canonicalize().at(dir)?);
        Ok(chain)
    }

    /// Fails if the directory `place` is that of a pack in the chain: that pack would be rebuilt from itself, which is
    /// impossible once its binary is removed.
    fn refuse(&self, place: &Path, dir: &Path) -> Result<()> {
        if !self.0.contains(&place.canonicalize().at(place)?) {
            return Ok(());
        }
        Err(Error::corrupt("found a pack that is a base of its own base, so that it would be rebuilt from itself")
            .at(dir)
            .help(
                "run `iec dedup --model-dir DIR` without --base for the one of the packs that has its model.ie.bin; \
                 if neither has it, restore one from a backup",
            ))
    }
}

#[derive(Debug)]
enum ArtifactSource {
    Binary(Arc<MappedFile>),
    Store(Box<Store>),
}

impl Artifact {
    /// Opens the pack in `dir`, a base of the last pack in `chain`: its binary or, if that was removed, its store.
    ///
    /// # Errors
    /// Both are missing, or a number in a description is out of range.
    pub(super) fn open_below(dir: &Path, chain: &Chain) -> Result<Artifact> {
        chain.refuse(dir, dir)?;
        let binary = dir.join(iebin::BIN_NAME);
        if files::exists(&binary)? || !files::exists(&dir.join(JSON_NAME))? {
            let reader = iebin::IebinReader::open(dir)?;
            let bin = reader.bin()?;
            // The binary may be a link into a pack of the chain.
            chain.refuse(bin.path().canonicalize().at(&binary)?.parent().unwrap_or(dir), dir)?;
            let entries = reader.entries().to_vec();
            return Ok(Artifact { dir: dir.to_path_buf(), entries, bytes: ArtifactSource::Binary(bin.clone()) });
        }
        let store = Store::open(dir, chain)?;
        store.verify_unless_bound()?;
        Ok(Artifact {
            dir: dir.to_path_buf(),
            entries: store.entries.clone(),
            bytes: ArtifactSource::Store(Box::new(store)),
        })
    }

    /// Returns all tensors.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the store, if the binary was removed.
    pub(super) fn store(&self) -> Option<&Store> {
        match &self.bytes {
            ArtifactSource::Binary(_) => None,
            ArtifactSource::Store(store) => Some(store),
        }
    }

    /// Releases the pages that were read.
    pub(crate) fn release(&self) {
        match &self.bytes {
            ArtifactSource::Binary(file) => file.release(),
            ArtifactSource::Store(store) => store.files.iter().for_each(|file| file.release()),
        }
    }

    /// Reads bytes `range` of unit number `unit` of tensor `i`, which is divided as `layout` says. Bytes of the range
    /// beyond the end of the unit are zeros.
    pub(super) fn read_unit(
        &self,
        i: usize,
        layout: &Layout,
        unit: usize,
        range: Range<usize>,
        out: &mut [u8],
    ) -> Result<()> {
        let (start, end) = (range.start.min(layout.unit_bytes), range.end.min(layout.unit_bytes));
        let (there, beyond) = out.split_at_mut(end - start);
        beyond.fill(0);
        let unit = unit * layout.unit_bytes;
        self.read(i, unit + start..unit + end, there)
    }

    /// Reads bytes `range` of tensor `i`.
    pub(crate) fn read(&self, i: usize, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let entry = &self.entries[i];
        match &self.bytes {
            ArtifactSource::Binary(file) => {
                out.copy_from_slice(&file.bytes()[entry.offset..][..entry.nbytes][range]);
                Ok(())
            }
            ArtifactSource::Store(store) => store.read(store.payload_of(i), range, out),
        }
    }
}
