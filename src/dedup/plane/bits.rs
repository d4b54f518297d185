//! Values of three or five bits: groups of 512 in 192 or 320 bytes, for loops without a shift across bytes.
//!
//! A group is eight vectors of 64 values. The low bits of a value, all but the highest, share a byte with those of
//! other vectors. Of three-bit values, vectors 0 to 3 share the first 64 bytes (vector `k` at bit `2k`) and vectors 4
//! to 7 the next; of five-bit values, vectors 0 and 1 share the first 64 bytes, and so on. The last 64 bytes hold the
//! highest bits of all eight vectors (vector `k` at bit `k`). The last group is filled up with zeros.

use super::super::lanes::LANES;
use crate::simd::{Kernel, Level};

/// Values of a group.
pub(crate) const GROUP: usize = 8 * LANES;

/// Values of `LOW + 1` bits, 512 of them in `PACKED` bytes.
pub(crate) struct Bits<const LOW: usize, const PACKED: usize>;

/// Three bits each.
pub(crate) type Threes = Bits<2, 192>;
/// Five bits each.
pub(crate) type Fives = Bits<4, 320>;

impl<const LOW: usize, const PACKED: usize> Bits<LOW, PACKED> {
    /// Returns the number of bytes of `n` packed values.
    pub fn packed_len(n: usize) -> usize {
        n.div_ceil(GROUP) * PACKED
    }

    /// Appends the packed values; bits above the lowest three or five are dropped.
    pub fn pack(level: Level, values: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + Self::packed_len(values.len()), 0);
        let (groups, rest) = values.as_chunks::<GROUP>();
        let (packed, last) = out[start..].as_chunks_mut::<PACKED>().0.split_at_mut(groups.len());
        level.run(Pack::<LOW, PACKED> { groups, packed });
        if let [last] = last {
            let mut group = [0; GROUP];
            group[..rest.len()].copy_from_slice(rest);
            level.run(Pack::<LOW, PACKED> { groups: &[group], packed: std::slice::from_mut(last) });
        }
    }

    /// Unpacks values: the inverse of [`Bits::pack`]; `packed` has [`Bits::packed_len`] bytes.
    pub fn unpack(level: Level, packed: &[u8], out: &mut [u8]) {
        let (groups, rest) = out.as_chunks_mut::<GROUP>();
        let (packed, last) = packed.as_chunks::<PACKED>().0.split_at(groups.len());
        level.run(Unpack::<LOW, PACKED> { packed, groups });
        if let [last] = last {
            let mut group = [[0; GROUP]];
            level.run(Unpack::<LOW, PACKED> { packed: std::slice::from_ref(last), groups: &mut group });
            rest.copy_from_slice(&group[0][..rest.len()]);
        }
    }
}

struct Pack<'a, const LOW: usize, const PACKED: usize> {
    groups: &'a [[u8; GROUP]],
    packed: &'a mut [[u8; PACKED]],
}

impl<const LOW: usize, const PACKED: usize> Kernel for Pack<'_, LOW, PACKED> {
    #[inline(always)]
    fn run(self) {
        for (group, packed) in self.groups.iter().zip(self.packed) {
            let mut vectors = [[0u8; LANES]; 5];
            for (k, values) in group.as_chunks::<LANES>().0.iter().enumerate() {
                for lane in 0..LANES {
                    vectors[k * LOW / 8][lane] |= (values[lane] & ((1 << LOW) - 1)) << (k * LOW % 8);
                    vectors[LOW][lane] |= (values[lane] >> LOW & 1) << k;
                }
            }
            packed.copy_from_slice(&vectors.as_flattened()[..PACKED]);
        }
    }
}

struct Unpack<'a, const LOW: usize, const PACKED: usize> {
    packed: &'a [[u8; PACKED]],
    groups: &'a mut [[u8; GROUP]],
}

impl<const LOW: usize, const PACKED: usize> Kernel for Unpack<'_, LOW, PACKED> {
    #[inline(always)]
    fn run(self) {
        for (packed, group) in self.packed.iter().zip(self.groups) {
            let vectors = packed.as_chunks::<LANES>().0;
            for (k, values) in group.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                for lane in 0..LANES {
                    let low = (vectors[k * LOW / 8][lane] >> (k * LOW % 8)) & ((1 << LOW) - 1);
                    values[lane] = low | ((vectors[LOW][lane] >> k) & 1) << LOW;
                }
            }
        }
    }
}

const _: () = assert!(Threes::BYTES == 3 * LANES && Fives::BYTES == 5 * LANES);

impl<const LOW: usize, const PACKED: usize> Bits<LOW, PACKED> {
    /// Bytes of a group.
    pub const BYTES: usize = PACKED;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    fn round_trip<const LOW: usize, const PACKED: usize>(values: &[u8]) {
        for level in [Level::BASELINE, Level::detect()] {
            let (mut packed, mut back) = (vec![7], vec![0xFF; values.len()]);
            Bits::<LOW, PACKED>::pack(level, values, &mut packed);
            assert_eq!(packed.len(), 1 + Bits::<LOW, PACKED>::packed_len(values.len()));
            Bits::<LOW, PACKED>::unpack(level, &packed[1..], &mut back);
            let expected: Vec<u8> = values.iter().map(|value| value & ((2 << LOW) - 1)).collect();
            assert_eq!(back, expected);
        }
    }

    #[test]
    fn values_come_back_whatever_their_number() {
        let mut rng = Rng::new(3);
        for count in [0, 1, 63, 64, 511, 512, 513, 5000] {
            let values: Vec<u8> = (0..count).map(|_| rng.next_u64() as u8).collect();
            round_trip::<2, 192>(&values);
            round_trip::<4, 320>(&values);
        }
    }
}
