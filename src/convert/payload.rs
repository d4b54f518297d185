//! One payload of an artifact in the making: written in order, hashed on the way, alone or together with another.

use crate::error::Result;
use crate::iebin::IebinWriter;
use crate::interrupt;
use crate::progress::ProgressBar;
use crate::sha256::Stream;

/// Where the next bytes of a tensor go, and the hash of those before them.
pub(super) struct Payload<'a> {
    writer: &'a IebinWriter,
    bar: &'a ProgressBar,
    tensor: usize,
    offset: usize,
    hash: Stream,
}

impl<'a> Payload<'a> {
    /// The empty payload of tensor number `tensor`.
    pub(super) fn new(writer: &'a IebinWriter, bar: &'a ProgressBar, tensor: usize) -> Payload<'a> {
        Payload { writer, bar, tensor, offset: 0, hash: Stream::default() }
    }

    /// Writes and hashes the next bytes.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.write(bytes)?;
        self.hash(bytes);
        Ok(())
    }

    /// Writes the next bytes, which are to be hashed then.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        interrupt::check()?;
        self.writer.write_at(self.tensor, self.offset, bytes)?;
        self.offset += bytes.len();
        self.bar.inc(bytes.len() as u64);
        Ok(())
    }

    /// Hashes bytes that were written.
    pub(super) fn hash(&mut self, bytes: &[u8]) {
        self.hash.update(bytes);
    }

    /// Hashes bytes that were written to two payloads, in less time than one after the other.
    pub(super) fn hash_both(&mut self, bytes: &[u8], other: &mut Payload<'_>, of_other: &[u8]) {
        self.hash.update_both(bytes, &mut other.hash, of_other);
    }

    /// The SHA-256 of the whole payload, in hex.
    pub(super) fn finish(self) -> String {
        assert_eq!(self.offset, self.writer.entries()[self.tensor].nbytes, "tensor {} is complete", self.tensor);
        self.hash.hex()
    }
}
