//! The inputs of matrix products: rows of floats, padded to whole blocks, and their int8 form.

use super::kernels::KernelTable;
use crate::scheme::BLOCK;

/// 64 bytes of floats; gives rows of activations the alignment that vector loads like.
#[derive(Debug, Default, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// The int8 form of 32 activations, in one piece so that a kernel walks one pointer per row.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Q8Block {
    /// Rounded values, -127..=127; never -128, on which kernels rely.
    pub codes: [i8; BLOCK],
    /// Multiplies the codes.
    pub scale: f32,
    /// Sum of the codes, |sum| <= 32 * 127.
    pub sum: i32,
}

/// A batch of input rows: `n` tokens of `k` values, padded with zeros to whole blocks of 32, with its int8 form.
#[derive(Debug, Default, Clone)]
pub struct Acts {
    n: usize,
    k: usize,
    stride: usize,
    values: Vec<Line>,
    blocks: Vec<Q8Block>,
    quantized: bool,
}

impl Acts {
    /// Copies `n` rows of `k` values; the buffers are reused.
    pub fn set(&mut self, n: usize, k: usize, rows: &[f32]) {
        assert_eq!(rows.len(), n * k);
        self.reset(n, k);
        for i in 0..n {
            self.row_mut(i).copy_from_slice(&rows[i * k..][..k]);
        }
    }

    /// Makes room for `n` rows of `k` values, all of which are to be written through [`Acts::row_mut`] or
    /// [`Acts::rows_mut`]; until then they hold whatever numbers were there. Padding is zero.
    pub fn reset(&mut self, n: usize, k: usize) {
        let stride = k.next_multiple_of(BLOCK);
        (self.n, self.k, self.stride, self.quantized) = (n, k, stride, false);
        self.values.resize(n * stride / 16, Line::default());
        if stride > k {
            let values: &mut [f32] = bytemuck::cast_slice_mut(&mut self.values);
            values.chunks_exact_mut(stride).for_each(|row| row[k..].fill(0.0));
        }
    }

    /// Rounds every block of 32 to int8 as [`super::scalar::quantize_block`] does, on the calling thread;
    /// [`super::Cpu::quantize`] spreads the work.
    pub fn quantize(&mut self) {
        let (values, blocks) = self.start_quantizing();
        KernelTable::best().quantize(values, blocks);
    }

    /// All values and the blocks to be written from them; the caller writes every block.
    pub(super) fn start_quantizing(&mut self) -> (&[f32], &mut [Q8Block]) {
        let values: &[f32] = bytemuck::cast_slice(&self.values);
        self.blocks.resize(values.len() / BLOCK, Q8Block::default());
        self.quantized = true;
        (values, &mut self.blocks)
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
        &bytemuck::cast_slice(&self.values)[i * self.stride..][..self.stride]
    }

    /// Row `i` without padding, to be written; the int8 form is dropped.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        self.quantized = false;
        &mut bytemuck::cast_slice_mut(&mut self.values)[i * self.stride..][..self.k]
    }

    /// All rows and their stride, to be written in parallel; the padding of each row must stay zero.
    /// The int8 form is dropped.
    pub fn rows_mut(&mut self) -> (&mut [f32], usize) {
        self.quantized = false;
        (bytemuck::cast_slice_mut(&mut self.values), self.stride)
    }

    /// True when the int8 form is up to date.
    pub fn is_quantized(&self) -> bool {
        self.quantized
    }

    /// Int8 form of row `i`.
    pub fn row_q8(&self, i: usize) -> &[Q8Block] {
        let blocks = self.stride / BLOCK;
        &self.blocks[i * blocks..][..blocks]
    }
}
