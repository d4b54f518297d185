//! Weights that are unpacked once and multiplied by many columns.

#[cfg(target_arch = "x86_64")]
use super::acts::GROUP_BLOCKS;
use super::acts::Line;
use super::kernels::Part;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

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
    /// Unpacks the items of the part. Safety: as [`super::kernels::PartFn`].
    pub unpack: unsafe fn(&Part<'_>, &mut Panel),
    /// As [`super::kernels::PartFn`], for a panel that was unpacked from the same items.
    pub run: unsafe fn(&Part<'_>, &Panel, out: &mut [f32]),
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
    #[inline]
    pub fn of(part: &Part<'_>) -> NextTiles {
        let (layout, n, col) = (part.layout(), part.tokens, part.col - part.first);
        let bytes = part.items * layout.tile_bytes;
        let first = (part.item + part.items) * layout.tile_bytes;
        let (next, len) = (first + bytes * col / n, bytes * part.cols / n);
        let next = part.matrix.data.as_ptr().wrapping_add(next);
        let step = len.div_ceil(layout.blocks.div_ceil(GROUP_BLOCKS).max(1)).next_multiple_of(64);
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
