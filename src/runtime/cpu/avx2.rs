//! AVX2 kernels, with FMA and F16C, and with AVX-VNNI if `VNNI`: a tile is two pieces of 8 rows, each computed along
//! all of K.
//!
//! AVX-VNNI multiplies four pairs of bytes and adds the products with one instruction. Without it, sums of two products
//! are added up as 16-bit integers, which takes two instructions per vector, and widened to 32 bits after each block,
//! which takes one or two more. Products of signed bytes are too large for that and take four instructions.
#![allow(unsafe_code)]

use super::generic::{self, IntegerShape, Isa, PanelShape, Routine, memory, registers};
use super::kernels::{KernelTable, kind};
use crate::simd::Level;
use std::arch::asm;
use std::arch::x86_64::*;

pub(super) const TABLE: KernelTable = generic::table::<Avx2<false>>();

/// Kernel table with AVX-VNNI.
pub(super) const TABLE_VNNI: KernelTable = generic::with_int8::<Avx2<true>>(TABLE);

#[derive(Clone, Copy)]
struct Avx2<const VNNI: bool>(());

/// Sums of products of bytes.
#[derive(Clone, Copy)]
struct Sum4 {
    whole: __m256i,
    /// Sums of pairs as 16-bit integers, not yet added to `whole`.
    pairs: __m256i,
}

#[target_feature(enable = "avx2,fma,f16c")]
fn enter<R: Routine>(routine: R) -> R::Output {
    routine.run(Avx2::<false>(()))
}

#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn enter_vnni<R: Routine>(routine: R) -> R::Output {
    routine.run(Avx2::<true>(()))
}

// SAFETY: a register has 8 lanes, and two registers hold the rows of a tile; `detected` checks for all features.
unsafe impl<const VNNI: bool> Isa for Avx2<VNNI> {
    const NAME: &'static str = if VNNI { "avxvnni" } else { "avx2" };
    const LEVEL: Level = Level::AVX2;
    const LANES: usize = 8;
    const INT8: IntegerShape = IntegerShape {
        cols: 4,
        panel: Some(PanelShape { tiles: 1, cols: 6, least_cols: 5, cached: 128 << 10, fused: false }),
    };
    const INT16: IntegerShape = IntegerShape { cols: 4, panel: None };
    const FLOAT: (usize, usize) = (1, 4);
    // The 16 lanes of a sum are two registers, so 2 rows x 3 columns occupy 12 of the 16 registers.
    const PLAIN: (usize, usize) = (2, 3);
    const PLAIN_DEPTH: usize = 2048;
    const SUMS: usize = 8;

    type Int = __m256i;
    type Float = __m256;
    type Pieces<T: Copy> = [T; 2];
    type Sum4 = Sum4;
    type Sum2 = __m256i;

    fn detected() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"))
    }

    unsafe fn enter<R: Routine>(routine: R) -> R::Output {
        // SAFETY: the caller guarantees that the processor has the features of this instruction set.
        unsafe { if VNNI { enter_vnni(routine) } else { enter(routine) } }
    }

    /// Returns the offset of a kind; without AVX-VNNI, signed bytes have none.
    fn offset(kind: u8) -> i32 {
        match kind {
            kind::SYMMETRIC4 => 8,
            _ if VNNI => 128,
            kind::INT8 | kind::NL4 => 0,
            _ => 16,
        }
    }

    /// Returns true for nibbles without AVX-VNNI, unless a table makes them large. Without their offset, weights are at
    /// most 15, so the corrected sums of a block are at most 8 * 2 * 15 * 127, which 16 bits hold. On the way they may
    /// be larger, but additions wrap around, so the last one makes them right.
    fn narrow4(kind: u8) -> bool {
        !VNNI && !matches!(kind, kind::INT8 | kind::NL4)
    }

    #[inline(always)]
    fn pieces<T: Copy>(value: T) -> [T; 2] {
        [value; 2]
    }

    memory! {
        unsafe fn load(self, from: *const u8) -> __m256i { _mm256_loadu_si256(from.cast()) }
        unsafe fn load_f16(self, from: *const u8) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
        unsafe fn load_u16(self, from: *const u8) -> __m256i { _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())) }
        unsafe fn load_u8(self, from: *const u8) -> __m256i { _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())) }
        unsafe fn store(self, to: *mut f32, v: __m256) { _mm256_storeu_ps(to, v) }
        unsafe fn store_i8(self, to: *mut i8, v: __m256i) {
            let words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            _mm_storel_epi64(to.cast(), _mm_packs_epi16(words, words))
        }
    }

    registers! {
        fn prefetch(self, at: *const u8) -> () { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        fn splat(self, v: i32) -> __m256i { _mm256_set1_epi32(v) }
        fn splat_f32(self, v: f32) -> __m256 { _mm256_set1_ps(v) }
        fn as_f32(self, v: __m256i) -> __m256 { _mm256_castsi256_ps(v) }
        fn as_int(self, v: __m256) -> __m256i { _mm256_castps_si256(v) }
        fn add(self, a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
        fn sub_i8(self, a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi8(a, b) }
        fn sub_i16(self, a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi16(a, b) }
        fn min(self, a: __m256i, b: __m256i) -> __m256i { _mm256_min_epi32(a, b) }
        fn max(self, a: __m256i, b: __m256i) -> __m256i { _mm256_max_epi32(a, b) }
        fn and(self, a: __m256i, b: __m256i) -> __m256i { _mm256_and_si256(a, b) }
        fn or(self, a: __m256i, b: __m256i) -> __m256i { _mm256_or_si256(a, b) }
        fn xor(self, a: __m256i, b: __m256i) -> __m256i { _mm256_xor_si256(a, b) }
        fn shl<const BITS: i32>(self, v: __m256i) -> __m256i { _mm256_slli_epi32::<BITS>(v) }
        fn shr<const BITS: i32>(self, v: __m256i) -> __m256i { _mm256_srli_epi32::<BITS>(v) }
        fn sra<const BITS: i32>(self, v: __m256i) -> __m256i { _mm256_srai_epi32::<BITS>(v) }
        fn nibbles(self, v: __m256i) -> [__m256i; 2] {
            let mask = _mm256_set1_epi8(15);
            [_mm256_and_si256(v, mask), _mm256_and_si256(_mm256_srli_epi32::<4>(v), mask)]
        }
        fn lookup(self, table: [i8; 16], v: __m256i) -> __m256i {
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), v)
        }
        fn lookup_64(self, table: &'static [i8; 64], v: __m256i) -> __m256i {
            let table: *const i8 = table.as_ptr();
            let low = _mm256_and_si256(v, _mm256_set1_epi8(15));
            let mut of_quarter = [low; 4];
            for i in 0..4 {
                let quarter = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.add(16 * i).cast()));
                of_quarter[i] = _mm256_shuffle_epi8(quarter, low);
            }
            // Blending reads the highest bit of each byte.
            let (fifth, sixth) = (_mm256_slli_epi32::<3>(v), _mm256_slli_epi32::<2>(v));
            let lower = _mm256_blendv_epi8(of_quarter[0], of_quarter[1], fifth);
            let upper = _mm256_blendv_epi8(of_quarter[2], of_quarter[3], fifth);
            _mm256_blendv_epi8(lower, upper, sixth)
        }
        fn bytes_of_words(self, v: __m256i) -> [__m256i; 2] {
            [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(v)), _mm256_srai_epi16::<8>(v)]
        }
        fn to_f32(self, v: __m256i) -> __m256 { _mm256_cvtepi32_ps(v) }
        fn add_f32(self, a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        fn sub_f32(self, a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
        fn mul_f32(self, a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        fn fma(self, a: __m256, b: __m256, sum: __m256) -> __m256 { _mm256_fmadd_ps(a, b, sum) }
        fn min_f32(self, a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
        fn max_f32(self, a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
        fn numbers(self, v: __m256) -> __m256 { _mm256_and_ps(v, _mm256_cmp_ps::<_CMP_ORD_Q>(v, v)) }
        fn truncated(self, v: __m256) -> __m256i { _mm256_cvttps_epi32(v) }
        fn largest(self, v: __m256) -> f32 {
            let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
        fn total(self, v: __m256i) -> i32 {
            let four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)))
        }
        fn first(self, n: isize, a: __m256, b: __m256) -> __m256 {
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(n.clamp(0, 8) as i32), lanes);
            _mm256_blendv_ps(b, a, _mm256_castsi256_ps(mask))
        }
        fn zero4(self) -> Sum4 { Sum4 { whole: _mm256_setzero_si256(), pairs: _mm256_setzero_si256() } }
        fn add4(self, sum: Sum4, more: __m256i) -> Sum4 { Sum4 { whole: _mm256_add_epi32(sum.whole, more), ..sum } }
        fn dot4<const KIND: u8>(self, sum: Sum4, w: __m256i, a: __m256i) -> Sum4 {
            if VNNI {
                return Sum4 { whole: _mm256_dpbusd_avx_epi32(sum.whole, w, a), ..sum };
            }
            if const { kind::is_rare(KIND) && !kind::is_signed(KIND) } {
                // Codes are at most 63, so a pair is at most 2 * 63 * 127.
                let fours = _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1));
                return Sum4 { whole: _mm256_add_epi32(sum.whole, fours), ..sum };
            }
            if const { kind::is_signed(KIND) } {
                // One operand is unsigned and the other one takes its sign, so that a pair is at most
                // 2 * 128 * 127 = 32512. The activation, which is never -128, may take the sign of any weight; weights
                // of tables, which are not -128 either, that of the activation, whose magnitude all rows share.
                let (w, a) = match KIND {
                    kind::INT8 | kind::INT5 | kind::INT6 => (_mm256_abs_epi8(w), _mm256_sign_epi8(a, w)),
                    _ => (_mm256_abs_epi8(a), _mm256_sign_epi8(w, a)),
                };
                let fours = _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1));
                return Sum4 { whole: _mm256_add_epi32(sum.whole, fours), ..sum };
            }
            Sum4 { pairs: in_order(_mm256_add_epi16(sum.pairs, _mm256_maddubs_epi16(w, a))), ..sum }
        }
        fn narrow4_from<const KIND: u8>(self, sum: Sum4, starts: __m256i) -> Sum4 {
            Sum4 { pairs: if Self::offset(KIND) == 8 { starts } else { _mm256_slli_epi16::<1>(starts) }, ..sum }
        }
        fn widen4(self, sum: Sum4) -> Sum4 {
            let fours = _mm256_madd_epi16(sum.pairs, _mm256_set1_epi16(1));
            Sum4 { whole: _mm256_add_epi32(sum.whole, fours), pairs: _mm256_setzero_si256() }
        }
        fn finish4(self, sum: Sum4) -> __m256i { sum.whole }
        fn zero2(self) -> __m256i { _mm256_setzero_si256() }
        fn dot2(self, sum: __m256i, w: __m256i, a: __m256i) -> __m256i { _mm256_add_epi32(sum, _mm256_madd_epi16(w, a)) }
        fn finish2(self, sum: __m256i) -> __m256i { sum }
    }
}

/// Prevents the compiler from reordering additions, after which the registers would not suffice; this costs nothing.
#[inline]
#[target_feature(enable = "avx2")]
fn in_order(mut v: __m256i) -> __m256i {
    // SAFETY: the assembly contains no instruction.
    unsafe { asm!("/* {} */", inout(ymm_reg) v, options(pure, nomem, nostack, preserves_flags)) };
    v
}
