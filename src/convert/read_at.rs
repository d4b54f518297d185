//! Bytes that are read by position: an opened file, or memory in tests and fuzzing.

use crate::error::{Error, Result};

/// Something of known length that is read by position.
pub trait ReadAt {
    /// Its length in bytes.
    fn nbytes(&self) -> u64;

    /// Fills `out` with the bytes from position `at` on.
    ///
    /// # Errors
    /// The range reaches past the end, or reading fails.
    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()>;

    /// The `n` bytes from position `at` on. Nothing is allocated for bytes that do not exist.
    ///
    /// # Errors
    /// The range reaches past the end, or reading fails.
    fn read_vec(&self, at: u64, n: u64) -> Result<Vec<u8>> {
        let past_end = || Error::corrupt(format!("bytes {at}..+{n} of {}: the file is truncated", self.nbytes()));
        if at.checked_add(n).is_none_or(|end| end > self.nbytes()) {
            return Err(past_end());
        }
        let mut out = vec![0; usize::try_from(n).map_err(|_| past_end())?];
        self.read_at(at, &mut out)?;
        Ok(out)
    }
}

impl ReadAt for &[u8] {
    fn nbytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        let part = usize::try_from(at).ok().and_then(|at| self.get(at..)?.get(..out.len()));
        out.copy_from_slice(part.ok_or_else(|| Error::corrupt(format!("nothing lies at {at}")))?);
        Ok(())
    }
}
