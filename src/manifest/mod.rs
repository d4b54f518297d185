//! The quantization manifest: what is quantized, how, and how well; the one description that `pack --q4-map` obeys.
//!
//! A manifest is written by hand as *rules* (see `manifests/`), or expanded by `iec ptq` and `iec q4` into one entry per
//! tensor with metrics, verdict and, from `q4`, the place of the bytes. [`Manifest::load`] checks everything in it;
//! [`Manifest::decide`] answers for one tensor: its own entry wins, then the first rule that matches, then "keep it".
//! The JSON Schema is `manifests/q4_manifest.schema.json`.

mod load;
mod older;
mod packed;
pub mod plan;
mod rules;

use crate::calibration::{Calibration, Text};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::iebin;
use crate::provenance::{Evidence, Gate, Quality, Source, SourceFile};
use crate::role::Role;
use crate::scheme::{Granularity, QuantSpec, ScaleType, Scheme};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

pub use packed::{PackedJson, PackedRange};
pub use plan::Plan;
pub use rules::{QuantFields, Rule, Rules, compile_pattern};

/// Version written by this crate.
pub const VERSION: u32 = 1;

/// How codes and scales are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Round to nearest with the scheme's plain scale.
    Rtn,
    /// Search the scale (and codes) that minimise the squared error.
    Search,
    /// The same search, each error weighed with the mean square of its input.
    Imatrix,
    /// Scales of `imatrix`; then codes that make up for the errors of others.
    Gptq,
    /// Codes and scales that the weights already are; refused where they are not.
    Lattice,
}

impl Method {
    /// The word of the manifest.
    pub fn name(self) -> &'static str {
        match self {
            Method::Rtn => "rtn",
            Method::Search => "search",
            Method::Imatrix => "imatrix",
            Method::Gptq => "gptq",
            Method::Lattice => "lattice",
        }
    }

    /// True when it cannot do without statistics of the inputs.
    pub fn needs_inputs(self) -> bool {
        matches!(self, Method::Imatrix | Method::Gptq)
    }

    /// True when these must have the products of input channels.
    pub fn needs_products(self) -> bool {
        self == Method::Gptq
    }
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
    /// Scales come from this percentile of absolute values (50 < p <= 100) instead of the maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percentile: Option<f32>,
}

impl TensorQuant {
    /// True when weights may be such codes already, in a checkpoint that was trained for them or decoded from them.
    pub fn may_be_lattice(&self) -> bool {
        let spec = &self.spec;
        let symmetric4 = matches!(spec.scheme, Scheme::Q4_0 | Scheme::Int4) && spec.symmetric;
        let shared = spec.granularity == Granularity::Tensor || spec.scale_dtype != ScaleType::F16;
        (symmetric4 || spec.scheme == Scheme::Nl4) && !shared && self.clamp.is_none() && self.percentile.is_none()
    }

    /// Refuses combinations that no encoder offers.
    pub fn validate(&self) -> Result<()> {
        self.spec.validate()?;
        if let Some(limit) = self.clamp
            && !(limit.is_finite() && limit > 0.0)
        {
            return Err(Error::usage(format!("clamp {limit}; expected a positive number")));
        }
        let searches = self.method != Method::Rtn;
        if searches && self.spec.scheme == Scheme::Mxfp4 {
            let found = format!("method {} with scheme mxfp4; its scales are powers of two", self.method.name());
            return Err(Error::usage(found).help("choose rtn"));
        }
        if self.method.needs_inputs() && self.spec.granularity == Granularity::Tensor {
            let found = format!("method {} with one scale per tensor", self.method.name());
            return Err(Error::usage(found).help("choose --group-size row or smaller"));
        }
        if self.method == Method::Lattice && !self.may_be_lattice() {
            let found = format!("method lattice with scheme {} or a clamp", self.spec.scheme.name());
            return Err(Error::usage(found).help("lattices are those of q4_0, nl4 and symmetric int4 with fp16 scales"));
        }
        let Some(p) = self.percentile else { return Ok(()) };
        if !(p > 50.0 && p <= 100.0) {
            return Err(Error::usage(format!("percentile {p}; expected above 50 and at most 100")));
        }
        if searches {
            return Err(Error::usage(format!("a percentile together with method {}", self.method.name()))
                .help("the search finds the best scale by itself; use method rtn with a percentile"));
        }
        Ok(())
    }
}

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
    /// Root of (mean square error of the outputs / their mean square), on calibration windows that nothing was fitted on;
    /// absent without calibration.
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

/// The manifest as JSON has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// Schema version.
    pub version: u32,
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

/// What is to be done with one tensor.
#[derive(Debug, Clone)]
pub struct Decision {
    /// How it is quantized.
    pub quant: TensorQuant,
    /// What was measured when it was decided.
    pub metrics: Option<serde_json::Value>,
    /// Finished bytes, if `iec q4` made them.
    pub packed: Option<PackedRange>,
}

/// A loaded manifest, every number in it checked.
#[derive(Debug)]
pub struct Manifest {
    document: Document,
    rules: Rules,
    /// Where relative paths start.
    dir: PathBuf,
}

impl Manifest {
    /// The manifest as written.
    pub fn document(&self) -> &Document {
        &self.document
    }

    /// The compiled rules.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// How the tensor `name` is to be quantized; `None` leaves it as it is (or as [`Manifest::keep`] says).
    ///
    /// # Errors
    /// The manifest was made for a tensor of another shape.
    pub fn decide(&self, name: &str, shape: &[usize]) -> Result<Option<Decision>> {
        if let Some(entry) = self.document.tensors.get(name) {
            let expected = (entry.count, entry.rows, entry.cols);
            let found = iebin::matrices(shape).map_err(|e| e.tensor(name))?;
            if expected != found {
                return Err(Error::corrupt(format!(
                    "the manifest is for {} x {} x {}, the checkpoint has shape {shape:?}",
                    expected.0, expected.1, expected.2
                ))
                .tensor(name)
                .help("make the manifest again with `iec ptq` from this checkpoint"));
            }
            return Ok(entry.quant.map(|quant| Decision {
                quant,
                metrics: entry.metrics.and_then(|m| serde_json::to_value(m).ok()),
                packed: entry.packed.as_ref().map(|p| p.resolve(&self.dir)),
            }));
        }
        if !is_weight_matrix(name, shape) {
            return Ok(None);
        }
        Ok(self.rules.decide(name).map(|quant| Decision { quant, metrics: None, packed: None }))
    }

    /// True when an entry or a rule says how the codes of a tensor are chosen.
    pub fn names_method(&self, name: &str) -> bool {
        let entry = self.document.tensors.get(name);
        entry.map_or_else(|| self.rules.names_method(name), |entry| entry.quant.is_some())
    }

    /// Shape, meaning and place of the finished bytes of a tensor, if the manifest has them.
    pub fn packed(&self, name: &str) -> Option<(Vec<usize>, QuantSpec, PackedRange)> {
        let entry = self.document.tensors.get(name)?;
        let (packed, quant) = (entry.packed.as_ref()?, entry.quant?);
        let shape = if entry.count == 1 { vec![] } else { vec![entry.count] };
        Some(([shape, vec![entry.rows, entry.cols]].concat(), quant.spec, packed.resolve(&self.dir)))
    }

    /// The float type that an unquantized tensor was ordered to have, if any.
    pub fn keep(&self, name: &str) -> Option<DType> {
        match self.document.tensors.get(name)?.keep? {
            Keep::Source => None,
            Keep::Fp16 => Some(DType::F16),
            Keep::Bf16 => Some(DType::BF16),
        }
    }
}

/// True for what rules speak of. Vectors, and the biases that gpt-oss stacks by expert, stay as they are when a broad
/// pattern happens to match them.
pub fn is_weight_matrix(name: &str, shape: &[usize]) -> bool {
    shape.len() >= 2 && !matches!(Role::of(name), Role::Bias | Role::Norm | Role::Sinks)
}

impl Default for Document {
    fn default() -> Document {
        Document {
            version: VERSION,
            created_by: None,
            source: None,
            defaults: QuantFields::default(),
            rules: Vec::new(),
            gate: None,
            calibration: None,
            plan: None,
            evidence: None,
            refused: false,
            files: Vec::new(),
            tensors: BTreeMap::new(),
        }
    }
}

impl Document {
    /// What it proves about a model whose other tensors are as the checkpoint has them.
    pub fn quality(&self) -> Option<Quality> {
        self.gate.map(|gate| Quality { gate, refused: self.refused, evidence: self.evidence.clone() })
    }

    /// The bytes of the file: the same document gives the same bytes.
    pub fn to_json(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).expect("plain data always serializes");
        text.push(b'\n');
        text
    }
}
