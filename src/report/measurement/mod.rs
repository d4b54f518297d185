//! A measurement of speed: taken by [`mod@bench`] or by a run, stored as JSON lines, CSV, a page with charts and a row
//! of a table in a Markdown document, and compared with another one.
//!
//! [`record`] says what a measurement consists of; everything else is made of it.

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
use crate::output::{Target, write_atomically};
pub use line::{Line, Measured};
use record::{Entry, Meta, Record};
use std::path::{Path, PathBuf};

/// A measurement.
#[derive(Debug)]
pub struct Measurement {
    /// What was measured where.
    pub meta: Meta,
    /// One per text.
    pub records: Vec<Record>,
    /// One per run.
    pub lines: Vec<Line>,
}

impl Measurement {
    /// A measurement of one run.
    pub fn of_run(meta: Meta, measured: &Measured<'_>) -> Measurement {
        Measurement { meta, records: Record::all(measured), lines: vec![measured.line()] }
    }

    /// Writes JSON lines, CSV and a page into `root`, with at most `tokens_max` token ids per text; returns the path of
    /// the page.
    ///
    /// # Errors
    /// A file cannot be written; those that were are whole.
    pub fn save(&mut self, root: &Path, tokens_max: usize) -> Result<PathBuf> {
        self.records.iter_mut().for_each(|record| record.tokens.truncate(tokens_max));
        let path = self.free_path(root);
        write_atomically(&path.with_extension("csv"), self.csv().as_bytes())?;
        write_atomically(&path.with_extension("html"), page::page(self).as_bytes())?;
        // Last: whoever finds the lines finds the rest beside them.
        write_atomically(&path.with_extension("jsonl"), self.json_lines().as_bytes())?;
        Ok(path.with_extension("html"))
    }

    /// Puts the median of the runs into the table of a document.
    ///
    /// # Errors
    /// The document cannot be read or written, or its markers are damaged.
    pub fn merge_into(&self, document: &Target) -> Result<()> {
        markdown::merge(self, document)
    }

    /// Time, model and precision, and a number where that is taken. The extension is still to come.
    fn free_path(&self, root: &Path) -> PathBuf {
        let model = self.meta.model.rsplit(['/', ':']).find(|part| !part.is_empty()).unwrap_or("model");
        let model: String =
            model.chars().map(|c| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '-' }).collect();
        let time = self.meta.created.replace(['-', ':'], "");
        let stem = format!("{time}-{model}-{}", self.meta.precision);
        let named = |i: usize| root.join(if i == 1 { format!("{stem}.jsonl") } else { format!("{stem}-{i}.jsonl") });
        (1..).map(named).find(|path| !path.exists()).expect("numbers do not end")
    }

    fn json_lines(&self) -> String {
        let meta = Entry::Meta(self.meta.clone());
        let records = self.records.iter().cloned().map(Entry::Record);
        let summaries = self.lines.iter().map(|line| Entry::Summary(line.summary()));
        let entries = [meta].into_iter().chain(records).chain(summaries);
        entries.map(|entry| serde_json::to_string(&entry).expect("plain data always serializes") + "\n").collect()
    }

    fn csv(&self) -> String {
        let rows = self.records.iter().map(Record::csv);
        [record::CSV_HEADER.to_string()].into_iter().chain(rows).map(|row| row + "\n").collect()
    }
}
