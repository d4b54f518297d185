//! Second half of low-rank products: adds `scale * B h` to the outputs of other products, where `h` is `A x`.
//!
//! B is stored in panels of [`PANEL`] outputs, each `(rank, PANEL)`, so that a panel is read once, in the order of
//! memory, for all rows, which are multiplied a few at a time. Every output is summed over the rank in order, with
//! fused multiply-add, and several products are added one after the other, so its bits depend on neither the
//! instruction set, nor the number of threads, nor the other rows.
#![allow(unsafe_code)]

use super::{Base, Cpu, MIN_COST_PER_THREAD, SumType, WeightedSum};
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
    /// `(rows / PANEL, rank, PANEL)`; the last panel is padded with zeros.
    numbers: Numbers,
}

/// Numbers of a factor.
#[derive(Debug)]
pub(super) enum Numbers {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Numbers {
    /// Stores `count` numbers, given by their places, as f32, f16 or bf16.
    pub fn new(dtype: DType, count: usize, number: impl Fn(usize) -> f32) -> Numbers {
        match dtype {
            DType::F16 => Numbers::F16((0..count).map(|i| f16::from_f32(number(i))).collect()),
            DType::BF16 => Numbers::Bf16((0..count).map(|i| bf16::from_f32(number(i))).collect()),
            _ => Numbers::F32((0..count).map(number).collect()),
        }
    }

    /// Returns the bytes in memory.
    pub fn nbytes(&self) -> usize {
        match self {
            Numbers::F32(numbers) => size_of_val(numbers.as_slice()),
            Numbers::F16(numbers) => size_of_val(numbers.as_slice()),
            Numbers::Bf16(numbers) => size_of_val(numbers.as_slice()),
        }
    }

    /// Returns some numbers in a form that sums read; bf16 numbers are widened in `wide`.
    pub fn range<'a>(&'a self, cpu: &Cpu, range: Range<usize>, wide: &'a mut Vec<f32>) -> (SumType, &'a [u8]) {
        match self {
            Numbers::F32(all) => (SumType::F32, bytemuck::cast_slice(&all[range])),
            Numbers::F16(all) => (SumType::F16, bytemuck::cast_slice(&all[range])),
            Numbers::Bf16(all) => {
                wide.resize(range.len(), 0.0);
                cpu.level().run(Widen { from: &all[range], to: wide });
                (SumType::F32, bytemuck::cast_slice(wide))
            }
        }
    }
}

impl Panels {
    /// Stores B, `(rows, rank)`, as f32, f16 or bf16.
    pub fn new(b: &[f32], rows: usize, rank: usize, dtype: DType) -> Panels {
        assert_eq!(b.len(), rows * rank, "a matrix of this size");
        let number = |i: usize| {
            let (panel, k, lane) = (i / PANEL / rank, i / PANEL % rank, i % PANEL);
            let row = panel * PANEL + lane;
            if row < rows { b[row * rank + k] } else { 0.0 }
        };
        let count = rows.div_ceil(PANEL) * rank * PANEL;
        Panels { rows, rank, numbers: Numbers::new(dtype, count, number) }
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

    /// Adds `scale * B h` to `y`, `(rows)`, one output at a time.
    pub fn add_to(&self, h: &[f32], scale: f32, y: &mut [f32]) {
        for (i, y) in y.iter_mut().enumerate() {
            let at = |k: usize| (i / PANEL * self.rank + k) * PANEL + i % PANEL;
            let number = |k: usize| match &self.numbers {
                Numbers::F32(numbers) => numbers[at(k)],
                Numbers::F16(numbers) => numbers[at(k)].to_f32(),
                Numbers::Bf16(numbers) => numbers[at(k)].to_f32(),
            };
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

    /// Returns the cost of a panel, about the bytes that it reads plus the arithmetic of each row.
    fn panel_cost(&self) -> usize {
        let n = self.y.len() / self.rows;
        let cost = |part: &LowRankPart<'_>| part.b.map_or(0, Panels::rank) * (2 + n / 4) + n / 4;
        PANEL * self.parts.iter().map(cost).sum::<usize>().max(1)
    }

    fn check(&self) {
        assert!(self.rows > 0 && self.y.len().is_multiple_of(self.rows), "whole rows of outputs");
        let n = self.y.len() / self.rows;
        for part in &self.parts {
            let fits = part.b.is_none_or(|b| (b.rows, b.rank * n) == (self.rows, part.h.len()));
            let vectors = [part.gain, part.add.map(|(add, _)| add)];
            assert!(fits && vectors.into_iter().flatten().all(|values| values.len() == self.rows), "parts that fit");
        }
    }
}

thread_local! {
    /// Numbers of a panel as f32, and sums of some rows.
    static BUFFERS: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

impl Cpu {
    /// Computes all jobs as one parallel region.
    ///
    /// # Panics
    /// The sizes within a job do not agree, or the call comes from inside a region.
    pub fn add_low_rank(&self, jobs: &mut [LowRankJob<'_>]) {
        jobs.iter().for_each(LowRankJob::check);
        let costs: Vec<usize> = jobs.iter().map(LowRankJob::panel_cost).collect();
        let total: usize = jobs.iter().zip(&costs).map(|(job, cost)| job.panels() * cost).sum();
        let threads = (total / MIN_COST_PER_THREAD).clamp(1, self.threads());
        let bases: Vec<Base<f32>> = jobs.iter_mut().map(|job| Base(job.y.as_mut_ptr())).collect();
        let jobs = &*jobs;
        self.pool.run(threads, &|t| {
            let mut before = 0;
            let border = |t: usize, before: usize, cost: usize, panels: usize| {
                (total / threads * t).saturating_sub(before).div_ceil(cost.max(1)).min(panels)
            };
            for ((job, cost), base) in jobs.iter().zip(&costs).zip(&bases) {
                let panels = job.panels();
                let first = border(t, before, *cost, panels);
                let until = if t + 1 == threads { panels } else { border(t + 1, before, *cost, panels) };
                for panel in first..until {
                    self.panel(job, base, panel);
                }
                before += cost * panels;
            }
        });
    }

    /// Computes a panel for all rows of a job.
    fn panel(&self, job: &LowRankJob<'_>, y: &Base<f32>, panel: usize) {
        let first = panel * PANEL;
        let (count, n) = (PANEL.min(job.rows - first), job.y.len() / job.rows);
        let row = |row: usize| {
            // SAFETY: the columns of the panel lie inside the row, the rows inside the outputs, and each panel is given
            // to one thread, which uses one row at a time.
            unsafe { std::slice::from_raw_parts_mut(y.at(row * job.rows + first), count) }
        };
        for part in &job.parts {
            if let Some(b) = part.b {
                BUFFERS.with_borrow_mut(|(wide, sums)| {
                    let numbers = panel * b.rank * PANEL..(panel + 1) * b.rank * PANEL;
                    let (kind, values) = b.numbers.range(self, numbers, wide);
                    let size = kind.vector_bytes() / 16;
                    sums.resize(ROWS * PANEL, 0.0);
                    for from in (0..n).step_by(ROWS) {
                        let rows = ROWS.min(n - from);
                        let sum = WeightedSum {
                            values,
                            step: PANEL * size,
                            steps: b.rank,
                            vector: kind.vector_bytes(),
                            vectors: PANEL / 16,
                            weights: bytemuck::cast_slice(&part.h[from * b.rank..][..rows * b.rank]),
                            weight_row: b.rank,
                            rows,
                            next: &[],
                        };
                        self.weighted_sum(kind, &sum, sums, PANEL);
                        for (i, sums) in sums.chunks_exact(PANEL).take(rows).enumerate() {
                            self.level().run(AddScaled { x: row(from + i), y: &sums[..count], scale: part.scale });
                        }
                    }
                });
            }
            if let Some(gain) = part.gain {
                let gain = &gain[first..][..count];
                (0..n).for_each(|i| row(i).iter_mut().zip(gain).for_each(|(y, gain)| *y *= gain));
            }
            if let Some((add, factor)) = part.add {
                let add = &add[first..][..count];
                (0..n).for_each(|i| row(i).iter_mut().zip(add).for_each(|(y, add)| *y = factor.mul_add(*add, *y)));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    fn numbers(rng: &mut Rng, count: usize) -> Vec<f32> {
        (0..count).map(|_| rng.next_normal() as f32).collect()
    }

    /// Computes a part one output at a time.
    fn expected(b: &[f32], part: &LowRankPart<'_>, rank: usize, y: &[f32], rows: usize) -> Vec<f32> {
        let one = |(i, y): (usize, &f32)| {
            let (row, out) = (i / rows, i % rows);
            let sum = (0..rank).fold(0f32, |sum, k| part.h[row * rank + k].mul_add(b[out * rank + k], sum));
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
                for (rows, rank, n) in [(1, 1, 1), (64, 8, 1), (65, 3, 5), (200, 16, 2), (1000, 33, 9)] {
                    for dtype in [DType::F32, DType::F16, DType::BF16] {
                        let round = |x: &f32| match dtype {
                            DType::F16 => f16::from_f32(*x).to_f32(),
                            DType::BF16 => bf16::from_f32(*x).to_f32(),
                            _ => *x,
                        };
                        let b: Vec<f32> = numbers(&mut rng, rows * rank).iter().map(round).collect();
                        let (h, y) = (numbers(&mut rng, n * rank), numbers(&mut rng, n * rows));
                        let (gain, add) = (numbers(&mut rng, rows), numbers(&mut rng, rows));
                        let panels = Panels::new(&b, rows, rank, dtype);
                        let plain = LowRankPart { b: Some(&panels), h: &h, scale: 0.7, gain: None, add: None };
                        let scaled = LowRankPart { gain: Some(&gain), add: Some((&add, 0.3)), ..plain };
                        let vectors = LowRankPart { b: None, h: &[], ..scaled };
                        let (mut found, mut other) = (y.clone(), y.clone());
                        cpu.add_low_rank(&mut [
                            LowRankJob { parts: vec![plain, scaled], rows, y: &mut found },
                            LowRankJob { parts: vec![vectors], rows, y: &mut other },
                        ]);
                        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        let once = expected(&b, &plain, rank, &y, rows);
                        let twice = expected(&b, &scaled, rank, &once, rows);
                        assert_eq!(bits(&found), bits(&twice), "{isa} {threads} {rows} {rank} {n} {dtype}");
                        assert_eq!(bits(&other), bits(&expected(&[], &vectors, 0, &y, rows)));
                    }
                }
            }
        }
    }
}
