//! AVX-512 kernels (F, BW, VL, VNNI, and BF16 and VBMI if `BF16`): one register is one vector of a tile, 16 rows wide.
//!
//! Products that are limited by arithmetic rather than by memory keep 24 accumulators in the 32 registers. BF16 pairs
//! are multiplied by `vdpbf16ps` where it returns the same bits as two fused multiply-adds. It does so unless a
//! subnormal number occurs: it treats subnormal operands as zeros, and subnormal results become zeros.
#![allow(unsafe_code)]

mod nibbles;
mod pairs;
mod probabilities;

use super::generic::{self, IntegerShape, Isa, PanelShape, Routine, memory, registers};
use super::kernels::{KernelTable, kind};
use crate::simd::Level;
use std::arch::asm;
use std::arch::x86_64::*;

pub(super) const TABLE: KernelTable = KernelTable {
    probabilities: Some(probabilities::probabilities),
    wide_probabilities: Some(probabilities::wide_probabilities),
    nibbles: Some(nibbles::nibbles),
    pairs: Some(pairs::pairs),
    ..generic::table::<Avx512<false>>()
};

/// Kernel table with AVX512_BF16 and VBMI, which looks up bytes by 6 bits.
pub(super) const TABLE_BF16: KernelTable = generic::with_bf16::<Avx512<true>, Avx512<false>>(TABLE);

/// AVX-512, with BF16 dot products and VBMI if `BF16`.
#[derive(Clone, Copy)]
pub(super) struct Avx512<const BF16: bool>(());

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn enter<R: Routine>(routine: R) -> R::Output {
    routine.run(Avx512::<false>(()))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx512vbmi,avx2,fma,f16c")]
fn enter_bf16<R: Routine>(routine: R) -> R::Output {
    routine.run(Avx512::<true>(()))
}

// SAFETY: a register has 16 lanes; `detected` checks for all features.
unsafe impl<const BF16: bool> Isa for Avx512<BF16> {
    const NAME: &'static str = if BF16 { "avx512bf16" } else { "avx512" };
    const LEVEL: Level = Level::AVX512;
    const LANES: usize = 16;
    // `vpdpbusd`, multiplications and fused multiply-adds share two execution ports. Per tile and column of a panel,
    // four blocks take 32 slots of these ports for products of codes, and for products with scales 2 slots if the
    // blocks are one run, or 5 if they are four runs; all other instructions execute in parallel with them.
    const INT8: IntegerShape = IntegerShape {
        cols: 11,
        panel: Some(PanelShape { tiles: 2, cols: 6, least_cols: 12, cached: 384 << 10, fused: true }),
    };
    const INT16: IntegerShape = IntegerShape {
        cols: 6,
        panel: Some(PanelShape { tiles: 4, cols: 4, least_cols: 12, cached: 384 << 10, fused: false }),
    };
    const FLOAT: (usize, usize) = (2, 6);
    const PLAIN: (usize, usize) = (4, 6);
    const PLAIN_DEPTH: usize = 1024;
    const SUMS: usize = 16;
    const BF16_DOTS: bool = BF16;

    type Int = __m512i;
    type Float = __m512;
    type Pieces<T: Copy> = [T; 1];
    type Sum4 = __m512i;
    type Sum2 = __m512i;

    fn detected() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!BF16 || (is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vbmi")))
    }

    unsafe fn enter<R: Routine>(routine: R) -> R::Output {
        // SAFETY: the caller guarantees that the processor has the features of this instruction set.
        unsafe { if BF16 { enter_bf16(routine) } else { enter(routine) } }
    }

    fn offset(kind: u8) -> i32 {
        match kind {
            kind::SYMMETRIC4 => 8,
            _ => 128,
        }
    }

    #[inline(always)]
    fn pieces<T: Copy>(value: T) -> [T; 1] {
        [value]
    }

    memory! {
        unsafe fn load(self, from: *const u8) -> __m512i { _mm512_loadu_si512(from.cast()) }
        unsafe fn load_f16(self, from: *const u8) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
        unsafe fn load_u16(self, from: *const u8) -> __m512i { _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())) }
        unsafe fn load_u8(self, from: *const u8) -> __m512i { _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())) }
        unsafe fn store(self, to: *mut f32, v: __m512) { _mm512_storeu_ps(to, v) }
        unsafe fn store_i8(self, to: *mut i8, v: __m512i) { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(v)) }
    }

    registers! {
        fn prefetch(self, at: *const u8) -> () { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        fn prefetch_here(self, at: *const u8) -> () {
            // Loads and stores stay before and after assembler that might access memory.
            asm!("prefetcht1 byte ptr [{}]", in(reg) at, options(nostack, preserves_flags))
        }
        fn splat(self, v: i32) -> __m512i { _mm512_set1_epi32(v) }
        fn splat_f32(self, v: f32) -> __m512 { _mm512_set1_ps(v) }
        fn as_f32(self, v: __m512i) -> __m512 { _mm512_castsi512_ps(v) }
        fn as_int(self, v: __m512) -> __m512i { _mm512_castps_si512(v) }
        fn add(self, a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn sub_i8(self, a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi8(a, b) }
        fn sub_i16(self, a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi16(a, b) }
        fn min(self, a: __m512i, b: __m512i) -> __m512i { _mm512_min_epi32(a, b) }
        fn max(self, a: __m512i, b: __m512i) -> __m512i { _mm512_max_epi32(a, b) }
        fn and(self, a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        fn or(self, a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn xor(self, a: __m512i, b: __m512i) -> __m512i { _mm512_xor_si512(a, b) }
        fn shl<const BITS: i32>(self, v: __m512i) -> __m512i { _mm512_sll_epi32(v, _mm_cvtsi32_si128(BITS)) }
        fn shr<const BITS: i32>(self, v: __m512i) -> __m512i { _mm512_srl_epi32(v, _mm_cvtsi32_si128(BITS)) }
        fn sra<const BITS: i32>(self, v: __m512i) -> __m512i { _mm512_sra_epi32(v, _mm_cvtsi32_si128(BITS)) }
        fn nibbles(self, v: __m512i) -> [__m512i; 2] {
            let mask = _mm512_set1_epi8(15);
            [_mm512_and_si512(v, mask), _mm512_and_si512(_mm512_srli_epi32::<4>(v), mask)]
        }
        fn lookup(self, table: [i8; 16], v: __m512i) -> __m512i {
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), v)
        }
        fn lookup_nibbles(self, table: [i8; 16], v: __m512i) -> [__m512i; 2] {
            if !BF16 {
                let [low, high] = self.nibbles(v);
                return [self.lookup(table, low), self.lookup(table, high)];
            }
            // Looks up 6 bits, so four copies of the table make the bits above the nibble count for nothing.
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm512_permutexvar_epi8(v, table), _mm512_permutexvar_epi8(_mm512_srli_epi32::<4>(v), table)]
        }
        fn lookup_64(self, table: &'static [i8; 64], v: __m512i) -> __m512i {
            let table: *const i8 = table.as_ptr();
            if BF16 {
                return _mm512_permutexvar_epi8(v, _mm512_loadu_si512(table.cast()));
            }
            let low = _mm512_and_si512(v, _mm512_set1_epi8(15));
            let mut of_quarter = [low; 4];
            for i in 0..4 {
                let quarter = _mm512_broadcast_i32x4(_mm_loadu_si128(table.add(16 * i).cast()));
                of_quarter[i] = _mm512_shuffle_epi8(quarter, low);
            }
            let fifth = _mm512_movepi8_mask(_mm512_slli_epi32::<3>(v));
            let sixth = _mm512_movepi8_mask(_mm512_slli_epi32::<2>(v));
            let lower = _mm512_mask_blend_epi8(fifth, of_quarter[0], of_quarter[1]);
            let upper = _mm512_mask_blend_epi8(fifth, of_quarter[2], of_quarter[3]);
            _mm512_mask_blend_epi8(sixth, lower, upper)
        }
        fn bytes_of_words(self, v: __m512i) -> [__m512i; 2] {
            [_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(v)), _mm512_srai_epi16::<8>(v)]
        }
        fn to_f32(self, v: __m512i) -> __m512 { _mm512_cvtepi32_ps(v) }
        fn add_f32(self, a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub_f32(self, a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul_f32(self, a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn fma(self, a: __m512, b: __m512, sum: __m512) -> __m512 { _mm512_fmadd_ps(a, b, sum) }
        fn min_f32(self, a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        fn max_f32(self, a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn numbers(self, v: __m512) -> __m512 { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(v, v), v) }
        fn truncated(self, v: __m512) -> __m512i { _mm512_cvttps_epi32(v) }
        fn largest(self, v: __m512) -> f32 { _mm512_reduce_max_ps(v) }
        fn total(self, v: __m512i) -> i32 { _mm512_reduce_add_epi32(v) }
        fn first(self, n: isize, a: __m512, b: __m512) -> __m512 {
            _mm512_mask_blend_ps(((1u32 << n.clamp(0, 16)) - 1) as u16, b, a)
        }
        fn zero4(self) -> __m512i { _mm512_setzero_si512() }
        fn add4(self, sum: __m512i, more: __m512i) -> __m512i { _mm512_add_epi32(sum, more) }
        fn dot4<const KIND: u8>(self, sum: __m512i, w: __m512i, a: __m512i) -> __m512i { _mm512_dpbusd_epi32(sum, w, a) }
        fn finish4(self, sum: __m512i) -> __m512i { sum }
        fn zero2(self) -> __m512i { _mm512_setzero_si512() }
        fn dot2(self, sum: __m512i, w: __m512i, a: __m512i) -> __m512i { _mm512_dpwssd_epi32(sum, w, a) }
        fn finish2(self, sum: __m512i) -> __m512i { sum }

        // One table lookup converts nibbles to floats. It reads only the low four bits of each lane and so needs no
        // mask.
        fn float_codes<const KIND: u8>(self, v: __m512i, upper: __m512i) -> [__m512i; 2] {
            [v, if KIND == kind::INT8 { upper } else { _mm512_srli_epi32::<4>(v) }]
        }
        fn float_table<const KIND: u8>(self) -> __m512 {
            let mut values = [0f32; 16];
            for (code, value) in values.iter_mut().enumerate() {
                *value = match KIND {
                    kind::SYMMETRIC4 => code as f32 - 8.0,
                    kind::MXFP4 | kind::NL4 => f32::from(kind::table(KIND)[code]),
                    _ => code as f32,
                };
            }
            _mm512_loadu_ps(values.as_ptr())
        }
        fn code_value<const KIND: u8>(self, v: __m512i, table: __m512) -> __m512 {
            match KIND {
                kind::INT8 => _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(v))),
                _ => _mm512_permutexvar_ps(v, table),
            }
        }
        fn add_pairs<const NORMAL: bool>(self, sum: __m512, a: __m512i, b: __m512i) -> __m512 {
            if BF16 && NORMAL {
                // The vectors have the same size, and any bits are bf16 numbers.
                let a = std::mem::transmute::<__m512i, __m512bh>(a);
                return _mm512_dpbf16_ps(sum, a, std::mem::transmute::<__m512i, __m512bh>(b));
            }
            let upper = _mm512_set1_epi32(0xFFFF_0000_u32 as i32);
            let odd = _mm512_castsi512_ps(_mm512_and_si512(a, upper));
            let sum = _mm512_fmadd_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(b, upper)), sum);
            let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(a));
            _mm512_fmadd_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(b)), sum)
        }
        // Folds 16 sums at once: in each step the halves of two vectors are combined, so that one addition serves
        // both.
        fn fold(self, sums: &[[f32; 16]], out: &mut [f32]) -> () {
            let ((sums, rest), (out, last)) = (sums.as_chunks::<16>(), out.as_chunks_mut::<16>());
            for i in 0..sums.len() {
                _mm512_storeu_ps(out[i].as_mut_ptr(), fold_16(&sums[i]));
            }
            if !rest.is_empty() {
                let (mut padded, mut folded) = ([[0.0; 16]; 16], [0.0; 16]);
                padded[..rest.len()].copy_from_slice(rest);
                _mm512_storeu_ps(folded.as_mut_ptr(), fold_16(&padded));
                last.copy_from_slice(&folded[..last.len()]);
            }
        }
    }
}

/// Folds the 16 lanes of each of 16 sums. Lanes that stay in place are blended, because more execution ports can
/// blend than shuffle.
#[inline]
#[target_feature(enable = "avx512f")]
fn fold_16(sums: &[[f32; 16]; 16]) -> __m512 {
    let mut eight = [_mm512_setzero_ps(); 8];
    for i in 0..8 {
        // SAFETY: each of the sums is 16 readable floats.
        let (a, b) = unsafe { (_mm512_loadu_ps(sums[i].as_ptr()), _mm512_loadu_ps(sums[i + 8].as_ptr())) };
        eight[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xFF00, a, b), _mm512_shuffle_f32x4::<0x4E>(a, b));
    }
    // Sums i and i + 8 lie in the halves of a vector; this step puts i, i + 4, i + 8 and i + 12 into its quarters.
    let mut four = [_mm512_setzero_ps(); 4];
    for i in 0..4 {
        let (a, b) = (eight[i], eight[i + 4]);
        let others = _mm512_mask_blend_ps(0xF0F0, b, a);
        four[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xF0F0, a, b), _mm512_shuffle_f32x4::<0xB1>(others, others));
    }
    let mut two = [_mm512_setzero_ps(); 2];
    for i in 0..2 {
        let (a, b) = (four[i], four[i + 2]);
        two[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xCCCC, a, b), _mm512_shuffle_ps::<0x4E>(a, b));
    }
    let [a, b] = two;
    let one = _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xDD>(a, b));
    _mm512_permute_ps::<0xD8>(one)
}
