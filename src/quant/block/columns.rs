//! Packing of canonical codes in column order ([`CodeOrder::Columns`](crate::scheme::CodeOrder)): the low four bits
//! of columns 2j and 2j + 1 are in byte j; the remaining high bits follow, column by column, starting at the lowest
//! bit of the first byte. 8-bit codes take one byte per column.
//!
//! In memory and in tiles, symmetric codes are biased by half their range; canonical codes are two's complement,
//! which differs in the highest bit. `bias` is that bit; it is 0 for codes that are stored without a bias.

/// Packs the codes of one row; unused bits in the last byte of either part are zero.
pub fn pack(bits: u32, bias: u8, codes: &[u8], out: &mut [u8]) {
    if bits == 8 {
        return out.copy_from_slice(codes);
    }
    let (low, high) = out.split_at_mut(codes.len().div_ceil(2));
    for (pair, byte) in codes.chunks(2).zip(low) {
        *byte = (pair[0] ^ bias) & 15 | pair.get(1).map_or(0, |code| (code ^ bias) << 4);
    }
    let each = bits as usize - 4;
    if each == 0 {
        return;
    }
    for (codes, byte) in codes.chunks(8 / each).zip(high) {
        let bits = codes.iter().enumerate().map(|(i, code)| (code ^ bias) >> 4 << (each * i));
        *byte = bits.fold(0, |byte, bits| byte | bits);
    }
}

/// Unpacks the codes of one row; the inverse of [`pack`].
pub fn unpack(bits: u32, bias: u8, packed: &[u8], codes: &mut [u8]) {
    if bits == 8 {
        return codes.copy_from_slice(packed);
    }
    let (low, high) = packed.split_at(codes.len().div_ceil(2));
    for (pair, byte) in codes.chunks_mut(2).zip(low) {
        pair[0] = byte & 15 ^ bias;
        if let Some(second) = pair.get_mut(1) {
            *second = byte >> 4 ^ bias;
        }
    }
    let each = bits as usize - 4;
    if each == 0 {
        return;
    }
    for (codes, byte) in codes.chunks_mut(8 / each).zip(high) {
        for (i, code) in codes.iter_mut().enumerate() {
            *code ^= (byte >> (each * i) & ((1 << each) - 1)) << 4;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_twos_complement_with_the_high_bits_behind_the_nibbles() {
        let cases: [(u32, u8, [u8; 3], &[u8]); 4] = [
            // -8, 7, -1 biased by 8.
            (4, 8, [0, 15, 7], &[0x78, 0x0F]),
            // -16, 15, -1 biased by 16: 10000, 01111, 11111.
            (5, 16, [0, 31, 15], &[0xF0, 0x0F, 0b101]),
            // -32, 31, -1 biased by 32: 100000, 011111, 111111.
            (6, 32, [0, 63, 31], &[0xF0, 0x0F, 0b11_01_10]),
            (8, 0, [0x80, 0x7F, 0xFF], &[0x80, 0x7F, 0xFF]),
        ];
        for (bits, bias, codes, expected) in cases {
            let mut packed = vec![0; expected.len()];
            pack(bits, bias, &codes, &mut packed);
            assert_eq!(packed, expected, "{bits} bits");
            let mut back = [0; 3];
            unpack(bits, bias, &packed, &mut back);
            assert_eq!(back, codes, "{bits} bits");
        }
    }
}
