//! JSON trees from strangers: a key that occurs twice is refused (which of the two counts, readers disagree), and the
//! tree stays within a small multiple of its text.
//!
//! A tree node takes some 80 bytes where `[0,0,0…` spends two, so nodes are counted against the length of the text.
//! Nesting is bounded by serde_json (128 levels).

use crate::error::{Context, Error, Result};
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::fmt;
use std::path::Path;

/// Nodes that any text may have; beyond it a node must have this many bytes of text on average.
const FREE_NODES: usize = 4096;
const BYTES_PER_NODE: usize = 12;

/// Parses a text into a tree.
///
/// # Errors
/// It is no JSON, has a key twice in one object, or far more values than its size suggests.
pub fn parse(text: &[u8]) -> Result<Value> {
    let left = Cell::new(FREE_NODES + text.len() / BYTES_PER_NODE);
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let tree = Tree { left: &left }.deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| value));
    tree.map_err(|e| Error::corrupt(e.to_string()))
}

/// The bytes of a file that anyone may have made.
///
/// # Errors
/// It cannot be read, or is longer than `most` bytes.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let size = std::fs::metadata(path).at(path)?.len();
    if size > most {
        return Err(Error::corrupt(format!("{size} bytes, expected at most {most}")).at(path));
    }
    std::fs::read(path).at(path)
}

/// The dimensions of a tensor: `[0,0,0…` must not become a list that is many times its text.
///
/// # Errors
/// It is no list of whole numbers, or has more than [`MOST_DIMENSIONS`].
pub fn dimensions<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Vec<u64>, D::Error> {
    struct Dimensions;
    impl<'de> Visitor<'de> for Dimensions {
        type Value = Vec<u64>;
        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a list of dimensions")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Vec<u64>, A::Error> {
            let mut dimensions = Vec::new();
            while let Some(n) = seq.next_element()? {
                if dimensions.len() == MOST_DIMENSIONS {
                    return Err(A::Error::custom(format_args!("more than {MOST_DIMENSIONS} dimensions")));
                }
                dimensions.push(n);
            }
            Ok(dimensions)
        }
    }
    d.deserialize_seq(Dimensions)
}

/// Weights have up to four.
pub const MOST_DIMENSIONS: usize = 8;

#[derive(Clone, Copy)]
struct Tree<'a> {
    left: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> std::result::Result<Value, D::Error> {
        match self.left.get().checked_sub(1) {
            Some(left) => self.left.set(left),
            None => return Err(D::Error::custom("too many values for its size")),
        }
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("JSON")
    }
    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E>(self, v: bool) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_i64<E>(self, v: i64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_u64<E>(self, v: u64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_f64<E>(self, v: f64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_str<E>(self, v: &str) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_string<E>(self, v: String) -> std::result::Result<Value, E> {
        Ok(v.into())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = seq.next_element_seed(self)? {
            list.push(value);
        }
        Ok(list.into())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(A::Error::custom(format_args!("`{key}` occurs twice in one object")));
            }
            let value = map.next_value_seed(self)?;
            object.insert(key, value);
        }
        Ok(object.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_reads_as_serde_json_reads_it() {
        let text = br#"{"z": [1, -2, 3.5, "x", true, null], "a": {"b": {}}, "big": 18446744073709551615}"#;
        let tree = parse(text).unwrap();
        assert_eq!(tree, serde_json::from_slice::<Value>(text).unwrap());
        assert_eq!(tree.as_object().unwrap().keys().next().unwrap(), "z", "in the order of the text");
    }

    #[test]
    fn double_keys_bombs_and_trailing_text_are_refused() {
        let bomb = format!("[{}0]", "0,".repeat(20_000));
        let deep = "[".repeat(100_000);
        for (text, expected) in [
            (r#"{"a":1,"b":{"c":1,"c":2}}"#, "`c` occurs twice"),
            (bomb.as_str(), "too many values"),
            (deep.as_str(), "recursion limit"),
            ("{} {}", "trailing characters"),
            ("", "EOF"),
        ] {
            let message = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        let dense = format!("[{}0]", "0,".repeat(2_000));
        assert!(parse(dense.as_bytes()).is_ok(), "small texts may be dense");
    }
}
