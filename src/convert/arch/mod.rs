//! Model families: converts a `config.json` to a [`ModelConfig`] and maps canonical tensors to
//! those of the checkpoint.
//!
//! A family is one entry of [`ARCHS`]. It consists of default values, functions for the differences from the plain
//! decoder, and the views that make canonical tensors from source tensors. The list of tensors that a model must have
//! follows from the [`ModelConfig`] alone ([`expected_tensors`]).

mod expected;
mod family;
mod fields;
mod gemma;
mod gpt_oss;
mod llama;
mod phi3;
mod qwen;
mod rope;
mod view;

pub use expected::{ExpectedTensor, expected_tensors};
pub use fields::Fields;
pub use view::View;

use crate::error::Result;
use crate::model_config::{Mlp, ModelConfig};
use family::{dense, same_names, same_windows, silu};
use serde_json::{Map, Value};

/// A model family: the defaults of `transformers` for fields that a configuration leaves out, and the differences from
/// the plain decoder.
#[derive(Debug)]
pub struct Arch {
    /// Class name in `architectures`.
    pub class: &'static str,
    /// `model_type`, which decides when `architectures` is absent.
    pub model_type: &'static str,
    /// Default number of key/value heads; `None` = as many as query heads.
    n_kv_heads: Option<usize>,
    /// Default width of a head; `None` = the hidden width divided by the number of heads.
    head_dim: Option<usize>,
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
    n_kv_heads: None,
    head_dim: None,
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
    qwen::QWEN2,
    qwen::QWEN3,
    qwen::QWEN3_MOE,
    gemma::GEMMA2,
    gemma::GEMMA3,
    phi3::PHI3,
];

impl Arch {
    /// Finds the family of a configuration.
    ///
    /// # Errors
    /// The architecture is unknown.
    pub fn of(config: &Fields) -> Result<&'static Arch> {
        for arch in ARCHS {
            if (arch.claims)(config) || arch.is_named(config)? {
                return Ok(arch);
            }
        }
        let known = ARCHS.iter().map(|a| a.class).collect::<Vec<_>>().join(", ");
        let key = if config.get("architectures").is_some() { "architectures" } else { "model_type" };
        Err(config.unsupported(key, &format!("expected one of {known}")))
    }

    /// Finds the family of a class, such as `LlamaForCausalLM`.
    pub fn of_class(class: &str) -> Option<&'static Arch> {
        ARCHS.iter().find(|arch| arch.class == class)
    }

    /// Returns true when `architectures` lists the class, or is absent and `model_type` is the family's.
    fn is_named(&self, config: &Fields) -> Result<bool> {
        match config.words_opt("architectures")? {
            Some(classes) if !classes.is_empty() => Ok(classes.contains(&self.class)),
            _ => Ok(config.word_opt("model_type")? == Some(self.model_type)),
        }
    }

    /// Reads and checks the configuration; `generation` is generation_config.json, whose end tokens are added.
    pub fn model_config(&self, config: &Fields, generation: Option<&Map<String, Value>>) -> Result<ModelConfig> {
        let mut model = family::decoder(self, config)?;
        (self.adjust)(config, &mut model)?;
        let sources = [Some(*config), generation.map(Fields::new)];
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
mod tests;
