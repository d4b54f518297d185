//! Files of questions: JSON lines.

use iec::atomic_file::AtomicFile;
use iec::error::{Context, Error, Result};
use serde_json::Value;
use std::io::{BufWriter, Write};
use std::path::Path;

/// The lines of a file that `parse` makes something of; errors name the line.
pub fn read<T>(path: &Path, parse: impl Fn(&Value) -> Result<T>) -> Result<Vec<T>> {
    let text = super::read_text(path)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(number, line)| {
        let value = serde_json::from_str(line).map_err(|e| Error::corrupt(format!("not JSON: {e}")));
        value.and_then(|value| parse(&value)).tensor(&format!("line {}", number + 1)).at(path)
    });
    let parsed: Vec<T> = parsed.collect::<Result<_>>()?;
    if parsed.is_empty() { Err(Error::corrupt("holds no line").at(path)) } else { Ok(parsed) }
}

/// The first of the fields that is a text.
pub fn text<'a>(value: &'a Value, keys: &[&str]) -> Option<&'a str> {
    keys.iter().find_map(|key| value[*key].as_str())
}

/// An error about what a line lacks.
pub fn lacks(what: &str) -> Error {
    Error::corrupt(format!("lacks {what}"))
}

/// A file of one JSON line per question, there when it is complete.
pub struct Details(Option<BufWriter<AtomicFile>>);

impl Details {
    /// Starts the file, if one is wanted.
    pub fn create(path: Option<&Path>) -> Result<Details> {
        Ok(Details(path.map(AtomicFile::create).transpose()?.map(BufWriter::new)))
    }

    /// Writes a line.
    pub fn line(&mut self, value: &Value) -> Result<()> {
        if let Some(out) = &mut self.0 {
            let path = out.get_ref().path().to_path_buf();
            writeln!(out, "{value}").at(path)?;
        }
        Ok(())
    }

    /// Gives the file its name.
    pub fn commit(self) -> Result<()> {
        let Some(out) = self.0 else { return Ok(()) };
        let path = out.get_ref().path().to_path_buf();
        out.into_inner().map_err(|e| e.into_error()).at(path)?.commit()
    }
}
