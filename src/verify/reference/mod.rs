//! Reference implementation: the forward pass of `transformers`, reimplemented with candle's tensors.
//!
//! The runtime is verified against this reference, so the two share no code: the reference has its own parser of
//! `config.json` (`config`), its own readers of weights (`weights`), its own MXFP4 decoder and position rotation, and
//! it multiplies with candle's `gemm`. It is written for review next to `modeling_*.py`, not for speed. Only the names
//! and layouts of adapters are read by the code that reads them for the runtime; their arithmetic (`adapters`) is its
//! own. The values of matrices that another quantizer wrote come from the caller.
//!
//! Texts are known in advance: to verify a text that the model under test generated, the reference computes at each of
//! its positions which token comes next. All texts therefore pass through a layer together, and the weights of a layer
//! are widened once and then released. So only one layer at a time is in memory.

mod adapters;
mod attention;
mod config;
mod conv;
mod delta;
mod experts;
mod families;
mod family;
mod fields;
mod hybrids;
mod latent;
mod layer;
mod legacy_torch;
mod linear;
mod mamba;
mod mlp;
mod norm;
mod per_layer;
mod rope;
mod routing;
mod rules;
mod weights;

use crate::adapter::Adapter;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::strict_json;
use crate::verify::dtype::RefDtype;
use adapters::{ALL, Adapters, Embedding};
use candle_core::{DType, Tensor};
use config::Config;
use layer::{Layer, TextState};
use linear::{Linear, WeightSource};
use norm::Norm;
use per_layer::PerLayerInputs;
use std::collections::HashMap;
use std::path::Path;
use weights::Weights;

pub use weights::DecodedMatrices;

/// Text with the positions whose logits are requested: those from `from` on.
#[derive(Debug, Clone)]
pub struct ScoredText {
    /// Tokens of the text.
    pub ids: Vec<u32>,
    /// First position whose logits are requested.
    pub from: usize,
}

/// Opened checkpoint.
#[derive(Debug)]
pub struct Reference {
    config: Config,
    weights: Weights,
    adapters: Adapters,
    dtype: RefDtype,
}

/// A text, or its beginning, with its state after the layers computed so far.
struct Lane {
    /// Index of the text.
    text: usize,
    /// Positions whose logits are taken from this lane.
    wanted: std::ops::Range<usize>,
    state: TextState,
}

impl Reference {
    /// Opens a checkpoint of floats in the layout of Hugging Face.
    ///
    /// # Errors
    /// Same as [`Reference::open_decoded`].
    pub fn open(dir: &Path, dtype: RefDtype) -> Result<Reference> {
        Self::open_decoded(dir, dtype, None)
    }

    /// Opens a checkpoint; `decoded` has the matrices that another quantizer wrote.
    ///
    /// # Errors
    /// `config.json` or weights are missing or malformed, the model family is not supported, or weights are quantized
    /// and there is no `decoded`.
    pub fn open_decoded(dir: &Path, dtype: RefDtype, decoded: Option<Box<dyn DecodedMatrices>>) -> Result<Reference> {
        let path = dir.join("config.json");
        let text = files::read(&path)?;
        let json = serde_json::from_slice(&strict_json::from_python(&text))
            .map_err(|e| Error::corrupt(format!("not JSON: {e}")))
            .at(&path)?;
        if decoded.is_none() {
            refuse_quantization(&json).at(&path)?;
        }
        let mut config = Config::read(&json).at(&path)?;
        let weights = Weights::open(dir, decoded)?;
        // An output matrix that is stored beside the embedding is used as it is, whatever the configuration says: if
        // both are equal, it makes no difference. `pack` compares them instead.
        let has_own = weights.has("lm_head.weight") && weights.has("model.embed_tokens.weight");
        config.tied = Some(config.tied != Some(false) && !has_own);
        Ok(Reference { config, weights, adapters: Adapters::default(), dtype })
    }

    /// Computes the model with adapters, each with its factor; all are added.
    #[must_use]
    pub fn with_adapters(self, adapters: Vec<(Adapter, f32)>) -> Reference {
        Reference { adapters: Adapters::new(adapters), ..self }
    }

    /// Returns the number of logits per position.
    pub fn vocab(&self) -> usize {
        self.config.vocab
    }

    /// Returns the number of layers, which is the number of `progress` calls in [`Reference::logits`].
    pub fn layers(&self) -> usize {
        self.config.layers.len()
    }

    /// Calls `each` with the index of a text and its requested logits `(positions, vocab)`, text by text, and
    /// `progress` after each layer.
    ///
    /// # Errors
    /// A tensor is missing or has another shape, a token is outside the vocabulary, or `each` fails.
    pub fn logits(
        &self,
        texts: &[ScoredText],
        mut progress: impl FnMut() -> Result<()>,
        mut each: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let mut lanes = self.embed(texts)?;
        for index in 0..self.layers() {
            let Reference { config, weights, adapters, dtype } = self;
            let layer = Layer::load(WeightSource { config, weights, adapters, index, dtype: *dtype })?;
            for lane in &mut lanes {
                layer.forward(&mut lane.state)?;
            }
            progress()?;
        }
        let norms = self.config.norms;
        let norm = Norm::new(self.weights.get(self.final_norm(), self.dtype)?, norms.last, norms.eps);
        let head = match self.is_tied() {
            true => self.table()?,
            false => self.weights.get("lm_head.weight", self.dtype)?,
        };
        let head = self.adapters.change(Linear::new(head, None), "lm_head.weight", ALL)?;
        for lanes in lanes.chunk_by(|a, b| a.text == b.text) {
            let mut logits = Vec::new();
            for lane in lanes {
                logits.extend(self.head(
                    &lane.state.x.narrow(0, lane.wanted.start, lane.wanted.len())?,
                    &norm,
                    &head,
                )?);
            }
            each(lanes[0].text, &logits)?;
        }
        Ok(())
    }

    /// Returns the name of the norm before the output matrix.
    fn final_norm(&self) -> &'static str {
        const OF_LFM: &str = "model.embedding_norm.weight";
        if self.weights.has(OF_LFM) { OF_LFM } else { "model.norm.weight" }
    }

    fn is_tied(&self) -> bool {
        self.config.tied == Some(true)
    }

    /// Returns the embedding table; a tied matrix may be stored under the name of the output matrix.
    fn table(&self) -> Result<Tensor> {
        let name = "model.embed_tokens.weight";
        let other = self.is_tied() && !self.weights.has(name);
        self.weights.get(if other { "lm_head.weight" } else { name }, self.dtype)
    }

    fn head(&self, x: &Tensor, norm: &Norm, head: &Linear) -> candle_core::Result<Vec<f32>> {
        let x = self.dtype.round(norm.forward(x)?)?;
        let mut logits = self.dtype.round(head.forward(&x)?)?;
        if self.config.factors.logit != 1.0 {
            logits = self.dtype.round((logits * self.config.factors.logit)?)?;
        }
        if let Some(cap) = self.config.logit_cap {
            logits = ((logits / cap)?.tanh()? * cap)?;
        }
        logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1()
    }

    /// Creates a lane for each text, or two if the requested positions cross LongRoPE's length limit: every step of a
    /// generation computes the whole text so far with the factors for its length.
    fn embed(&self, texts: &[ScoredText]) -> Result<Vec<Lane>> {
        let table = self.adapters.embedding(self.table()?)?;
        let inputs = PerLayerInputs::load(&self.config, &self.weights, &self.adapters, self.dtype)?;
        let mut lanes = Vec::new();
        for (index, text) in texts.iter().enumerate() {
            if let Some(id) = text.ids.iter().find(|id| **id as usize >= self.config.vocab) {
                let found = format!("token {id} is outside the checkpoint's vocabulary of {}", self.config.vocab);
                return Err(Error::corrupt(found)
                    .help("name the checkpoint that the pack or the trace was made from with --hf-dir"));
            }
            let (from, end) = (text.from, text.ids.len());
            // The logits after position p are those of a text of p + 1 tokens.
            let border = self.config.long_border.unwrap_or(usize::MAX).clamp(from, end);
            for (wanted, long) in [(from..border, false), (border..end, true)] {
                if !wanted.is_empty() {
                    let ids = &text.ids[..wanted.end];
                    let x = self.embedded(&table, ids)?;
                    let per_layer = inputs.as_ref().map(|inputs| inputs.of(ids, &x)).transpose()?;
                    let state = TextState { x, long, kept: HashMap::new(), per_layer };
                    lanes.push(Lane { text: index, wanted, state });
                }
            }
        }
        Ok(lanes)
    }

    fn embedded(&self, table: &Embedding, ids: &[u32]) -> candle_core::Result<Tensor> {
        let x = table.of(ids)?;
        let scale = self.dtype.round_factor(self.config.factors.embedding);
        let x = self.dtype.round((x * scale)?)?;
        match self.config.norms.embeddings {
            true => self.dtype.round(Norm::unit(self.config.norms.eps).forward(&x)?),
            false => Ok(x),
        }
    }
}

/// Converts errors of candle, such as those for tensors of wrong shapes, and keeps the first line of their text.
impl From<candle_core::Error> for Error {
    fn from(e: candle_core::Error) -> Error {
        let text = e.to_string();
        Error::unsupported(format!("the reference cannot compute this: {}", text.lines().next().unwrap_or_default()))
    }
}

/// Refuses a checkpoint whose matrices are in codes, other than the experts of gpt-oss, which the reference decodes.
fn refuse_quantization(json: &serde_json::Value) -> Result<()> {
    let settings = ["quantization_config", "quantization"].map(|key| &json[key]);
    let Some(found) = settings.into_iter().find(|found| found.is_object() && found["quant_method"] != "mxfp4") else {
        return Ok(());
    };
    let method: String = found["quant_method"].as_str().unwrap_or("no method").chars().take(60).collect();
    Err(Error::unsupported(format!("found quantized weights (`{method}`), expected floats"))
        .tensor("quantization_config.quant_method")
        .help("use a checkpoint of floats"))
}
