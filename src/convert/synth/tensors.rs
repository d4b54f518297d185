//! Lists the tensors of a checkpoint with a given configuration: names, shapes, dtypes and distributions, in model
//! order.

use super::values::Values;
use crate::catalogue::Role;
use crate::convert::arch::{Arch, ExpectedTensor, View, expected_tensors};
use crate::convert::published::parts_of_mxfp4;
use crate::convert::sharding::Listed;
use crate::dtype::DType;
use crate::model_config::ModelConfig;
use std::collections::HashSet;

/// One tensor of the planned checkpoint, and the distribution of its numbers.
pub type Tensor = Listed<Values>;

impl Tensor {
    /// Returns the number of elements of one row, which are generated at once. For codes of MXFP4, a row is the last
    /// two axes, `(blocks, 16)`: the codes of one row of the matrix.
    pub fn row_elements(&self) -> usize {
        match self.content {
            Values::Mxfp4Codes { .. } => self.shape[self.shape.len() - 2..].iter().product(),
            _ => *self.shape.last().expect("tensors have a shape"),
        }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.shape.iter().product::<usize>() / self.row_elements()
    }

    /// Returns the name of the group that shares row scales: the codes and exponents of one MXFP4 tensor.
    pub fn group(&self) -> &str {
        self.name.strip_suffix("_blocks").or(self.name.strip_suffix("_scales")).unwrap_or(&self.name)
    }

    /// Returns the number of weights of this tensor; tensors of exponents have none.
    pub fn parameters(&self) -> u64 {
        let elements = self.shape.iter().product::<usize>() as u64;
        match self.content {
            Values::Normal { .. } => elements,
            Values::Mxfp4Codes { .. } => 2 * elements,
            Values::Mxfp4Scales { .. } => 0,
        }
    }
}

/// Lists all tensors of a model with floats in `dtype` and, with `mxfp4`, its experts in 4 bits, under the names
/// of its family.
pub fn list(arch: &Arch, model: &ModelConfig, dtype: DType, mxfp4: bool) -> Vec<Tensor> {
    let mut listed = HashSet::new();
    let mut tensors = Vec::new();
    for expected in expected_tensors(model) {
        let views = arch.views(model, &expected);
        let view =
            views.iter().find(|view| mxfp4 || !matches!(view, View::Coded { .. })).expect("each has a float view");
        let values = distribution(model, &expected);
        if let View::Coded { source } = view {
            let std = deviation(&expected.shape);
            let contents = [Values::Mxfp4Codes { std }, Values::Mxfp4Scales { std }];
            for ((name, shape), content) in parts_of_mxfp4(source, &expected.shape).into_iter().zip(contents) {
                tensors.push(Tensor { name, dtype: DType::U8, shape, content });
            }
            continue;
        }
        for (source, shape) in view.source_shapes(&expected.shape) {
            // A fused tensor is the source of several canonical tensors.
            if listed.insert(source.to_string()) {
                tensors.push(Tensor { name: source.to_string(), dtype, shape, content: values.clone() });
            }
        }
    }
    tensors
}

/// Returns the distribution of a tensor. Weights have a standard deviation of 1/sqrt(in), so that a product with a
/// normalized vector keeps its magnitude.
fn distribution(model: &ModelConfig, tensor: &ExpectedTensor) -> Values {
    // The norm inside of a delta net does not add 1 to its weights.
    let plus_one = model.norm_plus_one && !tensor.name.ends_with("linear_attn.norm.weight");
    match Role::of(&tensor.name) {
        Role::Norm => Values::Normal { mean: if plus_one { 0.0 } else { 1.0 }, std: 0.05 },
        Role::Bias => Values::Normal { mean: 0.0, std: 0.05 },
        Role::Sinks => Values::Normal { mean: 0.0, std: 1.0 },
        _ => Values::Normal { mean: 0.0, std: deviation(&tensor.shape) },
    }
}

fn deviation(shape: &[usize]) -> f32 {
    1.0 / (*shape.last().expect("tensors have a shape") as f32).sqrt()
}
