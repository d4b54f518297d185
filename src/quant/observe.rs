//! Statistics for a matrix-wide scale: extremes, and a histogram when the extremes are not sufficient.

use super::block::stored_scale;
use super::plain::{self, Choice, CodeRange};
use super::search;
use crate::quant_spec::{Method, TensorQuant};
use crate::scheme::{Granularity, QuantSpec};

/// Number of low bits of an f32 that the index of its bin omits; the index consists of the sign, the exponent and 9
/// bits of the mantissa.
const HIDDEN: u32 = 14;
/// Number of bins of the histogram.
const BINS: usize = 1 << (32 - HIDDEN);
/// Largest difference of a value from the middle of its bin, as a share of the value.
const RESOLUTION: f64 = 1.0 / 1024.0;

/// Statistics of all values added; independent of the order of [`Observation::add`].
#[derive(Debug)]
pub(crate) struct Observation {
    min: f32,
    max: f32,
    count: u64,
    /// Number of values per bin; empty when the extremes are sufficient.
    bins: Vec<u64>,
}

impl Observation {
    /// Creates empty statistics; allocates the histogram only when `quant` needs one.
    pub fn new(quant: &TensorQuant) -> Observation {
        let shared = quant.spec.granularity == Granularity::Tensor;
        let detailed = shared && (quant.percentile.is_some() || quant.method == Method::Search);
        let bins = vec![0; if detailed { BINS } else { 0 }];
        Observation { min: f32::INFINITY, max: f32::NEG_INFINITY, count: 0, bins }
    }

    /// Adds finite values, clipped to `clamp`.
    pub fn add(&mut self, values: &[f32], clamp: Option<f32>) {
        let limit = clamp.unwrap_or(f32::MAX);
        self.count += values.len() as u64;
        for x in values {
            let x = x.clamp(-limit, limit);
            self.min = self.min.min(x);
            self.max = self.max.max(x);
            if let Some(bin) = self.bins.get_mut((x.to_bits() >> HIDDEN) as usize) {
                *bin += 1;
            }
        }
    }

    /// Chooses scale and zero point for the whole matrix.
    ///
    /// # Panics
    /// No values were added.
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

    /// Searches for the best scale on the histogram, as [`search::Fit`] does on values. Moving values to the middle
    /// of their bins changes the root of the summed squared error by at most `slack` (the distance to the nearest
    /// code changes no faster than the value), so a scale that is better by more than twice `slack` is better for the
    /// exact values, too.
    fn search(&self, spec: &QuantSpec, plain: Choice) -> Choice {
        let stored =
            |choice: Choice| stored_scale(spec.scale_dtype, choice.scale).map(|scale| Choice { scale, ..choice });
        // The caller reports a plain scale that does not fit as an error.
        let Ok(plain) = stored(plain) else { return plain };
        let points: Vec<(f32, u64)> = self.points().collect();
        let energy: f64 = points.iter().map(|(x, n)| *n as f64 * f64::from(*x).powi(2)).sum();
        let slack = energy.sqrt() * RESOLUTION;
        let (plain_error, _) = error_and_best_scale(&points, spec, plain);
        let mut best = (plain_error, plain);
        for candidate in candidates(spec, plain) {
            let mut next = stored(candidate).ok();
            for _ in 0..4 {
                let Some(choice) = next else { break };
                let (error, scale) = error_and_best_scale(&points, spec, choice);
                if error < best.0 {
                    best = (error, choice);
                }
                next = scale.and_then(|scale| stored(Choice { scale, ..choice }).ok());
            }
        }
        if best.0.sqrt() + 2.0 * slack < plain_error.sqrt() { best.1 } else { plain }
    }

    /// Returns the p-th percentile of `key(value)`, accurate to the width of a bin (0.2 %).
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

    /// Returns the middle and the count of every occupied bin.
    fn points(&self) -> impl Iterator<Item = (f32, u64)> {
        let occupied = self.bins.iter().enumerate().filter(|(_, n)| **n > 0);
        // The bins of +0 and -0 represent zero itself; others are represented by their middle.
        let middle = |i: usize| match i % (BINS / 2) {
            0 => 0.0,
            _ => f32::from_bits((i as u32) << HIDDEN | 1 << (HIDDEN - 1)),
        };
        occupied.map(move |(i, n)| (middle(i), *n))
    }
}

/// Returns candidates: every zero point to try with scales from 0.08 to 1.05 of the plain scale, which have either sign
/// if the code range is asymmetric. The smallest scales clip all but the innermost values; they are tried because the
/// best scale of a whole matrix clips outliers.
fn candidates(spec: &QuantSpec, plain: Choice) -> impl Iterator<Item = Choice> {
    let signs = if search::lopsided(spec) { &[1.0, -1.0][..] } else { &[1.0] };
    let steps = || std::iter::successors(Some(0.08f32), |factor| Some(factor * 1.1)).take(28);
    search::zeros(spec, plain.zero).flat_map(move |zero| {
        let choice = move |sign: &f32, step: f32| Choice { scale: plain.scale * sign * step, zero };
        signs.iter().flat_map(move |sign| steps().map(move |step| choice(sign, step)))
    })
}

/// Returns the summed squared error of the points under a choice, and the best scale for the same codes unless all
/// codes are zero.
fn error_and_best_scale(points: &[(f32, u64)], spec: &QuantSpec, choice: Choice) -> (f64, Option<f32>) {
    let (inverse, range) = (plain::inverse(choice.scale), CodeRange::of(spec, choice.zero));
    let (mut error, mut xq, mut qq) = (0f64, 0f64, 0f64);
    for (x, n) in points {
        let q = plain::nearest(*x, inverse, range);
        let (n, e) = (*n as f64, f64::from(x - q * choice.scale));
        error += n * e * e;
        xq += n * f64::from(x * q);
        qq += n * f64::from(q * q);
    }
    (error, (qq > 0.0).then_some((xq / qq) as f32))
}
