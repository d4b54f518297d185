//! GGML's q4_0: 32 weights, one fp16 scale, value = (code - 8) * d.
//!
//! The plain encoder is byte-identical to GGML's `quantize_row_q4_0_ref`, its rounding included, so that packs and GGUF
//! files exchange tensors: d = (signed value of largest magnitude) / -8 in f32, codes from the unrounded 1/d.

use crate::quant::plain::{self, LANES, ROUND};
use crate::scheme::BLOCK;
use crate::simd::{Kernel, Level};

/// The scale, not yet rounded to fp16, that puts the signed `peak` on code 0: the value of largest magnitude (or of the
/// wanted percentile).
#[inline(always)]
pub(crate) fn scale(peak: f32) -> f32 {
    peak / -8.0
}

/// Writes the codes (biased by 8) of whole blocks as GGML chooses them, under the unrounded scale.
pub(crate) struct Encode<'a> {
    pub values: &'a [f32],
    pub scale: f32,
    pub codes: &'a mut [u8],
}

impl Kernel for Encode<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        encode(self.values, self.scale, self.codes);
    }
}

#[inline(always)]
fn encode(values: &[f32], scale: f32, codes: &mut [u8]) {
    let inverse = plain::inverse(scale);
    let codes = codes.as_chunks_mut::<LANES>().0;
    for (codes, values) in codes.iter_mut().zip(values.as_chunks::<LANES>().0) {
        let mut floors = [0f32; LANES];
        for lane in 0..LANES {
            // Truncation of x + 8.5 is GGML's rounding: halves go up. The limits are for what a percentile leaves outside.
            let t = values[lane] * inverse + 8.5;
            let t = if t < 0.0 { 0.0 } else { t };
            let t = if t > 15.0 { 15.0 } else { t };
            let nearest = (t + ROUND) - ROUND;
            floors[lane] = if nearest > t { nearest - 1.0 } else { nearest } + ROUND;
        }
        for lane in 0..LANES {
            codes[lane] = floors[lane].to_bits() as u8;
        }
    }
}

/// Quantizes the blocks of a row one after the other: codes, and scales not yet rounded to fp16. One kernel for all of
/// them, so that the processor begins a block while it waits for the scale of the one before.
pub(crate) struct EncodeRow<'a> {
    pub blocks: &'a [[f32; BLOCK]],
    pub codes: &'a mut [u8],
    /// One per block.
    pub scales: &'a mut [f32],
}

impl Kernel for EncodeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let outputs = self.codes.as_chunks_mut::<BLOCK>().0.iter_mut().zip(self.scales);
        for (block, (codes, out)) in self.blocks.iter().zip(outputs) {
            let (min, max) = plain::extremes(block);
            *out = scale(with_sign(block, min, max));
            encode(block, *out, codes);
        }
    }
}

/// The first value of largest magnitude, with its sign; among zeros the positive one. Whole blocks of values.
pub(crate) fn signed_peak(level: Level, values: &[f32]) -> f32 {
    let (min, max) = level.run(plain::Extremes(values));
    with_sign(values, min, max)
}

/// [`signed_peak`] of values between these extremes.
#[inline(always)]
fn with_sign(values: &[f32], min: f32, max: f32) -> f32 {
    if max == -min {
        return values.iter().copied().find(|x| x.abs() == max && max > 0.0).unwrap_or(0.0);
    }
    // A choice of bits, which needs no jump: the sign is a coin's.
    f32::from_bits(if max > -min { max.to_bits() } else { min.to_bits() })
}

/// Packs blocks of 32 biased codes into 16 bytes each.
pub fn pack(codes: &[u8], out: &mut [u8]) {
    for (codes, out) in codes.chunks_exact(BLOCK).zip(out.chunks_exact_mut(BLOCK / 2)) {
        for (j, byte) in out.iter_mut().enumerate() {
            *byte = codes[j] | codes[j + 16] << 4;
        }
    }
}

/// The inverse of [`pack`].
pub fn unpack(packed: &[u8], codes: &mut [u8]) {
    for (codes, packed) in codes.chunks_exact_mut(BLOCK).zip(packed.chunks_exact(BLOCK / 2)) {
        for (j, byte) in packed.iter().enumerate() {
            (codes[j], codes[j + 16]) = (byte & 15, byte >> 4);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEVEL: Level = Level::BASELINE;

    #[test]
    fn the_extreme_value_sits_on_code_zero_and_halves_round_up() {
        let mut values = [0f32; 32];
        (values[0], values[1], values[2], values[3]) = (8.0, -8.0, 0.5, -0.5);
        let mut codes = [0; 32];
        // d = 8 / -8 = -1: +8 is code 0, -8 saturates at 15, 0.5 * -1 + 8.5 = 8, -0.5 * -1 + 8.5 = 9.
        assert_eq!(scale(signed_peak(LEVEL, &values)), -1.0);
        LEVEL.run(Encode { values: &values, scale: -1.0, codes: &mut codes });
        assert_eq!(codes[..5], [0, 15, 8, 9, 8]);
    }

    #[test]
    fn a_row_is_its_blocks_one_by_one() {
        let mut rng = crate::rng::Rng::new(3);
        let mut blocks = [[0f32; BLOCK]; 9];
        for (i, x) in blocks[1..].as_flattened_mut().iter_mut().enumerate() {
            *x = if i / BLOCK == 2 { [-2.0, 2.0][i % 2] } else { rng.next_normal() as f32 };
        }
        for level in [LEVEL, Level::detect()] {
            let (mut codes, mut scales) = ([0u8; 9 * BLOCK], [0f32; 9]);
            level.run(EncodeRow { blocks: &blocks, codes: &mut codes, scales: &mut scales });
            for (i, block) in blocks.iter().enumerate() {
                let d = scale(signed_peak(LEVEL, block));
                let mut alone = [0u8; BLOCK];
                LEVEL.run(Encode { values: block, scale: d, codes: &mut alone });
                assert_eq!((scales[i].to_bits(), &codes[i * BLOCK..][..BLOCK]), (d.to_bits(), &alone[..]), "{i}");
            }
        }
    }

    #[test]
    fn zeros_keep_ggml_negative_zero_scale() {
        let mut codes = [0; 32];
        let d = scale(signed_peak(LEVEL, &[0.0; 32]));
        LEVEL.run(Encode { values: &[0.0; 32], scale: d, codes: &mut codes });
        assert_eq!((d.to_bits(), codes), ((-0.0f32).to_bits(), [8; 32]));
    }

    #[test]
    fn of_two_equal_magnitudes_the_first_decides_the_sign() {
        let mut values = [0f32; 32];
        assert_eq!(signed_peak(LEVEL, &values).to_bits(), 0);
        (values[1], values[20], values[31]) = (1.0, -3.0, 3.0);
        assert_eq!(signed_peak(LEVEL, &values), -3.0);
        values[20] = 2.0;
        assert_eq!(signed_peak(LEVEL, &values), 3.0);
        values[0] = -3.5;
        assert_eq!(signed_peak(LEVEL, &values), -3.5);
    }
}
