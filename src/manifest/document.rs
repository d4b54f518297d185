//! The manifest as its JSON has it.

use super::entry::TensorEntry;
use super::plan::Plan;
use super::rules::Rule;
use crate::calibration::{Calibration, Text};
use crate::output::pretty;
use crate::provenance::{Evidence, Gate, Quality, Source, SourceFile};
use crate::quant_spec::QuantFields;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version written by this crate.
pub const VERSION: u32 = 1;

/// The manifest as JSON has it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// Schema version.
    pub version: Version,
    /// `iec` and its version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_by: Option<String>,
    /// The checkpoint that was measured: file names and sizes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// What rules leave open.
    #[serde(default)]
    pub defaults: QuantFields,
    /// First match wins.
    #[serde(default)]
    pub rules: Vec<Rule>,
    /// The thresholds that were applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<Gate>,
    /// The statistics that entries with method `imatrix` or `gptq` were made with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationRecord>,
    /// How a budget was spent, where one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<Plan>,
    /// What the whole model was measured to lose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<Evidence>,
    /// True when a gate refused and the manifest was written all the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refused: bool,
    /// The files the entries point into, with sizes and hashes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<SourceFile>,
    /// Decided tensors by canonical name.
    #[serde(default)]
    pub tensors: BTreeMap<String, TensorEntry>,
}

/// Version of a document; a new one has [`VERSION`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Version(pub u32);

impl Default for Version {
    fn default() -> Version {
        Version(VERSION)
    }
}

impl Document {
    /// What it proves about a model whose other tensors are as the checkpoint has them.
    pub fn quality(&self) -> Option<Quality> {
        self.gate.map(|gate| Quality { gate, refused: self.refused, evidence: self.evidence.clone() })
    }

    /// The bytes of the file: the same document gives the same bytes.
    pub fn to_json(&self) -> Vec<u8> {
        pretty(self)
    }
}

/// Which statistics of `iec calib` were used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalibrationRecord {
    /// The seal of the file: the SHA-256 of its bytes before the seal.
    pub seal: String,
    /// The texts that were read for it.
    pub texts: Vec<Text>,
}

impl CalibrationRecord {
    /// Of opened statistics.
    pub fn of(calibration: &Calibration) -> CalibrationRecord {
        CalibrationRecord { seal: calibration.seal().to_string(), texts: calibration.description().texts.clone() }
    }
}
