//! Is a downloaded checkpoint whole? Every file is compared with the hash by which the Hub knows it, as far as the disk
//! tells it: links of a cache's snapshot point to files named by their hash, and `hf download --local-dir` writes it
//! down in `.cache/huggingface/download/FILE.metadata`. Nothing is asked over the network.

use super::hash::HashKind;
use crate::convert::layout::{Layout, WeightFiles};
use crate::convert::shards::{Shards, read_index};
use crate::error::{Context, Error, Result};
use crate::iebin::reader::plain_file_name;
use crate::progress;
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Directories within a checkpoint that are looked into.
const MAX_DEPTH: usize = 8;

/// What was checked, and what was found.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The directory.
    pub dir: PathBuf,
    /// Repository id, where the path tells.
    pub repo: Option<String>,
    /// Where the hashes come from.
    pub hashes: Hashes,
    /// Every file, by name.
    pub files: Vec<FileReport>,
    /// What is wrong with the checkpoint as a whole: shards of an index that are missing, headers that do not fit.
    pub problems: Vec<String>,
}

/// Where the expected hashes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hashes {
    /// Names of the cache's blobs.
    CacheBlobs,
    /// `.metadata` files of a download into a directory.
    DownloadMetadata,
    /// Nothing on this disk tells them.
    None,
}

/// One file of a checkpoint.
#[derive(Debug, Serialize)]
pub struct FileReport {
    /// Path below the directory.
    pub name: String,
    /// What was found.
    pub status: Status,
    /// Size, if it is there.
    pub bytes: Option<u64>,
    /// Which hash was compared.
    pub hash: Option<HashKind>,
    /// The hash the Hub knows.
    pub expected: Option<String>,
    /// The hash of the content, when it is another.
    pub found: Option<String>,
}

/// What was found out about a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// It has the hash the Hub knows.
    Ok,
    /// It has another.
    Damaged,
    /// It should be there.
    Missing,
    /// No hash is known.
    Unchecked,
}

impl Report {
    /// Files in this state.
    pub fn count(&self, status: Status) -> usize {
        self.files.iter().filter(|f| f.status == status).count()
    }

    /// True when nothing differs from what the Hub has.
    pub fn is_good(&self) -> bool {
        self.problems.is_empty() && self.files.iter().all(|f| matches!(f.status, Status::Ok | Status::Unchecked))
    }
}

/// Checks the checkpoint in `dir`.
///
/// # Errors
/// The directory cannot be read, or the user interrupts. Damage is no error but part of the report.
pub fn verify(dir: &Path) -> Result<Report> {
    let mut names = BTreeSet::new();
    list(dir, "", 0, &mut names)?;
    let metadata = dir.join(".cache/huggingface/download");
    let hashes = if names.iter().any(|name| blob_name(&dir.join(name)).is_some()) {
        Hashes::CacheBlobs
    } else if metadata.is_dir() {
        // Files that a download wrote metadata for should be there.
        let mut promised = BTreeSet::new();
        list(&metadata, "", 0, &mut promised)?;
        names.extend(promised.iter().filter_map(|name| name.strip_suffix(".metadata")).map(str::to_string));
        Hashes::DownloadMetadata
    } else {
        Hashes::None
    };
    let report = |name: String| {
        let expected = match hashes {
            Hashes::CacheBlobs => blob_name(&dir.join(&name)),
            Hashes::DownloadMetadata => etag(&metadata.join(format!("{name}.metadata"))),
            Hashes::None => None,
        };
        let bytes = dir.join(&name).metadata().ok().filter(|m| m.is_file()).map(|m| m.len());
        let status = if bytes.is_some() { Status::Unchecked } else { Status::Missing };
        let hash = expected.as_deref().and_then(HashKind::of);
        FileReport { name, status, bytes, hash, expected, found: None }
    };
    let mut files: Vec<FileReport> = names.into_iter().map(report).collect();
    let total = files.iter().filter(|file| file.hash.is_some()).filter_map(|file| file.bytes).sum();
    let bar = progress::bytes("verifying", total);
    files.par_iter_mut().try_for_each(|file| check(dir, file, &bar))?;
    Ok(Report { dir: dir.to_path_buf(), repo: super::repo_of(dir), hashes, files, problems: problems(dir) })
}

/// Compares a file with its hash, if both are there.
fn check(dir: &Path, file: &mut FileReport, bar: &progress::ProgressBar) -> Result<()> {
    let (Some(kind), Some(_)) = (file.hash, file.bytes) else { return Ok(()) };
    file.found = Some(kind.of_file(&dir.join(&file.name), bar)?).filter(|found| Some(found) != file.expected.as_ref());
    file.status = if file.found.is_none() { Status::Ok } else { Status::Damaged };
    Ok(())
}

/// Names of all files below `dir`; links are not resolved, so that broken ones are seen.
fn list(dir: &Path, below: &str, depth: usize, names: &mut BTreeSet<String>) -> Result<()> {
    if depth > MAX_DEPTH {
        return Err(Error::unsupported(format!("directories nested more than {MAX_DEPTH} deep")).at(dir));
    }
    let here = dir.join(below);
    for entry in std::fs::read_dir(&here).at(&here)? {
        let entry = entry.at(&here)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if below.is_empty() { name.clone() } else { format!("{below}/{name}") };
        if !entry.file_type().at(entry.path())?.is_dir() {
            names.insert(path);
        } else if name != ".cache" && name != ".git" {
            list(dir, &path, depth + 1, names)?;
        }
    }
    Ok(())
}

/// The hash that the target of a link is named by.
fn blob_name(path: &Path) -> Option<String> {
    let target = std::fs::read_link(path).ok()?;
    let name = target.file_name()?.to_str()?;
    HashKind::of(name).map(|_| name.to_string())
}

/// The second line of a `.metadata` file; the first is the commit, the third the time of the download.
fn etag(path: &Path) -> Option<String> {
    let text = crate::convert::json::read_limited(path).ok()?;
    let line = std::str::from_utf8(&text).ok()?.lines().nth(1)?.trim().to_string();
    HashKind::of(&line).map(|_| line)
}

/// What is wrong with the weights as a whole; each shard that an index names and the directory lacks is listed.
fn problems(dir: &Path) -> Vec<String> {
    let layout = match Layout::find(dir) {
        Ok(layout) => layout,
        Err(e) => return vec![e.to_string()],
    };
    let mut problems = Vec::new();
    if !layout.dir().join("config.json").exists() {
        problems.push("config.json is missing".to_string());
    }
    if let WeightFiles::Index(index) = &layout.weights
        && let Ok(map) = read_index(index)
    {
        let shards: BTreeSet<&String> = map.values().collect();
        let missing = |name: &&String| plain_file_name(name).is_ok() && !layout.dir().join(name.as_str()).exists();
        let words = |name: &String| format!("{name} is missing, which {} names", index.display());
        problems.extend(shards.into_iter().filter(missing).map(words));
    }
    if problems.is_empty() {
        problems.extend(Shards::open_layout(&layout).err().map(|e| e.to_string()));
    }
    problems
}
