//! Stores the sums of shards in the directory of partial work, from which an interrupted run and the merge of parts
//! take them.
//!
//! Every run has at most one file `shards`. It has a place for each shard, which is filled only if this run computes
//! the shard. A place has the sums of the layers in order, and of each layer the sums of its sites in the order of the
//! statistics ([`Sums::write`](crate::calibration::Sums::write)). The journal records the SHA-256 of each layer of each
//! shard, so the sums can be collected with any memory, that is with any number of layers per pass.

use crate::calibration::shards::SHARDS;
use crate::error::{Context, Error, Result};
use crate::job::{Found, Job, Part};
use crate::model_config::ModelConfig;
use crate::output;
use crate::runtime::calibrate::{self, Gathering};
use crate::sha256::{Digest, Sha256, hex};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

const NAME: &str = "shards";

/// Places of the layers of each shard in the file.
#[derive(Debug)]
pub(super) struct ShardLayout {
    /// End of each layer within a shard.
    ends: Vec<u64>,
}

impl ShardLayout {
    /// Computes the places for a model, whose output matrix counts as the last layer.
    ///
    /// # Errors
    /// The file would exceed the largest length of a file.
    pub fn new(config: &ModelConfig, products: bool) -> Result<ShardLayout> {
        let mut layers = vec![0u64; config.n_layers + 1];
        for (site, shape) in calibrate::sites(config, products) {
            // The file of statistics has both halves, a shard has one.
            layers[site.layer] = layers[site.layer].saturating_add(shape.nbytes() / 2);
        }
        ShardLayout::of_layers(&layers)
    }

    /// Computes the places for layers whose sums have these numbers of bytes.
    fn of_layers(layers: &[u64]) -> Result<ShardLayout> {
        let add = |end: &mut u64, bytes: &u64| {
            *end = end.saturating_add(*bytes);
            Some(*end)
        };
        let layout = ShardLayout { ends: layers.iter().scan(0, add).collect() };
        if layout.shard_bytes().saturating_mul(SHARDS as u64) > i64::MAX as u64 {
            return Err(Error::unsupported("the sums of this model are larger than a file can be"));
        }
        Ok(layout)
    }

    /// Returns the number of bytes of a shard.
    pub fn shard_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or_default()
    }

    /// Returns the number of layers, including the output matrix.
    pub fn layers(&self) -> usize {
        self.ends.len()
    }

    fn shard(&self, shard: usize) -> Range<u64> {
        let start = shard as u64 * self.shard_bytes();
        start..start + self.shard_bytes()
    }

    fn place(&self, shard: usize, layer: usize) -> Range<u64> {
        let start = self.shard(shard).start;
        let before = if layer == 0 { 0 } else { self.ends[layer - 1] };
        start + before..start + self.ends[layer]
    }
}

/// Returns the name of the task in the journal that collects the sums of a layer in a shard.
pub(super) fn task(shard: usize, layer: usize) -> String {
    format!("layer {layer} of shard {shard}")
}

/// File in which this run stores the sums of its shards.
#[derive(Debug)]
pub(super) struct ShardStore {
    file: File,
    path: PathBuf,
}

impl ShardStore {
    /// Opens the file of this run, and reserves the places of `shards` on the disk.
    ///
    /// # Errors
    /// The disk has too little space, or the file cannot be opened.
    pub fn open(job: &Job, layout: &ShardLayout, shards: impl Iterator<Item = usize>) -> Result<ShardStore> {
        let path = job.own_path(NAME);
        let places: Vec<Range<u64>> = shards.map(|shard| layout.shard(shard)).collect();
        let needed = layout.shard_bytes() * places.len() as u64;
        output::require_space(job.dir(), needed, output::occupied(&path))?;
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).at(&path)?;
        output::reserve(&file, layout.shard_bytes() * SHARDS as u64, places).at(&path)?;
        Ok(ShardStore { file, path })
    }

    /// Returns the open file, which must be synced before records of its content.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Stores the sums of a shard that were collected, and records each layer.
    ///
    /// # Errors
    /// The file or the journal cannot be written.
    pub fn put(&self, job: &Job, layout: &ShardLayout, gathering: &Gathering, shard: usize) -> Result<()> {
        for layer in gathering.layers() {
            let (place, mut hash) = (layout.place(shard, layer), Sha256::new());
            let mut at = place.start;
            for sums in gathering.of_layer(layer) {
                sums.write(|bytes| {
                    hash.update(bytes);
                    self.file.write_all_at(bytes, at).at(&self.path)?;
                    at += bytes.len() as u64;
                    Ok(())
                })?;
            }
            assert_eq!(at, place.end, "the sums fill their place");
            job.record(&task(shard, layer), &hex(hash), place.end - place.start)?;
        }
        Ok(())
    }
}

/// Result of a search for stored sums.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum StoredSums {
    /// All layers were found and read.
    Read,
    /// At least one layer is not stored, or this run stored it and it is damaged.
    Missing,
    /// The data of this part differ from its journal, and no other run has stored the same layer.
    Damaged(Part),
}

/// Reads the stored sums of a shard for all layers of a pass, from this run or from parts. If they are incomplete, the
/// pass has undefined sums.
///
/// # Errors
/// A file cannot be read.
pub(super) fn read(job: &Job, layout: &ShardLayout, gathering: &mut Gathering, shard: usize) -> Result<StoredSums> {
    for layer in gathering.layers() {
        let (task, place) = (task(shard, layer), layout.place(shard, layer));
        let (mut damaged, mut is_read) = (None, false);
        for found in job.found::<String>(&task) {
            is_read = read_layer(job, &found, &place, gathering, layer)?;
            if is_read {
                break;
            }
            damaged = found.part.or(damaged);
        }
        match damaged {
            _ if is_read => {}
            Some(part) => return Ok(StoredSums::Damaged(part)),
            None => return Ok(StoredSums::Missing),
        }
    }
    Ok(StoredSums::Read)
}

/// Reads the sums of a layer; returns false if the file is missing or too short, or does not have the recorded hash.
fn read_layer(
    job: &Job,
    found: &Found<'_, String>,
    place: &Range<u64>,
    gathering: &mut Gathering,
    layer: usize,
) -> Result<bool> {
    let Some(file) = job.open_data(found, NAME, place.end) else { return Ok(false) };
    let (mut at, mut hash) = (place.start, Sha256::new());
    for sums in gathering.of_layer_mut(layer) {
        sums.read(|bytes| {
            file(at, bytes)?;
            hash.update(&*bytes);
            at += bytes.len() as u64;
            Ok(())
        })?;
    }
    Ok(hex(hash) == found.result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_each_other_and_sums_larger_than_a_file_are_refused() {
        let layout = ShardLayout::of_layers(&[5, 0, 7]).unwrap();
        assert_eq!((layout.layers(), layout.shard_bytes()), (3, 12));
        let mut end = 0;
        for shard in 0..SHARDS {
            assert_eq!(layout.shard(shard), end..end + 12);
            for (layer, bytes) in [5, 0, 7].into_iter().enumerate() {
                assert_eq!(layout.place(shard, layer), end..end + bytes, "{shard} {layer}");
                end += bytes;
            }
        }
        let most = i64::MAX as u64 / SHARDS as u64;
        assert!(ShardLayout::of_layers(&[most - 1, 1]).is_ok());
        for layers in [&[most, 1][..], &[u64::MAX, u64::MAX], &[1, u64::MAX]] {
            assert!(ShardLayout::of_layers(layers).is_err(), "{layers:?}");
        }
    }
}
