//! The search for groups of a single block, 16 at a time: one group per lane, one candidate after the other.

use super::{Fan, ROUND, Sums, fan, lopsided, zeros};
use crate::quant::block::stored_scale;
use crate::quant::plain::{self, Choice, CodeRange, LANES, settle};
use crate::scheme::{BLOCK, QuantSpec, Scheme};
use crate::simd::{Kernel, Level};

/// From peak/9.7 to peak/5.7 for symmetric codes; the plain q4_0 scale is peak/8, the plain int4 scale peak/7. Small
/// groups have a ragged F and want a fine fan.
const FINE: Fan = fan(0.72, 1.037);
const FINE_Q4_0: Fan = fan(0.72 * 8.0 / 7.0, 1.037);
/// Between two steps of [`FINE`].
const AROUND: Fan = fan(0.965, 1.0048);

/// A value per group.
type Lanes = [f32; LANES];

/// Weights with the groups in the lanes: `[position][group]`. The length is [`BLOCK`], but no constant: a loop of that
/// many known turns is unrolled, and its vectors then go to memory and back.
type Turned<'a> = &'a [Lanes];

/// Finds for each group what [`super::Fit`] finds for larger ones, around its plain choice; up to 16 groups.
pub(crate) fn improve(level: Level, spec: &QuantSpec, blocks: &[[f32; BLOCK]], choices: &mut [Choice]) {
    let mut turned = [[0f32; LANES]; BLOCK];
    for (lane, block) in blocks.iter().enumerate() {
        for (row, x) in turned.iter_mut().zip(block) {
            row[lane] = *x;
        }
    }
    let mut plain = [Choice { scale: 0.0, zero: 0 }; LANES];
    plain[..choices.len()].copy_from_slice(choices);
    let best = level.run(Search { x: &settle(turned), spec, plain });
    let mut found = plain;
    for (lane, found) in found.iter_mut().enumerate() {
        if let Ok(scale) = stored_scale(spec.scale_dtype, found.scale * best.step[lane]) {
            *found = Choice { scale, zero: best.zero[lane] as u8 };
        }
    }
    let error = |choices| level.run(SquaredErrors { x: &settle(turned), spec, choices });
    let (before, after) = (error(plain), error(found));
    for (lane, choice) in choices.iter_mut().enumerate() {
        if after[lane] < before[lane] {
            *choice = found[lane];
        }
    }
}

/// The best scale of each group, as a multiple of the plain one, with its zero point.
struct Best {
    gain: Lanes,
    step: Lanes,
    zero: Lanes,
}

struct Search<'a> {
    x: &'a [Lanes; BLOCK],
    spec: &'a QuantSpec,
    plain: [Choice; LANES],
}

impl Kernel for Search<'_> {
    type Output = Best;

    #[inline(always)]
    fn run(self) -> Best {
        let Search { x, spec, plain } = self;
        let mut scaled = *x;
        let inverses = inverses(&plain);
        for row in &mut scaled {
            for lane in 0..LANES {
                row[lane] *= inverses[lane];
            }
        }
        let x: Turned<'_> = settle(&scaled);
        let fine = if spec.scheme == Scheme::Q4_0 { FINE_Q4_0 } else { FINE };
        let mut best = Best { gain: [0.0; LANES], step: [1.0; LANES], zero: [0.0; LANES] };
        for turn in 0..if spec.symmetric { 1 } else { 3 } {
            let mut zero = [0f32; LANES];
            for lane in 0..LANES {
                let tried = zeros(spec, plain[lane].zero);
                zero[lane] = f32::from((tried.start() + turn).min(*tried.end()));
            }
            best.offer(x, spec, zero, [1.0; LANES], settle(&fine));
            if lopsided(spec) {
                best.offer(x, spec, zero, [-1.0; LANES], settle(&fine));
            }
        }
        let mut nearer = [1f32; LANES];
        for (nearer, step) in nearer.iter_mut().zip(&best.step) {
            *nearer /= step;
        }
        best.offer(x, spec, best.zero, nearer, settle(&AROUND));
        best
    }
}

impl Best {
    /// Rounds every group under the candidates of `fan`, times a factor of its own, and keeps what gains.
    #[inline(always)]
    fn offer(&mut self, x: Turned<'_>, spec: &QuantSpec, zero: Lanes, factor: Lanes, fan: &[f32]) {
        let (mut low, mut high) = limits(spec, zero);
        for lane in 0..LANES {
            (low[lane], high[lane]) = (low[lane] + ROUND, high[lane] + ROUND);
        }
        for pair in fan.as_chunks::<2>().0 {
            let mut inverses = [factor; 2];
            for v in 0..2 {
                for inverse in &mut inverses[v] {
                    *inverse *= pair[v];
                }
            }
            for Sums { xq, qq } in sums(x, &inverses, &low, &high) {
                let (mut step, mut gain) = ([0f32; LANES], [0f32; LANES]);
                for lane in 0..LANES {
                    step[lane] = xq[lane] / qq[lane];
                    gain[lane] = step[lane] * xq[lane];
                }
                let (gain, step, before) = (settle(gain), settle(step), self.gain);
                self.gain = larger_of(&gain, &before, &gain, &before);
                self.step = larger_of(&gain, &before, &step, &self.step);
                self.zero = larger_of(&gain, &before, &zero, &self.zero);
            }
        }
    }
}

/// Per lane what belongs to the larger gain; to the second where one is NaN, as when all codes are zero.
#[inline(always)]
fn larger_of(gain: &Lanes, before: &Lanes, first: &Lanes, second: &Lanes) -> Lanes {
    let mut out = [0f32; LANES];
    for lane in 0..LANES {
        out[lane] = if gain[lane] > before[lane] { first[lane] } else { second[lane] };
    }
    out
}

/// The sums of two candidates per group.
#[inline(always)]
fn sums(x: Turned<'_>, inverses: &[Lanes; 2], low: &Lanes, high: &Lanes) -> [Sums; 2] {
    // Two sums in turn: one would wait for itself.
    let (mut even, mut odd) = ([Sums::ZERO; 2], [Sums::ZERO; 2]);
    for [x, y] in x.as_chunks().0 {
        for v in 0..2 {
            even[v].add(x, &inverses[v], low, high);
            odd[v].add(y, &inverses[v], low, high);
        }
    }
    for v in 0..2 {
        for lane in 0..LANES {
            even[v].xq[lane] += odd[v].xq[lane];
            even[v].qq[lane] += odd[v].qq[lane];
        }
    }
    even
}

/// Squared error of every group under its choice with the nearest codes.
struct SquaredErrors<'a> {
    x: &'a [Lanes; BLOCK],
    spec: &'a QuantSpec,
    choices: [Choice; LANES],
}

impl Kernel for SquaredErrors<'_> {
    type Output = Lanes;

    #[inline(always)]
    fn run(self) -> Lanes {
        let x: Turned<'_> = settle(self.x);
        let inverse = inverses(&self.choices);
        let mut zero = [0f32; LANES];
        let mut scale = [0f32; LANES];
        for lane in 0..LANES {
            (scale[lane], zero[lane]) = (self.choices[lane].scale, f32::from(self.choices[lane].zero));
        }
        let (low, high) = limits(self.spec, zero);
        let mut total = [0f32; LANES];
        for row in x {
            for lane in 0..LANES {
                let code = row[lane] * inverse[lane];
                let code = if code < low[lane] { low[lane] } else { code };
                let code = if code > high[lane] { high[lane] } else { code };
                let error = row[lane] - ((code + ROUND) - ROUND) * scale[lane];
                total[lane] += error * error;
            }
        }
        total
    }
}

#[inline(always)]
fn inverses(choices: &[Choice; LANES]) -> Lanes {
    let mut inverses = [0f32; LANES];
    for lane in 0..LANES {
        inverses[lane] = plain::inverse(choices[lane].scale);
    }
    inverses
}

/// Smallest and largest code of every group.
#[inline(always)]
fn limits(spec: &QuantSpec, zero: Lanes) -> (Lanes, Lanes) {
    let (mut low, mut high) = ([0f32; LANES], [0f32; LANES]);
    for lane in 0..LANES {
        let range = CodeRange::of(spec, zero[lane] as u8);
        (low[lane], high[lane]) = (range.low, range.high);
    }
    (low, high)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::block::q4_0;
    use crate::quant::search::error;
    use crate::rng::Rng;
    use crate::scheme::{Granularity, ScaleType};

    const LEVEL: Level = Level::BASELINE;

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

    fn plain_choices(spec: &QuantSpec, blocks: &[[f32; BLOCK]]) -> Vec<Choice> {
        let plain = |block: &[f32; BLOCK]| {
            let (min, max) = LEVEL.run(plain::Extremes(block));
            let mut choice = match spec.scheme {
                Scheme::Q4_0 => Choice { scale: q4_0::scale(q4_0::signed_peak(LEVEL, block)), zero: 0 },
                _ => plain::choose(spec, min, max),
            };
            choice.scale = stored_scale(spec.scale_dtype, choice.scale).unwrap();
            choice
        };
        blocks.iter().map(plain).collect()
    }

    #[test]
    fn the_search_comes_within_a_thousandth_of_the_true_optimum() {
        let mut rng = Rng::new(7);
        let (mut found, mut optimum) = (0f64, 0f64);
        for _ in 0..32 {
            let blocks: [[f32; BLOCK]; LANES] =
                std::array::from_fn(|_| std::array::from_fn(|_| (rng.next_normal() * 0.02) as f32));
            let mut choices = plain_choices(&QuantSpec::Q4_0, &blocks);
            improve(LEVEL, &QuantSpec::Q4_0, &blocks, &mut choices);
            for (block, choice) in blocks.iter().zip(&choices) {
                found += error(LEVEL, block, &QuantSpec::Q4_0, *choice);
                optimum += exhaustive(block);
            }
        }
        assert!(found < optimum * 1.001, "{found} against {optimum}");
    }

    #[test]
    fn a_searched_block_is_never_worse_than_a_plain_one_and_does_not_depend_on_its_neighbours() {
        let mut rng = Rng::new(9);
        let group = |scheme, symmetric| QuantSpec {
            scheme,
            granularity: Granularity::Group(BLOCK as u32),
            symmetric,
            scale_dtype: ScaleType::F16,
        };
        let int4 = [group(Scheme::Int4, true), group(Scheme::Int4, false)];
        for spec in [QuantSpec::Q4_0, int4[0], int4[1], group(Scheme::Int8, true)] {
            for n in [1, 5, LANES] {
                let mut blocks = vec![[0f32; BLOCK]; n];
                // Heavy tails, an exact grid, and nothing.
                for (i, x) in blocks.as_flattened_mut().iter_mut().enumerate() {
                    *x = match i / BLOCK % 3 {
                        0 => (rng.next_normal().powi(3) * 0.02) as f32,
                        1 => (rng.next_u64() % 15) as f32 - 7.0,
                        _ => 0.0,
                    };
                }
                let plain = plain_choices(&spec, &blocks);
                let mut found = plain.clone();
                improve(LEVEL, &spec, &blocks, &mut found);
                for i in 0..n {
                    let of = |choice| error(LEVEL, &blocks[i], &spec, choice);
                    assert!(of(found[i]) <= of(plain[i]) * (1.0 + 1e-6), "{spec:?} {i}");
                    let mut alone = [plain[i]];
                    improve(LEVEL, &spec, &blocks[i..=i], &mut alone);
                    assert_eq!((alone[0].scale, alone[0].zero), (found[i].scale, found[i].zero));
                }
            }
        }
    }
}
