//! `tensor_map.json`: name, dtype, shape and byte range of every tensor of a pack, tied to its binary by a hash; and
//! the check of recorded hashes.

use super::{Entry, IebinReader};
use crate::error::{Error, Result};
use crate::progress::ProgressBar;
use crate::sha256::{Digest, Sha256, hex};
use crate::{interrupt, progress};
use rayon::prelude::*;
use serde_json::{Value, json};

/// Bytes hashed between two looks at the interrupt flag.
const HASH_CHUNK: usize = 8 << 20;

/// The text of `tensor_map.json` and the hash of the binary it belongs to.
pub struct TensorMap {
    /// Content of the file.
    pub text: String,
    /// SHA-256 of the whole binary in hex.
    pub sha256: String,
}

/// Makes the map; with `strict`, every payload is hashed and compared with its record.
///
/// # Errors
/// The pack has no binary; with `strict`, a hash differs or is missing.
pub fn tensor_map(reader: &IebinReader, strict: bool) -> Result<TensorMap> {
    let bytes = reader.bin()?.bytes();
    let bar = progress::bytes("hash", bytes.len() as u64);
    let (sha256, checked) = rayon::join(
        || sha256_hex(bytes, &bar),
        || if strict { check_payloads(reader, &ProgressBar::hidden()) } else { Ok(()) },
    );
    checked?;
    let sha256 = sha256?;
    let bin = reader.bin()?.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let head = [("format", "tensor_map_v1"), ("weights_bin", &bin), ("weights_bin_sha256", &sha256)];
    let mut text = String::from("{\n");
    for (key, value) in head {
        text.push_str(&format!("  {}: {},\n", Value::from(key), Value::from(value)));
    }
    // One line per tensor: made to be read, searched and compared.
    let lines: Vec<String> = reader.entries().iter().map(|e| format!("    {}", line(e))).collect();
    text.push_str(&format!("  \"tensors\": [\n{}\n  ]\n}}\n", lines.join(",\n")));
    Ok(TensorMap { text, sha256 })
}

fn line(entry: &Entry) -> Value {
    json!({
        "name": entry.name,
        "dtype": entry.store.dtype_name(),
        "shape": entry.shape,
        "offset": entry.offset,
        "size_bytes": entry.nbytes,
    })
}

/// Compares every payload with its recorded hash and names the first that differs.
fn check_payloads(reader: &IebinReader, bar: &ProgressBar) -> Result<()> {
    let failures = failures(reader, bar);
    let count = failures.len();
    match failures.into_iter().next() {
        None => Ok(()),
        Some(first) => Err(first.at(reader.bin()?.path()).help(format!(
            "{count} of {} tensors failed; make the pack again with `iec pack`",
            reader.entries().len()
        ))),
    }
}

/// The errors of all tensors whose payloads differ from their recorded hashes or have none.
///
/// # Errors
/// The user interrupts.
pub fn differing_payloads(reader: &IebinReader) -> Result<Vec<Error>> {
    let bar = progress::bytes("hash", reader.entries().iter().map(|entry| entry.nbytes as u64).sum());
    let failures = failures(reader, &bar);
    interrupt::check()?;
    Ok(failures)
}

fn failures(reader: &IebinReader, bar: &ProgressBar) -> Vec<Error> {
    let entries = reader.entries().par_iter();
    entries.filter_map(|entry| check_payload(reader, entry, bar).err().map(|e| e.tensor(&entry.name))).collect()
}

fn check_payload(reader: &IebinReader, entry: &Entry, bar: &ProgressBar) -> Result<()> {
    let Some(recorded) = &entry.sha256 else {
        return Err(Error::corrupt("no sha256 is recorded"));
    };
    let found = sha256_hex(&reader.payload(entry)?, bar)?;
    if found.eq_ignore_ascii_case(recorded) {
        return Ok(());
    }
    Err(Error::corrupt(format!("sha256 is {found}, the record says {recorded}")))
}

fn sha256_hex(bytes: &[u8], bar: &ProgressBar) -> Result<String> {
    let mut hash = Sha256::new();
    for chunk in bytes.chunks(HASH_CHUNK) {
        interrupt::check()?;
        hash.update(chunk);
        bar.inc(chunk.len() as u64);
    }
    Ok(hex(hash))
}
