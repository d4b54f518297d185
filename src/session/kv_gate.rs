//! Verdicts about types of the KV cache: by how much each raises the perplexity of a model. They lie beside the pack,
//! so that every session that is opened with a type that was found to be worse can be refused.

use super::{Session, SessionOptions, pack_digest};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::{IebinReader, KV_VERDICTS_NAME};
use crate::output::{DirLock, directory_of, pretty, write_atomically};
use crate::progress;
use crate::runtime::KvType;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Largest increase of perplexity, in percent, with which a type passes.
pub const LIMIT_PERCENT: f64 = 0.5;
/// Version of the fields of the file.
const SCHEMA_VERSION: u32 = 1;
/// A larger file is refused before it is parsed.
const FILE_LIMIT: u64 = 1 << 16;

/// Measured effect of one type of the KV cache on one model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvVerdict {
    /// Measured type.
    pub kv: String,
    /// Type that it was compared with, the default of the precision.
    pub baseline_kv: String,
    /// Precision of both measurements.
    pub precision: String,
    /// Perplexity with the measured type.
    pub perplexity: f64,
    /// Perplexity with the default type.
    pub baseline_perplexity: f64,
    /// Number of scored tokens.
    pub tokens_scored: u64,
    /// SHA-256 of the text, in hex.
    pub text_sha256: String,
}

impl KvVerdict {
    /// Returns the increase of the perplexity in percent; negative if it fell.
    pub fn increase_percent(&self) -> f64 {
        100.0 * (self.perplexity / self.baseline_perplexity - 1.0)
    }

    /// Returns true if the increase is at most [`LIMIT_PERCENT`].
    pub fn passes(&self) -> bool {
        self.increase_percent() <= LIMIT_PERCENT
    }
}

/// Content of the file with the verdicts.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KvVerdicts {
    schema_version: u32,
    /// Digest of the pack that was measured; verdicts about another one do not count.
    pack_sha256: String,
    verdicts: Vec<KvVerdict>,
}

impl Session {
    /// Records a verdict beside the pack, in place of an earlier one about the same type. Returns the path of the file.
    ///
    /// # Errors
    /// The file cannot be read or written, or is invalid.
    pub fn record_kv_verdict(&self, verdict: KvVerdict) -> Result<PathBuf> {
        let path = self.reader.path(KV_VERDICTS_NAME);
        let _lock = DirLock::acquire(directory_of(&path))?;
        let pack_sha256 = pack_digest(&self.reader);
        let earlier = read_verdicts(&self.reader)?.filter(|found| found.pack_sha256 == pack_sha256);
        let mut verdicts = earlier.map_or_else(Vec::new, |found| found.verdicts);
        verdicts.retain(|other| other.kv != verdict.kv);
        verdicts.push(verdict);
        let content = KvVerdicts { schema_version: SCHEMA_VERSION, pack_sha256, verdicts };
        write_atomically(&path, &pretty(&content))?;
        Ok(path)
    }
}

impl SessionOptions {
    /// Refuses the type of the KV cache that these options name if it was found to raise the perplexity of the pack by
    /// more than [`LIMIT_PERCENT`]; notes that a type which often does so was not measured.
    ///
    /// # Errors
    /// The type is refused, or the verdicts cannot be read.
    pub(super) fn check_kv(&self, reader: &IebinReader) -> Result<()> {
        let Some(kv) = self.engine.kv.filter(|_| !self.measures_kv) else { return Ok(()) };
        let found = read_verdicts(reader)?.filter(|found| found.pack_sha256 == pack_digest(reader));
        let verdicts = found.map_or_else(Vec::new, |found| found.verdicts);
        match verdicts.iter().find(|verdict| verdict.kv == kv.to_string()) {
            Some(verdict) if !verdict.passes() => {
                let path = reader.path(KV_VERDICTS_NAME);
                let found = format!(
                    "--kv {kv}: found a perplexity that is {:.2} % higher than with --kv {}, expected at most \
                     {LIMIT_PERCENT} %",
                    verdict.increase_percent(),
                    verdict.baseline_kv
                );
                let help = format!(
                    "use --kv {}; `iec eval --kv-gate` measures again, and without this file, which it wrote, {kv} is \
                     used all the same",
                    verdict.baseline_kv
                );
                return Err(Error::refused(found).at(&path).help(help));
            }
            None if matches!(kv, KvType::Int4 | KvType::Fp8) => progress::detail(0, || {
                let measure = format!("`iec eval --kv {kv} --kv-gate` does it");
                format!("note: the effect of --kv {kv} on this model was not measured; {measure}")
            }),
            _ => {}
        }
        Ok(())
    }
}

fn read_verdicts(reader: &IebinReader) -> Result<Option<KvVerdicts>> {
    let path = reader.path(KV_VERDICTS_NAME);
    if !files::exists(&path)? {
        return Ok(None);
    }
    let text = files::read_limited(&path, FILE_LIMIT)?;
    let help = "remove the file; `iec eval --kv-gate` writes a new one";
    let found: KvVerdicts = serde_json::from_slice(&text)
        .map_err(|e| Error::corrupt(format!("invalid verdicts about KV caches: {e}")).help(help))
        .at(&path)?;
    if found.schema_version != SCHEMA_VERSION {
        let version = format!("found schema_version {}, expected {SCHEMA_VERSION}", found.schema_version);
        return Err(Error::unsupported(version).at(&path).help(help));
    }
    let number = |value: f64| value.is_finite() && value >= 1.0;
    match found.verdicts.iter().find(|one| !number(one.perplexity) || !number(one.baseline_perplexity)) {
        Some(one) => {
            let values = format!("found perplexities {} and {}", one.perplexity, one.baseline_perplexity);
            Err(Error::corrupt(format!("{values}, expected numbers of at least 1")).at(&path).help(help))
        }
        None => Ok(Some(found)),
    }
}
