//! Attention of an item (a tile of tokens and a key/value head, see the parent module): processes its rows page by
//! page, [`GROUP`] rows at a time.
//!
//! On each page, the scores of a row are turned into probabilities ([`super::scores`]), and the values weighted by them
//! are added to the result of earlier pages ([`super::fold`]). Products of queries with keys and of probabilities with
//! values are a [`WeightedSum`] with one lane per position or per value.

use super::fold::FoldGroup;
use super::scores::{mask, row_probabilities};
use super::transpose::{panel_words, values_of_keys};
use super::{AttentionTask, GROUP, Item, STATE, Tile};
use crate::runtime::cpu::{SumType, WeightedSum, pair, weights};
use crate::runtime::kv::{Element, Head, KvLayer, MAX_HEAD, PAGE, by_type, panel, rotate};
use crate::runtime::ops::LANES;
use std::ops::Range;

/// Buffers for one item at a time.
pub(super) struct Workspace<'a> {
    /// Queries as the weights of a [`WeightedSum`], one row after the other.
    queries: &'a mut [u32],
    /// Buffer for the keys of the page in the form of [`Element::panel`].
    keys: &'a mut [u32],
    /// Buffer for the values of the page in the form of [`Element::panel`], or transposed keys.
    values: &'a mut [u32],
    /// Scores: `(GROUP, PAGE)`.
    scores: &'a mut [f32],
    /// For cache types with scales only, products of queries and keys, then probabilities, before they are multiplied
    /// by scales, as bits of f32: `(GROUP, PAGE)`.
    products: &'a mut [u32],
    /// Probabilities as the weights of a [`WeightedSum`]: `(GROUP, PAGE)`.
    weights: &'a mut [u32],
    /// Weighted sums of the values: `(GROUP, value_stride)`.
    sums: &'a mut [f32],
}

impl<'a> Workspace<'a> {
    fn lengths(layer: &KvLayer, rows: usize) -> [usize; 7] {
        let group = GROUP * PAGE;
        let keys = PAGE * layer.key_stride() / 2;
        let values = match layer.heads.shared {
            true => panel_words(by_type!(layer.kind, T, T::SUM), layer.value_stride()),
            false => PAGE * layer.value_stride() / 2,
        };
        let queries = (rows * layer.key_stride()).next_multiple_of(LANES);
        [queries, keys, values, group, group, group, GROUP * layer.value_stride()]
    }

    /// Returns the length of the workspace for items of this many rows: a number of f32 values, divisible by [`LANES`].
    pub(super) fn len(layer: &KvLayer, rows: usize) -> usize {
        Self::lengths(layer, rows).iter().sum()
    }

    #[inline(always)]
    fn new(layer: &KvLayer, memory: &'a mut [f32], rows: usize) -> Workspace<'a> {
        let [queries, keys, values, scores, products, weights, sums] = Self::lengths(layer, rows);
        let (queries, rest) = memory.split_at_mut(queries);
        let (keys, rest) = rest.split_at_mut(keys);
        let (values, rest) = rest.split_at_mut(values);
        let (scores, rest) = rest.split_at_mut(scores);
        let (products, rest) = rest.split_at_mut(products);
        let (weights, rest) = rest.split_at_mut(weights);
        Workspace {
            queries: bytemuck::cast_slice_mut(queries),
            keys: bytemuck::cast_slice_mut(keys),
            values: bytemuck::cast_slice_mut(values),
            scores,
            products: bytemuck::cast_slice_mut(products),
            weights: bytemuck::cast_slice_mut(weights),
            sums: &mut rest[..sums],
        }
    }
}

/// Computes the rows of an item over its pages and writes the partial results to `folded`.
pub(super) struct ItemKernel<'a> {
    pub task: &'a AttentionTask<'a>,
    pub tile: &'a Tile,
    pub item: &'a Item,
    /// Next item of this thread, for prefetching.
    pub then: Option<(&'a Tile, &'a Item)>,
    pub folded: &'a mut [f32],
    pub workspace: &'a mut [f32],
}

impl ItemKernel<'_> {
    #[inline(always)]
    pub(super) fn over<T: Element>(self) {
        let ItemKernel { task, tile, item, then, folded, workspace } = self;
        let layer = task.layer;
        let row_len = layer.value_stride() + STATE;
        let rows = tile.tokens * task.group();
        let folded = &mut folded[..rows * row_len];
        for row in folded.chunks_exact_mut(row_len) {
            row.fill(0.0);
            row[row_len - LANES] = f32::NEG_INFINITY;
        }
        let Workspace { queries, keys, values, scores, products, weights, sums } =
            Workspace::new(layer, workspace, rows);
        let query_words = layer.key_stride() / pair(T::SUM);
        for (row, words) in queries[..rows * query_words].chunks_exact_mut(query_words).enumerate() {
            words[query_words - 1] = 0;
            query_weights::<T>(task, tile, item, row, words);
        }
        for page in item.pages.clone() {
            let (next_keys, next_values) = upcoming::<T>(task, tile, item, page, then);
            let head = layer.head::<T>(&task.caches[tile.sequence].pages()[page], item.head);
            let keys = panel(task.cpu, head.keys, &mut *keys);
            let values = match layer.heads.shared {
                true => values_of_keys(T::SUM, keys, layer, tile.visible(page), &mut *values),
                false => panel(task.cpu, head.values, &mut *values),
            };
            let panels = Panels { keys, values, head };
            for (first, folded) in (0..).step_by(GROUP).zip(folded.chunks_mut(GROUP * row_len)) {
                let next = if first == 0 { [next_keys, next_values] } else { [&[] as &[u8]; 2] };
                let group = RowGroup { task, tile, page, first, rows: folded.len() / row_len, panels: &panels, next };
                let slots = group.slots();
                let range = group.range(&slots);
                if range.is_empty() {
                    continue;
                }
                group.scores(&queries[first * query_words..], query_words, &range, scores, products);
                let mut states = [(f32::NEG_INFINITY, [f32::NEG_INFINITY; LANES]); GROUP];
                for r in 0..group.rows {
                    let scores = &mut scores[r * PAGE..][range.clone()];
                    mask(scores, range.start, &slots[r], task.shape.softcap);
                    let (m, lanes) = match T::SCALE_BLOCK {
                        None => row_probabilities(task.cpu, T::SUM, scores, &mut weights[r * PAGE..]),
                        Some(_) => row_probabilities(task.cpu, SumType::F32, scores, &mut products[r * PAGE..]),
                    };
                    states[r] = (if slots[r].is_empty() { f32::NEG_INFINITY } else { m }, lanes);
                }
                group.weighted_sums(&range, products, weights, sums);
                task.cpu.level().run(FoldGroup { folded, row_len, states: &states, sums });
            }
        }
    }
}

/// Returns the visible keys and values of the page that is processed after `page`, for prefetching: of the item's next
/// page, or of the first page of the next item, `then`. Both slices are empty if nothing follows.
#[inline(always)]
fn upcoming<'a, T: Element>(
    task: &AttentionTask<'a>,
    tile: &Tile,
    item: &Item,
    page: usize,
    then: Option<(&Tile, &Item)>,
) -> (&'a [u8], &'a [u8]) {
    let (tile, item, page) = match then {
        _ if page + 1 < item.pages.end => (tile, item, page + 1),
        Some((tile, item)) => (tile, item, item.pages.start),
        None => return (&[], &[]),
    };
    let layer = task.layer;
    let head = layer.head::<T>(&task.caches[tile.sequence].pages()[page], item.head);
    let elements = |stride: usize| tile.visible(page) * stride / T::NUMBERS;
    let (keys, values) = (elements(layer.key_stride()), elements(layer.value_stride()).min(head.values.len()));
    (bytemuck::cast_slice(&head.keys[..keys]), bytemuck::cast_slice(&head.values[..values]))
}

/// Writes the query of a row of a tile to `words`, as the weights of a [`WeightedSum`].
#[inline(always)]
fn query_weights<T: Element>(task: &AttentionTask<'_>, tile: &Tile, item: &Item, row: usize, words: &mut [u32]) {
    let (group, dim) = (task.group(), task.layer.heads.key);
    let (token, head) = (tile.first + row / group, item.head * group + row % group);
    let query = &task.queries[(token * task.shape.n_heads + head) * dim..][..dim];
    if T::ROTATED {
        let mut room = [0f32; MAX_HEAD];
        let rotated = &mut room[..dim];
        rotated.copy_from_slice(query);
        rotate(rotated, task.layer.heads.rotations()[0]);
        return weights(T::SUM, rotated, words);
    }
    weights(T::SUM, query, words);
}

/// Keys and values of one head in a page.
struct Panels<'a, T> {
    /// Keys in the form that products read.
    keys: &'a [u8],
    /// Values in the form that products read.
    values: &'a [u8],
    /// The head in its stored form.
    head: Head<'a, T>,
}

/// Up to [`GROUP`] rows of a tile that are computed together for one page.
struct RowGroup<'a, T> {
    task: &'a AttentionTask<'a>,
    tile: &'a Tile,
    page: usize,
    /// First row in the tile.
    first: usize,
    rows: usize,
    panels: &'a Panels<'a, T>,
    /// Keys and values that are needed after this page, for prefetching.
    next: [&'a [u8]; 2],
}

impl<T: Element> RowGroup<'_, T> {
    /// Returns the slots (positions within the page) that each row attends to.
    #[inline(always)]
    fn slots(&self) -> [Range<usize>; GROUP] {
        let group = self.task.group();
        let position = |row: usize| self.tile.position + row / group;
        let clip = |position: usize| position.saturating_sub(self.page * PAGE).min(PAGE);
        let of = |position: usize| {
            let visible = self.task.visible(position);
            clip(visible.start)..clip(visible.end)
        };
        let (first, last) = (of(position(self.first)), of(position(self.first + self.rows - 1)));
        // Rows are in the order of positions: if the first and the last see the same slots, so do all others.
        if first == last {
            return std::array::from_fn(|_| first.clone());
        }
        std::array::from_fn(|r| of(position(self.first + r.min(self.rows - 1))))
    }

    /// Returns the slots that at least one row attends to, extended at both ends to multiples of [`LANES`].
    #[inline(always)]
    fn range(&self, slots: &[Range<usize>; GROUP]) -> Range<usize> {
        // Rows are in the order of positions, so the first row begins and the last row ends the range.
        slots[0].start / LANES * LANES..slots[GROUP - 1].end.next_multiple_of(LANES)
    }

    /// Writes the query-key products of the slots in `range` to `scores`. For cache types with scales, `products` is a
    /// buffer for products that are not yet multiplied by them.
    #[inline(always)]
    fn scores(
        &self,
        queries: &[u32],
        query_words: usize,
        range: &Range<usize>,
        scores: &mut [f32],
        products: &mut [u32],
    ) {
        let products: &mut [f32] = bytemuck::cast_slice_mut(products);
        let from = range.start / LANES;
        let step = T::SUM.vector_bytes();
        let panel = query_words * step;
        let mut sum = WeightedSum {
            values: &self.panels.keys[from * panel..],
            step,
            steps: query_words,
            vector: panel,
            vectors: range.len() / LANES,
            weights: queries,
            weight_row: query_words,
            rows: self.rows,
            next: self.next[0],
        };
        let out = &mut scores[range.start..];
        let Some(block) = T::SCALE_BLOCK else {
            return self.task.cpu.weighted_sum(T::SUM, &sum, out, PAGE);
        };
        let words = block / pair(T::SUM);
        for (b, scales) in self.panels.head.key_scales.chunks_exact(PAGE).enumerate() {
            sum.values = &self.panels.keys[from * panel + b * words * step..];
            sum.weights = &queries[b * words..];
            sum.steps = words.min(query_words - b * words);
            self.task.cpu.weighted_sum(T::SUM, &sum, products, PAGE);
            let len = sum.vectors * LANES;
            let scales = &scales[range.start..][..len];
            for r in 0..self.rows {
                let (out, products) = (&mut out[r * PAGE..][..len], &products[r * PAGE..][..len]);
                for i in 0..len {
                    out[i] = if b == 0 { products[i] * scales[i] } else { products[i].mul_add(scales[i], out[i]) };
                }
            }
        }
    }

    /// Computes the weighted sums of the values in `range`: `sums` is `(rows, value_stride)`. For cache types without
    /// scales, `words` holds the probabilities as weights. For types with scales, the probabilities are read from
    /// `probabilities`, multiplied by the scales of the values and written to `words` first.
    #[inline(always)]
    fn weighted_sums(&self, range: &Range<usize>, probabilities: &[u32], words: &mut [u32], sums: &mut [f32]) {
        let (pair, stride) = (pair(T::SUM), self.task.layer.value_stride());
        let vector = T::SUM.vector_bytes();
        let sum = WeightedSum {
            values: &self.panels.values[range.start / pair * (stride / LANES * vector)..],
            step: stride / LANES * vector,
            steps: range.len() / pair,
            vector,
            vectors: stride / LANES,
            weights: &[],
            weight_row: PAGE,
            rows: self.rows,
            next: self.next[1],
        };
        let Some(block) = T::SCALE_BLOCK else {
            return self.task.cpu.weighted_sum(T::SUM, &WeightedSum { weights: words, ..sum }, sums, stride);
        };
        for (b, scales) in self.panels.head.value_scales.chunks_exact(PAGE).enumerate() {
            let scales = &scales[range.clone()];
            let mut scaled = [0f32; PAGE];
            let scaled = &mut scaled[..range.len()];
            for r in 0..self.rows {
                let probabilities: &[f32] = bytemuck::cast_slice(&probabilities[r * PAGE..][..range.len()]);
                for i in 0..scaled.len() {
                    scaled[i] = probabilities[i] * scales[i];
                }
                weights(T::SUM, scaled, &mut words[r * PAGE..]);
            }
            let first = b * block / LANES;
            let vectors = (block / LANES).min(sum.vectors - first);
            let sum = WeightedSum { values: &sum.values[first * vector..], vectors, weights: words, ..sum };
            self.task.cpu.weighted_sum(T::SUM, &sum, &mut sums[first * LANES..], stride);
        }
    }
}
