//! NEON: plain rows times activations.

use super::super::MatrixStore;
use super::super::kernels::{Part, with_size};
use super::super::mix::{BF16, F16, F32};
use super::super::plain::{Product, STRIPE, Sums, run};
use super::super::region::Sink;
use super::rows::widened;
use super::{QUARTER, store};
use crate::dtype::DType;
use std::arch::aarch64::*;
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

/// 16 elements of K at a time in four registers.
#[target_feature(enable = "neon")]
fn wide<const TYPE: u8, const R: usize, const C: usize>(part: &Part<'_>, k: Range<usize>, sums: &mut [[f32; 16]]) {
    let (cols, size) = (part.matrix.cols, if TYPE == F32 { 4 } else { 2 });
    let w = &part.matrix.data[part.item * cols * size..][..R * cols * size];
    let mut x: [&[[f32; 4]]; C] = [&[]; C];
    for c in 0..C {
        // Rows of activations are padded to blocks, so 16 values are readable from any multiple of 16 on.
        x[c] = part.x.row(part.col + c).as_chunks().0;
    }
    let mut acc = load_sums::<R, C>(sums, k.start);
    let (whole, rest) = (k.start + (k.end - k.start) / 16 * 16, (k.end - k.start) % 16);
    for k in (k.start..whole).step_by(16) {
        for r in 0..R {
            let w = widened::<TYPE>(&w[(r * cols + k) * size..][..16 * size]);
            for c in 0..C {
                for (q, x) in x[c][k / 4..][..4].iter().enumerate() {
                    // SAFETY: 4 readable floats.
                    acc[r][c][q] = vfmaq_f32(acc[r][c][q], w[q], unsafe { vld1q_f32(x.as_ptr()) });
                }
            }
        }
    }
    if rest > 0 {
        for r in 0..R {
            let mut padded = [0u8; 64];
            padded[..rest * size].copy_from_slice(&w[(r * cols + whole) * size..][..rest * size]);
            let w = widened::<TYPE>(&padded);
            for c in 0..C {
                for (q, x) in x[c][whole / 4..][..4].iter().enumerate() {
                    // SAFETY: 4 readable floats.
                    let sum = vfmaq_f32(acc[r][c][q], w[q], unsafe { vld1q_f32(x.as_ptr()) });
                    // Lanes without an element are left alone: adding zero would turn -0 into +0.
                    let mask: [u32; 4] = std::array::from_fn(|l| if 4 * q + l < rest { u32::MAX } else { 0 });
                    // SAFETY: 4 readable lanes.
                    acc[r][c][q] = vbslq_f32(unsafe { vld1q_u32(mask.as_ptr()) }, sum, acc[r][c][q]);
                }
            }
        }
    }
    store_sums(&acc, sums);
}

/// 32 elements of K at a time; what is left of a row is padded with zeros.
#[target_feature(enable = "neon")]
fn pairs<const R: usize, const C: usize>(part: &Part<'_>, k: Range<usize>, sums: &mut [[f32; 16]]) {
    let cols = part.matrix.cols;
    let w = &part.matrix.data[2 * part.item * cols..][..2 * R * cols];
    let mut acc = load_sums::<R, C>(sums, k.start);
    for k in k.step_by(32) {
        let left = 2 * 32.min(cols - k);
        for r in 0..R {
            let mut padded = [0u8; 64];
            padded[..left].copy_from_slice(&w[2 * (r * cols + k)..][..left]);
            for c in 0..C {
                let x: &[u8] = bytemuck::cast_slice(&part.x.row_bf16(part.col + c)[k..][..32]);
                for (q, (w, x)) in padded.as_chunks().0.iter().zip(x.as_chunks().0).enumerate() {
                    let (w, x) = (upper_and_lower(w), upper_and_lower(x));
                    acc[r][c][q] = vfmaq_f32(vfmaq_f32(acc[r][c][q], w[0], x[0]), w[1], x[1]);
                }
            }
        }
    }
    store_sums(&acc, sums);
}

/// The upper and the lower element of each of four pairs as floats.
#[inline]
#[target_feature(enable = "neon")]
fn upper_and_lower(pairs: &[u8; 16]) -> [float32x4_t; 2] {
    // SAFETY: 16 readable bytes.
    let pairs = vreinterpretq_u32_u8(unsafe { vld1q_u8(pairs.as_ptr()) });
    let upper = vandq_u32(pairs, vdupq_n_u32(0xFFFF_0000));
    [vreinterpretq_f32_u32(upper), vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs))]
}

#[inline]
#[target_feature(enable = "neon")]
fn load_sums<const R: usize, const C: usize>(sums: &[[f32; 16]], start: usize) -> [[[float32x4_t; 4]; C]; R] {
    let mut acc = [[[vdupq_n_f32(0.0); 4]; C]; R];
    if start == 0 {
        return acc;
    }
    for (r, c) in (0..R).flat_map(|r| (0..C).map(move |c| (r, c))) {
        for (acc, sum) in acc[r][c].iter_mut().zip(sums[c * STRIPE + r].as_chunks::<4>().0) {
            // SAFETY: 4 readable floats.
            *acc = unsafe { vld1q_f32(sum.as_ptr()) };
        }
    }
    acc
}

#[inline]
#[target_feature(enable = "neon")]
fn store_sums<const R: usize, const C: usize>(acc: &[[[float32x4_t; 4]; C]; R], sums: &mut [[f32; 16]]) {
    for (r, c) in (0..R).flat_map(|r| (0..C).map(move |c| (r, c))) {
        for q in 0..4 {
            store(&mut sums[c * STRIPE + r], QUARTER * q, acc[r][c][q]);
        }
    }
}
