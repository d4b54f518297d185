//! Codec that joins exponents with the first three bits of mantissas for an entropy coder of bytes.
//!
//! Given the scale of the weights, an exponent has about 2.65 bits of entropy. Among weights of one exponent, too,
//! large ones are rarer than small ones, so the first bits of a mantissa are not quite random. Both are joined in a
//! byte: five bits for the distance of the exponent from the top of its window, and three bits of the mantissa. With
//! so many values, Huffman codes lose little by their whole numbers of bits. A window is a row, because the weights of
//! a row have a common scale. The place of a window is its mean exponent, to a quarter of an octave; windows whose
//! places differ by whole octaves have the same distribution of distances, form a class and share a table. The coder
//! is the Huffman coder of zstd, which finds no matches in such data and then does little else.
//!
//! * masks: number of classes (1 or 4); the smallest place (`u16`); for each window its place minus the smallest
//!   (`u8`). A place is the mean exponent times the number of classes; its remainder modulo that number is the class
//! * exceptions: for each class that occurs the bytes of its windows, compressed; then the exponents that are too far
//!   from their tops, a byte each

use super::super::lanes::histogram;
use super::window::best_top;
use super::zstd::Zstd;
use super::{Codec, Cursors, Streams, take};
use crate::error::{Error, Result};
use crate::simd::{Kernel, Level};
use std::ops::Range;

/// Bits of a mantissa that are coded with its exponent.
pub(super) const LEAD: u32 = 3;
/// Distance that marks an exponent written in full.
const FAR: u8 = 31;
/// Distance of the top of a window above the mean exponent.
const ABOVE: u8 = 6;
/// Largest number of classes.
const MOST_CLASSES: usize = 4;

/// Layout of exponents and the bits below them.
#[derive(Debug, Clone, Copy)]
pub(super) struct JointShape {
    /// Number of weights in a window.
    pub window: usize,
    /// Position of the first bits of the mantissa in the plane below the exponents.
    pub shift: u32,
}

/// Places of windows, which determine their classes and tops.
struct Places {
    classes: usize,
    of: Vec<usize>,
}

impl Places {
    fn find(exponents: &[u8], window: usize, classes: usize) -> Places {
        Places { classes, of: exponents.chunks(window).map(|values| place(values, classes)).collect() }
    }

    fn top(&self, window: usize) -> u8 {
        ((self.of[window] / self.classes) as u8).wrapping_add(ABOVE)
    }

    /// Returns, for each class, the range of the bytes of its windows when the bytes are sorted by class.
    fn ranges(&self, count: usize, window: usize) -> [Range<usize>; MOST_CLASSES] {
        let mut lengths = [0; MOST_CLASSES];
        for (i, place) in self.of.iter().enumerate() {
            lengths[place % self.classes] += window.min(count - i * window);
        }
        let mut start = 0;
        lengths.map(|length| {
            start += length;
            start - length..start
        })
    }

    fn write(&mut self, masks: &mut Vec<u8>) {
        let least = self.of.iter().copied().min().unwrap_or(0);
        masks.push(self.classes as u8);
        masks.extend_from_slice(&(least as u16).to_le_bytes());
        for place in &mut self.of {
            let above = (*place - least).min(255);
            *place = least + above;
            masks.push(above as u8);
        }
    }

    fn read(masks: &mut &[u8], windows: usize) -> Result<Places> {
        let [classes, a, b] = take(masks, 3)?.as_chunks().0[0];
        if !matches!(classes, 1 | 4) {
            return Err(Error::corrupt(format!("found exponents in {classes} classes, expected 1 or 4")));
        }
        let least = u16::from_le_bytes([a, b]);
        let of = take(masks, windows)?.iter().map(|above| usize::from(least) + usize::from(*above)).collect();
        Ok(Places { classes: classes.into(), of })
    }
}

/// Returns the place of a window: its mean exponent times `classes`; the distance of outliers is limited.
fn place(values: &[u8], classes: usize) -> usize {
    let counts = histogram(values);
    let top = usize::from(best_top(&counts));
    let (least, most) = (top.saturating_sub(12), top + 3);
    let sum: usize = counts.iter().enumerate().map(|(v, count)| v.clamp(least, most) * *count as usize).sum();
    sum * classes / values.len().max(1)
}

/// Appends a plane of exponents with the first bits of the plane below it; `symbols` is a buffer.
///
/// # Errors
/// There is no memory for the tables of zstd.
pub(super) fn encode(
    level: Level,
    shape: JointShape,
    exponents: &[u8],
    lower: &[u8],
    zstd: &mut Zstd,
    symbols: &mut Vec<u8>,
    out: &mut Streams,
) -> Result<()> {
    let JointShape { window, shift } = shape;
    // A class takes a table of some 100 bytes.
    let classes = if exponents.len() > 65_536 { MOST_CLASSES } else { 1 };
    let mut places = Places::find(exponents, window, classes);
    out.masks.push(Codec::Joint as u8);
    places.write(&mut out.masks);
    symbols.resize(exponents.len(), 0);
    let ranges = places.ranges(exponents.len(), window);
    let mut next = ranges.clone().map(|range| range.start);
    let mut far = Vec::new();
    for (i, (exponents, lower)) in exponents.chunks(window).zip(lower.chunks(window)).enumerate() {
        let (top, at) = (places.top(i), &mut next[places.of[i] % classes]);
        let symbols = &mut symbols[*at..][..exponents.len()];
        *at += exponents.len();
        if level.run(Join { exponents, lower, top, shift, symbols }) {
            far.extend(exponents.iter().filter(|exponent| top.wrapping_sub(**exponent) >= FAR));
        }
    }
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        zstd.squeeze(&symbols[range], &mut out.exceptions)?;
    }
    out.exceptions.extend_from_slice(&far);
    Ok(())
}

/// Reads a plane of exponents, and adds the first bits of the plane below it; `symbols` is a buffer.
pub(super) fn decode(
    level: Level,
    shape: JointShape,
    from: &mut Cursors<'_>,
    zstd: &mut Zstd,
    symbols: &mut Vec<u8>,
    exponents: &mut [u8],
    lower: &mut [u8],
) -> Result<()> {
    let JointShape { window, shift } = shape;
    let places = Places::read(&mut from.masks, exponents.len().div_ceil(window))?;
    symbols.resize(exponents.len(), 0);
    let ranges = places.ranges(exponents.len(), window);
    let mut next = ranges.clone().map(|range| range.start);
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        zstd.restore(&mut from.exceptions, &mut symbols[range])?;
    }
    let mut far = 0;
    for (i, (exponents, lower)) in exponents.chunks_mut(window).zip(lower.chunks_mut(window)).enumerate() {
        let (top, at) = (places.top(i), &mut next[places.of[i] % places.classes]);
        let symbols = &symbols[*at..][..exponents.len()];
        *at += exponents.len();
        if level.run(Split { symbols, top, shift, exponents, lower }) {
            for (exponent, _) in exponents.iter_mut().zip(symbols).filter(|(_, symbol)| **symbol >> LEAD == FAR) {
                // A missing exponent is refused below.
                *exponent = from.exceptions.get(far).copied().unwrap_or(0);
                far += 1;
            }
        }
    }
    take(&mut from.exceptions, far).map(drop)
}

/// Joins exponents and first bits of mantissas to bytes; returns true if an exponent is far from its top.
struct Join<'a> {
    exponents: &'a [u8],
    lower: &'a [u8],
    top: u8,
    shift: u32,
    symbols: &'a mut [u8],
}

impl Kernel<bool> for Join<'_> {
    #[inline(always)]
    fn run(self) -> bool {
        let mut far = false;
        for ((exponent, lower), symbol) in self.exponents.iter().zip(self.lower).zip(self.symbols) {
            let distance = self.top.wrapping_sub(*exponent);
            far |= distance >= FAR;
            *symbol = (if distance < FAR { distance } else { FAR }) << LEAD | lower >> self.shift;
        }
        far
    }
}

/// Splits the bytes that [`Join`] makes; returns true if an exponent is far from its top.
struct Split<'a> {
    symbols: &'a [u8],
    top: u8,
    shift: u32,
    exponents: &'a mut [u8],
    lower: &'a mut [u8],
}

impl Kernel<bool> for Split<'_> {
    #[inline(always)]
    fn run(self) -> bool {
        let mut far = false;
        for ((symbol, exponent), lower) in self.symbols.iter().zip(self.exponents).zip(self.lower) {
            let distance = symbol >> LEAD;
            far |= distance == FAR;
            *exponent = self.top.wrapping_sub(distance);
            *lower |= (symbol & 7) << self.shift;
        }
        far
    }
}
