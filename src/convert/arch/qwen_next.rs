//! `Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM` (Qwen3.5 to 3.8, which are published inside wrappers) and
//! `Qwen3NextForCausalLM`: gated delta nets in most layers, attention with a gate of its output in the others.

use super::expected::ExpectedTensor;
use super::family::{PLAIN, dense, experts, separate_experts, silu};
use super::fields::Fields;
use super::qwen::set_dense_layers;
use super::rope::{self, AXES, PARTIAL};
use super::row::{Arch, PredictionPlace};
use super::view::{View, whole};
use crate::catalogue::layer_part;
use crate::error::{Error, Result};
use crate::model_config::{
    GatedDeltaNet, Mlp, ModelConfig, QkNorm, Recurrent, RecurrentLayers, RouterSoftmax, Selection, SharedExpert,
};

/// Field with the heads of values of delta nets.
pub const VALUE_HEADS: &str = "linear_num_value_heads";
/// Field that says which layers have attention: those whose number, counted from 1, is a multiple of it.
pub const INTERVAL: &str = "full_attention_interval";
/// Field that says whether the output of attention has a gate.
pub const OUTPUT_GATE: &str = "attn_output_gate";
/// Field with the type of each layer.
const TYPES: &str = "layer_types";
pub(super) const QWEN3_5: Arch = Arch {
    class: "Qwen3_5ForCausalLM",
    model_type: "qwen3_5_text",
    also: &["Qwen3_5ForConditionalGeneration", "qwen3_5"],
    n_heads: Some(16),
    n_kv_heads: Some(4),
    head_dim: Some(256),
    vocab: Some(248_320),
    max_context: 32_768,
    honours: &[VALUE_HEADS, INTERVAL, OUTPUT_GATE, PARTIAL, AXES],
    mlp: |arch, config| dense(arch, config, silu(config)?),
    // Layers without attention are no layers with windows; `adjust` reads the types.
    windows: |_, _| Ok(Vec::new()),
    adjust: set_mixers,
    views: views_of_qwen3_5,
    prediction: Some(PredictionPlace::Apart),
    ..PLAIN
};

pub(super) const QWEN3_5_MOE: Arch = Arch {
    class: "Qwen3_5MoeForCausalLM",
    model_type: "qwen3_5_moe_text",
    also: &["Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"],
    n_kv_heads: Some(2),
    honours: &[VALUE_HEADS, INTERVAL, OUTPUT_GATE, PARTIAL, AXES, "num_experts", "shared_expert_intermediate_size"],
    // The weights of the chosen experts always sum to one.
    mlp: |_, config| mixture(config, 256, 8, RouterSoftmax::Chosen),
    ..QWEN3_5
};

pub(super) const QWEN3_NEXT: Arch = Arch {
    class: "Qwen3NextForCausalLM",
    model_type: "qwen3_next",
    also: &[],
    n_kv_heads: Some(2),
    vocab: Some(151_936),
    honours: &[
        VALUE_HEADS,
        INTERVAL,
        OUTPUT_GATE,
        PARTIAL,
        "num_experts",
        "shared_expert_intermediate_size",
        "mlp_only_layers",
        "decoder_sparse_step",
    ],
    mlp: |_, config| {
        let softmax = if config.flag("norm_topk_prob", true)? { RouterSoftmax::Chosen } else { RouterSoftmax::All };
        mixture(config, 512, 10, softmax)
    },
    adjust: |config, model| {
        set_mixers(config, model)?;
        set_dense_layers(config, model, 5632)
    },
    views: views_of_qwen3_next,
    ..QWEN3_5
};

/// Reads experts, and the MLP beside them with a gate of its output.
fn mixture(config: &Fields, count: usize, top_k: usize, router_softmax: RouterSoftmax) -> Result<Mlp> {
    let size = |key: &str| Ok::<_, Error>(config.count_opt(key)?.unwrap_or(512));
    Ok(Mlp::Moe {
        experts: if config.get("num_experts").is_some() { experts(config)? } else { count },
        top_k: config.count_opt("num_experts_per_tok")?.unwrap_or(top_k),
        intermediate: size("moe_intermediate_size")?,
        activation: silu(config)?,
        bias: false,
        router_bias: false,
        latent: None,
        router_softmax,
        selection: Selection::default(),
        shared: match size("shared_expert_intermediate_size")? {
            0 => None,
            intermediate => Some(SharedExpert { intermediate, norms: false, gate: true }),
        },
    })
}

/// Sets the norms, the rotation, the gate of attention, and the layers with delta nets: those that `layer_types` calls
/// `linear_attention`, or all whose number is no multiple of `full_attention_interval`.
fn set_mixers(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    let n_layers = model.n_layers;
    if !config.flag(OUTPUT_GATE, true)? {
        return Err(config.unsupported(OUTPUT_GATE, "expected true, as in all models of this family"));
    }
    model.norm_plus_one = true;
    (model.attention.qk_norm, model.attention.gate) = (QkNorm::Head, true);
    rope::set_partial(config, model, Some(0.25))?;
    let is_recurrent: Vec<bool> = match config.words_opt(TYPES)? {
        Some(types) => {
            const WORDS: [&str; 2] = ["linear_attention", "full_attention"];
            if types.len() != n_layers || types.iter().any(|word| !WORDS.contains(word)) {
                return Err(config.wrong(TYPES, &format!("{} for each of {n_layers} layers", WORDS.join(" or "))));
            }
            types.into_iter().map(|word| word == WORDS[0]).collect()
        }
        None => {
            let interval = config.count_opt(INTERVAL)?.unwrap_or(4);
            (1..=n_layers).map(|number| interval == 0 || !number.is_multiple_of(interval)).collect()
        }
    };
    let size = |field: &str, usual: usize| Ok::<_, Error>(config.count_opt(field)?.unwrap_or(usual));
    let mixer = Recurrent::GatedDeltaNet(GatedDeltaNet {
        key_heads: size("linear_num_key_heads", 16)?,
        value_heads: size(VALUE_HEADS, 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        width: size("linear_conv_kernel_dim", 4)?,
        tiled: false,
        decay_factors: false,
    });
    let layers: Vec<usize> = (0..n_layers).filter(|layer| is_recurrent[*layer]).collect();
    model.recurrent = (!layers.is_empty()).then_some(RecurrentLayers { layers, mixer });
    Ok(())
}

/// Returns the view of a matrix whose rows belong to heads: in the source, head `h` has `of` rows, of which
/// those from `first` on are rows of this matrix.
fn rows_of_heads(source: &str, heads: usize, [first, of]: [usize; 2]) -> View {
    let head = |h: usize| View::Rows { source: source.to_string(), first: h * of + first, of: heads * of };
    View::Joined((0..heads).map(head).collect())
}

/// Returns the sizes of the delta nets of a model.
fn net_of(model: &ModelConfig) -> Option<GatedDeltaNet> {
    match model.recurrent.as_ref()?.mixer {
        Recurrent::GatedDeltaNet(net) => Some(net),
        Recurrent::ShortConv(_) | Recurrent::Mamba2(_) => None,
    }
}

/// Returns the views of tensors whose names and places all three families share.
fn views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let Some((layer, part)) = layer_part(&tensor.name) else { return separate(model, tensor) };
    let at = format!("model.layers.{layer}");
    let rows = tensor.shape[0];
    match part {
        // A head has rows of the query, then as many of the gate.
        "self_attn.q_proj.weight" | "self_attn.gate_proj.weight" => {
            let first = if part.starts_with("self_attn.gate") { model.head_dim } else { 0 };
            let source = format!("{at}.self_attn.q_proj.weight");
            vec![rows_of_heads(&source, model.n_heads, [first, 2 * model.head_dim])]
        }
        "mlp.router.shared_expert_gate.weight" => vec![whole(format!("{at}.mlp.shared_expert_gate.weight"), rows)],
        _ => match part.strip_prefix("mlp.shared_experts.") {
            Some(matrix) => vec![whole(format!("{at}.mlp.shared_expert.{matrix}"), rows)],
            None => separate(model, tensor),
        },
    }
}

fn separate(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    separate_experts(model, tensor, "mlp", ["gate_proj", "up_proj", "down_proj"])
}

/// Returns the views of Qwen3.5, which stacks the projections to queries, keys and values.
fn views_of_qwen3_5(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let Some(((layer, part), net)) = layer_part(&tensor.name).zip(net_of(model)) else { return views(model, tensor) };
    let at = format!("model.layers.{layer}.linear_attn");
    let stacked = |first| vec![View::Rows { source: format!("{at}.in_proj_qkv.weight"), first, of: net.channels() }];
    let own = |leaf: &str| vec![whole(format!("{at}.in_proj_{leaf}.weight"), tensor.shape[0])];
    match part {
        "linear_attn.q_proj.weight" => stacked(0),
        "linear_attn.k_proj.weight" => stacked(net.keys()),
        "linear_attn.v_proj.weight" => stacked(2 * net.keys()),
        "linear_attn.z_proj.weight" => own("z"),
        "linear_attn.b_proj.weight" => own("b"),
        "linear_attn.a_proj.weight" => own("a"),
        _ => views(model, tensor),
    }
}

/// Returns the views of Qwen3-Next, which stacks all projections, and in each key head the parts.
fn views_of_qwen3_next(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let Some(((layer, part), net)) = layer_part(&tensor.name).zip(net_of(model)) else { return views(model, tensor) };
    let at = format!("model.layers.{layer}.linear_attn");
    let per_key = net.per_key();
    let (key, value) = (net.key_dim, per_key * net.value_dim);
    let of = |leaf: &str, place| vec![rows_of_heads(&format!("{at}.in_proj_{leaf}.weight"), net.key_heads, place)];
    match part {
        "linear_attn.q_proj.weight" => of("qkvz", [0, 2 * (key + value)]),
        "linear_attn.k_proj.weight" => of("qkvz", [key, 2 * (key + value)]),
        "linear_attn.v_proj.weight" => of("qkvz", [2 * key, 2 * (key + value)]),
        "linear_attn.z_proj.weight" => of("qkvz", [2 * key + value, 2 * (key + value)]),
        "linear_attn.b_proj.weight" => of("ba", [0, 2 * per_key]),
        "linear_attn.a_proj.weight" => of("ba", [per_key, 2 * per_key]),
        _ => views(model, tensor),
    }
}
