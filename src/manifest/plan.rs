//! Record of how a budget was distributed over the tensors, written by `ptq --target-bpw`, `--target-size` and
//! `--target-kl`.

use crate::provenance::SourceFile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The budget, the schemes chosen for the tensors, and the expected and measured cost of this choice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The budget.
    pub target: Target,
    /// Bits per weight of the whole pack, scales and padding included.
    pub bits_per_weight: f64,
    /// Bytes of the `model.ie.bin` of the pack.
    pub bytes: u64,
    /// Measure of the costs.
    pub yardstick: Yardstick,
    /// Text on which the divergences were measured; absent for other yardsticks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<PlanText>,
    /// Sum of the costs of the tensors with more than one possible scheme.
    pub predicted: f64,
    /// Measured divergence of the whole pack on the same tokens, with quantized weights only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<f64>,
    /// Size and expected divergence when every tensor has the scheme with which it was measured alone (q4_0 where
    /// possible), for comparison; absent for other yardsticks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uniform: Option<Uniform>,
    /// Tensors with more than one possible scheme, by canonical name.
    pub tensors: BTreeMap<String, PlannedTensor>,
}

/// A budget for the whole pack.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Target {
    /// Bits per weight over all tensors of the pack.
    BitsPerWeight(f64),
    /// Bytes of its `model.ie.bin`.
    Bytes(u64),
    /// Expected divergence in nats per token; the pack is as small as it allows.
    Divergence(f64),
}

/// Measure of the cost of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Yardstick {
    /// Divergence of the model in nats per token when only this tensor is quantized.
    Divergence,
    /// Squared error of the outputs of the tensor divided by their mean square; multiplied by 64 for the output matrix.
    Outputs,
    /// Squared error of the weights of the tensor divided by their mean square; multiplied by 64 for the output matrix.
    Weights,
}

/// Windows of a text that the divergences of a plan were measured on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanText {
    /// The text file.
    pub file: SourceFile,
    /// Tokens per window; the second half of each window is scored.
    pub window: usize,
    /// Windows at the beginning of the text that were skipped, because calibration or a quality gate used them.
    pub skipped: usize,
    /// Number of windows that were evaluated.
    pub windows: usize,
}

/// The model with every tensor in the scheme with which it was measured alone (q4_0 where possible).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Uniform {
    /// Bits per weight of the whole pack.
    pub bits_per_weight: f64,
    /// Sum of the divergences that were measured with one quantized tensor at a time.
    pub predicted: f64,
}

/// One tensor of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedTensor {
    /// Storage of the tensor in words: its element type or scheme.
    pub stored: String,
    /// Bits per weight, scales and padding included.
    pub bits: f64,
    /// Cost of the tensor in this storage, in the units of [`Plan::yardstick`].
    pub cost: f64,
}
