//! What lies in a file that `torch.save` wrote, and where? Nothing in it is ever executed.
//!
//! PyTorch writes a pickle, a program for a small stack machine, whose tensors refer to storages by a key. Two containers
//! hold it:
//!
//! * a zip archive of stored (never compressed) entries: `NAME/data.pkl`, one `NAME/data/KEY` for each storage, and
//!   `NAME/byteorder`;
//! * before version 1.6, no archive but pickles in a row: a magic number, the protocol version, facts about the system, the
//!   object, the list of storage keys; then for each key a `u64` number of elements and the elements.
//!
//! `machine` runs the program on plain data: it knows the opcodes that such files use and the callables listed in
//! `globals`, whose meaning it imitates, and refuses every other by name. What it builds is bounded by the size of the
//! file. `state_dict` finds the tensors in it; a container says where each storage lies.

mod globals;
mod legacy;
mod machine;
mod state_dict;
mod stream;
mod zip;

use super::read_at::ReadAt;
use super::source_tensor::SourceTensor;
use crate::error::Result;
use machine::{Machine, StorageRef};
use stream::{Budget, Stream};

/// How a pickle is wrapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The zip archive of PyTorch 1.6 and later.
    Zip,
    /// Pickles in a row, then storages.
    Legacy,
}

impl Format {
    /// Tells the format from the first bytes of a file; `None` when it is neither.
    pub fn of(start: &[u8]) -> Option<Format> {
        if start.starts_with(b"PK\x03\x04") {
            return Some(Format::Zip);
        }
        legacy::starts(start).then_some(Format::Legacy)
    }
}

/// Where storages lie in a file.
trait Storages {
    /// Start and length of a storage in bytes.
    fn find(&self, storage: &StorageRef) -> Result<(u64, u64)>;
}

/// Lists the tensors of the state dict in a file, in file order.
///
/// # Errors
/// The container or the pickle is damaged, asks for something this reader does not imitate, or holds no state dict.
pub fn list(file: &dyn ReadAt, format: Format, shard: usize) -> Result<Vec<SourceTensor>> {
    let budget = Budget::of(file.nbytes());
    match format {
        Format::Zip => {
            let archive = zip::Archive::open(file, &budget)?;
            let pickle = archive.pickle()?;
            let mut machine = Machine::new(&budget);
            let root = machine.load(&mut Stream::new(file, pickle.0, pickle.1)?)?;
            state_dict::tensors(&machine, root, &archive, shard)
        }
        Format::Legacy => {
            let mut machine = Machine::new(&budget);
            let (root, storages) = legacy::load(file, &mut machine, &budget)?;
            state_dict::tensors(&machine, root, &storages, shard)
        }
    }
}
