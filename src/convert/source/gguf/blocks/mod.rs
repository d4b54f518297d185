//! Decodes the blocks of GGML's types and converts those that equal a scheme of this program.
//!
//! [`dequantize`] computes the values of any supported type in f32 as GGML does: every product of scales and codes is
//! exact, so only the sum with a minimum rounds, once. [`to_row`] and [`from_row`] convert blocks of the types that
//! have an equivalent scheme here; they copy codes and scales, so no value changes.
//!
//! Layouts are those of `ggml-common.h`. In blocks of 32 with 4-bit codes, byte j holds element j in the low and
//! element j + 16 in the high nibble.

mod grids;
pub(super) mod iq;
pub(super) mod k;
pub(super) mod legacy;
pub(super) mod small;
mod super_block;

use super::foreign::undecodable;
use super::types::{GgmlType, Meaning};
use crate::dtype::{DType, decode_floats};
use crate::error::{Error, Result};
use crate::quant::block::{CodedRow, mxfp4, q4_0};
use crate::scheme::{BLOCK, QuantSpec, ScaleType, Scheme, TileLayout};
use half::f16;
use super_block::Form;

/// Returns the plain element type with the same bytes; `None` for quantized types.
pub fn plain(kind: GgmlType) -> Option<DType> {
    match kind.meaning() {
        Meaning::Plain(dtype) => Some(dtype),
        Meaning::Coded(_) | Meaning::Unread => None,
    }
}

/// Returns the scheme of this program that represents the type exactly, code by code; `None` if there is none.
pub fn scheme(kind: GgmlType) -> Option<QuantSpec> {
    let scheme = match kind {
        GgmlType::Q8_0 => return Some(QuantSpec::Q8_0),
        GgmlType::Q4_0 => Scheme::Q4_0,
        GgmlType::Q4_1 => Scheme::Q4_1,
        GgmlType::Q5_0 => Scheme::Int5,
        GgmlType::Q5_1 => Scheme::Q5_1,
        GgmlType::Q2_K => Scheme::Q2K,
        GgmlType::Q3_K => Scheme::Q3K,
        GgmlType::Q4_K => Scheme::Q4K,
        GgmlType::Q5_K => Scheme::Q5K,
        GgmlType::Q6_K => Scheme::Q6K,
        GgmlType::IQ4_NL => Scheme::Nl4,
        GgmlType::IQ4_XS => Scheme::Iq4Xs,
        GgmlType::MXFP4 => Scheme::Mxfp4,
        GgmlType::NVFP4 => Scheme::Nvfp4,
        _ => return None,
    };
    Some(QuantSpec::usual(scheme))
}

/// Returns the GGML type that represents a scheme exactly: the same codes, or those of 6 bits in bytes with the scale
/// of a group repeated in each of its blocks. `None` if there is none, as for zero points, f32 scales and those of
/// rows. Blocks of NVFP4 hold the codes and the scales of groups, but not the numbers of rows, which must be 1.
pub fn twin(spec: &QuantSpec) -> Option<GgmlType> {
    match spec.scheme {
        _ if matches!(spec.scale_dtype, ScaleType::F32 | ScaleType::I8Row) || !spec.symmetric => None,
        Scheme::Q4_0 | Scheme::Int4 => Some(GgmlType::Q4_0),
        Scheme::Int5 => Some(GgmlType::Q5_0),
        Scheme::Int6 | Scheme::Int8 => Some(GgmlType::Q8_0),
        Scheme::Mxfp4 => Some(GgmlType::MXFP4),
        Scheme::Nl4 => Some(GgmlType::IQ4_NL),
        Scheme::Q4_1 => Some(GgmlType::Q4_1),
        Scheme::Q5_1 => Some(GgmlType::Q5_1),
        Scheme::Q2K => Some(GgmlType::Q2_K),
        Scheme::Q3K => Some(GgmlType::Q3_K),
        Scheme::Q4K => Some(GgmlType::Q4_K),
        Scheme::Q5K => Some(GgmlType::Q5_K),
        Scheme::Q6K => Some(GgmlType::Q6_K),
        Scheme::Iq4Xs => Some(GgmlType::IQ4_XS),
        Scheme::Nvfp4 => Some(GgmlType::NVFP4),
        Scheme::Fp8 | Scheme::T2 | Scheme::T3 => None,
    }
}

/// Refuses a type that this program cannot decode.
pub fn check_supported(kind: GgmlType) -> Result<()> {
    match kind.meaning() {
        Meaning::Plain(_) | Meaning::Coded(_) => Ok(()),
        Meaning::Unread => Err(undecodable(kind)),
    }
}

/// Decodes whole blocks to f32 values.
///
/// # Errors
/// The type is not supported.
///
/// # Panics
/// `raw` and `out` do not hold the same number of elements.
pub fn dequantize(kind: GgmlType, raw: &[u8], out: &mut [f32]) -> Result<()> {
    check_supported(kind)?;
    assert_eq!(kind.row_bytes(out.len()), Some(raw.len()), "{} elements of {kind}", out.len());
    match kind.meaning() {
        Meaning::Plain(dtype) => decode_floats(dtype, raw, out),
        Meaning::Coded(decode) => {
            let blocks = raw.chunks_exact(kind.block_bytes());
            blocks.zip(out.chunks_exact_mut(kind.block())).for_each(|(raw, out)| decode(raw, out));
            Ok(())
        }
        Meaning::Unread => unreachable!("checked above"),
    }
}

/// Returns the layout of the super-blocks of a type; `None` for types without them, or that no scheme represents.
fn super_block(kind: GgmlType) -> Option<Form> {
    match kind {
        GgmlType::Q2_K => Some(super_block::Q2_K),
        GgmlType::Q3_K => Some(super_block::Q3_K),
        GgmlType::Q4_K => Some(super_block::Q4_K),
        GgmlType::Q5_K => Some(super_block::Q5_K),
        GgmlType::Q6_K => Some(super_block::Q6_K),
        GgmlType::IQ4_XS => Some(super_block::IQ4_XS),
        _ => None,
    }
}

/// Unpacks a row of blocks whose type has a [`scheme`] into the codes and scales that tiles hold.
///
/// # Errors
/// A scale or a minimum is NaN or infinite.
pub fn to_row(kind: GgmlType, raw: &[u8], row: &mut CodedRow) -> Result<()> {
    if let Some(form) = super_block(kind) {
        form.unpack(raw, row);
        return check_finite(kind, &row.supers);
    }
    if kind == GgmlType::NVFP4 {
        return small::unpack_nvfp4(raw, row);
    }
    let blocks = row.codes.len() / BLOCK;
    let (size, minimum) = (row.scales.len() / blocks, row.zeros.len() / blocks);
    let blocks = raw.chunks_exact(kind.block_bytes()).zip(row.codes.chunks_exact_mut(BLOCK));
    for (i, (raw, codes)) in blocks.enumerate() {
        let (scale, raw) = raw.split_at(size);
        let (zero, raw) = raw.split_at(minimum);
        row.scales[i * size..][..size].copy_from_slice(scale);
        row.zeros[i * minimum..][..minimum].copy_from_slice(zero);
        match kind {
            GgmlType::Q5_0 | GgmlType::Q5_1 => legacy::unpack_five_bits(raw, codes),
            GgmlType::Q8_0 => codes.copy_from_slice(raw),
            _ => q4_0::unpack(raw, codes),
        }
    }
    if kind == GgmlType::MXFP4 {
        return mxfp4::check_scales(&row.scales);
    }
    check_finite(kind, &row.scales)?;
    check_finite(kind, &row.zeros)
}

/// Returns an error if one of these fp16 numbers is NaN or infinite.
fn check_finite(kind: GgmlType, numbers: &[u8]) -> Result<()> {
    let wrong = numbers.as_chunks::<2>().0.iter().map(|bits| f16::from_le_bytes(*bits)).find(|x| !x.is_finite());
    wrong.map_or(Ok(()), |x| {
        Err(Error::corrupt(format!("found a scale or minimum of {x} in a block of {kind}, expected a finite number"))
            .help("the file is damaged; get it again"))
    })
}

/// Packs a row of codes and scales of a scheme with a [`twin`] into blocks of `kind`; the inverse of [`to_row`].
pub fn from_row(kind: GgmlType, layout: &TileLayout, row: &CodedRow, out: &mut [u8]) {
    if let Some(form) = super_block(kind) {
        return form.pack(layout, row, out);
    }
    if kind == GgmlType::NVFP4 {
        return small::pack_nvfp4(row, out);
    }
    let (size, minimum) = (layout.spec.scale_dtype.size(), layout.zero_bytes);
    let blocks = out.chunks_exact_mut(kind.block_bytes()).zip(row.codes.chunks_exact(BLOCK));
    for (i, (out, codes)) in blocks.enumerate() {
        let group = i / layout.group_blocks;
        let (scale, out) = out.split_at_mut(size);
        let (zero, out) = out.split_at_mut(minimum);
        scale.copy_from_slice(&row.scales[group * size..][..size]);
        zero.copy_from_slice(&row.zeros[group * minimum..][..minimum]);
        match kind {
            GgmlType::Q5_0 | GgmlType::Q5_1 => legacy::pack_five_bits(codes, out),
            GgmlType::Q8_0 => {
                let bias = layout.spec.bias().unwrap_or(0);
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = code.wrapping_sub(bias));
            }
            _ => q4_0::pack(codes, out),
        }
    }
}

/// Reads the f16 number at the start of `raw`.
fn half(raw: &[u8]) -> f32 {
    f16::from_le_bytes([raw[0], raw[1]]).to_f32()
}

#[cfg(test)]
mod tests;
