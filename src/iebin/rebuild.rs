//! Payloads of a pack without its binary: whoever can rebuild them stands in for it.

use crate::error::Result;
use crate::mapped::MappedFile;
use crate::windowed::Windowed;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// Gives any bytes of any tensor of a pack.
pub trait Rebuild: Debug + Send + Sync {
    /// Length of the binary, if there was one.
    fn total_bytes(&self) -> u64;

    /// Writes bytes `range` of the payload of the pack's tensor number `tensor` to `out`, which is as long.
    ///
    /// # Errors
    /// What they are rebuilt from was changed.
    fn read(&self, tensor: usize, range: Range<usize>, out: &mut [u8]) -> Result<()>;

    /// Bytes `range` of that payload, where they are bf16 numbers that can be computed with as they are stored.
    fn windowed(&self, tensor: usize, range: Range<usize>) -> Option<Windowed>;

    /// What is read to rebuild.
    fn files(&self) -> &[Arc<MappedFile>];
}

/// How much of what was rebuilt is kept in memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keep {
    /// Most bytes kept at any time; `None` = everything.
    pub limit: Option<u64>,
    /// Tensors that are rebuilt before the first token and stay, in this order.
    pub hot: Vec<String>,
    /// After them, so many bytes of the others in the order of their use.
    pub hot_bytes: u64,
}
