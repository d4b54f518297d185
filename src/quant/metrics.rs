//! Metrics of the error of a quantized tensor, computed per row because a row is one output of the layer.

use crate::manifest::Metrics;

/// Comparison of one row with its dequantized form.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowMetrics {
    cosine: f64,
    squared_error: f64,
    squared_weights: f64,
    max_abs_error: f64,
}

impl RowMetrics {
    /// Compares a row with its dequantized values.
    pub fn of(original: &[f32], decoded: &[f32]) -> RowMetrics {
        let (mut xx, mut yy, mut xy, mut ee, mut max) = (0f64, 0f64, 0f64, 0f64, 0f64);
        for (x, y) in original.iter().zip(decoded) {
            let (x, y) = (f64::from(*x), f64::from(*y));
            xx += x * x;
            yy += y * y;
            xy += x * y;
            ee += (x - y) * (x - y);
            max = max.max((x - y).abs());
        }
        let cosine = match (xx > 0.0, yy > 0.0) {
            (true, true) => xy / (xx.sqrt() * yy.sqrt()),
            (false, false) => 1.0,
            _ => 0.0,
        };
        RowMetrics { cosine, squared_error: ee, squared_weights: xx, max_abs_error: max }
    }

    /// Computes the metrics of a tensor. The sums depend on the order of `rows`, which must be the row order of the
    /// tensor.
    pub fn summarize(rows: &[RowMetrics]) -> Metrics {
        let sum = |f: fn(&RowMetrics) -> f64| rows.iter().map(f).sum::<f64>();
        let weights = sum(|r| r.squared_weights);
        let relative_rms = if weights > 0.0 { (sum(|r| r.squared_error) / weights).sqrt() } else { 0.0 };
        Metrics {
            cosine_mean: nine_digits(sum(|r| r.cosine) / rows.len().max(1) as f64),
            cosine_min: nine_digits(rows.iter().fold(1.0, |m, r| m.min(r.cosine))),
            relative_rms: nine_digits(relative_rms),
            max_abs_error: nine_digits(rows.iter().fold(0.0, |m, r| m.max(r.max_abs_error))),
            output_error: None,
        }
    }
}

/// Rounds to nine significant digits, which survive JSON readers that are not exact to the last bit.
pub(crate) fn nine_digits(x: f64) -> f64 {
    format!("{x:.8e}").parse().unwrap_or(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_zeros_count_as_exact_and_lost_rows_as_lost() {
        let rows = [
            RowMetrics::of(&[0.0, 0.0], &[0.0, 0.0]),
            RowMetrics::of(&[1.0, 0.0], &[0.5, 0.5]),
            RowMetrics::of(&[1.0, 0.0], &[0.0, 0.0]),
        ];
        let m = RowMetrics::summarize(&rows);
        assert!((m.cosine_mean - (1.0 + 0.5f64.sqrt()) / 3.0).abs() < 1e-8);
        assert_eq!((m.cosine_min, m.max_abs_error), (0.0, 1.0));
        assert!((m.relative_rms - (1.5f64 / 2.0).sqrt()).abs() < 1e-8);
    }
}
