//! Prefix cache of an engine: keeps the keys and values of texts, so that a text that begins like an earlier one is
//! computed from the first difference on.
//!
//! A hit has the bits of a new computation, because results on the CPU do not depend on how a text is divided into
//! steps. Keys and values depend on more than the tokens; all of it is in the [`Key`] of the tree that is searched.

use super::engine::Engine;
use super::kv::{KvCache, Page, PageCounts};
use super::radix::{Hit, Key, RadixTree};
use super::sequence::Sequence;
use crate::model_config::{Mlp, ModelConfig, RopeScaling};
use crate::resources::memory_left;
use crate::sha256::{Digest, Sha256};

/// Version of the arithmetic that computes keys and values. It increases when the same pack gives other bits.
const ARITHMETIC: u32 = 1;

/// Largest size in bytes of a prefix cache in a pool without a budget.
const LARGEST: u64 = 2 << 30;

/// Cached beginnings of texts.
#[derive(Debug)]
pub(super) struct PrefixCache {
    tree: RadixTree,
    /// Digest of the pack.
    pack: String,
    /// Largest number of pages in the tree; `None` = the pool's budget is the only limit.
    most: Option<usize>,
}

impl PrefixCache {
    /// Releases the page that is cheapest to compute again; returns false if there is none.
    pub(super) fn evict(&mut self) -> bool {
        self.tree.evict()
    }
}

impl Engine {
    /// Enables the prefix cache. `pack` is the digest of the pack. The cache takes pages that no sequence uses and
    /// returns them when a sequence needs memory; without a budget (`--kv-memory`) it holds at most a quarter of the
    /// memory that is left now, and 2 GiB. Returns false if layers are on another device than the CPU, where a hit
    /// would not have the same bits as a new computation.
    pub fn enable_prefix_cache(&mut self, pack: &str) -> bool {
        let Some(caches) = self.empty_caches() else { return false };
        let bounded = caches.iter().all(|cache| cache.pool().most().is_some());
        let page: u64 = caches.iter().map(|cache| cache.pool().page_bytes()).sum();
        let bytes = memory_left().map_or(LARGEST, |left| (left / 4).min(LARGEST));
        let most = if bounded { None } else { Some((bytes / page.max(1)) as usize * caches.len()) };
        let tree = RadixTree::new(attention_cost(self.config()));
        self.prefix_cache = Some(PrefixCache { tree, pack: pack.to_string(), most });
        true
    }

    /// Returns true if the prefix cache is enabled.
    pub fn caches_prefixes(&self) -> bool {
        self.prefix_cache.is_some()
    }

    /// Counts the KV pages of the CPU in each state; all are 0 if layers are on another device.
    pub fn kv_pages(&self) -> PageCounts {
        let mut sum = PageCounts::default();
        for (part, cache) in self.empty_caches().unwrap_or_default().iter().enumerate() {
            let cached = self.prefix_cache.as_ref().map_or(0, |prefixes| prefixes.tree.own_pages(part));
            let counts = cache.pool().counts(cached);
            sum.total += counts.total;
            sum.free += counts.free;
            sum.used += counts.used;
            sum.cached += counts.cached;
        }
        sum
    }

    /// Returns a sequence that has read the longest known beginning of a prompt, except its last token, whose logits
    /// are needed. Texts with another salt are not searched.
    pub(super) fn find_prefix(&mut self, prompt: &[u32], salt: &[u8]) -> Option<Sequence> {
        let limit = self.longrope_limit();
        let long = limit.is_some_and(|limit| prompt.len() > limit);
        let key = self.prefix_key(long, salt)?;
        let prompt = &prompt[..prompt.len().saturating_sub(1)];
        let Hit { tokens: len, parts } = self.prefix_cache.as_mut()?.tree.find(&key, prompt)?;
        let mut sequence = self.new_sequence().ok()?;
        for (cache, pages) in sequence.caches.iter_mut().zip(parts) {
            cache.get_mut::<KvCache>().share(pages, len);
        }
        let tokens = if limit.is_some() { prompt[..len].to_vec() } else { Vec::new() };
        Some(Sequence { len, long, tokens, ..sequence })
    }

    /// Keeps the pages of a sequence that has read `ids`.
    pub(super) fn keep_prefix(&mut self, ids: &[u32], salt: &[u8], sequence: &Sequence) {
        debug_assert_eq!(ids.len(), sequence.len());
        let Some(key) = self.prefix_key(sequence.long, salt) else { return };
        let Some(prefixes) = &mut self.prefix_cache else { return };
        let parts: Option<Vec<&[Page]>> =
            sequence.caches.iter().map(|cache| Some(cache.get::<KvCache>()?.pages())).collect();
        let Some(parts) = parts else { return };
        prefixes.tree.insert(&key, ids, &parts);
        while prefixes.most.is_some_and(|most| prefixes.tree.pages() > most) {
            prefixes.tree.evict();
        }
    }

    /// Returns the digest of all that keys and values depend on besides the tokens: the pack, the arithmetic, the
    /// number types, the rotation factors; and of the salt. `None` without a prefix cache.
    fn prefix_key(&self, long: bool, salt: &[u8]) -> Option<Key> {
        let mut hasher = Sha256::new();
        let (precision, kv) = (self.precision().to_string(), self.kv_type().to_string());
        let fields: [(&str, &[u8]); 6] = [
            ("pack", self.prefix_cache.as_ref()?.pack.as_bytes()),
            ("arithmetic", &ARITHMETIC.to_le_bytes()),
            ("precision", precision.as_bytes()),
            ("kv", kv.as_bytes()),
            ("long", &[u8::from(long)]),
            ("salt", salt),
        ];
        // With names and lengths, no two lists of fields have the same bytes.
        for (name, value) in fields {
            hasher.update(name);
            hasher.update((value.len() as u64).to_le_bytes());
            hasher.update(value);
        }
        Some(hasher.finalize().into())
    }

    fn longrope_limit(&self) -> Option<usize> {
        match self.config().rope.scaling {
            RopeScaling::LongRope { original_max_position, .. } => Some(original_max_position),
            _ => None,
        }
    }

    /// Returns an empty KV cache of each part; `None` if a part is on another device than the CPU.
    fn empty_caches(&self) -> Option<Vec<KvCache>> {
        let sequence = self.new_sequence().ok()?;
        sequence.caches.iter().map(|cache| cache.get::<KvCache>().cloned()).collect()
    }
}

/// Returns the cost of attention to one position, relative to that of a token's matrix products.
fn attention_cost(c: &ModelConfig) -> f64 {
    let (q, kv) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
    let mlp = |mlp: Mlp| match mlp {
        Mlp::Dense { intermediate, .. } => intermediate,
        Mlp::Moe { top_k, intermediate, .. } => top_k * intermediate,
    };
    let mlp = c.mlps().map(mlp).max().unwrap_or(0);
    2.0 * q as f64 / (c.hidden * (2 * q + 2 * kv + 3 * mlp)) as f64
}
