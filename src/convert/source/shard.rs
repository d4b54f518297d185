//! Opens a weight file of any format and lists its tensors.
//!
//! The format is recognized by the first bytes of the file.

use super::checksum::Checksum;
use super::read_at::{InputFile, ReadAt};
use super::source_tensor::SourceTensor;
use super::{pickle, safetensors};
use crate::error::{Context, Error, Result};
use std::path::Path;

/// Content of a weight file.
#[derive(Debug)]
pub struct Listing {
    /// The tensors in file order.
    pub tensors: Vec<SourceTensor>,
    /// Recorded checksums in file order; empty for formats without checksums.
    pub checksums: Vec<Checksum>,
}

/// Opens a file as shard number `shard` and lists its tensors in file order.
///
/// # Errors
/// The format is not supported, or the file is invalid.
pub fn open(path: &Path, shard: usize) -> Result<(InputFile, Vec<SourceTensor>)> {
    let opened = InputFile::open(path)?;
    let Listing { tensors, checksums } = list(&opened, shard).at(path)?;
    Ok((opened.with_checksums(checksums), tensors))
}

/// Lists the content of a file of any format.
///
/// # Errors
/// The format is not supported, or the file is invalid.
pub fn list(file: &dyn ReadAt, shard: usize) -> Result<Listing> {
    let start = file.read_vec(0, file.nbytes().min(32))?;
    if start.starts_with(b"version https://git-lfs") {
        return Err(Error::corrupt("found a Git LFS pointer, expected the weights")
            .help("run `git lfs pull` in the directory of this file"));
    }
    match pickle::list(file, &start, shard).help("the file is damaged; get it again")? {
        Some(listing) => Ok(listing),
        None => Ok(Listing { tensors: safetensors::list(file, shard)?, checksums: Vec::new() }),
    }
}
