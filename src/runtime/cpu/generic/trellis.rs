//! Decoding of trellises: see [`crate::scheme::Trellis`].

use super::super::kernels::kind;
use super::isa::{Isa, Piece};

/// Decodes quarter `i` of a block to bytes and adds an offset, 0 or 128: those of the lower and of the upper half of
/// the block. Also prefetches like [`Piece::codes`].
///
/// # Safety
/// The tile has the block.
#[inline(always)]
pub(super) unsafe fn quarter<I: Isa, const KIND: u8>(
    isa: I,
    offset: i32,
    piece: &Piece<'_>,
    (block, i): (usize, usize),
) -> [I::Int; 2] {
    piece.prefetch_quarter::<I, KIND>(isa, block, i);
    let values = match offset {
        0 => kind::trellis_values::<KIND, 0>(),
        _ => kind::trellis_values::<KIND, 128>(),
    };
    // SAFETY: the caller guarantees the block.
    let (lower, upper) =
        unsafe { (indices::<I, KIND>(isa, piece, block, i), indices::<I, KIND>(isa, piece, block, i + 4)) };
    [isa.lookup_64(values, lower), isa.lookup_64(values, upper)]
}

/// Returns the indices of a step, each in the lowest six bits of a byte.
///
/// # Safety
/// The tile has the block.
#[inline(always)]
unsafe fn indices<I: Isa, const KIND: u8>(isa: I, piece: &Piece<'_>, block: usize, step: usize) -> I::Int {
    let vectors = kind::vectors(KIND);
    // A vector holds 8 bits of each stream; the index begins at this bit.
    let (vector, bit) = (step * vectors / 8, step * vectors % 8);
    // SAFETY: the caller guarantees the block, which has these vectors.
    let (own, next) = unsafe {
        let next = if vector + 1 == vectors { 0 } else { vector + 1 };
        (piece.vector::<I, KIND>(isa, block, vector), piece.vector::<I, KIND>(isa, block, next))
    };
    // Shifts of whole lanes move bits of other bytes into the place of those of the next vector, or above the index.
    let (low, high) = match bit {
        0 => return own,
        1 => return isa.shr::<1>(own),
        2 => return isa.shr::<2>(own),
        3 => (isa.shr::<3>(own), isa.shl::<5>(next)),
        4 => (isa.shr::<4>(own), isa.shl::<4>(next)),
        5 => (isa.shr::<5>(own), isa.shl::<3>(next)),
        6 => (isa.shr::<6>(own), isa.shl::<2>(next)),
        _ => (isa.shr::<7>(own), isa.shl::<1>(next)),
    };
    let own_bits = ((1 << (8 - bit)) - 1) * 0x0101_0101;
    isa.or(isa.and(low, isa.splat(own_bits)), isa.and(high, isa.splat(!own_bits)))
}
