//! zstd as an entropy coder: each compressed block is its length (`u32`) and a zstd frame.

use super::take;
use crate::error::{Error, Result};
use std::fmt;
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::compress_bound;

/// Compressor and decompressor with their tables, each created when it is first needed.
pub(crate) struct Zstd {
    level: i32,
    coder: Option<Compressor<'static>>,
    decoder: Option<Decompressor<'static>>,
}

impl Zstd {
    /// Creates a coder with this compression level, 1 to 22.
    pub fn new(level: i32) -> Zstd {
        Zstd { level, coder: None, decoder: None }
    }

    /// Appends the compressed bytes; `bytes` has at most 4 GiB.
    pub fn squeeze(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let make = || Compressor::new(self.level).expect("zstd has memory for its tables");
        let coder = self.coder.get_or_insert_with(make);
        let start = out.len();
        out.resize(start + 4 + compress_bound(bytes.len()), 0);
        let length = coder.compress_to_buffer(bytes, &mut out[start + 4..]).expect("zstd has room for its worst case");
        out[start..start + 4].copy_from_slice(&(length as u32).to_le_bytes());
        out.truncate(start + 4 + length);
    }

    /// Decompresses a block of [`Zstd::squeeze`], which must have as many bytes as `out`.
    pub fn restore(&mut self, from: &mut &[u8], out: &mut [u8]) -> Result<()> {
        let length = take(from, 4)?.as_chunks().0[0];
        let squeezed = take(from, u32::from_le_bytes(length) as usize)?;
        let make = || Decompressor::new().expect("zstd has memory for its tables");
        match self.decoder.get_or_insert_with(make).decompress_to_buffer(squeezed, out) {
            Ok(length) if length == out.len() => Ok(()),
            Ok(length) => {
                Err(Error::corrupt(format!("found a compressed plane of {length} bytes, expected {}", out.len())))
            }
            Err(e) => Err(Error::corrupt(format!("found a damaged compressed plane: {e}"))),
        }
    }
}

impl fmt::Debug for Zstd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Zstd")
    }
}
