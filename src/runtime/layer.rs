//! Description of a model's layers: the blocks of each layer, their order, sizes, windows and activations.
//!
//! Layers are built once, when tensors are bound, and are the same for all devices. Each block normalizes the
//! residual stream, computes its operation, normalizes the result if the model does so, and adds it to the residual
//! stream. Devices differ only in the storage of weights ([`Storage`]).

pub mod transfer;

use super::profile::Stage;
use crate::model_config::{
    Activation, GatedDeltaNet, Latent, Mamba2, PositionScale, RotaryPairs, RouterSoftmax, Selection,
};
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
    /// Factor of the residual stream at the end, where the model has one.
    pub scalar: Option<f32>,
}

/// A residual block: `x += post_norm(operation(input(x)))`.
#[derive(Debug)]
pub struct Block<S: Storage> {
    /// Input of the operation.
    pub input: BlockInput<S::Vector>,
    /// The operation between norm and residual addition.
    pub operation: Operation<S>,
    /// Norm of the output, where the model has one: `(hidden)`.
    pub post_norm: Option<S::Vector>,
}

/// Input of the operation of a block.
#[derive(Debug)]
pub enum BlockInput<V> {
    /// The residual stream after a norm with these factors: `(hidden)`.
    Normed(V),
    /// The residual stream itself.
    Stream,
    /// The input of the block before.
    Previous,
}

impl<V> BlockInput<V> {
    /// Returns the factors of the norm, if there is one.
    pub fn norm(&self) -> Option<&V> {
        match self {
            BlockInput::Normed(norm) => Some(norm),
            BlockInput::Stream | BlockInput::Previous => None,
        }
    }
}

/// The operation of a block. A layer holds only a few, so the size difference between variants does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub enum Operation<S: Storage> {
    /// Grouped-query attention.
    Attention(Attention<S>),
    /// Multi-head latent attention.
    Latent(LatentAttention<S>),
    /// Gated short convolution.
    ShortConv(ShortConv<S>),
    /// Gated delta net.
    DeltaNet(DeltaNet<S>),
    /// Mamba-2.
    Mamba(Mamba<S>),
    /// An MLP.
    Mlp(Mlp<S>),
    /// A router and its experts.
    Moe(Moe<S>),
    /// A further input that depends on the token alone.
    Input(TokenInput<S>),
}

impl<S: Storage> Operation<S> {
    /// Returns the stage of the last product of the operation.
    pub fn last_stage(&self) -> Stage {
        match self {
            Operation::Attention(_)
            | Operation::Latent(_)
            | Operation::ShortConv(_)
            | Operation::DeltaNet(_)
            | Operation::Mamba(_) => Stage::Projections,
            Operation::Mlp(_) | Operation::Moe(_) | Operation::Input(_) => Stage::Mlp,
        }
    }
}

/// Attention: projections, norms of heads, rotation, scores, weighted values, output projection.
#[derive(Debug)]
pub struct Attention<S: Storage> {
    /// Sizes and variants.
    pub shape: AttentionShape,
    /// Query projection: `(n_heads * head_dim, hidden)`.
    pub q: S::Matrix,
    /// Key projection, `(n_kv_heads * head_dim, hidden)`; `None` if the layer reads keys and values of another one.
    pub k: Option<S::Matrix>,
    /// Value projection, `(n_kv_heads * head_dim, hidden)`; `None` if values are the projected keys.
    pub v: Option<S::Matrix>,
    /// Factors, all 1, of the norm of values, where the model has one: `(head_dim)`.
    pub value_norm: Option<S::Vector>,
    /// Output projection: `(hidden, n_heads * head_dim)`.
    pub o: S::Matrix,
    /// Norms of queries and of keys, where the model has them: `(head_dim)` each for norms of each head, or the width
    /// of all heads for norms of all heads together.
    pub head_norms: Option<[S::Vector; 2]>,
    /// Projection whose sigmoid multiplies the output of the heads, where the model has one:
    /// `(n_heads * head_dim, hidden)`.
    pub gate: Option<S::Matrix>,
    /// Attention sinks, an extra logit of each head: `(n_heads)`.
    pub sinks: Option<S::Vector>,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), whose keys and values could be computed from one short
/// vector per token. A device keeps this vector, or the keys and values.
#[derive(Debug)]
pub struct LatentAttention<S: Storage> {
    /// Sizes and variants of the attention over expanded keys and values.
    pub shape: AttentionShape,
    /// Sizes of the vectors.
    pub latent: Latent,
    /// Projection to the vector of queries and factors of its norm, where the model has one: `(q_rank, hidden)`.
    pub q_a: Option<(S::Matrix, S::Vector)>,
    /// Query projection: `(n_heads * head_dim, q_rank or hidden)`.
    pub q: S::Matrix,
    /// Projection to the vector of keys and values, and to the rotated part of the keys: `(kv_rank + rope, hidden)`.
    pub kv_a: S::Matrix,
    /// Factors of the norm of the vector: `(kv_rank)`.
    pub kv_norm: S::Vector,
    /// Projection to the other part of the keys and to the values, head by head: `(n_heads * (nope + value), kv_rank)`.
    pub kv_b: S::Matrix,
    /// Output projection: `(hidden, n_heads * value)`.
    pub o: S::Matrix,
}

/// Gated short convolution, see [`crate::model_config::ShortConv`].
#[derive(Debug)]
pub struct ShortConv<S: Storage> {
    /// Positions that the convolution reads, including the present one.
    pub width: usize,
    /// Projection to B, C and x: `(3 * hidden, hidden)`.
    pub input: S::Matrix,
    /// Factors of the convolution, the oldest position first: `(width, hidden)`.
    pub kernel: S::Vector,
    /// Bias of the convolution, if any: `(hidden)`.
    pub bias: Option<S::Vector>,
    /// Output projection: `(hidden, hidden)`.
    pub output: S::Matrix,
}

/// Gated delta net, see [`GatedDeltaNet`].
#[derive(Debug)]
pub struct DeltaNet<S: Storage> {
    /// Sizes.
    pub sizes: GatedDeltaNet,
    /// Query projection: `(keys, hidden)`.
    pub q: S::Matrix,
    /// Key projection: `(keys, hidden)`.
    pub k: S::Matrix,
    /// Value projection: `(values, hidden)`.
    pub v: S::Matrix,
    /// Projection to the gate of the output: `(values, hidden)`.
    pub z: S::Matrix,
    /// Projection to the rates, whose sigmoids they are: `(value_heads, hidden)`.
    pub b: S::Matrix,
    /// Projection to the decays: `(value_heads, hidden)`.
    pub a: S::Matrix,
    /// Factors of the convolution, the oldest position first: `(width, channels)`.
    pub kernel: S::Vector,
    /// Factors of the logarithms of the decays, `-exp(A_log)`: `(value_heads)`.
    pub decay: S::Vector,
    /// Added to the projection to the decays, before the softplus: `(value_heads)`.
    pub decay_bias: S::Vector,
    /// Factors of the norm of each head of the output: `(value_dim)`.
    pub norm: S::Vector,
    /// Output projection: `(hidden, values)`.
    pub output: S::Matrix,
}

/// Mamba-2, see [`Mamba2`].
#[derive(Debug)]
pub struct Mamba<S: Storage> {
    /// Sizes.
    pub sizes: Mamba2,
    /// Projection to the gate of the output: `(values, hidden)`.
    pub z: S::Matrix,
    /// Projection to x: `(values, hidden)`.
    pub x: S::Matrix,
    /// Projection to B: `(keys, hidden)`.
    pub b: S::Matrix,
    /// Projection to C: `(keys, hidden)`.
    pub c: S::Matrix,
    /// Projection to the steps: `(heads, hidden)`.
    pub dt: S::Matrix,
    /// Factors of the convolution, the oldest position first: `(width, channels)`.
    pub kernel: S::Vector,
    /// Bias of the convolution, if any: `(channels)`.
    pub bias: Option<S::Vector>,
    /// Factors of the steps in the logarithms of the decays, `-exp(A_log)`: `(heads)`.
    pub decay: S::Vector,
    /// Added to the projection to the steps, before the softplus: `(heads)`.
    pub decay_bias: S::Vector,
    /// Share of x in the output: `(heads)`.
    pub skip: S::Vector,
    /// Factors of the norm of the output: `(values)`.
    pub norm: S::Vector,
    /// Output projection: `(hidden, values)`.
    pub output: S::Matrix,
}

/// Sizes and variants of attention in one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key/value heads.
    pub n_kv_heads: usize,
    /// Width of a query or key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Layer whose keys and values are read; `None` = this one.
    pub kv_from: Option<usize>,
    /// Kind of rotation, an index into the tables of angles; `None` = no rotation.
    pub rotary: Option<usize>,
    /// Values of a head that are rotated together.
    pub pairs: RotaryPairs,
    /// Growth of the queries with their positions.
    pub position_scale: Option<PositionScale>,
    /// Number of positions a query attends to, including its own; `None` = all.
    pub window: Option<usize>,
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Softcap of the scores, which become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
}

/// An MLP: `down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))`.
#[derive(Debug)]
pub struct Mlp<S: Storage> {
    /// Activation.
    pub activation: Activation,
    /// Number of rows of gate and of up.
    pub intermediate: usize,
    /// Gate projection, if the activation has one: `(intermediate, hidden)`.
    pub gate: Option<S::Matrix>,
    /// Up projection: `(intermediate, hidden)`.
    pub up: S::Matrix,
    /// Down projection: `(hidden, intermediate)`.
    pub down: S::Matrix,
}

/// A mixture of experts, each an MLP.
#[derive(Debug)]
pub struct Moe<S: Storage> {
    /// Activation of the experts.
    pub activation: Activation,
    /// Number of rows of gate and of up of each expert.
    pub intermediate: usize,
    /// Number of experts.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Set of experts over which the weights of the chosen ones are normalized.
    pub softmax: RouterSoftmax,
    /// Further properties of the choice of experts.
    pub selection: Selection,
    /// Number of each expert that is added to its score for the choice, where the model has them: `(experts)`.
    pub selection_bias: Option<S::Vector>,
    /// Factor of the weight of each expert, where the model has them: `(experts)`.
    pub factors: Option<S::Vector>,
    /// MLP that computes every token, where the model has one.
    pub shared: Option<Mlp<S>>,
    /// Vector whose product with the input is, as its sigmoid, a factor of the output of `shared`: `(1, hidden)`.
    pub shared_gate: Option<S::Matrix>,
    /// Norms of MLP and experts, where they have their own.
    pub norms: Option<MixtureNorms<S::Vector>>,
    /// Projections to the narrower vectors that experts read, `(latent, hidden)`, and back from those which they write,
    /// `(hidden, latent)`, where the model has them.
    pub latent: Option<[S::Matrix; 2]>,
    /// Router: `(experts, hidden)`.
    pub router: S::Matrix,
    /// One matrix per expert: `(2 * intermediate, hidden)` with alternating rows of gate and up, or `(intermediate,
    /// hidden)` with up alone if the activation has no gate.
    pub gate_up: S::Stack,
    /// One matrix `(hidden, intermediate)` per expert.
    pub down: S::Stack,
}

/// Factors of norms of an MLP and of the experts beside it: `(hidden)` each.
#[derive(Debug)]
pub struct MixtureNorms<V> {
    /// Norm of the output of the MLP.
    pub mlp_output: V,
    /// Norm of the input of the router.
    pub router_input: V,
    /// Norm of the input of the experts.
    pub expert_input: V,
    /// Norm of the output of the experts.
    pub expert_output: V,
}

/// A further input of a layer: `projection(gelu(gate(x)) * input)`.
#[derive(Debug)]
pub struct TokenInput<S: Storage> {
    /// Gate: `(width, hidden)`.
    pub gate: S::Matrix,
    /// Projection: `(hidden, width)`.
    pub projection: S::Matrix,
}
