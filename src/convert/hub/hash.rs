//! The hashes by which the Hub knows files.

use super::is_hex;
use crate::error::{Context, Error, Result};
use crate::interrupt;
use crate::progress::ProgressBar;
use crate::sha256::Sha256;
use serde::Serialize;
use sha1::Sha1;
use sha2::Digest;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Which hash a name is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HashKind {
    /// SHA-1 of `blob <length>\0` and the content, as git names it.
    GitSha1,
    /// SHA-256 of the content, as Git LFS names it.
    Sha256,
}

impl HashKind {
    /// Tells the hash from its length; `None` when the text is none.
    pub fn of(etag: &str) -> Option<HashKind> {
        match etag {
            _ if is_hex(etag, 40) => Some(HashKind::GitSha1),
            _ if is_hex(etag, 64) => Some(HashKind::Sha256),
            _ => None,
        }
    }

    /// The hash of a file in hex.
    pub(super) fn of_file(self, path: &Path, bar: &ProgressBar) -> Result<String> {
        let file = File::open(path).at(path)?;
        let nbytes = file.metadata().at(path)?.len();
        match self {
            HashKind::GitSha1 => {
                let mut hasher = Sha1::new();
                hasher.update(format!("blob {nbytes}\0"));
                feed(file, path, bar, |bytes| hasher.update(bytes))?;
                Ok(hex(&hasher.finalize()))
            }
            HashKind::Sha256 => {
                let mut hasher = Sha256::new();
                feed(file, path, bar, |bytes| hasher.update(bytes))?;
                Ok(hex(&hasher.finalize()))
            }
        }
    }
}

/// Hands a file over in pieces.
fn feed(mut file: File, path: &Path, bar: &ProgressBar, mut take: impl FnMut(&[u8])) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    loop {
        interrupt::check()?;
        match file.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => {
                take(&buffer[..n]);
                bar.inc(n as u64);
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::from(e).at(path)),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
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
