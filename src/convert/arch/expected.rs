//! Which canonical tensors a model consists of, from its description alone.

use crate::model_config::{Mlp, ModelConfig};

/// A tensor that must exist.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpectedTensor {
    /// Canonical name (see [`crate::role`]).
    pub name: String,
    /// Canonical shape.
    pub shape: Vec<usize>,
}

/// All tensors of a model, in the order in which a forward pass needs them.
pub fn expected_tensors(model: &ModelConfig) -> Vec<ExpectedTensor> {
    let mut list = List(Vec::new());
    list.push("model.embed_tokens.weight", &[model.vocab, model.hidden]);
    for layer in 0..model.n_layers {
        let layer = format!("model.layers.{layer}");
        attention(&mut list, model, &layer);
        if model.post_norms {
            list.push(format!("{layer}.pre_feedforward_layernorm.weight"), &[model.hidden]);
        }
        mlp(&mut list, model, &format!("{layer}.mlp"));
        if model.post_norms {
            list.push(format!("{layer}.post_feedforward_layernorm.weight"), &[model.hidden]);
        }
    }
    list.push("model.norm.weight", &[model.hidden]);
    if !model.tied_embeddings {
        list.push("lm_head.weight", &[model.vocab, model.hidden]);
    }
    list.0
}

struct List(Vec<ExpectedTensor>);

impl List {
    fn push(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.0.push(ExpectedTensor { name: name.into(), shape: shape.to_vec() });
    }

    /// A linear layer `(out, in)`.
    fn linear(&mut self, name: &str, out: usize, width: usize, bias: bool) {
        self.push(format!("{name}.weight"), &[out, width]);
        if bias {
            self.push(format!("{name}.bias"), &[out]);
        }
    }
}

fn attention(list: &mut List, model: &ModelConfig, layer: &str) {
    let (q, kv) = (model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim);
    let at = format!("{layer}.self_attn");
    list.push(format!("{layer}.input_layernorm.weight"), &[model.hidden]);
    for (name, out) in [("q_proj", q), ("k_proj", kv), ("v_proj", kv)] {
        list.linear(&format!("{at}.{name}"), out, model.hidden, model.attention.qkv_bias);
    }
    for name in ["q_norm", "k_norm"].into_iter().filter(|_| model.attention.qk_norm) {
        list.push(format!("{at}.{name}.weight"), &[model.head_dim]);
    }
    if model.attention.sinks {
        list.push(format!("{at}.sinks"), &[model.n_heads]);
    }
    list.linear(&format!("{at}.o_proj"), model.hidden, q, model.attention.o_bias);
    list.push(format!("{layer}.post_attention_layernorm.weight"), &[model.hidden]);
}

fn mlp(list: &mut List, model: &ModelConfig, at: &str) {
    match model.mlp {
        Mlp::Dense { intermediate, bias, .. } => {
            list.linear(&format!("{at}.gate_proj"), intermediate, model.hidden, bias);
            list.linear(&format!("{at}.up_proj"), intermediate, model.hidden, bias);
            list.linear(&format!("{at}.down_proj"), model.hidden, intermediate, bias);
        }
        Mlp::Moe { experts, intermediate, bias, router_bias, .. } => {
            list.linear(&format!("{at}.router"), experts, model.hidden, router_bias);
            for (name, out, width) in
                [("gate_up_proj", 2 * intermediate, model.hidden), ("down_proj", model.hidden, intermediate)]
            {
                list.push(format!("{at}.experts.{name}"), &[experts, out, width]);
                if bias {
                    list.push(format!("{at}.experts.{name}_bias"), &[experts, out]);
                }
            }
        }
    }
}
