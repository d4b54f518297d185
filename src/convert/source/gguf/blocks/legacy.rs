//! Decoders of the types with blocks of 32 elements and one scale per block.

use super::half;
use crate::quant::block::mxfp4::e8m0;
use crate::scheme::CodeTable;

/// Returns code `j` of 32 that are packed in 16 bytes.
fn nibble(codes: &[u8], j: usize) -> u8 {
    codes[j % 16] >> (4 * (j / 16)) & 15
}

/// Returns five-bit code `j` of 32: the fifth bits are in four separate bytes.
fn five_bits(high: &[u8], low: &[u8], j: usize) -> u8 {
    nibble(low, j) | (high[j / 8] >> (j % 8) & 1) << 4
}

/// Unpacks the codes of a Q5_0 block without its scale.
pub(super) fn unpack_five_bits(packed: &[u8], codes: &mut [u8]) {
    let (high, low) = packed.split_at(4);
    codes.iter_mut().enumerate().for_each(|(j, code)| *code = five_bits(high, low, j));
}

/// Packs codes; the inverse of [`unpack_five_bits`].
pub(super) fn pack_five_bits(codes: &[u8], out: &mut [u8]) {
    out.fill(0);
    let (high, low) = out.split_at_mut(4);
    for (j, code) in codes.iter().enumerate() {
        low[j % 16] |= (code & 15) << (4 * (j / 16));
        high[j / 8] |= code >> 4 << (j % 8);
    }
}

fn each(out: &mut [f32], value: impl Fn(usize) -> f32) {
    out.iter_mut().enumerate().for_each(|(j, out)| *out = value(j));
}

/// Decodes Q4_0: d (f16), 16 bytes of codes; value = (code - 8) * d.
pub(in crate::convert::source::gguf) fn q4_0(raw: &[u8], out: &mut [f32]) {
    let d = half(raw);
    each(out, |j| (f32::from(nibble(&raw[2..], j)) - 8.0) * d);
}

/// Decodes Q4_1: d, m (f16), 16 bytes of codes; value = code * d + m.
pub(in crate::convert::source::gguf) fn q4_1(raw: &[u8], out: &mut [f32]) {
    let (d, m) = (half(raw), half(&raw[2..]));
    each(out, |j| f32::from(nibble(&raw[4..], j)) * d + m);
}

/// Decodes Q5_0: d (f16), 4 bytes of fifth bits, 16 bytes of codes; value = (code - 16) * d.
pub(in crate::convert::source::gguf) fn q5_0(raw: &[u8], out: &mut [f32]) {
    let d = half(raw);
    each(out, |j| (f32::from(five_bits(&raw[2..6], &raw[6..], j)) - 16.0) * d);
}

/// Decodes Q5_1: d, m (f16), 4 bytes of fifth bits, 16 bytes of codes; value = code * d + m.
pub(in crate::convert::source::gguf) fn q5_1(raw: &[u8], out: &mut [f32]) {
    let (d, m) = (half(raw), half(&raw[2..]));
    each(out, |j| f32::from(five_bits(&raw[4..8], &raw[8..], j)) * d + m);
}

/// Decodes Q8_0: d (f16), 32 signed bytes; value = code * d.
pub(in crate::convert::source::gguf) fn q8_0(raw: &[u8], out: &mut [f32]) {
    let d = half(raw);
    each(out, |j| f32::from(raw[2 + j] as i8) * d);
}

/// Decodes IQ4_NL: d (f16), 16 bytes of codes into a fixed table; value = d * table value.
pub(in crate::convert::source::gguf) fn iq4_nl(raw: &[u8], out: &mut [f32]) {
    let d = half(raw);
    each(out, |j| f32::from(CodeTable::Iq4Nl.values()[usize::from(nibble(&raw[2..], j))]) * d);
}

/// Decodes MXFP4: exponent byte, 16 bytes of E2M1 codes; value = 2^(exponent - 127) * number of the code. The table
/// holds the doubled numbers, which are integers.
pub(in crate::convert::source::gguf) fn mxfp4(raw: &[u8], out: &mut [f32]) {
    let unit = e8m0(raw[0]) * 0.5;
    each(out, |j| f32::from(CodeTable::E2m1.values()[usize::from(nibble(&raw[1..], j))]) * unit);
}
