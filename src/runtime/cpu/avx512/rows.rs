//! AVX-512: plain numbers as floats, and the sum of lanes.

use super::super::mix::{F16, F32};
use std::arch::x86_64::*;

/// The elements of the mask as floats.
///
/// # Safety
/// They are readable at `from`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn widened<const TYPE: u8>(from: *const u8, mask: __mmask16) -> __m512 {
    if TYPE == F32 {
        // SAFETY: the caller's promise.
        return unsafe { _mm512_maskz_loadu_ps(mask, from.cast()) };
    }
    // SAFETY: the caller's promise.
    let half = unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) };
    if TYPE == F16 {
        return _mm512_cvtph_ps(half);
    }
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
}
