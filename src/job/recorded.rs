//! Finds the finished parts of a job and the command that they recorded, which `iec merge` repeats.

use super::partial::{self, Partial, partials};
use super::{Command, RunOptions, Share, remove_over};
use crate::error::{Error, Result};
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// Field of the options of a command in which it records the file that it writes, if its output is one file.
const OUT: &str = "out";

/// Directory with the parts of one job.
#[derive(Debug)]
pub struct RecordedParts {
    /// Hidden directory of partial work.
    pub dir: PathBuf,
    /// Command that completes the job.
    pub command: Command,
}

impl RecordedParts {
    /// Finds the parts in the output directory `out_dir`; with `name`, those whose output is the file of this name.
    ///
    /// # Errors
    /// There are no such parts or those of several jobs, or the directory cannot be read.
    pub fn find(out_dir: &Path, name: Option<&Path>) -> Result<RecordedParts> {
        let with_command =
            |partial: Partial| partial.command.map(|command| RecordedParts { dir: partial.path, command });
        let mut found: Vec<RecordedParts> = partials(out_dir)?.into_iter().filter_map(with_command).collect();
        let all = found.len();
        found.retain(|parts| name.is_none_or(|name| parts.out_name().as_deref() == Some(name)));
        match found.len() {
            1 => Ok(found.remove(0)),
            0 => {
                remove_over(out_dir);
                Err(none_found(out_dir, name, all))
            }
            _ => {
                let names: Vec<String> = found.iter().map(|parts| parts.dir.display().to_string()).collect();
                let found = format!("found parts of {} different conversions: {}", names.len(), names.join(", "));
                Err(Error::corrupt(found).at(out_dir).help(
                    "move or delete all these directories but the one to merge; command.json in each names its command",
                ))
            }
        }
    }

    /// Returns the name of the file that the command writes, if its output is one file.
    pub fn out_name(&self) -> Option<PathBuf> {
        let out = self.command.options.get(OUT)?.as_str()?;
        Path::new(out).file_name().map(PathBuf::from)
    }

    /// Returns true if an interrupted merge had begun to give the output its final name: an output that is there then
    /// belongs to this job and may be replaced.
    pub fn has_begun_commit(&self) -> bool {
        partial::has_begun_commit(&self.dir)
    }

    /// Returns the options of the command.
    ///
    /// # Errors
    /// The options do not have the fields that this version expects.
    pub fn options<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_value(self.command.options.clone()).map_err(|e| {
            Error::corrupt(format!("the command of {} cannot be read: {e}", self.command.iec))
                .at(&self.dir)
                .help("merge with that version of iec, or run the parts again with this one")
        })
    }

    /// Returns the options of a run that merges these parts.
    pub fn run(&self) -> RunOptions {
        RunOptions { share: Share::Merge(self.dir.clone()), ..RunOptions::default() }
    }
}

fn none_found(out_dir: &Path, name: Option<&Path>, others: usize) -> Error {
    let help = "first run all parts with this output, such as `iec pack … --part 1/N` to `--part N/N`";
    let error = match name {
        Some(name) if others > 0 => {
            let name = name.display();
            Error::corrupt(format!("found parts of {others} other outputs, but none whose output is `{name}`"))
        }
        _ => Error::corrupt("found no parts to merge"),
    };
    error.at(out_dir).help(help)
}
