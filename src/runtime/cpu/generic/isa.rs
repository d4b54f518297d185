//! Interface of an instruction set ([`Isa`]), and the operations on tiles that all instruction sets share.

use super::super::kernels::{AHEAD, kind};
use super::super::scalar;
use crate::scheme::{Minimum, ScaleType, TILE_ROWS, TileLayout};
use crate::simd::Level;
use std::ops::IndexMut;

/// Sizes of rectangles and panels of tiles times integer activations.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct IntegerShape {
    /// Largest number of columns of a rectangle, which has one tile; at most 11.
    pub cols: usize,
    /// Sizes of panels, if unpacking once for many columns is faster.
    pub panel: Option<PanelShape>,
}

/// Sizes of the panels of an instruction set.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct PanelShape {
    /// Tiles of a full panel: 1, 2 or 4.
    pub tiles: usize,
    /// Largest number of columns of a product.
    pub cols: usize,
    /// Fewest columns for which unpacking once is faster.
    pub least_cols: usize,
    /// Bytes of unpacked weights that stay in the second-level cache.
    pub cached: usize,
    /// True when the first product of a panel unpacks it, run by run: writing a panel, which is larger than the
    /// first-level cache, takes as long as multiplying it by some columns, and the processor overlaps the two.
    pub fused: bool,
}

impl PanelShape {
    /// Returns the fewest columns of a product when the columns are divided into equal pieces.
    pub const fn fewest_cols(&self) -> usize {
        let (mut fewest, mut n) = (self.cols, self.least_cols);
        while n <= self.least_cols + 2 * self.cols {
            let piece = n / n.div_ceil(self.cols);
            fewest = if piece < fewest { piece } else { fewest };
            n += 1;
        }
        fewest
    }
}

/// An instruction set. A value of the type proves that the processor has it.
///
/// # Safety
/// * `Int` and `Float` are vectors of `LANES` lanes of 32 bits, lane 0 first in memory, and any bits are valid.
/// * `LANES` divides 16, and `Pieces` are `16 / LANES` values.
/// * `detected` is true only where the processor has every instruction that the operations use.
pub(in super::super) unsafe trait Isa: Copy {
    /// Name in the table of kernels.
    const NAME: &'static str;
    /// The [`Level`] of this instruction set. Loops outside this trait are compiled once per level and run at this one.
    const LEVEL: Level;
    /// Number of lanes of a vector.
    const LANES: usize;
    /// Sizes for int8 activations.
    const INT8: IntegerShape;
    /// Sizes for 16-bit activations.
    const INT16: IntegerShape;
    /// Largest numbers of tiles (1 or 2) and of columns of a rectangle with float activations.
    const FLOAT: (usize, usize);
    /// Largest numbers of rows and of columns of a rectangle of plain rows.
    const PLAIN: (usize, usize);
    /// Number of elements of K that are processed at once with f32 activations, so few that the columns of a plain
    /// rectangle stay in the first-level cache.
    const PLAIN_DEPTH: usize;
    /// Largest number of vectors that hold the results of weighted sums.
    const SUMS: usize;
    /// True when [`Isa::add_pairs`] uses an instruction that treats subnormal numbers as zeros.
    const BF16_DOTS: bool = false;

    /// Vector of 32-bit integers, or of any bits.
    type Int: Copy;
    /// Vector of f32 numbers.
    type Float: Copy;
    /// One value for each piece of a tile.
    type Pieces<T: Copy>: Copy + IndexMut<usize, Output = T>;
    /// Unfinished sums of products of bytes, four products per lane.
    type Sum4: Copy;
    /// Unfinished sums of products of 16-bit integers, two products per lane.
    type Sum2: Copy;

    /// Returns true when this processor has the instruction set.
    fn detected() -> bool;

    /// Runs a routine that is compiled for this instruction set.
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn enter<R: Routine>(routine: R) -> R::Output;

    /// Loads a vector.
    ///
    /// # Safety
    /// A vector is readable at `from`, which need not be aligned.
    unsafe fn load(self, from: *const u8) -> Self::Int;
    /// Widens f16 numbers.
    ///
    /// # Safety
    /// Two bytes per lane are readable at `from`, which need not be aligned.
    unsafe fn load_f16(self, from: *const u8) -> Self::Float;
    /// Widens unsigned 16-bit numbers.
    ///
    /// # Safety
    /// Same as [`Isa::load_f16`].
    unsafe fn load_u16(self, from: *const u8) -> Self::Int;
    /// Widens unsigned bytes.
    ///
    /// # Safety
    /// A byte per lane is readable.
    unsafe fn load_u8(self, from: *const u8) -> Self::Int;
    /// Stores a vector.
    ///
    /// # Safety
    /// A vector is writable at `to`, which need not be aligned.
    unsafe fn store(self, to: *mut f32, v: Self::Float);
    /// Prefetches the cache line at an address, which need not be valid, into the second-level cache. The first level
    /// has too few buffers for lines that are being loaded from memory: with prefetching into it, decoding with q4_0 on
    /// one core of Zen 4 reaches only 0.9 of the speed.
    fn prefetch(self, at: *const u8);
    /// Prefetches like [`Isa::prefetch`]. Compilers may move that prefetch past loads, but not this one, if the
    /// instruction set implements this function itself. Prefetches that follow each other at once make the processor
    /// wait: on a Xeon (Granite Rapids), one before each load makes decoding with q4_0 1.05 times as fast.
    #[inline(always)]
    fn prefetch_here(self, at: *const u8) {
        self.prefetch(at);
    }

    /// Stores the lowest byte of each lane.
    ///
    /// # Safety
    /// A byte per lane is writable.
    unsafe fn store_i8(self, to: *mut i8, v: Self::Int);
    /// Returns a vector with the number in every lane.
    fn splat(self, v: i32) -> Self::Int;
    /// Returns a vector with the number in every lane.
    fn splat_f32(self, v: f32) -> Self::Float;
    /// Reinterprets the bits as floats.
    fn as_f32(self, v: Self::Int) -> Self::Float;
    /// Reinterprets the bits as integers.
    fn as_int(self, v: Self::Float) -> Self::Int;
    /// Adds 32-bit integers.
    fn add(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Subtracts bytes.
    fn sub_i8(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Subtracts 16-bit integers.
    fn sub_i16(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Returns the lesser of signed 32-bit integers.
    fn min(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Returns the greater of signed 32-bit integers.
    fn max(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Returns the bitwise AND.
    fn and(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Returns the bitwise OR.
    fn or(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Returns the bitwise exclusive OR.
    fn xor(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Shifts lanes to the left.
    fn shl<const BITS: i32>(self, v: Self::Int) -> Self::Int;
    /// Shifts lanes to the right and fills with zeros.
    fn shr<const BITS: i32>(self, v: Self::Int) -> Self::Int;
    /// Shifts lanes to the right and fills with the sign.
    fn sra<const BITS: i32>(self, v: Self::Int) -> Self::Int;
    /// Returns the lower and the upper nibble of each byte.
    fn nibbles(self, v: Self::Int) -> [Self::Int; 2];
    /// Looks up each byte, which is at most 15, in the table.
    fn lookup(self, table: [i8; 16], v: Self::Int) -> Self::Int;
    /// Looks up the lower and the upper nibble of each byte in the table.
    #[inline(always)]
    fn lookup_nibbles(self, table: [i8; 16], v: Self::Int) -> [Self::Int; 2] {
        let [low, high] = self.nibbles(v);
        [self.lookup(table, low), self.lookup(table, high)]
    }
    /// Looks up the lowest six bits of each byte in the table; the upper two bits may be anything.
    fn lookup_64(self, table: &'static [i8; 64], v: Self::Int) -> Self::Int;
    /// Returns the lower bytes and the upper bytes of 16-bit integers, sign-extended to 16 bits.
    fn bytes_of_words(self, v: Self::Int) -> [Self::Int; 2];
    /// Converts 32-bit integers to the nearest floats.
    fn to_f32(self, v: Self::Int) -> Self::Float;
    /// Adds floats.
    fn add_f32(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// Subtracts floats.
    fn sub_f32(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// Multiplies floats.
    fn mul_f32(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// Returns `a * b + sum`, rounded once.
    fn fma(self, a: Self::Float, b: Self::Float, sum: Self::Float) -> Self::Float;
    /// Returns the lesser numbers; those of `b` where `a` is NaN.
    fn min_f32(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// Returns the greater numbers; those of `b` where `a` is NaN.
    fn max_f32(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// Replaces NaN by zero.
    fn numbers(self, v: Self::Float) -> Self::Float;
    /// Truncates to 32-bit integers; the values must fit.
    fn truncated(self, v: Self::Float) -> Self::Int;
    /// Returns the largest number of all lanes.
    fn largest(self, v: Self::Float) -> f32;
    /// Returns the sum of all lanes.
    fn total(self, v: Self::Int) -> i32;
    /// Returns the first `n` lanes of `a` (none for a negative number, all for a large one) and the other lanes of
    /// `b`.
    fn first(self, n: isize, a: Self::Float, b: Self::Float) -> Self::Float;

    /// Returns the offset that must be added to the weights of a kind, none of the rare ones, before [`Isa::dot4`]: 0,
    /// 8 or 128, and 16 where [`Isa::narrow4`] is true.
    fn offset(kind: u8) -> i32;
    /// Returns sums of zero.
    fn zero4(self) -> Self::Sum4;
    /// Adds 32-bit integers to unfinished sums.
    fn add4(self, sum: Self::Sum4, more: Self::Int) -> Self::Sum4;
    /// Adds the four products of each lane: weights with their offset times activations, which are never -128.
    fn dot4<const KIND: u8>(self, sum: Self::Sum4, w: Self::Int, a: Self::Int) -> Self::Sum4;
    /// Returns true if the products of a block are added up as 16-bit integers first, two per lane. Their sums begin
    /// with [`Isa::narrow4_from`], which corrects the offset, and end with [`Isa::widen4`].
    fn narrow4(_kind: u8) -> bool {
        false
    }
    /// Sets the 16-bit sums to what cancels the offset of the kind. `starts` are those for an offset of 8, see
    /// [`super::super::acts::Q8Group`].
    fn narrow4_from<const KIND: u8>(self, sum: Self::Sum4, _starts: Self::Int) -> Self::Sum4 {
        sum
    }
    /// Adds the 16-bit sums to those of 32 bits.
    fn widen4(self, sum: Self::Sum4) -> Self::Sum4 {
        sum
    }
    /// Returns the finished sums.
    fn finish4(self, sum: Self::Sum4) -> Self::Int;
    /// Returns sums of zero.
    fn zero2(self) -> Self::Sum2;
    /// Adds the two products of each lane.
    fn dot2(self, sum: Self::Sum2, w: Self::Int, a: Self::Int) -> Self::Sum2;
    /// Returns the finished sums.
    fn finish2(self, sums: Self::Sum2) -> Self::Int;

    /// Returns a quarter of the codes of a block in the form that [`Isa::code_value`] reads: for nibbles, those of
    /// the lower half of the block and those of the upper half; for bytes, `v` and `upper`.
    #[inline(always)]
    fn float_codes<const KIND: u8>(self, v: Self::Int, upper: Self::Int) -> [Self::Int; 2] {
        if KIND == kind::INT8 { [v, upper] } else { bytes::<Self, KIND>(self, 0, v, self.splat(0)) }
    }
    /// Returns the table in which [`Isa::code_value`] looks values up.
    #[inline(always)]
    fn float_table<const KIND: u8>(self) -> Self::Float {
        self.splat_f32(0.0)
    }
    /// Returns the value of the lowest code in each lane, before a zero point is subtracted.
    #[inline(always)]
    fn code_value<const KIND: u8>(self, v: Self::Int, _table: Self::Float) -> Self::Float {
        self.to_f32(self.sra::<24>(self.shl::<24>(v)))
    }

    /// Adds the products of pairs of bf16 numbers, that of the upper ones first, with the bits of two fused
    /// multiply-adds. If `NORMAL`, the numbers must be such that nothing subnormal can arise.
    #[inline(always)]
    fn add_pairs<const NORMAL: bool>(self, sum: Self::Float, a: Self::Int, b: Self::Int) -> Self::Float {
        let upper = self.splat(0xFFFF_0000_u32 as i32);
        let (odd_a, odd_b) = (self.as_f32(self.and(a, upper)), self.as_f32(self.and(b, upper)));
        let (even_a, even_b) = (self.as_f32(self.shl::<16>(a)), self.as_f32(self.shl::<16>(b)));
        self.fma(even_a, even_b, self.fma(odd_a, odd_b, sum))
    }
    /// Folds the lanes of each sum as [`scalar::fold`] does.
    #[inline(always)]
    fn fold(self, sums: &[[f32; 16]], out: &mut [f32]) {
        out.iter_mut().zip(sums).for_each(|(out, sums)| *out = scalar::fold(*sums));
    }
    /// Returns the value once for each piece.
    fn pieces<T: Copy>(value: T) -> Self::Pieces<T>;
}

/// A computation that is compiled for each instruction set. `run` and all it calls must be `#[inline(always)]`.
pub(in super::super) trait Routine {
    /// Result of the computation.
    type Output;
    /// Runs the computation.
    fn run<I: Isa>(self, isa: I) -> Self::Output;
}

/// Defines operations of an instruction set on registers.
macro_rules! registers {
    ($($(#[$meta:meta])* fn $name:ident $(<$(const $g:ident: $t:ty),*>)? ($self:ident $(, $arg:ident: $ty:ty)*) -> $out:ty
        $body:block)*) => { $(
        $(#[$meta])*
        #[inline(always)]
        fn $name $(<$(const $g: $t),*>)? ($self $(, $arg: $ty)*) -> $out {
            // SAFETY: `self` proves that the processor has the instructions.
            #[allow(unused_unsafe)]
            unsafe { $body }
        }
    )* };
}
pub(in super::super) use registers;

/// Defines operations of an instruction set on memory.
macro_rules! memory {
    ($(unsafe fn $name:ident ($self:ident $(, $arg:ident: $ty:ty)*) $(-> $out:ty)? $body:block)*) => { $(
        #[inline(always)]
        unsafe fn $name ($self $(, $arg: $ty)*) $(-> $out)? {
            // SAFETY: the caller guarantees access to the memory, and `self` proves that the processor has the
            // instructions.
            unsafe { $body }
        }
    )* };
}
pub(in super::super) use memory;

/// A piece of a tile: the rows from a certain one on that fill a vector.
#[derive(Clone, Copy)]
pub(in super::super) struct Piece<'a> {
    layout: &'a TileLayout,
    tile: *const u8,
    row: usize,
    /// Codes of the rows. Like the next field this is part of the layout; compilers read a field again after each
    /// prefetch.
    codes: *const u8,
    /// Bytes of a block and its share of the scales.
    block_step: usize,
    /// True when prefetches are to stay between the loads; this costs instructions, which count if many columns are
    /// multiplied.
    in_place: bool,
}

impl<'a> Piece<'a> {
    /// Views the rows from `row` on.
    #[inline(always)]
    pub fn new(layout: &'a TileLayout, tile: *const u8, row: usize) -> Piece<'a> {
        let codes = tile.wrapping_add(layout.codes_offset + 4 * row);
        Piece { layout, tile, row, codes, block_step: layout.block_step, in_place: false }
    }

    /// Makes prefetches stay between the loads.
    #[inline(always)]
    pub fn in_place(self, in_place: bool) -> Piece<'a> {
        Piece { in_place, ..self }
    }

    #[inline(always)]
    fn prefetch<I: Isa>(&self, isa: I, at: *const u8) {
        if self.in_place { isa.prefetch_here(at) } else { isa.prefetch(at) }
    }

    /// Loads a vector of the codes of a block: four codes, or bytes of nibbles, of each row. Also prefetches weights
    /// [`AHEAD`] bytes further on, including a share of the scales.
    ///
    /// # Safety
    /// The tile has the block, and the block has the vector.
    #[inline(always)]
    pub unsafe fn codes<I: Isa, const KIND: u8>(&self, isa: I, block: usize, vector: usize) -> I::Int {
        let ahead = self.tile.wrapping_add(AHEAD + block * self.block_step + 64 * vector);
        if self.row == 0 {
            self.prefetch(isa, ahead);
        }
        // SAFETY: the caller guarantees that the tile has the block, and the block the vector.
        let codes = unsafe { isa.load(self.codes.add(64 * (block * kind::vectors(KIND) + vector))) };
        if self.row == 0 && vector + 1 == kind::vectors(KIND) {
            self.prefetch(isa, ahead.wrapping_add(64));
        }
        codes
    }

    /// Loads the scales of the rows; those of E2M1 codes are halved, because these are doubled. If `COMMON`, they have
    /// the type that is common for the kind.
    ///
    /// # Safety
    /// The tile has the group of scales.
    #[inline(always)]
    pub unsafe fn scales<I: Isa, const KIND: u8, const COMMON: bool>(&self, isa: I, group: usize) -> I::Float {
        let first = group * TILE_ROWS + self.row;
        // SAFETY: the caller guarantees that the tile has the group, so the scales of its rows are readable.
        unsafe {
            if const { matches!(kind::common_scale(KIND), ScaleType::E4m3) } {
                let scales = e4m3(isa, isa.load_u8(self.tile.add(first)));
                let scales = isa.mul_f32(scales, self.of_row(isa));
                return isa.mul_f32(scales, isa.splat_f32(0.5));
            }
            if const { matches!(kind::common_scale(KIND), ScaleType::I8) } {
                let scales = isa.load_u8(self.tile.add(first));
                let scales = match KIND {
                    kind::K2 => isa.and(scales, isa.splat(15)),
                    kind::K4 | kind::K5 => scales,
                    _ => isa.sra::<24>(isa.shl::<24>(scales)),
                };
                return isa.mul_f32(isa.to_f32(scales), self.of_super::<I, KIND>(isa, group, 0));
            }
            // Comparisons in this order, because a `match` becomes a jump through a table, or a range check: decoding
            // then takes 1.1 times as long with one scale per row, or with 16-bit activations.
            let dtype = if COMMON { kind::common_scale(KIND) } else { self.layout.spec.scale_dtype };
            if dtype == ScaleType::F16 {
                return isa.load_f16(self.tile.add(2 * first));
            }
            if dtype == ScaleType::F32 {
                return isa.as_f32(isa.load(self.tile.add(4 * first)));
            }
            if dtype == ScaleType::I8Row {
                let integers = isa.sra::<24>(isa.shl::<24>(isa.load_u8(self.tile.add(first))));
                return isa.mul_f32(isa.to_f32(integers), self.of_row(isa));
            }
            // This is E8M0, for which 2^-127 is subnormal: its bits are 1 << 22.
            let exponents = isa.load_u8(self.tile.add(first));
            let bits = isa.max(isa.shl::<23>(exponents), isa.splat(1 << 22));
            let unit = if KIND == kind::E4M3 { 1.0 } else { 0.5 };
            isa.mul_f32(isa.as_f32(bits), isa.splat_f32(unit))
        }
    }

    /// Loads the f32 numbers of the rows that multiply scales.
    ///
    /// # Safety
    /// The tile has these numbers.
    #[inline(always)]
    unsafe fn of_row<I: Isa>(&self, isa: I) -> I::Float {
        // SAFETY: the caller guarantees that the section of super-scales holds a number for each of the 16 rows.
        unsafe { isa.as_f32(isa.load(self.tile.add(self.layout.supers_offset + 4 * self.row))) }
    }

    /// Loads the fp16 numbers of the super-block of a group: those for scales (0), or for minimums (1).
    ///
    /// # Safety
    /// The tile has the group of scales, in two levels, and these numbers.
    #[inline(always)]
    unsafe fn of_super<I: Isa, const KIND: u8>(&self, isa: I, group: usize, number: usize) -> I::Float {
        let index = group / const { 8 * kind::halves(KIND) } * const { kind::minimum(KIND).supers() } + number;
        // SAFETY: the caller guarantees the group, whose super-block has the numbers of 16 rows.
        unsafe { isa.load_f16(self.tile.add(self.layout.supers_offset + 2 * (index * TILE_ROWS + self.row))) }
    }

    /// Loads the minimums of the rows, times a factor that is a power of two.
    ///
    /// # Safety
    /// The tile has the group of scales, and the kind has minimums.
    #[inline(always)]
    pub unsafe fn minimums<I: Isa, const KIND: u8>(&self, isa: I, group: usize, factor: f32) -> I::Float {
        let first = group * TILE_ROWS + self.row;
        // SAFETY: the caller guarantees that the tile has the group, so the minimums of its rows are readable.
        unsafe {
            let integers = match kind::minimum(KIND) {
                Minimum::F16 | Minimum::None => {
                    let minimums = isa.load_f16(self.tile.add(self.layout.zeros_offset + 2 * first));
                    return isa.mul_f32(minimums, isa.splat_f32(factor));
                }
                Minimum::U8 => isa.load_u8(self.tile.add(self.layout.zeros_offset + first)),
                Minimum::Nibble => isa.shr::<4>(isa.load_u8(self.tile.add(first))),
            };
            let minimums = isa.mul_f32(isa.to_f32(integers), self.of_super::<I, KIND>(isa, group, 1));
            isa.mul_f32(minimums, isa.splat_f32(-factor))
        }
    }

    /// Loads vector `vector` of a block without prefetching.
    ///
    /// # Safety
    /// The tile has the block, and the block has the vector.
    #[inline(always)]
    pub unsafe fn vector<I: Isa, const KIND: u8>(&self, isa: I, block: usize, vector: usize) -> I::Int {
        // SAFETY: the caller guarantees that the tile has the block, and the block the vector.
        unsafe { isa.load(self.codes.add(64 * (block * kind::vectors(KIND) + vector))) }
    }

    /// Prefetches like [`Piece::codes`] for quarter `i` of a block.
    #[inline(always)]
    pub fn prefetch_quarter<I: Isa, const KIND: u8>(&self, isa: I, block: usize, i: usize) {
        if self.row == 0 {
            let ahead = self.tile.wrapping_add(AHEAD + block * self.block_step);
            // The prefetches of the vectors behind the fourth, and of a share of the scales, follow the last quarter.
            for line in i..if i == 3 { kind::vectors(KIND) + 1 } else { i + 1 } {
                self.prefetch(isa, ahead.wrapping_add(64 * line));
            }
        }
    }

    /// Unpacks quarter `i` of a block of integers of 2 to 6 bits to bytes, with their bias: those of the lower and of
    /// the upper half of the block. Also prefetches like [`Piece::codes`].
    ///
    /// # Safety
    /// The tile has the block.
    #[inline(always)]
    pub unsafe fn integers<I: Isa, const KIND: u8>(&self, isa: I, block: usize, i: usize) -> [I::Int; 2] {
        let bits = kind::vectors(KIND);
        self.prefetch_quarter::<I, KIND>(isa, block, i);
        let mut integers = [isa.splat(0); 2];
        let mut next = 0;
        // SAFETY: the caller guarantees the block, which has as many vectors as bits.
        unsafe {
            if bits >= 4 {
                integers = isa.nibbles(self.vector::<I, KIND>(isa, block, i));
                next = 4;
            }
            if matches!(bits, 2 | 3 | 6) {
                for half in 0..2 {
                    let two = self.vector::<I, KIND>(isa, block, next + half);
                    integers[half] = isa.or(integers[half], field::<I, 2>(isa, two, 2 * i, next));
                }
                next += 2;
            }
            if matches!(bits, 3 | 5) {
                let one = self.vector::<I, KIND>(isa, block, next);
                let to = bits - 1;
                integers[0] = isa.or(integers[0], field::<I, 1>(isa, one, i, to));
                integers[1] = isa.or(integers[1], field::<I, 1>(isa, one, i + 4, to));
            }
        }
        integers
    }

    /// Loads the zero points of the rows.
    ///
    /// # Safety
    /// The tile has the group of scales, and the layout is affine.
    #[inline(always)]
    pub unsafe fn zeros<I: Isa>(&self, isa: I, group: usize) -> I::Int {
        // SAFETY: the caller guarantees that the tile has the group and zero points.
        let zeros = unsafe { isa.load_u8(self.tile.add(self.layout.zeros_offset + group * TILE_ROWS + self.row)) };
        // The encoders of `iec` write only zero points of at most 15; larger ones in other files are read as 15.
        isa.min(zeros, isa.splat(15))
    }
}

/// Returns the FP8 number in the lowest byte of each lane, see [`crate::scheme::e4m3`]. With exponent and fraction in
/// the place of those of an f32 number, which has a bias of 127 instead of 7, the number is too small by 2^120; this
/// holds for subnormal numbers, too.
#[inline(always)]
pub(super) fn e4m3<I: Isa>(isa: I, v: I::Int) -> I::Float {
    let bits = isa.and(isa.sra::<4>(isa.shl::<24>(v)), isa.splat(0x87F0_0000_u32 as i32));
    isa.mul_f32(isa.as_f32(bits), isa.splat_f32(f32::from_bits((127 + 120) << 23)))
}

/// Returns the `BITS` bits of each byte that begin at bit `from`, moved to bit `to`. Bits that cross from one byte to
/// another are masked out.
#[inline(always)]
fn field<I: Isa, const BITS: u32>(isa: I, v: I::Int, from: usize, to: usize) -> I::Int {
    let moved = match to as isize - from as isize {
        0 => v,
        1 => isa.shl::<1>(v),
        2 => isa.shl::<2>(v),
        3 => isa.shl::<3>(v),
        4 => isa.shl::<4>(v),
        -1 => isa.shr::<1>(v),
        -2 => isa.shr::<2>(v),
        -3 => isa.shr::<3>(v),
        -4 => isa.shr::<4>(v),
        -5 => isa.shr::<5>(v),
        _ => isa.shr::<6>(v),
    };
    isa.and(moved, isa.splat((((1i32 << BITS) - 1) << to).wrapping_mul(0x0101_0101)))
}

/// Returns the values of nibbles plus an offset: those of the lower and of the upper half of the block. `zero` holds
/// the zero points minus the offset in each byte of a row; only affine codes need it.
#[inline(always)]
pub(super) fn bytes<I: Isa, const KIND: u8>(isa: I, offset: i32, v: I::Int, zero: I::Int) -> [I::Int; 2] {
    let [low, high] = isa.nibbles(v);
    match KIND {
        kind::AFFINE4 => [isa.sub_i8(low, zero), isa.sub_i8(high, zero)],
        kind::SYMMETRIC4 if offset == 8 => [low, high],
        kind::SYMMETRIC4 => {
            let eight = isa.splat(0x0808_0808);
            [isa.sub_i8(low, eight), isa.sub_i8(high, eight)]
        }
        _ => {
            // A counted loop, which the compiler folds into a constant; it calls the closure of `map` for each vector.
            let mut values = kind::table(KIND);
            for i in 0..values.len() {
                values[i] = values[i].wrapping_add(offset as i8);
            }
            isa.lookup_nibbles(values, v)
        }
    }
}
