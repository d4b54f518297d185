//! Loading of weights into memory before they are needed.
//!
//! Opening a pack maps it. A page is entered in the page table, and read from the disk if necessary, when it is first
//! touched. `read_whole` touches all pages at once, for benchmarks and for users who want the first answer to be as
//! fast as the second.

use crate::error::Result;
use crate::interrupt;
use crate::mapped::{Bytes, MappedFile};
use crate::progress;
use rayon::prelude::*;
use std::sync::Arc;

/// When weights are loaded into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Residency {
    /// When they are first used; the system may also read the following part of the file ahead.
    #[default]
    OnDemand,
    /// When they are first used; the system does not read ahead.
    NoReadAhead,
    /// All of them, before the engine is returned.
    Whole,
    /// All of them, as with [`Residency::Whole`], and locked so that the system cannot evict them.
    Locked,
}

/// Number of bytes that one task reads, which takes a few milliseconds.
const PIECE: usize = 16 << 20;

/// Reads the whole file into memory in parallel and shows a progress bar.
///
/// # Errors
/// The user interrupted.
pub(super) fn read_whole(file: &Arc<MappedFile>) -> Result<()> {
    let whole = Bytes::mapped(file, 0..file.bytes().len())?;
    let bar = progress::bytes("weights", whole.len() as u64);
    let pieces = (0..whole.len().div_ceil(PIECE)).into_par_iter();
    pieces.try_for_each(|i| -> Result<()> {
        interrupt::check()?;
        let range = i * PIECE..((i + 1) * PIECE).min(whole.len());
        bar.inc(range.len() as u64);
        whole.populate(range);
        Ok(())
    })
}
