//! Fingerprint of a conversion: a digest of everything that determines the bytes of its output.

use crate::error::{Context, Result};
use crate::sha256::{Digest, Sha256, hex};
use serde::Serialize;
use std::fmt::Display;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// Incremented when the results of an older version must not be continued although inputs and options are equal.
const GENERATION: u32 = 2;

/// Digest under construction. The order of fields matters; each field is hashed with its length, so that adjacent
/// fields cannot be confused.
#[derive(Debug)]
pub struct Fingerprint(Sha256);

impl Fingerprint {
    /// Starts a digest with the command and this version of the program.
    pub fn new(command: &str) -> Fingerprint {
        let mut fingerprint = Fingerprint(Sha256::new());
        fingerprint.field("command", command);
        fingerprint.field("version", format_args!("{} {GENERATION}", env!("CARGO_PKG_VERSION")));
        fingerprint
    }

    /// Starts a digest with the command and the name of the only file that it writes.
    pub fn for_file(command: &str, out: &Path) -> Fingerprint {
        let mut fingerprint = Fingerprint::new(command);
        fingerprint.field("out", out.file_name().unwrap_or_default().to_string_lossy());
        fingerprint
    }

    /// Adds the text of a value.
    pub fn field(&mut self, name: &str, value: impl Display) {
        let value = value.to_string();
        for text in [name, &value] {
            self.0.update((text.len() as u64).to_le_bytes());
            self.0.update(text);
        }
    }

    /// Adds the JSON of a value.
    pub fn json(&mut self, name: &str, value: &impl Serialize) {
        self.field(name, serde_json::to_string(value).expect("plain data always serializes"));
    }

    /// Adds the name, size and modification time of an input file. The path is not added, because another machine may
    /// have mounted the file elsewhere.
    ///
    /// # Errors
    /// The metadata of the file cannot be read, for example because it does not exist.
    pub fn file(&mut self, path: &Path) -> Result<()> {
        let metadata = std::fs::metadata(path).at(path)?;
        let changed = metadata.modified().at(path)?;
        let nanoseconds = match changed.duration_since(UNIX_EPOCH) {
            Ok(after) => after.as_nanos() as i128,
            Err(before) => -(before.duration().as_nanos() as i128),
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        self.field("file", format_args!("{name} {} {nanoseconds}", metadata.len()));
        Ok(())
    }

    /// Returns the digest in hex.
    pub fn finish(self) -> String {
        hex(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_difference_shows() {
        let of = |fields: &[(&str, &str)]| {
            let mut fingerprint = Fingerprint::new("test");
            fields.iter().for_each(|(name, value)| fingerprint.field(name, value));
            fingerprint.finish()
        };
        let all = [
            of(&[]),
            of(&[("a", "bc")]),
            of(&[("ab", "c")]),
            of(&[("a", "b"), ("c", "")]),
            of(&[("a", "bc"), ("", "")]),
        ];
        for (i, one) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|other| other != one));
        }
        assert_eq!(of(&[("a", "bc")]), all[1]);
    }

    #[test]
    fn a_file_is_known_by_name_size_and_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let print = |path: &Path| {
            let mut fingerprint = Fingerprint::new("test");
            fingerprint.file(path).unwrap();
            fingerprint.finish()
        };
        std::fs::write(&path, "one").unwrap();
        let first = print(&path);
        assert_eq!(print(&path), first);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(UNIX_EPOCH).unwrap();
        assert_ne!(print(&path), first);
        assert!(Fingerprint::new("test").file(&dir.path().join("missing")).is_err());
    }
}
