//! Statistics of measurements: means with standard errors, percentiles, intervals of shares, and the comparison of two
//! models that answered the same questions.

use serde::Serialize;

/// Quantile of the normal distribution for two-sided 95 % intervals.
const Z95: f64 = 1.959_963_984_540_054;

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

/// Computes the 95 % interval of Wilson for a share, of which `right` of `count` values were observed. Unlike the
/// interval of the normal distribution, it stays between 0 and 1 and has a width when all or none are right.
pub fn wilson(right: usize, count: usize) -> [f64; 2] {
    if count == 0 {
        return [0.0, 1.0];
    }
    let (n, share) = (count as f64, right as f64 / count as f64);
    let centre = share + Z95 * Z95 / (2.0 * n);
    let half = Z95 * (share * (1.0 - share) / n + Z95 * Z95 / (4.0 * n * n)).sqrt();
    let scale = 1.0 + Z95 * Z95 / n;
    // At the ends the interval is exact; rounding would leave the last bit.
    let low = if right == 0 { 0.0 } else { ((centre - half) / scale).max(0.0) };
    let high = if right == count { 1.0 } else { ((centre + half) / scale).min(1.0) };
    [low, high]
}

/// Computes the two-sided p-value of McNemar's exact test: the probability that `gained + lost` differing answers are
/// divided at least as unevenly as here, if each is equally likely to go either way.
pub fn mcnemar(gained: usize, lost: usize) -> f64 {
    let (less, n) = (gained.min(lost), gained + lost);
    let mut log_binomial = 0.0;
    let mut tail = 0.0;
    for k in 0..=less {
        if k > 0 {
            log_binomial += ((n - k + 1) as f64 / k as f64).ln();
        }
        tail += (log_binomial - n as f64 * std::f64::consts::LN_2).exp();
    }
    (2.0 * tail).min(1.0)
}

/// Difference between the accuracies of two models on the same questions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PairedDifference {
    /// Accuracy of the model minus that of the reference, with the standard error of the mean of the differences per
    /// question.
    #[serde(flatten)]
    pub difference: Mean,
    /// 95 % interval of the difference.
    pub ci95: [f64; 2],
    /// Number of questions that the model answers correctly and the reference does not.
    pub became_right: usize,
    /// Number of questions that the reference answers correctly and the model does not.
    pub became_wrong: usize,
    /// p-value of McNemar's exact test, two-sided.
    pub p_value: f64,
}

impl PairedDifference {
    /// Compares which questions a model and its reference answered correctly, in the same order.
    pub fn of(model: &[bool], reference: &[bool]) -> PairedDifference {
        let pairs = || model.iter().zip(reference);
        let difference = Mean::of(pairs().map(|(ours, theirs)| f64::from(*ours as i8 - *theirs as i8)));
        let (became_right, became_wrong) = (
            pairs().filter(|(ours, theirs)| **ours && !**theirs).count(),
            pairs().filter(|(ours, theirs)| !**ours && **theirs).count(),
        );
        let half = Z95 * difference.stderr;
        PairedDifference {
            difference,
            ci95: [difference.value - half, difference.value + half],
            became_right,
            became_wrong,
            p_value: mcnemar(became_right, became_wrong),
        }
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
    fn intervals_of_shares_are_those_of_wilson() {
        let close = |found: [f64; 2], expected: [f64; 2]| {
            let near = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 5e-5);
            assert!(near, "{found:?} {expected:?}");
        };
        // Newcombe, Statistics in Medicine 17 (1998), table I.
        close(wilson(81, 263), [0.2553, 0.3662]);
        close(wilson(15, 148), [0.0624, 0.1605]);
        close(wilson(0, 20), [0.0, 0.1611]);
        close(wilson(1, 29), [0.0061, 0.1718]);
        assert_eq!(wilson(20, 20)[1], 1.0);
        assert_eq!(wilson(0, 0), [0.0, 1.0]);
    }

    #[test]
    fn the_test_of_mcnemar_sums_the_tail_of_the_binomial_distribution() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        close(mcnemar(0, 0), 1.0);
        close(mcnemar(3, 3), 1.0);
        close(mcnemar(0, 5), 2.0 / 32.0);
        close(mcnemar(5, 0), 2.0 / 32.0);
        // 1 + 10 + 45 of 1024 in each tail.
        close(mcnemar(2, 8), 2.0 * 56.0 / 1024.0);
        // Terms below the smallest number of f64 do not disturb the sum.
        assert!(mcnemar(49_000, 51_000) < 1e-9 && mcnemar(50_000, 50_000) == 1.0);
    }

    #[test]
    fn paired_answers_are_compared_question_by_question() {
        let model = [true, true, false, true, false, false];
        let reference = [true, false, true, true, true, false];
        let found = PairedDifference::of(&model, &reference);
        assert_eq!((found.became_right, found.became_wrong), (1, 2));
        // Differences 0, 1, -1, 0, -1, 0: mean -1/6, sum of squares around it 3 - 1/6.
        assert!((found.difference.value + 1.0 / 6.0).abs() < 1e-12);
        assert!((found.difference.stderr - ((3.0 - 1.0 / 6.0) / 30.0f64).sqrt()).abs() < 1e-12);
        assert!((found.ci95[1] - found.ci95[0] - 2.0 * 1.96 * found.difference.stderr).abs() < 1e-3);
        assert!(found.p_value == 1.0 && PairedDifference::of(&model, &model).ci95 == [0.0, 0.0]);
    }

    #[test]
    fn percentiles_lie_between_neighbours() {
        let spread = Spread::of([4.0, 0.0, 3.0, 1.0, 2.0].into_iter());
        assert_eq!((spread.median, spread.max), (2.0, 4.0));
        assert!((spread.p90 - 3.6).abs() < 1e-12);
        assert!(Spread::of(std::iter::empty()).median.is_nan());
    }
}
