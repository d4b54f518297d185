//! Writes a planned checkpoint: all weight files, the index of several, and the files beside them, under their names
//! only when all are complete.

use super::executor::{Conversion, Finished, Task, TaskOutput};
use super::sharding::{self, Shard};
use crate::error::Result;
use crate::job::{self, Command, DataFile, Fingerprint, Output, RunOptions};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::Path;

/// Checkpoint that is written.
pub(super) struct NewCheckpoint<'a, T> {
    /// Weight files with their tensors.
    pub shards: &'a [Shard<T>],
    /// Names and contents of the other files, config.json last.
    pub beside: Vec<(&'static str, Vec<u8>)>,
    /// Directory of the checkpoint; created if it is missing.
    pub out_dir: &'a Path,
    /// True to replace an existing checkpoint.
    pub overwrite: bool,
    /// Options of the run.
    pub run: &'a RunOptions,
    /// Label of the progress bar.
    pub label: &'static str,
}

impl<T> NewCheckpoint<'_, T> {
    /// Does the tasks of this run and gives the files their names, unless the run is one of several parts. `make` makes
    /// an item; `fingerprint` has everything that affects the bytes, and `command` is what `iec merge` repeats.
    ///
    /// # Errors
    /// `make` fails, the directory holds a checkpoint that must not be replaced, or a file cannot be written.
    pub fn write<V: Serialize + DeserializeOwned + Send>(
        self,
        command: Command,
        fingerprint: Fingerprint,
        tasks: Vec<Task<'_>>,
        make: impl Fn(usize, &mut TaskOutput<'_>) -> Result<V> + Sync,
    ) -> Result<Finished<V>> {
        let NewCheckpoint { shards, beside, out_dir, overwrite, run, label } = self;
        let fingerprint = fingerprint.finish();
        if !job::was_torn(out_dir, &fingerprint, None, shards.iter().map(|shard| &*shard.file_name)) {
            sharding::refuse_checkpoint(out_dir, overwrite)?;
        }
        let files = shards.iter().map(|s| DataFile::new(&s.file_name, s.nbytes(), s.header.clone())).collect();
        let output = Output::Alone;
        let conversion = Conversion { command, out_dir, fingerprint, lead: None, output, run, label, files, tasks };
        conversion.run(make, |job, files, _| {
            let small = sharding::index(shards).into_iter().chain(beside);
            let small = small.map(|(name, content)| job.small_file(name, &content)).collect::<Result<Vec<_>>>()?;
            job.commit_begins()?;
            let allowed = || match job.was_torn() {
                true => Ok(()),
                false => sharding::refuse_checkpoint(out_dir, overwrite),
            };
            sharding::commit(out_dir, files.into_iter().chain(small), allowed)
        })
    }
}
