//! The scale and codes of a group that minimise the squared error, instead of those that merely fit the largest value.
//!
//! For fixed codes q the best scale is d = sum(x q) / sum(q q), and it leaves the error sum(x x) - F with
//! F = sum(x q)^2 / sum(q q). So the search maximises F: it rounds the group under a fan of candidate scales, keeps the
//! best F, then alternates "best scale for these codes" and "nearest codes for this scale" while F rises. The error of
//! the result, with its scale rounded to storage, is compared with the plain one; the plain one wins ties, so a searched
//! group is never worse.
//!
//! Every weight counts the same. Weighing by the square of the weight itself, a usual substitute for importance, helps
//! some models and harms others (docs/DECISIONS.md, 11), so it is not done blindly.

use super::block::stored_scale;
use super::plain::{self, Choice, CodeRange};
use crate::scheme::{BLOCK, QuantSpec, Scheme};

/// The best choice seen so far by F.
#[derive(Debug, Clone, Copy)]
struct Best {
    gain: f64,
    choice: Choice,
}

/// Searches the best choice for a group around its plain choice. `values` are padded with zeros to whole blocks. The
/// scale returned is representable in storage; codes are the nearest ones under it ([`plain::encode`]).
/// `None`: the group is best left to the plain choice, whose error is `plain_error`.
pub(crate) fn fit(values: &[f32], spec: &QuantSpec, plain: Choice, plain_error: f64) -> Option<Choice> {
    let (blocks, rest) = values.as_chunks::<BLOCK>();
    debug_assert!(rest.is_empty());
    let mut best = Best { gain: 0.0, choice: plain };
    for candidate in candidates(spec, plain, blocks.len() == 1) {
        improve(blocks, spec, candidate, &mut best);
    }
    if blocks.len() > 1 {
        let around = best.choice;
        for step in AROUND.steps() {
            improve(blocks, spec, Choice { scale: around.scale * step, ..around }, &mut best);
        }
    }
    // Alternating ends in a fixed point after a few steps; the bound is for the pathological.
    for _ in 0..8 {
        let before = best.gain;
        let next = best.choice;
        improve(blocks, spec, next, &mut best);
        if best.gain <= before {
            break;
        }
    }
    let scale = stored_scale(spec.scale_dtype, best.choice.scale).ok()?;
    let choice = Choice { scale, ..best.choice };
    (error(values, spec, choice) < plain_error).then_some(choice)
}

/// Rounds the group under `candidate` and keeps the optimal scale for the codes if F rose.
fn improve(blocks: &[[f32; BLOCK]], spec: &QuantSpec, candidate: Choice, best: &mut Best) {
    let (xq, qq) = sums(blocks, plain::inverse(candidate.scale), CodeRange::of(spec, candidate.zero));
    if qq > 0.0 && xq * xq > best.gain * qq {
        *best = Best { gain: xq * xq / qq, choice: Choice { scale: (xq / qq) as f32, ..candidate } };
    }
}

/// Scales to try, as multiples of the plain one. Small groups have a ragged F and want a fine fan; in large ones F is
/// smooth and the optimum cuts outliers off, farther from the plain scale.
pub(crate) fn candidates(spec: &QuantSpec, plain: Choice, small: bool) -> impl Iterator<Item = Choice> {
    let steps = match (small, spec.scheme) {
        (true, Scheme::Q4_0) => Fan { from: FINE.from * 8.0 / 7.0, ..FINE },
        (true, _) => FINE,
        (false, _) => COARSE,
    };
    // Only the ranges -8..=7 are lopsided: there the extreme may sit at either end.
    let signs: &[f32] = if spec.symmetric && spec.scheme != Scheme::Int8 { &[1.0, -1.0] } else { &[1.0] };
    let zeros = if spec.symmetric { 0..=0 } else { plain.zero.saturating_sub(1)..=(plain.zero + 1).min(15) };
    zeros.flat_map(move |zero| {
        signs
            .iter()
            .flat_map(move |sign| steps.steps().map(move |step| Choice { scale: plain.scale * sign * step, zero }))
    })
}

/// A geometric fan of factors.
#[derive(Debug, Clone, Copy)]
struct Fan {
    from: f32,
    ratio: f32,
    count: u32,
}

/// From peak/9.7 to peak/5.7 for symmetric codes; the plain q4_0 scale is peak/8, the plain int4 scale peak/7.
const FINE: Fan = Fan { from: 0.72, ratio: 1.02, count: 28 };
/// Down to a scale that keeps only the innermost 8 % of the range.
const COARSE: Fan = Fan { from: 0.08, ratio: 1.1, count: 28 };
/// Between two steps of [`COARSE`].
const AROUND: Fan = Fan { from: 0.955, ratio: 1.02, count: 5 };

impl Fan {
    fn steps(self) -> impl Iterator<Item = f32> {
        (0..self.count).scan(self.from, move |factor, _| {
            let now = *factor;
            *factor *= self.ratio;
            Some(now)
        })
    }
}

/// sum(x q) and sum(q q) with q the codes nearest to x * inverse. Lanes inside a block, f64 across blocks.
fn sums(blocks: &[[f32; BLOCK]], inverse: f32, range: CodeRange) -> (f64, f64) {
    let (mut xq, mut qq) = (0f64, 0f64);
    for block in blocks {
        let (mut block_xq, mut block_qq) = ([0f32; LANES], [0f32; LANES]);
        for x in block.as_chunks::<LANES>().0 {
            for lane in 0..LANES {
                let q = plain::nearest(x[lane], inverse, range);
                block_xq[lane] += x[lane] * q;
                block_qq[lane] += q * q;
            }
        }
        xq += f64::from(fold(block_xq));
        qq += f64::from(fold(block_qq));
    }
    (xq, qq)
}

/// Squared error of the group under a choice with the nearest codes.
pub(crate) fn error(values: &[f32], spec: &QuantSpec, choice: Choice) -> f64 {
    let (inverse, range) = (plain::inverse(choice.scale), CodeRange::of(spec, choice.zero));
    let mut total = 0f64;
    for block in values.as_chunks::<BLOCK>().0 {
        let mut sum = [0f32; LANES];
        for x in block.as_chunks::<LANES>().0 {
            for lane in 0..LANES {
                let e = x[lane] - plain::nearest(x[lane], inverse, range) * choice.scale;
                sum[lane] += e * e;
            }
        }
        total += f64::from(fold(sum));
    }
    total
}

/// Independent sums, one per lane of the vectors that every x86-64 has; wider arrays compile to slower code there.
const LANES: usize = 4;

fn fold(lanes: [f32; LANES]) -> f32 {
    (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
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
            let choice = fit(&values, &QuantSpec::Q4_0, plain, f64::INFINITY).unwrap();
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
                    let (min, max) = plain::extremes(&values, spec.symmetric, None);
                    let mut choice = plain::choose(&spec, min, max);
                    choice.scale = stored_scale(spec.scale_dtype, choice.scale).unwrap();
                    let before = error(&values, &spec, choice);
                    if let Some(better) = fit(&values, &spec, choice, before) {
                        assert!(error(&values, &spec, better) < before);
                    }
                }
            }
        }
    }
}
