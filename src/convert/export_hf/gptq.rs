//! GPTQ, first version of the format: symmetric integers of 4 or 8 bits, without reordered columns.
//!
//! A weight (out, in) of n-bit integers is transposed: `qweight` I32 (in * n / 32, out) holds in word r of column o the
//! codes of inputs 32 / n * r and following, lowest bits first, each the signed integer plus 2^(n-1). `scales` F16
//! (groups, out). `qzeros` I32 (groups, out * n / 32) holds the zero points minus 1, here 2^(n-1) - 1. `g_idx` I32 (in)
//! is the group of each input. Value = (code - 2^(n-1)) * scale. Source: GPTQModel 7, `nn_modules/qlinear`.

use super::format::{Stored, describe, group_size, note_small_groups};
use super::matrix::ExportedMatrix;
use super::plan::Module;
use crate::convert::executor::TaskOutput;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::scheme::{CodeMap, ScaleType};
use serde_json::{Map, Value, json};

/// Bytes of words that are collected before they are written. The weight is read once for each such piece.
const BAND_BYTES: usize = 16 << 20;
/// Sections of a module.
const WEIGHTS: usize = 0;
const ZEROS: usize = 1;
const SCALES: usize = 2;
const GROUPS: usize = 3;

/// Codes of a module as GPTQ stores them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Codes {
    bits: usize,
    /// Bits by which the codes of the pack differ.
    flip: u8,
    /// Number of inputs that share a scale; `None` for all.
    group: Option<usize>,
}

fn codes(module: &Module) -> Result<Codes> {
    let refused = |why: String| Err(Error::unsupported(why));
    let Some(spec) = module.spec else { return refused("found floats, expected codes".into()) };
    let (bits, flip) = match spec.code_map() {
        CodeMap::Biased(8) => (4, 0),
        CodeMap::Bytes => (8, 0x80),
        _ => return refused(format!("found {}, expected symmetric integers of 4 or 8 bits for GPTQ", describe(&spec))),
    };
    if spec.scale_dtype != ScaleType::F16 {
        return refused("found f32 scales, expected f16 scales, which GPTQ has".into());
    }
    let per_word = 32 / bits;
    if !(module.cols.is_multiple_of(per_word) && module.rows.is_multiple_of(per_word)) {
        let found = format!("found a matrix of {} x {} weights", module.rows, module.cols);
        return refused(format!("{found}, expected multiples of {per_word} for {bits} bits of GPTQ"));
    }
    Ok(Codes { bits, flip, group: group_size(&spec, module.cols)? })
}

/// Returns the tensors of a module.
///
/// # Errors
/// GPTQ has no equivalent of the codes, scales or shape.
pub(super) fn tensors(module: &Module) -> Result<Vec<Stored>> {
    let (Codes { bits, group, .. }, Module { rows, cols, .. }) = (codes(module)?, module);
    let (groups, per_word) = (group.map_or(1, |size| cols / size), 32 / bits);
    let stored = |name, dtype, shape: &[usize]| Stored { name, dtype, shape: shape.to_vec() };
    Ok(vec![
        stored("qweight", DType::I32, &[cols / per_word, *rows]),
        stored("qzeros", DType::I32, &[groups, rows / per_word]),
        stored("scales", DType::F16, &[groups, *rows]),
        stored("g_idx", DType::I32, &[*cols]),
    ])
}

/// Writes the tensors of a module. Words of some inputs and all outputs are collected at a time.
pub(super) fn fill(module: &Module, matrix: &mut ExportedMatrix<'_>, out: &mut TaskOutput<'_>) -> Result<()> {
    let (Codes { bits, flip, group }, Module { rows, cols, .. }) = (codes(module)?, module);
    let (groups, per_word) = (group.map_or(1, |size| cols / size), 32 / bits);
    let (all, height) = (cols / per_word, (BAND_BYTES / (4 * rows)).max(1));
    let mut scales = vec![0; 2 * groups * rows];
    let mut words = Vec::new();
    for first in (0..all).step_by(height) {
        let band = first..all.min(first + height);
        words.clear();
        words.resize(4 * band.len() * rows, 0);
        matrix.codes(|row, coded| {
            for (word, codes) in coded.codes.chunks_exact(per_word).enumerate().take(band.end).skip(band.start) {
                let packed = codes.iter().rev().fold(0, |word, code| word << bits | u32::from(code ^ flip));
                words[4 * ((word - first) * rows + row)..][..4].copy_from_slice(&packed.to_le_bytes());
            }
            for (group, scale) in coded.scales.chunks_exact(2).enumerate() {
                scales[2 * (group * rows + row)..][..2].copy_from_slice(scale);
            }
            Ok(())
        })?;
        out.append(WEIGHTS, &words)?;
    }
    let zero = if bits == 4 { 0x77 } else { 0x7f };
    out.append(ZEROS, &vec![zero; 4 * groups * (rows / per_word)])?;
    out.append(SCALES, &scales)?;
    let group_of = |col: usize| (col / group.unwrap_or(*cols)) as u32;
    let indices: Vec<u8> = (0..*cols).flat_map(|col| group_of(col).to_le_bytes()).collect();
    out.append(GROUPS, &indices)
}

/// Returns `quantization_config`.
///
/// # Errors
/// The modules differ in bits or groups, for which the format has one number each.
pub(super) fn config(modules: &[&Module], unquantized: &[String]) -> Result<Value> {
    let first = codes(modules[0])?;
    for module in modules {
        let Codes { bits, group, .. } = codes(module)?;
        if (bits, group) != (first.bits, first.group) {
            let of = |bits, group: Option<usize>| format!("{bits} bits, group size {}", group.map_or(-1, |n| n as i64));
            let (found, expected) = (of(bits, group), of(first.bits, first.group));
            let expected = format!("expected {expected} as in `{}`", modules[0].name);
            return Err(Error::unsupported(format!("found {found}, {expected}: GPTQ has one choice for all matrices"))
                .tensor(&module.name)
                .help("use --format compressed-tensors, which has groups of matrices"));
        }
    }
    // Keys are regular expressions on the names of modules; `-:` excludes them.
    let exclude = |name: &String| (format!("-:^{}$", name.replace('.', "\\.")), json!({}));
    let dynamic: Map<String, Value> = unquantized.iter().filter(|name| *name != "lm_head").map(exclude).collect();
    let mut config = json!({
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": first.bits,
        "group_size": first.group.map_or(-1, |size| size as i64),
        "sym": true,
        "desc_act": false,
        "static_groups": false,
        "true_sequential": true,
        "lm_head": modules.iter().any(|module| module.name == "lm_head"),
        "meta": {"quantizer": [concat!("iec:", env!("CARGO_PKG_VERSION"))]},
    });
    if !dynamic.is_empty() {
        config["dynamic"] = Value::Object(dynamic);
    }
    Ok(config)
}

/// Returns notes about the programs that read the format.
pub(super) fn notes(modules: &[&Module]) -> Vec<String> {
    note_small_groups(modules).into_iter().collect()
}
