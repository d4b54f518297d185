//! Second half of low-rank products: adds `scale * B h` to the outputs of other products, where `h` is `A x`.
//!
//! B is stored in panels of [`PANEL`] outputs, each `(rank, PANEL)`, so that a panel is read once, in the order of
//! memory, for all rows, which are multiplied a few at a time. Every output is summed over the rank in order, with
//! fused multiply-add, and several products are added one after the other, so its bits depend on neither the
//! instruction set, nor the number of threads, nor the other rows. Factors in [`FactorType::Pairs`] are multiplied by
//! bf16, twice as many numbers per instruction; the rank is then padded to whole pairs.
#![allow(unsafe_code)]

use super::{Base, Cpu, MIN_COST_PER_THREAD, SumType, WeightedSum, pair, rounded};
use crate::dtype::DType;
use crate::runtime::ops::AddScaled;
use crate::simd::Kernel;
use half::{bf16, f16};
use std::cell::RefCell;
use std::ops::Range;

/// Outputs of a panel.
pub const PANEL: usize = 128;

/// Number of rows whose sums are computed before they are added to the outputs.
const ROWS: usize = 16;

/// The factor B of a low-rank matrix.
#[derive(Debug)]
pub struct Panels {
    rows: usize,
    rank: usize,
    /// Steps of a panel: the rank, or the pairs that hold it.
    steps: usize,
    /// `(rows / PANEL, rank, PANEL)`; the last panel is padded with zeros.
    numbers: Numbers,
}

/// Form of the numbers of a factor, and with it the arithmetic of its products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FactorType {
    /// f32, multiplied by f32.
    F32,
    /// f16, multiplied by f32.
    F16,
    /// bf16, multiplied by f32.
    Bf16,
    /// bf16, multiplied by bf16 in pairs, see [`SumType::Bf16`].
    Pairs,
}

/// Numbers of a factor.
#[derive(Debug)]
pub(super) enum Numbers {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    Pairs(Vec<u32>),
}

impl Numbers {
    /// Stores a matrix `(steps, lanes)`, whose numbers `of_step(step)(lane)` returns. Pairs are those of two steps in a
    /// lane; an odd number of steps is padded with zeros.
    pub fn new<F: Fn(usize) -> f32>(
        kind: FactorType,
        steps: usize,
        lanes: usize,
        of_step: impl Fn(usize) -> F,
    ) -> Numbers {
        fn all<T, F: Fn(usize) -> f32>(
            (steps, lanes): (usize, usize),
            of_step: impl Fn(usize) -> F,
            to: impl Fn(f32) -> T,
        ) -> Vec<T> {
            let mut all = Vec::with_capacity(steps * lanes);
            for step in 0..steps {
                let number = of_step(step);
                all.extend((0..lanes).map(|lane| to(number(lane))));
            }
            all
        }
        let size = (steps, lanes);
        match kind {
            FactorType::F32 => Numbers::F32(all(size, of_step, |x| x)),
            FactorType::F16 => Numbers::F16(all(size, of_step, f16::from_f32)),
            FactorType::Bf16 => Numbers::Bf16(all(size, of_step, bf16::from_f32)),
            FactorType::Pairs => {
                let mut words = Vec::with_capacity(steps.div_ceil(2) * lanes);
                for step in (0..steps).step_by(2) {
                    let (even, odd) = (of_step(step), (step + 1 < steps).then(|| of_step(step + 1)));
                    let odd = |lane: usize| odd.as_ref().map_or(0, |odd| rounded(odd(lane)));
                    words.extend((0..lanes).map(|lane| rounded(even(lane)) >> 16 | odd(lane)));
                }
                Numbers::Pairs(words)
            }
        }
    }

    /// Returns the type of the sums.
    pub fn sum_type(&self) -> SumType {
        match self {
            Numbers::F32(_) | Numbers::Bf16(_) => SumType::F32,
            Numbers::F16(_) => SumType::F16,
            Numbers::Pairs(_) => SumType::Bf16,
        }
    }

    /// Returns the bytes in memory.
    pub fn nbytes(&self) -> usize {
        match self {
            Numbers::F32(numbers) => size_of_val(numbers.as_slice()),
            Numbers::F16(numbers) => size_of_val(numbers.as_slice()),
            Numbers::Bf16(numbers) => size_of_val(numbers.as_slice()),
            Numbers::Pairs(words) => size_of_val(words.as_slice()),
        }
    }

    /// Returns the type of the numbers.
    pub fn dtype(&self) -> DType {
        match self {
            Numbers::F32(_) => DType::F32,
            Numbers::F16(_) => DType::F16,
            Numbers::Bf16(_) | Numbers::Pairs(_) => DType::BF16,
        }
    }

    /// Returns a number of a matrix of `lanes` lanes by its place.
    pub fn number(&self, lanes: usize, step: usize, lane: usize) -> f32 {
        let at = step * lanes + lane;
        match self {
            Numbers::F32(numbers) => numbers[at],
            Numbers::F16(numbers) => numbers[at].to_f32(),
            Numbers::Bf16(numbers) => numbers[at].to_f32(),
            Numbers::Pairs(words) => {
                f32::from_bits(words[step / 2 * lanes + lane] << (16 * (1 - step % 2)) & 0xffff_0000)
            }
        }
    }

    /// Returns some numbers, or words of pairs, in the form that sums read; bf16 numbers that are multiplied by f32 are
    /// widened in `wide`.
    pub fn range<'a>(&'a self, cpu: &Cpu, range: Range<usize>, wide: &'a mut Vec<f32>) -> &'a [u8] {
        match self {
            Numbers::F32(all) => bytemuck::cast_slice(&all[range]),
            Numbers::F16(all) => bytemuck::cast_slice(&all[range]),
            Numbers::Pairs(words) => bytemuck::cast_slice(&words[range]),
            Numbers::Bf16(all) => {
                wide.resize(range.len(), 0.0);
                cpu.level().run(Widen { from: &all[range], to: wide });
                bytemuck::cast_slice(wide)
            }
        }
    }
}

/// Converts rows of `count` f32 numbers each, `stride` numbers apart, to the weights of sums of [`SumType::Bf16`], with
/// `count.div_ceil(2)` words per row.
pub(super) fn pair_words(cpu: &Cpu, values: &[f32], stride: usize, count: usize, words: &mut Vec<u32>) {
    let row = count.div_ceil(2);
    words.resize(values.len().div_ceil(stride) * row, 0);
    cpu.for_rows(bytemuck::cast_slice_mut(words), row, |i, words| {
        cpu.bf16_pairs(&values[i * stride..][..count], bytemuck::cast_slice_mut(words));
    });
}

impl Panels {
    /// Stores B, `(rows, rank)`.
    pub fn new(b: &[f32], rows: usize, rank: usize, kind: FactorType) -> Panels {
        assert_eq!(b.len(), rows * rank, "a matrix of this size");
        // A panel has whole pairs.
        let padded = if kind == FactorType::Pairs { rank.next_multiple_of(2) } else { rank };
        let of_step = |step: usize| {
            let (first, k) = (step / padded * PANEL, step % padded);
            move |lane: usize| if first + lane < rows && k < rank { b[(first + lane) * rank + k] } else { 0.0 }
        };
        let numbers = Numbers::new(kind, rows.div_ceil(PANEL) * padded, PANEL, of_step);
        Panels { rows, rank, steps: padded / pair(numbers.sum_type()), numbers }
    }

    /// Returns the bytes in memory.
    pub fn nbytes(&self) -> usize {
        self.numbers.nbytes()
    }

    /// Returns the number of columns of B.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of rows of B.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns B transposed, `(rank, rows)`, and the type that holds its numbers exactly.
    pub fn transposed(&self) -> (Vec<f32>, DType) {
        let number = |i: usize| self.number(i % self.rows, i / self.rows);
        ((0..self.rank * self.rows).map(number).collect(), self.numbers.dtype())
    }

    fn number(&self, row: usize, k: usize) -> f32 {
        let padded = self.steps * pair(self.numbers.sum_type());
        self.numbers.number(PANEL, row / PANEL * padded + k, row % PANEL)
    }

    /// Adds `scale * B h` to `y`, `(rows)`, one output at a time.
    pub fn add_to(&self, h: &[f32], scale: f32, y: &mut [f32]) {
        for (i, y) in y.iter_mut().enumerate() {
            let number = |k: usize| self.number(i, k);
            *y = scale.mul_add(h.iter().enumerate().fold(0f32, |sum, (k, h)| h.mul_add(number(k), sum)), *y);
        }
    }
}

/// Changes of the outputs of a product: `y = gain * (y + scale * B h) + factor * add` for each part in turn.
pub struct LowRankJob<'a> {
    /// The changes.
    pub parts: Vec<LowRankPart<'a>>,
    /// Number of outputs of a row.
    pub rows: usize,
    /// Outputs: `(n, rows)`.
    pub y: &'a mut [f32],
}

/// One of the changes of a [`LowRankJob`].
#[derive(Debug, Clone, Copy)]
pub struct LowRankPart<'a> {
    /// B; `None` changes the outputs by `gain` and `add` only.
    pub b: Option<&'a Panels>,
    /// Results of A: `(n, rank)`.
    pub h: &'a [f32],
    /// Factor of the low-rank product.
    pub scale: f32,
    /// Factors of the outputs, if any: `(rows)`.
    pub gain: Option<&'a [f32]>,
    /// Numbers added to the outputs, if any, `(rows)`, with their factor.
    pub add: Option<(&'a [f32], f32)>,
}

impl LowRankJob<'_> {
    fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    fn n(&self) -> usize {
        self.y.len() / self.rows
    }

    /// Returns true if threads divide the rows of the outputs, in blocks of [`ROWS`], and not the panels. With many
    /// rows, the outputs are most of the memory that is read, and they are read in order.
    fn by_rows(&self) -> bool {
        self.n() >= 4 * ROWS
    }

    fn units(&self) -> usize {
        if self.by_rows() { self.n().div_ceil(ROWS) } else { self.panels() }
    }

    /// Returns the cost of a unit, about the bytes that it reads plus the arithmetic of each row.
    fn unit_cost(&self) -> usize {
        let n = self.n();
        let cost = |part: &LowRankPart<'_>| part.b.map_or(0, Panels::rank) * (2 + n / 4) + n / 4;
        let panel = PANEL * self.parts.iter().map(cost).sum::<usize>().max(1);
        panel * self.panels() / self.units().max(1)
    }

    fn check(&self) {
        assert!(self.rows > 0 && self.y.len().is_multiple_of(self.rows), "whole rows of outputs");
        let n = self.n();
        for part in &self.parts {
            let fits = part.b.is_none_or(|b| (b.rows, b.rank * n) == (self.rows, part.h.len()));
            let vectors = [part.gain, part.add.map(|(add, _)| add)];
            assert!(fits && vectors.into_iter().flatten().all(|values| values.len() == self.rows), "parts that fit");
        }
    }

    /// Returns the results of A of each part as weights, with the words per row. Pairs are made in `room`.
    fn weights<'a>(&'a self, cpu: &Cpu, room: &'a mut Vec<Vec<u32>>) -> Vec<(&'a [u32], usize)> {
        room.resize_with(self.parts.len(), Vec::new);
        let weights = |(part, room): (&'a LowRankPart<'_>, &'a mut Vec<u32>)| match part.b {
            Some(b) if b.numbers.sum_type() == SumType::Bf16 => {
                pair_words(cpu, part.h, b.rank, b.rank, room);
                (&room[..], b.steps)
            }
            _ => (bytemuck::cast_slice(part.h), part.b.map_or(0, Panels::rank)),
        };
        self.parts.iter().zip(room).map(weights).collect()
    }
}

thread_local! {
    /// Numbers of a panel as f32, and sums of some rows.
    static BUFFERS: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// A job with its weights and its outputs, which threads write in parallel.
struct Shared<'a> {
    job: &'a LowRankJob<'a>,
    y: Base<f32>,
    weights: Vec<(&'a [u32], usize)>,
}

impl Cpu {
    /// Computes all jobs as one parallel region.
    ///
    /// # Panics
    /// The sizes within a job do not agree, or the call comes from inside a region.
    pub fn add_low_rank(&self, jobs: &mut [LowRankJob<'_>]) {
        jobs.iter().for_each(LowRankJob::check);
        let bases: Vec<Base<f32>> = jobs.iter_mut().map(|job| Base(job.y.as_mut_ptr())).collect();
        let mut room: Vec<Vec<Vec<u32>>> = jobs.iter().map(|_| Vec::new()).collect();
        let shared = |((job, y), room)| Shared { job, y, weights: LowRankJob::weights(job, self, room) };
        let shared: Vec<Shared<'_>> = jobs.iter().zip(bases).zip(&mut room).map(shared).collect();
        let costs: Vec<usize> = jobs.iter().map(LowRankJob::unit_cost).collect();
        let total: usize = jobs.iter().zip(&costs).map(|(job, cost)| job.units() * cost).sum();
        let threads = (total / MIN_COST_PER_THREAD).clamp(1, self.threads());
        self.pool.run(threads, &|t| {
            let mut before = 0;
            let border = |t: usize, before: usize, cost: usize, units: usize| {
                (total / threads * t).saturating_sub(before).div_ceil(cost.max(1)).min(units)
            };
            for (shared, cost) in shared.iter().zip(&costs) {
                let (job, units) = (shared.job, shared.job.units());
                let first = border(t, before, *cost, units);
                let until = if t + 1 == threads { units } else { border(t + 1, before, *cost, units) };
                for unit in first..until {
                    if job.by_rows() {
                        let rows = unit * ROWS..job.n().min((unit + 1) * ROWS);
                        (0..job.panels()).for_each(|panel| self.panel(shared, panel, rows.clone()));
                    } else {
                        self.panel(shared, unit, 0..job.n());
                    }
                }
                before += cost * units;
            }
        });
    }

    /// Computes a panel for some rows of a job.
    fn panel(&self, Shared { job, y, weights }: &Shared<'_>, panel: usize, rows: Range<usize>) {
        let first = panel * PANEL;
        let count = PANEL.min(job.rows - first);
        let row = |row: usize| {
            // SAFETY: the columns of the panel lie inside the row, the rows inside the outputs, and each panel of a row
            // is given to one thread, which uses one row at a time.
            unsafe { std::slice::from_raw_parts_mut(y.at(row * job.rows + first), count) }
        };
        for (part, (weights, weight_row)) in job.parts.iter().zip(weights) {
            if let Some(b) = part.b {
                BUFFERS.with_borrow_mut(|(wide, sums)| {
                    let numbers = panel * b.steps * PANEL..(panel + 1) * b.steps * PANEL;
                    let (kind, values) = (b.numbers.sum_type(), b.numbers.range(self, numbers, wide));
                    let size = kind.vector_bytes() / 16;
                    sums.resize(ROWS * PANEL, 0.0);
                    for from in rows.clone().step_by(ROWS) {
                        let sum = WeightedSum {
                            values,
                            step: PANEL * size,
                            steps: b.steps,
                            vector: kind.vector_bytes(),
                            vectors: PANEL / 16,
                            weights: &weights[from * weight_row..],
                            weight_row: *weight_row,
                            rows: ROWS.min(rows.end - from),
                            next: &[],
                        };
                        self.weighted_sum(kind, &sum, sums, PANEL);
                        for (i, sums) in sums.chunks_exact(PANEL).take(sum.rows).enumerate() {
                            self.level().run(AddScaled { x: row(from + i), y: &sums[..count], scale: part.scale });
                        }
                    }
                });
            }
            if let Some(gain) = part.gain {
                let gain = &gain[first..][..count];
                rows.clone().for_each(|i| row(i).iter_mut().zip(gain).for_each(|(y, gain)| *y *= gain));
            }
            if let Some((add, factor)) = part.add {
                let add = &add[first..][..count];
                let one = |i| row(i).iter_mut().zip(add).for_each(|(y, add)| *y = factor.mul_add(*add, *y));
                rows.clone().for_each(one);
            }
        }
    }
}

/// Converts bf16 numbers to f32.
struct Widen<'a> {
    from: &'a [bf16],
    to: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    #[inline(always)]
    fn run(self) {
        for i in 0..self.from.len().min(self.to.len()) {
            self.to[i] = f32::from_bits(u32::from(self.from[i].to_bits()) << 16);
        }
    }
}

/// Returns `x` as a factor of this type holds it.
#[cfg(test)]
pub(super) fn held(kind: FactorType, x: f32) -> f32 {
    match kind {
        FactorType::F32 => x,
        FactorType::F16 => f16::from_f32(x).to_f32(),
        FactorType::Bf16 | FactorType::Pairs => bf16::from_f32(x).to_f32(),
    }
}

/// Computes a sum of products in the order of a factor of this type, one by one.
#[cfg(test)]
pub(super) fn dot(kind: FactorType, numbers: &[f32], x: &[f32]) -> f32 {
    if kind != FactorType::Pairs {
        return numbers.iter().zip(x).fold(0f32, |sum, (a, x)| a.mul_add(*x, sum));
    }
    let x: Vec<f32> = x.iter().map(|x| held(kind, *x)).collect();
    let at = |values: &[f32], i: usize| values.get(i).copied().unwrap_or(0.0);
    (0..x.len()).step_by(2).fold(0f32, |sum, i| {
        let odd = at(numbers, i + 1).mul_add(at(&x, i + 1), sum);
        numbers[i].mul_add(x[i], odd)
    })
}

#[cfg(test)]
pub(super) const ALL_TYPES: [FactorType; 4] = [FactorType::F32, FactorType::F16, FactorType::Bf16, FactorType::Pairs];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    fn numbers(rng: &mut Rng, count: usize) -> Vec<f32> {
        (0..count).map(|_| rng.next_normal() as f32).collect()
    }

    /// Computes a part one output at a time.
    fn expected(
        (b, kind): (&[f32], FactorType),
        part: &LowRankPart<'_>,
        rank: usize,
        y: &[f32],
        rows: usize,
    ) -> Vec<f32> {
        let one = |(i, y): (usize, &f32)| {
            let (row, out) = (i / rows, i % rows);
            let sum = dot(kind, &b[out * rank..][..rank], &part.h[row * rank..][..rank]);
            let y = if rank > 0 { sum.mul_add(part.scale, *y) } else { *y };
            let y = part.gain.map_or(y, |gain| y * gain[out]);
            part.add.map_or(y, |(add, factor)| factor.mul_add(add[out], y))
        };
        y.iter().enumerate().map(one).collect()
    }

    #[test]
    fn any_shape_thread_count_and_instruction_set_give_the_bits_of_the_plain_loop() {
        let mut rng = Rng::new(9);
        for isa in Cpu::isas() {
            for threads in [1, 3] {
                let cpu = Cpu::with_isa(threads, Some(isa)).unwrap();
                for (rows, rank, n) in [(1, 1, 1), (64, 8, 1), (65, 3, 5), (200, 16, 2), (1000, 33, 9), (150, 5, 77)] {
                    for kind in ALL_TYPES {
                        let b: Vec<f32> = numbers(&mut rng, rows * rank).iter().map(|x| held(kind, *x)).collect();
                        let (h, y) = (numbers(&mut rng, n * rank), numbers(&mut rng, n * rows));
                        let (gain, add) = (numbers(&mut rng, rows), numbers(&mut rng, rows));
                        let panels = Panels::new(&b, rows, rank, kind);
                        assert_eq!(crate::adapter::transposed(&panels.transposed().0, rank, rows), b);
                        let plain = LowRankPart { b: Some(&panels), h: &h, scale: 0.7, gain: None, add: None };
                        let scaled = LowRankPart { gain: Some(&gain), add: Some((&add, 0.3)), ..plain };
                        let vectors = LowRankPart { b: None, h: &[], ..scaled };
                        let (mut found, mut other) = (y.clone(), y.clone());
                        cpu.add_low_rank(&mut [
                            LowRankJob { parts: vec![plain, scaled], rows, y: &mut found },
                            LowRankJob { parts: vec![vectors], rows, y: &mut other },
                        ]);
                        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        let once = expected((&b, kind), &plain, rank, &y, rows);
                        let twice = expected((&b, kind), &scaled, rank, &once, rows);
                        assert_eq!(bits(&found), bits(&twice), "{isa} {threads} {rows} {rank} {n} {kind:?}");
                        assert_eq!(bits(&other), bits(&expected((&[], kind), &vectors, 0, &y, rows)));
                    }
                }
            }
        }
    }
}
