//! Shortlist of an output matrix: the rows of the tokens that texts use most, from which drafts are chosen.
//!
//! A draft need not be exact, since the model verifies it, and the output matrix is the largest part of what a drafting
//! layer reads. FR-Spec (arXiv 2502.14856) and EAGLE-3 (arXiv 2503.01840) draft from the 32 000 most frequent tokens of
//! a corpus. Here the texts themselves are counted, so that the list follows their language. Rows are kept in the tiles
//! of 16 in which they are stored. Tokens that were not seen yet are taken by their number, because vocabularies of
//! byte pairs number tokens by their frequency.

use super::cpu::{Acts, Arithmetic, Cpu, Job, Matrix, MatrixStore};
use crate::error::Result;
use crate::mapped::Bytes;
use crate::scheme::{TILE_ROWS, TileLayout};

/// Number of tokens in a list.
const TOKENS: usize = 1 << 15;
/// Number of tokens outside the list after which it is chosen again; it doubles each time, up to the second number.
const MISSED: [usize; 2] = [16, 4096];

/// The rows of the most used tokens.
#[derive(Debug)]
pub struct Shortlist {
    whole: Matrix,
    /// Numbers of the tiles in the list.
    tiles: Vec<u32>,
    /// Their rows.
    rows: Matrix,
    /// For each tile, whether it is in the list, and how often texts used its tokens.
    used: Vec<(bool, u32)>,
    /// Number of tokens outside the list since it was chosen, and that at which it is chosen again.
    missed: usize,
    limit: usize,
    x: Acts,
    y: Vec<f32>,
}

impl Shortlist {
    /// Chooses the first list for an output matrix; `None` if the matrix has so few rows that a list saves little.
    ///
    /// # Errors
    /// There is no memory for the rows.
    pub fn new(whole: &Matrix) -> Result<Option<Shortlist>> {
        let tiles = whole.rows / TILE_ROWS;
        if whole.rows < 2 * TOKENS || tile_bytes(whole).is_none() {
            return Ok(None);
        }
        let mut used = vec![(false, 0); tiles];
        let chosen = choose(&mut used);
        let rows = gather(whole, &chosen)?;
        let (whole, limit) = (whole.clone(), MISSED[0]);
        let (x, y) = (Acts::default(), Vec::new());
        Ok(Some(Shortlist { whole, tiles: chosen, rows, used, missed: 0, limit, x, y }))
    }

    /// Counts tokens of a text.
    ///
    /// # Errors
    /// There is no memory for another list.
    pub fn count(&mut self, tokens: &[u32]) -> Result<()> {
        for token in tokens {
            if let Some((is_listed, count)) = self.used.get_mut(*token as usize / TILE_ROWS) {
                *count = count.saturating_add(1);
                self.missed += usize::from(!*is_listed);
            }
        }
        if self.missed >= self.limit {
            self.tiles = choose(&mut self.used);
            self.rows = gather(&self.whole, &self.tiles)?;
            (self.missed, self.limit) = (0, (2 * self.limit).min(MISSED[1]));
        }
        Ok(())
    }

    /// Returns the bytes that a draft reads.
    pub fn bytes(&self) -> usize {
        self.rows.data.len()
    }

    /// Returns the token of the list with the largest logit for each of some outputs of the final norm.
    pub fn best(&mut self, cpu: &Cpu, arithmetic: Arithmetic, outputs: &[f32]) -> Vec<u32> {
        let Shortlist { rows, x, y, tiles, .. } = self;
        let n = outputs.len() / rows.cols;
        x.set(n, rows.cols, outputs);
        cpu.prepare(x, rows.store.form(arithmetic));
        y.resize(n * rows.rows, 0.0);
        cpu.matmul(&mut [Job::new(rows, None, x, y)], arithmetic);
        let best = |row: &[f32]| {
            let largest = largest(row);
            tiles[largest / TILE_ROWS] * TILE_ROWS as u32 + (largest % TILE_ROWS) as u32
        };
        y.chunks_exact(rows.rows).map(best).collect()
    }
}

/// Returns the index of the largest number, of equal ones the first.
pub(super) fn largest(row: &[f32]) -> usize {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best })
}

/// Chooses the tiles of a list: those that were used most, then the first ones.
fn choose(used: &mut [(bool, u32)]) -> Vec<u32> {
    let mut tiles: Vec<u32> = (0..used.len() as u32).collect();
    tiles.sort_by_key(|tile| std::cmp::Reverse(used[*tile as usize].1));
    tiles.truncate(TOKENS / TILE_ROWS);
    tiles.sort_unstable();
    used.iter_mut().for_each(|(is_listed, _)| *is_listed = false);
    tiles.iter().for_each(|tile| used[*tile as usize].0 = true);
    tiles
}

/// Returns the bytes of a whole tile of a matrix; `None` if its rows are not in memory.
fn tile_bytes(matrix: &Matrix) -> Option<usize> {
    match matrix.store {
        MatrixStore::Plain(dtype) => Some(TILE_ROWS * matrix.cols * dtype.size()),
        MatrixStore::Tiled(layout) => Some(layout.tile_bytes),
    }
    .filter(|bytes| *bytes * (matrix.rows / TILE_ROWS) <= matrix.data.len())
}

/// Copies tiles of a matrix.
fn gather(whole: &Matrix, tiles: &[u32]) -> Result<Matrix> {
    let (count, size) = (tiles.len() * TILE_ROWS, tile_bytes(whole).expect("a matrix in memory"));
    let store = match whole.store {
        MatrixStore::Plain(dtype) => MatrixStore::Plain(dtype),
        MatrixStore::Tiled(layout) => MatrixStore::Tiled(TileLayout::new(layout.spec, count, layout.cols)?),
    };
    let data = Bytes::build(tiles.len() * size, |all| {
        for (copy, tile) in all.chunks_exact_mut(size).zip(tiles) {
            copy.copy_from_slice(&whole.data[*tile as usize * size..][..size]);
        }
        Ok(())
    })?;
    Matrix::new(count, whole.cols, store, data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::rng::Rng;

    #[test]
    fn tokens_that_texts_use_are_listed_and_found() {
        let (rows, cols) = (3 * TOKENS + 5, 32);
        let mut rng = Rng::new(5);
        let values: Vec<f32> = (0..rows * cols).map(|_| rng.next_normal() as f32).collect();
        let data = Bytes::build(4 * values.len(), |all| {
            all.copy_from_slice(bytemuck::cast_slice(&values));
            Ok(())
        });
        let whole = Matrix::new(rows, cols, MatrixStore::Plain(DType::F32), data.unwrap()).unwrap();
        let mut list = Shortlist::new(&whole).unwrap().unwrap();
        let cpu = Cpu::new(2).unwrap();
        // Each row is its own largest product, nearly always.
        let found = |list: &mut Shortlist, token: usize| {
            let long: Vec<f32> = values[token * cols..][..cols].iter().map(|x| 9.0 * x).collect();
            list.best(&cpu, Arithmetic::Float, &[&long[..], &long].concat())
        };
        let late = 2 * TOKENS + 77;
        assert_eq!(found(&mut list, 1000), [1000, 1000]);
        assert_ne!(found(&mut list, late), [late as u32; 2]);
        list.count(&vec![late as u32; MISSED[0]]).unwrap();
        assert_eq!(found(&mut list, late), [late as u32; 2]);
        assert_eq!(found(&mut list, 1000), [1000, 1000]);
        // A token that is the last, alone in its tile, is never listed.
        list.count(&vec![rows as u32 - 1; 9 * MISSED[1]]).unwrap();
        assert_eq!((list.tiles.len(), list.bytes()), (TOKENS / TILE_ROWS, TOKENS * cols * 4));
    }

    #[test]
    fn small_vocabularies_have_no_list() {
        let data = Bytes::build(4 * 64 * 16, |_| Ok(())).unwrap();
        let whole = Matrix::new(64, 16, MatrixStore::Plain(DType::F32), data).unwrap();
        assert!(Shortlist::new(&whole).unwrap().is_none());
    }
}
