//! Sizes of a KV cache: where the keys and values of each layer and head lie within a page.
//!
//! Layers may differ in the number of heads and in the sizes of keys and values, and a layer without heads keeps
//! nothing. Only the layer itself and attention know these sizes: the pool, the prefix cache and the scheduler handle
//! whole pages.

use super::element::{Element, KvType, by_type};
use super::{Line, PAGE, hadamard};
use crate::error::{Error, Result};
use crate::model_config::{Heads, Latent, LayerConfig, ModelConfig};
use crate::runtime::ops::LANES;
use std::ops::Range;

/// Sizes of a KV cache, the same for all sequences of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvLayout {
    /// Element type of keys and values.
    pub kind: KvType,
    layers: Vec<KvLayer>,
    /// Bytes of a page; `None` if it would not fit the address space.
    page_bytes: Option<usize>,
}

/// Sizes of the keys and values of one layer, and their place in a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayer {
    /// Element type of keys and values.
    pub kind: KvType,
    /// Sizes of the heads.
    pub heads: KvHeads,
    /// Cache lines in a page before those of this layer.
    first: usize,
}

/// Heads whose keys and values a layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvHeads {
    /// Number of key/value heads; 0 for a layer that keeps nothing.
    pub count: usize,
    /// Numbers per key.
    pub key: usize,
    /// Numbers per value.
    pub value: usize,
    /// Whether values are the first numbers of the keys and are not stored themselves.
    pub shared: bool,
}

impl KvHeads {
    /// Returns `count` heads with keys and values of `dim` numbers.
    pub fn new(count: usize, dim: usize) -> KvHeads {
        KvHeads { count, key: dim, value: dim, shared: false }
    }

    /// Returns the heads whose keys and values a layer keeps; none if it reads those of another layer, or has no
    /// attention.
    fn of(heads: Option<&Heads>) -> KvHeads {
        let Some(heads) = heads else { return KvHeads::new(0, LANES) };
        let Heads { n_kv_heads, head_dim, value_dim, kv_from, .. } = *heads;
        let count = if kv_from.is_none() { n_kv_heads } else { 0 };
        KvHeads { count, key: head_dim, value: value_dim, shared: false }
    }

    /// Returns the head that latent attention keeps: the normalized vector of a token and the rotated part of its key.
    pub fn latent(latent: &Latent) -> KvHeads {
        KvHeads { count: 1, key: latent.kv_rank + latent.rope, value: latent.kv_rank, shared: true }
    }

    /// Returns the orders of the Hadamard matrices for keys and for values. Numbers that are both have one order.
    pub fn rotations(&self) -> [usize; 2] {
        match self.shared {
            true => [hadamard::order(self.key | self.value); 2],
            false => [self.key, self.value].map(hadamard::order),
        }
    }
}

impl KvLayout {
    /// Returns the layout of layers with these heads, in this order.
    pub fn new(kind: KvType, layers: impl IntoIterator<Item = KvHeads>) -> KvLayout {
        let mut lines = Some(0usize);
        let place = |heads: KvHeads| {
            let layer = KvLayer { kind, heads, first: lines.unwrap_or(0) };
            lines = lines.zip(layer.lines()).and_then(|(sum, more)| sum.checked_add(more));
            layer
        };
        let layers = layers.into_iter().map(place).collect();
        let page_bytes = lines.and_then(|lines| lines.checked_mul(size_of::<Line>()));
        KvLayout { kind, layers, page_bytes: page_bytes.filter(|bytes| *bytes < isize::MAX as usize) }
    }

    /// Returns the layout of all layers of a model for devices that keep the vectors of latent attention.
    pub fn of(config: &ModelConfig, kind: KvType) -> KvLayout {
        let heads = |layer: LayerConfig| layer.latent().map_or_else(|| KvHeads::of(layer.heads()), KvHeads::latent);
        KvLayout::new(kind, config.layers().map(heads))
    }

    /// Returns the layout of all layers of a model for devices that keep the keys and values of all heads.
    pub fn expanded(config: &ModelConfig, kind: KvType) -> KvLayout {
        KvLayout::new(kind, config.layers().map(|layer| KvHeads::of(layer.heads())))
    }

    /// Returns the layout of some of the layers.
    pub fn part(&self, layers: Range<usize>) -> KvLayout {
        KvLayout::new(self.kind, self.layers[layers].iter().map(|layer| layer.heads))
    }

    /// Returns the layout of the same layers with another element type.
    pub fn with_kind(&self, kind: KvType) -> KvLayout {
        KvLayout::new(kind, self.layers.iter().map(|layer| layer.heads))
    }

    /// Returns the layers.
    pub fn layers(&self) -> &[KvLayer] {
        &self.layers
    }

    /// Checks that heads of these sizes can be stored in this type.
    ///
    /// # Errors
    /// The type stores rotated heads, and no Hadamard matrix fits a head size.
    pub fn check(&self) -> Result<()> {
        let rotated = by_type!(self.kind, T, T::ROTATED);
        let unfit = |heads: &KvHeads| {
            let mut sizes = [heads.key, heads.value].into_iter().zip(heads.rotations());
            sizes.find(|(dim, order)| *dim > 0 && !hadamard::fits(*dim, *order))
        };
        match self.layers.iter().filter(|_| rotated).find_map(|layer| unfit(&layer.heads)) {
            None => Ok(()),
            Some((dim, order)) => {
                let kind = self.kind;
                let expected = "expected a power of two or a multiple of 16";
                let found = format!("--kv {kind}: head_dim found {dim}, rotated in blocks of {order}, {expected}");
                Err(Error::engine(found).help("use --kv int8, which suits every head size"))
            }
        }
    }

    /// Returns the bytes of a page; `None` if a page would not fit the address space.
    pub(super) fn page_bytes(&self) -> Option<usize> {
        self.page_bytes
    }

    /// Returns the bytes of the cache of one sequence of `tokens` tokens, in whole pages.
    pub fn bytes(&self, tokens: usize) -> u64 {
        self.page_bytes.map_or(u64::MAX, |page| (page as u64).saturating_mul(tokens.div_ceil(PAGE) as u64))
    }
}

impl KvLayer {
    /// Returns the numbers stored per key: its size padded to whole pairs.
    pub fn key_stride(&self) -> usize {
        self.heads.key.next_multiple_of(2)
    }

    /// Returns the numbers stored per value: its size padded to whole lanes.
    pub fn value_stride(&self) -> usize {
        self.heads.value.next_multiple_of(LANES)
    }

    /// Returns the numbers of the keys and of the values of a position that are stored.
    pub(super) fn widths(&self) -> [usize; 2] {
        [self.heads.key, if self.heads.shared { 0 } else { self.heads.value }].map(|dim| self.heads.count * dim)
    }

    /// Returns the bytes of keys, values, scales of keys and scales of values of one head in a page.
    fn sections<T: Element>(&self) -> [usize; 4] {
        let keys = [bytes_of::<T>(PAGE * self.key_stride()), scales::<T>(self.heads.key)];
        let values = match self.heads.shared {
            true => [0; 2],
            false => [bytes_of::<T>(PAGE * self.value_stride()), scales::<T>(self.heads.value)],
        };
        [keys[0], values[0], keys[1], values[1]]
    }

    /// Returns the bytes of one head in a page.
    fn head_bytes(&self) -> usize {
        by_type!(self.kind, T, self.sections::<T>().into_iter().sum())
    }

    /// Returns the cache lines of one head in a page.
    pub(super) fn head_lines(&self) -> usize {
        self.head_bytes() / size_of::<Line>()
    }

    /// Returns the cache lines of the layer in a page; `None` if they would not fit the address space.
    fn lines(&self) -> Option<usize> {
        self.head_lines().checked_mul(self.heads.count)
    }

    /// Returns the cache lines of the layer in a page.
    pub(super) fn range(&self) -> Range<usize> {
        self.first..self.first + self.head_lines() * self.heads.count
    }

    /// Returns keys, values, scales of keys and scales of values of a head in a page. Values that are the first numbers
    /// of the keys have the scales of these numbers.
    #[inline(always)]
    pub(in crate::runtime) fn head<'a, T: Element>(&self, page: &'a [Line], head: usize) -> Head<'a, T> {
        let lines = self.head_lines();
        let bytes: &[u8] = bytemuck::cast_slice(&page[self.first + head * lines..][..lines]);
        let [keys, values, key_scales, _] = self.sections::<T>();
        let (keys, rest) = bytes.split_at(keys);
        let (values, rest) = rest.split_at(values);
        let (key_scales, value_scales) = rest.split_at(key_scales);
        let value_scales = match self.heads.shared {
            true => &key_scales[..scales::<T>(self.heads.value)],
            false => value_scales,
        };
        Head {
            keys: bytemuck::cast_slice(keys),
            values: bytemuck::cast_slice(values),
            key_scales: bytemuck::cast_slice(key_scales),
            value_scales: bytemuck::cast_slice(value_scales),
        }
    }

    /// Returns keys, values, scales of keys and scales of values in the bytes of a head, for writing.
    #[inline(always)]
    pub(super) fn head_mut<'a, T: Element>(&self, bytes: &'a mut [u8]) -> HeadMut<'a, T> {
        let [keys, values, key_scales, _] = self.sections::<T>();
        let (keys, rest) = bytes.split_at_mut(keys);
        let (values, rest) = rest.split_at_mut(values);
        let (key_scales, value_scales) = rest.split_at_mut(key_scales);
        HeadMut {
            keys: bytemuck::cast_slice_mut(keys),
            values: bytemuck::cast_slice_mut(values),
            key_scales: bytemuck::cast_slice_mut(key_scales),
            value_scales: bytemuck::cast_slice_mut(value_scales),
        }
    }
}

/// Returns the bytes of this many stored numbers.
const fn bytes_of<T: Element>(numbers: usize) -> usize {
    numbers / T::NUMBERS * size_of::<T>()
}

/// Returns the bytes of the scales of all keys, or of all values, of this size in a page.
fn scales<T: Element>(dim: usize) -> usize {
    T::SCALE_BLOCK.map_or(0, |block| PAGE * dim.div_ceil(block) * size_of::<f32>())
}

/// Keys and values of one head of one layer in a page.
#[derive(Clone, Copy)]
pub(in crate::runtime) struct Head<'a, T> {
    /// Keys: `[PAGE/16][key_stride/pair][16][pair]`.
    pub keys: &'a [T],
    /// Values: `[PAGE/pair][value_stride][pair]`; empty if they are the first numbers of the keys.
    pub values: &'a [T],
    /// Scales of keys, if any: `[blocks][PAGE]`.
    pub key_scales: &'a [f32],
    /// Scales of values, if any: `[blocks][PAGE]`.
    pub value_scales: &'a [f32],
}

/// Keys and values as in [`Head`], for writing.
pub(super) struct HeadMut<'a, T> {
    pub keys: &'a mut [T],
    pub values: &'a mut [T],
    pub key_scales: &'a mut [f32],
    pub value_scales: &'a mut [f32],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_takes_the_bytes_its_type_promises() {
        // Each position has a key and a value of 64 numbers; int8 adds an f32 for each 32 of them, fp8 and int4 for 64.
        let floats = [(KvType::F32, 512), (KvType::F16, 256), (KvType::Bf16, 256)];
        for (kind, bytes) in
            floats.into_iter().chain([(KvType::Int8, 128 + 16), (KvType::Fp8, 128 + 8), (KvType::Int4, 64 + 8)])
        {
            assert_eq!(KvLayout::new(kind, [KvHeads::new(1, 64)]).page_bytes(), Some(PAGE * bytes), "{kind}");
        }
    }

    #[test]
    fn layers_of_different_sizes_follow_one_another_without_gaps() {
        let heads = [(2, 64, 64), (0, 64, 64), (1, 512, 0), (3, 80, 32), (1, 2, 2)];
        let heads = heads.map(|(count, key, value)| KvHeads { count, key, value, shared: key == 80 });
        for kind in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Int8, KvType::Fp8, KvType::Int4] {
            let layout = KvLayout::new(kind, heads);
            let mut end = 0;
            for (layer, heads) in layout.layers().iter().zip(heads) {
                assert_eq!((layer.range().start, layer.range().is_empty()), (end, heads.count == 0), "{kind}");
                end = layer.range().end;
            }
            assert_eq!(layout.page_bytes(), Some(end * size_of::<Line>()), "{kind}");
            let alone = |heads| KvLayout::new(kind, [heads]).page_bytes().unwrap();
            assert_eq!(layout.page_bytes(), Some(heads.into_iter().map(alone).sum()), "{kind}");
            assert_eq!(layout.part(2..4), KvLayout::new(kind, heads[2..4].iter().copied()));
        }
    }

    #[test]
    fn a_page_beyond_the_address_space_has_no_size() {
        let layout = KvLayout::new(KvType::F32, [KvHeads::new(usize::MAX / 4096, 64); 3]);
        assert_eq!((layout.page_bytes(), layout.bytes(1)), (None, u64::MAX));
    }

    #[test]
    fn heads_that_no_hadamard_matrix_fits_are_refused_for_int4_only() {
        let of = |kind, head_dim| KvLayout::new(kind, [KvHeads::new(1, head_dim)]).check();
        let error = of(KvType::Int4, 20).unwrap_err();
        assert_eq!(error.cause().exit_code(), 5);
        assert!(error.to_string().contains("--kv int4: head_dim found 20"), "{error}");
        assert!(of(KvType::Int4, 80).is_ok() && of(KvType::Fp8, 20).is_ok() && of(KvType::Int8, 20).is_ok());
    }
}
