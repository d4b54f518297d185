//! One payload of an artifact in the making: written in order, hashed on the way.

use crate::error::Result;
use crate::iebin::IebinWriter;
use crate::interrupt;
use crate::sha256::{Digest, Sha256, hex};
use indicatif::ProgressBar;

/// Where the next bytes of a tensor go, and the hash of those before them.
pub(super) struct Payload<'a> {
    writer: &'a IebinWriter,
    bar: &'a ProgressBar,
    tensor: usize,
    offset: usize,
    hash: Sha256,
}

impl<'a> Payload<'a> {
    /// The empty payload of tensor number `tensor`.
    pub(super) fn new(writer: &'a IebinWriter, bar: &'a ProgressBar, tensor: usize) -> Payload<'a> {
        Payload { writer, bar, tensor, offset: 0, hash: Sha256::new() }
    }

    /// Writes the next bytes.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        interrupt::check()?;
        self.hash.update(bytes);
        self.writer.write_at(self.tensor, self.offset, bytes)?;
        self.offset += bytes.len();
        self.bar.inc(bytes.len() as u64);
        Ok(())
    }

    /// The SHA-256 of the whole payload, in hex.
    pub(super) fn finish(self) -> String {
        assert_eq!(self.offset, self.writer.entries()[self.tensor].nbytes, "tensor {} is complete", self.tensor);
        hex(self.hash)
    }
}
