//! AVX-512 kernel that turns attention scores into probabilities. It uses intrinsics, because `vscalefps` and
//! `vpermt2w` replace about ten instructions of the vectorized loop in `kv` by two.

use super::super::weighted_sum::{SMALLEST_POWER, reference};
use crate::runtime::ops::{EXP2_TERMS, ROUNDER};
use std::arch::x86_64::*;

/// Exponent below which a probability in bf16 is zero.
const LEAST: f32 = SMALLEST_POWER as f32;

/// Permutation that selects the upper halves of the words of two vectors, those of the first vector first.
static UPPER: [u16; 32] = {
    let mut places = [1; 32];
    let mut i = 1;
    while i < 32 {
        places[i] = places[i - 1] + 2;
        i += 1;
    }
    places
};

/// Computes what `cpu::reference` and `kv::probabilities` define, with the same bits. It avoids iterators and
/// closures, because builds without link-time optimization do not inline them here.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn probabilities(scores: &[f32], words: &mut [u32], sum: &mut [f32; 16]) -> f32 {
    let (chunks, words) = (scores.as_chunks::<16>().0, words.as_chunks_mut::<8>().0);
    let chunks = &chunks[..chunks.len().min(words.len())];
    let m = reference(largest(chunks));
    // SAFETY: 64 readable bytes; the load has no alignment demand.
    let upper = unsafe { _mm512_loadu_si512(UPPER.as_ptr().cast()) };
    let mut sums = _mm512_setzero_ps();
    let mut i = 0;
    while i + 1 < chunks.len() {
        let (first, second) = (power(LEAST, loaded(&chunks[i]), m), power(LEAST, loaded(&chunks[i + 1]), m));
        sums = _mm512_add_ps(_mm512_add_ps(sums, first), second);
        let both = _mm512_permutex2var_epi16(near(first), upper, near(second));
        // SAFETY: chunks `i` and `i + 1` are 16 writable words; the store has no alignment demand.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().add(i).cast(), both) };
        i += 2;
    }
    if i < chunks.len() {
        let last = power(LEAST, loaded(&chunks[i]), m);
        sums = _mm512_add_ps(sums, last);
        let halves = _mm512_castsi512_si256(_mm512_permutexvar_epi16(upper, near(last)));
        // SAFETY: 8 writable words; the store has no alignment demand.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().add(i).cast(), halves) };
    }
    // SAFETY: 16 writable floats; the store has no alignment demand.
    unsafe { _mm512_storeu_ps(sum.as_mut_ptr(), sums) };
    m
}

/// Computes the same probabilities as f32, one per word.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn wide_probabilities(scores: &[f32], words: &mut [u32], sum: &mut [f32; 16]) -> f32 {
    let (chunks, words) = (scores.as_chunks::<16>().0, words.as_chunks_mut::<16>().0);
    let chunks = &chunks[..chunks.len().min(words.len())];
    let m = reference(largest(chunks));
    let mut sums = _mm512_setzero_ps();
    let mut i = 0;
    while i < chunks.len() {
        let p = power(-126.0, loaded(&chunks[i]), m);
        sums = _mm512_add_ps(sums, p);
        // SAFETY: 16 writable words; the store has no alignment demand.
        unsafe { _mm512_storeu_ps(words.as_mut_ptr().add(i).cast(), p) };
        i += 1;
    }
    // SAFETY: 16 writable floats; the store has no alignment demand.
    unsafe { _mm512_storeu_ps(sum.as_mut_ptr(), sums) };
    m
}

/// Returns the largest score; NaN is skipped.
#[inline]
#[target_feature(enable = "avx512f")]
fn largest(chunks: &[[f32; 16]]) -> f32 {
    let mut peaks = _mm512_set1_ps(f32::NEG_INFINITY);
    for chunk in chunks {
        // If one operand is NaN, the result is the second.
        peaks = _mm512_max_ps(loaded(chunk), peaks);
    }
    _mm512_reduce_max_ps(peaks)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn loaded(chunk: &[f32; 16]) -> __m512 {
    // SAFETY: 16 readable floats; the load has no alignment demand.
    unsafe { _mm512_loadu_ps(chunk.as_ptr()) }
}

/// Returns `exp2_from(least, score - m)`. `vscalefps` equals the multiplication by a power of two.
#[inline]
#[target_feature(enable = "avx512f")]
fn power(least: f32, score: __m512, m: f32) -> __m512 {
    let x = _mm512_sub_ps(score, _mm512_set1_ps(m));
    let n = _mm512_sub_ps(_mm512_add_ps(x, _mm512_set1_ps(ROUNDER)), _mm512_set1_ps(ROUNDER));
    let r = _mm512_sub_ps(x, n);
    let mut p = _mm512_set1_ps(EXP2_TERMS[0]);
    for i in 1..EXP2_TERMS.len() {
        p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(EXP2_TERMS[i]));
    }
    let large = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(least));
    _mm512_maskz_scalef_ps(large, p, n)
}

/// Rounds each float to the upper half of its word, up at a tie.
#[inline]
#[target_feature(enable = "avx512f")]
fn near(p: __m512) -> __m512i {
    _mm512_add_epi32(_mm512_castps_si512(p), _mm512_set1_epi32(0x8000))
}
