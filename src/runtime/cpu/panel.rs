//! Weights that are unpacked once and multiplied by many columns.

use super::acts::Line;
use super::kernels::Part;
use crate::scheme::TILE_ROWS;
use std::ops::Range;

/// Values of activations that are multiplied while the next weights are asked for; more would drive those out again.
const LATE_ACTS: usize = 64 << 10;

/// A function that shares the work of a [`super::kernels::PartFn`] with itself: called first, it unpacks `items` items
/// while it multiplies them by up to `cols` columns; called again, it multiplies what it finds by others. Whether it
/// wins is a matter of the number of columns only; the bits are the same.
#[derive(Debug, Clone, Copy)]
pub(super) struct PanelKernel {
    /// Items of a full panel.
    pub items: usize,
    /// Most columns of a product.
    pub cols: usize,
    /// Columns from which on unpacking pays.
    pub least_cols: usize,
    /// Bytes of an unpacked weight.
    pub weight_bytes: usize,
    /// Bytes of unpacked weights that stay in the second-level cache beside the activations of some columns and the
    /// packed weights that come next.
    pub cached: usize,
    /// As [`super::kernels::PartFn`]; called again, for a panel that was unpacked from the same items.
    pub run: unsafe fn(&Part<'_>, &mut Panel, Turn, out: &mut [f32]),
}

impl PanelKernel {
    /// How many panels stay in the cache, for columns of `k` values.
    pub fn at_once(&self, k: usize) -> usize {
        (self.cached / (self.items * TILE_ROWS * self.weight_bytes * k.max(1))).max(1)
    }
}

/// Whether a panel is to be unpacked or was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    First,
    Again,
}

/// Unpacked weights, in whatever form the kernel likes; the memory is used again.
#[derive(Debug, Default)]
pub(super) struct Panel {
    pub codes: Vec<Line>,
    pub scales: Vec<Line>,
}

/// The packed weights behind some panels, in shares for the products of these.
pub(super) struct Ahead<'a> {
    bytes: &'a [u8],
    /// Products of a panel with a column, before which nothing is asked for: the activations in between would drive it
    /// out.
    from: usize,
    until: usize,
}

impl<'a> Ahead<'a> {
    /// What lies behind these items, which are so many panels, and is as long.
    pub fn behind(whole: &Part<'a>, panels: usize) -> Ahead<'a> {
        let (data, tile_bytes): (&'a [u8], usize) = (&whole.matrix.data, whole.layout().tile_bytes);
        let end = (whole.item + whole.items) * tile_bytes;
        let len = whole.items * tile_bytes;
        let until = whole.cols * panels;
        let late = (LATE_ACTS / whole.matrix.cols.max(1)).max(1) * panels;
        Ahead { bytes: &data[end..(end + len).min(data.len())], from: until.saturating_sub(late), until }
    }

    /// What goes with these products.
    pub fn share(&self, products: Range<usize>) -> &'a [u8] {
        let at =
            |product: usize| self.bytes.len() * product.saturating_sub(self.from) / (self.until - self.from).max(1);
        &self.bytes[at(products.start)..at(products.end)]
    }
}
