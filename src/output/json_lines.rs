//! Writes JSON Lines files value by value.

use super::atomic::AtomicFile;
use super::target::Target;
use crate::error::{Context, Result};
use serde_json::Value;
use std::io::{BufWriter, Write};

/// File with one JSON value per line; it gets its final name when it is complete.
#[derive(Debug)]
pub struct JsonLines(BufWriter<AtomicFile>);

impl JsonLines {
    /// Creates the file under a temporary name.
    ///
    /// # Errors
    /// The same as those of [`Target::create`].
    pub fn create(target: &Target) -> Result<JsonLines> {
        Ok(JsonLines(BufWriter::new(target.create()?)))
    }

    /// Writes a line.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn line(&mut self, value: &Value) -> Result<()> {
        let path = self.0.get_ref().path().to_path_buf();
        writeln!(self.0, "{value}").at(path)
    }

    /// Renames the complete file to its final name.
    ///
    /// # Errors
    /// The same as those of [`AtomicFile::commit`].
    pub fn commit(self) -> Result<()> {
        let path = self.0.get_ref().path().to_path_buf();
        self.0.into_inner().map_err(|e| e.into_error()).at(path)?.commit()
    }
}
