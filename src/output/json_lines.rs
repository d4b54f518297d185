//! Files of JSON lines, written value by value.

use super::{AtomicFile, Target};
use crate::error::{Context, Result};
use serde_json::Value;
use std::io::{BufWriter, Write};

/// A file with a JSON value per line; it gets its name when it is complete.
#[derive(Debug)]
pub struct JsonLines(BufWriter<AtomicFile>);

impl JsonLines {
    /// Starts the file.
    ///
    /// # Errors
    /// As [`Target::create`].
    pub fn create(target: &Target) -> Result<JsonLines> {
        Ok(JsonLines(BufWriter::new(target.create()?)))
    }

    /// Writes a line.
    ///
    /// # Errors
    /// The system refuses.
    pub fn line(&mut self, value: &Value) -> Result<()> {
        let path = self.0.get_ref().path().to_path_buf();
        writeln!(self.0, "{value}").at(path)
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// As [`AtomicFile::commit`].
    pub fn commit(self) -> Result<()> {
        let path = self.0.get_ref().path().to_path_buf();
        self.0.into_inner().map_err(|e| e.into_error()).at(path)?.commit()
    }
}
