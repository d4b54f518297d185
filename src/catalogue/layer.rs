//! Tensors of layers.

use super::{LayerInput, LayerTensor, Role, Target};
use crate::model_config::{
    GatedDeltaNet, Heads, Latent, LayerConfig, Mamba2, Mixer, Mlp, ModelConfig, PerLayerInput, QkNorm, Recurrent,
    Selection, SharedExpert, ShortConv,
};

type Shape = fn(&ModelConfig, &LayerConfig) -> Option<Vec<usize>>;

/// Describes a matrix that adapters change.
const fn matrix(
    name: &'static str,
    gguf: &'static str,
    role: Role,
    target: Target,
    input: Option<LayerInput>,
    shape: Shape,
) -> LayerTensor {
    LayerTensor { name, gguf, role, target: Some(target), input, shape }
}

/// Describes the matrices of all experts.
const fn experts(name: &'static str, gguf: &'static str, input: LayerInput, shape: Shape) -> LayerTensor {
    LayerTensor { name, gguf, role: Role::Experts, target: None, input: Some(input), shape }
}

/// Describes a tensor that is no matrix.
const fn vector(name: &'static str, gguf: &'static str, role: Role, shape: Shape) -> LayerTensor {
    LayerTensor { name, gguf, role, target: None, input: None, shape }
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
    vector("input_layernorm.weight", "attn_norm.weight", Role::Norm, |m, l| {
        has(m.pre_norms && l.mixer.is_some(), [m.hidden])
    }),
    // Attention, and what latent attention has in place of queries, keys and values.
    matrix("self_attn.q_proj.weight", "attn_q.weight", Role::Attention, Target::Q, ATTENTION, |m, l| match l.mixer {
        None | Some(Mixer::Latent(_, Latent { q_rank: Some(_), .. }) | Mixer::Recurrent(_)) => None,
        Some(Mixer::Attention(heads) | Mixer::Latent(heads, _)) => Some(vec![queries(&heads), m.hidden]),
    }),
    vector("self_attn.q_proj.bias", "attn_q.bias", Role::Bias, |m, l| {
        plain(l).filter(|_| m.attention.qkv_bias).map(|heads| vec![queries(heads)])
    }),
    matrix("self_attn.k_proj.weight", "attn_k.weight", Role::Attention, Target::K, ATTENTION, |m, l| {
        with_keys(l).map(|heads| vec![keys(heads), m.hidden])
    }),
    vector("self_attn.k_proj.bias", "attn_k.bias", Role::Bias, |m, l| {
        with_keys(l).filter(|_| m.attention.qkv_bias).map(|heads| vec![keys(heads)])
    }),
    matrix("self_attn.v_proj.weight", "attn_v.weight", Role::Attention, Target::V, ATTENTION, |m, l| {
        with_values(l).map(|heads| vec![keys(heads), m.hidden])
    }),
    vector("self_attn.v_proj.bias", "attn_v.bias", Role::Bias, |m, l| {
        with_values(l).filter(|_| m.attention.qkv_bias).map(|heads| vec![keys(heads)])
    }),
    vector("self_attn.q_norm.weight", "attn_q_norm.weight", Role::Norm, |m, l| {
        plain(l).and_then(|heads| head_norm(m, heads, queries(heads)))
    }),
    vector("self_attn.k_norm.weight", "attn_k_norm.weight", Role::Norm, |m, l| {
        with_keys(l).and_then(|heads| head_norm(m, heads, keys(heads)))
    }),
    matrix("self_attn.gate_proj.weight", "attn_gate.weight", Role::Attention, Target::OutputGate, ATTENTION, |m, l| {
        let width =
            |heads| if m.attention.head_gate { l.heads().map_or(0, |heads| heads.n_heads) } else { queries(heads) };
        plain(l).filter(|_| m.attention.gate).map(|heads| vec![width(heads), m.hidden])
    }),
    vector("self_attn.sinks", "attn_sinks.weight", Role::Sinks, |m, l| {
        plain(l).filter(|_| m.attention.sinks).map(|heads| vec![heads.n_heads])
    }),
    matrix("self_attn.q_a_proj.weight", "attn_q_a.weight", Role::Attention, Target::QLatent, ATTENTION, |m, l| {
        q_rank(l).map(|rank| vec![rank, m.hidden])
    }),
    vector("self_attn.q_a_proj.bias", "attn_q_a.bias", Role::Bias, |m, l| {
        q_rank(l).filter(|_| m.attention.qkv_bias).map(|rank| vec![rank])
    }),
    vector("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight", Role::Norm, |_, l| {
        q_rank(l).map(|rank| vec![rank])
    }),
    matrix("self_attn.q_b_proj.weight", "attn_q_b.weight", Role::Attention, Target::Q, None, |_, l| {
        q_rank(l).zip(l.heads()).map(|(rank, heads)| vec![queries(heads), rank])
    }),
    matrix(
        "self_attn.kv_a_proj_with_mqa.weight",
        "attn_kv_a_mqa.weight",
        Role::Attention,
        Target::KvLatent,
        ATTENTION,
        |m, l| l.latent().map(|Latent { kv_rank, rope, .. }| vec![kv_rank + rope, m.hidden]),
    ),
    vector("self_attn.kv_a_proj_with_mqa.bias", "attn_kv_a_mqa.bias", Role::Bias, |m, l| {
        l.latent().filter(|_| m.attention.qkv_bias).map(|Latent { kv_rank, rope, .. }| vec![kv_rank + rope])
    }),
    vector("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight", Role::Norm, |_, l| {
        l.latent().map(|latent| vec![latent.kv_rank])
    }),
    matrix("self_attn.kv_b_proj.weight", "attn_kv_b.weight", Role::Attention, Target::KvHeads, None, |_, l| {
        match l.mixer? {
            Mixer::Attention(_) | Mixer::Recurrent(_) => None,
            Mixer::Latent(Heads { n_heads, .. }, Latent { kv_rank, nope, value, .. }) => {
                Some(vec![n_heads * (nope + value), kv_rank])
            }
        }
    }),
    matrix(
        "self_attn.o_proj.weight",
        "attn_output.weight",
        Role::Attention,
        Target::O,
        Some(LayerInput::AttentionOutput),
        |m, l| l.heads().map(|Heads { n_heads, value_dim, .. }| vec![m.hidden, n_heads * value_dim]),
    ),
    vector("self_attn.o_proj.bias", "attn_output.bias", Role::Bias, |m, l| {
        has(m.attention.o_bias && l.heads().is_some(), [m.hidden])
    }),
    // Gated short convolution.
    matrix("conv.in_proj.weight", "shortconv.in_proj.weight", Role::Mixer, Target::MixerInput, ATTENTION, |m, l| {
        conv(l).map(|_| vec![3 * m.hidden, m.hidden])
    }),
    vector("conv.in_proj.bias", "shortconv.in_proj.bias", Role::Bias, |m, l| {
        conv(l).filter(|conv| conv.bias).map(|_| vec![3 * m.hidden])
    }),
    vector("conv.conv.weight", "shortconv.conv.weight", Role::Other, |m, l| {
        conv(l).map(|conv| vec![m.hidden, 1, conv.width])
    }),
    vector("conv.conv.bias", "shortconv.conv.bias", Role::Bias, |m, l| {
        conv(l).filter(|conv| conv.bias).map(|_| vec![m.hidden])
    }),
    matrix(
        "conv.out_proj.weight",
        "shortconv.out_proj.weight",
        Role::Mixer,
        Target::MixerOutput,
        Some(LayerInput::AttentionOutput),
        |m, l| conv(l).map(|_| vec![m.hidden, m.hidden]),
    ),
    vector("conv.out_proj.bias", "shortconv.out_proj.bias", Role::Bias, |m, l| {
        conv(l).filter(|conv| conv.bias).map(|_| vec![m.hidden])
    }),
    // Gated delta net; its convolution has the channels of queries, keys and values, in this order.
    matrix("linear_attn.q_proj.weight", "", Role::Mixer, Target::Q, ATTENTION, |m, l| {
        delta_net(l).map(|net| vec![net.keys(), m.hidden])
    }),
    matrix("linear_attn.k_proj.weight", "", Role::Mixer, Target::K, ATTENTION, |m, l| {
        delta_net(l).map(|net| vec![net.keys(), m.hidden])
    }),
    matrix("linear_attn.v_proj.weight", "", Role::Mixer, Target::V, ATTENTION, |m, l| {
        delta_net(l).map(|net| vec![net.values(), m.hidden])
    }),
    matrix("linear_attn.z_proj.weight", "attn_gate.weight", Role::Mixer, Target::OutputGate, ATTENTION, |m, l| {
        delta_net(l).map(|net| vec![net.values(), m.hidden])
    }),
    matrix("linear_attn.b_proj.weight", "ssm_beta.weight", Role::Other, Target::MixerRate, ATTENTION, |m, l| {
        delta_net(l).map(|net| vec![net.value_heads, m.hidden])
    }),
    matrix("linear_attn.a_proj.weight", "ssm_alpha.weight", Role::Other, Target::MixerDecay, ATTENTION, |m, l| {
        delta_net(l).map(|net| vec![net.value_heads, m.hidden])
    }),
    vector("linear_attn.conv1d.weight", "ssm_conv1d.weight", Role::Other, |_, l| {
        delta_net(l).map(|net| vec![net.channels(), 1, net.width])
    }),
    vector("linear_attn.A_log", "ssm_a", Role::Other, |_, l| {
        delta_net(l).filter(|net| !net.decay_factors).map(|net| vec![net.value_heads])
    }),
    vector("linear_attn.A", "ssm_a", Role::Other, |_, l| {
        delta_net(l).filter(|net| net.decay_factors).map(|net| vec![net.value_heads])
    }),
    vector("linear_attn.dt_bias", "ssm_dt.bias", Role::Bias, |_, l| delta_net(l).map(|net| vec![net.value_heads])),
    vector("linear_attn.norm.weight", "ssm_norm.weight", Role::Norm, |_, l| {
        delta_net(l).map(|net| vec![net.value_dim])
    }),
    matrix(
        "linear_attn.out_proj.weight",
        "ssm_out.weight",
        Role::Mixer,
        Target::MixerOutput,
        Some(LayerInput::AttentionOutput),
        |m, l| delta_net(l).map(|net| vec![m.hidden, net.values()]),
    ),
    // Mamba-2; its convolution has the channels of x, B and C, in this order.
    matrix("mamba.z_proj.weight", "", Role::Mixer, Target::OutputGate, ATTENTION, |m, l| {
        mamba(l).map(|mamba| vec![mamba.values(), m.hidden])
    }),
    vector("mamba.z_proj.bias", "", Role::Bias, |_, l| biased(l).map(|mamba| vec![mamba.values()])),
    matrix("mamba.x_proj.weight", "", Role::Mixer, Target::V, ATTENTION, |m, l| {
        mamba(l).map(|mamba| vec![mamba.values(), m.hidden])
    }),
    vector("mamba.x_proj.bias", "", Role::Bias, |_, l| biased(l).map(|mamba| vec![mamba.values()])),
    matrix("mamba.b_proj.weight", "", Role::Mixer, Target::K, ATTENTION, |m, l| {
        mamba(l).map(|mamba| vec![mamba.keys(), m.hidden])
    }),
    vector("mamba.b_proj.bias", "", Role::Bias, |_, l| biased(l).map(|mamba| vec![mamba.keys()])),
    matrix("mamba.c_proj.weight", "", Role::Mixer, Target::Q, ATTENTION, |m, l| {
        mamba(l).map(|mamba| vec![mamba.keys(), m.hidden])
    }),
    vector("mamba.c_proj.bias", "", Role::Bias, |_, l| biased(l).map(|mamba| vec![mamba.keys()])),
    matrix("mamba.dt_proj.weight", "", Role::Other, Target::MixerDecay, ATTENTION, |m, l| {
        mamba(l).map(|mamba| vec![mamba.heads, m.hidden])
    }),
    vector("mamba.dt_proj.bias", "", Role::Bias, |_, l| biased(l).map(|mamba| vec![mamba.heads])),
    vector("mamba.conv1d.weight", "ssm_conv1d.weight", Role::Other, |_, l| {
        mamba(l).map(|mamba| vec![mamba.channels(), 1, mamba.width])
    }),
    vector("mamba.conv1d.bias", "ssm_conv1d.bias", Role::Bias, |_, l| {
        mamba(l).filter(|mamba| mamba.conv_bias).map(|mamba| vec![mamba.channels()])
    }),
    vector("mamba.A_log", "ssm_a", Role::Other, |_, l| {
        mamba(l).filter(|mamba| !mamba.decay_factors).map(|mamba| vec![mamba.heads])
    }),
    vector("mamba.A", "ssm_a", Role::Other, |_, l| {
        mamba(l).filter(|mamba| mamba.decay_factors).map(|mamba| vec![mamba.heads])
    }),
    vector("mamba.dt_bias", "ssm_dt.bias", Role::Bias, |_, l| mamba(l).map(|mamba| vec![mamba.heads])),
    vector("mamba.D", "ssm_d", Role::Other, |_, l| mamba(l).map(|mamba| vec![mamba.heads])),
    vector("mamba.norm.weight", "ssm_norm.weight", Role::Norm, |_, l| mamba(l).map(|mamba| vec![mamba.values()])),
    matrix(
        "mamba.out_proj.weight",
        "ssm_out.weight",
        Role::Mixer,
        Target::MixerOutput,
        Some(LayerInput::AttentionOutput),
        |m, l| mamba(l).map(|mamba| vec![m.hidden, mamba.values()]),
    ),
    vector("mamba.out_proj.bias", "", Role::Bias, |m, l| biased(l).map(|_| vec![m.hidden])),
    // In models with post norms, this is the norm of attention's output; in others, that of the MLP's input.
    vector("post_attention_layernorm.weight", "", Role::Norm, |m, l| {
        has(m.post_norms || has_mlp_norm(m) && l.mlp.is_some(), [m.hidden])
    }),
    vector("pre_feedforward_layernorm.weight", "ffn_norm.weight", Role::Norm, |m, _| {
        has(m.post_norms && has_mlp_norm(m), [m.hidden])
    }),
    // The MLP, or a router and its experts: in `gate_up_proj`, rows of gate and up alternate. Without a gate, there is
    // `up_proj` alone.
    matrix("mlp.gate_proj.weight", "ffn_gate.weight", Role::Mlp, Target::Gate, MLP, |m, l| {
        dense(l).filter(|_| is_gated(l)).map(|(width, _)| vec![width, m.hidden])
    }),
    vector("mlp.gate_proj.bias", "ffn_gate.bias", Role::Bias, |_, l| {
        dense(l).filter(|(_, bias)| *bias && is_gated(l)).map(|(width, _)| vec![width])
    }),
    matrix("mlp.up_proj.weight", "ffn_up.weight", Role::Mlp, Target::Up, MLP, |m, l| {
        dense(l).map(|(width, _)| vec![width, m.hidden])
    }),
    vector("mlp.up_proj.bias", "ffn_up.bias", Role::Bias, |_, l| {
        dense(l).filter(|(_, bias)| *bias).map(|(width, _)| vec![width])
    }),
    matrix("mlp.down_proj.weight", "ffn_down.weight", Role::Mlp, Target::Down, MIDDLE, |m, l| {
        dense(l).map(|(width, _)| vec![m.hidden, width])
    }),
    vector("mlp.down_proj.bias", "ffn_down.bias", Role::Bias, |m, l| {
        dense(l).filter(|(_, bias)| *bias).map(|_| vec![m.hidden])
    }),
    matrix("mlp.router.weight", "ffn_gate_inp.weight", Role::Router, Target::Router, None, |m, l| {
        moe(l).map(|moe| vec![moe.experts, m.hidden])
    }),
    vector("mlp.router.bias", "ffn_gate_inp.bias", Role::Bias, |_, l| {
        moe(l).filter(|moe| moe.router_bias).map(|moe| vec![moe.experts])
    }),
    vector("mlp.router.selection_bias", "exp_probs_b.bias", Role::Bias, |_, l| {
        moe(l).filter(|moe| moe.selection.bias).map(|moe| vec![moe.experts])
    }),
    experts("mlp.experts.gate_up_proj", "", LayerInput::Experts, |m, l| {
        moe(l).filter(|_| is_gated(l)).map(|moe| vec![moe.experts, 2 * moe.width, moe.outer(m)])
    }),
    vector("mlp.experts.gate_up_proj_bias", "", Role::Bias, |_, l| {
        moe(l).filter(|moe| moe.bias && is_gated(l)).map(|moe| vec![moe.experts, 2 * moe.width])
    }),
    experts("mlp.experts.up_proj", "ffn_up_exps.weight", LayerInput::Experts, |m, l| {
        moe(l).filter(|_| !is_gated(l)).map(|moe| vec![moe.experts, moe.width, moe.outer(m)])
    }),
    vector("mlp.experts.up_proj_bias", "ffn_up_exps.bias", Role::Bias, |_, l| {
        moe(l).filter(|moe| moe.bias && !is_gated(l)).map(|moe| vec![moe.experts, moe.width])
    }),
    experts("mlp.experts.down_proj", "ffn_down_exps.weight", LayerInput::ExpertsMiddle, |m, l| {
        moe(l).map(|moe| vec![moe.experts, moe.outer(m), moe.width])
    }),
    vector("mlp.experts.down_proj_bias", "ffn_down_exps.bias", Role::Bias, |m, l| {
        moe(l).filter(|moe| moe.bias).map(|moe| vec![moe.experts, moe.outer(m)])
    }),
    // Projections to the narrower vector that experts read, and back from that which they write.
    matrix("mlp.latent_down_proj.weight", "ffn_latent_down.weight", Role::Mlp, Target::LatentDown, MLP, |m, l| {
        moe(l).and_then(|moe| moe.latent).map(|latent| vec![latent, m.hidden])
    }),
    matrix("mlp.latent_up_proj.weight", "ffn_latent_up.weight", Role::Mlp, Target::LatentUp, None, |m, l| {
        moe(l).and_then(|moe| moe.latent).map(|latent| vec![m.hidden, latent])
    }),
    // An MLP beside the experts, and norms that both have.
    matrix(
        "mlp.shared_experts.gate_proj.weight",
        "ffn_gate_shexp.weight",
        Role::Mlp,
        Target::SharedGate,
        MLP,
        |m, l| shared(l).filter(|_| is_gated(l)).map(|shared| vec![shared.intermediate, m.hidden]),
    ),
    matrix("mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight", Role::Mlp, Target::SharedUp, MLP, |m, l| {
        shared(l).map(|shared| vec![shared.intermediate, m.hidden])
    }),
    matrix(
        "mlp.shared_experts.down_proj.weight",
        "ffn_down_shexp.weight",
        Role::Mlp,
        Target::SharedDown,
        MIDDLE,
        |m, l| shared(l).map(|shared| vec![m.hidden, shared.intermediate]),
    ),
    matrix(
        "mlp.router.shared_expert_gate.weight",
        "ffn_gate_inp_shexp.weight",
        Role::Router,
        Target::SharedOutputGate,
        MLP,
        |m, l| shared(l).filter(|shared| shared.gate).map(|_| vec![1, m.hidden]),
    ),
    vector("mlp.shared_experts.post_layernorm.weight", "post_ffw_norm_1.weight", Role::Norm, |m, l| {
        has(has_mixture_norms(l), [m.hidden])
    }),
    vector("mlp.experts.pre_layernorm.weight", "pre_ffw_norm_2.weight", Role::Norm, |m, l| {
        has(has_mixture_norms(l), [m.hidden])
    }),
    vector("mlp.experts.post_layernorm.weight", "post_ffw_norm_2.weight", Role::Norm, |m, l| {
        has(has_mixture_norms(l), [m.hidden])
    }),
    vector("mlp.router.input_scale", "ffn_gate_inp.scale", Role::Router, |m, l| has(has_mixture_norms(l), [m.hidden])),
    vector("mlp.router.expert_scale", "ffn_down_exps.scale", Role::Router, |_, l| {
        moe(l).filter(|moe| moe.selection.factors).map(|moe| vec![moe.experts])
    }),
    vector("post_feedforward_layernorm.weight", "post_ffw_norm.weight", Role::Norm, |m, _| {
        has(m.post_norms, [m.hidden])
    }),
    // The further input of the layer (Gemma 4 E2B and E4B).
    matrix("per_layer_input_gate.weight", "inp_gate.weight", Role::Other, Target::InputGate, None, |m, l| {
        l.extras.input.map(|PerLayerInput { width, .. }| vec![width, m.hidden])
    }),
    matrix("per_layer_projection.weight", "proj.weight", Role::Other, Target::InputProjection, None, |m, l| {
        l.extras.input.map(|PerLayerInput { width, .. }| vec![m.hidden, width])
    }),
    vector("post_per_layer_input_norm.weight", "post_norm.weight", Role::Norm, |m, l| {
        has(l.extras.input.is_some(), [m.hidden])
    }),
    vector("layer_scalar", "layer_output_scale.weight", Role::Other, |_, l| has(l.extras.scalar, [1])),
];

/// Returns the heads of plain attention.
fn plain(layer: &LayerConfig) -> Option<&Heads> {
    match layer.mixer.as_ref()? {
        Mixer::Attention(heads) => Some(heads),
        Mixer::Latent(..) | Mixer::Recurrent(_) => None,
    }
}

/// Returns the sizes of a gated short convolution.
fn conv(layer: &LayerConfig) -> Option<&ShortConv> {
    match layer.recurrent()? {
        Recurrent::ShortConv(conv) => Some(conv),
        _ => None,
    }
}

/// Returns the sizes of a gated delta net.
fn delta_net(layer: &LayerConfig) -> Option<&GatedDeltaNet> {
    match layer.recurrent()? {
        Recurrent::GatedDeltaNet(net) => Some(net),
        _ => None,
    }
}

/// Returns the sizes of Mamba-2.
fn mamba(layer: &LayerConfig) -> Option<&Mamba2> {
    match layer.recurrent()? {
        Recurrent::Mamba2(mamba) => Some(mamba),
        _ => None,
    }
}

/// Returns the sizes of Mamba-2 whose projections have biases.
fn biased(layer: &LayerConfig) -> Option<&Mamba2> {
    mamba(layer).filter(|mamba| mamba.bias)
}

/// Returns the heads of plain attention with keys of its own.
fn with_keys(layer: &LayerConfig) -> Option<&Heads> {
    plain(layer).filter(|heads| heads.kv_from.is_none())
}

/// Returns the heads of plain attention with values of its own.
fn with_values(layer: &LayerConfig) -> Option<&Heads> {
    with_keys(layer).filter(|heads| !heads.keys_are_values)
}

fn queries(heads: &Heads) -> usize {
    heads.n_heads * heads.head_dim
}

fn keys(heads: &Heads) -> usize {
    heads.n_kv_heads * heads.head_dim
}

/// Returns the shape of the norm of queries or keys; `all` is the width of all heads.
fn head_norm(model: &ModelConfig, heads: &Heads, all: usize) -> Option<Vec<usize>> {
    match model.attention.qk_norm {
        QkNorm::None | QkNorm::Unit => None,
        QkNorm::Head => Some(vec![heads.head_dim]),
        QkNorm::All => Some(vec![all]),
    }
}

/// Returns the length of the vector of queries in latent attention, where the layer has one.
fn q_rank(layer: &LayerConfig) -> Option<usize> {
    layer.latent()?.q_rank
}

fn has_mlp_norm(model: &ModelConfig) -> bool {
    model.pre_norms && !model.parallel
}

/// Returns the width of a dense MLP, and whether it has biases.
fn dense(layer: &LayerConfig) -> Option<(usize, bool)> {
    match layer.mlp? {
        Mlp::Dense { intermediate, bias, .. } => Some((intermediate, bias)),
        Mlp::Moe { .. } => None,
    }
}

/// Returns true if the MLP or the experts have gates.
fn is_gated(layer: &LayerConfig) -> bool {
    layer.mlp.is_some_and(|mlp| mlp.activation().is_gated())
}

/// Sizes of a mixture of experts.
struct Mixture {
    experts: usize,
    width: usize,
    bias: bool,
    router_bias: bool,
    selection: Selection,
    latent: Option<usize>,
}

impl Mixture {
    /// Returns the width of the vectors that experts read and write.
    fn outer(&self, model: &ModelConfig) -> usize {
        self.latent.unwrap_or(model.hidden)
    }
}

fn moe(layer: &LayerConfig) -> Option<Mixture> {
    match layer.mlp? {
        Mlp::Dense { .. } => None,
        Mlp::Moe { experts, intermediate: width, bias, router_bias, selection, latent, .. } => {
            Some(Mixture { experts, width, bias, router_bias, selection, latent })
        }
    }
}

fn shared(layer: &LayerConfig) -> Option<SharedExpert> {
    match layer.mlp? {
        Mlp::Dense { .. } => None,
        Mlp::Moe { shared, .. } => shared,
    }
}

fn has_mixture_norms(layer: &LayerConfig) -> bool {
    shared(layer).is_some_and(|shared| shared.norms)
}
