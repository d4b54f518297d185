//! Reads the tensors of a file written by `torch.save`. No code in the file is ever executed.
//!
//! PyTorch writes a pickle, a program for a small stack machine, in which tensors refer to storages by a key. Two
//! containers are in use:
//!
//! * a zip archive of stored (never compressed) entries: `NAME/data.pkl`, one `NAME/data/KEY` for each storage, and
//!   `NAME/byteorder`;
//! * before version 1.6, a sequence of pickles: a magic number, the protocol version, information about the system,
//!   the object, and the list of storage keys. For each key follow a `u64` number of elements and the elements.
//!
//! `machine` interprets the program on plain data. It implements the opcodes that such files use and the callables
//! listed in `globals`, and refuses all others by name. The memory it takes is bounded by the size of the file.
//! `state_dict` finds the tensors in the result; `zip` and `legacy` return the position of each storage.

mod globals;
mod legacy;
mod machine;
mod state_dict;
mod stream;
mod zip;

use super::checksum::{self, Checksum};
use super::read_at::ReadAt;
use super::shard::Listing;
use crate::error::Result;
use machine::{Machine, StorageRef};
use std::cell::RefCell;
use std::collections::BTreeMap;
use stream::{Budget, Stream, malformed};

/// Lists the tensors of the state dict in a file that begins with the bytes `start`, in file order, and the checksums
/// of their storages; returns `None` when `torch.save` did not write the file.
///
/// # Errors
/// The container or the pickle is damaged, uses an opcode or callable that is not supported, or
/// contains no state dict.
pub fn list(file: &dyn ReadAt, start: &[u8], shard: usize) -> Result<Option<Listing>> {
    let budget = Budget::of(file.nbytes());
    let mut machine = Machine::new(&budget);
    let listing = if start.starts_with(&zip::LOCAL) {
        let archive = zip::Archive::open(file, &budget)?;
        let (start, nbytes) = archive.entry("data.pkl")?;
        let root = machine.load(&mut Stream::new(file, start, nbytes)?)?;
        let checksums = RefCell::new(BTreeMap::from([(String::new(), archive.checksum("data.pkl")?)]));
        let find = |storage: &StorageRef| {
            if let Some(known) = checksums.borrow().get(&storage.key) {
                return Ok((known.range.start, known.range.end - known.range.start));
            }
            budget.charge::<[(String, Checksum); 2]>(1)?;
            let found = archive.checksum(&format!("data/{}", storage.key))?;
            budget.charge::<u8>(storage.key.len() + found.name.len())?;
            let place = (found.range.start, found.range.end - found.range.start);
            checksums.borrow_mut().insert(storage.key.clone(), found);
            Ok(place)
        };
        let tensors = state_dict::tensors(&machine, root, &find, shard)?;
        Listing { tensors, checksums: checksum::in_order(checksums.into_inner().into_values().collect())? }
    } else if legacy::starts(start) {
        let (root, ranges) = legacy::load(file, &mut machine, &budget)?;
        let missing = |key: &str| malformed(format!("storage {key} is not in the file"));
        let find = |storage: &StorageRef| ranges.get(&storage.key).copied().ok_or_else(|| missing(&storage.key));
        Listing { tensors: state_dict::tensors(&machine, root, &find, shard)?, checksums: Vec::new() }
    } else {
        return Ok(None);
    };
    Ok(Some(listing))
}
