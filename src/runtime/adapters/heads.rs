//! Changes of the matrices of heads, by which latent attention on the CPU multiplies in place of `kv_b`
//! ([`crate::runtime::per_head`]).
//!
//! If the part of `kv_b` for the keys of a head becomes `W = K + scale * B A`, a query is multiplied by
//! `W^T = K^T + scale * A^T B^T`: the factors change places. The gains of DoRA multiply the rows of `W`, so they
//! multiply the numbers of the query before the product. A number added to the keys of a head adds the same to all
//! scores of a query, which their softmax does not see, so it is left out.

use super::bind::{AdapterBinder, check_size, factor_type, gain, storage};
use super::{AdapterSet, BoundChange, BoundFactors, Changed, Factor, Group};
use crate::adapter::{Change, LowRank, transposed};
use crate::error::{Error, Result};
use crate::model_config::Latent;
use crate::runtime::cpu::{FactorType, LowRankInput, Panels};
use crate::runtime::layer::LatentAttention;
use crate::runtime::weights::Host;
use std::ops::Range;
use std::sync::Arc;

/// Kind of the matrix of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadMatrix {
    /// Transposed matrix of the part of the keys that is not rotated: `(kv_rank, nope)`.
    Keys,
    /// Matrix of the values: `(value, kv_rank)`.
    Values,
}

/// Changes of the matrices of all heads of a layer.
#[derive(Debug)]
pub(super) struct HeadChanges {
    /// Factors of the queries without their rotated part: `(heads, nope)`.
    query_gain: Option<Vec<f32>>,
    /// Changes of the matrices of keys and of values of each head.
    matrices: [Vec<BoundChange>; 2],
    /// Bytes in memory.
    nbytes: usize,
}

impl HeadChanges {
    /// Binds the change of `kv_b`. Factors in int8 are multiplied as floats, since A and B change places.
    ///
    /// # Errors
    /// The change has other sizes than the matrix, or replaces it.
    pub fn bind(change: &Change, op: &LatentAttention<Host>, base: &AdapterBinder) -> Result<HeadChanges> {
        if change.replaced.is_some() {
            return Err(Error::unsupported("found a whole matrix in place of that of keys and values"));
        }
        let Latent { kv_rank, nope, value, .. } = op.latent;
        let (rows, each) = (op.kv_b.matrix.rows(), nope + value);
        let gains = change.magnitude.as_ref().map(|magnitude| gain(magnitude, change, &op.kv_b.matrix)).transpose()?;
        let factors = change.low_rank.as_ref().map(|factors| SharedFactors::new(factors, rows, kv_rank, base));
        let factors = factors.transpose()?;
        // The model has no bias here, so that of an adapter is added like the bias of its B.
        let (add, add_scales) = (change.bias.as_ref().or(change.added.as_ref()), change.bias.is_none());
        let heads = || (0..rows).step_by(each);
        let empty = |rows| BoundChange { rows, low_rank: None, gain: None, add: None, add_scales, replaced: None };
        let keys = |first: usize| {
            let low_rank = factors.as_ref().map(|factors| factors.of_keys(first..first + nope));
            BoundChange { low_rank, ..empty(kv_rank) }
        };
        let values = |first: usize| {
            let own = first + nope..first + each;
            let numbers = |all: &Vec<f32>| all[own.clone()].to_vec();
            let low_rank = factors.as_ref().map(|factors| factors.of_values(own.clone()));
            let (gain, add) = (gains.as_ref().map(numbers), add.map(numbers));
            BoundChange { low_rank, gain, add, ..empty(value) }
        };
        let matrices: [Vec<BoundChange>; 2] = [heads().map(keys).collect(), heads().map(values).collect()];
        let query_gain: Option<Vec<f32>> =
            gains.as_ref().map(|gains| heads().flat_map(|first| &gains[first..first + nope]).copied().collect());
        let all: usize = matrices.iter().flatten().map(BoundChange::nbytes).sum();
        let counted_again = factors.as_ref().map_or(0, |factors| factors.nbytes() * (heads().count() - 1));
        let nbytes = all - counted_again + query_gain.as_ref().map_or(0, |gain| size_of_val(gain.as_slice()));
        Ok(HeadChanges { query_gain, matrices, nbytes })
    }

    /// Returns the bytes in memory.
    pub fn nbytes(&self) -> usize {
        self.nbytes
    }
}

/// Factors of `kv_b`, whose A is that of all heads.
struct SharedFactors<'a> {
    of: &'a LowRank,
    /// Form of B.
    kind: FactorType,
    /// A: `(rank, kv_rank)`.
    a: Arc<LowRankInput>,
    /// A transposed: `(kv_rank, rank)`.
    a_transposed: Arc<Panels>,
}

impl<'a> SharedFactors<'a> {
    fn new(of: &'a LowRank, rows: usize, cols: usize, base: &AdapterBinder) -> Result<SharedFactors<'a>> {
        check_size(of, rows, cols)?;
        let rank = of.rank;
        let [kind, of_b] = [&of.a, &of.b].map(|values| factor_type(storage(of.dtype, values, base), base));
        let a = Arc::new(LowRankInput::new(&of.a, rank, cols, kind));
        let a_transposed = Arc::new(Panels::new(&transposed(&of.a, rank, cols), cols, rank, kind));
        Ok(SharedFactors { of, kind: of_b, a, a_transposed })
    }

    /// Returns rows of B.
    fn b(&self, rows: Range<usize>) -> &[f32] {
        &self.of.b[rows.start * self.of.rank..rows.end * self.of.rank]
    }

    /// Returns the factors of the transposed matrix of these rows: A^T and B^T.
    fn of_keys(&self, rows: Range<usize>) -> BoundFactors {
        let (rank, count) = (self.of.rank, rows.len());
        let b_transposed = LowRankInput::new(&transposed(self.b(rows), count, rank), rank, count, self.kind);
        BoundFactors {
            a: Factor::Floats(Arc::new(b_transposed)),
            b: Factor::Floats(self.a_transposed.clone()),
            scale: self.of.scale,
        }
    }

    /// Returns the factors of these rows.
    fn of_values(&self, rows: Range<usize>) -> BoundFactors {
        let b = Panels::new(self.b(rows.clone()), rows.len(), self.of.rank, self.kind);
        BoundFactors { a: Factor::Floats(self.a.clone()), b: Factor::Floats(Arc::new(b)), scale: self.of.scale }
    }

    /// Returns the bytes of what the heads share.
    fn nbytes(&self) -> usize {
        self.a.nbytes() + self.a_transposed.nbytes()
    }
}

impl AdapterSet {
    /// Returns the factors of the queries in a layer, `(heads, nope)`, of each adapter that has some.
    pub(in crate::runtime) fn query_gains(&self, layer: usize) -> impl Iterator<Item = &[f32]> {
        let heads = self.adapters().iter().filter_map(move |(adapter, _)| adapter.layers[layer].heads.as_ref());
        heads.filter_map(|heads| heads.query_gain.as_deref())
    }

    /// Returns the changes of the matrix of a head in a layer, for the given rows.
    fn of_head(&self, (layer, matrix, head): (usize, HeadMatrix, usize), rows: &Range<usize>) -> Vec<Changed<'_>> {
        self.pick(rows, |adapter| Some(&adapter.layers[layer].heads.as_ref()?.matrices[matrix as usize][head]))
    }
}

/// Returns the changes of the matrix of a head of a layer, which multiplies `n` rows, by the adapters of all groups.
pub(in crate::runtime) fn of_head(
    groups: &[Group],
    (layer, matrix, head): (usize, HeadMatrix, usize),
    n: usize,
) -> Vec<Changed<'_>> {
    let rows = |group: &Group| head * n + group.rows.start..head * n + group.rows.end;
    groups.iter().flat_map(|group| group.set.of_head((layer, matrix, head), &rows(group))).collect()
}
