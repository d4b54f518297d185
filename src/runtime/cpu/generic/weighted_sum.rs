//! Kernel for weighted sums of vectors, see [`super::super::weighted_sum`].

use super::super::kernels::with_const;
use super::super::weighted_sum::{BF16, F16, WeightedSum};
use super::isa::{Isa, Routine};
use crate::scheme::TILE_ROWS;

/// Bytes of [`WeightedSum::next`] that a rectangle prefetches in each step: two cache lines.
const NEXT_BYTES: usize = 128;
/// Largest number of outputs of a rectangle.
const ROWS: usize = 4;

/// Computes all outputs in rectangles whose sums stay in registers.
///
/// # Safety
/// Same as [`super::super::weighted_sum::WeightedSumFn`].
pub(super) unsafe fn sum<I: Isa, const TYPE: u8>(sum: &WeightedSum<'_>, out: &mut [f32], out_row: usize) {
    let (mut vector, mut rest) = (0, sum.next);
    while vector < sum.vectors {
        let sums_of = |width: usize| width * sum.rows.min(ROWS) * (TILE_ROWS / I::LANES);
        let fits = |width: &usize| *width <= sum.vectors - vector && sums_of(*width) <= I::SUMS;
        let width = [8, 4, 2].into_iter().find(fits).unwrap_or(1);
        for row in (0..sum.rows).step_by(ROWS) {
            let next;
            (next, rest) = rest.split_at(rest.len().min(sum.steps * NEXT_BYTES));
            let (sum, out) = (&WeightedSum { next, ..*sum }, &mut out[row * out_row..]);
            with_const!(ROWS.min(sum.rows - row), [1 2 3 4], R, R <= ROWS, {
                with_const!(width, [1 2 4 8], V, V == 1 || V * R * (TILE_ROWS / I::LANES) <= I::SUMS, {
                    // SAFETY: the caller guarantees the instruction set, and has checked `sum` and `out`.
                    unsafe { I::enter(Rectangle::<TYPE, R, V> { sum, row, vector, out, out_row }) }
                })
            })
        }
        vector += width;
    }
}

/// Rectangle of `R` outputs by `V` vectors of 16 lanes.
struct Rectangle<'a, const TYPE: u8, const R: usize, const V: usize> {
    sum: &'a WeightedSum<'a>,
    row: usize,
    vector: usize,
    out: &'a mut [f32],
    out_row: usize,
}

impl<const TYPE: u8, const R: usize, const V: usize> Routine for Rectangle<'_, TYPE, R, V> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Rectangle { sum, row, vector, out, out_row } = self;
        let pieces = TILE_ROWS / I::LANES;
        let mut weights = [std::ptr::null::<u32>(); R];
        for r in 0..R {
            weights[r] = sum.weights[(row + r) * sum.weight_row..][..sum.steps].as_ptr();
        }
        let mut sums = [[I::pieces(isa.splat_f32(0.0)); V]; R];
        let mut values = sum.values[vector * sum.vector..].as_ptr();
        let mut next = Ahead::new(sum);
        for i in 0..sum.steps {
            next.ask(isa);
            let mut weight = [isa.splat(0); R];
            for r in 0..R {
                // SAFETY: there are `steps` weights for each output.
                weight[r] = isa.splat(unsafe { *weights[r].add(i) } as i32);
            }
            for v in 0..V {
                for p in 0..pieces {
                    // SAFETY: the values have `V` vectors from `vector` on for each step.
                    let value = unsafe { load::<I, TYPE>(isa, values.add(v * sum.vector), p) };
                    for r in 0..R {
                        let sum = &mut sums[r][v][p];
                        *sum = match TYPE {
                            BF16 => isa.add_pairs::<true>(*sum, value, weight[r]),
                            _ => isa.fma(isa.as_f32(value), isa.as_f32(weight[r]), *sum),
                        };
                    }
                }
            }
            values = values.wrapping_add(sum.step);
        }
        for r in 0..R {
            for v in 0..V {
                for p in 0..pieces {
                    let to: &mut [f32] = &mut out[r * out_row + TILE_ROWS * (vector + v) + p * I::LANES..][..I::LANES];
                    // SAFETY: `to` is a whole vector.
                    unsafe { isa.store(to.as_mut_ptr(), sums[r][v][p]) };
                }
            }
        }
    }
}

/// Loads a piece of the numbers of a step: floats, or pairs of bf16.
///
/// # Safety
/// 16 numbers or pairs are readable.
#[inline(always)]
unsafe fn load<I: Isa, const TYPE: u8>(isa: I, from: *const u8, piece: usize) -> I::Int {
    // SAFETY: the caller guarantees that all 16 numbers or pairs are readable.
    unsafe {
        match TYPE {
            F16 => isa.as_int(isa.load_f16(from.add(2 * I::LANES * piece))),
            _ => isa.load(from.add(4 * I::LANES * piece)),
        }
    }
}

/// Position in [`WeightedSum::next`], which is prefetched step by step.
struct Ahead {
    at: *const u8,
    step: usize,
}

impl Ahead {
    #[inline(always)]
    fn new(sum: &WeightedSum<'_>) -> Ahead {
        // If nothing follows, this prefetches a line that is in use anyway.
        if sum.next.is_empty() {
            return Ahead { at: sum.weights.as_ptr().cast(), step: 0 };
        }
        Ahead { at: sum.next.as_ptr(), step: NEXT_BYTES }
    }

    /// Prefetches the lines of a step.
    #[inline(always)]
    fn ask<I: Isa>(&mut self, isa: I) {
        isa.prefetch(self.at);
        isa.prefetch(self.at.wrapping_add(64));
        self.at = self.at.wrapping_add(self.step);
    }
}
