//! Measurements in bounded memory: histograms of times, and series over time.

use crate::sched::Micros;

/// Buckets per doubling of the value.
const PARTS: u64 = 32;

/// Histogram of times. The width of a bucket is 1/32 of its value or less.
#[derive(Debug, Clone, Default)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum: f64,
    largest: Micros,
}

impl Histogram {
    /// Adds a time.
    pub fn add(&mut self, time: Micros) {
        let bucket = if time < PARTS {
            time
        } else {
            let doublings = u64::from(time.ilog2() - PARTS.ilog2());
            (doublings + 1) * PARTS + (time >> doublings) - PARTS
        } as usize;
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.total += 1;
        self.sum += time as f64;
        self.largest = self.largest.max(time);
    }

    /// Returns the number of times.
    pub fn count(&self) -> u64 {
        self.total
    }

    /// Returns the mean in seconds, 0 without times.
    pub fn mean(&self) -> f64 {
        self.sum / (self.total.max(1) as f64) / 1e6
    }

    /// Returns the largest time in seconds.
    pub fn largest(&self) -> f64 {
        self.largest as f64 / 1e6
    }

    /// Returns the smallest time, in seconds, that at least the share `share` of the times does not exceed; 0 without
    /// times. The error is at most the width of a bucket.
    pub fn quantile(&self, share: f64) -> f64 {
        let wanted = (self.total as f64 * share).ceil().max(1.0) as u64;
        let mut sum = 0;
        let bucket = self.counts.iter().position(|count| {
            sum += count;
            sum >= wanted
        });
        let bucket = bucket.map_or(0, |bucket| bucket as u64);
        let upper = if bucket < PARTS {
            bucket
        } else {
            let doublings = bucket / PARTS - 1;
            // The last bucket ends with the largest integer, where the shift leaves 0.
            ((bucket % PARTS + PARTS + 1) << doublings).wrapping_sub(1)
        };
        upper.min(self.largest) as f64 / 1e6
    }
}

/// Largest number of intervals of a series.
const INTERVALS: usize = 400;

/// Mean values of `N` quantities in intervals of equal length. When there are too many intervals, neighbors are merged.
#[derive(Debug, Clone)]
pub struct Series<const N: usize> {
    /// Length of an interval.
    width: Micros,
    /// Integrals over time of each interval.
    sums: Vec<[f64; N]>,
    now: Micros,
}

impl<const N: usize> Series<N> {
    /// Creates a series that starts at time 0.
    pub fn new() -> Series<N> {
        Series { width: 100_000, sums: Vec::new(), now: 0 }
    }

    /// Enters that the quantities had these values since the last call.
    pub fn add(&mut self, now: Micros, values: [f64; N]) {
        while now / self.width >= INTERVALS as u64 {
            self.width *= 2;
            let merged = self.sums.chunks(2).map(|pair| {
                let second = pair.get(1).copied().unwrap_or([0.0; N]);
                std::array::from_fn(|i| pair[0][i] + second[i])
            });
            self.sums = merged.collect();
        }
        while self.now < now {
            let at = (self.now / self.width) as usize;
            self.sums.resize(self.sums.len().max(at + 1), [0.0; N]);
            let end = now.min((at as u64 + 1) * self.width);
            let time = (end - self.now) as f64;
            self.sums[at].iter_mut().zip(values).for_each(|(sum, value)| *sum += time * value);
            self.now = end;
        }
    }

    /// Returns the length of an interval in seconds.
    pub fn seconds(&self) -> f64 {
        self.width as f64 / 1e6
    }

    /// Returns the means of quantity `i` by interval.
    pub fn means(&self, i: usize) -> Vec<f64> {
        let time = |at: usize| (self.now - at as u64 * self.width).min(self.width).max(1) as f64;
        self.sums.iter().enumerate().map(|(at, sums)| sums[i] / time(at)).collect()
    }
}

impl<const N: usize> Default for Series<N> {
    fn default() -> Series<N> {
        Series::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_exact_to_a_bucket() {
        let mut histogram = Histogram::default();
        assert_eq!((histogram.quantile(0.5), histogram.mean()), (0.0, 0.0));
        (1..=100_000).for_each(|time| histogram.add(time));
        for share in [0.001, 0.5, 0.9, 0.99] {
            let (found, exact) = (histogram.quantile(share), share * 0.1);
            assert!((exact..=exact * 1.04).contains(&found), "{share}: {found}");
        }
        assert_eq!((histogram.quantile(1.0), histogram.largest(), histogram.count()), (0.1, 0.1, 100_000));
        histogram.add(u64::MAX);
        assert!(histogram.quantile(1.0) > 1e12);
    }

    #[test]
    fn series_keep_means_when_intervals_are_merged() {
        let mut series = Series::<2>::new();
        (1..=1000u64).for_each(|i| series.add(i * 1_000_000, [i as f64, 2.0]));
        let (first, second) = (series.means(0), series.means(1));
        assert!(first.len() <= INTERVALS && series.seconds() > 2.0);
        let mean = first.iter().sum::<f64>() / first.len() as f64;
        assert!((mean - 500.0).abs() < 15.0 && first.is_sorted(), "{mean}");
        assert!(second.iter().all(|value| (value - 2.0).abs() < 1e-9), "{second:?}");
    }
}
