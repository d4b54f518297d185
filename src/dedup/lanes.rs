//! Loops over bytes that the compiler vectorizes: small kernels for planes.

use crate::simd::Kernel;

/// Number of bytes handled at once: the vector width of AVX-512.
pub(crate) const LANES: usize = 64;

/// Kernel that returns true if all bytes (first field) are equal to one value (second field).
pub(crate) struct AllAre<'a>(pub &'a [u8], pub u8);

impl Kernel<bool> for AllAre<'_> {
    #[inline(always)]
    fn run(self) -> bool {
        let AllAre(bytes, value) = self;
        let (chunks, rest) = bytes.as_chunks::<LANES>();
        // In chunks, so that a difference ends the loop early.
        chunks.iter().all(|chunk| chunk.iter().fold(0, |other, byte| other | (byte ^ value)) == 0)
            && rest.iter().all(|byte| *byte == value)
    }
}

/// Calls `f` with the index of every byte of `lanes` that is not zero; all bytes are 0 or 255.
#[inline(always)]
pub(crate) fn for_each_set(lanes: &[u8], mut f: impl FnMut(usize)) {
    for (word, eight) in lanes.as_chunks::<8>().0.iter().enumerate() {
        let mut set = u64::from_le_bytes(*eight) & 0x0101_0101_0101_0101;
        while set != 0 {
            f(word * 8 + set.trailing_zeros() as usize / 8);
            set &= set - 1;
        }
    }
}

/// Returns the number of occurrences of each byte.
pub(crate) fn histogram(bytes: &[u8]) -> [u32; 256] {
    // Four counters in turn, because increments of the same counter would wait for each other.
    let mut counts = [[0u32; 256]; 4];
    let (fours, rest) = bytes.as_chunks::<4>();
    for four in fours {
        for i in 0..4 {
            counts[i][usize::from(four[i])] += 1;
        }
    }
    for byte in rest {
        counts[0][usize::from(*byte)] += 1;
    }
    let [mut sum, others @ ..] = counts;
    for other in others {
        for (sum, count) in sum.iter_mut().zip(other) {
            *sum += count;
        }
    }
    sum
}
