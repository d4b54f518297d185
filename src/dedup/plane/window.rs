//! Exponents in three bits: the seven from the top of a window downwards, and "none of these".
//!
//! The exponents of weights that share a scale fall off quickly on both sides, so seven neighbouring values hold some 98 %
//! of them (the fixed-length idea of ZipServ, arXiv 2603.17435). Each block of [`BLOCK`] values has its own window.
//! Decoding is a subtraction per value, at the speed of memory, and any block can be decoded alone.
//!
//! * masks: for each block its top, the number of its exceptions and where those of the plane end with it (`u8`, `u16`, 24 bits);
//!   then the distances, packed in threes
//! * exceptions: for each block a nibble per exception, its distance below the window, or 15 for those farther away or
//!   above, whose values follow the nibbles, a byte each

use super::super::lanes::{LANES, for_each_set, histogram};
use super::three::{self, GROUP, PACKED};
use super::{Cursors, Streams, take};
use crate::error::{Error, Result};
use crate::simd::{Kernel, Level};

/// Values that share a window.
pub(crate) const BLOCK: usize = 2048;
/// Values of a window.
const WIDTH: u8 = 7;
/// The distance that stands for an exception.
const EXCEPTION: u8 = WIDTH;
/// The nibble of an exception that is written in full.
const FAR: u8 = 15;
/// Bytes of a block's header.
const HEADER: usize = 6;
/// Values of a plane, at most: a block's exceptions take up to one and a half bytes each, and say where they end in 24 bits.
pub(super) const MOST: usize = 1 << 23;

/// Appends the plane; `values` is a buffer.
pub(super) fn encode(level: Level, plane: &[u8], out: &mut Streams, values: &mut Vec<u8>) {
    out.masks.push(super::Codec::Window as u8);
    let (headers, start) = (out.masks.len(), out.exceptions.len());
    out.masks.resize(headers + plane.len().div_ceil(BLOCK) * HEADER, 0);
    values.resize(BLOCK, 0);
    let mut beyond = [0; BLOCK];
    for (i, block) in plane.chunks(BLOCK).enumerate() {
        let top = best_top(&histogram(block));
        let distances = &mut values[..block.len()];
        beyond[block.len()..].fill(0);
        level.run(Distances { block, top, distances, beyond: &mut beyond });
        three::pack(level, distances, &mut out.masks);
        let count = write_exceptions(block, top, &beyond, &mut out.exceptions);
        let header = &mut out.masks[headers + i * HEADER..][..HEADER];
        header[0] = top;
        header[1..3].copy_from_slice(&count.to_le_bytes());
        header[3..].copy_from_slice(&((out.exceptions.len() - start) as u32).to_le_bytes()[..3]);
    }
}

/// The window that holds most values.
pub(super) fn best_top(counts: &[u32; 256]) -> u8 {
    let width = usize::from(WIDTH);
    let mut inside: u32 = counts[..width].iter().sum();
    let (mut most, mut best) = (inside, width - 1);
    for top in width..256 {
        inside = inside + counts[top] - counts[top - width];
        if inside > most {
            (most, best) = (inside, top);
        }
    }
    best as u8
}

struct Distances<'a> {
    block: &'a [u8],
    top: u8,
    distances: &'a mut [u8],
    beyond: &'a mut [u8],
}

impl Kernel for Distances<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for ((value, distance), beyond) in self.block.iter().zip(self.distances).zip(self.beyond) {
            let d = self.top.wrapping_sub(*value);
            *distance = if d < EXCEPTION { d } else { EXCEPTION };
            *beyond = if d < EXCEPTION { 0 } else { 255 };
        }
    }
}

/// Appends the exceptions of a block and counts them.
fn write_exceptions(block: &[u8], top: u8, beyond: &[u8; BLOCK], out: &mut Vec<u8>) -> u16 {
    let start = out.len();
    let mut far = Vec::new();
    let mut count = 0;
    for_each_set(beyond, |i| {
        let below = top.wrapping_sub(WIDTH).wrapping_sub(block[i]);
        // Not above the window, and near enough for a nibble.
        let nibble = if block[i] < top && below < FAR { below } else { FAR };
        if nibble == FAR {
            far.push(block[i]);
        }
        if count % 2 == 0 {
            out.push(nibble);
        } else {
            out[start + count / 2] |= nibble << 4;
        }
        count += 1;
    });
    out.extend_from_slice(&far);
    count as u16
}

/// Reads a plane of `out.len()` values.
pub(super) fn decode(level: Level, from: &mut Cursors<'_>, out: &mut [u8]) -> Result<()> {
    let headers = take(&mut from.masks, out.len().div_ceil(BLOCK) * HEADER)?;
    let packed = take(&mut from.masks, three::packed_len(out.len()))?;
    let before = from.exceptions.len();
    let blocks = out.chunks_mut(BLOCK).zip(packed.chunks(BLOCK / GROUP * PACKED));
    for ((values, packed), header) in blocks.zip(headers.as_chunks::<HEADER>().0) {
        let [top, a, b, end @ ..] = *header;
        let count = usize::from(u16::from_le_bytes([a, b]));
        three::unpack(level, packed, values);
        let mut beyond = [0; BLOCK];
        level.run(Undo { top, values, beyond: &mut beyond });
        read_exceptions(count, top, &beyond, values, &mut from.exceptions)?;
        if before - from.exceptions.len() != u32::from_le_bytes([end[0], end[1], end[2], 0]) as usize {
            return Err(Error::corrupt("the exceptions of a block end elsewhere than its header says"));
        }
    }
    Ok(())
}

/// Turns distances back into values.
struct Undo<'a> {
    top: u8,
    values: &'a mut [u8],
    beyond: &'a mut [u8],
}

impl Kernel for Undo<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (value, beyond) in self.values.iter_mut().zip(self.beyond) {
            *beyond = if *value == EXCEPTION { 255 } else { 0 };
            *value = self.top.wrapping_sub(*value);
        }
    }
}

fn read_exceptions(count: usize, top: u8, beyond: &[u8; BLOCK], values: &mut [u8], from: &mut &[u8]) -> Result<()> {
    if beyond.iter().map(|lane| usize::from(lane & 1)).sum::<usize>() != count {
        return Err(Error::corrupt("a block of exponents has not the number of exceptions that its header says"));
    }
    let nibbles = take(from, count.div_ceil(2))?;
    let (mut seen, mut far) = (0, 0);
    for_each_set(beyond, |i| {
        let nibble = nibbles[seen / 2] >> (seen % 2 * 4) & 15;
        values[i] = match nibble {
            FAR => {
                far += 1;
                // What is missing here is refused below.
                from.get(far - 1).copied().unwrap_or(0)
            }
            near => top.wrapping_sub(WIDTH).wrapping_sub(near),
        };
        seen += 1;
    });
    take(from, far).map(drop)
}

const _: () = assert!(BLOCK.is_multiple_of(GROUP) && GROUP.is_multiple_of(LANES) && BLOCK <= u16::MAX as usize);
