//! KV cache: keys and values of every layer of a sequence, in pages of [`PAGE`] positions that are added as it grows.
//!
//! Within a page, the data of a layer and key/value head is contiguous: the keys transposed in groups of 16 positions,
//! so that scores need no horizontal sums; then the values position by position, with heads padded to whole lanes,
//! unless values are the first numbers of the keys, from which attention then takes them; then, for types with scales,
//! the scales of the keys and of the values, `[blocks][PAGE]` each, where a block is the values of a head that share a
//! scale. Numbers that are multiplied in pairs (`pair` is 1 for f32 and f16, otherwise 2)
//! are adjacent: keys are `[PAGE/16][key_stride/pair][16][pair]` and values `[PAGE/pair][value_stride][pair]`. Clones
//! of a sequence share pages until one of them writes.

mod coded;
mod element;
mod hadamard;
mod layout;
mod numbers;
mod pool;

pub(super) use coded::{Fp8, Int4Pair, Int8};
pub use element::KvType;
pub(super) use element::{Bf16, Element, F16, by_type, panel, probabilities};
pub(super) use hadamard::rotate;
pub(super) use layout::Head;
use layout::HeadMut;
pub use layout::{KvHeads, KvLayer, KvLayout};
pub use pool::{Page, PagePool, exhausted, pages_within};

use super::cpu::{Cpu, pair};
use super::ops::LANES;
use crate::error::Result;
use crate::simd::Kernel;
use std::sync::Arc;

/// Number of positions per page.
pub const PAGE: usize = 128;
/// Largest padded head size that a cache and attention support; the engine rejects models beyond it.
pub const MAX_HEAD: usize = 1024;

/// A cache line of 64 bytes, the alignment of vectors in a page.
#[derive(Debug, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
pub struct Line([u8; 64]);

impl Default for Line {
    fn default() -> Line {
        Line([0; 64])
    }
}

/// KV cache of one sequence.
#[derive(Debug, Clone)]
pub struct KvCache {
    pool: Arc<PagePool>,
    pages: Vec<Page>,
    len: usize,
}

impl KvCache {
    /// Creates an empty cache, which takes no page of the pool until it grows.
    pub fn new(pool: &Arc<PagePool>) -> KvCache {
        KvCache { pool: pool.clone(), pages: Vec::new(), len: 0 }
    }

    /// Returns the sizes of the cache.
    pub fn layout(&self) -> &KvLayout {
        self.pool.layout()
    }

    /// Makes room for `more` positions and counts them as part of the cache; the caller must then write every layer.
    /// A page that has another owner and will be written is copied.
    ///
    /// # Errors
    /// The pool has no page left; the cache is as before.
    pub fn grow(&mut self, more: usize) -> Result<()> {
        let end = self.len + more;
        let new = end.div_ceil(PAGE).saturating_sub(self.pages.len());
        let added = (0..new).map(|_| self.pool.page()).collect::<Result<Vec<Page>>>()?;
        if more > 0
            && let Some(page) = self.pages.get_mut(self.len / PAGE)
            && page.is_shared()
        {
            *page = self.pool.copy(page)?;
        }
        self.pages.extend(added);
        self.len = end;
        Ok(())
    }

    /// Replaces the contents by `len` positions of pages that another cache has written.
    pub fn share(&mut self, pages: Vec<Page>, len: usize) {
        assert_eq!(pages.len(), len.div_ceil(PAGE), "pages of `len` positions");
        (self.pages, self.len) = (pages, len);
    }

    /// Drops all positions from `len` on, and returns the number of those that are left.
    pub fn truncate(&mut self, len: usize) -> usize {
        self.len = self.len.min(len);
        self.pages.truncate(self.len.div_ceil(PAGE));
        self.len
    }

    /// Stores keys, `(positions, heads.count * heads.key)`, and values, `(positions, heads.count * heads.value)` or
    /// none if they are the first numbers of the keys, of consecutive positions in one layer. The cache must have grown
    /// to include these positions, and no clone may have been made since.
    ///
    /// # Panics
    /// A page has another owner.
    pub fn write(&mut self, cpu: &Cpu, layer: usize, mut position: usize, mut keys: &[f32], mut values: &[f32]) {
        let layer = self.layout().layers()[layer];
        let [key_width, value_width] = layer.widths();
        while !keys.is_empty() {
            let tokens = (PAGE - position % PAGE).min(keys.len() / key_width);
            let (k, next_keys) = keys.split_at(tokens * key_width);
            let (v, next_values) = values.split_at(tokens * value_width);
            let task = PageWrite { layer: &layer, slot: position % PAGE, keys: k, values: v };
            write_page(cpu, &mut self.pages[position / PAGE], &task);
            (position, keys, values) = (position + tokens, next_keys, next_values);
        }
    }

    /// Returns the pages.
    pub fn pages(&self) -> &[Page] {
        &self.pages
    }
}

/// A write to one page: the layer, the first slot, and the keys and values of the tokens.
struct PageWrite<'a> {
    layer: &'a KvLayer,
    slot: usize,
    /// Keys: `(tokens, heads.count * heads.key)`.
    keys: &'a [f32],
    /// Values: `(tokens, heads.count * heads.value)`; empty if they are the first numbers of the keys.
    values: &'a [f32],
}

fn write_page(cpu: &Cpu, page: &mut Page, task: &PageWrite<'_>) {
    let (layer, lines) = (task.layer, task.layer.head_lines());
    let heads = &mut page.get_mut().expect("`grow` copied a page with another owner")[layer.range()];
    // Waking threads costs more than writing a few tokens.
    let heads_per_task = if task.keys.len() < 8192 { layer.heads.count } else { 1 };
    cpu.for_chunks(heads, heads_per_task * lines, |i, part| {
        for (j, to) in part.chunks_exact_mut(lines).enumerate() {
            cpu.level().run(Write { head: i * heads_per_task + j, to: bytemuck::cast_slice_mut(to), task });
        }
    });
}

/// Stores tokens in one head of a page.
struct Write<'a> {
    head: usize,
    /// Bytes of the head in the page.
    to: &'a mut [u8],
    task: &'a PageWrite<'a>,
}

impl Kernel for Write<'_> {
    #[inline(always)]
    fn run(self) {
        by_type!(self.task.layer.kind, T, self.store::<T>());
    }
}

impl Write<'_> {
    #[inline(always)]
    fn store<T: Element>(self) {
        let (task, layer, pair) = (self.task, self.task.layer, pair(T::SUM));
        let (heads, key_stride, value_stride) = (layer.heads, layer.key_stride(), layer.value_stride());
        let HeadMut { keys, values, key_scales, value_scales } = layer.head_mut::<T>(self.to);
        let [key_width, value_width] = layer.widths();
        let [key_order, value_order] = heads.rotations();
        let mut room = [0f32; MAX_HEAD];
        for (slot, key) in (task.slot..).zip(task.keys.chunks_exact(key_width)) {
            let scale = if T::SCALE_BLOCK.is_some() { slot } else { 0 };
            let first = slot / LANES * LANES * key_stride + slot % LANES * pair;
            let key = &key[self.head * heads.key..][..heads.key];
            let head = prepared::<T>(key, key_order, &mut room, &mut key_scales[scale..]);
            for (i, value) in head.iter().enumerate() {
                T::store(keys, first + i / pair * LANES * pair + i % pair, *value);
            }
        }
        if value_width == 0 {
            return;
        }
        for (slot, value) in (task.slot..).zip(task.values.chunks_exact(value_width)) {
            let scale = if T::SCALE_BLOCK.is_some() { slot } else { 0 };
            let first = slot / pair * pair * value_stride + slot % pair;
            let value = &value[self.head * heads.value..][..heads.value];
            let head = prepared::<T>(value, value_order, &mut room, &mut value_scales[scale..]);
            for (i, value) in head.iter().enumerate() {
                T::store(values, first + i * pair, *value);
            }
        }
    }
}

/// Returns the values of a head as [`Element::store`] takes them: rotated by the matrix of this order for types that
/// are stored so, and divided by their scales for types with scales. The scale of block `i` is written to
/// `scales[i * PAGE]`.
#[inline(always)]
fn prepared<'a, T: Element>(
    head: &'a [f32],
    order: usize,
    room: &'a mut [f32; MAX_HEAD],
    scales: &mut [f32],
) -> &'a [f32] {
    if T::SCALE_BLOCK.is_none() && !T::ROTATED {
        return head;
    }
    let room = &mut room[..head.len()];
    room.copy_from_slice(head);
    if T::ROTATED {
        rotate(room, order);
    }
    if let Some(block) = T::SCALE_BLOCK {
        for (b, block) in room.chunks_mut(block).enumerate() {
            let scale = T::scale(block);
            // The inverse of zero, or of a number near it, is not finite.
            let inverse = if (1.0 / scale).is_finite() { 1.0 / scale } else { 0.0 };
            block.iter_mut().for_each(|value| *value *= inverse);
            scales[b * PAGE] = scale;
        }
    }
    room
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn clones_share_pages_until_one_writes() {
        let pool = PagePool::new(KvLayout::new(KvType::F16, [KvHeads::new(1, 2)]), None).unwrap();
        let mut a = KvCache::new(&pool);
        a.grow(1).unwrap();
        let cpu = Cpu::new(1).unwrap();
        a.write(&cpu, 0, 0, &[1.0, 2.0], &[3.0, 4.0]);
        let mut b = a.clone();
        b.grow(1).unwrap();
        b.write(&cpu, 0, 1, &[5.0, 6.0], &[7.0, 8.0]);
        let key = |cache: &KvCache, position: usize| {
            let bytes = bytemuck::cast_slice::<Line, u8>(&cache.pages()[0]);
            f16::from_le_bytes([bytes[2 * position], bytes[2 * position + 1]]).to_f32()
        };
        assert_eq!((key(&a, 0), key(&a, 1), key(&b, 0), key(&b, 1)), (1.0, 0.0, 1.0, 5.0));
        b.truncate(0);
        assert_eq!((b.len, b.pages().len(), a.len), (0, 0, 1));
    }

    /// Index of the layer that is written and read, between layers of other sizes.
    const LAYER: usize = 1;

    /// Checks that keys and values of these sizes are read as they were written up to `step`, the distance of numbers
    /// relative to the largest value of a head.
    fn check_round_trip<T: Element>(kind: KvType, [key, value]: [usize; 2], step: f32) {
        let heads = KvHeads { count: 2, key, value, shared: false };
        let layout = KvLayout::new(kind, [KvHeads::new(3, 32), heads, KvHeads::new(1, 16)]);
        let (mut cache, cpu) = (KvCache::new(&PagePool::new(layout, None).unwrap()), Cpu::new(1).unwrap());
        let (mut rng, tokens) = (crate::rng::Rng::new(11), 37);
        let mut random = |dim: usize| (0..tokens * 2 * dim).map(|_| rng.next_normal() as f32).collect::<Vec<f32>>();
        let (keys, values) = (random(key), random(value));
        cache.grow(tokens).unwrap();
        // In two parts, of which the second begins in the middle of a pair of positions.
        let rest = 21;
        cache.write(&cpu, LAYER, 0, &keys[..rest * 2 * key], &values[..rest * 2 * value]);
        cache.write(&cpu, LAYER, rest, &keys[rest * 2 * key..], &values[rest * 2 * value..]);
        let read = cache.layout().layers()[LAYER].numbers(&cache.pages()[0], 1, tokens);
        for slot in 0..tokens {
            let found = [&read[0][slot * key..][..key], &read[1][slot * value..][..value]];
            for ((found, all), dim) in found.into_iter().zip([&keys, &values]).zip([key, value]) {
                let mut expected = all[(slot * 2 + 1) * dim..][..dim].to_vec();
                if T::ROTATED && dim > 0 {
                    rotate(&mut expected, hadamard::order(dim));
                }
                let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
                for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
                    assert!((a - b).abs() <= step * largest, "{kind}, {key}, {value}: {a}, not {b} at {slot}, {i}");
                }
            }
        }
        let page = &cache.pages()[0];
        let range = cache.layout().layers()[LAYER].range();
        let others = page[..range.start].iter().chain(&page[range.end..]);
        assert!(others.flat_map(bytemuck::bytes_of).all(|byte| *byte == 0), "{kind}: another layer was written");
    }

    #[test]
    fn keys_and_values_are_read_as_they_were_written_up_to_rounding() {
        for sizes in [[16, 16], [64, 64], [80, 80], [256, 256], [192, 128], [16, 64], [576, 0]] {
            check_round_trip::<Int8>(KvType::Int8, sizes, 0.5 / 126.9);
            check_round_trip::<Fp8>(KvType::Fp8, sizes, 1.01 / 28.0);
            // The largest magnitude is -8 steps, so values of the other sign reach 7 steps.
            check_round_trip::<Int4Pair>(KvType::Int4, sizes, 1.01 / 8.0);
        }
        check_round_trip::<Int8>(KvType::Int8, [20, 20], 0.5 / 126.9);
        check_round_trip::<Fp8>(KvType::Fp8, [20, 20], 1.01 / 28.0);
    }
}
