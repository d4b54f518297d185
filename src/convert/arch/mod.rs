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
mod lfm;
mod llama;
mod minimax;
mod muse;
mod nemotron;
mod olmo;
mod phi3;
mod qwen;
mod qwen_next;
mod rope;
mod row;
mod smollm;
mod view;
mod wrapper;

pub use expected::{ExpectedTensor, expected_tensors};
pub use fields::Fields;
pub use row::{Arch, TIED};
pub use view::View;
pub use wrapper::{LeftOut, Naming, PartKind, tower};

use crate::error::Result;
use crate::model_config::ModelConfig;
use serde_json::{Map, Value};
use wrapper::text_fields;

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
    lfm::LFM2,
    lfm::LFM2_MOE,
    lfm::LFM3,
    qwen_next::QWEN3_5,
    qwen_next::QWEN3_5_MOE,
    qwen_next::QWEN3_NEXT,
    granite::GRANITE_HYBRID,
    nemotron::NEMOTRON_H,
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

    /// Reads and checks the configuration; `generation` is generation_config.json, whose end tokens are added.
    pub fn model_config(&self, config: &Fields, generation: Option<&Map<String, Value>>) -> Result<ModelConfig> {
        let text = text_fields(config)?;
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
}

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

#[cfg(test)]
mod newer_tests;
#[cfg(test)]
mod tests;
