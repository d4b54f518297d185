//! Statistics of measurements: means with standard errors, and percentiles.

use serde::Serialize;

/// Mean and its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Mean {
    /// Mean.
    pub value: f64,
    /// Standard error of the mean, assuming independent values; 0 for fewer than two.
    pub stderr: f64,
}

impl Mean {
    /// Computes the mean of all values; NaN when there are none.
    pub fn of(values: impl Iterator<Item = f64> + Clone) -> Mean {
        let count = values.clone().count() as f64;
        let value = values.clone().sum::<f64>() / count;
        let squares: f64 = values.map(|v| (v - value).powi(2)).sum();
        let stderr = if count > 1.0 { (squares / count / (count - 1.0)).sqrt() } else { 0.0 };
        Mean { value, stderr }
    }

    /// Computes the share of values that are true.
    pub fn share(values: impl Iterator<Item = bool> + Clone) -> Mean {
        Mean::of(values.map(|v| f64::from(u8::from(v))))
    }

    /// Applies `f` to the mean; `slope` is the derivative of `f` at the mean and scales the standard error.
    pub fn map(self, f: impl Fn(f64) -> f64, slope: f64) -> Mean {
        Mean { value: f(self.value), stderr: (slope * self.stderr).abs() }
    }

    /// Returns the exponential of the mean, with its standard error. The exponential of the mean negative
    /// log-likelihood is the perplexity.
    pub fn exp(self) -> Mean {
        self.map(f64::exp, self.value.exp())
    }
}

/// Percentiles of a set of values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Spread {
    pub median: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Spread {
    /// Computes the percentiles of all values, with linear interpolation between neighbors.
    pub fn of(values: impl Iterator<Item = f64>) -> Spread {
        let mut sorted: Vec<f64> = values.collect();
        sorted.sort_by(f64::total_cmp);
        let at = |fraction: f64| {
            let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
            let place = fraction * last as f64;
            let (low, part) = (place as usize, place.fract());
            sorted[low] * (1.0 - part) + sorted[(low + 1).min(last)] * part
        };
        Spread { median: at(0.5), p90: at(0.9), p95: at(0.95), p99: at(0.99), p999: at(0.999), max: at(1.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_mean_shrinks_with_the_root_of_the_count() {
        let values = [1.0, 2.0, 3.0, 4.0];
        let mean = Mean::of(values.into_iter());
        // Sample standard deviation sqrt(5/3), over the root of 4.
        assert_eq!(mean.value, 2.5);
        assert!((mean.stderr - (5.0f64 / 3.0).sqrt() / 2.0).abs() < 1e-12);
        assert_eq!(Mean::of([7.0].into_iter()), Mean { value: 7.0, stderr: 0.0 });
        assert!(Mean::of(std::iter::empty()).value.is_nan());
        let share = Mean::share([true, false, true, true].into_iter());
        assert!(share.value == 0.75 && (share.stderr - (0.75f64 * 0.25 / 3.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn percentiles_lie_between_neighbours() {
        let spread = Spread::of([4.0, 0.0, 3.0, 1.0, 2.0].into_iter());
        assert_eq!((spread.median, spread.max), (2.0, 4.0));
        assert!((spread.p90 - 3.6).abs() < 1e-12);
        assert!(Spread::of(std::iter::empty()).median.is_nan());
    }
}
