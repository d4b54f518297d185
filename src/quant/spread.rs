//! Histograms of weights before and after quantization and of their errors, computed from some tiles of the first
//! matrix of a tensor.

use super::stream::{Stack, quantizers};
use crate::error::Result;
use crate::quant_spec::TensorQuant;
use crate::scheme::TILE_ROWS;
use rayon::prelude::*;

/// Approximate number of weights that are counted.
const WEIGHTS: usize = 1 << 20;
/// Half width of the histogram in multiples of the root mean square; values outside are counted in the first and the
/// last bin.
const REACH: f64 = 4.0;

/// Histogram with equally wide bins around zero.
#[derive(Debug, Clone, PartialEq)]
pub struct Bins {
    /// Limit of the histogram: the first bin begins at `-limit`, the last one ends at `limit`.
    pub limit: f64,
    /// Number of values in each bin; the first and the last bin include the values outside the limits.
    pub counts: Vec<u64>,
}

impl Bins {
    /// Number of bins; odd, so that zero is in the middle of a bin.
    const COUNT: usize = 121;

    /// Creates an empty histogram from `-limit` to `limit`; a limit of 0 is replaced by 1.
    fn around(limit: f64) -> Bins {
        Bins { limit: if limit > 0.0 { limit } else { 1.0 }, counts: vec![0; Bins::COUNT] }
    }

    fn with(mut self, values: impl Iterator<Item = f32>) -> Bins {
        for value in values {
            let place = (f64::from(value) / self.limit + 1.0) / 2.0 * Bins::COUNT as f64;
            self.counts[(place.max(0.0) as usize).min(Bins::COUNT - 1)] += 1;
        }
        self
    }
}

/// Histograms of a tensor before and after quantization.
#[derive(Debug, Clone, PartialEq)]
pub struct Spread {
    /// Number of weights that were counted.
    pub weights: usize,
    /// Histogram of the original weights.
    pub before: Bins,
    /// Histogram of the dequantized weights, with the same bins.
    pub after: Bins,
    /// Histogram of the errors, dequantized weight minus original weight, with bins of its own.
    pub errors: Bins,
}

impl Spread {
    /// Quantizes some rows of the first matrix.
    ///
    /// # Errors
    /// Reading or quantizing fails.
    pub fn of(quant: TensorQuant, stack: &Stack<'_>) -> Result<Spread> {
        let first = Stack { count: 1, ..*stack };
        let quantizer = &quantizers(quant, &first)?[0];
        let tiles = stack.rows.div_ceil(TILE_ROWS);
        let each = tiles.div_ceil((WEIGHTS / (TILE_ROWS * stack.cols)).max(1));
        let starts: Vec<usize> = (0..tiles).step_by(each).map(|tile| tile * TILE_ROWS).collect();
        let quantized = starts.into_par_iter().map(|start| {
            let rows = start..stack.rows.min(start + TILE_ROWS);
            let mut before = vec![0f32; rows.len() * stack.cols];
            (stack.read)(0, rows, &mut before)?;
            let after = quantizer.round_trip(&before)?;
            Ok((before, after))
        });
        let (before, after): (Vec<_>, Vec<_>) = quantized.collect::<Result<Vec<_>>>()?.into_iter().unzip();
        let (before, after) = (before.concat(), after.concat());
        let errors = || before.iter().zip(&after).map(|(x, y)| y - x);
        let limit = REACH * root_mean_square(before.iter().copied());
        Ok(Spread {
            weights: before.len(),
            before: Bins::around(limit).with(before.iter().copied()),
            after: Bins::around(limit).with(after.iter().copied()),
            errors: Bins::around(REACH * root_mean_square(errors())).with(errors()),
        })
    }
}

fn root_mean_square(values: impl Iterator<Item = f32>) -> f64 {
    let (sum, n) = values.fold((0.0, 0), |(sum, n), v| (sum + f64::from(v) * f64::from(v), n + 1));
    (sum / f64::from(n.max(1))).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant_spec::QuantFields;
    use crate::rng::Rng;
    use crate::scheme::Scheme;

    #[test]
    fn every_weight_is_counted_before_and_after_and_errors_are_smaller() {
        let (rows, cols) = (37, 80);
        let mut rng = Rng::new(7);
        let weights: Vec<f32> = (0..rows * cols).map(|_| rng.next_normal() as f32).collect();
        let read = |_: usize, rows: std::ops::Range<usize>, out: &mut [f32]| {
            out.copy_from_slice(&weights[rows.start * cols..rows.end * cols]);
            Ok(())
        };
        let stack = Stack { count: 1, rows, cols, read: &read, chunk_rows: None, inputs: None };
        let quant = QuantFields { scheme: Some(Scheme::Q4_0), ..QuantFields::default() };
        let spread = Spread::of(quant.resolve(&QuantFields::default()).unwrap(), &stack).unwrap();
        assert_eq!(spread.weights, rows * cols);
        for bins in [&spread.before, &spread.after, &spread.errors] {
            assert_eq!(bins.counts.iter().sum::<u64>(), (rows * cols) as u64);
        }
        assert!(spread.errors.limit < 0.2 * spread.before.limit && spread.errors.limit > 0.0);
        assert_eq!(spread.before.limit, spread.after.limit);
    }

    #[test]
    fn zeros_and_outliers_have_bins() {
        let bins = Bins::around(0.0).with([0.0, 0.0].into_iter());
        assert_eq!(bins.counts[Bins::COUNT / 2], 2);
        let bins = Bins::around(1.0).with([-9.0, 9.0, 1.0, -1.0].into_iter());
        assert_eq!((bins.counts[0], bins.counts[Bins::COUNT - 1]), (2, 2));
    }
}
