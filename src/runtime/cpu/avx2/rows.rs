//! AVX2: plain numbers as floats, and the sum of lanes.

use super::super::mix::{F16, F32};
use std::arch::x86_64::*;

/// 16 elements as floats.
///
/// # Safety
/// They are readable at `from`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn widened<const TYPE: u8>(from: *const u8) -> [__m256; 2] {
    let mut wide = [_mm256_setzero_ps(); 2];
    for h in 0..2 {
        // SAFETY: the caller's promise; the loads have no alignment demand.
        wide[h] = unsafe {
            match TYPE {
                F32 => _mm256_loadu_ps(from.add(32 * h).cast()),
                F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.add(16 * h).cast())),
                _ => {
                    let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(16 * h).cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
                }
            }
        };
    }
    wide
}
