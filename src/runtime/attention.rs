//! Attention over a paged cache: which tokens are computed together, and the arithmetic of one page.
//!
//! A *tile* is a few consecutive tokens of one sequence; its *rows* are their query heads that share a key/value head.
//! For each page of positions a row yields a partial result: the largest score `m`, the sum `l` of `exp(score - m)` and
//! the values weighted by it. Partial results are folded in the order of pages, whoever computed them, so a row's bits
//! depend only on its own position: not on the tile, the batch, the chunk or the number of threads. Scores, exponentials
//! and sums are f32; one lane per position (scores) or per value (weighted sums), so no horizontal sums but the two of
//! the softmax.

use super::cpu::Cpu;
use super::cpu::scalar::fold as fold_lanes;
use super::engine::Sequence;
use super::kv::{Element, KvLayout, PAGE, PagesRef, head_of};
use super::ops::{LANES, exp, max, softcap};
use crate::simd::Kernel;
use std::ops::Range;
use std::sync::Arc;

/// Rows computed together share the loads of a page; more would not stay in the first-level cache.
const ROWS: usize = 32;
/// Rows whose sums are held in registers at once.
const GROUP: usize = 8;
/// Multiplications and additions that are worth waking a thread for: a microsecond or two.
const MIN_WORK: usize = 1 << 15;
/// Behind the values of a partial result: `m`, `l`, and padding to whole lanes.
const STATE: usize = LANES;

/// Consecutive tokens of one sequence that are computed together.
#[derive(Debug, Clone)]
struct Tile {
    sequence: usize,
    /// First row of the batch.
    first: usize,
    tokens: usize,
    /// Position of the first token.
    position: usize,
    /// Pages that any of its tokens sees.
    pages: Range<usize>,
    /// Index of its first item.
    first_item: usize,
}

/// What one task computes: a tile and a key/value head over some pages.
#[derive(Debug, Clone)]
struct Item {
    tile: usize,
    head: usize,
    pages: Range<usize>,
}

/// How one layer attends.
#[derive(Debug, Clone, Copy)]
pub struct LayerShape<'a> {
    /// Decoder layer.
    pub layer: usize,
    /// How many positions a query sees, its own included.
    pub window: Option<usize>,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// One extra logit per query head.
    pub sinks: Option<&'a [f32]>,
}

/// A run of consecutive tokens of one sequence in a batch.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// Index of the sequence.
    pub sequence: usize,
    /// First row in the batch.
    pub first: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Position of the first token.
    pub position: usize,
}

/// Attention with its reusable memory.
#[derive(Debug, Default)]
pub struct Attention {
    tiles: Vec<Tile>,
    /// The tile of each row of the batch.
    tile_of_row: Vec<u32>,
    items: Vec<Item>,
    /// One chunk per item: folded rows, then room for the partial rows of a page.
    partials: Vec<f32>,
}

impl Attention {
    /// Bytes of memory held.
    pub fn bytes(&self) -> usize {
        self.partials.capacity() * 4
    }

    /// Attends for every token of a batch whose keys and values are already in the caches.
    ///
    /// `queries` is `(n, n_heads * head_dim)`, rotated and scaled; `out` is `(n, out_stride)`, of which the first
    /// `n_heads * head_dim` values are written.
    pub fn run(&mut self, task: &Task<'_>, out: &mut [f32], out_stride: usize) {
        let rows = self.plan(task);
        let (layout, group) = (task.layout, task.group());
        let row_len = layout.value_stride + STATE;
        let chunk = 2 * rows * row_len;
        self.partials.resize(self.items.len() * chunk, 0.0);
        let (tiles, items) = (&self.tiles, &self.items);
        let pages: usize = items.iter().map(|item| item.pages.len()).sum();
        let work = pages * PAGE * rows * 2 * layout.value_stride / items.len();
        let per_task = MIN_WORK.div_ceil(work);
        task.cpu.for_chunks(&mut self.partials, per_task * chunk, |i, part| {
            for (item, chunk) in items[i * per_task..].iter().zip(part.chunks_exact_mut(chunk)) {
                let (folded, page) = chunk.split_at_mut(rows * row_len);
                let queries = Queries { task, tile: &tiles[item.tile], item };
                task.cpu.level().run(ItemKernel { queries, folded, page });
            }
        });
        let (partials, tile_of_row) = (&self.partials, &self.tile_of_row);
        task.cpu.for_rows(out, out_stride, |row, out| {
            let tile = &tiles[tile_of_row[row] as usize];
            let pieces = task.pieces(items, tile);
            for (head, out) in out[..task.n_heads * layout.head_dim].chunks_exact_mut(layout.head_dim).enumerate() {
                let first = tile.first_item + head / group * pieces;
                let at = ((row - tile.first) * group + head % group) * row_len;
                let states = (first..first + pieces).map(|i| &partials[i * chunk + at..][..row_len]);
                task.cpu.level().run(Finish { states, sink: task.shape.sinks.map(|s| s[head]), out });
            }
        });
    }

    /// Cuts the batch into tiles and items; returns the most rows a tile has.
    fn plan(&mut self, task: &Task<'_>) -> usize {
        let group = task.group();
        let per_tile = (ROWS / group).max(1);
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
        // A few long sequences do not fill the threads; then each page is its own item.
        let split = self.tiles.len() * task.layout.kv_heads < 2 * task.cpu.threads() && task.cpu.threads() > 1;
        // Threads take equal shares of the items in order, and later tiles see more: early and late ones alternate.
        let n = self.tiles.len();
        for i in (0..n).map(|i| if i % 2 == 0 { i / 2 } else { n - 1 - i / 2 }) {
            let tile = &mut self.tiles[i];
            tile.first_item = self.items.len();
            for head in 0..task.layout.kv_heads {
                if split {
                    self.items.extend(tile.pages.clone().map(|p| Item { tile: i, head, pages: p..p + 1 }));
                } else {
                    self.items.push(Item { tile: i, head, pages: tile.pages.clone() });
                }
            }
        }
        self.tiles.iter().map(|tile| tile.tokens).max().unwrap_or(0) * group
    }
}

/// The inputs of attention in one layer.
pub struct Task<'a> {
    /// Threads.
    pub cpu: &'a Cpu,
    /// Sizes of the caches.
    pub layout: &'a KvLayout,
    /// Query heads.
    pub n_heads: usize,
    /// Window and sinks.
    pub shape: LayerShape<'a>,
    /// The batch, in order of rows.
    pub runs: &'a [Run],
    /// What each sequence has read, this batch included.
    pub sequences: &'a [&'a mut Sequence],
    /// `(n, n_heads * head_dim)`.
    pub queries: &'a [f32],
}

impl Task<'_> {
    fn group(&self) -> usize {
        self.n_heads / self.layout.kv_heads
    }

    /// The positions a query at `position` sees.
    fn visible(&self, position: usize) -> Range<usize> {
        let from = self.shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
        from..position + 1
    }

    /// Items per key/value head of a tile.
    fn pieces(&self, items: &[Item], tile: &Tile) -> usize {
        let whole = items[tile.first_item].pages.len() == tile.pages.len();
        if whole { 1 } else { tile.pages.len() }
    }
}

/// The rows of an item.
#[derive(Clone, Copy)]
struct Queries<'a> {
    task: &'a Task<'a>,
    tile: &'a Tile,
    item: &'a Item,
}

struct ItemKernel<'a> {
    queries: Queries<'a>,
    folded: &'a mut [f32],
    page: &'a mut [f32],
}

impl Kernel for ItemKernel<'_> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        match self.queries.task.sequences[self.queries.tile.sequence].cache.pages() {
            PagesRef::F32(pages) => self.over(pages),
            PagesRef::F16(pages) => self.over(pages),
        }
    }
}

impl ItemKernel<'_> {
    #[inline(always)]
    fn over<T: Element>(self, pages: &[Arc<Vec<T>>]) {
        let Queries { task, tile, item } = self.queries;
        let layout = task.layout;
        let row_len = layout.value_stride + STATE;
        let rows = tile.tokens * task.group();
        let folded = &mut self.folded[..rows * row_len];
        let page = &mut self.page[..rows * row_len];
        for row in folded.chunks_exact_mut(row_len) {
            row.fill(0.0);
        }
        for p in item.pages.clone() {
            let (keys, values) = head_of(layout, &pages[p], task.shape.layer, item.head);
            for first in (0..rows).step_by(GROUP) {
                let count = GROUP.min(rows - first);
                let out = &mut page[first * row_len..][..count * row_len];
                let rows = PageRows { queries: self.queries, layout, keys, values, page: p, first };
                match count {
                    8 => rows.run::<8>(out),
                    7 => rows.run::<7>(out),
                    6 => rows.run::<6>(out),
                    5 => rows.run::<5>(out),
                    4 => rows.run::<4>(out),
                    3 => rows.run::<3>(out),
                    2 => rows.run::<2>(out),
                    _ => rows.run::<1>(out),
                }
            }
            for (state, partial) in folded.chunks_exact_mut(row_len).zip(page.chunks_exact(row_len)) {
                fold(state, partial);
            }
        }
    }
}

impl Queries<'_> {
    /// The query of row `row` of the tile.
    #[inline(always)]
    fn query(&self, row: usize) -> &[f32] {
        let (group, dim) = (self.task.group(), self.task.layout.head_dim);
        let token = self.tile.first + row / group;
        let head = self.item.head * group + row % group;
        &self.task.queries[(token * self.task.n_heads + head) * dim..][..dim]
    }

    /// The slots of page `page` that row `row` sees.
    #[inline(always)]
    fn slots(&self, row: usize, page: usize) -> Range<usize> {
        let visible = self.task.visible(self.tile.position + row / self.task.group());
        let clip = |position: usize| position.saturating_sub(page * PAGE).min(PAGE);
        clip(visible.start)..clip(visible.end)
    }
}

/// Up to [`GROUP`] rows over one page.
struct PageRows<'a, T> {
    queries: Queries<'a>,
    layout: &'a KvLayout,
    keys: &'a [T],
    values: &'a [T],
    page: usize,
    first: usize,
}

impl<T: Element> PageRows<'_, T> {
    /// Writes `R` partial results to `out`.
    #[inline(always)]
    fn run<const R: usize>(&self, out: &mut [f32]) {
        let mut weights = [[0f32; PAGE]; R];
        let slots: [Range<usize>; R] = std::array::from_fn(|r| self.queries.slots(self.first + r, self.page));
        let from = slots.iter().map(|s| s.start).min().unwrap_or(0);
        let to = slots.iter().map(|s| s.end).max().unwrap_or(0);
        self.scores(from / LANES..to.div_ceil(LANES), &mut weights);
        let row_len = self.layout.value_stride + STATE;
        for ((weights, slots), out) in weights.iter_mut().zip(slots).zip(out.chunks_exact_mut(row_len)) {
            let state = &mut out[self.layout.value_stride..];
            (state[0], state[1]) = softmax(weights, slots, self.queries.task.shape.softcap);
        }
        for at in (0..self.layout.value_stride).step_by(LANES) {
            let sums = self.weighted_sum(at, from..to, &weights);
            for (r, sums) in sums.iter().enumerate() {
                out[r * row_len + at..][..LANES].copy_from_slice(sums);
            }
        }
    }

    /// Query-key products of some groups of 16 positions.
    #[inline(always)]
    fn scores<const R: usize>(&self, groups: Range<usize>, scores: &mut [[f32; PAGE]; R]) {
        let dim = self.layout.head_dim;
        let queries: [&[f32]; R] = std::array::from_fn(|r| self.queries.query(self.first + r));
        for g in groups {
            let mut sums = [[0f32; LANES]; R];
            let keys = &self.keys[g * LANES * dim..][..LANES * dim];
            T::mix(self.queries.task.cpu, keys, LANES, &queries, &mut sums);
            for r in 0..R {
                scores[r][g * LANES..][..LANES].copy_from_slice(&sums[r]);
            }
        }
    }

    /// Sixteen values at `at`, summed over positions with their weights.
    #[inline(always)]
    fn weighted_sum<const R: usize>(
        &self,
        at: usize,
        slots: Range<usize>,
        weights: &[[f32; PAGE]; R],
    ) -> [[f32; LANES]; R] {
        let stride = self.layout.value_stride;
        let mut sums = [[0f32; LANES]; R];
        if slots.is_empty() {
            return sums;
        }
        let values = &self.values[slots.start * stride + at..];
        let weights: [&[f32]; R] = std::array::from_fn(|r| &weights[r][slots.clone()]);
        T::mix(self.queries.task.cpu, values, stride, &weights, &mut sums);
        sums
    }
}

/// Turns the scores in `slots`, capped first, into `exp(score - m)` and everything else into zero; returns `(m, l)`.
#[inline(always)]
fn softmax(scores: &mut [f32; PAGE], slots: Range<usize>, cap: Option<f32>) -> (f32, f32) {
    if let Some(cap) = cap {
        for score in &mut scores[slots.clone()] {
            *score = softcap(*score, cap);
        }
    }
    let m = max(&scores[slots.clone()]);
    scores[..slots.start].fill(0.0);
    scores[slots.end..].fill(0.0);
    for score in &mut scores[slots] {
        *score = exp(*score - m);
    }
    let mut lanes = [0f32; LANES];
    let (chunks, _) = scores.as_chunks::<LANES>();
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] += chunk[l];
        }
    }
    (m, fold_lanes(lanes))
}

/// Adds the partial result of the next page to `state`. Both hold values, then `m` and `l`; `l == 0` means nothing seen.
#[inline(always)]
fn fold(state: &mut [f32], partial: &[f32]) {
    let at = state.len() - STATE;
    let (m, l) = (partial[at], partial[at + 1]);
    if l == 0.0 {
        return;
    }
    if state[at + 1] == 0.0 {
        state.copy_from_slice(partial);
        return;
    }
    let new_m = if m > state[at] { m } else { state[at] };
    let (keep, add) = (exp(state[at] - new_m), exp(m - new_m));
    for (s, p) in state[..at].iter_mut().zip(partial) {
        *s = *s * keep + p * add;
    }
    state[at + 1] = state[at + 1] * keep + l * add;
    state[at] = new_m;
}

/// Folds what the items of one query head found and divides by the sum, in which a sink takes part.
struct Finish<'a, I> {
    states: I,
    sink: Option<f32>,
    out: &'a mut [f32],
}

impl<'a, I: Iterator<Item = &'a [f32]>> Kernel for Finish<'_, I> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Finish { mut states, sink, out } = self;
        let Some(mut state) = states.next() else { return };
        let mut folded;
        if let Some(second) = states.next() {
            folded = [0f32; MAX_HEAD + STATE];
            let folded = &mut folded[..state.len()];
            folded.copy_from_slice(state);
            fold(folded, second);
            for partial in states {
                fold(folded, partial);
            }
            state = folded;
        }
        let (values, ml) = state.split_at(state.len() - STATE);
        let (m, l) = (ml[0], ml[1]);
        let (keep, sink) = match sink {
            Some(sink) if sink > m => (exp(m - sink), 1.0),
            Some(sink) => (1.0, exp(sink - m)),
            None => (1.0, 0.0),
        };
        let scale = keep / (l * keep + sink);
        for (out, value) in out.iter_mut().zip(values) {
            *out = value * scale;
        }
    }
}

/// Widest head, padded, that attention takes; the engine refuses models beyond it.
pub const MAX_HEAD: usize = 1024;
