//! The CPU engine: matrices as they lie in the artifact, activations, and the products of the two.
//!
//! [`Cpu::matmul`] runs a list of [`Job`]s as one parallel region. Whatever the instruction set, the number of threads
//! and the number of columns, every output element is the same bits: [`scalar`] fixes the order of summation, and the
//! fast kernels follow it.

pub mod level;
pub mod scalar;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mapped::Bytes;
use crate::scheme::{BLOCK, TileLayout};

/// How the bytes of a [`Matrix`] are to be read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MatrixStore {
    /// Row-major elements: F32, F16 or BF16.
    Plain(DType),
    /// Row-interleaved quantized tiles.
    Tiled(TileLayout),
}

/// A weight matrix: `rows` outputs by `cols` inputs, borrowed from the artifact.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Output features.
    pub rows: usize,
    /// Input features (K).
    pub cols: usize,
    /// How `data` is to be read.
    pub store: MatrixStore,
    /// The payload.
    pub data: Bytes,
}

impl Matrix {
    /// Checks that the payload has the length the store demands.
    pub fn new(rows: usize, cols: usize, store: MatrixStore, data: Bytes) -> Result<Matrix> {
        let expected = match store {
            MatrixStore::Plain(dtype @ (DType::F32 | DType::F16 | DType::BF16)) => rows * cols * dtype.size(),
            MatrixStore::Plain(other) => return Err(Error::unsupported(format!("a weight matrix of {other}"))),
            MatrixStore::Tiled(layout) => layout.nbytes(),
        };
        if data.len() != expected || !(data.as_ptr() as usize).is_multiple_of(4) {
            return Err(Error::corrupt(format!("{} bytes for a {rows} x {cols} matrix of {expected}", data.len())));
        }
        Ok(Matrix { rows, cols, store, data })
    }
}

/// What the products of quantized weights are computed in. Plain weights are always computed in float.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Weights are widened to f32, activations stay f32.
    Float,
    /// Activations are rounded to int8 per block of 32 (W4A8); integer sums inside a block, f32 across blocks.
    Int8,
}

/// A batch of input rows: `n` tokens of `k` values, padded with zeros to whole blocks of 32, with its int8 form.
#[derive(Debug, Default, Clone)]
pub struct Acts {
    n: usize,
    k: usize,
    stride: usize,
    values: Vec<f32>,
    codes: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
    quantized: bool,
}

impl Acts {
    /// Copies `n` rows of `k` values; the buffers are reused.
    pub fn set(&mut self, n: usize, k: usize, rows: &[f32]) {
        assert_eq!(rows.len(), n * k);
        self.reset(n, k);
        for (to, from) in self.values.chunks_exact_mut(self.stride).zip(rows.chunks_exact(k)) {
            to[..k].copy_from_slice(from);
        }
    }

    /// Makes room for `n` zeroed rows of `k` values, to be filled through [`Acts::row_mut`].
    pub fn reset(&mut self, n: usize, k: usize) {
        let stride = k.next_multiple_of(BLOCK);
        (self.n, self.k, self.stride, self.quantized) = (n, k, stride, false);
        self.values.clear();
        self.values.resize(n * stride, 0.0);
    }

    /// Rounds every block of 32 to int8: scale = absmax / 127, code = round(value / scale), ties away from zero.
    pub fn quantize(&mut self) {
        let blocks = self.values.len() / BLOCK;
        self.codes.resize(self.values.len(), 0);
        self.scales.resize(blocks, 0.0);
        self.sums.resize(blocks, 0);
        for (b, (values, codes)) in self.values.chunks_exact(BLOCK).zip(self.codes.chunks_exact_mut(BLOCK)).enumerate()
        {
            (self.scales[b], self.sums[b]) = scalar::quantize_block(values, codes);
        }
        self.quantized = true;
    }

    /// Number of rows (tokens).
    pub fn n(&self) -> usize {
        self.n
    }

    /// Values per row without padding.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Row `i`, padded to whole blocks.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.stride..][..self.stride]
    }

    /// Row `i` without padding, to be written; the int8 form is dropped.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        self.quantized = false;
        &mut self.values[i * self.stride..][..self.k]
    }

    /// All rows and their stride, to be written in parallel; the padding of each row must stay zero.
    /// The int8 form is dropped.
    pub fn rows_mut(&mut self) -> (&mut [f32], usize) {
        self.quantized = false;
        (&mut self.values, self.stride)
    }

    /// True when the int8 form is up to date.
    pub fn is_quantized(&self) -> bool {
        self.quantized
    }

    /// Int8 form of row `i`: codes, and per block the scale and the sum of the codes.
    pub fn row_q8(&self, i: usize) -> (&[i8], &[f32], &[i32]) {
        let blocks = self.stride / BLOCK;
        (
            &self.codes[i * self.stride..][..self.stride],
            &self.scales[i * blocks..][..blocks],
            &self.sums[i * blocks..][..blocks],
        )
    }
}

/// One product of a parallel region: `y = x * matrix^T + bias`.
#[derive(Debug)]
pub struct Job<'a> {
    /// Weights.
    pub matrix: &'a Matrix,
    /// Added to every row of the result: `(rows)`.
    pub bias: Option<&'a [f32]>,
    /// Inputs: `(n, cols)`; must be quantized for [`Arithmetic::Int8`] with a tiled matrix.
    pub x: &'a Acts,
    /// Outputs: `(n, rows)`, row-major, overwritten.
    pub y: &'a mut [f32],
}

/// The engine: threads and kernels.
#[derive(Debug)]
pub struct Cpu {
    threads: usize,
}

impl Cpu {
    /// An engine with this many threads (the caller's included), at least one.
    pub fn new(threads: usize) -> Cpu {
        Cpu { threads: threads.max(1) }
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Name of the instruction set in use.
    pub fn isa(&self) -> &'static str {
        "scalar"
    }

    /// Runs all products as one parallel region.
    pub fn matmul(&self, jobs: &mut [Job<'_>], arithmetic: Arithmetic) {
        for job in jobs {
            scalar::matmul(job, arithmetic);
        }
    }

    /// Calls `f(i, chunk)` for each chunk of `out` (the last may be shorter), spread over the threads.
    pub fn for_chunks<T: Send>(&self, out: &mut [T], chunk: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        for (i, c) in out.chunks_mut(chunk).enumerate() {
            f(i, c);
        }
    }
}
