//! MLX: integers of 2 to 8 bits with a scale and an offset for each group (`mx.quantize`). `config.json` has the
//! settings under `quantization`, by module where they differ.
//!
//! `M.weight` U32 `(out, in * bits / 32)` is a dense bit stream for each row, `M.scales` and `M.biases` `(out,
//! groups)`; the value is `code * scale + bias`. Embeddings and the output matrix are quantized, too. MLX files are
//! converted models: some families have other names there, or norms with 1 added, so only families that keep both are
//! read.

use super::coded::{Coded, Codes, Meaning, Packing, ScaleValues, Scales, Zeros};
use super::format::{Describe, Format, Settings};
use super::names::spellings;
use super::parts::Parts;
use crate::convert::arch::Fields;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::DType;
use crate::error::{Error, Result};
use std::collections::BTreeMap;

pub(super) const MLX: Format = Format { name: "MLX", methods: &["mlx"], markers: &[".scales"], open, ..Format::NONE };

/// Model types whose MLX files have the names and norms of Hugging Face.
const FAMILIES: [&str; 4] = ["llama", "qwen2", "qwen3", "mistral"];

/// Bits and group size of a module.
#[derive(Debug, Clone, Copy)]
struct Module {
    bits: u32,
    group: usize,
}

fn open(settings: &Settings<'_>) -> Result<Describe> {
    let model_type = settings.model_type.unwrap_or_default();
    if !FAMILIES.contains(&model_type) {
        let known = FAMILIES.join(", ");
        let found = format!("found an MLX checkpoint of `{model_type:.60}`, expected one of {known}");
        return Err(Error::unsupported(found)
            .tensor("model_type")
            .help("convert from the checkpoint that the MLX files were made from"));
    }
    let fields = settings.fields()?;
    if !matches!(fields.word_opt("mode")?, None | Some("affine")) {
        return Err(fields.unsupported("mode", "expected affine"));
    }
    let usual = module(&fields)?;
    let mut own = BTreeMap::new();
    for key in fields.keys().filter(|key| fields.get(key).is_some_and(|value| value.is_object())) {
        if let Some(object) = fields.object_opt(key)? {
            own.insert(key.to_string(), module(&object)?);
        }
    }
    Ok(Box::new(move |parts, scales| {
        let module = spellings(parts.stem).find_map(|name| own.get(&name).copied()).unwrap_or(usual);
        matrix(parts, scales, module)
    }))
}

fn module(fields: &Fields<'_>) -> Result<Module> {
    let bits = match fields.count("bits")? {
        bits @ (2..=6 | 8) => bits as u32,
        _ => return Err(fields.unsupported("bits", "expected 2, 3, 4, 5, 6 or 8")),
    };
    match fields.count("group_size")? {
        0 => Err(fields.wrong("group_size", "a number above zero")),
        group => Ok(Module { bits, group }),
    }
}

fn matrix(parts: &Parts<'_>, scales: &SourceTensor, module: Module) -> Result<Coded> {
    let (weight, biases, bits) = (parts.need(".weight")?, parts.need(".biases")?, module.bits as usize);
    let [rows, words] = parts.matrix(weight)?;
    parts.check(weight, &[DType::U32, DType::I32], &[rows, words])?;
    let cols = words.checked_mul(32).filter(|all| all.is_multiple_of(bits)).map(|all| all / bits);
    let cols = cols.ok_or_else(|| parts.wrong(weight, format!("codes of {bits} bits in whole words")))?;
    let width = parts.group(weight, Some(module.group), cols)?;
    for tensor in [scales, biases] {
        parts.check_floats(tensor, &[&[rows, cols / width]])?;
    }
    let codes = Codes::new(weight, Packing::Stream, module.bits, Meaning::Unsigned);
    let scales = Scales::blocks(ScaleValues::Floats(scales.clone()), 1, width, cols);
    let mut coded = Coded::new(&weight.name, &[rows, cols], format!("MLX {bits} bit"), codes, scales);
    coded.zeros = Zeros::Offsets(biases.clone());
    Ok(coded)
}
