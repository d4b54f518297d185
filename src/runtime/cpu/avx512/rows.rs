//! AVX-512: weighted sums of rows.

use super::super::kernels::Mix;
use super::store;
use std::arch::x86_64::*;

pub(super) const F32: u8 = 0;

pub(super) const F16: u8 = 1;

pub(super) const BF16: u8 = 2;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn mix<const TYPE: u8>(mix: &Mix<'_>, out: &mut [[f32; 16]]) {
    for (weights, out) in mix.weights.chunks(8).zip(out.chunks_mut(8)) {
        let values = mix.values;
        match weights.len() {
            1 => mix_sized::<TYPE, 1>(values, mix.stride, weights, out),
            2 => mix_sized::<TYPE, 2>(values, mix.stride, weights, out),
            3 => mix_sized::<TYPE, 3>(values, mix.stride, weights, out),
            4 => mix_sized::<TYPE, 4>(values, mix.stride, weights, out),
            5 => mix_sized::<TYPE, 5>(values, mix.stride, weights, out),
            6 => mix_sized::<TYPE, 6>(values, mix.stride, weights, out),
            7 => mix_sized::<TYPE, 7>(values, mix.stride, weights, out),
            _ => mix_sized::<TYPE, 8>(values, mix.stride, weights, out),
        }
    }
}

/// `R` outputs, all in registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn mix_sized<const TYPE: u8, const R: usize>(values: &[u8], stride: usize, weights: &[&[f32]], out: &mut [[f32; 16]]) {
    let size = if TYPE == F32 { 4 } else { 2 };
    let count = weights[0].len();
    let mut w = [std::ptr::null::<f32>(); R];
    for r in 0..R {
        w[r] = weights[r][..count].as_ptr();
    }
    let mut sums = [_mm512_setzero_ps(); R];
    for i in 0..count {
        // SAFETY: the values have 16 elements for each weight.
        let v = unsafe { widened::<TYPE>(values.as_ptr().add(i * stride * size), !0) };
        for r in 0..R {
            // SAFETY: there are `count` weights for each output.
            sums[r] = _mm512_fmadd_ps(v, _mm512_set1_ps(unsafe { *w[r].add(i) }), sums[r]);
        }
    }
    for r in 0..R {
        store(&mut out[r], 0, sums[r]);
    }
}

/// The elements of the mask as floats.
///
/// # Safety
/// They are readable at `from`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn widened<const TYPE: u8>(from: *const u8, mask: __mmask16) -> __m512 {
    if TYPE == F32 {
        // SAFETY: the caller's promise.
        return unsafe { _mm512_maskz_loadu_ps(mask, from.cast()) };
    }
    // SAFETY: the caller's promise.
    let half = unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) };
    if TYPE == F16 {
        return _mm512_cvtph_ps(half);
    }
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
}
