//! Folding of partial results: combines the results of a row (one query head of one token) over several pages of the KV
//! cache into one.
//!
//! A partial result consists of the reference `m` of its probabilities `2^(s - m)`, their sum (as 16 partial sums, the
//! lanes), and the weighted sum of the values. Because `m` is an integer, bringing two results to the same reference
//! multiplies them by powers of two, which is exact.

use super::{GROUP, STATE};
use crate::runtime::cpu::scalar::fold as fold_lanes;
use crate::runtime::kv::{MAX_HEAD, rotate};
use crate::runtime::ops::{LANES, exp2};
use crate::simd::Kernel;
use std::f32::consts::LOG2_E;

/// Adds the results of the next page to the rows in `folded`.
pub(super) struct FoldGroup<'a> {
    /// Results of earlier pages: `(rows, row_len)`.
    pub folded: &'a mut [f32],
    /// Length of a row: its values, then [`STATE`] numbers.
    pub row_len: usize,
    /// Reference of each new result, or minus infinity if the row attends to no position of the page, and the lanes of
    /// the sum of its probabilities.
    pub states: &'a [(f32, [f32; LANES]); GROUP],
    /// Weighted sum of the values of each new result: `(rows, row_len - STATE)`.
    pub sums: &'a [f32],
}

impl Kernel for FoldGroup<'_> {
    #[inline(always)]
    fn run(self) {
        let FoldGroup { folded, row_len, states, sums } = self;
        let stride = row_len - STATE;
        // The first half multiplies the rows in `folded`, the second half the new results.
        let mut factors = [f32::NEG_INFINITY; 2 * GROUP];
        for (r, row) in folded.chunks_exact_mut(row_len).enumerate() {
            let (own, other) = (row[row_len - LANES], states[r].0);
            let larger = if other > own { other } else { own };
            (factors[r], factors[GROUP + r]) = (own - larger, other - larger);
            row[row_len - LANES] = larger;
        }
        for factor in &mut factors {
            *factor = exp2(*factor);
        }
        for (r, row) in folded.chunks_exact_mut(row_len).enumerate() {
            if states[r].0 != f32::NEG_INFINITY {
                fold(row, factors[r], factors[GROUP + r], &states[r].1, &sums[r * stride..][..stride]);
            }
        }
    }
}

/// Returns the factors that bring sums of reference `own` and of reference `other` to the larger reference.
#[inline(always)]
fn factors(own: f32, other: f32) -> (f32, f32) {
    let larger = if other > own { other } else { own };
    (exp2(own - larger), exp2(other - larger))
}

/// Computes `row * keep + other * add` for the values and the lanes of the sum.
#[inline(always)]
fn fold(row: &mut [f32], keep: f32, add: f32, lanes: &[f32], sums: &[f32]) {
    let (values, state) = row.split_at_mut(row.len() - STATE);
    add_scaled(state, keep, lanes, add);
    add_scaled(values, keep, sums, add);
}

/// Computes `own * keep + other * add` over whole vectors, as many as `other` has.
#[inline(always)]
fn add_scaled(own: &mut [f32], keep: f32, other: &[f32], add: f32) {
    let (own, other) = (own.as_chunks_mut::<LANES>().0, other.as_chunks::<LANES>().0);
    for i in 0..own.len().min(other.len()) {
        // The compiler vectorizes operations on a separate array.
        let mut lanes = own[i];
        for l in 0..LANES {
            lanes[l] = lanes[l] * keep + other[i][l] * add;
        }
        own[i] = lanes;
    }
}

/// Combines the partial results of one query head and divides by the sum, which includes the sink if there is one. If
/// values are stored rotated, the result is rotated back.
pub(super) struct Finish<'a, I> {
    /// Partial results in the order of pages: values, then [`STATE`] numbers.
    pub states: I,
    /// Attention sink of the head, if any.
    pub sink: Option<f32>,
    /// Order of the matrix by which values are stored rotated, if they are.
    pub rotated: Option<usize>,
    /// Output of the head: `(head_dim)`.
    pub out: &'a mut [f32],
}

impl<'a, I: ExactSizeIterator<Item = &'a [f32]>> Kernel for Finish<'_, I> {
    #[inline(always)]
    fn run(self) {
        let Finish { states, sink, rotated, out } = self;
        combine(states, sink, out);
        // The Hadamard matrix is its own inverse.
        if let Some(order) = rotated {
            rotate(out, order);
        }
    }
}

/// Combines partial results in the order of pages and writes the values divided by the sum to `out`.
#[inline(always)]
fn combine<'a>(mut states: impl ExactSizeIterator<Item = &'a [f32]>, sink: Option<f32>, out: &mut [f32]) {
    if states.len() == 1 {
        return finish(states.next().expect("one state"), sink, out);
    }
    let mut folded = [0f32; MAX_HEAD + STATE];
    let mut len = 0;
    for state in states {
        if len == 0 {
            len = state.len();
            folded[len - LANES] = f32::NEG_INFINITY;
        }
        let (values, rest) = state.split_at(len - STATE);
        let (own, other) = (folded[len - LANES], rest[LANES]);
        if other != f32::NEG_INFINITY {
            let (keep, add) = factors(own, other);
            fold(&mut folded[..len], keep, add, &rest[..LANES], values);
            folded[len - LANES] = if other > own { other } else { own };
        }
    }
    finish(&folded[..len], sink, out);
}

#[inline(always)]
fn finish(state: &[f32], sink: Option<f32>, out: &mut [f32]) {
    let (values, state) = state.split_at(state.len() - STATE);
    let l = fold_lanes(*state.first_chunk().expect("lanes of the sum"));
    let m = state[LANES];
    let (keep, sink) = match sink.map(|sink| sink * LOG2_E) {
        Some(sink) if sink > m => (exp2(m - sink), 1.0),
        Some(sink) => (1.0, exp2(sink - m)),
        None => (1.0, 0.0),
    };
    let scale = keep / (l * keep + sink);
    for (out, value) in out.iter_mut().zip(values) {
        *out = value * scale;
    }
}
