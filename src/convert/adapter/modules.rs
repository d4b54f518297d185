//! Tensors of `adapter_model.safetensors`, sorted by the module that they change.

use super::FILE;
use crate::convert::source::read_at::InputFile;
use crate::convert::source::safetensors;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::{DType, decode_floats};
use crate::error::{Context, Error, Result};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// Beginning of all names: PEFT saves the model inside two wrappers.
const PREFIX: &str = "base_model.model.";

/// Parts of a module, by the ends of their names.
const PARTS: &[(&str, ModulePart)] = &[
    (".lora_A.weight", ModulePart::A),
    (".lora_B.weight", ModulePart::B),
    (".lora_B.bias", ModulePart::BiasOfB),
    (".lora_magnitude_vector", ModulePart::Magnitude),
    (".lora_magnitude_vector.weight", ModulePart::Magnitude),
    (".lora_embedding_A", ModulePart::EmbeddingA),
    (".lora_embedding_B", ModulePart::EmbeddingB),
    (".base_layer.weight", ModulePart::Weight),
    (".base_layer.bias", ModulePart::Bias),
    (".weight", ModulePart::Weight),
    (".bias", ModulePart::Bias),
];

/// Part of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ModulePart {
    /// `(rank, cols)`.
    A,
    /// `(rows, rank)`.
    B,
    /// Bias of B: `(rows)`.
    BiasOfB,
    /// Magnitudes of DoRA.
    Magnitude,
    /// A of an embedding: `(rank, vocab)`.
    EmbeddingA,
    /// B of an embedding: `(hidden, rank)`.
    EmbeddingB,
    /// Weight in place of that of the model.
    Weight,
    /// Bias in place of that of the model.
    Bias,
}

/// A matrix or vector of f32.
#[derive(Debug, Clone)]
pub(super) struct Values {
    /// Dimensions: one or two.
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
    /// Type in the file.
    pub dtype: DType,
}

impl Values {
    /// Returns the rows and columns of a matrix.
    pub fn matrix(&self) -> Option<(usize, usize)> {
        match self.shape[..] {
            [rows, cols] => Some((rows, cols)),
            _ => None,
        }
    }
}

/// The modules that an adapter changes, by the names in the model that was trained, with their parts.
pub(super) type Modules = BTreeMap<String, BTreeMap<ModulePart, Values>>;

/// Lists the tensors of a file by module and part, without reading their values.
///
/// # Errors
/// The file is no safetensors file, or a tensor has a name, type or shape that an adapter cannot have.
pub(super) fn list(file: &InputFile, path: &Path) -> Result<BTreeMap<String, BTreeMap<ModulePart, SourceTensor>>> {
    let mut modules: BTreeMap<String, BTreeMap<ModulePart, SourceTensor>> = BTreeMap::new();
    for tensor in safetensors::list(file, 0).at(path)? {
        let name = tensor.name.clone();
        check(&tensor).at(path).tensor(&name)?;
        let (module, part) = place(&name)?;
        if modules.entry(module.to_string()).or_default().insert(part, tensor).is_some() {
            return Err(Error::corrupt("found this part of a module twice").at(path).tensor(name));
        }
    }
    if modules.is_empty() { Err(Error::corrupt("found no tensor").at(path)) } else { Ok(modules) }
}

/// Reads all tensors of a file.
///
/// # Errors
/// The errors of [`list()`], or a number is not finite.
pub(super) fn read(path: &Path) -> Result<Modules> {
    let file = InputFile::open(path)?;
    let one =
        |(part, tensor): (ModulePart, SourceTensor)| Ok((part, values(&file, &tensor).at(path).tensor(&tensor.name)?));
    let modules = list(&file, path)?.into_par_iter().map(|(module, parts)| {
        let parts: Vec<(ModulePart, Values)> = parts.into_par_iter().map(one).collect::<Result<_>>()?;
        Ok((module, parts.into_iter().collect()))
    });
    modules.collect()
}

/// Splits the name of a tensor into the name of its module and the part.
fn place(name: &str) -> Result<(&str, ModulePart)> {
    let inner = name.strip_prefix(PREFIX);
    let placed = inner.and_then(|inner| {
        let found = PARTS.iter().find_map(|(end, part)| Some((inner.strip_suffix(end)?, *part)));
        found.filter(|(module, _)| !module.is_empty() && !module.contains("lora_"))
    });
    placed.ok_or_else(|| {
        Error::unsupported(format!(
            "found a tensor that is no part of a LoRA adapter, expected names such as `{PREFIX}lm_head.lora_A.weight`"
        ))
        .tensor(name)
        .help(format!("save the adapter with `save_pretrained` of PEFT, which writes {FILE}"))
    })
}

/// Refuses shapes and types that an adapter cannot have.
fn check(tensor: &SourceTensor) -> Result<()> {
    if !matches!(tensor.shape.len(), 1 | 2) || tensor.shape.contains(&0) {
        let found = format!("found shape {:?}, expected one or two dimensions of at least 1", tensor.shape);
        return Err(Error::corrupt(found));
    }
    if !matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(Error::unsupported(format!("found numbers of {}, expected f32, f16 or bf16", tensor.dtype)));
    }
    Ok(())
}

/// Reads the values of a tensor.
fn values(file: &InputFile, tensor: &SourceTensor) -> Result<Values> {
    let mut bytes = vec![0; tensor.nbytes];
    tensor.read(file, 0, &mut bytes)?;
    let mut values = vec![0.0; tensor.nbytes / tensor.dtype.size()];
    decode_floats(tensor.dtype, &bytes, &mut values)?;
    match values.iter().find(|value| !value.is_finite()) {
        Some(value) => Err(Error::corrupt(format!("found {value}, expected finite numbers"))),
        None => Ok(Values { shape: tensor.shape.clone(), values, dtype: tensor.dtype }),
    }
}
