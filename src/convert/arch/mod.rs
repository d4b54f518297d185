//! How does a family's `config.json` become a [`ModelConfig`], and its tensor names canonical names?
//!
//! A family is one row of [`ARCHS`]: defaults, and functions for what it does differently from the plain decoder, with
//! the source tensors from which a canonical tensor is viewed. Which tensors there must be follows from the
//! [`ModelConfig`] alone ([`expected_tensors`]).

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

/// One model family: what `transformers` assumes where a configuration says nothing, and what the family does
/// differently from the plain decoder.
#[derive(Debug)]
pub struct Arch {
    /// Class name in `architectures`.
    pub class: &'static str,
    /// `model_type`, which counts where `architectures` is absent.
    pub model_type: &'static str,
    /// Key/value heads; `None` = as many as query heads.
    n_kv_heads: Option<usize>,
    /// Width of a head; `None` = the hidden width divided among the heads.
    head_dim: Option<usize>,
    /// Length of the context.
    max_context: usize,
    /// Epsilon of the norms.
    norm_eps: f64,
    /// Base of the rotary frequencies.
    theta: f64,
    /// Is the output matrix the embedding matrix?
    tied: bool,
    /// Do the projections of attention have biases?
    attention_bias: bool,
    /// The `quant_method` whose tensors are read.
    quantization: Option<&'static str>,
    /// Fields of [`family::FOREIGN`], or [`family::PARTIAL`], that the family reads itself.
    honours: &'static [&'static str],
    /// Does a configuration without class and type belong to the family?
    claims: fn(&Fields) -> bool,
    /// Reads the feed-forward part.
    mlp: fn(&Arch, &Fields) -> Result<Mlp>,
    /// Reads the window of each of so many layers.
    windows: fn(&Fields, usize) -> Result<Vec<Option<usize>>>,
    /// Changes what else the family does differently.
    adjust: fn(&Fields, &mut ModelConfig) -> Result<()>,
    /// Where a canonical tensor may lie in the source, best guess first.
    views: fn(&ModelConfig, &ExpectedTensor) -> Vec<View>,
}

/// The plain decoder, which other families are written as differences from: RMSNorm, rotary embedding, grouped-query
/// attention over all positions and a gated MLP with SiLU, no biases, tensors under their canonical names.
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

/// The families this program converts.
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

    /// True when `architectures` lists the class, or is absent and `model_type` is the family's.
    fn is_named(&self, config: &Fields) -> Result<bool> {
        match config.words_opt("architectures")? {
            Some(classes) if !classes.is_empty() => Ok(classes.contains(&self.class)),
            _ => Ok(config.word_opt("model_type")? == Some(self.model_type)),
        }
    }

    /// Reads and checks the configuration; `generation` is generation_config.json, whose end tokens count too.
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

    /// Where a canonical tensor may lie in the source, best guess first.
    pub fn views(&self, model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
        (self.views)(model, tensor)
    }
}

/// A source tensor that carries no weights: buffers that older versions of transformers saved.
pub fn is_ignorable(source_name: &str) -> bool {
    source_name.ends_with("rotary_emb.inv_freq")
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
