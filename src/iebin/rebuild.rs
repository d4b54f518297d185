//! Interface for packs without a binary: reads payloads from a source that rebuilds them, such as a deduplicated store.

use crate::error::Result;
use crate::mapped::MappedFile;
use crate::windowed::Windowed;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// Source that rebuilds the payloads of a pack, any byte range of any tensor.
pub trait Rebuild: Debug + Send + Sync {
    /// Returns the length that the binary of the pack would have.
    fn total_bytes(&self) -> u64;

    /// Returns the SHA-256 of the binary of the pack in hex; `progress` is called with the number of bytes
    /// that were hashed since the last call.
    ///
    /// # Errors
    /// The data that payloads are rebuilt from were changed, or the user interrupts.
    fn sha256(&self, progress: &(dyn Fn(u64) + Sync)) -> Result<String>;

    /// Writes bytes `range` of the payload of tensor number `tensor` of the pack to `out`, whose length is that of the
    /// range.
    ///
    /// # Errors
    /// The data that the payload is rebuilt from were changed.
    fn read(&self, tensor: usize, range: Range<usize>, out: &mut [u8]) -> Result<()>;

    /// Returns bytes `range` of the payload of tensor number `tensor` in their stored form, if they are bf16 numbers in
    /// a form that products can read directly.
    fn windowed(&self, tensor: usize, range: Range<usize>) -> Option<Windowed>;

    /// Returns the files that payloads are rebuilt from.
    fn files(&self) -> &[Arc<MappedFile>];
}

/// Limits of the memory for rebuilt payloads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keep {
    /// Largest number of bytes kept at any time; `None` means most of the memory that is left.
    pub limit: Option<u64>,
    /// Names of tensors that are rebuilt before the first token and always kept, in this order.
    pub hot: Vec<String>,
    /// Bytes of further tensors that are rebuilt before the first token and always kept, in the order of their use.
    pub hot_bytes: u64,
}
