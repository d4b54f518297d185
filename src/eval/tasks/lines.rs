//! Files of JSON lines: questions are read from one, details of the answers are written to another.

use crate::error::{Context, Error, Result};
use crate::output::{AtomicFile, Target};
use serde_json::Value;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Parses every line of a file that is not blank; errors name the line.
pub(super) fn read<T>(path: &Path, parse: impl Fn(&Value) -> Result<T>) -> Result<Vec<T>> {
    let text = super::read_text(path)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(number, line)| {
        let value = serde_json::from_str(line).map_err(|e| Error::corrupt(format!("not JSON: {e}")));
        value.and_then(|value| parse(&value)).tensor(&format!("line {}", number + 1)).at(path)
    });
    let parsed: Vec<T> = parsed.collect::<Result<_>>()?;
    if parsed.is_empty() { Err(Error::corrupt("holds no line").at(path)) } else { Ok(parsed) }
}

/// The value of the first of these fields that is a string.
pub(super) fn text<'a>(value: &'a Value, keys: &[&str]) -> Option<&'a str> {
    keys.iter().find_map(|key| value[*key].as_str())
}

/// The error for a line without a required field.
pub(super) fn lacks(what: &str) -> Error {
    Error::corrupt(format!("lacks {what}"))
}

/// A file with one JSON line per question; it gets its name when it is complete.
pub(super) struct Details(Option<BufWriter<AtomicFile>>);

impl Details {
    /// Starts the file, if one is wanted.
    pub(super) fn create(target: Option<&Target>) -> Result<Details> {
        Ok(Details(target.map(Target::create).transpose()?.map(BufWriter::new)))
    }

    /// Writes a line.
    pub(super) fn line(&mut self, value: &Value) -> Result<()> {
        if let Some(out) = &mut self.0 {
            let path = out.get_ref().path().to_path_buf();
            writeln!(out, "{value}").at(path)?;
        }
        Ok(())
    }

    /// Gives the file its name.
    pub(super) fn commit(self) -> Result<()> {
        let Some(out) = self.0 else { return Ok(()) };
        let path = out.get_ref().path().to_path_buf();
        out.into_inner().map_err(|e| e.into_error()).at(path)?.commit()
    }
}
