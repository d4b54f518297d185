//! The index of a unit: for each frame the lengths of its streams and their checksum.

use super::plane::{Cursors, Streams};

/// Bytes of a frame's entry in the index of its unit: three lengths and a checksum, 32 bits each.
pub(super) const INDEX_ENTRY: usize = 16;

/// Returns the lengths of the streams of a frame.
pub(super) fn lengths(entry: &[u8; INDEX_ENTRY]) -> [usize; 3] {
    let numbers = entry.as_chunks::<4>().0;
    std::array::from_fn(|i| u32::from_le_bytes(numbers[i]) as usize)
}

/// Returns the recorded checksum of the streams of a frame.
pub(super) fn checksum_of(entry: &[u8; INDEX_ENTRY]) -> u32 {
    u32::from_le_bytes(entry.as_chunks::<4>().0[3])
}

/// Returns the entry of a frame in the index.
pub(super) fn entry_of(streams: &Streams) -> [u8; INDEX_ENTRY] {
    let [defaults, masks, exceptions] = streams.cursors().all().map(|stream| stream.len() as u32);
    bytemuck::cast([defaults, masks, exceptions, checksum(&streams.cursors())].map(u32::to_le_bytes))
}

/// Returns the CRC-32 of the streams of a frame.
pub(super) fn checksum(frame: &Cursors<'_>) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for stream in frame.all() {
        // Lengths are part of the checksum, so that no byte can move from one stream to the next unnoticed.
        hasher.update(&(stream.len() as u32).to_le_bytes());
        hasher.update(stream);
    }
    hasher.finalize()
}
