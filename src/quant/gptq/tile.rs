//! Rounds sixteen rows with error compensation: one row per lane.

use super::Correlations;
use crate::quant::block::iq4_nl;
use crate::quant::lanes::{Choices, Lanes, Limits, inverses, stored_scales, times, whole_steps};
use crate::quant::plain::{LANES, ROUND};
use crate::scheme::{BLOCK, QuantSpec, TileLayout};
use crate::simd::{Kernel, Level, black_box};

/// Number of sweeps of coordinate descent. On the trained test model llama-trained with q4_0, the first sweep achieves
/// most of the improvement.
const SWEEPS: usize = 3;

/// Rows of a tile to be rounded.
pub(in crate::quant) struct Tile<'a> {
    /// Instruction set of the loops.
    pub level: Level,
    /// Layout of the tile, which includes the scheme.
    pub layout: &'a TileLayout,
    /// Products of the input channels.
    pub correlations: &'a Correlations,
    /// Weights, `[column][row]`, padded with zeros to whole blocks.
    pub weights: &'a [Lanes],
    /// Scales, rounded to their storage type, and zero points of each group.
    pub choices: Vec<Choices>,
    /// Numbers of the rows whose multiples scales are; `None` for scales of one level.
    pub steps: Option<Lanes>,
}

/// Codes and scales of a rounded tile.
pub(in crate::quant) struct Coded {
    /// Codes as integers with the zero point subtracted, `[column][row]`.
    pub codes: Vec<Lanes>,
    /// Scales and zero points of each group.
    pub choices: Vec<Choices>,
}

impl Tile<'_> {
    /// Rounds all columns and then improves the codes by coordinate descent.
    pub fn encode(mut self) -> Coded {
        let mut codes = vec![[0f32; LANES]; self.weights.len()];
        let mut errors = vec![[0f32; LANES]; self.weights.len()];
        self.round(&mut codes, &mut errors);
        for _ in 0..SWEEPS {
            self.sweep(&mut codes, &mut errors);
        }
        Coded { codes, choices: self.choices }
    }

    fn group(&self, column: usize) -> usize {
        column / (self.layout.group_blocks * BLOCK)
    }

    /// Rounds all columns once with error feedback, in the order of activity.
    fn round(&self, codes: &mut [Lanes], errors: &mut [Lanes]) {
        let spec = &self.layout.spec;
        let limits: Vec<Limits> = self.choices.iter().map(|choice| Limits::of(spec, &choice.zero)).collect();
        let inverse: Vec<Lanes> = self.choices.iter().map(|choice| inverses(&choice.scale)).collect();
        // Errors in the order of rounding.
        let mut ordered = vec![[0f32; LANES]; self.weights.len()];
        for (block, columns) in self.correlations.columns.order.chunks_exact(BLOCK).enumerate() {
            let start = block * BLOCK;
            let feedback = self.correlations.columns.feedback(start);
            let (before, own) = feedback.split_at(start);
            let mut targets = [[0f32; LANES]; BLOCK];
            self.level.run(Products { errors: &ordered[..start], panel: before, sums: &mut targets });
            for (k, column) in columns.iter().enumerate() {
                let (column, group) = (*column as usize, self.group(*column as usize));
                let weight = &self.weights[column];
                let one = One { weight, target: &targets[k], inverse: &inverse[group], limits: &limits[group] };
                let scale = &self.choices[group].scale;
                let (code, error) = match spec.has_table() {
                    true => self.level.run(RoundOne::<true> { one, scale }),
                    false => self.level.run(RoundOne::<false> { one, scale }),
                };
                (codes[column], errors[column], ordered[start + k]) = (code, error, error);
                self.level.run(Spread { change: &error, row: &own[k], from: k + 1, sums: &mut targets });
            }
        }
    }

    /// Runs one sweep of coordinate descent over all blocks, in column order.
    fn sweep(&mut self, codes: &mut [Lanes], errors: &mut [Lanes]) {
        let single = self.layout.group_blocks == 1;
        for start in (0..self.weights.len()).step_by(BLOCK) {
            let hessian = self.correlations.hessian.block(start);
            let own = &hessian[start..start + BLOCK];
            let mut gradient = [[0f32; LANES]; BLOCK];
            self.level.run(Products { errors, panel: hessian, sums: &mut gradient });
            let group = self.group(start);
            let codes = &mut codes[start..start + BLOCK];
            let errors = &mut errors[start..start + BLOCK];
            if single {
                let choice = &mut self.choices[group];
                self.level.run(Rescale {
                    spec: &self.layout.spec,
                    steps: self.steps.as_ref(),
                    hessian: own,
                    gradient: &mut gradient,
                    codes,
                    errors,
                    choice,
                });
            }
            match self.layout.spec.has_table() {
                true => self.improve_block::<true>(group, own, &mut gradient, codes, errors),
                false => self.improve_block::<false>(group, own, &mut gradient, codes, errors),
            }
        }
    }

    /// Moves the codes of a block to their optima, one after the other.
    fn improve_block<const TABLE: bool>(
        &self,
        group: usize,
        own: &[[f32; BLOCK]],
        gradient: &mut [Lanes; BLOCK],
        codes: &mut [Lanes],
        errors: &mut [Lanes],
    ) {
        let choice = &self.choices[group];
        let limits = Limits::of(&self.layout.spec, &choice.zero);
        let inverse = inverses(&choice.scale);
        for k in 0..BLOCK {
            let step = Improve::<TABLE> {
                curvature: own[k][k],
                gradient: &gradient[k],
                code: &mut codes[k],
                error: &mut errors[k],
                scale: &choice.scale,
                inverse: &inverse,
                limits: &limits,
            };
            let change = self.level.run(step);
            self.level.run(Spread { change: &change, row: &own[k], from: 0, sums: gradient });
        }
    }
}

/// Number of columns summed at once. With more, the compiler interchanges the loops and emits gathers.
const TOGETHER: usize = 4;

/// Kernel that computes `sums[k] = sum_j errors[j] * panel[j][k]`, adding in the order of j. Earlier values of `sums`
/// are replaced.
pub(in crate::quant) struct Products<'a> {
    pub errors: &'a [Lanes],
    pub panel: &'a [[f32; BLOCK]],
    pub sums: &'a mut [Lanes; BLOCK],
}

impl Kernel for Products<'_> {
    #[inline(always)]
    fn run(self) {
        let (errors, panel) = (self.errors, &self.panel[..self.errors.len()]);
        for (i, sums) in self.sums.as_chunks_mut::<TOGETHER>().0.iter_mut().enumerate() {
            let mut totals = [[0f32; LANES]; TOGETHER];
            for j in 0..errors.len() {
                let (error, row) = (&errors[j], &panel[j]);
                for k in 0..TOGETHER {
                    let factor = row[i * TOGETHER + k];
                    for lane in 0..LANES {
                        totals[k][lane] = factor.mul_add(error[lane], totals[k][lane]);
                    }
                }
            }
            *sums = totals;
        }
    }
}

/// Kernel that adds the change of one column, times the factors in `row`, to the sums of the columns from `from` on.
pub(in crate::quant) struct Spread<'a> {
    pub change: &'a Lanes,
    pub row: &'a [f32; BLOCK],
    pub from: usize,
    pub sums: &'a mut [Lanes; BLOCK],
}

impl Kernel for Spread<'_> {
    #[inline(always)]
    fn run(self) {
        let Spread { change, row, from, sums } = self;
        for (k, sums) in sums.iter_mut().enumerate().skip(from) {
            let (mut sum, factor) = ([0f32; LANES], row[k]);
            for lane in 0..LANES {
                sum[lane] = factor.mul_add(change[lane], sums[lane]);
            }
            *sums = black_box(sum);
        }
    }
}

/// Column to be rounded, with the limits of its codes.
struct One<'a> {
    weight: &'a Lanes,
    /// Correction that compensates the errors of the columns rounded before: `sum_{j<k} e_j U_jk` of [`super`].
    target: &'a Lanes,
    inverse: &'a Lanes,
    limits: &'a Limits,
}

/// Returns the nearest codes as integers, or as table values if `TABLE`.
#[inline(always)]
fn nearest<const TABLE: bool>(x: &Lanes, inverse: &Lanes, limits: &Limits) -> Lanes {
    if TABLE {
        return iq4_nl::nearest(&times(x, inverse));
    }
    let mut codes = [0f32; LANES];
    for lane in 0..LANES {
        let code = x[lane] * inverse[lane];
        let code = if code < limits.low[lane] { limits.low[lane] } else { code };
        let code = if code > limits.high[lane] { limits.high[lane] } else { code };
        codes[lane] = (code + ROUND) - ROUND;
    }
    codes
}

/// Kernel that returns the code of a column and the remaining error.
struct RoundOne<'a, const TABLE: bool> {
    one: One<'a>,
    scale: &'a Lanes,
}

impl<const TABLE: bool> Kernel<(Lanes, Lanes)> for RoundOne<'_, TABLE> {
    #[inline(always)]
    fn run(self) -> (Lanes, Lanes) {
        let One { weight, target, inverse, limits } = self.one;
        let (mut wanted, mut error) = ([0f32; LANES], [0f32; LANES]);
        for lane in 0..LANES {
            wanted[lane] = weight[lane] + target[lane];
        }
        let code = black_box(nearest::<TABLE>(&wanted, inverse, limits));
        for lane in 0..LANES {
            error[lane] = weight[lane] - code[lane] * self.scale[lane];
        }
        (code, black_box(error))
    }
}

/// Kernel that moves a code to its optimum while all others are fixed, and returns the change of its error.
struct Improve<'a, const TABLE: bool> {
    curvature: f32,
    gradient: &'a Lanes,
    code: &'a mut Lanes,
    error: &'a mut Lanes,
    scale: &'a Lanes,
    inverse: &'a Lanes,
    limits: &'a Limits,
}

impl<const TABLE: bool> Kernel<Lanes> for Improve<'_, TABLE> {
    #[inline(always)]
    fn run(self) -> Lanes {
        let Improve { curvature, gradient, code: codes, error, scale, inverse, limits } = self;
        let inverse_curvature = 1.0 / curvature;
        let (mut wanted, mut change) = ([0f32; LANES], [0f32; LANES]);
        for lane in 0..LANES {
            wanted[lane] = codes[lane] * scale[lane] + gradient[lane] * inverse_curvature;
        }
        let best = nearest::<TABLE>(&wanted, inverse, limits);
        for lane in 0..LANES {
            change[lane] = (codes[lane] - best[lane]) * scale[lane];
            codes[lane] = best[lane];
            error[lane] += change[lane];
        }
        change
    }
}

/// Kernel that moves the scale of a block to its optimum while all codes are fixed.
struct Rescale<'a> {
    spec: &'a QuantSpec,
    steps: Option<&'a Lanes>,
    hessian: &'a [[f32; BLOCK]],
    gradient: &'a mut [Lanes; BLOCK],
    codes: &'a [Lanes],
    errors: &'a mut [Lanes],
    choice: &'a mut Choices,
}

impl Kernel for Rescale<'_> {
    #[inline(always)]
    fn run(self) {
        let codes = self.codes;
        // Decrease of the gradient per unit of the scale.
        let mut slope = [[0f32; LANES]; BLOCK];
        for k in 0..codes.len() {
            let (code, row) = (&codes[k], &self.hessian[k]);
            for (i, slope) in slope.iter_mut().enumerate() {
                let (mut sum, factor) = ([0f32; LANES], row[i]);
                for lane in 0..LANES {
                    sum[lane] = factor.mul_add(code[lane], slope[lane]);
                }
                *slope = black_box(sum);
            }
        }
        let (mut wanted, mut curvature) = ([0f32; LANES], [0f32; LANES]);
        for k in 0..codes.len() {
            for lane in 0..LANES {
                wanted[lane] = codes[k][lane].mul_add(self.gradient[k][lane], wanted[lane]);
                curvature[lane] = codes[k][lane].mul_add(slope[k][lane], curvature[lane]);
            }
        }
        let mut scale = [0f32; LANES];
        for lane in 0..LANES {
            scale[lane] = self.choice.scale[lane] + wanted[lane] / curvature[lane];
        }
        let scale = match self.steps {
            Some(steps) => whole_steps(&scale, steps),
            None => stored_scales(self.spec.scale_dtype, &scale),
        };
        let mut change = [0f32; LANES];
        for lane in 0..LANES {
            // A curvature of zero results in a step that is NaN or infinite. After rounding to the storage type, a
            // step is taken only if it reduces the error.
            let step = scale[lane] - self.choice.scale[lane];
            let gains = step * (2.0 * wanted[lane] - step * curvature[lane]) > 0.0;
            change[lane] = if gains && step.is_finite() { step } else { 0.0 };
            self.choice.scale[lane] += change[lane];
        }
        for k in 0..codes.len() {
            for lane in 0..LANES {
                self.errors[k][lane] -= change[lane] * codes[k][lane];
                self.gradient[k][lane] -= change[lane] * slope[k][lane];
            }
        }
    }
}
