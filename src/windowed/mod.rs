//! BF16 numbers in 11 bits, as deduplicated packs keep them, unpacked where they are needed.
//!
//! A block of [`BLOCK`] numbers is a byte each for sign and mantissa, three bits each for the distance of the exponent from the
//! top of a window, and a few exceptions (docs/FORMAT.md, codec `window`). A block says where its exceptions end, so any block
//! can be unpacked alone. On processors with AVX-512 VBMI2 that is faster than memory delivers unpacked numbers, so products read
//! them in this form; elsewhere packs are rebuilt into memory, and nothing here is used.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod avx512;

use crate::mapped::MappedFile;
use std::ops::Range;
use std::sync::Arc;

/// Numbers that share a window.
pub const BLOCK: usize = 2048;
/// Bytes of their distances.
const PACKED: usize = BLOCK / GROUP * GROUP_BYTES;
/// Bytes of a block's header: the top of the window, the number of exceptions, and where they end.
const HEADER: usize = 6;
/// Distances that are packed together.
const GROUP: usize = 512;
const GROUP_BYTES: usize = 192;
/// First bytes of the masks of such a frame: planes follow; low bytes as they are; exponents in windows.
const MARK: [u8; 3] = [1, 0, 2];
/// Room for the exceptions of a block, and for reading a whole vector behind the last of them.
type Exceptions = [u8; BLOCK + 64];

/// The numbers of a matrix.
#[derive(Debug)]
pub struct Windowed {
    files: [Arc<MappedFile>; 3],
    frames: Vec<[Range<usize>; 3]>,
    frame: usize,
    len: usize,
}

/// One block, as far as it goes: the last of a frame may be shorter.
struct Block<'a> {
    top: u8,
    count: usize,
    mantissas: &'a [u8],
    packed: &'a [u8],
    exceptions: &'a [u8],
}

impl Windowed {
    /// True where this processor unpacks them faster than memory delivers them unpacked.
    pub fn is_fast() -> bool {
        #[cfg(target_arch = "x86_64")]
        return avx512::detected();
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// `len` numbers in frames of `frame`, whose streams (low bytes, masks, exceptions) lie at these places of the files.
    /// `None` if any of them is written in another way.
    pub fn new(
        files: [Arc<MappedFile>; 3],
        frames: Vec<[Range<usize>; 3]>,
        frame: usize,
        len: usize,
    ) -> Option<Windowed> {
        if frame == 0 || !frame.is_multiple_of(BLOCK) || frames.len() != len.div_ceil(frame) {
            return None;
        }
        let windowed = Windowed { files, frames, frame, len };
        let good = |(i, [mantissas, masks, exceptions]): (usize, &[Range<usize>; 3])| {
            let n = windowed.frame_len(i);
            let bytes = |file: usize, range: &Range<usize>| windowed.files[file].bytes().get(range.clone());
            let expected = MARK.len() + n.div_ceil(BLOCK) * HEADER + n.div_ceil(GROUP) * GROUP_BYTES;
            bytes(0, mantissas).is_some_and(|bytes| bytes.len() == n)
                && bytes(1, masks).is_some_and(|bytes| bytes.len() == expected && bytes.starts_with(&MARK))
                && bytes(2, exceptions).is_some()
        };
        let all = windowed.frames.iter().enumerate().all(good);
        all.then_some(windowed)
    }

    fn frame_len(&self, i: usize) -> usize {
        self.frame.min(self.len - i * self.frame)
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True without any.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes they take where they lie.
    pub fn stored_bytes(&self) -> usize {
        self.frames.iter().flatten().map(|range| range.len()).sum()
    }

    /// Writes the bits of numbers `range` to `out`, as many. False if what is stored there is impossible; then nothing is
    /// promised of `out`.
    ///
    /// # Panics
    /// The range lies outside, or this processor cannot: see [`Windowed::is_fast`].
    pub fn unpack(&self, range: Range<usize>, out: &mut [u16]) -> bool {
        assert!(range.start <= range.end && range.end <= self.len && range.len() == out.len(), "no such numbers");
        assert!(Windowed::is_fast(), "a processor without AVX-512 VBMI2");
        let mut scratch: Exceptions = [0; BLOCK + 64];
        let (mut at, mut rest) = (range.start, out);
        while at < range.end {
            let (frame, within) = (at / self.frame, at % self.frame);
            let Some(block) = self.block(frame, within / BLOCK) else { return false };
            let first = within % BLOCK;
            let n = (block.mantissas.len() - first).min(range.end - at);
            let (part, more) = rest.split_at_mut(n);
            let good = match <&mut [u16; BLOCK]>::try_from(&mut *part) {
                Ok(out) => unpack_block(&block, &mut scratch, out),
                Err(_) => {
                    let mut whole = [0; BLOCK];
                    let good = unpack_block(&block, &mut scratch, &mut whole);
                    part.copy_from_slice(&whole[first..first + n]);
                    good
                }
            };
            if !good {
                return false;
            }
            (at, rest) = (at + n, more);
        }
        true
    }

    /// A block, if its exceptions lie inside the stream.
    fn block(&self, frame: usize, block: usize) -> Option<Block<'_>> {
        let n = self.frame_len(frame);
        let [mantissas, masks, exceptions]: [&[u8]; 3] =
            std::array::from_fn(|i| &self.files[i].bytes()[self.frames[frame][i].clone()]);
        let (headers, packed) = masks[MARK.len()..].split_at(n.div_ceil(BLOCK) * HEADER);
        let headers = headers.as_chunks::<HEADER>().0;
        let end = |header: &[u8; HEADER]| u32::from_le_bytes([header[3], header[4], header[5], 0]) as usize;
        let header = &headers[block];
        let start = if block == 0 { 0 } else { end(&headers[block - 1]) };
        let numbers = block * BLOCK..((block + 1) * BLOCK).min(n);
        Some(Block {
            top: header[0],
            count: usize::from(u16::from_le_bytes([header[1], header[2]])),
            packed: &packed[block * PACKED..packed.len().min((block + 1) * PACKED)],
            mantissas: &mantissas[numbers],
            exceptions: exceptions.get(start..end(header))?,
        })
    }
}

/// Unpacks a block; what is missing in a short one is arbitrary.
fn unpack_block(block: &Block<'_>, scratch: &mut Exceptions, out: &mut [u16; BLOCK]) -> bool {
    match (block.mantissas.try_into(), block.packed.try_into()) {
        (Ok(mantissas), Ok(packed)) => unpack_whole(block, mantissas, packed, scratch, out),
        _ => unpack_short(block, scratch, out),
    }
}

/// The last block of a frame: its bytes are filled up with zeros.
#[cold]
fn unpack_short(block: &Block<'_>, scratch: &mut Exceptions, out: &mut [u16; BLOCK]) -> bool {
    let (mut mantissas, mut packed) = ([0; BLOCK], [0; PACKED]);
    mantissas[..block.mantissas.len()].copy_from_slice(block.mantissas);
    packed[..block.packed.len()].copy_from_slice(block.packed);
    unpack_whole(block, &mantissas, &packed, scratch, out)
}

fn unpack_whole(
    block: &Block<'_>,
    mantissas: &[u8; BLOCK],
    packed: &[u8; PACKED],
    scratch: &mut Exceptions,
    out: &mut [u16; BLOCK],
) -> bool {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `Windowed::unpack`, the only caller in the end, asked the processor.
    return unsafe { avx512::unpack(block.top, block.count, mantissas, packed, block.exceptions, scratch, out) };
    #[cfg(not(target_arch = "x86_64"))]
    {
        let places = (mantissas.len(), packed.len(), scratch.len(), out.len());
        let Block { top, count, exceptions, .. } = block;
        unreachable!("asked before: {count} of {} exceptions, top {top}, {places:?}", exceptions.len())
    }
}
