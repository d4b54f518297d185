//! Origin and measured quality of a pack or quantized checkpoint.
//!
//! [`Source`] lists the files that an artifact was made from; every container and manifest contains it. [`Quality`]
//! holds the thresholds of a quantization and the [`Evidence`] that it met them: `ptq` writes it, `pack` copies it
//! into the pack.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Files that an artifact was made from.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// Id of the repository on the Hugging Face Hub (`ORG/NAME`), if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// Weight files that were read.
    #[serde(default)]
    pub files: Vec<SourceFile>,
}

/// File that an artifact was made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourceFile {
    /// File name without directories.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 in hex.
    pub sha256: String,
}

/// Thresholds for every tensor and for the outputs of the whole model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    /// Lower bound of [`crate::manifest::Metrics::cosine_mean`]; if it is not set, that of the bits of each tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cosine: Option<f64>,
    /// Lower bound of [`crate::manifest::Metrics::cosine_min`]; if it is not set, that of the bits of each tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cosine_min: Option<f64>,
    /// Upper bound of [`Figures::kl`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// Upper bound of `perplexity_ratio - 1`; 0.01 is one percent more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity_rise: Option<f64>,
    /// Lower bound of [`Figures::top1_agreement`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top1: Option<f64>,
    /// Bounds on the accuracy on files of questions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<TaskBound>,
}

/// Bound on the accuracy of the quantized model on a file of questions.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskBound {
    /// Path of the file, for the measurement; not recorded.
    #[serde(skip)]
    pub path: PathBuf,
    /// Name of the file without directories.
    pub file: String,
    /// Largest share by which the accuracy may be below that of the float model; 0.01 is one percentage point.
    pub largest_drop: f64,
}

/// Measured quality of a quantized model, as a pack records it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quality {
    /// Thresholds that were applied.
    pub gate: Gate,
    /// True when the model missed the gate and the manifest was written because of `--force`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refused: bool,
    /// Measurement of the whole model, if one was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<Evidence>,
    /// Measurements of [`Gate::tasks`], in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub task_evidence: Vec<TaskEvidence>,
}

/// Distance between the predictions of a quantized model and those of the float model it was made from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    /// Mean Kullback-Leibler divergence from the float model, in nats per token.
    pub kl: f64,
    /// Standard error of `kl`.
    pub kl_stderr: f64,
    /// 99th percentile of the divergence over tokens.
    pub kl_p99: f64,
    /// Perplexity of the quantized model.
    pub perplexity: f64,
    /// Perplexity of the quantized model divided by that of the float model.
    pub perplexity_ratio: f64,
    /// Standard error of `perplexity_ratio`.
    pub perplexity_ratio_stderr: f64,
    /// Share of scored positions at which both models have the same most likely token. Older manifests name it `top1`.
    #[serde(alias = "top1")]
    pub top1_agreement: f64,
}

/// Repeatable measurement of the whole model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// Text file that both models were evaluated on.
    pub text: SourceFile,
    /// Tokens per window; the second half of each window is scored.
    pub window: usize,
    /// Number of scored tokens.
    pub scored: usize,
    /// Precision in which the quantized model ran.
    pub precision: String,
    /// Precision in which the float model ran.
    pub reference_precision: String,
    /// Bits per weight of the measured pack, including scales and padding.
    pub bits_per_weight: f64,
    /// Measured values.
    pub figures: Figures,
    /// Tensors that were given more bits so that the model passes the gate, in order of promotion.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub promoted: Vec<Promotion>,
    /// Reasons why the model misses the gate; empty if it passes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objections: Vec<String>,
}

/// Repeatable measurement of the accuracy on a file of questions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskEvidence {
    /// File that both models answered.
    pub file: SourceFile,
    /// Name of the task.
    pub task: String,
    /// Number of questions.
    pub questions: usize,
    /// Precision in which the quantized model ran.
    pub precision: String,
    /// Precision in which the float model ran.
    pub reference_precision: String,
    /// Share of right answers of the quantized model.
    pub accuracy: f64,
    /// Share of right answers of the float model.
    pub reference_accuracy: f64,
    /// `accuracy - reference_accuracy`.
    pub difference: f64,
    /// Standard error of `difference`, from the differences per question.
    pub difference_stderr: f64,
    /// Number of questions that only the quantized model answers correctly.
    pub became_right: usize,
    /// Number of questions that only the float model answers correctly.
    pub became_wrong: usize,
    /// Reason why the model misses the bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objection: Option<String>,
}

/// Tensor that was given more bits because it degraded the model most for its size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Promotion {
    /// Canonical name of the tensor.
    pub tensor: String,
    /// Mean Kullback-Leibler divergence of a model in which only this tensor is quantized, in nats per token.
    pub kl: f64,
    /// Quantization before the promotion.
    pub from: String,
    /// Quantization or float type after the promotion.
    pub to: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_name_of_the_agreement_is_read() {
        let figures = r#"{"kl": 0, "kl_stderr": 0, "kl_p99": 0, "perplexity": 1, "perplexity_ratio": 1,
            "perplexity_ratio_stderr": 0, "top1": 0.5}"#;
        let figures: Figures = serde_json::from_str(figures).unwrap();
        assert_eq!(figures.top1_agreement, 0.5);
        assert!(serde_json::to_string(&figures).unwrap().ends_with(r#""top1_agreement":0.5}"#));
    }
}
