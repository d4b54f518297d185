//! Adapters that are bound to an opened model: factors in the form that products read, and the sets of adapters that
//! sequences use.
//!
//! The product of a row with a changed matrix is that of the base matrix, which all rows of a step share, plus
//! `scale * B (A x)`. Rows with the same adapters are consecutive in a step ([`Group`]). A is multiplied before the
//! base matrix, or with it if A is int8, and B afterwards (`factors.rs`). Sums are in a fixed order, so the
//! bits of a row depend on no other row.

mod bind;
pub(super) mod factors;
mod heads;
mod plain;

pub use bind::AdapterBinder;
pub(super) use heads::{HeadMatrix, of_head};

use super::cpu::{LowRankInput, LowRankPart, Matrix, Panels};
use crate::catalogue::Target;
use crate::error::{Error, Result};
use heads::HeadChanges;
use std::ops::Range;
use std::sync::Arc;

/// Largest number of adapters of a sequence.
pub const MOST: usize = 4;

/// Adapters of a sequence with their factors, in the order in which they are added. The same adapters with the same
/// factors give the same results in any order of the request.
#[derive(Debug, Clone, Default)]
pub struct AdapterSet(Option<Arc<Vec<Scaled>>>);

/// An adapter with its factor.
pub type Scaled = (Arc<BoundAdapter>, f32);

/// An adapter that is bound to a model.
#[derive(Debug)]
pub struct BoundAdapter {
    /// Digest of the files.
    pub hash: String,
    /// Bytes of all factors in memory.
    pub bytes: usize,
    /// Changes of each layer.
    layers: Vec<LayerChanges>,
    embedding: Option<BoundEmbedding>,
    pub(super) lm_head: Option<BoundChange>,
    /// Change of the projection to the further inputs of all layers.
    pub(super) further: Option<BoundChange>,
    /// Whether it has magnitudes of DoRA.
    is_dora: bool,
}

/// Changes of a layer.
#[derive(Debug, Default)]
pub struct LayerChanges {
    targets: [Option<BoundChange>; Target::ALL.len()],
    /// Changes of the first and of the second matrix of each expert; empty if there are none.
    experts: [Vec<Option<BoundChange>>; 2],
    /// Changes of the matrices of heads, where latent attention multiplies these.
    heads: Option<HeadChanges>,
}

/// Change of a matrix in the form that products read.
#[derive(Debug)]
pub(super) struct BoundChange {
    rows: usize,
    low_rank: Option<BoundFactors>,
    /// Factors of the outputs: `(rows)`.
    gain: Option<Vec<f32>>,
    /// Numbers added to the outputs: `(rows)`.
    add: Option<Vec<f32>>,
    /// Whether the factor of the adapter multiplies `add`: it is the bias of B, not one in place of the model's.
    add_scales: bool,
    /// Matrix in place of that of the model.
    replaced: Option<Matrix>,
}

/// Low-rank factors in the forms that products read, with their scale.
#[derive(Debug)]
struct BoundFactors {
    a: Factor<LowRankInput>,
    b: Factor<Panels>,
    scale: f32,
}

/// A factor as floats, which the heads of latent attention share, or as an int8 matrix that is multiplied like those of
/// a model.
#[derive(Debug)]
enum Factor<T> {
    Floats(Arc<T>),
    Int8(Matrix),
}

/// Change of the embedding.
#[derive(Debug)]
struct BoundEmbedding {
    /// The factor with a row per token, `(vocab, rank)`, the one with a row per number of an embedding, and their
    /// scale.
    low_rank: Option<(Matrix, Panels, f32)>,
    /// Factors of the numbers: `(hidden)`.
    gain: Option<Vec<f32>>,
    /// Matrix in place of that of the model.
    replaced: Option<Matrix>,
}

/// Consecutive rows of a step that use the same adapters.
#[derive(Debug, Clone)]
pub struct Group {
    /// Rows of the step.
    pub rows: Range<usize>,
    /// Their adapters; at least one.
    pub set: AdapterSet,
}

/// Rows of a product whose result an adapter changes.
#[derive(Debug, Clone)]
pub(super) struct Changed<'a> {
    /// Rows of the input.
    pub rows: Range<usize>,
    pub change: &'a BoundChange,
    /// Factor of the adapter.
    pub factor: f32,
}

impl AdapterSet {
    /// Creates a set of adapters with factors; those with the factor 0 are left out.
    ///
    /// # Errors
    /// There are more than [`MOST`], a factor is not finite, or an adapter of DoRA is not alone with the factor 1.
    pub fn new(adapters: impl IntoIterator<Item = Scaled>) -> Result<AdapterSet> {
        let mut all: Vec<Scaled> = Vec::new();
        for (adapter, factor) in adapters {
            if !factor.is_finite() {
                return Err(Error::usage(format!("found {factor} as the scale of an adapter, expected a number")));
            }
            match all.iter_mut().find(|(known, _)| known.hash == adapter.hash) {
                Some((_, sum)) => *sum += factor,
                None => all.push((adapter, factor)),
            }
        }
        all.retain(|(_, factor)| *factor != 0.0);
        // Sums of f32 depend on the order.
        all.sort_by(|a, b| a.0.hash.cmp(&b.0.hash));
        if all.len() > MOST {
            return Err(Error::usage(format!("found {} adapters for one text, expected at most {MOST}", all.len())));
        }
        if all.iter().any(|(adapter, factor)| adapter.is_dora && (all.len() > 1 || *factor != 1.0)) {
            return Err(Error::usage(
                "found an adapter of DoRA with others or with a scale, expected it alone with scale 1",
            )
            .help("DoRA normalizes the rows of the changed matrices, which is not defined for sums of adapters"));
        }
        Ok(AdapterSet((!all.is_empty()).then(|| Arc::new(all))))
    }

    /// Returns true if there is no adapter.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the adapters with their factors.
    pub fn adapters(&self) -> &[Scaled] {
        self.0.as_deref().map_or(&[], Vec::as_slice)
    }

    /// Returns true if both sets are the same adapters with the same factors.
    pub fn is(&self, other: &AdapterSet) -> bool {
        let same = |(a, b): (&Scaled, &Scaled)| a.0.hash == b.0.hash && a.1.to_bits() == b.1.to_bits();
        self.adapters().len() == other.adapters().len() && self.adapters().iter().zip(other.adapters()).all(same)
    }

    /// Returns bytes that identify the adapters by their content, for keys of the prefix cache.
    pub fn key(&self) -> Vec<u8> {
        let one = |(adapter, factor): &Scaled| [adapter.hash.as_bytes(), &factor.to_le_bytes()].concat();
        self.adapters().iter().flat_map(one).collect()
    }

    /// Returns the changes of a target in a layer, for the given rows.
    pub(super) fn changes(&self, layer: usize, target: Target, rows: &Range<usize>) -> Vec<Changed<'_>> {
        self.pick(rows, |adapter| adapter.layers[layer].targets[target as usize].as_ref())
    }

    /// Returns the changes of the first or second matrix of an expert, for the given rows.
    pub(super) fn of_expert(
        &self,
        layer: usize,
        matrix: usize,
        expert: usize,
        rows: &Range<usize>,
    ) -> Vec<Changed<'_>> {
        self.pick(rows, |adapter| adapter.layers[layer].experts[matrix].get(expert)?.as_ref())
    }

    pub(super) fn of_lm_head(&self, rows: &Range<usize>) -> Vec<Changed<'_>> {
        self.pick(rows, |adapter| adapter.lm_head.as_ref())
    }

    /// Returns the changes of the projection to the further inputs of all layers, for the given rows.
    pub(super) fn of_further(&self, rows: &Range<usize>) -> Vec<Changed<'_>> {
        self.pick(rows, |adapter| adapter.further.as_ref())
    }

    fn pick<'a>(
        &'a self,
        rows: &Range<usize>,
        of: impl Fn(&'a BoundAdapter) -> Option<&'a BoundChange>,
    ) -> Vec<Changed<'a>> {
        let changed =
            |(adapter, factor): &'a Scaled| Some(Changed { rows: rows.clone(), change: of(adapter)?, factor: *factor });
        self.adapters().iter().filter_map(changed).collect()
    }

    /// Changes the embedding of a token, `(hidden)`, before it is scaled.
    pub(super) fn embed(&self, token: usize, x: &mut [f32]) {
        for (adapter, factor) in self.adapters() {
            if let Some(change) = &adapter.embedding {
                change.embed(token, *factor, x);
            }
        }
    }
}

/// Joins consecutive rows that use the same adapters, of which there is at least one.
pub(super) fn groups<'a>(runs: impl Iterator<Item = (Range<usize>, &'a AdapterSet)>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (rows, set) in runs {
        match groups.last_mut() {
            _ if set.is_empty() => {}
            Some(last) if last.rows.end == rows.start && last.set.is(set) => last.rows.end = rows.end,
            _ => groups.push(Group { rows, set: set.clone() }),
        }
    }
    groups
}

/// Returns the changes of a target in a layer for all groups.
pub(super) fn changes(groups: &[Group], layer: usize, target: Target) -> Vec<Changed<'_>> {
    groups.iter().flat_map(|group| group.set.changes(layer, target, &group.rows)).collect()
}

impl BoundChange {
    /// Returns the matrix in place of that of the model.
    pub fn replaced(&self) -> Option<&Matrix> {
        self.replaced.as_ref()
    }

    /// Returns the change of outputs whose results of A are `h`, `(n, rank)`, without that by a B in int8; `None` if
    /// nothing is left.
    fn part<'a>(&'a self, factor: f32, h: &'a [f32]) -> Option<LowRankPart<'a>> {
        let floats = self.low_rank.as_ref().and_then(|low_rank| match &low_rank.b {
            Factor::Floats(b) => Some((&**b, low_rank.scale * factor)),
            Factor::Int8(_) => None,
        });
        let (b, scale) = floats.map_or((None, 0.0), |(b, scale)| (Some(b), scale));
        let h = if b.is_some() { h } else { &[] };
        let add = self.add.as_deref().map(|add| (add, if self.add_scales { factor } else { 1.0 }));
        let gain = self.gain.as_deref();
        (b.is_some() || gain.is_some() || add.is_some()).then_some(LowRankPart { b, h, scale, gain, add })
    }

    /// Returns B in int8 with its scale.
    fn int8_b(&self) -> Option<(&Matrix, f32)> {
        match &self.low_rank {
            Some(BoundFactors { b: Factor::Int8(b), scale, .. }) => Some((b, *scale)),
            _ => None,
        }
    }

    /// Returns the rank; 0 without factors.
    fn rank(&self) -> usize {
        match self.low_rank.as_ref().map(|low_rank| &low_rank.a) {
            Some(Factor::Floats(a)) => a.rank(),
            Some(Factor::Int8(a)) => a.rows,
            None => 0,
        }
    }

    fn nbytes(&self) -> usize {
        let vectors = [&self.gain, &self.add].into_iter().flatten().map(|values| size_of_val(values.as_slice()));
        let a = |a: &Factor<LowRankInput>| match a {
            Factor::Floats(a) => a.nbytes(),
            Factor::Int8(a) => a.nbytes(),
        };
        let b = |b: &Factor<Panels>| match b {
            Factor::Floats(b) => b.nbytes(),
            Factor::Int8(b) => b.nbytes(),
        };
        let factors = self.low_rank.as_ref().map_or(0, |low_rank| a(&low_rank.a) + b(&low_rank.b));
        factors + vectors.sum::<usize>() + self.replaced.as_ref().map_or(0, Matrix::nbytes)
    }
}

impl BoundEmbedding {
    /// Changes the embedding of a token.
    fn embed(&self, token: usize, factor: f32, x: &mut [f32]) {
        if let Some(replaced) = &self.replaced {
            super::weights::read_row(replaced, token, x).expect("a matrix in memory");
        }
        if let Some((a, b, scale)) = &self.low_rank {
            let mut h = vec![0.0; b.rank()];
            super::weights::read_row(a, token, &mut h).expect("a matrix in memory");
            b.add_to(&h, scale * factor, x);
        }
        if let Some(gain) = &self.gain {
            x.iter_mut().zip(gain).for_each(|(x, gain)| *x *= gain);
        }
    }

    fn nbytes(&self) -> usize {
        let factors = self.low_rank.as_ref().map_or(0, |(a, b, _)| a.nbytes() + b.nbytes());
        let gain = self.gain.as_ref().map_or(0, |gain| size_of_val(gain.as_slice()));
        factors + gain + self.replaced.as_ref().map_or(0, Matrix::nbytes)
    }
}
