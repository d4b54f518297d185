//! Are the weights in memory before they are needed?
//!
//! Opening a pack maps it; a page comes into the page table, and if need be from the disk, when it is first touched, which
//! the computing threads would wait for. [`ReadAhead`] touches what every token reads while other work (mostly loading the
//! tokenizer) keeps only one core busy, and ends when the first token wants all of them. [`read_whole`] reads everything
//! at once, for those who measure or who want the first answer to be as fast as the second.

use super::weights::Weights;
use crate::error::Result;
use crate::interrupt;
use crate::mapped::{Bytes, MappedFile};
use crate::progress;
use rayon::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// When weights come into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Residency {
    /// When they are computed with.
    #[default]
    OnDemand,
    /// From the moment the engine opens until it is first used, as far as that gets, by a thread of its own.
    Ahead,
    /// All before the engine is there.
    Whole,
    /// As [`Residency::Whole`], and the system must not take them away again.
    Locked,
}

/// Bytes populated at once; a few milliseconds of work.
const PIECE: usize = 16 << 20;

/// A thread that populates weights; it stops when this is dropped.
#[derive(Debug)]
pub(super) struct ReadAhead(Arc<AtomicBool>);

impl ReadAhead {
    /// Starts with what every token reads, in that order. `None` when there is no thread to be had: it is only help.
    pub(super) fn start(weights: &Weights) -> Option<ReadAhead> {
        let parts: Vec<Bytes> = weights.always_read().map(|matrix| matrix.data.clone()).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let read = move || {
            for part in parts {
                for from in (0..part.len()).step_by(PIECE) {
                    if stopped.load(Ordering::Relaxed) {
                        return;
                    }
                    part.populate(from..(from + PIECE).min(part.len()));
                }
            }
        };
        std::thread::Builder::new().name("iec-read-ahead".into()).spawn(read).ok().map(|_| ReadAhead(stop))
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

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
    })?;
    bar.finish_and_clear();
    Ok(())
}
