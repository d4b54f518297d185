//! AVX-512: plain rows times activations.
//!
//! A rectangle of 4 rows x 6 columns keeps 24 accumulators in the 32 registers and needs 10 loads for 24 products.
//! BF16 pairs are multiplied by `vdpbf16ps` where it gives the bits of two fused multiply-adds, which it does unless a
//! number that is not normal turns up: it takes and makes such numbers as zeros.

use super::super::MatrixStore;
use super::super::kernels::{AHEAD, Part, with_size};
use super::super::mix::{BF16, F16, F32};
use super::super::plain::{Product, STRIPE, Sums, run};
use super::super::region::Sink;
use super::rows::widened;
use crate::dtype::DType;
use std::arch::x86_64::*;
use std::ops::Range;

const ROWS: usize = 4;

const COLS: usize = 6;

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

/// BF16 rows times BF16 activations, for processors with AVX512_BF16.
///
/// # Safety
/// As [`super::super::kernels::PlainFn`].
pub(super) unsafe fn bf16(part: &Part<'_>, sink: &Sink<'_>) {
    let mut sums = Sums::new();
    for col in (part.col..part.col + part.cols).step_by(COLS) {
        let part = Part { col, cols: COLS.min(part.col + part.cols - col), ..*part };
        // SAFETY: the caller's promises, and the columns lie inside the part.
        unsafe {
            match part.stays_normal() {
                true => run::<Dots>(&part, sink, &mut sums),
                false => run::<Pairs>(&part, sink, &mut sums),
            }
        }
    }
}

/// The same for processors without.
///
/// # Safety
/// As [`super::super::kernels::PlainFn`].
pub(super) unsafe fn bf16_emulated(part: &Part<'_>, sink: &Sink<'_>) {
    // SAFETY: the caller's promises.
    unsafe { run::<Pairs>(part, sink, &mut Sums::new()) }
}

/// Weights widened to f32 times f32 activations.
struct Wide<const TYPE: u8>;

/// BF16 pairs by two fused multiply-adds.
struct Pairs;

/// BF16 pairs by `vdpbf16ps`.
struct Dots;

/// Implements [`Product`] by a function that is generic over the size of the rectangle.
macro_rules! product {
    ($depth:literal, $function:ident $(, $type:ident)?) => {
        const ROWS: usize = ROWS;
        const COLS: usize = COLS;
        const DEPTH: usize = $depth;

        unsafe fn rectangle(part: &Part<'_>, k: Range<usize>, sums: &mut [[f32; 16]]) {
            // SAFETY: the caller's promises.
            unsafe {
                with_size!(
                    part,
                    [(1, 1)(1, 2)(1, 3)(1, 4)(1, 5)(1, 6)(2, 1)(2, 2)(2, 3)(2, 4)(2, 5)(2, 6)(3, 1)(3, 2)(3, 3)(3, 4)(
                        3, 5
                    )(3, 6)(4, 1)(4, 2)(4, 3)(4, 4)(4, 5)(4, 6)],
                    R,
                    C,
                    $function::<$($type,)? R, C>(part, k, sums)
                )
            }
        }

        unsafe fn fold(sums: &[[f32; 16]], out: &mut [f32]) {
            // SAFETY: the caller's promises.
            unsafe { fold(sums, out) }
        }
    };
}

impl<const TYPE: u8> Product for Wide<TYPE> {
    product!(1024, wide, TYPE);
}

impl Product for Pairs {
    product!(2048, pairs);
}

impl Product for Dots {
    product!(2048, dots);
}

/// 16 elements of K at a time; what is left of a row is masked, and its lanes are left alone.
///
/// # Safety
/// As [`Product::rectangle`], for `R` rows and `C` columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn wide<const TYPE: u8, const R: usize, const C: usize>(
    part: &Part<'_>,
    k: Range<usize>,
    sums: &mut [[f32; 16]],
) {
    let (cols, size) = (part.matrix.cols, if TYPE == F32 { 4 } else { 2 });
    let w = part.matrix.data[part.item * cols * size..][..R * cols * size].as_ptr();
    let mut x = [std::ptr::null(); C];
    for c in 0..C {
        x[c] = part.x.row(part.col + c)[..cols].as_ptr();
    }
    let (mut acc, first) = (load_sums::<R, C>(sums, k.start), part.col == 0);
    let whole = k.start + (k.end - k.start) / 16 * 16;
    for k in (k.start..whole).step_by(16) {
        let mut a = [_mm512_setzero_ps(); C];
        for c in 0..C {
            // SAFETY: 16 elements from k on lie inside the row of activations.
            a[c] = unsafe { _mm512_loadu_ps(x[c].add(k)) };
        }
        for r in 0..R {
            let at = (r * cols + k) * size;
            ask_ahead::<R, C>(first, w, at, cols * size);
            // SAFETY: 16 elements from k on lie inside row r of the weights.
            let w = unsafe { widened::<TYPE>(w.add(at), !0) };
            for c in 0..C {
                acc[r][c] = _mm512_fmadd_ps(w, a[c], acc[r][c]);
            }
        }
    }
    if whole < k.end {
        let mask = (1 << (k.end - whole)) - 1;
        for c in 0..C {
            // SAFETY: only the elements of the mask are read, which lie inside the row.
            let a = unsafe { _mm512_maskz_loadu_ps(mask, x[c].add(whole)) };
            for r in 0..R {
                // SAFETY: as above, for row r of the weights.
                let w = unsafe { widened::<TYPE>(w.add((r * cols + whole) * size), mask) };
                acc[r][c] = _mm512_mask3_fmadd_ps(w, a, acc[r][c], mask);
            }
        }
    }
    store_sums(&acc, sums);
}

/// Defines a function over BF16 pairs, 32 elements of K at a time; what is left of a row is padded with zeros.
macro_rules! over_pairs {
    ($name:ident, $features:literal, $multiply:expr) => {
        /// # Safety
        /// As [`Product::rectangle`], for `R` rows and `C` columns.
        #[target_feature(enable = $features)]
        unsafe fn $name<const R: usize, const C: usize>(part: &Part<'_>, k: Range<usize>, sums: &mut [[f32; 16]]) {
            let multiply = $multiply;
            let cols = part.matrix.cols;
            let w = part.matrix.data[2 * part.item * cols..][..2 * R * cols].as_ptr();
            let mut x = [std::ptr::null::<u16>(); C];
            for c in 0..C {
                x[c] = part.x.row_bf16(part.col + c)[..cols.next_multiple_of(32)].as_ptr();
            }
            let (mut acc, first) = (load_sums::<R, C>(sums, k.start), part.col == 0);
            let whole = k.start + (k.end - k.start) / 32 * 32;
            for k in (k.start..whole).step_by(32) {
                let mut a = [_mm512_setzero_si512(); C];
                for c in 0..C {
                    // SAFETY: 32 elements from k on lie inside the row of activations.
                    a[c] = unsafe { _mm512_loadu_si512(x[c].add(k).cast()) };
                }
                for r in 0..R {
                    let at = 2 * (r * cols + k);
                    ask_ahead::<R, C>(first, w, at, 2 * cols);
                    // SAFETY: 32 elements from k on lie inside row r of the weights.
                    let w = unsafe { _mm512_loadu_si512(w.add(at).cast()) };
                    for c in 0..C {
                        acc[r][c] = multiply(acc[r][c], w, a[c]);
                    }
                }
            }
            if whole < k.end {
                let mask = (1 << (k.end - whole)) - 1;
                for c in 0..C {
                    // SAFETY: 32 elements from there on are readable, the padding included.
                    let a = unsafe { _mm512_loadu_si512(x[c].add(whole).cast()) };
                    for r in 0..R {
                        // SAFETY: only the elements of the mask are read, which lie inside row r.
                        let w = unsafe { _mm512_maskz_loadu_epi16(mask, w.add(2 * (r * cols + whole)).cast()) };
                        acc[r][c] = multiply(acc[r][c], w, a);
                    }
                }
            }
            store_sums(&acc, sums);
        }
    };
}

over_pairs!(pairs, "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c", |sum, w, a| {
    let upper = |v| _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(0xFFFF_0000u32 as i32)));
    let lower = |v| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v));
    _mm512_fmadd_ps(lower(w), lower(a), _mm512_fmadd_ps(upper(w), upper(a), sum))
});

over_pairs!(dots, "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c", |sum, w, a| {
    // SAFETY: both types are 64 bytes without invalid values.
    let pairs = |v| unsafe { std::mem::transmute::<__m512i, __m512bh>(v) };
    _mm512_dpbf16_ps(sum, pairs(w), pairs(a))
});

/// The first columns find the weights in memory; asks for the rows of the next rectangle, or for what a single column will
/// read soon.
#[inline]
#[target_feature(enable = "avx512f")]
fn ask_ahead<const R: usize, const C: usize>(first: bool, w: *const u8, at: usize, row_bytes: usize) {
    if R == 1 && C == 1 && at.is_multiple_of(64) {
        _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(at + AHEAD).cast());
    } else if first && R == ROWS && at.is_multiple_of(64) {
        _mm_prefetch::<_MM_HINT_T1>(w.wrapping_add(at + R * row_bytes).cast());
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_sums<const R: usize, const C: usize>(sums: &[[f32; 16]], start: usize) -> [[__m512; C]; R] {
    let mut acc = [[_mm512_setzero_ps(); C]; R];
    if start == 0 {
        return acc;
    }
    for r in 0..R {
        for c in 0..C {
            // SAFETY: 16 readable floats.
            acc[r][c] = unsafe { _mm512_loadu_ps(sums[c * STRIPE + r].as_ptr()) };
        }
    }
    acc
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_sums<const R: usize, const C: usize>(acc: &[[__m512; C]; R], sums: &mut [[f32; 16]]) {
    for r in 0..R {
        for c in 0..C {
            // SAFETY: 16 writable floats.
            unsafe { _mm512_storeu_ps(sums[c * STRIPE + r].as_mut_ptr(), acc[r][c]) };
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn fold(sums: &[[f32; 16]], out: &mut [f32]) {
    let (sums, rest) = sums.as_chunks::<16>();
    let (out, last) = out.as_chunks_mut::<16>();
    for (sums, out) in sums.iter().zip(out) {
        let sums = fold_16(sums);
        // SAFETY: 16 writable floats.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sums) };
    }
    if !rest.is_empty() {
        let mut padded = [[0.0; 16]; 16];
        padded[..rest.len()].copy_from_slice(rest);
        let mut out = [0.0; 16];
        // SAFETY: 16 writable floats.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), fold_16(&padded)) };
        last.copy_from_slice(&out[..last.len()]);
    }
}

/// Folds the lanes of 16 sums at once: in each step the halves of two vectors meet, so that one addition serves both. What
/// stays in its place is blended, which more units can do than shuffle.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn fold_16(sums: &[[f32; 16]; 16]) -> __m512 {
    let mut eight = [_mm512_setzero_ps(); 8];
    for i in 0..8 {
        // SAFETY: 16 readable floats each.
        let (a, b) = unsafe { (_mm512_loadu_ps(sums[i].as_ptr()), _mm512_loadu_ps(sums[i + 8].as_ptr())) };
        eight[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xFF00, a, b), _mm512_shuffle_f32x4::<0x4E>(a, b));
    }
    // Sums i and i + 8 lie in the halves of a vector; now i, i + 4, i + 8 and i + 12 come to its quarters.
    let mut four = [_mm512_setzero_ps(); 4];
    for i in 0..4 {
        let (a, b) = (eight[i], eight[i + 4]);
        let others = _mm512_mask_blend_ps(0xF0F0, b, a);
        four[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xF0F0, a, b), _mm512_shuffle_f32x4::<0xB1>(others, others));
    }
    let mut two = [_mm512_setzero_ps(); 2];
    for i in 0..2 {
        let (a, b) = (four[i], four[i + 2]);
        two[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xCCCC, a, b), _mm512_shuffle_ps::<0x4E>(a, b));
    }
    let [a, b] = two;
    let one = _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xDD>(a, b));
    _mm512_permute_ps::<0xD8>(one)
}
