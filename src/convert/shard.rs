//! One weight file of any format, opened and checked: which tensors does it hold, and where?
//!
//! Formats are told apart by their first bytes. Data is read by position, never mapped, so that memory stays bounded by
//! the caller's buffers.

use super::read_at::ReadAt;
use super::source_tensor::SourceTensor;
use super::{pickle, safetensors};
use crate::error::{Context, Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// An opened weight file whose list of tensors was checked.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    file: File,
    len: u64,
}

impl Shard {
    /// Opens a file as shard number `shard` and lists its tensors in file order.
    ///
    /// # Errors
    /// The format is not known, or the file breaks its rules.
    pub fn open(path: &Path, shard: usize) -> Result<(Shard, Vec<SourceTensor>)> {
        let opened = Shard::without_list(path)?;
        let tensors = list(&opened, shard).at(path)?;
        Ok((opened, tensors))
    }

    /// Opens a file whose list of tensors lies elsewhere.
    pub(super) fn without_list(path: &Path) -> Result<Shard> {
        let file = File::open(path).at(path)?;
        let len = file.metadata().at(path)?.len();
        Ok(Shard { path: path.to_path_buf(), file, len })
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// File size in bytes.
    pub fn nbytes(&self) -> u64 {
        self.len
    }

    /// Fills `out` from position `at` of the file.
    pub fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, at).at(&self.path)
    }
}

impl ReadAt for Shard {
    fn nbytes(&self) -> u64 {
        self.len
    }

    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        Shard::read_at(self, at, out)
    }
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
    let tensors = match pickle::Format::of(&start) {
        Some(format) => pickle::list(file, format, shard)?,
        None => safetensors::list(file, shard)?,
    };
    Ok(tensors)
}
