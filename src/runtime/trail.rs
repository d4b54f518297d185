//! Reads a text with models that differ in one layer: what comes before that layer is computed once for all of them.

use super::attention::Run;
use super::engine::{Engine, Feed};
use super::forward::Chunk;
use super::precision::Precision;
use crate::error::Result;

/// The residual stream of one text in front of each layer, and behind the last one that of the rows whose logits are wanted.
#[derive(Debug, Default)]
pub struct Trail {
    precision: Option<Precision>,
    streams: Vec<Vec<f32>>,
}

impl Engine {
    /// The logits `(tokens - first, vocab)` behind the tokens from number `first` on, of a text of its own: the same bits as
    /// [`Engine::forward`] gives. The embedding and all layers before `layer` (their number for the output matrix) must be those of
    /// the models that `trail` was with before. If it reached so far, in the same precision, it is followed; otherwise it begins anew.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn logits_along(&mut self, tokens: &[u32], first: usize, layer: usize, trail: &mut Trail) -> Result<Vec<f32>> {
        let mut sequence = self.new_sequence()?;
        let mut feeds = [Feed { sequence: &mut sequence, tokens }];
        self.check(&feeds[0])?;
        self.cross_border(&mut feeds, &mut Vec::new())?;
        sequence.cache.grow(tokens.len())?;
        let precision = Some(self.precision());
        let (model, s) = (&self.model, &mut self.scratch);
        let runs = [Run { sequence: 0, first: 0, tokens: tokens.len(), position: 0 }];
        let wanted: Vec<usize> = (first..tokens.len()).collect();
        let (chunk, sequences) = (Chunk { tokens, runs: &runs, wanted: &wanted }, &mut [&mut sequence]);
        let mut logits = vec![0.0; wanted.len() * model.config.vocab];
        model.start(&chunk, sequences, s)?;
        let known = trail.streams.get(layer).filter(|_| trail.precision == precision);
        let from = known.map_or(0, |_| layer);
        match known {
            Some(stream) => s.x.clone_from(stream),
            None => *trail = Trail { precision, streams: Vec::new() },
        }
        for index in from..model.config.n_layers {
            trail.note(index, layer, &s.x);
            model.layers_of(index..index + 1, &chunk, sequences, s)?;
        }
        trail.note(model.config.n_layers, layer, &s.x);
        model.logits(s, &mut logits)?;
        Ok(logits)
    }
}

impl Trail {
    /// Keeps what comes in front of a layer, up to `last`, unless it is known.
    fn note(&mut self, index: usize, last: usize, stream: &[f32]) {
        if index <= last && index == self.streams.len() {
            self.streams.push(stream.to_vec());
        }
    }
}
