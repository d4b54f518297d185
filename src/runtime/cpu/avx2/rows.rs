//! AVX2: plain rows times float activations, and weighted sums of rows.

use super::super::MatrixStore;
use super::super::kernels::{Mix, Part, with_size};
use super::{HALF, store};
use crate::dtype::DType;
use std::arch::x86_64::*;

pub(super) const F32: u8 = 0;

pub(super) const F16: u8 = 1;

const BF16: u8 = 2;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn plain(part: &Part<'_>, out: &mut [f32]) {
    match part.matrix.store {
        MatrixStore::Plain(DType::F32) => plain_sized::<F32>(part, out),
        MatrixStore::Plain(DType::F16) => plain_sized::<F16>(part, out),
        MatrixStore::Plain(_) => plain_sized::<BF16>(part, out),
        MatrixStore::Tiled(_) => unreachable!("tiles have their own kernels"),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn plain_sized<const TYPE: u8>(part: &Part<'_>, out: &mut [f32]) {
    with_size!(part, [(1, 1)(1, 2)(1, 3)(2, 1)(2, 2)(2, 3)], R, C, rows::<TYPE, R, C>(part, out));
}

/// `R` rows times `C` tokens, 16 elements of K at a time in two registers.
#[target_feature(enable = "avx2,fma,f16c")]
fn rows<const TYPE: u8, const R: usize, const C: usize>(part: &Part<'_>, out: &mut [f32]) {
    let cols = part.matrix.cols;
    let size = if TYPE == F32 { 4 } else { 2 };
    let w = part.matrix.data[part.item * cols * size..][..R * cols * size].as_ptr();
    let (whole, rest) = (cols / 16 * 16, cols % 16);
    let mut x = [std::ptr::null::<f32>(); C];
    for c in 0..C {
        // Rows of activations are padded to blocks, so 16 values are readable from `whole` on.
        x[c] = part.x.row(part.col + c)[..cols.next_multiple_of(16)].as_ptr();
    }
    let mut sums = [[[_mm256_setzero_ps(); 2]; C]; R];
    for k in (0..whole).step_by(16) {
        for r in 0..R {
            // SAFETY: 16 elements from k on lie inside row r of the weights.
            let w = unsafe { widened::<TYPE>(w.add((r * cols + k) * size)) };
            for c in 0..C {
                for h in 0..2 {
                    // SAFETY: 16 values from k on lie inside the row of activations.
                    let a = unsafe { _mm256_loadu_ps(x[c].add(k + 8 * h)) };
                    sums[r][c][h] = _mm256_fmadd_ps(w[h], a, sums[r][c][h]);
                }
            }
        }
    }
    if rest > 0 {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        for r in 0..R {
            let mut padded = [0u8; 64];
            // SAFETY: the rest of row r is readable.
            let left = unsafe { std::slice::from_raw_parts(w.add((r * cols + whole) * size), rest * size) };
            padded[..rest * size].copy_from_slice(left);
            // SAFETY: 16 elements are readable.
            let w = unsafe { widened::<TYPE>(padded.as_ptr()) };
            for (c, h) in (0..C).flat_map(|c| [(c, 0), (c, 1)]) {
                // SAFETY: 16 values are readable, the padding included.
                let a = unsafe { _mm256_loadu_ps(x[c].add(whole + 8 * h)) };
                // Lanes without an element are left alone: adding zero would turn -0 into +0.
                let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(rest as i32 - 8 * h as i32), lanes);
                let sum = _mm256_fmadd_ps(w[h], a, sums[r][c][h]);
                sums[r][c][h] = _mm256_blendv_ps(sums[r][c][h], sum, _mm256_castsi256_ps(mask));
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            out[c * R + r] = fold(sums[r][c]);
        }
    }
}

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
unsafe fn widened<const TYPE: u8>(from: *const u8) -> [__m256; 2] {
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

/// Folds 16 lanes: 8, 4, 2, 1.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fold(v: [__m256; 2]) -> f32 {
    let eight = _mm256_add_ps(v[0], v[1]);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}
