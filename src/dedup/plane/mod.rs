//! Planes: the bytes of one frame with the same meaning, and the codecs that write them.
//!
//! A frame of numbers is split into planes (see [`super::pattern`]): exponents in one, mantissas in others. A plane
//! is written by the [`Codec`] that makes it smallest in a trial, among those that the [`Effort`] permits. Every codec
//! writes three streams, one per file: values in full, masks, and exceptions.

mod bits;
mod joint;
mod window;
mod zstd;

use crate::error::{Error, Result};
use crate::simd::Level;
use bits::{Fives, Threes};

/// Content of a plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlaneKind {
    /// Exponents of neighbouring weights: few values, close together.
    Exponents,
    /// Exponents of four-byte numbers, which have three raw planes each, so that an entropy coder slows them down
    /// little.
    SparseExponents,
    /// Values of three bits.
    Threes,
    /// Bytes without known structure.
    Bytes,
}

impl PlaneKind {
    /// Returns the number of bits of this plane below those that can be joined with exponents.
    fn shift(self) -> u32 {
        if self == PlaneKind::Threes { 0 } else { u8::BITS - joint::LEAD }
    }
}

/// Codec of a plane: its first byte in the stream of masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Codec {
    /// Unchanged.
    Raw = 0,
    /// All bytes are equal; the byte follows.
    Constant = 1,
    /// Three bits per value: its distance from the top of a window, or "exception" ([`window`]).
    Window = 2,
    /// Joined with the first bits of the plane before and entropy-coded ([`joint`]).
    Joint = 3,
    /// Bytes compressed by zstd.
    Squeezed = 4,
    /// Without its first bits, which are stored with the next plane.
    Rest = 5,
}

/// Codecs that may be used to make planes smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Planes are stored unchanged, except those of equal bytes.
    None,
    /// Codecs that decode at memory bandwidth.
    Fast,
    /// Entropy coding in addition, with this level of zstd.
    Small(i32),
}

/// An encoded frame, one stream per file.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Streams {
    /// Values in full.
    pub defaults: Vec<u8>,
    /// Headers, and values packed in few bits.
    pub masks: Vec<u8>,
    /// Values that do not fit in these bits, and compressed data.
    pub exceptions: Vec<u8>,
}

impl Streams {
    /// Returns cursors at the beginnings of the streams.
    pub fn cursors(&self) -> Cursors<'_> {
        Cursors { defaults: &self.defaults, masks: &self.masks, exceptions: &self.exceptions }
    }

    /// Returns the number of bytes in all streams.
    pub fn len(&self) -> usize {
        self.cursors().all().iter().map(|stream| stream.len()).sum()
    }

    pub fn clear(&mut self) {
        self.defaults.clear();
        self.masks.clear();
        self.exceptions.clear();
    }

    fn append(&mut self, other: &Streams) {
        self.defaults.extend_from_slice(&other.defaults);
        self.masks.extend_from_slice(&other.masks);
        self.exceptions.extend_from_slice(&other.exceptions);
    }
}

/// Bytes of the streams of a frame that are not yet decoded. They are untrusted input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cursors<'a> {
    pub defaults: &'a [u8],
    pub masks: &'a [u8],
    pub exceptions: &'a [u8],
}

impl<'a> Cursors<'a> {
    /// Creates cursors over streams in the order of the files.
    pub fn of([defaults, masks, exceptions]: [&'a [u8]; 3]) -> Cursors<'a> {
        Cursors { defaults, masks, exceptions }
    }

    /// Returns the streams in the order of the files.
    pub fn all(&self) -> [&'a [u8]; 3] {
        [self.defaults, self.masks, self.exceptions]
    }
}

/// Returns the next `n` bytes of a stream and removes them from it.
pub(crate) fn take<'a>(stream: &mut &'a [u8], n: usize) -> Result<&'a [u8]> {
    let (taken, left) = stream.split_at_checked(n).ok_or_else(|| {
        Error::corrupt(format!("found a stream of an encoded frame that ends {} bytes too early", n - stream.len()))
    })?;
    *stream = left;
    Ok(taken)
}

/// Tables and buffers that encoding and decoding reuse.
#[derive(Debug)]
pub(crate) struct Scratch {
    zstd: zstd::Zstd,
    best: Streams,
    tried: Streams,
    bytes: Vec<u8>,
}

impl Scratch {
    pub fn new(effort: Effort) -> Scratch {
        let level = if let Effort::Small(level) = effort { level } else { 1 };
        let (best, tried) = Default::default();
        Scratch { zstd: zstd::Zstd::new(level), best, tried, bytes: Vec::new() }
    }
}

/// Appends a plane in its smallest form.
///
/// # Errors
/// There is no memory for the tables of zstd.
pub(crate) fn encode(
    level: Level,
    plane: &[u8],
    kind: PlaneKind,
    effort: Effort,
    scratch: &mut Scratch,
    out: &mut Streams,
) -> Result<()> {
    match plane {
        [first, rest @ ..] if level.run(super::lanes::AllAre(rest, *first)) => {
            out.masks.extend([Codec::Constant as u8, *first]);
            return Ok(());
        }
        _ if kind == PlaneKind::Threes => {
            out.masks.push(Codec::Raw as u8);
            Threes::pack(level, plane, &mut out.defaults);
            return Ok(());
        }
        _ => {}
    }
    let Scratch { zstd, best, tried, bytes } = scratch;
    best.clear();
    best.masks.push(Codec::Raw as u8);
    best.defaults.extend_from_slice(plane);
    let mut offer = |write: &mut dyn FnMut(&mut Streams) -> Result<()>| -> Result<()> {
        tried.clear();
        write(tried)?;
        if tried.len() < best.len() {
            std::mem::swap(tried, best);
        }
        Ok(())
    };
    let exponents = matches!(kind, PlaneKind::Exponents | PlaneKind::SparseExponents);
    if exponents && effort != Effort::None && (effort, kind) != (Effort::Fast, PlaneKind::SparseExponents) {
        offer(&mut |s| {
            window::encode(level, plane, s, bytes);
            Ok(())
        })?;
    }
    if let Effort::Small(_) = effort {
        offer(&mut |s| {
            s.masks.push(Codec::Squeezed as u8);
            zstd.squeeze(plane, &mut s.exceptions)
        })?;
    }
    out.append(best);
    Ok(())
}

/// Appends a plane of exponents and the plane below it (the upper bits of the mantissas), separately or joined,
/// whichever is smaller.
///
/// # Errors
/// There is no memory for the tables of zstd.
#[allow(clippy::too_many_arguments)]
pub(crate) fn encode_floats(
    level: Level,
    [lower, exponents]: [&[u8]; 2],
    [below, kind]: [PlaneKind; 2],
    window: usize,
    effort: Effort,
    scratch: &mut Scratch,
    out: &mut Streams,
) -> Result<()> {
    if effort == Effort::None || (effort, kind) == (Effort::Fast, PlaneKind::Exponents) {
        encode(level, lower, below, effort, scratch, out)?;
        return encode(level, exponents, kind, effort, scratch, out);
    }
    let mut smallest = Streams::default();
    encode(level, lower, below, effort, scratch, &mut smallest)?;
    encode(level, exponents, kind, effort, scratch, &mut smallest)?;
    let Scratch { zstd, tried, bytes, .. } = scratch;
    let shape = joint::JointShape { window, shift: below.shift() };
    tried.clear();
    tried.masks.push(Codec::Rest as u8);
    if below == PlaneKind::Bytes {
        Fives::pack(level, lower, &mut tried.defaults);
    }
    joint::encode(level, shape, exponents, lower, zstd, bytes, tried)?;
    out.append(if tried.len() < smallest.len() { tried } else { &smallest });
    Ok(())
}

/// Reads the next plane, of `out.len()` values. The first bits of the plane before, `lower`, may be stored together
/// with exponents; they are then added to `lower`.
pub(crate) fn decode(
    level: Level,
    kind: PlaneKind,
    from: &mut Cursors<'_>,
    window: usize,
    scratch: &mut Scratch,
    lower: Option<(PlaneKind, &mut [u8])>,
    out: &mut [u8],
) -> Result<()> {
    match (take(&mut from.masks, 1)?[0], lower) {
        (0, _) if kind == PlaneKind::Threes => {
            Threes::unpack(level, take(&mut from.defaults, Threes::packed_len(out.len()))?, out);
        }
        (0, _) => out.copy_from_slice(take(&mut from.defaults, out.len())?),
        (1, _) => out.fill(take(&mut from.masks, 1)?[0]),
        (2, _) => window::decode(level, from, out)?,
        (3, Some((below, lower))) => {
            let shape = joint::JointShape { window, shift: below.shift() };
            joint::decode(level, shape, from, &mut scratch.zstd, &mut scratch.bytes, out, lower)?;
        }
        (4, _) => scratch.zstd.restore(&mut from.exceptions, out)?,
        (5, _) if kind == PlaneKind::Threes => out.fill(0),
        (5, _) => Fives::unpack(level, take(&mut from.defaults, Fives::packed_len(out.len()))?, out),
        (other, _) => {
            return Err(Error::corrupt(format!("found codec {other} of a plane, which is unknown or not valid here")));
        }
    }
    Ok(())
}

/// Returns the next plane, of `len` values, without a copy, if it is stored in full; otherwise leaves the cursors as
/// they are and returns `None`.
pub(crate) fn in_place<'a>(kind: PlaneKind, from: &mut Cursors<'a>, len: usize) -> Option<&'a [u8]> {
    if kind != PlaneKind::Bytes || from.masks.first() != Some(&(Codec::Raw as u8)) {
        return None;
    }
    let plane = take(&mut from.defaults, len).ok()?;
    from.masks = &from.masks[1..];
    Some(plane)
}
