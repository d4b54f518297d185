//! Writes `tensor_map.json`, which lists name, dtype, shape and byte range of every tensor of a pack together with the
//! hash of its binary; and verifies the recorded hashes of payloads.

use super::{Entry, IebinReader};
use crate::error::{Context, Error, Result};
use crate::progress::ProgressBar;
use crate::sha256::{Digest, Sha256, hex};
use crate::{interrupt, progress};
use rayon::prelude::*;
use serde_json::{Value, json};

/// Bytes hashed between two checks of the interrupt flag.
const HASH_CHUNK: usize = 8 << 20;

/// The text of `tensor_map.json` and the hash of the binary it belongs to.
pub struct TensorMap {
    /// Content of the file.
    pub text: String,
    /// SHA-256 of the whole binary in hex.
    pub sha256: String,
}

/// Builds the map. With `strict`, also hashes every payload and compares it with the recorded hash.
///
/// # Errors
/// Data that payloads are rebuilt from were changed; with `strict`, a hash differs or is missing (exit code 4).
pub fn tensor_map(reader: &IebinReader, strict: bool) -> Result<TensorMap> {
    let bar = progress::bytes("hash", reader.total_bytes());
    let (sha256, checked) = rayon::join(
        || binary_sha256(reader, &bar),
        || if strict { check_payloads(reader, &ProgressBar::hidden()) } else { Ok(()) },
    );
    checked?;
    let sha256 = sha256?;
    let bin = match reader.bin() {
        Ok(bin) => bin.path().file_name().unwrap_or_default().to_string_lossy().into_owned(),
        Err(_) => reader.description.weights_bin.clone(),
    };
    let head = [("format", "tensor_map_v1"), ("weights_bin", &bin), ("weights_bin_sha256", &sha256)];
    let mut text = String::from("{\n");
    for (key, value) in head {
        text.push_str(&format!("  {}: {},\n", Value::from(key), Value::from(value)));
    }
    // One line per tensor, which is easy to read, search and compare.
    let lines: Vec<String> = reader.entries().iter().map(|e| format!("    {}", line(e))).collect();
    text.push_str(&format!("  \"tensors\": [\n{}\n  ]\n}}\n", lines.join(",\n")));
    Ok(TensorMap { text, sha256 })
}

/// Returns the SHA-256 of the whole binary of a pack, which is rebuilt in memory if deduplication has removed it.
///
/// # Errors
/// Data that payloads are rebuilt from were changed, or the user interrupts.
pub fn binary_sha256(reader: &IebinReader, bar: &ProgressBar) -> Result<String> {
    match reader.rebuilt() {
        Some((source, _)) => source.sha256(&|bytes| bar.inc(bytes)),
        None => sha256_hex(reader.bin()?.bytes(), bar),
    }
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
    let failures = failures(reader, bar)?;
    let count = failures.len();
    match failures.into_iter().next() {
        None => reader.check_files().map(drop),
        Some(first) => Err(first.at(reader.path(&reader.description.weights_bin)).help(format!(
            "{count} of {} tensors differ from their recorded hashes, have none or cannot be read; make the pack again",
            reader.entries().len()
        ))),
    }
}

/// Returns an error for each tensor whose payload differs from its recorded hash or that has no recorded hash, and for
/// the first other file of the pack that differs.
///
/// # Errors
/// The user interrupts.
pub fn differing_payloads(reader: &IebinReader) -> Result<Vec<Error>> {
    let bar = progress::bytes("hash", reader.entries().iter().map(|entry| entry.nbytes as u64).sum());
    let mut failures = failures(reader, &bar)?;
    failures.extend(reader.check_files().err());
    Ok(failures)
}

/// Fails if a payload differs from its recorded hash, or another file of the pack does.
///
/// # Errors
/// The pack is damaged, or the user interrupts.
pub fn refuse_damage(reader: &IebinReader) -> Result<()> {
    reader.check_files()?;
    let recorded = || reader.entries().par_iter().filter(|entry| entry.sha256.is_some());
    let bar = progress::bytes("hash", recorded().map(|entry| entry.nbytes as u64).sum());
    let check = |entry: &Entry| check_payload(reader, entry, &bar).tensor(&entry.name);
    interrupt::check().and(recorded().try_for_each(check)).at(&reader.dir).help("make the pack again with `iec pack`")
}

fn failures(reader: &IebinReader, bar: &ProgressBar) -> Result<Vec<Error>> {
    let entries = reader.entries().par_iter();
    let failures =
        entries.filter_map(|entry| check_payload(reader, entry, bar).err().map(|e| e.tensor(&entry.name))).collect();
    // After an interrupt, most failures are of tensors that were not read, so the interrupt is returned instead.
    interrupt::check().map(|()| failures)
}

fn check_payload(reader: &IebinReader, entry: &Entry, bar: &ProgressBar) -> Result<()> {
    let Some(recorded) = &entry.sha256 else {
        return Err(Error::refused("found no recorded sha256 to compare with"));
    };
    let found = sha256_hex(&reader.payload(entry)?, bar)?;
    if found.eq_ignore_ascii_case(recorded) {
        return Ok(());
    }
    Err(Error::refused(format!("found the sha256 {found}, expected the recorded {recorded}")))
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
