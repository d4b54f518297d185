//! Are the weights in memory before they are needed?
//!
//! Opening a pack maps it; a page comes into the page table, and if need be from the disk, when it is first touched.
//! `read_whole` touches everything at once, for those who measure or who want the first answer to be as fast as the
//! second.

use crate::error::Result;
use crate::interrupt;
use crate::mapped::{Bytes, MappedFile};
use crate::progress;
use rayon::prelude::*;
use std::sync::Arc;

/// When weights come into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Residency {
    /// When they are computed with.
    #[default]
    OnDemand,
    /// All before the engine is there.
    Whole,
    /// As [`Residency::Whole`], and the system must not take them away again.
    Locked,
}

/// Bytes populated at once; a few milliseconds of work.
const PIECE: usize = 16 << 20;

/// Populates the whole file, in parallel and with a progress bar.
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
