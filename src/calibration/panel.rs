//! Product of a matrix with its own transpose, and Cholesky factorization of a symmetric matrix.
//!
//! Rows are stored in *panels* of [`WIDTH`] columns, `[panel][row][column]`, so that the columns of a product are
//! read sequentially. The order of all sums is fixed: rows are added one after the other, for any number of threads.

use crate::simd::{Kernel, Level, black_box};
use rayon::prelude::*;

/// Number of columns of a panel.
pub const WIDTH: usize = 32;
/// Number of result rows that are summed at once. Each needs two vectors of [`LANES`] sums, which together fill the
/// registers.
const TOGETHER: usize = 4;
const LANES: usize = 16;

/// Rows stored in panels; the last panel is padded with zeros.
#[derive(Debug, Default)]
pub struct Panels {
    rows: usize,
    cols: usize,
    data: Vec<f32>,
}

/// Splits a packed upper triangle of `n` columns into its rows, each starting at the diagonal.
pub fn triangle_rows(mut triangle: &mut [f32], n: usize) -> Vec<&mut [f32]> {
    let mut next = |len| triangle.split_off_mut(..len).expect("a triangle has a row of each length");
    (1..=n).rev().map(&mut next).collect()
}

impl Panels {
    /// Resizes the storage for `rows` rows of `cols` values and sets them to zero.
    pub fn reset(&mut self, rows: usize, cols: usize) {
        (self.rows, self.cols) = (rows, cols);
        self.data.clear();
        self.data.resize(rows * cols.next_multiple_of(WIDTH), 0.0);
    }

    /// Writes a row.
    pub fn put(&mut self, row: usize, values: &[f32]) {
        for (panel, values) in self.data.chunks_exact_mut(self.rows * WIDTH).zip(values.chunks(WIDTH)) {
            panel[row * WIDTH..][..values.len()].copy_from_slice(values);
        }
    }

    fn panel(&self, i: usize) -> &[f32] {
        &self.data[i * self.rows * WIDTH..][..self.rows * WIDTH]
    }

    /// Adds `sign * X^T X` of the stored rows to the upper triangle of a `(cols, cols)` matrix; `sums[i]` is row i of
    /// the triangle, starting at the diagonal.
    ///
    /// # Panics
    /// `sums` does not have the rows of a triangle of this size.
    pub fn add_products(&self, sign: f32, sums: &mut [&mut [f32]]) {
        if self.rows == 0 {
            return;
        }
        let level = Level::detect();
        assert!(sums.len() == self.cols && sums.iter().rev().zip(1..).all(|(row, len)| row.len() == len));
        sums.par_chunks_mut(WIDTH).enumerate().for_each(|(i, strip)| {
            for j in i..self.cols.div_ceil(WIDTH) {
                let mut block = [[0f32; WIDTH]; WIDTH];
                level.run(Block { a: self.panel(i), b: self.panel(j), out: &mut block });
                for (k, (row, products)) in strip.iter_mut().zip(&block).enumerate() {
                    // In a diagonal block only the part from the diagonal on is added.
                    let (first, products) =
                        if i == j { (0, &products[k..]) } else { ((j - i) * WIDTH - k, &products[..]) };
                    let row = &mut row[first..];
                    let n = row.len().min(products.len());
                    let (row, products) = (&mut row[..n], &products[..n]);
                    for i in 0..n {
                        row[i] += sign * products[i];
                    }
                }
            }
        });
    }
}

/// Kernel that computes the products of two panels.
struct Block<'a> {
    a: &'a [f32],
    b: &'a [f32],
    out: &'a mut [[f32; WIDTH]; WIDTH],
}

impl Kernel for Block<'_> {
    #[inline(always)]
    fn run(self) {
        let (a, b) = (self.a.as_chunks::<WIDTH>().0, self.b.as_chunks::<LANES>().0.as_chunks::<2>().0);
        for (i, out) in self.out.as_chunks_mut::<TOGETHER>().0.iter_mut().enumerate() {
            let (mut low, mut high) = ([[0f32; LANES]; TOGETHER], [[0f32; LANES]; TOGETHER]);
            for t in 0..a.len().min(b.len()) {
                let (a, [b_low, b_high]) = (&a[t], &b[t]);
                for r in 0..TOGETHER {
                    let x = a[i * TOGETHER + r];
                    for lane in 0..LANES {
                        low[r][lane] = x.mul_add(b_low[lane], low[r][lane]);
                    }
                }
                for r in 0..TOGETHER {
                    let x = a[i * TOGETHER + r];
                    for lane in 0..LANES {
                        high[r][lane] = x.mul_add(b_high[lane], high[r][lane]);
                    }
                }
            }
            // Passing the sums through memory keeps the compiler from vectorizing the loops above for these copies.
            let (low, high) = black_box((low, high));
            for r in 0..TOGETHER {
                out[r][..LANES].copy_from_slice(&low[r]);
                out[r][LANES..].copy_from_slice(&high[r]);
            }
        }
    }
}

/// Number of rows that are eliminated together.
const ELIMINATED: usize = 64;

/// Replaces the upper triangle of the symmetric `(n, n)` matrix M by its Cholesky factor V, the upper triangular
/// matrix with `V^T V = M`. Returns false if M is not positive definite; `matrix` then has undefined contents.
pub fn factor(matrix: &mut [f32], n: usize) -> bool {
    let level = Level::detect();
    let mut panels = Panels::default();
    for start in (0..n).step_by(ELIMINATED) {
        let end = n.min(start + ELIMINATED);
        let (rows, rest) = matrix[start * n..].split_at_mut((end - start) * n);
        for i in 0..end - start {
            let (above, row) = rows.split_at_mut(i * n);
            let row = &mut row[start + i..n];
            for above in above.chunks_exact(n) {
                let above = &above[start + i..];
                level.run(Subtract { factor: above[0], above, row });
            }
            let pivot = row[0];
            if !(pivot > 0.0 && pivot.is_finite()) {
                return false;
            }
            let scale = 1.0 / pivot.sqrt();
            row.iter_mut().for_each(|x| *x *= scale);
        }
        if end < n {
            panels.reset(end - start, n - end);
            rows.chunks_exact(n).enumerate().for_each(|(i, row)| panels.put(i, &row[end..]));
            let behind = rest.chunks_exact_mut(n).enumerate().map(|(i, row)| &mut row[end + i..]);
            panels.add_products(-1.0, &mut behind.collect::<Vec<_>>());
        }
    }
    true
}

/// Replaces each row x of a `(rows, n)` matrix by the y with `y M = x`, where V is the factor of the symmetric `(n, n)`
/// matrix M ([`factor`]).
pub fn solve(factor: &[f32], n: usize, rows: &mut [f32]) {
    let level = Level::detect();
    rows.par_chunks_mut(LANES * n).for_each(|rows| {
        let mut columns = vec![[0f32; LANES]; n];
        for (lane, row) in rows.chunks_exact(n).enumerate() {
            columns.iter_mut().zip(row).for_each(|(column, x)| column[lane] = *x);
        }
        level.run(Solve { factor, columns: &mut columns });
        for (lane, row) in rows.chunks_exact_mut(n).enumerate() {
            row.iter_mut().zip(&columns).for_each(|(x, column)| *x = column[lane]);
        }
    });
}

/// Kernel that solves `y V^T V = x` for as many rows as there are lanes, in place: first `z V = x`, then `y V^T = z`.
struct Solve<'a> {
    /// V, of which the upper triangle is read.
    factor: &'a [f32],
    /// The rows, `[column][row]`.
    columns: &'a mut [[f32; LANES]],
}

impl Kernel for Solve<'_> {
    #[inline(always)]
    fn run(self) {
        let n = self.columns.len();
        for k in 0..n {
            let row = &self.factor[k * n + k..(k + 1) * n];
            let (head, tail) = self.columns[k..].split_at_mut(1);
            let mut z = head[0];
            for lane in 0..LANES {
                z[lane] /= row[0];
            }
            head[0] = z;
            for j in 0..tail.len().min(row.len() - 1) {
                let (weight, column) = (row[j + 1], &mut tail[j]);
                for lane in 0..LANES {
                    column[lane] = (-weight).mul_add(z[lane], column[lane]);
                }
            }
        }
        for k in (0..n).rev() {
            let row = &self.factor[k * n + k..(k + 1) * n];
            let (head, tail) = self.columns[k..].split_at_mut(1);
            let mut y = head[0];
            for j in 0..tail.len().min(row.len() - 1) {
                let (weight, column) = (row[j + 1], tail[j]);
                for lane in 0..LANES {
                    y[lane] = (-weight).mul_add(column[lane], y[lane]);
                }
            }
            for lane in 0..LANES {
                y[lane] /= row[0];
            }
            head[0] = y;
        }
    }
}

/// Kernel that computes `row -= factor * above`.
struct Subtract<'a> {
    factor: f32,
    above: &'a [f32],
    row: &'a mut [f32],
}

impl Kernel for Subtract<'_> {
    #[inline(always)]
    fn run(self) {
        for (x, above) in self.row.iter_mut().zip(self.above) {
            *x = (-self.factor).mul_add(*above, *x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    fn rows(n: usize, cols: usize, seed: u64) -> Vec<f32> {
        let mut rng = Rng::new(seed);
        (0..n * cols).map(|_| rng.next_normal() as f32).collect()
    }

    #[test]
    fn products_of_odd_shapes_are_those_of_the_definition() {
        for (n, cols) in [(1, 1), (3, 31), (7, 32), (5, 33), (40, 100)] {
            let x = rows(n, cols, 1);
            let mut panels = Panels::default();
            panels.reset(n, cols);
            x.chunks_exact(cols).enumerate().for_each(|(i, row)| panels.put(i, row));
            let mut sums = vec![1f32; cols * (cols + 1) / 2];
            let mut rows = triangle_rows(&mut sums, cols);
            panels.add_products(-2.0, &mut rows);
            for (i, row) in rows.iter().enumerate() {
                for (sum, j) in row.iter().zip(i..cols) {
                    let exact: f64 = (0..n).map(|t| f64::from(x[t * cols + i]) * f64::from(x[t * cols + j])).sum();
                    assert!((f64::from(*sum) - (1.0 - 2.0 * exact)).abs() < 1e-4, "{n} {cols} {i} {j}");
                }
            }
        }
    }

    #[test]
    fn a_solution_multiplied_by_the_matrix_gives_the_rows_back() {
        for (n, m) in [(1, 1), (5, 3), (40, 16), (70, 33)] {
            let x = rows(3 * n + 2, n, 3);
            let product = |i: usize, j: usize| -> f64 {
                x.chunks_exact(n).map(|row| f64::from(row[i]) * f64::from(row[j])).sum()
            };
            let matrix: Vec<f32> = (0..n * n).map(|i| product(i / n, i % n) as f32).collect();
            let mut v = matrix.clone();
            assert!(factor(&mut v, n));
            let wanted = rows(m, n, 4);
            let mut solution = wanted.clone();
            solve(&v, n, &mut solution);
            for (solution, wanted) in solution.chunks_exact(n).zip(wanted.chunks_exact(n)) {
                for (j, wanted) in wanted.iter().enumerate() {
                    let back: f64 = (0..n).map(|k| f64::from(solution[k]) * f64::from(matrix[k * n + j])).sum();
                    assert!((back - f64::from(*wanted)).abs() < 1e-3, "{n} {m}: {back} {wanted}");
                }
            }
        }
    }

    #[test]
    fn a_factor_gives_its_matrix_back_and_needs_a_positive_definite_one() {
        for n in [1, 5, 64, 65, 150] {
            let x = rows(2 * n + 3, n, 2);
            let mut panels = Panels::default();
            panels.reset(2 * n + 3, n);
            x.chunks_exact(n).enumerate().for_each(|(i, row)| panels.put(i, row));
            let mut matrix = vec![0f32; n * n];
            let rows = matrix.chunks_exact_mut(n).enumerate().map(|(i, row)| &mut row[i..]);
            panels.add_products(1.0, &mut rows.collect::<Vec<_>>());
            let mut v = matrix.clone();
            assert!(factor(&mut v, n));
            for i in 0..n {
                for j in i..n {
                    let back: f64 = (0..=i).map(|k| f64::from(v[k * n + i]) * f64::from(v[k * n + j])).sum();
                    assert!((back - f64::from(matrix[i * n + j])).abs() < 2e-3, "{n}: {i} {j}");
                }
            }
        }
        assert!(!factor(&mut [1.0, 2.0, 0.0, 1.0], 2));
        assert!(!factor(&mut [f32::NAN], 1));
    }
}
