//! What a sequence has read: keys and values of every layer, in pages of [`PAGE`] positions that are added as it grows.
//!
//! Within a page each layer and key/value head has one run of memory: the keys transposed in groups of 16 positions
//! (`[PAGE/16][head_dim][16]`, so that scores need no horizontal sums), then the values position by position
//! (`[PAGE][value_stride]`, the head padded to whole lanes). Pages are shared between clones of a sequence until one of
//! them writes.

use super::cpu::Cpu;
use super::ops::LANES;
use crate::error::{Cause, Error, Result};
use crate::model_config::ModelConfig;
use crate::simd::Kernel;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Positions per page.
pub const PAGE: usize = 128;

/// Element type of cached keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// f32: what was computed.
    F32,
    /// f16: half the memory, rounded to nearest even; values beyond its range become its largest.
    F16,
}

impl FromStr for KvType {
    type Err = Error;
    fn from_str(s: &str) -> Result<KvType> {
        match s {
            "f32" | "fp32" => Ok(KvType::F32),
            "f16" | "fp16" => Ok(KvType::F16),
            _ => Err(Error::usage(format!("KV type `{s}`: expected f32 or f16"))),
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == KvType::F32 { "f32" } else { "f16" })
    }
}

/// A stored number.
pub trait Element: Copy + Default + Send + Sync + fmt::Debug + 'static {
    /// The stored form of a value.
    fn narrow(value: f32) -> Self;
    /// The value, exactly.
    fn widen(self) -> f32;
    /// [`Cpu::mix_f32`] for this type.
    fn mix(cpu: &Cpu, values: &[Self], stride: usize, weights: &[&[f32]], out: &mut [[f32; 16]]);
}

impl Element for f32 {
    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        value
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    fn mix(cpu: &Cpu, values: &[f32], stride: usize, weights: &[&[f32]], out: &mut [[f32; 16]]) {
        cpu.mix_f32(values, stride, weights, out);
    }
}

/// IEEE half precision as bits: arithmetic on them vectorises on every machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(transparent)]
pub struct Half(u16);

impl Element for Half {
    #[inline(always)]
    fn narrow(value: f32) -> Half {
        let bits = value.to_bits();
        let sign = (bits >> 16) & 0x8000;
        let abs = bits & 0x7fff_ffff;
        // Rebias the exponent and round the lost 13 bits to nearest even.
        let normal = abs.wrapping_sub(112 << 23).wrapping_add(0xfff + ((abs >> 13) & 1)) >> 13;
        // Below 2^-14: one unit of f16 is 2^-24, the last place of numbers in 0.5..1.
        let small = (f32::from_bits(abs) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let half = if abs < 0x3880_0000 { small } else { normal };
        let half = if half > 0x7bff { 0x7bff } else { half };
        let half = if abs >= 0x7f80_0000 { 0x7c00 } else { half };
        let half = if abs > 0x7f80_0000 { 0x7e00 } else { half };
        Half((sign | half) as u16)
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.0);
        let abs = bits & 0x7fff;
        // The exponent field read as f32's is 112 too small; the product also normalises subnormals.
        let finite = (f32::from_bits(abs << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
        let value = if abs >= 0x7c00 { finite | 0x7f80_0000 } else { finite };
        f32::from_bits(value | (bits & 0x8000) << 16)
    }
    fn mix(cpu: &Cpu, values: &[Half], stride: usize, weights: &[&[f32]], out: &mut [[f32; 16]]) {
        cpu.mix_f16(bytemuck::cast_slice(values), stride, weights, out);
    }
}

/// Sizes of a cache, the same for all sequences of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Decoder layers.
    pub layers: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Values per head, padded to whole lanes.
    pub value_stride: usize,
}

impl KvLayout {
    /// The sizes for a model.
    pub fn new(config: &ModelConfig) -> KvLayout {
        KvLayout {
            layers: config.n_layers,
            kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            value_stride: config.head_dim.next_multiple_of(LANES),
        }
    }

    /// Elements of one head of one layer in a page: keys, then values.
    fn head_len(&self) -> usize {
        PAGE * (self.head_dim + self.value_stride)
    }

    /// Elements of a page; `None` when a page would not fit the address space.
    fn page_len(&self) -> Option<usize> {
        self.head_len().checked_mul(self.kv_heads)?.checked_mul(self.layers).filter(|n| *n < isize::MAX as usize / 4)
    }
}

type Pages<T> = Vec<Arc<Vec<T>>>;

#[derive(Debug, Clone)]
enum Store {
    F32(Pages<f32>),
    F16(Pages<Half>),
}

/// The keys and values of one sequence.
#[derive(Debug, Clone)]
pub struct KvCache {
    layout: KvLayout,
    store: Store,
    len: usize,
}

/// The pages of a cache, by element type.
#[allow(missing_docs)]
pub enum PagesRef<'a> {
    F32(&'a [Arc<Vec<f32>>]),
    F16(&'a [Arc<Vec<Half>>]),
}

impl KvCache {
    /// An empty cache; it takes no memory until it grows.
    ///
    /// # Errors
    /// A page of this layout does not fit the address space.
    pub fn new(layout: KvLayout, kind: KvType) -> Result<KvCache> {
        layout.page_len().ok_or_else(|| out_of_memory(0))?;
        let store = match kind {
            KvType::F32 => Store::F32(Vec::new()),
            KvType::F16 => Store::F16(Vec::new()),
        };
        Ok(KvCache { layout, store, len: 0 })
    }

    /// The sizes.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// The element type.
    pub fn kind(&self) -> KvType {
        match self.store {
            Store::F32(_) => KvType::F32,
            Store::F16(_) => KvType::F16,
        }
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True before the first token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory held.
    pub fn bytes(&self) -> usize {
        let page = self.layout.page_len().unwrap_or(0);
        match &self.store {
            Store::F32(pages) => pages.len() * page * 4,
            Store::F16(pages) => pages.len() * page * 2,
        }
    }

    /// Makes room for `more` positions and counts them as held; every layer must then be written.
    ///
    /// # Errors
    /// Memory could not be had; the cache is as before.
    pub fn grow(&mut self, more: usize) -> Result<()> {
        let pages = (self.len + more).div_ceil(PAGE);
        let page_len = self.layout.page_len().ok_or_else(|| out_of_memory(self.len))?;
        let done = match &mut self.store {
            Store::F32(store) => grow(store, pages, page_len),
            Store::F16(store) => grow(store, pages, page_len),
        };
        done.ok_or_else(|| out_of_memory(self.len))?;
        self.len += more;
        Ok(())
    }

    /// Forgets all positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        let pages = self.len.div_ceil(PAGE);
        match &mut self.store {
            Store::F32(store) => store.truncate(pages),
            Store::F16(store) => store.truncate(pages),
        }
    }

    /// Stores the keys and values of consecutive positions, `(positions, kv_heads * head_dim)` each, in one layer. The
    /// cache has grown past the last of them.
    pub fn write(&mut self, cpu: &Cpu, layer: usize, mut position: usize, mut keys: &[f32], mut values: &[f32]) {
        let width = self.layout.kv_heads * self.layout.head_dim;
        while !keys.is_empty() {
            let tokens = (PAGE - position % PAGE).min(keys.len() / width);
            let ((k, next_keys), (v, next_values)) = (keys.split_at(tokens * width), values.split_at(tokens * width));
            let task = PageWrite { layer, slot: position % PAGE, keys: k, values: v };
            match &mut self.store {
                Store::F32(pages) => write_page(cpu, &self.layout, &mut pages[position / PAGE], &task),
                Store::F16(pages) => write_page(cpu, &self.layout, &mut pages[position / PAGE], &task),
            }
            (position, keys, values) = (position + tokens, next_keys, next_values);
        }
    }

    /// The pages, for reading.
    pub fn pages(&self) -> PagesRef<'_> {
        match &self.store {
            Store::F32(pages) => PagesRef::F32(pages),
            Store::F16(pages) => PagesRef::F16(pages),
        }
    }
}

fn out_of_memory(len: usize) -> Error {
    Error::new(Cause::OutOfMemory(format!("no memory for the KV cache beyond {len} positions")))
        .help("use a shorter context, a smaller batch or an f16 KV cache")
}

fn grow<T: Element>(store: &mut Pages<T>, pages: usize, page_len: usize) -> Option<()> {
    while store.len() < pages {
        let mut page = Vec::new();
        page.try_reserve_exact(page_len).ok()?;
        page.resize(page_len, T::default());
        store.push(Arc::new(page));
    }
    Some(())
}

/// The keys and values of one head of one layer in a page.
#[inline(always)]
pub fn head_of<'a, T>(layout: &KvLayout, page: &'a [T], layer: usize, head: usize) -> (&'a [T], &'a [T]) {
    let len = layout.head_len();
    page[(layer * layout.kv_heads + head) * len..][..len].split_at(PAGE * layout.head_dim)
}

/// Tokens of one page of one head, to be stored.
struct Write<'a, T> {
    layout: &'a KvLayout,
    head: usize,
    /// Keys and values of the head in the page.
    to: &'a mut [T],
    /// First slot.
    slot: usize,
    /// `(tokens, kv_heads * head_dim)`.
    keys: &'a [f32],
    /// `(tokens, kv_heads * head_dim)`.
    values: &'a [f32],
}

impl<T: Element> Kernel for Write<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let (dim, stride) = (self.layout.head_dim, self.layout.value_stride);
        let width = self.layout.kv_heads * dim;
        let (keys, values) = self.to.split_at_mut(PAGE * dim);
        let tokens = self.keys.chunks_exact(width).zip(self.values.chunks_exact(width));
        for (slot, (key, value)) in (self.slot..).zip(tokens) {
            let (lanes, _) = keys[slot / LANES * LANES * dim..][..LANES * dim].as_chunks_mut::<LANES>();
            for (lanes, key) in lanes.iter_mut().zip(&key[self.head * dim..][..dim]) {
                lanes[slot % LANES] = T::narrow(*key);
            }
            for (to, value) in values[slot * stride..].iter_mut().zip(&value[self.head * dim..][..dim]) {
                *to = T::narrow(*value);
            }
        }
    }
}

/// Where a page is written: the layer, the first slot, and the tokens' keys and values.
struct PageWrite<'a> {
    layer: usize,
    slot: usize,
    keys: &'a [f32],
    values: &'a [f32],
}

fn write_page<T: Element>(cpu: &Cpu, layout: &KvLayout, page: &mut Arc<Vec<T>>, task: &PageWrite<'_>) {
    let len = layout.head_len();
    let heads = &mut Arc::make_mut(page)[task.layer * layout.kv_heads * len..][..layout.kv_heads * len];
    // A few tokens are not worth waking threads for.
    let heads_per_task = if task.keys.len() < 8192 { layout.kv_heads } else { 1 };
    cpu.for_chunks(heads, heads_per_task * len, |i, part| {
        for (j, to) in part.chunks_exact_mut(len).enumerate() {
            let PageWrite { slot, keys, values, .. } = *task;
            cpu.level().run(Write { layout, head: i * heads_per_task + j, to, slot, keys, values });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn half_widens_every_bit_pattern_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, reference) = (Half(bits).widen(), f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == reference.to_bits() || ours.is_nan() && reference.is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn half_rounds_as_the_half_crate_but_saturates() {
        let mut rng = crate::rng::Rng::new(7);
        for _ in 0..300_000 {
            let value = f32::from_bits(rng.next_u64() as u32);
            let (ours, reference) = (Half::narrow(value), f16::from_f32(value));
            if value.is_nan() {
                assert!(ours.widen().is_nan());
            } else if reference.is_infinite() && value.is_finite() {
                assert_eq!(ours.widen(), 65504f32.copysign(value));
            } else {
                assert_eq!(ours.0, reference.to_bits(), "{value}");
            }
        }
        for bits in 0..=u16::MAX {
            let half = f16::from_bits(bits);
            assert!(half.is_nan() || Half::narrow(half.to_f32()).0 == bits);
        }
    }

    #[test]
    fn clones_share_pages_until_one_writes() {
        let layout = KvLayout { layers: 1, kv_heads: 1, head_dim: 2, value_stride: 16 };
        let mut a = KvCache::new(layout, KvType::F16).unwrap();
        a.grow(1).unwrap();
        let cpu = Cpu::new(1).unwrap();
        a.write(&cpu, 0, 0, &[1.0, 2.0], &[3.0, 4.0]);
        let mut b = a.clone();
        b.grow(1).unwrap();
        b.write(&cpu, 0, 1, &[5.0, 6.0], &[7.0, 8.0]);
        let key = |cache: &KvCache, position: usize| {
            let PagesRef::F16(pages) = cache.pages() else { unreachable!() };
            head_of(&layout, &pages[0], 0, 0).0[position].widen()
        };
        assert_eq!((key(&a, 0), key(&a, 1), key(&b, 0), key(&b, 1)), (1.0, 0.0, 1.0, 5.0));
        b.truncate(0);
        assert_eq!((b.len(), b.bytes(), a.len()), (0, 0, 1));
    }
}
