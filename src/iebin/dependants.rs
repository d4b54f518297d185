//! Packs that are rebuilt from another one, and that keep it from being replaced or taken away.
//!
//! A pack that was deduplicated against others names their directories and the hashes of their tensors, so it notices
//! when one is gone or changed. In the other direction a base keeps a list of the packs that need it. The list is
//! written before the description that makes it true and is believed only where such a description lies: whatever is
//! interrupted, a base is never taken away from a pack that needs it.

use super::{DEDUP_FORMAT, DEDUP_JSON_NAME};
use crate::error::{Context, Error, Result};
use crate::output::{pretty, write_atomically};
use crate::sha256::{Digest, Sha256, hex};
use crate::strict_json;
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
            let text = match strict_json::read(&path, LIST_LIMIT) {
                Err(e) if e.is_not_found() => return Ok(List::default()),
                text => text?,
            };
            let list: List =
                serde_json::from_slice(&text).map_err(|e| Error::corrupt(format!("not a list of packs: {e}")))?;
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
        write_atomically(&base.join(LIST_NAME), &pretty(&list))
    }
}

/// Locks the list of the pack in `dir` until the result is dropped.
pub(crate) fn lock(dir: &Path) -> Result<File> {
    let lock = File::open(dir).at(dir)?;
    lock.lock().at(dir)?;
    Ok(lock)
}

/// Notes in `base` that `member` is about to need it.
pub(crate) fn enroll(base: &Path, member: &Path) -> Result<()> {
    let member = relative(member, base)?;
    List::change(base, |members| {
        if !members.contains(&member) {
            members.push(member);
        }
    })
}

/// Removes `member`, whose path from `base` is this, from the list of `base`.
pub(crate) fn forget(base: &Path, member: &str) -> Result<()> {
    List::change(base, |members| members.retain(|listed| listed != member))
}

/// The packs that are rebuilt from the one in `dir`, as far as they are known there.
///
/// # Errors
/// The list cannot be read.
pub fn dependants(dir: &Path) -> Result<Vec<PathBuf>> {
    let list = List::read(dir)?;
    if list.members.is_empty() {
        return Ok(Vec::new());
    }
    let this = dir.canonicalize().at(dir)?;
    let needs_this = |member: &PathBuf| match std::fs::read(member.join(DEDUP_JSON_NAME)) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => false,
        // What cannot be read may need anything.
        Err(_) => true,
        Ok(text) => bases(&text).is_none_or(|bases| {
            bases.iter().any(|base| member.join(&base.dir).canonicalize().is_ok_and(|base| base == this))
        }),
    };
    let members = list.members.into_iter().map(|member| tidy(&dir.join(member)));
    Ok(members.filter(needs_this).collect())
}

/// The packs that a pack with this description of its store is rebuilt from; `None` where the description is damaged or
/// of another version.
fn bases(text: &[u8]) -> Option<Vec<Base>> {
    #[derive(Deserialize)]
    struct Needs {
        format: String,
        bases: Vec<Base>,
    }
    let body = unsealed(std::str::from_utf8(text).ok()?)?;
    let needs: Needs = serde_json::from_str(&format!("{body}}}")).ok()?;
    (needs.format == DEDUP_FORMAT).then_some(needs.bases)
}

/// A pack that a deduplicated one is rebuilt from.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Base {
    /// Its directory, relative to the deduplicated pack.
    pub dir: String,
}

const SEAL: &str = ",\n  \"sha256\": \"";

/// The text of a description whose closing brace is missing, with its hash behind it.
pub fn sealed(body: &str) -> String {
    format!("{body}{SEAL}{}\"\n}}\n", hex(Sha256::new_with_prefix(body)))
}

/// The text that was [`sealed`]; `None` when it has another hash.
pub fn unsealed(text: &str) -> Option<&str> {
    let (body, _) = text.rsplit_once(SEAL)?;
    (sealed(body) == text).then_some(body)
}

/// Fails if other packs are rebuilt from the one in `dir`, which is about to be replaced or taken away.
///
/// # Errors
/// There are such packs.
pub fn refuse_if_needed(dir: &Path) -> Result<()> {
    let names: Vec<String> = dependants(dir)?.iter().map(|member| member.display().to_string()).collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(Error::refused(format!("{} could not be rebuilt without this pack", names.join(", "))).at(dir).help(
        "first let them stand alone: `iec dedup --restore --model-dir DIR`, then `iec dedup --model-dir DIR` without --base",
    ))
}

/// The way to `base` from `dir`.
pub(crate) fn relative(base: &Path, dir: &Path) -> Result<String> {
    let (base, dir) = (base.canonicalize().at(base)?, dir.canonicalize().at(dir)?);
    let common = base.components().zip(dir.components()).take_while(|(a, b)| a == b).count();
    let up = dir.components().skip(common).map(|_| "..".as_ref());
    let path: PathBuf = up.chain(base.components().skip(common).map(|c| c.as_os_str())).collect();
    let text = path.to_str().ok_or_else(|| Error::unsupported("a pack whose path is not UTF-8").at(&base))?;
    Ok(text.to_string())
}

/// The path without what goes up again.
pub(crate) fn tidy(path: &Path) -> PathBuf {
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
