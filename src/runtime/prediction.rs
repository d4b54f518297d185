//! Multi-token prediction: layers that predict the token after the next from what the model computed.

use super::engine::Engine;
use super::sequence::{Feed, Output, Sequence};
use crate::error::{Error, Result};
use crate::iebin::IebinReader;
use crate::model_config::{ModelConfig, RopeScaling};

/// A layer of multi-token prediction, with keys and values of its own.
///
/// It reads each token with what the model computed for the token before it, the output of the final norm, and predicts
/// the token that follows both. A further token is predicted from the layer's own output in place of the model's:
/// [`Predictor::step`] returns it. Positions count from the second token of a text, which is the first that the layer
/// reads; rotations depend on distances only.
#[derive(Debug)]
pub struct Predictor {
    engine: Engine,
}

impl Engine {
    /// Opens the layers of multi-token prediction that the pack of this engine has. They run on the CPU, with the
    /// threads, the embedding and the output matrix of this engine.
    ///
    /// # Errors
    /// The pack has no such layers, lacks tensors of them, or has a rotation that depends on more than distances.
    pub fn predictors(&self, reader: &IebinReader) -> Result<Vec<Predictor>> {
        let config = self.config();
        if config.prediction_layers == 0 {
            let found = "found a pack without layers of multi-token prediction that are computed";
            return Err(Error::usage(found).help("`iec pack --with-mtp` keeps those of a checkpoint that has them"));
        }
        if config.attention.position_scale.is_some() || matches!(config.rope.scaling, RopeScaling::LongRope { .. }) {
            return Err(Error::unsupported(
                "found multi-token prediction in a model whose queries or rotations depend on positions",
            ));
        }
        let layers = 0..config.prediction_layers;
        layers.map(|n| Ok(Predictor { engine: Engine::new(self.model.open_prediction(reader, n)?) })).collect()
    }
}

impl Predictor {
    /// Describes the layer as a model of one layer.
    pub fn config(&self) -> &ModelConfig {
        self.engine.config()
    }

    /// Creates an empty sequence for this layer.
    ///
    /// # Errors
    /// The keys and values of one page do not fit the address space.
    pub fn new_sequence(&self) -> Result<Sequence> {
        self.engine.new_sequence()
    }

    /// Computes one step: reads the tokens of all feeds, `previous` being what was computed for the token before each
    /// of them, `(tokens, hidden)`. Appends the logits that the feeds want, and the output for every token.
    ///
    /// # Errors
    /// `previous` has another length, or the same as for [`Engine::step`].
    pub fn step(
        &mut self,
        feeds: &mut [Feed<'_>],
        previous: &[f32],
        [logits, hidden]: [&mut Vec<f32>; 2],
    ) -> Result<()> {
        let tokens: usize = feeds.iter().map(|feed| feed.tokens.len()).sum();
        let expected = tokens.saturating_mul(self.engine.config().hidden);
        if previous.len() != expected {
            let found = format!("found {} numbers for {tokens} tokens, expected {expected}", previous.len());
            return Err(Error::usage(found));
        }
        self.engine.previous.clear();
        self.engine.previous.extend_from_slice(previous);
        self.engine.step(feeds, Output::Hidden { logits, hidden })
    }
}
