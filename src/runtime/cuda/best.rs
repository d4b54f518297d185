//! The largest logits of each row, found where they are: a few numbers go to the host instead of a vocabulary's.

use super::args;
use super::array::{Array, View};
use super::context::{Context, Launch, Pinned};
use super::ops::{GRID, Ops};
use crate::error::Result;
use std::sync::Arc;

/// Numbers that a block sorts, `TOP_K_SPAN` in `args.cuh`.
const SPAN: usize = 2048;
/// Most parts that a row is cut into to find its largest number.
const PARTS: usize = 512;

/// Device memory for the search.
#[derive(Debug)]
pub struct Best {
    vocab: usize,
    /// Parts that a row is cut into for its largest number.
    parts: usize,
    most: usize,
    /// `(rows, parts)`: largest of each part.
    partial: Array<f32>,
    /// `(rows, parts)`: where.
    places: Array<u32>,
    /// What is left after each launch, in turn.
    keys: [Array<u64>; 2],
    /// `(rows, k)`.
    ids: Array<u32>,
    /// `(rows, k)`.
    values: Array<f32>,
}

impl Best {
    /// Room for up to `most` of each of so many rows.
    ///
    /// # Errors
    /// There is none.
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

    /// Numbers of 4 bytes that [`Best::take`] copies at most.
    pub fn output_len(&self) -> usize {
        2 * self.partial.view().len().max(self.ids.view().len())
    }

    /// Finds the largest logit of each part of `n` rows, and caps all of them if there is a cap.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn largest(&self, ops: &Ops, logits: View<f32>, n: usize, cap: Option<f32>) -> Result<()> {
        assert!(logits.len() >= n * self.vocab && self.partial.view().len() >= n * self.parts && n <= GRID);
        let args = args::Logits {
            logits: logits.address(),
            partial: self.partial.view().address(),
            places: self.places.view().address(),
            n: n as u32,
            vocab: self.vocab as u32,
            parts: self.parts as u32,
            softcap: cap.unwrap_or(0.0),
        };
        ops.start("logits_parts", Launch { grid: [self.parts as u32, n as u32, 1], block: 256, shared: 0 }, &args)
    }

    /// Finds the `k` largest logits of `n` rows.
    ///
    /// # Errors
    /// The driver refuses.
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

    /// What was found: `k` numbers of each of `n` rows, the largest first.
    ///
    /// # Errors
    /// The driver refuses, or earlier work failed.
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
                // The lowest of equals comes first; a number is better than none.
                let better = |best: (u32, f32), other: (u32, f32)| {
                    if other.1 > best.1 || best.1.is_nan() && !other.1.is_nan() { other } else { best }
                };
                pairs.reduce(better).into_iter().collect()
            })
            .collect())
    }
}
