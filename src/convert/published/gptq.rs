//! `gptq`: integers of 2, 3, 4 or 8 bits, packed along the inputs (GPTQModel, `nn_modules/qlinear/`).
//!
//! `M.qweight` I32 `(in * bits / 32, out)` holds a dense bit stream for each output, `M.qzeros` I32
//! `(groups, out * bits / 32)` the zero points, `M.scales` `(groups, out)`, `M.g_idx` I32 `(in)` the group of each
//! input, in any order if `desc_act` is true. The first version stores zero points minus one. Settings may differ by
//! module (`dynamic`, keyed by regular expressions; `-:` excludes modules).

use super::coded::{Coded, Codes, Grid, Meaning, Packing, ScaleValues, Scales, ZeroOrder, Zeros};
use super::format::{Describe, Format, Settings};
use super::names::{Pattern, Patterns};
use super::parts::Parts;
use crate::convert::arch::Fields;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::DType;
use crate::error::Result;
use serde_json::Value;

pub(super) const GPTQ: Format = Format {
    name: "GPTQ",
    methods: &["gptq", "gptqmodel"],
    file: Some("quantize_config.json"),
    markers: &[".qweight"],
    excluded: &["modules_to_not_convert"],
    open,
    ..Format::NONE
};

/// Settings of a module.
#[derive(Debug, Clone, Copy)]
pub(super) struct Module {
    pub bits: u32,
    /// Inputs of a group; `None` for all.
    pub group: Option<usize>,
    /// Number that is added to stored zero points: 1 in the first version of the format.
    pub add: i32,
}

fn open(settings: &Settings<'_>) -> Result<Describe> {
    let fields = settings.fields()?;
    let add = match fields.word_opt("checkpoint_format")? {
        None | Some("gptq") => 1,
        Some("gptq_v2") => 0,
        Some(_) => return Err(fields.unsupported("checkpoint_format", "expected gptq or gptq_v2")),
    };
    if !matches!(fields.word_opt("pack_dtype")?, None | Some("int32" | "torch.int32")) {
        return Err(fields.unsupported("pack_dtype", "expected int32"));
    }
    let usual = Module { bits: bits(&fields)?, group: group(&fields, "group_size")?, add };
    let mut patterns = Patterns::default();
    let mut overrides: Vec<(Pattern, Module)> = Vec::new();
    if let Some(dynamic) = fields.object_opt("dynamic")? {
        for key in dynamic.keys().filter(|key| !key.starts_with("-:")) {
            let own = dynamic.object_opt(key)?.ok_or_else(|| dynamic.wrong(key, "an object"))?;
            let own_bits = if own.get("bits").is_some() { bits(&own)? } else { usual.bits };
            let own_group = if own.get("group_size").is_some() { group(&own, "group_size")? } else { usual.group };
            let pattern = patterns.compile(key.strip_prefix("+:").unwrap_or(key))?;
            overrides.push((pattern, Module { bits: own_bits, group: own_group, add }));
        }
    }
    Ok(Box::new(move |parts, qweight| {
        let own = overrides.iter().find(|(pattern, _)| pattern.matches(parts.stem));
        matrix(parts, qweight, own.map_or(usual, |(_, own)| *own), "GPTQ")
    }))
}

/// Reads the number of bits of a code.
///
/// # Errors
/// It is none that the format has.
pub(super) fn bits(fields: &Fields<'_>) -> Result<u32> {
    match fields.count("bits")? {
        bits @ (2 | 3 | 4 | 8) => Ok(bits as u32),
        _ => Err(fields.unsupported("bits", "expected 2, 3, 4 or 8")),
    }
}

/// Reads a group size; -1 stands for whole rows.
///
/// # Errors
/// It is no whole number above zero.
pub(super) fn group(fields: &Fields<'_>, key: &str) -> Result<Option<usize>> {
    match (fields.get(key).and_then(Value::as_i64), fields.count_opt(key)) {
        (Some(-1), _) | (None, Ok(None)) => Ok(None),
        (_, Ok(Some(group))) if group > 0 => Ok(Some(group)),
        _ => Err(fields.wrong(key, "a number above zero, or -1")),
    }
}

/// Describes a matrix.
///
/// # Errors
/// A tensor has another type or shape than the settings say.
pub(super) fn matrix(parts: &Parts<'_>, qweight: &SourceTensor, module: Module, form: &str) -> Result<Coded> {
    let ([words, rows], bits) = (parts.matrix(qweight)?, module.bits as usize);
    let cols = words.checked_mul(32).filter(|all| all.is_multiple_of(bits)).map(|all| all / bits);
    let cols = cols.ok_or_else(|| parts.wrong(qweight, format!("codes of {bits} bits in whole words")))?;
    parts.check(qweight, &[DType::I32], &qweight.shape)?;
    let width = parts.group(qweight, module.group, cols)?;
    let groups = cols / width;
    let (scales, qzeros) = (parts.need(".scales")?, parts.need(".qzeros")?);
    parts.check_floats(scales, &[&[groups, rows]])?;
    let zero_words = rows.checked_mul(bits).map_or(0, |all| all.div_ceil(32));
    parts.check(qzeros, &[DType::I32], &[groups, zero_words])?;
    let codes = Codes::new(qweight, Packing::AlongInputs, module.bits, Meaning::Unsigned);
    let values = ScaleValues::Floats(scales.clone());
    let scales = Scales { values, grid: Grid::Transposed { width }, groups, factor: 1.0 };
    let name = format!("{}.weight", parts.stem);
    let mut coded = Coded::new(&name, &[rows, cols], format!("{form} {bits} bit"), codes, scales);
    coded.zeros = Zeros::Packed { tensor: qzeros.clone(), order: ZeroOrder::AlongOutputs, add: module.add };
    if let Some(index) = parts.get(".g_idx") {
        parts.check(index, &[DType::I32], &[cols])?;
        coded.index = Some(index.clone());
    }
    Ok(coded)
}
