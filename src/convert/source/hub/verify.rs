//! Verifies a downloaded checkpoint. Every file whose hash on the Hub is also recorded on disk is compared with
//! it: the links of a cache's snapshot point to files named by their hash, and `hf download --local-dir` writes the
//! hash to `.cache/huggingface/download/FILE.metadata`. The network is not used.

use super::hash::HashKind;
use crate::convert::source::layout::{Layout, WeightFiles};
use crate::convert::source::shards::{Shards, read_index};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::reader::plain_file_name;
use crate::progress;
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Maximum depth of directories within a checkpoint.
const MAX_DEPTH: usize = 8;

/// Result of a verification.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Directory of the checkpoint.
    pub dir: PathBuf,
    /// Repository id, if the directory is a snapshot in a cache of the Hub.
    pub repo: Option<String>,
    /// Source of the expected hashes.
    pub hashes: Hashes,
    /// Reports of all files, sorted by name.
    pub files: Vec<FileReport>,
    /// Problems of the checkpoint as a whole, such as missing shards of an index or weight files with invalid headers.
    pub problems: Vec<String>,
}

/// Source of the expected hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hashes {
    /// Names of the blobs in the cache.
    CacheBlobs,
    /// `.metadata` files of a download into a directory.
    DownloadMetadata,
    /// No hashes are on this disk.
    None,
}

/// Report of one file of a checkpoint.
#[derive(Debug, Serialize)]
pub struct FileReport {
    /// Path relative to the directory.
    pub name: String,
    /// Result of the check.
    pub status: Status,
    /// Size in bytes, if the file exists.
    pub bytes: Option<u64>,
    /// Kind of the compared hash.
    pub hash: Option<HashKind>,
    /// Hash of the file on the Hub.
    pub expected: Option<String>,
    /// Hash of the content, if it differs.
    pub found: Option<String>,
}

/// Result of the check of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// The hash equals the Hub's.
    Ok,
    /// The hash differs from the Hub's.
    Damaged,
    /// The file should exist, but does not.
    Missing,
    /// The file exists, but the hash of the Hub is not known.
    Unchecked,
}

impl Report {
    /// Returns the number of files with this status.
    pub fn count(&self, status: Status) -> usize {
        self.files.iter().filter(|f| f.status == status).count()
    }

    /// Returns true when no difference from the Hub was found.
    pub fn is_good(&self) -> bool {
        self.problems.is_empty() && self.files.iter().all(|f| matches!(f.status, Status::Ok | Status::Unchecked))
    }
}

/// Checks the checkpoint in `dir`.
///
/// # Errors
/// The directory cannot be read, or the user interrupts. Damage is not an error; the report lists it.
pub fn verify(dir: &Path) -> Result<Report> {
    let mut names = BTreeSet::new();
    list(dir, "", 0, &mut names)?;
    let metadata = dir.join(".cache/huggingface/download");
    let hashes = if names.iter().any(|name| blob_name(&dir.join(name)).is_some()) {
        Hashes::CacheBlobs
    } else if files::is_dir(&metadata)? {
        // Every file for which a download wrote metadata should exist.
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
    Ok(Report { dir: dir.to_path_buf(), repo: super::repo_of(dir), hashes, files, problems: problems(dir, hashes)? })
}

/// Compares a file with its hash, if both exist.
fn check(dir: &Path, file: &mut FileReport, bar: &progress::ProgressBar) -> Result<()> {
    let (Some(kind), Some(_)) = (file.hash, file.bytes) else { return Ok(()) };
    file.found = Some(kind.of_file(&dir.join(&file.name), bar)?).filter(|found| Some(found) != file.expected.as_ref());
    file.status = if file.found.is_none() { Status::Ok } else { Status::Damaged };
    Ok(())
}

/// Adds the names of all files below `dir` to `names`. Links are not resolved, so broken links are listed, too.
fn list(dir: &Path, below: &str, depth: usize, names: &mut BTreeSet<String>) -> Result<()> {
    if depth > MAX_DEPTH {
        let found = format!("found directories nested more than {MAX_DEPTH} deep, which are not supported");
        return Err(Error::unsupported(found).at(dir.join(below)).help("name the directory of one checkpoint"));
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

/// Returns the name of the file that a link points to, if the name is a hash.
fn blob_name(path: &Path) -> Option<String> {
    let target = std::fs::read_link(path).ok()?;
    let name = target.file_name()?.to_str()?;
    HashKind::of(name).map(|_| name.to_string())
}

/// Reads the hash from the second line of a `.metadata` file; the first line is the commit, the third
/// the time of the download.
fn etag(path: &Path) -> Option<String> {
    let text = crate::convert::json::read_limited(path).ok()?;
    let line = std::str::from_utf8(&text).ok()?.lines().nth(1)?.trim().to_string();
    HashKind::of(&line).map(|_| line)
}

/// Returns the problems of the weights as a whole, including each shard that the index names and the directory lacks.
/// If no file has a hash of the Hub and nothing else is wrong, archives of `torch.save` are compared with the checksums
/// inside them.
///
/// # Errors
/// The user interrupts.
fn problems(dir: &Path, hashes: Hashes) -> Result<Vec<String>> {
    let layout = match Layout::find(dir) {
        Ok(layout) => layout,
        Err(e) => return Ok(vec![e.to_string()]),
    };
    let mut problems = Vec::new();
    match files::exists(&layout.dir().join("config.json")) {
        Ok(true) => {}
        Ok(false) => problems.push("config.json is missing".to_string()),
        Err(e) => problems.push(e.to_string()),
    }
    if let WeightFiles::Index(index) = &layout.weights
        && let Ok(map) = read_index(index)
    {
        let shards: BTreeSet<&String> = map.values().collect();
        let missing = |name: &&String| {
            plain_file_name(name).is_ok() && !matches!(files::exists(&layout.dir().join(name.as_str())), Ok(true))
        };
        let words = |name: &String| format!("{name} is missing, but {} lists it", index.display());
        problems.extend(shards.into_iter().filter(missing).map(words));
    }
    if problems.is_empty() {
        let compare = |shards: Shards| if hashes == Hashes::None { shards.compare_checksums() } else { Ok(()) };
        match Shards::open_layout(&layout).and_then(compare) {
            Ok(()) => {}
            Err(e) if e.is_interrupt() => return Err(e),
            Err(e) => problems.push(e.to_string()),
        }
    }
    Ok(problems)
}
