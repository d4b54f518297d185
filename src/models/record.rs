//! Record of a cache entry: what it was made from, and the files that it must have.

use super::make::Wanted;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::JSON_NAME;
use crate::iebin::reader::read_description;
use crate::output::{pretty, write_atomically};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// File name of the record in the directory of an entry.
pub(super) const RECORD_NAME: &str = "cache.json";
/// File name of the lock.
pub(super) const LOCK_NAME: &str = "cache.lock";
/// Version of the fields.
const SCHEMA_VERSION: u32 = 1;
/// A larger record is refused before it is parsed.
const LIMIT: u64 = 1 << 20;

/// Description of the source of an entry.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Version of the fields.
    pub(super) schema_version: u32,
    /// Canonical path of the checkpoint or GGUF file.
    pub source: String,
    /// `ORG/NAME` of a model in a Hugging Face cache.
    pub repo: Option<String>,
    /// `checkpoint` or `gguf`.
    pub kind: String,
    /// Wanted weights: `source`, `int8` or `int4`.
    pub weights: String,
    /// Type with the most bytes in the pack, such as `bf16` or `q4_0`.
    pub dtype: Option<String>,
    /// Digest of the source path and the wanted weights; entries of the same origin replace each other.
    pub(super) origin: String,
    /// Digest of the source's files and the wanted weights.
    pub(super) fingerprint: String,
    /// Time at which the entry was made, in UTC.
    pub created: String,
    /// Version of the program that made it.
    pub created_by: String,
    /// Size of each file of the pack in bytes, by name.
    pub(super) files: BTreeMap<String, u64>,
}

impl Record {
    /// Returns the source as people name it: the repository, otherwise the path.
    pub fn shown_source(&self) -> &str {
        self.repo.as_deref().unwrap_or(&self.source)
    }

    /// Returns the type of the weights: the wanted quantization, otherwise the type of the source.
    pub fn stored_weights(&self) -> &str {
        match &self.dtype {
            Some(dtype) if self.weights == Wanted::Source.name() => dtype,
            _ => &self.weights,
        }
    }

    /// Reads a record.
    ///
    /// # Errors
    /// It cannot be read, or is not valid.
    pub(super) fn read(path: &Path) -> Result<Record> {
        let text = files::read_limited(path, LIMIT)?;
        let record: Record =
            serde_json::from_slice(&text).map_err(|e| Error::corrupt(format!("invalid record: {e}"))).at(path)?;
        if record.schema_version != SCHEMA_VERSION {
            let found = format!("found version {}, expected {SCHEMA_VERSION}", record.schema_version);
            return Err(Error::unsupported(found).at(path));
        }
        Ok(record)
    }

    /// Completes the record with the files of the entry in `dir`, and writes it there.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub(super) fn write(mut self, dir: &Path) -> Result<()> {
        self.schema_version = SCHEMA_VERSION;
        for entry in std::fs::read_dir(dir).at(dir)? {
            let entry = entry.at(dir)?;
            let (name, found) = (entry.file_name(), entry.metadata().at(dir)?);
            let Some(name) = name.to_str().filter(|name| !name.starts_with('.') && found.is_file()) else { continue };
            if ![RECORD_NAME, LOCK_NAME].contains(&name) {
                self.files.insert(name.to_string(), found.len());
            }
        }
        write_atomically(&dir.join(RECORD_NAME), &pretty(&self))
    }

    /// Checks that the files of the entry in `dir` are those that were recorded. Their contents are not read, except
    /// the description of the pack, which is small and has a digest.
    ///
    /// # Errors
    /// A file is missing or has another size, or the description is damaged.
    pub(super) fn check(&self, dir: &Path) -> Result<()> {
        for (name, expected) in &self.files {
            let path = dir.join(name);
            let found = files::find(&path)?.ok_or_else(|| Error::corrupt("found no file of this name").at(&path))?;
            if found.len() != *expected {
                return Err(Error::corrupt(format!("found {} bytes, expected {expected}", found.len())).at(&path));
            }
        }
        read_description(&dir.join(JSON_NAME)).map(drop)
    }
}

#[cfg(test)]
pub(super) fn test_record(origin: &str) -> Record {
    Record {
        schema_version: SCHEMA_VERSION,
        source: format!("/models/{origin}"),
        repo: Some(format!("org/{origin}")),
        kind: "checkpoint".into(),
        weights: "source".into(),
        dtype: None,
        origin: origin.into(),
        fingerprint: String::new(),
        created: "2026-11-23T00:00:00Z".into(),
        created_by: "iec".into(),
        files: BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_and_others_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(RECORD_NAME);
        std::fs::write(dir.path().join("model.ie.bin"), [0; 7]).unwrap();
        std::fs::create_dir(dir.path().join(".iec-0123456789abcdef.partial")).unwrap();
        test_record("a").write(dir.path()).unwrap();
        let record = Record::read(&path).unwrap();
        assert_eq!((record.files.len(), record.files["model.ie.bin"], &*record.origin), (1, 7, "a"));
        std::fs::write(dir.path().join("model.ie.bin"), [0; 6]).unwrap();
        assert!(record.check(dir.path()).unwrap_err().to_string().contains("found 6 bytes, expected 7"));
        let text = std::fs::read_to_string(&path).unwrap();
        for (from, to) in [("\"schema_version\": 1", "\"schema_version\": 2"), ("\"kind\"", "\"sort\""), ("{", "")] {
            std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
            assert!(Record::read(&path).is_err(), "{from}");
        }
        std::fs::write(&path, vec![b' '; LIMIT as usize + 1]).unwrap();
        assert!(Record::read(&path).is_err());
    }
}
