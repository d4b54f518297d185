//! Decoders of the IQ types of 1 to 3 bits: super-blocks of 256 elements whose codes are indices into a codebook of
//! vectors of 4 or 8 elements ([`grids`]), with separate signs and small integer scales for sub-blocks of 16 or 32.
//!
//! Layouts are those of `ggml-common.h` and `ggml-quants.c` of llama.cpp. Every value is a product of an f16 number, an
//! integer scale of at most 5 bits and a magnitude of at most 6 bits, which f32 holds exactly.

use super::{grids, half};

/// Magnitudes of the codebooks of the IQ2 types.
const TWO_BITS: [u8; 4] = [8, 25, 43, 0];
/// Magnitudes of the codebook of IQ3_XXS.
const IQ3_XXS: [u8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];
/// Magnitudes of the codebook of IQ3_S.
const IQ3_S: [u8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];
/// Offset that the IQ1 types add to or subtract from the elements of their codebook.
const DELTA: f32 = 0.125;

/// Signed vector of 8 elements: its scale, its magnitudes and one bit per element that is set when it is negative.
struct Eight {
    scale: f32,
    magnitudes: [u8; 8],
    signs: u8,
}

/// Fills a super-block; the argument of `eight` is the index of 8 consecutive elements.
fn eights(out: &mut [f32], eight: impl Fn(usize) -> Eight) {
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let Eight { scale, magnitudes, signs } = eight(i);
        for (j, (out, magnitude)) in out.iter_mut().zip(magnitudes).enumerate() {
            let sign = if signs >> j & 1 == 0 { 1.0 } else { -1.0 };
            *out = scale * f32::from(magnitude) * sign;
        }
    }
}

/// Returns the magnitudes of an entry of a codebook with 8 elements per word.
fn of_eight(word: u16) -> [u8; 8] {
    std::array::from_fn(|j| TWO_BITS[usize::from(word >> (2 * j) & 3)])
}

/// Returns the magnitudes of two entries of a codebook with 4 elements per word.
fn of_four(words: [u16; 2], magnitudes: &[u8; 8]) -> [u8; 8] {
    std::array::from_fn(|j| magnitudes[usize::from(words[j / 4] >> (4 * (j % 4)) & 7)])
}

/// Completes seven signs by an eighth one that makes the number of negative elements even.
fn even_signs(seven: u32) -> u8 {
    let seven = (seven & 0x7f) as u8;
    seven | ((seven.count_ones() as u8 & 1) << 7)
}

/// Reads little-endian number `i` of 16 bits.
fn word(raw: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([raw[2 * i], raw[2 * i + 1]])
}

/// Reads little-endian number `i` of 32 bits.
fn long(raw: &[u8], i: usize) -> u32 {
    u32::from(word(raw, 2 * i)) | u32::from(word(raw, 2 * i + 1)) << 16
}

/// Returns code `i` of four bits, low nibble first.
fn nibble(raw: &[u8], i: usize) -> u8 {
    raw[i / 2] >> (i % 2 * 4) & 15
}

/// Decodes IQ2_XXS: d, then per 32 elements 4 bytes of indices and a 32-bit number with four times seven signs and, in
/// the upper four bits, the scale; value = d * (scale + 1/2) / 4 * sign * magnitude.
pub(in crate::convert::source::gguf) fn iq2_xxs(raw: &[u8], out: &mut [f32]) {
    let (d, groups) = (half(raw), &raw[2..66]);
    eights(out, |i| {
        let (index, packed) = (groups[i / 4 * 8 + i % 4], long(groups, i / 4 * 2 + 1));
        Eight {
            scale: d * (0.5 + (packed >> 28) as f32) * 0.25,
            magnitudes: of_eight(grids::IQ2_XXS[usize::from(index)]),
            signs: even_signs(packed >> (7 * (i % 4))),
        }
    });
}

/// Decodes IQ2_XS: d, 32 numbers of 16 bits with an index of nine bits and seven signs, 8 bytes of 4-bit scales of 16
/// elements; value = d * (scale + 1/2) / 4 * sign * magnitude.
pub(in crate::convert::source::gguf) fn iq2_xs(raw: &[u8], out: &mut [f32]) {
    let (d, codes, scales) = (half(raw), &raw[2..66], &raw[66..74]);
    eights(out, |i| {
        let code = word(codes, i);
        Eight {
            scale: d * (0.5 + f32::from(nibble(scales, i / 2))) * 0.25,
            magnitudes: of_eight(grids::IQ2_XS[usize::from(code & 511)]),
            signs: even_signs(u32::from(code >> 9)),
        }
    });
}

/// Decodes IQ2_S: d, 32 bytes with the lower eight bits of indices, 32 bytes of signs, 8 bytes with the upper two bits,
/// 8 bytes of 4-bit scales of 16 elements; value = d * (scale + 1/2) / 4 * sign * magnitude.
pub(in crate::convert::source::gguf) fn iq2_s(raw: &[u8], out: &mut [f32]) {
    let (d, low, signs, high, scales) = (half(raw), &raw[2..34], &raw[34..66], &raw[66..74], &raw[74..82]);
    eights(out, |i| {
        let index = usize::from(low[i]) | usize::from(high[i / 4] >> (2 * (i % 4)) & 3) << 8;
        Eight {
            scale: d * (0.5 + f32::from(nibble(scales, i / 2))) * 0.25,
            magnitudes: of_eight(grids::IQ2_S[index]),
            signs: signs[i],
        }
    });
}

/// Decodes IQ3_XXS: d, 64 bytes of indices, and per 32 elements a 32-bit number with four times seven signs and, in the
/// upper four bits, the scale; value = d * (scale + 1/2) / 2 * sign * magnitude.
pub(in crate::convert::source::gguf) fn iq3_xxs(raw: &[u8], out: &mut [f32]) {
    let (d, indices, scales) = (half(raw), &raw[2..66], &raw[66..98]);
    eights(out, |i| {
        let packed = long(scales, i / 4);
        let words = [2 * i, 2 * i + 1].map(|i| grids::IQ3_XXS[usize::from(indices[i])]);
        Eight {
            scale: d * (0.5 + (packed >> 28) as f32) * 0.5,
            magnitudes: of_four(words, &IQ3_XXS),
            signs: even_signs(packed >> (7 * (i % 4))),
        }
    });
}

/// Decodes IQ3_S: d, 64 bytes with the lower eight bits of indices, 8 bytes with the ninth ones, 32 bytes of signs, 4
/// bytes of 4-bit scales of 32 elements; value = d * (2 * scale + 1) * sign * magnitude.
pub(in crate::convert::source::gguf) fn iq3_s(raw: &[u8], out: &mut [f32]) {
    let (d, low, high, signs, scales) = (half(raw), &raw[2..66], &raw[66..74], &raw[74..106], &raw[106..110]);
    let index = |i: usize| usize::from(low[i]) | usize::from(high[i / 8] >> (i % 8) & 1) << 8;
    eights(out, |i| Eight {
        scale: d * f32::from(2 * nibble(scales, i / 4) + 1),
        magnitudes: of_four([2 * i, 2 * i + 1].map(|i| grids::IQ3_S[index(i)]), &IQ3_S),
        signs: signs[i],
    });
}

/// Writes 8 elements of an IQ1 type: scale * (element of the codebook + offset), where elements are -1, 0 or 1.
fn ternary(out: &mut [f32], scale: f32, index: usize, offset: f32) {
    let word = grids::IQ1_S[index];
    for (j, out) in out.iter_mut().enumerate() {
        *out = scale * (f32::from(word >> (2 * j) & 3) - 1.0 + offset);
    }
}

/// Decodes IQ1_S: d, 32 bytes with the lower eight bits of indices, and per 32 elements a 16-bit number with four times
/// three upper bits of indices, three bits of scale and the sign of the offset; value = d * (2 * scale + 1) *
/// (element ± 1/8).
pub(in crate::convert::source::gguf) fn iq1_s(raw: &[u8], out: &mut [f32]) {
    let (d, low, groups) = (half(raw), &raw[2..34], &raw[34..50]);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let group = word(groups, i / 4);
        let index = usize::from(low[i]) | usize::from(group >> (3 * (i % 4)) & 7) << 8;
        let offset = if group >> 15 == 0 { DELTA } else { -DELTA };
        ternary(out, d * f32::from(2 * (group >> 12 & 7) + 1), index, offset);
    }
}

/// Decodes IQ1_M: 32 bytes with the lower eight bits of indices, 32 nibbles with three upper bits and the sign of the
/// offset, four 16-bit numbers with four times three bits of scale of 16 elements; value as for IQ1_S. The upper four
/// bits of the four numbers, lowest first, are d.
pub(in crate::convert::source::gguf) fn iq1_m(raw: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&raw[..32], &raw[32..48], &raw[48..56]);
    let d = (0..4).fold(0, |d, i| d | word(scales, i) >> 12 << (4 * i));
    let d = half(&d.to_le_bytes());
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let (high, scale) = (nibble(high, i), word(scales, i / 8) >> (3 * (i / 2 % 4)) & 7);
        let offset = if high & 8 == 0 { DELTA } else { -DELTA };
        ternary(out, d * f32::from(2 * scale + 1), usize::from(low[i]) | usize::from(high & 7) << 8, offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_are_completed_to_an_even_number() {
        assert_eq!((even_signs(0), even_signs(1), even_signs(3), even_signs(0x7f)), (0, 0x81, 3, 0xff));
        assert!((0..128).all(|seven| even_signs(seven).count_ones().is_multiple_of(2)));
    }

    #[test]
    fn the_scale_of_iq1_m_lies_in_four_nibbles() {
        let mut raw = [0; 56];
        // 0x3c00 is 1.0; the nibbles 0, 0, c, 3 lie in the upper bits of the four numbers.
        (raw[53], raw[55]) = (0xc0, 0x30);
        let mut out = [0.0; 256];
        iq1_m(&raw, &mut out);
        assert!(out.iter().all(|v| *v == -0.875), "{out:?}");
    }
}
