//! Prefix cache of an engine: keeps the keys and values of texts, so that a text that begins like an earlier one is
//! computed from the first difference on.
//!
//! A hit has the bits of a new computation, because results on the CPU do not depend on how a text is divided into
//! steps. Keys and values depend on more than the tokens; all of it is in the [`Key`] of the tree that is searched.

pub mod radix;
mod store;

pub use store::{DiskCounts, Saved, page_content};

use super::engine::Engine;
use super::kv::{KvCache, PAGE, Page, PageCounts, PagePool};
use super::sequence::Sequence;
use crate::error::Result;
use crate::model_config::{Mlp, ModelConfig, RopeScaling};
use crate::resources::memory_left;
use crate::sha256::{Digest, Sha256};
use radix::{Hit, Key, RadixTree};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use store::{PageName, PagePlace, PrefixStore};

/// Version of the arithmetic that computes keys and values. It increases when the same pack gives other bits.
const ARITHMETIC: u32 = 2;

/// Largest size in bytes of a prefix cache in a pool without a budget.
const LARGEST: u64 = 2 << 30;

/// Cached beginnings of texts.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    pub tree: RadixTree,
    /// Hash of all that keys and values depend on besides tokens and salt, except the rotation of long texts.
    hash: Sha256,
    /// Length of a text up to which LongRoPE rotates with the factors of short texts.
    short: Option<usize>,
    /// Largest number of nodes of the tree; `None` = the pool's budget is the only limit.
    pub most: Option<usize>,
    /// Pages on disk.
    store: Option<PrefixStore>,
    pools: Vec<Arc<PagePool>>,
}

impl PrefixCache {
    /// Returns the digest of all that keys and values of a text depend on besides its tokens, and of the salt. `len` is
    /// the length of the text.
    pub fn key(&self, len: usize, salt: &[u8]) -> Key {
        let mut hash = self.hash.clone();
        let long = self.short.is_some_and(|short| len > short);
        add_field(&mut hash, "long", &[u8::from(long)]);
        add_field(&mut hash, "salt", salt);
        hash.finalize().into()
    }

    /// Returns the numbers of pages on disk by what happened to them; `None` if none are kept there.
    pub fn disk_counts(&self) -> Option<DiskCounts> {
        self.store.as_ref().map(|store| store.counts)
    }

    /// Returns true if a text that grows from `len` to `end` tokens gets other keys and values on the way.
    pub fn changes(&self, len: usize, end: usize) -> bool {
        self.short.is_some_and(|short| len <= short && end > short)
    }

    /// Reads at most `pages` pages of the beginning of `ids` from disk into the tree. Returns their number.
    pub fn load(&mut self, key: &Key, ids: &[u32], pages: usize) -> usize {
        let Some(store) = &mut self.store else { return 0 };
        let room = self.most.map_or(usize::MAX, |most| most.saturating_sub(self.tree.len()));
        let known = self.tree.find(key, ids);
        let known = known.full();
        let (mut before, mut name, mut loaded, mut damaged) = (known.last().copied(), PageName::default(), 0, false);
        for (i, tokens) in ids.chunks_exact(PAGE).enumerate() {
            let place = PagePlace { key, before: name, tokens };
            name = place.name();
            if i < known.len() {
                continue;
            }
            if damaged {
                // It is computed again with the page before it, and written.
                store.remove(&name);
                continue;
            }
            let is_there = store.has(&name);
            if loaded == pages.min(room) || !is_there {
                store.counts.miss += usize::from(!is_there);
                break;
            }
            // Without memory for a page, the text is computed.
            let parts = self.pools.iter().map(|pool| pool.page()).collect::<Result<Vec<Page>>>();
            let Ok(mut parts) = parts else { break };
            if !store.read(&place, &mut parts) {
                damaged = true;
                continue;
            }
            before = Some(self.tree.restore(key, before, i, tokens, parts));
            loaded += 1;
        }
        loaded
    }

    /// Writes full pages to disk that were not written before, at most `most` of them. A page that left the directory
    /// because of its limit is not written again.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn save(&mut self, most: usize) -> Result<Saved> {
        let (mut saved, mut names, mut written) = (Saved::default(), HashMap::new(), Vec::new());
        let Some(store) = &mut self.store else { return Ok(saved) };
        let result = self.tree.visit_full(|page| {
            let before = page.before.map_or(PageName::default(), |before| names[&before]);
            let place = PagePlace { key: page.key, before, tokens: page.tokens };
            names.insert(page.node, place.name());
            if !page.saved && saved.written < most {
                store.write(&place, page.parts, &mut saved)?;
                written.push(page.node);
            }
            Ok(())
        });
        written.into_iter().for_each(|node| self.tree.set_saved(node));
        result.map(|()| saved)
    }
}

/// Adds a field with its name and length, so that no two lists of fields have the same bytes.
fn add_field(hash: &mut Sha256, name: &str, value: &[u8]) {
    hash.update(name);
    hash.update((value.len() as u64).to_le_bytes());
    hash.update(value);
}

impl Engine {
    /// Enables the prefix cache. `pack` is the digest of the pack. The cache takes pages that no sequence uses and
    /// returns them when a sequence needs memory; without a budget (`--kv-memory`) it holds at most a quarter of the
    /// memory that is left now, and 2 GiB. Returns false if layers are on another device than the CPU, where a hit
    /// would not have the same bits as a new computation.
    pub fn enable_prefix_cache(&mut self, pack: &str) -> bool {
        let Some(pools) = self.page_pools() else { return false };
        let bounded = pools.iter().all(|pool| pool.most().is_some());
        let page: u64 = pools.iter().map(|pool| pool.page_bytes()).sum();
        let bytes = prefix_cache_bytes(memory_left());
        let (precision, kv) = (self.precision().to_string(), self.kv_type().to_string());
        let mut hash = Sha256::new();
        add_field(&mut hash, "pack", pack.as_bytes());
        add_field(&mut hash, "arithmetic", &ARITHMETIC.to_le_bytes());
        add_field(&mut hash, "precision", precision.as_bytes());
        add_field(&mut hash, "kv", kv.as_bytes());
        add_field(&mut hash, "attention", self.attention().name().as_bytes());
        add_field(&mut hash, "isa", self.isa().as_bytes());
        self.prefix_cache = Some(PrefixCache {
            tree: RadixTree::new(attention_cost(self.config())),
            hash,
            short: match self.config().rope.scaling {
                RopeScaling::LongRope { original_max_position, .. } => Some(original_max_position),
                _ => None,
            },
            most: (!bounded).then_some((bytes / page.max(1)) as usize),
            store: None,
            pools,
        });
        true
    }

    /// Lets the prefix cache, which must be enabled, read pages from the directory `state`, in which
    /// [`Engine::save_prefixes`] keeps at most `limit` bytes.
    ///
    /// # Errors
    /// The directory cannot be created or read.
    pub fn keep_prefixes_in(&mut self, state: &Path, limit: u64) -> Result<()> {
        if let Some(prefixes) = &mut self.prefix_cache {
            prefixes.store = Some(PrefixStore::open(state, limit)?);
        }
        Ok(())
    }

    /// Writes the full pages of the prefix cache that were not written before to the directory of
    /// [`Engine::keep_prefixes_in`]. Pages that were used least recently leave it when it is full.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn save_prefixes(&mut self) -> Result<Saved> {
        self.prefix_cache.as_mut().map_or(Ok(Saved::default()), |prefixes| prefixes.save(usize::MAX))
    }

    /// Counts the KV pages of the CPU in each state; all are 0 if layers are on another device. Pages of a running
    /// [`Batch`](crate::generate::Batch) count as used, and so do those of its prefix cache.
    pub fn kv_pages(&self) -> PageCounts {
        let cached = self.prefix_cache.as_ref().map_or(0, |prefixes| prefixes.tree.len());
        let mut sum = PageCounts::default();
        for pool in self.page_pools().unwrap_or_default() {
            let counts = pool.counts(cached);
            sum.total += counts.total;
            sum.free += counts.free;
            sum.used += counts.used;
            sum.cached += counts.cached;
        }
        sum
    }

    /// Returns a sequence that has read `hit`, the beginning of a text of `len` tokens `ids`.
    pub(crate) fn sequence_of(&self, hit: &Hit, parts: Vec<Vec<Page>>, ids: &[u32]) -> Result<Sequence> {
        let mut sequence = self.new_sequence()?;
        for (cache, pages) in sequence.caches.iter_mut().zip(parts) {
            cache.get_mut::<KvCache>().share(pages, hit.tokens);
        }
        sequence.len = hit.tokens;
        if let RopeScaling::LongRope { original_max_position, .. } = self.config().rope.scaling {
            sequence.long = ids.len() > original_max_position;
            sequence.tokens = ids[..hit.tokens].to_vec();
        }
        Ok(sequence)
    }

    /// Returns the pool of KV pages of each part; `None` if a part is on another device than the CPU.
    pub(crate) fn page_pools(&self) -> Option<Vec<Arc<PagePool>>> {
        let sequence = self.new_sequence().ok()?;
        sequence.caches.iter().map(|cache| cache.get::<KvCache>().map(|cache| cache.pool().clone())).collect()
    }
}

impl Sequence {
    /// Returns the KV pages of each part; `None` if a part is on another device than the CPU.
    pub(crate) fn pages(&self) -> Option<Vec<Vec<Page>>> {
        self.caches.iter().map(|cache| Some(cache.get::<KvCache>()?.pages().to_vec())).collect()
    }
}

/// Returns the largest size in bytes of a prefix cache in a pool without a budget, if `left` bytes of memory are left.
pub fn prefix_cache_bytes(left: Option<u64>) -> u64 {
    left.map_or(LARGEST, |left| (left / 4).min(LARGEST))
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
