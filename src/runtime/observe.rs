//! Lets someone see what the matrices of a model read while it computes: calibration asks for it, and nobody else does.

use super::cpu::Acts;
use crate::calibration::panel::Panels;
use crate::calibration::{Half, Part, Site, Sums};
use std::collections::BTreeMap;
use std::ops::Range;

/// Sums the inputs that it is shown.
#[derive(Debug)]
pub struct Gatherer {
    /// What was seen, by site; other sites are passed over.
    pub(super) sums: BTreeMap<Site, Sums>,
    /// Layers behind these are not computed.
    pub(super) layers: Range<usize>,
    /// Which half the present window belongs to.
    pub(super) half: Half,
    pub(super) panels: Panels,
}

impl Gatherer {
    /// `rows` are inputs of all matrices of `site`; of experts, those of number `matrix` alone.
    fn see(&mut self, site: Site, matrix: usize, rows: &mut dyn ExactSizeIterator<Item = &'_ [f32]>) {
        if let Some(sums) = self.sums.get_mut(&site) {
            sums.add(self.half, matrix, rows, &mut self.panels);
        }
    }
}

/// One who gathers or none, which costs a branch.
#[derive(Debug, Default)]
pub(super) struct Watch(pub(super) Option<Gatherer>);

impl Watch {
    /// True when nobody cares about this layer and those behind it.
    pub fn is_over(&self, layer: usize) -> bool {
        self.0.as_ref().is_some_and(|gatherer| layer >= gatherer.layers.end)
    }

    /// True when what is gathered needs so much memory that weights should not stay in it.
    pub fn is_large(&self) -> bool {
        self.0.as_ref().is_some_and(|gatherer| gatherer.sums.values().any(|sums| sums.products.is_some()))
    }

    /// Shows all rows.
    pub fn see(&mut self, layer: usize, part: Part, acts: &Acts) {
        if let Some(gatherer) = &mut self.0 {
            gatherer.see(Site { layer, part }, 0, &mut (0..acts.n()).map(|i| &acts.row(i)[..acts.k()]));
        }
    }

    /// Shows the rows of each expert: `tokens[starts[e]..starts[e + 1]]` are those of number e.
    pub fn see_experts(&mut self, layer: usize, acts: &Acts, tokens: &[u32], starts: &[usize]) {
        let Some(gatherer) = &mut self.0 else { return };
        for (expert, rows) in starts.windows(2).enumerate().filter(|(_, rows)| rows[0] < rows[1]) {
            let mut rows = tokens[rows[0]..rows[1]].iter().map(|token| &acts.row(*token as usize)[..acts.k()]);
            gatherer.see(Site { layer, part: Part::Experts }, expert, &mut rows);
        }
    }

    /// Shows what the experts from `first` on have in the middle, sorted by expert.
    pub fn see_middle(&mut self, layer: usize, first: usize, acts: &Acts, starts: &[usize]) {
        let Some(gatherer) = &mut self.0 else { return };
        for (i, rows) in starts.windows(2).enumerate().filter(|(_, rows)| rows[0] < rows[1]) {
            let mut rows = (rows[0] - starts[0]..rows[1] - starts[0]).map(|row| &acts.row(row)[..acts.k()]);
            gatherer.see(Site { layer, part: Part::ExpertsMiddle }, first + i, &mut rows);
        }
    }
}
