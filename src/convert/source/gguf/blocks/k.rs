//! Decoders of the types with super-blocks of 256 elements, whose sub-blocks of 16 or 32 have small integer scales.

use super::half;
use crate::scheme::CodeTable;

/// Fills a super-block with sub-blocks of `width` elements; the arguments of `value` are the index of the sub-block
/// and the index of the element in the super-block.
fn sub_blocks(out: &mut [f32], width: usize, value: impl Fn(usize, usize) -> f32) {
    out.iter_mut().enumerate().for_each(|(i, out)| *out = value(i / width, i));
}

/// Returns the two-bit code of element `i`: every 32 bytes hold 128 elements, four per byte, 32 apart.
fn two_bits(codes: &[u8], i: usize) -> u8 {
    codes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3
}

/// Returns the four-bit code of element `i`: every 32 bytes hold 64 elements, two per byte, 32 apart.
fn four_bits(codes: &[u8], i: usize) -> u8 {
    codes[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15
}

/// Decodes Q2_K: 16 bytes of 4-bit scales and minima, 64 bytes of codes, d, dmin. Sub-blocks of 16;
/// value = d * scale * code - dmin * minimum.
pub(in crate::convert::source::gguf) fn q2(raw: &[u8], out: &mut [f32]) {
    let (scales, codes) = (&raw[..16], &raw[16..80]);
    let (d, dmin) = (half(&raw[80..]), half(&raw[82..]));
    sub_blocks(out, 16, |s, i| {
        let (scale, min) = (scales[s] & 15, scales[s] >> 4);
        d * f32::from(scale) * f32::from(two_bits(codes, i)) - dmin * f32::from(min)
    });
}

/// Decodes Q3_K: 32 bytes of third bits, 64 bytes of codes, 12 bytes of 6-bit scales, d. Sub-blocks of 16;
/// value = d * (scale - 32) * (code - 4). The third bits of elements 32 apart share a byte.
pub(in crate::convert::source::gguf) fn q3(raw: &[u8], out: &mut [f32]) {
    let (high, codes, scales, d) = (&raw[..32], &raw[32..96], &raw[96..108], half(&raw[108..]));
    // The low four bits of the scales are in 8 bytes, low nibbles first; the upper two bits are in 4 bytes, which hold
    // the bits of every fourth scale.
    let scale = |s: usize| (scales[s % 8] >> (s / 8 * 4) & 15 | (scales[8 + s % 4] >> (s / 4 * 2) & 3) << 4) as i8 - 32;
    sub_blocks(out, 16, |s, i| {
        let code = two_bits(codes, i) | (high[i % 32] >> (i / 32) & 1) << 2;
        d * f32::from(scale(s)) * (f32::from(code) - 4.0)
    });
}

/// Returns the scale and the minimum of sub-block `s` of 8, six bits each, from 12 bytes. Those of sub-blocks 0 to 3
/// are the low six bits of bytes 0 to 3 (scales) and 4 to 7 (minima). For sub-blocks 4 to 7, bytes 8 to 11 hold the
/// lower four bits (of the scale in the low nibble, of the minimum in the high one), and the top two bits of bytes 0
/// to 7 are the upper two bits.
fn scale_and_min(packed: &[u8], s: usize) -> (f32, f32) {
    let (scale, min) = match s {
        0..4 => (packed[s] & 63, packed[s + 4] & 63),
        _ => (packed[s + 4] & 15 | packed[s - 4] >> 6 << 4, packed[s + 4] >> 4 | packed[s] >> 6 << 4),
    };
    (f32::from(scale), f32::from(min))
}

/// Decodes Q4_K: d, dmin, 12 bytes of scales and minima, 128 bytes of codes. Sub-blocks of 32;
/// value = d * scale * code - dmin * minimum.
pub(in crate::convert::source::gguf) fn q4(raw: &[u8], out: &mut [f32]) {
    let (d, dmin, packed, codes) = (half(raw), half(&raw[2..]), &raw[4..16], &raw[16..]);
    sub_blocks(out, 32, |s, i| {
        let (scale, min) = scale_and_min(packed, s);
        d * scale * f32::from(four_bits(codes, i)) - dmin * min
    });
}

/// Decodes Q5_K: the layout of Q4_K with 32 bytes of fifth bits before the codes. The fifth bits of
/// elements 32 apart share a byte.
pub(in crate::convert::source::gguf) fn q5(raw: &[u8], out: &mut [f32]) {
    let (d, dmin, packed, high, codes) = (half(raw), half(&raw[2..]), &raw[4..16], &raw[16..48], &raw[48..]);
    sub_blocks(out, 32, |s, i| {
        let (scale, min) = scale_and_min(packed, s);
        let code = four_bits(codes, i) | (high[i % 32] >> (i / 32) & 1) << 4;
        d * scale * f32::from(code) - dmin * min
    });
}

/// Decodes Q6_K: 128 bytes of low bits, 64 bytes of the upper two bits, 16 signed scales, d. Sub-blocks of 16;
/// value = d * scale * (code - 32). Every 64 bytes of low bits hold 128 elements, two per byte, 64 apart.
pub(in crate::convert::source::gguf) fn q6(raw: &[u8], out: &mut [f32]) {
    let (low, high, scales, d) = (&raw[..128], &raw[128..192], &raw[192..208], half(&raw[208..]));
    sub_blocks(out, 16, |s, i| {
        let four = low[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
        let code = (four | two_bits(high, i) << 4) as i8 - 32;
        d * f32::from(scales[s] as i8) * f32::from(code)
    });
}

/// Decodes IQ4_XS: d, 2 bytes with the upper two bits of 8 scales, 4 bytes with the lower four bits, 128 bytes of
/// codes into the table of IQ4_NL. Sub-blocks of 32;
/// value = d * (scale - 32) * table value.
pub(in crate::convert::source::gguf) fn iq4_xs(raw: &[u8], out: &mut [f32]) {
    let (d, high, low, codes) = (half(raw), u16::from_le_bytes([raw[2], raw[3]]), &raw[4..8], &raw[8..]);
    sub_blocks(out, 32, |s, i| {
        let scale = (low[s / 2] >> (s % 2 * 4) & 15 | ((high >> (2 * s) & 3) as u8) << 4) as i8 - 32;
        let code = codes[16 * s + i % 16] >> (i % 32 / 16 * 4) & 15;
        d * f32::from(scale) * f32::from(CodeTable::Iq4Nl.values()[usize::from(code)])
    });
}
