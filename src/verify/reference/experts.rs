//! Experts of a layer, selected by a router, in the layouts of Mixtral, Qwen, DeepSeek, Gemma 4 and gpt-oss.

use super::adapters::Rows;
use super::config::Activation;
use super::linear::{Linear, WeightSource};
use super::mlp::Dense;
use super::norm::sigmoid;
use super::weights::Weights;
use crate::error::{Context, Error, Result};
use crate::verify::dtype::RefDtype;
use candle_core::{DType, Device, Tensor};

/// Values of the 16 E2M1 codes: one sign bit, two exponent bits, one mantissa bit.
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Experts with their router; an expert is loaded when a token selects it.
pub(super) struct Experts<'a> {
    source: WeightSource<'a>,
    /// Name of the module that has the experts.
    module: String,
    layout: Layout,
    router: Linear,
    /// Numbers that are added to the scores of the experts for the choice, if there are any.
    bias: Option<Vec<f64>>,
    /// Factors of the weights of the experts, if there are any.
    factors: Option<Vec<f64>>,
    /// MLP that computes every token, if there is one.
    shared: Option<Dense<'a>>,
    /// Projections to the vectors that experts read, and back from those which they write, if these are narrower.
    latent: Option<[Linear; 2]>,
    /// Vector whose product with the input decides how much of the output of `shared` is added.
    shared_gate: Option<Linear>,
}

/// Layout of the experts of a layer in the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// Tensors `experts.N.w1`, `w3`, `w2`.
    Mixtral,
    /// Tensors `experts.N.gate_proj`, `up_proj`, `down_proj`.
    Separate,
    /// Stacks `(experts, out, in)` with the rows of gate before those of up.
    Fused,
    /// Stacks `(experts, out, in)` called `input_linear`, with the rows of gate before those of up, and
    /// `output_linear`.
    Granite,
    /// Stacks `(experts, in, out)` with gate and up interleaved.
    Stacked,
    /// Stacks `(experts, out, in)` with gate and up interleaved, in blocks of 32 four-bit floats with a scale.
    Mxfp4,
}

impl<'a> Experts<'a> {
    pub fn load(source: WeightSource<'a>) -> Result<Experts<'a>> {
        let (layer, router, layout) = if source.has("block_sparse_moe.gate.weight") {
            ("block_sparse_moe.", "block_sparse_moe.gate", Layout::Mixtral)
        } else if source.has("block_sparse_moe.router.layer.weight") {
            ("block_sparse_moe.", "block_sparse_moe.router.layer", Layout::Granite)
        } else if source.has("feed_forward.gate.weight") {
            ("feed_forward.", "feed_forward.gate", Layout::Mixtral)
        } else if source.has("mlp.gate.weight") {
            let fused = source.has("mlp.experts.gate_up_proj");
            ("mlp.", "mlp.gate", if fused { Layout::Fused } else { Layout::Separate })
        } else if source.has("router.proj.weight") {
            ("", "router.proj", Layout::Fused)
        } else {
            let blocks = source.has("mlp.experts.gate_up_proj_blocks");
            ("mlp.", "mlp.router", if blocks { Layout::Mxfp4 } else { Layout::Stacked })
        };
        let routing = source.config.routing;
        let numbers = |name: &str, dtype: RefDtype| -> Result<Option<Vec<f64>>> {
            let found = source.weights.find(&source.stored(name), dtype)?;
            Ok(found.map(|tensor| tensor.to_dtype(DType::F64)?.to_vec1()).transpose()?)
        };
        // transformers keeps this bias in f32 in models of any type.
        let bias = match routing.sigmoid {
            true => {
                let names = ["mlp.gate.e_score_correction_bias".into(), format!("{layer}e_score_correction_bias")];
                let names = names.into_iter().chain([format!("{layer}expert_bias")]);
                names.into_iter().try_fold(None, |found: Option<Vec<f64>>, name| {
                    Ok::<_, Error>(found.or(numbers(&name, RefDtype::F32)?))
                })?
            }
            false => None,
        };
        let module = if source.config.family.has_delta_nets() { "mlp.shared_expert" } else { "mlp.shared_experts" };
        let matrix = |leaf: &str| source.linear_as(&format!("{module}.{leaf}"), &format!("mlp.shared_experts.{leaf}"));
        let is_gated = source.config.activation != Activation::Relu2;
        let shared = match routing.shared {
            true if layout == Layout::Granite => Some(Dense::load(source, "mlp.shared_experts")?),
            true => {
                let gate = is_gated.then(|| matrix("gate_proj")).transpose()?;
                Some(Dense { source, gate, up: matrix("up_proj")?, down: matrix("down_proj")? })
            }
            false => None,
        };
        let shared_gate = match source.has("mlp.shared_expert_gate.weight") {
            true => Some(source.linear_as("mlp.shared_expert_gate", "mlp.router.shared_expert_gate")?),
            false => None,
        };
        Ok(Experts {
            source,
            module: source.stored(&format!("{layer}experts")),
            layout,
            router: source.linear_as(router, "mlp.router")?,
            bias,
            factors: numbers("router.per_expert_scale", source.dtype)?,
            shared,
            latent: latent_projections(source)?,
            shared_gate,
        })
    }

    /// Computes the output for `x`, `(tokens, hidden)`; the router reads `routed`.
    pub fn forward(&self, x: &Tensor, routed: &Tensor) -> Result<Tensor> {
        let whole = x;
        let narrow = match &self.latent {
            Some([down, _]) => Some(self.source.round(down.forward(x)?)?),
            None => None,
        };
        let x = narrow.as_ref().unwrap_or(whole);
        let (tokens, hidden) = x.dims2()?;
        let routing = &self.source.config.routing;
        let mut logits = self.router.forward(routed)?;
        if !routing.wide {
            logits = self.source.round(logits)?;
        }
        let choice = routing.choose(&logits, self.bias.as_deref())?;
        let mut sum = vec![0f64; tokens * hidden];
        for expert in 0..routing.count {
            let factor = self.factors.as_ref().and_then(|factors| factors.get(expert)).unwrap_or(&1.0);
            let (rows, shares): (Vec<u32>, Vec<f64>) =
                choice.iter().filter(|c| c.expert == expert).map(|c| (c.token as u32, c.weight * factor)).unzip();
            if rows.is_empty() {
                continue;
            }
            let dense = self.expert(expert)?;
            let x = x.index_select(&Tensor::new(rows.as_slice(), &Device::Cpu)?, 0)?;
            let y = dense.forward(&x)?.to_dtype(DType::F64)?.to_vec2::<f64>()?;
            for ((row, share), y) in rows.iter().zip(shares).zip(y) {
                let sum = &mut sum[*row as usize * hidden..][..hidden];
                sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += share * y);
            }
        }
        let mut sum = self.source.round(Tensor::from_vec(sum, (tokens, hidden), &Device::Cpu)?)?;
        if let Some([_, up]) = &self.latent {
            sum = self.source.round(up.forward(&sum)?)?;
        }
        let x = whole;
        match &self.shared {
            Some(shared) => {
                let mut y = shared.forward(x)?;
                if let Some(gate) = &self.shared_gate {
                    let open = self.source.round(sigmoid(&self.source.round(gate.forward(x)?)?)?)?;
                    y = self.source.round(y.broadcast_mul(&open)?)?;
                }
                Ok(self.source.round((sum + y)?)?)
            }
            None => Ok(sum),
        }
    }

    fn expert(&self, index: usize) -> Result<Dense<'a>> {
        let (weights, dtype): (&Weights, RefDtype) = (self.source.weights, self.source.dtype);
        let is_gated = self.source.config.activation != Activation::Relu2;
        let linear = |name: &str| Linear::load(weights, &format!("{}.{index}.{name}", self.module), dtype);
        let bias = |name: &str| {
            let name = format!("{}.{name}_bias", self.module);
            if weights.has(&name) { weights.row(&name, index, dtype).map(Some) } else { Ok(None) }
        };
        let (gate, up, down) = match self.layout {
            Layout::Mixtral => (Some(linear("w1")?), linear("w3")?, linear("w2")?),
            Layout::Separate => {
                let gate = is_gated.then(|| linear("gate_proj")).transpose()?;
                (gate, linear("up_proj")?, linear("down_proj")?)
            }
            Layout::Granite => {
                let stack = |name: &str| {
                    let name = self.source.name(&format!("block_sparse_moe.{name}.weight"));
                    Ok::<_, Error>(Linear::new(weights.row(&name, index, dtype)?, None))
                };
                let both = stack("input_linear")?;
                let half = both.weight.dim(0)? / 2;
                (Some(both.rows(0, half)?), both.rows(half, half)?, stack("output_linear")?)
            }
            Layout::Fused | Layout::Stacked | Layout::Mxfp4 => {
                let both = Linear::new(self.matrix("gate_up_proj", index)?, bias("gate_up_proj")?);
                let down = Linear::new(self.matrix("down_proj", index)?, bias("down_proj")?);
                let half = both.weight.dim(0)? / 2;
                match self.layout {
                    Layout::Fused => (Some(both.rows(0, half)?), both.rows(half, half)?, down),
                    _ => (Some(every_second(&both, 0)?), every_second(&both, 1)?, down),
                }
            }
        };
        // The rows of the canonical gate_up_proj alternate in every family.
        let changed = |linear, name: &str, first, step| {
            let name = self.source.name(&format!("mlp.experts.{name}"));
            self.source.adapters.change(linear, &name, Rows { index, first, step })
        };
        Ok(Dense {
            source: self.source,
            gate: gate.map(|gate| changed(gate, "gate_up_proj", 0, 2)).transpose()?,
            up: if is_gated { changed(up, "gate_up_proj", 1, 2)? } else { changed(up, "up_proj", 0, 1)? },
            down: changed(down, "down_proj", 0, 1)?,
        })
    }

    /// Returns a matrix of an expert as `(out, in)`.
    fn matrix(&self, name: &str, index: usize) -> Result<Tensor> {
        let (name, weights, dtype) = (format!("{}.{name}", self.module), self.source.weights, self.source.dtype);
        match self.layout {
            Layout::Stacked => return Ok(weights.row(&name, index, dtype)?.t()?.contiguous()?),
            Layout::Fused => {
                let found = weights.row(&name, index, dtype)?;
                // Qwen3-VL-MoE stores its stacks as `(experts, in, out)`.
                let hidden = self.router.weight.dim(1)?;
                let axis = usize::from(name.ends_with("gate_up_proj"));
                return if found.dim(axis)? == hidden { Ok(found) } else { Ok(found.t()?.contiguous()?) };
            }
            _ => {}
        }
        let (shape, blocks) = weights.bytes(&format!("{name}_blocks"), index)?;
        let (_, scales) = weights.bytes(&format!("{name}_scales"), index)?;
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
        weight.and_then(|weight| dtype.round(weight)).tensor(&name)
    }
}

/// Reads the projections of experts that read and write narrower vectors, if they are such.
fn latent_projections(source: WeightSource<'_>) -> Result<Option<[Linear; 2]>> {
    if !source.has("mlp.fc1_latent_proj.weight") {
        return Ok(None);
    }
    let down = source.linear_as("mlp.fc1_latent_proj", "mlp.latent_down_proj")?;
    Ok(Some([down, source.linear_as("mlp.fc2_latent_proj", "mlp.latent_up_proj")?]))
}

/// Selects the rows `first`, `first + 2`, …
fn every_second(both: &Linear, first: usize) -> candle_core::Result<Linear> {
    let split = |t: &Tensor| {
        let (rows, rest) = (t.dim(0)? / 2, t.dims()[1..].to_vec());
        t.reshape([vec![rows, 2], rest].concat())?.narrow(1, first, 1)?.squeeze(1)?.contiguous()
    };
    Ok(Linear::new(split(&both.weight)?, both.bias.as_ref().map(split).transpose()?))
}
