//! Reading `config.json` field by field, with errors that name the field.

use crate::error::{Error, Result};
use serde_json::{Map, Value};

/// A JSON object; `null` counts as absent everywhere.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Name of the object within the file, empty for the file itself.
    parent: &'a str,
}

impl<'a> Fields<'a> {
    /// The top level of a file.
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Fields { map, parent: "" }
    }

    /// The value of a field that is present and not null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// True for a field that is there and `null`, which some families tell from a field that is left out.
    pub fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    /// An error about a field: what was found and what was expected.
    pub fn wrong(&self, key: &str, expected: &str) -> Error {
        let found = match self.get(key) {
            None => "missing".to_string(),
            Some(value) => format!("found {}", shortened(value)),
        };
        Error::corrupt(format!("{found}, expected {expected}")).tensor(self.name(key))
    }

    /// An error about a field whose value is valid but not supported.
    pub fn unsupported(&self, key: &str, supported: &str) -> Error {
        let found = self.get(key).map_or("nothing".to_string(), shortened);
        Error::unsupported(format!("{found} is not supported; {supported}")).tensor(self.name(key))
    }

    /// Full name of a field, for messages.
    pub fn name(&self, key: &str) -> String {
        if self.parent.is_empty() { key.to_string() } else { format!("{}.{key}", self.parent) }
    }

    fn optional<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong(key, expected)),
        }
    }

    /// An optional count.
    pub fn count_opt(&self, key: &str) -> Result<Option<usize>> {
        self.optional(key, "a whole number", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// A required count.
    pub fn count(&self, key: &str) -> Result<usize> {
        self.count_opt(key)?.ok_or_else(|| self.wrong(key, "a whole number"))
    }

    /// An optional number.
    pub fn number_opt(&self, key: &str) -> Result<Option<f64>> {
        self.optional(key, "a number", Value::as_f64)
    }

    /// A required number.
    pub fn number(&self, key: &str) -> Result<f64> {
        self.number_opt(key)?.ok_or_else(|| self.wrong(key, "a number"))
    }

    /// A flag with a default.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.optional(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// An optional word.
    pub fn word_opt(&self, key: &str) -> Result<Option<&'a str>> {
        self.optional(key, "a string", Value::as_str)
    }

    /// An optional object; `key` lends its name to the fields inside.
    pub fn object_opt(&self, key: &'a str) -> Result<Option<Fields<'a>>> {
        Ok(self.optional(key, "an object", Value::as_object)?.map(|map| Fields { map, parent: key }))
    }

    /// An optional list of words.
    pub fn words_opt(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        self.optional(key, "a list of strings", |v| v.as_array()?.iter().map(Value::as_str).collect())
    }

    /// A required list of numbers.
    pub fn numbers(&self, key: &str) -> Result<Vec<f64>> {
        let expected = "a list of numbers";
        let read = |v: &Value| v.as_array()?.iter().map(Value::as_f64).collect();
        self.optional(key, expected, read)?.ok_or_else(|| self.wrong(key, expected))
    }

    /// Token ids: absent, one, or a list.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = self.optional(key, "a token id or a list of them", |v| match v {
            Value::Array(list) => list.iter().map(id).collect::<Option<Vec<u32>>>(),
            one => id(one).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}

/// A value in at most 60 characters, since strangers choose it.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        None => format!("`{text}`"),
        Some((end, _)) => format!("`{}…`", &text[..end]),
    }
}
