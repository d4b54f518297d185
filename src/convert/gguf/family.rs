//! The model families that GGUF files name and this program runs: what their tensors and numbers mean there.
//!
//! One row per family. What differs between families is data: which rows are moved, which constants llama.cpp has built in.

use crate::error::{Error, Result};
use crate::model_config::ModelConfig;

/// One value of `general.architecture`.
#[derive(Debug)]
pub struct Family {
    /// The value, which also begins its keys.
    pub name: &'static str,
    /// Class of a dense model of the family.
    pub dense: Option<&'static str>,
    /// Class of a mixture of experts of the family.
    pub moe: Option<&'static str>,
    /// More classes that are exported as this family.
    pub also: &'static [&'static str],
    /// `model_type` of the classes, dense and mixture.
    pub model_type: (&'static str, &'static str),
    /// Rotary pairs are neighbours in GGUF, so the rows of q and k are in another order.
    pub neighbour_pairs: bool,
    /// Name in GGUF of the norm that is called `post_attention_layernorm`.
    pub post_attention: &'static str,
    /// Norm weights are stored with 1 added.
    pub norm_plus_one: bool,
    /// q, k, v and gate, up are written as one matrix each.
    pub fused: bool,
    /// In which layers llama.cpp applies `attention.sliding_window`.
    pub window: Window,
}

/// What llama.cpp does with a sliding window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Window {
    /// It has none.
    None,
    /// All layers but every n-th; another pattern can be listed.
    AllBut(usize),
}

/// The families.
pub const FAMILIES: &[Family] = &[
    Family {
        dense: Some("LlamaForCausalLM"),
        moe: Some("MixtralForCausalLM"),
        also: &["MistralForCausalLM"],
        model_type: ("llama", "mixtral"),
        neighbour_pairs: true,
        ..named("llama")
    },
    Family {
        moe: Some("GptOssForCausalLM"),
        model_type: ("", "gpt_oss"),
        post_attention: "post_attention_norm",
        window: Window::AllBut(2),
        ..named("gpt-oss")
    },
    Family { dense: Some("Qwen2ForCausalLM"), model_type: ("qwen2", ""), ..named("qwen2") },
    Family { dense: Some("Qwen3ForCausalLM"), model_type: ("qwen3", ""), ..named("qwen3") },
    Family { moe: Some("Qwen3MoeForCausalLM"), model_type: ("", "qwen3_moe"), ..named("qwen3moe") },
    Family {
        dense: Some("Gemma2ForCausalLM"),
        model_type: ("gemma2", ""),
        post_attention: "post_attention_norm",
        norm_plus_one: true,
        window: Window::AllBut(2),
        ..named("gemma2")
    },
    Family {
        dense: Some("Gemma3ForCausalLM"),
        model_type: ("gemma3_text", ""),
        post_attention: "post_attention_norm",
        norm_plus_one: true,
        window: Window::AllBut(6),
        ..named("gemma3")
    },
    Family { dense: Some("Phi3ForCausalLM"), model_type: ("phi3", ""), fused: true, ..named("phi3") },
];

const fn named(name: &'static str) -> Family {
    Family {
        name,
        dense: None,
        moe: None,
        also: &[],
        model_type: ("", ""),
        neighbour_pairs: false,
        post_attention: "ffn_norm",
        norm_plus_one: false,
        fused: false,
        window: Window::None,
    }
}

impl Family {
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
        self.dense.into_iter().chain(self.moe).chain(self.also.iter().copied())
    }
}

fn known(names: impl Fn(&Family) -> Vec<&'static str>) -> String {
    FAMILIES.iter().flat_map(names).collect::<Vec<_>>().join(", ")
}
