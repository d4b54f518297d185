//! Hashes by which the Hub identifies files.

use super::is_hex;
use crate::convert::digest::digest_range;
use crate::convert::source::read_at::{InputFile, ReadAt};
use crate::error::Result;
use crate::progress::ProgressBar;
use crate::sha256::{Digest, Sha256};
use serde::Serialize;
use sha1::Sha1;
use std::path::Path;

/// Kind of a hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HashKind {
    /// SHA-1 of `blob <length>\0` and the content, as git computes it.
    GitSha1,
    /// SHA-256 of the content, as Git LFS uses it.
    Sha256,
}

impl HashKind {
    /// Recognizes the kind of a hex hash by its length; returns `None` for any other text.
    pub fn of(etag: &str) -> Option<HashKind> {
        match etag {
            _ if is_hex(etag, 40) => Some(HashKind::GitSha1),
            _ if is_hex(etag, 64) => Some(HashKind::Sha256),
            _ => None,
        }
    }

    /// Computes the hash of a file in hex.
    pub(super) fn of_file(self, path: &Path, bar: &ProgressBar) -> Result<String> {
        let file = InputFile::open(path)?;
        let (range, read) = (0..file.nbytes(), |at: u64, out: &mut [u8]| file.read_at(at, out));
        match self {
            HashKind::GitSha1 => {
                let start = Sha1::new_with_prefix(format!("blob {}\0", file.nbytes()));
                digest_range(start, range, bar, read, |_, _| Ok(()))
            }
            HashKind::Sha256 => digest_range(Sha256::new(), range, bar, read, |_, _| Ok(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_git_and_of_the_standard() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "hello\n").unwrap();
        let bar = ProgressBar::hidden();
        for hash in [
            // `echo hello | git hash-object --stdin` and `echo hello | sha256sum`
            "ce013625030ba8dba906f756967f9e9ca394464a",
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
        ] {
            assert_eq!(HashKind::of(hash).unwrap().of_file(file.path(), &bar).unwrap(), hash);
        }
        assert_eq!(HashKind::of("CE013625030ba8dba906f756967f9e9ca394464a"), None);
    }
}
