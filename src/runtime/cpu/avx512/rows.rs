//! AVX-512: plain rows times float activations, and weighted sums of rows.

use super::super::MatrixStore;
use super::super::kernels::{Mix, Part, with_size};
use super::store;
use crate::dtype::DType;
use std::arch::x86_64::*;

pub(super) const F32: u8 = 0;

pub(super) const F16: u8 = 1;

const BF16: u8 = 2;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn plain(part: &Part<'_>, out: &mut [f32]) {
    match part.matrix.store {
        MatrixStore::Plain(DType::F32) => plain_sized::<F32>(part, out),
        MatrixStore::Plain(DType::F16) => plain_sized::<F16>(part, out),
        MatrixStore::Plain(_) => plain_sized::<BF16>(part, out),
        MatrixStore::Tiled(_) => unreachable!("tiles have their own kernels"),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn plain_sized<const TYPE: u8>(part: &Part<'_>, out: &mut [f32]) {
    with_size!(
        part,
        [(1, 1)(1, 2)(1, 3)(1, 4)(1, 5)(1, 6)(2, 1)(2, 2)(2, 3)(2, 4)(2, 5)(2, 6)(3, 1)(3, 2)(3, 3)(3, 4)(3, 5)(3, 6)(
            4, 1
        )(4, 2)(4, 3)(4, 4)(4, 5)(4, 6)],
        R,
        C,
        rows::<TYPE, R, C>(part, out)
    );
}

/// `R` rows times `C` tokens, 16 elements of K at a time; what is left of a row is masked, and its lanes are left alone.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn rows<const TYPE: u8, const R: usize, const C: usize>(part: &Part<'_>, out: &mut [f32]) {
    let cols = part.matrix.cols;
    let size = if TYPE == F32 { 4 } else { 2 };
    let w = part.matrix.data[part.item * cols * size..][..R * cols * size].as_ptr();
    let mut x = [std::ptr::null(); C];
    for c in 0..C {
        x[c] = part.x.row(part.col + c)[..cols].as_ptr();
    }
    let mut sums = [[_mm512_setzero_ps(); C]; R];
    let whole = cols / 16 * 16;
    for k in (0..whole).step_by(16) {
        let mut a = [_mm512_setzero_ps(); C];
        for c in 0..C {
            // SAFETY: 16 elements from k on lie inside the row of activations.
            a[c] = unsafe { _mm512_loadu_ps(x[c].add(k)) };
        }
        for r in 0..R {
            if R > 1 && k * size % 64 == 0 {
                _mm_prefetch::<_MM_HINT_T1>(w.wrapping_add(((r + R) * cols + k) * size).cast());
            }
            // SAFETY: 16 elements from k on lie inside row r of the weights.
            let w = unsafe { widened::<TYPE>(w.add((r * cols + k) * size), !0) };
            for c in 0..C {
                sums[r][c] = _mm512_fmadd_ps(w, a[c], sums[r][c]);
            }
        }
    }
    if whole < cols {
        let mask = (1 << (cols - whole)) - 1;
        for c in 0..C {
            // SAFETY: only the elements of the mask are read, which lie inside the row.
            let a = unsafe { _mm512_maskz_loadu_ps(mask, x[c].add(whole)) };
            for r in 0..R {
                // SAFETY: as above, for row r of the weights.
                let w = unsafe { widened::<TYPE>(w.add((r * cols + whole) * size), mask) };
                sums[r][c] = _mm512_mask3_fmadd_ps(w, a, sums[r][c], mask);
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            out[c * R + r] = fold(sums[r][c]);
        }
    }
}

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
unsafe fn widened<const TYPE: u8>(from: *const u8, mask: __mmask16) -> __m512 {
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

/// Folds 16 lanes: 8, 4, 2, 1.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn fold(v: __m512) -> f32 {
    let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
    let eight = _mm256_add_ps(_mm512_castps512_ps256(v), upper);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}
