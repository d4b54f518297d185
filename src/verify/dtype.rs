//! Type in which the reference computes.

#[cfg(feature = "reference")]
use candle_core::{DType, Tensor};

/// Type to which the reference rounds weights and intermediate results.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RefDtype {
    /// No rounding beyond f32.
    #[default]
    F32,
    /// Weights and the results of each operation are rounded to bf16, as `torch_dtype=bfloat16` does.
    Bf16,
}

#[cfg(feature = "reference")]
impl RefDtype {
    pub(super) fn round(self, x: Tensor) -> candle_core::Result<Tensor> {
        match self {
            RefDtype::F32 => Ok(x),
            RefDtype::Bf16 => x.to_dtype(DType::BF16)?.to_dtype(DType::F32),
        }
    }

    /// Rounds a factor that transformers stores in the dtype of the model.
    pub(super) fn round_factor(self, factor: f64) -> f64 {
        match self {
            RefDtype::F32 => factor,
            RefDtype::Bf16 => half::bf16::from_f64(factor).to_f64(),
        }
    }
}
