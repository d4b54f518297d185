//! The streams of trellises, see [`crate::scheme::Trellis`].

use crate::scheme::{BLOCK, STEPS, Trellis};

/// Returns the four streams of a block whose weights have these indices.
pub fn of_block(trellis: &Trellis, indices: &[u8]) -> [u32; 4] {
    std::array::from_fn(|j| trellis.stream(std::array::from_fn(|step| indices[4 * step + j])))
}

/// Writes the indices of the weights of a block.
pub fn indices(trellis: &Trellis, streams: [u32; 4], out: &mut [u8]) {
    for (j, stream) in streams.into_iter().enumerate() {
        (0..STEPS).for_each(|step| out[4 * step + j] = trellis.index(stream, step));
    }
}

/// Writes the bytes of the streams of whole blocks.
pub fn pack(trellis: &Trellis, codes: &[u8], out: &mut [u8]) {
    let each = trellis.bits as usize;
    for (indices, bytes) in codes.chunks_exact(BLOCK).zip(out.chunks_exact_mut(4 * each)) {
        for (stream, bytes) in of_block(trellis, indices).into_iter().zip(bytes.chunks_exact_mut(each)) {
            bytes.copy_from_slice(&stream.to_le_bytes()[..each]);
        }
    }
}

/// Reads the indices of whole blocks from the bytes of their streams.
pub fn unpack(trellis: &Trellis, packed: &[u8], codes: &mut [u8]) {
    let each = trellis.bits as usize;
    for (bytes, out) in packed.chunks_exact(4 * each).zip(codes.chunks_exact_mut(BLOCK)) {
        let stream = |j: usize| {
            let mut stream = [0; 4];
            stream[..each].copy_from_slice(&bytes[j * each..][..each]);
            u32::from_le_bytes(stream)
        };
        indices(trellis, std::array::from_fn(stream), out);
    }
}
