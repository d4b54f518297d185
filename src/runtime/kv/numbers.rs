//! Keys and values of a page as numbers, one by one: for the reference of attention and for tests.

use super::{Element, KvLayer, Line, PAGE, by_type};
use crate::runtime::cpu::{SumType, pair};
use crate::runtime::ops::LANES;
use half::{bf16, f16};

impl KvLayer {
    /// Returns the keys and the values of a head for the first `slots` positions of a page: `(slots, heads.key)` and
    /// `(slots, heads.value)`. Types that are stored rotated ([`Element::ROTATED`]) stay so.
    pub(in crate::runtime) fn numbers(&self, page: &[Line], head: usize, slots: usize) -> [Vec<f32>; 2] {
        by_type!(self.kind, T, self.numbers_of::<T>(page, head, slots))
    }

    fn numbers_of<T: Element>(&self, page: &[Line], head: usize, slots: usize) -> [Vec<f32>; 2] {
        let head = self.head::<T>(page, head);
        let [key_stride, value_stride] = [self.key_stride(), self.value_stride()];
        let (group, pair) = (LANES, pair(T::SUM));
        let mut room = vec![0; PAGE * key_stride.max(value_stride) / 2];
        let scale =
            |scales: &[f32], slot: usize, i: usize| T::SCALE_BLOCK.map_or(1.0, |block| scales[i / block * PAGE + slot]);
        let mut keys = Vec::with_capacity(slots * self.heads.key);
        let panel = T::panel(head.keys, &mut room);
        for (slot, i) in indices(slots, self.heads.key) {
            let at = slot / group * group * key_stride + (i / pair * group + slot % group) * pair + i % pair;
            keys.push(number(T::SUM, panel, at) * scale(head.key_scales, slot, i));
        }
        if self.heads.shared {
            let values = keys.chunks_exact(self.heads.key).flat_map(|key| &key[..self.heads.value]).copied().collect();
            return [keys, values];
        }
        let mut values = Vec::with_capacity(slots * self.heads.value);
        let panel = T::panel(head.values, &mut room);
        for (slot, i) in indices(slots, self.heads.value) {
            let at = slot / pair * pair * value_stride + i * pair + slot % pair;
            values.push(number(T::SUM, panel, at) * scale(head.value_scales, slot, i));
        }
        [keys, values]
    }
}

fn indices(slots: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..slots).flat_map(move |slot| (0..size).map(move |i| (slot, i)))
}

/// Returns number `index` of a panel, see [`Element::panel`].
fn number(sum_type: SumType, panel: &[u8], index: usize) -> f32 {
    match sum_type {
        SumType::F32 => f32::from_le_bytes(panel.as_chunks().0[index]),
        SumType::F16 => f16::from_le_bytes(panel.as_chunks().0[index]).to_f32(),
        SumType::Bf16 => bf16::from_le_bytes(panel.as_chunks().0[index]).to_f32(),
    }
}
