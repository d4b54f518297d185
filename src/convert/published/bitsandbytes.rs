//! `bitsandbytes`: 4-bit codes in blocks of the flattened matrix (NF4, FP4), and INT8 with a scale per row
//! (bitsandbytes 0.50, `functional.py`).
//!
//! 4 bit: `M.weight` holds two codes a byte, high nibble first, of all rows in a sequence; `M.weight.quant_map` the 16
//! values, `M.weight.absmax` the scale of each block. With double quantization, absmax is U8 and stands for
//! `nested_quant_map[code] * nested_absmax[i / 256] + nested_offset`. `M.weight.quant_state.bitsandbytes__nf4` is JSON
//! with the shape and the sizes of blocks. Blocks run over the ends of rows, and maps are taken from the file.
//!
//! 8 bit: `M.weight` I8 and `M.SCB` F32 `(out)`: the value is `(code * SCB) * (1 / 127)`.

use super::coded::{Coded, Codes, Grid, Meaning, Packing, ScaleValues, Scales};
use super::format::{Describe, Format, Settings};
use super::parts::Parts;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::DType;
use crate::error::{Error, Result};
use serde::Deserialize;

pub(super) const BITSANDBYTES: Format = Format {
    name: "bitsandbytes",
    methods: &["bitsandbytes"],
    markers: &[".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4", ".SCB"],
    excluded: &["llm_int8_skip_modules"],
    open,
    ..Format::NONE
};

/// 1 / 127, as `int8_vectorwise_dequant` has it.
const ONE_127TH: f32 = 0.007_874_016;

/// Fields of `quant_state` that decide about values.
#[derive(Deserialize)]
struct QuantState {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

fn open(_: &Settings<'_>) -> Result<Describe> {
    Ok(Box::new(|parts, marker| match marker.name.ends_with(".SCB") {
        true => int8(parts, marker),
        false => four_bit(parts, marker),
    }))
}

fn int8(parts: &Parts<'_>, scale: &SourceTensor) -> Result<Coded> {
    let weight = parts.need(".weight")?;
    let [rows, cols] = parts.matrix(weight)?;
    parts.check(weight, &[DType::I8], &[rows, cols])?;
    parts.check(scale, &[DType::F32], &[rows])?;
    let mut others = Vec::new();
    if let Some(format) = parts.get(".weight_format") {
        if format.dtype != DType::U8 || parts.bytes(format)? != [0] {
            return Err(parts.wrong(format, "U8 with the value 0, which stands for rows"));
        }
        others.push(format.name.clone());
    }
    let scales = Scales::blocks(ScaleValues::Floats(scale.clone()), 1, cols, cols);
    let codes = Codes::new(weight, Packing::Bytes, 8, Meaning::Signed);
    let scales = Scales { factor: ONE_127TH, ..scales };
    let name = &weight.name;
    Ok(Coded { others, ..Coded::new(name, &[rows, cols], "bitsandbytes int8", codes, scales) })
}

fn four_bit(parts: &Parts<'_>, marker: &SourceTensor) -> Result<Coded> {
    let (weight, state) = (parts.need(".weight")?, state(parts, marker)?);
    let (shape, elements) = match state.shape[..] {
        [rows, cols] if rows > 0 && cols > 0 => ([rows, cols], rows.checked_mul(cols)),
        _ => ([0, 0], None),
    };
    let wrong = || parts.wrong(marker, "a shape and sizes of blocks that fit the codes");
    let elements = elements.filter(|n| n.div_ceil(2) == weight.nbytes).ok_or_else(wrong)?;
    let block = state.blocksize;
    if block == 0 || !block.is_power_of_two() {
        return Err(wrong());
    }
    let (blocks, absmax, map) = (elements.div_ceil(block), parts.need(".weight.absmax")?, ".weight.quant_map");
    let map: [f32; 16] = parts.numbers(parts.need(map)?, 16)?.try_into().map_err(|_| wrong())?;
    let mut others = vec![marker.name.clone(), format!("{}.weight.quant_map", parts.stem)];
    let values = match state.nested_blocksize {
        None => {
            parts.check(absmax, &[DType::F32], &[blocks])?;
            ScaleValues::Floats(absmax.clone())
        }
        Some(nested) => {
            let (outer, offset) = (parts.need(".weight.nested_absmax")?, state.nested_offset.unwrap_or(0.0));
            if nested == 0 || !offset.is_finite() {
                return Err(wrong());
            }
            parts.check(absmax, &[DType::U8], &[blocks])?;
            parts.check(outer, &[DType::F32], &[blocks.div_ceil(nested)])?;
            let map = parts.numbers(parts.need(".weight.nested_quant_map")?, 256)?.into();
            others.push(format!("{}.weight.nested_quant_map", parts.stem));
            ScaleValues::Nested { codes: absmax.clone(), map, absmax: outer.clone(), block: nested, offset }
        }
    };
    let codes = Codes::new(weight, Packing::HighNibbleFirst, 4, Meaning::Table(Box::new(map)));
    let scales = Scales { values, grid: Grid::Flat { length: block }, groups: shape[1] / block + 2, factor: 1.0 };
    let form = format!("bitsandbytes {}", state.quant_type);
    Ok(Coded { others, ..Coded::new(&weight.name, &shape, form, codes, scales) })
}

/// Reads the state of a 4-bit matrix, which is JSON in a tensor of bytes.
fn state(parts: &Parts<'_>, marker: &SourceTensor) -> Result<QuantState> {
    let bytes = parts.bytes(marker)?;
    let state: QuantState = serde_json::from_slice(&bytes).map_err(|e| {
        Error::corrupt(format!("invalid JSON: {e}"))
            .at(parts.shards.path(marker))
            .tensor(&marker.name)
            .help("the file is damaged; get it again")
    })?;
    match state.quant_type.as_str() {
        "nf4" | "fp4" => Ok(state),
        _ => Err(parts.wrong(marker, "quant_type nf4 or fp4 in it")),
    }
}
