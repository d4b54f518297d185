//! Paged KV cache on a device. Pages of [`PAGE`] positions are shared between clones of a sequence until one of the
//! clones writes.
//!
//! For each layer of its part of the model and each key/value head, a page holds the keys position by position,
//! then the values.

use super::args;
use super::context::{Buffer, Context};
use crate::error::{Error, Result};
use crate::runtime::device::{Cache, PartCache};
use crate::runtime::kv::{KvLayer, KvLayout, KvType, PAGE};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Pool of pages of one size; pages that are no longer used are recycled.
#[derive(Debug)]
pub struct Pool {
    context: Arc<Context>,
    layout: KvLayout,
    free: Mutex<Vec<Buffer>>,
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
        if let Some(buffer) = self.buffer.take() {
            self.pool.free.lock().unwrap_or_else(|e| e.into_inner()).push(buffer);
        }
    }
}

impl Page {
    /// Returns true when the page belongs to this pool.
    pub fn is_of(&self, pool: &Arc<Pool>) -> bool {
        Arc::ptr_eq(&self.0.pool, pool)
    }

    /// Returns the device address.
    pub fn address(&self) -> u64 {
        self.buffer().address()
    }

    fn buffer(&self) -> &Buffer {
        self.0.buffer.as_ref().expect("taken by drop only")
    }
}

/// Pages of one sequence.
#[derive(Debug, Clone, Default)]
pub struct Pages(pub Vec<Page>);

impl PartCache for Pages {
    fn truncate(&mut self, len: usize) {
        self.0.truncate(len.div_ceil(PAGE));
    }

    fn clone_cache(&self) -> Cache {
        Cache::new(self.clone())
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
    /// Creates a pool without pages. `layout` is that of the layers on this device.
    pub fn new(context: &Arc<Context>, layout: KvLayout) -> Arc<Pool> {
        Arc::new(Pool { context: context.clone(), layout, free: Mutex::default() })
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
    pub fn grow(self: &Arc<Pool>, pages: &mut Vec<Page>, positions: Range<usize>) -> Result<()> {
        pages.truncate(positions.end.div_ceil(PAGE));
        for page in pages.iter_mut().skip(positions.start / PAGE) {
            if Arc::strong_count(&page.0) > 1 {
                let own = self.page()?;
                own.buffer().copy_from_device(page.buffer())?;
                *page = own;
            }
        }
        while pages.len() < positions.end.div_ceil(PAGE) {
            pages.push(self.page()?);
        }
        Ok(())
    }

    fn page(self: &Arc<Pool>) -> Result<Page> {
        let free = self.free.lock().unwrap_or_else(|e| e.into_inner()).pop();
        let buffer = match free {
            Some(buffer) => buffer,
            None => self.context.alloc(Pool::page_bytes(&self.layout))?,
        };
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
