//! The weights of a model, each at its place, with every shape checked.
//!
//! Matrices stay where they are, in the mapped file; only a float matrix wider than the precision asked for and codes of 5 and 6
//! bits are converted into owned memory. Those of a pack without its binary are rebuilt when they are used ([`Weight`]). Vectors (norms,
//! biases, sinks) are small and held as f32.

mod bind;
mod shape;
mod widen;

pub(super) use shape::Shape;

use super::cache::{Cache, too_small};
use super::cpu::{Arithmetic, Form, Matrix, MatrixStore, scalar};
use super::rebuilt::Rebuilt;
use super::residency::Residency;
use crate::dtype::{DType, decode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::rebuild::Keep;
use crate::iebin::{IebinReader, JSON_NAME};
use crate::interrupt;
use crate::model_config::{Mlp, ModelConfig};
use crate::progress;
use crate::scheme::{BLOCK, TILE_ROWS};
use bind::Binder;
use std::ops::Deref;
use std::sync::Arc;

/// A weight matrix, in memory or to be rebuilt.
#[derive(Debug, Clone)]
pub enum Weight {
    /// Mapped, or converted.
    Here(Matrix),
    /// Rebuilt when it is used.
    Rebuilt(Rebuilt),
}

/// A weight matrix while it is computed with.
#[derive(Debug)]
pub enum Held<'a> {
    /// It is always there.
    Here(&'a Matrix),
    /// It stays as long as it is held.
    Rebuilt(Arc<Matrix>),
}

impl Deref for Held<'_> {
    type Target = Matrix;
    fn deref(&self) -> &Matrix {
        match self {
            Held::Here(matrix) => matrix,
            Held::Rebuilt(matrix) => matrix,
        }
    }
}

impl Weight {
    /// The matrix in memory.
    ///
    /// # Errors
    /// What it is rebuilt from was changed.
    pub fn hold(&self) -> Result<Held<'_>> {
        match self {
            Weight::Here(matrix) => Ok(Held::Here(matrix)),
            Weight::Rebuilt(rebuilt) => rebuilt.matrix(false).map(Held::Rebuilt),
        }
    }

    /// What is rebuilt.
    fn as_rebuilt(&self) -> Option<&Rebuilt> {
        match self {
            Weight::Here(_) => None,
            Weight::Rebuilt(rebuilt) => Some(rebuilt),
        }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        match self {
            Weight::Here(matrix) => matrix.rows,
            Weight::Rebuilt(rebuilt) => rebuilt.rows,
        }
    }

    /// How the elements lie.
    pub fn store(&self) -> MatrixStore {
        match self {
            Weight::Here(matrix) => matrix.store,
            Weight::Rebuilt(rebuilt) => rebuilt.store,
        }
    }

    /// Bytes that a product reads.
    pub fn nbytes(&self) -> usize {
        match self {
            Weight::Here(matrix) => matrix.nbytes(),
            Weight::Rebuilt(rebuilt) => rebuilt.nbytes(),
        }
    }

    /// Writes row `row`, widened or dequantized, to `out` (one value per column).
    ///
    /// # Errors
    /// What it is rebuilt from was changed.
    pub fn read_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match self {
            Weight::Here(matrix) => read_row(matrix, row, out),
            Weight::Rebuilt(rebuilt) => {
                let (part, row) = rebuilt.around(row)?;
                read_row(&part, row, out)
            }
        }
    }
}

/// A matrix with its optional bias.
#[derive(Debug)]
pub struct Linear {
    /// `(out, in)`.
    pub matrix: Weight,
    /// `(out)`.
    pub bias: Option<Vec<f32>>,
}

/// All weights of a model.
#[derive(Debug)]
pub struct Weights {
    /// `(vocab, hidden)`.
    pub embedding: Weight,
    /// One per layer.
    pub layers: Vec<Layer>,
    /// `(hidden)`.
    pub final_norm: Vec<f32>,
    /// `(vocab, hidden)`; the embedding itself when tied.
    pub lm_head: Weight,
    /// What is rebuilt, if anything is.
    pub cache: Option<Arc<Cache>>,
}

/// The weights of one decoder layer.
#[derive(Debug)]
pub struct Layer {
    /// `(hidden)`.
    pub attention_norm: Vec<f32>,
    /// `(n_heads * head_dim, hidden)`.
    pub q: Linear,
    /// `(n_kv_heads * head_dim, hidden)`.
    pub k: Linear,
    /// `(n_kv_heads * head_dim, hidden)`.
    pub v: Linear,
    /// `(hidden, n_heads * head_dim)`.
    pub o: Linear,
    /// Norms of each query and each key head, where the model has them.
    pub head_norms: Option<HeadNorms>,
    /// `(n_heads)`: the extra logit of each head.
    pub sinks: Option<Vec<f32>>,
    /// `(hidden)`: norm of what attention adds to the residual stream.
    pub attention_post_norm: Option<Vec<f32>>,
    /// `(hidden)`.
    pub mlp_norm: Vec<f32>,
    /// The feed-forward part.
    pub mlp: MlpWeights,
    /// `(hidden)`: norm of what the feed-forward part adds to the residual stream.
    pub mlp_post_norm: Option<Vec<f32>>,
}

/// Norms within heads.
#[derive(Debug)]
pub struct HeadNorms {
    /// `(head_dim)`.
    pub q: Vec<f32>,
    /// `(head_dim)`.
    pub k: Vec<f32>,
}

/// The feed-forward weights of a layer. A model holds one per layer, so the size of the smaller variant is no concern.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub enum MlpWeights {
    /// One gated MLP.
    Dense {
        /// `(intermediate, hidden)`.
        gate: Linear,
        /// `(intermediate, hidden)`.
        up: Linear,
        /// `(hidden, intermediate)`.
        down: Linear,
    },
    /// A router and its experts.
    Moe {
        /// `(experts, hidden)`.
        router: Linear,
        /// One per expert: `(2 * intermediate, hidden)`, gate and up rows interleaved.
        gate_up: Vec<Linear>,
        /// One per expert: `(hidden, intermediate)`.
        down: Vec<Linear>,
    },
}

impl Layer {
    /// All matrices, in the order of their use.
    fn matrices(&self) -> impl Iterator<Item = &Weight> {
        let mlp: Vec<&Linear> = match &self.mlp {
            MlpWeights::Dense { gate, up, down } => vec![gate, up, down],
            MlpWeights::Moe { router, gate_up, down } => [router].into_iter().chain(gate_up).chain(down).collect(),
        };
        [&self.q, &self.k, &self.v, &self.o].into_iter().chain(mlp).map(|linear| &linear.matrix)
    }

    /// Lets go of the pages of mapped matrices, for those who need the memory more than the time to map them again.
    pub fn release(&self) {
        self.matrices().for_each(|weight| {
            if let Weight::Here(matrix) = weight {
                matrix.data.release();
            }
        });
    }
}

impl Weights {
    /// Binds every tensor the configuration calls for; float matrices are converted to `convert` if it is given. Of a pack without
    /// its binary, those that can be computed with as they are stored stay so if `in_place` says so.
    ///
    /// # Errors
    /// A tensor is missing, has the wrong shape or store, overflows the type it is converted to, or has no place in the
    /// model (running without it would be a silently different model).
    pub fn bind(reader: &IebinReader, config: &ModelConfig, convert: Option<DType>, in_place: bool) -> Result<Weights> {
        Binder::new(reader, config, convert, in_place).model(config).at(reader.dir.join(JSON_NAME))
    }

    /// All matrices, in the order of their use; a tied embedding twice.
    pub fn matrices(&self) -> impl Iterator<Item = &Weight> {
        let layers = self.layers.iter().flat_map(Layer::matrices);
        [&self.embedding].into_iter().chain(layers).chain([&self.lm_head])
    }

    /// Rebuilds what is wanted before the first token: hot weights, and everything there is room for where `residency` asks for it.
    ///
    /// # Errors
    /// A hot tensor is none of this model, there is no room, or what weights are rebuilt from was changed.
    pub(super) fn rebuild(&self, keep: &Keep, residency: Residency) -> Result<()> {
        // The embedding is read row by row.
        let rebuilt: Vec<&Rebuilt> = self.matrices().skip(1).filter_map(Weight::as_rebuilt).collect();
        let (hot, cold) = sort_by_heat(&rebuilt, keep)?;
        let bytes = |list: &[&Rebuilt]| list.iter().map(|r| r.nbytes() as u64).sum::<u64>();
        let (limit, largest) = (keep.limit.unwrap_or(u64::MAX), cold.iter().map(|r| r.nbytes() as u64).max());
        let needed = bytes(&hot) + largest.unwrap_or(0);
        if limit < needed {
            return Err(too_small(limit, needed));
        }
        let mut room = if residency == Residency::OnDemand { 0 } else { limit - bytes(&hot) };
        let warm = cold.iter().take_while(|r| {
            let rest = room.checked_sub(r.nbytes() as u64);
            room = rest.unwrap_or(0);
            rest.is_some()
        });
        let warm: Vec<&Rebuilt> = warm.copied().collect();
        let bar = progress::bytes("rebuilding", bytes(&hot) + bytes(&warm));
        for (list, hot) in [(hot, true), (warm, false)] {
            for rebuilt in list {
                interrupt::check()?;
                rebuilt.matrix(hot)?;
                bar.inc(rebuilt.nbytes() as u64);
            }
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// The forms of activations that products with these weights read.
    pub fn forms(&self, arithmetic: Arithmetic) -> Vec<Form> {
        let mut forms = vec![self.lm_head.store().form(arithmetic)];
        for layer in &self.layers {
            let form = |linear: &Linear| linear.matrix.store().form(arithmetic);
            forms.extend([&layer.q, &layer.k, &layer.v, &layer.o].map(form));
            match &layer.mlp {
                MlpWeights::Dense { gate, up, down } => forms.extend([gate, up, down].map(form)),
                MlpWeights::Moe { router, gate_up, down } => {
                    forms.push(router.matrix.store().form(arithmetic.for_routers()));
                    forms.extend(gate_up.iter().chain(down).map(form));
                }
            }
        }
        forms.sort_unstable();
        forms.dedup();
        forms
    }

    /// Bytes of weights read to compute one token: every matrix once, of the experts only the chosen ones.
    pub fn bytes_per_token(&self, config: &ModelConfig) -> u64 {
        let linear = |l: &Linear| l.matrix.nbytes() + l.bias.as_ref().map_or(0, |b| 4 * b.len());
        let layer = |layer: &Layer| {
            let attention: usize = [&layer.q, &layer.k, &layer.v, &layer.o].map(linear).iter().sum();
            let optional = [&layer.sinks, &layer.attention_post_norm, &layer.mlp_post_norm];
            let optional: usize = optional.into_iter().flatten().map(Vec::len).sum();
            let head_norms = layer.head_norms.as_ref().map_or(0, |norms| norms.q.len() + norms.k.len());
            let vectors = 4 * (layer.attention_norm.len() + layer.mlp_norm.len() + head_norms + optional);
            let mlp = match &layer.mlp {
                MlpWeights::Dense { gate, up, down } => linear(gate) + linear(up) + linear(down),
                MlpWeights::Moe { router, gate_up, down } => {
                    let Mlp::Moe { top_k, .. } = config.mlp else { unreachable!("bound from this configuration") };
                    let each = linear(&gate_up[0]) + linear(&down[0]);
                    linear(router) + top_k * each
                }
            };
            (attention + vectors + mlp) as u64
        };
        let embedding_row = self.embedding.nbytes() / self.embedding.rows();
        let ends = embedding_row + 4 * self.final_norm.len() + self.lm_head.nbytes();
        self.layers.iter().map(layer).sum::<u64>() + ends as u64
    }
}

/// Writes row `row` of a matrix, widened or dequantized, to `out` (`cols` values).
fn read_row(matrix: &Matrix, row: usize, out: &mut [f32]) -> Result<()> {
    if let Some(bytes) = matrix.unpacked_row(row) {
        return decode_floats(DType::BF16, &bytes?, out);
    }
    match matrix.store {
        MatrixStore::Plain(dtype) => {
            let bytes = matrix.cols * dtype.size();
            decode_floats(dtype, &matrix.data[row * bytes..][..bytes], out)
        }
        MatrixStore::Tiled(layout) => {
            let tile = &matrix.data[row / TILE_ROWS * layout.tile_bytes..][..layout.tile_bytes];
            for (block, out) in out.chunks_mut(BLOCK).enumerate() {
                let (codes, scale) = scalar::tile_block(&layout, tile, row % TILE_ROWS, block);
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = code as f32 * scale);
            }
            Ok(())
        }
    }
}

/// Hot weights, and the others.
///
/// # Errors
/// A hot tensor is none of these.
fn sort_by_heat<'a>(rebuilt: &[&'a Rebuilt], keep: &Keep) -> Result<(Vec<&'a Rebuilt>, Vec<&'a Rebuilt>)> {
    let is_listed = |r: &Rebuilt| keep.hot.iter().any(|name| r.name() == name);
    if let Some(unknown) = keep.hot.iter().find(|name| !rebuilt.iter().any(|r| r.name() == **name)) {
        return Err(Error::usage("a hot tensor that is no matrix of this model")
            .tensor(unknown)
            .help("`iec inspect PACK --tensors` lists the names"));
    }
    let mut left = keep.hot_bytes;
    Ok(rebuilt.iter().partition(|r| {
        is_listed(r) || {
            let rest = left.checked_sub(r.nbytes() as u64);
            left = rest.unwrap_or(0);
            rest.is_some()
        }
    }))
}
