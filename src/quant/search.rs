//! The scale and codes of a group that minimise the squared error, instead of those that merely fit the largest value.
//!
//! For fixed codes q the best scale is d = sum(x q) / sum(q q), and it leaves the error sum(x x) - F with
//! F = sum(x q)^2 / sum(q q). So the search maximises F: it rounds the group under a fan of candidate scales, then under
//! a finer fan around the best one, and keeps the best scale for the codes with the highest F. The error of the result,
//! with its scale rounded to storage, is compared with the plain one; the plain one wins ties, so a searched group is
//! never worse.
//!
//! The candidates of a fan are the lanes of a vector: each weight is read once for all of them, and no sum is folded
//! across lanes.
//!
//! Every weight counts the same. Weighing by the square of the weight itself, a usual substitute for importance, helps
//! some models and harms others (docs/DECISIONS.md, 11), so it is not done blindly.

use super::block::stored_scale;
use super::plain::{self, Choice, CodeRange, LANES, ROUND};
use crate::scheme::{BLOCK, QuantSpec, Scheme};
use crate::simd::Kernel;

/// The search for one group around its plain choice.
///
/// The result's scale is representable in storage; codes are the nearest ones under it ([`plain::encode`]). It is the
/// plain choice where nothing is better.
pub(crate) struct Fit<'a> {
    /// The weights, padded with zeros to whole blocks.
    pub values: &'a [f32],
    /// The scheme.
    pub spec: &'a QuantSpec,
    /// The plain choice.
    pub plain: Choice,
}

impl Kernel for Fit<'_> {
    type Output = Choice;

    #[inline(always)]
    fn run(self) -> Choice {
        let (blocks, rest) = self.values.as_chunks::<BLOCK>();
        debug_assert!(rest.is_empty());
        let (fan, around) = match (blocks.len(), self.spec.scheme) {
            (1, Scheme::Q4_0) => (&FINE_Q4_0, &AROUND_FINE),
            (1, _) => (&FINE, &AROUND_FINE),
            _ => (&COARSE, &AROUND_COARSE),
        };
        let mut best = Best { gain: 0.0, step: 1.0, zero: self.plain.zero };
        let inverse = plain::inverse(self.plain.scale);
        for zero in zeros(self.spec, self.plain.zero) {
            let range = CodeRange::of(self.spec, zero);
            if lopsided(self.spec) {
                best.try_all(blocks, inverse, [times(fan, 1.0), times(fan, -1.0)], range, zero);
            } else {
                best.try_all(blocks, inverse, [*fan], range, zero);
            }
        }
        let near = [times(around, 1.0 / best.step)];
        best.try_all(blocks, inverse, near, CodeRange::of(self.spec, best.zero), best.zero);
        let Ok(scale) = stored_scale(self.spec.scale_dtype, self.plain.scale * best.step) else { return self.plain };
        let found = Choice { scale, zero: best.zero };
        let better = error(self.values, self.spec, found) < error(self.values, self.spec, self.plain);
        if better { found } else { self.plain }
    }
}

/// One candidate per lane: what the inverse of the plain scale is multiplied by.
type Fan = [f32; LANES];

/// From peak/9.7 to peak/5.7 for symmetric codes; the plain q4_0 scale is peak/8, the plain int4 scale peak/7. Small
/// groups have a ragged F and want a fine fan.
static FINE: Fan = fan(0.72, 1.037);
static FINE_Q4_0: Fan = fan(0.72 * 8.0 / 7.0, 1.037);
/// Down to a scale that keeps only the innermost 8 % of the range: in large groups F is smooth and the optimum cuts
/// outliers off, farther from the plain scale.
static COARSE: Fan = fan(0.08, 1.19);
/// Between two steps of [`FINE`].
static AROUND_FINE: Fan = fan(0.965, 1.0048);
/// Between two steps of [`COARSE`].
static AROUND_COARSE: Fan = fan(0.85, 1.022);

/// Scales from `from` on, each `ratio` times the one before.
const fn fan(from: f32, ratio: f32) -> Fan {
    let mut inverses = [0f32; LANES];
    let (mut i, mut factor) = (0, from);
    while i < LANES {
        inverses[i] = 1.0 / factor;
        factor *= ratio;
        i += 1;
    }
    inverses
}

#[inline(always)]
fn times(fan: &Fan, factor: f32) -> Fan {
    let mut fan = *fan;
    for inverse in &mut fan {
        *inverse *= factor;
    }
    fan
}

/// Only the ranges -8..=7 are lopsided: there the extreme may sit at either end.
#[inline(always)]
pub(crate) fn lopsided(spec: &QuantSpec) -> bool {
    spec.symmetric && spec.scheme != Scheme::Int8
}

/// Zero points worth trying.
#[inline(always)]
pub(crate) fn zeros(spec: &QuantSpec, plain: u8) -> std::ops::RangeInclusive<u8> {
    if spec.symmetric { 0..=0 } else { plain.saturating_sub(1)..=(plain + 1).min(15) }
}

/// The best choice seen so far by F.
#[derive(Debug, Clone, Copy)]
struct Best {
    /// F in units of the squared plain scale: neither tiny nor huge weights leave the range of f32.
    gain: f32,
    /// The scale, as a multiple of the plain one.
    step: f32,
    zero: u8,
}

impl Best {
    /// Rounds the group under every candidate and keeps the optimal scale for the codes with the highest F.
    #[inline(always)]
    fn try_all<const V: usize>(
        &mut self,
        blocks: &[[f32; BLOCK]],
        inverse: f32,
        fans: [Fan; V],
        range: CodeRange,
        zero: u8,
    ) {
        let (mut xq, mut qq) = ([[0f64; LANES]; V], [[0f64; LANES]; V]);
        let (low, high) = (ROUND + range.low, ROUND + range.high);
        for block in blocks {
            // Two sums in turn: one would wait for itself.
            let (mut even, mut odd) = (Sums::<V>::ZERO, Sums::<V>::ZERO);
            for [x, y] in block.as_chunks().0 {
                even.add(x * inverse, &fans, low, high);
                odd.add(y * inverse, &fans, low, high);
            }
            for v in 0..V {
                for lane in 0..LANES {
                    xq[v][lane] += f64::from(even.xq[v][lane] + odd.xq[v][lane]);
                    qq[v][lane] += f64::from(even.qq[v][lane] + odd.qq[v][lane]);
                }
            }
        }
        for v in 0..V {
            let (mut gain, mut step) = ([0f32; LANES], [0f32; LANES]);
            for lane in 0..LANES {
                step[lane] = xq[v][lane] as f32 / qq[v][lane] as f32;
                let g = step[lane] * xq[v][lane] as f32;
                // NaN where all codes are zero.
                gain[lane] = if g > 0.0 { g } else { 0.0 };
            }
            let (gain, step) = better_half::<16, 8>(gain, step);
            let (gain, step) = better_half::<8, 4>(gain, step);
            let (gain, step) = better_half::<4, 2>(gain, step);
            let ([gain], [step]) = better_half::<2, 1>(gain, step);
            if gain > self.gain {
                *self = Best { gain, step, zero };
            }
        }
    }
}

/// sum(x q) and sum(q q) of every candidate.
struct Sums<const V: usize> {
    xq: [[f32; LANES]; V],
    qq: [[f32; LANES]; V],
}

impl<const V: usize> Sums<V> {
    const ZERO: Self = Sums { xq: [[0.0; LANES]; V], qq: [[0.0; LANES]; V] };

    /// Adds a weight, given in units of the plain scale. `low` and `high` are the limits of the codes plus [`ROUND`].
    #[inline(always)]
    fn add(&mut self, x: f32, fans: &[Fan; V], low: f32, high: f32) {
        for (v, fan) in fans.iter().enumerate() {
            for (lane, inverse) in fan.iter().enumerate() {
                // As `plain::nearest`, but fused: a candidate need not round as the final encoding will.
                let t = x.mul_add(*inverse, ROUND);
                let t = if t < low { low } else { t };
                let t = if t > high { high } else { t };
                let q = t - ROUND;
                self.xq[v][lane] = x.mul_add(q, self.xq[v][lane]);
                self.qq[v][lane] = q.mul_add(q, self.qq[v][lane]);
            }
        }
    }
}

/// Of each pair of candidates the one that gains more.
#[inline(always)]
fn better_half<const N: usize, const HALF: usize>(gain: [f32; N], step: [f32; N]) -> ([f32; HALF], [f32; HALF]) {
    let (mut best_gain, mut best_step) = ([0f32; HALF], [0f32; HALF]);
    for i in 0..HALF {
        let second = gain[i + HALF] > gain[i];
        best_gain[i] = if second { gain[i + HALF] } else { gain[i] };
        best_step[i] = if second { step[i + HALF] } else { step[i] };
    }
    (best_gain, best_step)
}

/// Squared error of the group under a choice with the nearest codes.
#[inline(always)]
pub(crate) fn error(values: &[f32], spec: &QuantSpec, choice: Choice) -> f64 {
    let (inverse, range) = (plain::inverse(choice.scale), CodeRange::of(spec, choice.zero));
    let mut total = 0f64;
    for block in values.as_chunks::<BLOCK>().0 {
        let mut squares = [0f32; BLOCK];
        for i in 0..BLOCK {
            let e = block[i] - plain::nearest(block[i], inverse, range) * choice.scale;
            squares[i] = e * e;
        }
        total += f64::from(plain::fold(squares, |a, b| a + b));
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::block::q4_0;
    use crate::rng::Rng;
    use crate::scheme::{Granularity, ScaleType};

    /// The true optimum for codes -8..=7: every threshold at which a code changes, from the largest scale down.
    fn exhaustive(block: &[f32]) -> f64 {
        let mut best = 0f64;
        for sign in [1.0, -1.0] {
            let steps = block.iter().map(|x| f64::from(x * sign)).flat_map(|x| {
                let levels = if x > 0.0 { 7 } else { 8 };
                (1..=levels).map(move |level| ((f64::from(level) - 0.5) / x.abs(), x.abs(), level))
            });
            let mut steps: Vec<(f64, f64, i32)> = steps.filter(|s| s.0.is_finite()).collect();
            steps.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (mut xq, mut qq) = (0f64, 0f64);
            for (_, x, level) in steps {
                xq += x;
                qq += f64::from(2 * level - 1);
                best = best.max(xq * xq / qq);
            }
        }
        block.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() - best
    }

    #[test]
    fn the_search_comes_within_a_thousandth_of_the_true_optimum() {
        let mut rng = Rng::new(7);
        let (mut found, mut optimum) = (0f64, 0f64);
        for _ in 0..500 {
            let values: Vec<f32> = (0..BLOCK).map(|_| (rng.next_normal() * 0.02) as f32).collect();
            let plain = Choice { scale: q4_0::signed_peak(&values) / -8.0, zero: 0 };
            let spec = &QuantSpec::Q4_0;
            let choice = Fit { values: &values, spec, plain }.run();
            found += error(&values, &QuantSpec::Q4_0, choice);
            optimum += exhaustive(&values);
        }
        assert!(found < optimum * 1.001, "{found} against {optimum}");
    }

    #[test]
    fn a_searched_group_is_never_worse_than_a_plain_one() {
        let mut rng = Rng::new(8);
        let int = |scheme, symmetric| QuantSpec {
            scheme,
            granularity: Granularity::Row,
            symmetric,
            scale_dtype: ScaleType::F16,
        };
        for spec in [int(Scheme::Int4, true), int(Scheme::Int4, false), int(Scheme::Int8, true)] {
            for n in [1, 2, 7] {
                // Heavy tails, an exact grid, and nothing.
                let tails = |rng: &mut Rng| (rng.next_normal().powi(3) * 0.02) as f32;
                let grid = |rng: &mut Rng| (rng.next_u64() % 15) as f32 - 7.0;
                for make in [&tails as &dyn Fn(&mut Rng) -> f32, &grid, &|_| 0.0] {
                    let values: Vec<f32> = (0..n * BLOCK).map(|_| make(&mut rng)).collect();
                    let (min, max) = plain::extremes(&values);
                    let mut choice = plain::choose(&spec, min, max);
                    choice.scale = stored_scale(spec.scale_dtype, choice.scale).unwrap();
                    let before = error(&values, &spec, choice);
                    let fit = Fit { values: &values, spec: &spec, plain: choice }.run();
                    assert!(error(&values, &spec, fit) <= before);
                }
            }
        }
    }
}
