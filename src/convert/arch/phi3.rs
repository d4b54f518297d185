//! `Phi3ForCausalLM`: Llama with q, k and v in one matrix, gate and up in another, a sliding window, LongRoPE, and in
//! Phi-4 heads that are rotated in part.

use super::expected::ExpectedTensor;
use super::family::{PLAIN, rows_of_qkv, same_names, same_windows};
use super::rope::{self, PARTIAL};
use super::row::Arch;
use super::view::View;
use crate::catalogue::layer_part;
use crate::model_config::{Mlp, ModelConfig};

pub(super) const PHI3: Arch = Arch {
    class: "Phi3ForCausalLM",
    model_type: "phi3",
    max_context: 4096,
    norm_eps: 1e-5,
    honours: &["sliding_window", PARTIAL],
    windows: |config, n_layers| same_windows(config, n_layers, config.count_opt("sliding_window")?),
    adjust: |config, model| rope::set_partial(config, model, None),
    views,
    ..PLAIN
};

fn views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let Some((layer, part)) = layer_part(&tensor.name) else { return same_names(model, tensor) };
    let Mlp::Dense { intermediate, .. } = model.mlp else { unreachable!("the family has no experts") };
    let (fused, (first, of)) = match (part, rows_of_qkv(model, part)) {
        ("mlp.gate_proj.weight", _) => ("mlp.gate_up_proj", (0, 2 * intermediate)),
        ("mlp.up_proj.weight", _) => ("mlp.gate_up_proj", (intermediate, 2 * intermediate)),
        (_, Some(rows)) => ("self_attn.qkv_proj", rows),
        (_, None) => return same_names(model, tensor),
    };
    vec![View::Rows { source: format!("model.layers.{layer}.{fused}.weight"), first, of }]
}
