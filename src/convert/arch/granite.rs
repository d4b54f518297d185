//! `GraniteForCausalLM`: Llama with factors of the embeddings, the scores, the outputs of blocks, and the logits; and
//! `GraniteMoeHybridForCausalLM` (Granite 4), with Mamba-2 in most layers and an MLP in each, perhaps beside experts.

use super::expected::ExpectedTensor;
use super::family::{PLAIN, experts, same_names, silu};
use super::fields::Fields;
use super::row::Arch;
use super::view::{View, whole};
use crate::catalogue::layer_part;
use crate::error::{Error, Result};
use crate::model_config::{
    LayerException, Mamba2, Mlp, ModelConfig, Recurrent, RecurrentLayers, RouterSoftmax, Selection, SharedExpert,
};

pub(super) const GRANITE: Arch = Arch {
    class: "GraniteForCausalLM",
    model_type: "granite",
    honours: &[
        "attention_bias",
        "mlp_bias",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ],
    adjust: set_factors,
    ..PLAIN
};

/// Field with the number of heads of Mamba-2.
pub const MAMBA_HEADS: &str = "mamba_n_heads";
/// Field with the width of the MLP that every token passes.
const SHARED: &str = "shared_intermediate_size";
/// Field with the type of each layer.
const TYPES: &str = "layer_types";

pub(super) const GRANITE_HYBRID: Arch = Arch {
    class: "GraniteMoeHybridForCausalLM",
    model_type: "granitemoehybrid",
    honours: &[
        "attention_bias",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "num_experts",
        "num_local_experts",
        SHARED,
        MAMBA_HEADS,
    ],
    mlp: |_, config| {
        let (width, activation) = (config.count_opt(SHARED)?.unwrap_or(1024), silu(config)?);
        // Models without experts say so with 0.
        if experts(config)? == 0 {
            return Ok(Mlp::Dense { intermediate: width, activation, bias: false });
        }
        Ok(Mlp::Moe {
            experts: experts(config)?,
            top_k: config.count_opt("num_experts_per_tok")?.unwrap_or(2),
            intermediate: config.count("intermediate_size")?,
            activation,
            bias: false,
            router_bias: false,
            latent: None,
            router_softmax: RouterSoftmax::Chosen,
            selection: Selection::default(),
            shared: Some(SharedExpert { intermediate: width, norms: false, gate: false }),
        })
    },
    // Layers without attention are no layers with windows; `adjust` reads the types.
    windows: |_, _| Ok(Vec::new()),
    adjust: |config, model| {
        set_factors(config, model)?;
        set_mixers(config, model)
    },
    views: views_of_hybrid,
    ..GRANITE
};

fn set_factors(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    let factor = |key: &str| Ok::<_, Error>(config.number_opt(key)?.unwrap_or(1.0));
    model.embedding_scale = factor("embedding_multiplier")? as f32;
    model.attention.scale = factor("attention_multiplier")? as f32;
    model.residual_scale = factor("residual_multiplier")? as f32;
    model.logit_scale = (1.0 / factor("logits_scaling")?) as f32;
    Ok(())
}

/// Sets the layers with Mamba-2: those that `layer_types` calls `mamba` (or `linear_attention`), and without this field
/// all. Attention rotates only if `position_embedding_type` is `rope`.
fn set_mixers(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    const WORDS: [&str; 4] = ["mamba", "linear_attention", "attention", "full_attention"];
    let n_layers = model.n_layers;
    let types = config.words_opt(TYPES)?.unwrap_or_else(|| vec![WORDS[0]; n_layers]);
    if types.len() != n_layers || types.iter().any(|word| !WORDS.contains(word)) {
        return Err(config.wrong(TYPES, &format!("{} for each of {n_layers} layers", WORDS.join(" or "))));
    }
    let (layers, others): (Vec<usize>, Vec<usize>) =
        (0..n_layers).partition(|layer| WORDS[..2].contains(&types[*layer]));
    if config.word_opt("position_embedding_type")? != Some("rope") {
        model.except(LayerException { layers: others, unrotated: true, ..LayerException::default() });
    }
    refuse_step_limits(config)?;
    let size = |field: &str, usual: usize| Ok::<_, Error>(config.count_opt(field)?.unwrap_or(usual));
    // The norm of this family covers all heads, and that of others a group of them.
    if size("mamba_n_groups", 1)? != 1 {
        return Err(config.unsupported("mamba_n_groups", "expected 1, as in all models of this family"));
    }
    let heads = size(MAMBA_HEADS, 128)?;
    let head_dim = match config.get("mamba_d_head").is_some_and(|width| width.is_number()) {
        true => config.count("mamba_d_head")?,
        // The field may say `auto`.
        false => (size("mamba_expand", 2)?.saturating_mul(model.hidden)).checked_div(heads).unwrap_or(0),
    };
    let mixer = Recurrent::Mamba2(Mamba2 {
        groups: 1,
        heads,
        state: size("mamba_d_state", 256)?,
        head_dim,
        width: size("mamba_d_conv", 4)?,
        conv_bias: config.flag("mamba_conv_bias", true)?,
        bias: config.flag("mamba_proj_bias", false)?,
        decay_factors: false,
    });
    model.recurrent = (!layers.is_empty()).then_some(RecurrentLayers { layers, mixer });
    Ok(())
}

/// Refuses limits of the steps of Mamba-2, which `transformers` does not apply where it decodes.
pub(super) fn refuse_step_limits(config: &Fields) -> Result<()> {
    const LIMITS: &str = "time_step_limit";
    let limits = config.get(LIMITS).and_then(|limits| limits.as_array());
    match limits.and_then(|limits| limits.first()).is_some_and(|least| least.as_f64() != Some(0.0)) {
        true => Err(config.unsupported(LIMITS, "expected limits that change nothing, from 0 on")),
        false => Ok(()),
    }
}

/// Returns the views of tensors of Granite 4: one projection for all inputs of Mamba-2, and gate and up matrices in
/// halves of one tensor.
fn views_of_hybrid(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let Some((layer, part)) = layer_part(&tensor.name) else { return same_names(model, tensor) };
    let rows = tensor.shape[0];
    let source = |leaf: &str| format!("model.layers.{layer}.{leaf}");
    let range = |leaf: &str, first: usize, of: usize| vec![View::Rows { source: source(leaf), first, of }];
    if let Some((first, of)) = mamba_rows(model, part) {
        let end = part.rsplit_once('.').map_or("", |(_, end)| end);
        return range(&format!("mamba.in_proj.{end}"), first, of);
    }
    match part {
        "mlp.gate_proj.weight" | "mlp.shared_experts.gate_proj.weight" => {
            range("shared_mlp.input_linear.weight", 0, 2 * rows)
        }
        "mlp.up_proj.weight" | "mlp.shared_experts.up_proj.weight" => {
            range("shared_mlp.input_linear.weight", rows, 2 * rows)
        }
        "mlp.down_proj.weight" | "mlp.shared_experts.down_proj.weight" => {
            vec![whole(source("shared_mlp.output_linear.weight"), rows)]
        }
        "mlp.router.weight" => vec![whole(source("block_sparse_moe.router.layer.weight"), rows)],
        "mlp.experts.gate_up_proj" => {
            let half = tensor.shape[1] / 2;
            let slices =
                |first| View::Slices { source: source("block_sparse_moe.input_linear.weight"), first, of: 2 * half };
            vec![View::Interleaved(vec![slices(0), slices(half)])]
        }
        "mlp.experts.down_proj" => vec![whole(source("block_sparse_moe.output_linear.weight"), rows)],
        _ => same_names(model, tensor),
    }
}

/// Returns the first row of a projection of Mamba-2 in the tensor of all of them, and the rows of this tensor.
pub(super) fn mamba_rows(model: &ModelConfig, part: &str) -> Option<(usize, usize)> {
    let Recurrent::Mamba2(mamba) = model.recurrent.as_ref()?.mixer else { return None };
    let (values, keys) = (mamba.values(), mamba.keys());
    let (matrix, _) = part.strip_prefix("mamba.")?.split_once("_proj.")?;
    let before = match matrix {
        "z" => 0,
        "x" => values,
        "b" => 2 * values,
        "c" => 2 * values + keys,
        "dt" => 2 * values + 2 * keys,
        _ => return None,
    };
    Some((before, 2 * values + 2 * keys + mamba.heads))
}
