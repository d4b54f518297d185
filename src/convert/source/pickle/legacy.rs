//! Reads the container of PyTorch before 1.6: a sequence of pickles, followed by the storages.

use super::machine::{Machine, Object, PROTO, StorageRef, Value};
use super::stream::{Budget, Stream, malformed};
use super::zip::u64_at;
use crate::convert::source::read_at::ReadAt;
use crate::error::{Error, Result};
use std::collections::HashMap;

/// The magic number 0x1950a86a20f9469cfc6c, encoded in protocol 2, without the two bytes of the protocol.
const MAGIC: [u8; 13] = [0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, b'.'];
const PROTOCOL_VERSION: i64 = 1001;

/// Returns true when a file starts with the magic number.
pub(super) fn starts(start: &[u8]) -> bool {
    start.first() == Some(&PROTO) && start.get(2..2 + MAGIC.len()) == Some(&MAGIC)
}

/// Start and length of each storage in bytes, by storage key.
type Ranges = HashMap<String, (u64, u64)>;

/// Interprets the pickles of a file; returns the object and the positions of the storages.
pub(super) fn load(file: &dyn ReadAt, machine: &mut Machine, budget: &Budget) -> Result<(Value, Ranges)> {
    let start = 2 + MAGIC.len() as u64;
    let mut stream = Stream::new(file, start, file.nbytes().saturating_sub(start))?;
    match machine.load(&mut stream)? {
        Value::Int(PROTOCOL_VERSION) => {}
        other => {
            return Err(Error::unsupported(format!(
                "found torch.save protocol {other:?}, expected {PROTOCOL_VERSION}"
            ))
            .help("save the weights again with a current PyTorch, or as safetensors"));
        }
    }
    let system = machine.load(&mut stream)?;
    check_system(machine, system)?;
    let root = machine.load(&mut stream)?;
    let keys = machine.load(&mut stream)?;
    let ranges = ranges(file, machine, keys, stream.position(), budget)?;
    Ok((root, ranges))
}

fn check_system(machine: &Machine, system: Value) -> Result<()> {
    let Some(Object::Dict(facts)) = machine.object(system) else {
        return Err(malformed("no information about the system that wrote the file"));
    };
    match facts.iter().find(|(key, _)| machine.text(*key) == Some("little_endian")) {
        Some((_, Value::Bool(true))) => Ok(()),
        Some((_, Value::Bool(false))) => {
            Err(Error::unsupported("found data of a big-endian machine, expected little-endian")
                .help("save the weights on a little-endian machine"))
        }
        _ => Err(malformed("no byte order in the information about the system")),
    }
}

/// Computes the positions of the storages, which are stored in the order of `keys`.
fn ranges(file: &dyn ReadAt, machine: &Machine, keys: Value, mut at: u64, budget: &Budget) -> Result<Ranges> {
    let storages: HashMap<&str, &StorageRef> = machine.storages().map(|s| (s.key.as_str(), s)).collect();
    let keys = machine.items(keys).ok_or_else(|| malformed("no list of storages"))?;
    let mut ranges = HashMap::new();
    for key in keys {
        let key = machine.text(*key).ok_or_else(|| malformed("a storage without a name"))?;
        let storage = storages.get(key).ok_or_else(|| malformed(format!("storage {key}, which no tensor uses")))?;
        let count = u64_at(&file.read_vec(at, 8)?, 0);
        if count != storage.elements {
            let expected = storage.elements;
            return Err(malformed(format!("storage {key} of {count} elements, expected {expected} as in its tensors")));
        }
        let start = at + 8;
        let end = count.checked_mul(storage.element_bytes()).and_then(|n| start.checked_add(n));
        at = end.filter(|end| *end <= file.nbytes()).ok_or_else(|| {
            Error::corrupt(format!("found storage {key} of {count} elements, which reaches past the end of the file"))
                .help("the file is truncated; get it again")
        })?;
        budget.charge::<(String, (u64, u64))>(1)?;
        if ranges.insert(key.to_string(), (start, at - start)).is_some() {
            return Err(malformed(format!("storage {key} is listed twice")));
        }
    }
    match file.nbytes() - at {
        0 => Ok(ranges),
        rest => Err(Error::corrupt(format!("found {rest} bytes after the last storage"))),
    }
}
