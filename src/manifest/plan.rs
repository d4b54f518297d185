//! Record of how a budget was distributed over the tensors, written by `ptq --target-bpw`, `--target-size`,
//! `--target-kl` and `--target-speed`.

use crate::error::{Error, Result};
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
    /// Predicted speed, if the target is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<PlannedSpeed>,
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
    /// Tokens per second that one text decodes.
    Speed(f64),
}

/// Targets as options give them, of which at most one may be set.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AskedTargets {
    /// Bits per weight.
    pub bits_per_weight: Option<f64>,
    /// Bytes.
    pub bytes: Option<u64>,
    /// Divergence in nats per token.
    pub divergence: Option<f64>,
    /// Tokens per second.
    pub speed: Option<f64>,
}

impl AskedTargets {
    /// Returns the target that is set, if one is; `option` returns the spelling of the option `target-NAME`.
    ///
    /// # Errors
    /// Several targets are set, or the value is out of range.
    pub fn target(self, option: impl Fn(&str) -> String) -> Result<Option<Target>> {
        let refuse = |name: &str, found: f64, expected: &str| {
            Err(Error::usage(format!("{}: found {found}, expected {expected}", option(name))))
        };
        Ok(Some(match self {
            AskedTargets { bits_per_weight: None, bytes: None, divergence: None, speed: None } => return Ok(None),
            AskedTargets { bits_per_weight: Some(bits), bytes: None, divergence: None, speed: None } => match bits {
                bits if bits > 0.0 && bits <= 64.0 => Target::BitsPerWeight(bits),
                bits => return refuse("target-bpw", bits, "bits per weight, like 4.5"),
            },
            AskedTargets { bits_per_weight: None, bytes: Some(bytes), divergence: None, speed: None } => {
                Target::Bytes(bytes)
            }
            AskedTargets { bits_per_weight: None, bytes: None, divergence: Some(kl), speed: None } => match kl {
                kl if kl > 0.0 && kl.is_finite() => Target::Divergence(kl),
                kl => return refuse("target-kl", kl, "nats per token, like 0.002"),
            },
            AskedTargets { bits_per_weight: None, bytes: None, divergence: None, speed: Some(speed) } => match speed {
                speed if speed > 0.0 && speed <= 1e9 => Target::Speed(speed),
                speed => return refuse("target-speed", speed, "tokens per second, like 20"),
            },
            _ => {
                let all = ["target-bpw", "target-size", "target-kl", "target-speed"].map(&option).join(", ");
                return Err(Error::usage(format!("found several of {all}, expected one")));
            }
        }))
    }
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

/// Predicted speed of the pack, and what the prediction is based on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlannedSpeed {
    /// Tokens per second of one text, products with weights alone.
    pub tokens_per_second: f64,
    /// Measured rates in 10^9 bytes per second, by storage; empty if the bandwidth was given.
    pub rates: BTreeMap<String, f64>,
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
