//! Multi-token prediction: layers that predict the token after the next from what the model computed.

use super::engine::Engine;
use super::sequence::{Feed, Output, Sequence, Want};
use super::shortlist::{Shortlist, largest};
use super::weights::Weight;
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
    /// Rows of the output matrix that drafts are chosen from; `None` = all of them.
    shortlist: Option<Shortlist>,
}

impl Engine {
    /// Returns true if [`Engine::predictors`] can open layers of multi-token prediction, and these can follow a text.
    pub fn predicts(&self) -> bool {
        self.config().prediction_layers > 0 && self.depends_on_distances_only() && self.finds_hidden()
    }

    fn depends_on_distances_only(&self) -> bool {
        let config = self.config();
        config.attention.position_scale.is_none() && !matches!(config.rope.scaling, RopeScaling::LongRope { .. })
    }

    /// Opens the layers of multi-token prediction that the pack of this engine has. They run on the CPU, with the
    /// threads, the embedding and the output matrix of this engine.
    ///
    /// # Errors
    /// The pack has no such layers, lacks tensors of them, or has a rotation that depends on more than distances; or
    /// the last layers of this engine are on a GPU.
    pub fn predictors(&self, reader: &IebinReader) -> Result<Vec<Predictor>> {
        let config = self.config();
        if config.prediction_layers == 0 {
            let found = "found a pack without layers of multi-token prediction that are computed";
            return Err(Error::usage(found).help("`iec pack --with-mtp` keeps those of a checkpoint that has them"));
        }
        self.check_hidden()?;
        if !self.depends_on_distances_only() {
            return Err(Error::unsupported(
                "found multi-token prediction in a model whose queries or rotations depend on positions",
            ));
        }
        let layers = 0..config.prediction_layers;
        layers.map(|n| Ok(Predictor::new(Engine::new(self.model.open_prediction(reader, n)?)))).collect()
    }
}

impl Predictor {
    fn new(engine: Engine) -> Predictor {
        Predictor { engine, shortlist: None }
    }

    /// Prepares [`Predictor::draft`].
    ///
    /// # Errors
    /// There is no memory for the rows of the output matrix that drafts are chosen from.
    pub(crate) fn for_drafts(mut self) -> Result<Predictor> {
        if let Weight::Here(matrix) = &self.engine.model.weights.lm_head {
            self.shortlist = Shortlist::new(matrix)?;
        }
        Ok(self)
    }

    /// Counts tokens of a text, whose tokens are likely to be drafted.
    ///
    /// # Errors
    /// There is no memory for other rows of the output matrix.
    pub(crate) fn count(&mut self, tokens: &[u32]) -> Result<()> {
        self.shortlist.as_mut().map_or(Ok(()), |list| list.count(tokens))
    }

    /// Computes one step like [`Predictor::step`], and returns the most likely next token of each feed, of those that
    /// texts use.
    ///
    /// # Errors
    /// The same as for [`Predictor::step`].
    pub(crate) fn draft(
        &mut self,
        feeds: &mut [Feed<'_>],
        previous: &[f32],
        hidden: &mut Vec<f32>,
    ) -> Result<Vec<u32>> {
        let (vocab, width, before) = (self.config().vocab, self.config().hidden, hidden.len());
        let mut logits = Vec::new();
        let want = if self.shortlist.is_some() { Want::Nothing } else { Want::Last };
        feeds.iter_mut().for_each(|feed| feed.want = want);
        self.step(feeds, previous, [&mut logits, hidden])?;
        let Some(list) = &mut self.shortlist else {
            return Ok(logits.chunks_exact(vocab).map(|row| largest(row) as u32).collect());
        };
        let (mut outputs, mut end) = (Vec::with_capacity(feeds.len() * width), before);
        for feed in feeds {
            end += feed.tokens.len() * width;
            outputs.extend_from_slice(&hidden[end - width..end]);
        }
        let model = &self.engine.model;
        Ok(list.best(&model.cpu, model.precision.arithmetic(), &outputs))
    }

    /// Describes the layer as a model of one layer.
    pub fn config(&self) -> &ModelConfig {
        self.engine.config()
    }

    /// Returns the length of the longest sequence in tokens.
    pub fn context(&self) -> usize {
        self.engine.context()
    }

    /// Returns the largest number of tokens that [`Predictor::step`] takes.
    pub fn step_rows(&self) -> usize {
        self.engine.step_rows()
    }

    /// Returns the number of bytes of weights that a draft token reads.
    pub(crate) fn bytes_per_draft(&self) -> u64 {
        let all = self.engine.weight_bytes_per_token();
        match (&self.shortlist, &self.engine.model.weights.lm_head) {
            (Some(list), Weight::Here(whole)) => all.saturating_sub((whole.data.len() - list.bytes()) as u64),
            _ => all,
        }
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
