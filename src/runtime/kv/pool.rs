//! Pool of KV cache pages: hands out pages of [`PAGE`] positions and takes them back when their last owner drops them.
//!
//! With a budget, the pool has a fixed number of pages, whose memory is mapped at once. Without one, it grows while the
//! machine has memory left. In both cases a page takes memory from its first use on and is then handed out again and
//! again, so a long run neither allocates nor returns memory. The memory is backed by huge pages: a long text is read
//! in full for each token, and translating the addresses of small pages takes longer than reading them. The pool knows
//! the size of a page only, not what the page holds.

use super::{KvLayout, Line, PAGE};
use crate::error::{Cause, Error, Result};
use crate::mapped::SlabPart;
use crate::resources::{is_left, memory_left};
use crate::runtime::state::{PageCounts, Piece, PieceMemory, StatePool};
use crate::units::human_bytes;
use std::borrow::Cow;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard};

/// Largest number of bytes that a pool without a budget maps at once, unless a page is larger.
const SLAB: usize = 64 << 20;

/// Pages of one size under a common budget.
#[derive(Debug)]
pub struct PagePool {
    layout: KvLayout,
    page_bytes: usize,
    /// Whether the memory is locked, so that it is never paged out.
    locked: bool,
    /// Largest number of pages; `None` = as many as the machine has memory for.
    most: Option<usize>,
    state: Mutex<PoolState>,
}

#[derive(Debug, Default)]
struct PoolState {
    /// Pages that were used before and have no owner.
    returned: Vec<SlabPart>,
    /// Memory that was mapped and never used; it holds zeros.
    fresh: Vec<SlabPart>,
    /// Number of pages that have an owner.
    owned: usize,
}

/// Shared ownership of the memory of [`PAGE`] consecutive positions in all layers and heads.
#[derive(Debug, Clone)]
pub struct Page(Arc<Owned>);

#[derive(Debug)]
struct Owned {
    /// Memory of the page; `None` only while it is dropped.
    memory: Option<SlabPart>,
    pool: Arc<PagePool>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        let memory = self.memory.take();
        let mut state = self.pool.state();
        state.owned -= 1;
        state.returned.extend(memory);
    }
}

impl Deref for Page {
    type Target = [Line];

    fn deref(&self) -> &[Line] {
        self.0.memory.as_deref().map_or(&[], bytemuck::cast_slice)
    }
}

impl PieceMemory for Owned {
    fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(self.memory.as_deref().unwrap_or_default()))
    }
}

impl Page {
    /// Returns one more owner of the page, as modules see it that do not know what it holds.
    pub fn piece(&self) -> Piece {
        Piece::new(self.0.clone())
    }

    /// Returns the page of a piece.
    ///
    /// # Panics
    /// The piece is not a page of the CPU.
    pub fn from_piece(piece: Piece) -> Page {
        Page(piece.memory())
    }

    /// Returns true if the page has another owner.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Returns the memory for writing; `None` if the page has another owner.
    pub fn get_mut(&mut self) -> Option<&mut [Line]> {
        Arc::get_mut(&mut self.0)?.memory.as_deref_mut().map(bytemuck::cast_slice_mut)
    }
}

impl PagePool {
    /// Creates a pool of pages for `layout`. `most` is the budget, the largest number of pages.
    ///
    /// # Errors
    /// A page or the budget does not fit the address space.
    pub fn new(layout: KvLayout, most: Option<usize>) -> Result<Arc<PagePool>> {
        PagePool::placed(layout, most, false)
    }

    /// Creates a pool as [`PagePool::new`] does. If it is `locked`, its memory is never paged out; that of a budget is
    /// then allocated at once.
    ///
    /// # Errors
    /// The same as for [`PagePool::new`], and the limit of locked memory does not suffice.
    pub fn placed(layout: KvLayout, most: Option<usize>, locked: bool) -> Result<Arc<PagePool>> {
        let page_bytes = layout.page_bytes().ok_or_else(|| {
            Error::new(Cause::OutOfMemory("a page of the KV cache does not fit the address space".into()))
        })?;
        let fresh = most.map_or(Ok(Vec::new()), |most| SlabPart::map(page_bytes, most, locked))?;
        let state = Mutex::new(PoolState { fresh, ..PoolState::default() });
        Ok(Arc::new(PagePool { layout, page_bytes, locked, most, state }))
    }

    /// Returns the sizes of the keys and values that the pages hold.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Returns a page of zeros.
    ///
    /// # Errors
    /// All pages of the budget have owners, or the machine has no memory left.
    pub fn page(self: &Arc<PagePool>) -> Result<Page> {
        let (mut memory, fresh) = self.take()?;
        if !fresh {
            // Zeros, so that no number of an earlier text can reach a product, not even multiplied by zero.
            memory.fill(0);
        }
        Ok(self.owned(memory))
    }

    /// Returns a copy of a page of this size.
    ///
    /// # Errors
    /// The same as for [`PagePool::page`].
    pub fn copy(self: &Arc<PagePool>, page: &Page) -> Result<Page> {
        let (mut memory, _) = self.take()?;
        memory.copy_from_slice(bytemuck::cast_slice::<Line, u8>(page));
        Ok(self.owned(memory))
    }

    fn owned(self: &Arc<PagePool>, memory: SlabPart) -> Page {
        Page(Arc::new(Owned { memory: Some(memory), pool: self.clone() }))
    }

    /// Takes memory for a page, which counts as owned from now on. The second value is true if it was never used.
    fn take(&self) -> Result<(SlabPart, bool)> {
        let mut state = self.state();
        let memory = match state.returned.pop() {
            Some(memory) => (memory, false),
            None => (self.fresh(&mut state)?, true),
        };
        state.owned += 1;
        Ok(memory)
    }

    /// Takes memory that was never used. Without a budget, each mapping doubles the number of pages, up to [`SLAB`].
    fn fresh(&self, state: &mut PoolState) -> Result<SlabPart> {
        if self.most.is_none() && !is_left(self.page_bytes) {
            return Err(out_of_memory(state.owned, self.page_bytes as u64));
        }
        if state.fresh.is_empty() {
            if self.most.is_some() {
                return Err(exhausted(state.owned, self.page_bytes as u64));
            }
            let count = state.owned.clamp(1, (SLAB / self.page_bytes.max(1)).max(1));
            let mapped = SlabPart::map(self.page_bytes, count, self.locked);
            let mapped =
                if count > 1 { mapped.or_else(|_| SlabPart::map(self.page_bytes, 1, self.locked)) } else { mapped };
            state.fresh = match (mapped, self.locked) {
                (Err(_), false) => return Err(out_of_memory(state.owned, self.page_bytes as u64)),
                (mapped, _) => mapped?,
            };
        }
        state.fresh.pop().ok_or_else(|| out_of_memory(state.owned, self.page_bytes as u64))
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl StatePool for Arc<PagePool> {
    fn page_bytes(&self) -> u64 {
        self.page_bytes as u64
    }

    fn snapshot_bytes(&self) -> u64 {
        0
    }

    fn most(&self) -> Option<usize> {
        self.most
    }

    fn counts(&self) -> PageCounts {
        let state = self.state();
        let total = self.most.unwrap_or(state.owned + state.returned.len());
        PageCounts { total, free: total - state.owned, used: state.owned }
    }

    fn memory_left(&self) -> Option<u64> {
        memory_left()
    }

    fn restore(&self, bytes: &[u8]) -> Result<Piece> {
        let (mut memory, _) = self.take()?;
        memory.copy_from_slice(bytes);
        Ok(self.owned(memory).piece())
    }
}

/// Returns the number of pages of `page` bytes that a budget in bytes holds.
///
/// # Errors
/// It holds none.
pub fn pages_within(page: u64, budget: u64) -> Result<usize> {
    match budget / page.max(1) {
        0 => Err(Error::new(Cause::OutOfMemory(format!(
            "--kv-memory: found {}, expected at least {} for one page of {PAGE} positions",
            human_bytes(budget),
            human_bytes(page)
        )))
        .help("raise --kv-memory, or use a narrower type (`--kv int8`)")),
        pages => Ok(usize::try_from(pages).unwrap_or(usize::MAX)),
    }
}

/// Returns the error of a pool all `owned` pages of whose budget are in use.
pub fn exhausted(owned: usize, page_bytes: u64) -> Error {
    let bytes = human_bytes(owned as u64 * page_bytes);
    Error::new(Cause::OutOfMemory(format!(
        "the KV cache is full: all {owned} pages of {PAGE} positions ({bytes}) are in use"
    )))
    .help("raise --kv-memory, or use a smaller batch, a shorter context (--ctx) or a narrower type (`--kv int8`)")
}

fn out_of_memory(owned: usize, page_bytes: u64) -> Error {
    let bytes = human_bytes(owned as u64 * page_bytes);
    Error::new(Cause::OutOfMemory(format!(
        "no memory for the KV cache beyond {owned} pages of {PAGE} positions ({bytes})"
    )))
    .help("use a shorter context (--ctx), a smaller batch or a narrower KV cache (`--kv int8`)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::runtime::kv::{KvCache, KvHeads, KvType};

    fn layout() -> KvLayout {
        KvLayout::new(KvType::F16, [KvHeads::new(1, 2)])
    }

    #[test]
    fn every_page_is_free_used_or_refused_and_never_lost() {
        let pool = PagePool::new(layout(), Some(7)).unwrap();
        let mut rng = Rng::new(3);
        let mut caches: Vec<KvCache> = Vec::new();
        let mut refused = 0;
        for _ in 0..2000 {
            let pick = rng.next_u64() as usize % caches.len().max(1);
            match rng.next_u64() % 4 {
                0 => caches.push(KvCache::new(&pool)),
                1 if !caches.is_empty() => caches.push(caches[pick].clone()),
                2 if !caches.is_empty() => drop(caches.swap_remove(pick)),
                _ if !caches.is_empty() => {
                    let before = (caches[pick].pages().len(), pool.counts());
                    if caches[pick].grow(rng.next_u64() as usize % 200).is_err() {
                        refused += 1;
                        assert_eq!((caches[pick].pages().len(), pool.counts()), before);
                    }
                }
                _ => {}
            }
            let mut distinct: Vec<*const Line> =
                caches.iter().flat_map(|cache| cache.pages().iter().map(|page| page.as_ptr())).collect();
            distinct.sort_unstable();
            distinct.dedup();
            let counts = pool.counts();
            assert_eq!((counts.total, counts.used, counts.free), (7, distinct.len(), 7 - distinct.len()));
        }
        assert!(refused > 0, "the budget was never reached");
    }

    #[test]
    fn a_budget_below_one_page_is_out_of_memory_and_tells_both_sizes() {
        let page = layout().bytes(PAGE);
        assert_eq!(pages_within(page, 7 * page + 5).unwrap(), 7);
        let error = pages_within(page, page - 1).unwrap_err();
        assert_eq!(error.cause().exit_code(), 6, "{error}");
        let pool = PagePool::new(layout(), Some(1)).unwrap();
        let _page = pool.page().unwrap();
        let error = pool.page().unwrap_err();
        assert!(error.cause().exit_code() == 6 && error.to_string().contains("all 1 pages of 128"), "{error}");
    }

    #[test]
    fn a_page_that_was_used_before_holds_zeros() {
        let pool = PagePool::new(layout(), Some(1)).unwrap();
        let mut page = pool.page().unwrap();
        bytemuck::cast_slice_mut::<Line, u8>(page.get_mut().unwrap()).fill(7);
        drop(page);
        let page = pool.page().unwrap();
        assert!(bytemuck::cast_slice::<Line, u8>(&page).iter().all(|byte| *byte == 0));
    }
}
