//! A matrix of a pack without its binary.

use super::cache::{Cache, Key};
use super::cpu::{Matrix, MatrixStore};
use super::weights::Shape;
use crate::error::{Context, Error, Result};
use crate::iebin::rebuild::Rebuild;
use crate::mapped::Bytes;
use crate::scheme::TILE_ROWS;
use std::ops::Range;
use std::sync::Arc;

/// Where a matrix is rebuilt from, and what it is then.
#[derive(Debug, Clone)]
pub struct Rebuilt {
    name: Arc<str>,
    /// What it is once it is there.
    pub(super) shape: Shape,
    key: Key,
    /// Its bytes in the payload of its tensor.
    range: Range<usize>,
    source: Arc<dyn Rebuild>,
    cache: Arc<Cache>,
}

impl Rebuilt {
    /// Checks that such a matrix can be computed with.
    ///
    /// # Errors
    /// Its elements are no floats, or the payload has another length.
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
            // Types that are no weights are refused without any.
            shape.with_rows(0)?.matrix(Bytes::copied(&[]))?;
        }
        Ok(rebuilt)
    }

    /// Bytes in memory.
    pub fn nbytes(&self) -> usize {
        match self.shape.store {
            MatrixStore::Plain(dtype) => self.shape.rows * self.shape.cols * dtype.size(),
            MatrixStore::Tiled(layout) => layout.nbytes(),
        }
    }

    /// The tensor it belongs to.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The matrix, which is kept for the next time as long as there is room, always if it is `hot`.
    ///
    /// # Errors
    /// What it is rebuilt from was changed, or there is no room for it.
    pub fn matrix(&self, hot: bool) -> Result<Arc<Matrix>> {
        self.cache.get(self.key, self.nbytes(), hot, || {
            self.part(self.shape, self.range.clone()).tensor(&self.name).map_err(Error::while_opening_model)
        })
    }

    /// A small matrix that holds row `row` of this one, and its place there.
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
