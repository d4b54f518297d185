//! Tracks the packs that are rebuilt from another pack (their base), and protects the base from being replaced or
//! removed.
//!
//! A pack that was deduplicated against bases records their directories and the hashes of their tensors, so a missing
//! or changed base is detected. In the other direction, a base keeps a list of the packs that need it. A pack is added
//! to the list before its own description is written, and a list entry counts only if its pack has such a description.
//! An interruption at any point therefore cannot lead to the removal of a base that is still needed.

use super::seal::unsealed;
use super::{DEDUP_FORMAT, DEDUP_JSON_NAME};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::output::{pretty, write_atomically};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};

/// File name of the list of packs that need this one.
pub const LIST_NAME: &str = "model.dedup.family.json";
/// Format name of the list.
const FORMAT: &str = "iec_dedup_family_v1";
/// A list larger than this is refused before it is parsed.
const LIST_LIMIT: u64 = 16 << 20;

/// List that a base keeps of the packs that need it.
#[derive(Debug, Default, Serialize, Deserialize)]
struct List {
    format: String,
    /// Directories of the packs, relative to the base.
    members: Vec<String>,
}

impl List {
    fn read(base: &Path) -> Result<List> {
        let path = base.join(LIST_NAME);
        let read = || {
            let text = match files::read_limited(&path, LIST_LIMIT) {
                Err(e) if e.is_not_found() => return Ok(List::default()),
                text => text?,
            };
            let list: List =
                serde_json::from_slice(&text).map_err(|e| Error::corrupt(format!("invalid list of packs: {e}")))?;
            match list.format == FORMAT {
                true => Ok(list),
                false => Err(Error::unsupported(format!("found format `{}`, expected `{FORMAT}`", list.format))
                    .help("a newer version of iec wrote this list: use that version")),
            }
        };
        read().at(&path).help(
            "if this list is damaged, delete it; then run, for each pack DIR that was deduplicated against this one, \
             `iec dedup --restore --model-dir DIR` and `iec dedup --model-dir DIR --base BASE`",
        )
    }

    /// Changes the list of a base while it is locked against other processes.
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
    let opened = files::open_dir(dir).at(dir)?;
    crate::output::lock(&opened, dir)?;
    Ok(opened)
}

/// Adds `member`, which is about to need `base`, to the list of `base`.
pub(crate) fn add_dependant(base: &Path, member: &Path) -> Result<()> {
    let member = relative(member, base)?;
    List::change(base, |members| {
        if !members.contains(&member) {
            members.push(member);
        }
    })
}

/// Removes the pack with the path `member`, relative to `base`, from the list of `base`.
pub(crate) fn forget(base: &Path, member: &str) -> Result<()> {
    List::change(base, |members| members.retain(|listed| listed != member))
}

/// Returns the packs in the list of the pack in `dir` that still need it to be rebuilt.
///
/// # Errors
/// The list cannot be read.
pub fn dependants(dir: &Path) -> Result<Vec<PathBuf>> {
    let list = List::read(dir)?;
    if list.members.is_empty() {
        return Ok(Vec::new());
    }
    let this = dir.canonicalize().at(dir)?;
    let needs_this = |member: &PathBuf| match files::read(&member.join(DEDUP_JSON_NAME)) {
        Err(e) if e.is_not_found() => false,
        // A pack whose description cannot be read may need this one.
        Err(_) => true,
        Ok(text) => bases(&text).is_none_or(|bases| {
            bases.iter().any(|base| member.join(&base.dir).canonicalize().is_ok_and(|base| base == this))
        }),
    };
    let members = list.members.into_iter().map(|member| tidy(&dir.join(member)));
    Ok(members.filter(needs_this).collect())
}

/// Returns the bases of a deduplicated pack by the text of its description; `None` when the description is damaged or
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

/// Fails if other packs are rebuilt from the pack in `dir`; called before this pack is replaced or removed.
///
/// # Errors
/// There are such packs.
pub fn refuse_if_needed(dir: &Path) -> Result<()> {
    let names: Vec<String> = dependants(dir)?.iter().map(|member| member.display().to_string()).collect();
    if names.is_empty() {
        return Ok(());
    }
    let found = format!("the pack must stay as it is, because other packs are rebuilt from it: {}", names.join(", "));
    Err(Error::refused(found).at(dir).help(
        "first make each of them independent: `iec dedup --restore --model-dir DIR`, then `iec dedup --model-dir DIR` \
         without --base",
    ))
}

/// Returns the path of `base` relative to `dir`.
pub(crate) fn relative(base: &Path, dir: &Path) -> Result<String> {
    let (base, dir) = (base.canonicalize().at(base)?, dir.canonicalize().at(dir)?);
    let common = base.components().zip(dir.components()).take_while(|(a, b)| a == b).count();
    let up = dir.components().skip(common).map(|_| "..".as_ref());
    let path: PathBuf = up.chain(base.components().skip(common).map(|c| c.as_os_str())).collect();
    let text = path.to_str().ok_or_else(|| Error::unsupported("found a pack whose path is not UTF-8").at(&base))?;
    Ok(text.to_string())
}

/// Returns the path without `.` components and without `..` components that cancel a preceding name; keeps `..` after a
/// symbolic link.
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
