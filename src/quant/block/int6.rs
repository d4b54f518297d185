//! Integers of 5 and 6 bits: two's complement, the low four bits in nibbles as [`super::int4`] has them, and the 1 or 2 high
//! bits (`HIGH`) behind them, column by column from the lowest bit of the first byte on.
//!
//! In memory codes are biased by half their range, as tiles store them; that differs from two's complement in the highest bit.

/// Packs the biased codes of one row; what is left of the last byte of either part is zero.
pub fn pack<const HIGH: usize>(codes: &[u8], out: &mut [u8]) {
    let (low, high) = out.split_at_mut(codes.len().div_ceil(2));
    for (pair, byte) in codes.chunks(2).zip(low) {
        *byte = pair[0] & 15 | pair.get(1).map_or(0, |code| code << 4);
    }
    for (codes, byte) in codes.chunks(8 / HIGH).zip(high) {
        let bits = codes.iter().enumerate().map(|(i, code)| (code >> 4 ^ sign(HIGH)) << (HIGH * i));
        *byte = bits.fold(0, |byte, bits| byte | bits);
    }
}

/// The inverse of [`pack`].
pub fn unpack<const HIGH: usize>(packed: &[u8], codes: &mut [u8]) {
    let (low, high) = packed.split_at(codes.len().div_ceil(2));
    for (k, code) in codes.iter_mut().enumerate() {
        let nibble = low[k / 2] >> (4 * (k % 2)) & 15;
        let bits = high[HIGH * k / 8] >> (HIGH * k % 8) & ((1 << HIGH) - 1);
        *code = nibble | (bits ^ sign(HIGH)) << 4;
    }
}

/// The highest of the high bits.
fn sign(high: usize) -> u8 {
    1 << (high - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_twos_complement_with_the_high_bits_behind_the_nibbles() {
        // -32, 31, -1 biased by 32: 100000, 011111, 111111.
        let mut packed = [0; 3];
        pack::<2>(&[0, 63, 31], &mut packed);
        assert_eq!(packed, [0xF0, 0x0F, 0b11_01_10]);
        let mut codes = [0; 3];
        unpack::<2>(&packed, &mut codes);
        assert_eq!(codes, [0, 63, 31]);
        // -16, 15, -1 biased by 16: 10000, 01111, 11111.
        pack::<1>(&[0, 31, 15], &mut packed);
        assert_eq!(packed, [0xF0, 0x0F, 0b101]);
        unpack::<1>(&packed, &mut codes);
        assert_eq!(codes, [0, 31, 15]);
    }
}
