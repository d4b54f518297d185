//! Refuses models with properties that llama.cpp's code for their family does not implement.

use super::family::{Family, LogitScale, Unrotated};
use crate::error::{Error, Result};
use crate::model_config::{
    DenseLayers, ExpertGroups, Heads, Mlp, ModelConfig, QkNorm, Recurrent, RopeScaling, RouterSoftmax, Selection,
    SharedExpert, ShortConv,
};

/// Epsilon of the norms after attention and MLP in families where it is built into llama.cpp.
const POST_NORM_EPS: f32 = 1e-8;

/// A property of a model: its field, whether llama.cpp implements it for the family, and what was found.
type Check = (&'static str, bool, String);

/// Refuses models with properties that llama.cpp's code for the family does not implement.
///
/// # Errors
/// Names the field of the first such property.
pub(super) fn check(model: &ModelConfig, family: &Family) -> Result<()> {
    for field in model.extensions() {
        if !family.always_has(field) && !family.may.contains(&field) {
            return Err(cannot(family, field, "a property that only other families have"));
        }
    }
    if let Some(field) = family.always.iter().find(|field| !model.extensions().any(|found| found == **field)) {
        return Err(cannot(family, field, "a model without this property"));
    }
    let checks = mlp_checks(model, family).into_iter().chain(attention_checks(model, family));
    match checks.chain(block_checks(model, family)).chain(layer_checks(model, family)).find(|(_, fits, _)| !fits) {
        Some((field, _, why)) => Err(cannot(family, field, &why)),
        None => Ok(()),
    }
}

fn mlp_checks(model: &ModelConfig, family: &Family) -> Vec<Check> {
    let activation = model.mlp.activation();
    let all_experts = matches!(model.mlp, Mlp::Moe { router_softmax: RouterSoftmax::All, .. });
    let (of_its_kind, kind) = match model.mlp {
        Mlp::Dense { .. } => (family.dense.or(family.windowed), "a dense MLP in every layer"),
        Mlp::Moe { .. } => (family.moe, "experts"),
    };
    let has_bias = matches!(model.mlp, Mlp::Dense { bias: true, .. });
    let dense_first = |dense: &DenseLayers| dense.layers.iter().copied().eq(0..dense.layers.len());
    let fits = model.dense_layers.as_ref().is_none_or(|dense| family.has_leading_dense() && dense_first(dense));
    let (selection, shared) = match model.mlp {
        Mlp::Moe { selection, shared, intermediate, .. } if family.routed_experts => {
            (is_deep(&selection), shared.is_some_and(|shared| is_multiple(shared, intermediate)))
        }
        Mlp::Moe { selection, shared, .. } if family.has_single_blocks() => (
            selection == Selection { sigmoid: true, bias: true, scale: selection.scale, ..Selection::default() },
            shared.is_some_and(|shared| !shared.gate && !shared.norms),
        ),
        Mlp::Moe { selection, .. } if family.has_sigmoid_experts() => {
            (selection == Selection { sigmoid: true, bias: true, ..Selection::default() }, true)
        }
        Mlp::Moe { selection, shared, .. } if family.has_mamba() => {
            (selection == Selection::default(), shared.is_some_and(|shared| !shared.gate && !shared.norms))
        }
        Mlp::Moe { selection, shared, .. } if family.has_delta_nets() => {
            (selection == Selection::default(), shared.is_some_and(|shared| shared.gate && !shared.norms))
        }
        Mlp::Moe { selection, shared, .. } if family.may.contains(&"mlp.shared") => (
            selection == Selection { factors: true, ..Selection::default() },
            shared.is_some_and(|shared| shared.norms),
        ),
        _ => (true, true),
    };
    vec![
        ("mlp.kind", of_its_kind.is_some(), kind.to_string()),
        ("mlp.bias", !has_bias || family.mlp_bias, "biases of a dense MLP".into()),
        ("dense_layers", fits, "a dense MLP in some layers and experts in the others".into()),
        (
            "mlp.activation",
            activation == family.activation,
            format!("{activation:?}, expected {:?}", family.activation),
        ),
        (
            "mlp.router_softmax",
            family.routed_experts || family.has_single_blocks() || !all_experts,
            "weights of experts that do not sum to one".into(),
        ),
        ("mlp.selection", selection, "another choice of experts".into()),
        ("mlp.shared", shared, "no MLP beside the experts, or one of another width or with other norms".into()),
    ]
}

/// Returns true for a choice of experts that the keys of DeepSeek-V3 describe. llama.cpp scores groups of experts by
/// their two largest scores.
fn is_deep(selection: &Selection) -> bool {
    let groups = selection.groups.is_none_or(|ExpertGroups { count, chosen, best }| best == 2 && chosen < count);
    groups && !selection.factors
}

fn is_multiple(shared: SharedExpert, intermediate: usize) -> bool {
    shared.intermediate.is_multiple_of(intermediate) && !shared.norms
}

fn attention_checks(model: &ModelConfig, family: &Family) -> Vec<Check> {
    let attention = &model.attention;
    let width = family.score_width(model.n_layers, model.hidden, model.n_heads, model.head_dim);
    let scale = family.score_scale.unwrap_or((1.0 / (width as f64).sqrt()) as f32);
    // Unit norms have GGUF weights that hold the scale, and that of latent attention depends on the rotation.
    let free = family.factor_keys || attention.qk_norm == QkNorm::Unit || attention.latent.is_some();
    let partial = model.heads().any(|Heads { rotary, head_dim, .. }| {
        let rope = rotary.and_then(|rotary| model.ropes().nth(rotary));
        rope.is_some_and(|rope| rope.rotary_dim(head_dim) != head_dim)
    });
    let [q, k, v, o] = family.biases;
    let heads = model.n_heads * model.head_dim;
    vec![
        ("attention.scale", free || close(attention.scale, scale), format!("{}, expected {scale}", attention.scale)),
        ("attention.softcap", attention.softcap.is_some() == family.softcap, or_none(attention.softcap)),
        ("attention.sinks", attention.sinks == family.sinks, attention.sinks.to_string()),
        ("attention.qk_norm", family.qk_norm.contains(&attention.qk_norm), format!("{:?}", attention.qk_norm)),
        ("attention.qkv_bias", !attention.qkv_bias || q && k && v, "biases of q, k and v".into()),
        ("attention.o_bias", !attention.o_bias || o, "a bias of the output projection".into()),
        (
            "rope.rotary_dim",
            family.partial_rotary || attention.latent.is_some() || !partial,
            "a rotation of only a part of each head".into(),
        ),
        (
            "head_dim",
            !family.full_width || heads == model.hidden,
            format!("heads of {heads} values, expected {}", model.hidden),
        ),
        ("attention.latent.q_rank", q_rank_is_read(model), "a rank of queries in a model of this depth".into()),
    ]
}

/// Returns false for models whose rank of queries llama.cpp does not read, because it takes them for DeepSeek-V2-Lite
/// or another small model by their number of layers.
fn q_rank_is_read(model: &ModelConfig) -> bool {
    let is_lite = matches!((model.n_layers, model.vocab), (26 | 27, _) | (48, 128_256));
    !is_lite || model.attention.latent.is_none_or(|latent| latent.q_rank.is_none())
}

fn block_checks(model: &ModelConfig, family: &Family) -> Vec<Check> {
    let embedding = family.embedding_scale(model.hidden);
    let cap = model.logit_softcap;
    let post_eps = if family.always_has("post_norm_eps") { Some(POST_NORM_EPS) } else { None };
    let vocab = model.per_layer_input.map_or(model.vocab, |input| input.vocab);
    vec![
        (
            "embedding_scale",
            family.factor_keys || close(model.embedding_scale, embedding),
            format!("{}, expected {embedding}", model.embedding_scale),
        ),
        ("logit_softcap", if cap.is_some() { family.logit_softcap } else { !family.softcap }, or_none(cap)),
        (
            "logit_scale",
            model.logit_scale == 1.0 || family.logit_scale != LogitScale::None && model.logit_scale != 0.0,
            model.logit_scale.to_string(),
        ),
        ("norm_plus_one", model.norm_plus_one == family.norm_plus_one, model.norm_plus_one.to_string()),
        ("post_norms", model.post_norms == family.post_norms, model.post_norms.to_string()),
        (
            "post_norm_eps",
            post_eps.is_none() || model.post_norm_eps == post_eps,
            format!("{:?}, expected {post_eps:?}", model.post_norm_eps),
        ),
        (
            "tied_embeddings",
            family.tied.is_none_or(|tied| tied == model.tied_embeddings),
            model.tied_embeddings.to_string(),
        ),
        ("per_layer_input.vocab", vocab == model.vocab, format!("{vocab} rows, expected {}", model.vocab)),
    ]
}

/// Checks properties that differ by layer.
fn layer_checks(model: &ModelConfig, family: &Family) -> Vec<Check> {
    let is_rotated = |layer: usize| match family.unrotated {
        Unrotated::None => true,
        Unrotated::EveryFourth => !(layer + 1).is_multiple_of(4),
        Unrotated::WithoutWindow => model.layer(layer).window().is_some(),
        Unrotated::Everywhere => model.heads().all(|heads| heads.rotary.is_some()),
        Unrotated::Always => false,
    };
    let heads = |layer: usize| model.layer(layer).heads().copied();
    let rotated = (0..model.n_layers).all(|n| heads(n).is_none_or(|heads| heads.rotary.is_some() == is_rotated(n)));
    let differs = family.has_layer_sizes();
    let plain = |layer: usize| {
        let (Some(found), base) = (heads(layer), model) else { return true };
        let same = found.n_kv_heads == base.n_kv_heads && found.head_dim == base.head_dim;
        same && !found.keys_are_values && found.kv_from.is_none()
    };
    let layers = || 0..model.n_layers;
    let owners = layers().filter(|layer| model.layer(*layer).kv_from().is_none()).count();
    // llama.cpp takes keys and values from the last two layers that have their own: one with, one without a window.
    let owner = |layer: usize| owners.checked_sub(if model.layer(layer).window().is_some() { 2 } else { 1 });
    let shares = |layer: usize| if layer < owners { None } else { owner(layer) };
    let widths = |windowed: bool| {
        let mut of_kind = model.heads().filter(move |heads| heads.window.is_some() == windowed);
        let first = of_kind.next();
        of_kind.all(|heads| {
            first.is_none_or(|first| {
                (heads.head_dim, heads.keys_are_values, heads.n_kv_heads)
                    == (first.head_dim, first.keys_are_values, first.n_kv_heads)
            })
        })
    };
    let plain_convolution = model.recurrent.as_ref().is_none_or(|recurrent| match recurrent.mixer {
        Recurrent::ShortConv(ShortConv { width, bias }) => width > 1 && !bias,
        // In Granite 4, llama.cpp supports heads that together are twice as wide as the residual stream.
        Recurrent::Mamba2(mamba) => {
            let fits = family.has_single_blocks() || mamba.values() == 2 * model.hidden;
            fits && !mamba.bias && mamba.width > 1
        }
        // llama.cpp has one width for keys and values, and a window of at least two positions.
        Recurrent::GatedDeltaNet(net) => net.key_dim == net.value_dim && net.width > 1,
    });
    vec![
        (
            "recurrent.mixer",
            plain_convolution,
            "convolutions with biases or of one position, or heads of other widths".into(),
        ),
        ("exceptions.unrotated", rotated, "other layers without rotation".into()),
        ("exceptions", differs || layers().all(plain), "layers of different sizes".into()),
        (
            "exceptions.kv_from",
            layers().all(|layer| model.layer(layer).kv_from() == shares(layer)),
            "layers that read keys and values of other layers than in llama.cpp".into(),
        ),
        ("exceptions.head_dim", widths(true) && widths(false), "layers of one type with different sizes".into()),
        (
            "rope.scaling",
            !differs || model.rope.scaling == RopeScaling::None,
            "a scaled rotation that turns a part of the pairs".into(),
        ),
    ]
}

fn or_none(number: Option<f32>) -> String {
    number.map_or("none".to_string(), |number| number.to_string())
}

/// Returns the error for a property that llama.cpp does not implement for the family.
pub(super) fn cannot(family: &Family, field: &str, why: &str) -> Error {
    Error::unsupported(format!("found {why}; llama.cpp does not support this for {}", family.name)).tensor(field)
}

fn close(a: f32, b: f32) -> bool {
    (a - b).abs() <= 1e-6 * b.abs()
}
