//! Disk space that the output of a conversion needs.

use crate::error::Result;
use crate::{job, output};
use serde::Serialize;
use std::path::Path;

/// Space on the disk of the output.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Disk {
    /// Bytes of all output files.
    pub needed: u64,
    /// Bytes of `needed` that an interrupted run of the same command already occupies; that run will be continued.
    pub occupied: u64,
    /// Tasks that the interrupted run has finished.
    pub finished_tasks: usize,
    /// Free bytes on the disk.
    pub free: u64,
    /// True when the missing bytes fit into the free ones.
    pub fits: bool,
}

impl Disk {
    /// Compares the `needed` bytes with the free space of `out_dir`. Bytes that `files` of an interrupted run occupy
    /// count as written.
    pub(super) fn new(out_dir: &Path, fingerprint: &str, needed: u64, files: &[&str]) -> Result<Disk> {
        let (finished_tasks, occupied) = job::left_over(out_dir, fingerprint, files);
        let free = output::free_bytes(out_dir)?;
        Ok(Disk { needed, occupied, finished_tasks, free, fits: needed.saturating_sub(occupied) <= free })
    }
}
