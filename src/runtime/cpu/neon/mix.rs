//! NEON: weighted sums of vectors.

use super::super::mix::{BF16, F32, Mix};
use super::rows::widened;
use super::{QUARTER, store};
use std::arch::aarch64::*;

#[target_feature(enable = "neon")]
pub(super) fn mix<const TYPE: u8>(mix: &Mix<'_>, out: &mut [f32], out_row: usize) {
    for vector in 0..mix.vectors {
        for row in (0..mix.rows).step_by(4) {
            let out = &mut out[row * out_row + 16 * vector..];
            match mix.rows - row {
                1 => sums::<TYPE, 1>(mix, row, vector, out, out_row),
                2 => sums::<TYPE, 2>(mix, row, vector, out, out_row),
                3 => sums::<TYPE, 3>(mix, row, vector, out, out_row),
                _ => sums::<TYPE, 4>(mix, row, vector, out, out_row),
            }
        }
    }
}

/// `R` outputs of one vector, all in registers; a pair of bf16 is multiplied in two steps, the odd one first.
#[target_feature(enable = "neon")]
fn sums<const TYPE: u8, const R: usize>(mix: &Mix<'_>, row: usize, vector: usize, out: &mut [f32], out_row: usize) {
    let mut w: [&[u32]; R] = [&[]; R];
    for r in 0..R {
        w[r] = &mix.weights[(row + r) * mix.weight_row..][..mix.steps];
    }
    let mut sums = [[vdupq_n_f32(0.0); 4]; R];
    for i in 0..mix.steps {
        let values = &mix.values[i * mix.step + vector * mix.vector..];
        if TYPE == BF16 {
            let words = widened::<F32>(values).map(|v| vreinterpretq_u32_f32(v));
            for r in 0..R {
                let (odd, even) = (f32::from_bits(w[r][i] & 0xffff_0000), f32::from_bits(w[r][i] << 16));
                for q in 0..4 {
                    let odds = vreinterpretq_f32_u32(vandq_u32(words[q], vdupq_n_u32(0xffff_0000)));
                    let evens = vreinterpretq_f32_u32(vshlq_n_u32::<16>(words[q]));
                    sums[r][q] = vfmaq_n_f32(vfmaq_n_f32(sums[r][q], odds, odd), evens, even);
                }
            }
            continue;
        }
        let v = widened::<TYPE>(values);
        for r in 0..R {
            for q in 0..4 {
                sums[r][q] = vfmaq_n_f32(sums[r][q], v[q], f32::from_bits(w[r][i]));
            }
        }
    }
    for r in 0..R {
        for q in 0..4 {
            store(&mut out[r * out_row..], QUARTER * q, sums[r][q]);
        }
    }
}
