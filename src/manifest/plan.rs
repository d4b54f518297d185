//! How a budget was spent: written by `ptq --target-bpw` and `--target-size`.

use crate::provenance::SourceFile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What was asked for, what was chosen, and what that was expected and measured to cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The budget.
    pub target: Target,
    /// Bits per weight of the whole pack, scales and padding included.
    pub bits_per_weight: f64,
    /// Bytes of its `model.ie.bin`.
    pub bytes: u64,
    /// What costs are.
    pub yardstick: Yardstick,
    /// The tokens that divergences were measured on; absent for other yardsticks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<PlanText>,
    /// Sum of the costs.
    pub predicted: f64,
    /// What the pack as a whole was measured to diverge on the same tokens, weights alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<f64>,
    /// What it costs to give every tensor the scheme that it was measured with: sum, and as a whole where that was
    /// measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uniform: Option<Uniform>,
    /// Each tensor that had a choice, by canonical name.
    pub tensors: BTreeMap<String, PlannedTensor>,
}

/// A budget for the whole pack.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Target {
    /// Bits per weight of everything in it.
    BitsPerWeight(f64),
    /// Bytes of its `model.ie.bin`.
    Bytes(u64),
}

/// What a tensor is taken to cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Yardstick {
    /// Nats per token that the model diverges when the tensor alone is quantized.
    Divergence,
    /// Squared error of its outputs over their mean square, 64 times for the output matrix.
    Outputs,
    /// The same of its weights.
    Weights,
}

/// The windows of a text that a plan was made with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanText {
    /// The text.
    pub file: SourceFile,
    /// Tokens of a window; the second half of each is scored.
    pub window: usize,
    /// Windows at its beginning that were left out, because calibration or a gate has read them.
    pub skipped: usize,
    /// Windows that were read.
    pub windows: usize,
}

/// The model with every tensor in the scheme that its own divergence was measured with.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Uniform {
    /// Bits per weight of the whole pack.
    pub bits_per_weight: f64,
    /// Sum of the divergences of each tensor alone.
    pub predicted: f64,
}

/// One tensor of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedTensor {
    /// What it is stored as, in a word or two.
    pub stored: String,
    /// Bits per weight, scales and padding included.
    pub bits: f64,
    /// What it is taken to cost as it is stored.
    pub cost: f64,
}
