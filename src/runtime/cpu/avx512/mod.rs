//! AVX-512 (F, BW, VL, VNNI): one register is one vector of a tile, 16 rows wide.
//!
//! Weights are unpacked in registers, once for all columns of the rectangle. Few columns read one tile after the other, as one
//! stream from memory; where arithmetic counts more, two tiles share each broadcast activation, and a rectangle of 2 tiles x 6
//! columns keeps 24 accumulators in the 32 registers.
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
    name: "avx512",
    detected,
    level: Level::AVX512,
    plain: plain::plain,
    plain_bf16: plain::bf16_emulated,
    bf16_wants_magnitudes: false,
    tile_float: Kernel { items: 2, alone: 1, cols: 6, run: float::tile_float, panel: None },
    tile_int16: Kernel { items: 1, alone: 1, cols: 6, run: int16::tile_int16, panel: Some(int16::PANEL) },
    mix_f32: mix::mix::<F32>,
    mix_f16: mix::mix::<F16>,
    mix_bf16: mix::mix::<BF16>,
    probabilities: Some(mix::probabilities),
    tile_int8: Kernel { items: 1, alone: 1, cols: 11, run: int8::tile_int8, panel: Some(panel::INT8) },
    quantize: int8::quantize,
};

/// With AVX512_BF16.
pub(super) const TABLE_BF16: KernelTable = KernelTable {
    name: "avx512bf16",
    detected: || detected() && is_x86_feature_detected!("avx512bf16"),
    plain_bf16: plain::bf16,
    bf16_wants_magnitudes: true,
    mix_bf16: mix::mix_pairs,
    ..TABLE
};

fn detected() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Vector `i` of a block of codes; asks for what lies ahead of it and of its share of the scales.
///
/// # Safety
/// `tile` points to a tile of the layout that has the block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn load<const KIND: u8>(layout: &TileLayout, tile: *const u8, block: usize, i: usize) -> __m512i {
    let at = layout.codes_offset + 64 * (block * kind::vectors(KIND) + i);
    let ahead = tile.wrapping_add(AHEAD + block * layout.block_step + 64 * i);
    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
    if i + 1 == kind::vectors(KIND) {
        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64).cast());
    }
    // SAFETY: the caller's promise; the load has no alignment demand.
    unsafe { _mm512_loadu_si512(tile.add(at).cast()) }
}

/// The scales of 16 rows; halved for MXFP4, whose codes are doubled.
///
/// # Safety
/// `tile` points to a tile of the layout that has the group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn scales(layout: &TileLayout, tile: *const u8, group: usize) -> __m512 {
    // SAFETY: the caller's promise: 16 scales of the type are readable. The loads have no alignment demand.
    unsafe {
        match layout.spec.scale_dtype {
            ScaleType::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(tile.add(group * TILE_ROWS * 2).cast())),
            ScaleType::F32 => _mm512_loadu_ps(tile.add(group * TILE_ROWS * 4).cast()),
            ScaleType::E8m0 => half_of_e8m0(bytes_of_rows(tile.add(group * TILE_ROWS))),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn half_of_e8m0(exponents: __m512i) -> __m512 {
    // 2^-127 is not normal.
    let zero = _mm512_testn_epi32_mask(exponents, exponents);
    let bits = _mm512_mask_mov_epi32(_mm512_slli_epi32::<23>(exponents), zero, _mm512_set1_epi32(1 << 22));
    _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0.5))
}

/// One unsigned byte per row.
///
/// # Safety
/// 16 bytes are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn bytes_of_rows(from: *const u8) -> __m512i {
    // SAFETY: the caller's promise; the load has no alignment demand.
    _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(from.cast()) })
}

/// The zero points of 16 rows.
///
/// # Safety
/// `tile` points to a tile of the (affine) layout that has the group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn zeros(layout: &TileLayout, tile: *const u8, group: usize) -> __m512i {
    // SAFETY: the caller's promise.
    _mm512_min_epu32(unsafe { bytes_of_rows(tile.add(layout.zeros_offset + group * TILE_ROWS)) }, _mm512_set1_epi32(15))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn store(out: &mut [f32], at: usize, v: __m512) {
    let to: &mut [f32; 16] = out[at * 16..].first_chunk_mut().expect("room for a tile");
    // SAFETY: 16 writable floats, and the store has no alignment demand.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
}
