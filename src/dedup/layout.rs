//! How the bytes of a payload are cut into units, and these into frames.

use super::frame::frame_bytes;
use super::pattern::Pattern;
use super::plane::Effort;
use crate::error::Result;
use crate::iebin::Entry;
use std::ops::Range;

/// How a payload is cut.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// What its bytes mean.
    pub pattern: Pattern,
    /// Number of units.
    pub units: usize,
    pub unit_bytes: usize,
    pub frame_bytes: usize,
}

impl Layout {
    /// The layout of a tensor, or of other bytes.
    pub fn of(entry: Option<&Entry>, nbytes: usize, effort: Effort) -> Result<Layout> {
        let (pattern, units) = match entry {
            None => (Pattern::bytes(), 1),
            Some(entry) => (Pattern::of(entry)?, if entry.shape.len() > 2 { entry.matrices()?.0 } else { 1 }),
        };
        // Stacks of nothing, and of matrices that do not end between two numbers, are one unit.
        let whole = |bytes: usize| bytes > 0 && nbytes > 0 && nbytes.is_multiple_of(bytes);
        let units = if units.checked_mul(pattern.period).is_some_and(whole) { units } else { 1 };
        Ok(Layout { units, unit_bytes: nbytes / units, frame_bytes: frame_bytes(&pattern, effort), pattern })
    }

    /// True when a unit of the other can stand for one of these.
    pub fn alike(&self, other: &Layout) -> bool {
        (&self.pattern, self.unit_bytes) == (&other.pattern, other.unit_bytes)
    }

    /// The frames of a unit.
    pub fn frames(&self) -> usize {
        self.unit_bytes.div_ceil(self.frame_bytes)
    }

    /// Bytes of frame `i` within its unit.
    pub fn frame(&self, i: usize) -> Range<usize> {
        i * self.frame_bytes..((i + 1) * self.frame_bytes).min(self.unit_bytes)
    }
}
