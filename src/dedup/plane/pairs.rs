//! Exponents in pairs, made for an entropy coder of bytes.
//!
//! Two distances from the top of a window of 15 are a byte, a nibble each: so one step of the coder yields two weights, its
//! codes of whole bits lose half as much, and what neighbours know of each other is used. The coder is Huffman's of zstd, which
//! finds no matches here and then does little else.
//!
//! * masks: whether tops follow for each block or one for all, and these tops
//! * exceptions: the pairs, squeezed; then the values beyond the windows, a byte each

use super::super::lanes::{LANES, histogram};
use super::window::{self, best_top};
use super::zstd::Zstd;
use super::{Codec, Cursors, Streams, take};
use crate::error::{Error, Result};
use crate::simd::{Kernel, Level};

/// Values of a pair of vectors: the first of each pair of distances lie in one, the second in the other.
const PAIRS: usize = 2 * LANES;
/// The nibble of a value beyond the window.
const FAR: u8 = 15;
/// What a window of 15 has above the best one of 7.
const ABOVE: u8 = 3;

/// Whether the blocks of a plane have windows of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Windows {
    One = 0,
    PerBlock = 1,
}

impl Windows {
    /// Values that share a window, in a plane of so many.
    fn block(self, values: usize) -> usize {
        match self {
            Windows::One => values.next_multiple_of(PAIRS),
            Windows::PerBlock => window::BLOCK,
        }
    }
}

/// Appends a plane of exponents; `symbols` is a buffer.
pub(super) fn encode(
    level: Level,
    plane: &[u8],
    windows: Windows,
    zstd: &mut Zstd,
    symbols: &mut Vec<u8>,
    out: &mut Streams,
) {
    out.masks.extend([Codec::Pairs as u8, windows as u8]);
    symbols.clear();
    let mut far = Vec::new();
    for block in plane.chunks(windows.block(plane.len())) {
        let top = best_top(&histogram(block)).wrapping_add(ABOVE);
        out.masks.push(top);
        far.extend(block.iter().filter(|value| top.wrapping_sub(**value) >= FAR));
        let start = symbols.len();
        symbols.resize(start + block.len().div_ceil(PAIRS) * LANES, 0);
        let (values, rest) = block.as_chunks::<PAIRS>();
        let (pairs, last) = symbols[start..].as_chunks_mut::<LANES>().0.split_at_mut(values.len());
        level.run(Join { values, top, pairs });
        if let [last] = last {
            // Filled up with what decodes to no exception.
            let mut values = [top; PAIRS];
            values[..rest.len()].copy_from_slice(rest);
            level.run(Join { values: &[values], top, pairs: std::slice::from_mut(last) });
        }
    }
    zstd.squeeze(symbols, &mut out.exceptions);
    out.exceptions.extend_from_slice(&far);
}

/// Reads a plane of exponents; `symbols` is a buffer.
pub(super) fn decode(
    level: Level,
    from: &mut Cursors<'_>,
    zstd: &mut Zstd,
    symbols: &mut Vec<u8>,
    out: &mut [u8],
) -> Result<()> {
    let windows = match take(&mut from.masks, 1)?[0] {
        0 => Windows::One,
        1 => Windows::PerBlock,
        other => return Err(Error::corrupt(format!("pairs with windows of kind {other}"))),
    };
    let block = windows.block(out.len());
    let tops = take(&mut from.masks, out.len().div_ceil(block))?;
    symbols.resize(out.len().div_ceil(PAIRS) * LANES, 0);
    zstd.restore(&mut from.exceptions, symbols)?;
    let mut far = 0;
    for ((values, symbols), top) in out.chunks_mut(block).zip(symbols.chunks(block / 2)).zip(tops) {
        let (pairs, last) = symbols.as_chunks::<LANES>().0.split_at(values.len() / PAIRS);
        let (whole, rest) = values.as_chunks_mut::<PAIRS>();
        let mut any = level.run(Split { pairs, top: *top, values: whole });
        if let [last] = last {
            let mut values = [[0; PAIRS]];
            any |= level.run(Split { pairs: std::slice::from_ref(last), top: *top, values: &mut values });
            rest.copy_from_slice(&values[0][..rest.len()]);
        }
        if any {
            let beyond = top.wrapping_sub(FAR);
            for value in values.iter_mut().filter(|value| **value == beyond) {
                // What is missing here is refused below.
                *value = from.exceptions.get(far).copied().unwrap_or(0);
                far += 1;
            }
        }
    }
    take(&mut from.exceptions, far).map(drop)
}

/// Makes pairs of distances.
struct Join<'a> {
    values: &'a [[u8; PAIRS]],
    top: u8,
    pairs: &'a mut [[u8; LANES]],
}

impl Kernel for Join<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (values, pairs) in self.values.iter().zip(self.pairs) {
            for lane in 0..LANES {
                let (first, second) =
                    (self.top.wrapping_sub(values[lane]), self.top.wrapping_sub(values[LANES + lane]));
                let (first, second) = (if first < FAR { first } else { FAR }, if second < FAR { second } else { FAR });
                pairs[lane] = first | second << 4;
            }
        }
    }
}

/// Takes pairs apart; true when there is a value beyond the window.
struct Split<'a> {
    pairs: &'a [[u8; LANES]],
    top: u8,
    values: &'a mut [[u8; PAIRS]],
}

impl Kernel for Split<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let mut far = [0u8; LANES];
        for (pairs, values) in self.pairs.iter().zip(self.values) {
            for lane in 0..LANES {
                let (first, second) = (pairs[lane] & 15, pairs[lane] >> 4);
                far[lane] |= if first == FAR { 255 } else { 0 } | if second == FAR { 255 } else { 0 };
                values[lane] = self.top.wrapping_sub(first);
                values[LANES + lane] = self.top.wrapping_sub(second);
            }
        }
        far.iter().fold(0, |any, lane| any | lane) != 0
    }
}
