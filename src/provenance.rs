//! Where an artifact comes from and how good it was measured to be.
//!
//! [`Source`] lists the files an artifact was made from; every container and manifest carries it. [`Quality`] holds the
//! thresholds of a quantization and the [`Evidence`] that it met them: `ptq` writes it, `pack` copies it into the pack.

use serde::{Deserialize, Serialize};

/// Provenance of an artifact.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// Repository id, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// The shards that were read.
    #[serde(default)]
    pub files: Vec<SourceFile>,
}

/// One file an artifact was made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourceFile {
    /// File name without directories.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 in hex.
    pub sha256: String,
}

/// Thresholds of every tensor and of the answers of the whole model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    /// Lower bound of [`crate::manifest::Metrics::cosine_mean`].
    pub cosine: f64,
    /// Lower bound of [`crate::manifest::Metrics::cosine_min`].
    pub cosine_min: f64,
    /// Upper bound of [`Figures::kl`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// Upper bound of `perplexity_ratio - 1`; 0.01 is one percent more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity_rise: Option<f64>,
    /// Lower bound of [`Figures::top1`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top1: Option<f64>,
}

/// The proof of a quantization, as a pack carries it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quality {
    /// What had to be reached.
    pub gate: Gate,
    /// True when the gate refused and the manifest was written all the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refused: bool,
    /// What the whole model was measured to lose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<Evidence>,
}

/// How far the answers of a quantized model are from those of the model it was made from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    /// Mean Kullback-Leibler divergence from the float model, in nats per token.
    pub kl: f64,
    /// Its standard error.
    pub kl_stderr: f64,
    /// 99 of 100 tokens diverge less.
    pub kl_p99: f64,
    /// Perplexity of the quantized model.
    pub perplexity: f64,
    /// Perplexity over that of the float model.
    pub perplexity_ratio: f64,
    /// Its standard error.
    pub perplexity_ratio_stderr: f64,
    /// Share of tokens where both find the same token most likely.
    pub top1: f64,
}

/// A measurement of the whole model that can be repeated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// The text that both models read.
    pub text: SourceFile,
    /// Tokens of a window; the second half of each is scored.
    pub window: usize,
    /// Tokens scored.
    pub scored: usize,
    /// The precision of the quantized model.
    pub precision: String,
    /// The precision of the float model.
    pub reference_precision: String,
    /// Bits per weight of the whole pack that was measured, scales and padding included.
    pub bits_per_weight: f64,
    /// What was measured.
    pub figures: Figures,
    /// Tensors that were given more bits until the gate let the model through, in that order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub promoted: Vec<Promotion>,
    /// What the gate objects to; empty when it is content.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objections: Vec<String>,
}

/// A tensor that was given more bits, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Promotion {
    /// Its name.
    pub tensor: String,
    /// Mean divergence of a model in which only this tensor is quantized, in nats per token.
    pub kl: f64,
    /// What it was.
    pub from: String,
    /// What it became.
    pub to: String,
}
