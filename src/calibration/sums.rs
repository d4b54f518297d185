//! What is summed at one site while a model reads.

use super::Half;
use super::panel::Panels;

/// Sums over the inputs of one site. A site of experts has one matrix for each; its products are those of all together,
/// as a text of bearable length does not fill the products of every expert.
#[derive(Debug, Clone, PartialEq)]
pub struct Sums {
    /// Input channels.
    pub cols: usize,
    /// Per half and matrix: rows seen.
    pub counts: [Vec<f64>; 2],
    /// Per half, `(matrices, cols)`: sums of squares.
    pub squares: [Vec<f64>; 2],
    /// Per half, `(cols, cols)` of which the upper triangle is used: sums of products.
    pub products: Option<[Vec<f32>; 2]>,
}

impl Sums {
    /// Nothing seen yet.
    pub fn new(matrices: usize, cols: usize, products: bool) -> Sums {
        let zeros = |n| [vec![0.0; n], vec![0.0; n]];
        let products = products.then(|| [vec![0.0; cols * cols], vec![0.0; cols * cols]]);
        Sums { cols, counts: zeros(matrices), squares: zeros(matrices * cols), products }
    }

    /// Bytes of the products of a site; about half of them are ever touched.
    pub fn product_bytes(cols: usize) -> u64 {
        4 * (cols as u64) * (cols as u64)
    }

    /// Adds rows that matrix number `matrix` has met.
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
        work.reset(if self.products.is_some() { n } else { 0 }, cols);
        for (i, row) in rows.enumerate() {
            squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
            if self.products.is_some() {
                work.put(i, row);
            }
        }
        if let Some(products) = &mut self.products {
            work.add_products(1.0, &mut products[half], cols);
        }
    }

    /// Adds what was seen elsewhere at the same site.
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
