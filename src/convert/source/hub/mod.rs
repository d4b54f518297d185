//! Finds checkpoints in the local cache of the Hugging Face Hub, verifies them, and downloads them.
//!
//! The cache has one directory per repository, `models--ORG--NAME`, which contains
//!
//! * `refs/BRANCH`: the commit that a branch or tag pointed to when it was downloaded,
//! * `snapshots/COMMIT/`: the files of a commit under their names, as symbolic links to
//! * `blobs/HASH`: the contents of the files. The name is the hash by which the Hub identifies the file: SHA-256 for
//!   large files, git's SHA-1 for others.

pub mod cache;
mod hash;
#[cfg(feature = "hub")]
pub mod pull;
pub mod verify;

use crate::error::{Error, Result};
use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// Lookup of the environment variables that the tools of the Hub read; returns `None` when a
/// variable is unset or empty.
pub type Variables<'a> = dyn Fn(&str) -> Option<OsString> + 'a;

/// Branch that is used when none is given.
const DEFAULT_REVISION: &str = "main";

/// A repository at a revision: `ORG/NAME` or `ORG/NAME@REVISION`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoSpec {
    /// `ORG/NAME`; some old repositories have no organisation.
    pub id: String,
    /// Branch, tag or commit.
    pub revision: String,
}

impl RepoSpec {
    /// Returns the name of the repository's directory in a cache.
    fn folder(&self) -> String {
        format!("models--{}", self.id.replace('/', "--"))
    }

    /// Returns the commands that download the repository: those that this build and the tool `hf` have.
    pub fn download_commands(&self) -> String {
        let revision = match self.revision.as_str() {
            DEFAULT_REVISION => String::new(),
            revision => format!(" --revision {revision}"),
        };
        let hf = format!("`hf download {}{revision}`", self.id);
        if cfg!(feature = "hub") { format!("`iec pull {self}` or {hf}") } else { hf }
    }

    /// Returns true when the revision is a full commit hash.
    fn is_commit(&self) -> bool {
        is_hex(&self.revision, 40)
    }
}

impl fmt::Display for RepoSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.revision.as_str() {
            DEFAULT_REVISION => f.write_str(&self.id),
            revision => write!(f, "{}@{revision}", self.id),
        }
    }
}

impl FromStr for RepoSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<RepoSpec> {
        let (id, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        let word = |part: &str| {
            let plain = part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
            plain && !part.is_empty() && !part.starts_with(['-', '.']) && !part.contains("--") && !part.contains("..")
        };
        if id.split('/').count() > 2 || !id.split('/').all(word) {
            return Err(Error::usage(format!("found `{id}`, expected ORG/NAME or ORG/NAME@REVISION")));
        }
        let plain = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', '\0']);
        if !revision.split('/').all(plain) {
            return Err(Error::usage(format!("found `{revision}`, expected a branch, tag or commit")));
        }
        Ok(RepoSpec { id: id.to_string(), revision: revision.to_string() })
    }
}

/// Returns the repository id of a path within a snapshot of a cache.
pub fn repo_of(path: &Path) -> Option<String> {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let snapshots = path.ancestors().find(|a| a.file_name().is_some_and(|name| name == "snapshots"))?;
    id_of(snapshots.parent()?.file_name()?.to_str()?)
}

/// Returns the repository id that belongs to the name of a directory in a cache.
fn id_of(folder: &str) -> Option<String> {
    folder.strip_prefix("models--").map(|id| id.replacen("--", "/", 1))
}

/// Returns true when `text` consists of `n` lower-case hex digits.
fn is_hex(text: &str, n: usize) -> bool {
    text.len() == n && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_ids_are_read_and_nothing_else() {
        let spec: RepoSpec = "openai/gpt-oss-20b".parse().unwrap();
        assert_eq!((spec.folder().as_str(), spec.revision.as_str()), ("models--openai--gpt-oss-20b", "main"));
        let spec: RepoSpec = "gpt2@refs/pr/4".parse().unwrap();
        assert_eq!((spec.id.as_str(), spec.revision.as_str()), ("gpt2", "refs/pr/4"));
        assert_eq!(spec.to_string(), "gpt2@refs/pr/4");
        for bad in ["", "a/b/c", "../b", "a/..", "a/b@", "a/b@../x", "a b/c", "a/b@x//y", "-a/b", "a--b/c", "/a", "a/"]
        {
            assert!(bad.parse::<RepoSpec>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_snapshot_tells_its_repository() {
        let path = Path::new("/c/models--openai--gpt-oss-20b/snapshots/0123/original");
        assert_eq!(repo_of(path).as_deref(), Some("openai/gpt-oss-20b"));
        assert_eq!(repo_of(Path::new("/models/gpt-oss-20b")), None);
    }
}
