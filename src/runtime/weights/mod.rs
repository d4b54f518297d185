//! The weights of a model, each at its place, with every shape checked.
//!
//! Matrices stay where they are, in the mapped file; only a float matrix wider than the precision asked for and codes
//! of 5 and 6 bits are converted into owned memory. Those of a pack without its binary are rebuilt when they are used
//! ([`Weight`]). Vectors (norms, biases, sinks) are small and held as f32.

mod bind;
mod shape;
mod widen;

pub(super) use shape::Shape;

use super::cache::{Cache, too_small};
use super::cpu::{Arithmetic, Form, Matrix, MatrixStore, scalar};
use super::layer::{Block, Layer, Operation, Storage};
use super::rebuilt::Rebuilt;
use super::residency::Residency;
use crate::dtype::{DType, decode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::rebuild::Keep;
use crate::iebin::{IebinReader, JSON_NAME};
use crate::interrupt;
use crate::model_config::ModelConfig;
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
            Weight::Rebuilt(rebuilt) => rebuilt.shape.rows,
        }
    }

    /// How the elements lie.
    pub fn store(&self) -> MatrixStore {
        match self {
            Weight::Here(matrix) => matrix.store,
            Weight::Rebuilt(rebuilt) => rebuilt.shape.store,
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

impl Linear {
    /// Bytes that a product reads.
    pub fn nbytes(&self) -> usize {
        self.matrix.nbytes() + self.bias.as_ref().map_or(0, |bias| size_of_val(bias.as_slice()))
    }
}

/// Weights in the memory of the host, most of them mapped.
#[derive(Debug)]
pub struct Host;

impl Storage for Host {
    type Matrix = Linear;
    type Stack = Vec<Linear>;
    type Vector = Vec<f32>;
}

/// All weights of a model.
#[derive(Debug)]
pub struct Weights {
    /// `(vocab, hidden)`.
    pub embedding: Weight,
    /// One per layer.
    pub layers: Vec<Layer<Host>>,
    /// `(hidden)`.
    pub final_norm: Vec<f32>,
    /// `(vocab, hidden)`; the embedding itself when tied.
    pub lm_head: Weight,
    /// What is rebuilt, if anything is.
    pub cache: Option<Arc<Cache>>,
}

impl Operation<Host> {
    /// All matrices, in the order of their use.
    fn linears(&self) -> Vec<&Linear> {
        match self {
            Operation::Attention(op) => vec![&op.q, &op.k, &op.v, &op.o],
            Operation::Mlp(op) => vec![&op.gate, &op.up, &op.down],
            Operation::Moe(op) => [&op.router].into_iter().chain(&op.gate_up).chain(&op.down).collect(),
        }
    }

    /// The forms of activations that its products read.
    fn forms(&self, arithmetic: Arithmetic) -> Vec<Form> {
        let form = |linear: &Linear| linear.matrix.store().form(arithmetic);
        match self {
            Operation::Moe(op) => {
                let router = op.router.matrix.store().form(arithmetic.for_routers());
                op.gate_up.iter().chain(&op.down).map(form).chain([router]).collect()
            }
            _ => self.linears().into_iter().map(form).collect(),
        }
    }

    /// Bytes read to compute one token: of the experts only the chosen ones.
    fn bytes_per_token(&self) -> usize {
        let all = |linears: &[&Linear]| linears.iter().map(|linear| linear.nbytes()).sum::<usize>();
        match self {
            Operation::Attention(op) => {
                let norms = op.head_norms.iter().flatten().chain(&op.sinks);
                all(&self.linears()) + norms.map(|values| size_of_val(values.as_slice())).sum::<usize>()
            }
            Operation::Mlp(_) => all(&self.linears()),
            Operation::Moe(op) => op.router.nbytes() + op.top_k * all(&[&op.gate_up[0], &op.down[0]]),
        }
    }
}

impl Layer<Host> {
    /// All matrices, in the order of their use.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.blocks.iter().flat_map(|block| block.operation.linears())
    }

    /// Releases the pages of mapped matrices, where memory is scarcer than the time to map them again.
    pub fn release(&self) {
        self.linears().for_each(|linear| {
            if let Weight::Here(matrix) = &linear.matrix {
                matrix.data.release();
            }
        });
    }
}

impl Weights {
    /// Binds every tensor the configuration calls for; float matrices are converted to `convert` if it is given. Of a
    /// pack without its binary, those that can be computed with as they are stored stay so if `in_place` says so.
    ///
    /// # Errors
    /// A tensor is missing, has the wrong shape or store, overflows the type it is converted to, or has no place in the
    /// model (running without it would be a silently different model).
    pub fn bind(reader: &IebinReader, config: &ModelConfig, convert: Option<DType>, in_place: bool) -> Result<Weights> {
        Binder::new(reader, config, convert, in_place).model(config).at(reader.dir.join(JSON_NAME))
    }

    /// All matrices, in the order of their use; a tied embedding twice.
    pub fn matrices(&self) -> impl Iterator<Item = &Weight> {
        let layers = self.layers.iter().flat_map(Layer::linears).map(|linear| &linear.matrix);
        [&self.embedding].into_iter().chain(layers).chain([&self.lm_head])
    }

    /// Rebuilds what is wanted before the first token: hot weights, and everything there is room for where `residency`
    /// asks for it.
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
        let warm: Vec<&Rebuilt> = cold.iter().take_while(|r| take(&mut room, r.nbytes())).copied().collect();
        let bar = progress::bytes("rebuilding", bytes(&hot) + bytes(&warm));
        for (list, hot) in [(hot, true), (warm, false)] {
            for rebuilt in list {
                interrupt::check()?;
                rebuilt.matrix(hot)?;
                bar.inc(rebuilt.nbytes() as u64);
            }
        }
        Ok(())
    }

    /// Locks what was rebuilt in memory, and rebuilds what was not.
    ///
    /// # Errors
    /// The system refuses.
    pub(super) fn lock(&self) -> Result<()> {
        self.matrices().filter_map(Weight::as_rebuilt).try_for_each(|rebuilt| rebuilt.matrix(true)?.data.lock())
    }

    /// The forms of activations that products with these weights read.
    pub fn forms(&self, arithmetic: Arithmetic) -> Vec<Form> {
        let blocks = self.layers.iter().flat_map(|layer| &layer.blocks);
        let mut forms: Vec<Form> = blocks.flat_map(|block| block.operation.forms(arithmetic)).collect();
        forms.push(self.lm_head.store().form(arithmetic));
        forms.sort_unstable();
        forms.dedup();
        forms
    }

    /// Bytes of weights read to compute one token: every matrix once, of the experts only the chosen ones.
    pub fn bytes_per_token(&self) -> u64 {
        let blocks = self.layers.iter().flat_map(|layer| &layer.blocks);
        let block = |block: &Block<Host>| {
            let norms = [Some(&block.norm), block.post_norm.as_ref()].into_iter().flatten();
            norms.map(|norm| size_of_val(norm.as_slice())).sum::<usize>() + block.operation.bytes_per_token()
        };
        let embedding_row = self.embedding.nbytes() / self.embedding.rows();
        let ends = embedding_row + size_of_val(self.final_norm.as_slice()) + self.lm_head.nbytes();
        (blocks.map(block).sum::<usize>() + ends) as u64
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
    Ok(rebuilt.iter().partition(|r| is_listed(r) || take(&mut left, r.nbytes())))
}

/// Takes bytes from what is left of a budget; where it does not suffice, it is used up.
fn take(left: &mut u64, bytes: usize) -> bool {
    let rest = left.checked_sub(bytes as u64);
    *left = rest.unwrap_or(0);
    rest.is_some()
}
