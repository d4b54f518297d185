//! How does a family's `config.json` become a [`ModelConfig`], and its tensor names canonical names?
//!
//! A family is one file and one row in [`ARCHS`]: a function that reads the configuration, and one that says from which
//! source tensor a canonical tensor is viewed. Which tensors there must be follows from the [`ModelConfig`] alone
//! ([`expected_tensors`]).

mod expected;
mod family;
mod fields;
mod gemma;
mod gpt_oss;
mod llama;
mod mistral;
mod mixtral;
mod phi3;
mod qwen;
mod rope;
mod view;

pub use expected::{ExpectedTensor, expected_tensors};
pub use fields::Fields;
pub use view::View;

use crate::error::Result;
use crate::model_config::ModelConfig;
use serde_json::{Map, Value};

/// One model family.
#[derive(Debug)]
pub struct Arch {
    /// Class name in `architectures`.
    pub class: &'static str,
    /// Does this configuration belong to the family?
    claims: fn(&Fields) -> Result<bool>,
    /// Reads the configuration.
    config: fn(&Fields) -> Result<ModelConfig>,
    /// Where a canonical tensor may lie in the source, best guess first.
    views: fn(&ModelConfig, &ExpectedTensor) -> Vec<View>,
}

/// The families this program converts.
pub const ARCHS: &[Arch] = &[
    llama::ARCH,
    gpt_oss::ARCH,
    mistral::ARCH,
    mixtral::ARCH,
    qwen::QWEN2,
    qwen::QWEN3,
    qwen::QWEN3_MOE,
    gemma::GEMMA2,
    gemma::GEMMA3,
    phi3::ARCH,
];

impl Arch {
    /// Finds the family of a configuration.
    ///
    /// # Errors
    /// The architecture is unknown.
    pub fn of(config: &Fields) -> Result<&'static Arch> {
        for arch in ARCHS {
            if (arch.claims)(config)? {
                return Ok(arch);
            }
        }
        let known = ARCHS.iter().map(|a| a.class).collect::<Vec<_>>().join(", ");
        let key = if config.get("architectures").is_some() { "architectures" } else { "model_type" };
        Err(config.unsupported(key, &format!("expected one of {known}")))
    }

    /// Reads and checks the configuration; `generation` is generation_config.json, whose end tokens count too.
    pub fn model_config(&self, config: &Fields, generation: Option<&Map<String, Value>>) -> Result<ModelConfig> {
        let mut model = (self.config)(config)?;
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

    /// Where a canonical tensor may lie in the source, best guess first.
    pub fn views(&self, model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
        (self.views)(model, tensor)
    }
}

/// A source tensor that carries no weights: buffers that older versions of transformers saved.
pub fn is_ignorable(source_name: &str) -> bool {
    source_name.ends_with("rotary_emb.inv_freq")
}

/// True when `architectures` lists `class`, or is absent and `model_type` says it.
fn named(config: &Fields, class: &str, model_type: &str) -> Result<bool> {
    match config.words_opt("architectures")? {
        Some(classes) if !classes.is_empty() => Ok(classes.contains(&class)),
        _ => Ok(config.word_opt("model_type")? == Some(model_type)),
    }
}

/// The view of a tensor that has the same name and shape in the source.
fn whole(source: impl Into<String>, of: usize) -> View {
    View::Rows { source: source.into(), first: 0, of }
}

/// Splits `model.layers.N.rest` into N and rest.
fn layer_part(canonical: &str) -> Option<(&str, &str)> {
    canonical.strip_prefix("model.layers.")?.split_once('.')
}

#[cfg(test)]
mod tests;
