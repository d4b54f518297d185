//! The layers of a model as data: which blocks a layer has, in which order, and with which sizes, windows and
//! activations.
//!
//! A layer is built once, when tensors are bound, and every device follows it: each block norms the residual stream,
//! computes its operation, norms the result where the model does so, and adds it to the residual stream. Devices differ
//! only in how weights are stored ([`Storage`]).

use crate::model_config::{Activation, RouterSoftmax};
use std::fmt::Debug;

/// How a device stores weights.
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
    /// In the order of computation.
    pub blocks: Vec<Block<S>>,
}

/// A residual block: `x += post_norm(operation(norm(x)))`.
#[derive(Debug)]
pub struct Block<S: Storage> {
    /// Norm of the input: `(hidden)`.
    pub norm: S::Vector,
    /// What is computed.
    pub operation: Operation<S>,
    /// Norm of the output, where the model has one: `(hidden)`.
    pub post_norm: Option<S::Vector>,
}

/// The operation of a block. A model holds few per layer, so the size of the smaller variants is no concern.
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
    /// `(n_heads * head_dim, hidden)`.
    pub q: S::Matrix,
    /// `(n_kv_heads * head_dim, hidden)`.
    pub k: S::Matrix,
    /// `(n_kv_heads * head_dim, hidden)`.
    pub v: S::Matrix,
    /// `(hidden, n_heads * head_dim)`.
    pub o: S::Matrix,
    /// Norms of each query head and of each key head, where the model has them: `(head_dim)` each.
    pub head_norms: Option<[S::Vector; 2]>,
    /// The extra logit of each head: `(n_heads)`.
    pub sinks: Option<S::Vector>,
}

/// Sizes and variants of attention in one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub n_heads: usize,
    /// Key/value heads.
    pub n_kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Which of the model's rotations applies: an index of the tables of angles.
    pub rotary: usize,
    /// How many positions a query sees, its own included; `None` = all.
    pub window: Option<usize>,
    /// Multiplies products of queries and keys.
    pub scale: f32,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
}

/// A gated MLP: `down(activation(gate(x)) * up(x))`.
#[derive(Debug)]
pub struct Mlp<S: Storage> {
    /// Activation of the gate.
    pub activation: Activation,
    /// Rows of gate and up.
    pub intermediate: usize,
    /// `(intermediate, hidden)`.
    pub gate: S::Matrix,
    /// `(intermediate, hidden)`.
    pub up: S::Matrix,
    /// `(hidden, intermediate)`.
    pub down: S::Matrix,
}

/// A mixture of experts, each a gated MLP.
#[derive(Debug)]
pub struct Moe<S: Storage> {
    /// Activation of the gates.
    pub activation: Activation,
    /// Rows of gate and up of each expert.
    pub intermediate: usize,
    /// Number of experts.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// What the weights of the chosen experts are normalized over.
    pub softmax: RouterSoftmax,
    /// `(experts, hidden)`.
    pub router: S::Matrix,
    /// Each `(2 * intermediate, hidden)`, rows of gate and up in turn.
    pub gate_up: S::Stack,
    /// Each `(hidden, intermediate)`.
    pub down: S::Stack,
}
