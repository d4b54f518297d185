//! The options that say where measurements are stored.

use crate::global::{Global, non_empty_variable, parsed_variable};
use iec::error::{Context, Result};
use iec::report::measurement::Measurement;
use std::path::PathBuf;

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
        let is_no = |word: &str| ["0", "false", "no", "off"].contains(&word.to_lowercase().as_str());
        let off = non_empty_variable("REPORT").is_some_and(|word| is_no(&word.to_string_lossy()));
        let root = self.report_root.clone().filter(|root| !root.as_os_str().is_empty());
        root.or(self.html.then(|| PathBuf::from("reports"))).filter(|_| !off)
    }

    /// Most token ids of a text that go into the report.
    fn tokens_max(&self) -> Result<usize> {
        Ok(parsed_variable("REPORT_TOKENS_MAX", "a number")?.unwrap_or(usize::MAX))
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

    /// Writes a measurement, if that is wanted, and notes where it is.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn save(&self, measurement: &mut Measurement, global: &Global) -> Result<()> {
        if let Some(root) = self.root() {
            let page = measurement.save(&root, self.tokens_max()?)?;
            global.note(format!("report: {}", page.display()));
        }
        Ok(())
    }
}
