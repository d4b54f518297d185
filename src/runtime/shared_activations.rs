//! Shares activations between models that read the same text and differ in one layer only: the layers before it are
//! computed once.

use super::engine::Engine;
use super::observe::Observer;
use super::precision::Precision;
use crate::calibration::Site;
use crate::error::Result;

/// The residual stream of one text at the input of each layer, and the output of the last layer, which has only the
/// rows whose logits are wanted.
#[derive(Debug, Default)]
pub struct PrefixActivations {
    precision: Option<Precision>,
    /// By layer: the residual stream at its input, `(tokens, hidden)`. The index `n_layers` stands for the output of
    /// the last layer.
    streams: Vec<Vec<f32>>,
    /// The last layer whose input is kept.
    last: usize,
}

impl Observer for PrefixActivations {
    fn stream(&mut self, layer: usize, x: &[f32]) {
        if layer <= self.last && layer == self.streams.len() {
            self.streams.push(x.to_vec());
        }
    }

    fn inputs(&mut self, _: Site, _: usize, _: &mut dyn ExactSizeIterator<Item = &'_ [f32]>) {}

    fn end(&self) -> usize {
        usize::MAX
    }

    fn is_large(&self) -> bool {
        false
    }
}

impl Engine {
    /// Reads `tokens` as a new text and returns the logits of those from index `first` on, `(tokens - first, vocab)`,
    /// with the same bits as [`Engine::forward`]. The embedding and all layers before `layer` must equal those of the
    /// models that used `prefix` before; if `layer` is the number of layers, only the output matrix may differ. If
    /// `prefix` holds the input of `layer` in the same precision, the computation starts there; otherwise, and in models
    /// whose layers read more than the residual stream, it starts at the embedding and refills `prefix`.
    ///
    /// # Errors
    /// The same as [`Engine::forward`]; also if layers are on a GPU.
    pub fn logits_reusing(
        &mut self,
        tokens: &[u32],
        first: usize,
        layer: usize,
        prefix: &mut PrefixActivations,
    ) -> Result<Vec<f32>> {
        let precision = Some(self.precision());
        let known = prefix.streams.get(layer).filter(|_| prefix.precision == precision && self.layers_stand_alone());
        let start = known.map(|stream| (layer, stream.clone()));
        if start.is_none() {
            *prefix = PrefixActivations { precision, ..PrefixActivations::default() };
        }
        prefix.last = layer;
        self.logits_from(tokens, first, start, prefix)
    }

    /// Returns true if a layer reads only the residual stream: no tokens, and no keys and values of other layers.
    fn layers_stand_alone(&self) -> bool {
        let config = self.config();
        config.per_layer_input.is_none() && config.exceptions.iter().all(|exception| exception.kv_from.is_none())
    }
}
