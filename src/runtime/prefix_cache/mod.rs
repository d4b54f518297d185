//! Prefix cache: keeps the states of texts, so that a text that begins like an earlier one is computed from the first
//! difference on.
//!
//! On the CPU, a hit has the bits of a new computation, because results do not depend on how a text is divided into
//! steps; on a GPU it has those of another division. States depend on more than the tokens; all of it is in the key
//! of the tree that is searched.

pub(crate) mod radix;
mod store;

pub use store::{DiskCounts, Saved, page_content};

use super::engine::Engine;
use super::kv::PAGE;
use super::state::StatePool;
use crate::error::Result;
use crate::model_config::{Mlp, ModelConfig, RopeScaling};
use crate::sha256::{Digest, Sha256};
use radix::{Key, RadixTree};
use std::collections::HashMap;
use std::path::Path;
use store::{PageName, PagePlace, PrefixStore};

/// Version of the arithmetic that computes keys and values. It increases when the same pack gives other bits.
const ARITHMETIC: u32 = 2;

/// Largest size in bytes of a prefix cache in a pool without a budget.
const LARGEST: u64 = 2 << 30;

/// Cached beginnings of texts.
#[derive(Debug)]
pub struct PrefixCache {
    pub(crate) tree: RadixTree,
    /// Hash of all that keys and values depend on besides tokens and salt, except the rotation of long texts.
    hash: Sha256,
    /// Length of a text up to which LongRoPE rotates with the factors of short texts.
    short: Option<usize>,
    /// Largest number of pages of the tree; `None` = the budgets of the pools are the only limit.
    pub(crate) most: Option<usize>,
    /// Pages on disk.
    store: Option<PrefixStore>,
    /// Memory of each part.
    pools: Vec<Box<dyn StatePool>>,
    /// Number of pages that a snapshot takes.
    pub(crate) snapshot_pages: usize,
}

impl PrefixCache {
    /// Creates an empty cache for an engine. `pack` is the digest of its pack. The cache takes pages that no sequence
    /// uses and returns them when a sequence needs memory; where the pages have no budget (`--kv-memory`) it takes at
    /// most a quarter of the memory that is left now, and 2 GiB.
    pub fn new(engine: &Engine, pack: &str) -> PrefixCache {
        let pools = engine.pools();
        let within = |pool: &dyn StatePool| {
            (prefix_cache_bytes(pool.memory_left()) / pool.page_bytes().max(1)).try_into().unwrap_or(usize::MAX)
        };
        let most = pools.iter().filter(|pool| pool.most().is_none()).map(|pool| within(&**pool)).min();
        let snapshot_pages = snapshot_pages(&pools);
        let mut hash = Sha256::new();
        add_field(&mut hash, "pack", pack.as_bytes());
        add_field(&mut hash, "arithmetic", &ARITHMETIC.to_le_bytes());
        let mut field = |name: &str, value: &str| add_field(&mut hash, name, value.as_bytes());
        field("precision", &engine.precision().to_string());
        field("kv", &engine.kv_type().to_string());
        field("attention", engine.attention().name());
        field("isa", engine.isa());
        for part in engine.parts() {
            if let Some(device) = part.device {
                field("layers", &format!("{:?}", part.layers));
                field("device", &format!("{} {} {:?}", device.kind, device.name, device.capability));
            }
        }
        PrefixCache {
            tree: RadixTree::new(attention_cost(engine.config()), snapshot_pages),
            hash,
            short: match engine.config().rope.scaling {
                RopeScaling::LongRope { original_max_position, .. } => Some(original_max_position),
                _ => None,
            },
            most,
            store: None,
            pools,
            snapshot_pages,
        }
    }

    /// Reads pages from the directory `state` from now on, in which [`PrefixCache::save`] keeps at most `limit` bytes.
    ///
    /// # Errors
    /// The directory cannot be created or read.
    pub fn keep_in(&mut self, state: &Path, limit: u64) -> Result<()> {
        self.store = Some(PrefixStore::open(state, limit)?);
        Ok(())
    }

    /// Removes all pages on disk.
    pub fn clear_disk(&mut self) {
        self.store.iter_mut().for_each(PrefixStore::clear);
    }

    /// Counts the pages of each part that the cache holds.
    pub fn pages(&self) -> usize {
        self.tree.pages()
    }

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
        let room = self.most.map_or(usize::MAX, |most| most.saturating_sub(self.tree.pages())).min(pages);
        let known = self.tree.find_pages(key, ids);
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
            if loaded + 1 + self.snapshot_pages > room || !is_there {
                store.counts.miss += usize::from(!is_there);
                break;
            }
            match store.read(&place, &self.pools) {
                Ok(Some(state)) => {
                    loaded += 1 + state.snapshots.len() * self.snapshot_pages;
                    before = Some(self.tree.restore(key, before, i, tokens, state));
                }
                Ok(None) => damaged = true,
                // Without memory for a page, the text is computed.
                Err(_) => break,
            }
        }
        loaded
    }

    /// Writes full pages that were not written before, at most `most` of them, to the directory of
    /// [`PrefixCache::keep_in`]; without one, none. Pages that were used least recently leave it when it is full, and
    /// are not written again.
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
                store.write(&place, page.state, &self.pools, &mut saved)?;
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

/// Returns the largest size in bytes of a prefix cache in a pool without a budget, if `left` bytes of memory are left.
pub fn prefix_cache_bytes(left: Option<u64>) -> u64 {
    left.map_or(LARGEST, |left| (left / 4).min(LARGEST))
}

/// Returns the number of pages that the memory of fixed size of a text takes of the budgets, 0 if it has none.
pub(crate) fn snapshot_pages(pools: &[Box<dyn StatePool>]) -> usize {
    let pages = pools.iter().map(|pool| pool.snapshot_bytes().div_ceil(pool.page_bytes().max(1)));
    pages.max().unwrap_or(0).try_into().unwrap_or(usize::MAX)
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
