//! First half of low-rank products: `h = A x` for matrices A of few rows.
//!
//! A is stored column by column, `(cols, lanes)`, with its rows in lanes, so that it is read once in the order of
//! memory for up to [`TOGETHER`] inputs, without horizontal sums. A sum over [`CHUNK`] columns is computed in order,
//! with fused multiply-add, and the sums of the chunks are added in order: the bits of a result depend on neither the
//! instruction set, nor the number of threads, nor the other inputs.
#![allow(unsafe_code)]

use super::low_rank::{FactorType, Numbers, pair_words};
use super::{Acts, Base, Cpu, Form, MIN_COST_PER_THREAD, SumType, WeightedSum, pair};
use crate::dtype::DType;
use std::cell::RefCell;
use std::ops::Range;

/// Columns whose products are summed at once, an even number.
const CHUNK: usize = 512;
/// Largest number of inputs that a thread multiplies with a chunk before it takes the next one.
const TOGETHER: usize = 16;

/// The factor A of a low-rank matrix.
#[derive(Debug)]
pub struct LowRankInput {
    rank: usize,
    cols: usize,
    /// Rank, padded to whole vectors.
    lanes: usize,
    /// `(cols, lanes)`.
    numbers: Numbers,
}

/// A product of some inputs with A.
pub struct LowRankInputJob<'a> {
    /// A.
    pub a: &'a LowRankInput,
    /// Inputs: `(n, cols)`.
    pub x: &'a Acts,
    /// Rows of `x` that take part.
    pub tokens: Range<usize>,
    /// Results: `(tokens, rank)`.
    pub h: &'a mut [f32],
}

thread_local! {
    /// Numbers of a chunk as f32.
    static WIDE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Inputs as pairs of bf16.
    static PAIRS: RefCell<Vec<Vec<u32>>> = const { RefCell::new(Vec::new()) };
}

impl LowRankInput {
    /// Stores A, `(rank, cols)`.
    pub fn new(a: &[f32], rank: usize, cols: usize, kind: FactorType) -> LowRankInput {
        assert_eq!(a.len(), rank * cols, "a matrix of this size");
        let lanes = rank.next_multiple_of(16);
        let of_step = |col: usize| move |lane: usize| if lane < rank { a[lane * cols + col] } else { 0.0 };
        LowRankInput { rank, cols, lanes, numbers: Numbers::new(kind, cols, lanes, of_step) }
    }

    /// Returns the bytes in memory.
    pub fn nbytes(&self) -> usize {
        self.numbers.nbytes()
    }

    /// Returns A row by row, `(rank, cols)`, and the type that holds its numbers exactly.
    pub fn values(&self) -> (Vec<f32>, DType) {
        let number = |i: usize| self.numbers.number(self.lanes, i % self.cols, i / self.cols);
        ((0..self.rank * self.cols).map(number).collect(), self.numbers.dtype())
    }

    /// Returns the number of rows of A.
    pub fn rank(&self) -> usize {
        self.rank
    }
}

impl LowRankInputJob<'_> {
    fn blocks(&self) -> usize {
        self.tokens.len().div_ceil(TOGETHER)
    }

    fn chunks(&self) -> usize {
        self.a.cols.div_ceil(CHUNK)
    }

    /// Returns the cost of a block and a chunk, about the bytes that it reads plus its arithmetic.
    fn cost(&self) -> usize {
        CHUNK * self.a.lanes * (2 + self.tokens.len().min(TOGETHER) / 4)
    }
}

impl Cpu {
    /// Computes all jobs as one parallel region.
    ///
    /// # Panics
    /// The sizes within a job do not agree, or the call comes from inside a region.
    pub fn low_rank_inputs<'x>(&self, jobs: &mut [LowRankInputJob<'x>]) {
        for job in &*jobs {
            let has_rows = job.tokens.start <= job.tokens.end && job.tokens.end <= job.x.n();
            assert!(has_rows && job.x.has(Form::F32), "rows that the inputs have as f32");
            assert_eq!((job.a.cols, job.tokens.len() * job.a.rank), (job.x.k(), job.h.len()), "sizes that agree");
        }
        PAIRS.with_borrow_mut(|pairs| {
            let numbers = self.make_pairs(jobs, pairs);
            let input = |(x, number): (&'x Acts, &Option<usize>)| match number {
                Some(number) => (&pairs[*number][..], x.k.div_ceil(2)),
                None => (bytemuck::cast_slice(&x.values), x.stride),
            };
            let inputs: Vec<(&[u32], usize)> = jobs.iter().map(|job| job.x).zip(&numbers).map(input).collect();
            self.multiply_inputs(jobs, &inputs);
        });
    }

    /// Converts the inputs of factors in pairs to pairs of bf16, and returns the number of each in `pairs`.
    fn make_pairs<'x>(&self, jobs: &[LowRankInputJob<'x>], pairs: &mut Vec<Vec<u32>>) -> Vec<Option<usize>> {
        let mut made: Vec<&Acts> = Vec::new();
        let mut make = |job: &LowRankInputJob<'x>| {
            if job.a.numbers.sum_type() != SumType::Bf16 {
                return None;
            }
            // Products that share an input share its pairs.
            if let Some(number) = made.iter().position(|x| std::ptr::eq(*x, job.x)) {
                return Some(number);
            }
            let number = made.len();
            pairs.resize_with(pairs.len().max(number + 1), Vec::new);
            let values: &[f32] = bytemuck::cast_slice(&job.x.values);
            pair_words(self, &values[..job.x.n * job.x.stride], job.x.stride, job.x.k, &mut pairs[number]);
            made.push(job.x);
            Some(number)
        };
        jobs.iter().map(&mut make).collect()
    }

    /// Computes all jobs; `inputs` has the weights of each and the words per row.
    fn multiply_inputs(&self, jobs: &mut [LowRankInputJob<'_>], inputs: &[(&[u32], usize)]) {
        // The sums of each chunk of a job: (chunks, tokens, lanes).
        let mut sums: Vec<Vec<f32>> =
            jobs.iter().map(|job| vec![0.0; job.chunks() * job.tokens.len() * job.a.lanes]).collect();
        let bases: Vec<Base<f32>> = sums.iter_mut().map(|sums| Base(sums.as_mut_ptr())).collect();
        // One unit per job, chunk and block.
        let units: Vec<(usize, usize, usize)> = (jobs.iter().enumerate())
            .flat_map(|(i, job)| {
                (0..job.chunks()).flat_map(move |chunk| (0..job.blocks()).map(move |block| (i, chunk, block)))
            })
            .collect();
        let total: usize = units.iter().map(|(i, ..)| jobs[*i].cost()).sum();
        let threads = (total / MIN_COST_PER_THREAD).clamp(1, self.threads());
        let shared = &*jobs;
        self.pool.run(threads, &|t| {
            let mut before = 0;
            for (i, chunk, block) in &units {
                let job = &shared[*i];
                // A unit belongs to the thread in whose share of the cost it begins.
                if before * threads / total.max(1) == t {
                    self.unit(job, inputs[*i], &bases[*i], *chunk, *block);
                }
                before += job.cost();
            }
        });
        for (job, sums) in jobs.iter_mut().zip(&sums) {
            let (lanes, rank, n) = (job.a.lanes, job.a.rank, job.tokens.len());
            job.h.fill(0.0);
            for chunk in sums.chunks_exact((n * lanes).max(1)) {
                for (h, sums) in job.h.chunks_exact_mut(rank).zip(chunk.chunks_exact(lanes)) {
                    h.iter_mut().zip(sums).for_each(|(h, sum)| *h += sum);
                }
            }
        }
    }

    /// Multiplies a block of inputs with a chunk of A.
    fn unit(
        &self,
        job: &LowRankInputJob<'_>,
        (inputs, weight_row): (&[u32], usize),
        sums: &Base<f32>,
        chunk: usize,
        block: usize,
    ) {
        let LowRankInput { cols, lanes, numbers, .. } = job.a;
        let (lanes, n) = (*lanes, job.tokens.len());
        let (first, from) = (chunk * CHUNK, block * TOGETHER);
        let (count, rows) = (CHUNK.min(cols - first), TOGETHER.min(n - from));
        let kind = numbers.sum_type();
        let (before, steps) = (first / pair(kind), count.div_ceil(pair(kind)));
        WIDE.with_borrow_mut(|wide| {
            let values = numbers.range(self, before * lanes..(before + steps) * lanes, wide);
            let size = kind.vector_bytes() / 16;
            let weights = &inputs[(job.tokens.start + from) * weight_row + before..];
            let sum = WeightedSum {
                values,
                step: lanes * size,
                steps,
                vector: kind.vector_bytes(),
                vectors: lanes / 16,
                weights,
                weight_row,
                rows,
                next: &[],
            };
            let place = (chunk * n + from) * lanes;
            // SAFETY: the sums of the block and chunk lie inside those of the job, and each unit is given to one
            // thread.
            let out = unsafe { std::slice::from_raw_parts_mut(sums.at(place), rows * lanes) };
            self.weighted_sum(kind, &sum, out, lanes);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::low_rank::{ALL_TYPES, dot, held};
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn any_shape_thread_count_and_instruction_set_give_the_bits_of_the_plain_loop() {
        let mut rng = Rng::new(4);
        let mut numbers = |count: usize| (0..count).map(|_| rng.next_normal() as f32).collect::<Vec<f32>>();
        for (rank, cols, n) in [(1, 1, 1), (8, 96, 3), (16, 512, 1), (33, 700, 20), (5, 1100, 37)] {
            for kind in ALL_TYPES {
                let a: Vec<f32> = numbers(rank * cols).iter().map(|x| held(kind, *x)).collect();
                let rows = numbers(n * cols);
                let mut x = Acts::default();
                x.set(n, cols, &rows);
                let tokens = n / 3..n;
                let one = |i: usize| {
                    let (row, r) = (&rows[(tokens.start + i / rank) * cols..][..cols], i % rank);
                    let sum = |chunk: usize| {
                        let ks = chunk * CHUNK..cols.min((chunk + 1) * CHUNK);
                        dot(kind, &a[r * cols..][ks.clone()], &row[ks])
                    };
                    (0..cols.div_ceil(CHUNK)).fold(0f32, |h, chunk| h + sum(chunk)).to_bits()
                };
                let expected: Vec<u32> = (0..tokens.len() * rank).map(one).collect();
                let factor = LowRankInput::new(&a, rank, cols, kind);
                assert_eq!(factor.values().0, a);
                for isa in Cpu::isas() {
                    for threads in [1, 3] {
                        let cpu = Cpu::with_isa(threads, Some(isa)).unwrap();
                        let (mut h, mut other) = (vec![7.0; tokens.len() * rank], vec![7.0; rank]);
                        let job = |tokens, h| LowRankInputJob { a: &factor, x: &x, tokens, h };
                        cpu.low_rank_inputs(&mut [job(tokens.clone(), &mut h), job(n - 1..n, &mut other)]);
                        let bits: Vec<u32> = h.iter().map(|x| x.to_bits()).collect();
                        assert_eq!(bits, expected, "{isa} {threads} {rank} {cols} {n} {kind:?}");
                        assert_eq!(other, h[h.len() - rank..]);
                    }
                }
            }
        }
    }
}
