//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its naive form: keys and values of every head are
//! expanded from one short vector per token, and all heads share the rotated part of the keys.

use super::attention::KeysValues;
use super::config::{LatentSizes, NormKind};
use super::linear::{Linear, WeightSource};
use super::norm::Norm;
use crate::error::Result;
use candle_core::{D, Tensor};

/// Epsilon of the inner norms, whatever the configuration says for the others.
const EPS: f64 = 1e-6;

pub(super) struct Latent<'a> {
    source: WeightSource<'a>,
    sizes: LatentSizes,
    /// Projection to a short vector and its norm, from which queries are projected, if there is one.
    q_a: Option<(Linear, Norm)>,
    q: Linear,
    kv_a: Linear,
    kv_norm: Norm,
    kv_b: Linear,
}

impl<'a> Latent<'a> {
    pub fn load(source: WeightSource<'a>, sizes: LatentSizes) -> Result<Latent<'a>> {
        let norm = |name: &str| -> Result<Norm> { Ok(Norm::new(source.get(name)?, NormKind::Rms, EPS)) };
        let (q_a, q) = if source.has("self_attn.q_a_proj.weight") {
            let q_a = (source.linear("self_attn.q_a_proj")?, norm("self_attn.q_a_layernorm.weight")?);
            (Some(q_a), source.linear("self_attn.q_b_proj")?)
        } else {
            (None, source.linear("self_attn.q_proj")?)
        };
        Ok(Latent {
            source,
            sizes,
            q_a,
            q,
            kv_a: source.linear("self_attn.kv_a_proj_with_mqa")?,
            kv_norm: norm("self_attn.kv_a_layernorm.weight")?,
            kv_b: source.linear("self_attn.kv_b_proj")?,
        })
    }

    /// Computes queries, keys and values of `x`, `(tokens, hidden)`.
    pub fn forward(&self, x: &Tensor, long: bool) -> Result<(Tensor, Option<KeysValues>)> {
        let LatentSizes { kv_rank, nope, rope, value } = self.sizes;
        let (source, heads) = (&self.source, self.source.config.heads);
        let q = match &self.q_a {
            Some((q_a, norm)) => source.round(norm.forward(&source.round(q_a.forward(x)?)?)?)?,
            None => x.clone(),
        };
        let q = split(&source.round(self.q.forward(&q)?)?, heads, nope + rope)?;
        let turned = self.rotated(&q.narrow(D::Minus1, nope, rope)?, long)?;
        let q = Tensor::cat(&[q.narrow(D::Minus1, 0, nope)?, turned], D::Minus1)?;
        let both = source.round(self.kv_a.forward(x)?)?;
        let latent = source.round(self.kv_norm.forward(&both.narrow(1, 0, kv_rank)?)?)?;
        let shared = self.rotated(&both.narrow(1, kv_rank, rope)?.unsqueeze(0)?, long)?;
        let expanded = split(&source.round(self.kv_b.forward(&latent)?)?, heads, nope + value)?;
        let shared = shared.broadcast_as((heads, x.dim(0)?, rope))?;
        let k = Tensor::cat(&[expanded.narrow(D::Minus1, 0, nope)?, shared], D::Minus1)?;
        let v = expanded.narrow(D::Minus1, nope, value)?.contiguous()?;
        Ok((q, Some((k, v))))
    }

    fn rotated(&self, x: &Tensor, long: bool) -> candle_core::Result<Tensor> {
        match &self.source.config.layers[self.source.index].rope {
            Some(rope) => self.source.round(rope.rotate(&x.contiguous()?, long)?),
            None => Ok(x.clone()),
        }
    }
}

/// Splits `(tokens, heads * width)` into `(heads, tokens, width)`.
fn split(y: &Tensor, heads: usize, width: usize) -> candle_core::Result<Tensor> {
    y.reshape((y.dim(0)?, heads, width))?.transpose(0, 1)?.contiguous()
}
