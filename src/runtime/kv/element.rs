//! Element types of the KV cache: the conversion of a value to its stored form, and the form used in products.
//!
//! Loops run over indices of fixed arrays because closures of iterators are not always compiled with the caller's
//! instruction set.

use crate::error::{Error, Result};
use crate::runtime::cpu::{Cpu, SMALLEST_POWER, SumType, joined, pair, rounded};
use crate::runtime::ops::{LANES, exp2, exp2_from};
use std::fmt;
use std::str::FromStr;

/// Element type of cached keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// f32: keys and values as computed.
    F32,
    /// f16: half the memory, rounded to nearest even; larger values become the largest f16. Products are f32.
    F16,
    /// bf16: half the memory, rounded to nearest even. Queries and probabilities are rounded to bf16 too.
    Bf16,
    /// int8 with an f32 scale per 32 values of a head: 9 bits per value. Products are those of [`KvType::Bf16`].
    Int8,
    /// 8-bit floats (e4m3) with an f32 scale per head. Products are those of [`KvType::Bf16`].
    Fp8,
    /// Rotated by a Hadamard matrix, then 4-bit integers with an f32 scale per 64 values of a head: 4.5 bits per value.
    /// Products are those of [`KvType::Bf16`].
    Int4,
}

const NAMES: [(KvType, &str, &str); 6] = [
    (KvType::F32, "f32", "fp32"),
    (KvType::F16, "f16", "fp16"),
    (KvType::Bf16, "bf16", "bfloat16"),
    (KvType::Int8, "int8", "q8"),
    (KvType::Fp8, "fp8", "e4m3"),
    (KvType::Int4, "int4", "q4"),
];

impl FromStr for KvType {
    type Err = Error;
    fn from_str(s: &str) -> Result<KvType> {
        NAMES
            .iter()
            .find(|(_, name, other)| s.eq_ignore_ascii_case(name) || s.eq_ignore_ascii_case(other))
            .map(|(kind, ..)| *kind)
            .ok_or_else(|| Error::usage(format!("KV type `{s}`: expected f32, f16, bf16, int8, fp8 or int4")))
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAMES.iter().find(|(kind, ..)| kind == self).map_or("", |(_, name, _)| name))
    }
}

/// A unit of storage: one number, or several that share a byte. A new type needs an implementation of this trait, an
/// entry in [`NAMES`] and an arm in [`by_type`].
pub trait Element: bytemuck::Pod + Send + Sync {
    /// Numbers in one element.
    const NUMBERS: usize = 1;
    /// Kind of products in which it is used.
    const SUM: SumType;
    /// Number of values of a head that share a scale, a multiple of [`LANES`]; `None` for types without scales.
    const SCALE_BLOCK: Option<usize> = None;
    /// Whether queries, keys and values are multiplied by a Hadamard matrix, see [`super::hadamard`].
    const ROTATED: bool = false;
    /// Returns the scale of values that share one, if the type has scales. Each value is multiplied by the inverse of
    /// the scale before it is stored.
    fn scale(_: &[f32]) -> f32 {
        1.0
    }
    /// Stores a value as number `index` of `stored`.
    fn store(stored: &mut [Self], index: usize, value: f32);
    /// Returns the numbers in the form that products read: the stored bytes, or a conversion in `room`, which must have
    /// at least one word for two numbers.
    fn panel<'a>(stored: &'a [Self], room: &'a mut [u32]) -> &'a [u8];
}

/// Returns what [`Element::panel`] does, by the function of the instruction set where it has one for the type.
#[inline(always)]
pub fn panel<'a, T: Element>(cpu: &Cpu, stored: &'a [T], room: &'a mut [u32]) -> &'a [u8] {
    if T::NUMBERS == 2 && cpu.widen_nibbles(bytemuck::cast_slice(stored), &mut room[..stored.len()]) {
        return bytemuck::cast_slice(&room[..stored.len()]);
    }
    T::panel(stored, room)
}

/// Evaluates `$call` with `$T` standing for the element type of `$kind`.
macro_rules! by_type {
    ($kind:expr, $T:ident, $call:expr) => {
        match $kind {
            $crate::runtime::kv::KvType::F32 => {
                type $T = f32;
                $call
            }
            $crate::runtime::kv::KvType::F16 => {
                type $T = $crate::runtime::kv::F16;
                $call
            }
            $crate::runtime::kv::KvType::Bf16 => {
                type $T = $crate::runtime::kv::Bf16;
                $call
            }
            $crate::runtime::kv::KvType::Int8 => {
                type $T = $crate::runtime::kv::Int8;
                $call
            }
            $crate::runtime::kv::KvType::Fp8 => {
                type $T = $crate::runtime::kv::Fp8;
                $call
            }
            $crate::runtime::kv::KvType::Int4 => {
                type $T = $crate::runtime::kv::Int4Pair;
                $call
            }
        }
    };
}
pub(crate) use by_type;

/// Writes the probabilities `2^(score - m)` to `words` in the form of [`weights`], and returns their sum in lanes. The
/// number of scores must be a multiple of [`LANES`].
#[inline(always)]
pub fn probabilities(sum_type: SumType, scores: &[f32], m: f32, words: &mut [u32]) -> [f32; LANES] {
    let mut sum = [0f32; LANES];
    let (chunks, _) = scores.as_chunks::<LANES>();
    if pair(sum_type) == 1 {
        let words = words.as_chunks_mut::<LANES>().0;
        for i in 0..chunks.len() {
            let (words, chunk) = (&mut words[i], &chunks[i]);
            for l in 0..LANES {
                let p = exp2(chunk[l] - m);
                sum[l] += p;
                words[l] = p.to_bits();
            }
        }
        return sum;
    }
    let words = words.as_chunks_mut::<{ LANES / 2 }>().0;
    for i in 0..chunks.len() {
        let (words, chunk) = (&mut words[i], &chunks[i]);
        let mut bits = [0; LANES];
        for l in 0..LANES {
            let p = exp2_from(SMALLEST_POWER as f32, chunk[l] - m);
            sum[l] += p;
            // Rounds to nearest, ties upwards. Zero, 1 and NaN need no special case.
            bits[l] = p.to_bits().wrapping_add(0x8000);
        }
        let wide: [u64; LANES / 2] = bytemuck::cast(bits);
        for l in 0..LANES / 2 {
            words[l] = joined(wide[l]);
        }
    }
    sum
}

impl Element for f32 {
    const SUM: SumType = SumType::F32;
    #[inline(always)]
    fn store(stored: &mut [f32], index: usize, value: f32) {
        stored[index] = value;
    }
    #[inline(always)]
    fn panel<'a>(stored: &'a [f32], _: &'a mut [u32]) -> &'a [u8] {
        bytemuck::cast_slice(stored)
    }
}

/// IEEE half precision as bits, so that conversions are integer operations that vectorize on every machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(transparent)]
pub struct F16(u16);

impl F16 {
    /// Rounds to nearest even; larger values become the largest f16.
    #[inline(always)]
    fn narrow(value: f32) -> F16 {
        let bits = value.to_bits();
        let sign = (bits >> 16) & 0x8000;
        let abs = bits & 0x7fff_ffff;
        // Rebias the exponent and round the lost 13 bits to nearest even.
        let normal = abs.wrapping_sub(112 << 23).wrapping_add(0xfff + ((abs >> 13) & 1)) >> 13;
        // Below 2^-14: one unit of f16 is 2^-24, the last place of f32 numbers in 0.5..1.
        let small = (f32::from_bits(abs) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let half = if abs < 0x3880_0000 { small } else { normal };
        let half = if half > 0x7bff { 0x7bff } else { half };
        let half = if abs >= 0x7f80_0000 { 0x7c00 } else { half };
        let half = if abs > 0x7f80_0000 { 0x7e00 } else { half };
        F16((sign | half) as u16)
    }
}

impl Element for F16 {
    const SUM: SumType = SumType::F16;
    #[inline(always)]
    fn store(stored: &mut [F16], index: usize, value: f32) {
        stored[index] = F16::narrow(value);
    }
    #[inline(always)]
    fn panel<'a>(stored: &'a [F16], _: &'a mut [u32]) -> &'a [u8] {
        bytemuck::cast_slice(stored)
    }
}

/// A bf16, the upper half of an f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(transparent)]
pub struct Bf16(u16);

impl Bf16 {
    /// Rounds to nearest even; magnitudes below 2^-56 become zero.
    #[inline(always)]
    fn narrow(value: f32) -> Bf16 {
        Bf16((rounded(value) >> 16) as u16)
    }
}

impl Element for Bf16 {
    const SUM: SumType = SumType::Bf16;
    #[inline(always)]
    fn store(stored: &mut [Bf16], index: usize, value: f32) {
        stored[index] = Bf16::narrow(value);
    }
    #[inline(always)]
    fn panel<'a>(stored: &'a [Bf16], _: &'a mut [u32]) -> &'a [u8] {
        bytemuck::cast_slice(stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_name_parses_back_and_others_are_refused() {
        for (kind, name, other) in NAMES {
            assert_eq!((name.parse::<KvType>().unwrap(), other.parse::<KvType>().unwrap()), (kind, kind));
            assert_eq!(kind.to_string(), name);
        }
        assert!("int3".parse::<KvType>().unwrap_err().to_string().contains("fp8 or int4"));
    }

    #[test]
    fn half_rounds_as_the_half_crate_but_saturates() {
        let mut rng = crate::rng::Rng::new(7);
        for _ in 0..300_000 {
            let value = f32::from_bits(rng.next_u64() as u32);
            let (ours, reference) = (f16::from_bits(F16::narrow(value).0), f16::from_f32(value));
            if value.is_nan() {
                assert!(ours.is_nan());
            } else if reference.is_infinite() && value.is_finite() {
                assert_eq!(ours.to_f32(), 65504f32.copysign(value));
            } else {
                assert_eq!(ours.to_bits(), reference.to_bits(), "{value}");
            }
        }
        for bits in 0..=u16::MAX {
            let half = f16::from_bits(bits);
            assert!(half.is_nan() || F16::narrow(half.to_f32()).0 == bits);
        }
    }

    #[test]
    fn brain_rounds_as_the_half_crate_but_is_zero_below_2_to_the_minus_56() {
        let mut rng = crate::rng::Rng::new(8);
        for _ in 0..300_000 {
            let value = f32::from_bits(rng.next_u64() as u32);
            let (ours, reference) = (bf16::from_bits(Bf16::narrow(value).0), bf16::from_f32(value));
            if value.is_nan() {
                assert!(ours.is_nan());
            } else if value.abs() < 2f32.powi(-56) {
                assert_eq!(ours.to_bits(), 0);
            } else {
                assert_eq!(ours.to_bits(), reference.to_bits(), "{value}");
            }
        }
    }
}
