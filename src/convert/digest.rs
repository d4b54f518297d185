//! SHA-256 and other digests of byte ranges that are too large for memory, computed chunk by chunk.

use crate::error::Result;
use crate::interrupt;
use crate::progress::ProgressBar;
use crate::sha256::{Digest, Sha256, hex_of};
use std::ops::Range;

/// Bytes read at once.
const CHUNK: u64 = 1 << 20;

/// Hashes a range with SHA-256 and returns the digest in hex. `read` fills a buffer with the bytes at a position;
/// `each` is called with the position and the bytes of every chunk after it is hashed.
pub(super) fn hash_range(
    range: Range<u64>,
    bar: &ProgressBar,
    read: impl Fn(u64, &mut [u8]) -> Result<()>,
    each: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<String> {
    digest_range(Sha256::new(), range, bar, read, each)
}

/// Hashes a range like [`hash_range`], but with the given hash, which may already have absorbed other data.
pub(super) fn digest_range(
    mut hash: impl Digest,
    range: Range<u64>,
    bar: &ProgressBar,
    read: impl Fn(u64, &mut [u8]) -> Result<()>,
    mut each: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<String> {
    let mut buffer = vec![0; CHUNK.min(range.end - range.start) as usize];
    for at in range.clone().step_by(CHUNK as usize) {
        interrupt::check()?;
        let piece = &mut buffer[..CHUNK.min(range.end - at) as usize];
        read(at, piece)?;
        hash.update(&piece);
        each(at, piece)?;
        bar.inc(piece.len() as u64);
    }
    Ok(hex_of(hash))
}

/// Hashes a whole file of `nbytes` bytes with SHA-256.
pub(super) fn hash_file(nbytes: u64, bar: &ProgressBar, read: impl Fn(u64, &mut [u8]) -> Result<()>) -> Result<String> {
    hash_range(0..nbytes, bar, read, |_, _| Ok(()))
}
