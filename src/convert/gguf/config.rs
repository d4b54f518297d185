//! Converts the metadata of a GGUF file to a `config.json` in the form of Hugging Face.
//!
//! The code of the model family then reads this configuration like that of any checkpoint and refuses models that
//! cannot be run. Settings that GGUF does not record (biases, tied embeddings) follow from the tensors in the file.

use super::family::Family;
use super::rope_factors;
use super::tokenizer_in::ends_by_name;
use crate::convert::arch::ARCHS;
use crate::convert::source::gguf::reader::{Gguf, GgufTensor};
use crate::convert::source::gguf::types::GgmlType;
use crate::convert::source::gguf::value::{Value as Meta, required};
use crate::error::{Error, Result};
use crate::model_config::{Activation, LAYER_LIMIT};
use serde_json::{Map, Value, json};

/// Key under which an export lists all tokens that end a text; the standard keys of GGUF hold only one.
pub(super) const EOS_KEY: &str = "iec.eos_token_ids";
/// Names of the tensors with the RoPE factors of LongRoPE, for long and for short texts.
pub(super) const FACTORS: [&str; 2] = ["rope_factors_long.weight", "rope_factors_short.weight"];
/// Name of the tensor with the factors of Llama 3's RoPE scaling.
pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";
/// Largest number of factors of frequencies, one for each pair of numbers of a head.
const MAX_FACTORS: usize = 1 << 13;
/// Names, in a layer, of the weights of query and key norms that the model does not have: they hold constants.
pub(super) const UNIT_NORMS: [&str; 2] = ["attn_q_norm.weight", "attn_k_norm.weight"];
/// Value of `expert_gating_func`: scores of experts are the softmax of the router's logits.
pub(super) const SOFTMAX: u32 = 1;
/// Value of `expert_gating_func`: scores of experts are sigmoids of the router's logits.
pub(super) const SIGMOID: u32 = 2;
/// Key with the number of layers behind those of the model, which predict further tokens and are left out.
pub(super) const NEXTN: &str = "nextn_predict_layers";
/// Key with the magnitude of YaRN.
const YARN_FACTOR: &str = "rope.scaling.yarn_attn_factor";
/// Key with the growth of YaRN's magnitude, in the families that read it.
pub(super) const LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";

/// Returns the configuration of a model.
///
/// # Errors
/// The family is unknown, or a key is missing, has the wrong type, or has a value that this program does not support.
pub fn config_json(gguf: &Gguf) -> Result<Map<String, Value>> {
    let family = Family::of_file(gguf.metadata.text("general.architecture")?)?;
    let mut writer = Writer { gguf, family, config: Map::new() };
    let model = writer.dimensions()?;
    writer.attention()?;
    writer.windows(&model)?;
    writer.activation(&model);
    writer.mlp(&model)?;
    writer.rope(&model)?;
    writer.family_fields(&model)?;
    writer.tokens()?;
    Ok(writer.config)
}

/// Numbers on which other fields depend.
pub(super) struct Dimensions {
    pub(super) layers: usize,
    hidden: usize,
    heads: usize,
    pub(super) head_dim: usize,
    context: usize,
    pub(super) experts: usize,
}

/// Writer of a configuration, and the file that it reads.
pub(super) struct Writer<'a> {
    pub(super) gguf: &'a Gguf,
    pub(super) family: &'a Family,
    config: Map<String, Value>,
}

impl<'a> Writer<'a> {
    pub(super) fn put(&mut self, field: &str, value: impl Into<Value>) {
        self.config.insert(field.to_string(), value.into());
    }

    /// Returns the value of a field that was written before, or null.
    pub(super) fn field(&self, name: &str) -> &Value {
        self.config.get(name).unwrap_or(&Value::Null)
    }

    pub(super) fn key(&self, leaf: &str) -> String {
        format!("{}.{leaf}", self.family.name)
    }

    pub(super) fn count(&self, leaf: &str) -> Result<usize> {
        required(&self.key(leaf), self.count_opt(leaf)?)
    }

    /// Returns a count, if the key is there. If the key holds a list with one count per layer, all must be equal.
    pub(super) fn count_opt(&self, leaf: &str) -> Result<Option<usize>> {
        let key = self.key(leaf);
        if !matches!(self.gguf.metadata.get(&key), Some(Meta::Numbers(..))) {
            return self.gguf.metadata.count_opt(&key);
        }
        let list = self.gguf.metadata.integers_opt(&key)?.unwrap_or_default();
        match list.split_first() {
            Some((first, rest)) if rest.iter().all(|n| n == first) => usize::try_from(*first)
                .map(Some)
                .map_err(|_| Error::corrupt(format!("found {first}, expected a count")).tensor(key)),
            _ => Err(Error::unsupported("found different values in the layers, expected the same in all").tensor(key)),
        }
    }

    pub(super) fn number_opt(&self, leaf: &str) -> Result<Option<f64>> {
        self.gguf.metadata.number_opt(&self.key(leaf))
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&'a GgufTensor> {
        self.gguf.tensors.iter().find(|tensor| tensor.name == name)
    }

    fn needed(&self, name: &str) -> Result<&'a GgufTensor> {
        self.tensor(name).ok_or_else(|| {
            Error::corrupt("missing from the file")
                .tensor(name)
                .help("the file is incomplete or holds no whole model (an adapter, for example); get the whole model")
        })
    }

    pub(super) fn has_bias(&self, name: &str) -> bool {
        self.tensor(&format!("blk.0.{name}.bias")).is_some()
    }

    /// Sets the class name and its `model_type`.
    pub(super) fn class(&mut self, class: &str) {
        self.put("architectures", vec![class]);
        self.put("model_type", ARCHS.iter().find(|arch| arch.class == class).map_or("", |arch| arch.model_type));
    }

    fn dimensions(&mut self) -> Result<Dimensions> {
        let experts = self.count_opt("expert_count")?.unwrap_or(0);
        let Some(class) = (if experts == 0 { self.family.dense } else { self.family.moe }) else {
            let found = format!("found {experts} experts, which are not supported in this family");
            return Err(Error::unsupported(found).tensor(self.key("expert_count")));
        };
        let heads = self.count("attention.head_count")?;
        let hidden = self.count("embedding_length")?;
        // As in llama.cpp, the width of a head does not depend on how much of it is rotated.
        let head_dim = self.head_dim(hidden.checked_div(heads).unwrap_or(0))?;
        let rotated = self.count_opt("rope.dimension_count")?.unwrap_or(head_dim);
        let partial = self.family.partial_rotary && rotated < head_dim;
        let further = self.count_opt(NEXTN)?.unwrap_or(0);
        let layers = self.count("block_count")?.saturating_sub(further);
        // The number is bounded before lists are made; the code of the family checks it again.
        if layers > LAYER_LIMIT {
            return Err(Error::corrupt(format!("found {layers} layers, expected at most {LAYER_LIMIT}"))
                .tensor(self.key("block_count")));
        }
        let context = self.count("context_length")?;
        self.class(class);
        self.put("vocab_size", self.needed("token_embd.weight")?.shape[0]);
        self.put("hidden_size", hidden);
        self.put("num_hidden_layers", layers);
        self.put("num_attention_heads", heads);
        if self.family.has_convolutions() {
            self.convolutions(layers)?;
        } else if self.family.has_single_blocks() {
            self.single_blocks(layers, experts > 0)?;
        } else if self.family.has_mamba() {
            self.mamba(layers)?;
        } else if !self.family.has_layer_sizes() {
            let of_keys = if self.family.is_latent() { None } else { self.count_opt("attention.head_count_kv")? };
            self.put("num_key_value_heads", of_keys.unwrap_or(heads));
        }
        self.put("head_dim", head_dim);
        self.put("max_position_embeddings", context);
        let is_layer_norm = self.family.always_has("norm_kind");
        let (field, leaf) = match is_layer_norm {
            true => ("layer_norm_eps", "attention.layer_norm_epsilon"),
            false => ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
        };
        self.put(field, required(&self.key(leaf), self.number_opt(leaf)?)?);
        // In families with routed experts or delta nets an absent field means a share.
        if partial || (self.family.routed_experts || self.family.has_delta_nets()) && self.family.partial_rotary {
            self.put("partial_rotary_factor", rotated as f64 / head_dim as f64);
        }
        self.put("tie_word_embeddings", self.tensor("output.weight").is_none());
        Ok(Dimensions { layers, hidden, heads, head_dim, context, experts })
    }

    /// Returns the width of a query head, `usual` if the file does not say it.
    fn head_dim(&self, usual: usize) -> Result<usize> {
        if self.family.is_latent() {
            return match self.count_opt("attention.key_length_mla")?.filter(|width| *width > 0) {
                Some(width) => Ok(width),
                None => self.count("attention.key_length"),
            };
        }
        let mut width = 0;
        let suffixes: &[&str] = if self.family.has_layer_sizes() { &["", "_swa"] } else { &[""] };
        for suffix in suffixes {
            let leaf = |leaf: &str| format!("{leaf}{suffix}");
            width = self.count_opt(&leaf("attention.key_length"))?.unwrap_or(usual);
            for name in ["attention.value_length", "rope.dimension_count"] {
                let found = self.count_opt(&leaf(name))?.unwrap_or(width);
                let partial = self.family.partial_rotary && found < width && name.starts_with("rope");
                if found != width && !partial {
                    let found = format!("found {found}, expected the head size {width}");
                    return Err(Error::unsupported(found).tensor(self.key(&leaf(name))));
                }
            }
        }
        Ok(width)
    }

    fn attention(&mut self) -> Result<()> {
        let biases = ["attn_q", "attn_k", "attn_v", "attn_output"].map(|name| self.has_bias(name));
        let some = biases.contains(&true);
        if some && biases != self.family.biases {
            let found =
                format!("found biases {biases:?} for q, k, v and output, expected {:?} or none", self.family.biases);
            return Err(Error::unsupported(found).tensor("blk.0.attn_q.bias"));
        }
        // Qwen2 always has biases and no such field.
        if !some || self.family.biases == [true; 4] || self.family.routed_experts {
            self.put("attention_bias", some);
        }
        for cap in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if let Some(value) = self.number_opt(cap)? {
                self.put(cap, value);
            }
        }
        match self.number_opt("attention.scale")?.filter(|_| !self.family.factor_keys) {
            Some(scale) => Err(Error::unsupported(format!(
                "found {scale}, expected no such key: the scale must follow from the head size"
            ))
            .tensor(self.key("attention.scale"))),
            None => Ok(()),
        }
    }

    fn windows(&mut self, model: &Dimensions) -> Result<()> {
        let width = self.count_opt("attention.sliding_window")?.filter(|width| *width > 0);
        if let Some(class) = self.family.windowed.filter(|_| model.experts == 0 && width.is_some()) {
            self.class(class);
        }
        let Some(default) = self.family.window else {
            // llama.cpp ignores the key in these families, but the model was trained with the window.
            if let Some(width) = width {
                self.put("sliding_window", width);
            }
            return Ok(());
        };
        let key = self.key("attention.sliding_window_pattern");
        let pattern: Vec<bool> = match self.gguf.metadata.get(&key) {
            Some(list @ Meta::Numbers(..)) => {
                let flags =
                    list.numbers().into_iter().flatten().map(|n| n.as_bool().or(n.as_integer().map(|n| n != 0)));
                flags
                    .collect::<Option<_>>()
                    .ok_or_else(|| Error::corrupt("found another type, expected a list of booleans").tensor(&key))?
            }
            _ => {
                let period = self.gguf.metadata.count_opt(&key)?.unwrap_or(default).max(1);
                (0..model.layers).map(|layer| layer % period < period - 1).collect()
            }
        };
        let slides = |windowed: bool| if windowed && width.is_some() { "sliding_attention" } else { "full_attention" };
        self.put("layer_types", pattern.into_iter().map(slides).collect::<Vec<_>>());
        self.put("sliding_window", json!(width));
        Ok(())
    }

    fn activation(&mut self, model: &Dimensions) {
        if self.family.activation == Activation::Relu2 {
            return self.put("mlp_hidden_act", "relu2");
        }
        if self.family.activation != Activation::GeluTanh {
            return self.put("hidden_act", "silu");
        }
        self.put("hidden_activation", "gelu_pytorch_tanh");
        if self.family.score_scale.is_none() {
            let width = self.family.score_width(model.layers, model.hidden, model.heads, model.head_dim);
            self.put("query_pre_attn_scalar", width);
        }
    }

    fn mlp(&mut self, model: &Dimensions) -> Result<()> {
        if self.family.has_layer_sizes() || self.family.routed_experts {
            return self.deep_mlp(model);
        }
        if self.family.has_single_blocks() {
            return self.mlp_of_single_blocks(model);
        }
        if model.experts == 0 {
            if self.family.has_mamba() {
                self.put("num_local_experts", 0);
                self.put("shared_intermediate_size", self.count("feed_forward_length")?);
                return Ok(());
            }
            self.put("intermediate_size", self.count("feed_forward_length")?);
            self.put("mlp_bias", ["ffn_gate", "ffn_up", "ffn_down"].iter().any(|name| self.has_bias(name)));
            return Ok(());
        }
        let width = match self.count_opt("expert_feed_forward_length")? {
            Some(width) => width,
            None => self.count("feed_forward_length")?,
        };
        self.put("intermediate_size", width);
        self.put("num_experts_per_tok", self.count("expert_used_count")?);
        if self.family.has_sigmoid_experts() {
            let function = self.count("expert_gating_func")?;
            if function != SIGMOID as usize {
                let found = format!("found {function}, expected {SIGMOID}, the sigmoid");
                return Err(Error::unsupported(found).tensor(self.key("expert_gating_func")));
            }
        }
        if self.family.has_convolutions() {
            self.put("intermediate_size", self.count("feed_forward_length")?);
            self.put("num_experts", model.experts);
            self.put("moe_intermediate_size", width);
            self.put("num_dense_layers", self.count_opt("leading_dense_block_count")?.unwrap_or(0));
        } else if self.family.has_mamba() {
            self.put("num_local_experts", model.experts);
            self.put("shared_intermediate_size", self.count("expert_shared_feed_forward_length")?);
        } else if self.family.has_delta_nets() {
            self.put("num_experts", model.experts);
            self.put("moe_intermediate_size", width);
            let shared = self.count_opt("expert_shared_feed_forward_length")?;
            self.put("shared_expert_intermediate_size", shared.unwrap_or(0));
        } else if self.family.qwen_experts {
            self.put("num_experts", model.experts);
            self.put("moe_intermediate_size", width);
            self.put("norm_topk_prob", true);
            self.put("decoder_sparse_step", 1);
            self.put("mlp_only_layers", json!([]));
        } else {
            self.put("num_local_experts", model.experts);
        }
        Ok(())
    }

    fn rope(&mut self, model: &Dimensions) -> Result<()> {
        let theta = self.number_opt("rope.freq_base")?.unwrap_or(10_000.0);
        self.put("rope_theta", theta);
        let scaling = self.rope_scaling(model, theta)?;
        if self.family.local_rope {
            // Layers with a window have their own RoPE base and no scaling.
            self.put("rope_local_base_freq", self.number_opt("rope.freq_base_swa")?.unwrap_or(10_000.0));
        }
        self.put("rope_scaling", scaling);
        Ok(())
    }

    fn rope_scaling(&mut self, model: &Dimensions, theta: f64) -> Result<Value> {
        let [long, short] = FACTORS;
        let original = self.count_opt("rope.scaling.original_context_length")?.unwrap_or(model.context);
        if self.tensor(long).is_some() || self.tensor(short).is_some() {
            let (long, short) = (self.factors(long)?, self.factors(short)?);
            self.put("original_max_position_embeddings", original);
            let attention = self.number_opt("rope.scaling.attn_factor")?;
            return Ok(json!({"type": "longrope", "long_factor": long, "short_factor": short,
                             "attention_factor": attention.unwrap_or(1.0),
                             "original_max_position_embeddings": original}));
        }
        if self.tensor(ROPE_FREQS).is_some() && !self.family.has_layer_sizes() {
            return Ok(rope_factors::llama3_json(&self.factors(ROPE_FREQS)?, theta));
        }
        let factor = self.number_opt("rope.scaling.factor")?.or(self.number_opt("rope.scale_linear")?);
        let kind = self.key("rope.scaling.type");
        match (self.gguf.metadata.text_opt(&kind)?, factor) {
            (Some("none"), _) | (_, None) | (Some("linear") | None, Some(1.0 | 0.0)) => Ok(Value::Null),
            (Some("linear") | None, Some(factor)) => Ok(json!({"rope_type": "linear", "factor": factor})),
            (Some("yarn"), Some(factor)) => self.yarn(factor, original),
            (Some(other), _) => {
                Err(Error::unsupported(format!("found `{other}`, expected none, linear, yarn or longrope"))
                    .tensor(kind))
            }
        }
    }

    fn yarn(&self, factor: f64, original: usize) -> Result<Value> {
        let mut yarn = json!({
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
            "beta_fast": self.number_opt("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            "beta_slow": self.number_opt("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            "truncate": self.family.yarn_truncates,
        });
        let multiplier = self.number_opt(LOG_MULTIPLIER)?.filter(|_| self.family.reads_log_multiplier());
        let extra = self.number_opt("rope.scaling.attn_factor")?;
        // The converter of llama.cpp writes the factor that the checkpoint states; 0 and 1 stand for none. llama.cpp
        // always computes the usual one.
        let given = self.number_opt(YARN_FACTOR)?.filter(|x| *x != 0.0 && *x != 1.0);
        let magnitude = |mscale: f64| 0.1 * mscale * factor.ln() + 1.0;
        if self.family.is_latent() {
            self.latent_yarn(&mut yarn)?;
        } else if extra.is_some() || multiplier.is_some() {
            let factor = extra.unwrap_or(1.0) * magnitude(1.0) / magnitude(multiplier.unwrap_or(0.0));
            yarn["attention_factor"] = json!(factor);
        } else if let Some(given) = given
            && (given / magnitude(1.0) - 1.0).abs() > 1e-6
        {
            yarn["attention_factor"] = json!(given);
        }
        let read = multiplier.is_some() || self.family.is_latent();
        let reads_given = !read && extra.is_none();
        for (leaf, is_read) in
            [("rope.scaling.yarn_ext_factor", false), (YARN_FACTOR, reads_given), (LOG_MULTIPLIER, read)]
        {
            if !is_read && self.number_opt(leaf)?.is_some_and(|x| x != 0.0 && x != 1.0) {
                return Err(
                    Error::unsupported("found a value that is not supported, expected 0 or 1").tensor(self.key(leaf))
                );
            }
        }
        Ok(yarn)
    }

    pub(super) fn factors(&self, name: &str) -> Result<Vec<f32>> {
        let tensor = self.needed(name)?;
        // Types of one or two bits would make a small file a large list of numbers.
        if tensor.kind != GgmlType::F32 || tensor.elements() > MAX_FACTORS {
            let found = format!("found {} factors of type {}", tensor.elements(), tensor.kind);
            return Err(Error::corrupt(format!("{found}, expected at most {MAX_FACTORS} of F32"))
                .tensor(name)
                .help("the file is damaged; get it again"));
        }
        self.gguf.floats(tensor)
    }

    fn tokens(&mut self) -> Result<()> {
        let meta = &self.gguf.metadata;
        let id = |name: &str| meta.count_opt(&format!("tokenizer.ggml.{name}_token_id"));
        for (name, field) in [("bos", "bos_token_id"), ("padding", "pad_token_id")] {
            if let Some(id) = id(name)? {
                self.put(field, id);
            }
        }
        let mut ends = meta.integers_opt(EOS_KEY)?.unwrap_or_default();
        if meta.get(EOS_KEY).is_none() {
            let keys = [id("eos")?, id("eot")?, id("eom")?].into_iter().flatten().map(|id| id as i64);
            for end in keys.chain(ends_by_name(meta)?) {
                if !ends.contains(&end) {
                    ends.push(end);
                }
            }
        }
        self.put("eos_token_id", ends);
        Ok(())
    }
}
