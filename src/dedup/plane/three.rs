//! Values of three bits: groups of 512 in 192 bytes, for loops without a shift across bytes.
//!
//! A group is eight vectors of 64 values. The low two bits of vectors 0 to 3 share the first 64 bytes (vector `k` at bit
//! `2k`), those of vectors 4 to 7 the next, and the high bits of all eight the last 64 (vector `k` at bit `k`). The last
//! group is filled up with zeros.

use super::super::lanes::LANES;
use crate::simd::{Kernel, Level};

/// Values of a group.
pub(crate) const GROUP: usize = 8 * LANES;
/// Bytes of a group.
pub(crate) const PACKED: usize = 3 * LANES;

/// Bytes that `n` values take.
pub(crate) fn packed_len(n: usize) -> usize {
    n.div_ceil(GROUP) * PACKED
}

/// Appends values below 8.
pub(crate) fn pack(level: Level, values: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + packed_len(values.len()), 0);
    let (groups, rest) = values.as_chunks::<GROUP>();
    let (packed, last) = out[start..].as_chunks_mut::<PACKED>().0.split_at_mut(groups.len());
    level.run(Pack { groups, packed });
    if let [last] = last {
        let mut group = [0; GROUP];
        group[..rest.len()].copy_from_slice(rest);
        level.run(Pack { groups: &[group], packed: std::slice::from_mut(last) });
    }
}

/// The inverse of [`pack`]; `packed` has [`packed_len`] bytes.
pub(crate) fn unpack(level: Level, packed: &[u8], out: &mut [u8]) {
    let (groups, rest) = out.as_chunks_mut::<GROUP>();
    let (packed, last) = packed.as_chunks::<PACKED>().0.split_at(groups.len());
    level.run(Unpack { packed, groups });
    if let [last] = last {
        let mut group = [[0; GROUP]];
        level.run(Unpack { packed: std::slice::from_ref(last), groups: &mut group });
        rest.copy_from_slice(&group[0][..rest.len()]);
    }
}

struct Pack<'a> {
    groups: &'a [[u8; GROUP]],
    packed: &'a mut [[u8; PACKED]],
}

impl Kernel for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (group, packed) in self.groups.iter().zip(self.packed) {
            pack_group(group, packed);
        }
    }
}

#[inline(always)]
pub(super) fn pack_group(group: &[u8; GROUP], packed: &mut [u8; PACKED]) {
    let mut three = [[0u8; LANES]; 3];
    for (k, values) in group.as_chunks::<LANES>().0.iter().enumerate() {
        for lane in 0..LANES {
            three[k / 4][lane] |= (values[lane] & 3) << (2 * (k % 4));
            three[2][lane] |= (values[lane] >> 2) << k;
        }
    }
    packed.copy_from_slice(three.as_flattened());
}

struct Unpack<'a> {
    packed: &'a [[u8; PACKED]],
    groups: &'a mut [[u8; GROUP]],
}

impl Kernel for Unpack<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (packed, group) in self.packed.iter().zip(self.groups) {
            unpack_group(packed, group);
        }
    }
}

#[inline(always)]
pub(super) fn unpack_group(packed: &[u8; PACKED], group: &mut [u8; GROUP]) {
    let three = packed.as_chunks::<LANES>().0;
    for (k, values) in group.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        for lane in 0..LANES {
            values[lane] = (three[k / 4][lane] >> (2 * (k % 4))) & 3 | ((three[2][lane] >> k) & 1) << 2;
        }
    }
}
