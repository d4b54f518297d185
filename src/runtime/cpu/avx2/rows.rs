//! AVX2: weighted sums of rows.

use super::super::kernels::Mix;
use super::{HALF, store};
use std::arch::x86_64::*;

pub(super) const F32: u8 = 0;

pub(super) const F16: u8 = 1;

pub(super) const BF16: u8 = 2;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn mix<const TYPE: u8>(mix: &Mix<'_>, out: &mut [[f32; 16]]) {
    for (weights, out) in mix.weights.chunks(4).zip(out.chunks_mut(4)) {
        let values = mix.values;
        match weights.len() {
            1 => mix_sized::<TYPE, 1>(values, mix.stride, weights, out),
            2 => mix_sized::<TYPE, 2>(values, mix.stride, weights, out),
            3 => mix_sized::<TYPE, 3>(values, mix.stride, weights, out),
            _ => mix_sized::<TYPE, 4>(values, mix.stride, weights, out),
        }
    }
}

/// `R` outputs, all in registers.
#[target_feature(enable = "avx2,fma,f16c")]
fn mix_sized<const TYPE: u8, const R: usize>(values: &[u8], stride: usize, weights: &[&[f32]], out: &mut [[f32; 16]]) {
    let size = if TYPE == F32 { 4 } else { 2 };
    let count = weights[0].len();
    let mut w = [std::ptr::null::<f32>(); R];
    for r in 0..R {
        w[r] = weights[r][..count].as_ptr();
    }
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for i in 0..count {
        // SAFETY: the values have 16 elements for each weight.
        let v = unsafe { widened::<TYPE>(values.as_ptr().add(i * stride * size)) };
        for r in 0..R {
            // SAFETY: there are `count` weights for each output.
            let w = _mm256_set1_ps(unsafe { *w[r].add(i) });
            sums[r] = [_mm256_fmadd_ps(v[0], w, sums[r][0]), _mm256_fmadd_ps(v[1], w, sums[r][1])];
        }
    }
    for r in 0..R {
        store(&mut out[r], 0, sums[r][0]);
        store(&mut out[r], HALF, sums[r][1]);
    }
}

/// 16 elements as floats.
///
/// # Safety
/// They are readable at `from`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn widened<const TYPE: u8>(from: *const u8) -> [__m256; 2] {
    let mut wide = [_mm256_setzero_ps(); 2];
    for h in 0..2 {
        // SAFETY: the caller's promise; the loads have no alignment demand.
        wide[h] = unsafe {
            match TYPE {
                F32 => _mm256_loadu_ps(from.add(32 * h).cast()),
                F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.add(16 * h).cast())),
                _ => {
                    let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(16 * h).cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
                }
            }
        };
    }
    wide
}
