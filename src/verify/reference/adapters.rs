//! Adapters of the reference: `y = gain * (W x + scale * B (A x)) + bias`, as the layers of PEFT compute it without
//! merging.
//!
//! Factors come in terms of canonical tensors ([`Adapter`]) and are never rounded, also beside weights that are rounded
//! to bf16: PEFT keeps the factors of a bf16 model in f32. The gain of DoRA is computed in f64. The matrices of an
//! expert take some rows of a change of its canonical matrices ([`Rows`]).

use super::linear::Linear;
use crate::adapter::{Adapter, Change};
use crate::error::{Context, Error, Result};
use candle_core::{DType, Device, Tensor};

/// Adapters with their factors; all are added.
#[derive(Debug, Default)]
pub(super) struct Adapters(Vec<(Adapter, f32)>);

/// Rows of a canonical matrix: `first`, `first + step`, …, of the matrix `index` of a stack.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub index: usize,
    pub first: usize,
    pub step: usize,
}

/// All rows of a matrix that is in no stack.
pub(super) const ALL: Rows = Rows { index: 0, first: 0, step: 1 };

/// Low-rank change of a matrix `(out, in)`.
#[derive(Debug)]
pub(super) struct LowRank {
    /// `(rank, in)`.
    a: Tensor,
    /// `(out, rank)`.
    b: Tensor,
    scale: f64,
}

impl LowRank {
    /// Returns the change of products of `x`, `(tokens, in)`.
    pub fn product(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x.matmul(&self.a.t()?)?.matmul(&self.b.t()?)? * self.scale
    }

    /// Returns the change of the rows `ids` of the matrix.
    fn rows(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        self.b.index_select(ids, 0)?.matmul(&self.a)? * self.scale
    }
}

/// Embedding with its changes by adapters.
pub(super) struct Embedding {
    /// `(vocab, hidden)`.
    table: Tensor,
    low_rank: Vec<LowRank>,
    /// Factors of the columns: `(hidden)`.
    gain: Option<Tensor>,
}

impl Embedding {
    /// Returns the embeddings of tokens: `(tokens, hidden)`.
    pub fn of(&self, ids: &[u32]) -> candle_core::Result<Tensor> {
        let ids = Tensor::new(ids, &Device::Cpu)?;
        let mut x = self.table.index_select(&ids, 0)?;
        for change in &self.low_rank {
            x = (x + change.rows(&ids)?)?;
        }
        match &self.gain {
            Some(gain) => x.broadcast_mul(gain),
            None => Ok(x),
        }
    }
}

impl Adapters {
    /// Creates the sum of adapters with factors; those with the factor 0 are left out.
    pub fn new(adapters: Vec<(Adapter, f32)>) -> Adapters {
        Adapters(adapters.into_iter().filter(|(_, factor)| *factor != 0.0).collect())
    }

    /// Changes a matrix that has these rows of a canonical tensor.
    ///
    /// # Errors
    /// A change has another size than the matrix, or two adapters replace the same part of it.
    pub fn change(&self, mut linear: Linear, name: &str, rows: Rows) -> Result<Linear> {
        let changes = self.of(name, rows.index);
        let dtype = linear.weight.dtype();
        let found = |linear: &mut Linear| -> Result<()> {
            if let Some(weight) = replaced(&changes, |change| change.replaced.as_deref())? {
                linear.weight = matrix(weight, &linear.weight, rows)?;
            }
            if let Some(bias) = replaced(&changes, |change| change.bias.as_deref())? {
                linear.bias = Some(vector(bias, dtype, rows)?);
            }
            for (change, factor) in &changes {
                linear.low_rank.extend(low_rank(change, *factor, &linear.weight, rows)?);
                if let Some(added) = &change.added {
                    let added = (vector(added, dtype, rows)? * f64::from(*factor))?;
                    linear.bias = Some(match &linear.bias {
                        Some(bias) => (bias + added)?,
                        None => added,
                    });
                }
            }
            if let Some(magnitude) = magnitude(&changes) {
                linear.gain = Some(gain(&vector(magnitude, dtype, rows)?, &linear.weight, &linear.low_rank, 1)?);
            }
            Ok(())
        };
        found(&mut linear).tensor(name)?;
        Ok(linear)
    }

    /// Changes the embedding; the magnitudes of DoRA are those of its columns.
    ///
    /// # Errors
    /// A change has another size than the table, or two adapters replace it.
    pub fn embedding(&self, table: Tensor) -> Result<Embedding> {
        let name = "model.embed_tokens.weight";
        let changes = self.of(name, 0);
        let mut embedding = Embedding { table, low_rank: Vec::new(), gain: None };
        if let Some(table) = replaced(&changes, |change| change.replaced.as_deref()).tensor(name)? {
            embedding.table = matrix(table, &embedding.table, ALL)?;
        }
        for (change, factor) in &changes {
            embedding.low_rank.extend(low_rank(change, *factor, &embedding.table, ALL)?);
        }
        if let Some(magnitude) = magnitude(&changes) {
            embedding.gain = Some(gain(
                &vector(magnitude, embedding.table.dtype(), ALL)?,
                &embedding.table,
                &embedding.low_rank,
                0,
            )?);
        }
        Ok(embedding)
    }

    /// Returns the changes of matrix `index` of a tensor, with the factors of their adapters.
    fn of(&self, name: &str, index: usize) -> Vec<(&Change, f32)> {
        self.0.iter().filter_map(|(adapter, factor)| Some((adapter.changes.get(name)?.get(index)?, *factor))).collect()
    }
}

/// Returns the part of the model that a change replaces.
fn replaced<'a>(changes: &[(&'a Change, f32)], part: fn(&Change) -> Option<&[f32]>) -> Result<Option<&'a [f32]>> {
    let mut all = changes.iter().filter_map(|(change, _)| part(change));
    let first = all.next();
    match all.all(|other| Some(other) == first) {
        true => Ok(first),
        false => Err(Error::unsupported("found two adapters that replace this, expected one")),
    }
}

/// Returns the magnitudes of an adapter of DoRA, which is alone.
fn magnitude<'a>(changes: &[(&'a Change, f32)]) -> Option<&'a [f32]> {
    changes.iter().find_map(|(change, _)| change.magnitude.as_deref())
}

fn low_rank(change: &Change, factor: f32, weight: &Tensor, rows: Rows) -> Result<Option<LowRank>> {
    let Some(factors) = &change.low_rank else { return Ok(None) };
    let dtype = weight.dtype();
    let a = Tensor::from_slice(&factors.a, (factors.rank, weight.dim(1)?), &Device::Cpu)?.to_dtype(dtype)?;
    let b = taken(&factors.b, factors.rank, rows);
    let b = Tensor::from_slice(&b, (b.len() / factors.rank, factors.rank), &Device::Cpu)?.to_dtype(dtype)?;
    Ok(Some(LowRank { a, b, scale: f64::from(factors.scale) * f64::from(factor) }))
}

/// Returns some rows of a matrix `(…, width)`.
fn taken(values: &[f32], width: usize, rows: Rows) -> Vec<f32> {
    values.chunks_exact(width).skip(rows.first).step_by(rows.step).flatten().copied().collect()
}

fn vector(values: &[f32], dtype: DType, rows: Rows) -> candle_core::Result<Tensor> {
    let values = taken(values, 1, rows);
    Tensor::from_slice(&values, values.len(), &Device::Cpu)?.to_dtype(dtype)
}

/// Returns some rows of a matrix in place of `like`.
fn matrix(values: &[f32], like: &Tensor, rows: Rows) -> candle_core::Result<Tensor> {
    Tensor::from_slice(&taken(values, like.dim(1)?, rows), like.dims2()?, &Device::Cpu)?.to_dtype(like.dtype())
}

/// Returns the factors of DoRA: each magnitude divided by the norm of the changed matrix along dimension `along`.
fn gain(magnitude: &Tensor, weight: &Tensor, changes: &[LowRank], along: usize) -> candle_core::Result<Tensor> {
    let mut changed = weight.to_dtype(DType::F64)?;
    for LowRank { a, b, scale } in changes {
        changed = (changed + (b.to_dtype(DType::F64)?.matmul(&a.to_dtype(DType::F64)?)? * *scale)?)?;
    }
    let norm = changed.sqr()?.sum(along)?.sqrt()?;
    (magnitude.to_dtype(DType::F64)? / norm)?.to_dtype(weight.dtype())
}
