//! Accumulates the calibration sums of one site while a model processes texts.

use super::Half;
use super::panel::{Panels, triangle_rows};
use crate::simd::{Kernel, Level};

/// Sums over the inputs of one site. A site of experts has one matrix per expert. Its products are summed over all
/// experts together, because a calibration text of reasonable length does not provide enough rows for the products of
/// each expert.
#[derive(Debug, Clone, PartialEq)]
pub struct Sums {
    /// Number of input channels.
    pub cols: usize,
    /// Number of rows added, per half and matrix.
    pub counts: [Vec<f64>; 2],
    /// Sums of squares per half: `(matrices, cols)`.
    pub squares: [Vec<f64>; 2],
    /// Sums of products per half: the upper triangle of a `(cols, cols)` matrix, stored row by row.
    pub products: Option<[Vec<f32>; 2]>,
}

impl Sums {
    /// Creates empty sums.
    pub fn new(matrices: usize, cols: usize, products: bool) -> Sums {
        let zeros = |n| [vec![0.0; n], vec![0.0; n]];
        let products = products.then(|| [(); 2].map(|()| vec![0.0; cols * (cols + 1) / 2]));
        Sums { cols, counts: zeros(matrices), squares: zeros(matrices * cols), products }
    }

    /// Returns the number of bytes of the products of a site with `cols` input channels, both halves together.
    pub fn product_bytes(cols: usize) -> u64 {
        4 * (cols as u64) * (cols as u64 + 1)
    }

    /// Adds input rows of matrix number `matrix`, which belong to the windows of `half`; `work` is scratch memory.
    pub fn add(
        &mut self,
        half: Half,
        matrix: usize,
        rows: &mut dyn ExactSizeIterator<Item = &'_ [f32]>,
        work: &mut Panels,
    ) {
        let (cols, half, n) = (self.cols, half as usize, rows.len());
        self.counts[half][matrix] += n as f64;
        let squares = &mut self.squares[half][matrix * cols..][..cols];
        let (rows, level) = (rows.collect::<Vec<_>>(), Level::detect());
        let (fours, rest) = rows.as_chunks::<4>();
        fours.iter().for_each(|rows| level.run(AddSquares { rows, sums: squares }));
        rest.iter().for_each(|row| level.run(AddSquares { rows: &[row], sums: squares }));
        if let Some(products) = &mut self.products {
            work.reset(n, cols);
            rows.iter().enumerate().for_each(|(i, row)| work.put(i, row));
            work.add_products(1.0, &mut triangle_rows(&mut products[half], cols));
        }
    }

    /// Adds the sums of another calibration run at the same site.
    pub fn plus(&mut self, other: &Sums) {
        fn add<T: Copy + std::ops::AddAssign>(to: &mut [Vec<T>; 2], from: &[Vec<T>; 2]) {
            for (to, from) in to.iter_mut().flatten().zip(from.iter().flatten()) {
                *to += *from;
            }
        }
        add(&mut self.counts, &other.counts);
        add(&mut self.squares, &other.squares);
        if let (Some(to), Some(from)) = (&mut self.products, &other.products) {
            add(to, from);
        }
    }
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
                sums.add(Half::Second, 1, &mut rows.chunks_exact(cols), &mut Panels::default());
            }
            assert_eq!(sums.squares[1][cols..], exact, "{at_once} rows at once");
            assert_eq!((&sums.counts[1][..], &sums.squares[0][..]), (&[0.0, 11.0][..], &[0.0; 74][..]));
        }
    }
}
