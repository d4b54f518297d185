//! The quantization manifest: what is quantized, how, and how well; the one description that `pack --q4-map` obeys.
//!
//! A manifest is written by hand as *rules* (see `manifests/`), or expanded by `iec ptq` and `iec q4` into one entry
//! per tensor with metrics, verdict and, from `q4`, the place of the bytes. [`Manifest::load`] checks everything in it;
//! [`Manifest::decide`] answers for one tensor: its own entry wins, then the first rule that matches, then "keep it".
//! The JSON Schema is `manifests/q4_manifest.schema.json`.

mod document;
mod entry;
mod load;
mod older;
mod packed;
pub mod plan;
mod rules;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::iebin;
use crate::quant_spec::TensorQuant;
use crate::role::Role;
use std::path::{Path, PathBuf};

pub use document::{CalibrationRecord, Document, VERSION, Version};
pub use entry::{Keep, Metrics, TensorEntry, Verdict};
pub(crate) use older::entry as older_entry;
pub use packed::{FinishedTensor, PackedJson, PackedRange};
pub use plan::Plan;
pub use rules::{Rule, Rules, compile_pattern};

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
    /// Where it was read from; empty for a text.
    path: PathBuf,
    /// Where relative paths start.
    dir: PathBuf,
}

impl Manifest {
    /// The manifest as written.
    pub fn document(&self) -> &Document {
        &self.document
    }

    /// Where it was read from; empty for a text.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the files that it names lie.
    pub fn dir(&self) -> &Path {
        &self.dir
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

    /// Refuses a manifest with entries for tensors that the model does not have.
    ///
    /// # Errors
    /// There is such an entry.
    pub fn refuse_strangers(&self, is_known: impl Fn(&str) -> bool) -> Result<()> {
        match self.document.tensors.keys().find(|name| !is_known(name)) {
            Some(name) => Err(Error::corrupt("is in the manifest, but not in the model")
                .tensor(name)
                .help("make the manifest again with `iec ptq` from this checkpoint")),
            None => Ok(()),
        }
    }

    /// True when an entry or a rule says how the codes of a tensor are chosen.
    pub fn names_method(&self, name: &str) -> bool {
        let entry = self.document.tensors.get(name);
        entry.map_or_else(|| self.rules.names_method(name), |entry| entry.quant.is_some())
    }

    /// The finished bytes of a tensor, if the manifest has them.
    pub fn finished(&self, name: &str) -> Option<FinishedTensor> {
        self.document.tensors.get(name)?.finished(&self.dir)
    }

    /// The float type that an unquantized tensor was ordered to have, if any.
    pub fn keep(&self, name: &str) -> Option<DType> {
        self.document.tensors.get(name)?.keep?.dtype()
    }
}

/// True for what rules speak of. Vectors, and the biases that gpt-oss stacks by expert, stay as they are when a broad
/// pattern happens to match them.
pub fn is_weight_matrix(name: &str, shape: &[usize]) -> bool {
    shape.len() >= 2 && !matches!(Role::of(name), Role::Bias | Role::Norm | Role::Sinks)
}
