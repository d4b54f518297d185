//! The quantization manifest: what is quantized, how, and how well; the one description that `pack --q4-map` obeys.

use crate::scheme::QuantSpec;
use serde::{Deserialize, Serialize};

/// How codes and scales are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Round to nearest with the scheme's plain scale.
    Rtn,
    /// Search the scale (and codes) that minimise the weighted squared error.
    Search,
}

/// A full decision for one tensor: from the same weights it gives the same bytes everywhere.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TensorQuant {
    /// What the codes mean.
    #[serde(flatten)]
    pub spec: QuantSpec,
    /// How they are chosen.
    pub method: Method,
    /// Weights are clipped to this absolute value first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clamp: Option<f32>,
    /// Scales come from this percentile of absolute values (0 < p <= 100) instead of the maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percentile: Option<f32>,
}
