//! The scale and codes of a group that minimise the squared error, instead of those that merely fit the largest value.
//!
//! For fixed codes q the best scale is d = sum(x q) / sum(q q), and it leaves the error sum(x x) - F with F = sum(x
//! q)^2 / sum(q q). So the search maximises F: it rounds the group under a fan of candidate scales, then under a finer
//! fan around the best one, and keeps the best scale for the codes with the highest F. The error of the result, with
//! its scale rounded to storage, is compared with the plain one; the plain one wins ties, so a searched group is never
//! worse.
//!
//! The candidates of a fan are the lanes of a vector: each weight is read once for all of them, and no sum is folded
//! across lanes. Groups of a single block would spend most of the time on choosing among the lanes; [`small`] takes 16
//! of them at once instead, one in each lane.
//!
//! Every weight counts the same. Weighing by the square of the weight itself, a usual substitute for importance, helps
//! some models and harms others (docs/decisions, 11), so it is not done blindly.

pub(super) mod small;

use super::block::stored_scale;
use super::plain::{self, Choice, CodeRange, LANES, ROUND};
use crate::scheme::{CodeMap, QuantSpec};
use crate::simd::{Kernel, Level, black_box};

/// The search for one group of several blocks around its plain choice.
///
/// The result's scale is representable in storage; codes are the nearest ones under it ([`plain::encode`]). It is the
/// plain choice where nothing is better.
pub(crate) struct Fit<'a> {
    /// The instruction set for the loops.
    pub level: Level,
    /// The weights, padded with zeros to whole blocks.
    pub values: &'a [f32],
    /// How much the error of each counts; without it all count the same.
    pub importance: Option<&'a [f32]>,
    /// The scheme.
    pub spec: &'a QuantSpec,
    /// The plain choice.
    pub plain: Choice,
}

impl Fit<'_> {
    /// The best choice found.
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

/// One candidate per lane: what the inverse of the plain scale is multiplied by.
type Fan = [f32; LANES];

/// Down to a scale that keeps only the innermost 8 % of the range: in large groups F is smooth and the optimum cuts
/// outliers off, farther from the plain scale.
const COARSE: Fan = fan(0.08, 1.19);
/// Between two steps of [`COARSE`].
const AROUND_COARSE: Fan = fan(0.85, 1.022);

/// Scales from `from` on, each `ratio` times the one before.
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

/// Ranges like -8..=7 are lopsided: there the extreme may sit at either end.
#[inline(always)]
pub(crate) fn lopsided(spec: &QuantSpec) -> bool {
    matches!(spec.code_map(), CodeMap::Biased(_) | CodeMap::Table(_))
}

/// Zero points worth trying.
#[inline(always)]
pub(crate) fn zeros(spec: &QuantSpec, plain: u8) -> std::ops::RangeInclusive<u8> {
    if spec.symmetric { 0..=0 } else { plain.saturating_sub(1)..=(plain + 1).min(15) }
}

/// The best candidate of a fan.
#[derive(Debug, Clone, Copy)]
struct Found {
    /// F in units of the squared plain scale: neither tiny nor huge weights leave the range of f32.
    gain: f32,
    /// The optimal scale for its codes, as a multiple of the plain one.
    step: f32,
}

/// The best choice seen so far.
#[derive(Debug, Clone, Copy)]
struct Best {
    gain: f32,
    step: f32,
    zero: u8,
}

impl Best {
    fn offer<const FANS: usize>(&mut self, found: [Found; FANS], zero: u8) {
        for Found { gain, step } in found {
            if gain > self.gain {
                *self = Best { gain, step, zero };
            }
        }
    }
}

/// Rounds whole blocks under every candidate of each fan, and finds the best of the fan.
struct Pass<'a, const FANS: usize, const WEIGHTED: bool> {
    values: &'a [f32],
    /// Of each value; read only if WEIGHTED.
    importance: &'a [f32],
    /// Of the plain scale.
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
                // NaN where all codes are zero.
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

/// sum(x q) and sum(q q) of the candidates of a fan.
#[derive(Clone, Copy)]
struct Sums {
    xq: [f32; LANES],
    qq: [f32; LANES],
}

impl Sums {
    const ZERO: Sums = Sums { xq: [0.0; LANES], qq: [0.0; LANES] };

    /// Adds weights that count `weight` if WEIGHTED, otherwise all the same; given in units of the plain scale. `low`
    /// and `high` are the limits of the codes plus [`ROUND`].
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
            // As `plain::nearest`, but fused: a candidate need not round as the final encoding will.
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
    /// Adds weights with the codes that they get, in the units of the scale.
    #[inline(always)]
    fn add_values<const WEIGHTED: bool>(&mut self, x: &[f32; LANES], weight: f32, codes: &[f32; LANES]) {
        for lane in 0..LANES {
            let weighed = if WEIGHTED { codes[lane] * weight } else { codes[lane] };
            self.xq[lane] = x[lane].mul_add(weighed, self.xq[lane]);
            self.qq[lane] = codes[lane].mul_add(weighed, self.qq[lane]);
        }
    }
}

/// Most weights summed in f32; longer groups go on in f64.
const F32_SUM: usize = 256;

/// The sums over whole blocks of weights, for every fan. The length must not be a constant: a loop of 32 known turns is
/// unrolled, and its vectors then go to memory and back.
#[inline(always)]
fn sums<const FANS: usize, const WEIGHTED: bool>(
    values: &[f32],
    importance: &[f32],
    inverse: f32,
    fans: [Fan; FANS],
    range: CodeRange,
) -> [Sums; FANS] {
    let (low, high) = ([ROUND + range.low; LANES], [ROUND + range.high; LANES]);
    // Two sums in turn: one would wait for itself.
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

/// Squared error of whole blocks under a choice with the nearest codes.
pub(crate) fn error(level: Level, values: &[f32], importance: Option<&[f32]>, spec: &QuantSpec, choice: Choice) -> f64 {
    let (scale, range) = (choice.scale, CodeRange::of(spec, choice.zero));
    match importance {
        Some(importance) => level.run(SquaredError::<true> { values, importance, scale, range }),
        None => level.run(SquaredError::<false> { values, importance: values, scale, range }),
    }
}

struct SquaredError<'a, const WEIGHTED: bool> {
    values: &'a [f32],
    /// Of each value; read only if WEIGHTED.
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
                // Heavy tails, an exact grid, and nothing.
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
