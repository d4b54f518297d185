//! Gated delta net of the reference (`Qwen3NextGatedDeltaNet`, `Qwen3_5GatedDeltaNet`): the rule token by token, in
//! f64.

use super::config::DeltaSizes;
use super::conv::convolve;
use super::linear::{Linear, WeightSource};
use super::norm::{sigmoid, silu};
use crate::error::Result;
use crate::verify::dtype::RefDtype;
use candle_core::{DType, Device, Tensor};

pub(super) struct DeltaNet<'a> {
    source: WeightSource<'a>,
    sizes: DeltaSizes,
    /// Projections to queries, keys, values, gates, rates and decays.
    projections: [Linear; 6],
    /// Factors of the convolution: `(channels, width)`.
    kernel: Tensor,
    /// Factors of the logarithms of the decays, and numbers added before the softplus: one for each value head.
    decay: [Vec<f64>; 2],
    /// Factors of the norm of the output: `(value)`.
    norm: Tensor,
    eps: f64,
    output: Linear,
}

impl<'a> DeltaNet<'a> {
    pub fn load(source: WeightSource<'a>, sizes: DeltaSizes) -> Result<DeltaNet<'a>> {
        let kernel = source.get("linear_attn.conv1d.weight")?;
        let channels = kernel.dim(0)?;
        let names = ["q", "k", "v", "z", "b", "a"];
        let mut projections = match source.has("linear_attn.in_proj_qkvz.weight") {
            true => by_key_heads(source, sizes)?,
            false => stacked(source, sizes)?,
        }
        .into_iter();
        let changed = names.map(|name| {
            let plain = projections.next().expect("six projections");
            source.changed(plain, &format!("linear_attn.{name}_proj"))
        });
        let [q, k, v, z, b, a] = changed;
        let wide = |part: &str| -> Result<Vec<f64>> {
            let numbers = source.weights.get(&source.name(&format!("linear_attn.{part}")), RefDtype::F32)?;
            Ok(numbers.to_dtype(DType::F64)?.to_vec1()?)
        };
        Ok(DeltaNet {
            source,
            sizes,
            projections: [q?, k?, v?, z?, b?, a?],
            kernel: kernel.reshape((channels, kernel.elem_count() / channels))?,
            decay: [wide("A_log")?.into_iter().map(|x| -x.exp()).collect(), wide("dt_bias")?],
            norm: source.get("linear_attn.norm.weight")?,
            eps: source.config.norms.eps,
            output: source.linear("linear_attn.out_proj")?,
        })
    }

    /// Computes the output for `x`, `(tokens, hidden)`.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let round = |x: Tensor| self.source.round(x);
        let DeltaSizes { key_heads, value_heads, key, value } = self.sizes;
        let tokens = x.dim(0)?;
        let mut projected = Vec::new();
        for projection in &self.projections {
            projected.push(round(projection.forward(x)?)?);
        }
        let mixed = round(convolve(&Tensor::cat(&projected[..3], 1)?, &self.kernel, None)?)?;
        let mixed = round(silu(&mixed, 1.0)?)?;
        let heads = |first: usize, count: usize, width: usize| {
            mixed.narrow(1, first, count * width)?.reshape((tokens, count, width))
        };
        let unit = |x: Tensor| -> candle_core::Result<Vec<Vec<Vec<f64>>>> {
            let wide = x.to_dtype(DType::F64)?;
            let sum = (wide.sqr()?.sum_keepdim(2)? + 1e-6)?;
            round(wide.broadcast_div(&sum.sqrt()?)?.to_dtype(x.dtype())?)?.to_dtype(DType::F64)?.to_vec3()
        };
        let q = unit(heads(0, key_heads, key)?)?;
        let k = unit(heads(key_heads * key, key_heads, key)?)?;
        let v: Vec<Vec<Vec<f64>>> = heads(2 * key_heads * key, value_heads, value)?.to_dtype(DType::F64)?.to_vec3()?;
        let rates: Vec<Vec<f64>> = round(sigmoid(&projected[4])?)?.to_dtype(DType::F64)?.to_vec2()?;
        let logs: Vec<Vec<f64>> = projected[5].to_dtype(DType::F64)?.to_vec2()?;
        let mut out = vec![0f64; tokens * value_heads * value];
        for head in 0..value_heads {
            let group = head * key_heads / value_heads;
            let mut state = vec![0f64; key * value];
            for t in 0..tokens {
                let log = logs[t][head] + self.decay[1][head];
                let decay = (self.decay[0][head] * (log.max(0.0) + (-log.abs()).exp().ln_1p())).exp();
                state.iter_mut().for_each(|x| *x *= decay);
                let (k, q) = (&k[t][group], &q[t][group]);
                let read =
                    |state: &[f64], x: &[f64], j: usize| -> f64 { (0..key).map(|i| x[i] * state[i * value + j]).sum() };
                for j in 0..value {
                    let added = rates[t][head] * (v[t][head][j] - read(&state, k, j));
                    (0..key).for_each(|i| state[i * value + j] += k[i] * added);
                    out[(t * value_heads + head) * value + j] = read(&state, q, j) / (key as f64).sqrt();
                }
            }
        }
        let out = round(Tensor::from_vec(out, (tokens, value_heads, value), &Device::Cpu)?.to_dtype(x.dtype())?)?;
        let gates = projected[3].reshape((tokens, value_heads, value))?;
        let normed = self.normed(&out)?;
        let gated =
            round((normed.to_dtype(DType::F64)? * silu(&gates.to_dtype(DType::F64)?, 1.0)?)?.to_dtype(x.dtype())?)?;
        round(self.output.forward(&gated.reshape((tokens, value_heads * value))?)?)
    }

    /// Normalizes each head of `x`, `(tokens, heads, value)`; the factors do not begin at one.
    fn normed(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let wide = x.to_dtype(DType::F64)?;
        let mean = (wide.sqr()?.mean_keepdim(2)? + self.eps)?;
        let normed = self.source.round(wide.broadcast_div(&mean.sqrt()?)?.to_dtype(x.dtype())?)?;
        self.source.round(normed.broadcast_mul(&self.norm)?)
    }
}

/// Reads the projections of Qwen3.5.
fn stacked(source: WeightSource<'_>, sizes: DeltaSizes) -> Result<Vec<Linear>> {
    let (keys, values) = (sizes.key_heads * sizes.key, sizes.value_heads * sizes.value);
    let qkv = source.plain("linear_attn.in_proj_qkv")?;
    let mut all = vec![qkv.rows(0, keys)?, qkv.rows(keys, keys)?, qkv.rows(2 * keys, values)?];
    for name in ["z", "b", "a"] {
        all.push(source.plain(&format!("linear_attn.in_proj_{name}"))?);
    }
    Ok(all)
}

/// Reads the projections of Qwen3-Next, whose rows belong to key heads, and within these to the parts.
fn by_key_heads(source: WeightSource<'_>, sizes: DeltaSizes) -> Result<Vec<Linear>> {
    let per_key = sizes.value_heads / sizes.key_heads;
    let mut all = Vec::new();
    let parts =
        [("qkvz", vec![sizes.key, sizes.key, per_key * sizes.value, per_key * sizes.value]), ("ba", vec![per_key; 2])];
    for (name, counts) in parts {
        let whole = source.plain(&format!("linear_attn.in_proj_{name}"))?.weight;
        let cols = whole.dim(1)?;
        let by_head = whole.reshape((sizes.key_heads, counts.iter().sum::<usize>(), cols))?;
        let mut first = 0;
        for count in counts {
            let part = by_head.narrow(1, first, count)?.contiguous()?;
            all.push(Linear::new(part.reshape((sizes.key_heads * count, cols))?, None));
            first += count;
        }
    }
    Ok(all)
}
