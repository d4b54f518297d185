//! Access to the fields of `config.json`, with errors that name the field.

use crate::error::{Error, Result};
use serde_json::Value;

/// Access to the fields of a JSON object; a field that is `null` counts as missing. Errors name the field.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a>(pub &'a Value);

impl<'a> Fields<'a> {
    pub(super) fn find(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let number = value.as_f64().filter(|v| v.is_finite());
        number.map(Some).ok_or_else(|| Error::corrupt(format!("found {value:.80}, expected a number")).tensor(key))
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let size = value.as_u64().filter(|v| *v < 1 << 32);
        let wrong = || Error::corrupt(format!("found {value:.80}, expected a whole number below 2^32")).tensor(key);
        size.map(|v| Some(v as usize)).ok_or_else(wrong)
    }

    pub(super) fn required(&self, key: &str) -> Result<usize> {
        let missing = || Error::corrupt("found no value or 0, expected a positive whole number").tensor(key);
        self.size(key)?.filter(|v| *v > 0).ok_or_else(missing)
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        let Some(value) = self.find(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| Error::corrupt(format!("found {value:.80}, expected true or false")).tensor(key))
    }

    pub(super) fn word(&self, key: &str) -> Option<&'a str> {
        self.find(key)?.as_str()
    }

    pub(super) fn numbers(&self, key: &str) -> Option<Vec<f64>> {
        self.find(key)?.as_array()?.iter().map(Value::as_f64).collect()
    }

    pub(super) fn object(&self, key: &str) -> Option<Fields<'a>> {
        self.find(key).filter(|v| v.is_object()).map(Fields)
    }
}
