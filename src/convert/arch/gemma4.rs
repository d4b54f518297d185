//! `Gemma4ForCausalLM`: Gemma 3 with plain norms, layers of two head sizes, values that are the keys of some layers, a
//! rotation that turns a part of the pairs, factors of layers, and by size experts beside the MLP (26B-A4B), or layers
//! that share keys and values, and further inputs of layers (E2B, E4B).

use super::expected::ExpectedTensor;
use super::family::{PLAIN, windows};
use super::fields::Fields;
use super::gemma::check_gelu;
use super::rope::{self, PARTIAL};
use super::row::Arch;
use super::view::{View, whole};
use crate::catalogue::layer_part;
use crate::error::Result;
use crate::model_config::{
    Activation, LayerException, Mlp, ModelConfig, PerLayerInput, QkNorm, RouterSoftmax, Selection, SharedExpert,
};

pub(super) const GEMMA4: Arch = Arch {
    class: "Gemma4ForCausalLM",
    model_type: "gemma4_text",
    also: &["gemma4_unified_text", "Gemma4UnifiedForCausalLM"],
    n_kv_heads: Some(4),
    head_dim: Some(256),
    max_context: 131_072,
    tied: true,
    honours: &[
        "attention_bias",
        "sliding_window",
        "final_logit_softcapping",
        "use_bidirectional_attention",
        "global_head_dim",
        "num_global_key_value_heads",
        "attention_k_eq_v",
        "num_kv_shared_layers",
        "hidden_size_per_layer_input",
        "enable_moe_block",
        "num_experts",
        "use_double_wide_mlp",
        LAYERS,
        super::rope::LOCAL_BASE,
        PARTIAL,
    ],
    mlp,
    windows: |config, n_layers| {
        let width = config.count_opt("sliding_window")?.unwrap_or(if is_unified(config)? { 1024 } else { 512 });
        let mut windows = windows(config, n_layers, width, |layer| !(layer + 1).is_multiple_of(6))?;
        // Whatever the configuration says, the last layer has no window.
        windows.last_mut().into_iter().for_each(|window| *window = None);
        Ok(windows)
    },
    adjust,
    views,
    ..PLAIN
};

/// Returns true for the models whose vision and audio parts share the language model's layers.
fn is_unified(config: &Fields) -> Result<bool> {
    Ok(config.word_opt("model_type")? == Some("gemma4_unified_text"))
}

fn mlp(_: &Arch, config: &Fields) -> Result<Mlp> {
    check_gelu(config)?;
    let (intermediate, activation) = (config.count("intermediate_size")?, Activation::GeluTanh);
    if !config.flag("enable_moe_block", false)? {
        return Ok(Mlp::Dense { intermediate, activation, bias: false });
    }
    Ok(Mlp::Moe {
        experts: config.count("num_experts")?,
        top_k: config.count("top_k_experts")?,
        intermediate: config.count("moe_intermediate_size")?,
        activation,
        bias: false,
        router_bias: false,
        latent: None,
        router_softmax: RouterSoftmax::Chosen,
        selection: Selection { factors: true, ..Selection::default() },
        shared: Some(SharedExpert { intermediate, norms: true, gate: false }),
    })
}

fn adjust(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    const DIRECTIONS: &str = "use_bidirectional_attention";
    // Images are seen in both directions, texts never.
    if config.get(DIRECTIONS).is_some_and(|value| value != "vision" && value != false) {
        return Err(config.unsupported(DIRECTIONS, "expected none or vision"));
    }
    model.post_norms = true;
    model.layer_scalars = true;
    model.embedding_scale = (model.hidden as f64).sqrt() as f32;
    model.logit_softcap = config.number_opt("final_logit_softcapping")?.map(|cap| cap as f32);
    model.attention.scale = 1.0;
    model.attention.qk_norm = QkNorm::Head;
    model.attention.value_norm = true;
    let usual = if is_unified(config)? { 0 } else { 256 };
    let width = config.count_opt("hidden_size_per_layer_input")?.unwrap_or(usual);
    if width > 0 {
        let vocab = config.count_opt("vocab_size_per_layer_input")?.unwrap_or(262_144);
        model.per_layer_input = Some(PerLayerInput { width, vocab });
    }
    let head_dim = of_full_layers(config, model, "head_dim", "global_head_dim")?.unwrap_or(512);
    let share = rope::partial(config)?.map_or(1.0, |(_, share)| share);
    model.local_rope = Some(rope::local(config, 10_000.0, model.max_context)?);
    model.rope.turning_pairs = Some((share * head_dim as f64 / 2.0) as usize);
    except_layers(config, model, head_dim)
}

/// Field of newer configurations with the sizes of layers that differ, by number.
const LAYERS: &str = "per_layer_config";

/// Reads a size of the layers without a window: the field `key` of each of them in `per_layer_config`, or the field
/// `older` of the whole model.
fn of_full_layers(config: &Fields, model: &ModelConfig, key: &str, older: &str) -> Result<Option<usize>> {
    let Some(layers) = config.object_opt(LAYERS)? else { return config.count_opt(older) };
    let mut size = None;
    for layer in (0..model.n_layers).filter(|layer| model.attention.windows[*layer].is_none()) {
        let own = layers.count_in(&layer.to_string(), key)?;
        if *size.get_or_insert(own) != own {
            return Err(config.unsupported(LAYERS, "expected the same sizes in all layers without a window"));
        }
    }
    Ok(size.flatten())
}

/// Describes the layers without a window, and those that read keys and values of earlier ones.
fn except_layers(config: &Fields, model: &mut ModelConfig, head_dim: usize) -> Result<()> {
    const SHARED: &str = "num_kv_shared_layers";
    let shared = config.count_opt(SHARED)?.unwrap_or(0);
    let Some(owners) = model.n_layers.checked_sub(shared).filter(|owners| *owners > 0) else {
        return Err(config.wrong(SHARED, &format!("fewer than the {} layers", model.n_layers)));
    };
    let keys_are_values = config.flag("attention_k_eq_v", false)?;
    let wide = config.flag("use_double_wide_mlp", false)?;
    let of_keys = of_full_layers(config, model, "num_key_value_heads", "num_global_key_value_heads")?;
    let of_keys = of_keys.filter(|_| keys_are_values || config.get(LAYERS).is_some());
    let is_full = |layer: usize, model: &ModelConfig| model.attention.windows[layer].is_none();
    let mut groups: Vec<(LayerException, Vec<usize>)> = Vec::new();
    for layer in 0..model.n_layers {
        let (full, shares) = (is_full(layer, model), layer >= owners);
        let kv_from = (0..owners).rev().find(|owner| is_full(*owner, model) == full).filter(|_| shares);
        if shares && kv_from.is_none() {
            return Err(config.wrong(SHARED, "a layer of each type that has keys and values"));
        }
        let intermediate = match model.mlp {
            Mlp::Dense { intermediate, .. } if shares && wide => Some(intermediate.saturating_mul(2)),
            _ => None,
        };
        let exception = LayerException {
            layers: Vec::new(),
            unrotated: false,
            n_kv_heads: of_keys.filter(|_| full),
            head_dim: full.then_some(head_dim),
            keys_are_values: full && keys_are_values,
            kv_from,
            intermediate,
        };
        if exception == LayerException::default() {
            continue;
        }
        match groups.iter_mut().find(|(other, _)| *other == exception) {
            Some((_, layers)) => layers.push(layer),
            None => groups.push((exception, vec![layer])),
        }
    }
    model.exceptions = groups.into_iter().map(|(exception, layers)| LayerException { layers, ..exception }).collect();
    Ok(())
}

fn views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let Some((layer, part)) = layer_part(&tensor.name) else { return super::family::same_names(model, tensor) };
    let first = tensor.shape[0];
    let source = match part {
        "mlp.router.weight" => "router.proj.weight",
        "mlp.router.input_scale" => "router.scale",
        "mlp.router.expert_scale" => "router.per_expert_scale",
        "mlp.shared_experts.gate_proj.weight" => "mlp.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight" => "mlp.up_proj.weight",
        "mlp.shared_experts.down_proj.weight" => "mlp.down_proj.weight",
        "mlp.shared_experts.post_layernorm.weight" => "post_feedforward_layernorm_1.weight",
        "mlp.experts.pre_layernorm.weight" => "pre_feedforward_layernorm_2.weight",
        "mlp.experts.post_layernorm.weight" => "post_feedforward_layernorm_2.weight",
        "mlp.experts.down_proj" => "experts.down_proj",
        "mlp.experts.gate_up_proj" => {
            let rows = tensor.shape[1] / 2;
            let source = format!("model.layers.{layer}.experts.gate_up_proj");
            let slices = |first| View::Slices { source: source.clone(), first, of: 2 * rows };
            return vec![View::Interleaved(vec![slices(0), slices(rows)])];
        }
        _ => return super::family::same_names(model, tensor),
    };
    vec![whole(format!("model.layers.{layer}.{source}"), first)]
}
