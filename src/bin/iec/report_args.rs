//! Options that name the directory and form of measurement reports.

use crate::global::Global;
use clap::builder::FalseyValueParser;
use iec::error::Result;
use iec::output::{make_dir, stale};
use iec::report::measurement::Measurement;
use std::path::PathBuf;

/// Options that write measurements to files.
#[derive(Debug, clap::Args)]
pub struct ReportArgs {
    /// Write the measurement into DIR as JSON lines, CSV and an HTML page with charts
    #[arg(long, value_name = "DIR", env = "REPORT_ROOT")]
    report_root: Option<PathBuf>,
    /// Write the measurement as --report-root does, into ./reports if no other directory is given. For `bench` the
    /// variable REPORT decides, too: 1 has the effect of this option, 0 writes no report
    #[arg(long)]
    html: bool,
    /// Largest number of token ids per text in the files of --report-root or --html [default: no limit]
    #[arg(long, value_name = "N", env = "REPORT_TOKENS_MAX")]
    report_tokens_max: Option<usize>,
    /// Variable of the predecessor; 0 writes no report, 1 writes one as --html does
    #[arg(long, hide = true, env = "REPORT", value_parser = FalseyValueParser::new(), action = clap::ArgAction::Set)]
    report: Option<bool>,
}

impl ReportArgs {
    /// Returns the directory of the report, if one is wanted.
    fn root(&self) -> Option<PathBuf> {
        let root = self.report_root.clone().filter(|root| !root.as_os_str().is_empty());
        let wanted = self.html || self.report == Some(true);
        root.or(wanted.then(|| PathBuf::from("reports"))).filter(|_| self.report != Some(false))
    }

    /// Returns true if a report is wanted.
    pub fn is_wanted(&self) -> bool {
        self.root().is_some()
    }

    /// Checks before the measurement that the report can be written, creates the directory, and removes what killed
    /// processes have left there.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn prepare(&self) -> Result<()> {
        let Some(root) = self.root() else { return Ok(()) };
        make_dir(&root)?;
        stale::remove(&root);
        Ok(())
    }

    /// Writes a measurement if a report is wanted, and prints its path as a note.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn save(&self, measurement: &mut Measurement, global: &Global) -> Result<()> {
        if let Some(root) = self.root() {
            let page = measurement.save(&root, self.report_tokens_max.unwrap_or(usize::MAX))?;
            global.note(format!("report: {}", page.display()));
        }
        Ok(())
    }
}
