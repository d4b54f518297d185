//! AVX-512: weighted sums of vectors.

use super::super::mix::{BF16, F16, Mix, NEXT_BYTES};
use super::store;
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

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn finish<const R: usize, const V: usize>(sums: &[[__m512; V]; R], vector: usize, out: &mut [f32], out_row: usize) {
    for r in 0..R {
        for j in 0..V {
            store(&mut out[r * out_row..], vector + j, sums[r][j]);
        }
    }
}
