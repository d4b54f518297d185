//! One tensor of a manifest: what was decided about it, and how well it came out.

use super::packed::{FinishedTensor, PackedJson};
use crate::dtype::DType;
use crate::quant_spec::TensorQuant;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// How far the quantized tensor is from the original.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// Mean over rows of the cosine between a row and its dequantized form; rows of zeros count as 1.
    pub cosine_mean: f64,
    /// The worst row.
    pub cosine_min: f64,
    /// Root of (summed squared error / summed squared weights).
    pub relative_rms: f64,
    /// Largest absolute error of a weight.
    pub max_abs_error: f64,
    /// Root of (mean square error of the outputs / their mean square), on calibration windows that nothing was fitted
    /// on; absent without calibration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_error: Option<f64>,
}

/// What the gate said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Good enough.
    Accepted,
    /// Not good enough, and written only because of `--force`.
    Refused,
    /// Left in another type; see [`TensorEntry::keep`].
    Kept,
}

/// The type of a tensor that is not quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Keep {
    /// As the checkpoint has it.
    Source,
    /// IEEE half precision.
    Fp16,
    /// bfloat16.
    Bf16,
}

impl Keep {
    /// The float type that is ordered, if any is.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Keep::Source => None,
            Keep::Fp16 => Some(DType::F16),
            Keep::Bf16 => Some(DType::BF16),
        }
    }
}

/// One tensor, decided and measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Rows of one matrix.
    pub rows: usize,
    /// Columns of one matrix.
    pub cols: usize,
    /// Matrices stacked in the tensor (experts); 1 otherwise.
    pub count: usize,
    /// How it is quantized; absent when kept.
    #[serde(flatten)]
    pub quant: Option<TensorQuant>,
    /// How it is kept; absent when quantized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<Keep>,
    /// What was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Metrics>,
    /// What the gate said; absent when none ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// Why the verdict is not `accepted`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
    /// Where `iec q4` put the bytes.
    #[serde(flatten)]
    pub packed: Option<PackedJson>,
}

impl TensorEntry {
    /// Its finished bytes in the files of `dir`, if it has some.
    pub(crate) fn finished(&self, dir: &Path) -> Option<FinishedTensor> {
        let (packed, quant) = (self.packed.as_ref()?, self.quant?);
        let shape = if self.count == 1 { vec![] } else { vec![self.count] };
        let shape = [shape, vec![self.rows, self.cols]].concat();
        Some(FinishedTensor { shape, spec: quant.spec, range: packed.resolve(dir) })
    }
}
