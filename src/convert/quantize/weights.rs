//! Reads the weights that are to be quantized, from a checkpoint or from a pack that still holds floats.

use crate::catalogue::Role;
use crate::convert::pack_input;
use crate::convert::source::read_at::InputFile;
use crate::convert::{Checkpoint, CheckpointOptions};
use crate::dtype::decode_floats;
use crate::error::{Context, Error, Result};
use crate::iebin::{self, IebinReader, Store};
use crate::job::Fingerprint;
use crate::provenance::Source;
use std::ops::Range;
use std::path::Path;

/// Canonical name of the embedding that may also be the output matrix.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// An opened model.
#[derive(Debug)]
pub enum Weights {
    /// A Hugging Face directory.
    Checkpoint(Box<Checkpoint>),
    /// A pack written by `iec pack`.
    Pack(Box<IebinReader>),
}

/// A tensor of the model.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Canonical name.
    pub name: String,
    /// Canonical shape.
    pub shape: Vec<usize>,
    /// Role in the model.
    pub role: Role,
    /// True for the embedding of a model that uses it as its output matrix, too.
    pub is_tied: bool,
    /// Storage format of the source.
    pub store: Store,
    index: usize,
}

impl Tensor {
    /// Returns the shape as a stack of matrices: `(count, rows, cols)`.
    pub fn matrices(&self) -> Result<(usize, usize, usize)> {
        iebin::matrices(&self.shape).tensor(&self.name)
    }

    /// Returns the number of weights.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64
    }

    /// Returns the size in the source in bytes; of quantized tensors, the size of the codes without the scales.
    pub fn nbytes(&self) -> u64 {
        match self.store {
            Store::Plain(dtype) => self.elements() * dtype.size() as u64,
            Store::Tiled(spec) => self.elements() * u64::from(spec.scheme.bits()) / 8,
        }
    }
}

impl Weights {
    /// Opens a Hugging Face checkpoint; `config` replaces its config.json.
    pub fn open_checkpoint(dir: &Path, config: Option<&Path>) -> Result<Weights> {
        Checkpoint::open_with(dir, CheckpointOptions { config, ..CheckpointOptions::default() })
            .map(|checkpoint| Weights::Checkpoint(Box::new(checkpoint)))
    }

    /// Opens a pack.
    pub fn open_pack(dir: &Path) -> Result<Weights> {
        IebinReader::open(dir).map(|reader| Weights::Pack(Box::new(reader)))
    }

    /// Returns all tensors in the order of the model.
    pub fn tensors(&self) -> Vec<Tensor> {
        let mut tensors: Vec<Tensor> = match self {
            Weights::Checkpoint(checkpoint) => {
                let tensors = checkpoint.tensors().iter().enumerate();
                tensors.map(|(i, t)| tensor(i, &t.name, &t.shape, t.store)).collect()
            }
            Weights::Pack(reader) => {
                let entries = reader.entries().iter().enumerate();
                entries.map(|(i, e)| tensor(i, &e.name, &e.shape, e.store)).collect()
            }
        };
        let has_head = tensors.iter().any(|tensor| tensor.role == Role::LmHead);
        tensors.iter_mut().for_each(|tensor| tensor.is_tied = !has_head && tensor.name == EMBEDDING);
        tensors
    }

    /// Reads rows of one matrix of a float tensor into `out`, which must have exactly their length.
    ///
    /// # Errors
    /// The tensor does not hold floats, or reading fails.
    pub fn read_rows_f32(&self, tensor: &Tensor, matrix: usize, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let Store::Plain(dtype) = tensor.store else {
            return Err(Error::unsupported("found quantized codes, expected floats")
                .tensor(&tensor.name)
                .help("give the checkpoint that the pack was made from as --hf-dir"));
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

    /// Returns a closure that reads rows of a tensor, for [`Stack::read`](crate::quant::stream::Stack::read).
    pub(super) fn rows<'a>(
        &'a self,
        tensor: &'a Tensor,
    ) -> impl Fn(usize, Range<usize>, &mut [f32]) -> Result<()> + 'a {
        move |matrix, rows, out| self.read_rows_f32(tensor, matrix, rows, out)
    }

    /// Returns the weight files of a checkpoint; empty for a pack.
    pub(super) fn files(&self) -> &[InputFile] {
        match self {
            Weights::Checkpoint(checkpoint) => checkpoint.shards().files(),
            Weights::Pack(_) => &[],
        }
    }

    /// Adds everything to `fingerprint` that determines the values of the weights.
    pub(crate) fn fingerprint(&self, fingerprint: &mut Fingerprint) -> Result<()> {
        let (config, pack) = match self {
            Weights::Checkpoint(checkpoint) => (Some(checkpoint.config()), None),
            Weights::Pack(reader) => (reader.description.model.as_ref(), Some(reader)),
        };
        fingerprint.json("config", &config);
        if let Weights::Checkpoint(checkpoint) = self {
            fingerprint.field("published", checkpoint.published().settings());
        }
        pack.map_or(Ok(()), |reader| pack_input::fingerprint(reader, fingerprint))?;
        self.files().iter().try_for_each(|shard| fingerprint.file(shard.path()))
    }

    /// Returns names, sizes and hashes of the weight files; for a pack, those of the checkpoint it was made from.
    /// `sha256` holds the digests of [`Weights::files`].
    pub(super) fn source(&self, sha256: &[Option<String>]) -> Option<Source> {
        match self {
            Weights::Checkpoint(checkpoint) => {
                let files = self.files().iter().zip(sha256.iter().flatten());
                let files = files.map(|(file, sha256)| file.source_file(sha256.clone())).collect();
                Some(Source { repo: checkpoint.repo(), files })
            }
            Weights::Pack(reader) => reader.description.source.clone(),
        }
    }
}

fn tensor(index: usize, name: &str, shape: &[usize], store: Store) -> Tensor {
    Tensor { name: name.to_string(), shape: shape.to_vec(), role: Role::of(name), is_tied: false, store, index }
}

#[cfg(test)]
impl Tensor {
    /// Returns a tensor of floats for tests that read no weights.
    pub(super) fn float(name: &str, shape: &[usize], is_tied: bool) -> Tensor {
        Tensor { is_tied, ..tensor(0, name, shape, Store::Plain(crate::dtype::DType::F32)) }
    }
}
