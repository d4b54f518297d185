//! Decodes the blocks of GGML's types and converts those that equal a scheme of this program.
//!
//! [`dequantize`] computes the values of any supported type in f32 as GGML does: every product of scales and codes is
//! exact, so only the sum with a minimum rounds, once. [`to_row`] and [`from_row`] convert blocks of the types that
//! have an equivalent scheme here; they copy codes and scales, so no value changes.
//!
//! Layouts are those of `ggml-common.h`. In blocks of 32 with 4-bit codes, byte j holds element j in the low and
//! element j + 16 in the high nibble.

pub(super) mod k;
pub(super) mod legacy;

use super::types::{GgmlType, Meaning};
use crate::dtype::{DType, decode_floats};
use crate::error::{Error, Result};
use crate::quant::block::{CodedRow, mxfp4, q4_0};
use crate::scheme::{BLOCK, CodeMap, CodeTable, Granularity, QuantSpec, SCHEMES, ScaleType, TileLayout};
use half::f16;

/// Returns the plain element type with the same bytes; `None` for quantized types.
pub fn plain(kind: GgmlType) -> Option<DType> {
    match kind.meaning() {
        Meaning::Plain(dtype) => Some(dtype),
        Meaning::Coded(_) | Meaning::Unread => None,
    }
}

/// Returns the scheme of this program that represents the type exactly, code by code; `None` if there is none.
pub fn scheme(kind: GgmlType) -> Option<QuantSpec> {
    let specs =
        SCHEMES.iter().map(|row| QuantSpec { granularity: Granularity::Group(32), ..QuantSpec::usual(row.scheme) });
    let bytes = |spec: &QuantSpec| spec.scale_dtype.size() + BLOCK * spec.scheme.bits() as usize / 8;
    specs.into_iter().find(|spec| twin(spec) == Some(kind) && bytes(spec) == kind.block_bytes())
}

/// Returns the GGML type that represents a scheme exactly: the same integers (those of 6 bits in bytes), with the
/// scale of a group repeated in each of its blocks. `None` if there is none, as for zero points and f32 scales.
pub fn twin(spec: &QuantSpec) -> Option<GgmlType> {
    match spec.code_map() {
        _ if spec.scale_dtype == ScaleType::F32 => None,
        CodeMap::Biased(8) => Some(GgmlType::Q4_0),
        CodeMap::Biased(16) => Some(GgmlType::Q5_0),
        CodeMap::Biased(_) | CodeMap::Bytes => Some(GgmlType::Q8_0),
        CodeMap::Affine => None,
        CodeMap::Table(CodeTable::E2m1) => Some(GgmlType::MXFP4),
        CodeMap::Table(CodeTable::Iq4Nl) => Some(GgmlType::IQ4_NL),
    }
}

/// Refuses a type that this program cannot decode.
pub fn check_supported(kind: GgmlType) -> Result<()> {
    match kind.meaning() {
        Meaning::Plain(_) | Meaning::Coded(_) => Ok(()),
        Meaning::Unread => Err(Error::unsupported(format!("found GGML type {kind}, which is not supported"))
            .help(format!("use a file of one of the types {}", GgmlType::readable().join(", ")))),
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

/// Unpacks a row of blocks whose type has a [`scheme`] into the codes and scales that tiles hold.
///
/// # Errors
/// A scale of an MXFP4 block is NaN.
pub fn to_row(kind: GgmlType, raw: &[u8], row: &mut CodedRow) -> Result<()> {
    let size = row.scales.len() / (row.codes.len() / BLOCK);
    let blocks = raw.chunks_exact(kind.block_bytes()).zip(row.codes.chunks_exact_mut(BLOCK));
    for ((raw, codes), scale) in blocks.zip(row.scales.chunks_exact_mut(size)) {
        let (of_block, raw) = raw.split_at(size);
        scale.copy_from_slice(of_block);
        match kind {
            GgmlType::Q5_0 => legacy::unpack_five_bits(raw, codes),
            GgmlType::Q8_0 => codes.copy_from_slice(raw),
            _ => q4_0::unpack(raw, codes),
        }
    }
    if kind == GgmlType::MXFP4 { mxfp4::check_scales(&row.scales) } else { Ok(()) }
}

/// Packs a row of codes and scales of a scheme with a [`twin`] into blocks of `kind`; the inverse of [`to_row`].
pub fn from_row(kind: GgmlType, layout: &TileLayout, row: &CodedRow, out: &mut [u8]) {
    let size = layout.spec.scale_dtype.size();
    let blocks = out.chunks_exact_mut(kind.block_bytes()).zip(row.codes.chunks_exact(BLOCK));
    for (i, (out, codes)) in blocks.enumerate() {
        let scale = &row.scales[i / layout.group_blocks * size..][..size];
        out[..size].copy_from_slice(scale);
        match kind {
            GgmlType::Q5_0 => legacy::pack_five_bits(codes, &mut out[size..]),
            GgmlType::Q8_0 => {
                let bias = layout.spec.bias().unwrap_or(0);
                out[size..].iter_mut().zip(codes).for_each(|(out, code)| *out = code.wrapping_sub(bias));
            }
            _ => q4_0::pack(codes, &mut out[size..]),
        }
    }
}

/// Reads the f16 number at the start of `raw`.
fn half(raw: &[u8]) -> f32 {
    f16::from_le_bytes([raw[0], raw[1]]).to_f32()
}

#[cfg(test)]
mod tests;
