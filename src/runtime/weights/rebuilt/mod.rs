//! Matrices of a pack without `model.ie.bin`, such as a deduplicated pack. Their bytes are rebuilt on demand from a
//! source, such as the store of the deduplicated pack.

pub mod cache;

use super::Shape;
use crate::error::{Context, Error, Result};
use crate::iebin::rebuild::Rebuild;
use crate::mapped::Bytes;
use crate::runtime::cpu::{Matrix, MatrixStore};
use crate::scheme::TILE_ROWS;
use cache::{Cache, Key};
use std::ops::Range;
use std::sync::Arc;

/// A matrix that is rebuilt on demand, with its source and its shape.
#[derive(Debug, Clone)]
pub struct Rebuilt {
    name: Arc<str>,
    /// Shape and storage of the rebuilt matrix.
    pub(super) shape: Shape,
    key: Key,
    /// Range of the matrix's bytes in the payload of the tensor.
    range: Range<usize>,
    source: Arc<dyn Rebuild>,
    cache: Arc<Cache>,
}

impl Rebuilt {
    /// Creates the matrix and checks that products with its element type are supported.
    ///
    /// # Errors
    /// The elements of a plain matrix are not floats.
    pub(super) fn new(
        name: &Arc<str>,
        shape: Shape,
        key: Key,
        range: Range<usize>,
        source: Arc<dyn Rebuild>,
        cache: Arc<Cache>,
    ) -> Result<Rebuilt> {
        let rebuilt = Rebuilt { name: name.clone(), shape, key, range, source, cache };
        if let MatrixStore::Plain(_) = rebuilt.shape.store {
            // Building a matrix of 0 rows rejects element types that cannot be weights.
            shape.with_rows(0)?.matrix(Bytes::copied(&[]))?;
        }
        Ok(rebuilt)
    }

    /// Returns the size of the rebuilt matrix in bytes.
    pub fn nbytes(&self) -> usize {
        match self.shape.store {
            MatrixStore::Plain(dtype) => self.shape.rows * self.shape.cols * dtype.size(),
            MatrixStore::Tiled(layout) => layout.nbytes(),
        }
    }

    /// Returns the name of the tensor that holds the matrix.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the matrix and keeps it in the cache: permanently if it is `hot`, otherwise while the limit permits.
    ///
    /// # Errors
    /// The source of the rebuilt bytes is damaged or was changed, or the cache has no room for the matrix.
    pub fn matrix(&self, hot: bool) -> Result<Arc<Matrix>> {
        self.cache.get(self.key, self.nbytes(), hot, || {
            self.part(self.shape, self.range.clone()).tensor(&self.name).map_err(Error::while_opening_model)
        })
    }

    /// Rebuilds only row `row`, or the tile that contains it. Returns these rows as a matrix, and the index of `row` in
    /// that matrix.
    pub(super) fn around(&self, row: usize) -> Result<(Matrix, usize)> {
        let (step, first) = match self.shape.store {
            MatrixStore::Plain(_) => (1, row),
            MatrixStore::Tiled(_) => (TILE_ROWS, row / TILE_ROWS * TILE_ROWS),
        };
        let rows = step.min(self.shape.rows - first);
        let steps = self.shape.rows.div_ceil(step);
        let bytes = self.range.len() / steps.max(1);
        let start = self.range.start + first / step * bytes;
        let shape = self.shape.with_rows(rows)?;
        let part = self.part(shape, start..start + bytes).tensor(&self.name).map_err(Error::while_opening_model)?;
        Ok((part, row - first))
    }

    fn part(&self, shape: Shape, range: Range<usize>) -> Result<Matrix> {
        let bytes = Bytes::build(range.len(), |out| self.source.read(self.key.0, range, out))?;
        shape.matrix(bytes)
    }
}
