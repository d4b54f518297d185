//! Norms and other functions of one row: softmax and sigmoid.

use super::config::NormKind;
use candle_core::{D, DType, Device, Tensor};

/// Norm along the last dimension.
pub(super) struct Norm {
    /// Weight, if there is one: `(width)`.
    weight: Option<Tensor>,
    kind: NormKind,
    eps: f64,
}

impl Norm {
    pub fn new(weight: Tensor, kind: NormKind, eps: f64) -> Norm {
        Norm { weight: Some(weight), kind, eps }
    }

    /// Makes an RMS norm without weight.
    pub fn unit(eps: f64) -> Norm {
        Norm { weight: None, kind: NormKind::Rms, eps }
    }

    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (mut wide, width) = (x.to_dtype(DType::F64)?, x.dim(D::Minus1)? as f64);
        if self.kind == NormKind::Layer {
            wide = wide.broadcast_sub(&(wide.sum_keepdim(D::Minus1)? / width)?)?;
        }
        let mean = (wide.sqr()?.sum_keepdim(D::Minus1)? / width)?;
        let normed = wide.broadcast_div(&(mean + self.eps)?.sqrt()?)?.to_dtype(x.dtype())?;
        match (&self.weight, self.kind) {
            (None, _) => Ok(normed),
            (Some(weight), NormKind::RmsOnePlus) => normed.broadcast_mul(&(weight + 1.0)?),
            (Some(weight), NormKind::Rms | NormKind::Layer) => normed.broadcast_mul(weight),
        }
    }
}

/// Computes the softmax along the last dimension; a sink is one more score, whose probability is dropped.
pub(super) fn softmax(scores: &Tensor, sink: Option<f64>) -> candle_core::Result<Tensor> {
    let mut max = scores.max_keepdim(D::Minus1)?;
    let sink = sink.map(|sink| Tensor::full(sink, max.shape(), &Device::Cpu)?.to_dtype(max.dtype())).transpose()?;
    if let Some(sink) = &sink {
        max = max.maximum(sink)?;
    }
    let exp = scores.broadcast_sub(&max)?.exp()?;
    let mut sum = exp.sum_keepdim(D::Minus1)?;
    if let Some(sink) = sink {
        sum = (sum + (sink - max)?.exp()?)?;
    }
    exp.broadcast_div(&sum)
}

/// Returns `1 / (1 + exp(-x))`.
pub(super) fn sigmoid(x: &Tensor) -> candle_core::Result<Tensor> {
    ((x * -1.0)?.exp()? + 1.0)?.recip()
}

/// Returns `x * sigmoid(alpha * x)`.
pub(super) fn silu(x: &Tensor, alpha: f64) -> candle_core::Result<Tensor> {
    x / ((x * -alpha)?.exp()? + 1.0)?
}
