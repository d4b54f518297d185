//! Model of a prefix cache: a table of hashes of pages, least recently used pages evicted first.
//!
//! A prompt consists of a shared text at its head (number and length) and a rest of its own, so the hash of a page
//! follows from the numbers of both without any tokens.

use crate::sched::{Hit, PAGE, PrefixCache, Released, RequestId};
use std::collections::{HashMap, VecDeque};

/// Head of a prompt, shared by all requests with the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Number of the text, different for each adapter and each group of keys that may share pages.
    pub text: u64,
    /// Tokens of the head.
    pub tokens: u32,
}

/// Page of the cache.
#[derive(Debug)]
struct CachePage {
    uses: u32,
    /// Time of the last release, as a count of releases.
    released: u64,
}

/// Hash that identifies the content of a page and of all pages before it.
type Hash = u64;

/// Prefix cache of the simulation.
#[derive(Debug, Default)]
pub struct BlockCache {
    blocks: HashMap<Hash, CachePage>,
    heads: HashMap<RequestId, Head>,
    /// Pages that running requests hold, in the order of positions, and how many of their pages were entered.
    held: HashMap<RequestId, (Vec<Hash>, u32)>,
    /// Released pages in the order of release. Entries of pages that were used again are out of date.
    order: VecDeque<(Hash, u64)>,
    clock: u64,
    idle: u32,
    repeated: u32,
}

impl BlockCache {
    /// Registers the head of a request's prompt.
    pub fn register(&mut self, id: RequestId, head: Head) {
        self.heads.insert(id, head);
    }

    /// Removes a request that ended.
    pub fn forget(&mut self, id: RequestId) {
        self.heads.remove(&id);
    }

    /// Returns the hash of page `page` of a request.
    fn hash(&self, id: RequestId, page: u32) -> Hash {
        let head = self.heads.get(&id).filter(|head| (page + 1) * PAGE <= head.tokens);
        let (kind, text) = head.map_or((1, id), |head| (2, head.text));
        let mixed = (text ^ (kind << 62)).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(page);
        let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed ^ (mixed >> 32)
    }

    /// Returns the cached pages at the beginning of a request of at most `most` tokens.
    fn found(&self, id: RequestId, most: u32) -> Vec<Hash> {
        (0..most / PAGE).map(|page| self.hash(id, page)).take_while(|hash| self.blocks.contains_key(hash)).collect()
    }

    fn hit(&self, found: &[Hash]) -> Hit {
        let idle = found.iter().filter(|hash| self.blocks[hash].uses == 0).count() as u32;
        let pages = found.len() as u32;
        Hit { tokens: pages * PAGE, idle, shared: pages - idle }
    }
}

impl PrefixCache for BlockCache {
    fn peek(&self, id: RequestId, most: u32) -> Hit {
        self.hit(&self.found(id, most))
    }

    fn acquire(&mut self, id: RequestId, most: u32) -> Hit {
        let found = self.found(id, most);
        let hit = self.hit(&found);
        for hash in &found {
            self.blocks.entry(*hash).and_modify(|block| block.uses += 1);
        }
        self.idle -= hit.idle;
        self.repeated += hit.shared;
        let entered = found.len() as u32;
        self.held.insert(id, (found, entered));
        hit
    }

    fn fill(&mut self, id: RequestId, tokens: u32, _free: u32) -> u32 {
        let from = self.held.get(&id).map_or(0, |(_, entered)| *entered);
        let new: Vec<Hash> = (from..tokens / PAGE).map(|page| self.hash(id, page)).collect();
        if new.is_empty() {
            return 0;
        }
        let (held, entered) = self.held.entry(id).or_default();
        *entered = tokens / PAGE;
        for hash in new {
            // A page that another sequence has entered meanwhile stays a private copy of this one.
            self.blocks.entry(hash).or_insert_with(|| {
                held.push(hash);
                CachePage { uses: 1, released: 0 }
            });
        }
        0
    }

    fn release(&mut self, id: RequestId) -> Released {
        let mut released = Released::default();
        let (held, _) = self.held.remove(&id).unwrap_or_default();
        // The last pages of a sequence are released first, so that they are evicted before those they depend on.
        for hash in held.into_iter().rev() {
            let Some(block) = self.blocks.get_mut(&hash) else { continue };
            block.uses -= 1;
            if block.uses > 0 {
                released.shared += 1;
                continue;
            }
            self.clock += 1;
            block.released = self.clock;
            self.order.push_back((hash, self.clock));
            released.idle += 1;
        }
        self.idle += released.idle;
        self.repeated -= released.shared;
        released
    }

    fn awaits(&self, id: RequestId, others: &[RequestId]) -> bool {
        let Some(own) = self.heads.get(&id) else { return false };
        let known = self.found(id, own.tokens).len() as u32;
        let same = |other: &RequestId| self.heads.get(other).is_some_and(|other| other.text == own.text);
        known < own.tokens / PAGE && others.iter().any(same)
    }

    fn evict(&mut self, pages: u32) -> u32 {
        let mut left = pages;
        while left > 0
            && let Some((hash, released)) = self.order.pop_front()
        {
            if self.blocks.get(&hash).is_some_and(|block| block.uses == 0 && block.released == released) {
                self.blocks.remove(&hash);
                left -= 1;
            }
        }
        self.idle -= pages - left;
        pages - left
    }

    fn idle(&self) -> u32 {
        self.idle
    }

    fn repeated_uses(&self) -> u32 {
        self.repeated
    }
}
