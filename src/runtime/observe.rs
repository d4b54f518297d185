//! Observation of activations during the forward pass: calibration collects statistics of what matrices read, and
//! models that share their first layers share the residual stream behind them.

use super::cpu::Acts;
use crate::calibration::{Part, Site};
use std::fmt::Debug;

/// Sees activations while the CPU computes a step. Passing none costs one branch per product.
pub trait Observer: Debug + Send {
    /// Receives the residual stream in front of a layer; behind the last layer, that of the wanted rows.
    fn stream(&mut self, layer: usize, x: &[f32]);

    /// Receives rows that all matrices of `site` read; of experts, those that expert `matrix` reads.
    fn inputs(&mut self, site: Site, matrix: usize, rows: &mut dyn ExactSizeIterator<Item = &'_ [f32]>);

    /// Layers from this one on need not be computed.
    fn end(&self) -> usize;

    /// True when the observer takes so much memory that weights should not stay in memory beside it.
    fn is_large(&self) -> bool;
}

/// An observer, or none.
pub type ObserverRef<'a> = Option<&'a mut (dyn Observer + 'static)>;

/// Shows all rows of the input of a site.
pub(super) fn see(observer: ObserverRef<'_>, layer: usize, part: Part, acts: &Acts) {
    if let Some(observer) = observer {
        observer.inputs(Site { layer, part }, 0, &mut (0..acts.n()).map(|i| &acts.row(i)[..acts.k()]));
    }
}

/// Shows the inputs of the experts from `first` on, sorted by expert: `starts` has the first row of each, and the end.
/// `row` gives the values of a row in that order.
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
