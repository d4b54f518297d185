//! Accumulates the calibration sums of one site while a model processes texts.

use super::panel::{Panels, triangle_rows};
use crate::error::Result;
use crate::simd::{Kernel, Level};
use rayon::prelude::*;

/// Number of sums that are added, written or read at once.
const PIECE: usize = 1 << 16;

/// Sums over the inputs of one site in windows of one half. A site of experts has one matrix per expert. Its products
/// are summed over all experts together, because a calibration text of reasonable length does not provide enough rows
/// for the products of each expert.
#[derive(Debug, Clone, PartialEq)]
pub struct Sums {
    /// Number of input channels.
    pub cols: usize,
    /// Number of rows added, per matrix.
    pub counts: Vec<f64>,
    /// Sums of squares: `(matrices, cols)`.
    pub squares: Vec<f64>,
    /// Sums of products: the upper triangle of a `(cols, cols)` matrix, stored row by row.
    pub products: Option<Vec<f32>>,
}

impl Sums {
    /// Creates empty sums.
    pub fn new(matrices: usize, cols: usize, products: bool) -> Sums {
        let products = products.then(|| vec![0.0; cols * (cols + 1) / 2]);
        Sums { cols, counts: vec![0.0; matrices], squares: vec![0.0; matrices * cols], products }
    }

    /// Returns the number of bytes of the products of a site with `cols` input channels, for one half.
    pub fn product_bytes(cols: usize) -> u64 {
        2 * (cols as u64) * (cols as u64 + 1)
    }

    /// Adds input rows of matrix number `matrix`; `work` is scratch memory.
    pub fn add(&mut self, matrix: usize, rows: &mut dyn ExactSizeIterator<Item = &'_ [f32]>, work: &mut Panels) {
        let (cols, n) = (self.cols, rows.len());
        self.counts[matrix] += n as f64;
        let squares = &mut self.squares[matrix * cols..][..cols];
        let (rows, level) = (rows.collect::<Vec<_>>(), Level::detect());
        let (fours, rest) = rows.as_chunks::<4>();
        fours.iter().for_each(|rows| level.run(AddSquares { rows, sums: squares }));
        rest.iter().for_each(|row| level.run(AddSquares { rows: &[row], sums: squares }));
        if let Some(products) = &mut self.products {
            work.reset(n, cols);
            rows.iter().enumerate().for_each(|(i, row)| work.put(i, row));
            work.add_products(1.0, &mut triangle_rows(products, cols));
        }
    }

    /// Adds the sums of other windows or texts at the same site, each number to its counterpart.
    pub fn plus(&mut self, other: &Sums) {
        fn add<T: Copy + Send + Sync + std::ops::AddAssign>(to: &mut [T], from: &[T]) {
            let pieces = to.par_chunks_mut(PIECE).zip(from.par_chunks(PIECE));
            pieces.for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(to, from)| *to += *from));
        }
        add(&mut self.counts, &other.counts);
        add(&mut self.squares, &other.squares);
        if let (Some(to), Some(from)) = (&mut self.products, &other.products) {
            add(to, from);
        }
    }

    /// Returns the sums of the channels from `first` on, of a single matrix.
    pub fn from_channel(&self, first: usize) -> Sums {
        let cols = self.cols - first;
        let skipped = self.cols * (self.cols + 1) / 2 - cols * (cols + 1) / 2;
        let products = self.products.as_ref().map(|products| products[skipped..].to_vec());
        Sums { cols, counts: self.counts.clone(), squares: self.squares[first..].to_vec(), products }
    }

    /// Sets all sums to zero.
    pub fn clear(&mut self) {
        self.counts.fill(0.0);
        self.squares.fill(0.0);
        self.products.iter_mut().for_each(|products| products.par_chunks_mut(PIECE).for_each(|piece| piece.fill(0.0)));
    }

    /// Passes all numbers to `write` as little-endian bytes, piece by piece: counts, squares, products.
    ///
    /// # Errors
    /// The errors of `write`.
    pub fn write(&self, mut write: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        write_doubles(&self.counts, &mut write)?;
        write_doubles(&self.squares, &mut write)?;
        self.products.iter().try_for_each(|products| write_floats(products, &mut write))
    }

    /// Replaces all numbers by those that [`Sums::write`] wrote. `read` fills its argument with the next bytes.
    ///
    /// # Errors
    /// The errors of `read`. The sums then have undefined values.
    pub fn read(&mut self, mut read: impl FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        let mut buffer = vec![0; 8 * PIECE];
        for piece in self.counts.chunks_mut(PIECE).chain(self.squares.chunks_mut(PIECE)) {
            let bytes = &mut buffer[..8 * piece.len()];
            read(bytes)?;
            piece.iter_mut().zip(bytes.as_chunks().0).for_each(|(x, bytes)| *x = f64::from_le_bytes(*bytes));
        }
        for piece in self.products.iter_mut().flat_map(|products| products.chunks_mut(PIECE)) {
            let bytes = &mut buffer[..4 * piece.len()];
            read(bytes)?;
            piece.iter_mut().zip(bytes.as_chunks().0).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
        }
        Ok(())
    }
}

/// Passes numbers to `write` as little-endian bytes, piece by piece.
pub(super) fn write_doubles(numbers: &[f64], mut write: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let mut pieces = numbers.chunks(PIECE);
    pieces.try_for_each(|piece| write(piece.iter().map(|x| x.to_le_bytes()).collect::<Vec<_>>().as_flattened()))
}

/// Passes numbers to `write` as little-endian bytes, piece by piece.
pub(super) fn write_floats(numbers: &[f32], mut write: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let mut pieces = numbers.chunks(PIECE);
    pieces.try_for_each(|piece| write(piece.iter().map(|x| x.to_le_bytes()).collect::<Vec<_>>().as_flattened()))
}

/// Kernel that adds the squares of each channel, row by row. Processing several rows at once reduces reads and writes
/// of the sums.
struct AddSquares<'a, const N: usize> {
    rows: &'a [&'a [f32]; N],
    sums: &'a mut [f64],
}

impl<const N: usize> Kernel for AddSquares<'_, N> {
    #[inline(always)]
    fn run(self) {
        let rows = self.rows.map(|row| &row[..self.sums.len()]);
        for (i, sum) in self.sums.iter_mut().enumerate() {
            // The square of an f32 is exact in f64, so only the order of the rows affects the result.
            rows.iter().for_each(|row| *sum += f64::from(row[i]) * f64::from(row[i]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn squares_are_added_row_after_row_however_many_come_at_once() {
        let (cols, mut rng) = (37, Rng::new(5));
        let x: Vec<f32> = (0..11 * cols).map(|_| rng.next_normal() as f32).collect();
        let mut exact = vec![0f64; cols];
        for row in x.chunks_exact(cols) {
            exact.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
        }
        for at_once in [1, 3, 4, 11] {
            let mut sums = Sums::new(2, cols, false);
            for rows in x.chunks(at_once * cols) {
                sums.add(1, &mut rows.chunks_exact(cols), &mut Panels::default());
            }
            assert_eq!(sums.squares[cols..], exact, "{at_once} rows at once");
            assert_eq!((&sums.counts[..], &sums.squares[..cols]), (&[0.0, 11.0][..], &[0.0; 37][..]));
        }
    }

    #[test]
    fn sums_that_were_written_are_read_back_and_a_short_file_is_an_error() {
        let (cols, mut rng) = (400, Rng::new(6));
        let x: Vec<f32> = (0..3 * cols).map(|_| rng.next_normal() as f32).collect();
        for products in [false, true] {
            let mut sums = Sums::new(3, cols, products);
            sums.add(2, &mut x.chunks_exact(cols), &mut Panels::default());
            let mut bytes = Vec::new();
            sums.write(|piece| {
                bytes.extend_from_slice(piece);
                Ok(())
            })
            .unwrap();
            let squares = 8 * 3 * (1 + cols as u64);
            assert_eq!(bytes.len() as u64, squares + if products { Sums::product_bytes(cols) } else { 0 });
            let read_from = |mut bytes: &[u8]| {
                let mut back = Sums::new(3, cols, products);
                let found = back.read(|piece| Ok(std::io::Read::read_exact(&mut bytes, piece)?));
                found.map(|()| back)
            };
            assert_eq!(read_from(&bytes).unwrap(), sums);
            assert!(read_from(&bytes[..bytes.len() - 1]).is_err());
            let mut twice = sums.clone();
            twice.plus(&sums);
            assert!(twice.squares.iter().zip(&sums.squares).all(|(two, one)| *two == 2.0 * one));
            assert!(twice.products.iter().flatten().zip(sums.products.iter().flatten()).all(|(a, b)| *a == 2.0 * b));
            twice.clear();
            assert_eq!(twice, Sums::new(3, cols, products));
        }
    }
}
