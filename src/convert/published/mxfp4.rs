//! `mxfp4`: the experts of gpt-oss. `NAME_blocks` U8 `(experts, out, in / 32, 16)` holds two E2M1 codes a byte, low
//! nibble first, and `NAME_scales` U8 `(experts, out, in / 32)` their powers of two. The directory `original/` has the
//! same under `NAME.blocks` and `NAME.scales`. No setting is needed: the tensors say everything.
//!
//! `ptq` keeps these codes, because the model was trained with them.

use super::coded::{Coded, Codes, Meaning, Packing, ScaleValues, Scales};
use super::format::{Describe, Format, Settings};
use super::parts::Parts;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::DType;
use crate::error::Result;
use crate::scheme::BLOCK;

pub(super) const MXFP4: Format = Format {
    name: "MXFP4",
    methods: &["mxfp4"],
    markers: &[BLOCKS, BLOCKS_OF_ORIGINAL],
    may_be_floats: true,
    needs_settings: false,
    open,
    ..Format::NONE
};

const BLOCKS: &str = "_blocks";
const BLOCKS_OF_ORIGINAL: &str = ".blocks";

fn open(_: &Settings<'_>) -> Result<Describe> {
    Ok(Box::new(|parts, blocks| {
        let [.., groups, bytes] = blocks.shape[..] else { return Err(parts.wrong(blocks, "blocks of MXFP4")) };
        let lead = &blocks.shape[..blocks.shape.len() - 2];
        let is_code = blocks.dtype == DType::U8 && bytes == BLOCK / 2 && !lead.is_empty() && blocks.nbytes > 0;
        let Some(cols) = groups.checked_mul(BLOCK).filter(|_| is_code && lead.len() <= 2) else {
            return Err(parts.wrong(blocks, format!("U8 [.., out, in / {BLOCK}, {}]", BLOCK / 2)));
        };
        let ending = if blocks.name.ends_with(BLOCKS) { "_scales" } else { ".scales" };
        describe(parts, blocks, parts.need(ending)?, &[lead, &[cols]].concat())
    }))
}

fn describe(parts: &Parts<'_>, blocks: &SourceTensor, scales: &SourceTensor, shape: &[usize]) -> Result<Coded> {
    let cols = shape[shape.len() - 1];
    parts.check(scales, &[DType::U8], &[&shape[..shape.len() - 1], &[cols / BLOCK]].concat())?;
    let codes = Codes::new(blocks, Packing::Stream, 4, Meaning::E2m1);
    let scales = Scales::blocks(ScaleValues::E8m0(scales.clone()), 1, BLOCK, cols);
    Ok(Coded { is_final: true, ..Coded::new(parts.stem, shape, "MXFP4", codes, scales) })
}

/// Returns names and shapes of the tensors of codes and scales for a tensor of this name and shape, whose number of
/// columns is a multiple of 32.
pub fn parts_of(name: &str, shape: &[usize]) -> [(String, Vec<usize>); 2] {
    let (cols, lead) = shape.split_last().expect("a matrix has columns");
    assert!(cols.is_multiple_of(BLOCK), "{name}: {cols} columns");
    // In `original/` names of matrices end in `_weight`.
    let separator = if name.ends_with("_weight") { '.' } else { '_' };
    let with = |tail: &[usize]| [lead, tail].concat();
    [
        (format!("{name}{separator}blocks"), with(&[cols / BLOCK, BLOCK / 2])),
        (format!("{name}{separator}scales"), with(&[cols / BLOCK])),
    ]
}
