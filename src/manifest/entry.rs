//! Manifest entry of one tensor: its quantization, the measured error and the verdict of the quality gate.

use super::packed::{FinishedTensor, PackedJson};
use crate::dtype::DType;
use crate::quant_spec::TensorQuant;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Error of the quantized tensor relative to the original.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// Mean over rows of the cosine similarity between a row and its dequantized form; rows of zeros count as 1.
    pub cosine_mean: f64,
    /// Smallest cosine similarity of any row.
    pub cosine_min: f64,
    /// Square root of (summed squared error / summed squared weights).
    pub relative_rms: f64,
    /// Largest absolute error of any weight.
    pub max_abs_error: f64,
    /// Square root of (mean squared error of the outputs / mean square of the outputs), measured on calibration windows
    /// that were not used for fitting; absent without calibration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_error: Option<f64>,
}

/// Verdict of the quality gate on one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The tensor meets the thresholds.
    Accepted,
    /// The tensor misses a threshold and was written only because of `--force`.
    Refused,
    /// The tensor is not quantized; see [`TensorEntry::keep`].
    Kept,
}

/// The type of a tensor that is not quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Keep {
    /// The type of the checkpoint.
    Source,
    /// IEEE half precision.
    Fp16,
    /// bfloat16.
    Bf16,
}

impl Keep {
    /// Returns the float type to convert to; `None` keeps the type of the checkpoint.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Keep::Source => None,
            Keep::Fp16 => Some(DType::F16),
            Keep::Bf16 => Some(DType::BF16),
        }
    }
}

/// Decision about one tensor and its measured error.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Rows of one matrix.
    pub rows: usize,
    /// Columns of one matrix.
    pub cols: usize,
    /// Number of matrices stacked in the tensor (experts); 1 for a single matrix.
    pub count: usize,
    /// Quantization of the tensor; absent when it is kept.
    #[serde(flatten)]
    pub quant: Option<TensorQuant>,
    /// Type of a tensor that is kept; absent when it is quantized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<Keep>,
    /// Measured error of the quantized tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Metrics>,
    /// Verdict of the quality gate; absent without a gate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// Reasons for a verdict other than `accepted`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
    /// Location of the finished bytes that `iec q4` wrote.
    #[serde(flatten)]
    pub packed: Option<PackedJson>,
}

impl TensorEntry {
    /// Returns the finished bytes of the tensor in the files of `dir`; `None` when the entry has none.
    pub(crate) fn finished(&self, dir: &Path) -> Option<FinishedTensor> {
        let (packed, quant) = (self.packed.as_ref()?, self.quant?);
        let shape = if self.count == 1 { vec![] } else { vec![self.count] };
        let shape = [shape, vec![self.rows, self.cols]].concat();
        Some(FinishedTensor { shape, spec: quant.spec, range: packed.resolve(dir) })
    }
}
