//! Divides the bytes of a payload into units, and units into frames.

use super::frame::frame_bytes;
use super::pattern::Pattern;
use super::plane::Effort;
use crate::error::Result;
use crate::iebin::Entry;
use std::ops::Range;

/// Division of a payload into units.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// Structure of its bytes.
    pub pattern: Pattern,
    /// Number of units.
    pub units: usize,
    pub unit_bytes: usize,
    pub frame_bytes: usize,
}

impl Layout {
    /// Returns the layout of a tensor, or of bytes that belong to no tensor.
    pub fn of(entry: Option<&Entry>, nbytes: usize, effort: Effort) -> Result<Layout> {
        let (pattern, units) = match entry {
            None => (Pattern::bytes(), 1),
            Some(entry) => (Pattern::of(entry)?, if entry.shape.len() > 2 { entry.matrices()?.0 } else { 1 }),
        };
        // Empty stacks, and stacks whose matrices are not whole periods of the pattern, are one unit.
        let whole = |bytes: usize| bytes > 0 && nbytes > 0 && nbytes.is_multiple_of(bytes);
        let units = if units.checked_mul(pattern.period).is_some_and(whole) { units } else { 1 };
        Ok(Layout { units, unit_bytes: nbytes / units, frame_bytes: frame_bytes(&pattern, effort), pattern })
    }

    /// Returns the layout of the same bytes divided into `units` units; `None` if these would not have whole periods.
    pub fn cut(&self, units: usize) -> Option<Layout> {
        let nbytes = self.units * self.unit_bytes;
        let fits = units > 0 && nbytes.is_multiple_of(units) && (nbytes / units).is_multiple_of(self.pattern.period);
        (fits && nbytes > 0).then(|| Layout { units, unit_bytes: nbytes / units, ..self.clone() })
    }

    /// Returns the layout of the tensor `entry` of a base for a comparison with the tensor of this layout: with units
    /// of the same size, if possible.
    pub fn facing(&self, entry: &Entry, effort: Effort) -> Result<Layout> {
        let other = Layout::of(Some(entry), entry.nbytes, effort)?;
        if self.alike(&other) || self.units == 1 || other.pattern != self.pattern {
            return Ok(other);
        }
        let units = entry.nbytes.checked_div(self.unit_bytes).filter(|units| units * self.unit_bytes == entry.nbytes);
        Ok(units.and_then(|units| other.cut(units)).unwrap_or(other))
    }

    /// Returns true if a unit of the other layout may equal one of this layout.
    pub fn alike(&self, other: &Layout) -> bool {
        (&self.pattern, self.unit_bytes) == (&other.pattern, other.unit_bytes)
    }

    /// Returns true if a unit of `other` can be stored as differences from a unit of this layout: the numbers must be
    /// of one type, but whole tensors may differ in length, for example if the vocabulary has grown.
    pub fn can_help(&self, other: &Layout) -> bool {
        self.alike(other) || (self.pattern == other.pattern && self.units == 1 && other.units == 1)
    }

    /// Returns a range of about `wanted` bytes in the middle of a unit; it consists of whole periods.
    pub fn middle(&self, wanted: usize) -> Range<usize> {
        let period = self.pattern.period.max(1);
        let length = self.pattern.frame_bytes(wanted).min(self.unit_bytes / period * period);
        let start = (self.unit_bytes - length) / 2 / period * period;
        start..start + length
    }

    /// Returns the number of frames of a unit.
    pub fn frames(&self) -> usize {
        self.unit_bytes.div_ceil(self.frame_bytes)
    }

    /// Returns the range of bytes of frame `i` within its unit.
    pub fn frame(&self, i: usize) -> Range<usize> {
        i * self.frame_bytes..((i + 1) * self.frame_bytes).min(self.unit_bytes)
    }
}
