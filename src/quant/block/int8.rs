//! Plain 8-bit integers: a two's-complement byte per column, -127..=127 so that the range is symmetric.

/// Largest code.
pub const MAX: f32 = 127.0;

/// Packs the codes of one row: they already are the bytes.
pub fn pack(codes: &[u8], out: &mut [u8]) {
    out.copy_from_slice(codes);
}

/// The inverse of [`pack`].
pub fn unpack(packed: &[u8], codes: &mut [u8]) {
    codes.copy_from_slice(packed);
}
