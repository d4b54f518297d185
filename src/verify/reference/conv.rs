//! Gated short convolution of the reference (`Lfm2ShortConv`).

use super::linear::{Linear, WeightSource};
use crate::error::Result;
use candle_core::{DType, Tensor};

pub(super) struct ShortConv<'a> {
    source: WeightSource<'a>,
    input: Linear,
    /// Factors: `(channels, width)`.
    kernel: Tensor,
    bias: Option<Tensor>,
    output: Linear,
}

impl<'a> ShortConv<'a> {
    pub fn load(source: WeightSource<'a>, width: usize) -> Result<ShortConv<'a>> {
        let kernel = source.get("conv.conv.weight")?;
        let channels = kernel.dim(0)?;
        Ok(ShortConv {
            source,
            input: source.linear("conv.in_proj")?,
            kernel: kernel.reshape((channels, width))?,
            bias: source.find("conv.conv.bias")?,
            output: source.linear("conv.out_proj")?,
        })
    }

    /// Computes the output for `x`, `(tokens, hidden)`.
    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let hidden = x.dim(1)?;
        let round = |x: Tensor| self.source.round(x);
        let projected = round(self.input.forward(x)?)?;
        let [b, c, x] = [0, 1, 2].map(|part| projected.narrow(1, part * hidden, hidden));
        let mixed = round(convolve(&round((b? * x?)?)?, &self.kernel, self.bias.as_ref())?)?;
        round(self.output.forward(&round((c? * mixed)?)?)?)
    }
}

/// Convolves the channels of `x`, `(tokens, channels)`, over the positions up to each token, in f64. `kernel` has the
/// factors, `(channels, width)`.
pub(super) fn convolve(x: &Tensor, kernel: &Tensor, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
    let (tokens, channels) = x.dims2()?;
    let (kernel, width) = (kernel.to_dtype(DType::F64)?, kernel.dim(1)?);
    let padded = x.to_dtype(DType::F64)?.pad_with_zeros(0, width - 1, 0)?;
    let mut sum = Tensor::zeros((tokens, channels), DType::F64, x.device())?;
    for at in 0..width {
        let factors = kernel.narrow(1, at, 1)?.reshape((1, channels))?;
        sum = (sum + padded.narrow(0, at, tokens)?.broadcast_mul(&factors)?)?;
    }
    if let Some(bias) = bias {
        sum = sum.broadcast_add(&bias.to_dtype(DType::F64)?)?;
    }
    sum.to_dtype(x.dtype())
}
