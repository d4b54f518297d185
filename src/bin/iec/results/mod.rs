//! What `--report-root` and `--performance-md` write: a measurement as JSON lines, as CSV, as a page with charts, and as a
//! row of a table in a document.
//!
//! [`entry`] says what a measurement consists of; everything else is made of it.

pub mod compare;
pub mod entry;
mod markdown;
mod page;
mod rank;

use crate::model::variable;
use crate::report::Line;
use entry::{Entry, Meta, Record};
use iec::atomic_file::write_atomically;
use iec::error::{Context, Error, Result};
use iec::runtime::text::strftime_now;
use std::path::{Path, PathBuf};

/// Where measurements go.
#[derive(Debug, clap::Args)]
pub struct ReportArgs {
    /// Write the measurement into DIR as JSON lines, CSV and a page with charts; REPORT=0 writes none, and
    /// REPORT_TOKENS_MAX=N keeps at most so many token ids per text
    #[arg(long, value_name = "DIR", env = "REPORT_ROOT")]
    report_root: Option<PathBuf>,
    /// The same into ./reports, unless --report-root says where
    #[arg(long)]
    html: bool,
}

impl ReportArgs {
    /// The directory, if there is to be a report.
    fn root(&self) -> Option<PathBuf> {
        let off = variable("REPORT").is_some_and(|v| ["0", "false", "no", "off"].contains(&v.to_lowercase().as_str()));
        let root = self.report_root.clone().filter(|root| !root.as_os_str().is_empty());
        root.or(self.html.then(|| PathBuf::from("reports"))).filter(|_| !off)
    }

    /// Most token ids of a text that go into the report.
    fn tokens_max(&self) -> Result<usize> {
        let Some(text) = variable("REPORT_TOKENS_MAX") else { return Ok(usize::MAX) };
        text.parse().map_err(|_| Error::usage(format!("REPORT_TOKENS_MAX=`{text}` is not a number")))
    }

    /// True when there is to be a report.
    pub fn is_wanted(&self) -> bool {
        self.root().is_some()
    }

    /// Checks what can be checked before anything is measured, and makes the directory.
    ///
    /// # Errors
    /// The directory cannot be made; a variable is no number.
    pub fn prepare(&self) -> Result<()> {
        self.tokens_max()?;
        self.root().map_or(Ok(()), |root| std::fs::create_dir_all(&root).at(&root))
    }
}

/// A measurement.
#[derive(Debug)]
pub struct Results {
    /// What was measured where.
    pub meta: Meta,
    /// One per text.
    pub records: Vec<Record>,
    /// One per run.
    pub lines: Vec<Line>,
}

impl Results {
    /// Writes the three files where `args` say; returns the path of the page.
    ///
    /// # Errors
    /// A file cannot be written; those that were are whole.
    pub fn save(&mut self, args: &ReportArgs) -> Result<Option<PathBuf>> {
        let Some(root) = args.root() else { return Ok(None) };
        let most = args.tokens_max()?;
        self.records.iter_mut().for_each(|record| record.tokens.truncate(most));
        let path = self.free_path(&root);
        write_atomically(&path.with_extension("csv"), self.csv().as_bytes())?;
        write_atomically(&path.with_extension("html"), page::page(self).as_bytes())?;
        // Last: whoever finds the lines finds the rest beside them.
        write_atomically(&path.with_extension("jsonl"), self.json_lines().as_bytes())?;
        Ok(Some(path.with_extension("html")))
    }

    /// Puts the median of the runs into the table of a document.
    ///
    /// # Errors
    /// The document cannot be read or written, or its markers are damaged.
    pub fn merge_into(&self, document: &Path) -> Result<()> {
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
        [entry::CSV_HEADER.to_string()].into_iter().chain(rows).map(|row| row + "\n").collect()
    }
}

/// Now, in UTC.
pub fn now() -> String {
    strftime_now("%FT%TZ").expect("all directives are known")
}
