//! Lists the canonical tensors of a model from its description alone.

use crate::model_config::{Latent, LayerConfig, Mlp, ModelConfig, PerLayerInput, QkNorm, SharedExpert};

/// A tensor that a model must have.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpectedTensor {
    /// Canonical name (see [`crate::role`]).
    pub name: String,
    /// Canonical shape.
    pub shape: Vec<usize>,
}

/// Returns all tensors of a model, in the order in which a forward pass needs them.
pub fn expected_tensors(model: &ModelConfig) -> Vec<ExpectedTensor> {
    let of_layers = (0..model.n_layers).flat_map(|layer| {
        let tensors = layer_tensors(model, &model.layer(layer)).into_iter().filter(|(_, there, _)| *there);
        tensors.map(move |(part, _, shape)| ExpectedTensor { name: format!("model.layers.{layer}.{part}"), shape })
    });
    let (further, further_width) = match model.per_layer_input {
        Some(PerLayerInput { width, vocab }) => (Some(vocab), width.saturating_mul(model.n_layers)),
        None => (None, 0),
    };
    let top = |name: &str, shape: &[usize]| ExpectedTensor { name: name.to_string(), shape: shape.to_vec() };
    let output = top("lm_head.weight", &[model.vocab, model.hidden]);
    std::iter::once(top("model.embed_tokens.weight", &[model.vocab, model.hidden]))
        .chain(further.into_iter().flat_map(|vocab| {
            [
                top("model.embed_tokens_per_layer.weight", &[vocab, further_width]),
                top("model.per_layer_model_projection.weight", &[further_width, model.hidden]),
                top("model.per_layer_projection_norm.weight", &[further_width / model.n_layers]),
            ]
        }))
        .chain(of_layers)
        .chain([top("model.norm.weight", &[model.hidden])])
        .chain((!model.tied_embeddings).then_some(output))
        .collect()
}

/// Tensor that a layer may have: name, whether this model has it, shape. Linear layers are `(out, in)`.
type MayHave = (&'static str, bool, Vec<usize>);

/// Lists the tensors that a layer of this description may have.
fn layer_tensors(model: &ModelConfig, layer: &LayerConfig) -> Vec<MayHave> {
    let hidden = model.hidden;
    let mlp_norm = model.pre_norms && !model.parallel;
    let (has_input, width) = (model.per_layer_input.is_some(), model.per_layer_input.map_or(0, |input| input.width));
    let mut tensors = vec![("input_layernorm.weight", model.pre_norms, vec![hidden])];
    tensors.extend(attention_tensors(model, layer));
    tensors.extend([
        ("self_attn.o_proj.weight", true, vec![hidden, layer.n_heads * layer.value_dim]),
        ("self_attn.o_proj.bias", model.attention.o_bias, vec![hidden]),
        ("post_attention_layernorm.weight", model.post_norms || mlp_norm, vec![hidden]),
        ("pre_feedforward_layernorm.weight", model.post_norms && mlp_norm, vec![hidden]),
    ]);
    tensors.extend(mlp_tensors(hidden, layer.mlp));
    tensors.extend([
        ("post_feedforward_layernorm.weight", model.post_norms, vec![hidden]),
        ("per_layer_input_gate.weight", has_input, vec![width, hidden]),
        ("per_layer_projection.weight", has_input, vec![hidden, width]),
        ("post_per_layer_input_norm.weight", has_input, vec![hidden]),
        ("layer_scalar", model.layer_scalars, vec![1]),
    ]);
    tensors
}

/// Lists the tensors of attention before the output projection.
fn attention_tensors(model: &ModelConfig, layer: &LayerConfig) -> Vec<MayHave> {
    let (hidden, attention) = (model.hidden, &model.attention);
    let LayerConfig { n_heads, n_kv_heads, head_dim, .. } = *layer;
    let (q, kv) = (n_heads * head_dim, n_kv_heads * head_dim);
    let (has_qk_norm, [q_norm, k_norm]) = match attention.qk_norm {
        QkNorm::None | QkNorm::Unit => (false, [0; 2]),
        QkNorm::Head => (true, [head_dim; 2]),
        QkNorm::All => (true, [q, kv]),
    };
    let has_keys = layer.kv_from.is_none();
    let has_values = has_keys && !layer.keys_are_values;
    match attention.latent {
        None => vec![
            ("self_attn.q_proj.weight", true, vec![q, hidden]),
            ("self_attn.q_proj.bias", attention.qkv_bias, vec![q]),
            ("self_attn.k_proj.weight", has_keys, vec![kv, hidden]),
            ("self_attn.k_proj.bias", has_keys && attention.qkv_bias, vec![kv]),
            ("self_attn.v_proj.weight", has_values, vec![kv, hidden]),
            ("self_attn.v_proj.bias", has_values && attention.qkv_bias, vec![kv]),
            ("self_attn.q_norm.weight", has_qk_norm, vec![q_norm]),
            ("self_attn.k_norm.weight", has_keys && has_qk_norm, vec![k_norm]),
            ("self_attn.gate_proj.weight", attention.gate, vec![q, hidden]),
            ("self_attn.sinks", attention.sinks, vec![n_heads]),
        ],
        Some(Latent { q_rank, kv_rank, nope, rope, value, .. }) => {
            let (has_rank, rank) = (q_rank.is_some(), q_rank.unwrap_or(0));
            vec![
                ("self_attn.q_proj.weight", !has_rank, vec![q, hidden]),
                ("self_attn.q_a_proj.weight", has_rank, vec![rank, hidden]),
                ("self_attn.q_a_proj.bias", has_rank && attention.qkv_bias, vec![rank]),
                ("self_attn.q_a_layernorm.weight", has_rank, vec![rank]),
                ("self_attn.q_b_proj.weight", has_rank, vec![q, rank]),
                ("self_attn.kv_a_proj_with_mqa.weight", true, vec![kv_rank + rope, hidden]),
                ("self_attn.kv_a_proj_with_mqa.bias", attention.qkv_bias, vec![kv_rank + rope]),
                ("self_attn.kv_a_layernorm.weight", true, vec![kv_rank]),
                ("self_attn.kv_b_proj.weight", true, vec![n_heads * (nope + value), kv_rank]),
            ]
        }
    }
}

/// Lists the tensors of the feed-forward part.
fn mlp_tensors(hidden: usize, mlp: Mlp) -> Vec<MayHave> {
    match mlp {
        Mlp::Dense { intermediate, bias, .. } => vec![
            ("mlp.gate_proj.weight", true, vec![intermediate, hidden]),
            ("mlp.gate_proj.bias", bias, vec![intermediate]),
            ("mlp.up_proj.weight", true, vec![intermediate, hidden]),
            ("mlp.up_proj.bias", bias, vec![intermediate]),
            ("mlp.down_proj.weight", true, vec![hidden, intermediate]),
            ("mlp.down_proj.bias", bias, vec![hidden]),
        ],
        Mlp::Moe { experts, intermediate, bias, router_bias, selection, shared, .. } => {
            let (has_shared, width) =
                (shared.is_some(), shared.map_or(0, |SharedExpert { intermediate, .. }| intermediate));
            let has_norms = shared.is_some_and(|shared| shared.norms);
            vec![
                ("mlp.router.weight", true, vec![experts, hidden]),
                ("mlp.router.bias", router_bias, vec![experts]),
                ("mlp.router.selection_bias", selection.bias, vec![experts]),
                ("mlp.experts.gate_up_proj", true, vec![experts, 2 * intermediate, hidden]),
                ("mlp.experts.gate_up_proj_bias", bias, vec![experts, 2 * intermediate]),
                ("mlp.experts.down_proj", true, vec![experts, hidden, intermediate]),
                ("mlp.experts.down_proj_bias", bias, vec![experts, hidden]),
                ("mlp.shared_experts.gate_proj.weight", has_shared, vec![width, hidden]),
                ("mlp.shared_experts.up_proj.weight", has_shared, vec![width, hidden]),
                ("mlp.shared_experts.down_proj.weight", has_shared, vec![hidden, width]),
                ("mlp.shared_experts.post_layernorm.weight", has_norms, vec![hidden]),
                ("mlp.experts.pre_layernorm.weight", has_norms, vec![hidden]),
                ("mlp.experts.post_layernorm.weight", has_norms, vec![hidden]),
                ("mlp.router.input_scale", has_norms, vec![hidden]),
                ("mlp.router.expert_scale", selection.factors, vec![experts]),
            ]
        }
    }
}

/// Splits `model.layers.N.rest` into N and rest.
pub(super) fn layer_part(canonical: &str) -> Option<(&str, &str)> {
    canonical.strip_prefix("model.layers.")?.split_once('.')
}
