//! Speed measurements: taken by [`mod@bench`] or by a run, stored as JSON lines, CSV, an HTML page with charts and a
//! row of a table in a Markdown document, and compared with other measurements.
//!
//! [`record`] defines the data of a measurement; all other forms are derived from it.

pub mod bench;
pub mod compare;
mod expected;
pub mod line;
mod markdown;
mod page;
mod rank;
pub mod record;
pub mod stages;
mod touch;

use crate::error::Result;
use crate::files;
use crate::output::{Target, write_atomically};
use crate::trial::agreement::GeneratedText;
pub use line::{Measured, MeasurementLine};
use record::{Meta, Record, RecordEntry};
use std::path::{Path, PathBuf};

/// Data of a measurement.
#[derive(Debug)]
pub struct Measurement {
    /// Model, settings and machine.
    pub meta: Meta,
    /// One record per generated text.
    pub records: Vec<Record>,
    /// One line per run.
    pub lines: Vec<MeasurementLine>,
    /// The different texts that were generated, for a comparison with the checkpoint; none for a single run.
    pub texts: Vec<GeneratedText>,
}

impl Measurement {
    /// Creates a measurement of one run.
    pub fn of_run(meta: Meta, measured: &Measured<'_>) -> Measurement {
        Measurement { meta, records: Record::all(measured), lines: vec![measured.line()], texts: Vec::new() }
    }

    /// Writes JSON lines, CSV and a page into `root`, with at most `tokens_max` token ids per text; returns the path
    /// of the page.
    ///
    /// # Errors
    /// A file cannot be written; the files written before are complete.
    pub fn save(&mut self, root: &Path, tokens_max: usize) -> Result<PathBuf> {
        self.records.iter_mut().for_each(|record| record.tokens.truncate(tokens_max));
        let path = self.free_path(root)?;
        write_atomically(&path.with_extension("csv"), self.csv().as_bytes())?;
        write_atomically(&path.with_extension("html"), page::page(self).as_bytes())?;
        // This file is written last, so that the other files exist when it does.
        write_atomically(&path.with_extension("jsonl"), self.json_lines().as_bytes())?;
        Ok(path.with_extension("html"))
    }

    /// Writes the median of the runs into the table of a document.
    ///
    /// # Errors
    /// The document cannot be read or written, or its markers are damaged.
    pub fn merge_into(&self, document: &Target) -> Result<()> {
        markdown::merge(self, document)
    }

    /// Returns the path of a file that does not exist yet, made of time, model and precision, with a number if
    /// necessary. Callers replace the extension.
    fn free_path(&self, root: &Path) -> Result<PathBuf> {
        let model = self.meta.model.rsplit(['/', ':']).find(|part| !part.is_empty()).unwrap_or("model");
        let model: String =
            model.chars().map(|c| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '-' }).collect();
        let time = self.meta.created.replace(['-', ':'], "");
        let stem = format!("{time}-{model}-{}", self.meta.precision);
        let named = |i: usize| root.join(if i == 1 { format!("{stem}.jsonl") } else { format!("{stem}-{i}.jsonl") });
        let mut i = 1;
        while files::exists(&named(i))? {
            i += 1;
        }
        Ok(named(i))
    }

    fn json_lines(&self) -> String {
        let meta = RecordEntry::Meta(self.meta.clone());
        let records = self.records.iter().cloned().map(RecordEntry::Record);
        let summaries = self.lines.iter().map(|line| RecordEntry::Summary(line.summary()));
        let entries = [meta].into_iter().chain(records).chain(summaries);
        entries.map(|entry| serde_json::to_string(&entry).expect("plain data always serializes") + "\n").collect()
    }

    fn csv(&self) -> String {
        let rows = self.records.iter().map(Record::csv);
        [record::CSV_HEADER.to_string()].into_iter().chain(rows).map(|row| row + "\n").collect()
    }
}
