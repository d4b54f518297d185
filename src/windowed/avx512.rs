//! Unpacks windowed bf16 numbers with AVX-512 VBMI, VBMI2 and GFNI: 64 numbers in about fifteen instructions.
//!
//! Two bit-matrix multiplications (`gf2p8affineqb`) assemble the three bits of a distance, `vpexpandb` moves exceptions
//! to their positions, and a byte permutation interleaves exponents with mantissas.

use super::{BLOCK, Exceptions, FAR, GROUP, GROUP_BYTES, Header, NEXT, PACKED, WIDTH};
use std::arch::x86_64::*;

/// Prefetch distance in bytes of the low bytes (sign and mantissa); the packed distances are prefetched at half of it.
const AHEAD: usize = 8192;

/// Returns true when this processor has all extensions that this module uses.
pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512vbmi2")
        && is_x86_feature_detected!("gfni")
        && is_x86_feature_detected!("popcnt")
}

/// Vectors that are constant within a block.
#[derive(Clone, Copy)]
struct Constants {
    /// The top of the window in every byte.
    tops: __m512i,
    /// The distance that marks an exception in every byte.
    exception: __m512i,
    /// [`BESIDE`].
    orders: [__m512i; 2],
}

/// Unpacks a block. Returns false if its exceptions do not match those that its distances mark.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,gfni,popcnt")]
#[inline(never)]
pub(super) fn unpack(
    header: Header,
    mantissas: &[u8; BLOCK],
    packed: &[u8; PACKED],
    exceptions: &[u8],
    spread: &mut Exceptions,
    out: &mut [u16; BLOCK],
) -> bool {
    let good = spread_exceptions(header, exceptions, spread);
    // SAFETY: each `Order` has 64 readable bytes.
    let orders = unsafe { [load(BESIDE[0].0.as_ptr()), load(BESIDE[1].0.as_ptr())] };
    let (tops, exception) = (_mm512_set1_epi8(header.top as i8), _mm512_set1_epi8(WIDTH as i8));
    let constants = Constants { tops, exception, orders };
    let mut seen = 0;
    for group in 0..BLOCK / GROUP {
        let packed = packed[group * GROUP_BYTES..][..GROUP_BYTES].as_ptr();
        let mantissas = mantissas[group * GROUP..][..GROUP].as_ptr();
        let out = out[group * GROUP..][..GROUP].as_mut_ptr();
        for line in 0..3 {
            _mm_prefetch::<_MM_HINT_T0>(packed.wrapping_add(AHEAD / 2 + 64 * line).cast());
        }
        // SAFETY: `packed` points to a group of `GROUP_BYTES` readable bytes, three vectors of 64.
        let [low, high, third] = unsafe { [load(packed), load(packed.add(64)), load(packed.add(128))] };
        // Unrolled by hand, so that the matrices are constants.
        macro_rules! vector {
            ($k:literal, $pairs:expr) => {
                // SAFETY: `mantissas` and `out` point to `GROUP` elements, of which vector `k` has 64. `spread` has
                // `BLOCK` + 64 bytes, and `seen` is at most 64 for each vector before this one, so less than `BLOCK`.
                unsafe {
                    let pairs =
                        _mm512_gf2p8affine_epi64_epi8::<0>($pairs, _mm512_set1_epi64(const { two_bits($k % 4) }));
                    let thirds = _mm512_gf2p8affine_epi64_epi8::<0>(third, _mm512_set1_epi64(const { third_bit($k) }));
                    let distances = _mm512_or_si512(pairs, thirds);
                    let at = spread.as_ptr().add(seen);
                    seen += numbers(&constants, distances, at, mantissas.add(64 * $k), out.add(64 * $k));
                }
            };
        }
        vector!(0, low);
        vector!(1, low);
        vector!(2, low);
        vector!(3, low);
        vector!(4, high);
        vector!(5, high);
        vector!(6, high);
        vector!(7, high);
    }
    good && seen == header.exceptions
}

/// Assembles 64 numbers and returns the number of exceptions among them.
///
/// # Safety
/// 64 bytes must be readable from `exceptions` and from `mantissas` on, and 64 numbers must be writable from `out` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,gfni,popcnt")]
unsafe fn numbers(
    constants: &Constants,
    distances: __m512i,
    exceptions: *const u8,
    mantissas: *const u8,
    out: *mut u16,
) -> usize {
    let beyond = _mm512_cmpeq_epi8_mask(distances, constants.exception);
    _mm_prefetch::<_MM_HINT_T0>(mantissas.wrapping_add(AHEAD).cast());
    // SAFETY: the caller guarantees these ranges.
    let (others, mantissas) = unsafe { (load(exceptions), load(mantissas)) };
    let distances = _mm512_mask_expand_epi8(distances, beyond, others);
    let exponents = _mm512_sub_epi8(constants.tops, distances);
    let lower = _mm512_permutex2var_epi8(mantissas, constants.orders[0], exponents);
    let upper = _mm512_permutex2var_epi8(mantissas, constants.orders[1], exponents);
    // Rotation by one moves the sign from the lowest bit to the highest. SAFETY: the caller guarantees these ranges.
    unsafe {
        _mm512_storeu_si512(out.cast(), _mm512_shrdi_epi16::<1>(lower, lower));
        _mm512_storeu_si512(out.add(32).cast(), _mm512_shrdi_epi16::<1>(upper, upper));
    }
    beyond.count_ones() as usize
}

/// # Safety
/// 64 bytes must be readable from `from` on.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(from: *const u8) -> __m512i {
    // SAFETY: the caller guarantees 64 readable bytes.
    unsafe { _mm512_loadu_si512(from.cast()) }
}

/// Returns the bit matrix that moves bits `2k` and `2k + 1` to bits 0 and 1. The first byte of a matrix produces the
/// highest bit.
const fn two_bits(k: u32) -> i64 {
    1 << (2 * k) << 56 | 1 << (2 * k + 1) << 48
}

/// Returns the bit matrix that moves bit `k` to bit 2.
const fn third_bit(k: u32) -> i64 {
    1 << k << 40
}

#[repr(align(64))]
struct Order([u8; 64]);

/// Byte orders that interleave 32 low bytes (the first from low byte 0 on, the second from 32 on) with their exponents,
/// which are the second operand of the permutation.
static BESIDE: [Order; 2] = [beside(0), beside(32)];

const fn beside(start: u8) -> Order {
    let (mut order, mut i) = ([0; 64], 0);
    while i < 64 {
        order[i] = start + i as u8 / 2 + 64 * (i as u8 % 2);
        i += 1;
    }
    Order(order)
}

/// Writes the distance from the top of every exception as one byte, in order. Returns false if there are too few or too
/// many bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
fn spread_exceptions(header: Header, bytes: &[u8], out: &mut Exceptions) -> bool {
    let count = header.exceptions;
    if count > BLOCK || header.nbytes() != bytes.len() {
        return false;
    }
    let (codes, mut far) = bytes.split_at(count.div_ceil(4));
    let next = _mm512_set1_epi32(i32::from_le_bytes([NEXT[0], NEXT[1], NEXT[2], 0]));
    // Bit positions of eight two-bit codes in a lane of eight bytes; a byte is extracted from each position on.
    let shifts = _mm512_set1_epi64(i64::from_le_bytes([0, 2, 4, 6, 8, 10, 12, 14]));
    for done in (0..count).step_by(64) {
        let codes = &codes[done / 4..];
        // SAFETY: the mask limits the load to the bytes of `codes`.
        let packed = unsafe { _mm_maskz_loadu_epi8(lowest(codes.len()) as u16, codes.as_ptr().cast()) };
        let codes = _mm512_multishift_epi64_epi8(shifts, _mm512_cvtepu16_epi64(packed));
        let codes = _mm512_and_si512(codes, _mm512_set1_epi8(FAR as i8));
        let is_far = _mm512_mask_cmpeq_epi8_mask(lowest(count - done), codes, _mm512_set1_epi8(FAR as i8));
        let now = is_far.count_ones() as usize;
        if now > far.len() {
            return false;
        }
        // SAFETY: the mask limits the load to `now` bytes, and `far` has at least as many.
        let distances = unsafe { _mm512_maskz_loadu_epi8(lowest(now), far.as_ptr().cast()) };
        let distances = _mm512_mask_expand_epi8(_mm512_shuffle_epi8(next, codes), is_far, distances);
        // SAFETY: `out` has `BLOCK` + 64 bytes and `done` is less than `BLOCK`, so 64 bytes from `done` on are in it.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(done).cast(), distances) };
        far = &far[now..];
    }
    far.is_empty()
}

/// Returns a mask of the first `n` lanes; all 64 lanes if `n` is 64 or more.
#[inline(always)]
fn lowest(n: usize) -> u64 {
    if n >= 64 { !0 } else { (1 << n) - 1 }
}
