//! Type in which the reference computes.

#[cfg(feature = "reference")]
use candle_core::{DType, Tensor};

/// Type in which the reference computes, and to which it rounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RefDtype {
    /// f32, as transformers does by default.
    #[default]
    F32,
    /// f64, with the rotations of f32 models: for differences that are smaller than the rounding of f32.
    F64,
    /// Weights and the results of each operation are rounded to bf16, as `torch_dtype=bfloat16` does.
    Bf16,
}

#[cfg(feature = "reference")]
impl RefDtype {
    /// Returns the type of all tensors.
    pub(super) fn wide(self) -> DType {
        match self {
            RefDtype::F32 | RefDtype::Bf16 => DType::F32,
            RefDtype::F64 => DType::F64,
        }
    }

    /// Rounds numbers of any type, and returns them in the type of all tensors.
    pub(super) fn round(self, x: Tensor) -> candle_core::Result<Tensor> {
        match self {
            RefDtype::F32 | RefDtype::F64 => x.to_dtype(self.wide()),
            RefDtype::Bf16 => x.to_dtype(DType::BF16)?.to_dtype(DType::F32),
        }
    }

    /// Rounds a factor that transformers stores in the dtype of the model.
    pub(super) fn round_factor(self, factor: f64) -> f64 {
        match self {
            RefDtype::F32 | RefDtype::F64 => factor,
            RefDtype::Bf16 => half::bf16::from_f64(factor).to_f64(),
        }
    }
}
