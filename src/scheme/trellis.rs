//! Trellis codes: indices into a table of 64 values that share bits with each other.
//!
//! The weights k = j, j + 4, … of a block of 32 columns of a row, j = 0 to 3, are the 8 steps of a *stream* of 8 b
//! bits, b = 2 or 3. The index of step s is the [`INDEX_BITS`] bits of the stream that begin at bit s * b; behind
//! the last bit follows the first one. So each weight costs b bits, but its value is one of 64, and an encoder chooses
//! all values of a stream together. This is the bitshift trellis of QTIP (Tseng et al. 2024, arXiv 2406.11235), with a
//! table instead of computed values, so that one shuffle of bytes decodes it, and with streams that end where they
//! begin (tail-biting), so that blocks are independent.

/// Bits of an index into the table of values.
pub const INDEX_BITS: usize = 6;
/// Number of steps of a stream.
pub const STEPS: usize = 8;

/// Meaning of the streams of a scheme.
#[derive(Debug, PartialEq, Eq)]
pub struct Trellis {
    /// Bits per weight.
    pub bits: u32,
    /// Value of each index; none is -128.
    pub values: [i8; 1 << INDEX_BITS],
    /// Standard deviation of the weights that the values are made for, in units of the values.
    pub spread: u32,
}

impl Trellis {
    /// Returns the index of a step of a stream.
    #[inline(always)]
    pub fn index(&self, stream: u32, step: usize) -> u8 {
        let circle = u64::from(stream) | u64::from(stream) << (self.bits * STEPS as u32);
        (circle >> (self.bits as usize * step)) as u8 & ((1 << INDEX_BITS) - 1)
    }

    /// Returns the stream whose steps have these indices. Only the lowest bits of each index are read; the others are
    /// those of its neighbours.
    #[inline(always)]
    pub fn stream(&self, indices: [u8; STEPS]) -> u32 {
        let mut stream = 0;
        for (step, index) in indices.iter().enumerate() {
            stream |= (u32::from(*index) & ((1 << self.bits) - 1)) << (self.bits as usize * step);
        }
        stream
    }
}

/// Trellis of 2 bits. The values are the means of what was encoded with them, repeated until they no longer changed
/// (Lloyd), for groups of 128 of which half were normally distributed and half had Student's t distribution with 5
/// degrees of freedom.
pub static T2: Trellis = Trellis {
    bits: 2,
    values: [
        25, -28, 9, -5, 88, -67, -15, 32, -39, 13, 31, 76, -50, -5, -91, -28, -81, -51, -27, 27, -28, 3, -53, 46, 37,
        69, -32, 2, 51, 23, -20, 21, 12, 0, -7, -36, 65, -67, 39, 9, 75, 39, 2, -45, 0, -39, 38, -10, -20, -127, -56,
        21, -8, 38, 120, -21, 10, -8, 65, -27, 24, 58, 2, -71,
    ],
    spread: 42,
};

/// Trellis of 3 bits; see [`T2`].
pub static T3: Trellis = Trellis {
    bits: 3,
    values: [
        38, -7, -125, 4, -72, -18, 20, -33, -63, -9, -28, -1, -46, 13, -22, 39, 69, 6, 44, 127, 28, -42, -15, 14, 6,
        52, 31, -16, 18, -29, 78, -2, -15, 32, 1, 17, -24, -6, -40, -55, 44, -34, -57, 19, 6, 26, -9, 61, 26, -90, 12,
        -70, -3, -41, 49, -19, 15, -15, 61, -47, -29, 35, 2, 91,
    ],
    spread: 36,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn indices_share_the_bits_of_their_neighbours() {
        let mut rng = Rng::new(7);
        for trellis in [&T2, &T3] {
            for _ in 0..100 {
                let length = trellis.bits * STEPS as u32;
                let stream = rng.next_u64() as u32 & ((1u32 << length) - 1);
                let bit = |i: u32| stream >> (i % length) & 1;
                let indices = std::array::from_fn(|step| trellis.index(stream, step));
                for (step, index) in indices.iter().enumerate() {
                    let bits = (0..INDEX_BITS as u32).map(|i| bit(step as u32 * trellis.bits + i) << i);
                    assert_eq!(u32::from(*index), bits.sum::<u32>());
                }
                assert_eq!(trellis.stream(indices), stream);
            }
        }
    }

    #[test]
    fn values_use_the_range_of_bytes() {
        for trellis in [&T2, &T3] {
            assert_eq!(trellis.values.iter().map(|value| i32::from(*value).abs()).max(), Some(127));
        }
    }
}
