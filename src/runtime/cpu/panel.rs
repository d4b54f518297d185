//! Weights that are unpacked once and multiplied by many columns.
//!
//! A panel is some groups of K of some tiles. Few columns would not pay for writing and reading it in the second-level cache,
//! so for them it is as small as the first-level cache likes, and sums wait in memory for the next groups.

#[cfg(target_arch = "x86_64")]
use super::acts::GROUP_BLOCKS;
use super::acts::Line;
use super::kernels::Part;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

/// A pair of functions which share the work of a [`super::kernels::PartFn`]: one unpacks `items` items (or 1), the other
/// multiplies them by up to `cols` columns, again and again. Whether it wins is a matter of the number of columns only; the
/// bits are the same.
#[derive(Debug, Clone, Copy)]
pub(super) struct PanelKernel {
    /// Items of a full panel.
    pub items: usize,
    /// Most columns of a product.
    pub cols: usize,
    /// Columns from which on unpacking pays.
    pub least_cols: usize,
    /// Groups of K whose panel takes about a third of the first-level cache.
    pub groups: usize,
    /// Unpacks these groups of the items of the part. Safety: as [`super::kernels::PartFn`]; the groups lie inside K.
    pub unpack: unsafe fn(&Part<'_>, Range<usize>, &mut Panel),
    /// As [`super::kernels::PartFn`], for a panel that was unpacked from the same items and groups; goes on with `out` unless
    /// these are the first.
    pub run: unsafe fn(&Part<'_>, Range<usize>, &Panel, out: &mut [f32]),
}

/// Columns from which on a panel takes all of K: then it is read so often that walking through the sums is what costs more.
const MANY_COLS: usize = 64;

impl PanelKernel {
    /// How many groups of K to unpack at once for this many columns, of so many that there are.
    pub fn depth(&self, cols: usize, groups: usize) -> usize {
        if cols < MANY_COLS { self.groups } else { groups.max(1) }
    }
}

/// Unpacked weights, in whatever form the kernel likes; the memory is used again.
#[derive(Debug, Default)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
pub(super) struct Panel {
    pub codes: Vec<Line>,
    pub scales: Vec<Line>,
}

/// The packed tiles behind a panel's, which come next: each product asks for its share of them, so that they are on their
/// way into the second-level cache while others are multiplied.
#[cfg(target_arch = "x86_64")]
pub(super) struct NextTiles {
    next: *const u8,
    until: *const u8,
    /// Bytes to ask for in each group.
    step: usize,
}

#[cfg(target_arch = "x86_64")]
impl NextTiles {
    /// For a product with these groups of K.
    #[inline]
    pub fn of(part: &Part<'_>, groups: &Range<usize>) -> NextTiles {
        let layout = part.layout();
        let (bytes, n, col) = (part.items * layout.tile_bytes, part.tokens, part.col - part.first);
        let per_group = bytes / layout.blocks.div_ceil(GROUP_BLOCKS).max(1);
        let share = per_group * groups.len();
        let first = (part.item + part.items) * layout.tile_bytes + per_group * groups.start;
        let (next, len) = (first + share * col / n, share * part.cols / n);
        let next = part.matrix.data.as_ptr().wrapping_add(next);
        let step = len.div_ceil(groups.len().max(1)).next_multiple_of(64);
        NextTiles { next, until: next.wrapping_add(len), step }
    }

    /// Asks for what one group of activations is worth.
    #[inline(always)]
    pub fn ask(&mut self) {
        let until = self.next.wrapping_add(self.step);
        while self.next < until.min(self.until) {
            // SAFETY: every x86-64 processor has the instruction, and it never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.next.cast()) };
            self.next = self.next.wrapping_add(64);
        }
    }
}
