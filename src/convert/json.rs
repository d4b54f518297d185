//! Reads untrusted JSON files: their size is limited, and duplicate keys are refused.

use crate::error::{Error, Result};
use crate::files;
use crate::strict_json;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

/// Maximum size of configuration, index and tokenizer files in bytes.
pub const JSON_LIMIT: u64 = 256 << 20;

/// Maximum size in bytes of configurations, which are parsed into trees; real ones stay far below 1 MB.
const OBJECT_LIMIT: u64 = 16 << 20;

/// Reads a whole file of at most [`JSON_LIMIT`] bytes.
pub fn read_limited(path: &Path) -> Result<Vec<u8>> {
    files::read_limited(path, JSON_LIMIT)
}

/// Reads and parses a JSON file, which a Python program may have written.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    serde_json::from_slice(&strict_json::from_python(&read_limited(path)?))
        .map_err(|e| Error::corrupt(format!("invalid JSON: {e}")).at(path))
}

/// Reads and parses a JSON object as a tree; no key may occur twice.
pub fn read_object(path: &Path) -> Result<Map<String, Value>> {
    match strict_json::parse_python(&files::read_limited(path, OBJECT_LIMIT)?)
        .map_err(|e| Error::corrupt(format!("invalid JSON: {e}")).at(path))?
    {
        Value::Object(map) => Ok(map),
        _ => Err(Error::corrupt("found another JSON value, expected a JSON object").at(path)),
    }
}

/// JSON object as a list of keys and values, so that a caller can find duplicate keys. Errors about a value name its
/// key; the key `__metadata__` of safetensors is skipped.
#[derive(Debug)]
pub struct Pairs<V>(pub Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Pairs<V> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct Collect<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Collect<V> {
            type Value = Pairs<V>;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    if key == "__metadata__" {
                        map.next_value::<serde::de::IgnoredAny>()?;
                        continue;
                    }
                    let value = map.next_value().map_err(|e| serde::de::Error::custom(format_args!("{key}: {e}")))?;
                    pairs.push((key, value));
                }
                Ok(Pairs(pairs))
            }
        }
        d.deserialize_map(Collect(PhantomData))
    }
}
