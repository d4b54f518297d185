//! CPU engine: multiplies weight matrices, in the layout of the pack, by activations.
//!
//! [`Cpu::matmul`] runs a list of [`Job`]s as one parallel region. Every output element has the same bits for every
//! instruction set, number of threads and number of columns: [`scalar`] fixes the order of summation, and the fast
//! kernels follow it.

#![allow(unsafe_code)]

mod acts;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod counters;
mod generic;
mod kernels;
mod low_rank;
mod low_rank_input;
mod matrix;
#[cfg(target_arch = "aarch64")]
mod neon;
mod packed;
mod panel;
mod pieces;
pub mod place;
mod pool;
mod prepare;
mod region;
pub mod scalar;
mod sink;
mod tables;
pub mod topology;
mod weighted_sum;
mod weights;

pub use acts::{Acts, GROUP, Q8Group, Q16Group};
pub use low_rank::{FactorType, LowRankJob, LowRankPart, Panels};
pub use low_rank_input::{LowRankInput, LowRankInputJob};
pub use matrix::{Arithmetic, Form, Matrix, MatrixStore};
pub use region::Job;
pub use tables::ISA_VARIABLE;
pub use weighted_sum::{SMALLEST_POWER, SumType, WeightedSum, reference};
pub use weights::{joined, pair, rounded, weights};

use crate::error::Result;
use crate::resources::thread_refused;
use crate::simd::Level;
use crate::windowed::Windowed;
use kernels::KernelTable;
use place::Placement;
use pool::Pool;
use region::{Region, Task};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// CPU engine: a thread pool and the kernels of one instruction set.
#[derive(Debug)]
pub struct Cpu {
    pool: Pool,
    table: &'static KernelTable,
}

/// Least cost of work (about the number of bytes that it reads) that is worth another thread: a core does about this
/// much work in the time in which a sleeping thread wakes.
const MIN_COST_PER_THREAD: usize = 32 << 10;

/// Name of the instruction set that every [`Cpu`] of this process uses instead of the best one.
static FORCED_ISA: OnceLock<String> = OnceLock::new();

/// Makes every [`Cpu`] of this process use the named instruction set. [`Cpu::new`] checks whether this CPU supports
/// it. Only the first call has an effect.
pub fn force_isa(name: String) {
    FORCED_ISA.get_or_init(|| name);
}

/// Returns the names of the instruction sets that this CPU has kernels for, best first.
pub fn instruction_sets() -> Vec<&'static str> {
    KernelTable::all_detected().map(|table| table.name).collect()
}

impl Cpu {
    /// Starts an engine with this many threads (including the caller's, at least one) and the best instruction set of
    /// this CPU, or the one given to [`force_isa`].
    ///
    /// # Errors
    /// This CPU lacks the forced instruction set, or the system cannot start a thread.
    pub fn new(threads: usize) -> Result<Cpu> {
        Cpu::placed(threads, &Placement::default())
    }

    /// Starts an engine like [`Cpu::new`], with its threads placed as `placement` says. The calling thread is the
    /// first of them until the engine is dropped.
    ///
    /// # Errors
    /// Same as [`Cpu::new`].
    pub fn placed(threads: usize, placement: &Placement) -> Result<Cpu> {
        Cpu::start(threads, FORCED_ISA.get().map(String::as_str), placement)
    }

    /// Starts an engine with the named instruction set: one of [`Cpu::isas`], or the best one for `None`.
    ///
    /// # Errors
    /// This CPU lacks the instruction set, or the system cannot start a thread.
    pub fn with_isa(threads: usize, isa: Option<&str>) -> Result<Cpu> {
        Cpu::start(threads, isa, &Placement::default())
    }

    fn start(threads: usize, isa: Option<&str>, placement: &Placement) -> Result<Cpu> {
        let table = isa.map_or_else(|| Ok(KernelTable::best()), KernelTable::named)?;
        let pool = Pool::new(threads.max(1), placement).map_err(thread_refused)?;
        Ok(Cpu { pool, table })
    }

    /// Returns the names of the instruction sets that this CPU can run, best first.
    pub fn isas() -> Vec<&'static str> {
        KernelTable::all_detected().map(|table| table.name).collect()
    }

    /// Returns the number of threads.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Returns the name of the instruction set in use.
    pub fn isa(&self) -> &'static str {
        self.table.name
    }

    /// Returns true when unpacking a packed matrix is faster than reading an unpacked one from memory, see
    /// [`Matrix::windowed`].
    pub fn unpacks(&self) -> bool {
        self.level() == Level::detect() && Windowed::is_fast()
    }

    /// Returns the [`Level`] of the instruction set, for loops that are compiled once per level.
    pub fn level(&self) -> Level {
        self.table.level
    }

    /// Starts (`on`) or stops measuring how long callers wait for other threads.
    pub fn time_waits(&self, on: bool) {
        self.pool.timed.store(on, Ordering::Relaxed);
    }

    /// Returns how long callers have waited for other threads while this was measured.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.pool.waited.load(Ordering::Relaxed))
    }

    /// Runs all products as one parallel region.
    ///
    /// # Panics
    /// The shapes within a job do not agree, the activations lack the form that the matrix needs, or the call comes
    /// from inside a region.
    pub fn matmul(&self, jobs: &mut [Job<'_>], arithmetic: Arithmetic) {
        if self.table.bf16_wants_magnitudes {
            jobs.iter().filter(|job| job.matrix.store.form(arithmetic) == Form::Bf16).for_each(|job| {
                self.measure(job.matrix);
            });
        }
        let tasks: Vec<Task<'_>> = jobs.iter_mut().map(|job| Task::new(job, self.table, arithmetic)).collect();
        let cost: usize = tasks.iter().map(Task::cost).sum();
        let threads = (cost / MIN_COST_PER_THREAD).clamp(1, self.threads());
        let region = Region::new(tasks, threads);
        // SAFETY: a table is returned only if this CPU has its instruction set.
        self.pool.run(threads, &|t| unsafe { region.run(t) });
    }

    /// Computes weighted sums on the calling thread and writes lane `l` of output `r` to `out[r * out_row + l]`; each
    /// vector has 16 lanes.
    ///
    /// # Panics
    /// A step, a weight or an output lies outside its slice.
    pub fn weighted_sum(&self, kind: SumType, sum: &WeightedSum<'_>, out: &mut [f32], out_row: usize) {
        sum.check(kind, out, out_row);
        // SAFETY: a table is returned only if this CPU has its instruction set, and the shapes were just checked.
        unsafe { self.table.weighted_sum(kind)(sum, out, out_row) }
    }

    /// Turns attention scores into probabilities and writes them to `words`, as weights for sums of `kind`. Returns the
    /// score that the probabilities are relative to (see [`reference()`]) and the sum of the probabilities, split into
    /// 16 lanes; or `None`, without writing, if the instruction set has no function of its own for this.
    ///
    /// # Panics
    /// `words` holds less than one word per step of a sum, or the number of scores is not a multiple of 16.
    pub fn probabilities(&self, kind: SumType, scores: &[f32], words: &mut [u32]) -> Option<(f32, [f32; 16])> {
        let (function, words_of) = match kind {
            SumType::Bf16 => (self.table.probabilities, scores.len() / 2),
            SumType::F32 | SumType::F16 => (self.table.wide_probabilities, scores.len()),
        };
        assert!(scores.len().is_multiple_of(16) && words.len() >= words_of, "a word for each step");
        let mut sum = [0f32; 16];
        // SAFETY: a table is returned only if this CPU has its instruction set, and the lengths were just checked.
        function.map(|f| (unsafe { f(scores, words, &mut sum) }, sum))
    }

    /// Widens pairs of 4-bit integers in two's complement to bf16: each byte becomes a word, the low halves first.
    /// Returns false, without writing, if the instruction set has no function of its own for this.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn widen_nibbles(&self, bytes: &[u8], words: &mut [u32]) -> bool {
        assert_eq!(bytes.len(), words.len(), "a word for each byte");
        // SAFETY: a table is returned only if this CPU has its instruction set.
        self.table.nibbles.map(|f| unsafe { f(bytes, words) }).is_some()
    }

    /// Rounds numbers to pairs of bf16, one word for two numbers, as [`weights()`] does.
    ///
    /// # Panics
    /// There are too few words.
    pub fn bf16_pairs(&self, values: &[f32], words: &mut [u32]) {
        assert!(words.len() >= values.len().div_ceil(2), "a word for two numbers");
        match self.table.pairs {
            // SAFETY: a table is returned only if this CPU has its instruction set.
            Some(f) => unsafe { f(values, words) },
            None => self.level().run(weights::Pairs { from: values, to: words }),
        }
    }

    /// Calls `f(i, row)` for each row of `row_len` values of `out`. Uses as many threads as are worth starting when
    /// every value costs about as much as an elementwise operation.
    ///
    /// # Panics
    /// Same as [`Cpu::for_chunks`].
    pub fn for_rows(&self, out: &mut [f32], row_len: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
        let rows = (MIN_COST_PER_THREAD / size_of::<f32>()).div_ceil(row_len);
        self.for_chunks(out, rows * row_len, |i, chunk| {
            for (j, row) in chunk.chunks_mut(row_len).enumerate() {
                f(i * rows + j, row);
            }
        });
    }

    /// Calls `f(i, chunk)` for each chunk of `out` (the last may be shorter), spread over the threads.
    ///
    /// # Panics
    /// `f` panics or starts a region itself, or `chunk` is zero.
    pub fn for_chunks<T: Send>(&self, out: &mut [T], chunk: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        let (len, chunks) = (out.len(), out.len().div_ceil(chunk));
        let threads = chunks.clamp(1, self.threads());
        let base = Base(out.as_mut_ptr());
        self.pool.run(threads, &|t| {
            for i in chunks * t / threads..chunks * (t + 1) / threads {
                let from = i * chunk;
                // SAFETY: the range lies inside `out`, which is exclusively borrowed, and each chunk belongs to one
                // thread.
                let part = unsafe { std::slice::from_raw_parts_mut(base.at(from), chunk.min(len - from)) };
                f(i, part);
            }
        });
    }
}

/// Start of a slice whose disjoint parts are given to several threads.
struct Base<T>(*mut T);

impl<T> Base<T> {
    /// # Safety
    /// `i` lies inside the slice.
    unsafe fn at(&self, i: usize) -> *mut T {
        // SAFETY: the caller guarantees that `i` lies inside the slice.
        unsafe { self.0.add(i) }
    }
}

// SAFETY: only `for_chunks` uses it, and gives every element to one thread; `T: Send` allows that.
unsafe impl<T: Send> Sync for Base<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_slice_once_in_order_of_their_index() {
        for threads in 1..5 {
            let cpu = Cpu::new(threads).unwrap();
            for (len, chunk) in [(0, 3), (1, 3), (3, 3), (10, 3), (100, 7), (5, 100)] {
                let mut out = vec![usize::MAX; len];
                cpu.for_chunks(&mut out, chunk, |i, part| {
                    part.iter_mut().enumerate().for_each(|(j, o)| *o = o.wrapping_add(1 + i * chunk + j));
                });
                assert_eq!(out, (0..len).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn an_unknown_instruction_set_is_an_engine_error_that_lists_the_known() {
        let error = Cpu::with_isa(1, Some("mmx")).unwrap_err();
        assert_eq!(error.cause().kind(), "engine");
        assert!(error.help_text().unwrap().contains("scalar"), "{error}");
    }
}
