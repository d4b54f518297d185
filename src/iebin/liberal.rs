//! Reads `model.ie.json` in the spellings of other writers of the format.
//!
//! In these, `tensors` may be an object from name to entry, sizes and offsets may have other names or be missing, a
//! dtype may be an integer code, and fields of the top level may have values of other types. The result is validated
//! afterwards like a description that this program wrote.

use super::{EntryJson, QuantJson};
use crate::dtype::DType;
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Reads a list of entries, or an object from name to entry. Keeps duplicate names; the validation refuses them later.
pub(super) fn tensors<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<EntryJson>, D::Error> {
    struct Entries;
    impl<'de> Visitor<'de> for Entries {
        type Value = Vec<EntryJson>;
        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a list of tensors, or an object from name to tensor")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut entries: Vec<EntryJson> = Vec::new();
            while let Some(entry) = seq.next_element::<EntryJson>()? {
                if entry.name.is_empty() {
                    return Err(Error::custom(format_args!("tensor number {} has no name", entries.len())));
                }
                entries.push(entry);
            }
            Ok(entries)
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut entries = Vec::new();
            while let Some(name) = map.next_key::<String>()? {
                let entry: EntryJson = map.next_value().map_err(|e| Error::custom(format_args!("{name}: {e}")))?;
                entries.push(EntryJson { name, ..entry });
            }
            Ok(entries)
        }
    }
    d.deserialize_any(Entries)
}

/// A tensor entry in any of the accepted spellings.
#[derive(Deserialize)]
pub(super) struct RawEntry {
    #[serde(default)]
    name: String,
    #[serde(deserialize_with = "dtype")]
    dtype: String,
    #[serde(deserialize_with = "crate::strict_json::dimensions")]
    shape: Vec<u64>,
    #[serde(default, alias = "size_bytes", alias = "size")]
    nbytes: Option<u64>,
    #[serde(alias = "offset_bytes")]
    offset: u64,
    sha256: Option<String>,
    source_layout: Option<String>,
    quant: Option<Map<String, Value>>,
}

impl TryFrom<RawEntry> for EntryJson {
    type Error = String;

    fn try_from(raw: RawEntry) -> Result<EntryJson, String> {
        let int4 = ["int4", "uint4", "u4"].contains(&raw.dtype.to_ascii_lowercase().as_str());
        let (quant, older) = match raw.quant {
            // The `quant` object of older writers has no scheme. Without a `quant` object, the manifest defines the
            // meaning of 4-bit codes.
            Some(quant) if int4 && !quant.contains_key("scheme") => (None, Some(quant)),
            None if int4 => (None, Some(Map::new())),
            Some(quant) => {
                (Some(QuantJson::deserialize(Value::Object(quant)).map_err(|e| format!("quant: {e}"))?), None)
            }
            None => (None, None),
        };
        let nbytes = match raw.nbytes {
            Some(nbytes) => nbytes,
            None => natural_bytes(&raw.dtype, &raw.shape, int4).ok_or("missing field `nbytes`")?,
        };
        Ok(EntryJson {
            name: raw.name,
            dtype: raw.dtype,
            shape: raw.shape,
            nbytes,
            offset: raw.offset,
            sha256: raw.sha256,
            source_layout: raw.source_layout,
            quant,
            older,
        })
    }
}

/// Returns the length of a payload by dtype and shape, for writers that omitted it.
fn natural_bytes(dtype: &str, shape: &[u64], int4: bool) -> Option<u64> {
    let product = |dims: &[u64]| dims.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
    match shape {
        [rows @ .., cols] if int4 => product(rows)?.checked_mul(cols.div_ceil(2)),
        _ => product(shape)?.checked_mul(DType::parse(dtype).ok()?.size() as u64),
    }
}

/// Reads an optional text. Older writers put objects or numbers into such fields; they are not needed and give `None`.
pub(super) fn text<'de, D: Deserializer<'de>>(d: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum LiberalText {
        Text(String),
        Other(IgnoredAny),
    }
    match Option::<LiberalText>::deserialize(d)? {
        Some(LiberalText::Text(text)) => Ok(Some(text)),
        Some(LiberalText::Other(_)) | None => Ok(None),
    }
}

/// Reads a dtype: a name, or one of the integer codes of older writers.
fn dtype<'de, D: Deserializer<'de>>(d: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Spelling {
        Code(u64),
        Name(String),
    }
    const CODES: [&str; 14] =
        ["F64", "F16", "BF16", "F32", "I8", "INT4", "FP8", "FP4", "U8", "UINT4", "UE8", "UE4", "U8", "U4"];
    match Spelling::deserialize(d)? {
        Spelling::Name(name) => Ok(name),
        Spelling::Code(code) => match usize::try_from(code).ok().and_then(|code| CODES.get(code)) {
            Some(name) => Ok(name.to_string()),
            None => Err(Error::custom(format_args!("dtype code {code} is unknown"))),
        },
    }
}
