//! Model families: converts a `config.json` to a [`ModelConfig`] and maps canonical tensors to
//! those of the checkpoint.
//!
//! A family is one entry of [`ARCHS`]. It consists of default values, functions for the differences from the plain
//! decoder, and the views that make canonical tensors from source tensors. The list of tensors that a model must have
//! follows from the [`ModelConfig`] alone ([`expected_tensors`]).

mod cohere;
mod deepseek;
mod expected;
mod family;
mod fields;
mod gemma;
mod gemma4;
mod glm;
mod gpt_oss;
mod granite;
mod llama;
mod minimax;
mod muse;
mod olmo;
mod phi3;
mod qwen;
mod rope;
mod smollm;
mod view;
mod wrapper;

pub use expected::{ExpectedTensor, expected_tensors};
pub use fields::Fields;
pub use view::View;
pub use wrapper::{LeftOut, Naming, PartKind, tower};

use crate::error::Result;
use crate::model_config::{Mlp, ModelConfig};
use family::{dense, same_names, same_windows, silu};
use serde_json::{Map, Value};
use wrapper::text_fields;

/// A model family: the defaults of `transformers` for fields that a configuration leaves out, and the differences from
/// the plain decoder.
#[derive(Debug)]
pub struct Arch {
    /// Class name in `architectures`.
    pub class: &'static str,
    /// `model_type`, which decides when `architectures` is absent, and in the `text_config` of wrappers.
    pub model_type: &'static str,
    /// Other classes and model types with the same language model.
    also: &'static [&'static str],
    /// Default number of query heads; `None` = the field is required.
    n_heads: Option<usize>,
    /// Default number of key/value heads; `None` = as many as query heads.
    n_kv_heads: Option<usize>,
    /// Default width of a head; `None` = the hidden width divided by the number of heads.
    head_dim: Option<usize>,
    /// Default number of rows of the embedding matrix; `None` = the field is required.
    vocab: Option<usize>,
    /// Default context length in tokens.
    max_context: usize,
    /// Default epsilon of the norms.
    norm_eps: f64,
    /// Default base of the RoPE frequencies.
    theta: f64,
    /// Default of `tie_word_embeddings`: true when the output matrix is the embedding matrix.
    tied: bool,
    /// Default of `attention_bias`: true when the projections of attention have biases.
    attention_bias: bool,
    /// Supported `quant_method` of quantized checkpoints, if any.
    quantization: Option<&'static str>,
    /// Fields that the family supports, of those that are otherwise refused: [`family::FOREIGN`] and
    /// [`family::PARTIAL`].
    honours: &'static [&'static str],
    /// Function that returns true when a configuration without class and type belongs to the family.
    claims: fn(&Fields) -> bool,
    /// Function that reads the feed-forward part.
    mlp: fn(&Arch, &Fields) -> Result<Mlp>,
    /// Function that reads the window of each layer; its second argument is the number of layers.
    windows: fn(&Fields, usize) -> Result<Vec<Option<usize>>>,
    /// Function that applies the family's other differences from the plain decoder.
    adjust: fn(&Fields, &mut ModelConfig) -> Result<()>,
    /// Function that returns the views by which a canonical tensor may be read from the source, the most likely first.
    views: fn(&ModelConfig, &ExpectedTensor) -> Vec<View>,
}

/// The plain decoder, relative to which other families are defined: RMSNorm, rotary embedding, grouped-query attention
/// over all positions, a gated MLP with SiLU, no biases, and tensors under their canonical names.
const PLAIN: Arch = Arch {
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
    quantization: None,
    honours: &[],
    claims: |_| false,
    mlp: |arch, config| dense(arch, config, silu(config)?),
    windows: |config, n_layers| same_windows(config, n_layers, None),
    adjust: |_, _| Ok(()),
    views: same_names,
};

/// All supported families.
pub const ARCHS: &[Arch] = &[
    llama::LLAMA,
    gpt_oss::GPT_OSS,
    llama::MISTRAL,
    llama::MIXTRAL,
    llama::MINISTRAL3,
    qwen::QWEN2,
    qwen::QWEN3,
    qwen::QWEN3_MOE,
    qwen::QWEN3_VL_MOE,
    gemma::GEMMA2,
    gemma::GEMMA3,
    gemma4::GEMMA4,
    phi3::PHI3,
    granite::GRANITE,
    smollm::SMOLLM3,
    olmo::OLMO2,
    olmo::OLMO3,
    cohere::COHERE2,
    glm::GLM4_MOE,
    muse::MUSE_GLIMMER,
    deepseek::DEEPSEEK_V2,
    deepseek::DEEPSEEK_V3,
    deepseek::GLM4_MOE_LITE,
    deepseek::MISTRAL4,
    minimax::MINIMAX_M2,
];

impl Arch {
    /// Finds the family of a configuration.
    ///
    /// # Errors
    /// The architecture is unknown.
    pub fn of(config: &Fields) -> Result<&'static Arch> {
        let text = text_fields(config)?;
        for arch in ARCHS {
            if (arch.claims)(&text) || arch.is_named(&text)? {
                return Ok(arch);
            }
        }
        let known = ARCHS.iter().map(|a| a.class).collect::<Vec<_>>().join(", ");
        let key = if text.get("architectures").is_some() { "architectures" } else { "model_type" };
        Err(text.unsupported(key, &format!("expected the language model of one of {known}")))
    }

    /// Finds the family of a class, such as `LlamaForCausalLM`.
    pub fn of_class(class: &str) -> Option<&'static Arch> {
        ARCHS.iter().find(|arch| arch.class == class)
    }

    /// Returns true when `architectures` lists the class, or is absent and `model_type` is the family's.
    fn is_named(&self, config: &Fields) -> Result<bool> {
        match config.words_opt("architectures")? {
            Some(classes) if !classes.is_empty() => {
                Ok(classes.iter().any(|class| *class == self.class || self.also.contains(class)))
            }
            _ => Ok(config
                .word_opt("model_type")?
                .is_some_and(|name| name == self.model_type || self.also.contains(&name))),
        }
    }

    /// Reads and checks the configuration; `generation` is generation_config.json, whose end tokens are added.
    pub fn model_config(&self, config: &Fields, generation: Option<&Map<String, Value>>) -> Result<ModelConfig> {
        let text = text_fields(config)?;
        family::refuse_quantization(config, self.quantization)?;
        let mut model = family::decoder(self, &text)?;
        if text.get(TIED).is_none() {
            model.tied_embeddings = config.flag(TIED, model.tied_embeddings)?;
        }
        (self.adjust)(&text, &mut model)?;
        let sources = [Some(text), Some(*config), generation.map(Fields::new)];
        for fields in sources.into_iter().flatten() {
            model.bos = model.bos.or(fields.token_ids("bos_token_id")?.first().copied());
            for id in fields.token_ids("eos_token_id")? {
                if !model.eos.contains(&id) {
                    model.eos.push(id);
                }
            }
        }
        model.validate()?;
        Ok(model)
    }

    /// Returns the views by which a canonical tensor may be read from the source, the most likely first.
    pub fn views(&self, model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
        (self.views)(model, tensor)
    }
}

/// Field that says whether the output matrix is the embedding matrix.
pub const TIED: &str = "tie_word_embeddings";

/// Returns true for a wrapper that says two things about its output matrix; then the weights decide.
///
/// # Errors
/// A field has the wrong type.
pub fn disagrees_about_output(config: &Fields) -> Result<bool> {
    let inner = config.object_opt("text_config")?;
    let both = inner.filter(|inner| inner.get(TIED).is_some() && config.get(TIED).is_some());
    both.map_or(Ok(false), |inner| Ok(inner.flag(TIED, false)? != config.flag(TIED, false)?))
}

/// Returns true for source tensors without weights: buffers that older versions of transformers saved.
pub fn is_ignorable(source_name: &str) -> bool {
    source_name.ends_with("rotary_emb.inv_freq")
}

/// Returns the view of a source tensor that has the shape of the canonical tensor; `of` is the
/// length of its first axis.
fn whole(source: impl Into<String>, of: usize) -> View {
    View::Rows { source: source.into(), first: 0, of }
}

/// Splits `model.layers.N.rest` into N and rest.
fn layer_part(canonical: &str) -> Option<(&str, &str)> {
    canonical.strip_prefix("model.layers.")?.split_once('.')
}

#[cfg(test)]
mod newer_tests;
#[cfg(test)]
mod tests;
