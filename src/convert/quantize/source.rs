//! Which files were read? Names, sizes and hashes of the shards, found once even when the work is interrupted.

use super::weights::Weights;
use crate::convert::digest::hash_file;
use crate::convert::shard::Shard;
use crate::error::Result;
use crate::job::Job;
use crate::progress;
use crate::provenance::SourceFile;
use rayon::prelude::*;

/// Hashes the shards that are `wanted`, except those that the job's journal knows already.
pub(super) fn hash_shards(weights: &Weights, wanted: &[bool], job: Option<&Job>) -> Result<Vec<SourceFile>> {
    let shards: Vec<&Shard> =
        weights.shards().iter().zip(wanted).filter(|(_, w)| **w).map(|(shard, _)| shard).collect();
    let bar = progress::bytes("hashing", shards.iter().map(|s| s.nbytes()).sum());
    let files = shards.par_iter().map(|shard| {
        let task = task(shard);
        let sha256 = match job.and_then(|job| job.found::<String>(&task).next()) {
            Some(found) => found.result,
            None => {
                let sha256 = hash_file(shard.nbytes(), &bar, |at, out| shard.read_at(at, out))?;
                job.map_or(Ok(()), |job| job.record(&task, &sha256, shard.nbytes()))?;
                sha256
            }
        };
        Ok(SourceFile { name: name(shard), bytes: shard.nbytes(), sha256 })
    });
    let files = files.collect();
    bar.finish_and_clear();
    files
}

/// The name of the task in a journal.
pub(super) fn task(shard: &Shard) -> String {
    format!("shard {}", name(shard))
}

fn name(shard: &Shard) -> String {
    shard.path().file_name().unwrap_or_default().to_string_lossy().into_owned()
}
