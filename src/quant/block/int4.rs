//! Plain 4-bit integers: two's-complement nibbles (symmetric) or unsigned nibbles with a zero point (affine), the even
//! column in the low half of a byte.
//!
//! In memory symmetric codes are biased by 8 as tiles store them; the bias never leaves this program in canonical bytes.

/// Turns a biased code into its two's-complement nibble and back.
const SIGN_FLIP: u8 = 8;

/// Packs biased codes of one row as two's-complement nibbles; an odd row ends with a zero nibble.
pub fn pack_symmetric(codes: &[u8], out: &mut [u8]) {
    pack(codes, SIGN_FLIP, out);
}

/// Packs unsigned codes of one row; an odd row ends with a zero nibble.
pub fn pack_affine(codes: &[u8], out: &mut [u8]) {
    pack(codes, 0, out);
}

/// The inverse of [`pack_symmetric`]: biased codes.
pub fn unpack_symmetric(packed: &[u8], codes: &mut [u8]) {
    unpack(packed, SIGN_FLIP, codes);
}

/// The inverse of [`pack_affine`].
pub fn unpack_affine(packed: &[u8], codes: &mut [u8]) {
    unpack(packed, 0, codes);
}

fn pack(codes: &[u8], flip: u8, out: &mut [u8]) {
    for (pair, byte) in codes.chunks(2).zip(out) {
        let high = pair.get(1).map_or(0, |c| c ^ flip);
        *byte = (pair[0] ^ flip) | high << 4;
    }
}

fn unpack(packed: &[u8], flip: u8, codes: &mut [u8]) {
    for (pair, byte) in codes.chunks_mut(2).zip(packed) {
        pair[0] = (byte & 15) ^ flip;
        if let Some(high) = pair.get_mut(1) {
            *high = (byte >> 4) ^ flip;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_are_twos_complement_and_even_columns_are_low() {
        // -8, 7, -1 biased by 8.
        let mut packed = [0; 2];
        pack_symmetric(&[0, 15, 7], &mut packed);
        assert_eq!(packed, [0x78, 0x0F]);
        let mut codes = [0; 3];
        unpack_symmetric(&packed, &mut codes);
        assert_eq!(codes, [0, 15, 7]);
    }
}
