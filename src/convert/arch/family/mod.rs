//! Code shared by the families, most of which are Llama's plain decoder with a few differences.

pub mod routed;

use super::expected::ExpectedTensor;
use super::fields::Fields;
use super::granite;
use super::lfm;
use super::nemotron;
use super::qwen_next;
use super::rope::{self, AXES, GROWTH, LOCAL_BASE, PARTIAL};
use super::row::{Arch, TIED};
use super::view::{View, whole};
use crate::catalogue::layer_part;
use crate::error::{Error, Result};
use crate::model_config::{Activation, Attention, Mlp, ModelConfig, NormKind, QkNorm, RouterSoftmax, Selection};
use serde_json::Value;

/// The plain decoder, relative to which other families are defined: RMSNorm, rotary embedding, grouped-query attention
/// over all positions, a gated MLP with SiLU, no biases, and tensors under their canonical names.
pub const PLAIN: Arch = Arch {
    class: "",
    model_type: "",
    also: &[],
    n_heads: None,
    n_kv_heads: None,
    head_dim: None,
    vocab: None,
    max_context: 2048,
    norm_eps: 1e-6,
    theta: 10_000.0,
    tied: false,
    attention_bias: false,
    honours: &[],
    claims: |_| false,
    mlp: |arch, config| dense(arch, config, silu(config)?),
    windows: |config, n_layers| same_windows(config, n_layers, None),
    adjust: |_, _| Ok(()),
    views: same_names,
    prediction: None,
};

/// Fields that change the arithmetic unless they have their neutral value. A family that does not support such a field
/// refuses any other value, because it would otherwise silently compute a different model.
pub const FOREIGN: &[(&str, Neutral)] = &[
    ("attention_bias", Neutral::Off),
    ("mlp_bias", Neutral::Off),
    ("attn_logit_softcapping", Neutral::Off),
    ("final_logit_softcapping", Neutral::Off),
    ("query_pre_attn_scalar", Neutral::Absent),
    ("attention_multiplier", Neutral::Absent),
    ("embedding_multiplier", Neutral::One),
    ("residual_multiplier", Neutral::One),
    ("logits_scaling", Neutral::One),
    ("logit_scale", Neutral::One),
    ("scale_emb", Neutral::One),
    ("scale_depth", Neutral::Absent),
    ("rotary_pct", Neutral::One),
    (LOCAL_BASE, Neutral::Absent),
    ("alibi", Neutral::Off),
    ("clip_qkv", Neutral::Off),
    ("use_qk_norm", Neutral::Off),
    ("qk_layernorm", Neutral::Off),
    ("use_bidirectional_attention", Neutral::Off),
    ("use_sliding_window", Neutral::Off),
    ("sliding_window", Neutral::Off),
    ("attention_chunk_size", Neutral::Off),
    ("no_rope_layers", Neutral::Off),
    ("num_experts", Neutral::Off),
    ("num_local_experts", Neutral::Off),
    ("n_routed_experts", Neutral::Off),
    ("n_shared_experts", Neutral::Off),
    ("shared_expert_intermediate_size", Neutral::Off),
    ("shared_intermediate_size", Neutral::Off),
    ("mlp_only_layers", Neutral::Off),
    ("decoder_sparse_step", Neutral::One),
    ("first_k_dense_replace", Neutral::Off),
    ("compression_config", Neutral::Off),
    ("n_group", Neutral::One),
    ("topk_group", Neutral::One),
    ("routed_scaling_factor", Neutral::One),
    ("output_multiplier", Neutral::One),
    ("qk_scale_factor", Neutral::One),
    ("post_norm_eps", Neutral::Absent),
    ("layer_rope_theta", Neutral::Absent),
    ("layer_norm_eps", Neutral::Absent),
    ("no_rope_layer_interval", Neutral::Off),
    ("rotary_dim", Neutral::Absent),
    ("kv_lora_rank", Neutral::Off),
    ("q_lora_rank", Neutral::Off),
    ("global_head_dim", Neutral::Absent),
    ("num_global_key_value_heads", Neutral::Absent),
    ("attention_k_eq_v", Neutral::Off),
    ("num_kv_shared_layers", Neutral::Off),
    ("hidden_size_per_layer_input", Neutral::Off),
    ("enable_moe_block", Neutral::Off),
    ("use_double_wide_mlp", Neutral::Off),
    ("per_layer_config", Neutral::Absent),
    (lfm::WIDTH, Neutral::Absent),
    (lfm::BIAS, Neutral::Off),
    ("num_dense_layers", Neutral::Off),
    (lfm::SANDWICH, Neutral::Off),
    (lfm::GATE, Neutral::Off),
    (qwen_next::VALUE_HEADS, Neutral::Absent),
    (granite::MAMBA_HEADS, Neutral::Absent),
    (nemotron::PATTERN, Neutral::Absent),
    (nemotron::LATENT, Neutral::Off),
    (qwen_next::INTERVAL, Neutral::One),
    (qwen_next::OUTPUT_GATE, Neutral::Off),
];

/// Neutral value of a field, with which the field changes nothing.
#[derive(Debug, Clone, Copy)]
pub enum Neutral {
    /// `null`, `false`, 0 or empty values are neutral.
    Off,
    /// The value 1 is neutral.
    One,
    /// No value is neutral; the field must be absent.
    Absent,
}

impl Neutral {
    fn is(self, value: &Value) -> bool {
        match self {
            Neutral::Off => match value {
                Value::Bool(on) => !on,
                Value::Number(n) => n.as_f64() == Some(0.0),
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                Value::Null => true,
                Value::String(_) => false,
            },
            Neutral::One => value.as_f64() == Some(1.0),
            Neutral::Absent => false,
        }
    }

    fn expected(self) -> &'static str {
        match self {
            Neutral::Off => "expected none, false or 0",
            Neutral::One => "expected 1",
            Neutral::Absent => "other models of this family do not have the field",
        }
    }
}

/// Refuses fields that change the arithmetic and that the family does not support.
fn refuse_foreign(arch: &Arch, config: &Fields) -> Result<()> {
    for (key, neutral) in FOREIGN.iter().filter(|(key, _)| !arch.honours.contains(key)) {
        if config.get(key).is_some_and(|value| !neutral.is(value)) {
            return Err(config.unsupported(key, neutral.expected()));
        }
    }
    if let Some((fields, _)) = rope::partial(config)?.filter(|_| !arch.honours.contains(&PARTIAL)) {
        return Err(fields.unsupported(PARTIAL, "this family rotates whole heads, so expected 1"));
    }
    if !arch.honours.contains(&LOCAL_BASE) {
        rope::refuse_local(config)?;
    }
    if let Some(fields) = rope::axes(config)?.filter(|_| !arch.honours.contains(&AXES)) {
        return Err(fields.unsupported(AXES, "expected no such field"));
    }
    if let Some(fields) = rope::growth(config)?.filter(|_| !arch.honours.contains(&GROWTH)) {
        return Err(fields.unsupported(GROWTH, Neutral::Off.expected()));
    }
    Ok(())
}

/// Reads a field that is required unless the family has a default.
fn count_or(config: &Fields, key: &str, default: Option<usize>) -> Result<usize> {
    match (config.count_opt(key)?, default) {
        (Some(count), _) | (None, Some(count)) => Ok(count),
        (None, None) => config.count(key),
    }
}

/// Reads the plain decoder with the defaults, feed-forward part and windows of its family.
pub fn decoder(arch: &Arch, config: &Fields) -> Result<ModelConfig> {
    refuse_foreign(arch, config)?;
    let (hidden, n_layers) = (config.count("hidden_size")?, layers(config)?);
    let n_heads = count_or(config, "num_attention_heads", arch.n_heads)?;
    let head_dim = head_dim(config, arch.head_dim, hidden, n_heads)?;
    let max_context = config.count_opt("max_position_embeddings")?.unwrap_or(arch.max_context);
    let bias = bias(arch, config, "attention_bias", arch.attention_bias)?;
    Ok(ModelConfig {
        architecture: arch.class.to_string(),
        hidden,
        n_layers,
        n_heads,
        n_kv_heads: kv_heads(arch, config, n_heads)?,
        head_dim,
        vocab: count_or(config, "vocab_size", arch.vocab)?,
        max_context,
        norm_eps: config.number_opt("rms_norm_eps")?.unwrap_or(arch.norm_eps) as f32,
        norm_plus_one: false,
        post_norms: false,
        pre_norms: true,
        norm_kind: NormKind::Rms,
        parallel: false,
        post_norm_eps: None,
        plain_final_norm: false,
        embedding_norm: false,
        residual_scale: 1.0,
        layer_scalars: false,
        per_layer_input: None,
        logit_scale: 1.0,
        embedding_scale: 1.0,
        logit_softcap: None,
        rope: rope::rope(config, arch.theta, max_context)?,
        local_rope: None,
        attention: Attention {
            qkv_bias: bias,
            o_bias: bias,
            sinks: false,
            qk_norm: QkNorm::None,
            value_norm: false,
            gate: false,
            head_gate: false,
            latent: None,
            position_scale: None,
            softcap: None,
            windows: (arch.windows)(config, n_layers)?,
            scale: score_scale(head_dim as f64),
        },
        mlp: (arch.mlp)(arch, config)?,
        dense_layers: None,
        recurrent: None,
        mlp_layers: None,
        prediction_layers: 0,
        exceptions: Vec::new(),
        tied_embeddings: config.flag(TIED, arch.tied)?,
        bos: None,
        eos: Vec::new(),
    })
}

/// Reads the number of key/value heads. If the field is null, it is that of the query heads.
fn kv_heads(arch: &Arch, config: &Fields, n_heads: usize) -> Result<usize> {
    Ok(match config.count_opt("num_key_value_heads")? {
        None if config.is_null("num_key_value_heads") => n_heads,
        given => given.or(arch.n_kv_heads).unwrap_or(n_heads),
    })
}

/// Reads a flag for biases; it is false in families that do not support the field.
fn bias(arch: &Arch, config: &Fields, key: &str, default: bool) -> Result<bool> {
    if arch.honours.contains(&key) { config.flag(key, default) } else { Ok(false) }
}

/// Reads a gated MLP of width `intermediate_size`.
pub fn dense(arch: &Arch, config: &Fields, activation: Activation) -> Result<Mlp> {
    let bias = bias(arch, config, "mlp_bias", false)?;
    Ok(Mlp::Dense { intermediate: config.count("intermediate_size")?, activation, bias })
}

/// Reads a mixture of experts that are gated MLPs with SiLU, without biases. `top_k` is the family's default number of
/// active experts.
pub fn sparse(config: &Fields, top_k: usize, intermediate: usize, router_softmax: RouterSoftmax) -> Result<Mlp> {
    Ok(Mlp::Moe {
        experts: experts(config)?,
        top_k: config.count_opt("num_experts_per_tok")?.unwrap_or(top_k),
        intermediate,
        activation: silu(config)?,
        bias: false,
        router_bias: false,
        latent: None,
        router_softmax,
        selection: Selection::default(),
        shared: None,
    })
}

/// Reads the number of experts, which is in either of two fields.
pub fn experts(config: &Fields) -> Result<usize> {
    match (config.count_opt("num_experts")?, config.count_opt("num_local_experts")?) {
        (Some(one), Some(other)) if one != other => {
            Err(config.wrong("num_experts", &format!("{other}, as num_local_experts says")))
        }
        (one, other) => one.or(other).ok_or_else(|| config.wrong("num_experts", "a whole number")),
    }
}

/// Refuses an activation other than SiLU, which is also the default.
pub fn silu(config: &Fields) -> Result<Activation> {
    match config.word_opt("hidden_act")? {
        None | Some("silu" | "swish") => Ok(Activation::Silu),
        Some(_) => Err(config.unsupported("hidden_act", "expected silu")),
    }
}

/// Reads the number of layers. It is bounded so that lists per layer stay small for any file.
fn layers(config: &Fields) -> Result<usize> {
    let n = config.count("num_hidden_layers")?;
    if (1..=10_000).contains(&n) { Ok(n) } else { Err(config.wrong("num_hidden_layers", "1 to 10000")) }
}

fn head_dim(config: &Fields, default: Option<usize>, hidden: usize, n_heads: usize) -> Result<usize> {
    match config.count_opt("head_dim")?.or(default) {
        Some(width) => Ok(width),
        None if n_heads > 0 && hidden.is_multiple_of(n_heads) => Ok(hidden / n_heads),
        None => {
            let found = format!("found hidden_size {hidden}, expected a multiple of the {n_heads} heads");
            Err(Error::corrupt(found).tensor("num_attention_heads"))
        }
    }
}

/// Returns the scale of attention scores, one over the square root of `width`, which in most families is the width of
/// a head.
pub fn score_scale(width: f64) -> f32 {
    (1.0 / width.sqrt()) as f32
}

/// Returns the sliding window of each layer in tokens: `width`, or `None` for full attention. The field `layer_types`
/// of the configuration says which layers have a window; without it, layer `i` has one if `slides(i)` is true.
pub fn windows(
    config: &Fields,
    n_layers: usize,
    width: usize,
    slides: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>> {
    let sliding = match config.words_opt("layer_types")? {
        Some(types) => layer_types(&types, n_layers)?,
        None => (0..n_layers).map(slides).collect(),
    };
    Ok(sliding.into_iter().map(|slides| slides.then_some(width)).collect())
}

/// Returns the window of each layer in a family whose layers are all alike, or an empty list if they have no window;
/// refuses a `layer_types` that says otherwise.
pub fn same_windows(config: &Fields, n_layers: usize, width: Option<usize>) -> Result<Vec<Option<usize>>> {
    if let Some(types) = config.words_opt("layer_types")?
        && layer_types(&types, n_layers)?.into_iter().any(|slides| slides != width.is_some())
    {
        return Err(config.unsupported(
            "layer_types",
            "in this family either all layers have the window of sliding_window or none has",
        ));
    }
    Ok(if width.is_some() { vec![width; n_layers] } else { Vec::new() })
}

/// Returns, for each layer, true when its attention has a sliding window.
fn layer_types(types: &[&str], n_layers: usize) -> Result<Vec<bool>> {
    if types.len() != n_layers {
        return Err(Error::corrupt(format!(
            "found {} entries, expected one for each of {n_layers} layers",
            types.len()
        ))
        .tensor("layer_types"));
    }
    let slides = |word: &&str| match *word {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => Err(Error::unsupported(format!("found `{other:.60}`, expected sliding_attention or full_attention"))
            .tensor("layer_types")),
    };
    types.iter().map(slides).collect()
}

/// Returns views of tensors under their canonical names. Some checkpoints with tied embeddings save the shared matrix
/// under the name of the output matrix.
pub fn same_names(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let shared = model.tied_embeddings && tensor.name == "model.embed_tokens.weight";
    let names = [Some(tensor.name.as_str()), shared.then_some("lm_head.weight")];
    names.into_iter().flatten().map(|name| whole(name, tensor.shape[0])).collect()
}

/// Returns views for a router called `gate` and experts, all below `module`. The experts are separate tensors, whose
/// gate, up and down matrices have the names of the array, or, in newer checkpoints, stacks with the rows of gate
/// before those of up.
pub fn separate_experts(
    model: &ModelConfig,
    tensor: &ExpectedTensor,
    module: &str,
    [gate, up, down]: [&str; 3],
) -> Vec<View> {
    let Some((layer, part)) = layer_part(&tensor.name) else { return same_names(model, tensor) };
    let at = format!("model.layers.{layer}.{module}");
    let stack = |matrix: &str, rows: usize| {
        let expert = |number: usize| whole(format!("{at}.experts.{number}.{matrix}.weight"), rows);
        View::Stacked((0..tensor.shape[0]).map(expert).collect())
    };
    match part {
        "mlp.router.weight" => vec![whole(format!("{at}.gate.weight"), tensor.shape[0])],
        "mlp.experts.gate_up_proj" => {
            let rows = tensor.shape[1] / 2;
            let source = || format!("{at}.experts.gate_up_proj");
            let slices = |first| View::Slices { source: source(), first, of: 2 * rows };
            vec![
                View::Interleaved(vec![stack(gate, rows), stack(up, rows)]),
                View::Interleaved(vec![slices(0), slices(rows)]),
            ]
        }
        "mlp.experts.down_proj" => {
            vec![stack(down, tensor.shape[1]), whole(format!("{at}.experts.down_proj"), tensor.shape[0])]
        }
        _ => same_names(model, tensor),
    }
}

/// Returns the position of a weight or bias of q, k or v in a tensor in which the three are stacked: its first row, and
/// the number of rows of the whole stack. `None` for other tensors.
pub fn rows_of_qkv(model: &ModelConfig, part: &str) -> Option<(usize, usize)> {
    let (projection, _) = part.strip_prefix("self_attn.")?.split_once("_proj.")?;
    let (q, kv) = (model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim);
    let first = ["q", "k", "v"].iter().position(|name| *name == projection)?;
    Some(([0, q, q + kv][first], q + 2 * kv))
}
