//! The quantization manifest: a JSON file that defines which tensors are quantized, with which parameters and with
//! which measured error. `pack --q4-map` follows it.
//!
//! A manifest is either written by hand as *rules* (see `manifests/`), or expanded by `iec ptq` and `iec q4` into one
//! entry per tensor with metrics, verdict and, from `q4`, the location of the packed bytes. [`Manifest::load`]
//! validates all of it. [`Manifest::decide`] returns the decision for one tensor: its own entry has priority, then the
//! first rule that matches; a tensor that neither covers is kept. The JSON Schema is
//! `manifests/q4_manifest.schema.json`.

mod document;
mod entry;
mod load;
mod older;
mod packed;
pub mod plan;
pub mod recipes;
mod rules;

use crate::catalogue::Role;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::iebin;
use crate::quant_spec::TensorQuant;
use std::path::{Path, PathBuf};

pub use document::{CalibrationRecord, Document, VERSION, Version};
pub use entry::{Keep, Metrics, TensorEntry, Verdict};
pub(crate) use older::entry as older_entry;
pub use packed::{EXPANDED_NAME, FinishedTensor, PackedJson, PackedRange};
pub use plan::Plan;
pub use rules::{PatternBudget, Rule, Rules, compile_pattern};

/// Decision to quantize one tensor.
#[derive(Debug, Clone)]
pub struct Decision {
    /// Scheme and method of quantization.
    pub quant: TensorQuant,
    /// Error that was measured when the manifest was made.
    pub metrics: Option<serde_json::Value>,
    /// Finished bytes, if `iec q4` wrote them.
    pub packed: Option<PackedRange>,
}

/// A loaded and validated manifest.
#[derive(Debug)]
pub struct Manifest {
    document: Document,
    rules: Rules,
    /// Path of the file; empty for a manifest that was parsed from text.
    path: PathBuf,
    /// Directory that relative paths start at.
    dir: PathBuf,
}

impl Manifest {
    /// Returns the content of the manifest file.
    pub fn document(&self) -> &Document {
        &self.document
    }

    /// Returns the path of the file; empty for a manifest that was parsed from text.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the directory of the files that the manifest names.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the compiled rules.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Returns the quantization of the tensor `name`. `None` leaves the tensor unquantized, in the type that
    /// [`Manifest::keep`] returns.
    ///
    /// # Errors
    /// The manifest was made for a tensor of another shape.
    pub fn decide(&self, name: &str, shape: &[usize]) -> Result<Option<Decision>> {
        if let Some(entry) = self.document.tensors.get(name) {
            let expected = (entry.count, entry.rows, entry.cols);
            let found = iebin::matrices(shape).map_err(|e| e.tensor(name))?;
            if expected != found {
                return Err(Error::corrupt(format!(
                    "found {} x {} x {} in the manifest, but shape {shape:?} in the checkpoint",
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

    /// Refuses a manifest with entries for tensors that the model does not have; `is_known` returns true for the names
    /// of the model's tensors.
    ///
    /// # Errors
    /// There is such an entry.
    pub fn refuse_strangers(&self, is_known: impl Fn(&str) -> bool) -> Result<()> {
        match self.document.tensors.keys().find(|name| !is_known(name)) {
            Some(name) => Err(Error::corrupt("found in the manifest, but not in the model")
                .tensor(name)
                .help("make the manifest again with `iec ptq` from this checkpoint")),
            None => Ok(()),
        }
    }

    /// Returns true when an entry or a rule names the quantization method of a tensor.
    pub fn names_method(&self, name: &str) -> bool {
        let entry = self.document.tensors.get(name);
        entry.map_or_else(|| self.rules.names_method(name), |entry| entry.quant.is_some())
    }

    /// Returns the location of the finished bytes of a tensor; `None` when the manifest has none.
    pub fn finished(&self, name: &str) -> Option<FinishedTensor> {
        self.document.tensors.get(name)?.finished(&self.dir)
    }

    /// Returns the float type that the manifest demands for an unquantized tensor; `None` when it demands none.
    pub fn keep(&self, name: &str) -> Option<DType> {
        self.document.tensors.get(name)?.keep?.dtype()
    }
}

/// Returns true for tensors that rules apply to. Vectors, and the biases that gpt-oss stacks by expert, are not
/// quantized even when a broad pattern matches their names.
pub fn is_weight_matrix(name: &str, shape: &[usize]) -> bool {
    shape.len() >= 2 && !matches!(Role::of(name), Role::Bias | Role::Norm | Role::Sinks | Role::Prediction)
}
