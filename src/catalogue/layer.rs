//! Tensors of layers.

use super::{LayerInput, LayerTensor, Role, Target};
use crate::model_config::{Latent, LayerConfig, Mlp, ModelConfig, PerLayerInput, QkNorm, Selection, SharedExpert};

type Shape = fn(&ModelConfig, &LayerConfig) -> Option<Vec<usize>>;

/// Describes a matrix that adapters change.
const fn matrix(
    name: &'static str,
    role: Role,
    target: Target,
    input: Option<LayerInput>,
    shape: Shape,
) -> LayerTensor {
    LayerTensor { name, role, target: Some(target), input, shape }
}

/// Describes the matrices of all experts.
const fn experts(name: &'static str, input: LayerInput, shape: Shape) -> LayerTensor {
    LayerTensor { name, role: Role::Experts, target: None, input: Some(input), shape }
}

/// Describes a tensor that is no matrix.
const fn vector(name: &'static str, role: Role, shape: Shape) -> LayerTensor {
    LayerTensor { name, role, target: None, input: None, shape }
}

/// Returns the shape if the layer has the tensor.
fn has<const N: usize>(present: bool, shape: [usize; N]) -> Option<Vec<usize>> {
    present.then(|| shape.to_vec())
}

const ATTENTION: Option<LayerInput> = Some(LayerInput::Attention);
const MLP: Option<LayerInput> = Some(LayerInput::Mlp);
const MIDDLE: Option<LayerInput> = Some(LayerInput::MlpMiddle);

/// Tensors that layers may have, in the order in which a forward pass needs them.
pub const LAYER: &[LayerTensor] = &[
    vector("input_layernorm.weight", Role::Norm, |m, _| has(m.pre_norms, [m.hidden])),
    // Attention, and what latent attention has in place of queries, keys and values.
    matrix("self_attn.q_proj.weight", Role::Attention, Target::Q, ATTENTION, |m, l| match m.attention.latent {
        Some(Latent { q_rank: Some(_), .. }) => None,
        _ => Some(vec![queries(l), m.hidden]),
    }),
    vector("self_attn.q_proj.bias", Role::Bias, |m, l| has(is_plain(m) && m.attention.qkv_bias, [queries(l)])),
    matrix("self_attn.k_proj.weight", Role::Attention, Target::K, ATTENTION, |m, l| {
        has(has_keys(m, l), [keys(l), m.hidden])
    }),
    vector("self_attn.k_proj.bias", Role::Bias, |m, l| has(has_keys(m, l) && m.attention.qkv_bias, [keys(l)])),
    matrix("self_attn.v_proj.weight", Role::Attention, Target::V, ATTENTION, |m, l| {
        has(has_values(m, l), [keys(l), m.hidden])
    }),
    vector("self_attn.v_proj.bias", Role::Bias, |m, l| has(has_values(m, l) && m.attention.qkv_bias, [keys(l)])),
    vector("self_attn.q_norm.weight", Role::Norm, |m, l| head_norm(m, l, true, queries(l))),
    vector("self_attn.k_norm.weight", Role::Norm, |m, l| head_norm(m, l, l.kv_from.is_none(), keys(l))),
    matrix("self_attn.gate_proj.weight", Role::Attention, Target::OutputGate, ATTENTION, |m, l| {
        has(is_plain(m) && m.attention.gate, [queries(l), m.hidden])
    }),
    vector("self_attn.sinks", Role::Sinks, |m, l| has(is_plain(m) && m.attention.sinks, [l.n_heads])),
    matrix("self_attn.q_a_proj.weight", Role::Attention, Target::QLatent, ATTENTION, |m, _| {
        q_rank(m).map(|rank| vec![rank, m.hidden])
    }),
    vector("self_attn.q_a_proj.bias", Role::Bias, |m, _| {
        q_rank(m).filter(|_| m.attention.qkv_bias).map(|rank| vec![rank])
    }),
    vector("self_attn.q_a_layernorm.weight", Role::Norm, |m, _| q_rank(m).map(|rank| vec![rank])),
    matrix("self_attn.q_b_proj.weight", Role::Attention, Target::Q, None, |m, l| {
        q_rank(m).map(|rank| vec![queries(l), rank])
    }),
    matrix("self_attn.kv_a_proj_with_mqa.weight", Role::Attention, Target::KvLatent, ATTENTION, |m, _| {
        m.attention.latent.map(|Latent { kv_rank, rope, .. }| vec![kv_rank + rope, m.hidden])
    }),
    vector("self_attn.kv_a_proj_with_mqa.bias", Role::Bias, |m, _| {
        m.attention.latent.filter(|_| m.attention.qkv_bias).map(|Latent { kv_rank, rope, .. }| vec![kv_rank + rope])
    }),
    vector("self_attn.kv_a_layernorm.weight", Role::Norm, |m, _| m.attention.latent.map(|latent| vec![latent.kv_rank])),
    matrix("self_attn.kv_b_proj.weight", Role::Attention, Target::KvHeads, None, |m, l| {
        m.attention.latent.map(|Latent { kv_rank, nope, value, .. }| vec![l.n_heads * (nope + value), kv_rank])
    }),
    matrix("self_attn.o_proj.weight", Role::Attention, Target::O, Some(LayerInput::AttentionOutput), |m, l| {
        Some(vec![m.hidden, l.n_heads * l.value_dim])
    }),
    vector("self_attn.o_proj.bias", Role::Bias, |m, _| has(m.attention.o_bias, [m.hidden])),
    // In models with post norms, this is the norm of attention's output; in others, that of the MLP's input.
    vector("post_attention_layernorm.weight", Role::Norm, |m, _| has(m.post_norms || has_mlp_norm(m), [m.hidden])),
    vector("pre_feedforward_layernorm.weight", Role::Norm, |m, _| has(m.post_norms && has_mlp_norm(m), [m.hidden])),
    // The MLP, or a router and its experts: in `gate_up_proj`, rows of gate and up alternate.
    matrix("mlp.gate_proj.weight", Role::Mlp, Target::Gate, MLP, |m, l| {
        dense(l).map(|(width, _)| vec![width, m.hidden])
    }),
    vector("mlp.gate_proj.bias", Role::Bias, |_, l| dense(l).filter(|(_, bias)| *bias).map(|(width, _)| vec![width])),
    matrix("mlp.up_proj.weight", Role::Mlp, Target::Up, MLP, |m, l| dense(l).map(|(width, _)| vec![width, m.hidden])),
    vector("mlp.up_proj.bias", Role::Bias, |_, l| dense(l).filter(|(_, bias)| *bias).map(|(width, _)| vec![width])),
    matrix("mlp.down_proj.weight", Role::Mlp, Target::Down, MIDDLE, |m, l| {
        dense(l).map(|(width, _)| vec![m.hidden, width])
    }),
    vector("mlp.down_proj.bias", Role::Bias, |m, l| dense(l).filter(|(_, bias)| *bias).map(|_| vec![m.hidden])),
    matrix("mlp.router.weight", Role::Router, Target::Router, None, |m, l| {
        moe(l).map(|moe| vec![moe.experts, m.hidden])
    }),
    vector("mlp.router.bias", Role::Bias, |_, l| moe(l).filter(|moe| moe.router_bias).map(|moe| vec![moe.experts])),
    vector("mlp.router.selection_bias", Role::Bias, |_, l| {
        moe(l).filter(|moe| moe.selection.bias).map(|moe| vec![moe.experts])
    }),
    experts("mlp.experts.gate_up_proj", LayerInput::Experts, |m, l| {
        moe(l).map(|moe| vec![moe.experts, 2 * moe.width, m.hidden])
    }),
    vector("mlp.experts.gate_up_proj_bias", Role::Bias, |_, l| {
        moe(l).filter(|moe| moe.bias).map(|moe| vec![moe.experts, 2 * moe.width])
    }),
    experts("mlp.experts.down_proj", LayerInput::ExpertsMiddle, |m, l| {
        moe(l).map(|moe| vec![moe.experts, m.hidden, moe.width])
    }),
    vector("mlp.experts.down_proj_bias", Role::Bias, |m, l| {
        moe(l).filter(|moe| moe.bias).map(|moe| vec![moe.experts, m.hidden])
    }),
    // An MLP beside the experts, and norms that both have.
    matrix("mlp.shared_experts.gate_proj.weight", Role::Mlp, Target::SharedGate, MLP, |m, l| {
        shared(l).map(|shared| vec![shared.intermediate, m.hidden])
    }),
    matrix("mlp.shared_experts.up_proj.weight", Role::Mlp, Target::SharedUp, MLP, |m, l| {
        shared(l).map(|shared| vec![shared.intermediate, m.hidden])
    }),
    matrix("mlp.shared_experts.down_proj.weight", Role::Mlp, Target::SharedDown, MIDDLE, |m, l| {
        shared(l).map(|shared| vec![m.hidden, shared.intermediate])
    }),
    vector("mlp.shared_experts.post_layernorm.weight", Role::Norm, |m, l| has(has_mixture_norms(l), [m.hidden])),
    vector("mlp.experts.pre_layernorm.weight", Role::Norm, |m, l| has(has_mixture_norms(l), [m.hidden])),
    vector("mlp.experts.post_layernorm.weight", Role::Norm, |m, l| has(has_mixture_norms(l), [m.hidden])),
    vector("mlp.router.input_scale", Role::Router, |m, l| has(has_mixture_norms(l), [m.hidden])),
    vector("mlp.router.expert_scale", Role::Router, |_, l| {
        moe(l).filter(|moe| moe.selection.factors).map(|moe| vec![moe.experts])
    }),
    vector("post_feedforward_layernorm.weight", Role::Norm, |m, _| has(m.post_norms, [m.hidden])),
    // The further input of the layer (Gemma 4 E2B and E4B).
    matrix("per_layer_input_gate.weight", Role::Other, Target::InputGate, None, |m, _| {
        m.per_layer_input.map(|PerLayerInput { width, .. }| vec![width, m.hidden])
    }),
    matrix("per_layer_projection.weight", Role::Other, Target::InputProjection, None, |m, _| {
        m.per_layer_input.map(|PerLayerInput { width, .. }| vec![m.hidden, width])
    }),
    vector("post_per_layer_input_norm.weight", Role::Norm, |m, _| has(m.per_layer_input.is_some(), [m.hidden])),
    vector("layer_scalar", Role::Other, |m, _| has(m.layer_scalars, [1])),
];

fn is_plain(model: &ModelConfig) -> bool {
    model.attention.latent.is_none()
}

fn queries(layer: &LayerConfig) -> usize {
    layer.n_heads * layer.head_dim
}

fn keys(layer: &LayerConfig) -> usize {
    layer.n_kv_heads * layer.head_dim
}

fn has_keys(model: &ModelConfig, layer: &LayerConfig) -> bool {
    is_plain(model) && layer.kv_from.is_none()
}

fn has_values(model: &ModelConfig, layer: &LayerConfig) -> bool {
    has_keys(model, layer) && !layer.keys_are_values
}

/// Returns the shape of the norm of queries or keys; `all` is the width of all heads.
fn head_norm(model: &ModelConfig, layer: &LayerConfig, present: bool, all: usize) -> Option<Vec<usize>> {
    match model.attention.qk_norm {
        QkNorm::None | QkNorm::Unit => None,
        QkNorm::Head => has(present && is_plain(model), [layer.head_dim]),
        QkNorm::All => has(present && is_plain(model), [all]),
    }
}

/// Returns the length of the vector of queries in latent attention, where the model has one.
fn q_rank(model: &ModelConfig) -> Option<usize> {
    model.attention.latent?.q_rank
}

fn has_mlp_norm(model: &ModelConfig) -> bool {
    model.pre_norms && !model.parallel
}

/// Returns the width of a dense MLP, and whether it has biases.
fn dense(layer: &LayerConfig) -> Option<(usize, bool)> {
    match layer.mlp {
        Mlp::Dense { intermediate, bias, .. } => Some((intermediate, bias)),
        Mlp::Moe { .. } => None,
    }
}

/// Sizes of a mixture of experts.
struct Mixture {
    experts: usize,
    width: usize,
    bias: bool,
    router_bias: bool,
    selection: Selection,
}

fn moe(layer: &LayerConfig) -> Option<Mixture> {
    match layer.mlp {
        Mlp::Dense { .. } => None,
        Mlp::Moe { experts, intermediate: width, bias, router_bias, selection, .. } => {
            Some(Mixture { experts, width, bias, router_bias, selection })
        }
    }
}

fn shared(layer: &LayerConfig) -> Option<SharedExpert> {
    match layer.mlp {
        Mlp::Dense { .. } => None,
        Mlp::Moe { shared, .. } => shared,
    }
}

fn has_mixture_norms(layer: &LayerConfig) -> bool {
    shared(layer).is_some_and(|shared| shared.norms)
}
