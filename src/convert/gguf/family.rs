//! The model families that GGUF files name and this program runs: what their tensors and numbers mean there.
//!
//! One row per family. What differs between families is data: which rows are moved, which constants llama.cpp has built
//! in.

use crate::error::{Error, Result};
use crate::model_config::{Activation, ModelConfig};

/// One value of `general.architecture`.
#[derive(Debug)]
pub struct Family {
    /// The value, which also begins its keys.
    pub name: &'static str,
    /// Class of a dense model of the family.
    pub dense: Option<&'static str>,
    /// Class of a mixture of experts of the family.
    pub moe: Option<&'static str>,
    /// Class of a dense model of the family that has a sliding window.
    pub windowed: Option<&'static str>,
    /// Rotary pairs are neighbours in GGUF, so the rows of q and k are in another order.
    pub neighbour_pairs: bool,
    /// Name in GGUF of the norm that is called `post_attention_layernorm`.
    pub post_attention: &'static str,
    /// Norm weights are stored with 1 added.
    pub norm_plus_one: bool,
    /// q, k, v and gate, up are written as one matrix each.
    pub fused: bool,
    /// llama.cpp applies `attention.sliding_window` in all layers but every n-th, and can list another pattern; `None`
    /// where it has no windows.
    pub window: Option<usize>,
    /// Which of q, k, v and the output projection may have biases, all or none of them. Where all may, `attention_bias`
    /// of the configuration says whether they have.
    pub biases: [bool; 4],
    /// Activation of the MLP.
    pub activation: Activation,
    /// Queries and keys are normalized.
    pub qk_norm: bool,
    /// Attention has sinks.
    pub sinks: bool,
    /// Attention scores are capped.
    pub softcap: bool,
    /// Logits may be capped.
    pub logit_softcap: bool,
    /// Number of layers by which llama.cpp tells the model whose scores are scaled by the hidden width per head.
    pub layers_of_largest: Option<usize>,
    /// Whether input and output embeddings are the same matrix, where llama.cpp leaves no choice.
    pub tied: Option<bool>,
    /// Only a part of each head may be rotated.
    pub partial_rotary: bool,
    /// Layers with a window have a RoPE base of their own.
    pub local_rope: bool,
    /// Llama 3's RoPE scaling is known, as factors per frequency.
    pub llama3_rope: bool,
    /// LongRoPE is known.
    pub longrope: bool,
    /// YaRN was trained with bounds that are whole frequencies; GGUF cannot say it.
    pub yarn_truncates: bool,
    /// `config.json` names the experts as Qwen does, with the layers that have some.
    pub qwen_experts: bool,
    /// The width of experts has a key of its own.
    pub expert_width_key: bool,
}

/// The families.
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
    /// The width whose inverse root scales the scores of a model: that of a head, but for the largest models of some
    /// families.
    pub fn score_width(&self, n_layers: usize, hidden: usize, n_heads: usize, head_dim: usize) -> usize {
        if self.layers_of_largest == Some(n_layers) { hidden.checked_div(n_heads).unwrap_or(0) } else { head_dim }
    }

    /// The family of a GGUF file.
    ///
    /// # Errors
    /// This program does not run it.
    pub fn of_file(name: &str) -> Result<&'static Family> {
        FAMILIES.iter().find(|f| f.name == name).ok_or_else(|| {
            Error::unsupported(format!("`{name}` is not supported; expected one of {}", known(|f| vec![f.name])))
                .tensor("general.architecture")
        })
    }

    /// The family as which a model is exported.
    ///
    /// # Errors
    /// llama.cpp does not know its architecture, or this program does not know how.
    pub fn of_model(model: &ModelConfig) -> Result<&'static Family> {
        let class = model.architecture.as_str();
        let found = FAMILIES.iter().find(|f| f.classes().any(|c| c == class));
        found.ok_or_else(|| {
            let expected = known(|f| f.classes().collect());
            Error::unsupported(format!("{class} has no GGUF form here; expected one of {expected}"))
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
