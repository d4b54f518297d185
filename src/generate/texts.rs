//! Prefix cache of a batch: the scheduler's view of the radix tree.
//!
//! The scheduler counts pages and knows requests by number only. This module knows the tokens of each request, and
//! which nodes of the tree its sequence uses. The batch passes the state of a sequence before each outcome that may add
//! it.

use crate::runtime::kv::PAGE;
use crate::runtime::prefix_cache::PrefixCache;
use crate::runtime::prefix_cache::radix::{Hit, Key, NodeId};
use crate::runtime::sequence::SharedState;
use crate::sched::{self, RequestId};
use std::collections::HashMap;

/// Number of tokens that another text must be about to add to the prefix cache for a text to wait for them, and that a
/// snapshot must save a later text for it to be made.
const WORTHWHILE: usize = 32;

/// Texts of a batch and their use of the prefix cache.
#[derive(Debug, Default)]
pub(super) struct Texts<'a> {
    /// The prefix cache, if the batch has one.
    pub prefixes: Option<&'a mut PrefixCache>,
    texts: HashMap<RequestId, Text>,
    /// Number of cached texts of which no token has been computed yet.
    unstarted: usize,
}

#[derive(Debug)]
struct Text {
    /// Tree that is searched; `None` if the text is not cached.
    key: Option<Key>,
    salt: Vec<u8>,
    /// Tokens of prompt and answer, as far as they were passed.
    ids: Vec<u32>,
    /// Number of tokens of the prompt.
    prompt: usize,
    /// Number of tokens at the beginning that the sequence held when its state was passed.
    read: usize,
    /// Number of tokens at the beginning that the request's own sequence has read.
    known: usize,
    started: bool,
    /// Whether the tree is searched for the text, as opposed to only extended by it.
    reads: bool,
    /// Nodes of the tree that the sequence uses: those of its first pages.
    held: Vec<NodeId>,
    /// Whether all full pages of the sequence are in the tree.
    whole: bool,
    /// Known beginning that was found when the text entered the batch.
    hit: Option<(Hit, SharedState)>,
    /// State of the sequence, passed for the next outcome.
    state: Option<SharedState>,
}

impl<'a> Texts<'a> {
    /// Creates the view of a prefix cache.
    pub fn new(prefixes: Option<&'a mut PrefixCache>) -> Texts<'a> {
        Texts { prefixes, ..Texts::default() }
    }

    /// Adds a request with its prompt, of which its own sequence has read `known` tokens. `longest` is the largest
    /// number of tokens of prompt and answer; `reads` is false if the tree is not searched for it.
    pub fn add(&mut self, id: RequestId, ids: &[u32], salt: &[u8], known: usize, longest: usize, reads: bool) {
        let cached = self.prefixes.as_ref().filter(|prefixes| !prefixes.changes(ids.len(), longest));
        let key = cached.map(|prefixes| prefixes.key(ids.len(), salt));
        let (ids, salt) = if key.is_some() { (ids.to_vec(), salt.to_vec()) } else { (Vec::new(), Vec::new()) };
        let (held, hit, state, prompt) = (Vec::new(), None, None, ids.len());
        self.unstarted += usize::from(key.is_some());
        let (read, started, whole) = (0, false, true);
        let text = Text { key, salt, ids, prompt, read, known, started, reads, held, whole, hit, state };
        self.texts.insert(id, text);
    }

    /// Removes a request that ended.
    pub fn remove(&mut self, id: RequestId) {
        let unstarted = self.texts.remove(&id).is_some_and(|text| text.key.is_some() && !text.started);
        self.unstarted -= usize::from(unstarted);
    }

    /// Passes the tokens that a sequence has read, with its state and the number of them that it holds.
    pub fn pass(&mut self, id: RequestId, ids: &[u32], state: impl FnOnce() -> (SharedState, usize)) {
        if let Some(text) = self.texts.get_mut(&id)
            && text.key.is_some()
        {
            self.unstarted -= usize::from(!std::mem::replace(&mut text.started, true));
            // The rest of a prompt is still needed to search for it.
            if text.ids.len() < ids.len() {
                text.ids = ids.to_vec();
            }
            let (state, held) = state();
            (text.state, text.read) = (Some(state), held);
        }
    }

    /// Drops the state that was passed, so that the sequence is its only owner outside the tree.
    pub fn drop_state(&mut self, id: RequestId) {
        self.texts.get_mut(&id).into_iter().for_each(|text| text.state = None);
    }

    /// Returns what was found in the tree when the text entered the batch, once.
    pub fn take_hit(&mut self, id: RequestId) -> Option<(Hit, SharedState)> {
        self.texts.get_mut(&id)?.hit.take()
    }

    /// Searches the tree for at most `most` tokens of a text.
    fn find(&self, id: RequestId, most: u32) -> Option<(&Text, Hit)> {
        let (text, prefixes) = (self.texts.get(&id).filter(|text| text.reads)?, self.prefixes.as_ref()?);
        let hit = prefixes.tree.find(text.key.as_ref()?, &text.ids[..text.ids.len().min(most as usize)]);
        Some((text, hit))
    }

    /// Reports whether a snapshot of the state after `tokens` tokens is worth its memory: behind the last full page of
    /// a prompt that another text could reuse, and at its end, and between at distances that take as much memory as a
    /// snapshot. An answer gets one when it ends.
    fn is_worth_a_snapshot(text: &Text, prefixes: &PrefixCache, tokens: usize) -> bool {
        if tokens > text.prompt || tokens != text.read || !text.whole {
            return false;
        }
        let full = (tokens / PAGE).min(text.held.len());
        let is_known = |key| prefixes.tree.has_snapshot(key, &text.held[..full], &text.ids[..tokens]);
        if text.key.as_ref().is_none_or(is_known) {
            return false;
        }
        let known = tokens - full * PAGE + prefixes.tree.tokens_since_snapshot(&text.held[..full]);
        let is_last = tokens == text.prompt || tokens == (text.prompt - 1) / PAGE * PAGE;
        known >= if is_last { WORTHWHILE } else { prefixes.snapshot_pages * PAGE }
    }

    /// Evicts pages beyond the limit of a pool without a budget. Returns their number.
    fn shrink(&mut self) -> usize {
        let Some(prefixes) = &mut self.prefixes else { return 0 };
        let excess = prefixes.most.map_or(0, |most| prefixes.tree.pages().saturating_sub(most));
        prefixes.tree.evict_pages(excess)
    }
}

impl sched::PrefixCache for Texts<'_> {
    fn peek(&self, id: RequestId, most: u32) -> sched::Hit {
        let known = self.texts.get(&id).map_or(0, |text| text.known).min(most as usize);
        match self.find(id, most) {
            Some((_, hit)) if hit.tokens > known => {
                let tree = self.prefixes.as_ref().map(|prefixes| &prefixes.tree);
                let (full, idle) = (hit.full().len(), tree.map_or(0, |tree| tree.idle_among(hit.full())));
                sched::Hit { tokens: hit.tokens as u32, idle: idle as u32, shared: (full - idle) as u32 }
            }
            _ => sched::Hit { tokens: known as u32, idle: 0, shared: 0 },
        }
    }

    fn load(&mut self, id: RequestId, most: u32, pages: u32) -> u32 {
        let (Some(text), Some(prefixes)) = (self.texts.get(&id), &mut self.prefixes) else { return 0 };
        let Some(key) = text.key.as_ref().filter(|_| text.reads) else { return 0 };
        prefixes.load(key, &text.ids[..text.ids.len().min(most as usize)], pages as usize) as u32
    }

    fn acquire(&mut self, id: RequestId, most: u32) -> sched::Hit {
        let found = self.peek(id, most);
        let hit = self.find(id, most).map(|(_, hit)| hit).unwrap_or_default();
        let (Some(text), Some(prefixes)) = (self.texts.get_mut(&id), &mut self.prefixes) else { return found };
        (text.whole, text.hit) = (true, None);
        if hit.tokens > text.known.min(most as usize) {
            prefixes.tree.acquire(hit.full());
            text.held = hit.full().to_vec();
            let state = prefixes.tree.state_of(&hit);
            text.hit = Some((hit, state));
        }
        found
    }

    fn fill(&mut self, id: RequestId, tokens: u32, free: u32) -> u32 {
        let (Some(text), Some(prefixes)) = (self.texts.get_mut(&id), &mut self.prefixes) else { return 0 };
        let (Some(key), Some(state)) = (&text.key, &text.state) else { return 0 };
        let ids = &text.ids[..text.read.min(tokens as usize)];
        text.whole = text.whole && prefixes.tree.extend(key, &mut text.held, ids, state);
        let is_free = prefixes.snapshot_pages <= free as usize && ids.len() % PAGE == 0;
        match text.held.last() {
            Some(last) if is_free && Texts::is_worth_a_snapshot(text, prefixes, ids.len()) => {
                prefixes.tree.set_snapshot(*last, PAGE, state) as u32
            }
            _ => 0,
        }
    }

    fn wanted(&self, id: RequestId, tokens: u32) -> u32 {
        let (Some(text), Some(prefixes)) = (self.texts.get(&id), &self.prefixes) else { return 0 };
        let is_passed = prefixes.snapshot_pages > 0 && text.state.is_some();
        let is_wanted = is_passed && Texts::is_worth_a_snapshot(text, prefixes, tokens as usize);
        if is_wanted { 1 + prefixes.snapshot_pages as u32 } else { 0 }
    }

    fn release(&mut self, id: RequestId) -> sched::Released {
        let (Some(text), Some(prefixes)) = (self.texts.get_mut(&id), &mut self.prefixes) else {
            return sched::Released::default();
        };
        let (held, state) = (std::mem::take(&mut text.held), text.state.take());
        (text.hit, text.known) = (None, 0);
        let (added, replaced) = match (&text.key, state) {
            (Some(key), Some(state)) => prefixes.tree.insert(key, &text.ids[..text.read], &state),
            _ => (0, 0),
        };
        let idle = prefixes.tree.release(&held);
        let shrunk = self.shrink();
        sched::Released {
            idle: (idle + added) as u32,
            shared: (held.len() - idle) as u32,
            replaced: (replaced + shrunk) as u32,
        }
    }

    fn awaits(&self, id: RequestId, others: &[RequestId]) -> bool {
        let Some((text, hit)) = self.find(id, u32::MAX) else { return false };
        let reused = hit.tokens.max(text.known);
        let ids = &text.ids[..text.ids.len() - 1];
        let common = |other: &RequestId| match self.texts.get(other).filter(|other| other.salt == text.salt) {
            Some(other) if other.key.is_some() => other.ids.iter().zip(ids).take_while(|(a, b)| a == b).count(),
            _ => 0,
        };
        others.iter().any(|other| common(other) >= reused + WORTHWHILE)
    }

    fn share_tail(&mut self, id: RequestId, tokens: u32, free: u32) -> u32 {
        let (Some(text), Some(prefixes)) = (self.texts.get_mut(&id), &mut self.prefixes) else { return 0 };
        let (Some(key), Some(state), tokens) = (&text.key, &text.state, tokens as usize) else { return 0 };
        let full = text.whole && text.held.len() == tokens / PAGE && text.read == tokens;
        let is_wanted =
            self.unstarted > 0 || prefixes.snapshot_pages > 0 && Texts::is_worth_a_snapshot(text, prefixes, tokens);
        if !full || !is_wanted || 1 + prefixes.snapshot_pages > free as usize {
            return 0;
        }
        prefixes.tree.add_tail(key, &text.held, &text.ids[..tokens], state) as u32
    }

    fn evict(&mut self, pages: u32) -> u32 {
        let Some(prefixes) = &mut self.prefixes else { return 0 };
        let evicted = prefixes.tree.evict_pages(pages as usize);
        assert!(evicted >= pages as usize, "the scheduler counts unused pages");
        evicted as u32
    }

    fn idle(&self) -> u32 {
        self.prefixes.as_ref().map_or(0, |prefixes| prefixes.tree.idle() as u32)
    }

    fn repeated_uses(&self) -> u32 {
        self.prefixes.as_ref().map_or(0, |prefixes| prefixes.tree.repeated() as u32)
    }
}
