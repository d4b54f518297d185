//! AVX2: plain rows times activations. The 16 lanes of a sum are two registers, so a rectangle of 2 rows x 3 columns keeps 12
//! of the 16 registers.

use super::super::MatrixStore;
use super::super::kernels::{Part, with_size};
use super::super::mix::{BF16, F16, F32};
use super::super::plain::{Product, STRIPE, Sums, run};
use super::super::region::Sink;
use super::HALF;
use super::rows::widened;
use crate::dtype::DType;
use std::arch::x86_64::*;
use std::ops::Range;

/// F32, F16 and BF16 rows times f32 activations.
///
/// # Safety
/// As [`super::super::kernels::PlainFn`].
pub(super) unsafe fn plain(part: &Part<'_>, sink: &Sink<'_>) {
    // SAFETY: the caller's promises.
    unsafe {
        match part.matrix.store {
            MatrixStore::Plain(DType::F32) => run::<Wide<F32>>(part, sink, &mut Sums::new()),
            MatrixStore::Plain(DType::F16) => run::<Wide<F16>>(part, sink, &mut Sums::new()),
            MatrixStore::Plain(_) => run::<Wide<BF16>>(part, sink, &mut Sums::new()),
            MatrixStore::Tiled(_) => unreachable!("tiles have their own kernels"),
        }
    }
}

/// BF16 rows times BF16 activations.
///
/// # Safety
/// As [`super::super::kernels::PlainFn`].
pub(super) unsafe fn bf16(part: &Part<'_>, sink: &Sink<'_>) {
    // SAFETY: the caller's promises.
    unsafe { run::<Pairs>(part, sink, &mut Sums::new()) }
}

/// Weights widened to f32 times f32 activations.
struct Wide<const TYPE: u8>;

/// BF16 pairs by two fused multiply-adds.
struct Pairs;

impl<const TYPE: u8> Product for Wide<TYPE> {
    const ROWS: usize = 2;
    const COLS: usize = 3;
    const DEPTH: usize = 2048;

    unsafe fn rectangle(part: &Part<'_>, k: Range<usize>, sums: &mut [[f32; 16]]) {
        // SAFETY: the caller's promises.
        unsafe { with_size!(part, [(1, 1)(1, 2)(1, 3)(2, 1)(2, 2)(2, 3)], R, C, wide::<TYPE, R, C>(part, k, sums)) }
    }
}

impl Product for Pairs {
    const ROWS: usize = 2;
    const COLS: usize = 3;
    const DEPTH: usize = 4096;

    unsafe fn rectangle(part: &Part<'_>, k: Range<usize>, sums: &mut [[f32; 16]]) {
        // SAFETY: the caller's promises.
        unsafe { with_size!(part, [(1, 1)(1, 2)(1, 3)(2, 1)(2, 2)(2, 3)], R, C, pairs::<R, C>(part, k, sums)) }
    }
}

/// 16 elements of K at a time in two registers; lanes that a rest does not reach are left alone.
///
/// # Safety
/// As [`Product::rectangle`], for `R` rows and `C` columns.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn wide<const TYPE: u8, const R: usize, const C: usize>(
    part: &Part<'_>,
    k: Range<usize>,
    sums: &mut [[f32; 16]],
) {
    let (cols, size) = (part.matrix.cols, if TYPE == F32 { 4 } else { 2 });
    let w = part.matrix.data[part.item * cols * size..][..R * cols * size].as_ptr();
    let mut x = [std::ptr::null::<f32>(); C];
    for c in 0..C {
        // Rows of activations are padded to blocks, so 16 values are readable from any multiple of 16 on.
        x[c] = part.x.row(part.col + c)[..cols.next_multiple_of(16)].as_ptr();
    }
    let mut acc = load_sums::<R, C>(sums, k.start);
    let (whole, rest) = (k.start + (k.end - k.start) / 16 * 16, (k.end - k.start) % 16);
    for k in (k.start..whole).step_by(16) {
        for r in 0..R {
            // SAFETY: 16 elements from k on lie inside row r of the weights.
            let w = unsafe { widened::<TYPE>(w.add((r * cols + k) * size)) };
            for c in 0..C {
                for h in 0..2 {
                    // SAFETY: 16 values from k on lie inside the row of activations.
                    let a = unsafe { _mm256_loadu_ps(x[c].add(k + HALF * h)) };
                    acc[r][c][h] = _mm256_fmadd_ps(w[h], a, acc[r][c][h]);
                }
            }
        }
    }
    if rest > 0 {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        for r in 0..R {
            // SAFETY: the rest of row r is readable.
            let padded = unsafe { padded(w.add((r * cols + whole) * size), rest * size) };
            // SAFETY: 16 elements are readable.
            let w = unsafe { widened::<TYPE>(padded.as_ptr()) };
            for (c, h) in (0..C).flat_map(|c| [(c, 0), (c, 1)]) {
                // SAFETY: 16 values are readable, the padding included.
                let a = unsafe { _mm256_loadu_ps(x[c].add(whole + HALF * h)) };
                // Adding zero would turn -0 into +0.
                let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(rest as i32 - (HALF * h) as i32), lanes);
                let sum = _mm256_fmadd_ps(w[h], a, acc[r][c][h]);
                acc[r][c][h] = _mm256_blendv_ps(acc[r][c][h], sum, _mm256_castsi256_ps(mask));
            }
        }
    }
    store_sums(&acc, sums);
}

/// 32 elements of K at a time; what is left of a row is padded with zeros.
///
/// # Safety
/// As [`Product::rectangle`], for `R` rows and `C` columns.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pairs<const R: usize, const C: usize>(part: &Part<'_>, k: Range<usize>, sums: &mut [[f32; 16]]) {
    let cols = part.matrix.cols;
    let w = part.matrix.data[2 * part.item * cols..][..2 * R * cols].as_ptr();
    let mut x = [std::ptr::null::<u16>(); C];
    for c in 0..C {
        x[c] = part.x.row_bf16(part.col + c)[..cols.next_multiple_of(32)].as_ptr();
    }
    let mut acc = load_sums::<R, C>(sums, k.start);
    let (whole, rest) = (k.start + (k.end - k.start) / 32 * 32, (k.end - k.start) % 32);
    for k in (k.start..whole).step_by(32) {
        // SAFETY: 32 elements from k on lie inside each row of the weights and of the activations.
        unsafe { multiply(std::array::from_fn(|r| w.add(2 * (r * cols + k))), x.map(|x| x.add(k)), &mut acc) };
    }
    if rest > 0 {
        // SAFETY: the rest of each row is readable.
        let rows: [_; R] = std::array::from_fn(|r| unsafe { padded(w.add(2 * (r * cols + whole)), 2 * rest) });
        // SAFETY: 32 elements of each row are readable, those of the activations with their padding.
        unsafe { multiply(std::array::from_fn(|r| rows[r].as_ptr()), x.map(|x| x.add(whole)), &mut acc) };
    }
    store_sums(&acc, sums);
}

/// Adds the products of 32 elements: in each lane that of the upper element of a pair, then that of the lower.
///
/// # Safety
/// They are readable at all pointers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply<const R: usize, const C: usize>(
    w: [*const u8; R],
    x: [*const u16; C],
    acc: &mut [[[__m256; 2]; C]; R],
) {
    for h in 0..2 {
        let mut weights = [[_mm256_setzero_ps(); 2]; R];
        for r in 0..R {
            // SAFETY: the caller's promise; the load has no alignment demand.
            weights[r] = halves(unsafe { _mm256_loadu_si256(w[r].add(32 * h).cast()) });
        }
        for c in 0..C {
            // SAFETY: as above.
            let a = halves(unsafe { _mm256_loadu_si256(x[c].add(16 * h).cast()) });
            for r in 0..R {
                let upper = _mm256_fmadd_ps(weights[r][0], a[0], acc[r][c][h]);
                acc[r][c][h] = _mm256_fmadd_ps(weights[r][1], a[1], upper);
            }
        }
    }
}

/// The upper and the lower element of each pair as floats.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn halves(pairs: __m256i) -> [__m256; 2] {
    let upper = _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF_0000u32 as i32));
    [_mm256_castsi256_ps(upper), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs))]
}

/// These bytes, at most 64, with zeros behind them.
///
/// # Safety
/// They are readable.
#[inline]
unsafe fn padded(from: *const u8, bytes: usize) -> [u8; 64] {
    let mut padded = [0; 64];
    // SAFETY: the caller's promise.
    padded[..bytes].copy_from_slice(unsafe { std::slice::from_raw_parts(from, bytes) });
    padded
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_sums<const R: usize, const C: usize>(sums: &[[f32; 16]], start: usize) -> [[[__m256; 2]; C]; R] {
    let mut acc = [[[_mm256_setzero_ps(); 2]; C]; R];
    if start == 0 {
        return acc;
    }
    for (r, c) in (0..R).flat_map(|r| (0..C).map(move |c| (r, c))) {
        let sum = &sums[c * STRIPE + r];
        // SAFETY: 8 readable floats each.
        acc[r][c] = unsafe { [_mm256_loadu_ps(sum.as_ptr()), _mm256_loadu_ps(sum[HALF..].as_ptr())] };
    }
    acc
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_sums<const R: usize, const C: usize>(acc: &[[[__m256; 2]; C]; R], sums: &mut [[f32; 16]]) {
    for (r, c) in (0..R).flat_map(|r| (0..C).map(move |c| (r, c))) {
        super::store(&mut sums[c * STRIPE + r], 0, acc[r][c][0]);
        super::store(&mut sums[c * STRIPE + r], HALF, acc[r][c][1]);
    }
}
