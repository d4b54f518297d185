//! Writes a pack as the output of a conversion: one binary with a section per tensor, companions, and the description
//! that completes it.

use super::companions::{Companions, NAMES};
use super::executor::{Finished, Section};
use super::source::layout;
use crate::error::{Error, Result};
use crate::files;
use crate::iebin::writer::{self, Layout, refuse_existing};
use crate::iebin::{self, BIN_NAME, DescriptionParts, Entry, JSON_NAME, Store, dependants};
use crate::job::{self, DataFile, Job};
use crate::output::{AtomicFile, Inputs, stale};
use std::path::Path;

/// Returns the data file of the binary, which tasks fill.
pub(super) fn binary(layout: &Layout) -> DataFile {
    DataFile::new(BIN_NAME, layout.total_bytes, Vec::new())
}

/// Returns the section of a tensor.
pub(super) fn section(entry: &Entry) -> Vec<Section> {
    vec![Section { file: 0, range: entry.offset as u64..(entry.offset + entry.nbytes) as u64 }]
}

/// Gives the files of a pack their final names. `allowed`, which fails when files would be lost, is called again
/// immediately before files are replaced, because another command may have written a pack in the meantime.
pub(super) fn commit<T>(
    job: &Job,
    mut files: Vec<AtomicFile>,
    layout: &Layout,
    finished: &Finished<T>,
    parts: DescriptionParts,
    allowed: impl FnOnce() -> Result<()>,
) -> Result<()> {
    job.commit_begins()?;
    let allowed = || if job.was_torn() { Ok(()) } else { allowed() };
    writer::commit(layout.clone(), files.remove(0), job.dir(), parts, finished.digests(), allowed)
}

/// Returns true if a run of this job was killed while it renamed the files of its pack, so that the pack in `out_dir`
/// belongs to this job.
pub(super) fn was_torn(out_dir: &Path, fingerprint: &str) -> bool {
    job::was_torn(out_dir, fingerprint, Some(JSON_NAME), [BIN_NAME].into_iter())
}

/// Returns the parts of the description that list the companions.
pub(super) fn with_companions(companions: &Companions, job: &Job) -> Result<DescriptionParts> {
    Ok(DescriptionParts {
        tokenizer: companions.tokenizer(),
        tokenizer_from: companions.tokenizer_from(),
        companions: companions.write(job)?,
        files: companions.digests(),
        ..DescriptionParts::default()
    })
}

/// Totals over the tensors of a run, for its summary.
pub(super) struct Totals {
    pub tensors: usize,
    pub quantized: usize,
    pub weights: u64,
    /// Length of the binary; for a part, of the payloads that it made.
    pub bytes: u64,
    /// Bits of the payloads per weight, without padding between payloads.
    pub bits_per_weight: f64,
}

impl Totals {
    /// Computes the totals of the finished tensors of `layout`.
    pub fn new<T>(layout: &Layout, finished: &Finished<T>) -> Totals {
        let (mut payload, mut weights, mut tensors, mut quantized) = (0, 0, 0, 0);
        for entry in finished.made(&layout.entries) {
            payload += entry.nbytes as u64;
            weights += entry.elements() as u64;
            tensors += 1;
            quantized += usize::from(matches!(entry.store, Store::Tiled(_)));
        }
        let bytes = if finished.part.is_some() { payload } else { layout.total_bytes };
        let bits_per_weight = payload as f64 * 8.0 / (weights as f64).max(1.0);
        Totals { tensors, quantized, weights, bytes, bits_per_weight }
    }
}

/// Refuses an output directory in which files would be lost.
///
/// # Errors
/// `dir` holds an input, a checkpoint, a pack that other packs need, or files of a pack and `overwrite` is false.
pub(super) fn refuse_occupied(dir: &Path, overwrite: bool, inputs: &Inputs) -> Result<()> {
    stale::remove(dir);
    inputs.refuse_members(dir, &iebin::members())?;
    dependants::refuse_if_needed(dir)?;
    if layout::Layout::lies_in(dir)? {
        let found = "found a checkpoint, whose configuration a pack would replace";
        return Err(Error::usage(found).at(dir).help("choose another --out-dir"));
    }
    if overwrite {
        return Ok(());
    }
    refuse_existing(dir)?;
    match files::first(NAMES.iter().map(|name| dir.join(name)))? {
        Some(path) => Err(Error::usage("exists already").at(path).help("add --overwrite or choose another --out-dir")),
        None => Ok(()),
    }
}
