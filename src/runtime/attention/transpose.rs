//! Values that are the first numbers of the keys (latent attention): transposes the keys of a page.
//!
//! Keys lie number by number, with a lane per position; products of probabilities and values need a lane per number
//! ([`crate::runtime::kv`]). The numbers are moved in squares of 16 positions and 16 numbers, as words of 64 bits: a
//! row of a square becomes a column, and the numbers within words change places.

use crate::runtime::cpu::{SumType, pair};
use crate::runtime::kv::{KvLayer, PAGE};
use crate::runtime::ops::LANES;

/// Returns the words of 32 bits that the numbers of a page take, `stride` per position, in the form that products of
/// this type read.
pub(super) fn panel_words(sum_type: SumType, stride: usize) -> usize {
    PAGE / pair(sum_type) * (stride / LANES) * (sum_type.vector_bytes() / size_of::<u32>())
}

/// Writes the values of the first `positions` positions, a number of whole lanes, to `room` and returns them. Keys and
/// values are in the form of [`crate::runtime::kv::panel`].
#[inline(always)]
pub(super) fn values_of_keys<'a>(
    sum_type: SumType,
    keys: &[u8],
    layer: &KvLayer,
    positions: usize,
    room: &'a mut [u32],
) -> &'a [u8] {
    let (keys, out) = (bytemuck::cast_slice(keys), bytemuck::cast_slice_mut(room));
    let (key, value, groups) = (layer.key_stride(), layer.value_stride(), positions / LANES);
    match sum_type {
        SumType::F32 => transpose::<2, 8>(keys, key, value, groups, out, mix_words),
        SumType::F16 => transpose::<4, 4>(keys, key, value, groups, out, mix_halves),
        SumType::Bf16 => transpose::<1, 8>(keys, key / 2, value / 2, groups, out, mix_pairs),
    }
    bytemuck::cast_slice(room)
}

/// Transposes groups of 16 positions. A row of keys (a number, or a pair of numbers) has `WORDS` words for a group. The
/// words at the same place of `ROWS` rows hold a square of numbers, which `mix` transposes; there are `value_rows` rows
/// of which the first `key_rows` are keys and the others are zero.
#[inline(always)]
fn transpose<const ROWS: usize, const WORDS: usize>(
    keys: &[u64],
    key_rows: usize,
    value_rows: usize,
    groups: usize,
    out: &mut [u64],
    mix: impl Fn([u64; ROWS]) -> [u64; ROWS],
) {
    let value_words = value_rows / ROWS;
    for group in 0..groups {
        let keys = &keys[group * key_rows * WORDS..][..key_rows * WORDS];
        let out = &mut out[group * WORDS * value_words * ROWS..][..WORDS * value_words * ROWS];
        for first in (0..value_words).step_by(WORDS) {
            // Indices: word of a row of keys, row of the square, word of a row of values.
            let mut square = [[[0; WORDS]; ROWS]; WORDS];
            for column in 0..WORDS {
                let mut rows = [[0; WORDS]; ROWS];
                for i in 0..ROWS {
                    let row = (first + column) * ROWS + i;
                    if row < key_rows {
                        rows[i].copy_from_slice(&keys[row * WORDS..][..WORDS]);
                    }
                }
                for word in 0..WORDS {
                    let mut words = [0; ROWS];
                    for i in 0..ROWS {
                        words[i] = rows[i][word];
                    }
                    let words = mix(words);
                    for i in 0..ROWS {
                        square[word][i][column] = words[i];
                    }
                }
            }
            for word in 0..WORDS {
                for i in 0..ROWS {
                    out[(word * ROWS + i) * value_words + first..][..WORDS].copy_from_slice(&square[word][i]);
                }
            }
        }
    }
}

/// Transposes a square of 2 x 2 numbers of 32 bits.
#[inline(always)]
fn mix_words([a, b]: [u64; 2]) -> [u64; 2] {
    const LOW: u64 = 0xffff_ffff;
    [a & LOW | b << 32, a >> 32 | b & !LOW]
}

/// Transposes a square of 4 x 4 numbers of 16 bits.
#[inline(always)]
fn mix_halves([a, b, c, d]: [u64; 4]) -> [u64; 4] {
    const EVEN: u64 = 0x0000_ffff_0000_ffff;
    let zip = |a: u64, b: u64| [a & EVEN | (b & EVEN) << 16, a >> 16 & EVEN | b & !EVEN];
    let [[a, b], [c, d]] = [zip(a, b), zip(c, d)];
    let [[a, c], [b, d]] = [mix_words([a, c]), mix_words([b, d])];
    [a, b, c, d]
}

/// Transposes a square of 2 x 2 numbers of 16 bits in one word: swaps the two in the middle.
#[inline(always)]
fn mix_pairs([a]: [u64; 1]) -> [u64; 1] {
    [a & 0xffff_0000_0000_ffff | a << 16 & 0xffff_0000_0000 | a >> 16 & 0xffff_0000]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::runtime::kv::{KvHeads, KvLayout, KvType};

    /// Returns the index of a number of a key: `[PAGE/16][stride/pair][16][pair]`.
    fn key(sum_type: SumType, stride: usize, position: usize, i: usize) -> usize {
        let pair = pair(sum_type);
        position / LANES * LANES * stride + i / pair * LANES * pair + position % LANES * pair + i % pair
    }

    /// Returns the index of a number of a value: `[PAGE/pair][stride][pair]`.
    fn value(sum_type: SumType, stride: usize, position: usize, i: usize) -> usize {
        let pair = pair(sum_type);
        position / pair * pair * stride + i * pair + position % pair
    }

    #[test]
    fn values_are_the_first_numbers_of_the_keys_of_their_positions() {
        for (rank, rope) in [(24, 16), (24, 8), (512, 64), (17, 1), (30, 4), (16, 2)] {
            let heads = KvHeads { count: 1, key: rank + rope, value: rank, shared: true };
            for (kind, sum_type) in
                [(KvType::F32, SumType::F32), (KvType::F16, SumType::F16), (KvType::Int8, SumType::Bf16)]
            {
                let layer = KvLayout::new(kind, [heads]).layers()[0];
                let bytes = if sum_type == SumType::F32 { 4 } else { 2 };
                let mut rng = Rng::new(rank as u64);
                let keys: Vec<u64> = (0..PAGE * layer.key_stride() * bytes / 8).map(|_| rng.next_u64()).collect();
                let keys: &[u8] = bytemuck::cast_slice(&keys);
                for positions in [16, 48, PAGE] {
                    // Words of 64 bits, so that the buffer is aligned to them.
                    let mut room = vec![0xaaaa_aaaa_aaaa_aaaa_u64; panel_words(sum_type, layer.value_stride()) / 2];
                    let room = bytemuck::cast_slice_mut(&mut room);
                    let values = values_of_keys(sum_type, keys, &layer, positions, room);
                    let number = |panel: &[u8], at: usize| panel[at * bytes..][..bytes].to_vec();
                    for (position, i) in (0..positions).flat_map(|p| (0..rank).map(move |i| (p, i))) {
                        let found = number(values, value(sum_type, layer.value_stride(), position, i));
                        let expected = number(keys, key(sum_type, layer.key_stride(), position, i));
                        assert_eq!(found, expected, "{kind} {rank} + {rope}: number {i} of position {position}");
                    }
                    let written = positions * layer.value_stride() * bytes;
                    assert!(values[written..].iter().all(|byte| *byte == 0xaa), "{kind}: later positions");
                }
            }
        }
    }
}
