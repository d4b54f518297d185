//! Feed-forward part of a layer: dense, or experts selected by a router, in the layouts of Mixtral, Qwen and gpt-oss.

use super::RefDtype;
use super::adapters::{ALL, Adapters, Rows};
use super::config::{Activation, Config};
use super::layer::{Linear, softmax};
use super::weights::Weights;
use crate::error::{Context, Error, Result};
use candle_core::{Device, Tensor};

/// Values of the 16 E2M1 codes: one sign bit, two exponent bits, one mantissa bit.
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

pub(super) enum Mlp<'a> {
    Dense(Dense),
    Experts(Box<Experts<'a>>),
}

/// Dense MLP: `down(act(gate(x)) * up(x))`.
pub(super) struct Dense {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Activation,
    dtype: RefDtype,
}

/// Experts with their router; an expert is loaded when a token selects it.
pub(super) struct Experts<'a> {
    config: &'a Config,
    weights: &'a Weights,
    adapters: &'a Adapters,
    prefix: String,
    /// Canonical name of the experts' matrices, without that of the matrix.
    canonical: String,
    layout: Layout,
    router: Linear,
    dtype: RefDtype,
}

/// Layout of the experts of a layer in the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// Tensors `experts.N.w1`, `w3`, `w2`.
    Mixtral,
    /// Tensors `experts.N.gate_proj`, `up_proj`, `down_proj`.
    Qwen,
    /// Stacks `(experts, in, out)` with gate and up interleaved.
    Stacked,
    /// Stacks `(experts, out, in)` with gate and up interleaved, in blocks of 32 four-bit floats with a scale.
    Mxfp4,
}

impl<'a> Mlp<'a> {
    pub fn load(
        config: &'a Config,
        weights: &'a Weights,
        adapters: &'a Adapters,
        index: usize,
        dtype: RefDtype,
    ) -> Result<Mlp<'a>> {
        let layer = format!("model.layers.{index}");
        let mlp = format!("{layer}.mlp");
        let changed = |linear, name: &str| adapters.change(linear, &format!("{mlp}.{name}.weight"), ALL);
        let of = |prefix: String, router: &str, layout| -> Result<Mlp<'a>> {
            let router = changed(Linear::load(weights, &format!("{prefix}.{router}"), dtype)?, "router")?;
            let canonical = format!("{mlp}.experts");
            let experts = Experts { config, weights, adapters, prefix, canonical, layout, router, dtype };
            Ok(Mlp::Experts(Box::new(experts)))
        };
        let has = |name: &str| weights.has(&format!("{layer}.{name}"));
        let sparse = config.experts.count > 0 && !config.dense[index];
        if sparse && has("block_sparse_moe.gate.weight") {
            return of(format!("{layer}.block_sparse_moe"), "gate", Layout::Mixtral);
        }
        if sparse && has("mlp.gate.weight") {
            return of(mlp.clone(), "gate", Layout::Qwen);
        }
        if sparse && has("mlp.router.weight") {
            let blocks = has("mlp.experts.gate_up_proj_blocks");
            return of(mlp.clone(), "router", if blocks { Layout::Mxfp4 } else { Layout::Stacked });
        }
        let linear = |name: &str| Linear::load(weights, &format!("{mlp}.{name}"), dtype);
        let (gate, up) = if has("mlp.gate_up_proj.weight") {
            let both = linear("gate_up_proj")?;
            let half = both.weight.dim(0)? / 2;
            let part = |first| -> Result<Linear> { Ok(Linear::new(both.weight.narrow(0, first, half)?, None)) };
            (part(0)?, part(half)?)
        } else {
            (linear("gate_proj")?, linear("up_proj")?)
        };
        Ok(Mlp::Dense(Dense {
            gate: changed(gate, "gate_proj")?,
            up: changed(up, "up_proj")?,
            down: changed(linear("down_proj")?, "down_proj")?,
            activation: config.activation,
            dtype,
        }))
    }

    /// Computes the MLP; input and output are `(tokens, hidden)`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Mlp::Dense(dense) => Ok(dense.forward(x)?),
            Mlp::Experts(experts) => experts.forward(x),
        }
    }
}

impl Dense {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let gate = self.dtype.round(self.gate.forward(x)?)?;
        let up = self.dtype.round(self.up.forward(x)?)?;
        let inner = match self.activation {
            Activation::Silu => (silu(&gate, 1.0)? * up)?,
            Activation::GeluTanh => (gate.gelu()? * up)?,
            Activation::Clamped(limit) => {
                let gate = gate.minimum(limit)?;
                let up = up.clamp(-limit, limit)?;
                ((up + 1.0)? * silu(&gate, 1.702)?)?
            }
        };
        self.dtype.round(self.down.forward(&self.dtype.round(inner)?)?)
    }
}

/// Returns `x * sigmoid(alpha * x)`.
fn silu(x: &Tensor, alpha: f64) -> candle_core::Result<Tensor> {
    x / ((x * -alpha)?.exp()? + 1.0)?
}

impl Experts<'_> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (tokens, hidden) = x.dims2()?;
        let choice = self.choose(x)?;
        let mut sum = vec![0f32; tokens * hidden];
        for expert in 0..self.config.experts.count {
            let (rows, shares): (Vec<u32>, Vec<f32>) =
                choice.iter().filter(|c| c.1 == expert).map(|c| (c.0 as u32, c.2)).unzip();
            if rows.is_empty() {
                continue;
            }
            let dense = self.expert(expert)?;
            let x = x.index_select(&Tensor::new(rows.as_slice(), &Device::Cpu)?, 0)?;
            let y = dense.forward(&x)?.to_vec2::<f32>()?;
            for ((row, share), y) in rows.iter().zip(shares).zip(y) {
                let sum = &mut sum[*row as usize * hidden..][..hidden];
                sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += share * y);
            }
        }
        Ok(self.dtype.round(Tensor::from_vec(sum, (tokens, hidden), &Device::Cpu)?)?)
    }

    /// Selects the experts of each token: `(token, expert, weight)`.
    fn choose(&self, x: &Tensor) -> candle_core::Result<Vec<(usize, usize, f32)>> {
        let logits = self.dtype.round(self.router.forward(x)?)?;
        let all = softmax(&logits, None)?.to_vec2::<f32>()?;
        let mut choice = Vec::new();
        for (token, probabilities) in all.into_iter().enumerate() {
            let mut order: Vec<usize> = (0..probabilities.len()).collect();
            order.sort_by(|a, b| probabilities[*b].total_cmp(&probabilities[*a]));
            order.truncate(self.config.experts.chosen);
            let total: f32 = order.iter().map(|e| probabilities[*e]).sum();
            // A softmax over the selected logits equals these probabilities divided by their sum.
            let divisor = if self.config.experts.normalized { total } else { 1.0 };
            choice.extend(order.into_iter().map(|e| (token, e, probabilities[e] / divisor)));
        }
        Ok(choice)
    }

    fn expert(&self, index: usize) -> Result<Dense> {
        let dtype = self.dtype;
        let linear = |name: &str| Linear::load(self.weights, &format!("{}.experts.{index}.{name}", self.prefix), dtype);
        let bias = |name: &str| {
            let name = format!("{}.experts.{name}_bias", self.prefix);
            if self.weights.has(&name) { self.weights.row(&name, index, dtype).map(Some) } else { Ok(None) }
        };
        let (gate, up, down) = match self.layout {
            Layout::Mixtral => (linear("w1")?, linear("w3")?, linear("w2")?),
            Layout::Qwen => (linear("gate_proj")?, linear("up_proj")?, linear("down_proj")?),
            Layout::Stacked | Layout::Mxfp4 => {
                let both = Linear::new(self.matrix("gate_up_proj", index)?, bias("gate_up_proj")?);
                let down = Linear::new(self.matrix("down_proj", index)?, bias("down_proj")?);
                (every_second(&both, 0)?, every_second(&both, 1)?, down)
            }
        };
        // The rows of the canonical gate_up_proj alternate in every family.
        let changed = |linear, name: &str, first, step| {
            self.adapters.change(linear, &format!("{}.{name}", self.canonical), Rows { index, first, step })
        };
        Ok(Dense {
            gate: changed(gate, "gate_up_proj", 0, 2)?,
            up: changed(up, "gate_up_proj", 1, 2)?,
            down: changed(down, "down_proj", 0, 1)?,
            activation: self.config.activation,
            dtype,
        })
    }

    /// Returns a matrix of an expert as `(out, in)`.
    fn matrix(&self, name: &str, index: usize) -> Result<Tensor> {
        let name = format!("{}.experts.{name}", self.prefix);
        if self.layout == Layout::Stacked {
            return Ok(self.weights.row(&name, index, self.dtype)?.t()?.contiguous()?);
        }
        let (shape, blocks) = self.weights.bytes(&format!("{name}_blocks"), index)?;
        let (_, scales) = self.weights.bytes(&format!("{name}_scales"), index)?;
        let &[rows, per_row, 16] = shape.as_slice() else {
            return Err(Error::corrupt(format!("found blocks of shape {shape:?}, expected (rows, blocks, 16)")))
                .tensor(&name);
        };
        if scales.len() != rows * per_row {
            return Err(Error::corrupt(format!(
                "found {} scales, expected one for each of {} blocks",
                scales.len(),
                rows * per_row
            )))
            .tensor(&name);
        }
        let mut values = Vec::with_capacity(blocks.len() * 2);
        for (block, scale) in blocks.chunks_exact(16).zip(scales) {
            let scale = 2f32.powi(i32::from(scale) - 127);
            let nibbles = block.iter().flat_map(|b| [b & 15, b >> 4]);
            values.extend(nibbles.map(|nibble| E2M1[usize::from(nibble)] * scale));
        }
        let weight = Tensor::from_vec(values, (rows, per_row * 32), &Device::Cpu);
        weight.and_then(|weight| self.dtype.round(weight)).tensor(&name)
    }
}

/// Selects the rows `first`, `first + 2`, …
fn every_second(both: &Linear, first: usize) -> candle_core::Result<Linear> {
    let split = |t: &Tensor| {
        let (rows, rest) = (t.dim(0)? / 2, t.dims()[1..].to_vec());
        t.reshape([vec![rows, 2], rest].concat())?.narrow(1, first, 1)?.squeeze(1)?.contiguous()
    };
    Ok(Linear::new(split(&both.weight)?, both.bias.as_ref().map(split).transpose()?))
}
