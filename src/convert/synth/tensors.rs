//! Which tensors a checkpoint of a given configuration holds: names, shapes, dtypes and distributions, in model order.

use super::values::Values;
use crate::convert::arch::{Expected, expected_tensors};
use crate::dtype::DType;
use crate::model_config::ModelConfig;
use crate::role::Role;

/// One tensor of the checkpoint to be.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Hugging Face name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape as the checkpoint stores it.
    pub shape: Vec<usize>,
    /// How its numbers are distributed.
    pub values: Values,
}

impl Tensor {
    /// Elements of one row: the unit that is generated at once. MXFP4 keeps `(blocks, 16)` of an output row together.
    pub fn row_elements(&self) -> usize {
        match self.values {
            Values::Mxfp4Codes { .. } => self.shape[self.shape.len() - 2..].iter().product(),
            _ => *self.shape.last().expect("tensors have a shape"),
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape.iter().product::<usize>() / self.row_elements()
    }

    /// Size in bytes.
    pub fn nbytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.size() as u64
    }

    /// What shares row scales: the codes and exponents of one MXFP4 tensor.
    pub fn group(&self) -> &str {
        self.name.strip_suffix("_blocks").or(self.name.strip_suffix("_scales")).unwrap_or(&self.name)
    }

    /// Weights this tensor stands for; exponents stand for none of their own.
    pub fn parameters(&self) -> u64 {
        let elements = self.shape.iter().product::<usize>() as u64;
        match self.values {
            Values::Normal { .. } => elements,
            Values::Mxfp4Codes { .. } => 2 * elements,
            Values::Mxfp4Scales { .. } => 0,
        }
    }
}

/// All tensors of a model with floats in `dtype` and, with `mxfp4`, its experts in 4 bit.
pub fn list(model: &ModelConfig, dtype: DType, mxfp4: bool) -> Vec<Tensor> {
    expected_tensors(model)
        .into_iter()
        .flat_map(|tensor| match Role::of(&tensor.name) {
            Role::Experts if mxfp4 => mxfp4_experts(&tensor),
            Role::Experts => vec![float_experts(tensor, dtype)],
            role => {
                let values = distribution(role, &tensor.shape);
                vec![Tensor { name: tensor.name, dtype, shape: tensor.shape, values }]
            }
        })
        .collect()
}

/// Weights have deviation 1/sqrt(in): a product with a normalised vector keeps its size.
fn distribution(role: Role, shape: &[usize]) -> Values {
    match role {
        Role::Norm => Values::Normal { mean: 1.0, std: 0.05 },
        Role::Bias => Values::Normal { mean: 0.0, std: 0.05 },
        Role::Sinks => Values::Normal { mean: 0.0, std: 1.0 },
        _ => Values::Normal { mean: 0.0, std: deviation(shape) },
    }
}

fn deviation(shape: &[usize]) -> f32 {
    1.0 / (*shape.last().expect("tensors have a shape") as f32).sqrt()
}

/// Codes `(experts, out, in / 32, 16)` and exponents `(experts, out, in / 32)`.
fn mxfp4_experts(tensor: &Expected) -> Vec<Tensor> {
    let std = deviation(&tensor.shape);
    let (&columns, rows) = tensor.shape.split_last().expect("experts have a shape");
    let part = |suffix: &str, tail: &[usize], values| Tensor {
        name: format!("{}_{suffix}", tensor.name),
        dtype: DType::U8,
        shape: [rows, tail].concat(),
        values,
    };
    vec![
        part("blocks", &[columns / 32, 16], Values::Mxfp4Codes { std }),
        part("scales", &[columns / 32], Values::Mxfp4Scales { std }),
    ]
}

/// Hugging Face stores float experts as `(experts, in, out)`.
fn float_experts(tensor: Expected, dtype: DType) -> Tensor {
    let values = distribution(Role::Experts, &tensor.shape);
    let mut shape = tensor.shape;
    let last = shape.len() - 1;
    shape.swap(last - 1, last);
    Tensor { name: tensor.name, dtype, shape, values }
}
