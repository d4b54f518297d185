//! Quantizes to trellises (see [`crate::scheme::Trellis`]): sixteen rows at once, one per lane.
//!
//! All scales of a tile are chosen first. The scale of a group is that of some multiples of its root mean square with
//! the least error. Then follow the streams, one after the other ([`search`]); with the correlations of the inputs,
//! each compensates the errors of those before, and sweeps improve the result, as in [`super::gptq`].

mod search;

use super::gptq::{Correlations, Elimination, Products, Spread};
use super::input_stats::InputStats;
use super::lanes::{self, Lanes, inverses, times};
use super::plain::LANES;
use crate::quant_spec::{Method, TensorQuant};
use crate::scheme::{BLOCK, STEPS, TILE_ROWS, TileLayout};
use crate::simd::Level;
use search::{Chosen, Search, Streams, Wanted};
use std::ops::Range;

/// Multiples of the scale that follows from the root mean square of a group. In groups with outliers, larger scales
/// are better.
const MULTIPLES: [f32; 9] = [0.80, 0.86, 0.92, 0.98, 1.04, 1.11, 1.18, 1.27, 1.4];

/// Number of sweeps that improve streams and scales after they were chosen one by one.
const SWEEPS: usize = 2;

/// Streams in a block.
const STREAMS: usize = BLOCK / STEPS;

/// Tile to be quantized.
pub(super) struct TrellisTile<'a> {
    /// Instruction set of the loops.
    pub level: Level,
    /// Scheme, method and parameters.
    pub quant: &'a TensorQuant,
    /// Layout of the tile.
    pub layout: &'a TileLayout,
    /// Whole rows, at most [`TILE_ROWS`], of finite numbers.
    pub values: &'a [f32],
    /// Statistics of the inputs, if the method uses them.
    pub inputs: Option<&'a InputStats>,
}

impl TrellisTile<'_> {
    /// Fills the tile; missing rows are filled with zeros.
    pub fn encode(&self, tile: &mut [u8]) {
        let weights = self.weights();
        let correlations = self.inputs.and_then(InputStats::correlations);
        let costs = self.costs(correlations.map(Correlations::streams));
        let trellis = self.layout.spec.trellis().expect("the scheme is a trellis");
        let mut search = Search::new(self.level, trellis);
        let mut scales = self.scales(&mut search, &weights, &costs);
        let steps = lanes::steps_of_rows(scales.iter());
        for scale in &mut scales {
            *scale = lanes::whole_steps(scale, &steps);
        }
        let streams = vec![[0; LANES]; weights.len() / STEPS];
        let mut coded = Coded { tile: self, search, weights: &weights, streams, scales };
        match correlations {
            Some(correlations) => coded.compensate(correlations, &steps),
            None => coded.choose(&costs),
        }
        coded.put(&steps, tile);
    }

    /// Returns the weights `[column][row]`, clamped and padded with zeros to whole blocks.
    fn weights(&self) -> Vec<Lanes> {
        let mut weights = vec![[0f32; LANES]; self.layout.blocks * BLOCK];
        for (row, values) in self.values.chunks_exact(self.layout.cols).enumerate() {
            for (weights, value) in weights.iter_mut().zip(values) {
                weights[row] = self.quant.clamp.map_or(*value, |limit| value.clamp(-limit, limit));
            }
        }
        weights
    }

    /// Returns the weight of the squared error of each column. Padding costs nothing.
    fn costs(&self, factors: Option<&Elimination>) -> Vec<f32> {
        let width = self.layout.blocks * BLOCK;
        let mut costs = match (factors, self.inputs) {
            (Some(factors), _) => {
                let mut costs = vec![0f32; width];
                factors.order.iter().zip(&factors.costs).for_each(|(column, cost)| costs[*column as usize] = *cost);
                costs
            }
            (None, Some(inputs)) => inputs.importance(0..width).to_vec(),
            (None, None) => vec![1.0; width],
        };
        costs[self.layout.cols..].fill(0.0);
        costs
    }

    /// Returns the scale of each group.
    fn scales(&self, search: &mut Search, weights: &[Lanes], costs: &[f32]) -> Vec<Lanes> {
        let width = self.layout.group_blocks * BLOCK;
        // Sweeps move the scales afterwards, so that a good start is enough.
        let improves = self.inputs.is_some_and(|inputs| inputs.correlations().is_some());
        let mut scales = Vec::with_capacity(self.layout.groups);
        for (group, weights) in weights.chunks(width).enumerate() {
            let real = weights.len().min(self.layout.cols - group * width);
            let usual = spread(&weights[..real]).map(|spread| spread / search.trellis.spread as f32);
            if self.quant.method == Method::Rtn {
                scales.push(usual);
                continue;
            }
            let (mut best, mut least) = (usual, [f32::INFINITY; LANES]);
            for multiple in MULTIPLES {
                let scale = usual.map(|scale| scale * multiple);
                let mut total = [0f32; LANES];
                for (block, costs) in weights.chunks_exact(BLOCK).zip(costs[group * width..].chunks_exact(BLOCK)) {
                    for j in 0..STREAMS {
                        let values = values_of(block, j, &inverses(&scale));
                        let costs = std::array::from_fn(|step| costs[STREAMS * step + j]);
                        let wanted = Wanted { values: &values, targets: &values, costs: &costs, feedback: None };
                        let of_stream =
                            if improves { search.least_costs_of_lines(&wanted) } else { search.least_costs(&wanted) };
                        (0..LANES).for_each(|lane| total[lane] += of_stream[lane]);
                    }
                }
                for lane in 0..LANES {
                    let cost = total[lane] * scale[lane] * scale[lane];
                    if cost < least[lane] {
                        (least[lane], best[lane]) = (cost, scale[lane]);
                    }
                }
            }
            scales.push(best);
        }
        scales
    }
}

/// Returns the root mean square of each row.
fn spread(weights: &[Lanes]) -> Lanes {
    let mut squares = [0f64; LANES];
    for weights in weights {
        (0..LANES).for_each(|lane| squares[lane] += f64::from(weights[lane]) * f64::from(weights[lane]));
    }
    squares.map(|square| (square / weights.len() as f64).sqrt() as f32)
}

/// Returns the values of stream `j` of a block, times a factor for each row.
fn values_of(block: &[Lanes], j: usize, factor: &Lanes) -> [Lanes; STEPS] {
    std::array::from_fn(|step| times(&block[STREAMS * step + j], factor))
}

/// Streams and scales of a tile.
struct Coded<'a> {
    tile: &'a TrellisTile<'a>,
    search: Search,
    /// Weights, `[column][row]`.
    weights: &'a [Lanes],
    /// Streams, four for each block.
    streams: Vec<Streams>,
    /// Scale of each group.
    scales: Vec<Lanes>,
}

impl Coded<'_> {
    /// Chooses all streams, each for itself.
    fn choose(&mut self, costs: &[f32]) {
        for number in 0..self.streams.len() {
            let (block, j) = (number / STREAMS * BLOCK, number % STREAMS);
            let values = values_of(&self.weights[block..block + BLOCK], j, &inverses(self.scale(block)));
            let costs = std::array::from_fn(|step| costs[block + STREAMS * step + j]);
            let wanted = Wanted { values: &values, targets: &values, costs: &costs, feedback: None };
            self.streams[number] = self.search.find(&wanted).streams;
        }
    }

    /// Chooses streams that compensate each other's errors.
    fn compensate(&mut self, correlations: &Correlations, steps: &Lanes) {
        let mut errors = vec![[0f32; LANES]; self.weights.len()];
        self.round(correlations.streams(), &mut errors);
        for _ in 0..SWEEPS {
            for group in 0..self.scales.len() {
                self.rescale(correlations, steps, group, &mut errors);
                for block in self.blocks(group) {
                    self.improve(correlations, block * BLOCK, &mut errors);
                }
            }
        }
    }

    /// Chooses all streams once with error feedback.
    fn round(&mut self, factors: &Elimination, errors: &mut [Lanes]) {
        // Errors in the order of rounding.
        let mut ordered = vec![[0f32; LANES]; self.weights.len()];
        for start in (0..self.weights.len()).step_by(BLOCK) {
            let (before, own) = factors.feedback(start).split_at(start);
            let mut sums = [[0f32; LANES]; BLOCK];
            self.tile.level.run(Products { errors: &ordered[..start], panel: before, sums: &mut sums });
            for first in (0..BLOCK).step_by(STEPS) {
                let column = factors.order[start + first] as usize;
                let (block, j) = (column / BLOCK * BLOCK, column % BLOCK);
                let inverse = inverses(self.scale(block));
                let values = values_of(&self.weights[block..block + BLOCK], j, &inverse);
                let mut targets = values;
                for (target, sum) in targets.iter_mut().zip(&sums[first..]) {
                    (0..LANES).for_each(|lane| target[lane] += sum[lane] * inverse[lane]);
                }
                let costs = std::array::from_fn(|step| factors.costs[start + first + step]);
                let feedback = std::array::from_fn(|j| std::array::from_fn(|k| own[first + j][first + k]));
                let wanted = Wanted { values: &values, targets: &targets, costs: &costs, feedback: Some(&feedback) };
                let Chosen { streams, .. } = self.search.find(&wanted);
                for step in 0..STEPS {
                    let column = block + STREAMS * step + j;
                    let error = self.error(&streams, step, column);
                    (errors[column], ordered[start + first + step]) = (error, error);
                    let row = &own[first + step];
                    self.tile.level.run(Spread { change: &error, row, from: first + STEPS, sums: &mut sums });
                }
                self.streams[block / STEPS + j] = streams;
            }
        }
    }

    /// Improves the streams of a block, one after the other, while all others are fixed.
    fn improve(&mut self, correlations: &Correlations, block: usize, errors: &mut [Lanes]) {
        let panel = correlations.hessian.block(block);
        let own = &panel[block..block + BLOCK];
        let mut gradient = [[0f32; LANES]; BLOCK];
        self.tile.level.run(Products { errors, panel, sums: &mut gradient });
        for j in 0..STREAMS {
            let column = |step: usize| STREAMS * step + j;
            let curvature = std::array::from_fn(|a| std::array::from_fn(|b| own[column(a)][column(b)]));
            let Some(local) = Local::new(&curvature) else { continue };
            // The errors that would be best if values were not restricted.
            let mut free: [Lanes; STEPS] = std::array::from_fn(|step| gradient[column(step)]);
            local.solve(&mut free);
            let inverse = inverses(self.scale(block));
            let mut values = values_of(&self.weights[block..block + BLOCK], j, &inverse);
            for step in 0..STEPS {
                // Without the share of the own errors.
                let error = &errors[block + column(step)];
                for lane in 0..LANES {
                    values[step][lane] += (free[step][lane] - error[lane]) * inverse[lane];
                }
            }
            let (costs, feedback) = (&local.costs, Some(&local.feedback));
            let wanted = Wanted { values: &values, targets: &values, costs, feedback };
            let now = &mut self.streams[block / STEPS + j];
            let mut best = Chosen { streams: *now, costs: self.search.costs_of(&wanted, now) };
            best.keep(&self.search.find(&wanted));
            *now = best.streams;
            for step in 0..STEPS {
                let error = self.error(&best.streams, step, block + column(step));
                let mut change = error;
                let old = std::mem::replace(&mut errors[block + column(step)], error);
                (0..LANES).for_each(|lane| change[lane] -= old[lane]);
                self.tile.level.run(Spread { change: &change, row: &own[column(step)], from: 0, sums: &mut gradient });
            }
        }
    }

    /// Moves the scale of a group to its optimum while all streams are fixed.
    fn rescale(&mut self, correlations: &Correlations, steps: &Lanes, group: usize, errors: &mut [Lanes]) {
        let blocks = self.blocks(group);
        let columns = blocks.start * BLOCK..blocks.end * BLOCK;
        let units: Vec<Lanes> = columns.clone().map(|column| self.unit(column)).collect();
        let (mut wanted, mut curvature) = ([0f32; LANES], [0f32; LANES]);
        for block in blocks {
            let panel = correlations.hessian.block(block * BLOCK);
            let (mut gradient, mut slope) = ([[0f32; LANES]; BLOCK], [[0f32; LANES]; BLOCK]);
            self.tile.level.run(Products { errors, panel, sums: &mut gradient });
            self.tile.level.run(Products { errors: &units, panel: &panel[columns.clone()], sums: &mut slope });
            let units = &units[block * BLOCK - columns.start..];
            for k in 0..BLOCK {
                for lane in 0..LANES {
                    wanted[lane] += units[k][lane] * gradient[k][lane];
                    curvature[lane] += units[k][lane] * slope[k][lane];
                }
            }
        }
        let mut scale = self.scales[group];
        (0..LANES).for_each(|lane| scale[lane] += wanted[lane] / curvature[lane]);
        let scale = lanes::whole_steps(&scale, steps);
        for lane in 0..LANES {
            // After rounding to whole steps, a change is made only if it reduces the error.
            let change = scale[lane] - self.scales[group][lane];
            let gains = change * (2.0 * wanted[lane] - change * curvature[lane]) > 0.0;
            if gains && change.is_finite() {
                self.scales[group][lane] = scale[lane];
                for (error, unit) in errors[columns.clone()].iter_mut().zip(&units) {
                    error[lane] -= change * unit[lane];
                }
            }
        }
    }

    /// Returns the blocks of a group.
    fn blocks(&self, group: usize) -> Range<usize> {
        let each = self.tile.layout.group_blocks;
        group * each..((group + 1) * each).min(self.tile.layout.blocks)
    }

    /// Returns the scales of the group of a column.
    fn scale(&self, column: usize) -> &Lanes {
        &self.scales[column / BLOCK / self.tile.layout.group_blocks]
    }

    /// Returns the weights of a column in units of the scale.
    fn unit(&self, column: usize) -> Lanes {
        let streams = &self.streams[column / BLOCK * STREAMS + column % STREAMS];
        self.values(streams, column % BLOCK / STREAMS)
    }

    fn values(&self, streams: &Streams, step: usize) -> Lanes {
        let trellis = self.search.trellis;
        streams.map(|stream| f32::from(trellis.values[usize::from(trellis.index(stream, step))]))
    }

    /// Returns the errors of a column whose weights are those of a step of these streams.
    fn error(&self, streams: &Streams, step: usize, column: usize) -> Lanes {
        let (units, scale, weights) = (self.values(streams, step), self.scale(column), &self.weights[column]);
        std::array::from_fn(|lane| weights[lane] - units[lane] * scale[lane])
    }

    /// Writes the tile.
    fn put(&self, steps: &Lanes, tile: &mut [u8]) {
        let layout = self.tile.layout;
        let (head, codes) = tile.split_at_mut(layout.codes_offset);
        let (scales, supers) = head.split_at_mut(layout.supers_offset);
        supers.as_chunks_mut().0.iter_mut().zip(steps).for_each(|(number, step)| *number = step.to_le_bytes());
        for (scale, out) in self.scales.iter().zip(scales.chunks_exact_mut(TILE_ROWS)) {
            lanes::put_steps(scale, steps, out);
        }
        for (streams, block) in
            self.streams.as_chunks::<STREAMS>().0.iter().zip(codes.chunks_exact_mut(layout.block_bytes))
        {
            for (vector, bytes) in block.chunks_exact_mut(STREAMS * TILE_ROWS).enumerate() {
                for (place, byte) in bytes.iter_mut().enumerate() {
                    *byte = (streams[place % STREAMS][place / STREAMS] >> (8 * vector)) as u8;
                }
            }
        }
    }
}

/// Factors U and D of the products of the columns of a stream, `U D U^T` with a unit upper triangular U.
struct Local {
    feedback: [[f32; STEPS]; STEPS],
    costs: [f32; STEPS],
}

impl Local {
    /// Factors the products; returns `None` if they are not positive definite.
    fn new(products: &[[f32; STEPS]; STEPS]) -> Option<Local> {
        let mut rest = products.map(|row| row.map(f64::from));
        let (mut feedback, mut costs) = ([[0f32; STEPS]; STEPS], [0f32; STEPS]);
        for k in (0..STEPS).rev() {
            let cost = rest[k][k];
            if cost.is_nan() || cost <= 0.0 {
                return None;
            }
            costs[k] = cost as f32;
            let column: [f64; STEPS] = std::array::from_fn(|j| rest[j][k] / cost);
            for i in 0..k {
                feedback[i][k] = column[i] as f32;
                (0..k).for_each(|j| rest[i][j] -= column[i] * cost * column[j]);
            }
        }
        Some(Local { feedback, costs })
    }

    /// Replaces g by the solution h of `h U D U^T = g`, in each lane.
    fn solve(&self, lanes: &mut [Lanes; STEPS]) {
        // h U D is found first, from the last column on: that of k is g_k less the share of later ones.
        for k in (0..STEPS).rev() {
            for later in k + 1..STEPS {
                let factor = self.feedback[k][later];
                let of_later = lanes[later];
                (0..LANES).for_each(|lane| lanes[k][lane] -= factor * of_later[lane]);
            }
        }
        for k in 0..STEPS {
            (0..LANES).for_each(|lane| lanes[k][lane] /= self.costs[k]);
            for earlier in 0..k {
                let factor = self.feedback[earlier][k];
                let of_earlier = lanes[earlier];
                (0..LANES).for_each(|lane| lanes[k][lane] -= factor * of_earlier[lane]);
            }
        }
    }
}

#[cfg(test)]
mod tests;
