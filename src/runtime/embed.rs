//! Input of a step: the embeddings of its tokens and the rotary angles of their positions.

use super::adapters::Group;
use super::device::Run;
use super::ops::UnitNorm;
use super::rope::Rotary;
use super::weights::Weights;
use crate::error::Result;
use crate::model_config::ModelConfig;
use crate::simd::Level;
use std::sync::Arc;

/// Computes the input of each step in buffers that are reused. `n` is the number of rows of a step.
#[derive(Debug)]
pub(super) struct Embedder {
    weights: Arc<Weights>,
    /// Factor of every embedding.
    scale: f32,
    /// Epsilon of the norm of embeddings, if there is one.
    norm_eps: Option<f32>,
    hidden: usize,
    rotaries: Vec<Rotary>,
    /// The residual stream: `(n, hidden)`.
    pub x: Vec<f32>,
    /// Embeddings of the further inputs of all layers: `(n, layers * width)`; empty if there are none.
    pub further: Vec<f32>,
    further_width: usize,
    /// Factor of these embeddings.
    further_scale: f32,
    /// Cosines and sines of each row: one table `(n, rotary_dim)` per kind of rotation.
    pub angles: Vec<Vec<f32>>,
}

impl Embedder {
    /// Prepares the embedding and the rotations of a model.
    pub fn new(config: &ModelConfig, weights: &Arc<Weights>) -> Embedder {
        let head_dim = |kind| config.rotated_head_dim(kind);
        let rotaries: Vec<Rotary> =
            config.ropes().enumerate().map(|(kind, rope)| Rotary::new(rope, head_dim(kind))).collect();
        Embedder {
            weights: weights.clone(),
            scale: config.embedding_scale,
            norm_eps: config.embedding_norm.then_some(config.norm_eps),
            hidden: config.hidden,
            x: Vec::new(),
            further: Vec::new(),
            further_width: config.per_layer_input.map_or(0, |input| input.width * config.n_layers),
            further_scale: config.per_layer_input.map_or(1.0, |input| (input.width as f32).sqrt()),
            angles: vec![Vec::new(); rotaries.len()],
            rotaries,
        }
    }

    /// Writes the embeddings of the tokens to `x`, changed by the adapters of their rows.
    ///
    /// # Errors
    /// A row cannot be read.
    pub fn embed(&mut self, tokens: &[u32], groups: &[Group]) -> Result<()> {
        self.x.resize(tokens.len() * self.hidden, 0.0);
        for (token, row) in tokens.iter().zip(self.x.chunks_exact_mut(self.hidden)) {
            self.weights.embedding.read_row(*token as usize, row)?;
        }
        for group in groups {
            let rows = &mut self.x[group.rows.start * self.hidden..group.rows.end * self.hidden];
            for (token, row) in tokens[group.rows.clone()].iter().zip(rows.chunks_exact_mut(self.hidden)) {
                group.set.embed(*token as usize, row);
            }
        }
        self.x.iter_mut().for_each(|x| *x *= self.scale);
        if let Some(weights) = &self.weights.per_layer {
            self.further.resize(tokens.len() * self.further_width, 0.0);
            for (token, row) in tokens.iter().zip(self.further.chunks_exact_mut(self.further_width)) {
                weights.embedding.read_row(*token as usize, row)?;
            }
            self.further.iter_mut().for_each(|x| *x *= self.further_scale);
        }
        if let Some(eps) = self.norm_eps {
            self.x.chunks_exact_mut(self.hidden).for_each(|x| Level::detect().run(UnitNorm { x, eps }));
        }
        Ok(())
    }

    /// Writes the cosines and sines of each row's position to `angles`. `is_long` reports whether a sequence uses the
    /// LongRoPE factors for texts beyond the original context length.
    pub fn rotate(&mut self, runs: &[Run], is_long: impl Fn(usize) -> bool) {
        let rows: usize = runs.iter().map(|run| run.tokens).sum();
        for (rotary, angles) in self.rotaries.iter().zip(&mut self.angles) {
            angles.resize(rows * rotary.dim(), 0.0);
            let mut rows = angles.chunks_exact_mut(rotary.dim());
            for run in runs {
                let long = is_long(run.sequence);
                for (position, row) in (run.position..run.position + run.tokens).zip(&mut rows) {
                    rotary.angles(position, long, row);
                }
            }
        }
    }
}
