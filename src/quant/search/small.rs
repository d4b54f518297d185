//! Searches for the scales of single-block groups, 16 at a time: one group per lane, one candidate after the other.
//!
//! The fan of candidates is centered on the scale that maps the peak, the value of largest magnitude in the group, to
//! the last code, with the sign of the peak if the code range is asymmetric. With the other sign the peak would be
//! clipped by an eighth; trying it reduces the error by only 0.00003 (docs/decisions, 11).

use super::{ROUND, Sums, fan, zeros};
use crate::quant::block::iq4_nl;
use crate::quant::lanes::{Choices, Lanes, Limits, Turned, inverses, stored_scales, times};
use crate::quant::plain::{CodeRange, LANES};
use crate::scheme::{BLOCK, QuantSpec};
use crate::simd::{Kernel, Level, black_box};

/// Candidates from peak/9.1 to peak/6.2 for q4_0. F, the quantity that the search maximizes ([`super`]), is not smooth
/// in small groups; more candidates reduce the error by 0.0001 at most.
const FINE: [f32; 12] = fan(0.88, 1.0361);
/// Candidates around the best one of [`FINE`], less than one of its steps away.
const AROUND: [f32; 4] = fan(0.98, 1.0134);
/// Candidates for table values, tried with either sign of the peak because the range of the table is asymmetric.
const OF_TABLE: [f32; 8] = fan(0.85, 1.05);
/// Number of candidates that share one pass over the weights.
const TOGETHER: usize = 4;

/// Returns, for each group, the better of `plain` and the result of the search around the scales `from`.
///
/// `importance` is the weight of the squared error of each column; without it all have the same weight.
pub(in crate::quant) fn improve(
    level: Level,
    x: Turned<'_>,
    importance: Option<&[f32]>,
    spec: &QuantSpec,
    from: &Lanes,
    plain: &Choices,
) -> Choices {
    let columns = Columns { x, importance: importance.unwrap_or(black_box(&ONES)) };
    let improve_as = match (importance.is_some(), spec.has_table()) {
        (true, false) => improve_as::<true, false>,
        (false, false) => improve_as::<false, false>,
        (true, true) => improve_as::<true, true>,
        (false, true) => improve_as::<false, true>,
    };
    improve_as(level, columns, spec, from, plain)
}

/// Returns, for each group, the choice with the smaller error; the second one of equals.
pub(in crate::quant) fn better(
    level: Level,
    x: Turned<'_>,
    importance: Option<&[f32]>,
    spec: &QuantSpec,
    found: &Choices,
    plain: &Choices,
) -> Choices {
    let (columns, found) = (Columns { x, importance: importance.unwrap_or(black_box(&ONES)) }, *found);
    match (importance.is_some(), spec.has_table()) {
        (true, false) => level.run(Better::<true, false> { columns, spec, found, plain }),
        (false, false) => level.run(Better::<false, false> { columns, spec, found, plain }),
        (true, true) => level.run(Better::<true, true> { columns, spec, found, plain }),
        (false, true) => level.run(Better::<false, true> { columns, spec, found, plain }),
    }
}

const ONES: [f32; BLOCK] = [1.0; BLOCK];

/// Columns of a block and their importance.
#[derive(Clone, Copy)]
struct Columns<'a> {
    x: Turned<'a>,
    importance: &'a [f32],
}

/// Implements [`improve`] for weighted errors (`WEIGHTED`) and for codes that are indices into a table (`TABLE`).
fn improve_as<const WEIGHTED: bool, const TABLE: bool>(
    level: Level,
    columns: Columns<'_>,
    spec: &QuantSpec,
    from: &Lanes,
    plain: &Choices,
) -> Choices {
    let search = Search::<WEIGHTED, TABLE> { columns, spec, inverse: inverses(from), plain_zero: &plain.zero };
    let Best { step, zero, .. } = level.run(search);
    let mut scale = [0f32; LANES];
    for lane in 0..LANES {
        scale[lane] = from[lane] * step[lane];
    }
    let found = Choices { scale: stored_scales(spec.scale_dtype, &scale), zero };
    level.run(Better::<WEIGHTED, TABLE> { columns, spec, found, plain })
}

/// Best scale of each group as a multiple of the starting scale, with its zero point.
struct Best {
    /// F of each group in units of the squared starting scale.
    gain: Lanes,
    step: Lanes,
    zero: Lanes,
}

/// Kernel that tries all candidates and returns the best one of each group.
struct Search<'a, const WEIGHTED: bool, const TABLE: bool> {
    columns: Columns<'a>,
    spec: &'a QuantSpec,
    /// Inverse of the starting scales.
    inverse: Lanes,
    plain_zero: &'a Lanes,
}

impl<const WEIGHTED: bool, const TABLE: bool> Kernel<Best> for Search<'_, WEIGHTED, TABLE> {
    #[inline(always)]
    fn run(self) -> Best {
        let Search { columns, spec, inverse, plain_zero } = self;
        let mut best = Best { gain: [0.0; LANES], step: [1.0; LANES], zero: [0.0; LANES] };
        if TABLE {
            let ends = CodeRange::of(spec, 0);
            for sign in [1.0, ends.high / ends.low] {
                let around = Around { spec, zero: [0.0; LANES], unit: inverse, nearer: [sign; LANES] };
                best.offer::<WEIGHTED, TABLE>(columns, &around, black_box(&OF_TABLE));
            }
        }
        let zero_points = match (TABLE, spec.symmetric) {
            (true, _) => 0,
            (false, true) => 1,
            (false, false) => 3,
        };
        for turn in 0..zero_points {
            let mut zero = [0f32; LANES];
            for lane in 0..LANES {
                let tried = zeros(spec, plain_zero[lane] as u8);
                zero[lane] = f32::from((tried.start() + turn).min(*tried.end()));
            }
            best.offer::<WEIGHTED, TABLE>(
                columns,
                &Around { spec, zero, unit: inverse, nearer: [1.0; LANES] },
                black_box(&FINE),
            );
        }
        let mut nearer = [1f32; LANES];
        for lane in 0..LANES {
            nearer[lane] /= best.step[lane];
        }
        best.offer::<WEIGHTED, TABLE>(
            columns,
            &Around { spec, zero: best.zero, unit: inverse, nearer },
            black_box(&AROUND),
        );
        best
    }
}

/// Parameters that the candidates of a fan share.
struct Around<'a> {
    spec: &'a QuantSpec,
    zero: Lanes,
    /// Inverse of the starting scales. Sums are kept in units of these scales, so that neither tiny nor huge weights
    /// exceed the range of f32 when squared.
    unit: Lanes,
    /// Factor applied to the fan.
    nearer: Lanes,
}

impl Best {
    /// Rounds every group under the candidates of `fan` and keeps those with a higher gain.
    #[inline(always)]
    fn offer<const WEIGHTED: bool, const TABLE: bool>(
        &mut self,
        columns: Columns<'_>,
        around: &Around<'_>,
        fan: &[f32],
    ) {
        let Around { spec, zero, unit, nearer } = around;
        let Limits { mut low, mut high, .. } = Limits::of(spec, zero);
        for lane in 0..LANES {
            (low[lane], high[lane]) = (low[lane] + ROUND, high[lane] + ROUND);
        }
        for candidates in fan.as_chunks::<TOGETHER>().0 {
            let mut inverses = [*nearer; TOGETHER];
            for v in 0..TOGETHER {
                for lane in 0..LANES {
                    inverses[v][lane] *= unit[lane] * candidates[v];
                }
            }
            for Sums { xq, qq } in sums::<WEIGHTED, TABLE>(columns, &inverses, &low, &high) {
                let (mut step, mut gain) = ([0f32; LANES], [0f32; LANES]);
                for lane in 0..LANES {
                    let xq = xq[lane] * unit[lane];
                    step[lane] = xq / qq[lane];
                    gain[lane] = step[lane] * xq;
                }
                let (gain, step, before) = (black_box(gain), black_box(step), self.gain);
                self.gain = larger_of(&gain, &before, &gain, &before);
                self.step = larger_of(&gain, &before, &step, &self.step);
                self.zero = larger_of(&gain, &before, zero, &self.zero);
            }
        }
    }
}

/// Selects per lane `first` if `a > b`, else `second`; also `second` if either is NaN, as a gain is when all codes
/// are zero.
#[inline(always)]
fn larger_of(a: &Lanes, b: &Lanes, first: &Lanes, second: &Lanes) -> Lanes {
    let mut out = [0f32; LANES];
    for lane in 0..LANES {
        out[lane] = if a[lane] > b[lane] { first[lane] } else { second[lane] };
    }
    out
}

/// Computes the sums of [`TOGETHER`] candidates for every group.
#[inline(always)]
fn sums<const WEIGHTED: bool, const TABLE: bool>(
    Columns { x, importance }: Columns<'_>,
    inverses: &[Lanes; TOGETHER],
    low: &Lanes,
    high: &Lanes,
) -> [Sums; TOGETHER] {
    let mut sums = [Sums::ZERO; TOGETHER];
    let importance = &importance[..x.len()];
    for i in 0..x.len() {
        let (x, weight) = (&x[i], importance[i]);
        for v in 0..TOGETHER {
            if TABLE {
                sums[v].add_values::<WEIGHTED>(x, weight, &iq4_nl::nearest(&times(x, &inverses[v])));
            } else {
                sums[v].add::<WEIGHTED>(x, weight, &inverses[v], low, high);
            }
        }
    }
    sums
}

/// Kernel that selects, group by group, the choice with the smaller squared error of the nearest codes.
struct Better<'a, const WEIGHTED: bool, const TABLE: bool> {
    columns: Columns<'a>,
    spec: &'a QuantSpec,
    /// Choices found by the search. A scale is infinite if it does not fit its storage type.
    found: Choices,
    plain: &'a Choices,
}

impl<const WEIGHTED: bool, const TABLE: bool> Kernel<Choices> for Better<'_, WEIGHTED, TABLE> {
    #[inline(always)]
    fn run(self) -> Choices {
        let Better { columns, spec, found, plain } = self;
        let (found_error, plain_error) =
            (errors::<WEIGHTED, TABLE>(columns, spec, &found), errors::<WEIGHTED, TABLE>(columns, spec, plain));
        // An infinite scale results in a NaN error, which never compares as smaller.
        let (found_error, plain_error) = (black_box(found_error), black_box(plain_error));
        let select = |found, plain| larger_of(&plain_error, &found_error, found, plain);
        Choices { scale: select(&found.scale, &plain.scale), zero: select(&found.zero, &plain.zero) }
    }
}

/// Returns for every group the sum of the squared errors if each value is replaced by the nearest one that the choice
/// of the group allows; each square is multiplied by the importance of its column if `WEIGHTED`.
#[inline(always)]
fn errors<const WEIGHTED: bool, const TABLE: bool>(
    Columns { x, importance }: Columns<'_>,
    spec: &QuantSpec,
    choices: &Choices,
) -> Lanes {
    let inverse = inverses(&choices.scale);
    let Limits { low, high, .. } = Limits::of(spec, &choices.zero);
    let mut total = [0f32; LANES];
    let importance = &importance[..x.len()];
    for i in 0..x.len() {
        let (row, weight) = (&x[i], importance[i]);
        if TABLE {
            let nearest = iq4_nl::nearest(&times(row, &inverse));
            for lane in 0..LANES {
                let error = row[lane] - nearest[lane] * choices.scale[lane];
                total[lane] += if WEIGHTED { error * error * weight } else { error * error };
            }
            continue;
        }
        for lane in 0..LANES {
            let code = row[lane] * inverse[lane];
            let code = if code < low[lane] { low[lane] } else { code };
            let code = if code > high[lane] { high[lane] } else { code };
            let error = row[lane] - ((code + ROUND) - ROUND) * choices.scale[lane];
            total[lane] += if WEIGHTED { error * error * weight } else { error * error };
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::lanes;
    use crate::quant::plain::{self, Choice};
    use crate::quant::search::{error, lopsided};
    use crate::rng::Rng;
    use crate::scheme::{Granularity, ScaleType, Scheme};

    const LEVEL: Level = Level::BASELINE;

    /// Computes the true optimum for codes -8..=7 by visiting every threshold at which a code changes, from the
    /// largest scale down.
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

    /// Returns the searched choices of up to 16 blocks, and the plain ones.
    fn choices(spec: &QuantSpec, blocks: &[[f32; BLOCK]]) -> (Choices, Choices) {
        let mut rows = [[0f32; BLOCK]; LANES];
        rows[..blocks.len()].copy_from_slice(blocks);
        let mut x = lanes::Block([[0f32; LANES]; BLOCK]);
        lanes::turn(&rows, &mut x);
        let x = &x.0[..];
        let peaks = LEVEL.run(lanes::Peaks(x)).map(|peak| peak / plain::CodeRange::of(spec, 0).low);
        let (min, max) = LEVEL.run(lanes::Extremes(x));
        let plain = Choices::each(|lane| match plain::rounds_as_ggml(spec) {
            true => Choice { scale: peaks[lane], zero: 0 },
            false => plain::choose(spec, min[lane], max[lane]),
        });
        let from = if lopsided(spec) { peaks } else { plain.scale };
        let plain = plain.stored(spec).unwrap();
        (improve(LEVEL, x, None, spec, &from, &plain), plain)
    }

    fn error_of(block: &[f32], spec: &QuantSpec, choices: &Choices, lane: usize) -> f64 {
        error(LEVEL, block, None, spec, Choice { scale: choices.scale[lane], zero: choices.zero[lane] as u8 })
    }

    #[test]
    fn the_search_comes_within_a_thousandth_of_the_true_optimum() {
        let mut rng = Rng::new(7);
        let (mut found, mut optimum) = (0f64, 0f64);
        for _ in 0..32 {
            let blocks: [[f32; BLOCK]; LANES] =
                std::array::from_fn(|_| std::array::from_fn(|_| (rng.next_normal() * 0.02) as f32));
            let (searched, _) = choices(&QuantSpec::Q4_0, &blocks);
            for (lane, block) in blocks.iter().enumerate() {
                found += error_of(block, &QuantSpec::Q4_0, &searched, lane);
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
        let wider = [Scheme::Int5, Scheme::Int6, Scheme::Int8].map(|scheme| group(scheme, true));
        for spec in [QuantSpec::Q4_0, int4[0], int4[1], wider[0], wider[1], wider[2]] {
            for n in [1, 5, LANES] {
                let mut blocks = vec![[0f32; BLOCK]; n];
                // Heavy tails, an exact grid, and zeros.
                for (i, x) in blocks.as_flattened_mut().iter_mut().enumerate() {
                    *x = match i / BLOCK % 3 {
                        0 => (rng.next_normal().powi(3) * 0.02) as f32,
                        1 => (rng.next_u64() % 15) as f32 - 7.0,
                        _ => 0.0,
                    };
                }
                let (found, plain) = choices(&spec, &blocks);
                for i in 0..n {
                    let of = |which| error_of(&blocks[i], &spec, which, i);
                    assert!(of(&found) <= of(&plain) * (1.0 + 1e-6), "{spec:?} {i}");
                    let (alone, _) = choices(&spec, &blocks[i..=i]);
                    assert_eq!((alone.scale[0], alone.zero[0]), (found.scale[i], found.zero[i]));
                }
            }
        }
    }
}
