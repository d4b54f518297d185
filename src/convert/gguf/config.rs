//! Metadata of a GGUF file -> `config.json` as Hugging Face spells it.
//!
//! From there on the model goes the way of every checkpoint: the family's own code reads the configuration and refuses what
//! it cannot run. Flags that GGUF does not record (biases, tied embeddings) follow from the tensors that are there.

use super::family::{Family, Window};
use super::reader::Gguf;
use super::rope_factors;
use super::value::{Value as Meta, required};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};

/// The key under which an export lists all tokens that end a text; GGUF itself has room for one.
pub(super) const EOS_KEY: &str = "iec.eos_token_ids";

/// Writes the configuration of a model.
///
/// # Errors
/// The family is unknown, or a key is missing, of the wrong type, or has a value that this program cannot honour.
pub fn config_json(gguf: &Gguf) -> Result<Map<String, Value>> {
    let family = Family::of_file(gguf.metadata.text("general.architecture")?)?;
    let source = Source { gguf, family };
    let mut config = source.dimensions()?;
    source.attention(&mut config)?;
    source.mlp(&mut config)?;
    source.rope(&mut config)?;
    source.tokens(&mut config)?;
    Ok(config)
}

struct Source<'a> {
    gguf: &'a Gguf,
    family: &'a Family,
}

impl Source<'_> {
    fn key(&self, leaf: &str) -> String {
        format!("{}.{leaf}", self.family.name)
    }

    fn count(&self, leaf: &str) -> Result<usize> {
        let key = self.key(leaf);
        required(&key, self.count_opt(leaf)?)
    }

    /// A count; a list of counts, one for each layer, must be one and the same count.
    fn count_opt(&self, leaf: &str) -> Result<Option<usize>> {
        let key = self.key(leaf);
        if !matches!(self.gguf.metadata.get(&key), Some(Meta::Numbers(..))) {
            return self.gguf.metadata.count_opt(&key);
        }
        let list = self.gguf.metadata.integers_opt(&key)?.unwrap_or_default();
        match list.split_first() {
            Some((first, rest)) if rest.iter().all(|n| n == first) => {
                usize::try_from(*first).map(Some).map_err(|_| Error::corrupt("expected a count").tensor(key))
            }
            _ => Err(Error::unsupported("differs from layer to layer").tensor(key)),
        }
    }

    fn number_opt(&self, leaf: &str) -> Result<Option<f64>> {
        self.gguf.metadata.number_opt(&self.key(leaf))
    }

    fn has(&self, tensor: &str) -> bool {
        self.gguf.tensors.iter().any(|t| t.name == tensor)
    }

    fn dimensions(&self) -> Result<Map<String, Value>> {
        let experts = self.count_opt("expert_count")?.unwrap_or(0);
        let (class, model_type) = match experts {
            0 => (self.family.dense, self.family.model_type.0),
            _ => (self.family.moe, self.family.model_type.1),
        };
        let Some(class) = class else {
            let found = format!("{experts} experts; this family is not supported so");
            return Err(Error::unsupported(found).tensor(self.key("expert_count")));
        };
        let heads = self.count("attention.head_count")?;
        let hidden = self.count("embedding_length")?;
        // As llama.cpp: how much of a head is rotated says nothing about its width.
        let head_dim = match self.count_opt("attention.key_length")? {
            Some(width) => width,
            None => hidden.checked_div(heads).unwrap_or(0),
        };
        let rotated = self.count_opt("rope.dimension_count")?.unwrap_or(head_dim);
        let partial = self.family.partial_rotary && rotated < head_dim;
        for leaf in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
            if self.count_opt(leaf)?.is_some_and(|width| width != head_dim) && !(partial && leaf.starts_with("rope")) {
                let found = format!("differs from the head width of {head_dim}");
                return Err(Error::unsupported(found).tensor(self.key(leaf)));
            }
        }
        let Some(embedding) = self.gguf.tensors.iter().find(|t| t.name == "token_embd.weight") else {
            return Err(Error::corrupt("missing from the file").tensor("token_embd.weight"));
        };
        let mut config = Map::new();
        let mut put = |key: &str, value: Value| config.insert(key.to_string(), value);
        put("architectures", json!([class]));
        put("model_type", json!(model_type));
        put("vocab_size", json!(embedding.shape[0]));
        put("hidden_size", json!(hidden));
        put("num_hidden_layers", json!(self.count("block_count")?));
        put("num_attention_heads", json!(heads));
        put("num_key_value_heads", json!(self.count_opt("attention.head_count_kv")?.unwrap_or(heads)));
        put("head_dim", json!(head_dim));
        put("max_position_embeddings", json!(self.count("context_length")?));
        let eps = self.key("attention.layer_norm_rms_epsilon");
        put("rms_norm_eps", json!(required(&eps, self.gguf.metadata.number_opt(&eps)?)?));
        if partial {
            put("partial_rotary_factor", json!(rotated as f64 / head_dim as f64));
        }
        let tied = !self.has("output.weight");
        put("tie_word_embeddings", json!(tied));
        Ok(config)
    }

    fn attention(&self, config: &mut Map<String, Value>) -> Result<()> {
        let biases = ["q", "k", "v", "output"].map(|name| self.has(&format!("blk.0.attn_{name}.bias")));
        let some = biases.contains(&true);
        if some && biases != self.family.biases {
            let found = "biases in some of q, k, v and output, which this family does not have";
            return Err(Error::unsupported(found).tensor("blk.0.attn_q.bias"));
        }
        if !some || self.family.optional_biases {
            config.insert("attention_bias".into(), json!(some));
        }
        for cap in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if let Some(value) = self.number_opt(cap)? {
                config.insert(cap.into(), json!(value));
            }
        }
        self.windows(config)?;
        if self.family.norm_plus_one {
            config.insert("hidden_activation".into(), json!("gelu_pytorch_tanh"));
            let number = |key: &str| config[key].as_u64().unwrap_or(0) as usize;
            let (layers, hidden, heads) =
                (number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads"));
            let width = self.family.score_width(layers, hidden, heads, number("head_dim"));
            config.insert("query_pre_attn_scalar".into(), json!(width));
        } else {
            config.insert("hidden_act".into(), json!("silu"));
        }
        match self.number_opt("attention.scale")? {
            Some(_) => {
                Err(Error::unsupported("scores are scaled in an unusual way").tensor(self.key("attention.scale")))
            }
            None => Ok(()),
        }
    }

    fn windows(&self, config: &mut Map<String, Value>) -> Result<()> {
        let width = self.count_opt("attention.sliding_window")?.filter(|width| *width > 0);
        let Window::AllBut(default) = self.family.window else {
            // llama.cpp ignores the key in these families; the model was trained with the window.
            if let Some(width) = width {
                let is_dense = config["architectures"][0].as_str() == self.family.dense;
                if let Some((class, model_type)) = self.family.windowed.filter(|_| is_dense) {
                    config.insert("architectures".into(), json!([class]));
                    config.insert("model_type".into(), json!(model_type));
                }
                config.insert("sliding_window".into(), json!(width));
            }
            return Ok(());
        };
        let layers = config["num_hidden_layers"].as_u64().unwrap_or(0);
        // Bounded before a list is made; the family's own code checks the number again.
        if layers > 10_000 {
            return Err(Error::corrupt(format!("{layers} layers")).tensor(self.key("block_count")));
        }
        let key = self.key("attention.sliding_window_pattern");
        let pattern: Vec<bool> = match self.gguf.metadata.get(&key) {
            Some(list @ Meta::Numbers(..)) => {
                let flags =
                    list.numbers().into_iter().flatten().map(|n| n.as_bool().or(n.as_integer().map(|n| n != 0)));
                flags.collect::<Option<_>>().ok_or_else(|| Error::corrupt("expected truth values").tensor(&key))?
            }
            _ => {
                let period = self.gguf.metadata.count_opt(&key)?.unwrap_or(default).max(1);
                (0..layers as usize).map(|layer| layer % period < period - 1).collect()
            }
        };
        let words = pattern.iter().map(|windowed| match (windowed, width) {
            (true, Some(_)) => "sliding_attention",
            _ => "full_attention",
        });
        config.insert("layer_types".into(), words.collect::<Vec<_>>().into());
        config.insert("sliding_window".into(), json!(width));
        Ok(())
    }

    fn mlp(&self, config: &mut Map<String, Value>) -> Result<()> {
        let experts = self.count_opt("expert_count")?.unwrap_or(0);
        let mut put = |key: &str, value: Value| config.insert(key.to_string(), value);
        if experts == 0 {
            put("intermediate_size", json!(self.count("feed_forward_length")?));
            let biases = ["gate", "up", "down"].map(|name| self.has(&format!("blk.0.ffn_{name}.bias")));
            put("mlp_bias", json!(biases.contains(&true)));
            return Ok(());
        }
        let width = match self.count_opt("expert_feed_forward_length")? {
            Some(width) => width,
            None => self.count("feed_forward_length")?,
        };
        put("intermediate_size", json!(width));
        put("num_experts_per_tok", json!(self.count("expert_used_count")?));
        if self.family.qwen_experts {
            put("num_experts", json!(experts));
            put("moe_intermediate_size", json!(width));
            put("norm_topk_prob", json!(true));
            put("decoder_sparse_step", json!(1));
            put("mlp_only_layers", json!([]));
        } else {
            put("num_local_experts", json!(experts));
        }
        Ok(())
    }

    fn rope(&self, config: &mut Map<String, Value>) -> Result<()> {
        let theta = self.number_opt("rope.freq_base")?.unwrap_or(10_000.0);
        config.insert("rope_theta".into(), json!(theta));
        let scaling = self.rope_scaling(config, theta)?;
        if self.family.local_rope {
            // Layers with a window have a base of their own and no scaling.
            let local = self.number_opt("rope.freq_base_swa")?.unwrap_or(10_000.0);
            config.insert("rope_local_base_freq".into(), json!(local));
        }
        config.insert("rope_scaling".into(), scaling);
        Ok(())
    }

    fn rope_scaling(&self, config: &mut Map<String, Value>, theta: f64) -> Result<Value> {
        let original = self.count_opt("rope.scaling.original_context_length")?;
        let context = config["max_position_embeddings"].as_u64().unwrap_or(0) as usize;
        if self.has("rope_factors_long.weight") || self.has("rope_factors_short.weight") {
            let (long, short) = (self.factors("rope_factors_long.weight")?, self.factors("rope_factors_short.weight")?);
            let original = original.unwrap_or(context);
            config.insert("original_max_position_embeddings".into(), json!(original));
            let attention = self.number_opt("rope.scaling.attn_factor")?;
            return Ok(json!({"type": "longrope", "long_factor": long, "short_factor": short,
                             "attention_factor": attention.unwrap_or(1.0),
                             "original_max_position_embeddings": original}));
        }
        if self.has("rope_freqs.weight") {
            let factors = self.factors("rope_freqs.weight")?;
            return Ok(rope_factors::llama3_json(&factors, theta));
        }
        let factor = match self.number_opt("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.number_opt("rope.scale_linear")?,
        };
        let kind = self.key("rope.scaling.type");
        match (self.gguf.metadata.text_opt(&kind)?, factor) {
            (Some("none"), _) | (_, None) => Ok(Value::Null),
            (Some("linear") | None, Some(1.0 | 0.0)) => Ok(Value::Null),
            (Some("linear") | None, Some(factor)) => Ok(json!({"rope_type": "linear", "factor": factor})),
            (Some("yarn"), Some(factor)) => self.yarn(factor, original.unwrap_or(context)),
            (Some(other), _) => {
                Err(Error::unsupported(format!("`{other}`; expected none, linear, yarn or longrope")).tensor(kind))
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
        if let Some(extra) = self.number_opt("rope.scaling.attn_factor")? {
            yarn["attention_factor"] = json!(extra * (0.1 * factor.ln() + 1.0));
        }
        for leaf in
            ["rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier"]
        {
            if self.number_opt(leaf)?.is_some_and(|x| x != 0.0 && x != 1.0) {
                return Err(Error::unsupported("is not supported").tensor(self.key(leaf)));
            }
        }
        Ok(yarn)
    }

    fn factors(&self, name: &str) -> Result<Vec<f32>> {
        let tensor = self.gguf.tensors.iter().find(|t| t.name == name);
        let tensor = tensor.ok_or_else(|| Error::corrupt("missing from the file").tensor(name))?;
        if tensor.elements() > 1 << 16 {
            return Err(Error::corrupt(format!("{} factors", tensor.elements())).tensor(name));
        }
        self.gguf.floats(tensor)
    }

    fn tokens(&self, config: &mut Map<String, Value>) -> Result<()> {
        let meta = &self.gguf.metadata;
        let id = |name: &str| meta.count_opt(&format!("tokenizer.ggml.{name}_token_id"));
        for (name, field) in [("bos", "bos_token_id"), ("padding", "pad_token_id")] {
            if let Some(id) = id(name)? {
                config.insert(field.into(), json!(id));
            }
        }
        let eos: Vec<i64> = match meta.integers_opt(EOS_KEY)? {
            Some(list) => list,
            None => {
                let mut all: Vec<i64> = Vec::new();
                for name in ["eos", "eot", "eom"] {
                    all.extend(id(name)?.map(|id| id as i64).filter(|id| !all.contains(id)));
                }
                all.extend(super::tokenizer_in::ends_by_name(meta)?.filter(|id| !all.contains(id)).collect::<Vec<_>>());
                all
            }
        };
        config.insert("eos_token_id".into(), json!(eos));
        Ok(())
    }
}
