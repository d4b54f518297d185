//! Converts a model's description to the hyper-parameters of a GGUF file.
//!
//! Many properties of a family are built into llama.cpp. A model with a property that llama.cpp's code for the family
//! does not implement is refused; where llama.cpp computes nearly the same, a note reports the difference.

use super::check::{cannot, check};
use super::config::{FACTORS, ROPE_FREQS, SIGMOID, SOFTMAX, UNIT_NORMS};
use super::family::{Family, LogitScale};
use super::rope_factors::Llama3;
use crate::convert::source::gguf::value::{Scalar, Value as Meta};
use crate::error::Result;
use crate::model_config::{
    Latent, LayerConfig, Mlp, ModelConfig, NormKind, PositionScale, QkNorm, Recurrent, RecurrentLayers, Rope,
    RopeScaling, RouterSoftmax, SharedExpert,
};

/// Divisor of the frequency of a pair that does not turn.
const STILL: f32 = 1e30;

/// Metadata keys, extra tensors, and notes for the user.
#[derive(Debug, Default)]
pub struct GgufDescription {
    /// Keys and values in the order in which they are written.
    pub entries: Vec<(String, Meta)>,
    /// Tensors that hold hyper-parameters (factors of RoPE scaling, constant weights): name and values.
    pub factors: Vec<(String, Vec<f32>)>,
    /// Notes about computations in which llama.cpp differs.
    pub notes: Vec<String>,
}

/// Converts the description of a model of a family to metadata keys.
///
/// # Errors
/// The model needs a feature that llama.cpp lacks for this family; the message names the field.
pub fn describe(model: &ModelConfig, family: &Family) -> Result<GgufDescription> {
    check(model, family)?;
    let mut out = GgufDescription::default();
    let mut put = |leaf: &str, value: Meta| out.entries.push((format!("{}.{leaf}", family.name), value));
    put("vocab_size", count(model.vocab));
    put("context_length", count(context(model, family)));
    put("embedding_length", count(model.hidden));
    put("block_count", count(model.n_layers));
    mlp(model, family, &mut put);
    attention(model, family, &mut put);
    let eps = if model.norm_kind == NormKind::Layer { "layer_norm_epsilon" } else { "layer_norm_rms_epsilon" };
    put(&format!("attention.{eps}"), Meta::f32(model.norm_eps));
    if family.has_single_blocks() {
        // llama.cpp needs this key for another norm, which models without further layers do not have.
        put("attention.layer_norm_epsilon", Meta::f32(model.norm_eps));
    }
    let head_dim = model.rotated_head_dim(0);
    put("rope.dimension_count", count(model.rope.rotary_dim(head_dim)));
    put("rope.freq_base", Meta::f32(model.rope.theta as f32));
    if let Some(cap) = model.attention.softcap {
        put("attn_logit_softcapping", Meta::f32(cap));
    }
    if let Some(cap) = model.logit_softcap {
        put("final_logit_softcapping", Meta::f32(cap));
    }
    factors(model, family, &mut put);
    if family.has_layer_sizes() {
        layer_sizes(model, &mut put);
    }
    windows(model, family, &mut out);
    check_steps(model, family)?;
    rope(model, family, &mut out)?;
    extra_tensors(model, &mut out);
    if model.attention.latent.is_some_and(|latent| latent.norm_eps != model.norm_eps) {
        out.notes.push(ONE_EPSILON.to_string());
    }
    Ok(out)
}

fn count(n: usize) -> Meta {
    Meta::u32(n as u32)
}

/// Returns a number for all layers, or a list with one for each if they differ.
fn count_of_layers(counts: Vec<usize>) -> Meta {
    match counts.split_first() {
        Some((first, rest)) if rest.iter().all(|n| n == first) => count(*first),
        _ => Meta::Numbers(Scalar::I32, counts.iter().flat_map(|n| (*n as i32).to_le_bytes()).collect()),
    }
}

/// Writes the keys of the feed-forward parts.
fn mlp(model: &ModelConfig, family: &Family, put: &mut impl FnMut(&str, Meta)) {
    let widths = model.layers().map(|layer| match layer.mlp {
        None => 0,
        Some(Mlp::Dense { intermediate, .. }) => intermediate,
        Some(Mlp::Moe { shared: Some(SharedExpert { norms: true, intermediate, .. }), .. }) => intermediate,
        Some(Mlp::Moe { intermediate, .. }) => {
            model.dense_layers.as_ref().map_or(intermediate, |dense| dense.intermediate)
        }
    });
    put("feed_forward_length", count_of_layers(widths.collect()));
    let Mlp::Moe { experts, top_k, intermediate, router_softmax, selection, shared, latent, .. } = model.mlp else {
        return;
    };
    if family.expert_width_key {
        put("expert_feed_forward_length", count(intermediate));
    }
    put("expert_count", count(experts));
    put("expert_used_count", count(top_k));
    if let Some(shared) = shared.filter(|shared| shared.gate || family.has_mamba()) {
        put("expert_shared_feed_forward_length", count(shared.intermediate));
    }
    if family.routed_experts || family.has_sigmoid_experts() {
        put("expert_gating_func", Meta::u32(if selection.sigmoid { SIGMOID } else { SOFTMAX }));
    }
    if family.has_leading_dense() {
        put("leading_dense_block_count", count(model.dense_layers.as_ref().map_or(0, |dense| dense.layers.len())));
    }
    if !family.routed_experts && !family.has_single_blocks() {
        return;
    }
    if let Some(latent) = latent {
        put("moe_latent_size", count(latent));
    }
    let number = |shared: SharedExpert| {
        if family.has_single_blocks() { 1 } else { shared.intermediate / intermediate }
    };
    put("expert_shared_count", count(shared.map_or(0, number)));
    put("expert_weights_scale", Meta::f32(selection.scale));
    put("expert_weights_norm", Meta::bool(router_softmax == RouterSoftmax::Chosen));
    if let Some(groups) = selection.groups {
        put("expert_group_count", count(groups.count));
        put("expert_group_used_count", count(groups.chosen));
    }
}

/// Writes the numbers and widths of heads.
fn attention(model: &ModelConfig, family: &Family, put: &mut impl FnMut(&str, Meta)) {
    put("attention.head_count", count(model.n_heads));
    let Some(Latent { q_rank, kv_rank, nope, rope, value, .. }) = model.attention.latent else {
        let head_dim = model.rotated_head_dim(0);
        // llama.cpp takes layers of LFM2 and Granite 4 without key/value heads for the recurrent ones.
        let of_others = if family.has_delta_nets() { model.n_kv_heads } else { 0 };
        let of_layer = |layer: LayerConfig| layer.heads().map_or(of_others, |heads| heads.n_kv_heads);
        put("attention.head_count_kv", count_of_layers(model.layers().map(of_layer).collect()));
        put("attention.key_length", count(head_dim));
        put("attention.value_length", count(head_dim));
        if let Some(recurrent) = &model.recurrent {
            mixers(model, recurrent, put);
        }
        return;
    };
    // llama.cpp caches the vector that keys and values are computed from, as the only key/value head.
    put("attention.head_count_kv", count(1));
    put("attention.key_length", count(kv_rank + rope));
    put("attention.value_length", count(kv_rank));
    put("attention.key_length_mla", count(nope + rope));
    put("attention.value_length_mla", count(value));
    put("attention.q_lora_rank", count(q_rank.unwrap_or(0)));
    put("attention.kv_lora_rank", count(kv_rank));
}

/// Writes the sizes of recurrent mixers, and the layers that have one.
fn mixers(model: &ModelConfig, RecurrentLayers { layers, mixer }: &RecurrentLayers, put: &mut impl FnMut(&str, Meta)) {
    let net = match mixer {
        Recurrent::ShortConv(conv) => return put("shortconv.l_cache", count(conv.width)),
        Recurrent::GatedDeltaNet(net) => net,
        Recurrent::Mamba2(mamba) => {
            put("ssm.conv_kernel", count(mamba.width));
            put("ssm.state_size", count(mamba.state));
            put("ssm.group_count", count(mamba.groups));
            put("ssm.time_step_rank", count(mamba.heads));
            put("ssm.inner_size", count(mamba.values()));
            return put("rope.scaling.finetuned", Meta::bool(model.heads().any(|heads| heads.rotary.is_some())));
        }
    };
    put("ssm.conv_kernel", count(net.width));
    put("ssm.state_size", count(net.key_dim));
    put("ssm.group_count", count(net.key_heads));
    put("ssm.time_step_rank", count(net.value_heads));
    put("ssm.inner_size", count(net.values()));
    let flags = (0..model.n_layers).map(|layer| u8::from(layers.contains(&layer))).collect();
    put("attention.recurrent_layers", Meta::Numbers(Scalar::Bool, flags));
    // The pairs of a head that turn by each of three axes, which in text have the same positions.
    let pairs = model.rope.rotary_dim(model.head_dim) / 2;
    let sections = [pairs.div_ceil(3), (pairs + 1) / 3, pairs / 3, 0];
    put(
        "rope.dimension_sections",
        Meta::Numbers(Scalar::I32, sections.iter().flat_map(|n| (*n as i32).to_le_bytes()).collect()),
    );
}

/// Writes the factors of scores, embeddings, outputs of blocks, and logits.
fn factors(model: &ModelConfig, family: &Family, put: &mut impl FnMut(&str, Meta)) {
    if family.factor_keys {
        put("attention.scale", Meta::f32(model.attention.scale));
        put("embedding_scale", Meta::f32(model.embedding_scale));
        put("residual_scale", Meta::f32(model.residual_scale));
    }
    match family.logit_scale {
        LogitScale::None => {}
        LogitScale::Factor => put("logit_scale", Meta::f32(model.logit_scale)),
        LogitScale::Divisor => put("logit_scale", Meta::f32((1.0 / f64::from(model.logit_scale)) as f32)),
    }
    if let Some(PositionScale { beta, original_max_position }) = model.attention.position_scale {
        put("attention.temperature_scale", Meta::f32(beta as f32));
        if model.attention.latent.is_some() {
            put("attention.temperature_length", count(original_max_position));
        }
    }
}

/// Writes the keys of Gemma 4, whose layers with a window have heads of another width, and perhaps a further input.
fn layer_sizes(model: &ModelConfig, put: &mut impl FnMut(&str, Meta)) {
    put("attention.key_length_swa", count(model.head_dim));
    put("attention.value_length_swa", count(model.head_dim));
    put("rope.dimension_count_swa", count(model.head_dim));
    put("attention.shared_kv_layers", count(model.layers().filter(|layer| layer.kv_from().is_some()).count()));
    put("embedding_length_per_layer_input", count(model.per_layer_input.map_or(0, |input| input.width)));
}

/// Adds tensors that hold constants: the divisors of frequencies of pairs that do not turn, and the weights of norms
/// that have none.
fn extra_tensors(model: &ModelConfig, out: &mut GgufDescription) {
    if let Some(turning) = model.rope.turning_pairs {
        let pairs = model.rotated_head_dim(0) / 2;
        let factors = (0..pairs).map(|pair| if pair < turning { 1.0 } else { STILL }).collect();
        out.factors.push((ROPE_FREQS.to_string(), factors));
    }
    if model.attention.qk_norm == QkNorm::Unit {
        let of_queries = query_factor(model);
        for layer in 0..model.n_layers {
            for (leaf, weight) in [(UNIT_NORMS[0], of_queries), (UNIT_NORMS[1], 1.0)] {
                let weights = vec![weight as f32; model.head_dim];
                out.factors.push((format!("blk.{layer}.{leaf}"), weights));
            }
        }
    }
}

/// Returns the smallest window of the model if llama.cpp has no windows for the family and the window is
/// shorter than the context.
fn lost_window(model: &ModelConfig, family: &Family) -> Option<usize> {
    let smallest = model.attention.windows.iter().flatten().min().copied();
    smallest.filter(|width| family.window.is_none() && *width < model.max_context)
}

/// Returns the context length up to which llama.cpp computes the same as this program.
fn context(model: &ModelConfig, family: &Family) -> usize {
    lost_window(model, family).unwrap_or(model.max_context)
}

fn windows(model: &ModelConfig, family: &Family, out: &mut GgufDescription) {
    let key = |leaf: &str| format!("{}.attention.{leaf}", family.name);
    let Some(period) = family.window else {
        if let Some(width) = lost_window(model, family) {
            out.notes.push(format!(
                "llama.cpp has no sliding window for {}; context_length is written as {width} instead of {}, because \
                 only up to this length the results are the same",
                family.name, model.max_context
            ));
        }
        return;
    };
    let has_windows = model.attention.windows.iter().any(Option::is_some);
    if family.unscaled_windows && !has_windows {
        return;
    }
    let windowed: Vec<bool> = (0..model.n_layers).map(|layer| model.layer(layer).window().is_some()).collect();
    let width = model.attention.windows.iter().flatten().next().copied();
    // Without windows, every layer attends to all positions, which a window as wide as the context expresses.
    out.entries.push((key("sliding_window"), Meta::u32(width.unwrap_or(model.max_context) as u32)));
    let usual = windowed.iter().enumerate().all(|(layer, w)| *w == (layer % period < period - 1));
    // The newer families read the list even if it is the usual one; Gemma 4 has no usual one.
    if !family.always.is_empty() || !usual && width.is_some() {
        let flags = windowed.iter().map(|w| u8::from(*w)).collect();
        out.entries.push((key("sliding_window_pattern"), Meta::Numbers(Scalar::Bool, flags)));
    }
}

/// Refuses queries that grow with their positions in other steps than in llama.cpp: the context length before YaRN.
fn check_steps(model: &ModelConfig, family: &Family) -> Result<()> {
    let Some(scale) = model.attention.position_scale.filter(|_| model.attention.latent.is_none()) else {
        return Ok(());
    };
    let original = match &model.rope.scaling {
        RopeScaling::Yarn { original_max_position, .. } => *original_max_position,
        _ => context(model, family),
    };
    if original == scale.original_max_position {
        return Ok(());
    }
    let why = format!("steps of {} positions, expected {original}", scale.original_max_position);
    Err(cannot(family, "attention.position_scale", &why))
}

fn rope(model: &ModelConfig, family: &Family, out: &mut GgufDescription) -> Result<()> {
    let no = |what: &str| cannot(family, "rope", what);
    let mut put = |leaf: &str, value: Meta| out.entries.push((format!("{}.rope.{leaf}", family.name), value));
    let has_windows = model.attention.windows.iter().any(Option::is_some);
    if family.unscaled_windows && has_windows {
        let local = model.local_rope.as_ref().unwrap_or(&model.rope);
        if local.scaling != RopeScaling::None || local.theta != model.rope.theta {
            return Err(no("a scaled or another RoPE in layers with a window"));
        }
    } else if let Some(Rope { theta, scaling, .. }) = &model.local_rope {
        if *scaling != RopeScaling::None || !family.local_rope {
            return Err(no("another RoPE in layers with a window"));
        }
        put("freq_base_swa", Meta::f32(*theta as f32));
    }
    let text = |word: &str| Meta::String(word.into());
    match &model.rope.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            put("scaling.type", text("linear"));
            put("scaling.factor", Meta::f32(*factor as f32));
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
            if !family.llama3_rope {
                return Err(no("Llama 3's RoPE scaling"));
            }
            let (low, high) = (*low_freq_factor, *high_freq_factor);
            let llama3 = Llama3 { factor: *factor, low, high, original: *original_max_position };
            out.factors.push((ROPE_FREQS.to_string(), llama3.factors(model.rope.theta, model.head_dim)));
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, truncate, attention_factor } => {
            put("scaling.type", text("yarn"));
            put("scaling.factor", Meta::f32(*factor as f32));
            put("scaling.original_context_length", Meta::u32(*original_max_position as u32));
            put("scaling.yarn_beta_fast", Meta::f32(*beta_fast as f32));
            put("scaling.yarn_beta_slow", Meta::f32(*beta_slow as f32));
            magnitude(model, family, [*factor, *attention_factor], &mut put)?;
            out.notes.extend((!truncate).then(|| ROUNDED_RAMP.to_string()));
        }
        RopeScaling::LongRope { short, long, original_max_position, attention_factor } => {
            if !family.longrope {
                return Err(no("LongRoPE"));
            }
            put("scaling.type", text("longrope"));
            put("scaling.original_context_length", Meta::u32(*original_max_position as u32));
            put("scaling.attn_factor", Meta::f32(*attention_factor as f32));
            let floats = |list: &[f64]| -> Vec<f32> { list.iter().map(|x| *x as f32).collect() };
            out.factors.extend(FACTORS.map(str::to_string).into_iter().zip([floats(long), floats(short)]));
            out.notes.push(format!(
                "llama.cpp chooses LongRoPE's factors by the context it is started with: keep -c at or below \
                 {original_max_position} for short texts"
            ));
        }
    }
    Ok(())
}

/// Returns the factor of queries in a model whose attention scores are not only divided by the square root of the head
/// width.
fn query_factor(model: &ModelConfig) -> f64 {
    let root = (model.head_dim as f64).sqrt();
    let plain = f64::from((1.0 / root) as f32);
    let fits = |factor: f64| (factor * plain) as f32 == model.attention.scale;
    short_number(f64::from(model.attention.scale) * root, fits)
}

/// Returns the nearest number with four decimals if it fits, because the numbers of configurations are short, such as
/// 0.707; otherwise the number itself.
fn short_number(exact: f64, fits: impl Fn(f64) -> bool) -> f64 {
    let short = (exact * 1e4).round() / 1e4;
    if fits(short) { short } else { exact }
}

/// Writes the keys for the factor of cos and sin, and for that of the scores of latent attention.
fn magnitude(
    model: &ModelConfig,
    family: &Family,
    [factor, attention_factor]: [f64; 2],
    put: &mut impl FnMut(&str, Meta),
) -> Result<()> {
    const MULTIPLIER: &str = "scaling.yarn_log_multiplier";
    if model.attention.latent.is_some() {
        let Some(multiplier) = latent_multiplier(model, factor, attention_factor) else {
            return Err(cannot(family, "rope", "factors of YaRN's scores and angles"));
        };
        put(MULTIPLIER, Meta::f32((0.1 * multiplier) as f32));
        return Ok(());
    }
    let standard = 0.1 * factor.ln() + 1.0;
    // llama.cpp already applies YaRN's standard magnitude, so only the ratio to it is written.
    let extra = attention_factor / standard;
    if (extra - 1.0).abs() <= 1e-6 {
        return Ok(());
    }
    // In this family llama.cpp divides the standard magnitude by 1 + multiplier * 0.1 ln(factor).
    let multiplier = (1.0 / extra - 1.0) / (0.1 * factor.ln());
    match family.reads_log_multiplier() && multiplier > 0.0 {
        true => put(MULTIPLIER, Meta::f32(multiplier as f32)),
        false => put("scaling.attn_factor", Meta::f32(extra as f32)),
    }
    Ok(())
}

/// Returns the number m with which llama.cpp computes the same scores in latent attention: it does not scale cos and
/// sin, and multiplies the scores by the square of 1 + m * 0.1 ln(factor). `None` if there is none.
fn latent_multiplier(model: &ModelConfig, factor: f64, attention_factor: f64) -> Option<f64> {
    let scale = |multiplier: f64| {
        let plain = (1.0 / (model.head_dim as f64).sqrt()) as f32;
        let magnitude = 0.1 * multiplier * factor.ln() + 1.0;
        (f64::from(plain) * magnitude * magnitude) as f32
    };
    let ratio = f64::from(model.attention.scale) * (model.head_dim as f64).sqrt();
    let exact = (ratio.sqrt() - 1.0) / (0.1 * factor.ln());
    let found = short_number(exact, |multiplier| scale(multiplier) == model.attention.scale);
    ((attention_factor - 1.0).abs() < 1e-9 && found.is_finite() && found > 0.0).then_some(found)
}

const ONE_EPSILON: &str =
    "llama.cpp has one epsilon for all norms; this model has another one for the norms inside of latent attention";
const ROUNDED_RAMP: &str =
    "llama.cpp rounds the bounds of YaRN's ramp to whole frequencies, unlike this model: rotary angles differ a little";
