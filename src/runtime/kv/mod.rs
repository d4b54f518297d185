//! KV cache: keys and values of every layer of a sequence, in pages of [`PAGE`] positions that are added as it grows.
//!
//! Within a page, the data of a layer and key/value head is contiguous: the keys transposed in groups of 16 positions,
//! so that scores need no horizontal sums; then the values position by position, with heads padded to whole lanes;
//! then, for types with scales, the scales of the keys and of the values, `[blocks][PAGE]` each, where a block is the
//! values of a head that share a scale. Numbers that are multiplied in pairs (`pair` is 1 for f32 and f16, otherwise 2)
//! are adjacent: keys are `[PAGE/16][key_stride/pair][16][pair]` and values `[PAGE/pair][value_stride][pair]`. Clones
//! of a sequence share pages until one of them writes.

mod coded;
mod element;
mod hadamard;
mod pool;

pub(super) use coded::{Fp8, Int4Pair, Int8};
pub use element::KvType;
pub(super) use element::{Bf16, Element, F16, by_type, pair, panel, probabilities, weights};
pub(super) use hadamard::rotate;
pub use pool::{Page, PageCounts, PagePool, pages_within};

use super::cpu::Cpu;
use super::ops::LANES;
use crate::error::{Error, Result};
use crate::model_config::ModelConfig;
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

/// Sizes of a KV cache, the same for all sequences of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Element type of keys and values.
    pub kind: KvType,
}

impl KvLayout {
    /// Returns the sizes for a model.
    pub fn new(config: &ModelConfig, kind: KvType) -> KvLayout {
        KvLayout { layers: config.n_layers, kv_heads: config.n_kv_heads, head_dim: config.head_dim, kind }
    }

    /// Checks that heads of this size can be stored in this type.
    ///
    /// # Errors
    /// The type stores rotated heads, and no Hadamard matrix fits the head size.
    pub fn check(&self) -> Result<()> {
        if by_type!(self.kind, T, T::ROTATED) && hadamard::block(self.head_dim).is_none() {
            let (kind, dim) = (self.kind, self.head_dim);
            let found = format!("--kv {kind}: head_dim found {dim}, expected a power of two or a multiple of 16");
            return Err(Error::engine(found).help("use --kv int8, which suits every head size"));
        }
        Ok(())
    }

    /// Returns the numbers stored per key: the head size padded to whole pairs.
    pub fn key_stride(&self) -> usize {
        self.head_dim.next_multiple_of(2)
    }

    /// Returns the numbers stored per value: the head size padded to whole lanes.
    pub fn value_stride(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Returns the bytes of one head of one layer in a page.
    fn head_bytes(&self) -> usize {
        by_type!(self.kind, T, {
            let scales = T::SCALE_BLOCK.map_or(0, |block| 2 * self.head_dim.div_ceil(block));
            bytes_of::<T>(PAGE * (self.key_stride() + self.value_stride())) + PAGE * scales * size_of::<f32>()
        })
    }

    /// Returns the bytes of a page; `None` if a page would not fit the address space.
    fn page_bytes(&self) -> Option<usize> {
        self.head_bytes().checked_mul(self.kv_heads)?.checked_mul(self.layers).filter(|n| *n < isize::MAX as usize)
    }

    /// Returns the bytes of the cache of one sequence of `tokens` tokens, in whole pages.
    pub fn bytes(&self, tokens: usize) -> u64 {
        self.page_bytes().map_or(u64::MAX, |page| (page as u64).saturating_mul(tokens.div_ceil(PAGE) as u64))
    }

    /// Splits the bytes of a head into keys, values, scales of keys and scales of values.
    #[inline(always)]
    pub(super) fn head<'a, T: Element>(&self, page: &'a [Line], layer: usize, head: usize) -> Head<'a, T> {
        let lines = self.head_bytes() / size_of::<Line>();
        let bytes: &[u8] = bytemuck::cast_slice(&page[(layer * self.kv_heads + head) * lines..][..lines]);
        let (keys, rest) = bytes.split_at(bytes_of::<T>(PAGE * self.key_stride()));
        let (values, scales) = rest.split_at(bytes_of::<T>(PAGE * self.value_stride()));
        let (key_scales, value_scales) = scales.split_at(scales.len() / 2);
        Head {
            keys: bytemuck::cast_slice(keys),
            values: bytemuck::cast_slice(values),
            key_scales: bytemuck::cast_slice(key_scales),
            value_scales: bytemuck::cast_slice(value_scales),
        }
    }
}

/// Returns the bytes of this many stored numbers.
const fn bytes_of<T: Element>(numbers: usize) -> usize {
    numbers / T::NUMBERS * size_of::<T>()
}

/// Keys and values of one head of one layer in a page.
#[derive(Clone, Copy)]
pub(super) struct Head<'a, T> {
    /// Keys: `[PAGE/16][key_stride/pair][16][pair]`.
    pub keys: &'a [T],
    /// Values: `[PAGE/pair][value_stride][pair]`.
    pub values: &'a [T],
    /// Scales of keys, if any: `[blocks][PAGE]`.
    pub key_scales: &'a [f32],
    /// Scales of values, if any: `[blocks][PAGE]`.
    pub value_scales: &'a [f32],
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

    /// Returns the pool from which the cache takes its pages.
    pub fn pool(&self) -> &Arc<PagePool> {
        &self.pool
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

    /// Drops all positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.pages.truncate(self.len.div_ceil(PAGE));
    }

    /// Stores the keys and values of consecutive positions, `(positions, kv_heads * head_dim)` each, in one layer. The
    /// cache must have grown to include these positions, and no clone may have been made since.
    ///
    /// # Panics
    /// A page has another owner.
    pub fn write(&mut self, cpu: &Cpu, layer: usize, mut position: usize, mut keys: &[f32], mut values: &[f32]) {
        let layout = *self.layout();
        let width = layout.kv_heads * layout.head_dim;
        while !keys.is_empty() {
            let tokens = (PAGE - position % PAGE).min(keys.len() / width);
            let ((k, next_keys), (v, next_values)) = (keys.split_at(tokens * width), values.split_at(tokens * width));
            let task = PageWrite { layer, slot: position % PAGE, keys: k, values: v };
            write_page(cpu, &layout, &mut self.pages[position / PAGE], &task);
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
    layer: usize,
    slot: usize,
    /// Keys: `(tokens, kv_heads * head_dim)`.
    keys: &'a [f32],
    /// Values: `(tokens, kv_heads * head_dim)`.
    values: &'a [f32],
}

fn write_page(cpu: &Cpu, layout: &KvLayout, page: &mut Page, task: &PageWrite<'_>) {
    let lines = layout.head_bytes() / size_of::<Line>();
    let lines_of_page = page.get_mut().expect("`grow` copied a page with another owner");
    let heads = &mut lines_of_page[task.layer * layout.kv_heads * lines..][..layout.kv_heads * lines];
    // Waking threads costs more than writing a few tokens.
    let heads_per_task = if task.keys.len() < 8192 { layout.kv_heads } else { 1 };
    cpu.for_chunks(heads, heads_per_task * lines, |i, part| {
        for (j, to) in part.chunks_exact_mut(lines).enumerate() {
            cpu.level().run(Write { layout, head: i * heads_per_task + j, to: bytemuck::cast_slice_mut(to), task });
        }
    });
}

/// Stores tokens in one head of a page.
struct Write<'a> {
    layout: &'a KvLayout,
    head: usize,
    /// Bytes of the head in the page.
    to: &'a mut [u8],
    task: &'a PageWrite<'a>,
}

impl Kernel for Write<'_> {
    #[inline(always)]
    fn run(self) {
        by_type!(self.layout.kind, T, self.store::<T>());
    }
}

impl Write<'_> {
    #[inline(always)]
    fn store<T: Element>(self) {
        let (dim, pair) = (self.layout.head_dim, pair(T::SUM));
        let (key_stride, value_stride) = (self.layout.key_stride(), self.layout.value_stride());
        let width = self.layout.kv_heads * dim;
        let (keys, rest) = self.to.split_at_mut(bytes_of::<T>(PAGE * key_stride));
        let (values, scales) = rest.split_at_mut(bytes_of::<T>(PAGE * value_stride));
        let (keys, values): (&mut [T], &mut [T]) = (bytemuck::cast_slice_mut(keys), bytemuck::cast_slice_mut(values));
        let scales: &mut [f32] = bytemuck::cast_slice_mut(scales);
        let (key_scales, value_scales) = scales.split_at_mut(scales.len() / 2);
        let tokens = self.task.keys.chunks_exact(width).zip(self.task.values.chunks_exact(width));
        let mut room = [0f32; MAX_HEAD];
        for (slot, (key, value)) in (self.task.slot..).zip(tokens) {
            let scale = if T::SCALE_BLOCK.is_some() { slot } else { 0 };
            let first = slot / LANES * LANES * key_stride + slot % LANES * pair;
            let head = prepared::<T>(&key[self.head * dim..][..dim], &mut room, &mut key_scales[scale..]);
            for (i, value) in head.iter().enumerate() {
                T::store(keys, first + i / pair * LANES * pair + i % pair, *value);
            }
            let first = slot / pair * pair * value_stride + slot % pair;
            let head = prepared::<T>(&value[self.head * dim..][..dim], &mut room, &mut value_scales[scale..]);
            for (i, value) in head.iter().enumerate() {
                T::store(values, first + i * pair, *value);
            }
        }
    }
}

/// Returns the values of a head as [`Element::store`] takes them: rotated for types that are stored so, and divided by
/// their scales for types with scales. The scale of block `i` is written to `scales[i * PAGE]`.
#[inline(always)]
fn prepared<'a, T: Element>(head: &'a [f32], room: &'a mut [f32; MAX_HEAD], scales: &mut [f32]) -> &'a [f32] {
    if T::SCALE_BLOCK.is_none() && !T::ROTATED {
        return head;
    }
    let room = &mut room[..head.len()];
    room.copy_from_slice(head);
    if T::ROTATED {
        rotate(room);
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

    const LAYOUT: KvLayout = KvLayout { layers: 1, kv_heads: 1, head_dim: 2, kind: KvType::F16 };

    #[test]
    fn clones_share_pages_until_one_writes() {
        let pool = PagePool::new(LAYOUT, None).unwrap();
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

    #[test]
    fn a_page_takes_the_bytes_its_type_promises() {
        // Each position has a key and a value of 64 numbers; int8 adds an f32 for each 32 of them, fp8 and int4 for 64.
        let floats = [(KvType::F32, 512), (KvType::F16, 256), (KvType::Bf16, 256)];
        for (kind, bytes) in
            floats.into_iter().chain([(KvType::Int8, 128 + 16), (KvType::Fp8, 128 + 8), (KvType::Int4, 64 + 8)])
        {
            let layout = KvLayout { kind, head_dim: 64, ..LAYOUT };
            assert_eq!(layout.page_bytes().unwrap(), PAGE * bytes, "{kind}");
        }
    }

    /// Returns the values that attention reads for head 1 of position `slot`: its key and its value.
    fn read<T: Element>(cache: &KvCache, slot: usize) -> [Vec<f32>; 2] {
        let layout = cache.layout();
        let head = layout.head::<T>(&cache.pages()[0], 0, 1);
        let mut room = vec![0; PAGE * layout.value_stride()];
        let number = |panel: &[u8], i: usize| half::bf16::from_le_bytes([panel[2 * i], panel[2 * i + 1]]).to_f32();
        let scale = |scales: &[f32], i: usize| scales[i / T::SCALE_BLOCK.unwrap() * PAGE + slot];
        let panel = T::panel(head.keys, &mut room);
        let at = |i: usize| slot / 16 * 16 * layout.key_stride() + i / 2 * 32 + slot % 16 * 2 + i % 2;
        let key = (0..layout.head_dim).map(|i| number(panel, at(i)) * scale(head.key_scales, i)).collect();
        let panel = T::panel(head.values, &mut room);
        let at = |i: usize| slot / 2 * 2 * layout.value_stride() + i * 2 + slot % 2;
        let value = (0..layout.head_dim).map(|i| number(panel, at(i)) * scale(head.value_scales, i)).collect();
        [key, value]
    }

    /// Checks that keys and values are read as they were written up to `step`, the distance of numbers relative to the
    /// largest value of a head.
    fn check_round_trip<T: Element>(kind: KvType, head_dim: usize, step: f32) {
        let layout = KvLayout { layers: 1, kv_heads: 2, head_dim, kind };
        let (mut cache, cpu) = (KvCache::new(&PagePool::new(layout, None).unwrap()), Cpu::new(1).unwrap());
        let (mut rng, tokens) = (crate::rng::Rng::new(11), 37);
        let mut random = || (0..tokens * 2 * head_dim).map(|_| rng.next_normal() as f32).collect::<Vec<f32>>();
        let (keys, values) = (random(), random());
        cache.grow(tokens).unwrap();
        // In two parts, of which the second begins in the middle of a pair of positions.
        let (first, rest) = (21 * 2 * head_dim, 21);
        cache.write(&cpu, 0, 0, &keys[..first], &values[..first]);
        cache.write(&cpu, 0, rest, &keys[first..], &values[first..]);
        for slot in 0..tokens {
            for (found, all) in read::<T>(&cache, slot).into_iter().zip([&keys, &values]) {
                let mut expected = all[(slot * 2 + 1) * head_dim..][..head_dim].to_vec();
                if T::ROTATED {
                    rotate(&mut expected);
                }
                let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
                for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
                    assert!((a - b).abs() <= step * largest, "{kind}, {head_dim}: {a} instead of {b} at {slot}, {i}");
                }
            }
        }
    }

    #[test]
    fn keys_and_values_are_read_as_they_were_written_up_to_rounding() {
        for head_dim in [16, 64, 80, 256] {
            check_round_trip::<Int8>(KvType::Int8, head_dim, 0.5 / 126.9);
            check_round_trip::<Fp8>(KvType::Fp8, head_dim, 1.01 / 28.0);
            // The largest magnitude is -8 steps, so values of the other sign reach 7 steps.
            check_round_trip::<Int4Pair>(KvType::Int4, head_dim, 1.01 / 8.0);
        }
        check_round_trip::<Int8>(KvType::Int8, 20, 0.5 / 126.9);
        check_round_trip::<Fp8>(KvType::Fp8, 20, 1.01 / 28.0);
    }

    #[test]
    fn heads_that_no_hadamard_matrix_fits_are_refused_for_int4_only() {
        let of = |kind, head_dim| KvLayout { kind, head_dim, ..LAYOUT }.check();
        let error = of(KvType::Int4, 20).unwrap_err();
        assert_eq!(error.cause().exit_code(), 5);
        assert!(error.to_string().contains("--kv int4: head_dim found 20"), "{error}");
        assert!(of(KvType::Int4, 80).is_ok() && of(KvType::Fp8, 20).is_ok() && of(KvType::Int8, 20).is_ok());
    }
}
