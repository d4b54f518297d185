//! zstd as an entropy coder: each compressed block is its length (`u32`) and a zstd frame.

use super::take;
use crate::error::{Cause, Error, Result};
use std::fmt;
use zstd::zstd_safe::{CCtx, CParameter, DCtx, compress_bound, get_error_name};

/// Compressor and decompressor with their tables, each created when it is first needed.
pub(crate) struct Zstd {
    level: i32,
    coder: Option<CCtx<'static>>,
    decoder: Option<DCtx<'static>>,
}

impl Zstd {
    /// Creates a coder with this compression level, 1 to 22.
    pub fn new(level: i32) -> Zstd {
        Zstd { level, coder: None, decoder: None }
    }

    /// Appends the compressed bytes; `bytes` has at most 4 GiB.
    ///
    /// # Errors
    /// There is no memory for the tables of zstd.
    pub fn squeeze(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<()> {
        let coder = match &mut self.coder {
            Some(coder) => coder,
            empty => empty.insert(CCtx::try_create().ok_or_else(|| no_memory("no context"))?),
        };
        let start = out.len();
        out.resize(start + 4 + compress_bound(bytes.len()), 0);
        // There is room for the worst case and the level is valid, so only memory can be missing.
        let length = coder
            .set_parameter(CParameter::CompressionLevel(self.level))
            .and_then(|_| coder.compress2(&mut out[start + 4..], bytes))
            .map_err(|code| no_memory(get_error_name(code)))?;
        out[start..start + 4].copy_from_slice(&(length as u32).to_le_bytes());
        out.truncate(start + 4 + length);
        Ok(())
    }

    /// Decompresses a block of [`Zstd::squeeze`], which must have as many bytes as `out`.
    ///
    /// # Errors
    /// The block is damaged, or there is no memory for the tables of zstd.
    pub fn restore(&mut self, from: &mut &[u8], out: &mut [u8]) -> Result<()> {
        let length = take(from, 4)?.as_chunks().0[0];
        let squeezed = take(from, u32::from_le_bytes(length) as usize)?;
        let decoder = match &mut self.decoder {
            Some(decoder) => decoder,
            empty => empty.insert(DCtx::try_create().ok_or_else(|| no_memory("no context"))?),
        };
        match decoder.decompress(out, squeezed) {
            Ok(length) if length == out.len() => Ok(()),
            Ok(length) => {
                Err(Error::corrupt(format!("found a compressed plane of {length} bytes, expected {}", out.len())))
            }
            Err(code) => Err(Error::corrupt(format!("found a damaged compressed plane: {}", get_error_name(code)))),
        }
    }
}

fn no_memory(found: &str) -> Error {
    Error::new(Cause::OutOfMemory(format!("no memory for the tables of zstd: {found}")))
        .help("use fewer threads (--threads)")
}

impl fmt::Debug for Zstd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Zstd")
    }
}
