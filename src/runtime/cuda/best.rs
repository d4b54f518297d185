//! Finds the largest logits of each row on the device, so that the host receives a few numbers instead of whole rows.

use super::args;
use super::array::{Array, View};
use super::context::{Context, Launch, Pinned};
use super::ops::{GRID, Ops};
use crate::error::Result;
use std::sync::Arc;

/// Number of values that a thread block sorts, `TOP_K_SPAN` in `args.cuh`.
const SPAN: usize = 2048;
/// Maximum number of parts that a row is cut into to find its largest logit.
const PARTS: usize = 512;

/// Device memory for the search of the largest logits.
#[derive(Debug)]
pub struct Best {
    vocab: usize,
    /// Number of parts that a row is cut into to find its largest logit.
    parts: usize,
    /// Largest `k` for which there is memory.
    most: usize,
    /// Largest logit of each part: `(rows, parts)`.
    partial: Array<f32>,
    /// Token with the largest logit of each part: `(rows, parts)`.
    places: Array<u32>,
    /// Candidates that remain after a launch; successive launches write the two arrays alternately.
    keys: [Array<u64>; 2],
    /// Tokens of the largest logits: `(rows, k)`.
    ids: Array<u32>,
    /// Largest logits: `(rows, k)`.
    values: Array<f32>,
}

impl Best {
    /// Allocates memory to find up to `most` largest logits in each of `rows` rows.
    ///
    /// # Errors
    /// There is not enough device memory.
    pub fn new(context: &Arc<Context>, rows: usize, vocab: usize, most: usize) -> Result<Best> {
        let (parts, left) = (vocab.div_ceil(SPAN).min(PARTS), vocab.div_ceil(SPAN) * most);
        Ok(Best {
            vocab,
            parts,
            most,
            partial: Array::new(context, rows * parts)?,
            places: Array::new(context, rows * parts)?,
            keys: [Array::new(context, rows * left)?, Array::new(context, rows * left.div_ceil(SPAN) * most)?],
            ids: Array::new(context, rows * most)?,
            values: Array::new(context, rows * most)?,
        })
    }

    /// Returns the maximum number of 4-byte values that [`Best::take`] copies.
    pub fn output_len(&self) -> usize {
        2 * self.partial.view().len().max(self.ids.view().len())
    }

    /// Finds the largest logit of each part of `n` rows, after all logits were multiplied by `scale` and capped by
    /// `cap`, if there is one. [`Best::take`] with `k = 1` then finds the largest of each row.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn largest(&self, ops: &Ops, logits: View<f32>, n: usize, scale: f32, cap: Option<f32>) -> Result<()> {
        assert!(logits.len() >= n * self.vocab && self.partial.view().len() >= n * self.parts && n <= GRID);
        let args = args::Logits {
            logits: logits.address(),
            partial: self.partial.view().address(),
            places: self.places.view().address(),
            n: n as u32,
            vocab: self.vocab as u32,
            parts: self.parts as u32,
            scale,
            softcap: cap.unwrap_or(0.0),
            unused: 0,
        };
        ops.start("logits_parts", Launch { grid: [self.parts as u32, n as u32, 1], block: 256, shared: 0 }, &args)
    }

    /// Finds the `k` largest logits of `n` rows.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn largest_of(&self, ops: &Ops, logits: View<f32>, n: usize, k: usize) -> Result<()> {
        assert!(
            logits.len() >= n * self.vocab && k <= self.most && n * self.most <= self.ids.view().len() && n <= GRID
        );
        let (mut len, mut from) = (self.vocab, 0);
        for (i, logits) in [logits.address(), 0, 0, 0].into_iter().enumerate() {
            let (parts, to) = (len.div_ceil(SPAN), self.keys[i % 2].view());
            assert!(parts == 1 || to.len() >= n * parts * k);
            let args = args::TopK {
                logits,
                from,
                to: to.address(),
                ids: self.ids.view().address(),
                values: self.values.view().address(),
                n: n as u32,
                len: len as u32,
                parts: parts as u32,
                k: k as u32,
            };
            ops.start("top_k", Launch { grid: [parts as u32, n as u32, 1], block: 512, shared: 0 }, &args)?;
            if parts == 1 {
                break;
            }
            (len, from) = (parts * k, to.address());
        }
        Ok(())
    }

    /// Returns the `k` largest logits of each of `n` rows with their tokens, the largest first.
    ///
    /// # Errors
    /// The driver reports an error, or earlier work failed.
    pub fn take(&self, context: &Context, output: &mut Pinned, n: usize, k: usize) -> Result<Vec<Vec<(u32, f32)>>> {
        let (width, ids, values) = match k {
            1 => (self.parts, &self.places, &self.partial),
            _ => (k, &self.ids, &self.values),
        };
        values.copy_to(output, 0, n * width)?;
        ids.copy_to(output, n * width, n * width)?;
        context.synchronize()?;
        let values: &[f32] = &bytemuck::cast_slice(output.bytes())[..n * width];
        let ids: &[u32] = &bytemuck::cast_slice(output.bytes())[n * width..2 * n * width];
        let rows = ids.chunks_exact(width).zip(values.chunks_exact(width));
        Ok(rows
            .map(|(ids, values)| {
                let pairs = ids.iter().copied().zip(values.iter().copied());
                if k > 1 {
                    return pairs.collect();
                }
                // Of equal logits, the one with the lowest token comes first; a number is better than NaN.
                let better = |best: (u32, f32), other: (u32, f32)| {
                    if other.1 > best.1 || best.1.is_nan() && !other.1.is_nan() { other } else { best }
                };
                pairs.reduce(better).into_iter().collect()
            })
            .collect())
    }
}
