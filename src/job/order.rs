//! What is to be done: the plain data that a job is opened with.

use super::{Pace, Part};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;

/// What a job is and how it is to be run.
#[derive(Debug)]
pub struct Order<'a> {
    /// See [`super::Fingerprint::finish`].
    pub fingerprint: &'a str,
    /// What [`super::Partial::command`] will hold, for parts.
    pub command: &'a Command,
    /// File whose appearance completes the output.
    pub commit_point: &'a str,
    /// Whose directory it is.
    pub output: Output,
    /// How to run it.
    pub run: &'a RunOptions,
}

/// What else may lie in the directory of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Nothing: conversions that were interrupted there were to become this output, too.
    Alone,
    /// Outputs of other commands, whose interrupted work must be left alone.
    AmongOthers,
}

/// What the user may choose for any job; it does not show in the result.
#[derive(Debug, Clone, Default)]
pub struct RunOptions {
    /// All of it, or what of it.
    pub share: Share,
    /// Forget what was interrupted before.
    pub fresh: bool,
    /// How often finished work is made durable.
    pub pace: Pace,
}

/// How much of a job one run does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Share {
    /// All of it, taking over what earlier runs and parts have finished.
    #[default]
    Whole,
    /// One part, to be merged later.
    Part(Part),
    /// Nothing new: the parts in this directory are put together.
    Merge(PathBuf),
}

/// The command that parts belong to, so that `iec merge` can repeat it.
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
    /// A file that has its final name from the beginning.
    pub fn new(name: impl Into<String>, len: u64, header: Vec<u8>) -> DataFile {
        let name = name.into();
        DataFile { partial_name: name.clone(), name, len, header }
    }
}

impl Command {
    /// A command of this version. Options that JSON cannot hold (a path that is not UTF-8) become null: the command
    /// runs, but no part of it can be recorded.
    pub fn new(name: &str, options: &impl Serialize) -> Command {
        let options = serde_json::to_value(options).unwrap_or_default();
        Command { iec: this_version(), name: name.to_string(), options }
    }
}

/// The program and its version, as journals, commands and outputs name it.
pub fn this_version() -> String {
    format!("iec {}", env!("CARGO_PKG_VERSION"))
}
