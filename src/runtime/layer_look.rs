//! Activations of one layer while it reads one text, from a given residual stream at its input: what calibration along
//! a quantized model compares.

use super::engine::Engine;
use super::observe::Observer;
use crate::calibration::Site;
use crate::error::Result;

/// Input rows of a matrix: its number (0, or that of an expert) and the rows one after the other.
pub type InputRows = (usize, Vec<f32>);

/// Activations of one layer and one text.
#[derive(Debug, Default)]
pub struct LayerLook {
    layer: usize,
    wanted: Option<Site>,
    /// Residual stream at the input of the layer, `(tokens, hidden)`.
    pub input: Vec<f32>,
    /// Residual stream after each block of the layer, `(tokens, hidden)`.
    pub blocks: Vec<Vec<f32>>,
    /// Sites of the layer in the order of the computation, each with the number of its block.
    pub sites: Vec<(Site, usize)>,
    /// Inputs of the wanted site.
    pub rows: Vec<InputRows>,
}

impl Observer for LayerLook {
    fn stream(&mut self, layer: usize, x: &[f32]) {
        if layer == self.layer {
            self.input = x.to_vec();
        }
    }

    fn block(&mut self, layer: usize, _: usize, x: &[f32]) {
        if layer == self.layer {
            self.blocks.push(x.to_vec());
        }
    }

    fn inputs(&mut self, site: Site, matrix: usize, rows: &mut dyn ExactSizeIterator<Item = &'_ [f32]>) {
        if site.layer == self.layer && self.sites.iter().all(|(other, _)| *other != site) {
            self.sites.push((site, self.blocks.len()));
        }
        if self.wanted == Some(site) {
            self.rows.push((matrix, rows.flatten().copied().collect()));
        }
    }

    fn end(&self) -> usize {
        self.layer + 1
    }

    fn is_large(&self) -> bool {
        false
    }
}

impl LayerLook {
    /// Computes a layer from the residual stream at its input, and keeps the inputs of the site `wanted`. With the
    /// number of layers as `layer`, computes the final norm.
    ///
    /// # Errors
    /// The same as for [`Engine::forward`]; also if layers are on a GPU.
    pub fn at(
        engine: &mut Engine,
        tokens: &[u32],
        layer: usize,
        input: Vec<f32>,
        wanted: Option<Site>,
    ) -> Result<LayerLook> {
        let mut look = LayerLook { layer, wanted, ..LayerLook::default() };
        engine.observe_from(tokens, Some((layer, input)), &mut look)?;
        Ok(look)
    }

    /// Returns the residual stream at the input of the first layer.
    ///
    /// # Errors
    /// The same as for [`LayerLook::at`].
    pub fn embeddings(engine: &mut Engine, tokens: &[u32]) -> Result<Vec<f32>> {
        let mut look = Beginning::default();
        engine.observe_from(tokens, None, &mut look)?;
        Ok(look.0)
    }
}

/// Residual stream at the input of the first layer.
#[derive(Debug, Default)]
struct Beginning(Vec<f32>);

impl Observer for Beginning {
    fn stream(&mut self, _: usize, x: &[f32]) {
        self.0 = x.to_vec();
    }

    fn inputs(&mut self, _: Site, _: usize, _: &mut dyn ExactSizeIterator<Item = &'_ [f32]>) {}

    fn end(&self) -> usize {
        0
    }

    fn is_large(&self) -> bool {
        false
    }
}
