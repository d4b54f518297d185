//! Reader of files with questions: JSON lines, and errors that name the line.

use crate::error::{Context, Error, Result};
use crate::files;
use serde_json::Value;
use std::path::Path;

/// Largest size of a file of questions in bytes. The largest of the supported benchmarks, the training questions of
/// MMLU, has 170 MB.
pub const TASK_LIMIT: u64 = 256 << 20;

/// Advice for a line that cannot be read.
pub(super) const FORMS: &str = "docs/guide/measuring.md describes the forms of these files";

/// Parses every non-blank line of a file as JSON, then with `parse`; errors include the line number.
pub(super) fn read<T>(path: &Path, parse: impl Fn(&Value) -> Result<T>) -> Result<Vec<T>> {
    parse_text(&files::read_text(path, TASK_LIMIT)?, path, parse)
}

/// Parses every non-blank line of `text`, the content of a file, as JSON, then with `parse`.
pub(super) fn parse_text<T>(text: &str, path: &Path, parse: impl Fn(&Value) -> Result<T>) -> Result<Vec<T>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(number, line)| {
        let value = serde_json::from_str(line).map_err(|e| Error::corrupt(format!("not JSON: {e}")));
        value.and_then(|value| parse(&value)).tensor(&format!("line {}", number + 1)).at(path)
    });
    let parsed: Vec<T> = parsed.collect::<Result<_>>().help(FORMS)?;
    if parsed.is_empty() {
        Err(Error::corrupt("found only blank lines, expected JSON lines").at(path))
    } else {
        Ok(parsed)
    }
}

/// Returns the value of the first of these fields that is a string.
pub(super) fn text<'a>(value: &'a Value, keys: &[&str]) -> Option<&'a str> {
    keys.iter().find_map(|key| value[*key].as_str())
}

/// Returns the string in a field.
pub(super) fn string<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key].as_str().ok_or_else(|| Error::corrupt(format!("`{key}`: found {}, expected a text", kind(&value[key]))))
}

/// Describes the kind of a JSON value.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Creates the error for a line without a required field.
pub(super) fn lacks(what: &str) -> Error {
    Error::corrupt(format!("found no {what}"))
}
