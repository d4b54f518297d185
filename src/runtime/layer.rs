//! Description of a model's layers: the blocks of each layer, their order, sizes, windows and activations.
//!
//! Layers are built once, when tensors are bound, and are the same for all devices. Each block normalizes the
//! residual stream, computes its operation, normalizes the result if the model does so, and adds it to the residual
//! stream. Devices differ only in the storage of weights ([`Storage`]).

use crate::model_config::{Activation, RouterSoftmax};
use std::fmt::Debug;

/// Storage of weights on a device.
pub trait Storage: Debug {
    /// A matrix with its optional bias.
    type Matrix: Debug;
    /// One matrix per expert.
    type Stack: Debug;
    /// A vector of f32.
    type Vector: Debug;
}

/// A decoder layer.
#[derive(Debug)]
pub struct Layer<S: Storage> {
    /// Blocks in the order of computation.
    pub blocks: Vec<Block<S>>,
}

/// A residual block: `x += post_norm(operation(norm(x)))`.
#[derive(Debug)]
pub struct Block<S: Storage> {
    /// Norm of the input: `(hidden)`.
    pub norm: S::Vector,
    /// The operation between norm and residual addition.
    pub operation: Operation<S>,
    /// Norm of the output, where the model has one: `(hidden)`.
    pub post_norm: Option<S::Vector>,
}

/// The operation of a block. A layer holds only a few, so the size difference between variants does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub enum Operation<S: Storage> {
    /// Grouped-query attention.
    Attention(Attention<S>),
    /// A gated MLP.
    Mlp(Mlp<S>),
    /// A router and its experts.
    Moe(Moe<S>),
}

/// Attention: projections, norms of heads, rotation, scores, weighted values, output projection.
#[derive(Debug)]
pub struct Attention<S: Storage> {
    /// Sizes and variants.
    pub shape: AttentionShape,
    /// Query projection: `(n_heads * head_dim, hidden)`.
    pub q: S::Matrix,
    /// Key projection: `(n_kv_heads * head_dim, hidden)`.
    pub k: S::Matrix,
    /// Value projection: `(n_kv_heads * head_dim, hidden)`.
    pub v: S::Matrix,
    /// Output projection: `(hidden, n_heads * head_dim)`.
    pub o: S::Matrix,
    /// Norms of each query head and of each key head, where the model has them: `(head_dim)` each.
    pub head_norms: Option<[S::Vector; 2]>,
    /// Attention sinks, an extra logit of each head: `(n_heads)`.
    pub sinks: Option<S::Vector>,
}

/// Sizes and variants of attention in one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key/value heads.
    pub n_kv_heads: usize,
    /// Number of values per head.
    pub head_dim: usize,
    /// Kind of rotation, an index into the tables of angles: 0 for the model's usual rotation, 1 for its rotation in
    /// layers with a window, if that is another one (Gemma 3).
    pub rotary: usize,
    /// Number of positions a query attends to, including its own; `None` = all.
    pub window: Option<usize>,
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Softcap of the scores, which become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
}

/// A gated MLP: `down(activation(gate(x)) * up(x))`.
#[derive(Debug)]
pub struct Mlp<S: Storage> {
    /// Activation of the gate.
    pub activation: Activation,
    /// Number of rows of gate and of up.
    pub intermediate: usize,
    /// Gate projection: `(intermediate, hidden)`.
    pub gate: S::Matrix,
    /// Up projection: `(intermediate, hidden)`.
    pub up: S::Matrix,
    /// Down projection: `(hidden, intermediate)`.
    pub down: S::Matrix,
}

/// A mixture of experts, each a gated MLP.
#[derive(Debug)]
pub struct Moe<S: Storage> {
    /// Activation of the gates.
    pub activation: Activation,
    /// Number of rows of gate and of up of each expert.
    pub intermediate: usize,
    /// Number of experts.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Set of experts over which the weights of the chosen ones are normalized.
    pub softmax: RouterSoftmax,
    /// Router: `(experts, hidden)`.
    pub router: S::Matrix,
    /// One matrix `(2 * intermediate, hidden)` per expert, with alternating rows of gate and up.
    pub gate_up: S::Stack,
    /// One matrix `(hidden, intermediate)` per expert.
    pub down: S::Stack,
}
