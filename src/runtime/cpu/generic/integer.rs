//! Kernels for tiles times int8 and 16-bit activations.
//!
//! [`product`] is the loop that all of them share. A *run* consists of consecutive blocks that share both a scale
//! of the weights and a scale of the activations. The integer sums over each run are multiplied by the scales of
//! the weights and summed over the group of activations; these sums are multiplied by the scale of the activations
//! and summed over K. Kinds with minimums add the sum of the activations times the minimum to each run; where the
//! halves of a block have their own scales, each half is a run. An implementation of [`Runs`] supplies the sums of
//! each run. The one in [`super::tiles`] reads tiles, which are unpacked in registers, once for all columns of the
//! rectangle; the one in [`super::panel`] reads a panel.

use super::super::acts::{Acts, GROUP_BLOCKS, Q8Group, Q16Group};
use super::super::kernels::{Tiles, kind};
use super::isa::{IntegerShape, Isa, Piece, bytes};
use super::trellis;
use std::ops::Range;

/// Form in which the weights of a block are unpacked.
pub(in super::super) trait Codes: Copy {
    /// Vectors of a quarter of a block (8 of its 32 columns, all rows of a piece).
    type Quarter<I: Isa>: AsRef<[I::Int]>;
    /// Number of vectors of a block: one for each 32-bit word of the activation codes of a block.
    const VECTORS: usize;
    /// Loads the zero points of a group of scales, if there are any, in the form that [`Codes::quarter`] takes.
    ///
    /// # Safety
    /// The tile has the group of scales.
    unsafe fn zeros<I: Isa, const KIND: u8>(isa: I, piece: &Piece<'_>, group: usize) -> I::Int;
    /// Unpacks quarter `i` of a block. Its vector `s` is multiplied by word [`Codes::word`] of the activations of the
    /// block.
    ///
    /// # Safety
    /// The tile has the block.
    unsafe fn quarter<I: Isa, const KIND: u8>(
        isa: I,
        piece: &Piece<'_>,
        block: usize,
        i: usize,
        zeros: I::Int,
    ) -> Self::Quarter<I>;
    /// Returns the index of the word that vector `s` of quarter `i` is multiplied by.
    fn word(i: usize, s: usize) -> usize;
}

/// Integer width of the activations.
pub(in super::super) trait Width: Codes {
    /// Activations that share a scale. The codes come first, as whole 32-bit words.
    type Group;
    /// Unfinished integer sums.
    type Sum<I: Isa>: Copy;
    /// Number of chains that each sum is divided into when there are few sums, so that additions need not wait for
    /// each other. Sums are exact, so no bit changes.
    const CHAINS: usize;
    /// Bits of an activation code.
    const BITS: usize;
    /// Returns the kind whose unpacked codes have the same form as those of this kind, so that one kernel serves both.
    fn unpacked_kind(kind: u8) -> u8;
    /// Unit of [`Width::sum`].
    const SUM_UNIT: f32;
    /// Returns the sum of the codes of a block of a group, or of half `part` of it, divided by [`Width::SUM_UNIT`].
    fn sum(group: &Self::Group, block: usize, part: Option<usize>) -> i32;
    /// Returns the index of word `at` of a half of a block.
    #[inline(always)]
    fn word_of_half(half: usize, at: usize) -> usize {
        // Quarter `i` of a block has as many vectors of the first half as of the second.
        let each = Self::VECTORS / 8;
        Self::word(at / each, half * each + at % each)
    }
    /// Returns the groups of a token.
    fn groups(x: &Acts, token: usize) -> &[Self::Group];
    /// Returns the scale of the codes of a group.
    fn scale(group: &Self::Group) -> f32;
    /// Returns sums of zero.
    fn zero<I: Isa>(isa: I) -> Self::Sum<I>;
    /// Adds the correction for the offset of the weights, for `BLOCKS` blocks of a group starting with `block`.
    fn start<I: Isa, const KIND: u8, const BLOCKS: usize>(
        isa: I,
        sum: Self::Sum<I>,
        group: &Self::Group,
        block: usize,
    ) -> Self::Sum<I>;
    /// Adds the correction for the offset of the weights, for one half of a block of a group.
    #[inline(always)]
    fn start_half<I: Isa, const KIND: u8>(
        _isa: I,
        sum: Self::Sum<I>,
        _group: &Self::Group,
        _half: (usize, usize),
    ) -> Self::Sum<I> {
        sum
    }
    /// Adds the products of weights and activations.
    fn dot<I: Isa, const KIND: u8>(isa: I, sum: Self::Sum<I>, w: I::Int, a: I::Int) -> Self::Sum<I>;
    /// Prepares sums for the products of a block of a group.
    #[inline(always)]
    fn begin<I: Isa, const KIND: u8>(_isa: I, sum: Self::Sum<I>, _group: &Self::Group, _block: usize) -> Self::Sum<I> {
        sum
    }
    /// Makes room for the products of further blocks.
    #[inline(always)]
    fn end<I: Isa, const KIND: u8>(_isa: I, sum: Self::Sum<I>) -> Self::Sum<I> {
        sum
    }
    /// Returns the finished sums.
    fn finish<I: Isa>(isa: I, sum: Self::Sum<I>) -> I::Int;
}

/// Activations of 8 bits: four per lane.
#[derive(Clone, Copy)]
pub(in super::super) struct Int8;

/// Activations of 16 bits: a pair per lane.
#[derive(Clone, Copy)]
pub(in super::super) struct Int16;

/// Returns the zero points of a group of scales minus an offset, in each byte of a row; zero for kinds without zero
/// points.
///
/// # Safety
/// The tile has the group of scales.
#[inline(always)]
pub(in super::super) unsafe fn byte_zeros<I: Isa, const KIND: u8>(
    isa: I,
    offset: i32,
    piece: &Piece<'_>,
    group: usize,
) -> I::Int {
    if KIND != kind::AFFINE4 {
        return isa.splat(0);
    }
    // SAFETY: the caller guarantees the group of scales, and the layout is affine.
    let zeros = unsafe { piece.zeros(isa, group) };
    let pairs = isa.or(zeros, isa.shl::<8>(zeros));
    let bytes = isa.or(pairs, isa.shl::<16>(pairs));
    isa.sub_i8(bytes, isa.splat(offset.wrapping_mul(0x0101_0101)))
}

/// Unpacks quarter `i` of `block` to bytes and adds an offset, which is 0 or that of the kind of codes. `zeros` are
/// those of [`byte_zeros`].
///
/// # Safety
/// The tile has the block.
#[inline(always)]
pub(in super::super) unsafe fn byte_quarter<I: Isa, const KIND: u8>(
    isa: I,
    offset: i32,
    piece: &Piece<'_>,
    (block, i): (usize, usize),
    zeros: I::Int,
) -> [I::Int; 2] {
    if const { kind::is_trellis(KIND) } {
        // SAFETY: the caller guarantees the block.
        return unsafe { trellis::quarter::<I, KIND>(isa, offset, piece, (block, i)) };
    }
    if const { kind::is_rare(KIND) && !kind::has_table(KIND) } {
        // SAFETY: the caller guarantees the block.
        let mut integers = unsafe { piece.integers::<I, KIND>(isa, block, i) };
        let less = const { kind::bias(KIND) } - offset;
        if less != 0 {
            for half in 0..2 {
                integers[half] = isa.sub_i8(integers[half], isa.splat((less & 0xFF).wrapping_mul(0x0101_0101)));
            }
        }
        return integers;
    }
    // SAFETY: the caller guarantees the block, which has at least 4 vectors.
    let v = unsafe { piece.codes::<I, KIND>(isa, block, i) };
    if KIND != kind::INT8 {
        return bytes::<I, KIND>(isa, offset, v, zeros);
    }
    // SAFETY: the caller guarantees the block, which has 8 vectors of bytes.
    let upper = unsafe { piece.codes::<I, KIND>(isa, block, i + 4) };
    match offset {
        0 => [v, upper],
        _ => [isa.xor(v, isa.splat(0x8080_8080_u32 as i32)), isa.xor(upper, isa.splat(0x8080_8080_u32 as i32))],
    }
}

impl Codes for Int8 {
    type Quarter<I: Isa> = [I::Int; 2];
    const VECTORS: usize = 8;

    #[inline(always)]
    unsafe fn zeros<I: Isa, const KIND: u8>(isa: I, piece: &Piece<'_>, group: usize) -> I::Int {
        // SAFETY: `byte_zeros` requires the same as this function.
        unsafe { byte_zeros::<I, KIND>(isa, offset::<I>(KIND), piece, group) }
    }

    #[inline(always)]
    unsafe fn quarter<I: Isa, const KIND: u8>(
        isa: I,
        piece: &Piece<'_>,
        block: usize,
        i: usize,
        zeros: I::Int,
    ) -> [I::Int; 2] {
        // SAFETY: `byte_quarter` requires the same as this function.
        unsafe { byte_quarter::<I, KIND>(isa, offset::<I>(KIND), piece, (block, i), zeros) }
    }

    #[inline(always)]
    fn word(i: usize, s: usize) -> usize {
        i + 4 * s
    }
}

/// Returns the offset that is added to the weights of a kind before [`Isa::dot4`].
#[inline(always)]
fn offset<I: Isa>(kind: u8) -> i32 {
    match kind {
        _ if !kind::is_rare(kind) => I::offset(kind),
        _ if kind::is_signed(kind) => I::offset(kind::INT8),
        // One kernel serves panels of both, so their integers have the same offset.
        kind::NV4 | kind::K3 | kind::K6 => 32,
        _ => 0,
    }
}

impl Width for Int8 {
    type Group = Q8Group;
    type Sum<I: Isa> = I::Sum4;
    const BITS: usize = 8;
    const CHAINS: usize = 1;

    fn unpacked_kind(kind: u8) -> u8 {
        match kind {
            kind::SYMMETRIC4 | kind::K2 => kind,
            _ if kind::is_signed(kind) => kind::INT8,
            _ if kind::has_minimum(kind) => kind::MINIMUM4,
            kind::NV4 | kind::K3 | kind::K6 => kind::K6,
            _ => kind::MXFP4,
        }
    }

    const SUM_UNIT: f32 = -0.125;

    #[inline(always)]
    fn sum(group: &Q8Group, block: usize, part: Option<usize>) -> i32 {
        part.map_or(group.starts[block], |part| group.half_start(block, part))
    }

    #[inline(always)]
    fn groups(x: &Acts, token: usize) -> &[Q8Group] {
        x.row_q8(token)
    }

    #[inline(always)]
    fn scale(group: &Q8Group) -> f32 {
        group.scale
    }

    #[inline(always)]
    fn zero<I: Isa>(isa: I) -> I::Sum4 {
        isa.zero4()
    }

    #[inline(always)]
    fn start<I: Isa, const KIND: u8, const BLOCKS: usize>(
        isa: I,
        sum: I::Sum4,
        group: &Q8Group,
        block: usize,
    ) -> I::Sum4 {
        if narrow4::<I>(KIND) {
            return sum;
        }
        // Blocks beyond the end of a row have zeros.
        let starts = |of: &[i32; GROUP_BLOCKS]| if BLOCKS == 1 { of[block] } else { of[block] + of[block | 1] };
        match (offset::<I>(KIND), BLOCKS) {
            (0, _) => sum,
            (8, 1 | 2) => isa.add4(sum, isa.splat(starts(&group.starts))),
            (8, _) => isa.add4(sum, isa.splat(group.start)),
            (_, 1 | 2) => isa.add4(sum, isa.splat(starts(&group.wide_starts))),
            _ => isa.add4(sum, isa.shl::<4>(isa.splat(group.start))),
        }
    }

    #[inline(always)]
    fn start_half<I: Isa, const KIND: u8>(
        isa: I,
        sum: I::Sum4,
        group: &Q8Group,
        (block, half): (usize, usize),
    ) -> I::Sum4 {
        match offset::<I>(KIND) {
            0 => sum,
            _ => isa.add4(sum, isa.splat(group.half_start(block, half) << 2)),
        }
    }

    #[inline(always)]
    fn dot<I: Isa, const KIND: u8>(isa: I, sum: I::Sum4, w: I::Int, a: I::Int) -> I::Sum4 {
        isa.dot4::<KIND>(sum, w, a)
    }

    #[inline(always)]
    fn begin<I: Isa, const KIND: u8>(isa: I, sum: I::Sum4, group: &Q8Group, block: usize) -> I::Sum4 {
        if !narrow4::<I>(KIND) {
            return sum;
        }
        isa.narrow4_from::<KIND>(sum, isa.splat(bytemuck::cast(group.pair_starts[block])))
    }

    #[inline(always)]
    fn end<I: Isa, const KIND: u8>(isa: I, sum: I::Sum4) -> I::Sum4 {
        if narrow4::<I>(KIND) { isa.widen4(sum) } else { sum }
    }

    #[inline(always)]
    fn finish<I: Isa>(isa: I, sum: I::Sum4) -> I::Int {
        isa.finish4(sum)
    }
}

/// Returns true if the products of a block are added up as 16-bit integers first.
#[inline(always)]
fn narrow4<I: Isa>(kind: u8) -> bool {
    !kind::is_rare(kind) && I::narrow4(kind)
}

impl Codes for Int16 {
    type Quarter<I: Isa> = [I::Int; 4];
    const VECTORS: usize = 16;

    /// Returns each zero point twice per lane.
    #[inline(always)]
    unsafe fn zeros<I: Isa, const KIND: u8>(isa: I, piece: &Piece<'_>, group: usize) -> I::Int {
        match KIND {
            kind::AFFINE4 => {
                // SAFETY: the caller guarantees the group of scales, and the layout is affine.
                let zeros = unsafe { piece.zeros(isa, group) };
                isa.or(zeros, isa.shl::<16>(zeros))
            }
            kind::SYMMETRIC4 => isa.splat(0x0008_0008),
            _ => isa.splat(0),
        }
    }

    /// Returns pairs per row: k = 4i and 4i + 2, k = 4i + 1 and 4i + 3, then the same pairs from k = 16 + 4i on. This
    /// is the order of [`Q16Group`].
    #[inline(always)]
    unsafe fn quarter<I: Isa, const KIND: u8>(
        isa: I,
        piece: &Piece<'_>,
        block: usize,
        i: usize,
        zeros: I::Int,
    ) -> [I::Int; 4] {
        if const { kind::is_rare(KIND) } {
            // SAFETY: the caller guarantees the block.
            let [lower, upper] = unsafe { byte_quarter::<I, KIND>(isa, 0, piece, (block, i), zeros) };
            let ([a, b], [c, d]) = (isa.bytes_of_words(lower), isa.bytes_of_words(upper));
            return [a, b, c, d];
        }
        // SAFETY: the caller guarantees the block, which has at least 4 vectors.
        let v = unsafe { piece.codes::<I, KIND>(isa, block, i) };
        if matches!(KIND, kind::SYMMETRIC4 | kind::AFFINE4) {
            let mut w = [v, isa.shr::<8>(v), isa.shr::<4>(v), isa.shr::<12>(v)];
            for s in 0..4 {
                w[s] = isa.sub_i16(isa.and(w[s], isa.splat(0x000F_000F)), zeros);
            }
            return w;
        }
        let [lower, upper] = match KIND {
            // SAFETY: the caller guarantees the block, which has 8 vectors of bytes.
            kind::INT8 => [v, unsafe { piece.codes::<I, KIND>(isa, block, i + 4) }],
            _ => bytes::<I, KIND>(isa, 0, v, zeros),
        };
        let ([a, b], [c, d]) = (isa.bytes_of_words(lower), isa.bytes_of_words(upper));
        [a, b, c, d]
    }

    #[inline(always)]
    fn word(i: usize, s: usize) -> usize {
        4 * i + s
    }
}

impl Width for Int16 {
    type Group = Q16Group;
    type Sum<I: Isa> = I::Sum2;
    const BITS: usize = 16;
    const CHAINS: usize = 4;

    fn unpacked_kind(kind: u8) -> u8 {
        match (kind::has_minimum(kind), kind::halves(kind)) {
            (false, 1) => kind::INT8,
            (true, 1) => kind::MINIMUM4,
            (true, _) => kind::K2,
            (false, _) => kind::K6,
        }
    }

    const SUM_UNIT: f32 = 1.0;

    #[inline(always)]
    fn sum(group: &Q16Group, block: usize, part: Option<usize>) -> i32 {
        let [first, second] = group.half_sums[block];
        part.map_or(first + second, |part| group.half_sums[block][part])
    }

    #[inline(always)]
    fn groups(x: &Acts, token: usize) -> &[Q16Group] {
        x.row_q16(token)
    }

    #[inline(always)]
    fn scale(group: &Q16Group) -> f32 {
        group.scale
    }

    #[inline(always)]
    fn zero<I: Isa>(isa: I) -> I::Sum2 {
        isa.zero2()
    }

    #[inline(always)]
    fn start<I: Isa, const KIND: u8, const BLOCKS: usize>(
        _isa: I,
        sum: I::Sum2,
        _group: &Q16Group,
        _block: usize,
    ) -> I::Sum2 {
        sum
    }

    #[inline(always)]
    fn dot<I: Isa, const KIND: u8>(isa: I, sum: I::Sum2, w: I::Int, a: I::Int) -> I::Sum2 {
        isa.dot2(sum, w, a)
    }

    #[inline(always)]
    fn finish<I: Isa>(isa: I, sum: I::Sum2) -> I::Int {
        isa.finish2(sum)
    }
}

/// Returns the sizes of the rectangles and panels of a width.
pub(super) const fn shape<I: Isa, W: Width>() -> IntegerShape {
    if W::BITS == 8 { I::INT8 } else { I::INT16 }
}

/// Source of the products of runs, for `N` vectors of rows and `C` columns.
pub(super) trait Runs<I: Isa, W: Width, const N: usize, const C: usize> {
    /// Kind of the codes, which decides whether there are halves.
    const KIND: u8;
    /// Adds the products of the next run to `totals`, by [`add_sums`] and, if there are minimums, [`add_minimums`],
    /// first for the first half of a block and then for the second if these have their own scales. `blocks` share the
    /// groups of scales from `scale` on and lie in the groups of activations `x`.
    ///
    /// # Safety
    /// The tiles have the blocks.
    unsafe fn add(
        &mut self,
        isa: I,
        x: &[&W::Group; C],
        blocks: Range<usize>,
        scale: usize,
        totals: &mut [[I::Float; C]; N],
    );
}

/// Adds integer sums times the scales of the weights.
#[inline(always)]
pub(super) fn add_sums<I: Isa, const N: usize, const C: usize>(
    isa: I,
    totals: &mut [[I::Float; C]; N],
    sums: &[[I::Int; C]; N],
    scales: &[I::Float; N],
) {
    for n in 0..N {
        for c in 0..C {
            totals[n][c] = isa.fma(isa.to_f32(sums[n][c]), scales[n], totals[n][c]);
        }
    }
}

/// Adds the sums of the activations of a block, or of a half of it, times minimums. These are those of the weights
/// times [`Width::SUM_UNIT`].
#[inline(always)]
pub(super) fn add_minimums<I: Isa, W: Width, const N: usize, const C: usize>(
    isa: I,
    totals: &mut [[I::Float; C]; N],
    x: &[&W::Group; C],
    (block, half): (usize, Option<usize>),
    minimums: &[I::Float; N],
) {
    for c in 0..C {
        let sum = isa.to_f32(isa.splat(W::sum(x[c], block % GROUP_BLOCKS, half)));
        for n in 0..N {
            totals[n][c] = isa.fma(sum, minimums[n], totals[n][c]);
        }
    }
}

/// Computes the products of some vectors of rows with the columns of a part. Runs are `RUN` blocks long, the last one
/// of a row possibly shorter; if `RUN` is 0, the layout determines their length.
#[inline(always)]
pub(super) fn product<I: Isa, W: Width, R: Runs<I, W, N, C>, const RUN: usize, const N: usize, const C: usize>(
    isa: I,
    tiles: &Tiles<'_>,
    mut runs: R,
) -> [[I::Float; C]; N] {
    let parts = const { kind::halves(R::KIND) };
    let blocks = tiles.layout.blocks;
    let run = if RUN == 0 { tiles.run_blocks() } else { RUN };
    let groups = blocks.div_ceil(GROUP_BLOCKS);
    let mut x = [[].as_slice(); C];
    for c in 0..C {
        x[c] = &W::groups(tiles.part.x, tiles.part.col + c)[..groups];
    }
    let mut rows = [[isa.splat_f32(0.0); C]; N];
    for group in 0..groups {
        let mut groups = [&x[0][group]; C];
        for c in 1..C {
            groups[c] = &x[c][group];
        }
        let mut totals = [[isa.splat_f32(0.0); C]; N];
        let mut from = group * GROUP_BLOCKS;
        let until = (from + GROUP_BLOCKS).min(blocks);
        while from < until {
            let (end, scale) = match RUN {
                1 => (from + 1, from),
                _ => ((from + run).min(until), from / tiles.layout.group_blocks),
            };
            // SAFETY: the tiles have these blocks.
            unsafe { runs.add(isa, &groups, from..end, scale * parts, &mut totals) };
            from = end;
        }
        for c in 0..C {
            let scale = isa.splat_f32(W::scale(groups[c]));
            for n in 0..N {
                rows[n][c] = isa.fma(totals[n][c], scale, rows[n][c]);
            }
        }
    }
    rows
}

/// Returns a vector with a word of the activation codes in every lane.
///
/// # Safety
/// The group has the word.
#[inline(always)]
pub(super) unsafe fn broadcast<I: Isa, W: Width>(isa: I, group: &W::Group, word: usize) -> I::Int {
    // SAFETY: the caller guarantees that the group has the word; the codes come first, with the alignment of an i32,
    // and any bytes are a valid i32.
    isa.splat(unsafe { (&raw const *group).cast::<i32>().add(word).read() })
}
