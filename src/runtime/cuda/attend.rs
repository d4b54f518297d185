//! Launches of attention: selects the kernels for a KV cache and divides a step among thread blocks.

use super::args;
use super::array::{Acts, View};
use super::context::{Launch, USUAL_SHARED};
use super::kv;
use super::ops::{GRID, Ops};
use crate::error::{Error, Result};
use crate::runtime::device::DeviceInfo;
use crate::runtime::kv::KvLayer;

/// A step is computed row by row, as in decoding, if no sequence has more than this number of tokens in it.
const DECODE_RUN: usize = 8;
/// Maximum number of query heads with the same key/value head that a thread block computes in decoding.
const DECODE_HEADS: usize = 8;
/// Minimum number of positions per part: in decoding, the positions of a sequence are cut into parts that are computed
/// by different thread blocks, and `attention_combine` combines their partial results.
const PART: usize = 64;
/// Maximum number of parts of a sequence.
const PARTS: usize = 1024;
/// Largest head size that kernels exist for.
const HEAD: usize = 512;
/// Largest head size of the kernels that compute with 16-bit numbers, and of the narrower ones for any type.
const NARROW_HEAD: usize = 256;

/// Attention kernels for a KV cache on a device, with the parameters of their launches.
#[derive(Debug, Clone)]
pub struct Kernels {
    decode: String,
    decode_shared: u32,
    /// Number of thread blocks of the decode kernel that fit on a multiprocessor at once.
    resident: usize,
    prefill: String,
    prefill_threads: u32,
    prefill_shared: u32,
    /// Maximum number of rows per tile.
    tile_rows: usize,
    multiprocessors: usize,
    n_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
}

/// Arguments of attention in a layer.
pub struct Attend<'a> {
    /// Queries `(n, n_heads * head_dim)`, rotated, and scaled so that the weight of a score `s` is `2^s`.
    pub q: View<f32>,
    pub rows: View<args::Row>,
    /// Tiles of rows; empty = row by row.
    pub tiles: View<args::Tile>,
    /// Attention sinks, if any, times log2(e): `(n_heads)`.
    pub sinks: Option<View<f32>>,
    /// Numbers whose sigmoids multiply the results, if any: `(n, n_heads * value_dim)`.
    pub gate: Option<View<f32>>,
    /// Memory for partial results: [`Kernels::partial_len`] numbers.
    pub partial: View<f32>,
    pub out: &'a Acts,
    pub cache: args::Cache,
    pub n: usize,
    /// Number of positions that a query attends to, its own included; `None` = all.
    pub window: Option<usize>,
    /// Cap of scores, if any, times log2(e).
    pub softcap: Option<f32>,
    /// Number of positions that the longest sequence may reach before steps get another
    /// [`StepPlan`](super::input::StepPlan).
    pub longest: usize,
}

impl Kernels {
    /// Selects the kernels for the cache of a layer on a device.
    ///
    /// # Errors
    /// No kernels exist for the element type or the head size.
    pub fn new(info: &DeviceInfo, layer: &KvLayer, n_heads: usize) -> Result<Kernels> {
        let (_, kind) = kv::kind(layer.kind)?;
        let dim = layer.heads.key.max(layer.heads.value);
        let (width, rows, resident) = match dim {
            0..=64 => (64, 128, 5),
            65..=128 => (128, 128, 3),
            _ => (256, 64, 2),
        };
        let shared = ((rows + 128) * (width + 8) * 2) as u32;
        let tensor_cores = info.has_tensor_cores() && shared <= info.shared;
        // Parameters of the kernels that take any shape: number of f32 values from row to row in shared memory, and
        // threads per block in prefill.
        let (stride, threads) = (dim.next_multiple_of(4) + 4, if dim <= 128 { 256 } else { 128 });
        let (wide, usual_resident) = if dim > NARROW_HEAD { ("_wide", 2) } else { ("", 5) };
        let usual = Kernels {
            decode: format!("attention_decode{wide}"),
            decode_shared: (4 * (40 * stride + 264)) as u32,
            resident: usual_resident,
            prefill: format!("attention_prefill{wide}"),
            prefill_threads: threads as u32,
            prefill_shared: ((threads / 8 + 32) * stride * 4 + threads * 16) as u32,
            tile_rows: threads / 8,
            multiprocessors: info.multiprocessors as usize,
            n_heads,
            kv_heads: layer.heads.count,
            head_dim: layer.heads.key,
            value_dim: layer.heads.value,
        };
        let needed = usual.decode_shared.max(usual.prefill_shared);
        if dim > HEAD || needed > info.shared.max(USUAL_SHARED) {
            let found = format!("`head_dim`: found heads of {dim} values, which are not computed on this GPU");
            return Err(Error::engine(found).help("use --device cpu"));
        }
        let eights = layer.heads.key.is_multiple_of(8) && layer.heads.value.is_multiple_of(8);
        if ["f32", "int8"].contains(&kind) || !tensor_cores || !eights || dim > NARROW_HEAD {
            return Ok(usual);
        }
        Ok(Kernels {
            decode: format!("attention_decode_{kind}_{width}"),
            decode_shared: 0,
            resident,
            prefill: format!("attention_prefill_{kind}_{width}_{rows}"),
            prefill_threads: 128,
            prefill_shared: shared,
            tile_rows: rows,
            ..usual
        })
    }

    /// Returns the index among the two numbers of [`tile_rows`] of the tiles that the kernels take.
    pub fn tiles(&self, tile_rows: [usize; 2]) -> usize {
        usize::from(self.tile_rows < tile_rows[0])
    }

    /// Returns the number of thread blocks that the decode kernel uses for each part of the positions of a row.
    fn blocks(&self) -> usize {
        self.kv_heads * (self.n_heads / self.kv_heads).div_ceil(DECODE_HEADS)
    }

    /// Returns the number of parts that sequences of up to `longest` positions are cut into in a step of `n` rows.
    fn splits(&self, n: usize, longest: usize) -> usize {
        let fill = self.resident * self.multiprocessors / (self.blocks() * n);
        fill.clamp(1, longest.div_ceil(PART).clamp(1, PARTS))
    }

    /// Returns the number of f32 values of partial results in a step of up to `rows` rows.
    pub fn partial_len(&self, rows: usize) -> usize {
        let parts = rows.max(self.resident * self.multiprocessors / self.blocks());
        self.n_heads * (self.value_dim + 2) * parts
    }
}

/// Returns the maximum number of rows per tile in a step that reads these numbers of tokens into its sequences: that of
/// the kernels with the largest tiles, and that of the others, which is 0 if all are alike. Both are 0 if the step is
/// computed row by row.
pub fn tile_rows(kernels: &[Kernels], mut runs: impl Iterator<Item = usize>) -> [usize; 2] {
    if !runs.any(|tokens| tokens > DECODE_RUN) {
        return [0; 2];
    }
    let rows = || kernels.iter().map(|kernels| kernels.tile_rows);
    let (largest, smallest) = (rows().max().unwrap_or(0), rows().min().unwrap_or(0));
    [largest, if smallest == largest { 0 } else { smallest }]
}

/// Cuts the rows `first` .. `first + tokens` of a batch into tiles of at most `tile_rows` rows; returns no tile if
/// `tile_rows` is 0.
pub fn tiles(first: usize, tokens: usize, tile_rows: usize) -> impl Iterator<Item = args::Tile> {
    let count = if tile_rows == 0 { 0 } else { tokens.div_ceil(tile_rows) };
    (0..count).map(move |i| {
        let before = i * tile_rows;
        args::Tile { first: (first + before) as u32, count: (tokens - before).min(tile_rows) as u32 }
    })
}

impl Ops {
    /// Computes attention.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn attend(&self, kernels: &Kernels, task: &Attend<'_>) -> Result<()> {
        let Attend { n, window, cache, .. } = *task;
        let (heads, dim) = (kernels.n_heads, kernels.value_dim);
        let (q_width, width) = (heads * kernels.head_dim, heads * dim);
        let splits = kernels.splits(n, window.map_or(task.longest, |window| window.min(task.longest)));
        assert!(
            [kernels.kv_heads, kernels.head_dim, dim].map(|size| size as u32)
                == [cache.kv_heads, cache.head_dim, cache.value_dim]
        );
        assert!(task.q.len() >= n * q_width && task.rows.len() >= n && n <= GRID && kernels.kv_heads <= GRID);
        assert!(task.out.rows >= n && task.out.width == width);
        assert!(task.sinks.is_none_or(|sinks| sinks.len() == heads));
        assert!(task.gate.is_none_or(|gate| gate.len() >= n * width));
        let args = args::Attention {
            q: task.q.address(),
            rows: task.rows.address(),
            tiles: task.tiles.address(),
            sinks: task.sinks.map_or(0, View::address),
            gate: task.gate.map_or(0, View::address),
            partial: task.partial.address(),
            out: task.out.args(),
            cache,
            n: n as u32,
            n_heads: heads as u32,
            q_stride: q_width as u32,
            window: window.map_or(0, |window| window.min(u32::MAX as usize) as u32),
            softcap: task.softcap.unwrap_or(0.0),
            splits: splits as u32,
        };
        if task.tiles.len() > 0 {
            assert!(task.tiles.len() <= GRID);
            let grid = [heads as u32, task.tiles.len() as u32, 1];
            let launch = Launch { grid, block: kernels.prefill_threads, shared: kernels.prefill_shared };
            return self.start(&kernels.prefill, launch, &args);
        }
        assert!(task.partial.len() >= n * heads * splits * (dim + 2));
        let chunks = (heads / kernels.kv_heads).div_ceil(DECODE_HEADS);
        let grid = [splits as u32, (kernels.kv_heads * chunks) as u32, n as u32];
        self.start(&kernels.decode, Launch { grid, block: 128, shared: kernels.decode_shared }, &args)?;
        self.start("attention_combine", Launch { grid: [heads as u32, n as u32, 1], block: 256, shared: 0 }, &args)
    }
}
