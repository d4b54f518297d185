//! State of a text on a device: what a part keeps for the tokens that were read so far, opaque to other modules.
//!
//! A state has two kinds of memory. One grows with the text: pages of [`PAGE`](super::kv::PAGE) positions, such as keys
//! and values. The other has one size however long the text is, such as the state of a recurrent layer; it exists for
//! the last position only, so an earlier one is reached again only if it was kept: by [`PartCache::mark`], by a
//! [snapshot](PartCache::snapshot), or at intervals that the part chooses. Texts and the prefix cache share pages and
//! snapshots as [`Piece`]s. Both kinds come out of the [`StatePool`] of the part and count against its budget.

use crate::error::Result;
use std::any::Any;
use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::Arc;

/// State of one text in one part. A clone shares memory with the original until one of them is written.
#[derive(Debug)]
pub struct Cache(Box<dyn PartCache>);

/// The contents of a [`Cache`].
pub trait PartCache: Any + Debug + Send + Sync {
    /// Clones the contents.
    fn clone_cache(&self) -> Cache;

    /// Keeps what a later [`rewind`](PartCache::rewind) to the present end needs; a later mark may replace it.
    fn mark(&mut self);

    /// Drops positions until at most `len` are left, and returns the number that is left: `len`, or fewer if the state
    /// after `len` positions is not known any more. The state after none is always known.
    fn rewind(&mut self, len: usize) -> usize;

    /// Returns the pages of all positions.
    fn pages(&self) -> Vec<Piece>;

    /// Returns the memory of fixed size, as it is after the last position; `None` if the pages are the whole state.
    fn snapshot(&self) -> Option<Piece>;

    /// Replaces the contents by `len` positions of another text: its pages, of which the last may hold more positions,
    /// and its snapshot after these positions, if the part has any.
    fn adopt(&mut self, pages: Vec<Piece>, snapshot: Option<Piece>, len: usize);
}

impl Cache {
    /// Creates a cache with these contents.
    pub fn new(contents: impl PartCache) -> Cache {
        Cache(Box::new(contents))
    }

    /// Returns the contents if they have type `T`; only the part that created the cache knows it.
    pub fn get<T: PartCache>(&self) -> Option<&T> {
        (&*self.0 as &dyn Any).downcast_ref()
    }

    /// Returns the contents for modification.
    ///
    /// # Panics
    /// The contents have another type; the engine calls [`DevicePart::owns`](super::device::DevicePart::owns) first.
    pub fn get_mut<T: PartCache>(&mut self) -> &mut T {
        (&mut *self.0 as &mut dyn Any).downcast_mut().expect("a cache of this part")
    }

    /// Returns the contents.
    pub fn contents(&self) -> &dyn PartCache {
        &*self.0
    }

    /// Returns the contents for modification.
    pub fn contents_mut(&mut self) -> &mut dyn PartCache {
        &mut *self.0
    }
}

impl Clone for Cache {
    fn clone(&self) -> Cache {
        self.0.clone_cache()
    }
}

/// Shared ownership of a page or a snapshot. Its memory is not changed while it has more than one owner.
#[derive(Debug, Clone)]
pub struct Piece(Arc<dyn PieceMemory>);

/// Memory of a [`Piece`].
pub trait PieceMemory: Any + Debug + Send + Sync {
    /// Returns the contents, which [`StatePool::restore`] takes.
    ///
    /// # Errors
    /// The device fails.
    fn bytes(&self) -> Result<Cow<'_, [u8]>>;
}

impl Piece {
    /// Creates a piece that is one more owner of this memory.
    pub fn new(memory: Arc<impl PieceMemory>) -> Piece {
        Piece(memory)
    }

    /// Returns the memory.
    ///
    /// # Panics
    /// The memory has another type: the piece belongs to another part.
    pub fn memory<T: PieceMemory>(self) -> Arc<T> {
        let memory: Arc<dyn Any + Send + Sync> = self.0;
        memory.downcast().expect("a piece of this part")
    }

    /// Returns the contents.
    ///
    /// # Errors
    /// The device fails.
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        self.0.bytes()
    }
}

/// Memory of one part for the states of texts.
pub trait StatePool: Debug + Send + Sync {
    /// Returns the bytes of a page.
    fn page_bytes(&self) -> u64;

    /// Returns the bytes of a text's memory of fixed size; 0 if its pages are its whole state.
    fn snapshot_bytes(&self) -> u64;

    /// Returns the largest number of pages, if there is a budget. A snapshot takes as much of it as the pages of its
    /// bytes.
    fn most(&self) -> Option<usize>;

    /// Counts the pages.
    fn counts(&self) -> PageCounts;

    /// Returns the bytes of memory that are left on the device; `None` if that is not known.
    fn memory_left(&self) -> Option<u64>;

    /// Returns a new piece with the contents of an earlier one: a page, or a snapshot, as the length tells.
    ///
    /// # Errors
    /// There is not enough memory, or the device fails.
    fn restore(&self, bytes: &[u8]) -> Result<Piece>;
}

/// Number of pages of a pool, or of all pools of an engine, in each state. `free + used = total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageCounts {
    /// All pages: those of the budget, or without one those allocated so far.
    pub total: usize,
    /// Pages without an owner.
    pub free: usize,
    /// Pages that belong to at least one text or to the prefix cache.
    pub used: usize,
}
