//! What a matrix-wide scale is made of: extremes, and a histogram when more than the extremes is needed.

use super::plain::{self, Choice, CodeRange};
use super::search;
use crate::manifest::{Method, TensorQuant};
use crate::scheme::{Granularity, QuantSpec};

/// Bins of the histogram: sign, exponent and 7 bits of mantissa of an f32.
const BINS: usize = 1 << 16;

/// Statistics of all values seen; the same for any order of [`Observation::add`].
#[derive(Debug)]
pub(crate) struct Observation {
    min: f32,
    max: f32,
    count: u64,
    /// Counts by the upper half of the value's bits; empty when extremes suffice.
    bins: Vec<u64>,
}

impl Observation {
    /// Nothing seen yet; allocates the histogram only when `quant` needs one.
    pub fn new(quant: &TensorQuant) -> Observation {
        let shared = quant.spec.granularity == Granularity::Tensor;
        let detailed = shared && (quant.percentile.is_some() || quant.method == Method::Search);
        let bins = vec![0; if detailed { BINS } else { 0 }];
        Observation { min: f32::INFINITY, max: f32::NEG_INFINITY, count: 0, bins }
    }

    /// Counts finite values, clipped to `clamp`.
    pub fn add(&mut self, values: &[f32], clamp: Option<f32>) {
        let limit = clamp.unwrap_or(f32::MAX);
        self.count += values.len() as u64;
        for x in values {
            let x = x.clamp(-limit, limit);
            self.min = self.min.min(x);
            self.max = self.max.max(x);
            if let Some(bin) = self.bins.get_mut((x.to_bits() >> 16) as usize) {
                *bin += 1;
            }
        }
    }

    /// Plain scale and zero point for the whole matrix.
    ///
    /// # Panics
    /// Nothing was observed.
    pub fn choose(&self, quant: &TensorQuant) -> Choice {
        assert!(self.count > 0, "a matrix-wide scale needs all rows observed first");
        let (min, max) = match quant.percentile {
            None => (self.min, self.max),
            Some(p) if quant.spec.symmetric => {
                let peak = self.percentile(p, |x| x.abs());
                (-peak, peak)
            }
            Some(p) => (self.percentile(100.0 - p, |x| x), self.percentile(p, |x| x)),
        };
        let plain = plain::choose(&quant.spec, min, max);
        if quant.method == Method::Search { self.search(&quant.spec, plain) } else { plain }
    }

    /// The search of [`search::fit`] on the histogram. Its bins stand for their values to 0.4 %, so a scale must be better
    /// than the plain one by more than that could feign.
    fn search(&self, spec: &QuantSpec, plain: Choice) -> Choice {
        let points: Vec<(f32, u64)> = self.points().collect();
        let sums = |choice: Choice| {
            let (inverse, range) = (plain::inverse(choice.scale), CodeRange::of(spec, choice.zero));
            points.iter().fold((0f64, 0f64, 0f64), |(error, xq, qq), (x, n)| {
                let q = plain::nearest(*x, inverse, range);
                let (n, e) = (*n as f64, f64::from(x - q * choice.scale));
                (error + n * e * e, xq + n * f64::from(x * q), qq + n * f64::from(q * q))
            })
        };
        let plain_error = sums(plain).0;
        let mut best = (plain_error, plain);
        for mut candidate in search::candidates(spec, plain, false) {
            for _ in 0..4 {
                let (error, xq, qq) = sums(candidate);
                if error < best.0 {
                    best = (error, candidate);
                }
                if qq == 0.0 {
                    break;
                }
                candidate.scale = (xq / qq) as f32;
            }
        }
        if best.0 < 0.98 * plain_error { best.1 } else { plain }
    }

    /// The p-th percentile of `key(value)`, exact to the width of a bin (0.4 %).
    fn percentile(&self, p: f32, key: impl Fn(f32) -> f32) -> f32 {
        let mut sorted: Vec<(f32, u64)> = self.points().map(|(x, n)| (key(x), n)).collect();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        let rank = plain::rank(p, self.count as usize) as u64;
        let mut below = 0;
        let reached = sorted.iter().find(|(_, n)| {
            below += n;
            below > rank
        });
        reached.map_or(0.0, |(x, _)| x.clamp(self.min.min(-self.max), self.max.max(-self.min)))
    }

    /// Middle and count of every occupied bin.
    fn points(&self) -> impl Iterator<Item = (f32, u64)> {
        let occupied = self.bins.iter().enumerate().filter(|(_, n)| **n > 0);
        // The bins of +0 and -0 mean zero itself; others are represented by the middle of their 2^16 values.
        occupied.map(|(i, n)| (if i & 0x7FFF == 0 { 0.0 } else { f32::from_bits((i as u32) << 16 | 0x8000) }, *n))
    }
}
