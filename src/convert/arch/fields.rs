//! Reads `config.json` field by field, with errors that name the field.

use crate::error::{Error, Result};
use serde_json::{Map, Value};

/// A JSON object. A field that is `null` is treated as absent, except by [`Fields::is_null`].
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Name of the object within the file; empty for the top level.
    parent: &'a str,
}

impl<'a> Fields<'a> {
    /// Makes the fields of the top level of a file.
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Fields { map, parent: "" }
    }

    /// Returns the value of a field that is present and not null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Returns the names of all fields.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.map.keys().map(String::as_str)
    }

    /// Returns true for a field that is `null`, which some families distinguish from an absent field.
    pub fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    /// Makes an error about a field from its value and the expected one.
    pub fn wrong(&self, key: &str, expected: &str) -> Error {
        let found = match self.get(key) {
            None => "missing".to_string(),
            Some(value) => format!("found {}", shortened(value)),
        };
        Error::corrupt(format!("{found}, expected {expected}")).tensor(self.name(key))
    }

    /// Makes an error about a field whose value is valid but not supported.
    pub fn unsupported(&self, key: &str, supported: &str) -> Error {
        let found = match self.get(key) {
            None => "missing".to_string(),
            Some(value) => format!("{} is not supported", shortened(value)),
        };
        Error::unsupported(format!("{found}; {supported}"))
            .tensor(self.name(key))
            .help("use a checkpoint without this feature; docs/guide/checkpoints.md lists what each family supports")
    }

    /// Returns the full name of a field, for messages.
    pub fn name(&self, key: &str) -> String {
        if self.parent.is_empty() { key.to_string() } else { format!("{}.{key}", self.parent) }
    }

    fn optional<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong(key, expected)),
        }
    }

    /// Reads an optional count.
    pub fn count_opt(&self, key: &str) -> Result<Option<usize>> {
        self.optional(key, "a whole number", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// Reads an optional count in the object `name`, which may be absent, too.
    pub fn count_in(&self, name: &str, key: &str) -> Result<Option<usize>> {
        let map = self.optional(name, "an object", Value::as_object)?;
        let parent = self.name(name);
        map.map_or(Ok(None), |map| Fields { map, parent: &parent }.count_opt(key))
    }

    /// Reads a required count.
    pub fn count(&self, key: &str) -> Result<usize> {
        self.count_opt(key)?.ok_or_else(|| self.wrong(key, "a whole number"))
    }

    /// Reads an optional number.
    pub fn number_opt(&self, key: &str) -> Result<Option<f64>> {
        self.optional(key, "a number", Value::as_f64)
    }

    /// Reads a required number.
    pub fn number(&self, key: &str) -> Result<f64> {
        self.number_opt(key)?.ok_or_else(|| self.wrong(key, "a number"))
    }

    /// Reads a flag with a default.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.optional(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// Reads an optional string.
    pub fn word_opt(&self, key: &str) -> Result<Option<&'a str>> {
        self.optional(key, "a string", Value::as_str)
    }

    /// Reads an optional object; the names of its fields in messages begin with `key`.
    pub fn object_opt(&self, key: &'a str) -> Result<Option<Fields<'a>>> {
        Ok(self.optional(key, "an object", Value::as_object)?.map(|map| Fields { map, parent: key }))
    }

    /// Reads an optional list of strings.
    pub fn words_opt(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        self.optional(key, "a list of strings", |v| v.as_array()?.iter().map(Value::as_str).collect())
    }

    /// Reads a required list of numbers.
    pub fn numbers(&self, key: &str) -> Result<Vec<f64>> {
        let expected = "a list of numbers";
        let read = |v: &Value| v.as_array()?.iter().map(Value::as_f64).collect();
        self.optional(key, expected, read)?.ok_or_else(|| self.wrong(key, expected))
    }

    /// Reads an optional list of counts.
    pub fn counts_opt(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let count = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
        self.optional(key, "a list of whole numbers", |v| v.as_array()?.iter().map(count).collect())
    }

    /// Reads token ids: none, one, or a list.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = self.optional(key, "a token id or a list of them", |v| match v {
            Value::Array(list) => list.iter().map(id).collect::<Option<Vec<u32>>>(),
            one => id(one).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}

/// Formats a value in at most 60 characters, because it is untrusted input.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        None => format!("`{text}`"),
        Some((end, _)) => format!("`{}…`", &text[..end]),
    }
}
