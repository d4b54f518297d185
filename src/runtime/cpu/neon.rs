//! NEON kernels: a tile is four pieces of 4 rows. Only instructions that every aarch64 processor has are used.
#![allow(unsafe_code)]

use super::generic::{self, IntegerShape, Isa, PanelShape, Routine, memory, registers};
use super::kernels::KernelTable;
use crate::simd::Level;
use std::arch::aarch64::*;

pub(super) const TABLE: KernelTable = generic::table::<Neon>();

#[derive(Clone, Copy)]
struct Neon(());

#[target_feature(enable = "neon")]
fn enter<R: Routine>(routine: R) -> R::Output {
    routine.run(Neon(()))
}

// SAFETY: a register has 4 lanes, and four registers hold the rows of a tile; `detected` checks for the feature.
unsafe impl Isa for Neon {
    const NAME: &'static str = "neon";
    const LEVEL: Level = Level::BASELINE;
    const LANES: usize = 4;
    // Four pieces times four columns of a panel occupy 16 of the 32 registers.
    const INT8: IntegerShape = IntegerShape {
        cols: 4,
        panel: Some(PanelShape { tiles: 1, cols: 4, least_cols: 5, cached: 128 << 10, fused: false }),
    };
    const INT16: IntegerShape = IntegerShape { cols: 4, panel: None };
    const FLOAT: (usize, usize) = (1, 4);
    const PLAIN: (usize, usize) = (2, 3);
    const PLAIN_DEPTH: usize = 2048;
    const SUMS: usize = 16;

    type Int = int32x4_t;
    type Float = float32x4_t;
    type Pieces<T: Copy> = [T; 4];
    type Sum4 = int32x4_t;
    /// Sums of the lower two rows, then of the upper two.
    type Sum2 = [int32x4_t; 2];

    fn detected() -> bool {
        std::arch::is_aarch64_feature_detected!("neon")
    }

    unsafe fn enter<R: Routine>(routine: R) -> R::Output {
        // SAFETY: the caller guarantees that the processor has the features of this instruction set.
        unsafe { enter(routine) }
    }

    /// Returns 0: signed bytes are multiplied without an offset.
    fn offset(_kind: u8) -> i32 {
        0
    }

    #[inline(always)]
    fn pieces<T: Copy>(value: T) -> [T; 4] {
        [value; 4]
    }

    memory! {
        unsafe fn load(self, from: *const u8) -> int32x4_t { vreinterpretq_s32_u8(vld1q_u8(from)) }
        unsafe fn load_f16(self, from: *const u8) -> float32x4_t {
            let bits = vreinterpretq_u32_s32(self.load_u16(from));
            let magnitude = vshlq_n_u32::<13>(vandq_u32(bits, vdupq_n_u32(0x7FFF)));
            let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
            // Multiplying by 2^112 changes the exponent bias from that of f16 to that of f32 and makes subnormal
            // numbers normal.
            let finite = vmulq_f32(vreinterpretq_f32_u32(magnitude), vdupq_n_f32(f32::from_bits(239 << 23)));
            let special = vorrq_u32(magnitude, vdupq_n_u32(0x7F80_0000));
            let is_special = vcgeq_u32(magnitude, vdupq_n_u32(0x0F80_0000));
            vreinterpretq_f32_u32(vorrq_u32(vbslq_u32(is_special, special, vreinterpretq_u32_f32(finite)), sign))
        }
        unsafe fn load_u16(self, from: *const u8) -> int32x4_t {
            vreinterpretq_s32_u32(vmovl_u16(vreinterpret_u16_u8(vld1_u8(from))))
        }
        unsafe fn load_u8(self, from: *const u8) -> int32x4_t {
            let bytes = vcreate_u8(u64::from(from.cast::<u32>().read_unaligned()));
            vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))))
        }
        unsafe fn store(self, to: *mut f32, v: float32x4_t) { vst1q_f32(to, v) }
        unsafe fn store_i8(self, to: *mut i8, v: int32x4_t) {
            let words = vmovn_s32(v);
            let bytes = vmovn_s16(vcombine_s16(words, words));
            to.cast::<u32>().write_unaligned(vget_lane_u32::<0>(vreinterpret_u32_s8(bytes)))
        }
    }

    /// Does nothing, because stable Rust has no intrinsic for prefetching on AArch64.
    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}

    registers! {
        fn splat(self, v: i32) -> int32x4_t { vdupq_n_s32(v) }
        fn splat_f32(self, v: f32) -> float32x4_t { vdupq_n_f32(v) }
        fn as_f32(self, v: int32x4_t) -> float32x4_t { vreinterpretq_f32_s32(v) }
        fn as_int(self, v: float32x4_t) -> int32x4_t { vreinterpretq_s32_f32(v) }
        fn add(self, a: int32x4_t, b: int32x4_t) -> int32x4_t { vaddq_s32(a, b) }
        fn sub_i8(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
            vreinterpretq_s32_s8(vsubq_s8(vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b)))
        }
        fn sub_i16(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
            vreinterpretq_s32_s16(vsubq_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)))
        }
        fn min(self, a: int32x4_t, b: int32x4_t) -> int32x4_t { vminq_s32(a, b) }
        fn max(self, a: int32x4_t, b: int32x4_t) -> int32x4_t { vmaxq_s32(a, b) }
        fn and(self, a: int32x4_t, b: int32x4_t) -> int32x4_t { vandq_s32(a, b) }
        fn or(self, a: int32x4_t, b: int32x4_t) -> int32x4_t { vorrq_s32(a, b) }
        fn xor(self, a: int32x4_t, b: int32x4_t) -> int32x4_t { veorq_s32(a, b) }
        fn shl<const BITS: i32>(self, v: int32x4_t) -> int32x4_t { vshlq_n_s32::<BITS>(v) }
        fn shr<const BITS: i32>(self, v: int32x4_t) -> int32x4_t {
            vreinterpretq_s32_u32(vshrq_n_u32::<BITS>(vreinterpretq_u32_s32(v)))
        }
        fn sra<const BITS: i32>(self, v: int32x4_t) -> int32x4_t { vshrq_n_s32::<BITS>(v) }
        fn nibbles(self, v: int32x4_t) -> [int32x4_t; 2] {
            let v = vreinterpretq_u8_s32(v);
            [vreinterpretq_s32_u8(vandq_u8(v, vdupq_n_u8(15))), vreinterpretq_s32_u8(vshrq_n_u8::<4>(v))]
        }
        fn lookup(self, table: [i8; 16], v: int32x4_t) -> int32x4_t {
            vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table.as_ptr()), vreinterpretq_u8_s32(v)))
        }
        fn lookup_64(self, table: &'static [i8; 64], v: int32x4_t) -> int32x4_t {
            let table = vld1q_s8_x4(table.as_ptr());
            vreinterpretq_s32_s8(vqtbl4q_s8(table, vandq_u8(vreinterpretq_u8_s32(v), vdupq_n_u8(63))))
        }
        fn bytes_of_words(self, v: int32x4_t) -> [int32x4_t; 2] {
            let words = vreinterpretq_s16_s32(v);
            let lower = vshrq_n_s16::<8>(vshlq_n_s16::<8>(words));
            [vreinterpretq_s32_s16(lower), vreinterpretq_s32_s16(vshrq_n_s16::<8>(words))]
        }
        fn to_f32(self, v: int32x4_t) -> float32x4_t { vcvtq_f32_s32(v) }
        fn add_f32(self, a: float32x4_t, b: float32x4_t) -> float32x4_t { vaddq_f32(a, b) }
        fn sub_f32(self, a: float32x4_t, b: float32x4_t) -> float32x4_t { vsubq_f32(a, b) }
        fn mul_f32(self, a: float32x4_t, b: float32x4_t) -> float32x4_t { vmulq_f32(a, b) }
        fn fma(self, a: float32x4_t, b: float32x4_t, sum: float32x4_t) -> float32x4_t { vfmaq_f32(sum, a, b) }
        fn min_f32(self, a: float32x4_t, b: float32x4_t) -> float32x4_t { vminnmq_f32(a, b) }
        fn max_f32(self, a: float32x4_t, b: float32x4_t) -> float32x4_t { vmaxnmq_f32(a, b) }
        fn numbers(self, v: float32x4_t) -> float32x4_t {
            vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v), vceqq_f32(v, v)))
        }
        fn truncated(self, v: float32x4_t) -> int32x4_t { vcvtq_s32_f32(v) }
        fn largest(self, v: float32x4_t) -> f32 { vmaxvq_f32(v) }
        fn total(self, v: int32x4_t) -> i32 { vaddvq_s32(v) }
        fn first(self, n: isize, a: float32x4_t, b: float32x4_t) -> float32x4_t {
            let lanes = vld1q_s32([0, 1, 2, 3].as_ptr());
            vbslq_f32(vcltq_s32(lanes, vdupq_n_s32(n.clamp(0, 4) as i32)), a, b)
        }
        fn zero4(self) -> int32x4_t { vdupq_n_s32(0) }
        fn add4(self, sum: int32x4_t, more: int32x4_t) -> int32x4_t { vaddq_s32(sum, more) }
        // A product of bytes fits 16 bits, and so does a sum of two: |w| <= 128, |a| <= 127.
        fn dot4<const KIND: u8>(self, sum: int32x4_t, w: int32x4_t, a: int32x4_t) -> int32x4_t {
            let (w, a) = (vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(a));
            let (lower, upper) = (vmull_s8(vget_low_s8(w), vget_low_s8(a)), vmull_high_s8(w, a));
            vpadalq_s16(sum, vpaddq_s16(lower, upper))
        }
        fn finish4(self, sum: int32x4_t) -> int32x4_t { sum }
        fn zero2(self) -> [int32x4_t; 2] { [vdupq_n_s32(0); 2] }
        fn dot2(self, sum: [int32x4_t; 2], w: int32x4_t, a: int32x4_t) -> [int32x4_t; 2] {
            let (w, a) = (vreinterpretq_s16_s32(w), vreinterpretq_s16_s32(a));
            [vmlal_s16(sum[0], vget_low_s16(w), vget_low_s16(a)), vmlal_high_s16(sum[1], w, a)]
        }
        fn finish2(self, sum: [int32x4_t; 2]) -> int32x4_t { vpaddq_s32(sum[0], sum[1]) }
    }
}
