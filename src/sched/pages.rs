//! Accounting of the pages of the KV cache, and the interface to the prefix cache.

use super::{PAGE, RequestId};

/// Beginning of a sequence found in the prefix cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hit {
    /// Tokens whose keys and values are known. They may end within a page, which is then copied to a new one.
    pub tokens: u32,
    /// Full pages of these tokens that no sequence uses.
    pub idle: u32,
    /// Full pages of these tokens that other sequences use.
    pub shared: u32,
}

/// Pages of a sequence that are not free after it released them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Released {
    /// Pages that stay in the prefix cache and that no sequence uses.
    pub idle: u32,
    /// Pages that other sequences use.
    pub shared: u32,
    /// Pages that no sequence used and that left the prefix cache for the pages of this sequence.
    pub replaced: u32,
}

/// Prefix cache: which pages hold the beginning of a sequence, and which pages outlive their sequences.
///
/// The cache knows the tokens of a request from its caller, who registers them between `arrive` and the next `plan`.
pub trait PrefixCache {
    /// Finds the cached beginning of a request, at most `most` tokens, without a change of the cache.
    fn peek(&self, id: RequestId, most: u32) -> Hit;
    /// Adds at most `pages` pages of the first `most` tokens of a request from a slower storage. Returns their number;
    /// no sequence uses them yet.
    fn load(&mut self, id: RequestId, most: u32, pages: u32) -> u32 {
        let _ = (id, most, pages);
        0
    }
    /// Takes the pages that `peek` finds for the request; they are not evicted until it releases them.
    fn acquire(&mut self, id: RequestId, most: u32) -> Hit;
    /// Enters the full pages of the first `tokens` computed tokens of the request; the request still uses them. Of the
    /// `free` pages, the cache may take some for a snapshot of the state; returns their number.
    fn fill(&mut self, id: RequestId, tokens: u32, free: u32) -> u32;
    /// Returns the number of pages, free ones or of the cache, that the cache would best use for a snapshot of the
    /// request's state after its first `tokens` computed tokens, by `fill` or `share_tail`.
    fn wanted(&self, id: RequestId, tokens: u32) -> u32 {
        let _ = (id, tokens);
        0
    }
    /// Ends the use of all pages by the request.
    fn release(&mut self, id: RequestId) -> Released;
    /// Tests whether a request in the batch should wait because one of `others`, which are computed now, will soon add
    /// a longer beginning of the same prompt.
    fn awaits(&self, id: RequestId, others: &[RequestId]) -> bool {
        let _ = (id, others);
        false
    }
    /// Enters the last page of a prompt of `tokens` tokens, which is not full. The request then continues on a copy of
    /// it. Returns the number of the `free` pages that this takes; 0, without a change, if it takes more, or if the
    /// cache has no use for the page.
    fn share_tail(&mut self, id: RequestId, tokens: u32, free: u32) -> u32 {
        let _ = (id, tokens, free);
        0
    }
    /// Evicts at least `pages` pages that no sequence uses; there are as many. Returns the number of those evicted.
    fn evict(&mut self, pages: u32) -> u32;
    /// Counts the pages that no sequence uses.
    fn idle(&self) -> u32;
    /// Counts the uses of pages beyond the first use of each.
    fn repeated_uses(&self) -> u32;
}

/// Prefix cache that holds nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoCache;

impl PrefixCache for NoCache {
    fn peek(&self, _: RequestId, _: u32) -> Hit {
        Hit::default()
    }

    fn acquire(&mut self, _: RequestId, _: u32) -> Hit {
        Hit::default()
    }

    fn fill(&mut self, _: RequestId, _: u32, _: u32) -> u32 {
        0
    }

    fn release(&mut self, _: RequestId) -> Released {
        Released::default()
    }

    fn evict(&mut self, _: u32) -> u32 {
        0
    }

    fn idle(&self) -> u32 {
        0
    }

    fn repeated_uses(&self) -> u32 {
        0
    }
}

/// Numbers of pages by state; their sum is the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCounts {
    /// Pages without content.
    pub free: u32,
    /// Pages that at least one sequence uses.
    pub used: u32,
    /// Pages of the prefix cache that no sequence uses. They are evicted when a sequence needs them.
    pub cached: u32,
}

impl PageCounts {
    /// Counts the pages that a sequence can get without preemption.
    pub fn available(&self) -> u32 {
        self.free + self.cached
    }
}

/// Counts the pages that `tokens` positions need.
pub fn pages_of(tokens: u32) -> u32 {
    tokens.div_ceil(PAGE)
}

/// Pages and prefix cache.
#[derive(Debug)]
pub struct Pool<C> {
    pub counts: PageCounts,
    /// Pages that each sequence takes besides those of its positions.
    fixed: u32,
    pub cache: C,
}

impl<C: PrefixCache> Pool<C> {
    /// Creates a pool of `pages` pages, some of which the cache may hold already. Each sequence takes `fixed` pages
    /// besides those of its positions.
    pub fn new(pages: u32, fixed: u32, cache: C) -> Pool<C> {
        let cached = cache.idle();
        Pool { counts: PageCounts { free: pages - cached, used: 0, cached }, fixed, cache }
    }

    /// Takes `pages` new pages, for which cached ones are evicted. Returns false, without a change, if too few are
    /// available.
    pub fn take(&mut self, pages: u32) -> bool {
        if pages > self.counts.available() {
            return false;
        }
        let missing = pages.saturating_sub(self.counts.free);
        if missing > 0 {
            let evicted = self.cache.evict(missing);
            self.counts.cached -= evicted;
            self.counts.free += evicted;
        }
        self.counts.free -= pages;
        self.counts.used += pages;
        true
    }

    /// Gives a sequence the pages of its state of fixed size and `pages` pages of positions, of which the cached
    /// beginning is taken from the cache. The caller has compared the number of available pages.
    pub fn admit(&mut self, id: RequestId, most: u32, pages: u32) -> Hit {
        let loaded = self.cache.load(id, most, self.counts.free);
        self.counts.free -= loaded;
        self.counts.cached += loaded;
        let hit = self.cache.acquire(id, most);
        self.counts.cached -= hit.idle;
        self.counts.used += hit.idle;
        let taken = self.take(self.fixed + pages - hit.idle - hit.shared);
        assert!(taken, "the caller has compared the number of available pages");
        hit
    }

    /// Searches the cache again for a sequence of `pages` pages whose computation has not begun.
    pub fn renew(&mut self, id: RequestId, most: u32, pages: u32) -> Hit {
        self.release(id, pages);
        self.admit(id, most, pages)
    }

    /// Frees pages of the cache as far as a snapshot of the state of a sequence takes them.
    fn make_room(&mut self, id: RequestId, tokens: u32) {
        let missing = self.cache.wanted(id, tokens).saturating_sub(self.counts.free);
        if (1..=self.counts.cached).contains(&missing) {
            let evicted = self.cache.evict(missing);
            self.counts.cached -= evicted;
            self.counts.free += evicted;
        }
    }

    /// Puts the full pages of `tokens` computed tokens of a sequence into the cache.
    pub fn fill(&mut self, id: RequestId, tokens: u32) {
        self.make_room(id, tokens);
        let taken = self.cache.fill(id, tokens, self.counts.free);
        self.counts.free -= taken;
        self.counts.cached += taken;
    }

    /// Puts the last page of a prompt into the cache if a page is free for the copy on which the sequence continues.
    pub fn share_tail(&mut self, id: RequestId, tokens: u32) {
        self.make_room(id, tokens);
        let taken = self.cache.share_tail(id, tokens, self.counts.free);
        self.counts.free -= taken;
        self.counts.cached += taken;
    }

    /// Takes back the pages of a sequence, of which `pages` hold positions.
    pub fn release(&mut self, id: RequestId, pages: u32) {
        let pages = pages + self.fixed;
        let kept = self.cache.release(id);
        self.counts.used -= pages - kept.shared;
        self.counts.cached += kept.idle;
        self.counts.cached -= kept.replaced;
        self.counts.free += pages - kept.shared - kept.idle + kept.replaced;
    }

    /// Evicts all pages that no sequence uses; returns false if there are none.
    pub fn clear_cache(&mut self) -> bool {
        let pages = self.cache.evict(self.counts.cached);
        self.counts.cached -= pages;
        self.counts.free += pages;
        pages > 0
    }
}
