//! Options and descriptions that a job is opened with, as plain data.

use super::{Pace, Part};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;

/// Description of a job and the options of this run.
#[derive(Debug)]
pub struct Order<'a> {
    /// Fingerprint of the job; see [`super::Fingerprint::finish`].
    pub fingerprint: &'a str,
    /// State of the input files beyond what the fingerprint has: a digest of the times at which the system last changed
    /// them. An interrupted run is not continued if it differs, because the content may have changed under the same
    /// modification time. Empty if there is nothing to compare.
    pub inputs: &'a str,
    /// Command that is recorded for parts; `iec merge` reads it from [`super::RecordedParts`].
    pub command: &'a Command,
    /// Name of the file that readers open first, for outputs that [`crate::output::swap`] replaces.
    pub lead: Option<&'a str>,
    /// Other content that the output directory may have.
    pub output: Output,
    /// Options of this run.
    pub run: &'a RunOptions,
}

/// Content of the output directory other than this output, which decides what may be removed from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// The directory is for this output only: interrupted conversions in it were meant to produce the same output, and
    /// may be removed.
    Alone,
    /// The directory also has outputs of other commands, whose interrupted work must not be removed.
    AmongOthers,
}

/// Options of the user that every job has; they do not change the result.
#[derive(Debug, Clone, Default)]
pub struct RunOptions {
    /// Share of the job that this run does.
    pub share: Share,
    /// True to discard the work of interrupted runs.
    pub fresh: bool,
    /// Interval at which finished work is made durable.
    pub pace: Pace,
}

/// Share of a job that one run does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Share {
    /// The whole job, continuing from the tasks that earlier runs and parts have finished.
    #[default]
    Whole,
    /// One part, to be merged later.
    Part(Part),
    /// Only the merge of the finished parts in this directory.
    Merge(PathBuf),
}

impl Share {
    /// Returns the part of a run that is one of several parts.
    pub fn part(&self) -> Option<Part> {
        match self {
            Share::Part(part) => Some(*part),
            Share::Whole | Share::Merge(_) => None,
        }
    }
}

/// Command that the parts of a job belong to; `iec merge` repeats it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Command {
    /// Program and version.
    pub iec: String,
    /// Name of the command.
    pub name: String,
    /// Its options, as the command itself defines them.
    pub options: Value,
}

/// A data file of known length.
#[derive(Debug)]
pub struct DataFile {
    /// Its name in the directory of partial work.
    pub partial_name: String,
    /// Its final name.
    pub name: String,
    /// Its final length.
    pub len: u64,
    /// Its first bytes, which belong to no task.
    pub header: Vec<u8>,
}

impl DataFile {
    /// Describes a file that has the same name in the directory of partial work and in the output.
    pub fn new(name: impl Into<String>, len: u64, header: Vec<u8>) -> DataFile {
        let name = name.into();
        DataFile { partial_name: name.clone(), name, len, header }
    }
}

impl Command {
    /// Builds the record of a command of this version. Options that JSON cannot hold (a path that is not UTF-8) become
    /// null; such a command can be run, but no part of it can be recorded.
    pub fn new(name: &str, options: &impl Serialize) -> Command {
        let options = serde_json::to_value(options).unwrap_or_default();
        Command { iec: this_version(), name: name.to_string(), options }
    }
}

/// Returns the program name and version as recorded in journals, commands and outputs.
pub fn this_version() -> String {
    format!("iec {}", env!("CARGO_PKG_VERSION"))
}
