//! AVX-512: weighted sums of vectors, and the probabilities that weigh them.

use super::super::mix::{BF16, F16, Mix, NEXT_BYTES, SMALLEST_POWER, reference};
use super::store;
use crate::runtime::ops::{EXP2_TERMS, ROUNDER};
use std::arch::x86_64::*;

/// Evaluates `$call` for each rectangle that is computed in registers: `$R` outputs by `$V` vectors from `$row` and
/// `$vector` on; at most 4 outputs and 16 vectors of sums. `$next` is the part of [`Mix::next`] that goes with it.
macro_rules! in_registers {
    ($mix:expr, $row:ident, $vector:ident, $next:ident, $R:ident, $V:ident, $call:expr) => {{
        let (mut $vector, mut rest) = (0, $mix.next);
        while $vector < $mix.vectors {
            let fits = |width: &usize| *width <= $mix.vectors - $vector && width * $mix.rows.min(4) <= 16;
            let width = [8, 4, 2].into_iter().find(fits).unwrap_or(1);
            for $row in (0..$mix.rows).step_by(4) {
                let $next;
                ($next, rest) = rest.split_at(rest.len().min($mix.steps * NEXT_BYTES));
                in_registers!(@ ((4).min($mix.rows - $row), width),
                    [(1, 1)(1, 2)(1, 4)(1, 8)(2, 1)(2, 2)(2, 4)(2, 8)(3, 1)(3, 2)(3, 4)(4, 1)(4, 2)(4, 4)],
                    $R, $V, $call);
            }
            $vector += width;
        }
    }};
    (@ $size:expr, [$(($r:literal, $v:literal))*], $R:ident, $V:ident, $call:expr) => {
        match $size {
            $(($r, $v) => {
                const $R: usize = $r;
                const $V: usize = $v;
                $call
            })*
            (rows, vectors) => unreachable!("{rows} outputs by {vectors} vectors"),
        }
    };
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn mix<const TYPE: u8>(mix: &Mix<'_>, out: &mut [f32], out_row: usize) {
    in_registers!(mix, row, vector, next, R, V, {
        sums::<TYPE, R, V>(&Mix { next, ..*mix }, row, vector, &mut out[row * out_row..], out_row);
    });
}

/// Walks through [`Mix::next`].
struct Ahead {
    at: *const u8,
    step: usize,
}

impl Ahead {
    #[inline(always)]
    fn new(mix: &Mix<'_>) -> Ahead {
        // Where nothing follows, a line that is in use anyway.
        if mix.next.is_empty() {
            return Ahead { at: mix.weights.as_ptr().cast(), step: 0 };
        }
        Ahead { at: mix.next.as_ptr(), step: NEXT_BYTES }
    }

    /// Asks for the lines of a step.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn ask(&mut self) {
        _mm_prefetch::<_MM_HINT_T0>(self.at.cast());
        _mm_prefetch::<_MM_HINT_T0>(self.at.wrapping_add(64).cast());
        self.at = self.at.wrapping_add(self.step);
    }
}

/// `R` outputs by `V` vectors, all in registers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sums<const TYPE: u8, const R: usize, const V: usize>(
    mix: &Mix<'_>,
    row: usize,
    vector: usize,
    out: &mut [f32],
    out_row: usize,
) {
    let mut w = [std::ptr::null::<u32>(); R];
    for r in 0..R {
        w[r] = mix.weights[(row + r) * mix.weight_row..][..mix.steps].as_ptr();
    }
    let mut sums = [[_mm512_setzero_ps(); V]; R];
    let mut values = mix.values[vector * mix.vector..].as_ptr();
    let mut next = Ahead::new(mix);
    for i in 0..mix.steps {
        next.ask();
        let mut v = [[_mm512_setzero_ps(); 2]; V];
        for j in 0..V {
            // SAFETY: the values have `V` vectors from `vector` on for each step.
            v[j] = unsafe { widened::<TYPE>(values.add(j * mix.vector)) };
        }
        for r in 0..R {
            // SAFETY: there are `steps` weights for each output.
            let [even, odd] = parts::<TYPE>(_mm512_set1_epi32(unsafe { *w[r].add(i) } as i32));
            for j in 0..V {
                if TYPE == BF16 {
                    sums[r][j] = _mm512_fmadd_ps(v[j][1], odd, sums[r][j]);
                }
                sums[r][j] = _mm512_fmadd_ps(v[j][0], even, sums[r][j]);
            }
        }
        values = values.wrapping_add(mix.step);
    }
    finish(&sums, vector, out, out_row);
}

/// The numbers of a step as floats: one vector, or the even and the odd ones of pairs.
///
/// # Safety
/// A vector of the type is readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn widened<const TYPE: u8>(from: *const u8) -> [__m512; 2] {
    // SAFETY: the caller's promise; the loads have no alignment demand.
    unsafe {
        match TYPE {
            F16 => [_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())), _mm512_setzero_ps()],
            _ => parts::<TYPE>(_mm512_loadu_si512(from.cast())),
        }
    }
}

/// Words as floats: themselves, or the even and the odd numbers of pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn parts<const TYPE: u8>(words: __m512i) -> [__m512; 2] {
    if TYPE != BF16 {
        return [_mm512_castsi512_ps(words), _mm512_setzero_ps()];
    }
    let odd = _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32 as i32));
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)), _mm512_castsi512_ps(odd)]
}

/// Pairs of bf16 by the instruction made for them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
pub(super) fn mix_pairs(mix: &Mix<'_>, out: &mut [f32], out_row: usize) {
    in_registers!(mix, row, vector, next, R, V, {
        pairs::<R, V>(&Mix { next, ..*mix }, row, vector, &mut out[row * out_row..], out_row);
    });
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
fn pairs<const R: usize, const V: usize>(mix: &Mix<'_>, row: usize, vector: usize, out: &mut [f32], out_row: usize) {
    let mut w = [std::ptr::null::<u32>(); R];
    for r in 0..R {
        w[r] = mix.weights[(row + r) * mix.weight_row..][..mix.steps].as_ptr();
    }
    let mut sums = [[_mm512_setzero_ps(); V]; R];
    let mut values = mix.values[vector * mix.vector..].as_ptr();
    let mut next = Ahead::new(mix);
    for i in 0..mix.steps {
        next.ask();
        let mut v = [_mm512_setzero_si512(); V];
        for j in 0..V {
            // SAFETY: the values have `V` vectors from `vector` on for each step; the load has no alignment demand.
            v[j] = unsafe { _mm512_loadu_si512(values.add(j * mix.vector).cast()) };
        }
        for r in 0..R {
            // SAFETY: there are `steps` weights for each output.
            let weight = _mm512_set1_epi32(unsafe { *w[r].add(i) } as i32);
            for j in 0..V {
                sums[r][j] = pair(sums[r][j], v[j], weight);
            }
        }
        values = values.wrapping_add(mix.step);
    }
    finish(&sums, vector, out, out_row);
}

/// Adds the products of odd numbers, then those of even ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn pair(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
    // SAFETY: vectors of the same size; any bits are bf16 numbers.
    let (a, b) = unsafe { (std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512i, __m512bh>(b)) };
    _mm512_dpbf16_ps(sum, a, b)
}

/// The upper halves of two vectors of words, those of the first before those of the second.
static UPPER: [u16; 32] = {
    let mut places = [1; 32];
    let mut i = 1;
    while i < 32 {
        places[i] = places[i - 1] + 2;
        i += 1;
    }
    places
};

/// The reference is `cpu::reference` and `kv::probabilities`. Without iterators and closures, which builds without
/// link-time optimization do not inline here.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn probabilities(scores: &[f32], words: &mut [u32], sum: &mut [f32; 16]) -> f32 {
    let (chunks, words) = (scores.as_chunks::<16>().0, words.as_chunks_mut::<8>().0);
    let chunks = &chunks[..chunks.len().min(words.len())];
    let mut peaks = _mm512_set1_ps(f32::NEG_INFINITY);
    for chunk in chunks {
        // What is not a number is skipped: the second one is the result then.
        peaks = _mm512_max_ps(loaded(chunk), peaks);
    }
    let m = reference(_mm512_reduce_max_ps(peaks));
    // SAFETY: 64 readable bytes; the load has no alignment demand.
    let upper = unsafe { _mm512_loadu_si512(UPPER.as_ptr().cast()) };
    let mut sums = _mm512_setzero_ps();
    let mut i = 0;
    while i + 1 < chunks.len() {
        let (first, second) = (power(loaded(&chunks[i]), m), power(loaded(&chunks[i + 1]), m));
        sums = _mm512_add_ps(_mm512_add_ps(sums, first), second);
        let both = _mm512_permutex2var_epi16(near(first), upper, near(second));
        // SAFETY: 8 writable words, and as many behind them; the store has no alignment demand.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().add(i).cast(), both) };
        i += 2;
    }
    if i < chunks.len() {
        let last = power(loaded(&chunks[i]), m);
        sums = _mm512_add_ps(sums, last);
        let halves = _mm512_castsi512_si256(_mm512_permutexvar_epi16(upper, near(last)));
        // SAFETY: 8 writable words; the store has no alignment demand.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().add(i).cast(), halves) };
    }
    // SAFETY: 16 writable floats; the store has no alignment demand.
    unsafe { _mm512_storeu_ps(sum.as_mut_ptr(), sums) };
    m
}

#[inline]
#[target_feature(enable = "avx512f")]
fn loaded(chunk: &[f32; 16]) -> __m512 {
    // SAFETY: 16 readable floats; the load has no alignment demand.
    unsafe { _mm512_loadu_ps(chunk.as_ptr()) }
}

/// `exp2_from(SMALLEST_POWER, score - m)`; no such power is subnormal, so scaling is the multiplication.
#[inline]
#[target_feature(enable = "avx512f")]
fn power(score: __m512, m: f32) -> __m512 {
    let x = _mm512_sub_ps(score, _mm512_set1_ps(m));
    let n = _mm512_sub_ps(_mm512_add_ps(x, _mm512_set1_ps(ROUNDER)), _mm512_set1_ps(ROUNDER));
    let r = _mm512_sub_ps(x, n);
    let mut p = _mm512_set1_ps(EXP2_TERMS[0]);
    for i in 1..EXP2_TERMS.len() {
        p = _mm512_fmadd_ps(r, p, _mm512_set1_ps(EXP2_TERMS[i]));
    }
    let large = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(SMALLEST_POWER as f32));
    _mm512_maskz_scalef_ps(large, p, n)
}

/// Rounds in the upper half, up at a tie.
#[inline]
#[target_feature(enable = "avx512f")]
fn near(p: __m512) -> __m512i {
    _mm512_add_epi32(_mm512_castps_si512(p), _mm512_set1_epi32(0x8000))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn finish<const R: usize, const V: usize>(sums: &[[__m512; V]; R], vector: usize, out: &mut [f32], out_row: usize) {
    for r in 0..R {
        for j in 0..V {
            store(&mut out[r * out_row..], vector + j, sums[r][j]);
        }
    }
}
