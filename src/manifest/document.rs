//! The manifest document: the data structure that is serialized to and from its JSON file.

use super::entry::TensorEntry;
use super::plan::Plan;
use super::rules::Rule;
use crate::calibration::{Calibration, CalibrationText};
use crate::output::pretty;
use crate::provenance::{Evidence, Gate, Quality, Source, SourceFile, TaskEvidence};
use crate::quant_spec::{QuantFields, TensorQuant};
use crate::sha256::{Digest, Sha256, hex};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version written by this crate.
pub const VERSION: u32 = 1;

/// The content of a manifest file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// Schema version.
    pub version: Version,
    /// `iec` and its version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_by: Option<String>,
    /// The measured checkpoint: file names and sizes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// Default parameters for fields that a rule does not set.
    #[serde(default)]
    pub defaults: QuantFields,
    /// Rules for tensors without an entry of their own; the first rule that matches decides.
    #[serde(default)]
    pub rules: Vec<Rule>,
    /// Thresholds of the quality gate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<Gate>,
    /// Calibration statistics that were used for entries with method `imatrix` or `gptq`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationRecord>,
    /// Record of how a bit or size budget was distributed over the tensors; absent without a budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<Plan>,
    /// Measured quality loss of the whole model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<Evidence>,
    /// Measured accuracies on the files of questions of the gate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub task_evidence: Vec<TaskEvidence>,
    /// True when the quality gate refused the model and the manifest was written anyway.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refused: bool,
    /// Files that contain the packed bytes of entries, with sizes and hashes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<SourceFile>,
    /// Entries of single tensors by canonical name.
    #[serde(default)]
    pub tensors: BTreeMap<String, TensorEntry>,
}

/// Schema version of a document; the default is [`VERSION`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Version(pub u32);

impl Default for Version {
    fn default() -> Version {
        Version(VERSION)
    }
}

impl Document {
    /// Returns the quality record that goes into a pack made from this manifest; `None` without a gate.
    pub fn quality(&self) -> Option<Quality> {
        self.gate.clone().map(|gate| Quality {
            gate,
            refused: self.refused,
            evidence: self.evidence.clone(),
            task_evidence: self.task_evidence.clone(),
        })
    }

    /// Returns the reasons why the outputs of the measured model miss the gate.
    pub fn objections(&self) -> Vec<&str> {
        let texts = self.evidence.iter().flat_map(|evidence| evidence.objections.iter().map(String::as_str));
        texts.chain(self.task_evidence.iter().filter_map(|task| task.objection.as_deref())).collect()
    }

    /// Returns the SHA-256 of all tensors with their quantization, in hex.
    pub fn decisions_hash(&self) -> String {
        let decisions: BTreeMap<&str, TensorQuant> =
            self.tensors.iter().filter_map(|(name, entry)| Some((name.as_str(), entry.quant?))).collect();
        let text = serde_json::to_vec(&decisions).expect("plain data always serializes");
        hex(Sha256::new_with_prefix(&text))
    }

    /// Serializes the document as JSON. Equal documents give equal bytes.
    pub fn to_json(&self) -> Vec<u8> {
        pretty(self)
    }
}

/// Identification of the `iec calib` statistics that were used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalibrationRecord {
    /// The seal of the statistics file: the SHA-256 of all bytes before the seal.
    pub seal: String,
    /// The texts that the statistics were collected on.
    pub texts: Vec<CalibrationText>,
}

impl CalibrationRecord {
    /// Builds the record of opened statistics.
    pub fn of(calibration: &Calibration) -> CalibrationRecord {
        CalibrationRecord { seal: calibration.seal().to_string(), texts: calibration.description().texts.clone() }
    }
}
