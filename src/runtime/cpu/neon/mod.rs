//! NEON: a tile is four quarters of 4 rows; only instructions that every aarch64 processor has.
#![allow(unsafe_code, clippy::needless_range_loop)]

mod float;
mod int16;
mod int8;
mod mix;
mod plain;
mod rows;

use super::kernels::{Kernel, KernelTable, kind};
use super::mix::{BF16, F16, F32};
use super::scalar;
use crate::scheme::{ScaleType, TILE_ROWS, TileLayout};
use crate::simd::Level;
use std::arch::aarch64::*;

pub(super) const TABLE: KernelTable = KernelTable {
    name: "neon",
    detected: || std::arch::is_aarch64_feature_detected!("neon"),
    level: Level::BASELINE,
    plain: plain::plain,
    plain_bf16: plain::bf16,
    tile_float: Kernel { items: 1, alone: 1, cols: 4, run: float::tile_float, panel: None },
    tile_int16: Kernel { items: 1, alone: 1, cols: 4, run: int16::tile_int16, panel: None },
    mix_f32: mix::mix::<F32>,
    mix_f16: mix::mix::<F16>,
    mix_bf16: mix::mix::<BF16>,
    tile_int8: Kernel { items: 1, alone: 1, cols: 4, run: int8::tile_int8, panel: None },
    ..scalar::TABLE
};

/// Rows in a register.
const QUARTER: usize = 4;

/// A quarter of vector `i` of a block of codes: four codes (or bytes of nibbles) of each of 4 rows.
///
/// # Safety
/// `tile` points to a tile of the layout that has the block.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load<const KIND: u8>(
    layout: &TileLayout,
    tile: *const u8,
    quarter: usize,
    block: usize,
    i: usize,
) -> uint8x16_t {
    let at = layout.codes_offset + 64 * (block * kind::vectors(KIND) + i) + 16 * quarter;
    // SAFETY: the caller's promise; the load has no alignment demand.
    unsafe { vld1q_u8(tile.add(at)) }
}

/// Four halves, given as the low bits of each lane, as floats.
#[inline]
#[target_feature(enable = "neon")]
fn halves(bits: uint32x4_t) -> float32x4_t {
    let magnitude = vshlq_n_u32::<13>(vandq_u32(bits, vdupq_n_u32(0x7FFF)));
    let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
    // 2^112 moves the exponent from the bias of a half to that of a float; denormals become normal on the way.
    let finite = vmulq_f32(vreinterpretq_f32_u32(magnitude), vdupq_n_f32(f32::from_bits(239 << 23)));
    let special = vorrq_u32(magnitude, vdupq_n_u32(0x7F80_0000));
    let is_special = vcgeq_u32(magnitude, vdupq_n_u32(0x0F80_0000));
    vreinterpretq_f32_u32(vorrq_u32(vbslq_u32(is_special, special, vreinterpretq_u32_f32(finite)), sign))
}

/// The scales of 4 rows; halved for MXFP4, whose codes are doubled.
///
/// # Safety
/// `tile` points to a tile of the layout that has the group.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn scales(layout: &TileLayout, tile: *const u8, quarter: usize, group: usize) -> float32x4_t {
    let first = group * TILE_ROWS + QUARTER * quarter;
    // SAFETY: the caller's promise: 4 scales of the type are readable. The loads have no alignment demand.
    unsafe {
        match layout.spec.scale_dtype {
            ScaleType::F16 => halves(vmovl_u16(vld1_u16(tile.add(2 * first).cast()))),
            ScaleType::F32 => vld1q_f32(tile.add(4 * first).cast()),
            ScaleType::E8m0 => half_of_e8m0(bytes_of_rows(tile.add(first))),
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn half_of_e8m0(exponents: uint32x4_t) -> float32x4_t {
    // 2^-127 is not normal.
    let zero = vceqzq_u32(exponents);
    let bits = vbslq_u32(zero, vdupq_n_u32(1 << 22), vshlq_n_u32::<23>(exponents));
    vmulq_f32(vreinterpretq_f32_u32(bits), vdupq_n_f32(0.5))
}

/// One unsigned byte per row.
///
/// # Safety
/// 4 bytes are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn bytes_of_rows(from: *const u8) -> uint32x4_t {
    // SAFETY: the caller's promise, and any bytes are a u32.
    let bytes = vcreate_u8(u64::from(unsafe { from.cast::<u32>().read_unaligned() }));
    vmovl_u16(vget_low_u16(vmovl_u8(bytes)))
}

/// The zero points of 4 rows.
///
/// # Safety
/// `tile` points to a tile of the (affine) layout that has the group.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn zeros(layout: &TileLayout, tile: *const u8, quarter: usize, group: usize) -> uint32x4_t {
    // SAFETY: the caller's promise.
    let zeros = unsafe { bytes_of_rows(tile.add(layout.zeros_offset + group * TILE_ROWS + QUARTER * quarter)) };
    vminq_u32(zeros, vdupq_n_u32(15))
}

/// The codes of vector `i` (and, for nibbles, of k + 16) as signed bytes; affine ones without their zero point.
///
/// # Safety
/// `tile` points to a tile of the layout that has the block.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn signed<const KIND: u8>(
    layout: &TileLayout,
    tile: *const u8,
    quarter: usize,
    block: usize,
    i: usize,
) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise.
    let v = unsafe { load::<KIND>(layout, tile, quarter, block, i) };
    if KIND == kind::INT8 {
        // SAFETY: the caller's promise.
        let upper = unsafe { load::<KIND>(layout, tile, quarter, block, i + 4) };
        return [vreinterpretq_s8_u8(v), vreinterpretq_s8_u8(upper)];
    }
    let (low, high) = (vandq_u8(v, vdupq_n_u8(15)), vshrq_n_u8::<4>(v));
    if matches!(KIND, kind::MXFP4 | kind::NL4) {
        let values = kind::table(KIND);
        // SAFETY: 16 readable bytes.
        let table = unsafe { vld1q_s8(values.as_ptr()) };
        return [vqtbl1q_s8(table, low), vqtbl1q_s8(table, high)];
    }
    let offset = vdupq_n_s8(if KIND == kind::SYMMETRIC4 { 8 } else { 0 });
    [vsubq_s8(vreinterpretq_s8_u8(low), offset), vsubq_s8(vreinterpretq_s8_u8(high), offset)]
}

#[inline]
#[target_feature(enable = "neon")]
fn store(out: &mut [f32], at: usize, v: float32x4_t) {
    let to: &mut [f32; QUARTER] = out[at..].first_chunk_mut().expect("room for a quarter of a tile");
    // SAFETY: 4 writable floats.
    unsafe { vst1q_f32(to.as_mut_ptr(), v) }
}
