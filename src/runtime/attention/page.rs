//! The arithmetic of attention: some rows over the pages of an item.
//!
//! Scores are in units of a power of two: `s = q . k * log2(e)`, capped if the model does so. A page yields for each row
//! the whole number `m` above its largest score, the sum `l` of `2^(s - m)` and the values weighted by `2^(s - m)`. As `m`
//! is whole, folding scales by powers of two, which are exact. Sums are f32, one lane per position (scores, `l`) or per
//! value (weighted sums).

use super::{Item, STATE, Task, Tile};
use crate::runtime::cpu::scalar::fold as fold_lanes;
use crate::runtime::cpu::{Cpu, Mix, MixType};
use crate::runtime::kv::{Element, Head, KvLayout, PAGE, SCALE_BLOCK, pair, probabilities, weights};
use crate::runtime::ops::{LANES, exp2, max, softcap};
use crate::simd::Kernel;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Rows whose sums are held in registers at once.
const GROUP: usize = 8;

/// Widest head, padded, that attention takes; the engine refuses models beyond it.
pub const MAX_HEAD: usize = 1024;

/// Memory for one item at a time.
pub(super) struct Workspace<'a> {
    /// Queries as weights: one row after the other.
    queries: &'a mut [u32],
    /// Room for the page in another form, see [`Element::panel`].
    keys: &'a mut [u32],
    values: &'a mut [u32],
    /// `(GROUP, PAGE)`.
    scores: &'a mut [f32],
    /// `(GROUP, PAGE)`: products, or probabilities, on their way through the scales; bits of f32.
    products: &'a mut [u32],
    /// `(GROUP, PAGE)`: probabilities as weights.
    weights: &'a mut [u32],
    /// `(GROUP, value_stride)`.
    sums: &'a mut [f32],
}

impl<'a> Workspace<'a> {
    fn lengths(layout: &KvLayout, rows: usize) -> [usize; 7] {
        let group = GROUP * PAGE;
        let (keys, values) = (PAGE * layout.key_stride() / 2, PAGE * layout.value_stride() / 2);
        let queries = (rows * layout.key_stride()).next_multiple_of(LANES);
        [queries, keys, values, group, group, group, GROUP * layout.value_stride()]
    }

    /// Words that are needed for items of this many rows: whole lanes.
    pub(super) fn len(layout: &KvLayout, rows: usize) -> usize {
        Self::lengths(layout, rows).iter().sum()
    }

    #[inline(always)]
    fn new(layout: &KvLayout, memory: &'a mut [f32], rows: usize) -> Workspace<'a> {
        let [queries, keys, values, scores, products, weights, sums] = Self::lengths(layout, rows);
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

/// The rows of an item over its pages; what is folded goes to `folded`.
pub(super) struct ItemKernel<'a> {
    pub task: &'a Task<'a>,
    pub tile: &'a Tile,
    pub item: &'a Item,
    /// What this thread computes next.
    pub then: Option<(&'a Tile, &'a Item)>,
    pub folded: &'a mut [f32],
    pub workspace: &'a mut [f32],
}

impl ItemKernel<'_> {
    #[inline(always)]
    pub(super) fn over<T: Element>(self) {
        let ItemKernel { task, tile, item, then, folded, workspace } = self;
        let layout = task.layout;
        let row_len = layout.value_stride() + STATE;
        let rows = tile.tokens * task.group();
        let folded = &mut folded[..rows * row_len];
        for row in folded.chunks_exact_mut(row_len) {
            row.fill(0.0);
            row[row_len - LANES] = f32::NEG_INFINITY;
        }
        let Workspace { queries, keys, values, scores, products, weights, sums } =
            Workspace::new(layout, workspace, rows);
        let query_words = layout.key_stride() / pair(T::MIX);
        for (row, words) in queries[..rows * query_words].chunks_exact_mut(query_words).enumerate() {
            words[query_words - 1] = 0;
            query_weights(T::MIX, task, tile, item, row, words);
        }
        for page in item.pages.clone() {
            let (next_keys, next_values) = upcoming::<T>(task, tile, item, page, then);
            let head =
                layout.head::<T>(&task.sequences[tile.sequence].cache.pages()[page], task.shape.layer, item.head);
            let panels =
                Panels { keys: T::panel(head.keys, &mut *keys), values: T::panel(head.values, &mut *values), head };
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
                    let (m, lanes) = match T::LARGEST {
                        None => row_probabilities(task.cpu, T::MIX, scores, &mut weights[r * PAGE..]),
                        Some(_) => row_probabilities(task.cpu, MixType::F32, scores, &mut products[r * PAGE..]),
                    };
                    states[r] = (if slots[r].is_empty() { f32::NEG_INFINITY } else { m }, lanes);
                }
                group.weighted_sums(&range, products, weights, sums);
                task.cpu.level().run(FoldGroup { folded, row_len, states: &states, sums });
            }
        }
    }
}

/// The keys and values that are needed after a page of an item, as far as they are visible.
#[inline(always)]
fn upcoming<'a, T: Element>(
    task: &Task<'a>,
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
    let layout = task.layout;
    let head = layout.head::<T>(&task.sequences[tile.sequence].cache.pages()[page], task.shape.layer, item.head);
    let visible = (tile.position + tile.tokens - page * PAGE).min(PAGE).next_multiple_of(LANES);
    let (keys, values) = (&head.keys[..visible * layout.key_stride()], &head.values[..visible * layout.value_stride()]);
    (bytemuck::cast_slice(keys), bytemuck::cast_slice(values))
}

/// The query of a row of a tile as weights.
#[inline(always)]
fn query_weights(mix: MixType, task: &Task<'_>, tile: &Tile, item: &Item, row: usize, words: &mut [u32]) {
    let (group, dim) = (task.group(), task.layout.head_dim);
    let (token, head) = (tile.first + row / group, item.head * group + row % group);
    weights(mix, &task.queries[(token * task.n_heads + head) * dim..][..dim], words);
}

/// One head of a page.
struct Panels<'a, T> {
    /// Keys in the form that is multiplied.
    keys: &'a [u8],
    /// Values in the form that is multiplied.
    values: &'a [u8],
    /// As it is stored.
    head: Head<'a, T>,
}

/// Up to [`GROUP`] rows over one page.
struct RowGroup<'a, T> {
    task: &'a Task<'a>,
    tile: &'a Tile,
    page: usize,
    /// First row of the tile.
    first: usize,
    rows: usize,
    panels: &'a Panels<'a, T>,
    /// Keys and values that will be needed after this page.
    next: [&'a [u8]; 2],
}

impl<T: Element> RowGroup<'_, T> {
    /// The slots of the page that each row sees.
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
        // Rows are in the order of positions, so all see the same where the first and the last do.
        if first == last {
            return std::array::from_fn(|_| first.clone());
        }
        std::array::from_fn(|r| of(position(self.first + r.min(self.rows - 1))))
    }

    /// The slots that any row sees, rounded out to whole lanes.
    #[inline(always)]
    fn range(&self, slots: &[Range<usize>; GROUP]) -> Range<usize> {
        // Rows are in the order of positions.
        slots[0].start / LANES * LANES..slots[GROUP - 1].end.next_multiple_of(LANES)
    }

    /// Query-key products of the slots in `range`.
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
        let (step, words) = (T::MIX.vector_bytes(), SCALE_BLOCK / pair(T::MIX));
        let panel = query_words * step;
        let mut mix = Mix {
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
        if T::LARGEST.is_none() {
            return self.task.cpu.mix(T::MIX, &mix, out, PAGE);
        }
        for (b, scales) in self.panels.head.key_scales.chunks_exact(PAGE).enumerate() {
            mix.values = &self.panels.keys[from * panel + b * words * step..];
            mix.weights = &queries[b * words..];
            mix.steps = words.min(query_words - b * words);
            self.task.cpu.mix(T::MIX, &mix, products, PAGE);
            let len = mix.vectors * LANES;
            let scales = &scales[range.start..][..len];
            for r in 0..self.rows {
                let (out, products) = (&mut out[r * PAGE..][..len], &products[r * PAGE..][..len]);
                for ((out, product), scale) in out.iter_mut().zip(products).zip(scales) {
                    *out = if b == 0 { product * scale } else { product.mul_add(*scale, *out) };
                }
            }
        }
    }

    /// The values in `range`, weighted: `sums` is `(rows, value_stride)`. Of types with scales the probabilities are still
    /// to be scaled; of others they are in `words`.
    #[inline(always)]
    fn weighted_sums(&self, range: &Range<usize>, probabilities: &[u32], words: &mut [u32], sums: &mut [f32]) {
        let (pair, stride) = (pair(T::MIX), self.task.layout.value_stride());
        let vector = T::MIX.vector_bytes();
        let mix = Mix {
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
        if T::LARGEST.is_none() {
            return self.task.cpu.mix(T::MIX, &Mix { weights: words, ..mix }, sums, stride);
        }
        for (b, scales) in self.panels.head.value_scales.chunks_exact(PAGE).enumerate() {
            let mut scaled = [0f32; PAGE];
            let scaled = &mut scaled[..range.len()];
            for r in 0..self.rows {
                let probabilities: &[f32] = bytemuck::cast_slice(&probabilities[r * PAGE..][..range.len()]);
                for ((scaled, p), scale) in scaled.iter_mut().zip(probabilities).zip(&scales[range.clone()]) {
                    *scaled = p * scale;
                }
                weights(T::MIX, scaled, &mut words[r * PAGE..]);
            }
            let first = b * SCALE_BLOCK / LANES;
            let vectors = (SCALE_BLOCK / LANES).min(mix.vectors - first);
            let mix = Mix { values: &mix.values[first * vector..], vectors, weights: words, ..mix };
            self.task.cpu.mix(T::MIX, &mix, &mut sums[first * LANES..], stride);
        }
    }
}

/// Caps the scores in `slots`; the others become minus infinity. `scores` begin at slot `from`.
#[inline(always)]
fn mask(scores: &mut [f32], from: usize, slots: &Range<usize>, cap: Option<f32>) {
    let seen = slots.start.saturating_sub(from).min(scores.len())..slots.end.saturating_sub(from);
    if let Some(cap) = cap {
        for score in &mut scores[seen.clone()] {
            *score = softcap(*score, cap * LOG2_E);
        }
    }
    scores[..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..].fill(f32::NEG_INFINITY);
}

/// Turns the scores of a row into probabilities: gives their reference and the lanes of their sum.
#[inline(always)]
fn row_probabilities(cpu: &Cpu, mix: MixType, scores: &[f32], words: &mut [u32]) -> (f32, [f32; LANES]) {
    if mix == MixType::Bf16
        && let Some(done) = cpu.probabilities(scores, words)
    {
        return done;
    }
    let m = reference(max(&peaks(scores)));
    (m, probabilities(mix, scores, m, words))
}

/// The largest score of each lane; what is not a number is skipped.
#[inline(always)]
fn peaks(scores: &[f32]) -> [f32; LANES] {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in scores.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            lanes[l] = if chunk[l] > lanes[l] { chunk[l] } else { lanes[l] };
        }
    }
    lanes
}

/// The whole number above the largest score; finite, so that scores which are not numbers stay so.
#[inline(always)]
pub(crate) fn reference(largest: f32) -> f32 {
    largest.ceil().max(f32::MIN)
}

/// Adds the results of the next page to the rows in `folded`.
struct FoldGroup<'a> {
    folded: &'a mut [f32],
    row_len: usize,
    states: &'a [(f32, [f32; LANES]); GROUP],
    sums: &'a [f32],
}

impl Kernel for FoldGroup<'_> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let FoldGroup { folded, row_len, states, sums } = self;
        let stride = row_len - STATE;
        // What is there is multiplied by the first factors, what comes by the others.
        let mut factors = [f32::NEG_INFINITY; 2 * GROUP];
        for (r, row) in folded.chunks_exact_mut(row_len).enumerate() {
            let (own, other) = (row[row_len - LANES], states[r].0);
            let larger = if other > own { other } else { own };
            (factors[r], factors[GROUP + r]) = (own - larger, other - larger);
            row[row_len - LANES] = larger;
        }
        for factor in &mut factors {
            *factor = exp2(*factor);
        }
        for (r, (row, sums)) in folded.chunks_exact_mut(row_len).zip(sums.chunks_exact(stride)).enumerate() {
            if states[r].0 != f32::NEG_INFINITY {
                fold(row, factors[r], factors[GROUP + r], &states[r].1, sums);
            }
        }
    }
}

/// What multiplies sums of reference `own` and of reference `other` to bring both to the larger.
#[inline(always)]
fn factors(own: f32, other: f32) -> (f32, f32) {
    let larger = if other > own { other } else { own };
    (exp2(own - larger), exp2(other - larger))
}

/// `row * keep + other * add` for the values and the lanes of the sum.
#[inline(always)]
fn fold(row: &mut [f32], keep: f32, add: f32, lanes: &[f32], sums: &[f32]) {
    let (values, state) = row.split_at_mut(row.len() - STATE);
    add_scaled(state, keep, lanes, add);
    add_scaled(values, keep, sums, add);
}

/// `own * keep + other * add` over whole vectors, as many as `other` has.
#[inline(always)]
fn add_scaled(own: &mut [f32], keep: f32, other: &[f32], add: f32) {
    let (own, other) = (own.as_chunks_mut::<LANES>().0, other.as_chunks::<LANES>().0);
    for i in 0..own.len().min(other.len()) {
        // An array of its own is what the compiler turns into a vector.
        let mut lanes = own[i];
        for l in 0..LANES {
            lanes[l] = lanes[l] * keep + other[i][l] * add;
        }
        own[i] = lanes;
    }
}

/// Folds what the items of one query head found and divides by the sum, in which a sink takes part.
pub(super) struct Finish<'a, I> {
    pub states: I,
    pub sink: Option<f32>,
    pub out: &'a mut [f32],
}

impl<'a, I: ExactSizeIterator<Item = &'a [f32]>> Kernel for Finish<'_, I> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Finish { mut states, sink, out } = self;
        if states.len() == 1 {
            return finish(states.next().expect("one state"), sink, out);
        }
        let mut folded = [0f32; MAX_HEAD + STATE];
        let mut len = 0;
        for state in states {
            if len == 0 {
                len = state.len();
                folded[len - LANES] = f32::NEG_INFINITY;
            }
            let (values, rest) = state.split_at(len - STATE);
            let (own, other) = (folded[len - LANES], rest[LANES]);
            if other != f32::NEG_INFINITY {
                let (keep, add) = factors(own, other);
                fold(&mut folded[..len], keep, add, &rest[..LANES], values);
                folded[len - LANES] = if other > own { other } else { own };
            }
        }
        finish(&folded[..len], sink, out);
    }
}

#[inline(always)]
fn finish(state: &[f32], sink: Option<f32>, out: &mut [f32]) {
    let (values, state) = state.split_at(state.len() - STATE);
    let l = fold_lanes(*state.first_chunk().expect("lanes of the sum"));
    let m = state[LANES];
    let (keep, sink) = match sink.map(|sink| sink * LOG2_E) {
        Some(sink) if sink > m => (exp2(m - sink), 1.0),
        Some(sink) => (1.0, exp2(sink - m)),
        None => (1.0, 0.0),
    };
    let scale = keep / (l * keep + sink);
    for (out, value) in out.iter_mut().zip(values) {
        *out = value * scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn probabilities_of_every_instruction_set_are_those_of_the_law() {
        let mut rng = Rng::new(9);
        for isa in Cpu::isas() {
            let cpu = Cpu::with_isa(1, Some(isa)).unwrap();
            for case in 0..200 {
                let spread = [0.01, 1.0, 20.0, 300.0][case % 4];
                let len = LANES * (1 + case % (PAGE / LANES));
                let mut scores: Vec<f32> = (0..len).map(|_| rng.next_normal() as f32 * spread).collect();
                match case % 7 {
                    0 => scores[len / 2..].fill(f32::NEG_INFINITY),
                    1 => scores.fill(f32::NEG_INFINITY),
                    2 => scores[len - 1] = f32::NAN,
                    3 => scores[len / 3] = f32::INFINITY,
                    4 => scores.iter_mut().for_each(|score| *score = score.round() - 0.0),
                    _ => {}
                }
                let (mut ours, mut law) = ([1u32; PAGE / 2], [1u32; PAGE / 2]);
                let (m, sum) = row_probabilities(&cpu, MixType::Bf16, &scores, &mut ours);
                let reference = reference(max(&peaks(&scores)));
                let lanes = probabilities(MixType::Bf16, &scores, reference, &mut law);
                let half = |bits: u32| if f32::from_bits(bits).is_nan() { u32::MAX } else { bits };
                let halves =
                    |words: &[u32]| words.iter().flat_map(|w| [half(w << 16), half(w >> 16 << 16)]).collect::<Vec<_>>();
                assert_eq!(m, reference, "{isa}, case {case}");
                assert_eq!(sum.map(|s| half(s.to_bits())), lanes.map(|s| half(s.to_bits())), "{isa}, case {case}");
                assert_eq!(halves(&ours), halves(&law), "{isa}, case {case}");
            }
        }
    }
}
