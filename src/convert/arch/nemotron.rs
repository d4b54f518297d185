//! `NemotronHForCausalLM` (Nemotron-H, Nemotron 3): each layer is one block, Mamba-2, attention without positions, an
//! MLP or experts, both without gates.

use super::expected::ExpectedTensor;
use super::family::routed::{self, SIGMOID};
use super::family::{PLAIN, same_names};
use super::fields::Fields;
use super::granite::{mamba_rows, refuse_step_limits};
use super::row::Arch;
use super::view::{View, whole};
use crate::catalogue::{EMBEDDING, FINAL_NORM, layer_part};
use crate::error::{Error, Result};
use crate::model_config::{
    Activation, DenseLayers, LayerException, Mamba2, Mlp, ModelConfig, Recurrent, RecurrentLayers, SharedExpert,
};

/// Field with a letter for each layer: M for Mamba-2, `*` for attention, `-` for an MLP, E for experts.
pub const PATTERN: &str = "hybrid_override_pattern";
/// The same field in newer files, with a word for each layer.
const TYPES: &str = "layers_block_type";
/// Letters and words for blocks.
const BLOCKS: [(char, &str); 4] = [('M', "mamba"), ('*', "attention"), ('-', "mlp"), ('E', "moe")];
/// Field with the width of a vector through which routed experts read and write.
pub const LATENT: &str = "moe_latent_size";

pub(super) const NEMOTRON_H: Arch = Arch {
    class: "NemotronHForCausalLM",
    model_type: "nemotron_h",
    n_heads: Some(32),
    n_kv_heads: Some(8),
    head_dim: Some(128),
    vocab: Some(131_072),
    max_context: 4096,
    norm_eps: 1e-5,
    honours: &[
        "attention_bias",
        "n_routed_experts",
        "n_shared_experts",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        PATTERN,
        LATENT,
    ],
    mlp,
    windows: |_, _| Ok(Vec::new()),
    adjust,
    views,
    ..PLAIN
};

/// Returns the letters of all layers.
fn pattern(config: &Fields, n_layers: usize) -> Result<Vec<char>> {
    let letters: Vec<char> = match (config.word_opt(PATTERN)?, config.words_opt(TYPES)?) {
        (Some(pattern), _) => pattern.chars().collect(),
        (None, Some(types)) => {
            let letter =
                |word: &str| BLOCKS.iter().find(|(_, known)| *known == word).map_or('?', |(letter, _)| *letter);
            types.into_iter().map(letter).collect()
        }
        (None, None) => Vec::new(),
    };
    match letters.len() == n_layers && letters.iter().all(|letter| BLOCKS.iter().any(|(known, _)| known == letter)) {
        true => Ok(letters),
        false => Err(config.wrong(PATTERN, &format!("M, *, - or E for each of {n_layers} layers"))),
    }
}

/// Reads the experts, or the MLP of models without experts.
fn mlp(_: &Arch, config: &Fields) -> Result<Mlp> {
    for (field, usual) in [("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")] {
        if config.word_opt(field)?.is_some_and(|found| found != usual) {
            return Err(config.unsupported(field, &format!("expected {usual}")));
        }
    }
    let activation = Activation::Relu2;
    if !pattern(config, config.count("num_hidden_layers")?)?.contains(&'E') {
        return Ok(Mlp::Dense { intermediate: config.count("intermediate_size")?, activation, bias: false });
    }
    let width = config.count_opt("moe_shared_expert_intermediate_size")?;
    let latent = config.count_opt(LATENT)?.filter(|width| *width > 0);
    Ok(match routed::experts(config, &SIGMOID)? {
        Mlp::Moe { experts, top_k, intermediate, bias, router_bias, router_softmax, selection, shared, .. } => {
            Mlp::Moe {
                experts,
                top_k,
                intermediate,
                activation,
                bias,
                router_bias,
                router_softmax,
                selection,
                // However many experts this MLP counts as, the field has the width of all.
                shared: shared
                    .map(|shared| SharedExpert { intermediate: width.unwrap_or(shared.intermediate), ..shared }),
                latent,
            }
        }
        dense @ Mlp::Dense { .. } => dense,
    })
}

fn adjust(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    let letters = pattern(config, model.n_layers)?;
    let layers = |wanted: &[char]| -> Vec<usize> {
        (0..letters.len()).filter(|layer| wanted.contains(&letters[*layer])).collect()
    };
    model.norm_eps = config.number_opt("layer_norm_epsilon")?.unwrap_or(NEMOTRON_H.norm_eps) as f32;
    model.mlp_layers = Some(layers(&['-', 'E']));
    model.except(LayerException { layers: layers(&['*']), unrotated: true, ..LayerException::default() });
    let dense = layers(&['-']);
    if matches!(model.mlp, Mlp::Moe { .. }) && !dense.is_empty() {
        model.dense_layers = Some(DenseLayers { layers: dense, intermediate: config.count("intermediate_size")? });
    }
    refuse_step_limits(config)?;
    let size = |field: &str, usual: usize| Ok::<_, Error>(config.count_opt(field)?.unwrap_or(usual));
    let mixer = Recurrent::Mamba2(Mamba2 {
        groups: size("n_groups", 8)?,
        heads: size("mamba_num_heads", 128)?,
        state: size("ssm_state_size", 128)?,
        head_dim: size("mamba_head_dim", 64)?,
        width: size("conv_kernel", 4)?,
        conv_bias: config.flag("use_conv_bias", true)?,
        bias: config.flag("use_bias", false)?,
        decay_factors: false,
    });
    let layers = layers(&['M']);
    model.recurrent = (!layers.is_empty()).then_some(RecurrentLayers { layers, mixer });
    Ok(())
}

/// Returns the views of tensors, all of which have names of their own. The block of a layer is its `mixer`.
fn views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let rows = tensor.shape[0];
    let Some((layer, part)) = layer_part(&tensor.name) else {
        return match tensor.name.as_str() {
            EMBEDDING => vec![whole("backbone.embeddings.weight", rows), whole("backbone.embedding.weight", rows)],
            FINAL_NORM => vec![whole("backbone.norm_f.weight", rows)],
            _ => same_names(model, tensor),
        };
    };
    let at = format!("backbone.layers.{layer}");
    let of_block = |leaf: &str| vec![whole(format!("{at}.mixer.{leaf}"), rows)];
    if let Some((first, of)) = mamba_rows(model, part) {
        let end = part.rsplit_once('.').map_or("", |(_, end)| end);
        return vec![View::Rows { source: format!("{at}.mixer.in_proj.{end}"), first, of }];
    }
    let expert = |matrix: &str| {
        let separate = |number| whole(format!("{at}.mixer.experts.{number}.{matrix}.weight"), tensor.shape[1]);
        vec![View::Stacked((0..rows).map(separate).collect()), whole(format!("{at}.mixer.experts.{matrix}"), rows)]
    };
    match part {
        "input_layernorm.weight" | "post_attention_layernorm.weight" => vec![whole(format!("{at}.norm.weight"), rows)],
        "mlp.router.weight" => of_block("gate.weight"),
        "mlp.router.selection_bias" => of_block("gate.e_score_correction_bias"),
        "mlp.experts.up_proj" => expert("up_proj"),
        "mlp.experts.down_proj" => expert("down_proj"),
        "mlp.latent_down_proj.weight" => of_block("fc1_latent_proj.weight"),
        "mlp.latent_up_proj.weight" => of_block("fc2_latent_proj.weight"),
        _ => match ["self_attn.", "mamba.", "mlp."].iter().find_map(|prefix| part.strip_prefix(prefix)) {
            Some(leaf) => of_block(leaf),
            None => same_names(model, tensor),
        },
    }
}
