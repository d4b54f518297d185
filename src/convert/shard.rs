//! Opens a weight file of any format and lists its tensors.
//!
//! The format is recognized by the first bytes of the file.

use super::read_at::{InputFile, ReadAt};
use super::source_tensor::SourceTensor;
use super::{pickle, safetensors};
use crate::error::{Context, Error, Result};
use std::path::Path;

/// Opens a file as shard number `shard` and lists its tensors in file order.
///
/// # Errors
/// The format is not known, or the file breaks its rules.
pub fn open(path: &Path, shard: usize) -> Result<(InputFile, Vec<SourceTensor>)> {
    let opened = InputFile::open(path)?;
    let tensors = list(&opened, shard).at(path)?;
    Ok((opened, tensors))
}

/// Lists the tensors of a file of any format in file order.
///
/// # Errors
/// The format is not known, or the file breaks its rules.
pub fn list(file: &dyn ReadAt, shard: usize) -> Result<Vec<SourceTensor>> {
    let start = file.read_vec(0, file.nbytes().min(32))?;
    if start.starts_with(b"version https://git-lfs") {
        return Err(
            Error::corrupt("is a Git LFS pointer, not the weights").help("run `git lfs pull` in that directory")
        );
    }
    match pickle::list(file, &start, shard)? {
        Some(tensors) => Ok(tensors),
        None => safetensors::list(file, shard),
    }
}
