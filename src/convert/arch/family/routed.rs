//! Experts as DeepSeek-V3 introduced them: chosen by sigmoids of their logits plus a bias, perhaps in groups, beside an
//! MLP that computes every token; the first layers have a dense MLP.

use super::{separate_experts, silu};
use crate::catalogue::layer_part;
use crate::convert::arch::expected::ExpectedTensor;
use crate::convert::arch::fields::Fields;
use crate::convert::arch::view::{View, whole};
use crate::error::Result;
use crate::model_config::{DenseLayers, ExpertGroups, Mlp, ModelConfig, RouterSoftmax, Selection, SharedExpert};

/// Values of fields that a configuration leaves out, and the kind of choice.
pub struct Defaults {
    pub experts: usize,
    pub top_k: usize,
    /// Width of the MLP beside the experts, in widths of an expert.
    pub shared: usize,
    /// Whether the weights of the chosen experts sum to one unless `norm_topk_prob` says otherwise; `None` = they never
    /// do.
    pub normalized: Option<bool>,
    /// Properties of the choice; `groups` says how groups are scored if there are several.
    pub selection: Selection,
}

/// The choice that DeepSeek-V3 introduced, without groups.
pub const SIGMOID: Defaults = Defaults {
    experts: 256,
    top_k: 8,
    shared: 1,
    normalized: Some(true),
    selection: Selection {
        sigmoid: true,
        bias: true,
        groups: Some(ExpertGroups { count: 1, chosen: 1, best: 2 }),
        scale: 1.0,
        factors: false,
    },
};

/// Reads the experts.
///
/// # Errors
/// A field has the wrong type.
pub fn experts(config: &Fields, defaults: &Defaults) -> Result<Mlp> {
    let count = |key: &str, default: usize| Ok::<_, crate::error::Error>(config.count_opt(key)?.unwrap_or(default));
    let intermediate = config.count("moe_intermediate_size")?;
    let groups = match defaults.selection.groups {
        None => None,
        Some(usual) => match (count("n_group", usual.count)?, count("topk_group", usual.chosen)?) {
            (1, _) => None,
            (count, chosen) => Some(ExpertGroups { count, chosen, ..usual }),
        },
    };
    let shared = match count("n_shared_experts", defaults.shared)? {
        0 => None,
        number => Some(SharedExpert { intermediate: number.saturating_mul(intermediate), norms: false, gate: false }),
    };
    let scale = config.number_opt("routed_scaling_factor")?.map_or(defaults.selection.scale, |scale| scale as f32);
    Ok(Mlp::Moe {
        experts: count("n_routed_experts", defaults.experts)?,
        top_k: count("num_experts_per_tok", defaults.top_k)?,
        intermediate,
        activation: silu(config)?,
        bias: false,
        router_bias: false,
        latent: None,
        router_softmax: match defaults.normalized.map(|usual| config.flag("norm_topk_prob", usual)).transpose()? {
            Some(true) => RouterSoftmax::Chosen,
            Some(false) | None => RouterSoftmax::All,
        },
        selection: Selection { groups, scale, ..defaults.selection },
        shared,
    })
}

/// Sets the layers with a dense MLP: those that `mlp_layer_types` calls `dense`, or without this field those before
/// `first_k_dense_replace`, whose default is `first`.
///
/// # Errors
/// A field has the wrong type, or `mlp_layer_types` has an unknown word or not one for each layer.
pub fn dense_layers(config: &Fields, model: &mut ModelConfig, first: usize) -> Result<()> {
    const TYPES: &str = "mlp_layer_types";
    let layers: Vec<usize> = match config.words_opt(TYPES)? {
        None => (0..config.count_opt("first_k_dense_replace")?.unwrap_or(first).min(model.n_layers)).collect(),
        Some(types)
            if types.len() != model.n_layers || types.iter().any(|word| !["dense", "sparse"].contains(word)) =>
        {
            return Err(config.wrong(TYPES, &format!("dense or sparse for each of {} layers", model.n_layers)));
        }
        Some(types) => (0..types.len()).filter(|layer| types[*layer] == "dense").collect(),
    };
    if layers.is_empty() {
        return Ok(());
    }
    let intermediate = config.count("intermediate_size")?;
    let activation = model.mlp.activation();
    if layers.len() == model.n_layers {
        model.mlp = Mlp::Dense { intermediate, activation, bias: false };
    } else {
        model.dense_layers = Some(DenseLayers { layers, intermediate });
    }
    Ok(())
}

/// Returns the views of the tensors of experts, which are separate in the source, and of all others.
pub fn views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    match layer_part(&tensor.name) {
        Some((layer, "mlp.router.selection_bias")) => {
            vec![whole(format!("model.layers.{layer}.mlp.gate.e_score_correction_bias"), tensor.shape[0])]
        }
        _ => separate_experts(model, tensor, "mlp", ["gate_proj", "up_proj", "down_proj"]),
    }
}
