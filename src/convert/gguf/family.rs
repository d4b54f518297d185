//! Properties of the model families of GGUF files that this program supports.
//!
//! The table has one entry per family. It records the differences between families as data: which rows are permuted,
//! and which constants are built into llama.cpp.

use crate::error::{Error, Result};
use crate::model_config::{Activation, Mlp, ModelConfig, QkNorm};

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
    /// Further classes of the family.
    pub also: &'static [&'static str],
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
    /// Norms of queries and keys that the family may have.
    pub qk_norm: &'static [QkNorm],
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
    /// True when layers with a window have the RoPE base of the others, without scaling.
    pub unscaled_windows: bool,
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
    /// Properties beyond those of the plain decoder ([`ModelConfig::extensions`]) that every model of the family has.
    pub always: &'static [&'static str],
    /// Properties beyond those of the plain decoder that a model of the family may have.
    pub may: &'static [&'static str],
    /// True when the outputs of attention and MLP are normalized.
    pub post_norms: bool,
    /// True when the projections of a dense MLP may have biases.
    pub mlp_bias: bool,
    /// Layers whose queries and keys are not rotated.
    pub unrotated: Unrotated,
    /// Meaning of the key `logit_scale`.
    pub logit_scale: LogitScale,
    /// True when GGUF has keys for the factors of scores, embeddings, and outputs of blocks.
    pub factor_keys: bool,
    /// Factor of the attention scores that is built into llama.cpp; `None` when it follows from the head width.
    pub score_scale: Option<f32>,
    /// True when the query heads must together be as wide as the residual stream.
    pub full_width: bool,
    /// True when GGUF describes the experts with the keys of DeepSeek-V3: function of the router's logits, factor of
    /// the weights, groups, shared experts, and the number of leading layers with a dense MLP.
    pub routed_experts: bool,
}

/// Layers whose queries and keys llama.cpp does not rotate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unrotated {
    /// None.
    None,
    /// Layers 3, 7, 11 and so on.
    EveryFourth,
    /// Layers without a window.
    WithoutWindow,
    /// All, or none: a key says which.
    Everywhere,
    /// All.
    Always,
}

/// Meaning of the key `logit_scale`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitScale {
    /// The family does not have the key.
    None,
    /// Logits are multiplied by the number.
    Factor,
    /// Logits are divided by the number.
    Divisor,
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
        mlp_bias: true,
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
    Family { dense: Some("Qwen3ForCausalLM"), qk_norm: &[QkNorm::Head], ..named("qwen3") },
    Family {
        moe: Some("Qwen3MoeForCausalLM"),
        also: &["Qwen3VLMoeForConditionalGeneration"],
        qk_norm: &[QkNorm::Head],
        qwen_experts: true,
        ..named("qwen3moe")
    },
    Family {
        dense: Some("Gemma2ForCausalLM"),
        post_attention: "post_attention_norm",
        norm_plus_one: true,
        post_norms: true,
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
        post_norms: true,
        window: Some(6),
        activation: Activation::GeluTanh,
        qk_norm: &[QkNorm::Head],
        logit_softcap: true,
        layers_of_largest: Some(62),
        local_rope: true,
        ..named("gemma3")
    },
    Family { dense: Some("Phi3ForCausalLM"), fused: true, partial_rotary: true, longrope: true, ..named("phi3") },
    // The text models of Qwen's models for images. Exports name the families `qwen2`, `qwen3` and `qwen3moe`, which
    // compute the same for text.
    Family { dense: Some("Qwen2ForCausalLM"), biases: [true, true, true, false], ..named("qwen2vl") },
    Family { dense: Some("Qwen3ForCausalLM"), qk_norm: &[QkNorm::Head], ..named("qwen3vl") },
    Family { moe: Some("Qwen3MoeForCausalLM"), qk_norm: &[QkNorm::Head], qwen_experts: true, ..named("qwen3vlmoe") },
    Family {
        dense: Some("GraniteForCausalLM"),
        neighbour_pairs: true,
        biases: [true; 4],
        mlp_bias: true,
        may: &["residual_scale", "logit_scale"],
        logit_scale: LogitScale::Divisor,
        factor_keys: true,
        llama3_rope: true,
        ..named("granite")
    },
    Family {
        dense: Some("SmolLM3ForCausalLM"),
        neighbour_pairs: true,
        may: &["exceptions"],
        unrotated: Unrotated::EveryFourth,
        ..named("smollm3")
    },
    Family {
        dense: Some("Olmo2ForCausalLM"),
        windowed: Some("Olmo3ForCausalLM"),
        post_attention: "post_attention_norm",
        window: Some(4),
        always: &["pre_norms", "attention.qk_norm"],
        post_norms: true,
        qk_norm: &[QkNorm::All],
        unscaled_windows: true,
        tied: Some(false),
        full_width: true,
        ..named("olmo2")
    },
    Family {
        dense: Some("Cohere2ForCausalLM"),
        window: Some(4),
        always: &["norm_kind", "parallel", "rope.pairs"],
        may: &["logit_scale", "exceptions"],
        unrotated: Unrotated::WithoutWindow,
        logit_scale: LogitScale::Factor,
        tied: Some(true),
        full_width: true,
        ..named("cohere2")
    },
    Family {
        dense: Some("Ministral3ForCausalLM"),
        neighbour_pairs: true,
        may: &["attention.position_scale"],
        ..named("mistral3")
    },
    Family {
        moe: Some("Glm4MoeForCausalLM"),
        post_attention: "post_attention_norm",
        biases: [true, true, true, false],
        may: &["mlp.selection", "mlp.shared"],
        qk_norm: &[QkNorm::None, QkNorm::Head],
        partial_rotary: true,
        routed_experts: true,
        ..named("glm4moe")
    },
    Family {
        moe: Some("DeepseekV3ForCausalLM"),
        also: &["DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM"],
        may: &["mlp.selection", "mlp.shared"],
        always: &["attention.latent", "rope.pairs"],
        routed_experts: true,
        ..named("deepseek2")
    },
    Family {
        moe: Some("Mistral4ForCausalLM"),
        may: &["mlp.selection", "mlp.shared", "attention.position_scale"],
        always: &["attention.latent", "rope.pairs"],
        routed_experts: true,
        ..named("mistral4")
    },
    Family {
        moe: Some("MiniMaxM2ForCausalLM"),
        always: &["mlp.selection", "attention.qk_norm"],
        qk_norm: &[QkNorm::All],
        partial_rotary: true,
        tied: Some(false),
        ..named("minimax-m2")
    },
    Family {
        dense: Some("MuseGlimmerForCausalLM"),
        neighbour_pairs: true,
        post_attention: "post_attention_norm",
        norm_plus_one: true,
        post_norms: true,
        window: Some(4),
        always: &["post_norm_eps", "plain_final_norm", "embedding_norm", "attention.qk_norm", "attention.gate"],
        may: &["logit_scale", "exceptions"],
        qk_norm: &[QkNorm::Unit],
        unrotated: Unrotated::WithoutWindow,
        logit_scale: LogitScale::Factor,
        logit_softcap: true,
        tied: Some(false),
        ..named("muse-glimmer")
    },
    Family {
        dense: Some("Gemma4ForCausalLM"),
        moe: Some("Gemma4ForCausalLM"),
        post_attention: "post_attention_norm",
        post_norms: true,
        window: Some(6),
        activation: Activation::GeluTanh,
        always: &["layer_scalars", "attention.value_norm", "rope.turning_pairs", "exceptions"],
        may: &["per_layer_input", "mlp.selection", "mlp.shared"],
        qk_norm: &[QkNorm::Head],
        logit_softcap: true,
        local_rope: true,
        score_scale: Some(1.0),
        ..named("gemma4")
    },
    Family {
        dense: Some("Lfm2ForCausalLM"),
        always: &["recurrent"],
        qk_norm: &[QkNorm::Head],
        full_width: true,
        ..named("lfm2")
    },
    Family {
        moe: Some("Lfm2MoeForCausalLM"),
        always: &["recurrent", "mlp.selection"],
        qk_norm: &[QkNorm::Head],
        full_width: true,
        ..named("lfm2moe")
    },
    Family {
        dense: Some("GraniteMoeHybridForCausalLM"),
        moe: Some("GraniteMoeHybridForCausalLM"),
        neighbour_pairs: true,
        always: &["recurrent"],
        may: &["residual_scale", "logit_scale", "exceptions", "mlp.shared"],
        logit_scale: LogitScale::Divisor,
        factor_keys: true,
        unrotated: Unrotated::Everywhere,
        ..named("granitehybrid")
    },
    Family { dense: Some("NemotronHForCausalLM"), ..one_block("nemotron_h") },
    Family {
        moe: Some("NemotronHForCausalLM"),
        may: &["mlp.selection", "mlp.shared", "mlp.latent"],
        ..one_block("nemotron_h_moe")
    },
    Family { dense: Some("Qwen3_5ForCausalLM"), ..delta("qwen35") },
    Family { moe: Some("Qwen3_5MoeForCausalLM"), may: &["mlp.shared", "mlp.shared.gate"], ..delta("qwen35moe") },
    Family { moe: Some("Qwen3NextForCausalLM"), may: &["mlp.shared", "mlp.shared.gate"], ..delta("qwen3next") },
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
        also: &[],
        biases: [false; 4],
        activation: Activation::Silu,
        qk_norm: &[QkNorm::None],
        sinks: false,
        softcap: false,
        logit_softcap: false,
        layers_of_largest: None,
        tied: None,
        partial_rotary: false,
        local_rope: false,
        unscaled_windows: false,
        llama3_rope: false,
        longrope: false,
        yarn_truncates: true,
        qwen_experts: false,
        expert_width_key: true,
        always: &[],
        may: &[],
        post_norms: false,
        mlp_bias: false,
        unrotated: Unrotated::None,
        logit_scale: LogitScale::None,
        factor_keys: false,
        score_scale: None,
        full_width: false,
        routed_experts: false,
    }
}

/// Returns the common properties of the families with gated delta nets.
const fn delta(name: &'static str) -> Family {
    Family {
        post_attention: "post_attention_norm",
        norm_plus_one: true,
        always: &["recurrent", "attention.gate"],
        qk_norm: &[QkNorm::Head],
        partial_rotary: true,
        ..named(name)
    }
}

/// Returns the common properties of the families whose layers are one block each.
const fn one_block(name: &'static str) -> Family {
    Family {
        post_attention: "attn_norm",
        biases: [true; 4],
        activation: Activation::Relu2,
        always: &["recurrent", "mlp_layers", "exceptions"],
        unrotated: Unrotated::Always,
        ..named(name)
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
        // Some classes have a family for models with experts and another one for those without.
        let of_kind = |f: &&Family| match model.mlp {
            Mlp::Dense { .. } => f.dense == Some(class),
            Mlp::Moe { .. } => f.moe == Some(class),
        };
        let found = FAMILIES.iter().find(of_kind);
        found.or_else(|| FAMILIES.iter().find(|f| f.classes().any(|c| c == class))).ok_or_else(|| {
            let expected = known(|f| f.classes().collect());
            Error::unsupported(format!("found {class}, which cannot be exported; expected one of {expected}"))
                .tensor("architecture")
        })
    }

    fn classes(&self) -> impl Iterator<Item = &'static str> {
        [self.dense, self.moe, self.windowed].into_iter().flatten().chain(self.also.iter().copied())
    }

    /// Returns true when every model of the family has this property beyond those of the plain decoder.
    pub fn always_has(&self, extension: &str) -> bool {
        self.always.contains(&extension)
    }

    /// Returns true for families whose experts llama.cpp chooses by sigmoids with a bias, and by nothing else.
    pub fn has_sigmoid_experts(&self) -> bool {
        self.always_has("mlp.selection")
    }

    /// Returns true for families with multi-head latent attention.
    pub fn is_latent(&self) -> bool {
        self.always_has("attention.latent")
    }

    /// Returns true for families with gated short convolutions (LFM2).
    pub fn has_convolutions(&self) -> bool {
        self.always_has("recurrent") && !self.has_delta_nets() && !self.has_mamba()
    }

    /// Returns true for families with Mamba-2 (Granite 4, Nemotron-H).
    pub fn has_mamba(&self) -> bool {
        self.always_has("recurrent") && self.factor_keys || self.has_single_blocks()
    }

    /// Returns true for families whose layers are one block each (Nemotron-H).
    pub fn has_single_blocks(&self) -> bool {
        self.always_has("mlp_layers")
    }

    /// Returns true for families with gated delta nets (Qwen3.5, Qwen3-Next).
    pub fn has_delta_nets(&self) -> bool {
        self.always_has("recurrent") && self.always_has("attention.gate")
    }

    /// Returns true for families in which the value heads that read one key head are as many heads apart as there are
    /// key heads.
    pub fn has_tiled_heads(&self) -> bool {
        self.has_delta_nets() && self.name != "qwen3next"
    }

    /// Returns true for families of which the first layers may have a dense MLP while the others have experts.
    pub fn has_leading_dense(&self) -> bool {
        self.routed_experts || self.has_convolutions()
    }

    /// Returns true for families in which llama.cpp reads a growth of YaRN's magnitude.
    pub fn reads_log_multiplier(&self) -> bool {
        self.may.contains(&"attention.position_scale") || self.is_latent()
    }

    /// Returns true for families whose layers without a window have other sizes than those with one (Gemma 4).
    pub fn has_layer_sizes(&self) -> bool {
        self.always_has("rope.turning_pairs")
    }

    /// Returns the factor by which every embedding is multiplied in llama.cpp's code for the family.
    pub fn embedding_scale(&self, hidden: usize) -> f32 {
        let has_scale = self.activation == Activation::GeluTanh;
        if has_scale { (hidden as f32).sqrt() } else { 1.0 }
    }
}

fn known(names: impl Fn(&Family) -> Vec<&'static str>) -> String {
    let mut all: Vec<&str> = Vec::new();
    for name in FAMILIES.iter().flat_map(names) {
        if !all.contains(&name) {
            all.push(name);
        }
    }
    all.join(", ")
}
