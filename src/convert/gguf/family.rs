//! Properties of the model families of GGUF files that this program supports.
//!
//! The table has one entry per family. It records the differences between families as data: which rows are permuted,
//! and which constants are built into llama.cpp.

use crate::error::{Error, Result};
use crate::model_config::{Activation, ModelConfig};

/// A model family: one value of `general.architecture`.
#[derive(Debug)]
pub struct Family {
    /// Value of `general.architecture`, which is also the prefix of the family's keys.
    pub name: &'static str,
    /// Class name in `config.json` of a dense model of the family.
    pub dense: Option<&'static str>,
    /// Class name in `config.json` of a mixture-of-experts model of the family.
    pub moe: Option<&'static str>,
    /// Class name in `config.json` of a dense model of the family with a sliding window.
    pub windowed: Option<&'static str>,
    /// True when GGUF stores the two rows of a rotary pair next to each other, so that the rows
    /// of q and k are permuted.
    pub neighbour_pairs: bool,
    /// Name in GGUF of the norm `post_attention_layernorm`.
    pub post_attention: &'static str,
    /// True when GGUF stores norm weights with 1 added.
    pub norm_plus_one: bool,
    /// True when q, k and v are written as one matrix, and gate and up as another.
    pub fused: bool,
    /// Period n of the windows: llama.cpp applies `attention.sliding_window` in all layers but every n-th, unless the
    /// file lists another pattern. `None` when llama.cpp has no windows for the family.
    pub window: Option<usize>,
    /// Projections among q, k, v and output that have biases if the model has any. When all four may have them, the
    /// field `attention_bias` of `config.json` says whether they do.
    pub biases: [bool; 4],
    /// Activation of the MLP.
    pub activation: Activation,
    /// True when queries and keys are normalized.
    pub qk_norm: bool,
    /// True when attention has sinks.
    pub sinks: bool,
    /// True when attention scores are soft-capped.
    pub softcap: bool,
    /// True when logits may be soft-capped.
    pub logit_softcap: bool,
    /// Number of layers by which llama.cpp recognizes the largest model of the family. Its attention scores are divided
    /// by the square root of hidden width / heads instead of that of the head width.
    pub layers_of_largest: Option<usize>,
    /// Fixed choice of llama.cpp about tied embeddings: whether input and output embeddings are the same matrix.
    /// `None` when both are possible.
    pub tied: Option<bool>,
    /// True when RoPE may rotate only a part of each head.
    pub partial_rotary: bool,
    /// True when layers with a window have their own RoPE base.
    pub local_rope: bool,
    /// True when the family supports Llama 3's RoPE scaling, stored in GGUF as factors per frequency.
    pub llama3_rope: bool,
    /// True when the family supports LongRoPE.
    pub longrope: bool,
    /// True when the bounds of YaRN's ramp are rounded to whole frequency indices, as the model was trained.
    /// GGUF has no key for it.
    pub yarn_truncates: bool,
    /// True when `config.json` describes the experts with Qwen's fields, including the list of layers without experts.
    pub qwen_experts: bool,
    /// True when GGUF has a separate key for the width of an expert.
    pub expert_width_key: bool,
}

/// All supported families.
pub const FAMILIES: &[Family] = &[
    Family {
        dense: Some("LlamaForCausalLM"),
        moe: Some("MixtralForCausalLM"),
        windowed: Some("MistralForCausalLM"),
        neighbour_pairs: true,
        biases: [true; 4],
        llama3_rope: true,
        longrope: true,
        expert_width_key: false,
        ..named("llama")
    },
    Family {
        moe: Some("GptOssForCausalLM"),
        post_attention: "post_attention_norm",
        window: Some(2),
        biases: [true; 4],
        activation: Activation::SwigluOai { alpha: 1.702, limit: 7.0 },
        sinks: true,
        tied: Some(false),
        yarn_truncates: false,
        ..named("gpt-oss")
    },
    Family { dense: Some("Qwen2ForCausalLM"), biases: [true, true, true, false], ..named("qwen2") },
    Family { dense: Some("Qwen3ForCausalLM"), qk_norm: true, ..named("qwen3") },
    Family { moe: Some("Qwen3MoeForCausalLM"), qk_norm: true, qwen_experts: true, ..named("qwen3moe") },
    Family {
        dense: Some("Gemma2ForCausalLM"),
        post_attention: "post_attention_norm",
        norm_plus_one: true,
        window: Some(2),
        activation: Activation::GeluTanh,
        softcap: true,
        logit_softcap: true,
        layers_of_largest: Some(46),
        tied: Some(true),
        ..named("gemma2")
    },
    Family {
        dense: Some("Gemma3ForCausalLM"),
        post_attention: "post_attention_norm",
        norm_plus_one: true,
        window: Some(6),
        activation: Activation::GeluTanh,
        qk_norm: true,
        logit_softcap: true,
        layers_of_largest: Some(62),
        local_rope: true,
        ..named("gemma3")
    },
    Family { dense: Some("Phi3ForCausalLM"), fused: true, partial_rotary: true, longrope: true, ..named("phi3") },
];

const fn named(name: &'static str) -> Family {
    Family {
        name,
        dense: None,
        moe: None,
        neighbour_pairs: false,
        post_attention: "ffn_norm",
        norm_plus_one: false,
        fused: false,
        window: None,
        windowed: None,
        biases: [false; 4],
        activation: Activation::Silu,
        qk_norm: false,
        sinks: false,
        softcap: false,
        logit_softcap: false,
        layers_of_largest: None,
        tied: None,
        partial_rotary: false,
        local_rope: false,
        llama3_rope: false,
        longrope: false,
        yarn_truncates: true,
        qwen_experts: false,
        expert_width_key: true,
    }
}

impl Family {
    /// Returns the width whose inverse square root scales the attention scores: the head width, except in the largest
    /// models of some families.
    pub fn score_width(&self, n_layers: usize, hidden: usize, n_heads: usize, head_dim: usize) -> usize {
        if self.layers_of_largest == Some(n_layers) { hidden.checked_div(n_heads).unwrap_or(0) } else { head_dim }
    }

    /// Returns the family of a GGUF file.
    ///
    /// # Errors
    /// This program does not support the family.
    pub fn of_file(name: &str) -> Result<&'static Family> {
        FAMILIES.iter().find(|f| f.name == name).ok_or_else(|| {
            Error::unsupported(format!("found `{name}`, expected one of {}", known(|f| vec![f.name])))
                .tensor("general.architecture")
        })
    }

    /// Returns the family under which a model is exported.
    ///
    /// # Errors
    /// llama.cpp has no family for the architecture, or this program cannot export it.
    pub fn of_model(model: &ModelConfig) -> Result<&'static Family> {
        let class = model.architecture.as_str();
        let found = FAMILIES.iter().find(|f| f.classes().any(|c| c == class));
        found.ok_or_else(|| {
            let expected = known(|f| f.classes().collect());
            Error::unsupported(format!("found {class}, which cannot be exported; expected one of {expected}"))
                .tensor("architecture")
        })
    }

    fn classes(&self) -> impl Iterator<Item = &'static str> {
        [self.dense, self.moe, self.windowed].into_iter().flatten()
    }
}

fn known(names: impl Fn(&Family) -> Vec<&'static str>) -> String {
    FAMILIES.iter().flat_map(names).collect::<Vec<_>>().join(", ")
}
