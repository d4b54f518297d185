//! Lists the canonical tensors of a model from its description alone.

use crate::model_config::{Mlp, ModelConfig};

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
        let tensors = layer_tensors(model, model.mlp_of(layer)).into_iter().filter(|(_, there, _)| *there);
        tensors.map(move |(part, _, shape)| ExpectedTensor { name: format!("model.layers.{layer}.{part}"), shape })
    });
    let top = |name: &str, shape: &[usize]| ExpectedTensor { name: name.to_string(), shape: shape.to_vec() };
    let output = top("lm_head.weight", &[model.vocab, model.hidden]);
    std::iter::once(top("model.embed_tokens.weight", &[model.vocab, model.hidden]))
        .chain(of_layers)
        .chain([top("model.norm.weight", &[model.hidden])])
        .chain((!model.tied_embeddings).then_some(output))
        .collect()
}

/// Lists the tensors that a layer with this feed-forward part may have: name, whether this model has it, shape. Linear
/// layers are `(out, in)`.
fn layer_tensors(model: &ModelConfig, mlp: Mlp) -> Vec<(&'static str, bool, Vec<usize>)> {
    let (hidden, head_dim, attention) = (model.hidden, model.head_dim, &model.attention);
    let (q, kv) = (model.n_heads * head_dim, model.n_kv_heads * head_dim);
    let mut tensors = vec![
        ("input_layernorm.weight", true, vec![hidden]),
        ("self_attn.q_proj.weight", true, vec![q, hidden]),
        ("self_attn.q_proj.bias", attention.qkv_bias, vec![q]),
        ("self_attn.k_proj.weight", true, vec![kv, hidden]),
        ("self_attn.k_proj.bias", attention.qkv_bias, vec![kv]),
        ("self_attn.v_proj.weight", true, vec![kv, hidden]),
        ("self_attn.v_proj.bias", attention.qkv_bias, vec![kv]),
        ("self_attn.q_norm.weight", attention.qk_norm, vec![head_dim]),
        ("self_attn.k_norm.weight", attention.qk_norm, vec![head_dim]),
        ("self_attn.sinks", attention.sinks, vec![model.n_heads]),
        ("self_attn.o_proj.weight", true, vec![hidden, q]),
        ("self_attn.o_proj.bias", attention.o_bias, vec![hidden]),
        ("post_attention_layernorm.weight", true, vec![hidden]),
        ("pre_feedforward_layernorm.weight", model.post_norms, vec![hidden]),
    ];
    match mlp {
        Mlp::Dense { intermediate, bias, .. } => tensors.extend([
            ("mlp.gate_proj.weight", true, vec![intermediate, hidden]),
            ("mlp.gate_proj.bias", bias, vec![intermediate]),
            ("mlp.up_proj.weight", true, vec![intermediate, hidden]),
            ("mlp.up_proj.bias", bias, vec![intermediate]),
            ("mlp.down_proj.weight", true, vec![hidden, intermediate]),
            ("mlp.down_proj.bias", bias, vec![hidden]),
        ]),
        Mlp::Moe { experts, intermediate, bias, router_bias, .. } => tensors.extend([
            ("mlp.router.weight", true, vec![experts, hidden]),
            ("mlp.router.bias", router_bias, vec![experts]),
            ("mlp.experts.gate_up_proj", true, vec![experts, 2 * intermediate, hidden]),
            ("mlp.experts.gate_up_proj_bias", bias, vec![experts, 2 * intermediate]),
            ("mlp.experts.down_proj", true, vec![experts, hidden, intermediate]),
            ("mlp.experts.down_proj_bias", bias, vec![experts, hidden]),
        ]),
    }
    tensors.push(("post_feedforward_layernorm.weight", model.post_norms, vec![hidden]));
    tensors
}
