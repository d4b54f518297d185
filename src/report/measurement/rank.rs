//! Statistical tests of whether one sample is larger than another: rank tests, which assume nothing about the
//! distribution, and ratios of medians with a bootstrap confidence interval.

use crate::rng::Rng;

/// Maximum number of values for which the distribution of rank sums is computed exactly; beyond it, the normal
/// approximation is close enough.
const EXACT: usize = 50;
/// Number of bootstrap resamples for an interval.
const RESAMPLES: usize = 2000;

/// Comparison of a second sample with a first one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// Median of the second sample divided by that of the first, or the median ratio of pairs.
    pub ratio: f64,
    /// Lower end of the 95 % confidence interval of the ratio.
    pub low: f64,
    /// Upper end of the 95 % confidence interval of the ratio.
    pub high: f64,
    /// p-value: probability of a difference at least as large, in either direction, between samples of the same
    /// distribution.
    pub p: f64,
}

/// Compares independent samples with the rank-sum test of Mann, Whitney and Wilcoxon.
pub fn unpaired(a: &[f64], b: &[f64]) -> Comparison {
    let ratio = |a: &mut [f64], b: &mut [f64]| median(b) / median(a);
    let mut rng = Rng::new(0);
    let mut draw = |from: &[f64]| -> Vec<f64> { from.iter().map(|_| from[below(&mut rng, from.len())]).collect() };
    let ratios = (0..RESAMPLES).map(|_| ratio(&mut draw(a), &mut draw(b))).collect();
    let (low, high) = interval(ratios);
    Comparison { ratio: ratio(&mut a.to_vec(), &mut b.to_vec()), low, high, p: rank_sum(a, b) }
}

/// Compares pairs of a first and a second value with the signed-rank test of Wilcoxon on their logarithmic ratios.
pub fn paired(pairs: &[(f64, f64)]) -> Comparison {
    let ratios: Vec<f64> = pairs.iter().map(|(a, b)| b / a).collect();
    let mut rng = Rng::new(0);
    let mut draw = || -> Vec<f64> { ratios.iter().map(|_| ratios[below(&mut rng, ratios.len())]).collect() };
    let (low, high) = interval((0..RESAMPLES).map(|_| median(&mut draw())).collect());
    let logarithms: Vec<f64> = ratios.iter().map(|ratio| ratio.ln()).collect();
    Comparison { ratio: median(&mut ratios.clone()), low, high, p: signed_rank(&logarithms) }
}

/// Returns the median: the middle value, or the mean of the two in the middle; NaN for no values. Reorders the
/// values.
pub fn median(values: &mut [f64]) -> f64 {
    if values.is_empty() {
        return f64::NAN;
    }
    let half = values.len() / 2;
    let odd = values.len() % 2 == 1;
    let (below, upper, _) = values.select_nth_unstable_by(half, f64::total_cmp);
    if odd { *upper } else { (*upper + below.iter().copied().fold(f64::NEG_INFINITY, f64::max)) / 2.0 }
}

fn below(rng: &mut Rng, n: usize) -> usize {
    (rng.next_f64() * n as f64) as usize
}

/// Returns the interval that holds the middle 95 % of the values.
fn interval(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values[(share * (values.len() - 1) as f64).round() as usize];
    (at(0.025), at(0.975))
}

/// Returns twice the rank of each value, ascending from 2. Equal values share the mean of their ranks; doubling keeps
/// it a whole number.
fn doubled_ranks(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|i, j| values[*i].total_cmp(&values[*j]));
    let mut ranks = vec![0; values.len()];
    let mut first = 0;
    for group in order.chunk_by(|i, j| values[*i] == values[*j]) {
        group.iter().for_each(|i| ranks[*i] = 2 * first + group.len() + 1);
        first += group.len();
    }
    ranks
}

fn rank_sum(a: &[f64], b: &[f64]) -> f64 {
    let ranks = doubled_ranks(&[a, b].concat());
    let (n, all) = (a.len(), ranks.len());
    let found: usize = ranks[..n].iter().sum();
    let mean = (n * (all + 1)) as f64;
    if all > EXACT {
        let spread: f64 = ranks.iter().map(|rank| (*rank as f64 - (all + 1) as f64).powi(2)).sum();
        let variance = spread * (n * b.len()) as f64 / (all * (all - 1)) as f64;
        return two_sided(found as f64 - mean, variance);
    }
    // ways[k][s] is the number of ways to choose k of the ranks with the sum s.
    let mut ways = vec![vec![0.0; ranks.iter().sum::<usize>() + 1]; n + 1];
    ways[0][0] = 1.0;
    for rank in &ranks {
        for k in (1..=n).rev() {
            let (fewer, more) = ways.split_at_mut(k);
            more[0][*rank..].iter_mut().zip(&fewer[k - 1]).for_each(|(more, fewer)| *more += fewer);
        }
    }
    as_extreme(&ways[n], found, mean)
}

fn signed_rank(differences: &[f64]) -> f64 {
    let differences: Vec<f64> = differences.iter().copied().filter(|d| *d != 0.0).collect();
    let ranks = doubled_ranks(&differences.iter().map(|d| d.abs()).collect::<Vec<_>>());
    let found: usize = ranks.iter().zip(&differences).filter(|(_, d)| **d > 0.0).map(|(rank, _)| rank).sum();
    let total: usize = ranks.iter().sum();
    let mean = total as f64 / 2.0;
    if ranks.len() > EXACT {
        return two_sided(found as f64 - mean, ranks.iter().map(|rank| (*rank as f64).powi(2)).sum::<f64>() / 4.0);
    }
    let mut ways = vec![0.0; total + 1];
    ways[0] = 1.0;
    for rank in &ranks {
        for sum in (*rank..=total).rev() {
            ways[sum] += ways[sum - rank];
        }
    }
    as_extreme(&ways, found, mean)
}

/// Returns the share of ways whose sum is at least as far from the mean as `found`.
fn as_extreme(ways: &[f64], found: usize, mean: f64) -> f64 {
    let far = |sum: usize| (sum as f64 - mean).abs() >= (found as f64 - mean).abs();
    let extreme: f64 = ways.iter().enumerate().filter(|(sum, _)| far(*sum)).map(|(_, ways)| ways).sum();
    extreme / ways.iter().sum::<f64>()
}

/// Returns the probability that a normal variable is at least this far from its mean. The error function is 7.1.26 of
/// Abramowitz and Stegun, accurate to 1.5e-7.
fn two_sided(distance: f64, variance: f64) -> f64 {
    if variance <= 0.0 {
        return 1.0;
    }
    let x = distance.abs() / (2.0 * variance).sqrt();
    let t = 1.0 / (1.0 + 0.327_591_1 * x);
    let polynomial = [1.061_405_429, -1.453_152_027, 1.421_413_741, -0.284_496_736, 0.254_829_592];
    polynomial.iter().fold(0.0, |sum, c| sum * t + c) * t * (-x * x).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_in_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0]), 2.5);
        assert!(median(&mut []).is_nan());
    }

    #[test]
    fn probabilities_are_those_of_the_textbooks() {
        let (low, high) = ([1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]);
        // 2 of the 252 ways to choose 5 of 10.
        assert!((rank_sum(&low, &high) - 2.0 / 252.0).abs() < 1e-12);
        assert!((rank_sum(&high, &low) - 2.0 / 252.0).abs() < 1e-12);
        // With ties: {1, 2, 2} against {2, 3} has the doubled ranks 2, 6, 6, 6, 10. The sum of the first sample is 14;
        // 6 of the 10 sums of three ranks are at least as far from the mean 18.
        assert!((rank_sum(&[1.0, 2.0, 2.0], &[2.0, 3.0]) - 0.6).abs() < 1e-12);
        // All of 8 differences of one sign: 2 of 256.
        assert!((signed_rank(&[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]) - 2.0 / 256.0).abs() < 1e-12);
        // A difference of zero does not count; the two others have one sign, as in 2 of 4 combinations.
        assert!((signed_rank(&[0.0, 1.0, 2.0]) - 0.5).abs() < 1e-12);
        assert_eq!((rank_sum(&[1.0; 60], &[1.0; 60]), signed_rank(&[0.0; 3])), (1.0, 1.0));
    }

    #[test]
    fn counting_and_the_normal_distribution_agree_where_they_meet() {
        let mut rng = Rng::new(7);
        let mut sample = |n: usize, shift: f64| -> Vec<f64> { (0..n).map(|_| rng.next_normal() + shift).collect() };
        for shift in [0.0, 0.3, 0.6] {
            let (a, b) = (sample(25, 0.0), sample(25, shift));
            let exact = rank_sum(&a, &b);
            let ranks = doubled_ranks(&[&a[..], &b].concat());
            let found: usize = ranks[..25].iter().sum();
            // 50 distinct values: the variance of the doubled rank sum is 4 * 25 * 25 * 51 / 12.
            let normal = two_sided(found as f64 - 25.0 * 51.0, 4.0 * 625.0 * 51.0 / 12.0);
            assert!((exact - normal).abs() < 0.02, "{exact} {normal}");
        }
        assert!((two_sided(1.959_964, 1.0) - 0.05).abs() < 1e-6);
    }

    #[test]
    fn the_interval_holds_the_ratio_and_pairs_see_what_spread_hides() {
        let mut rng = Rng::new(3);
        let a: Vec<f64> = (0..12).map(|i| 10.0 * 1.5f64.powi(i)).collect();
        let b: Vec<f64> = a.iter().map(|a| a * (1.1 + 0.01 * rng.next_normal())).collect();
        let pairs: Vec<(f64, f64)> = a.iter().copied().zip(b.iter().copied()).collect();
        let (seen, hidden) = (paired(&pairs), unpaired(&a, &b));
        assert!(seen.p < 0.001 && hidden.p > 0.5);
        assert!((seen.ratio - 1.1).abs() < 0.01 && seen.low <= seen.ratio && seen.ratio <= seen.high);
        assert!(seen.high - seen.low < 0.05 && hidden.high - hidden.low > 0.5);
    }
}
