//! BF16 numbers in 11 bits, the storage form of deduplicated packs, unpacked where they are used.
//!
//! A block of [`BLOCK`] numbers has one byte per number for sign and mantissa (the low byte), three bits per number for
//! the distance of its exponent from the top of a window, and a few exceptions (docs/FORMAT.md, codec `window`). Blocks
//! are stored in frames, the pieces of a tensor that are coded separately; each frame has a range in each of three
//! files: low bytes, masks (block headers and distances), and exceptions. The position of the exceptions of every block
//! is computed once when a pack is opened, so that any block can be unpacked alone.
//!
//! On processors with AVX-512 VBMI, VBMI2 and GFNI, unpacking is faster than loading unpacked numbers from memory, so
//! products read this form directly. On other processors, packs are rebuilt into memory, and this module is not used.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod avx512;

use crate::mapped::MappedFile;
use std::ops::Range;
use std::sync::Arc;

/// Numbers per block, which share one window of exponents.
pub const BLOCK: usize = 2048;
/// Bytes of the packed distances of a block.
const PACKED: usize = BLOCK / GROUP * GROUP_BYTES;
/// Number of exponents in a window, whose distances from the top are 0 to 6. A stored distance of 7 marks an exception.
pub(crate) const WIDTH: u8 = 7;
/// Distances from the top that exceptions store in two bits: those of the two exponents just below the window and of
/// the one just above it (255, which is -1 as a byte). They make up four fifths of all exceptions.
pub(crate) const NEXT: [u8; 3] = [WIDTH, WIDTH + 1, 255];
/// Two-bit code of a far exception, whose distance from the top is stored as a full byte.
pub(crate) const FAR: u8 = 3;
/// Bytes of a block's header.
pub(crate) const HEADER: usize = 4;
/// Distances that are packed together in [`GROUP_BYTES`] bytes.
const GROUP: usize = 512;
const GROUP_BYTES: usize = 192;
/// First bytes of the masks of a frame in this form. They say that the bytes of the numbers are coded as two planes
/// (1), low bytes as they are (0) and exponents in windows (2).
const MARK: [u8; 3] = [1, 0, 2];
/// Buffer for the exceptions of a block, with room to read a whole vector after the last of them.
type Exceptions = [u8; BLOCK + 64];

/// Header of a block: the top of its window in 8 bits, then the number of its exceptions and the number of far ones
/// among them in 12 bits each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub top: u8,
    pub exceptions: usize,
    pub far: usize,
}

impl Header {
    pub fn from_bytes([top, a, b, c]: [u8; HEADER]) -> Header {
        let [exceptions, far] = [[a, b & 15], [b >> 4 | c << 4, c >> 4]].map(|n| u16::from_le_bytes(n).into());
        Header { top, exceptions, far }
    }

    pub fn to_bytes(self) -> [u8; HEADER] {
        let [[a, b], [c, d]] = [self.exceptions, self.far].map(|n| (n as u16).to_le_bytes());
        [self.top, a, b | c << 4, c >> 4 | d << 4]
    }

    /// Returns the bytes that the exceptions of the block take: one byte per four codes, then one byte per far
    /// distance.
    pub fn nbytes(self) -> usize {
        self.exceptions.div_ceil(4) + self.far
    }
}

/// The packed numbers of a matrix. Values of this type exist only where [`Windowed::is_fast`] returns true.
#[derive(Debug)]
pub struct Windowed {
    /// Files of the low bytes, the masks and the exceptions.
    files: [Arc<MappedFile>; 3],
    /// Range of each frame in each of the three files.
    frames: Vec<[Range<usize>; 3]>,
    /// Start of the exceptions of each block within the exceptions of its frame, in bytes.
    starts: Vec<u32>,
    /// Numbers per frame; the last frame may have fewer.
    frame: usize,
    /// Total number of numbers.
    len: usize,
}

/// Stored bytes of one block; the last block of a frame may be shorter than [`BLOCK`].
struct Block<'a> {
    header: Header,
    mantissas: &'a [u8],
    packed: &'a [u8],
    exceptions: &'a [u8],
}

impl Windowed {
    /// Returns true when this processor unpacks the numbers faster than memory delivers unpacked ones.
    pub fn is_fast() -> bool {
        #[cfg(target_arch = "x86_64")]
        return avx512::detected();
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Opens `len` numbers in frames of `frame` numbers. `files` are the files of low bytes, masks and exceptions, and
    /// `frames` holds the range of each frame in each of them. Returns `None` if a frame is coded in another form, or
    /// if [`Windowed::is_fast`] is false.
    pub fn new(
        files: [Arc<MappedFile>; 3],
        frames: Vec<[Range<usize>; 3]>,
        frame: usize,
        len: usize,
    ) -> Option<Windowed> {
        if !Windowed::is_fast() || frame == 0 || !frame.is_multiple_of(BLOCK) || frames.len() != len.div_ceil(frame) {
            return None;
        }
        let mut windowed = Windowed { files, frames, starts: Vec::with_capacity(len.div_ceil(BLOCK)), frame, len };
        for i in 0..windowed.frames.len() {
            windowed.start_frame(i)?;
        }
        Some(windowed)
    }

    /// Checks the lengths of the three ranges of a frame and computes the start of the exceptions of its blocks.
    /// Returns `None` if the frame is coded in another form.
    fn start_frame(&mut self, i: usize) -> Option<()> {
        let (n, [mantissas, masks, exceptions]) = (self.frame_len(i), &self.frames[i]);
        let bytes = |file: usize, range: &Range<usize>| self.files[file].bytes().get(range.clone());
        let expected = MARK.len() + n.div_ceil(BLOCK) * HEADER + n.div_ceil(GROUP) * GROUP_BYTES;
        let masks = bytes(1, masks).filter(|masks| masks.len() == expected && masks.starts_with(&MARK))?;
        let headers = masks[MARK.len()..][..n.div_ceil(BLOCK) * HEADER].as_chunks().0;
        let mut start = 0;
        for header in headers {
            self.starts.push(u32::try_from(start).ok()?);
            start += Header::from_bytes(*header).nbytes();
        }
        (bytes(0, mantissas)?.len() == n && bytes(2, exceptions)?.len() == start).then_some(())
    }

    fn frame_len(&self, i: usize) -> usize {
        self.frame.min(self.len - i * self.frame)
    }

    /// Returns the length in numbers.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true when there are no numbers.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes that the numbers take in the files.
    pub fn stored_bytes(&self) -> usize {
        self.frames.iter().flatten().map(|range| range.len()).sum()
    }

    /// Writes the bits of numbers `range` to `out`, whose length is that of the range. Returns false if the stored data
    /// are invalid; the content of `out` is unspecified then.
    ///
    /// # Panics
    /// The range is out of bounds, or its length differs from that of `out`.
    pub fn unpack(&self, range: Range<usize>, out: &mut [u16]) -> bool {
        assert!(range.start <= range.end && range.end <= self.len && range.len() == out.len(), "no such numbers");
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

    /// Returns the stored bytes of a block; `None` when its exceptions reach past the end of those of its frame.
    fn block(&self, frame: usize, block: usize) -> Option<Block<'_>> {
        let n = self.frame_len(frame);
        let [mantissas, masks, exceptions]: [&[u8]; 3] =
            std::array::from_fn(|i| &self.files[i].bytes()[self.frames[frame][i].clone()]);
        let (headers, packed) = masks[MARK.len()..].split_at(n.div_ceil(BLOCK) * HEADER);
        let header = Header::from_bytes(headers.as_chunks().0[block]);
        let start = self.starts[frame * (self.frame / BLOCK) + block] as usize;
        let numbers = block * BLOCK..((block + 1) * BLOCK).min(n);
        Some(Block {
            header,
            packed: &packed[block * PACKED..packed.len().min((block + 1) * PACKED)],
            mantissas: &mantissas[numbers],
            exceptions: exceptions.get(start..start + header.nbytes())?,
        })
    }
}

/// Unpacks a block; numbers of `out` past the end of a short block are unspecified. Returns false if the stored data
/// are invalid.
fn unpack_block(block: &Block<'_>, scratch: &mut Exceptions, out: &mut [u16; BLOCK]) -> bool {
    match (block.mantissas.try_into(), block.packed.try_into()) {
        (Ok(mantissas), Ok(packed)) => unpack_whole(block, mantissas, packed, scratch, out),
        _ => unpack_short(block, scratch, out),
    }
}

/// Unpacks a short block, the last of a frame, after padding its low bytes and distances with zeros.
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
    // SAFETY: `Windowed::new` has checked that the processor supports these instructions.
    return unsafe { avx512::unpack(block.header, mantissas, packed, block.exceptions, scratch, out) };
    #[cfg(not(target_arch = "x86_64"))]
    {
        // Unreachable: on this architecture `Windowed::new` always returns `None`.
        let _ = (block.header, block.exceptions, mantissas, packed, scratch, out);
        false
    }
}
