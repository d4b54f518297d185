//! The parts of a configuration that decide which tensors exist.

use crate::error::{Error, Result};
use crate::model_config::{Activation, Attention, Mlp, ModelConfig, Rope, RopeScaling};
use serde_json::Value;

/// Reads the dimensions of a Llama or gpt-oss configuration.
pub fn model_config(config: &Value) -> Result<ModelConfig> {
    let gpt_oss = match config["model_type"].as_str() {
        Some("llama") => false,
        Some("gpt_oss") => true,
        other => {
            let found = other.unwrap_or("nothing");
            return Err(Error::unsupported(format!("`{found}`; expected llama or gpt_oss")).tensor("model_type"));
        }
    };
    let number = |field: &str| {
        let missing = || Error::corrupt(format!("found {}, expected a number", config[field])).tensor(field);
        config[field].as_u64().and_then(|n| usize::try_from(n).ok()).ok_or_else(missing)
    };
    let flag = |field: &str| config[field].as_bool().unwrap_or(false);
    let (hidden, n_heads) = (number("hidden_size")?, number("num_attention_heads")?);
    let head_dim = match &config["head_dim"] {
        Value::Null => hidden / n_heads.max(1),
        _ => number("head_dim")?,
    };
    let intermediate = number("intermediate_size")?;
    let mlp = if gpt_oss {
        Mlp::Moe {
            experts: number("num_local_experts")?,
            top_k: number("num_experts_per_tok")?,
            intermediate,
            activation: Activation::SwigluOai { alpha: 1.702, limit: 7.0 },
            bias: true,
            router_bias: true,
        }
    } else {
        Mlp::Dense { intermediate, activation: Activation::Silu, bias: flag("mlp_bias") }
    };
    let model = ModelConfig {
        architecture: String::new(),
        hidden,
        n_layers: number("num_hidden_layers")?,
        n_heads,
        n_kv_heads: if config["num_key_value_heads"].is_null() { n_heads } else { number("num_key_value_heads")? },
        head_dim,
        vocab: number("vocab_size")?,
        max_context: number("max_position_embeddings")?,
        norm_eps: 1e-5,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
        attention: Attention {
            qkv_bias: flag("attention_bias"),
            o_bias: flag("attention_bias"),
            sinks: gpt_oss,
            windows: Vec::new(),
            scale: 1.0,
        },
        mlp,
        tied_embeddings: flag("tie_word_embeddings"),
        bos: None,
        eos: Vec::new(),
    };
    model.validate()?;
    Ok(model)
}
