//! What would a conversion do? The answer of `--dry-run`: plain data, found without reading a weight or writing a byte.

use crate::error::Result;
use crate::scheme::QuantSpec;
use crate::{job, output};
use serde::Serialize;
use std::path::Path;

/// The plan of a conversion.
#[derive(Debug, Clone, Serialize)]
pub struct DryRun {
    /// Every tensor in the order of the output.
    pub tensors: Vec<Row>,
    /// Number of weights.
    pub weights: u64,
    /// Bytes of all weight files.
    pub bytes_in: u64,
    /// Bytes of payload.
    pub bytes: u64,
    /// Payload bits per weight.
    pub bits_per_weight: f64,
    /// What the disk must hold; absent for commands that write no weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<Disk>,
}

/// One tensor.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Canonical name.
    pub name: String,
    /// Canonical shape.
    pub shape: Vec<usize>,
    /// Element type in the source.
    pub source: &'static str,
    /// What becomes of it.
    pub stored: String,
    /// The reason.
    pub why: String,
    /// Bytes in the source.
    pub bytes_in: u64,
    /// Bytes in the output.
    pub bytes: u64,
}

/// Room on the disk of the output.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Disk {
    /// Bytes of all output files.
    pub needed: u64,
    /// Of these, occupied by an interrupted run of the same command, which will be continued.
    pub occupied: u64,
    /// Tasks that it has finished.
    pub finished_tasks: usize,
    /// Bytes that may still be written.
    pub free: u64,
    /// True when what is missing fits.
    pub fits: bool,
}

impl DryRun {
    /// Adds the rows up.
    pub(super) fn new(tensors: Vec<Row>, bytes_in: u64, disk: Option<Disk>) -> DryRun {
        let weights = tensors.iter().map(|t| t.shape.iter().product::<usize>() as u64).sum();
        let bytes = tensors.iter().map(|t| t.bytes).sum();
        DryRun { tensors, weights, bytes_in, bytes, bits_per_weight: bytes as f64 * 8.0 / weights as f64, disk }
    }
}

impl Disk {
    /// What `needed` bytes in `files` of `out_dir` mean for its disk.
    pub(super) fn new(out_dir: &Path, fingerprint: &str, needed: u64, files: &[&str]) -> Result<Disk> {
        let (finished_tasks, occupied) = job::left_over(out_dir, fingerprint, files);
        let free = output::free_bytes(out_dir)?;
        Ok(Disk { needed, occupied, finished_tasks, free, fits: needed.saturating_sub(occupied) <= free })
    }
}

/// `q4_0`, `int4/64`, `int4/row affine`: a scheme in a word or two.
pub fn in_words(spec: &QuantSpec) -> String {
    let info = spec.scheme.info();
    let group = if info.is_block_format { String::new() } else { format!("/{}", spec.granularity) };
    format!("{}{group}{}", info.name, if spec.symmetric { "" } else { " affine" })
}
