//! First half of low-rank products: `h = A x` for matrices A of few rows.
//!
//! A is stored column by column, `(cols, lanes)`, with its rows in lanes, so that it is read once in the order of
//! memory for up to [`TOGETHER`] inputs, without horizontal sums. A sum over [`CHUNK`] columns is computed in order,
//! with fused multiply-add, and the sums of the chunks are added in order: the bits of a result depend on neither the
//! instruction set, nor the number of threads, nor the other inputs.
#![allow(unsafe_code)]

use super::low_rank::Numbers;
use super::{Acts, Base, Cpu, Form, MIN_COST_PER_THREAD, WeightedSum};
use crate::dtype::DType;
use std::cell::RefCell;
use std::ops::Range;

/// Columns whose products are summed at once.
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
}

impl LowRankInput {
    /// Stores A, `(rank, cols)`, as f32, f16 or bf16.
    pub fn new(a: &[f32], rank: usize, cols: usize, dtype: DType) -> LowRankInput {
        assert_eq!(a.len(), rank * cols, "a matrix of this size");
        let lanes = rank.next_multiple_of(16);
        let number = |i: usize| if i % lanes < rank { a[i % lanes * cols + i / lanes] } else { 0.0 };
        LowRankInput { rank, cols, lanes, numbers: Numbers::new(dtype, cols * lanes, number) }
    }

    /// Returns the bytes in memory.
    pub fn nbytes(&self) -> usize {
        self.numbers.nbytes()
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
    pub fn low_rank_inputs(&self, jobs: &mut [LowRankInputJob<'_>]) {
        for job in &*jobs {
            let has_rows = job.tokens.start <= job.tokens.end && job.tokens.end <= job.x.n();
            assert!(has_rows && job.x.has(Form::F32), "rows that the inputs have as f32");
            assert_eq!((job.a.cols, job.tokens.len() * job.a.rank), (job.x.k(), job.h.len()), "sizes that agree");
        }
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
                    self.unit(job, &bases[*i], *chunk, *block);
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
    fn unit(&self, job: &LowRankInputJob<'_>, sums: &Base<f32>, chunk: usize, block: usize) {
        let LowRankInput { cols, lanes, numbers, .. } = job.a;
        let (lanes, n) = (*lanes, job.tokens.len());
        let (first, from) = (chunk * CHUNK, block * TOGETHER);
        let (steps, rows) = (CHUNK.min(cols - first), TOGETHER.min(n - from));
        WIDE.with_borrow_mut(|wide| {
            let (kind, values) = numbers.range(self, first * lanes..(first + steps) * lanes, wide);
            let size = kind.vector_bytes() / 16;
            let inputs: &[f32] = bytemuck::cast_slice(&job.x.values);
            let start = (job.tokens.start + from) * job.x.stride + first;
            let sum = WeightedSum {
                values,
                step: lanes * size,
                steps,
                vector: kind.vector_bytes(),
                vectors: lanes / 16,
                weights: bytemuck::cast_slice(&inputs[start..][..(rows - 1) * job.x.stride + steps]),
                weight_row: job.x.stride,
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
    use super::*;
    use crate::rng::Rng;
    use half::{bf16, f16};

    #[test]
    fn any_shape_thread_count_and_instruction_set_give_the_bits_of_the_plain_loop() {
        let mut rng = Rng::new(4);
        let mut numbers = |count: usize| (0..count).map(|_| rng.next_normal() as f32).collect::<Vec<f32>>();
        for (rank, cols, n) in [(1, 1, 1), (8, 96, 3), (16, 512, 1), (33, 700, 20), (5, 1100, 37)] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let round = |x: &f32| match dtype {
                    DType::F16 => f16::from_f32(*x).to_f32(),
                    DType::BF16 => bf16::from_f32(*x).to_f32(),
                    _ => *x,
                };
                let a: Vec<f32> = numbers(rank * cols).iter().map(round).collect();
                let rows = numbers(n * cols);
                let mut x = Acts::default();
                x.set(n, cols, &rows);
                let tokens = n / 3..n;
                let one = |i: usize| {
                    let (row, r) = (&rows[(tokens.start + i / rank) * cols..][..cols], i % rank);
                    let sum = |chunk: usize| {
                        let ks = chunk * CHUNK..cols.min((chunk + 1) * CHUNK);
                        ks.fold(0f32, |sum, k| a[r * cols + k].mul_add(row[k], sum))
                    };
                    (0..cols.div_ceil(CHUNK)).fold(0f32, |h, chunk| h + sum(chunk)).to_bits()
                };
                let expected: Vec<u32> = (0..tokens.len() * rank).map(one).collect();
                let factor = LowRankInput::new(&a, rank, cols, dtype);
                for isa in Cpu::isas() {
                    for threads in [1, 3] {
                        let cpu = Cpu::with_isa(threads, Some(isa)).unwrap();
                        let (mut h, mut other) = (vec![7.0; tokens.len() * rank], vec![7.0; rank]);
                        let job = |tokens, h| LowRankInputJob { a: &factor, x: &x, tokens, h };
                        cpu.low_rank_inputs(&mut [job(tokens.clone(), &mut h), job(n - 1..n, &mut other)]);
                        let bits: Vec<u32> = h.iter().map(|x| x.to_bits()).collect();
                        assert_eq!(bits, expected, "{isa} {threads} {rank} {cols} {n} {dtype}");
                        assert_eq!(other, h[h.len() - rank..]);
                    }
                }
            }
        }
    }
}
