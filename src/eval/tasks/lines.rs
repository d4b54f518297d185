//! Reader of JSON-lines files with questions.

use crate::error::{Context, Error, Result};
use crate::files::{self, TEXT_LIMIT};
use serde_json::Value;
use std::path::Path;

/// Parses every non-blank line of a file as JSON, then with `parse`; errors include the line number.
pub(super) fn read<T>(path: &Path, parse: impl Fn(&Value) -> Result<T>) -> Result<Vec<T>> {
    let text = files::read_text(path, TEXT_LIMIT)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(number, line)| {
        let value = serde_json::from_str(line).map_err(|e| Error::corrupt(format!("not JSON: {e}")));
        value.and_then(|value| parse(&value)).tensor(&format!("line {}", number + 1)).at(path)
    });
    let parsed: Vec<T> =
        parsed.collect::<Result<_>>().help("docs/guide/measuring.md describes the forms of these files")?;
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

/// Creates the error for a line without a required field.
pub(super) fn lacks(what: &str) -> Error {
    Error::corrupt(format!("found no {what}"))
}
