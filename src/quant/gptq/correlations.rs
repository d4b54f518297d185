//! Products of input channels, prepared in the two forms that [`super`] uses.

use super::tile::Products;
use crate::calibration::panel::factor;
use crate::error::{Error, Result};
use crate::quant::lanes::Lanes;
use crate::quant::plain::LANES;
use crate::scheme::{BLOCK, STEPS};
use crate::simd::Level;
use std::sync::OnceLock;

/// Damping added to the diagonal, as a share of its mean, because the calibration text does not cause all possible
/// inputs.
const DAMPING: f32 = 0.01;
/// Factor by which the damping grows when the products are not positive definite; damping above 1 is an error,
/// because the products would no longer matter.
const MORE: f32 = 10.0;

/// H in column order, padded to whole blocks.
#[derive(Debug)]
pub(in crate::quant) struct Hessian {
    /// Panels `[row][32]` of all rows, one for each block of 32 columns.
    panels: Vec<f32>,
    n: usize,
}

impl Hessian {
    /// Creates H from `(cols, cols)` products, of which the upper triangle is filled, and adds `damping` to the
    /// diagonal.
    pub fn new(products: &[f32], cols: usize, damping: f32) -> Hessian {
        let n = cols.next_multiple_of(BLOCK);
        let mut panels = Vec::with_capacity(n * n);
        for block in (0..n).step_by(BLOCK) {
            for j in 0..n {
                let damped = |k| at(products, cols, j, k) + if j == k { damping } else { 0.0 };
                panels.extend((block..block + BLOCK).map(damped));
            }
        }
        Hessian { panels, n }
    }

    /// Returns all rows of H for the block of columns that begins at `start`.
    pub fn block(&self, start: usize) -> &[[f32; BLOCK]] {
        self.panels[start * self.n..][..self.n * BLOCK].as_chunks().0
    }

    /// Returns an element.
    fn at(&self, i: usize, j: usize) -> f32 {
        self.block(j / BLOCK * BLOCK)[i][j % BLOCK]
    }

    /// Returns `w H w^T`, summed over the lanes; `weights` is `[column][lane]`.
    pub fn energy(&self, level: Level, weights: &[Lanes]) -> f64 {
        let mut total = 0f64;
        for (block, own) in weights.chunks(BLOCK).enumerate() {
            // H is symmetric, so what is left of the block counts twice, and what is right of it not at all.
            let (before, panel) = (&weights[..block * BLOCK], self.block(block * BLOCK));
            for (errors, panel, factor) in [(before, panel, 2.0), (own, &panel[before.len()..], 1.0)] {
                let mut gradient = [[0f32; LANES]; BLOCK];
                level.run(Products { errors, panel, sums: &mut gradient });
                let products = own.iter().flatten().zip(gradient.iter().flatten());
                total += factor * products.map(|(w, g)| f64::from(*w) * f64::from(*g)).sum::<f64>();
            }
        }
        total
    }
}

/// Returns an element of a symmetric matrix of which the upper triangle is filled; elements beyond the matrix are
/// zero.
fn at(products: &[f32], cols: usize, i: usize, j: usize) -> f32 {
    let (i, j) = (i.min(j), i.max(j));
    if j < cols { products[i * cols + j] } else { 0.0 }
}

/// Products of input channels, factored for rounding.
#[derive(Debug)]
pub(in crate::quant) struct Correlations {
    /// Factors for rounding column by column.
    pub columns: Elimination,
    /// Factors for rounding stream by stream, computed when they are first needed.
    streams: OnceLock<Elimination>,
    /// H with damping.
    pub hessian: Hessian,
}

impl Correlations {
    /// Factors `(cols, cols)` mean products, of which the upper triangle is filled.
    ///
    /// # Errors
    /// The products contain NaN or infinities.
    pub fn new(products: &[f32], cols: usize) -> Result<Correlations> {
        let n = cols.next_multiple_of(BLOCK);
        let diagonal: Vec<f32> = (0..cols).map(|i| products[i * cols + i]).collect();
        let mean = (diagonal.iter().map(|x| f64::from(*x)).sum::<f64>() / cols as f64) as f32;
        let mean = if mean > 0.0 { mean } else { 1.0 };
        let mut order: Vec<u32> = (0..n as u32).collect();
        let activity = |column: u32| diagonal.get(column as usize).copied().unwrap_or(-1.0);
        order.sort_by(|a, b| activity(*b).total_cmp(&activity(*a)));
        let mut damping = DAMPING;
        let columns = loop {
            if let Some(factors) = Elimination::new(&order, damping * mean, |i, j| at(products, cols, i, j)) {
                break factors;
            }
            damping *= MORE;
            if damping > 1.0 {
                return Err(Error::corrupt(
                    "found products of input channels that are infinite or not positive definite",
                )
                .help("make the statistics again with `iec calib --hessian`"));
            }
        };
        let hessian = Hessian::new(products, cols, damping * mean);
        Ok(Correlations { columns, streams: OnceLock::new(), hessian })
    }

    /// Returns the factors for rounding the streams of a trellis one after the other, each step after step. Streams
    /// are ordered by the activity of their columns.
    pub fn streams(&self) -> &Elimination {
        self.streams.get_or_init(|| {
            let n = self.hessian.n;
            let columns = |stream: usize| (0..STEPS).map(move |step| stream / 4 * BLOCK + stream % 4 + 4 * step);
            let activity: Vec<f32> =
                (0..n / STEPS).map(|stream| columns(stream).map(|k| self.hessian.at(k, k)).sum()).collect();
            let mut streams: Vec<usize> = (0..n / STEPS).collect();
            streams.sort_by(|a, b| activity[*b].total_cmp(&activity[*a]));
            let order: Vec<u32> = streams.into_iter().flat_map(columns).map(|column| column as u32).collect();
            let mean = activity.iter().sum::<f32>() / n as f32;
            // H has its damping; in another order, rounding may need some more.
            let mut damping = 0.0;
            loop {
                if let Some(factors) = Elimination::new(&order, damping * mean, |i, j| self.hessian.at(i, j)) {
                    return factors;
                }
                damping = damping * MORE + DAMPING / 100.0;
            }
        })
    }
}

/// Factors U and D of H in an order of rounding.
#[derive(Debug)]
pub(in crate::quant) struct Elimination {
    /// Columns in the order in which they are rounded: `(n)`.
    pub order: Vec<u32>,
    /// D: what the square of the error of each column costs, in the order of rounding.
    pub costs: Vec<f32>,
    /// U in the order of rounding: for each block of 32 columns a panel `[row][32]` of the rows up to the block's
    /// end.
    feedback: Vec<f32>,
}

impl Elimination {
    /// Factors a symmetric matrix with `damping` added to its diagonal; returns `None` if it is not positive definite.
    fn new(order: &[u32], damping: f32, at: impl Fn(usize, usize) -> f32) -> Option<Elimination> {
        let n = order.len();
        // Rows and columns are reversed, because the factorization U D U^T starts at the last column.
        let mut triangle = vec![0f32; n * n];
        for (i, row) in triangle.chunks_exact_mut(n).enumerate() {
            let column = order[n - 1 - i] as usize;
            for (j, x) in row.iter_mut().enumerate().skip(i) {
                *x = at(column, order[n - 1 - j] as usize);
            }
            row[i] += damping;
        }
        if !factor(&mut triangle, n) {
            return None;
        }
        let mut feedback = Vec::with_capacity(n * (n + BLOCK) / 2);
        for block in (0..n).step_by(BLOCK) {
            for j in 0..block + BLOCK {
                feedback.extend((block..block + BLOCK).map(|k| {
                    let row = &triangle[(n - 1 - k) * n..][..n];
                    if j < k { row[n - 1 - j] / row[n - 1 - k] } else { 0.0 }
                }));
            }
        }
        let costs = (0..n).map(|k| triangle[(n - 1 - k) * (n + 1)].powi(2)).collect();
        Some(Elimination { order: order.to_vec(), costs, feedback })
    }

    /// Returns the rows of U for the block at position `start`: all rows before it, then those of the block.
    pub fn feedback(&self, start: usize) -> &[[f32; BLOCK]] {
        let before = start / BLOCK * (start + BLOCK) / 2 * BLOCK;
        self.feedback[before..before + (start + BLOCK) * BLOCK].as_chunks().0
    }
}
