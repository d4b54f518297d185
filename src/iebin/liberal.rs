//! Spellings of `model.ie.json` that other writers of the format use, read as if they were ours.
//!
//! `tensors` may be an object from name to entry, sizes and offsets have other names (serde aliases in the parent), and
//! a dtype may be an integer code. Everything is validated afterwards like our own.

use super::EntryJson;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// A list of entries, or an object from name to entry; duplicates are kept for the validation to see.
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

/// A name, or one of the integer codes of older writers.
pub(super) fn dtype<'de, D: Deserializer<'de>>(d: D) -> Result<String, D::Error> {
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
        Spelling::Code(code) => match CODES.get(code as usize) {
            Some(name) => Ok(name.to_string()),
            None => Err(Error::custom(format_args!("dtype code {code} is unknown"))),
        },
    }
}
