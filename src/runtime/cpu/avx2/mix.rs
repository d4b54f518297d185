//! AVX2: weighted sums of vectors.

use super::super::mix::{BF16, F16, Mix};
use super::{HALF, store};
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,fma,f16c")]
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

/// `R` outputs of one vector, all in registers.
#[target_feature(enable = "avx2,fma,f16c")]
fn sums<const TYPE: u8, const R: usize>(mix: &Mix<'_>, row: usize, vector: usize, out: &mut [f32], out_row: usize) {
    let mut w = [std::ptr::null::<u32>(); R];
    for r in 0..R {
        w[r] = mix.weights[(row + r) * mix.weight_row..][..mix.steps].as_ptr();
    }
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    let mut values = mix.values[vector * mix.vector..].as_ptr();
    for i in 0..mix.steps {
        // SAFETY: the values have this vector for each step.
        let v = unsafe { [widened::<TYPE>(values, 0), widened::<TYPE>(values, 1)] };
        for r in 0..R {
            // SAFETY: there are `steps` weights for each output.
            let [even, odd] = parts::<TYPE>(_mm256_set1_epi32(unsafe { *w[r].add(i) } as i32));
            for h in 0..2 {
                if TYPE == BF16 {
                    sums[r][h] = _mm256_fmadd_ps(v[h][1], odd, sums[r][h]);
                }
                sums[r][h] = _mm256_fmadd_ps(v[h][0], even, sums[r][h]);
            }
        }
        values = values.wrapping_add(mix.step);
    }
    for r in 0..R {
        store(&mut out[r * out_row..], 0, sums[r][0]);
        store(&mut out[r * out_row..], HALF, sums[r][1]);
    }
}

/// Half of a step as floats: one vector, or the even and the odd ones of pairs.
///
/// # Safety
/// A vector of the type is readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widened<const TYPE: u8>(from: *const u8, half: usize) -> [__m256; 2] {
    // SAFETY: the caller's promise; the loads have no alignment demand.
    unsafe {
        match TYPE {
            F16 => [_mm256_cvtph_ps(_mm_loadu_si128(from.add(16 * half).cast())), _mm256_setzero_ps()],
            _ => parts::<TYPE>(_mm256_loadu_si256(from.add(32 * half).cast())),
        }
    }
}

/// Words as floats: themselves, or the even and the odd numbers of pairs.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn parts<const TYPE: u8>(words: __m256i) -> [__m256; 2] {
    if TYPE != BF16 {
        return [_mm256_castsi256_ps(words), _mm256_setzero_ps()];
    }
    let odd = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)), _mm256_castsi256_ps(odd)]
}
