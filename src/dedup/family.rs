//! Packs that are kept together: which are rebuilt from which, what each costs, and how one is taken away.
//!
//! A pack that was deduplicated against others names their directories and the hashes of their tensors, so it notices when
//! one is gone or changed. In the other direction a base keeps a list of the packs that need it. The list is written before
//! the description that makes it true and is believed only where such a description lies: whatever is interrupted, a base is
//! never taken away from a pack that needs it, and no pack writes into the files of another one.

use super::description::{Description, FILE_NAMES, JSON_NAME};
use super::report::{Shared, Summary};
use super::store::read_store;
use crate::error::{Context, Error, Result};
use crate::iebin;
use crate::iebin::reader::{check_entries, read_description};
use crate::output::write_atomically;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};

/// File name of the list of packs that need this one.
pub const LIST_NAME: &str = "model.dedup.family.json";
/// Name of its format.
const FORMAT: &str = "iec_dedup_family_v1";
/// A list larger than this is refused before it is parsed.
const LIST_LIMIT: u64 = 16 << 20;

/// What a base says of the packs that need it.
#[derive(Debug, Default, Serialize, Deserialize)]
struct List {
    format: String,
    /// Directories, relative to the base.
    members: Vec<String>,
}

impl List {
    fn read(base: &Path) -> Result<List> {
        let path = base.join(LIST_NAME);
        let read = || {
            let size = match std::fs::metadata(&path) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(List::default()),
                size => size?.len(),
            };
            if size > LIST_LIMIT {
                return Err(Error::corrupt(format!("{size} bytes; a list has at most {LIST_LIMIT}")));
            }
            let list: List = serde_json::from_slice(&std::fs::read(&path)?)
                .map_err(|e| Error::corrupt(format!("not a list of packs: {e}")))?;
            match list.format == FORMAT {
                true => Ok(list),
                false => Err(Error::unsupported(format!("format `{}`, expected `{FORMAT}`", list.format))),
            }
        };
        read().at(&path).help("remove it, then deduplicate the packs that need this one again")
    }

    /// Changes the list of a base; nobody else does so meanwhile.
    fn change(base: &Path, change: impl FnOnce(&mut Vec<String>)) -> Result<()> {
        let _lock = lock(base)?;
        let mut list = List::read(base)?;
        let before = list.members.clone();
        change(&mut list.members);
        if list.members == before {
            return Ok(());
        }
        list.format = FORMAT.to_string();
        let text = serde_json::to_string_pretty(&list).expect("a list of texts");
        write_atomically(&base.join(LIST_NAME), format!("{text}\n").as_bytes())
    }
}

/// Held until it is dropped.
fn lock(dir: &Path) -> Result<File> {
    let lock = File::open(dir).at(dir)?;
    lock.lock().at(dir)?;
    Ok(lock)
}

/// Notes in `base` that `member` is about to need it.
pub(super) fn enroll(base: &Path, member: &Path) -> Result<()> {
    let member = relative(member, base)?;
    List::change(base, |members| {
        if !members.contains(&member) {
            members.push(member);
        }
    })
}

/// The packs that are rebuilt from the one in `dir`, as far as they are known there.
///
/// # Errors
/// The list cannot be read.
pub fn dependants(dir: &Path) -> Result<Vec<PathBuf>> {
    let this = dir.canonicalize().at(dir)?;
    let needs_this = |member: &PathBuf| {
        let Ok(bytes) = std::fs::read(member.join(JSON_NAME)) else { return false };
        // What cannot be read may need anything.
        let Ok(description) = Description::parse(&bytes) else { return true };
        description.bases.iter().any(|base| member.join(&base.dir).canonicalize().is_ok_and(|base| base == this))
    };
    let members = List::read(dir)?.members.into_iter().map(|member| tidy(&dir.join(member)));
    Ok(members.filter(needs_this).collect())
}

/// Fails if other packs are rebuilt from the one in `dir`, which is about to be replaced or taken away.
///
/// # Errors
/// There are such packs.
pub fn refuse_if_needed(dir: &Path) -> Result<()> {
    if !dir.join(LIST_NAME).exists() {
        return Ok(());
    }
    let names: Vec<String> = dependants(dir)?.iter().map(|member| member.display().to_string()).collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(Error::refused(format!("{} could not be rebuilt without this pack", names.join(", "))).at(dir).help(
        "first let them stand alone: `iec dedup --restore --model-dir DIR`, then `iec dedup --model-dir DIR` without --base",
    ))
}

/// Takes a pack away: its weights and what describes them. Other files of the directory stay; it goes when it is empty.
///
/// # Errors
/// Other packs are rebuilt from it, or there is no pack.
pub fn remove(dir: &Path) -> Result<()> {
    // The description is first: half a pack is none.
    let names = [iebin::JSON_NAME, JSON_NAME, iebin::BIN_NAME, LIST_NAME];
    let names: Vec<&str> = names.into_iter().chain(FILE_NAMES).collect();
    let present = |name: &&&str| dir.join(name).symlink_metadata().is_ok();
    if names.iter().filter(present).count() == 0 {
        return Err(Error::usage("holds no pack").at(dir));
    }
    let lock = lock(dir)?;
    refuse_if_needed(dir)?;
    let bases = read_store(dir).map_or_else(|_| Vec::new(), |description| description.bases);
    let bases: Vec<PathBuf> = bases.iter().map(|base| dir.join(&base.dir)).filter(|base| base.exists()).collect();
    let listed = bases.iter().map(|base| relative(dir, base)).collect::<Result<Vec<_>>>()?;
    for name in names.iter().filter(present) {
        std::fs::remove_file(dir.join(name)).at(dir.join(name))?;
    }
    drop(lock);
    // The list would not be believed either way.
    for (base, listed) in bases.iter().zip(listed) {
        let _ = List::change(base, |members| members.retain(|member| *member != listed));
    }
    let _ = std::fs::remove_dir(dir);
    Ok(())
}

/// What a pack of a family costs.
#[derive(Debug, Clone, Serialize)]
pub struct Member {
    /// Its directory.
    pub dir: PathBuf,
    /// Bytes of its binary, there or not.
    pub original_bytes: u64,
    /// Bytes of the binary that lies there.
    pub binary_bytes: u64,
    /// Bytes of the four files of its store; 0 without one.
    pub store_bytes: u64,
    /// What it takes from other packs.
    pub bases: Vec<Shared>,
    /// Packs that take something from it.
    pub needed_by: Vec<PathBuf>,
}

impl Member {
    /// What the pack in `dir` costs. Weights are not read.
    ///
    /// # Errors
    /// A description is missing or impossible.
    pub fn of(dir: &Path) -> Result<Member> {
        let size = |name: &str| std::fs::metadata(dir.join(name)).map_or(0, |file| file.len());
        let binary_bytes = size(iebin::BIN_NAME);
        let needed_by = dependants(dir)?;
        let summary = if dir.join(JSON_NAME).exists() { Some(summary(dir)?) } else { None };
        Ok(Member {
            dir: dir.to_path_buf(),
            original_bytes: summary.as_ref().map_or(binary_bytes, |summary| summary.original_bytes),
            binary_bytes,
            store_bytes: summary.as_ref().map_or(0, |summary| summary.stored_bytes),
            bases: summary.map_or_else(Vec::new, |summary| summary.bases),
            needed_by,
        })
    }

    /// The pack in `dir` and all that are connected with it, bases first.
    ///
    /// # Errors
    /// A description is impossible; bases that are gone are left out.
    pub fn family(dir: &Path) -> Result<Vec<Member>> {
        let mut members: Vec<(PathBuf, Member)> = Vec::new();
        let mut open = vec![tidy(dir)];
        while let Some(dir) = open.pop() {
            let Ok(place) = dir.canonicalize() else { continue };
            if members.iter().any(|(seen, _)| *seen == place) || !dir.join(iebin::JSON_NAME).exists() {
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

    /// Bytes that lie in its directory for its weights.
    pub fn kept_bytes(&self) -> u64 {
        self.binary_bytes + self.store_bytes
    }
}

/// What became of the bytes of the deduplicated pack in `dir`, from its descriptions alone.
///
/// # Errors
/// A description is missing or impossible.
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

/// The way to `base` from `dir`.
pub(super) fn relative(base: &Path, dir: &Path) -> Result<String> {
    let (base, dir) = (base.canonicalize().at(base)?, dir.canonicalize().at(dir)?);
    let common = base.components().zip(dir.components()).take_while(|(a, b)| a == b).count();
    let up = dir.components().skip(common).map(|_| "..".as_ref());
    let path: PathBuf = up.chain(base.components().skip(common).map(|c| c.as_os_str())).collect();
    let text = path.to_str().ok_or_else(|| Error::unsupported("a pack whose path is not UTF-8").at(&base))?;
    Ok(text.to_string())
}

/// The path without what goes up again.
fn tidy(path: &Path) -> PathBuf {
    let mut tidy = PathBuf::new();
    for part in path.components() {
        let named = matches!(tidy.components().next_back(), Some(std::path::Component::Normal(_)));
        match part {
            std::path::Component::ParentDir if named && !tidy.is_symlink() => drop(tidy.pop()),
            std::path::Component::CurDir => {}
            part => tidy.push(part),
        }
    }
    tidy
}
