//! Families of deduplicated packs: which packs are rebuilt from which, the bytes of each, and the removal of a pack.
//!
//! [`crate::iebin::dependants`] describes the references between a pack and its bases. No pack writes into the files
//! of another one.

use super::description::{FILE_NAMES, JSON_NAME};
use super::report::{Shared, Summary};
use super::store::read_store;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin;
use crate::iebin::dependants::{LIST_NAME, dependants, forget, lock, refuse_if_needed, relative, tidy};
use crate::iebin::reader::{check_entries, read_description};
use crate::output::{DirLock, sync_dir};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Removes a pack: its weights and their descriptions. Other files of the directory stay; the directory is removed
/// when it is empty.
///
/// # Errors
/// Other packs are rebuilt from it, or there is no pack.
pub fn remove(dir: &Path) -> Result<()> {
    // The description is removed first: an incomplete pack must not look complete.
    let names = [iebin::JSON_NAME, JSON_NAME, iebin::BIN_NAME, LIST_NAME];
    let names: Vec<&str> = names.into_iter().chain(FILE_NAMES).collect();
    let present = |name: &&&str| dir.join(name).symlink_metadata().is_ok();
    // Locked before the search, so that the lock file of a killed command is removed even if there is no pack.
    let changing = DirLock::acquire(dir).map_err(Error::while_opening_model)?;
    if names.iter().filter(present).count() == 0 {
        return Err(Error::usage("found no pack").at(dir).help("name the directory of a pack with --model-dir"));
    }
    let lock = lock(dir)?;
    refuse_if_needed(dir)?;
    let bases = read_store(dir).map_or_else(|_| Vec::new(), |description| description.bases);
    let bases: Vec<PathBuf> =
        bases.iter().map(|base| dir.join(&base.dir)).filter(|base| matches!(files::exists(base), Ok(true))).collect();
    let listed = bases.iter().map(|base| relative(dir, base)).collect::<Result<Vec<_>>>()?;
    for (i, name) in names.iter().filter(present).enumerate() {
        std::fs::remove_file(dir.join(name)).at(dir.join(name))?;
        if i == 0 {
            sync_dir(dir)?;
        }
    }
    sync_dir(dir)?;
    drop((lock, changing));
    // A failure here is harmless: entries of the list are checked when they are used.
    for (base, listed) in bases.iter().zip(listed) {
        let _ = forget(base, &listed);
    }
    let _ = std::fs::remove_dir(dir);
    Ok(())
}

/// Sizes of one pack of a family, and the packs that it is rebuilt from or that are rebuilt from it.
#[derive(Debug, Clone, Serialize)]
pub struct Member {
    /// Directory of the pack.
    pub dir: PathBuf,
    /// Bytes of its binary, even if it was removed.
    pub original_bytes: u64,
    /// Bytes of the binary in the directory; 0 if it was removed.
    pub binary_bytes: u64,
    /// Bytes of the four files of its store; 0 without one.
    pub store_bytes: u64,
    /// Bytes that are rebuilt from other packs.
    pub bases: Vec<Shared>,
    /// Packs that are rebuilt from this one.
    pub needed_by: Vec<PathBuf>,
}

impl Member {
    /// Reads the sizes of the pack in `dir` from its descriptions, without its weights.
    ///
    /// # Errors
    /// A description is missing or invalid.
    pub fn of(dir: &Path) -> Result<Member> {
        let size = |name: &str| std::fs::metadata(dir.join(name)).map_or(0, |file| file.len());
        let binary_bytes = size(iebin::BIN_NAME);
        let needed_by = dependants(dir)?;
        let summary = if files::exists(&dir.join(JSON_NAME))? { Some(summary(dir)?) } else { None };
        Ok(Member {
            dir: dir.to_path_buf(),
            original_bytes: summary.as_ref().map_or(binary_bytes, |summary| summary.original_bytes),
            binary_bytes,
            store_bytes: summary.as_ref().map_or(0, |summary| summary.stored_bytes),
            bases: summary.map_or_else(Vec::new, |summary| summary.bases),
            needed_by,
        })
    }

    /// Returns the pack in `dir` and all packs connected with it, bases first.
    ///
    /// # Errors
    /// A description is invalid. Bases that were removed are left out.
    pub fn family(dir: &Path) -> Result<Vec<Member>> {
        let mut members: Vec<(PathBuf, Member)> = Vec::new();
        let mut open = vec![tidy(dir)];
        while let Some(dir) = open.pop() {
            let Ok(place) = dir.canonicalize() else { continue };
            if members.iter().any(|(seen, _)| *seen == place) || !files::exists(&dir.join(iebin::JSON_NAME))? {
                continue;
            }
            let member = Member::of(&dir)?;
            open.extend(member.needed_by.iter().cloned());
            open.extend(member.bases.iter().map(|base| tidy(&dir.join(&base.dir))));
            members.push((place, member));
        }
        let mut members: Vec<Member> = members.into_iter().map(|(_, member)| member).collect();
        members.sort_by(|a, b| (a.bases.len(), &a.dir).cmp(&(b.bases.len(), &b.dir)));
        Ok(members)
    }

    /// Returns the bytes of weights in its directory.
    pub fn kept_bytes(&self) -> u64 {
        self.binary_bytes + self.store_bytes
    }
}

/// Returns the summary of the deduplicated pack in `dir`, from its descriptions alone.
///
/// # Errors
/// A description is missing or invalid.
pub fn summary(dir: &Path) -> Result<Summary> {
    let mut description = read_store(dir)?;
    let pack = dir.join(iebin::JSON_NAME);
    let mut packed = read_description(&pack)?;
    let (older, length) = (packed.is_older(), description.total_bytes as usize);
    let entries = check_entries(std::mem::take(&mut packed.tensors), length, older).at(&pack)?;
    description.resolve(&entries).at(dir.join(JSON_NAME))?;
    let json_bytes = std::fs::metadata(dir.join(JSON_NAME)).at(dir)?.len();
    Ok(Summary::of(&description, &entries, json_bytes))
}
