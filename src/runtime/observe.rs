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

/// Shows the inputs of each expert: those of expert `e` are the rows `tokens[starts[e]..starts[e + 1]]`.
pub(super) fn see_experts(observer: ObserverRef<'_>, layer: usize, acts: &Acts, tokens: &[u32], starts: &[usize]) {
    let Some(observer) = observer else { return };
    for (expert, rows) in starts.windows(2).enumerate().filter(|(_, rows)| rows[0] < rows[1]) {
        let mut rows = tokens[rows[0]..rows[1]].iter().map(|token| &acts.row(*token as usize)[..acts.k()]);
        observer.inputs(Site { layer, part: Part::Experts }, expert, &mut rows);
    }
}

/// Shows the inputs of the second matrices of the experts from `first` on, sorted by expert.
pub(super) fn see_middle(observer: ObserverRef<'_>, layer: usize, first: usize, acts: &Acts, starts: &[usize]) {
    let Some(observer) = observer else { return };
    for (i, rows) in starts.windows(2).enumerate().filter(|(_, rows)| rows[0] < rows[1]) {
        let mut rows = (rows[0] - starts[0]..rows[1] - starts[0]).map(|row| &acts.row(row)[..acts.k()]);
        observer.inputs(Site { layer, part: Part::ExpertsMiddle }, first + i, &mut rows);
    }
}
