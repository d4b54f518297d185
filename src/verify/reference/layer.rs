//! One decoder layer of the reference: norms, attention and MLP.

use super::RefDtype;
use super::adapters::{ALL, Adapters, LowRank};
use super::config::Config;
use super::mlp::Mlp;
use super::weights::Weights;
use crate::error::Result;
use candle_core::{D, DType, Device, Tensor};

/// Number of queries whose scores are held at once.
const QUERIES: usize = 256;

/// Matrix `(out, in)` with its bias, if the checkpoint has one, and its changes by adapters.
pub(super) struct Linear {
    pub weight: Tensor,
    pub bias: Option<Tensor>,
    pub low_rank: Vec<LowRank>,
    /// Factors of the outputs without bias: `(out)`.
    pub gain: Option<Tensor>,
}

impl Linear {
    /// Makes a matrix that no adapter changes.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Linear {
        Linear { weight, bias, low_rank: Vec::new(), gain: None }
    }

    pub fn load(weights: &Weights, name: &str, dtype: RefDtype) -> Result<Linear> {
        let bias = weights.find(&format!("{name}.bias"), dtype)?;
        Ok(Linear::new(weights.get(&format!("{name}.weight"), dtype)?, bias))
    }

    /// Multiplies `(tokens, in)`; returns `(tokens, out)`.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut y = x.matmul(&self.weight.t()?)?;
        for change in &self.low_rank {
            y = (y + change.product(x)?)?;
        }
        if let Some(gain) = &self.gain {
            y = y.broadcast_mul(gain)?;
        }
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    fn rows(&self, first: usize, count: usize) -> candle_core::Result<Linear> {
        let bias = self.bias.as_ref().map(|b| b.narrow(0, first, count)).transpose()?;
        Ok(Linear::new(self.weight.narrow(0, first, count)?, bias))
    }
}

/// Weights of a layer in f32.
pub(super) struct Layer<'a> {
    config: &'a Config,
    index: usize,
    dtype: RefDtype,
    norms: Vec<Tensor>,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: Option<Tensor>,
    k_norm: Option<Tensor>,
    sinks: Option<Tensor>,
    mlp: Mlp<'a>,
}

impl<'a> Layer<'a> {
    pub fn load(
        config: &'a Config,
        weights: &'a Weights,
        adapters: &'a Adapters,
        index: usize,
        dtype: RefDtype,
    ) -> Result<Layer<'a>> {
        let prefix = format!("model.layers.{index}");
        let linear = |name: &str| Linear::load(weights, &format!("{prefix}.self_attn.{name}"), dtype);
        let (q_rows, kv_rows) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let (q, k, v) = if weights.has(&format!("{prefix}.self_attn.qkv_proj.weight")) {
            let qkv = linear("qkv_proj")?;
            (qkv.rows(0, q_rows)?, qkv.rows(q_rows, kv_rows)?, qkv.rows(q_rows + kv_rows, kv_rows)?)
        } else {
            (linear("q_proj")?, linear("k_proj")?, linear("v_proj")?)
        };
        let changed = |linear, name: &str| adapters.change(linear, &format!("{prefix}.self_attn.{name}.weight"), ALL);
        let names = ["input", "post_attention", "pre_feedforward", "post_feedforward"];
        let names = &names[..if config.sandwich { 4 } else { 2 }];
        let norms = names.iter().map(|name| weights.get(&format!("{prefix}.{name}_layernorm.weight"), dtype));
        Ok(Layer {
            config,
            index,
            dtype,
            norms: norms.collect::<Result<_>>()?,
            q: changed(q, "q_proj")?,
            k: changed(k, "k_proj")?,
            v: changed(v, "v_proj")?,
            o: changed(linear("o_proj")?, "o_proj")?,
            q_norm: weights.find(&format!("{prefix}.self_attn.q_norm.weight"), dtype)?,
            k_norm: weights.find(&format!("{prefix}.self_attn.k_norm.weight"), dtype)?,
            sinks: weights.find(&format!("{prefix}.self_attn.sinks"), dtype)?,
            mlp: Mlp::load(config, weights, adapters, index, dtype)?,
        })
    }

    /// Computes the layer; input and output are `(tokens, hidden)`.
    pub fn forward(&self, x: &Tensor, long: bool) -> Result<Tensor> {
        let norm = |x: &Tensor, i: usize| self.dtype.round(rms_norm(x, &self.norms[i], self.config)?);
        let add = |x: &Tensor, y: &Tensor| self.dtype.round((x + y)?);
        let y = self.attend(&norm(x, 0)?, long)?;
        let y = if self.config.sandwich { norm(&y, 1)? } else { y };
        let x = add(x, &y)?;
        let y = self.mlp.forward(&norm(&x, if self.config.sandwich { 2 } else { 1 })?)?;
        let y = if self.config.sandwich { norm(&y, 3)? } else { y };
        Ok(add(&x, &y)?)
    }

    fn attend(&self, x: &Tensor, long: bool) -> candle_core::Result<Tensor> {
        let Config { heads, kv_heads, head_dim, .. } = *self.config;
        let (tokens, rope) = (x.dim(0)?, &self.config.ropes[self.index]);
        let project = |linear: &Linear, heads: usize| {
            let y = self.dtype.round(linear.forward(x)?)?;
            y.reshape((tokens, heads, head_dim))?.transpose(0, 1)?.contiguous()
        };
        let turned = |y: Tensor, norm: &Option<Tensor>| {
            let y = match norm {
                Some(weight) => self.dtype.round(rms_norm(&y, weight, self.config)?)?,
                None => y,
            };
            self.dtype.round(rope.rotate(&y, long)?)
        };
        let q = turned(project(&self.q, heads)?, &self.q_norm)?;
        let k = turned(project(&self.k, kv_heads)?, &self.k_norm)?;
        let v = project(&self.v, kv_heads)?;
        let mut chunks = Vec::new();
        for first in (0..tokens).step_by(QUERIES) {
            let count = QUERIES.min(tokens - first);
            let mask = mask(first, count, tokens, self.config.windows[self.index])?;
            let mut outputs = Vec::with_capacity(heads);
            for head in 0..heads {
                let kv = head / (heads / kv_heads);
                let scores = q.get(head)?.narrow(0, first, count)?.matmul(&k.get(kv)?.t()?)?;
                let mut scores = (scores * self.config.scale)?;
                if let Some(cap) = self.config.score_cap {
                    scores = ((scores / cap)?.tanh()? * cap)?;
                }
                let sink = self.sinks.as_ref().map(|sinks| sinks.get(head)?.to_scalar::<f32>()).transpose()?;
                let weights = self.dtype.round(softmax(&(scores + &mask)?, sink)?)?;
                outputs.push(weights.matmul(&v.get(kv)?)?);
            }
            chunks.push(Tensor::cat(&outputs, 1)?);
        }
        let joined = self.dtype.round(Tensor::cat(&chunks, 0)?)?;
        self.dtype.round(self.o.forward(&joined)?)
    }
}

/// Creates the attention mask `(count, tokens)` for the queries from position `first` on: zero where a query attends
/// to a key, minus infinity elsewhere.
fn mask(first: usize, count: usize, tokens: usize, window: Option<usize>) -> candle_core::Result<Tensor> {
    let seen = |query: usize, key: usize| key <= query && window.is_none_or(|window| key + window > query);
    let cell = |i: usize| if seen(first + i / tokens, i % tokens) { 0.0 } else { f32::NEG_INFINITY };
    Tensor::from_vec((0..count * tokens).map(cell).collect(), (count, tokens), &Device::Cpu)
}

/// Computes the softmax along the last dimension; a sink is one more score, whose probability is dropped.
pub(super) fn softmax(scores: &Tensor, sink: Option<f32>) -> candle_core::Result<Tensor> {
    let mut max = scores.max_keepdim(D::Minus1)?;
    if let Some(sink) = sink {
        max = max.maximum(&Tensor::full(sink, max.shape(), &Device::Cpu)?)?;
    }
    let exp = scores.broadcast_sub(&max)?.exp()?;
    let mut sum = exp.sum_keepdim(D::Minus1)?;
    if let Some(sink) = sink {
        sum = (sum + (Tensor::full(sink, max.shape(), &Device::Cpu)? - max)?.exp()?)?;
    }
    exp.broadcast_div(&sum)
}

/// Computes the RMS norm along the last dimension.
pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, config: &Config) -> candle_core::Result<Tensor> {
    let wide = x.to_dtype(DType::F64)?;
    let mean = (wide.sqr()?.sum_keepdim(D::Minus1)? / x.dim(D::Minus1)? as f64)?;
    let normed = wide.broadcast_div(&(mean + config.eps)?.sqrt()?)?.to_dtype(DType::F32)?;
    let weight = if config.one_plus { (weight + 1.0)? } else { weight.clone() };
    normed.broadcast_mul(&weight)
}
