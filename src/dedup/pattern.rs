//! Splits the bytes of a payload by their meaning into planes, and joins them again.
//!
//! Exponents of floats take few, predictable values, and mantissas are noise; scales of quantized tiles differ from
//! codes. So a payload is a repeated period (an element, or a tile), a period has parts, and the numbers of a part
//! are split into planes.

use super::plane::PlaneKind;
use crate::dtype::DType;
use crate::error::Result;
use crate::iebin::{Entry, Store};
use crate::scheme::{CodeMap, CodeTable, ScaleType, TILE_ROWS};
use crate::simd::{Kernel, Level};

/// Type of the numbers in a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Numbers {
    Bf16,
    F16,
    F32,
    /// Two bytes of codes of quantized weights.
    Codes(Codes),
    Bytes,
}

/// Representation of codes. The half of the bits that determines the magnitude of a weight is entropy-coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codes {
    /// Four bits, 8 is zero.
    Offset,
    /// Four bits, sign and magnitude.
    Magnitude,
    /// Eight bits, or bytes that hold bits of several codes.
    Bytes,
}

impl Codes {
    /// Returns the mask with which [`split_nibbles`] converts the four offset codes in two bytes to sign and magnitude;
    /// 0 for other codes, which stay unchanged.
    fn fold(self) -> u16 {
        if self == Codes::Offset { 0x1111 } else { 0 }
    }
}

impl Numbers {
    /// Returns the size of one number in bytes.
    pub fn size(self) -> usize {
        match self {
            Numbers::Bf16 | Numbers::F16 | Numbers::Codes(_) => 2,
            Numbers::F32 => 4,
            Numbers::Bytes => 1,
        }
    }

    /// Returns the planes of these numbers, one value per number in each; the least significant is first.
    pub fn planes(self) -> &'static [PlaneKind] {
        match self {
            Numbers::Bf16 => &[PlaneKind::Bytes, PlaneKind::Exponents],
            Numbers::F16 => &[PlaneKind::Bytes, PlaneKind::Threes, PlaneKind::Exponents],
            Numbers::F32 => &[PlaneKind::Bytes, PlaneKind::Bytes, PlaneKind::Bytes, PlaneKind::SparseExponents],
            Numbers::Codes(_) => &[PlaneKind::Bytes, PlaneKind::Bytes],
            Numbers::Bytes => &[PlaneKind::Bytes],
        }
    }

    /// Returns the type of differences of these numbers, which are split byte by byte, and their planes.
    pub fn differences(self) -> (Numbers, &'static [PlaneKind]) {
        let whole = match self {
            Numbers::F16 => Numbers::Bf16,
            Numbers::Codes(_) => Numbers::Bytes,
            _ => self,
        };
        (whole, &[PlaneKind::Bytes; 4][..whole.size()])
    }
}

/// Consecutive bytes of a period that have numbers of one type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NumberRun {
    pub numbers: Numbers,
    /// Number of bytes, a multiple of the size of a number.
    pub bytes: usize,
}

/// The period of a payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pattern {
    pub parts: Vec<NumberRun>,
    /// Bytes of all parts; the length of the payload is a multiple of it.
    pub period: usize,
    /// Number of periods in a row of a matrix of plain numbers; 0 for other payloads.
    pub row: usize,
}

impl Pattern {
    /// Returns the pattern of a tensor of a pack.
    ///
    /// # Errors
    /// The shape does not fit whole tiles.
    pub fn of(entry: &Entry) -> Result<Pattern> {
        let parts = match (entry.store, entry.layout().transpose()?) {
            (Store::Tiled(spec), Some(layout)) => {
                let scales = layout.groups * TILE_ROWS * spec.scale_dtype.size();
                let numbers = match spec.scale_dtype {
                    ScaleType::F16 => Numbers::F16,
                    ScaleType::F32 => Numbers::F32,
                    ScaleType::E8m0 | ScaleType::I8 | ScaleType::E4m3 | ScaleType::I8Row => Numbers::Bytes,
                };
                let codes = match spec.code_map() {
                    CodeMap::Table(CodeTable::E2m1) => Codes::Magnitude,
                    CodeMap::Table(CodeTable::Iq4Nl) | CodeMap::Biased(8) | CodeMap::Affine => Codes::Offset,
                    CodeMap::Biased(_) | CodeMap::Trellis(_) | CodeMap::Unsigned | CodeMap::Bytes | CodeMap::E4m3 => {
                        Codes::Bytes
                    }
                };
                vec![
                    NumberRun { numbers, bytes: scales },
                    NumberRun { numbers: Numbers::Bytes, bytes: layout.codes_offset - scales },
                    NumberRun { numbers: Numbers::Codes(codes), bytes: layout.tile_bytes - layout.codes_offset },
                ]
            }
            (Store::Plain(dtype), _) => {
                let numbers = match dtype {
                    DType::BF16 => Numbers::Bf16,
                    DType::F16 => Numbers::F16,
                    DType::F32 => Numbers::F32,
                    _ => Numbers::Bytes,
                };
                vec![NumberRun { numbers, bytes: numbers.size() }]
            }
            (Store::Tiled(_), None) => unreachable!("a tiled store has a layout"),
        };
        let parts: Vec<NumberRun> = parts.into_iter().filter(|part| part.bytes > 0).collect();
        let row = match (entry.store, &entry.shape[..]) {
            (Store::Plain(_), [_, .., cols]) => *cols,
            _ => 0,
        };
        Ok(Pattern { period: parts.iter().map(|part| part.bytes).sum(), parts, row })
    }

    /// Returns the pattern of bytes without known structure.
    pub fn bytes() -> Pattern {
        Pattern { parts: vec![NumberRun { numbers: Numbers::Bytes, bytes: 1 }], period: 1, row: 0 }
    }

    /// Returns the length in bytes of a frame of whole periods, about `wanted`.
    pub fn frame_bytes(&self, wanted: usize) -> usize {
        (wanted / self.period).max(1) * self.period
    }

    /// Returns the length in bytes of a frame of whole rows, about `wanted`; of whole periods if a row is longer.
    pub fn frame_of_rows(&self, wanted: usize) -> usize {
        match self.row.checked_mul(self.period) {
            Some(row @ 1..) if row <= wanted => wanted / row * row,
            _ => self.frame_bytes(wanted),
        }
    }

    /// Returns the number of values that share a window ([`super::plane`]): one row, several short rows, or 2048 values
    /// of a long row or of a payload without rows.
    pub fn window(&self) -> usize {
        match self.row {
            0 | 8193.. => 2048,
            row => row * 1024usize.div_ceil(row),
        }
    }

    /// Returns the bytes of part `i` from all periods of a frame, one after the other. If it is the only part, they
    /// are borrowed from the frame.
    pub fn gather<'a>(&self, i: usize, frame: &'a [u8], buffer: &'a mut Vec<u8>) -> &'a [u8] {
        if self.parts.len() == 1 {
            return frame;
        }
        let range = self.range(i);
        buffer.clear();
        frame.chunks(self.period).for_each(|period| buffer.extend_from_slice(&period[range.clone()]));
        buffer
    }

    /// Writes the bytes of part `i` back into a frame: the inverse of [`Pattern::gather`] for a pattern of several
    /// parts.
    pub fn scatter(&self, i: usize, bytes: &[u8], frame: &mut [u8]) {
        let range = self.range(i);
        for (period, bytes) in frame.chunks_mut(self.period).zip(bytes.chunks(range.len())) {
            period[range.clone()].copy_from_slice(bytes);
        }
    }

    fn range(&self, i: usize) -> std::ops::Range<usize> {
        let start = self.parts[..i].iter().map(|part| part.bytes).sum();
        start..start + self.parts[i].bytes
    }
}

/// Splits numbers into planes: `planes[p][i]` is value `p` of number `i`.
pub(crate) fn split(level: Level, numbers: Numbers, bytes: &[u8], planes: &mut [Vec<u8>; 4]) {
    let count = bytes.len() / numbers.size();
    planes.iter_mut().for_each(|plane| plane.resize(count, 0));
    level.run(Split { numbers, bytes, planes: planes.each_mut().map(|plane| &mut plane[..]) });
}

/// Joins planes into numbers: the inverse of [`split`].
pub(crate) fn join(level: Level, numbers: Numbers, planes: [&[u8]; 4], bytes: &mut [u8]) {
    level.run(Join { numbers, planes, bytes });
}

struct Split<'a> {
    numbers: Numbers,
    bytes: &'a [u8],
    planes: [&'a mut [u8]; 4],
}

impl Kernel for Split<'_> {
    #[inline(always)]
    fn run(self) {
        let (bytes, [a, b, c, d]) = (self.bytes, self.planes);
        match self.numbers {
            Numbers::Bf16 => split_bf16(bytes.as_chunks().0, a, b),
            Numbers::F16 => split_f16(bytes.as_chunks().0, a, b, c),
            Numbers::F32 => split_f32(bytes.as_chunks().0, [a, b, c, d]),
            Numbers::Codes(Codes::Bytes) => split_bytes(bytes.as_chunks().0, a, b),
            Numbers::Codes(codes) => split_nibbles(codes.fold(), bytes.as_chunks().0, a, b),
            Numbers::Bytes => a.copy_from_slice(bytes),
        }
    }
}

struct Join<'a> {
    numbers: Numbers,
    planes: [&'a [u8]; 4],
    bytes: &'a mut [u8],
}

impl Kernel for Join<'_> {
    #[inline(always)]
    fn run(self) {
        let (bytes, [a, b, c, d]) = (self.bytes, self.planes);
        match self.numbers {
            Numbers::Bf16 => join_bf16(bytes.as_chunks_mut().0, a, b),
            Numbers::F16 => join_f16(bytes.as_chunks_mut().0, a, b, c),
            Numbers::F32 => join_f32(bytes.as_chunks_mut().0, [a, b, c, d]),
            Numbers::Codes(Codes::Bytes) => join_bytes(bytes.as_chunks_mut().0, a, b),
            Numbers::Codes(codes) => join_nibbles(codes.fold(), bytes.as_chunks_mut().0, a, b),
            Numbers::Bytes => bytes.copy_from_slice(a),
        }
    }
}

#[inline(always)]
fn split_bf16(numbers: &[[u8; 2]], mantissas: &mut [u8], exponents: &mut [u8]) {
    for ((number, mantissa), exponent) in numbers.iter().zip(mantissas).zip(exponents) {
        // The rotation moves the sign to the lowest bit, so that the exponent fills a byte.
        let bits = u16::from_le_bytes(*number).rotate_left(1);
        (*mantissa, *exponent) = (bits as u8, (bits >> 8) as u8);
    }
}

#[inline(always)]
fn join_bf16(numbers: &mut [[u8; 2]], mantissas: &[u8], exponents: &[u8]) {
    for ((number, mantissa), exponent) in numbers.iter_mut().zip(mantissas).zip(exponents) {
        *number = (u16::from(*exponent) << 8 | u16::from(*mantissa)).rotate_right(1).to_le_bytes();
    }
}

#[inline(always)]
fn split_f16(numbers: &[[u8; 2]], low: &mut [u8], middle: &mut [u8], exponents: &mut [u8]) {
    let planes = low.iter_mut().zip(middle).zip(exponents);
    for (number, ((low, middle), exponent)) in numbers.iter().zip(planes) {
        let bits = u16::from_le_bytes(*number).rotate_left(1);
        (*low, *middle, *exponent) = (bits as u8, (bits >> 8) as u8 & 7, (bits >> 11) as u8);
    }
}

#[inline(always)]
fn join_f16(numbers: &mut [[u8; 2]], low: &[u8], middle: &[u8], exponents: &[u8]) {
    let planes = low.iter().zip(middle).zip(exponents);
    for (number, ((low, middle), exponent)) in numbers.iter_mut().zip(planes) {
        let bits = u16::from(*exponent) << 11 | u16::from(*middle & 7) << 8 | u16::from(*low);
        *number = bits.rotate_right(1).to_le_bytes();
    }
}

#[inline(always)]
fn split_f32(numbers: &[[u8; 4]], [a, b, c, d]: [&mut [u8]; 4]) {
    for (number, (((a, b), c), d)) in numbers.iter().zip(a.iter_mut().zip(b).zip(c).zip(d)) {
        [*a, *b, *c, *d] = u32::from_le_bytes(*number).rotate_left(1).to_le_bytes();
    }
}

#[inline(always)]
fn join_f32(numbers: &mut [[u8; 4]], [a, b, c, d]: [&[u8]; 4]) {
    for (number, (((a, b), c), d)) in numbers.iter_mut().zip(a.iter().zip(b).zip(c).zip(d)) {
        *number = u32::from_le_bytes([*a, *b, *c, *d]).rotate_right(1).to_le_bytes();
    }
}

/// Returns the low nibbles of two bytes as one byte.
#[inline(always)]
fn together(nibbles: u16) -> u8 {
    (nibbles | nibbles >> 4) as u8
}

/// Splits a byte into nibbles: the inverse of [`together`].
#[inline(always)]
fn apart(byte: u8) -> u16 {
    let byte = u16::from(byte);
    byte & 0x0F | (byte & 0xF0) << 4
}

/// Splits pairs of eight-bit codes; the plane of high nibbles is entropy-coded.
#[inline(always)]
fn split_bytes(numbers: &[[u8; 2]], low: &mut [u8], high: &mut [u8]) {
    for ((number, low), high) in numbers.iter().zip(low).zip(high) {
        let bits = u16::from_le_bytes(*number);
        (*low, *high) = (together(bits & 0x0F0F), together(bits >> 4 & 0x0F0F));
    }
}

#[inline(always)]
fn join_bytes(numbers: &mut [[u8; 2]], low: &[u8], high: &[u8]) {
    let all = numbers.iter_mut().zip(low).zip(high);
    all.for_each(|((number, low), high)| *number = (apart(*low) | apart(*high) << 4).to_le_bytes());
}

/// Splits groups of four-bit codes; the plane of the middle bits, the higher ones of the magnitude, is entropy-coded.
#[inline(always)]
fn split_nibbles(fold: u16, numbers: &[[u8; 2]], low: &mut [u8], high: &mut [u8]) {
    for ((number, low), high) in numbers.iter().zip(low).zip(high) {
        let bits = u16::from_le_bytes(*number);
        let bits = bits ^ ((!bits >> 3 & fold) * 7);
        let outer = bits & 0x0101 | bits >> 2 & 0x0606 | bits >> 4 & 0x0808;
        (*low, *high) = (together(outer), together(bits >> 1 & 0x0303 | bits >> 3 & 0x0C0C));
    }
}

#[inline(always)]
fn join_nibbles(fold: u16, numbers: &mut [[u8; 2]], low: &[u8], high: &[u8]) {
    for ((number, low), high) in numbers.iter_mut().zip(low).zip(high) {
        let (low, high) = (apart(*low), apart(*high));
        let outer = low & 0x0101 | (low & 0x0606) << 2 | (low & 0x0808) << 4;
        let bits = outer | (high & 0x0303) << 1 | (high & 0x0C0C) << 3;
        *number = (bits ^ ((!bits >> 3 & fold) * 7)).to_le_bytes();
    }
}

/// Converts numbers to their differences from `base`, or back. The difference counts the representable numbers between
/// the two and is written as sign and magnitude, as in floats, so that small changes are small codes regardless of
/// their sign; for bytes it is the exclusive or. Every bit pattern has its own code, including those of NaN.
pub(crate) fn delta(level: Level, numbers: Numbers, way: Way, bytes: &mut [u8], base: &[u8]) {
    level.run(Delta { size: numbers.differences().0.size(), way, bytes, base });
}

/// Direction of [`delta`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    ToDifference,
    FromDifference,
}

struct Delta<'a> {
    /// Size of a number in bytes.
    size: usize,
    way: Way,
    bytes: &'a mut [u8],
    base: &'a [u8],
}

impl Kernel for Delta<'_> {
    #[inline(always)]
    fn run(self) {
        let (bytes, base) = (self.bytes, self.base);
        match self.size {
            2 => delta_16(self.way, bytes.as_chunks_mut().0, base.as_chunks().0),
            4 => delta_32(self.way, bytes.as_chunks_mut().0, base.as_chunks().0),
            _ => bytes.iter_mut().zip(base).for_each(|(byte, base)| *byte ^= base),
        }
    }
}

macro_rules! delta {
    ($name:ident, $unsigned:ty, $signed:ty) => {
        #[inline(always)]
        fn $name(way: Way, numbers: &mut [[u8; size_of::<$unsigned>()]], base: &[[u8; size_of::<$unsigned>()]]) {
            // Converts sign and magnitude to one's complement, and back: it is its own inverse.
            let turned = |x: $unsigned| x ^ (((x as $signed >> (<$unsigned>::BITS - 1)) as $unsigned) >> 1);
            let read = |bytes: &[u8; size_of::<$unsigned>()]| turned(<$unsigned>::from_le_bytes(*bytes));
            let numbers = numbers.iter_mut().zip(base);
            match way {
                Way::ToDifference => numbers.for_each(|(number, base)| {
                    *number = turned(read(number).wrapping_sub(read(base))).to_le_bytes();
                }),
                Way::FromDifference => numbers.for_each(|(number, base)| {
                    *number = turned(read(number).wrapping_add(read(base))).to_le_bytes();
                }),
            }
        }
    };
}

delta!(delta_16, u16, i16);
delta!(delta_32, u32, i32);
