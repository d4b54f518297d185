//! Attention over a paged KV cache: splits a batch into work items and distributes them to threads.
//!
//! A *tile* is a few consecutive tokens of one sequence. An *item*, the unit of work, is a tile and a key/value head
//! over some pages of the KV cache; its *rows* are the query heads of these tokens that share the key/value head. For
//! each page, a row yields a partial result (`page.rs`). Partial results are combined in the order of pages, whichever
//! thread computed them (`fold.rs`), so the bits of a row's result do not depend on the tile, the batch, the chunk or
//! the number of threads.

mod fold;
mod page;
mod reference;
mod scores;
#[cfg(test)]
mod tests;
mod transpose;

use super::cpu::Cpu;
use super::device::Run;
use super::kv::{Element, KvCache, KvLayer, Line, PAGE, by_type};
use super::layer::AttentionShape;
use super::ops::LANES;
use crate::error::{Error, Result};
use crate::simd::Kernel;
use fold::Finish;
use page::{ItemKernel, Workspace};
use std::ops::Range;
use std::str::FromStr;

/// Largest number of rows of an item. They share the loads of a page; more rows would not fit the CPU cache together
/// with the page.
const ROWS: usize = 64;
/// Multiply-adds that justify waking a thread, which takes a microsecond or two.
const MIN_WORK: usize = 1 << 16;
/// Number of rows whose sums are held in registers at once.
const GROUP: usize = 8;
/// Numbers after the values of a partial result: 16 lanes of the sum of its probabilities, then the reference `m` (an
/// exponent, see `fold.rs`) and padding.
const STATE: usize = 2 * LANES;

/// Implementation of attention on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AttentionKernel {
    /// Blocks of rows and vectors of numbers, in the arithmetic of the cache type.
    #[default]
    Fast,
    /// The definition, in f64 and one row at a time: slow, to find out whether a difference comes from attention.
    Reference,
}

impl AttentionKernel {
    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            AttentionKernel::Fast => "fast",
            AttentionKernel::Reference => "reference",
        }
    }
}

impl FromStr for AttentionKernel {
    type Err = Error;
    fn from_str(s: &str) -> Result<AttentionKernel> {
        [AttentionKernel::Fast, AttentionKernel::Reference]
            .into_iter()
            .find(|kernel| kernel.name() == s)
            .ok_or_else(|| Error::usage(format!("attention `{s}`: expected fast or reference")))
    }
}

/// Consecutive tokens of one sequence that are computed together.
#[derive(Debug, Clone)]
struct Tile {
    sequence: usize,
    /// Index of the first token in the batch.
    first: usize,
    tokens: usize,
    /// Position of the first token.
    position: usize,
    /// Pages that at least one of its tokens attends to.
    pages: Range<usize>,
    /// Index of the tile's first item in [`Attend::items`].
    first_item: usize,
}

/// Unit of work: a tile and a key/value head over some pages.
#[derive(Debug, Clone)]
struct Item {
    /// Index of the tile in [`Attend::tiles`].
    tile: usize,
    /// Key/value head.
    head: usize,
    pages: Range<usize>,
}

/// Attention with reusable buffers.
#[derive(Debug, Default)]
pub struct Attend {
    tiles: Vec<Tile>,
    /// Tile of each token of the batch.
    tile_of_row: Vec<u32>,
    /// Items in the order of tiles, heads and pages.
    items: Vec<Item>,
    /// Items in the order of the threads that they are assigned to.
    dealt: Vec<u32>,
    /// Offset of each item's rows in `memory`.
    places: Vec<usize>,
    /// One slice per thread, aligned to cache lines: the combined partial results of the thread's items, then a
    /// workspace.
    memory: Vec<Line>,
}

impl Attend {
    /// Computes attention for all tokens of a batch, whose keys and values are already in the caches.
    ///
    /// `out` is `(n, out_stride)`; the first `n_heads * heads.value` numbers of each row are written.
    pub fn run(&mut self, task: &AttentionTask<'_>, out: &mut [f32], out_stride: usize) {
        if task.kernel == AttentionKernel::Reference {
            return reference::run(task, out, out_stride);
        }
        self.plan(task);
        let (layer, group) = (task.layer, task.group());
        let rows = self.tiles.iter().map(|tile| tile.tokens).max().unwrap_or(0) * group;
        let row_len = layer.value_stride() + STATE;
        let shares = self.deal(task, rows);
        let per_share = self.items.len().div_ceil(shares);
        let workspace = Workspace::len(layer, rows);
        let share_len = per_share * rows * row_len + workspace;
        for (i, item) in self.dealt.iter().enumerate() {
            self.places[*item as usize] = i / per_share * share_len + i % per_share * rows * row_len;
        }
        self.memory.resize(shares * share_len / LANES, Line::default());
        let (tiles, items, dealt) = (&self.tiles, &self.items, &self.dealt);
        task.cpu.for_chunks(&mut self.memory, share_len / LANES, |i, part| {
            let part: &mut [f32] = bytemuck::cast_slice_mut(part);
            let (folded, workspace) = part.split_at_mut(per_share * rows * row_len);
            let mine = &dealt[(i * per_share).min(dealt.len())..((i + 1) * per_share).min(dealt.len())];
            for (n, folded) in (0..mine.len()).zip(folded.chunks_exact_mut(rows * row_len)) {
                let with_tile = |item: &u32| (&tiles[items[*item as usize].tile], &items[*item as usize]);
                let ((tile, item), then) = (with_tile(&mine[n]), mine.get(n + 1).map(with_tile));
                task.cpu.level().run(ItemKernel { task, tile, item, then, folded, workspace });
            }
        });
        let memory: &[f32] = bytemuck::cast_slice(&self.memory);
        let (places, tile_of_row) = (&self.places, &self.tile_of_row);
        let rotated = by_type!(layer.kind, T, T::ROTATED).then(|| layer.heads.rotations()[1]);
        let value = layer.heads.value;
        task.cpu.for_rows(out, out_stride, |row, out| {
            let tile = &tiles[tile_of_row[row] as usize];
            let pieces = tile.pieces(items);
            for (head, out) in out[..task.shape.n_heads * value].chunks_exact_mut(value).enumerate() {
                let first = tile.first_item + head / group * pieces;
                let at = ((row - tile.first) * group + head % group) * row_len;
                let states = places[first..first + pieces].iter().map(|place| &memory[place + at..][..row_len]);
                task.cpu.level().run(Finish { states, sink: task.sinks.map(|s| s[head]), rotated, out });
            }
        });
    }

    /// Splits the batch into tiles and items.
    fn plan(&mut self, task: &AttentionTask<'_>) {
        let per_tile = (ROWS / task.group()).max(1);
        self.tiles.clear();
        self.items.clear();
        self.tile_of_row.clear();
        for run in task.runs {
            for from in (0..run.tokens).step_by(per_tile) {
                let tokens = per_tile.min(run.tokens - from);
                let position = run.position + from;
                let pages = task.visible(position).start / PAGE..(position + tokens).div_ceil(PAGE);
                self.tile_of_row.extend(std::iter::repeat_n(self.tiles.len() as u32, tokens));
                let (sequence, first) = (run.sequence, run.first + from);
                self.tiles.push(Tile { sequence, first, tokens, position, pages, first_item: 0 });
            }
        }
        let (heads, threads) = (task.layer.heads.count, task.cpu.threads());
        // If a small number of items does not divide evenly among the threads, each page becomes an item.
        let items = self.tiles.len() * heads;
        let split = threads > 1 && items < 8 * threads && !items.is_multiple_of(threads);
        for (i, tile) in self.tiles.iter_mut().enumerate() {
            tile.first_item = self.items.len();
            for head in 0..heads {
                if split {
                    self.items.extend(tile.pages.clone().map(|p| Item { tile: i, head, pages: p..p + 1 }));
                } else {
                    self.items.push(Item { tile: i, head, pages: tile.pages.clone() });
                }
            }
        }
    }

    /// Assigns items of at most `rows` rows to as many threads as the work justifies and returns the number of threads.
    /// Items are dealt longest first, to the threads in ascending and descending order by turns, so that all have about
    /// the same work. `dealt` holds the items of the first thread, then those of the second, and so on, in slices of
    /// equal length, of which only the last may be shorter.
    fn deal(&mut self, task: &AttentionTask<'_>, rows: usize) -> usize {
        let items = &self.items;
        let pages: usize = items.iter().map(|item| item.pages.len()).sum();
        let work = pages * PAGE * rows * (task.layer.heads.key + task.layer.heads.value);
        let shares = (work / MIN_WORK).clamp(1, task.cpu.threads()).min(items.len().max(1));
        let per_share = items.len().div_ceil(shares);
        let mut order: Vec<u32> = (0..items.len() as u32).collect();
        order.sort_by_key(|i| std::cmp::Reverse(items[*i as usize].pages.len()));
        self.places.resize(items.len(), 0);
        self.dealt.clear();
        self.dealt.resize(items.len(), 0);
        let mut taken = vec![0; shares];
        let mut turn = (0..shares).chain((0..shares).rev()).cycle();
        for item in order {
            // The last slice may be shorter than the others.
            let room = |t: usize| per_share.min(items.len() - (t * per_share).min(items.len()));
            let t = turn.by_ref().find(|t| taken[*t] < room(*t)).expect("room for every item");
            self.dealt[t * per_share + taken[t]] = item;
            taken[t] += 1;
        }
        shares
    }
}

impl Tile {
    /// Returns the number of positions of a page that its last token attends to or could attend to without a window,
    /// in whole lanes.
    fn visible(&self, page: usize) -> usize {
        (self.position + self.tokens - page * PAGE).min(PAGE).next_multiple_of(LANES)
    }

    /// Returns the number of items per key/value head.
    fn pieces(&self, items: &[Item]) -> usize {
        if items[self.first_item].pages.len() == self.pages.len() { 1 } else { self.pages.len() }
    }
}

/// Inputs of attention in one layer.
pub struct AttentionTask<'a> {
    /// Implementation.
    pub kernel: AttentionKernel,
    /// Threads and kernels.
    pub cpu: &'a Cpu,
    /// Sizes and place of the keys and values of the layer in the caches.
    pub layer: &'a KvLayer,
    /// Heads, window and softcap.
    pub shape: &'a AttentionShape,
    /// Attention sinks, if any: one extra logit per query head.
    pub sinks: Option<&'a [f32]>,
    /// Sequences and positions of the batch, in order of rows.
    pub runs: &'a [Run],
    /// KV cache of each sequence; it already holds the keys and values of this batch.
    pub caches: &'a [&'a mut KvCache],
    /// Rotated queries, `(n, n_heads * heads.key)`, scaled such that scores are exponents of 2.
    pub queries: &'a [f32],
}

impl AttentionTask<'_> {
    /// Returns the number of query heads that share a key/value head.
    fn group(&self) -> usize {
        self.shape.n_heads / self.layer.heads.count
    }

    /// Returns the positions that a query at `position` attends to.
    fn visible(&self, position: usize) -> Range<usize> {
        let from = self.shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
        from..position + 1
    }
}

impl Kernel for ItemKernel<'_> {
    #[inline(always)]
    fn run(self) {
        by_type!(self.task.layer.kind, T, self.over::<T>());
    }
}
