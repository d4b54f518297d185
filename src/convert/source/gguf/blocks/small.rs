//! Decoders of ternary and binary types, whose codes have one or two bits or a fifth of a byte, and of NVFP4.
//!
//! Layouts are those of `ggml-common.h` of llama.cpp.

use super::half;
use crate::error::{Error, Result};
use crate::quant::block::CodedRow;
use crate::scheme::{CodeTable, e4m3};

/// Decodes TQ1_0: 48 bytes of five ternary digits, 4 bytes of four, d; value = d * (digit - 1). A byte b holds the
/// digits of ceil(256 b' / 243): multiplied by 3^n modulo 256, its upper part times 3 is digit n. The first 32 bytes
/// hold 160 elements, each byte five that are 32 apart; the next 16 hold 80, 16 apart; the last 4 hold 16, 4 apart.
pub(in crate::convert::source::gguf) fn tq1_0(raw: &[u8], out: &mut [f32]) {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let d = half(&raw[52..]);
    let runs = [(0, 0, 32), (160, 32, 16), (240, 48, 4)];
    for (i, out) in out.iter_mut().enumerate() {
        let (first, at, width) = *runs.iter().rfind(|run| run.0 <= i).expect("the first run begins at 0");
        let (digit, byte) = ((i - first) / width, raw[at + (i - first) % width]);
        let code = (u16::from(byte.wrapping_mul(POWERS[digit])) * 3) >> 8;
        *out = d * (f32::from(code) - 1.0);
    }
}

/// Decodes TQ2_0: 64 bytes of two-bit codes, d; value = d * (code - 1). Every 32 bytes hold 128 elements, four per
/// byte, 32 apart.
pub(in crate::convert::source::gguf) fn tq2_0(raw: &[u8], out: &mut [f32]) {
    let d = half(&raw[64..]);
    for (i, out) in out.iter_mut().enumerate() {
        let code = raw[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        *out = d * (f32::from(code) - 1.0);
    }
}

/// Decodes Q1_0: d, 16 bytes of bits, lowest first; value = d where the bit is set and -d elsewhere.
pub(in crate::convert::source::gguf) fn q1_0(raw: &[u8], out: &mut [f32]) {
    let d = half(raw);
    for (i, out) in out.iter_mut().enumerate() {
        *out = if raw[2 + i / 8] >> (i % 8) & 1 == 1 { d } else { -d };
    }
}

/// Decodes Q2_0 of either group size: d, two-bit codes, lowest first; value = d * (code - 1).
pub(in crate::convert::source::gguf) fn q2_0(raw: &[u8], out: &mut [f32]) {
    let d = half(raw);
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * (f32::from(raw[2 + i / 4] >> (i % 4 * 2) & 3) - 1.0);
    }
}

/// Returns half the value of an unsigned E4M3 scale: 4 bits of exponent with bias 7, 3 bits of fraction. GGML ignores
/// the upper bit and reads the pattern of NaN, 0x7f, as 0.
fn half_e4m3(scale: u8) -> f32 {
    if scale == 0x7f { 0.0 } else { e4m3(scale & 0x7f) * 0.5 }
}

/// Decodes NVFP4: 4 scales of E4M3, 32 bytes of E2M1 codes; value = scale * number of the code. Sub-blocks of 16 have 8
/// bytes: byte j holds element j in the low and element j + 8 in the high nibble.
pub(in crate::convert::source::gguf) fn nvfp4(raw: &[u8], out: &mut [f32]) {
    let (scales, codes) = raw.split_at(4);
    for (i, out) in out.iter_mut().enumerate() {
        let code = codes[i / 16 * 8 + i % 8] >> (i % 16 / 8 * 4) & 15;
        // The table holds doubled numbers, which are integers.
        *out = half_e4m3(scales[i / 16]) * f32::from(CodeTable::E2m1.values()[usize::from(code)]);
    }
}

/// Unpacks a row of NVFP4 blocks into the codes and scales that tiles hold.
///
/// # Errors
/// A scale is negative or NaN.
pub(super) fn unpack_nvfp4(raw: &[u8], row: &mut CodedRow) -> Result<()> {
    row.supers.copy_from_slice(&1f32.to_le_bytes());
    let blocks = raw.as_chunks::<36>().0.iter().zip(row.scales.as_chunks_mut::<4>().0);
    for ((raw, scales), codes) in blocks.zip(row.codes.as_chunks_mut::<64>().0) {
        scales.copy_from_slice(&raw[..4]);
        if let Some(scale) = scales.iter().find(|scale| **scale >= 0x7f) {
            let found = format!("found the scale {scale:#04x} in a block of NVFP4, expected 0x00 to 0x7e");
            return Err(Error::corrupt(found).help("the file is damaged; get it again"));
        }
        for (packed, codes) in raw[4..].as_chunks::<8>().0.iter().zip(codes.as_chunks_mut::<16>().0) {
            for (j, byte) in packed.iter().enumerate() {
                (codes[j], codes[j + 8]) = (byte & 15, byte >> 4);
            }
        }
    }
    Ok(())
}

/// Packs codes and scales into NVFP4 blocks; the inverse of [`unpack_nvfp4`].
pub(super) fn pack_nvfp4(row: &CodedRow, out: &mut [u8]) {
    let blocks = out.as_chunks_mut::<36>().0.iter_mut().zip(row.scales.as_chunks::<4>().0);
    for ((out, scales), codes) in blocks.zip(row.codes.as_chunks::<64>().0) {
        out[..4].copy_from_slice(scales);
        for (packed, codes) in out[4..].as_chunks_mut::<8>().0.iter_mut().zip(codes.as_chunks::<16>().0) {
            for (j, byte) in packed.iter_mut().enumerate() {
                *byte = codes[j] & 15 | codes[j + 8] << 4;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_ternary_digits_lie_in_a_byte() {
        let mut raw = [0; 54];
        // The digits 2 1 0 1 2, most significant first, are 194 of 243; the byte is 194 * 256 / 243, rounded up.
        raw[0] = (194u32 * 256).div_ceil(243) as u8;
        (raw[52], raw[53]) = (0, 0x40);
        let mut out = [0.0; 256];
        tq1_0(&raw, &mut out);
        assert_eq!([0, 32, 64, 96, 128].map(|i| out[i]), [2.0, 0.0, -2.0, 0.0, 2.0]);
    }

    #[test]
    fn scales_of_e4m3_are_halved_exactly() {
        assert_eq!([0, 1, 8, 0x38, 0x7e, 0x7f].map(half_e4m3), [0.0, 1.0 / 1024.0, 1.0 / 128.0, 0.5, 224.0, 0.0]);
    }

    #[test]
    fn codes_of_one_and_two_bits_are_read_from_the_lowest_bit_on() {
        let mut out = [0.0; 128];
        let mut raw = [0; 34];
        (raw[1], raw[2], raw[17]) = (0x3c, 0b101, 0x80);
        q1_0(&raw[..18], &mut out);
        assert_eq!((out[0], out[1], out[2], out[127], out[126]), (1.0, -1.0, 1.0, 1.0, -1.0));
        raw[2] = 0b1110_0100;
        q2_0(&raw, &mut out);
        assert_eq!((out[0], out[1], out[2], out[3], out[4]), (-1.0, 0.0, 1.0, 2.0, -1.0));
    }

    #[test]
    fn a_sub_block_of_nvfp4_has_its_low_nibbles_first() {
        let mut raw = [0; 36];
        (raw[1], raw[4 + 8]) = (0x40, 0xf1);
        let mut out = [0.0; 64];
        nvfp4(&raw, &mut out);
        assert_eq!((out[16], out[24], out[0]), (1.0, -12.0, 0.0));
    }
}
