//! Paged KV cache on a device. Pages of [`PAGE`] positions are shared between clones of a sequence until one of the
//! clones writes.
//!
//! Models with recurrent layers have a [`TextState`] beside the pages.
//!
//! For each layer of its part of the model and each key/value head, a page holds the keys position by position,
//! then the values.

use super::args;
use super::context::{Buffer, Context};
use super::states::{State, StateLayout, StateMemory, TextState};
use crate::error::{Error, Result};
use crate::runtime::kv::{KvLayer, KvLayout, KvType, PAGE, exhausted};
use crate::runtime::state::{Cache, PageCounts, PartCache, Piece, PieceMemory, StatePool};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// Pool of pages of one size; pages that are no longer used are recycled.
#[derive(Debug)]
pub struct Pool {
    context: Arc<Context>,
    layout: KvLayout,
    states: StateLayout,
    /// Largest number of pages.
    most: usize,
    pages: Mutex<PoolPages>,
}

#[derive(Debug, Default)]
struct PoolPages {
    /// Memory of pages that have no owner.
    free: Vec<Buffer>,
    /// Number of pages that have an owner.
    owned: usize,
    /// Memory of states that have no owner.
    free_states: Vec<Buffer>,
}

/// A page: shared ownership of the memory of [`PAGE`] positions.
#[derive(Debug, Clone)]
pub struct Page(Arc<Memory>);

#[derive(Debug)]
struct Memory {
    /// Memory of the page; `None` only while it is dropped.
    buffer: Option<Buffer>,
    pool: Arc<Pool>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mut pages = self.pool.pages();
        pages.owned -= 1;
        pages.free.extend(self.buffer.take());
    }
}

impl PieceMemory for Memory {
    fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        self.pool.context.enter()?;
        self.buffer().read().map(Cow::Owned)
    }
}

impl Memory {
    fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().expect("taken by drop only")
    }
}

impl Page {
    /// Returns true when the page belongs to this pool.
    pub fn is_of(&self, pool: &Arc<Pool>) -> bool {
        Arc::ptr_eq(&self.0.pool, pool)
    }

    /// Returns the device address.
    pub fn address(&self) -> u64 {
        self.0.buffer().address()
    }
}

/// State of one text: its pages, and what recurrent layers remember, if there are some.
#[derive(Debug, Clone, Default)]
pub struct TextCache {
    pub pages: Vec<Page>,
    pub state: Option<TextState>,
}

impl PartCache for TextCache {
    fn clone_cache(&self) -> Cache {
        Cache::new(self.clone())
    }

    fn mark(&mut self) {
        self.state.iter_mut().for_each(TextState::mark);
    }

    fn rewind(&mut self, len: usize) -> usize {
        let len = self.state.as_mut().map_or(len, |state| state.rewind(len));
        self.pages.truncate(len.div_ceil(PAGE));
        len
    }

    fn pages(&self) -> Vec<Piece> {
        self.pages.iter().map(|page| Piece::new(page.0.clone())).collect()
    }

    fn snapshot(&self) -> Option<Piece> {
        self.state.as_ref()?.snapshot().map(|state| Piece::new(state.0))
    }

    fn adopt(&mut self, pages: Vec<Piece>, snapshot: Option<Piece>, len: usize) {
        self.pages = pages.into_iter().map(|page| Page(page.memory())).collect();
        if let (Some(state), Some(snapshot)) = (&mut self.state, snapshot) {
            state.adopt(State(snapshot.memory::<StateMemory>()), len);
        }
    }
}

impl StatePool for Arc<Pool> {
    fn page_bytes(&self) -> u64 {
        Pool::page_bytes(&self.layout) as u64
    }

    fn snapshot_bytes(&self) -> u64 {
        self.state_bytes() as u64
    }

    fn most(&self) -> Option<usize> {
        Some(self.most)
    }

    fn counts(&self) -> PageCounts {
        let used = self.pages().owned;
        PageCounts { total: self.most, free: self.most - used, used }
    }

    fn memory_left(&self) -> Option<u64> {
        self.context.memory().ok().map(|(free, _)| free)
    }

    fn restore(&self, bytes: &[u8]) -> Result<Piece> {
        self.context.enter()?;
        if bytes.len() == self.state_bytes() {
            let state = self.state()?;
            state.0.buffer().write(bytes)?;
            return Ok(Piece::new(state.0));
        }
        let page = self.page()?;
        page.0.buffer().write(bytes)?;
        Ok(Piece::new(page.0))
    }
}

/// Returns the number and the name by which kernels identify an element type of the cache.
///
/// # Errors
/// No kernels exist for this type.
pub fn kind(kind: KvType) -> Result<(u32, &'static str)> {
    match kind {
        KvType::F32 => Ok((0, "f32")),
        KvType::F16 => Ok((1, "f16")),
        KvType::Bf16 => Ok((2, "bf16")),
        KvType::Int8 => Ok((3, "int8")),
        KvType::Fp8 | KvType::Int4 => Err(Error::engine(format!("a KV cache of {kind} is not available on a GPU"))
            .help("use --kv int8 or bf16, or --device cpu")),
    }
}

/// Numbers of a key or value that share a scale in a cache of int8.
pub const KV_BLOCK: usize = 32;

impl Pool {
    /// Creates a pool of at most `most` pages, which take memory from their first use on. `layout` is that of the
    /// layers on this device, `states` that of their recurrent layers.
    pub fn new(context: &Arc<Context>, layout: KvLayout, states: StateLayout, most: usize) -> Arc<Pool> {
        Arc::new(Pool { context: context.clone(), layout, states, most, pages: Mutex::default() })
    }

    /// Creates the state of an empty text.
    pub fn new_cache(&self) -> TextCache {
        TextCache { pages: Vec::new(), state: (self.states.bytes() > 0).then(TextState::default) }
    }

    /// Returns the places of recurrent layers in the state of a text.
    pub fn states(&self) -> &StateLayout {
        &self.states
    }

    /// Returns the bytes of the memory of a state; 0 without recurrent layers. Its size tells it from a page.
    fn state_bytes(&self) -> usize {
        let bytes = self.states.bytes();
        bytes + if bytes > 0 && bytes == Pool::page_bytes(&self.layout) { size_of::<f32>() } else { 0 }
    }

    /// Takes memory with arbitrary contents for a state.
    ///
    /// # Errors
    /// There is not enough device memory.
    pub(super) fn state(self: &Arc<Pool>) -> Result<State> {
        let free = self.pages().free_states.pop();
        let buffer = free.map_or_else(|| self.context.alloc(self.state_bytes()), Ok)?;
        Ok(State(Arc::new(StateMemory { buffer: Some(buffer), pool: self.clone() })))
    }

    /// Takes back the memory of a state.
    pub(super) fn give_state_back(&self, buffer: Option<Buffer>) {
        self.pages().free_states.extend(buffer);
    }

    /// Makes the device that of the calling thread.
    pub(super) fn enter(&self) -> Result<()> {
        self.context.enter()
    }

    fn pages(&self) -> MutexGuard<'_, PoolPages> {
        self.pages.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Returns the bytes of the keys and values of a layer in a page.
    fn layer_bytes(layer: &KvLayer) -> usize {
        let head = |dim: usize| match layer.kind {
            KvType::F32 => 4 * dim,
            KvType::Int8 => dim + 4 * dim.div_ceil(KV_BLOCK),
            _ => 2 * dim,
        };
        PAGE * layer.heads.count * (head(layer.heads.key) + head(layer.heads.value))
    }

    /// Returns the bytes of a page.
    pub fn page_bytes(layout: &KvLayout) -> usize {
        layout.layers().iter().map(Pool::layer_bytes).sum()
    }

    /// Makes room for positions that will be written. Pages that are shared with clones are copied first.
    ///
    /// # Errors
    /// There is not enough device memory; the contents of earlier positions stay.
    pub fn grow(self: &Arc<Pool>, cache: &mut TextCache, positions: Range<usize>) -> Result<()> {
        if let Some(state) = &mut cache.state {
            state.grow(self, positions.end)?;
        }
        let pages = &mut cache.pages;
        pages.truncate(positions.end.div_ceil(PAGE));
        for page in pages.iter_mut().skip(positions.start / PAGE) {
            if Arc::strong_count(&page.0) > 1 {
                let own = self.page()?;
                own.0.buffer().copy_from_device(page.0.buffer())?;
                *page = own;
            }
        }
        while pages.len() < positions.end.div_ceil(PAGE) {
            pages.push(self.page()?);
        }
        Ok(())
    }

    fn page(self: &Arc<Pool>) -> Result<Page> {
        let mut pages = self.pages();
        if pages.owned == self.most {
            return Err(exhausted(self.most, Pool::page_bytes(&self.layout) as u64));
        }
        let buffer = match pages.free.pop() {
            Some(buffer) => buffer,
            None => self.context.alloc(Pool::page_bytes(&self.layout))?,
        };
        pages.owned += 1;
        Ok(Page(Arc::new(Memory { buffer: Some(buffer), pool: self.clone() })))
    }

    /// Returns the arguments for kernels that use the cache of layer `index`, counted from the first layer on this
    /// device. `pages` is the device address of the page tables, which have `table_stride` entries per sequence.
    pub fn cache(&self, index: usize, pages: u64, table_stride: usize) -> args::Cache {
        let layer = &self.layout.layers()[index];
        args::Cache {
            pages,
            layer_offset: self.layout.layers()[..index].iter().map(Pool::layer_bytes).sum::<usize>() as u64,
            table_stride: table_stride as u32,
            kind: kind(layer.kind).map_or(0, |(kind, _)| kind),
            kv_heads: layer.heads.count as u32,
            head_dim: layer.heads.key as u32,
            value_dim: layer.heads.value as u32,
            unused: 0,
        }
    }

    /// Returns the sizes of a page.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_without_kernels_are_refused_by_name() {
        for refused in [KvType::Fp8, KvType::Int4] {
            let error = kind(refused).unwrap_err();
            assert_eq!(error.cause().exit_code(), 5);
            assert!(error.to_string().contains(&format!("KV cache of {refused}")), "{error}");
        }
        assert_eq!(kind(KvType::Bf16).unwrap().1, "bf16");
    }
}
