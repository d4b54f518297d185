//! Reads the files that `torch.save` wrote before PyTorch 1.6, with the pickle machine of candle, which itself reads
//! zip archives only.
//!
//! Such a file is a sequence of pickles (a magic number, the version of the protocol, facts about the system, the
//! object, the list of storages), followed by each storage: a `u64` number of elements and the elements.

use crate::error::{Error, Result};
use crate::files;
use candle_core::pickle::{Object, Stack, TensorInfo};
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The pickle of the magic number: protocol 2, a long integer of ten bytes, end.
const MAGIC: [u8; 15] = [0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, b'.'];
/// Deepest nesting of dictionaries in which a state dict is looked for.
const DEEPEST: usize = 4;

/// Opened file of the old container.
pub(super) struct LegacyFile {
    file: File,
    tensors: HashMap<String, TensorInfo>,
    /// Position and length in bytes of each storage, by its key.
    storages: HashMap<String, (u64, u64)>,
}

impl LegacyFile {
    /// Opens a file; returns `None` if it does not begin with the magic number.
    ///
    /// # Errors
    /// The file is damaged, or has objects that the pickle machine does not know.
    pub fn open(path: &Path) -> Result<Option<LegacyFile>> {
        let (file, metadata) = files::open_with_metadata(path)?;
        let mut reader = BufReader::new(file);
        let mut magic = [0; MAGIC.len()];
        match reader.read_exact(&mut magic) {
            Ok(()) if magic == MAGIC => {}
            _ => return Ok(None),
        }
        let mut next = || {
            let mut stack = Stack::empty();
            stack.read_loop(&mut reader).and_then(|()| stack.finalize())
        };
        let (_protocol, _system, root, keys) = (next()?, next()?, next()?, next()?);
        let mut tensors = HashMap::new();
        collect(root, DEEPEST, &mut tensors)?;
        let Object::List(keys) = keys else {
            return Err(Error::corrupt("found no list of storages in the torch file"));
        };
        let start = reader.stream_position()?;
        let mut found = LegacyFile { file: reader.into_inner(), tensors, storages: HashMap::new() };
        found.list_storages(keys, start, metadata.len())?;
        Ok(Some(found))
    }

    /// Finds the position of each storage.
    fn list_storages(&mut self, keys: Vec<Object>, mut at: u64, end: u64) -> Result<()> {
        let sizes: HashMap<&str, u64> =
            self.tensors.values().map(|info| (key_of(info), info.dtype.size_in_bytes() as u64)).collect();
        let mut storages = HashMap::new();
        for key in keys {
            let key = key.unicode().map_err(|_| Error::corrupt("found a storage without a name in the torch file"))?;
            let mut count = [0; 8];
            self.file.read_exact_at(&mut count, at)?;
            // A storage of no tensor has an unknown size, so nothing behind it can be found.
            let size = *sizes.get(key.as_str()).ok_or_else(|| {
                Error::unsupported(format!("found storage {key:.40} in the torch file, which no float tensor uses"))
            })?;
            let bytes = u64::from_le_bytes(count).checked_mul(size);
            let after = bytes.and_then(|bytes| at.checked_add(8)?.checked_add(bytes)).filter(|after| *after <= end);
            let after = after.ok_or_else(|| Error::corrupt("found a storage that reaches past the end of the file"))?;
            storages.insert(key, (at + 8, after - at - 8));
            at = after;
        }
        self.storages = storages;
        Ok(())
    }

    /// Returns the names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.tensors.keys()
    }

    /// Returns a tensor.
    ///
    /// # Errors
    /// There is no such tensor, it reaches past its storage, or reading fails.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        let info = self.tensors.get(name).ok_or_else(|| Error::corrupt("found no such tensor"))?;
        let (start, bytes) = self.storages.get(key_of(info)).ok_or_else(|| Error::corrupt("found no such storage"))?;
        let mut storage = vec![0; *bytes as usize];
        self.file.read_exact_at(&mut storage, *start)?;
        let (dims, size) = (info.layout.dims(), info.dtype.size_in_bytes());
        let nbytes = dims.iter().try_fold(size, |product, n| product.checked_mul(*n)).filter(|n| *n <= storage.len());
        let nbytes = nbytes.ok_or_else(|| Error::corrupt("found a tensor that is larger than its storage"))?;
        let mut data = Vec::with_capacity(nbytes);
        let mut index = vec![0; dims.len()];
        while data.len() < nbytes {
            data.extend_from_slice(element(info, &index, &storage).ok_or_else(past_end)?);
            for (i, n) in index.iter_mut().zip(dims).rev() {
                *i += 1;
                if *i < *n {
                    break;
                }
                *i = 0;
            }
        }
        Ok(Tensor::from_raw_buffer(&data, info.dtype, dims, &Device::Cpu)?)
    }
}

/// Returns the bytes of an element. The layout of candle's pickle machine has the offset in bytes and the strides in
/// elements.
fn element<'a>(info: &TensorInfo, index: &[usize], storage: &'a [u8]) -> Option<&'a [u8]> {
    let size = info.dtype.size_in_bytes();
    let steps = index.iter().zip(info.layout.stride()).map(|(i, stride)| i.checked_mul(*stride));
    let element = steps.into_iter().try_fold(0_usize, |at, step| at.checked_add(step?))?;
    let from = element.checked_mul(size)?.checked_add(info.layout.start_offset())?;
    storage.get(from..from.checked_add(size)?)
}

fn past_end() -> Error {
    Error::corrupt("found a tensor that reaches past its storage")
}

/// Returns the key of the storage of a tensor.
fn key_of(info: &TensorInfo) -> &str {
    info.path.trim_start_matches('/')
}

/// Collects the tensors of a state dict, which may lie in another dictionary.
fn collect(object: Object, depth: usize, tensors: &mut HashMap<String, TensorInfo>) -> Result<()> {
    let (Object::Dict(entries), true) = (object, depth > 0) else { return Ok(()) };
    for (name, value) in entries {
        match value {
            value @ Object::Dict(_) => collect(value, depth - 1, tensors)?,
            value => {
                if let Some(info) = value.into_tensor_info(name, Path::new(""))? {
                    tensors.insert(info.name.clone(), info);
                }
            }
        }
    }
    Ok(())
}
