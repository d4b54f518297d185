//! The weights that are to be quantized: a checkpoint, or a pack that still holds floats.

use crate::convert::{Aids, Checkpoint, Kind};
use crate::dtype::{DType, decode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::{self, IebinReader, Source, SourceFile, Store};
use crate::role::Role;
use crate::scheme::Scheme;
use crate::sha256::{Digest, Sha256, hex};
use crate::{interrupt, progress};
use rayon::prelude::*;
use std::ops::Range;
use std::path::Path;

/// An opened model.
#[derive(Debug)]
pub enum Weights {
    /// A Hugging Face directory.
    Checkpoint(Box<Checkpoint>),
    /// An artifact of `iec pack`.
    Pack(Box<IebinReader>),
}

/// A tensor of the model.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Canonical name.
    pub name: String,
    /// Canonical shape.
    pub shape: Vec<usize>,
    /// The part it plays.
    pub role: Role,
    /// How its numbers are stored.
    pub form: Form,
    index: usize,
}

/// How the numbers of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Floats of this type.
    Float(DType),
    /// Quantized already.
    Quantized(Scheme),
}

impl Tensor {
    /// The stack of matrices it is: `(count, rows, cols)`.
    pub fn matrices(&self) -> Result<(usize, usize, usize)> {
        iebin::matrices(&self.shape).tensor(&self.name)
    }
}

impl Weights {
    /// Opens a Hugging Face checkpoint; `config` replaces its config.json.
    pub fn open_checkpoint(dir: &Path, config: Option<&Path>) -> Result<Weights> {
        Checkpoint::open_with(dir, Aids { config, manifest: None })
            .map(|checkpoint| Weights::Checkpoint(Box::new(checkpoint)))
    }

    /// Opens a pack.
    pub fn open_pack(dir: &Path) -> Result<Weights> {
        IebinReader::open(dir).map(|reader| Weights::Pack(Box::new(reader)))
    }

    /// All tensors in the order of the model.
    pub fn tensors(&self) -> Vec<Tensor> {
        match self {
            Weights::Checkpoint(checkpoint) => {
                let tensors = checkpoint.tensors().iter().enumerate();
                let form = |kind| match kind {
                    Kind::Float(dtype) => Form::Float(dtype),
                    Kind::Mxfp4 => Form::Quantized(Scheme::Mxfp4),
                    Kind::Packed(spec) => Form::Quantized(spec.scheme),
                };
                tensors.map(|(i, t)| tensor(i, &t.name, &t.shape, form(t.kind))).collect()
            }
            Weights::Pack(reader) => {
                let form = |store| match store {
                    Store::Plain(dtype) => Form::Float(dtype),
                    Store::Tiled(spec) => Form::Quantized(spec.scheme),
                };
                let entries = reader.entries().iter().enumerate();
                entries.map(|(i, e)| tensor(i, &e.name, &e.shape, form(e.store))).collect()
            }
        }
    }

    /// Reads rows of one matrix of a float tensor; `out` has the exact length.
    ///
    /// # Errors
    /// The tensor does not hold floats, or reading fails.
    pub fn read_rows_f32(&self, tensor: &Tensor, matrix: usize, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let Form::Float(dtype) = tensor.form else {
            return Err(Error::unsupported("quantized codes where floats are needed").tensor(&tensor.name));
        };
        match self {
            Weights::Checkpoint(checkpoint) => {
                checkpoint.read_rows_f32(&checkpoint.tensors()[tensor.index], matrix, rows, out)
            }
            Weights::Pack(reader) => {
                let payload = reader.payload(&reader.entries()[tensor.index])?;
                let (_, n_rows, cols) = tensor.matrices()?;
                let row_bytes = cols * dtype.size();
                let start = (matrix * n_rows + rows.start) * row_bytes;
                decode_floats(dtype, &payload[start..start + rows.len() * row_bytes], out).tensor(&tensor.name)
            }
        }
    }

    /// File names, sizes and hashes of what was read; a pack tells those of the checkpoint it was made from.
    pub fn source(&self) -> Result<Option<Source>> {
        let checkpoint = match self {
            Weights::Checkpoint(checkpoint) => checkpoint,
            Weights::Pack(reader) => return Ok(reader.description.source.clone()),
        };
        let shards = checkpoint.shards().files();
        let bar = progress::bytes("hashing", shards.iter().map(|s| s.nbytes()).sum());
        let files = shards.par_iter().map(|shard| {
            let mut hash = Sha256::new();
            let mut buffer = vec![0; 1 << 20];
            let mut at = 0;
            while at < shard.nbytes() {
                interrupt::check()?;
                let n = buffer.len().min(usize::try_from(shard.nbytes() - at).unwrap_or(usize::MAX));
                shard.read_at(at, &mut buffer[..n])?;
                hash.update(&buffer[..n]);
                at += n as u64;
                bar.inc(n as u64);
            }
            let name = shard.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok(SourceFile { name, bytes: shard.nbytes(), sha256: hex(hash) })
        });
        let files = files.collect::<Result<Vec<_>>>()?;
        bar.finish_and_clear();
        Ok(Some(Source { repo: checkpoint.repo(), files }))
    }
}

fn tensor(index: usize, name: &str, shape: &[usize], form: Form) -> Tensor {
    Tensor { name: name.to_string(), shape: shape.to_vec(), role: Role::of(name), form, index }
}
