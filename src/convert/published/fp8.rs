//! `fp8`: FP8 (e4m3) codes with a scale for each block of 128 x 128 elements, for each row, or for the tensor, as
//! published by DeepSeek, Qwen, GLM and Mistral (`transformers`, `integrations/finegrained_fp8.py`).
//!
//! `M.weight` F8_E4M3 `(out, in)` and `M.weight_scale_inv`, which is a multiplier in spite of its name: `(ceil(out /
//! 128), ceil(in / 128))`, `(out, 1)` or a single number. Blocks at the end are cut off, so 576 rows have 5 rows of
//! scales. Scales are floats, or powers of two as F8_E8M0 or U8. Stacks of experts have blocks for each.

use super::coded::{Coded, Codes, Meaning, Packing, ScaleValues, Scales};
use super::format::{Describe, Format, Settings};
use super::parts::Parts;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::DType;
use crate::error::{Error, Result};

pub(super) const FP8: Format = Format {
    name: "FP8",
    methods: &["fp8"],
    markers: &["_scale_inv"],
    excluded: &["modules_to_not_convert", "ignored_layers"],
    open,
    ..Format::NONE
};

fn open(settings: &Settings<'_>) -> Result<Describe> {
    let fields = settings.fields()?;
    match fields.word_opt("fmt")? {
        None | Some("e4m3" | "e4m3fn" | "float8_e4m3fn") => {}
        Some(_) => return Err(fields.unsupported("fmt", "expected e4m3")),
    }
    let block = match fields.counts_opt("weight_block_size")?.as_deref() {
        None => None,
        Some(&[height, width]) if height > 0 && width > 0 => Some([height, width]),
        Some(_) => return Err(fields.wrong("weight_block_size", "two numbers above zero")),
    };
    Ok(Box::new(move |parts, scale| {
        let weight = parts.need("")?;
        let scales = scales(parts, weight, scale, block)?;
        Ok(matrix(parts.stem, weight, "FP8", scales))
    }))
}

/// Describes a matrix of FP8 codes.
pub(super) fn matrix(name: &str, weight: &SourceTensor, form: &str, scales: Scales) -> Coded {
    let codes = Codes::new(weight, Packing::Bytes, 8, Meaning::E4m3);
    Coded::new(name, &weight.shape, form, codes, scales)
}

/// Describes the scales of a matrix or stack of matrices of FP8 codes by their shape: one for each block of the size
/// `block`, for each row, or for the matrix.
///
/// # Errors
/// The codes are no FP8, or the scales have another shape or type.
pub(super) fn scales(
    parts: &Parts<'_>,
    weight: &SourceTensor,
    scale: &SourceTensor,
    block: Option<[usize; 2]>,
) -> Result<Scales> {
    let [lead @ .., rows, cols] = &weight.shape[..] else { return Err(parts.wrong(weight, "a matrix")) };
    let (rows, cols) = (*rows, *cols);
    if weight.dtype != DType::F8E4M3 || weight.nbytes == 0 || lead.len() > 1 {
        return Err(parts.wrong(weight, "a matrix of F8_E4M3"));
    }
    let values = match scale.dtype {
        dtype if dtype.is_float() => ScaleValues::Floats(scale.clone()),
        DType::F8E8M0 | DType::U8 => ScaleValues::E8m0(scale.clone()),
        _ => return Err(parts.wrong(scale, "floats or F8_E8M0")),
    };
    let with = |tail: &[usize]| [lead, tail].concat();
    let fits = |[height, width]: [usize; 2]| scale.shape == with(&[rows.div_ceil(height), cols.div_ceil(width)]);
    let is_single = lead.is_empty() && scale.shape.iter().product::<usize>() == 1;
    let by_row = scale.shape == with(&[rows, 1]) || scale.shape == with(&[rows]);
    let [height, width] = match block {
        Some(block) if fits(block) => block,
        _ if is_single || fits([rows, cols]) => [rows, cols],
        _ if by_row => [1, cols],
        Some([height, width]) => {
            let blocks = with(&[rows.div_ceil(height), cols.div_ceil(width)]);
            return Err(parts.wrong(scale, format!("shape {blocks:?} for blocks of {height} x {width}")));
        }
        None => return Err(parts.wrong(scale, format!("one scale, or shape {:?}", with(&[rows, 1])))),
    };
    Ok(Scales::blocks(values, height, width, cols))
}

/// Refuses e4m3fnuz, whose codes have other values, by the name that some settings give it.
///
/// # Errors
/// The word names it.
pub(super) fn refuse_fnuz(word: &str) -> Result<()> {
    match word.contains("fnuz") {
        true => Err(Error::unsupported("found FP8 of the kind e4m3fnuz, expected e4m3fn")
            .help("use a checkpoint that was not converted for AMD GPUs")),
        false => Ok(()),
    }
}
