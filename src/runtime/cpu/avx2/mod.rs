//! AVX2 with FMA and F16C: a tile is two halves of 8 rows, each walked along all of K.
#![allow(unsafe_code, clippy::needless_range_loop)]

mod float;
mod int16;
mod int8;
mod mix;
mod panel;
mod plain;
mod rows;

use super::kernels::{AHEAD, Kernel, KernelTable, kind};
use super::mix::{BF16, F16, F32};
use crate::scheme::{ScaleType, TILE_ROWS, TileLayout};
use crate::simd::Level;
use std::arch::x86_64::*;

pub(super) const TABLE: KernelTable = KernelTable {
    name: "avx2",
    detected: || {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
    },
    level: Level::AVX2,
    plain: plain::plain,
    plain_bf16: plain::bf16,
    bf16_wants_magnitudes: false,
    tile_float: Kernel { items: 1, alone: 1, cols: 4, run: float::tile_float, panel: None },
    tile_int16: Kernel { items: 1, alone: 1, cols: 4, run: int16::tile_int16, panel: None },
    mix_f32: mix::mix::<F32>,
    mix_f16: mix::mix::<F16>,
    mix_bf16: mix::mix::<BF16>,
    probabilities: None,
    tile_int8: Kernel { items: 1, alone: 1, cols: 4, run: int8::tile_int8, panel: Some(panel::PAIRS) },
    quantize: int8::quantize,
};

/// With AVX-VNNI.
pub(super) const TABLE_VNNI: KernelTable = KernelTable {
    name: "avxvnni",
    detected: || (TABLE.detected)() && is_x86_feature_detected!("avxvnni"),
    tile_int8: Kernel { panel: Some(panel::VNNI), ..TABLE.tile_int8 },
    ..TABLE
};

/// Rows in a register.
const HALF: usize = 8;

/// Half of vector `i` of a block of codes: four codes (or bytes of nibbles) of each of 8 rows.
///
/// # Safety
/// `tile` points to a tile of the layout that has the block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load<const KIND: u8>(layout: &TileLayout, tile: *const u8, half: usize, block: usize, i: usize) -> __m256i {
    let at = layout.codes_offset + 64 * (block * kind::vectors(KIND) + i) + 4 * HALF * half;
    if half == 0 {
        let ahead = tile.wrapping_add(AHEAD + block * layout.block_step + 64 * i);
        _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
        if i + 1 == kind::vectors(KIND) {
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64).cast());
        }
    }
    // SAFETY: the caller's promise; the load has no alignment demand.
    unsafe { _mm256_loadu_si256(tile.add(at).cast()) }
}

/// The scales of 8 rows; halved for MXFP4, whose codes are doubled.
///
/// # Safety
/// `tile` points to a tile of the layout that has the group.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scales(layout: &TileLayout, tile: *const u8, half: usize, group: usize) -> __m256 {
    let first = group * TILE_ROWS + HALF * half;
    // SAFETY: the caller's promise: 8 scales of the type are readable. The loads have no alignment demand.
    unsafe {
        match layout.spec.scale_dtype {
            ScaleType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(tile.add(2 * first).cast())),
            ScaleType::F32 => _mm256_loadu_ps(tile.add(4 * first).cast()),
            ScaleType::E8m0 => half_of_e8m0(bytes_of_rows(tile.add(first))),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn half_of_e8m0(exponents: __m256i) -> __m256 {
    // 2^-127 is not normal.
    let zero = _mm256_cmpeq_epi32(exponents, _mm256_setzero_si256());
    let bits = _mm256_blendv_epi8(_mm256_slli_epi32::<23>(exponents), _mm256_set1_epi32(1 << 22), zero);
    _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0.5))
}

/// One unsigned byte per row.
///
/// # Safety
/// 8 bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn bytes_of_rows(from: *const u8) -> __m256i {
    // SAFETY: the caller's promise; the load has no alignment demand.
    _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(from.cast()) })
}

/// The zero points of 8 rows.
///
/// # Safety
/// `tile` points to a tile of the (affine) layout that has the group.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn zeros(layout: &TileLayout, tile: *const u8, half: usize, group: usize) -> __m256i {
    // SAFETY: the caller's promise.
    let zeros = unsafe { bytes_of_rows(tile.add(layout.zeros_offset + group * TILE_ROWS + HALF * half)) };
    _mm256_min_epu32(zeros, _mm256_set1_epi32(15))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store(out: &mut [f32], at: usize, v: __m256) {
    let to: &mut [f32; HALF] = out[at..].first_chunk_mut().expect("room for half a tile");
    // SAFETY: 8 writable floats, and the store has no alignment demand.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nibbles(v: __m256i) -> [__m256i; 2] {
    let mask = _mm256_set1_epi8(15);
    [_mm256_and_si256(v, mask), _mm256_and_si256(_mm256_srli_epi32::<4>(v), mask)]
}
