//! Mamba-2 of the reference (`GraniteMoeHybridMambaLayer`, `NemotronHMamba2Mixer`): the recurrence token by token, in
//! f64.

use super::config::MambaSizes;
use super::conv::convolve;
use super::linear::{Linear, WeightSource};
use super::norm::silu;
use crate::error::Result;
use crate::verify::dtype::RefDtype;
use candle_core::{DType, Device, Tensor};

pub(super) struct Mamba<'a> {
    source: WeightSource<'a>,
    sizes: MambaSizes,
    /// Projections to the gate, x, B, C and the steps.
    projections: Vec<Linear>,
    /// Factors of the convolution, `(channels, width)`, and its bias, if any.
    kernel: Tensor,
    bias: Option<Tensor>,
    /// Factors of the steps in the logarithms of decays, numbers added before the softplus, and shares of x: one for
    /// each head.
    decay: Vec<f64>,
    step_bias: Vec<f64>,
    skip: Vec<f64>,
    norm: Tensor,
    eps: f64,
    output: Linear,
}

impl<'a> Mamba<'a> {
    pub fn load(source: WeightSource<'a>, sizes: MambaSizes) -> Result<Mamba<'a>> {
        let (values, keys) = (sizes.heads * sizes.head_dim, sizes.groups * sizes.state);
        let all = source.plain("mamba.in_proj")?;
        let (mut projections, mut first) = (Vec::new(), 0);
        for (name, rows) in [("z", values), ("x", values), ("b", keys), ("c", keys), ("dt", sizes.heads)] {
            projections.push(source.changed(all.rows(first, rows)?, &format!("mamba.{name}_proj"))?);
            first += rows;
        }
        let wide = |part: &str| -> Result<Vec<f64>> {
            let numbers = source.weights.get(&source.stored(&format!("mamba.{part}")), RefDtype::F32)?;
            Ok(numbers.to_dtype(DType::F64)?.to_vec1()?)
        };
        let kernel = source.get("mamba.conv1d.weight")?;
        let channels = kernel.dim(0)?;
        Ok(Mamba {
            source,
            sizes,
            projections,
            kernel: kernel.reshape((channels, kernel.elem_count() / channels))?,
            bias: source.find("mamba.conv1d.bias")?,
            decay: wide("A_log")?.into_iter().map(|x| -x.exp()).collect(),
            step_bias: wide("dt_bias")?,
            skip: wide("D")?,
            norm: source.get("mamba.norm.weight")?,
            eps: source.config.norms.eps,
            output: source.linear("mamba.out_proj")?,
        })
    }

    /// Computes the output for `x`, `(tokens, hidden)`.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let round = |x: Tensor| self.source.round(x);
        let MambaSizes { groups, heads, state, head_dim } = self.sizes;
        let (tokens, dtype) = (x.dim(0)?, x.dtype());
        let mut projected = Vec::new();
        for projection in &self.projections {
            projected.push(round(projection.forward(x)?)?);
        }
        let mixed = round(convolve(&Tensor::cat(&projected[1..4], 1)?, &self.kernel, self.bias.as_ref())?)?;
        let mixed = round(silu(&mixed, 1.0)?)?;
        let part = |first: usize, count: usize, width: usize| -> candle_core::Result<Vec<Vec<Vec<f64>>>> {
            let part = mixed.narrow(1, first, count * width)?.reshape((tokens, count, width))?;
            part.to_dtype(DType::F64)?.to_vec3()
        };
        let (values, keys) = (heads * head_dim, groups * state);
        let x = part(0, heads, head_dim)?;
        let (b, c) = (part(values, groups, state)?, part(values + keys, groups, state)?);
        let steps: Vec<Vec<f64>> = projected[4].to_dtype(DType::F64)?.to_vec2()?;
        let mut out = vec![0f64; tokens * values];
        for head in 0..heads {
            let group = head * groups / heads;
            let mut memory = vec![0f64; state * head_dim];
            for t in 0..tokens {
                let step = steps[t][head] + self.step_bias[head];
                let step = step.max(0.0) + (-step.abs()).exp().ln_1p();
                let decay = (self.decay[head] * step).exp();
                for j in 0..head_dim {
                    let mut read = 0.0;
                    for i in 0..state {
                        let cell = &mut memory[i * head_dim + j];
                        *cell = *cell * decay + b[t][group][i] * step * x[t][head][j];
                        read += *cell * c[t][group][i];
                    }
                    out[(t * heads + head) * head_dim + j] = read + self.skip[head] * x[t][head][j];
                }
            }
        }
        let out = Tensor::from_vec(out, (tokens, values), &Device::Cpu)?;
        let gated = (out * silu(&projected[0].to_dtype(DType::F64)?, 1.0)?)?;
        // Each group has a norm of its own.
        let gated = gated.reshape((tokens, groups, values / groups))?;
        let mean = (gated.sqr()?.mean_keepdim(2)? + self.eps)?;
        let normed = gated.broadcast_div(&mean.sqrt()?)?.reshape((tokens, values))?;
        let normed = round(normed.to_dtype(dtype)?)?;
        round(self.output.forward(&round(normed.broadcast_mul(&self.norm)?)?)?)
    }
}
