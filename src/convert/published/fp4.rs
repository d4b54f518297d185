//! FP4 codes (E2M1), two per byte, low nibble first: NVFP4 with an e4m3 scale for each 16 columns and a float for the
//! tensor, and MXFP4 with a power of two for each 32 columns.

use super::coded::{Coded, Codes, Meaning, Packing, ScaleValues, Scales};
use super::parts::Parts;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::DType;
use crate::error::Result;
use crate::scheme::BLOCK;

/// Columns that share a scale of NVFP4.
const NVFP4_GROUP: usize = 16;

/// Describes an NVFP4 matrix: `packed` U8 `(out, in / 2)`, scales F8_E4M3 `(out, in / 16)`, and a float that multiplies
/// them, or `divides` them.
///
/// # Errors
/// A tensor has another type or shape.
pub(super) fn nvfp4(
    name: &str,
    parts: &Parts<'_>,
    packed: &SourceTensor,
    [groups, tensor]: [&SourceTensor; 2],
    divides: bool,
) -> Result<Coded> {
    let [rows, cols] = shape(parts, packed)?;
    let width = parts.group(packed, Some(NVFP4_GROUP), cols)?;
    parts.check(groups, &[DType::F8E4M3], &[rows, cols / width])?;
    parts.check(tensor, &[DType::F32], &tensor.shape)?;
    parts.check_floats(tensor, &[&[1], &[]])?;
    let values = ScaleValues::TwoLevels { groups: groups.clone(), tensor: tensor.clone(), divides };
    let codes = Codes::new(packed, Packing::Stream, 4, Meaning::E2m1);
    Ok(Coded::new(name, &[rows, cols], "NVFP4", codes, Scales::blocks(values, 1, width, cols)))
}

/// Describes an MXFP4 matrix: `packed` U8 `(out, in / 2)`, scales U8 or F8_E8M0 `(out, in / 32)`.
///
/// # Errors
/// A tensor has another type or shape.
pub(super) fn mxfp4(name: &str, parts: &Parts<'_>, packed: &SourceTensor, scale: &SourceTensor) -> Result<Coded> {
    let [rows, cols] = shape(parts, packed)?;
    let width = parts.group(packed, Some(BLOCK), cols)?;
    parts.check(scale, &[DType::U8, DType::F8E8M0], &[rows, cols / width])?;
    let codes = Codes::new(packed, Packing::Stream, 4, Meaning::E2m1);
    let scales = Scales::blocks(ScaleValues::E8m0(scale.clone()), 1, width, cols);
    Ok(Coded::new(name, &[rows, cols], "MXFP4", codes, scales))
}

/// Returns the shape of the matrix whose codes are in `packed`.
fn shape(parts: &Parts<'_>, packed: &SourceTensor) -> Result<[usize; 2]> {
    let [rows, bytes] = parts.matrix(packed)?;
    match (packed.dtype, bytes.checked_mul(2)) {
        (DType::U8, Some(cols)) => Ok([rows, cols]),
        _ => Err(parts.wrong(packed, "U8 with two codes in a byte")),
    }
}
