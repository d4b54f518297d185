//! Parses untrusted JSON into trees. A key that occurs twice in an object is refused (readers disagree on which of
//! the two counts), and the memory of the tree stays within a small multiple of the text.
//!
//! A tree node takes some 80 bytes, while an element of `[0,0,0…` takes two bytes of text. The number of nodes is
//! therefore limited by the length of the text. Nesting is limited by serde_json (128 levels).
//!
//! Python's `json` writes and reads `NaN`, `Infinity` and `-Infinity`, which are no JSON. Files that Python programs
//! write (configurations of checkpoints, tokenizers and adapters) are read by [`parse_python`]: such a number becomes a
//! text that says so, and a field that is used gives an error with its name and this text.

use crate::error::{Error, Result};
use serde::Serialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;

/// Number of nodes that any text may have. Further nodes are allowed at one per [`BYTES_PER_NODE`] bytes of text.
const FREE_NODES: usize = 4096;
const BYTES_PER_NODE: usize = 12;

/// Numbers of Python that JSON cannot hold, and the text in their place. One that begins like another comes first.
const PYTHON_NUMBERS: [(&str, &str); 3] = [
    ("NaN", "NaN, which is no JSON number"),
    ("Infinity", "Infinity, which is no JSON number"),
    ("-Infinity", "-Infinity, which is no JSON number"),
];

/// Parses a text that a Python program wrote into a tree, as [`parse`] does.
///
/// # Errors
/// The same as for [`parse`].
pub fn parse_python(text: &[u8]) -> Result<Value> {
    parse(&from_python(text))
}

/// Puts a text in the place of each number of Python that JSON cannot hold.
pub fn from_python(text: &[u8]) -> Cow<'_, [u8]> {
    let (mut result, mut copied) = (Vec::new(), 0);
    let (mut at, mut in_string) = (0, false);
    while let Some(byte) = text.get(at) {
        let number = PYTHON_NUMBERS.iter().find(|(number, _)| !in_string && text[at..].starts_with(number.as_bytes()));
        at += match (byte, number) {
            (_, Some((number, shown))) => {
                result.extend_from_slice(&text[copied..at]);
                result.extend_from_slice(format!("\"{shown}\"").as_bytes());
                copied = at + number.len();
                number.len()
            }
            (b'\\', None) if in_string => 2,
            (b'"', None) => {
                in_string = !in_string;
                1
            }
            _ => 1,
        };
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    result.extend_from_slice(&text[copied..]);
    Cow::Owned(result)
}

/// Returns the bytes of an indented file for Python programs, with a newline at the end: [`crate::output::pretty`], and
/// numbers that [`from_python`] replaced are back in their place.
pub fn to_python(value: &impl Serialize) -> Vec<u8> {
    let text = String::from_utf8(crate::output::pretty(value)).expect("JSON is UTF-8");
    let back = |text: String, (number, shown): (&str, &str)| text.replace(&format!("\"{shown}\""), number);
    PYTHON_NUMBERS.into_iter().fold(text, back).into_bytes()
}

/// Parses a text into a tree.
///
/// # Errors
/// The text is not JSON, has a key twice in one object, or has far more values than its length allows.
pub fn parse(text: &[u8]) -> Result<Value> {
    let left = Cell::new(FREE_NODES + text.len() / BYTES_PER_NODE);
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let tree = Tree { left: &left }.deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| value));
    tree.map_err(|e| Error::corrupt(e.to_string()))
}

/// Deserializes the dimensions of a tensor; limits their number, so that `[0,0,0…` does not become a list much larger
/// than its text.
///
/// # Errors
/// The value is not a list of whole numbers, or has more than [`MOST_DIMENSIONS`].
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

/// Maximum number of dimensions of a tensor; weights have up to four.
pub const MOST_DIMENSIONS: usize = 8;

/// Deserializes a part of a text into a small tree, by the rules of [`parse`].
///
/// # Errors
/// The part is not JSON, has a key twice in one object, or has more than [`SMALL_NODES`] values.
pub fn small_tree<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Value, D::Error> {
    Tree { left: &Cell::new(SMALL_NODES) }.deserialize(d)
}

/// Maximum number of values in a small tree.
pub const SMALL_NODES: usize = 1 << 16;

#[derive(Clone, Copy)]
struct Tree<'a> {
    left: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> std::result::Result<Value, D::Error> {
        match self.left.get().checked_sub(1) {
            Some(left) => self.left.set(left),
            None => return Err(D::Error::custom("too many values for the length of the text")),
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
    fn numbers_of_python_become_texts_that_say_so_and_lead_back() {
        let text = br#"{"a": NaN, "b": [0.0, Infinity], "c": {"d": -Infinity}, "e": "\\\"NaN", "Infinity": -1}"#;
        assert!(parse(text).unwrap_err().to_string().contains("expected value"), "only for files of Python programs");
        let tree = parse_python(text).unwrap();
        assert_eq!(tree["a"], "NaN, which is no JSON number");
        assert_eq!(tree["b"][1], "Infinity, which is no JSON number");
        assert_eq!(tree["c"]["d"], "-Infinity, which is no JSON number");
        assert_eq!((&tree["e"], &tree["Infinity"]), (&Value::from("\\\"NaN"), &Value::from(-1)));
        let again = to_python(&tree);
        assert_eq!(parse_python(&again).unwrap(), tree);
        assert!(String::from_utf8(again).unwrap().contains("Infinity\n"), "as Python reads it");
        for (good, wrong) in
            [("{}", false), (r#"{"a": "NaN"}"#, false), ("[NaNa]", true), ("[- Infinity]", true), ("\"", true)]
        {
            assert_eq!(parse_python(good.as_bytes()).is_err(), wrong, "{good}");
        }
        assert!(matches!(from_python(br#"{"a": "NaN"}"#), Cow::Borrowed(_)));
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
