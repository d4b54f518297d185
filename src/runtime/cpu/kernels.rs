//! What kernels are given and what they are: rectangles of products, and the row of functions of an instruction set.
//!
//! A [`Kernel`] computes a small rectangle of a product (some rows or tiles times some columns); [`super::region`] cuts
//! products into such rectangles. Every kernel gives the bits of [`super::scalar`].
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
pub(super) struct Part<'a> {
    pub matrix: &'a Matrix,
    pub x: &'a Acts,
    /// First row or tile.
    pub item: usize,
    /// How many.
    pub items: usize,
    /// First token.
    pub col: usize,
    /// How many.
    pub cols: usize,
    /// True when the weights lie in a near cache.
    pub near: bool,
    /// Weights that will be needed next: a kernel may ask the memory for them.
    pub next: &'a [u8],
}

impl<'a> Part<'a> {
    /// How the tiles of the matrix lie.
    #[inline(always)]
    pub fn layout(&self) -> &'a TileLayout {
        let MatrixStore::Tiled(layout) = &self.matrix.store else { unreachable!("plain rows have their own kernel") };
        layout
    }
}

/// Computes a [`Part`] into `out`: for each column the results of its items, 1 or 16 each.
///
/// # Safety
/// * The CPU has the instruction set of the table the kernel comes from.
/// * Items and columns of the part lie inside the matrix and the activations, whose columns agree.
/// * For int8 arithmetic the activations are quantized.
pub(super) type PartFn = unsafe fn(&Part<'_>, out: &mut [f32]);

impl Part<'_> {
    /// True when products of these BF16 columns with the matrix cannot meet a number that is neither zero nor normal,
    /// so that instructions which take such numbers as zeros give the same bits.
    ///
    /// With exponents of at least `a` and `b` (biased by 127), factors are multiples of 2^(a - 134) and 2^(b - 134),
    /// hence products and all sums of them, which rounding makes only coarser, are multiples of 2^(a + b - 268): zero,
    /// or no smaller than the least normal number 2^-126.
    pub(super) fn stays_normal(&self) -> bool {
        let exponent = |least: u16| least.saturating_add(1) >> 8;
        let w = exponent(self.matrix.least_magnitude.get().copied().unwrap_or(0));
        let x = (self.col..self.col + self.cols).map(|col| exponent(self.x.least_magnitude(col))).min();
        x.is_none_or(|x| x.min(w) > 0 && x + w >= 142)
    }
}

/// Computes a [`Part`] of any size of a plain matrix, and hands each result to the sink once.
///
/// # Safety
/// * The CPU has the instruction set of the table the kernel comes from.
/// * Items and columns of the part lie inside the matrix, the activations (whose columns agree) and the sink; the
///   activations have the form that the kernel reads.
/// * No other thread writes these rows of the sink.
pub(super) type PlainFn = unsafe fn(&Part<'_>, &Sink<'_>);

/// Distance in bytes at which a product with a single column prefetches its weights, line by line in the order of
/// memory: arithmetic keeps the processor from looking far enough ahead by itself. Without prefetching, decoding q4_0
/// on one core of Zen 4 takes 1.5 times as long; half or twice the distance is no better.
pub(super) const AHEAD: usize = 8192;

/// The tiles of a rectangle with its columns.
#[derive(Clone, Copy)]
pub(super) struct Tiles<'a> {
    pub part: Part<'a>,
    pub layout: &'a TileLayout,
    /// `part.items` tiles.
    data: &'a [u8],
}

impl<'a> Tiles<'a> {
    /// Views the part as tiles.
    #[inline]
    pub fn of(part: &Part<'a>) -> Tiles<'a> {
        let layout = part.layout();
        let data = &part.matrix.data[part.item * layout.tile_bytes..][..part.items * layout.tile_bytes];
        Tiles { part: *part, layout, data }
    }

    /// The blocks that share the scales of `group`.
    #[inline(always)]
    pub fn blocks(&self, group: usize) -> Range<usize> {
        let from = group * self.layout.group_blocks;
        from..(from + self.layout.group_blocks).min(self.layout.blocks)
    }

    /// Blocks of a run: those that share both a scale of the weights and one of the int8 activations.
    #[inline(always)]
    pub fn run_blocks(&self) -> usize {
        // A scale that spans more than a group spans whole ones, unless it spans the row.
        self.layout.group_blocks.min(GROUP_BLOCKS)
    }

    /// Where tile `t` starts.
    #[inline(always)]
    pub fn tile(&self, t: usize) -> *const u8 {
        self.data[t * self.layout.tile_bytes..][..self.layout.tile_bytes].as_ptr()
    }
}

/// What a tile's codes mean to a kernel, as the value of a const generic.
pub(super) mod kind {
    use crate::scheme::{CodeMap, CodeTable, TileLayout};

    /// Nibbles biased by 8.
    pub const SYMMETRIC4: u8 = 0;
    /// Nibbles with a zero point per row and group.
    pub const AFFINE4: u8 = 1;
    /// E2M1 bits.
    pub const MXFP4: u8 = 2;
    /// Signed bytes.
    pub const INT8: u8 = 3;
    /// Nibbles that name a value of a table of signed bytes.
    pub const NL4: u8 = 4;

    /// Twice the value, for MXFP4, or the value that each nibble names.
    #[inline(always)]
    pub const fn table(kind: u8) -> [i8; 16] {
        *if kind == MXFP4 { CodeTable::E2m1 } else { CodeTable::Iq4Nl }.values()
    }

    /// Vectors of codes in a block. Unless it is inlined, loops over them are not unrolled and sums live in memory.
    #[inline(always)]
    pub const fn vectors(kind: u8) -> usize {
        if kind == INT8 { 8 } else { 4 }
    }

    /// The kind of a layout.
    pub fn of(layout: &TileLayout) -> u8 {
        match layout.spec.code_map() {
            CodeMap::Biased(8) => SYMMETRIC4,
            CodeMap::Biased(_) => unreachable!("widened to int8 when weights are opened"),
            CodeMap::Affine => AFFINE4,
            CodeMap::Table(CodeTable::E2m1) => MXFP4,
            CodeMap::Table(CodeTable::Iq4Nl) => NL4,
            CodeMap::Bytes => INT8,
        }
    }
}

/// Evaluates `$call` with the constant `$KIND` set to the kind of a layout.
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

/// Evaluates `$call` with the constant `$N` set to a value, which is one of those listed that are allowed; no code is
/// generated for the others.
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

/// A function and the rectangles it takes: `items` or 1 items with 1 to `cols` columns, `alone` or 1 items with a
/// single column.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    /// Items of a full rectangle.
    pub items: usize,
    /// The same for a single column, where every item side by side is one more stream from memory.
    pub alone: usize,
    /// Most columns.
    pub cols: usize,
    /// The function.
    pub run: PartFn,
    /// The same from weights that are unpacked once for many columns.
    pub panel: Option<PanelKernel>,
}

/// The range in steps, and what is left of it one by one, as start and length: then a kernel is compiled for two sizes
/// only.
pub(super) fn whole_or_single(range: Range<usize>, step: usize) -> impl Iterator<Item = (usize, usize)> {
    let whole = range.len() / step * step;
    let singles = range.start + whole..range.end;
    (range.start..range.start + whole).step_by(step).map(move |i| (i, step)).chain(singles.map(|i| (i, 1)))
}

/// Most floats a kernel writes in one call.
pub(super) const MAX_OUT: usize = 16 * 16;

/// Entry points of one instruction set.
#[derive(Debug)]
pub(super) struct KernelTable {
    pub name: &'static str,
    pub detected: fn() -> bool,
    /// For recompiled loops; no wider than what `detected` asks for.
    pub level: Level,
    /// F32, F16 and BF16 rows times f32 activations.
    pub plain: PlainFn,
    /// BF16 rows times BF16 activations.
    pub plain_bf16: PlainFn,
    /// True when that function asks for the least magnitudes of matrices.
    pub bf16_wants_magnitudes: bool,
    /// Tiles times f32 activations.
    pub tile_float: Kernel,
    /// Tiles times 16-bit activations.
    pub tile_int16: Kernel,
    /// Tiles times int8 activations.
    pub tile_int8: Kernel,
    /// Weighted sums of F32.
    pub sum_f32: WeightedSumFn,
    /// Weighted sums of F16.
    pub sum_f16: WeightedSumFn,
    /// Weighted sums of pairs of BF16.
    pub sum_bf16: WeightedSumFn,
    /// Probabilities as pairs of BF16, where that is worth a function of its own.
    pub probabilities: Option<ProbabilitiesFn>,
    /// Rounds whole groups to int8. Safety: the CPU has the instruction set.
    pub quantize: unsafe fn(&[[f32; GROUP]], &mut [Q8Group]),
}

impl KernelTable {
    /// The kernel for plain rows.
    pub(super) fn plain(&self, form: Form) -> PlainFn {
        if form == Form::Bf16 { self.plain_bf16 } else { self.plain }
    }

    /// The kernel for tiles.
    pub(super) fn tile(&self, form: Form) -> Kernel {
        match form {
            Form::Int8 => self.tile_int8,
            Form::Int16 => self.tile_int16,
            Form::F32 | Form::Bf16 => self.tile_float,
        }
    }

    /// The function for weighted sums of a type.
    pub(super) fn weighted_sum(&self, kind: SumType) -> WeightedSumFn {
        match kind {
            SumType::F32 => self.sum_f32,
            SumType::F16 => self.sum_f16,
            SumType::Bf16 => self.sum_bf16,
        }
    }

    /// Rounds a row of values to int8; what is missing in the last group is zero.
    pub(super) fn quantize(&self, values: &[f32], groups: &mut [Q8Group]) {
        let (whole, rest) = values.as_chunks::<GROUP>();
        let mut padded = [0f32; GROUP];
        padded[..rest.len()].copy_from_slice(rest);
        let (groups, last) = groups.split_at_mut(whole.len().min(groups.len()));
        // SAFETY: tables are handed out only after the CPU was asked.
        unsafe {
            (self.quantize)(whole, groups);
            (self.quantize)(&[padded], last);
        }
    }
}
