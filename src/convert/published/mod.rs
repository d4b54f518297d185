//! Published quantized checkpoints: which format the weights have, and which tensors belong to which matrix.
//!
//! A format is one row of the table in `table.rs` and one file. It finds its settings (`quantization_config` of
//! `config.json`, or a file beside it), and describes each matrix as plain data ([`Coded`]): codes, scales, zero points
//! and how they lie in the source. Everything else is common: [`Coded::read_rows`] computes the exact floats of any
//! rows, and [`Coded::native`] says whether a pack can hold the codes bit for bit. To add a format, write its file and
//! its row.
//!
//! The tensors decide which matrices are quantized. Lists of excluded modules in the settings are advice: names without
//! the right prefix and stale entries are common.

mod auto_round;
mod awq;
mod bits;
mod bitsandbytes;
mod coded;
mod compressed_tensors;
mod decode;
mod detect;
mod floats8;
mod format;
mod fp4;
mod fp8;
mod gptq;
mod mlx;
mod modelopt;
mod mxfp4;
mod names;
mod native;
mod parts;
mod table;
mod torchao;

pub use coded::Coded;
pub use mxfp4::parts_of as parts_of_mxfp4;
pub use native::{Kept, Native};

use crate::convert::arch::Fields;
use crate::convert::source::shards::Shards;
use crate::convert::source::source_tensor::SourceTensor;
use crate::error::{Error, Result};
use detect::{FoundSettings, unread};
use format::{Format, Settings};
use names::names_or_contains;
use parts::Parts;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

pub use detect::{Source, settings_of};

/// Summary of what a pack holds of a checkpoint that is quantized.
#[derive(Debug, Clone, Serialize)]
pub struct PublishedSummary {
    /// Name of the format.
    pub format: &'static str,
    /// Number of tensors whose codes the pack holds.
    pub kept: usize,
    /// Number of tensors that became floats, or were quantized again.
    pub converted: usize,
    /// True if the checkpoint has scales of activations, which the pack does not use.
    pub activation_scales: bool,
}

/// Form in which a pack holds a matrix that is quantized in the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MatrixForm {
    /// Canonical name of the tensor.
    pub tensor: String,
    /// Format in the checkpoint.
    pub format: String,
    /// Scheme that holds its codes; `None` if it becomes floats.
    pub kept_as: Option<String>,
    /// Reason why it becomes floats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub because: Option<&'static str>,
}

/// Largest number of bytes of a bias that is examined.
const LARGEST_BIAS: usize = 16 << 20;

/// The quantized matrices of a checkpoint.
#[derive(Debug, Default)]
pub struct Published {
    /// Name of the format; `None` for weights that are all floats.
    format: Option<&'static str>,
    /// Matrices by the name that they have in the unquantized model.
    matrices: BTreeMap<String, Arc<Coded>>,
    /// Names of the tensors that belong to a matrix.
    parts: HashSet<String>,
    /// Text of the settings, which decides about values as the weights do.
    settings: String,
    /// True if the checkpoint has scales of activations.
    activation_scales: bool,
}

impl Published {
    /// Finds the format of a checkpoint and describes its quantized matrices. Tensors for which `is_left_out` is true
    /// are not examined.
    ///
    /// # Errors
    /// The format is not supported, two formats are found, or a matrix is not as its settings say.
    pub fn open(source: &Source<'_>, shards: &Shards, is_left_out: &dyn Fn(&str) -> bool) -> Result<Published> {
        let found = FoundSettings::of(source, shards)?;
        let Some(format) = found.format else { return Ok(Published::default()) };
        let settings = Settings { fields: found.fields(), model_type: source.model_type(), shards };
        let describe = (format.open)(&settings).map_err(|e| if e.file().is_none() { e.at(&found.path) } else { e })?;
        let mut published = Published { format: Some(format.name), settings: found.text(), ..Published::default() };
        for tensor in shards.tensors().filter(|tensor| !is_left_out(&tensor.name)) {
            published.activation_scales |= is_activation_scale(&tensor.name);
            let Some(stem) = format.stem(&tensor.name) else { continue };
            let coded = describe(&Parts { shards, stem }, tensor)?;
            published.parts.extend(coded.part_names().map(str::to_string));
            if let Some(first) = published.matrices.insert(coded.name.clone(), Arc::new(coded)) {
                let twice = Error::corrupt("found two quantized forms of this matrix, expected one");
                return Err(twice.at(shards.path(tensor)).tensor(&first.name).help("get the checkpoint again"));
            }
        }
        match published.matrices.is_empty() && !format.may_be_floats {
            true => Err(found.no_matrices()),
            false => {
                published.note_floats(format, found.fields(), shards);
                Ok(published)
            }
        }
    }

    /// Returns the name of the format; `None` for weights that are all floats.
    pub fn format(&self) -> Option<&'static str> {
        self.format.filter(|_| !self.matrices.is_empty())
    }

    /// Returns the text of the settings that decide about values; empty for weights that are all floats.
    pub fn settings(&self) -> &str {
        if self.matrices.is_empty() { "" } else { &self.settings }
    }

    /// Returns true if the checkpoint has scales of activations, which products of quantized weights alone ignore.
    pub fn has_activation_scales(&self) -> bool {
        self.activation_scales && !self.matrices.is_empty()
    }

    /// Finds a matrix by the name that it has in the unquantized model.
    pub fn get(&self, name: &str) -> Option<&Arc<Coded>> {
        self.matrices.get(name)
    }

    /// Returns the names of all matrices.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.matrices.keys().map(String::as_str)
    }

    /// Returns true if a tensor belongs to a quantized matrix, or is a scale of activations or of a quantized KV cache,
    /// which nothing reads.
    pub fn explains(&self, tensor: &str) -> bool {
        !self.matrices.is_empty() && (self.parts.contains(tensor) || unread(tensor))
    }

    /// Returns true for a bias of a quantized matrix that is zero everywhere. Older tools write one for every matrix,
    /// also in models without biases.
    pub fn is_idle_bias(&self, shards: &Shards, tensor: &SourceTensor) -> bool {
        let module = tensor.name.strip_suffix(".bias").filter(|_| tensor.dtype.is_float());
        let is_known = module.is_some_and(|module| self.matrices.contains_key(&format!("{module}.weight")));
        let mut bytes = Vec::new();
        if is_known && tensor.shape.len() == 1 && tensor.nbytes <= LARGEST_BIAS {
            bytes.resize(tensor.nbytes, 1);
        }
        !bytes.is_empty() && shards.read(tensor, 0, &mut bytes).is_ok() && bytes.iter().all(|byte| *byte == 0)
    }

    /// Returns the number of weights that each tensor of a quantized matrix holds: all of them for its codes, and none
    /// for the others. Tensors of floats are not listed.
    pub fn weights_by_tensor(&self) -> HashMap<String, u64> {
        let mut weights: HashMap<String, u64> = self.parts.iter().map(|name| (name.clone(), 0)).collect();
        for coded in self.matrices.values() {
            weights.insert(coded.tensors()[0].name.clone(), coded.shape.iter().product::<usize>() as u64);
        }
        weights
    }

    /// Reports, in verbose output, matrices that the settings call quantized and that are floats: those with the last
    /// name of a quantized one that no list excludes.
    fn note_floats(&self, format: &Format, fields: Option<Fields<'_>>, shards: &Shards) {
        let leaf = |name: &str| Some(name.strip_suffix(".weight")?.rsplit_once('.')?.1.to_string());
        let leaves: BTreeSet<String> = self.matrices.keys().filter_map(|name| leaf(name)).collect();
        let excluded: Vec<&str> =
            format.excluded.iter().filter_map(|key| fields?.words_opt(key).ok().flatten()).flatten().collect();
        let is_plain = |tensor: &&SourceTensor| {
            tensor.dtype.is_float() && tensor.shape.len() == 2 && !self.matrices.contains_key(&tensor.name)
        };
        for tensor in shards.tensors().filter(is_plain) {
            let module = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name);
            let is_listed = || excluded.iter().any(|entry| names_or_contains(entry, module));
            if leaf(&tensor.name).is_some_and(|leaf| leaves.contains(&leaf)) && !is_listed() {
                crate::progress::detail(1, || {
                    format!("note: `{}` is not quantized, although the settings do not exclude it", tensor.name)
                });
            }
        }
    }
}

/// Returns the names of files beside `config.json` that may have quantization settings.
pub fn settings_files() -> impl Iterator<Item = &'static str> {
    table::FORMATS.iter().filter_map(|format| format.file)
}

/// Removes the quantization settings from a configuration whose weights are floats now.
pub fn remove_settings(config: &mut Map<String, Value>) {
    detect::KEYS.iter().for_each(|key| drop(config.shift_remove(*key)));
}

/// Returns true for scales of activations.
fn is_activation_scale(name: &str) -> bool {
    ["input_scale", "activation_scale", "input_global_scale"].iter().any(|ending| name.ends_with(ending))
}

#[cfg(test)]
mod tests;
