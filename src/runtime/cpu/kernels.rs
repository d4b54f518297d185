//! Interface of the kernels: rectangles of products, and the table of functions of an instruction set.
//!
//! A [`Kernel`] computes a small rectangle of a product (some rows or tiles times some columns); [`super::region`]
//! divides products into such rectangles. Every kernel returns the same bits as [`super::scalar`].
#![allow(unsafe_code)]

use super::acts::{Acts, GROUP, GROUP_BLOCKS, Q8Group};
use super::matrix::{Form, Matrix, MatrixStore};
use super::panel::PanelKernel;
use super::sink::Sink;
use super::weighted_sum::{ProbabilitiesFn, SumType, WeightedSumFn};
use crate::scheme::TileLayout;
use crate::simd::Level;
use std::ops::Range;

/// A rectangle of a product: items (rows of plain weights, tiles of tiled ones) times columns (tokens).
#[derive(Clone, Copy)]
pub(super) struct Rectangle<'a> {
    pub matrix: &'a Matrix,
    pub x: &'a Acts,
    /// First row or tile.
    pub item: usize,
    /// Number of rows or tiles.
    pub items: usize,
    /// First token.
    pub col: usize,
    /// Number of tokens.
    pub cols: usize,
    /// True when the weights are already in the first-level or second-level cache.
    pub near: bool,
    /// Weights that will be needed next, which a kernel may prefetch.
    pub next: &'a [u8],
}

impl<'a> Rectangle<'a> {
    /// Returns the layout of the tiles of the matrix.
    #[inline(always)]
    pub fn layout(&self) -> &'a TileLayout {
        let MatrixStore::Tiled(layout) = &self.matrix.store else { unreachable!("plain rows have their own kernel") };
        layout
    }
}

/// Function that computes a [`Rectangle`] of a tiled matrix into `out`: for each column 16 results per tile.
///
/// # Safety
/// * The CPU has the instruction set of the table the kernel comes from.
/// * Items and columns of the part lie inside the matrix and the activations, whose columns agree.
/// * The activations have the form (f32, 16-bit or int8) that the kernel reads.
pub(super) type PartFn = unsafe fn(&Rectangle<'_>, out: &mut [f32]);

impl Rectangle<'_> {
    /// Returns true when no subnormal number can occur in the products of these BF16 columns with the matrix, so that
    /// instructions that treat subnormal numbers as zeros return the same bits.
    ///
    /// With exponents of at least `a` and `b` (biased by 127), factors are multiples of 2^(a - 134) and 2^(b - 134).
    /// Hence products and all sums of them, which rounding only makes coarser, are multiples of 2^(a + b - 268):
    /// zero, or no smaller than the least normal number 2^-126.
    pub(super) fn stays_normal(&self) -> bool {
        let exponent = |least: u16| least.saturating_add(1) >> 8;
        let w = exponent(self.matrix.least_magnitude.get().copied().unwrap_or(0));
        let x = (self.col..self.col + self.cols).map(|col| exponent(self.x.least_magnitude(col))).min();
        x.is_none_or(|x| x.min(w) > 0 && x + w >= 142)
    }
}

/// Function that computes a [`Rectangle`] of any size of a plain matrix, and passes each result to the sink once.
///
/// # Safety
/// * The CPU has the instruction set of the table the kernel comes from.
/// * Items and columns of the part lie inside the matrix, the activations (whose columns agree) and the sink; the
///   activations have the form that the kernel reads.
/// * No other thread writes these rows of the sink.
pub(super) type PlainFn = unsafe fn(&Rectangle<'_>, &Sink<'_>);

/// Distance in bytes at which a product with a single column prefetches its weights, line by line in the order of
/// memory. Without this, the processor executes too much arithmetic per line to load far enough ahead: decoding q4_0
/// on one core of Zen 4 takes 1.5 times as long. Half or twice the distance is no better.
pub(super) const AHEAD: usize = 8192;

/// Rectangle of a product whose items are tiles.
#[derive(Clone, Copy)]
pub(super) struct Tiles<'a> {
    /// The part itself, because a copy of values that were stored just before would wait for these stores, which wait
    /// for the results of the part before.
    pub part: &'a Rectangle<'a>,
    pub layout: &'a TileLayout,
    /// Bytes of `part.items` tiles.
    data: &'a [u8],
}

impl<'a> Tiles<'a> {
    /// Views the part as tiles.
    #[inline(always)]
    pub fn of(part: &'a Rectangle<'a>) -> Tiles<'a> {
        let layout = part.layout();
        let data = &part.matrix.data[part.item * layout.tile_bytes..][..part.items * layout.tile_bytes];
        Tiles { part, layout, data }
    }

    /// Returns the blocks that share the scales of `group`.
    #[inline(always)]
    pub fn blocks(&self, group: usize) -> Range<usize> {
        let from = group * self.layout.group_blocks;
        from..(from + self.layout.group_blocks).min(self.layout.blocks)
    }

    /// Returns the number of blocks of a run: consecutive blocks that share both a scale of the weights and a scale of
    /// the integer activations.
    #[inline(always)]
    pub fn run_blocks(&self) -> usize {
        // A group of weights is shorter than a group of activations or a multiple of it, so the shorter one is a run.
        self.layout.group_blocks.min(GROUP_BLOCKS)
    }

    /// Returns the start of tile `t`.
    #[inline(always)]
    pub fn tile(&self, t: usize) -> *const u8 {
        self.data[t * self.layout.tile_bytes..][..self.layout.tile_bytes].as_ptr()
    }
}

/// Kinds of codes in tiles, as values of a const generic.
pub(super) mod kind {
    use crate::scheme::{CodeMap, CodeTable, Minimum, ScaleType, Scheme, TileLayout};

    /// Nibbles biased by 8.
    pub const SYMMETRIC4: u8 = 0;
    /// Nibbles with a zero point per row and group.
    pub const AFFINE4: u8 = 1;
    /// Nibbles of E2M1 bits.
    pub const MXFP4: u8 = 2;
    /// Signed bytes.
    pub const INT8: u8 = 3;
    /// Nibbles that index a table of signed bytes (IQ4_NL).
    pub const NL4: u8 = 4;
    /// FP8 numbers (E4M3), which only the kernel for float activations reads.
    pub const E4M3: u8 = 5;
    /// Like [`NL4`], with two levels of scales (IQ4_XS).
    pub const XS4: u8 = 6;
    /// Nibbles of E2M1 bits with a scale for each half of a block, two levels (NVFP4).
    pub const NV4: u8 = 7;
    /// 5-bit integers biased by 16.
    pub const INT5: u8 = 8;
    /// 6-bit integers biased by 32.
    pub const INT6: u8 = 9;
    /// 4-bit integers with a minimum (Q4_1).
    pub const MINIMUM4: u8 = 10;
    /// 5-bit integers with a minimum (Q5_1).
    pub const MINIMUM5: u8 = 11;
    /// 2-bit integers with a minimum for each half of a block, two levels (Q2_K).
    pub const K2: u8 = 12;
    /// 3-bit integers biased by 4, with a scale for each half of a block, two levels (Q3_K).
    pub const K3: u8 = 13;
    /// 4-bit integers with a minimum, two levels (Q4_K).
    pub const K4: u8 = 14;
    /// 5-bit integers with a minimum, two levels (Q5_K).
    pub const K5: u8 = 15;
    /// 6-bit integers biased by 32, with a scale for each half of a block, two levels (Q6_K).
    pub const K6: u8 = 16;
    /// Trellis of 2 bits.
    pub const T2: u8 = 17;
    /// Trellis of 3 bits.
    pub const T3: u8 = 18;

    /// Returns true for the kinds whose kernels exist for few sizes of rectangles only: those that `iec` does not
    /// quantize to by itself, or rarely.
    #[inline(always)]
    pub const fn is_rare(kind: u8) -> bool {
        kind >= XS4
    }

    /// Returns true for the kinds of nibbles that index a table.
    #[inline(always)]
    pub const fn has_table(kind: u8) -> bool {
        matches!(kind, MXFP4 | NL4 | XS4 | NV4)
    }

    /// Returns the value of each nibble: for MXFP4 and NVFP4 twice the E2M1 value, otherwise the IQ4_NL value.
    #[inline(always)]
    pub const fn table(kind: u8) -> [i8; 16] {
        *if matches!(kind, MXFP4 | NV4) { CodeTable::E2m1 } else { CodeTable::Iq4Nl }.values()
    }

    /// Returns the number of vectors of codes in a block, which is the number of bits of a code. If this is not
    /// inlined, loops over them are not unrolled and sums are kept in memory.
    #[inline(always)]
    pub const fn vectors(kind: u8) -> usize {
        match kind {
            INT8 | E4M3 => 8,
            INT6 | K6 => 6,
            INT5 | MINIMUM5 | K5 => 5,
            K3 | T3 => 3,
            K2 | T2 => 2,
            _ => 4,
        }
    }

    /// Returns what is added to integers before they are stored.
    #[inline(always)]
    pub const fn bias(kind: u8) -> i32 {
        match kind {
            INT6 | K6 => 32,
            INT5 => 16,
            SYMMETRIC4 => 8,
            K3 => 4,
            _ => 0,
        }
    }

    /// Returns the number of groups of scales in a block: 2 where each half of a block has its own.
    #[inline(always)]
    pub const fn halves(kind: u8) -> usize {
        if matches!(kind, NV4 | K2 | K3 | K6) { 2 } else { 1 }
    }

    /// Returns the storage of the minimums.
    #[inline(always)]
    pub const fn minimum(kind: u8) -> Minimum {
        match kind {
            MINIMUM4 | MINIMUM5 => Minimum::F16,
            K4 | K5 => Minimum::U8,
            K2 => Minimum::Nibble,
            _ => Minimum::None,
        }
    }

    /// Returns true for kinds whose groups have minimums.
    #[inline(always)]
    pub const fn has_minimum(kind: u8) -> bool {
        !matches!(minimum(kind), Minimum::None)
    }

    /// Returns true for kinds that int8 products read as signed bytes, with the offset that the instruction set has
    /// for [`INT8`].
    #[inline(always)]
    pub const fn is_signed(kind: u8) -> bool {
        matches!(kind, INT8 | NL4 | XS4 | INT5 | INT6) || is_trellis(kind)
    }

    /// Returns true for trellises.
    #[inline(always)]
    pub const fn is_trellis(kind: u8) -> bool {
        matches!(kind, T2 | T3)
    }

    /// Returns the values of a trellis plus an offset, which wrap around.
    #[inline(always)]
    pub const fn trellis_values<const KIND: u8, const OFFSET: i32>() -> &'static [i8; 64] {
        const fn moved(values: &[i8; 64], offset: i32) -> [i8; 64] {
            let (mut moved, mut i) = (*values, 0);
            while i < moved.len() {
                moved[i] = moved[i].wrapping_add(offset as i8);
                i += 1;
            }
            moved
        }
        const { &moved(if KIND == T2 { &crate::scheme::T2.values } else { &crate::scheme::T3.values }, OFFSET) }
    }

    /// Returns the type that scales of this kind have, but for a few tensors.
    #[inline(always)]
    pub const fn common_scale(kind: u8) -> ScaleType {
        match kind {
            MXFP4 => ScaleType::E8m0,
            XS4 | K2..=K6 => ScaleType::I8,
            NV4 => ScaleType::E4m3,
            E4M3 => ScaleType::F32,
            T2 | T3 => ScaleType::I8Row,
            _ => ScaleType::F16,
        }
    }

    /// Returns the kind of a layout.
    pub fn of(layout: &TileLayout) -> u8 {
        match (layout.spec.scheme, layout.spec.code_map()) {
            (_, CodeMap::Affine) => AFFINE4,
            (Scheme::Q4_0 | Scheme::Int4, _) => SYMMETRIC4,
            (Scheme::Mxfp4, _) => MXFP4,
            (Scheme::Nl4, _) => NL4,
            (Scheme::Fp8, _) => E4M3,
            (Scheme::Iq4Xs, _) => XS4,
            (Scheme::Nvfp4, _) => NV4,
            (Scheme::Int5, _) => INT5,
            (Scheme::Int6, _) => INT6,
            (Scheme::Int8, _) => INT8,
            (Scheme::Q4_1, _) => MINIMUM4,
            (Scheme::Q5_1, _) => MINIMUM5,
            (Scheme::Q2K, _) => K2,
            (Scheme::Q3K, _) => K3,
            (Scheme::Q4K, _) => K4,
            (Scheme::Q5K, _) => K5,
            (Scheme::Q6K, _) => K6,
            (Scheme::T2, _) => T2,
            (Scheme::T3, _) => T3,
        }
    }
}

/// Evaluates `$call` with the constant `$KIND` set to the kind of a layout, which is none of the rare ones and not
/// [`kind::E4M3`].
macro_rules! with_kind {
    ($layout:expr, $KIND:ident, $call:expr) => {
        with_kind!(@ $layout, $KIND, $call, SYMMETRIC4 AFFINE4 MXFP4 INT8 NL4)
    };
    (@ $layout:expr, $KIND:ident, $call:expr, $($kind:ident)*) => {
        match kind::of($layout) {
            $(kind::$kind => {
                const $KIND: u8 = kind::$kind;
                $call
            })*
            kind => unreachable!("codes of kind {kind}"),
        }
    };
}
pub(super) use with_kind;

/// Evaluates `$call` like [`with_kind`], also for [`kind::E4M3`].
macro_rules! with_float_kind {
    ($layout:expr, $KIND:ident, $call:expr) => {
        with_kind!(@ $layout, $KIND, $call, SYMMETRIC4 AFFINE4 MXFP4 INT8 NL4 E4M3)
    };
}
pub(super) use with_float_kind;

/// Evaluates `$call` like [`with_kind`] for one of the rare kinds that are no trellis, or one of `$more`.
macro_rules! with_rare_kind {
    ($layout:expr, $KIND:ident, $call:expr $(, $more:ident)*) => {
        with_kind!(@ $layout, $KIND, $call, XS4 NV4 INT5 INT6 MINIMUM4 MINIMUM5 K2 K3 K4 K5 K6 $($more)*)
    };
}
pub(super) use with_rare_kind;

/// Evaluates `$call` like [`with_kind`] for a trellis.
macro_rules! with_trellis_kind {
    ($layout:expr, $KIND:ident, $call:expr) => {
        with_kind!(@ $layout, $KIND, $call, T2 T3)
    };
}
pub(super) use with_trellis_kind;

/// Evaluates `$call` like [`with_kind`] for any of the rare kinds.
macro_rules! with_any_rare_kind {
    ($layout:expr, $KIND:ident, $call:expr) => {
        with_rare_kind!($layout, $KIND, $call, T2, T3)
    };
}
pub(super) use with_any_rare_kind;

/// Evaluates `$call` with the constant `$N` set to `$value`, which must be one of the listed values for which
/// `$allowed` is true. No code is generated for the other listed values.
macro_rules! with_const {
    ($value:expr, [$($n:literal)*], $N:ident, $allowed:expr, $call:expr) => {
        match $value {
            $($n if const { const $N: usize = $n; $allowed } => {
                const $N: usize = $n;
                $call
            })*
            n => unreachable!("a rectangle of {n}"),
        }
    };
}
pub(super) use with_const;

/// Function that computes rectangles, and the sizes of the rectangles that it accepts: up to [`Kernel::items`] items
/// with 1 to `cols` columns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    /// Items of a full rectangle with many columns.
    pub items: usize,
    /// Items of a full rectangle with a single column; of one with a few columns, as many as have the same number of
    /// results, if these are more than `items`.
    pub alone: usize,
    /// Largest number of columns of a rectangle.
    pub cols: usize,
    /// Function that computes a rectangle.
    pub run: PartFn,
    /// Kernel for weights that are unpacked once for many columns, if the instruction set has one.
    pub panel: Option<PanelKernel>,
}

impl Kernel {
    /// Returns the number of items of a full rectangle with `cols` columns.
    pub fn items(&self, cols: usize) -> usize {
        if cols == 1 { self.alone } else { self.items.max(self.alone / cols) }
    }
}

/// Divides the range into steps of `step` and single items for the rest, and returns their starts and lengths. So a
/// kernel is compiled for two sizes only.
pub(super) fn whole_or_single(range: Range<usize>, step: usize) -> impl Iterator<Item = (usize, usize)> {
    let whole = range.len() / step * step;
    let singles = range.start + whole..range.end;
    (range.start..range.start + whole).step_by(step).map(move |i| (i, step)).chain(singles.map(|i| (i, 1)))
}

/// Largest number of floats that a kernel writes in one call.
pub(super) const MAX_OUT: usize = 16 * 16;

/// Largest number of floats that the kernel of a panel writes in one call.
pub(super) const MAX_PANEL_OUT: usize = 32 * 32;

/// Results of a call of a kernel, aligned so that vectors of them do not cross cache lines.
#[repr(align(64))]
pub(super) struct Out<const N: usize>(pub [f32; N]);

/// Entry points of one instruction set.
#[derive(Debug)]
pub(super) struct KernelTable {
    pub name: &'static str,
    pub detected: fn() -> bool,
    /// Level for loops that are compiled once per [`Level`]; it needs no feature that `detected` does not check.
    pub level: Level,
    /// Kernel for F32, F16 and BF16 rows times f32 activations.
    pub plain: PlainFn,
    /// Kernel for BF16 rows times BF16 activations.
    pub plain_bf16: PlainFn,
    /// True when `plain_bf16` reads the least magnitudes of matrices.
    pub bf16_wants_magnitudes: bool,
    /// Kernel for tiles times f32 activations.
    pub tile_float: Kernel,
    /// Kernel for tiles times 16-bit activations.
    pub tile_int16: Kernel,
    /// Kernel for tiles times int8 activations.
    pub tile_int8: Kernel,
    /// Function for weighted sums of F32 values.
    pub sum_f32: WeightedSumFn,
    /// Function for weighted sums of F16 values.
    pub sum_f16: WeightedSumFn,
    /// Function for weighted sums of pairs of BF16 values.
    pub sum_bf16: WeightedSumFn,
    /// Function that computes attention probabilities as pairs of BF16, if the instruction set has its own.
    pub probabilities: Option<ProbabilitiesFn>,
    /// Function that computes attention probabilities as F32, if the instruction set has its own.
    pub wide_probabilities: Option<ProbabilitiesFn>,
    /// Function that widens 4-bit integers, if the instruction set has its own.
    pub nibbles: Option<NibblesFn>,
    /// Function that rounds f32 numbers to pairs of BF16, if the instruction set has its own.
    pub pairs: Option<PairsFn>,
    /// Function that rounds whole groups to int8. Safety: the CPU has the instruction set.
    pub quantize: unsafe fn(&[[f32; GROUP]], &mut [Q8Group]),
}

/// Function that widens the two integers of each byte to a word of two BF16. Safety: the CPU has the instruction set.
pub(super) type NibblesFn = unsafe fn(&[u8], &mut [u32]);

/// Function that rounds numbers as [`super::weights()`] does for pairs of BF16. Safety: the CPU has the instructions.
pub(super) type PairsFn = unsafe fn(&[f32], &mut [u32]);

impl KernelTable {
    /// Returns the kernel for plain rows and activations of this form.
    pub(super) fn plain(&self, form: Form) -> PlainFn {
        if form == Form::Bf16 { self.plain_bf16 } else { self.plain }
    }

    /// Returns the kernel for tiles and activations of this form.
    pub(super) fn tile(&self, form: Form) -> Kernel {
        match form {
            Form::Int8 => self.tile_int8,
            Form::Int16 => self.tile_int16,
            Form::F32 | Form::Bf16 => self.tile_float,
        }
    }

    /// Returns the function for weighted sums of a type.
    pub(super) fn weighted_sum(&self, kind: SumType) -> WeightedSumFn {
        match kind {
            SumType::F32 => self.sum_f32,
            SumType::F16 => self.sum_f16,
            SumType::Bf16 => self.sum_bf16,
        }
    }

    /// Rounds a row of values to int8; the last group is padded with zeros.
    pub(super) fn quantize(&self, values: &[f32], groups: &mut [Q8Group]) {
        let (whole, rest) = values.as_chunks::<GROUP>();
        let mut padded = [0f32; GROUP];
        padded[..rest.len()].copy_from_slice(rest);
        let (groups, last) = groups.split_at_mut(whole.len().min(groups.len()));
        // SAFETY: a table is returned only if this CPU has its instruction set.
        unsafe {
            (self.quantize)(whole, groups);
            (self.quantize)(&[padded], last);
        }
    }
}
