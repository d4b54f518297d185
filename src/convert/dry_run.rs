//! Result of `--dry-run`: the plan of a conversion as plain data, made without reading a weight or writing a byte.

use crate::convert::LeftOutPart;
use crate::convert::published::PublishedSummary;
use crate::scheme::{QuantSpec, ScaleType};
use serde::Serialize;

pub use super::disk::Disk;

/// The plan of a conversion.
#[derive(Debug, Clone, Serialize)]
pub struct DryRun {
    /// Every tensor in the order of the output.
    pub tensors: Vec<TensorRow>,
    /// Number of weights.
    pub weights: u64,
    /// Bytes of all weight files.
    pub bytes_in: u64,
    /// Bytes of all tensors in the output, without padding between them.
    pub bytes: u64,
    /// Eight times `bytes` divided by `weights`.
    pub bits_per_weight: f64,
    /// Disk space; absent for commands that write no weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<Disk>,
    /// Format of a checkpoint that is quantized, and what the output holds of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub published: Option<PublishedSummary>,
    /// Tensors of the checkpoint that do not belong to the language model and are left out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOutPart>,
    /// Files of the checkpoint from which the tokenizer.json will be made; empty if it is copied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tokenizer_from: Vec<String>,
}

/// One tensor.
#[derive(Debug, Clone, Serialize)]
pub struct TensorRow {
    /// Canonical name.
    pub name: String,
    /// Canonical shape.
    pub shape: Vec<usize>,
    /// Element type in the source.
    pub source: String,
    /// Element type or quantization scheme in the output.
    pub stored: String,
    /// Reason for this choice.
    pub why: String,
    /// Bytes in the source.
    pub bytes_in: u64,
    /// Bytes in the output.
    pub bytes: u64,
}

impl DryRun {
    /// Builds the plan from its tensors and computes their totals.
    pub(super) fn new(tensors: Vec<TensorRow>, bytes_in: u64, disk: Option<Disk>) -> DryRun {
        let weights = tensors.iter().map(|t| t.shape.iter().product::<usize>() as u64).sum();
        let bytes = tensors.iter().map(|t| t.bytes).sum();
        let bits_per_weight = bytes as f64 * 8.0 / weights as f64;
        DryRun {
            tensors,
            weights,
            bytes_in,
            bytes,
            bits_per_weight,
            disk,
            published: None,
            left_out: Vec::new(),
            tokenizer_from: Vec::new(),
        }
    }
}

/// Formats a scheme in a word or two: `q4_0`, `int4/64`, `int4/row affine`.
pub fn in_words(spec: &QuantSpec) -> String {
    let info = spec.scheme.info();
    let group = if info.is_block_format { String::new() } else { format!("/{}", spec.granularity) };
    let scales = if spec.scale_dtype == ScaleType::I8Row { " i8_row" } else { "" };
    format!("{}{group}{scales}{}", info.name, if spec.symmetric { "" } else { " affine" })
}
