//! Summary of a deduplication.

use super::description::{Description, Encoding};
use crate::iebin::{Entry, Store};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

/// Summary of a deduplication: bytes before and after.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// False if the store would not be smaller: then the binary is kept, and no file was written.
    pub written: bool,
    /// Bytes of the binary.
    pub original_bytes: u64,
    /// Bytes of the four files if they are written, otherwise of the binary.
    pub stored_bytes: u64,
    /// Bytes of the four files, even if they are not written.
    pub store_bytes: u64,
    /// Stored bytes divided by original bytes.
    pub ratio: f64,
    /// Bytes by encoding and by kind of tensor.
    pub parts: Vec<EncodingBytes>,
    /// Bytes that are rebuilt from other packs.
    pub bases: Vec<Shared>,
}

/// Bytes of one encoding of one kind of tensor.
#[derive(Debug, Clone, Serialize)]
pub struct EncodingBytes {
    /// `frames`, `same` or `delta`.
    pub encoding: String,
    /// The dtype or scheme.
    pub kind: String,
    /// Number of units.
    pub units: usize,
    /// Bytes of the units in the binary.
    pub original_bytes: u64,
    /// Bytes of the units in the store.
    pub stored_bytes: u64,
}

/// Bytes that another pack helps to rebuild.
#[derive(Debug, Clone, Serialize)]
pub struct Shared {
    /// Directory of the other pack, relative to this one.
    pub dir: PathBuf,
    /// Bytes of the binary that are copies of bytes of the other pack.
    pub same_bytes: u64,
    /// Bytes of the binary that are stored as differences from bytes of the other pack.
    pub delta_bytes: u64,
}

impl Summary {
    /// Adds up the bytes of all units of a pack with these tensors; `json_bytes` is the size of the description.
    pub(super) fn of(description: &Description, entries: &[Entry], json_bytes: u64) -> Summary {
        let kinds: HashMap<&str, &str> = entries.iter().map(|entry| (entry.name.as_str(), kind(entry))).collect();
        let mut parts: BTreeMap<(Encoding, &str), EncodingBytes> = BTreeMap::new();
        let shared =
            |base: &super::description::Base| Shared { dir: PathBuf::from(&base.dir), same_bytes: 0, delta_bytes: 0 };
        let mut bases: Vec<Shared> = description.bases.iter().map(shared).collect();
        for payload in &description.payloads {
            let kind = payload.name.as_deref().and_then(|name| kinds.get(name)).map_or("between tensors", |kind| *kind);
            let unit_bytes = payload.nbytes / payload.units.len().max(1) as u64;
            for unit in &payload.units {
                let sum = parts.entry((unit.encoding(), kind)).or_insert_with(|| EncodingBytes {
                    encoding: format!("{:?}", unit.encoding()).to_lowercase(),
                    kind: kind.to_string(),
                    units: 0,
                    original_bytes: 0,
                    stored_bytes: 0,
                });
                sum.units += 1;
                sum.original_bytes += unit_bytes;
                sum.stored_bytes += unit.streams.map_or(0, |streams| streams.iter().map(|range| range[1]).sum());
                let base = unit.of.as_ref().and_then(|of| of.base).and_then(|base| bases.get_mut(base));
                if let Some(base) = base {
                    match unit.encoding() {
                        Encoding::Same => base.same_bytes += unit_bytes,
                        _ => base.delta_bytes += unit_bytes,
                    }
                }
            }
        }
        let stored_bytes = description.files.iter().sum::<u64>() + json_bytes;
        let original_bytes = description.total_bytes;
        let ratio = stored_bytes as f64 / original_bytes.max(1) as f64;
        Summary {
            written: true,
            original_bytes,
            stored_bytes,
            store_bytes: stored_bytes,
            ratio,
            parts: parts.into_values().collect(),
            bases,
        }
    }

    /// Returns this summary for the case that the files are not written and the pack is left as it is.
    pub(super) fn nothing_gained(self) -> Summary {
        let (parts, bases) = (Vec::new(), Vec::new());
        Summary { written: false, stored_bytes: self.original_bytes, ratio: 1.0, parts, bases, ..self }
    }
}

/// Returns the dtype or scheme of a tensor.
pub(super) fn kind(entry: &Entry) -> &'static str {
    match entry.store {
        Store::Plain(dtype) => dtype.name(),
        Store::Tiled(spec) => spec.scheme.name(),
    }
}
