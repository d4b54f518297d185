//! Element types with scales: int8, fp8 and int4. Their numbers are exact as bf16, so products of all of them are those
//! of bf16.

use super::MAX_HEAD;
use super::element::Element;
use crate::runtime::cpu::SumType;

/// Adding this number (1.5 * 2^23) rounds to the nearest integer, which is then in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// Returns the largest magnitude, ignoring NaN.
#[inline(always)]
fn absmax(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |m, v| if v.abs() > m { v.abs() } else { m })
}

/// Joins two numbers that bf16 represents exactly into a word, the first in the low half.
#[inline(always)]
fn joined(first: f32, second: f32) -> u32 {
    first.to_bits() >> 16 | second.to_bits()
}

/// Fills `room` with `pair(codes)` for each pair of bytes and returns the words. The bytes are the low 16 bits of
/// `codes`, sign-extended.
#[inline(always)]
fn widen<'a>(bytes: &[u8], pair: impl Fn(i32) -> u32, room: &'a mut [u32]) -> &'a [u32] {
    let pairs = bytes.as_chunks::<2>().0;
    let words = &mut room[..pairs.len()];
    for i in 0..words.len() {
        words[i] = pair(i16::from_le_bytes(pairs[i]).into());
    }
    words
}

/// An integer from -127 to 127.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(transparent)]
pub struct Int8(i8);

impl Element for Int8 {
    const SUM: SumType = SumType::Bf16;
    const SCALE_BLOCK: Option<usize> = Some(32);
    #[inline(always)]
    fn scale(block: &[f32]) -> f32 {
        absmax(block) / 127.0
    }
    #[inline(always)]
    fn store(stored: &mut [Int8], index: usize, value: f32) {
        stored[index] = Int8((value.clamp(-127.0, 127.0) + ROUNDER).to_bits() as i8);
    }
    #[inline(always)]
    fn panel<'a>(stored: &'a [Int8], room: &'a mut [u32]) -> &'a [u8] {
        let pair = |codes: i32| joined((codes << 24 >> 24) as f32, (codes >> 8) as f32);
        bytemuck::cast_slice(widen(bytemuck::cast_slice(stored), pair, room))
    }
}

/// An 8-bit float in the format e4m3fn: sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa. The largest
/// number is 448. The two codes of NaN are not used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(transparent)]
pub struct Fp8(u8);

/// Largest number of [`Fp8`].
const FP8_LARGEST: f32 = 448.0;
/// Smallest number of [`Fp8`] with a full mantissa; smaller ones are multiples of 2^-9.
const FP8_NORMAL: f32 = 0.015_625;

impl Fp8 {
    /// Rounds to nearest even; larger values become the largest number, and NaN becomes zero.
    #[inline(always)]
    fn narrow(value: f32) -> Fp8 {
        let bits = value.to_bits();
        let abs = f32::from_bits(bits & 0x7fff_ffff);
        // `min` would turn NaN into the largest number.
        let abs = if abs <= FP8_LARGEST { abs } else { FP8_LARGEST };
        let bits_of = abs.to_bits();
        // Rebias the exponent and round the lost 20 bits to nearest even.
        let normal = bits_of.wrapping_sub(120 << 23).wrapping_add(0x7_ffff + (bits_of >> 20 & 1)) >> 20;
        // The last place of f32 numbers from 2^14 on is 2^-9.
        let small = (abs + 16_384.0).to_bits().wrapping_sub(16_384f32.to_bits());
        let code = if abs < FP8_NORMAL { small } else { normal };
        let code = code | bits >> 24 & 0x80;
        Fp8(if value.is_nan() { 0 } else { code as u8 })
    }

    /// Returns the number whose code, without the sign, is in bits 20 to 26, and whose sign is in bit 31.
    #[inline(always)]
    fn widened(code: i32, sign: i32) -> f32 {
        let normal = code + (120 << 23);
        // With the exponent of 2^-6, the mantissa of a small number is 2^-6 too large.
        let small = f32::from_bits((code + (121 << 23)) as u32) - FP8_NORMAL;
        let bits = if code < 8 << 20 { small.to_bits() as i32 } else { normal };
        f32::from_bits((sign | bits) as u32)
    }
}

impl Element for Fp8 {
    const SUM: SumType = SumType::Bf16;
    const SCALE_BLOCK: Option<usize> = Some(MAX_HEAD);
    #[inline(always)]
    fn scale(block: &[f32]) -> f32 {
        absmax(block) / FP8_LARGEST
    }
    #[inline(always)]
    fn store(stored: &mut [Fp8], index: usize, value: f32) {
        stored[index] = Fp8::narrow(value);
    }
    #[inline(always)]
    fn panel<'a>(stored: &'a [Fp8], room: &'a mut [u32]) -> &'a [u8] {
        const CODE: i32 = 0x7f << 20;
        const SIGN: i32 = i32::MIN;
        let pair = |codes: i32| {
            joined(
                Fp8::widened(codes << 20 & CODE, codes << 24 & SIGN),
                Fp8::widened(codes << 12 & CODE, codes << 16 & SIGN),
            )
        };
        bytemuck::cast_slice(widen(bytemuck::cast_slice(stored), pair, room))
    }
}

/// Two integers from -8 to 7 in two's complement, the first in the low half.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(transparent)]
pub struct Int4Pair(u8);

impl Int4Pair {
    /// Returns both integers as bf16, the first in the low half.
    #[inline(always)]
    fn widened(self) -> u32 {
        // Flipping the sign bit of a code adds 8 to its integer. The sum becomes the last bits of a float from 2^23 on.
        const BIASED: u32 = 0x4b00_0000 | 8;
        let (pair, float) = (u32::from(self.0), |code: u32| f32::from_bits(code ^ BIASED) - 8_388_616.0);
        joined(float(pair & 15), float(pair >> 4))
    }
}

impl Element for Int4Pair {
    const NUMBERS: usize = 2;
    const SUM: SumType = SumType::Bf16;
    const SCALE_BLOCK: Option<usize> = Some(64);
    const ROTATED: bool = true;
    /// Returns the scale with which the value of the largest magnitude becomes -8; it may be negative.
    #[inline(always)]
    fn scale(block: &[f32]) -> f32 {
        block.iter().fold(0f32, |m, v| if v.abs() > m.abs() { *v } else { m }) / -8.0
    }
    #[inline(always)]
    fn store(stored: &mut [Int4Pair], index: usize, value: f32) {
        let code = (value.clamp(-8.0, 7.0) + ROUNDER).to_bits() as u8 & 15;
        let pair = &mut stored[index / 2].0;
        *pair = if index.is_multiple_of(2) { *pair & 0xf0 | code } else { *pair & 15 | code << 4 };
    }
    #[inline(always)]
    fn panel<'a>(stored: &'a [Int4Pair], room: &'a mut [u32]) -> &'a [u8] {
        let words = &mut room[..stored.len()];
        for i in 0..words.len() {
            words[i] = stored[i].widened();
        }
        bytemuck::cast_slice(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::runtime::cpu::Cpu;
    use half::bf16;

    /// Returns the numbers that products read.
    fn numbers<T: Element>(stored: &[T]) -> Vec<f32> {
        let mut room = vec![u32::MAX; stored.len()];
        let panel = T::panel(stored, &mut room);
        panel.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
    }

    /// Returns the value as it is read again.
    fn stored<T: Element>(value: f32) -> f32 {
        let mut elements = [T::zeroed(); 2];
        T::store(&mut elements, 1, value);
        numbers(&elements)[1]
    }

    /// Returns the nearest of `choices`, and of two that are equally near the one whose index is even.
    fn nearest(value: f32, choices: &[f32]) -> f32 {
        let apart = |i: &usize| (f64::from(choices[*i]) - f64::from(value)).abs();
        let best = (0..choices.len()).min_by(|a, b| apart(a).total_cmp(&apart(b)).then((a % 2).cmp(&(b % 2))));
        choices[best.unwrap()]
    }

    /// Returns the numbers of e4m3 that are not negative, by the definition of the format.
    fn e4m3() -> Vec<f32> {
        let number = |code: i32| match (code >> 3, code & 7) {
            (0, mantissa) => mantissa as f32 / 512.0,
            (exponent, mantissa) => (8 + mantissa) as f32 * 2f32.powi(exponent - 10),
        };
        (0..0x7f).map(number).collect()
    }

    #[test]
    fn int8_codes_are_the_nearest_whole_numbers_and_exact_as_bf16() {
        for code in -127i8..=127 {
            let number = f32::from(code);
            assert_eq!((stored::<Int8>(number + 0.49), stored::<Int8>(number - 0.49)), (number, number));
            assert_eq!(numbers(&[Int8(code), Int8(-code)]), [number, -number]);
        }
        assert_eq!((stored::<Int8>(1e9), stored::<Int8>(-1e9)), (127.0, -127.0));
    }

    #[test]
    fn fp8_codes_are_the_numbers_of_e4m3() {
        for (code, number) in (0u8..).zip(e4m3()) {
            assert_eq!(numbers(&[Fp8(code), Fp8(code | 0x80)]), [number, -number], "{code}");
            assert_eq!((Fp8::narrow(number), Fp8::narrow(-number)), (Fp8(code), Fp8(code | 0x80)));
        }
    }

    #[test]
    fn fp8_rounds_to_the_nearest_even_number_and_saturates() {
        let choices = e4m3();
        let mut rng = Rng::new(5);
        let middles = choices.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let random = (0..20_000).map(|_| 2f32.powf((rng.next_f64() * 24.0 - 14.0) as f32));
        for value in middles.chain(random.collect::<Vec<_>>()) {
            let expected = nearest(value, &choices);
            assert_eq!((stored::<Fp8>(value), stored::<Fp8>(-value)), (expected, -expected), "{value}");
        }
        assert_eq!((stored::<Fp8>(1e9), stored::<Fp8>(f32::NEG_INFINITY)), (448.0, -448.0));
        assert_eq!((stored::<Fp8>(f32::NAN), stored::<Fp8>(1e-40)), (0.0, 0.0));
    }

    #[test]
    fn int4_codes_are_the_nearest_whole_numbers_and_leave_their_neighbours() {
        for (a, b) in (0..256).map(|i| ((i / 16 - 8) as f32, (i % 16 - 8) as f32)) {
            let mut pairs = [Int4Pair(0xff); 3];
            Int4Pair::store(&mut pairs, 3, b - 0.49);
            Int4Pair::store(&mut pairs, 2, a + 0.49);
            assert_eq!(numbers(&pairs), [-1.0, -1.0, a, b, -1.0, -1.0]);
        }
        assert_eq!((stored::<Int4Pair>(1e9), stored::<Int4Pair>(-1e9)), (7.0, -8.0));
    }

    #[test]
    fn every_instruction_set_widens_int4_to_the_same_words() {
        let pairs: Vec<Int4Pair> = (0..=255).chain([7, 200, 31]).map(Int4Pair).collect();
        let expected: Vec<u32> = pairs.iter().map(|pair| pair.widened()).collect();
        for isa in Cpu::isas() {
            let mut room = vec![0; pairs.len()];
            let words = crate::runtime::kv::panel(&Cpu::with_isa(1, Some(isa)).unwrap(), &pairs, &mut room);
            assert_eq!(bytemuck::cast_slice::<u8, u32>(words), expected, "{isa}");
        }
    }

    #[test]
    fn the_value_of_the_largest_magnitude_keeps_its_size() {
        let mut rng = Rng::new(6);
        for _ in 0..200 {
            let block: Vec<f32> = (0..64).map(|_| rng.next_normal() as f32).collect();
            let largest = block.iter().fold(0f32, |m, v| if v.abs() > m.abs() { *v } else { m });
            let kept = |scale: f32, number: f32| (scale * number / largest - 1.0).abs() < 1e-6;
            assert!(kept(Int4Pair::scale(&block), -8.0));
            assert!(kept(Int8::scale(&block), 127f32.copysign(largest)));
            assert!(kept(Fp8::scale(&block), 448f32.copysign(largest)));
        }
    }
}
