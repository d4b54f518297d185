//! Lists the canonical tensors of a model from its description alone.

use crate::catalogue;
use crate::model_config::ModelConfig;

/// A tensor that a model must have.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpectedTensor {
    /// Canonical name (see [`crate::catalogue`]).
    pub name: String,
    /// Canonical shape.
    pub shape: Vec<usize>,
}

/// Returns all tensors of a model, in the order in which a forward pass needs them.
pub fn expected_tensors(model: &ModelConfig) -> Vec<ExpectedTensor> {
    catalogue::tensors(model).map(|(name, shape)| ExpectedTensor { name, shape }).collect()
}
