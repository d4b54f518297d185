//! Builds files as `torch.save` writes them, and malformed ones, without PyTorch.

use crate::checkpoint::Tensor;
use safetensors::tensor::Dtype;
use std::collections::BTreeMap;

/// Builder of a pickle with the opcodes that Python's pickler writes in protocol 2.
#[derive(Clone)]
pub struct Pickle(pub Vec<u8>);

impl Pickle {
    pub fn new() -> Pickle {
        Pickle(vec![0x80, 2])
    }

    pub fn op(&mut self, bytes: &[u8]) -> &mut Pickle {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn text(&mut self, text: &str) -> &mut Pickle {
        self.op(b"X").op(&(text.len() as u32).to_le_bytes()).op(text.as_bytes())
    }

    pub fn global(&mut self, module: &str, name: &str) -> &mut Pickle {
        self.op(format!("c{module}\n{name}\n").as_bytes())
    }

    /// Appends an integer as LONG1, which holds any size.
    pub fn int(&mut self, n: i64) -> &mut Pickle {
        // As Python writes integers: in 32 bits if they fit.
        match i32::try_from(n) {
            Ok(n) => self.op(b"J").op(&n.to_le_bytes()),
            Err(_) => self.op(&[0x8a, 8]).op(&n.to_le_bytes()),
        }
    }

    pub fn ints(&mut self, numbers: &[i64]) -> &mut Pickle {
        self.op(b"(");
        for n in numbers {
            self.int(*n);
        }
        self.op(b"t")
    }

    /// Appends a call of `_rebuild_tensor_v2` on a storage of `elements`.
    pub fn tensor(&mut self, class: &str, key: &str, elements: i64, parts: Parts) -> &mut Pickle {
        self.global("torch._utils", "_rebuild_tensor_v2").op(b"((");
        self.storage(class, key, elements, b"tQ");
        self.int(parts.0).ints(parts.1).ints(parts.2).op(b"\x89");
        self.global("collections", "OrderedDict").op(b")RtR")
    }

    fn storage(&mut self, class: &str, key: &str, elements: i64, end: &[u8]) -> &mut Pickle {
        self.text("storage").global("torch", class).text(key).text("cpu").int(elements).op(end)
    }

    /// Appends a tensor as PyTorch wrote it before 1.6, where a storage has a sixth field.
    #[cfg(feature = "reference")]
    fn legacy_tensor(&mut self, class: &str, key: &str, elements: i64, parts: Parts) -> &mut Pickle {
        self.global("torch._utils", "_rebuild_tensor_v2").op(b"((").storage(class, key, elements, b"NtQ");
        self.int(parts.0).ints(parts.1).ints(parts.2).op(b"\x89");
        self.global("collections", "OrderedDict").op(b")RtR")
    }

    pub fn end(&mut self) -> Vec<u8> {
        self.op(b".").0.clone()
    }
}

/// Offset, shape and strides of a tensor in its storage, in elements.
pub type Parts<'a> = (i64, &'a [i64], &'a [i64]);

/// Builds a state dict of one tensor on a storage of four floats, as a zip archive.
pub fn one_tensor(parts: Parts) -> Vec<u8> {
    let pickle = Pickle::new().op(b"}").text("w").tensor("FloatStorage", "0", 4, parts).op(b"s").end();
    archive(pickle, &[("0".into(), vec![7; 16])])
}

/// Builds a zip archive of `data.pkl` and its storages.
pub fn archive(pickle: Vec<u8>, storages: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut entries = vec![("m/data.pkl".to_string(), pickle), ("m/byteorder".to_string(), b"little".to_vec())];
    entries.extend(storages.iter().map(|(key, data)| (format!("m/data/{key}"), data.clone())));
    zip(&entries)
}

/// Builds a state dict of a checkpoint's tensors; every other matrix is stored as its transpose.
pub fn state_dict(tensors: &BTreeMap<String, Tensor>) -> Vec<u8> {
    let (pickle, storages) = dict_of(tensors, Pickle::tensor);
    archive(pickle, &storages)
}

/// Builds a state dict as [`state_dict`] does, in the container of PyTorch before 1.6.
#[cfg(feature = "reference")]
pub fn legacy(tensors: &BTreeMap<String, Tensor>) -> Vec<u8> {
    let (pickle, storages) = dict_of(tensors, Pickle::legacy_tensor);
    let mut out = vec![0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, b'.'];
    out.extend(Pickle::new().int(1001).end());
    out.extend(Pickle::new().op(b"}").text("little_endian").op(b"\x88s").end());
    out.extend(pickle);
    let mut keys = Pickle::new();
    keys.op(b"](");
    for (key, _) in &storages {
        keys.text(key);
    }
    out.extend(keys.op(b"e").end());
    for ((_, data), tensor) in storages.iter().zip(tensors.values()) {
        out.extend((tensor.shape.iter().product::<usize>() as u64).to_le_bytes());
        out.extend(data);
    }
    out
}

/// Function that appends a tensor to a pickle: class and key of the storage, number of its elements, the tensor.
type AppendTensor = for<'a, 'p> fn(&'a mut Pickle, &str, &str, i64, Parts<'p>) -> &'a mut Pickle;

/// Builds the pickle of a dictionary of tensors, and the storages by key.
fn dict_of(tensors: &BTreeMap<String, Tensor>, append: AppendTensor) -> (Vec<u8>, Vec<(String, Vec<u8>)>) {
    let mut pickle = Pickle::new();
    pickle.op(b"}(");
    let mut storages = Vec::new();
    for (number, (name, tensor)) in tensors.iter().enumerate() {
        let class = match tensor.dtype {
            Dtype::F32 => "FloatStorage",
            Dtype::BF16 => "BFloat16Storage",
            Dtype::F16 => "HalfStorage",
            Dtype::U8 => "ByteStorage",
            other => panic!("{other:?}"),
        };
        let shape: Vec<i64> = tensor.shape.iter().map(|n| *n as i64).collect();
        let elements: i64 = shape.iter().product();
        let (data, strides) = match (&tensor.shape[..], number % 2) {
            ([rows, cols], 1) => (transposed(tensor, *rows, *cols), vec![1, *rows as i64]),
            _ => (tensor.bytes.clone(), (0..shape.len()).map(|i| shape[i + 1..].iter().product()).collect()),
        };
        append(pickle.text(name), class, &number.to_string(), elements, (0, &shape, &strides));
        storages.push((number.to_string(), data));
    }
    (pickle.op(b"u").end(), storages)
}

fn transposed(tensor: &Tensor, rows: usize, cols: usize) -> Vec<u8> {
    let size = tensor.bytes.len() / (rows * cols).max(1);
    let mut out = Vec::with_capacity(tensor.bytes.len());
    for col in 0..cols {
        for row in 0..rows {
            out.extend_from_slice(&tensor.bytes[(row * cols + col) * size..][..size]);
        }
    }
    out
}

/// Builds a zip archive of stored (uncompressed) entries with their checksums.
pub fn zip(entries: &[(String, Vec<u8>)]) -> Vec<u8> {
    zip_with(entries, |_, data| crc32fast::hash(data))
}

/// Builds a zip archive with the checksums that `crc32` returns for the name and the data of each entry.
pub fn zip_with(entries: &[(String, Vec<u8>)], crc32: impl Fn(&str, &[u8]) -> u32) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in entries {
        let start = out.len() as u32;
        // Version, flags, method, time, date, checksum, sizes, lengths of name and extra field.
        let mut facts = vec![0; 10];
        facts.extend(crc32(name, data).to_le_bytes());
        facts.extend([data.len() as u32; 2].iter().flat_map(|n| n.to_le_bytes()));
        facts.extend((name.len() as u16).to_le_bytes());
        facts.extend([0; 2]);
        out.extend(b"PK\x03\x04".iter().chain(&facts).chain(name.as_bytes()).chain(data));
        directory.extend(b"PK\x01\x02\0\0".iter().chain(&facts).chain(&[0; 10]));
        directory.extend(start.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (start, count) = (out.len() as u32, entries.len() as u16);
    out.extend(&directory);
    out.extend(b"PK\x05\x06\0\0\0\0");
    out.extend([count.to_le_bytes(), count.to_le_bytes()].concat());
    out.extend([(directory.len() as u32).to_le_bytes(), start.to_le_bytes()].concat());
    out.extend([0; 2]);
    out
}
