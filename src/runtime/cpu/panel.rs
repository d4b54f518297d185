//! Panels: the weights of a few tiles, which are unpacked once and multiplied by many columns (tokens).

use super::acts::Line;
use super::kernels::Rectangle;
use crate::scheme::TILE_ROWS;
use std::ops::Range;

/// Number of f32 activations that are multiplied while the next weights are prefetched; more would evict those weights
/// from the cache.
const LATE_ACTS: usize = 64 << 10;

/// Function that does the work of a [`super::kernels::PartFn`] in several calls. The first call unpacks `items` items
/// while it multiplies them by up to `cols` columns; later calls multiply the unpacked items by other columns.
/// Whether this is faster depends only on the number of columns; the bits are the same.
#[derive(Debug, Clone, Copy)]
pub(super) struct PanelKernel {
    /// Items of a full panel.
    pub items: usize,
    /// Largest number of columns of a product.
    pub cols: usize,
    /// Fewest columns for which unpacking once is faster.
    pub least_cols: usize,
    /// Bytes of an unpacked weight.
    pub weight_bytes: usize,
    /// Bytes of unpacked weights that stay in the second-level cache together with the activations of some columns
    /// and the packed weights that come next.
    pub cached: usize,
    /// Function with the conditions of [`super::kernels::PartFn`]. A panel with [`Turn::Again`] must have been
    /// unpacked from the same items.
    pub run: unsafe fn(&Rectangle<'_>, &mut Panel, Turn, out: &mut [f32]),
}

impl PanelKernel {
    /// Returns how many panels stay in the cache, for columns of `k` values.
    pub fn at_once(&self, k: usize) -> usize {
        (self.cached / (self.items * TILE_ROWS * self.weight_bytes * k.max(1))).max(1)
    }
}

/// State of a panel: it must be unpacked (`First`), or was unpacked by an earlier call (`Again`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    First,
    Again,
}

/// Unpacked weights, in the format of the kernel; the memory is reused.
#[derive(Debug, Default)]
pub(super) struct Panel {
    pub codes: Vec<Line>,
    pub scales: Vec<Line>,
    /// Sums of a kernel that passes them through memory.
    #[cfg(target_arch = "x86_64")]
    pub sums: Vec<Line>,
}

/// Packed weights that follow some panels in memory, divided into shares that are prefetched during the products of
/// these panels.
pub(super) struct Ahead<'a> {
    bytes: &'a [u8],
    /// Number of products of a panel with a column before which nothing is prefetched, because the activations in
    /// between would evict it.
    from: usize,
    /// Number of products of a panel with a column after which everything has been prefetched.
    until: usize,
}

impl<'a> Ahead<'a> {
    /// Selects the weights that follow the items of `whole` in memory, over the same length. The items form `panels`
    /// panels.
    pub fn behind(whole: &Rectangle<'a>, panels: usize) -> Ahead<'a> {
        let (data, tile_bytes): (&'a [u8], usize) = (&whole.matrix.data, whole.layout().tile_bytes);
        let end = (whole.item + whole.items) * tile_bytes;
        let len = whole.items * tile_bytes;
        let until = whole.cols * panels;
        let late = (LATE_ACTS / whole.matrix.cols.max(1)).max(1) * panels;
        Ahead { bytes: &data[end..(end + len).min(data.len())], from: until.saturating_sub(late), until }
    }

    /// Returns the weights to prefetch during these products; `products` counts products of a panel with a column.
    pub fn share(&self, products: Range<usize>) -> &'a [u8] {
        let at =
            |product: usize| self.bytes.len() * product.saturating_sub(self.from) / (self.until - self.from).max(1);
        &self.bytes[at(products.start)..at(products.end)]
    }
}
