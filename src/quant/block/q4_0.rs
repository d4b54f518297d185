//! GGML's q4_0 format: 32 weights, one fp16 scale, value = (code - 8) * d.
//!
//! The plain encoder is byte-identical to GGML's `quantize_row_q4_0_ref`, including its rounding, so that packs and
//! GGUF files can exchange tensors: d = (signed value of largest magnitude) / -8 in f32, codes from the unrounded
//! 1/d.

use crate::quant::plain::ROUND;
use crate::scheme::BLOCK;

/// Returns the scale, not yet rounded to fp16, under which the signed `peak` gets code 0. The peak is the value of
/// largest magnitude (or of the requested percentile).
#[inline(always)]
pub(crate) fn scale(peak: f32) -> f32 {
    peak / -8.0
}

/// Returns the stored code (biased by 8) that GGML chooses for `x`; `inverse` is the inverse of the unrounded scale.
#[inline(always)]
pub(crate) fn code(x: f32, inverse: f32) -> u32 {
    // GGML rounds by truncating x + 8.5, so halves are rounded up. The limits apply to values beyond a percentile.
    let t = x * inverse + 8.5;
    let t = if t < 0.0 { 0.0 } else { t };
    let t = if t > 15.0 { 15.0 } else { t };
    let nearest = (t + ROUND) - ROUND;
    let floor = if nearest > t { nearest - 1.0 } else { nearest };
    // An integer in the low bits of the float.
    (floor + ROUND).to_bits() & 15
}

/// Packs blocks of 32 biased codes into 16 bytes each.
pub fn pack(codes: &[u8], out: &mut [u8]) {
    for (codes, out) in codes.chunks_exact(BLOCK).zip(out.chunks_exact_mut(BLOCK / 2)) {
        for (j, byte) in out.iter_mut().enumerate() {
            *byte = codes[j] | codes[j + 16] << 4;
        }
    }
}

/// Unpacks blocks of 16 bytes into 32 biased codes each; the inverse of [`pack`].
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
        // d = 8 / -8 = -1: +8 is code 0, -8 saturates at 15, 0.5 * -1 + 8.5 = 8, -0.5 * -1 + 8.5 = 9.
        assert_eq!(scale(8.0), -1.0);
        assert_eq!([8.0, -8.0, 0.5, -0.5, 0.0].map(|x| code(x, -1.0)), [0, 15, 8, 9, 8]);
    }

    #[test]
    fn zeros_keep_ggml_negative_zero_scale() {
        assert_eq!((scale(0.0).to_bits(), code(0.0, 0.0)), ((-0.0f32).to_bits(), 8));
    }
}
