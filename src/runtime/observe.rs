//! Observers of activations during the forward pass: calibration collects statistics of matrix inputs, and models
//! with the same first layers share the residual stream at the output of these layers.

use super::cpu::Acts;
use crate::calibration::Site;
use std::fmt::Debug;

/// Observer that receives activations while the CPU computes a step. Without one, the cost is one branch per product.
pub trait Observer: Debug + Send {
    /// Receives the residual stream at the input of a layer. With the number of layers as `layer`, receives the wanted
    /// rows of the output of the last layer.
    fn stream(&mut self, layer: usize, x: &[f32]);

    /// Receives the residual stream after block number `block` of a layer (attention, for example, or the MLP).
    fn block(&mut self, _layer: usize, _block: usize, _x: &[f32]) {}

    /// Receives input rows that all matrices of `site` read; for experts, the rows of expert `matrix`.
    fn inputs(&mut self, site: Site, matrix: usize, rows: &mut dyn ExactSizeIterator<Item = &'_ [f32]>);

    /// Returns the first layer that need not be computed; later layers are skipped, too. Its input is still passed to
    /// [`Observer::stream`].
    fn end(&self) -> usize;

    /// Returns true when the observer uses so much memory that weights should be released after each layer.
    fn is_large(&self) -> bool;
}

/// An optional observer.
pub type ObserverRef<'a> = Option<&'a mut (dyn Observer + 'static)>;

/// Passes all input rows of a site to the observer.
pub(super) fn see(observer: ObserverRef<'_>, site: Site, acts: &Acts) {
    if let Some(observer) = observer {
        observer.inputs(site, 0, &mut (0..acts.n()).map(|i| &acts.row(i)[..acts.k()]));
    }
}

/// Passes the inputs of consecutive experts, beginning with expert `first`, to the observer. Rows are sorted by expert:
/// `starts` holds the index of the first row of each of these experts, and at the end the index after the last row;
/// `row` returns the values of the row with a given index.
pub(super) fn see_experts<'a>(
    observer: ObserverRef<'_>,
    site: Site,
    first: usize,
    starts: &[usize],
    row: impl Fn(usize) -> &'a [f32],
) {
    let Some(observer) = observer else { return };
    for (i, rows) in starts.windows(2).enumerate().filter(|(_, rows)| rows[0] < rows[1]) {
        observer.inputs(site, first + i, &mut (rows[0]..rows[1]).map(&row));
    }
}
