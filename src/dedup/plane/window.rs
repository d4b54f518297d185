//! Codec that stores exponents in three bits: the seven values from the top of a window downwards, or "none of
//! these".
//!
//! Among weights of one scale, few exponents are frequent and these are neighbours, so seven consecutive values cover
//! about 98 % of them (the fixed-length idea of ZipServ, arXiv 2603.17435). Each block of [`BLOCK`] values has its
//! own window. Decoding is a subtraction per value, at memory bandwidth, and any block can be decoded alone.
//!
//! * masks: for each block its top (`u8`), the number of its exceptions and the number of far ones among them (12
//!   bits each); then the distances, packed in three bits
//! * exceptions: for each block two bits per exception: one of the values next to the window ([`NEXT`]), or a far
//!   one; then the distances of the far ones from the top, a byte each

use super::super::lanes::{LANES, for_each_set, histogram};
use super::bits::{GROUP, Threes};
use super::{Cursors, Streams, take};
use crate::error::{Error, Result};
use crate::simd::{Kernel, Level};
use crate::windowed::{FAR, HEADER, Header, NEXT, WIDTH};

pub(crate) use crate::windowed::BLOCK;

/// Appends a plane of exponents; `values` is a buffer.
pub(super) fn encode(level: Level, plane: &[u8], out: &mut Streams, values: &mut Vec<u8>) {
    out.masks.push(super::Codec::Window as u8);
    let headers = out.masks.len();
    out.masks.resize(headers + plane.len().div_ceil(BLOCK) * HEADER, 0);
    values.resize(BLOCK, 0);
    let mut beyond = [0; BLOCK];
    for (i, block) in plane.chunks(BLOCK).enumerate() {
        let top = best_top(&histogram(block));
        let distances = &mut values[..block.len()];
        beyond[block.len()..].fill(0);
        level.run(Distances { block, top, distances, beyond: &mut beyond });
        Threes::pack(level, distances, &mut out.masks);
        let header = write_exceptions(block, top, &beyond, &mut out.exceptions);
        out.masks[headers + i * HEADER..][..HEADER].copy_from_slice(&header.to_bytes());
    }
}

/// Returns the top of the window that covers most values.
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
    #[inline(always)]
    fn run(self) {
        for ((value, distance), beyond) in self.block.iter().zip(self.distances).zip(self.beyond) {
            let d = self.top.wrapping_sub(*value);
            *distance = if d < WIDTH { d } else { WIDTH };
            *beyond = if d < WIDTH { 0 } else { 255 };
        }
    }
}

/// Appends the exceptions of a block; returns its header.
fn write_exceptions(block: &[u8], top: u8, beyond: &[u8; BLOCK], out: &mut Vec<u8>) -> Header {
    let start = out.len();
    let mut far = Vec::new();
    let mut exceptions = 0;
    for_each_set(beyond, |i| {
        let distance = top.wrapping_sub(block[i]);
        let code = NEXT.iter().position(|next| *next == distance).map_or(FAR, |code| code as u8);
        if code == FAR {
            far.push(distance);
        }
        if exceptions % 4 == 0 {
            out.push(code);
        } else {
            out[start + exceptions / 4] |= code << (exceptions % 4 * 2);
        }
        exceptions += 1;
    });
    out.extend_from_slice(&far);
    Header { top, exceptions, far: far.len() }
}

/// Reads a plane of `out.len()` values.
pub(super) fn decode(level: Level, from: &mut Cursors<'_>, out: &mut [u8]) -> Result<()> {
    let headers = take(&mut from.masks, out.len().div_ceil(BLOCK) * HEADER)?;
    let packed = take(&mut from.masks, Threes::packed_len(out.len()))?;
    let blocks = out.chunks_mut(BLOCK).zip(packed.chunks(BLOCK / GROUP * Threes::BYTES));
    for ((values, packed), header) in blocks.zip(headers.as_chunks().0) {
        let header = Header::from_bytes(*header);
        Threes::unpack(level, packed, values);
        let mut beyond = [0; BLOCK];
        level.run(Undo { top: header.top, values, beyond: &mut beyond });
        read_exceptions(header, &beyond, values, &mut from.exceptions)?;
    }
    Ok(())
}

/// Converts distances back to values.
struct Undo<'a> {
    top: u8,
    values: &'a mut [u8],
    beyond: &'a mut [u8],
}

impl Kernel for Undo<'_> {
    #[inline(always)]
    fn run(self) {
        for (value, beyond) in self.values.iter_mut().zip(self.beyond) {
            *beyond = if *value == WIDTH { 255 } else { 0 };
            *value = self.top.wrapping_sub(*value);
        }
    }
}

fn read_exceptions(header: Header, beyond: &[u8; BLOCK], values: &mut [u8], from: &mut &[u8]) -> Result<()> {
    let wrong = || {
        Error::corrupt(
            "found a block of exponents whose number of exceptions differs from its header; the file is damaged",
        )
    };
    if beyond.iter().map(|lane| usize::from(lane & 1)).sum::<usize>() != header.exceptions {
        return Err(wrong());
    }
    let codes = take(from, header.exceptions.div_ceil(4))?;
    let mut far = take(from, header.far)?.iter();
    let (mut seen, mut missing) = (0, false);
    for_each_set(beyond, |i| {
        let distance = match codes[seen / 4] >> (seen % 4 * 2) & 3 {
            FAR => far.next().copied().unwrap_or_else(|| {
                missing = true;
                0
            }),
            code => NEXT[usize::from(code)],
        };
        values[i] = header.top.wrapping_sub(distance);
        seen += 1;
    });
    if missing || far.next().is_some() { Err(wrong()) } else { Ok(()) }
}

const _: () = assert!(BLOCK.is_multiple_of(GROUP) && GROUP.is_multiple_of(LANES) && BLOCK < 1 << 12);
