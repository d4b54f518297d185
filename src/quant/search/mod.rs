//! Searches for the scale and codes of a group that minimize the squared error.
//!
//! For fixed codes q the best scale is d = sum(x q) / sum(q q). It leaves the error sum(x x) - F with F = sum(x q)^2 /
//! sum(q q), so the search maximizes F. It rounds the group under a *fan* of candidate scales (each a constant multiple
//! of the one before), then under a finer fan around the best candidate, and keeps the best scale for the codes with
//! the highest F. The error of the result, with its scale rounded to the storage type, is compared with that of the
//! plain scale. The plain scale wins ties, so a searched group is never worse.
//!
//! The candidates of a fan are the lanes of a vector: each weight is read once for all candidates, and no sum is
//! reduced across lanes. For groups of a single block, most of the time would be spent on selecting the best lane;
//! therefore [`small`] processes 16 of these groups at once, one per lane.
//!
//! All weights have the same importance by default. Weighting by the square of the weight itself, a usual substitute
//! for importance, improves some models and degrades others (docs/decisions, 11), so it is not applied.

pub(super) mod small;

use super::block::stored_scale;
use super::plain::{self, Choice, CodeRange, LANES, ROUND};
use crate::scheme::{CodeMap, QuantSpec};
use crate::simd::{Kernel, Level, black_box};

/// Search for the scale of one group of several blocks, starting from its plain choice.
///
/// The resulting scale is representable in its storage type; codes are the nearest ones under it ([`plain::Encode`]).
/// The result is the plain choice if no candidate is better.
pub(crate) struct Fit<'a> {
    /// Instruction set of the loops.
    pub level: Level,
    /// Weights, padded with zeros to whole blocks.
    pub values: &'a [f32],
    /// Weight of the squared error of each value; without it all have the same weight.
    pub importance: Option<&'a [f32]>,
    /// Scheme and parameters.
    pub spec: &'a QuantSpec,
    /// Plain choice.
    pub plain: Choice,
}

impl Fit<'_> {
    /// Returns the best choice found.
    pub fn best(self) -> Choice {
        let mut best = Best { gain: 0.0, step: 1.0, zero: self.plain.zero };
        for zero in zeros(self.spec, self.plain.zero) {
            if lopsided(self.spec) {
                best.offer(self.pass([times(&COARSE, 1.0), times(&COARSE, -1.0)], zero), zero);
            } else {
                best.offer(self.pass([COARSE], zero), zero);
            }
        }
        best.offer(self.pass([times(&AROUND_COARSE, 1.0 / best.step)], best.zero), best.zero);
        let Ok(scale) = stored_scale(self.spec.scale_dtype, self.plain.scale * best.step) else { return self.plain };
        let found = Choice { scale, zero: best.zero };
        if self.error(found) < self.error(self.plain) { found } else { self.plain }
    }

    /// Returns the best candidate of each fan for the zero point `zero`.
    fn pass<const FANS: usize>(&self, fans: [Fan; FANS], zero: u8) -> [Found; FANS] {
        let (values, inverse) = (self.values, plain::inverse(self.plain.scale));
        let range = CodeRange::of(self.spec, zero);
        match self.importance {
            Some(importance) => self.level.run(Pass::<FANS, true> { values, importance, inverse, fans, range }),
            None => self.level.run(Pass::<FANS, false> { values, importance: values, inverse, fans, range }),
        }
    }

    fn error(&self, choice: Choice) -> f64 {
        error(self.level, self.values, self.importance, self.spec, choice)
    }
}

/// One candidate per lane: the factor for the inverse of the plain scale.
type Fan = [f32; LANES];

/// Candidates from 0.08 to 1.09 of the plain scale. With the smallest, all values beyond the innermost 8 % of the range
/// are clipped. In large groups F is smooth, and the optimum clips outliers, so it can be far from the plain scale.
const COARSE: Fan = fan(0.08, 1.19);
/// Candidates around the best one of [`COARSE`], at most one of its steps away.
const AROUND_COARSE: Fan = fan(0.85, 1.022);

/// Returns the inverses of the scales that start at `from`, each `ratio` times the previous one.
const fn fan<const N: usize>(from: f32, ratio: f32) -> [f32; N] {
    let mut inverses = [0f32; N];
    let (mut i, mut factor) = (0, from);
    while i < N {
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

/// Returns true for asymmetric ranges like -8..=7, where the value of largest magnitude may be mapped to either end.
#[inline(always)]
pub(crate) fn lopsided(spec: &QuantSpec) -> bool {
    matches!(spec.code_map(), CodeMap::Biased(_) | CodeMap::Table(_))
}

/// Returns the zero points to try: the plain one and its neighbors; only 0 for symmetric schemes.
#[inline(always)]
pub(crate) fn zeros(spec: &QuantSpec, plain: u8) -> std::ops::RangeInclusive<u8> {
    if spec.symmetric { 0..=0 } else { plain.saturating_sub(1)..=(plain + 1).min(15) }
}

/// Best candidate of a fan.
#[derive(Debug, Clone, Copy)]
struct Found {
    /// F in units of the squared plain scale, so that neither tiny nor huge weights exceed the range of f32.
    gain: f32,
    /// Optimal scale for its codes, as a multiple of the plain scale.
    step: f32,
}

/// Best choice so far.
#[derive(Debug, Clone, Copy)]
struct Best {
    gain: f32,
    step: f32,
    zero: u8,
}

impl Best {
    /// Keeps the best of these candidates if it is better than the best choice so far.
    fn offer<const FANS: usize>(&mut self, found: [Found; FANS], zero: u8) {
        for Found { gain, step } in found {
            if gain > self.gain {
                *self = Best { gain, step, zero };
            }
        }
    }
}

/// Kernel that rounds whole blocks under every candidate of each fan and returns the best candidate of each.
struct Pass<'a, const FANS: usize, const WEIGHTED: bool> {
    values: &'a [f32],
    /// Importance of each value; read only if `WEIGHTED`.
    importance: &'a [f32],
    /// Inverse of the plain scale.
    inverse: f32,
    fans: [Fan; FANS],
    range: CodeRange,
}

impl<const FANS: usize, const WEIGHTED: bool> Kernel<[Found; FANS]> for Pass<'_, FANS, WEIGHTED> {
    #[inline(always)]
    fn run(self) -> [Found; FANS] {
        let (mut xq, mut qq) = ([[0f64; LANES]; FANS], [[0f64; LANES]; FANS]);
        for (part, importance) in self.values.chunks(F32_SUM).zip(self.importance.chunks(F32_SUM)) {
            let sums = sums::<FANS, WEIGHTED>(part, importance, self.inverse, self.fans, self.range);
            for v in 0..FANS {
                for lane in 0..LANES {
                    xq[v][lane] += f64::from(sums[v].xq[lane]);
                    qq[v][lane] += f64::from(sums[v].qq[lane]);
                }
            }
        }
        let (xq, qq) = black_box((xq, qq));
        let mut found = [Found { gain: 0.0, step: 1.0 }; FANS];
        for v in 0..FANS {
            let (mut gain, mut step) = ([0f32; LANES], [0f32; LANES]);
            for lane in 0..LANES {
                step[lane] = xq[v][lane] as f32 / qq[v][lane] as f32;
                let g = step[lane] * xq[v][lane] as f32;
                // The gain is NaN if all codes are zero.
                gain[lane] = if g > 0.0 { g } else { 0.0 };
            }
            let (gain, step) = black_box((gain, step));
            let (gain, step) = better_half::<16, 8>(gain, step);
            let (gain, step) = better_half::<8, 4>(gain, step);
            let (gain, step) = better_half::<4, 2>(gain, step);
            let ([gain], [step]) = better_half::<2, 1>(gain, step);
            found[v] = Found { gain, step };
        }
        found
    }
}

/// Sums sum(x q) and sum(q q) of the candidates of a fan.
#[derive(Clone, Copy)]
struct Sums {
    xq: [f32; LANES],
    qq: [f32; LANES],
}

impl Sums {
    const ZERO: Sums = Sums { xq: [0.0; LANES], qq: [0.0; LANES] };

    /// Adds weights `x`, given in units of the plain scale, with importance `weight` if `WEIGHTED`. `low` and `high`
    /// are the limits of the codes plus [`ROUND`].
    #[inline(always)]
    fn add<const WEIGHTED: bool>(
        &mut self,
        x: &[f32; LANES],
        weight: f32,
        inverse: &Fan,
        low: &[f32; LANES],
        high: &[f32; LANES],
    ) {
        for lane in 0..LANES {
            // Same rounding as `plain::nearest`, but with a fused multiply-add: a candidate may round differently
            // from the final encoding.
            let t = x[lane].mul_add(inverse[lane], ROUND);
            let t = if t < low[lane] { low[lane] } else { t };
            let t = if t > high[lane] { high[lane] } else { t };
            let q = t - ROUND;
            let weighed = if WEIGHTED { q * weight } else { q };
            self.xq[lane] = x[lane].mul_add(weighed, self.xq[lane]);
            self.qq[lane] = q.mul_add(weighed, self.qq[lane]);
        }
    }
}

impl Sums {
    /// Adds weights `x` with given codes, both in units of the scale.
    #[inline(always)]
    fn add_values<const WEIGHTED: bool>(&mut self, x: &[f32; LANES], weight: f32, codes: &[f32; LANES]) {
        for lane in 0..LANES {
            let weighed = if WEIGHTED { codes[lane] * weight } else { codes[lane] };
            self.xq[lane] = x[lane].mul_add(weighed, self.xq[lane]);
            self.qq[lane] = codes[lane].mul_add(weighed, self.qq[lane]);
        }
    }
}

/// Largest number of weights summed in f32; longer groups continue in f64.
const F32_SUM: usize = 256;

/// Computes the sums over whole blocks of weights for every fan. The length must not be a constant: the compiler
/// would unroll a loop of exactly 32 iterations and spill its vectors to memory.
#[inline(always)]
fn sums<const FANS: usize, const WEIGHTED: bool>(
    values: &[f32],
    importance: &[f32],
    inverse: f32,
    fans: [Fan; FANS],
    range: CodeRange,
) -> [Sums; FANS] {
    let (low, high) = ([ROUND + range.low; LANES], [ROUND + range.high; LANES]);
    // Two alternating sums avoid the latency of a single dependency chain.
    let (mut even, mut odd) = ([Sums::ZERO; FANS], [Sums::ZERO; FANS]);
    for ([x, y], [of_x, of_y]) in values.as_chunks().0.iter().zip(importance.as_chunks().0) {
        let (x, y) = ([x * inverse; LANES], [y * inverse; LANES]);
        for v in 0..FANS {
            even[v].add::<WEIGHTED>(&x, *of_x, &fans[v], &low, &high);
            odd[v].add::<WEIGHTED>(&y, *of_y, &fans[v], &low, &high);
        }
    }
    for v in 0..FANS {
        for lane in 0..LANES {
            even[v].xq[lane] += odd[v].xq[lane];
            even[v].qq[lane] += odd[v].qq[lane];
        }
    }
    even
}

/// Selects the better candidate of each pair.
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

/// Returns the sum of the squared errors of `values`, which are whole blocks, if each is replaced by the nearest value
/// that `choice` allows; each square is multiplied by the `importance` of its value, if that is given.
pub(crate) fn error(level: Level, values: &[f32], importance: Option<&[f32]>, spec: &QuantSpec, choice: Choice) -> f64 {
    let (scale, range) = (choice.scale, CodeRange::of(spec, choice.zero));
    match importance {
        Some(importance) => level.run(SquaredError::<true> { values, importance, scale, range }),
        None => level.run(SquaredError::<false> { values, importance: values, scale, range }),
    }
}

struct SquaredError<'a, const WEIGHTED: bool> {
    values: &'a [f32],
    /// Importance of each value; read only if `WEIGHTED`.
    importance: &'a [f32],
    scale: f32,
    range: CodeRange,
}

impl<const WEIGHTED: bool> Kernel<f64> for SquaredError<'_, WEIGHTED> {
    #[inline(always)]
    fn run(self) -> f64 {
        let inverse = plain::inverse(self.scale);
        let mut total = 0f64;
        for (part, importance) in self.values.chunks(F32_SUM).zip(self.importance.chunks(F32_SUM)) {
            let mut squares = [0f32; LANES];
            for (values, importance) in part.as_chunks::<LANES>().0.iter().zip(importance.as_chunks::<LANES>().0) {
                for lane in 0..LANES {
                    let e = values[lane] - plain::nearest(values[lane], inverse, self.range) * self.scale;
                    squares[lane] += if WEIGHTED { e * e * importance[lane] } else { e * e };
                }
            }
            total += f64::from(plain::fold(squares, |a, b| a + b));
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEVEL: Level = Level::BASELINE;
    use crate::rng::Rng;
    use crate::scheme::{BLOCK, Granularity, ScaleType, Scheme};

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
            for n in [2, 7] {
                // Heavy tails, an exact grid, and zeros.
                let tails = |rng: &mut Rng| (rng.next_normal().powi(3) * 0.02) as f32;
                let grid = |rng: &mut Rng| (rng.next_u64() % 15) as f32 - 7.0;
                for make in [&tails as &dyn Fn(&mut Rng) -> f32, &grid, &|_| 0.0] {
                    let values: Vec<f32> = (0..n * BLOCK).map(|_| make(&mut rng)).collect();
                    let (min, max) = LEVEL.run(plain::Extremes(&values));
                    let mut choice = plain::choose(&spec, min, max);
                    choice.scale = stored_scale(spec.scale_dtype, choice.scale).unwrap();
                    let before = error(LEVEL, &values, None, &spec, choice);
                    let fit =
                        Fit { level: LEVEL, values: &values, importance: None, spec: &spec, plain: choice }.best();
                    assert!(error(LEVEL, &values, None, &spec, fit) <= before);
                }
            }
        }
    }
}
