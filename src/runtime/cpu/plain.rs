//! How a plain matrix meets its columns: small rectangles in registers, walked so that their operands come from near
//! caches.
//!
//! [`super::region`] hands out blocks of rows that fit the second-level cache. A few columns of activations stay in the
//! first-level cache while those rows pass over them; where K is too long for that, it is cut, and the 16 partial sums of
//! each output wait in memory. Cutting changes no bit: every lane goes on where it stopped.
#![allow(unsafe_code)]

use super::kernels::Part;
use super::region::Sink;
use super::scalar;
use std::ops::Range;

/// Rows whose partial sums wait together.
pub(super) const STRIPE: usize = 32;

/// Most columns of a rectangle.
const MAX_COLS: usize = 6;

/// Partial sums of a stripe: those of row `r` and column `c` are `c * STRIPE + r`.
#[repr(align(64))]
pub(super) struct Sums([[f32; 16]; STRIPE * MAX_COLS]);

impl Sums {
    pub(super) fn new() -> Sums {
        Sums([[0.0; 16]; STRIPE * MAX_COLS])
    }
}

/// One way to multiply rows with columns on one instruction set.
pub(super) trait Product {
    /// Most rows of a rectangle.
    const ROWS: usize;
    /// Most columns, up to [`MAX_COLS`].
    const COLS: usize;
    /// Elements of K, so few that the columns stay in the first-level cache; a multiple of 32.
    const DEPTH: usize;

    /// Goes on with the sums of a rectangle, `sums[c * STRIPE + r]`, over this range of K, which starts at a multiple of 32
    /// and ends at one or at the end of K. Where it starts at 0, whatever the sums hold is overwritten.
    ///
    /// # Safety
    /// As [`super::kernels::PlainFn`]; the range lies inside K.
    unsafe fn rectangle(part: &Part<'_>, k: Range<usize>, sums: &mut [[f32; 16]]);

    /// Folds the lanes of each sum as [`scalar::fold`] does.
    ///
    /// # Safety
    /// The CPU has the instruction set; there are as many results as sums.
    unsafe fn fold(sums: &[[f32; 16]], out: &mut [f32]) {
        out.iter_mut().zip(sums).for_each(|(out, sums)| *out = scalar::fold(*sums));
    }
}

/// Computes a part by rectangles.
///
/// # Safety
/// As [`super::kernels::PlainFn`].
pub(super) unsafe fn run<P: Product>(part: &Part<'_>, sink: &Sink<'_>, sums: &mut Sums) {
    for col in (part.col..part.col + part.cols).step_by(P::COLS) {
        let cols = P::COLS.min(part.col + part.cols - col);
        for item in (part.item..part.item + part.items).step_by(STRIPE) {
            let stripe = Part { item, items: STRIPE.min(part.item + part.items - item), col, cols, ..*part };
            // SAFETY: the stripe lies inside the part.
            unsafe { run_stripe::<P>(&stripe, &mut sums.0, sink) };
        }
    }
}

/// # Safety
/// As [`run`], for a part of one stripe and the columns of one rectangle.
unsafe fn run_stripe<P: Product>(part: &Part<'_>, sums: &mut [[f32; 16]], sink: &Sink<'_>) {
    let k = part.matrix.cols;
    // A single column fits any cache, and its weights are read from memory best in one go, row after row as one stream.
    let (cuts, step) = match part.cols {
        1 => (1, if part.near { P::ROWS } else { 1 }),
        _ => (k.div_ceil(P::DEPTH).max(1), P::ROWS),
    };
    let depth = k.div_ceil(cuts).next_multiple_of(32).max(32);
    // Without columns there still are results.
    for from in (0..k.max(1)).step_by(depth) {
        for r in (0..part.items).step_by(step) {
            let rows = Part { item: part.item + r, items: step.min(part.items - r), ..*part };
            // SAFETY: the rectangle lies inside the part, and the range inside K.
            unsafe { P::rectangle(&rows, from..(from + depth).min(k), &mut sums[r..]) };
        }
    }
    let mut out = [0.0; STRIPE];
    for c in 0..part.cols {
        let out = &mut out[..part.items];
        // SAFETY: the caller's promise, and the lengths agree.
        unsafe { P::fold(&sums[c * STRIPE..][..part.items], out) };
        // SAFETY: the caller's promise.
        unsafe { sink.put(part.col + c, part.item, out) };
    }
}
