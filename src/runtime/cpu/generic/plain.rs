//! Kernels for plain (unquantized) rows times activations. They compute small rectangles in registers, in an order in
//! which most operands are read from the first-level and second-level caches.
//!
//! [`super::super::region`] divides the rows into blocks that fit the second-level cache. A few columns of
//! activations stay in the first-level cache while they are multiplied by those rows. If K is too long for that, it
//! is divided, and the 16 partial sums of each output are kept in memory in between. This changes no bit, because
//! every lane continues where it stopped.

use super::super::kernels::{AHEAD, Rectangle, whole_or_single, with_const};
use super::super::matrix::MatrixStore;
use super::super::sink::Sink;
use super::isa::{Isa, Routine};
use crate::dtype::DType;
use crate::scheme::TILE_ROWS;
use std::ops::Range;

/// Rows whose partial sums are kept in memory together.
pub(in super::super) const STRIPE: usize = 32;

/// Largest number of columns of a rectangle.
const MAX_COLS: usize = 6;

/// Ways to multiply weights and activations, as values of a const generic.
mod form {
    /// F32 weights times f32 activations.
    pub const F32: u8 = 0;
    /// F16 weights, widened, times f32 activations.
    pub const F16: u8 = 1;
    /// BF16 weights, widened, times f32 activations.
    pub const BF16: u8 = 2;
    /// Pairs of BF16 weights times pairs of BF16 activations.
    pub const PAIRS: u8 = 3;
    /// Like [`PAIRS`], for numbers with which no product and no sum can be subnormal.
    pub const NORMAL_PAIRS: u8 = 4;

    /// Returns true when elements are multiplied in pairs.
    pub const fn has_pairs(form: u8) -> bool {
        matches!(form, PAIRS | NORMAL_PAIRS)
    }

    /// Returns the bytes of a weight.
    pub const fn bytes(form: u8) -> usize {
        if form == F32 { 4 } else { 2 }
    }
}

/// Partial sums of a stripe: those of row `r` and column `c` are at index `c * STRIPE + r`.
#[repr(align(64))]
struct Sums([[f32; 16]; STRIPE * MAX_COLS]);

/// Computes F32, F16 and BF16 rows times f32 activations.
///
/// # Safety
/// Same as [`super::super::kernels::PlainFn`].
pub(super) unsafe fn plain<I: Isa>(part: &Rectangle<'_>, sink: &Sink<'_>) {
    let mut sums = Sums([[0.0; 16]; STRIPE * MAX_COLS]);
    // SAFETY: `run` requires the same as this function.
    unsafe {
        match part.matrix.store {
            MatrixStore::Plain(DType::F32) => run::<I, { form::F32 }>(part, sink, &mut sums),
            MatrixStore::Plain(DType::F16) => run::<I, { form::F16 }>(part, sink, &mut sums),
            MatrixStore::Plain(_) => run::<I, { form::BF16 }>(part, sink, &mut sums),
            MatrixStore::Tiled(_) => unreachable!("tiles have their own kernels"),
        }
    }
}

/// Computes BF16 rows times BF16 activations.
///
/// # Safety
/// Same as [`super::super::kernels::PlainFn`].
pub(super) unsafe fn bf16<I: Isa>(part: &Rectangle<'_>, sink: &Sink<'_>) {
    let mut sums = Sums([[0.0; 16]; STRIPE * MAX_COLS]);
    for col in (part.col..part.col + part.cols).step_by(I::PLAIN.1) {
        let part = Rectangle { col, cols: I::PLAIN.1.min(part.col + part.cols - col), ..*part };
        // SAFETY: `run` requires the same as this function; the columns lie inside the part.
        unsafe {
            if I::BF16_DOTS && part.stays_normal() {
                run::<I, { form::NORMAL_PAIRS }>(&part, sink, &mut sums);
            } else {
                run::<I, { form::PAIRS }>(&part, sink, &mut sums);
            }
        }
    }
}

/// Computes a part in rectangles.
///
/// # Safety
/// Same as [`super::super::kernels::PlainFn`].
unsafe fn run<I: Isa, const FORM: u8>(part: &Rectangle<'_>, sink: &Sink<'_>, sums: &mut Sums) {
    for col in (part.col..part.col + part.cols).step_by(I::PLAIN.1) {
        let cols = I::PLAIN.1.min(part.col + part.cols - col);
        for item in (part.item..part.item + part.items).step_by(STRIPE) {
            let stripe = Rectangle { item, items: STRIPE.min(part.item + part.items - item), col, cols, ..*part };
            // SAFETY: the stripe lies inside the part.
            unsafe { run_stripe::<I, FORM>(&stripe, &mut sums.0, sink) };
        }
    }
}

/// # Safety
/// Same as [`run`], for a part of one stripe and the columns of one rectangle.
unsafe fn run_stripe<I: Isa, const FORM: u8>(part: &Rectangle<'_>, sums: &mut [[f32; 16]], sink: &Sink<'_>) {
    with_const!(part.cols, [1 2 3 4 5 6], C, C <= I::PLAIN.1, {
        // SAFETY: the caller guarantees the instruction set, and a part inside matrix, activations and sink.
        unsafe { I::enter(Stripe::<FORM, C> { part, sums, sink }) }
    })
}

/// Product of the rows of a stripe with `C` columns, all in one function: selecting a function for each rectangle
/// would take 2 % of the time.
struct Stripe<'a, const FORM: u8, const C: usize> {
    part: &'a Rectangle<'a>,
    sums: &'a mut [[f32; 16]],
    sink: &'a Sink<'a>,
}

impl<const FORM: u8, const C: usize> Routine for Stripe<'_, FORM, C> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Stripe { part, sums, sink } = self;
        let k = part.matrix.cols;
        let (rows, most) = (I::PLAIN.0, if form::has_pairs(FORM) { 2 * I::PLAIN_DEPTH } else { I::PLAIN_DEPTH });
        // A single column fits any cache. Its weights are read fastest in one pass, row after row, as one stream from
        // memory.
        let (cuts, step) = match C {
            1 => (1, if part.near { rows } else { 1 }),
            _ => (k.div_ceil(most).max(1), rows),
        };
        let depth = k.div_ceil(cuts).next_multiple_of(32).max(32);
        // If K is zero, the loop still runs once, because there are results.
        for from in (0..k.max(1)).step_by(depth) {
            let range = from..(from + depth).min(k);
            for (r, items) in whole_or_single(0..part.items, step) {
                let rows = Rectangle { item: part.item + r, items, ..*part };
                with_const!(rows.items, [1 2 4], R, R == 1 || R == I::PLAIN.0, {
                    // SAFETY: the range lies inside K.
                    unsafe { rectangle::<I, FORM, R, C>(isa, &rows, range.clone(), &mut sums[r..]) };
                });
            }
        }
        let mut out = [0.0; STRIPE];
        for c in 0..C {
            let out = &mut out[..part.items];
            isa.fold(&sums[c * STRIPE..][..part.items], out);
            // SAFETY: `run_stripe` requires that these rows lie inside the sink and that no other thread writes them.
            unsafe { sink.put(part.col + c, part.item, out) };
        }
    }
}

/// Adds to the sums of `R` rows by `C` columns, `sums[c * STRIPE + r]`, the products of this range of K, which starts
/// at a multiple of 32 and ends at one or at the end of K. If the range starts at 0, the former contents of the sums
/// are overwritten. Each step adds 16 lanes of K: elements or pairs of them.
///
/// # Safety
/// The range lies inside K.
#[inline(always)]
unsafe fn rectangle<I: Isa, const FORM: u8, const R: usize, const C: usize>(
    isa: I,
    part: &Rectangle<'_>,
    k: Range<usize>,
    sums: &mut [[f32; 16]],
) {
    let step = if form::has_pairs(FORM) { 32 } else { 16 };
    let row_bytes = part.matrix.cols * form::bytes(FORM);
    let w = part.matrix.data[part.item * row_bytes..][..R * row_bytes].as_ptr();
    let mut x = [std::ptr::null::<u8>(); C];
    for c in 0..C {
        // Rows of activations are padded to blocks, so that 16 lanes are readable from any multiple of 16 lanes on.
        let padded = part.matrix.cols.next_multiple_of(32);
        x[c] = match form::has_pairs(FORM) {
            true => part.x.row_bf16(part.col + c)[..padded].as_ptr().cast(),
            false => part.x.row(part.col + c)[..padded].as_ptr().cast(),
        };
    }
    let mut acc = load_sums::<I, R, C>(isa, sums, k.start);
    let first = part.col == 0;
    let mut at = k.start;
    // Two steps together read one or two cache lines of a row of weights.
    let twice = k.start + (k.end - k.start) / (2 * step) * (2 * step);
    while at < twice {
        let lines = 2 * step * form::bytes(FORM) / 64;
        prefetch_ahead::<I, R, C>(isa, first, w.wrapping_add(at * form::bytes(FORM)), row_bytes);
        // SAFETY: the lanes of this step lie inside each row of the weights and of the activations.
        unsafe { add_lanes::<I, FORM, R, C>(isa, w, row_bytes, &x, at, &mut acc) };
        at += step;
        if lines == 2 {
            prefetch_ahead::<I, R, C>(isa, first, w.wrapping_add(at * form::bytes(FORM)), row_bytes);
        }
        // SAFETY: the lanes of the second step lie inside them, too.
        unsafe { add_lanes::<I, FORM, R, C>(isa, w, row_bytes, &x, at, &mut acc) };
        at += step;
    }
    if at + step <= k.end {
        // SAFETY: the lanes of this step lie inside each row of the weights and of the activations.
        unsafe { add_lanes::<I, FORM, R, C>(isa, w, row_bytes, &x, at, &mut acc) };
        at += step;
    }
    if at < k.end {
        // SAFETY: the rest of each row of the weights is readable, and 16 lanes of each column.
        unsafe { add_rest::<I, FORM, R, C>(isa, w, row_bytes, &x, at..k.end, &mut acc) };
    }
    store_sums::<I, R, C>(isa, &acc, sums);
}

/// Adds the products of 16 lanes from element `at` on.
///
/// # Safety
/// The lanes lie inside each row of the weights and of the activations.
#[inline(always)]
unsafe fn add_lanes<I: Isa, const FORM: u8, const R: usize, const C: usize>(
    isa: I,
    w: *const u8,
    row_bytes: usize,
    x: &[*const u8; C],
    at: usize,
    acc: &mut [[I::Pieces<I::Float>; C]; R],
) {
    for p in 0..TILE_ROWS / I::LANES {
        let mut weight = [isa.splat(0); R];
        // SAFETY: the caller guarantees that the lanes are readable in all rows of weights and of activations.
        unsafe {
            for r in 0..R {
                weight[r] = weights::<I, FORM>(isa, w.add(r * row_bytes + at * form::bytes(FORM)), p);
            }
            for c in 0..C {
                let a = activations::<I, FORM>(isa, x[c], at, p);
                for r in 0..R {
                    acc[r][c][p] = multiply::<I, FORM>(isa, weight[r], a, acc[r][c][p]);
                }
            }
        }
    }
}

/// Loads the sums of a rectangle so far; they are zero at the start of K.
#[inline(always)]
fn load_sums<I: Isa, const R: usize, const C: usize>(
    isa: I,
    sums: &[[f32; 16]],
    start: usize,
) -> [[I::Pieces<I::Float>; C]; R] {
    let mut acc = [[I::pieces(isa.splat_f32(0.0)); C]; R];
    if start == 0 {
        return acc;
    }
    for r in 0..R {
        for c in 0..C {
            for p in 0..TILE_ROWS / I::LANES {
                let from = sums[c * STRIPE + r][p * I::LANES..][..I::LANES].as_ptr();
                // SAFETY: `from` is the start of a whole vector.
                acc[r][c][p] = isa.as_f32(unsafe { isa.load(from.cast()) });
            }
        }
    }
    acc
}

#[inline(always)]
fn store_sums<I: Isa, const R: usize, const C: usize>(
    isa: I,
    acc: &[[I::Pieces<I::Float>; C]; R],
    sums: &mut [[f32; 16]],
) {
    for r in 0..R {
        for c in 0..C {
            for p in 0..TILE_ROWS / I::LANES {
                let to: &mut [f32] = &mut sums[c * STRIPE + r][p * I::LANES..][..I::LANES];
                // SAFETY: `to` is a whole vector.
                unsafe { isa.store(to.as_mut_ptr(), acc[r][c][p]) };
            }
        }
    }
}

/// Adds the products of the last elements of K, which do not fill the lanes; the weights are padded with zeros.
///
/// # Safety
/// The elements of each row of the weights are readable, and 16 lanes of each column.
#[inline(always)]
unsafe fn add_rest<I: Isa, const FORM: u8, const R: usize, const C: usize>(
    isa: I,
    w: *const u8,
    row_bytes: usize,
    x: &[*const u8; C],
    k: Range<usize>,
    acc: &mut [[I::Pieces<I::Float>; C]; R],
) {
    let mut padded = [[0u8; 64]; R];
    for r in 0..R {
        let (from, bytes) = (r * row_bytes + k.start * form::bytes(FORM), k.len() * form::bytes(FORM));
        // SAFETY: the caller guarantees that these elements are readable.
        padded[r][..bytes].copy_from_slice(unsafe { std::slice::from_raw_parts(w.add(from), bytes) });
    }
    // Lanes without an element keep their sums, because adding zero would turn -0 into +0. Pairs are padded instead.
    let lanes = if form::has_pairs(FORM) { 16 } else { k.len() as isize };
    for r in 0..R {
        for c in 0..C {
            for p in 0..TILE_ROWS / I::LANES {
                // SAFETY: 16 lanes of `padded` are readable, and of the column, its padding included.
                let (w, a) = unsafe {
                    let w = weights::<I, FORM>(isa, padded[r].as_ptr(), p);
                    (w, activations::<I, FORM>(isa, x[c], k.start, p))
                };
                let sum = multiply::<I, FORM>(isa, w, a, acc[r][c][p]);
                acc[r][c][p] = isa.first(lanes - (p * I::LANES) as isize, sum, acc[r][c][p]);
            }
        }
    }
}

/// Prefetches a line of each row of weights that is needed later than this one: of the rows of the next rectangle, or,
/// for a single column, [`AHEAD`] bytes further on, between the loads. With several columns only the first ones
/// prefetch, because later ones find the weights in the cache.
#[inline(always)]
fn prefetch_ahead<I: Isa, const R: usize, const C: usize>(isa: I, first: bool, line: *const u8, row_bytes: usize) {
    if R == 1 && C == 1 {
        isa.prefetch_here(line.wrapping_add(AHEAD));
    } else if first && R == I::PLAIN.0 {
        for r in 0..R {
            isa.prefetch(line.wrapping_add((R + r) * row_bytes));
        }
    }
}

/// Loads a piece of 16 lanes of a column from element `k` on: floats, or pairs.
///
/// # Safety
/// The lanes are readable.
#[inline(always)]
unsafe fn activations<I: Isa, const FORM: u8>(isa: I, x: *const u8, k: usize, piece: usize) -> I::Int {
    let bytes = if form::has_pairs(FORM) { 2 } else { 4 };
    // SAFETY: the caller guarantees that the lanes are readable.
    unsafe { isa.load(x.add(k * bytes + 4 * I::LANES * piece)) }
}

/// Loads a piece of 16 lanes of weights: floats, or pairs.
///
/// # Safety
/// The lanes are readable.
#[inline(always)]
unsafe fn weights<I: Isa, const FORM: u8>(isa: I, from: *const u8, piece: usize) -> I::Int {
    // SAFETY: the caller guarantees that the lanes are readable.
    unsafe {
        match FORM {
            form::F16 => isa.as_int(isa.load_f16(from.add(2 * I::LANES * piece))),
            form::BF16 => isa.shl::<16>(isa.load_u16(from.add(2 * I::LANES * piece))),
            _ => isa.load(from.add(4 * I::LANES * piece)),
        }
    }
}

#[inline(always)]
fn multiply<I: Isa, const FORM: u8>(isa: I, w: I::Int, a: I::Int, sum: I::Float) -> I::Float {
    match FORM {
        form::PAIRS => isa.add_pairs::<false>(sum, w, a),
        form::NORMAL_PAIRS => isa.add_pairs::<true>(sum, w, a),
        _ => isa.fma(isa.as_f32(w), isa.as_f32(a), sum),
    }
}
