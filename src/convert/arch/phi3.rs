//! `Phi3ForCausalLM`: Llama with q, k and v in one matrix, gate and up in another, a sliding window, LongRoPE, and in Phi-4
//! heads of which a part is rotated.

use super::family::{Defaults, PARTIAL, dense, plain, refuse_quantization, same_names, same_windows, silu};
use super::{Arch, ExpectedTensor, Fields, View, layer_part, named, rope};
use crate::error::Result;
use crate::model_config::{Mlp, ModelConfig};

pub(super) const ARCH: Arch =
    Arch { class: DEFAULTS.class, claims: |config| named(config, DEFAULTS.class, "phi3"), config, views };

const DEFAULTS: Defaults = Defaults {
    class: "Phi3ForCausalLM",
    n_kv_heads: None,
    head_dim: None,
    max_context: 4096,
    norm_eps: 1e-5,
    theta: 10_000.0,
    tied: false,
    honours: &["sliding_window", PARTIAL],
};

fn config(config: &Fields) -> Result<ModelConfig> {
    refuse_quantization(config, None)?;
    let mut model = plain(config, &DEFAULTS, dense(config, silu(config)?)?)?;
    if let Some((fields, share)) = rope::partial(config)? {
        if !(share > 0.0 && share < 1.0) {
            return Err(fields.wrong(PARTIAL, "more than 0 and at most 1"));
        }
        // Rounded down, as `transformers` does.
        model.rope.rotary_dim = Some((model.head_dim as f64 * share) as usize);
    }
    model.attention.windows = same_windows(config, model.n_layers, config.count_opt("sliding_window")?)?;
    Ok(model)
}

fn views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let Some((layer, part)) = layer_part(&tensor.name) else { return same_names(model, tensor) };
    let Mlp::Dense { intermediate, .. } = model.mlp else { unreachable!("the family has no experts") };
    let (q, kv) = (model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim);
    let (fused, first, of) = match part {
        "self_attn.q_proj.weight" => ("self_attn.qkv_proj", 0, q + 2 * kv),
        "self_attn.k_proj.weight" => ("self_attn.qkv_proj", q, q + 2 * kv),
        "self_attn.v_proj.weight" => ("self_attn.qkv_proj", q + kv, q + 2 * kv),
        "mlp.gate_proj.weight" => ("mlp.gate_up_proj", 0, 2 * intermediate),
        "mlp.up_proj.weight" => ("mlp.gate_up_proj", intermediate, 2 * intermediate),
        _ => return same_names(model, tensor),
    };
    vec![View::Rows { source: format!("model.layers.{layer}.{fused}.weight"), first, of }]
}
