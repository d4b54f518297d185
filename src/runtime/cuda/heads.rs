//! Launches that prepare the queries, keys and values of a layer: norms of heads, rotation, scaling, and writing to the
//! cache; and the further inputs of layers.

use super::args;
use super::array::View;
use super::context::Launch;
use super::ops::{GRID, Ops};
use crate::error::Result;
use crate::model_config::{Latent, RotaryPairs};

/// Arguments of the kernel that rotates queries and keys and writes keys and values into the cache.
pub struct Rope {
    pub q: View<f32>,
    /// Projected keys and values; `None` if the layer reads those of another layer. For a cache of a type other than
    /// int8, both may be the same memory.
    pub kv: Option<[View<f32>; 2]>,
    /// Cosines, then sines, of each row, `(n, rotary_dim)`; empty without rotation.
    pub angles: View<f32>,
    pub pairs: RotaryPairs,
    /// Factors of the norms of query and key heads.
    pub head_norms: Option<[View<f32>; 2]>,
    /// Factors of the norm of value heads.
    pub value_norm: Option<View<f32>>,
    pub rows: View<args::Row>,
    pub cache: args::Cache,
    pub n: usize,
    pub n_heads: usize,
    pub eps: f32,
    pub q_scale: f32,
}

/// Arguments of the same for latent attention.
pub struct LatentRope {
    pub sizes: Latent,
    pub q: View<f32>,
    /// Room for the keys of a cache of int8: `(n, n_heads * (nope + rope))`.
    pub k: View<f32>,
    /// Vectors from which keys and values were expanded, with the rotated part of the keys: `(n, kv_rank + rope)`.
    pub latent: View<f32>,
    /// Keys without their rotated part, and values: `(n, n_heads * (nope + value))`.
    pub expanded: View<f32>,
    /// Cosines, then sines, of each row, `(n, rope)`; empty without rotation.
    pub angles: View<f32>,
    pub pairs: RotaryPairs,
    pub rows: View<args::Row>,
    pub cache: args::Cache,
    pub n: usize,
    pub n_heads: usize,
    pub q_scale: f32,
}

/// Arguments of the further inputs of layers.
pub struct TokenInputs {
    /// Projected embeddings, which are scaled and normalized: `(n, layers * width)`.
    pub projected: View<f32>,
    /// Embeddings of the inputs: `(n, layers * width)`.
    pub embedded: View<f32>,
    /// Factors of the norm: `(width)`.
    pub norm: View<f32>,
    /// Inputs: `(layers, n, width)`.
    pub out: View<f32>,
    pub n: usize,
    pub layers: usize,
    /// Factor of the projected embeddings.
    pub scale: f32,
    pub eps: f32,
}

impl Ops {
    /// Rotates queries and keys, and writes keys and values into the cache.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn rope(&self, task: &Rope) -> Result<()> {
        let Rope { n, n_heads, cache, .. } = *task;
        let (head_dim, value_dim) = (cache.head_dim as usize, cache.value_dim as usize);
        let kv_heads = task.kv.map_or(0, |_| cache.kv_heads as usize);
        let rotary_dim = task.angles.len() / n;
        assert!(task.q.len() >= n * n_heads * head_dim && task.rows.len() >= n && n <= GRID);
        let fits = |[k, v]: [View<f32>; 2]| k.len() >= n * kv_heads * head_dim && v.len() >= n * kv_heads * value_dim;
        assert!(task.kv.is_none_or(fits) && rotary_dim <= head_dim);
        // A layer without keys of its own has no factors for them.
        let normed = |[q, k]: [View<f32>; 2]| q.len() == head_dim && (kv_heads == 0 || k.len() == head_dim);
        assert!(task.head_norms.is_none_or(normed) && task.value_norm.is_none_or(|norm| norm.len() == value_dim));
        let args = args::Rope {
            q: task.q.address(),
            k: task.kv.map_or(0, |[k, _]| k.address()),
            v: task.kv.map_or(0, |[_, v]| v.address()),
            angles: task.angles.address(),
            q_norm: task.head_norms.map_or(0, |norms| norms[0].address()),
            k_norm: task.head_norms.map_or(0, |norms| norms[1].address()),
            v_norm: task.value_norm.map_or(0, View::address),
            rows: task.rows.address(),
            cache,
            n: n as u32,
            n_heads: n_heads as u32,
            kv_heads: kv_heads as u32,
            rotary_dim: rotary_dim as u32,
            adjacent: (task.pairs == RotaryPairs::Adjacent).into(),
            eps: task.eps,
            q_scale: task.q_scale,
            unused: 0,
        };
        let grid = [(n_heads + 2 * kv_heads).div_ceil(4) as u32, n as u32, 1];
        self.start("rope", Launch { grid, block: 128, shared: 0 }, &args)
    }

    /// Rotates the queries and keys of latent attention, and writes expanded keys and values into the cache.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn latent_rope(&self, task: &LatentRope) -> Result<()> {
        let LatentRope { n, n_heads, cache, .. } = *task;
        let Latent { kv_rank, nope, rope, value, .. } = task.sizes;
        let sizes = [n_heads, nope + rope, value].map(|size| size as u32);
        assert!(sizes == [cache.kv_heads, cache.head_dim, cache.value_dim] && n <= GRID);
        let keys = n * n_heads * (nope + rope);
        assert!(task.q.len() >= keys && task.k.len() >= keys && task.rows.len() >= n);
        assert!(task.latent.len() >= n * (kv_rank + rope) && task.expanded.len() >= n * n_heads * (nope + value));
        assert!(task.angles.len() == 0 || task.angles.len() >= n * rope);
        let args = args::LatentRope {
            q: task.q.address(),
            k: task.k.address(),
            latent: task.latent.address(),
            expanded: task.expanded.address(),
            angles: if task.angles.len() == 0 { 0 } else { task.angles.address() },
            rows: task.rows.address(),
            cache,
            n: n as u32,
            n_heads: n_heads as u32,
            nope: nope as u32,
            rope: rope as u32,
            latent_stride: (kv_rank + rope) as u32,
            adjacent: (task.pairs == RotaryPairs::Adjacent).into(),
            q_scale: task.q_scale,
            unused: 0,
        };
        let grid = [(3 * n_heads).div_ceil(4) as u32, n as u32, 1];
        self.start("latent_rope", Launch { grid, block: 128, shared: 0 }, &args)
    }

    /// Computes the further inputs of all layers.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn token_inputs(&self, task: &TokenInputs) -> Result<()> {
        let TokenInputs { n, layers, scale, eps, .. } = *task;
        let (width, norm) = (task.norm.len(), task.norm.address());
        let fits = |view: View<f32>| view.len() >= n * layers * width;
        assert!(fits(task.projected) && fits(task.embedded) && fits(task.out) && n <= GRID);
        let [projected, embedded, out] = [task.projected, task.embedded, task.out].map(View::address);
        let (n, layers, width) = (n as u32, layers as u32, width as u32);
        let args = args::TokenInputs { projected, embedded, norm, out, n, layers, width, scale, eps, unused: 0 };
        self.start("token_inputs", Launch { grid: [layers.div_ceil(4), n, 1], block: 128, shared: 0 }, &args)
    }
}
