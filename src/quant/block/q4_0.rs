//! GGML's q4_0: 32 weights, one fp16 scale, value = (code - 8) * d.
//!
//! The plain encoder is byte-identical to GGML's `quantize_row_q4_0_ref`, its rounding included, so that packs and GGUF
//! files exchange tensors: d = (signed value of largest magnitude) / -8 in f32, codes from the unrounded 1/d.

use crate::quant::plain::{self, ROUND};
use crate::scheme::BLOCK;

/// The scale, not yet rounded to fp16, that puts the signed `peak` on code 0: the value of largest magnitude (or of the
/// wanted percentile).
#[inline(always)]
pub(crate) fn scale(peak: f32) -> f32 {
    peak / -8.0
}

/// Codes (biased by 8) as GGML chooses them, under the unrounded scale.
#[inline(always)]
pub(crate) fn encode_block(values: &[f32], scale: f32, codes: &mut [u8]) {
    let inverse = plain::inverse(scale);
    for (code, x) in codes.iter_mut().zip(values) {
        // Truncation of x + 8.5 is GGML's rounding: halves go up. The limits are for what a percentile leaves outside.
        let t = x * inverse + 8.5;
        let t = if t < 0.0 { 0.0 } else { t };
        let t = if t > 15.0 { 15.0 } else { t };
        let nearest = (t + ROUND) - ROUND;
        let floor = if nearest > t { nearest - 1.0 } else { nearest };
        *code = (floor + ROUND).to_bits() as u8;
    }
}

/// The first value of largest magnitude, with its sign.
#[inline(always)]
pub(crate) fn signed_peak(values: &[f32]) -> f32 {
    // Maxima and ors of integers, which the compiler may take in any order.
    let mut largest = 0;
    for x in values {
        largest = largest.max(x.abs().to_bits());
    }
    let peak = f32::from_bits(largest);
    let (mut plus, mut minus) = (false, false);
    for x in values {
        plus |= *x == peak;
        minus |= *x == -peak;
    }
    match (plus, minus) {
        (true, false) => peak,
        (false, true) => -peak,
        // Among zeros the positive one.
        _ => values.iter().copied().find(|x| x.abs() == peak && peak > 0.0).unwrap_or(0.0),
    }
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

    #[test]
    fn the_extreme_value_sits_on_code_zero_and_halves_round_up() {
        let mut values = [0f32; 32];
        (values[0], values[1], values[2], values[3]) = (8.0, -8.0, 0.5, -0.5);
        let mut codes = [0; 32];
        // d = 8 / -8 = -1: +8 is code 0, -8 saturates at 15, 0.5 * -1 + 8.5 = 8, -0.5 * -1 + 8.5 = 9.
        assert_eq!(scale(signed_peak(&values)), -1.0);
        encode_block(&values, -1.0, &mut codes);
        assert_eq!(codes[..5], [0, 15, 8, 9, 8]);
    }

    #[test]
    fn zeros_keep_ggml_negative_zero_scale() {
        let mut codes = [0; 32];
        let d = scale(signed_peak(&[0.0; 32]));
        encode_block(&[0.0; 32], d, &mut codes);
        assert_eq!((d.to_bits(), codes), ((-0.0f32).to_bits(), [8; 32]));
    }

    #[test]
    fn of_two_equal_magnitudes_the_first_decides_the_sign() {
        assert_eq!(signed_peak(&[1.0, -3.0, 3.0]), -3.0);
    }
}
