//! AVX-512 kernel that rounds f32 numbers to pairs of bf16. It uses intrinsics, because `vpermt2w` picks the upper
//! halves of 32 numbers at once, in their order.

use crate::runtime::cpu::{SMALLEST_POWER, SumType, weights};
use std::arch::x86_64::*;

/// Places of the upper halves of the words of two registers.
static UPPER: [u16; 32] = {
    let mut places = [0; 32];
    let mut i = 0;
    while i < 32 {
        places[i] = 2 * i as u16 + 1;
        i += 1;
    }
    places
};

/// Does what [`weights`] does for pairs of bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn pairs(values: &[f32], words: &mut [u32]) {
    let ((chunks, rest), (full, last)) = (values.as_chunks::<32>(), words.as_chunks_mut::<16>());
    let count = chunks.len().min(full.len());
    // SAFETY: 64 readable bytes; the load has no alignment demand.
    let upper = unsafe { _mm512_loadu_si512(UPPER.as_ptr().cast()) };
    let mut i = 0;
    while i < count {
        // SAFETY: 32 readable numbers; the loads have no alignment demand.
        let [low, high] = unsafe {
            let from = chunks[i].as_ptr();
            [_mm512_loadu_si512(from.cast()), _mm512_loadu_si512(from.add(16).cast())]
        };
        let pairs = _mm512_permutex2var_epi16(rounded(low), upper, rounded(high));
        // SAFETY: 16 writable words; the store has no alignment demand.
        unsafe { _mm512_storeu_si512(full[i].as_mut_ptr().cast(), pairs) };
        i += 1;
    }
    // A short rest ends within a chunk of words.
    weights(SumType::Bf16, rest, if full.len() > count { &mut full[count] } else { last });
}

/// Returns the bits of the nearest bf16 in the upper halves, as [`crate::runtime::cpu::rounded`] does.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn rounded(bits: __m512i) -> __m512i {
    let abs = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fff_ffff));
    let even = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even);
    let large = _mm512_cmpge_epu32_mask(abs, _mm512_set1_epi32((127 + SMALLEST_POWER) << 23));
    let nan = _mm512_cmpgt_epu32_mask(abs, _mm512_set1_epi32(0x7f80_0000));
    _mm512_mask_mov_epi32(_mm512_maskz_mov_epi32(large, near), nan, _mm512_set1_epi32(0x7fc0_0000))
}
