//! State of a mixer that adds products of keys and values to a matrix: the matrix at the last border, and the rows
//! since.
//!
//! A border is a position divisible by [`CHUNK`]. The rows since the last border are folded into the matrix only when
//! the next border is reached, so the state after any number of tokens is the same however they were fed, taking back
//! tokens since the border drops rows, and a step of one token reads the matrix but does not write it.

use crate::runtime::ops::LANES;
use std::sync::Arc;

/// Number of positions from one border to the next.
pub const CHUNK: usize = 64;

/// Sizes of the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoldedSizes {
    /// Key heads.
    pub groups: usize,
    /// Value heads that read one key head.
    pub per_group: usize,
    /// Width of a key head.
    pub key: usize,
    /// Width of a value head in whole vectors.
    pub value: usize,
}

/// State of one layer of a text.
#[derive(Debug, Clone)]
pub struct Folded {
    sizes: FoldedSizes,
    /// Positions that were read.
    end: usize,
    kept: Kept,
    /// Number of positions at the last mark, if there is one.
    mark: Option<usize>,
    /// State in the chunk of the mark, and the number of its positions, once a step has crossed the border behind it.
    earlier: Option<(usize, Kept)>,
}

/// Matrix at a border, and the rows since. Clones share memory until one of them is written.
#[derive(Debug, Clone)]
pub(super) struct Kept {
    /// Sums of products of keys and values at the border: `(groups, per_group, key, value)`.
    matrix: Arc<Vec<f32>>,
    rows: Arc<ChunkRows>,
}

/// Rows since the last border.
#[derive(Debug, Clone)]
struct ChunkRows {
    /// Keys, which become columns: `(groups, key, CHUNK)`.
    keys: Vec<f32>,
    /// Values that are added: `(groups, per_group, CHUNK, value)`.
    values: Vec<f32>,
    /// Sums of the logarithms of the decays since the border: `(groups, per_group, CHUNK)`.
    decays: Vec<f32>,
}

/// State of one group, for a step.
#[derive(Debug)]
pub struct GroupState<'a> {
    /// Positions since the last border.
    pub offset: usize,
    /// Sums at the border: `(per_group, key, value)`.
    pub matrix: GroupMatrix<'a>,
    /// Keys since the border: `(key, CHUNK)`.
    pub keys: &'a mut [f32],
    /// Values since the border: `(per_group, CHUNK, value)`.
    pub values: &'a mut [f32],
    /// Sums of the logarithms of the decays since the border: `(per_group, CHUNK)`.
    pub decays: &'a mut [f32],
}

/// Sums at the border, which are written only by a step that reaches the next one.
#[derive(Debug)]
pub enum GroupMatrix<'a> {
    /// The step does not reach the next border.
    Fixed(&'a [f32]),
    /// The step reaches the next border.
    Folding(&'a mut [f32]),
}

/// Returns the width of a head in whole vectors.
pub fn padded(width: usize) -> usize {
    width.next_multiple_of(LANES)
}

impl GroupMatrix<'_> {
    /// Returns the sums.
    pub fn get(&self) -> &[f32] {
        match self {
            GroupMatrix::Fixed(matrix) => matrix,
            GroupMatrix::Folding(matrix) => matrix,
        }
    }

    /// Returns the sums for modification.
    ///
    /// # Panics
    /// The step does not reach the next border.
    pub fn get_mut(&mut self) -> &mut [f32] {
        match self {
            GroupMatrix::Fixed(_) => unreachable!("only a step that reaches a border folds"),
            GroupMatrix::Folding(matrix) => matrix,
        }
    }
}

impl FoldedSizes {
    fn heads(&self) -> usize {
        self.groups * self.per_group
    }

    /// Returns the number of values of the matrix.
    pub(super) fn matrix_values(&self) -> usize {
        self.heads() * self.key * self.value
    }

    /// Returns the number of values of the rows.
    pub(super) fn row_values(&self) -> usize {
        CHUNK * (self.groups * self.key + self.heads() * (self.value + 1))
    }
}

impl Kept {
    fn new(sizes: &FoldedSizes) -> Kept {
        let FoldedSizes { groups, key, value, .. } = *sizes;
        let heads = sizes.heads();
        let rows = ChunkRows {
            keys: vec![0.0; groups * key * CHUNK],
            values: vec![0.0; heads * CHUNK * value],
            decays: vec![0.0; heads * CHUNK],
        };
        Kept { matrix: Arc::new(vec![0.0; sizes.matrix_values()]), rows: Arc::new(rows) }
    }

    /// Returns all values as bytes for [`Kept::from_values`].
    pub(super) fn values(&self) -> impl Iterator<Item = &[f32]> {
        [&self.matrix[..], &self.rows.keys, &self.rows.values, &self.rows.decays].into_iter()
    }

    /// Returns the state with these values, and the values behind them.
    pub(super) fn from_values<'a>(sizes: &FoldedSizes, values: &'a [f32]) -> (Kept, &'a [f32]) {
        let (mut kept, mut rest) = (Kept::new(sizes), values);
        let rows = Arc::make_mut(&mut kept.rows);
        for part in [Arc::make_mut(&mut kept.matrix), &mut rows.keys, &mut rows.values, &mut rows.decays] {
            let (own, behind) = rest.split_at(part.len());
            part.copy_from_slice(own);
            rest = behind;
        }
        (kept, rest)
    }
}

impl Folded {
    /// Creates the state before the first token.
    pub(super) fn new(sizes: FoldedSizes) -> Folded {
        Folded { sizes, end: 0, kept: Kept::new(&sizes), mark: None, earlier: None }
    }

    pub(super) fn sizes(&self) -> FoldedSizes {
        self.sizes
    }

    pub(super) fn kept(&self) -> &Kept {
        &self.kept
    }

    /// Begins to read the next `tokens` positions, and returns the state of each group, to which they are added.
    pub fn read(&mut self, tokens: usize) -> impl Iterator<Item = GroupState<'_>> {
        let FoldedSizes { per_group, key, value, .. } = self.sizes;
        let offset = self.end % CHUNK;
        let folds = offset + tokens >= CHUNK;
        if folds && self.mark.is_some_and(|mark| mark >= self.end - offset) {
            self.earlier = Some((self.end, self.kept.clone()));
        }
        self.end += tokens;
        let Kept { matrix, rows } = &mut self.kept;
        let ChunkRows { keys, values, decays } = Arc::make_mut(rows);
        let size = per_group * key * value;
        let matrices: Vec<GroupMatrix<'_>> = match folds {
            true => Arc::make_mut(matrix).chunks_exact_mut(size).map(GroupMatrix::Folding).collect(),
            false => matrix.chunks_exact(size).map(GroupMatrix::Fixed).collect(),
        };
        let keys = keys.chunks_exact_mut(key * CHUNK);
        let values = values.chunks_exact_mut(per_group * CHUNK * value);
        let groups = matrices.into_iter().zip(keys).zip(values).zip(decays.chunks_exact_mut(per_group * CHUNK));
        groups.map(move |(((matrix, keys), values), decays)| GroupState { offset, matrix, keys, values, decays })
    }

    /// Reports whether the state after `len` positions is known.
    pub(super) fn reaches(&self, len: usize) -> bool {
        let is_in_chunk = |end: usize| (end - end % CHUNK..=end).contains(&len);
        is_in_chunk(self.end) || self.earlier.as_ref().is_some_and(|(end, _)| is_in_chunk(*end))
    }

    /// Goes back to `len` positions, which the state [reaches](Folded::reaches).
    pub(super) fn truncate(&mut self, len: usize) {
        if len < self.end - self.end % CHUNK {
            let (_, kept) = self.earlier.take().expect("a state that reaches this position");
            self.kept = kept;
        }
        self.end = len;
        self.mark = self.mark.filter(|mark| *mark <= len);
        if self.earlier.as_ref().is_some_and(|(end, _)| len <= *end) {
            self.earlier = None;
        }
    }

    pub(super) fn mark(&mut self) {
        (self.mark, self.earlier) = (Some(self.end), None);
    }

    /// Replaces the state by that after `end` positions.
    pub(super) fn replace(&mut self, end: usize, kept: Kept) {
        *self = Folded { end, kept, mark: None, earlier: None, sizes: self.sizes };
    }
}
