//! Metrics of the error of a quantized tensor, computed per row because a row is one output of the layer.
//!
//! The cosine between a row and its decoded form does not depend on the size of the row. A row of weights near zero,
//! such as that of a dead channel, underflows in scales of fp16 and loses its direction, but hardly changes the output
//! of the layer. Rows much smaller than the others therefore count by what they contribute: as if each of them, and its
//! decoded form, also had a component of 1 % of the size of other rows, which is decoded exactly. A lost row
//! passes the default gate up to 0.2 % of the size of others, less than rounding to 8 bits changes these.

use crate::manifest::Metrics;

/// Share of the size of other rows that a row without a direction counts with.
const NEGLIGIBLE: f64 = 0.01;

/// Comparison of one row with its dequantized form.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowMetrics {
    squared_error: f64,
    squared_weights: f64,
    squared_decoded: f64,
    product: f64,
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
        RowMetrics { squared_error: ee, squared_weights: xx, squared_decoded: yy, product: xy, max_abs_error: max }
    }

    /// Returns the cosine of the row and its decoded form. A row whose norm is below `floor` counts with a component of
    /// this norm that is decoded exactly.
    fn cosine(&self, floor: f64) -> f64 {
        let added = if self.squared_weights.sqrt() < floor { floor * floor } else { 0.0 };
        let (xx, yy, xy) = (self.squared_weights + added, self.squared_decoded + added, self.product + added);
        match (xx > 0.0, yy > 0.0) {
            (true, true) => xy / (xx.sqrt() * yy.sqrt()),
            (false, false) => 1.0,
            _ => 0.0,
        }
    }

    /// Returns the norm below which rows count by what they contribute: a share of the upper quartile of the norms,
    /// which neither a few large rows nor many dead ones move.
    fn floor(rows: &[RowMetrics]) -> f64 {
        let mut norms: Vec<f64> = rows.iter().map(|row| row.squared_weights.sqrt()).collect();
        norms.sort_by(f64::total_cmp);
        norms.get(norms.len() * 3 / 4).map_or(0.0, |norm| NEGLIGIBLE * norm)
    }

    /// Computes the metrics of a tensor. The sums depend on the order of `rows`, which must be the row order of the
    /// tensor.
    pub fn summarize(rows: &[RowMetrics]) -> Metrics {
        let sum = |f: fn(&RowMetrics) -> f64| rows.iter().map(f).sum::<f64>();
        let floor = RowMetrics::floor(rows);
        let cosines = || rows.iter().map(|row| row.cosine(floor));
        let weights = sum(|r| r.squared_weights);
        let relative_rms = if weights > 0.0 { (sum(|r| r.squared_error) / weights).sqrt() } else { 0.0 };
        Metrics {
            cosine_mean: nine_digits(cosines().sum::<f64>() / rows.len().max(1) as f64),
            cosine_min: nine_digits(cosines().fold(1.0, f64::min)),
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
    fn rows_near_zero_count_by_what_they_contribute() {
        struct Case {
            name: &'static str,
            /// Size of the small row, and what it is decoded to, relative to the other rows.
            small: f32,
            decoded: f32,
            passes: bool,
        }
        let case = |name, small, decoded, passes| Case { name, small, decoded, passes };
        let cases = [
            case("a dead channel that becomes zero", 1e-7, 0.0, true),
            case("a row of zeros that stays small", 0.0, 1e-4, true),
            case("a row of less than rounding", 1e-3, 0.0, true),
            case("a lost row of 1 %", 1e-2, 0.0, false),
            case("a lost row of the usual size", 0.7, 0.0, false),
            case("a dead channel that becomes noise", 1e-7, 0.1, false),
            case("a row of zeros that becomes large", 0.0, 1.0, false),
        ];
        let mut wrong = Vec::new();
        for Case { name, small, decoded, passes } in cases {
            // The sign of the decoded row alternates, so that its direction is lost.
            let row = |size: f32, alternates: bool| -> Vec<f32> {
                (0..64).map(|i| if alternates && i % 2 == 1 { -size } else { size }).collect()
            };
            let good = row(1.0, false);
            let mut rows = vec![RowMetrics::of(&good, &good); 15];
            rows.push(RowMetrics::of(&row(small, false), &row(decoded, true)));
            let found = RowMetrics::summarize(&rows);
            if (found.cosine_min >= 0.98) != passes || (found.cosine_mean >= 0.995) != passes {
                wrong.push(format!("{name}: {} {}", found.cosine_mean, found.cosine_min));
            }
        }
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    #[test]
    fn a_large_row_and_many_dead_ones_do_not_decide_what_is_small() {
        let of = |size: f32, decoded: f32| RowMetrics::of(&[size; 8], &[decoded; 8]);
        let mut rows = vec![of(1.0, 1.0); 7];
        rows.extend([of(1e6, 1e6), of(1.0, 0.0)]);
        assert_eq!(RowMetrics::summarize(&rows).cosine_min, 0.0, "one large row makes no other small");
        let mut rows = vec![of(1e-8, 0.0); 6];
        rows.extend([of(1.0, 1.0); 4]);
        assert!(RowMetrics::summarize(&rows).cosine_min > 0.999, "more than half of the rows are dead");
    }

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
