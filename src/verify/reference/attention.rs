//! Attention of the reference: queries, keys and values of a layer, scores, and the output projection.

use super::config::{LayerConfig, QkNorm};
use super::latent::Latent;
use super::layer::TextState;
use super::linear::{Linear, WeightSource};
use super::norm::{Norm, sigmoid, softmax};
use crate::error::{Error, Result};
use candle_core::{DType, Device, Tensor};

/// Number of queries whose scores are held at once.
const QUERIES: usize = 256;

/// Keys and values of a layer: each `(key/value heads, tokens, values of a head)`.
pub(super) type KeysValues = (Tensor, Tensor);

pub(super) struct Attention<'a> {
    source: WeightSource<'a>,
    layer: &'a LayerConfig,
    /// True if a later layer reads the keys and values of this one.
    is_shared: bool,
    projections: Projections<'a>,
    gate: Option<Linear>,
    o: Linear,
    sinks: Option<Tensor>,
}

/// Projections to queries, keys and values.
enum Projections<'a> {
    Heads(Box<Heads<'a>>),
    Latent(Box<Latent<'a>>),
}

/// Projections whose rows are those of the heads.
struct Heads<'a> {
    source: WeightSource<'a>,
    layer: &'a LayerConfig,
    q: Linear,
    q_norm: Option<Norm>,
    /// Projection to keys with their norm; `None` in a layer that reads those of another.
    k: Option<(Linear, Option<Norm>)>,
    /// Projection to values, if they are not the projected keys.
    v: Option<Linear>,
}

impl<'a> Attention<'a> {
    pub fn load(source: WeightSource<'a>) -> Result<Attention<'a>> {
        let (config, layer) = (source.config, &source.config.layers[source.index]);
        let projections = match config.latent {
            Some(sizes) => Projections::Latent(Box::new(Latent::load(source, sizes)?)),
            None => Projections::Heads(Box::new(Heads::load(source, layer)?)),
        };
        let gate = match (config.output_gate, config.family.has_delta_nets()) {
            (true, true) => Some(source.changed(of_heads(source, layer, 1)?, "self_attn.gate_proj")?),
            (true, false) => Some(source.linear("self_attn.gate_proj")?),
            (false, _) => None,
        };
        Ok(Attention {
            source,
            layer,
            is_shared: config.layers.iter().any(|layer| layer.kv_from == Some(source.index)),
            projections,
            gate,
            o: source.linear("self_attn.o_proj")?,
            sinks: source.find("self_attn.sinks")?,
        })
    }

    /// Computes attention of `x`, `(tokens, hidden)`; keys and values for later layers are kept in `state`.
    pub fn forward(&self, x: &Tensor, state: &mut TextState) -> Result<Tensor> {
        let (mut q, own) = match &self.projections {
            Projections::Heads(heads) => heads.forward(x, state.long)?,
            Projections::Latent(latent) => latent.forward(x, state.long)?,
        };
        let kept = self.layer.kv_from.and_then(|owner| state.kept.get(&owner).cloned());
        let Some((k, v)) = kept.or(own) else {
            return Err(Error::unsupported("the reference has no keys and values for this layer"));
        };
        if self.is_shared {
            state.kept.insert(self.source.index, (k.clone(), v.clone()));
        }
        if let Some(growth) = self.source.config.growth {
            let factor = |position: usize| 1.0 + growth.beta * ((1 + position / growth.original) as f64).ln();
            let factors: Vec<f32> = (0..q.dim(1)?).map(|position| factor(position) as f32).collect();
            let factors = self.source.round(Tensor::from_vec(factors, (q.dim(1)?, 1), &Device::Cpu)?)?;
            q = self.source.round(q.broadcast_mul(&factors)?)?;
        }
        let mut joined = self.attend(&q, &k, &v)?;
        if let Some(gate) = &self.gate {
            let open = self.source.round(sigmoid(&self.source.round(gate.forward(x)?)?)?)?;
            // A gate has a number for each value, or for each head.
            let (tokens, width) = joined.dims2()?;
            let gates = if open.dim(1)? == width { width } else { self.source.config.heads };
            let heads = joined.reshape((tokens, gates, width / gates))?;
            let opened = heads.broadcast_mul(&open.reshape((tokens, gates, 1))?)?;
            joined = self.source.round(opened.reshape((tokens, width))?)?;
        }
        Ok(self.source.round(self.o.forward(&joined)?)?)
    }

    /// Computes the outputs of all heads side by side: `(tokens, heads * values of a head)`.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        let (heads, tokens, _) = q.dims3()?;
        let (per_kv, config) = (heads / k.dim(0)?, self.source.config);
        let mut chunks = Vec::new();
        for first in (0..tokens).step_by(QUERIES) {
            let count = QUERIES.min(tokens - first);
            let mask = mask(first, count, tokens, self.layer.window)?.to_dtype(q.dtype())?;
            let mut outputs = Vec::with_capacity(heads);
            for head in 0..heads {
                let kv = head / per_kv;
                let scores = q.get(head)?.narrow(0, first, count)?.matmul(&k.get(kv)?.t()?)?;
                let mut scores = (scores * config.factors.score)?;
                if let Some(cap) = config.score_cap {
                    scores = ((scores / cap)?.tanh()? * cap)?;
                }
                let sink =
                    self.sinks.as_ref().map(|sinks| sinks.get(head)?.to_dtype(DType::F64)?.to_scalar()).transpose()?;
                let weights = self.source.round(softmax(&(scores + &mask)?, sink)?)?;
                outputs.push(weights.matmul(&v.get(kv)?)?);
            }
            chunks.push(Tensor::cat(&outputs, 1)?);
        }
        self.source.round(Tensor::cat(&chunks, 0)?)
    }
}

impl<'a> Heads<'a> {
    fn load(source: WeightSource<'a>, layer: &'a LayerConfig) -> Result<Heads<'a>> {
        let (q_rows, kv_rows) = (source.config.heads * layer.head_dim, layer.kv_heads * layer.head_dim);
        let own = layer.kv_from.is_none();
        let (q, k, v) = if source.has("self_attn.qkv_proj.weight") {
            let qkv = source.plain("self_attn.qkv_proj")?;
            (qkv.rows(0, q_rows)?, Some(qkv.rows(q_rows, kv_rows)?), Some(qkv.rows(q_rows + kv_rows, kv_rows)?))
        } else {
            let load = |name: &str, there: bool| there.then(|| source.plain(name)).transpose();
            let k = load("self_attn.k_proj", own)?;
            let q = match source.config.family.has_delta_nets() {
                true => of_heads(source, layer, 0)?,
                false => source.plain("self_attn.q_proj")?,
            };
            (q, k, load("self_attn.v_proj", own && !layer.keys_are_values)?)
        };
        let changed =
            |linear: Option<Linear>, name: &str| linear.map(|linear| source.changed(linear, name)).transpose();
        let k = changed(k, "self_attn.k_proj")?;
        Ok(Heads {
            source,
            layer,
            q: source.changed(q, "self_attn.q_proj")?,
            q_norm: head_norm(source, "self_attn.q_norm.weight")?,
            k: k.map(|k| Ok::<_, Error>((k, head_norm(source, "self_attn.k_norm.weight")?))).transpose()?,
            v: changed(v, "self_attn.v_proj")?,
        })
    }

    /// Computes queries, keys and values of `x`, `(tokens, hidden)`.
    fn forward(&self, x: &Tensor, long: bool) -> Result<(Tensor, Option<KeysValues>)> {
        let (source, config) = (&self.source, self.source.config);
        let q = source.round(self.q.forward(x)?)?;
        let q = self.rotated(q, config.heads, &self.q_norm, config.factors.query, long)?;
        let Some((k, k_norm)) = &self.k else { return Ok((q, None)) };
        let projected = source.round(k.forward(x)?)?;
        let v = match &self.v {
            Some(v) => source.round(v.forward(x)?)?,
            None => projected.clone(),
        };
        let mut v = self.split(&v, self.layer.kv_heads)?;
        if config.norms.values {
            v = source.round(Norm::unit(config.norms.eps).forward(&v)?)?;
        }
        let k = self.rotated(projected, self.layer.kv_heads, k_norm, 1.0, long)?;
        Ok((q, Some((k, v))))
    }

    /// Splits rows into heads, normalizes them, multiplies them by `factor` and rotates them.
    fn rotated(
        &self,
        mut y: Tensor,
        heads: usize,
        norm: &Option<Norm>,
        factor: f64,
        long: bool,
    ) -> candle_core::Result<Tensor> {
        let (source, place) = (&self.source, self.source.config.norms.queries_and_keys);
        if let (Some(norm), QkNorm::All) = (norm, place) {
            y = source.round(norm.forward(&y)?)?;
        }
        let mut y = self.split(&y, heads)?;
        if let (Some(norm), QkNorm::Head | QkNorm::Unit) = (norm, place) {
            y = source.round(norm.forward(&y)?)?;
        }
        if factor != 1.0 {
            y = source.round((y * factor)?)?;
        }
        match &self.layer.rope {
            Some(rope) => source.round(rope.rotate(&y, long)?),
            None => Ok(y),
        }
    }

    /// Splits `(tokens, heads * head_dim)` into `(heads, tokens, head_dim)`.
    fn split(&self, y: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
        y.reshape((y.dim(0)?, heads, self.layer.head_dim))?.transpose(0, 1)?.contiguous()
    }
}

/// Reads the queries (0) or the gates (1) from the rows of a projection that has both for each head.
fn of_heads(source: WeightSource<'_>, layer: &LayerConfig, part: usize) -> Result<Linear> {
    let both = source.plain("self_attn.q_proj")?.weight;
    let (cols, heads, head_dim) = (both.dim(1)?, source.config.heads, layer.head_dim);
    let rows = both.reshape((heads, 2, head_dim, cols))?.narrow(1, part, 1)?.contiguous()?;
    Ok(Linear::new(rows.reshape((heads * head_dim, cols))?, None))
}

/// Reads the norm of queries or of keys, if there is one.
fn head_norm(source: WeightSource<'_>, name: &str) -> Result<Option<Norm>> {
    let norms = source.config.norms;
    Ok(match norms.queries_and_keys {
        QkNorm::None => None,
        QkNorm::Unit => Some(Norm::unit(norms.eps)),
        QkNorm::All => Some(Norm::new(source.get(name)?, norms.kind, norms.eps)),
        QkNorm::Head => source.find(name)?.map(|weight| Norm::new(weight, norms.kind, norms.eps)),
    })
}

/// Creates the attention mask `(count, tokens)` for the queries from position `first` on: zero where a query attends
/// to a key, minus infinity elsewhere.
fn mask(first: usize, count: usize, tokens: usize, window: Option<usize>) -> candle_core::Result<Tensor> {
    let seen = |query: usize, key: usize| key <= query && window.is_none_or(|window| key + window > query);
    let cell = |i: usize| if seen(first + i / tokens, i % tokens) { 0.0 } else { f32::NEG_INFINITY };
    Tensor::from_vec((0..count * tokens).map(cell).collect(), (count, tokens), &Device::Cpu)
}
