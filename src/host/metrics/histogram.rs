//! Histograms with fixed buckets, updated without locks.
//!
//! The counts are kept per bucket, not cumulative, so that an observation changes one count and the sum. The reader
//! adds the counts up; the total is computed from the same counts, so a reading is consistent in itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Largest observation in units. Larger ones count as this, so that sums do not overflow: 2^53 ns are 104 days.
const MOST: u64 = 1 << 53;

/// Counts of observed durations or numbers of tokens.
#[derive(Debug)]
pub(super) struct Histogram {
    /// Upper bounds of the buckets, ascending; a value equal to a bound lies in its bucket.
    bounds: &'static [f64],
    /// Observations per bucket, and one count for values above all bounds.
    counts: Box<[AtomicU64]>,
    /// Sum of all observations in units.
    sum: AtomicU64,
    /// Units per 1 of the exported value: 1e9 for durations, which are summed in nanoseconds, and 1 for tokens.
    units: f64,
}

impl Histogram {
    /// Creates a histogram of durations in seconds.
    pub(super) fn seconds(bounds: &'static [f64]) -> Histogram {
        Histogram::new(bounds, 1e9)
    }

    /// Creates a histogram of numbers of tokens.
    pub(super) fn tokens(bounds: &'static [f64]) -> Histogram {
        Histogram::new(bounds, 1.0)
    }

    fn new(bounds: &'static [f64], units: f64) -> Histogram {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, sum: AtomicU64::new(0), units }
    }

    /// Counts a duration.
    pub(super) fn observe(&self, time: Duration) {
        self.add(u64::try_from(time.as_nanos()).unwrap_or(MOST));
    }

    /// Counts a number of tokens.
    pub(super) fn observe_tokens(&self, tokens: usize) {
        self.add(tokens as u64);
    }

    fn add(&self, units: u64) {
        let units = units.min(MOST);
        // A division rounds correctly: 1,000,000 ns are exactly the number 0.001 of the bounds.
        let value = units as f64 / self.units;
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.sum.fetch_add(units, Ordering::Relaxed);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns each bucket's upper bound, `None` for the last one, and the number of observations in it.
    pub(super) fn buckets(&self) -> impl Iterator<Item = (Option<f64>, u64)> {
        let bounds = self.bounds.iter().copied().map(Some).chain([None]);
        bounds.zip(self.counts.iter().map(|count| count.load(Ordering::Relaxed)))
    }

    /// Returns the sum of all observations in seconds or tokens.
    pub(super) fn sum(&self) -> f64 {
        self.sum.load(Ordering::Relaxed) as f64 / self.units
    }

    /// Returns true if nothing was observed.
    pub(super) fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| count.load(Ordering::Relaxed) == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_lies_in_the_first_bucket_whose_bound_reaches_it() {
        let histogram = Histogram::seconds(&[0.001, 0.0025, 1.0]);
        for micros in [0, 1000, 1001, 2500, 999_999, 1_000_000, 1_000_001] {
            histogram.observe(Duration::from_micros(micros));
        }
        histogram.observe(Duration::MAX);
        let counts: Vec<u64> = histogram.buckets().map(|(_, count)| count).collect();
        assert_eq!(counts, [2, 2, 2, 2]);
        assert!((histogram.sum() - (3.004501 + MOST as f64 / 1e9)).abs() < 1e-6, "{}", histogram.sum());
    }

    #[test]
    fn tokens_are_counted_as_whole_numbers() {
        let histogram = Histogram::tokens(&[1.0, 8.0]);
        assert!(histogram.is_empty());
        [0, 1, 2, 8, 9].into_iter().for_each(|tokens| histogram.observe_tokens(tokens));
        assert_eq!(histogram.buckets().map(|(_, count)| count).collect::<Vec<_>>(), [2, 2, 1]);
        assert!(histogram.sum() == 20.0 && !histogram.is_empty());
    }
}
