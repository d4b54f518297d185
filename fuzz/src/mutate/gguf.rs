//! Mutates GGUF files: keys with typed values, descriptions of tensors, and data. In half of the outputs the tensors
//! are placed one after the other, with the sizes of their types and shapes.

use super::{Reader, below, edit, edit_text, number, one_in, pick};
use iec::convert::source::gguf::types::GgmlType;
use iec::rng::Rng;

const MAGIC: &[u8] = b"GGUF";
const STRING: u32 = 8;
const ARRAY: u32 = 9;
/// Maximum bytes of data that are written; the tensors may describe more.
const MOST_DATA: u64 = 4096;

/// Contents of a GGUF file. Counts, lengths and padding follow from them when the file is written.
struct File {
    version: u32,
    keys: Vec<Key>,
    tensors: Vec<Tensor>,
    data: Vec<u8>,
}

#[derive(Clone)]
struct Key {
    name: Vec<u8>,
    value: Value,
}

#[derive(Clone)]
struct Value {
    is_array: bool,
    kind: u32,
    /// Little-endian numbers, or strings; exactly one unless the value is an array.
    items: Vec<Vec<u8>>,
}

#[derive(Clone)]
struct Tensor {
    name: Vec<u8>,
    shape: Vec<u64>,
    kind: u32,
    offset: u64,
}

pub(super) fn mutate(input: &[u8], other: &[u8], rng: &mut Rng) -> Option<Vec<u8>> {
    let mut file = parse(input)?;
    let other = parse(other)?;
    for _ in 0..=below(rng, 3) {
        let (key, tensor) = (below(rng, file.keys.len()), below(rng, file.tensors.len()));
        match below(rng, 32) {
            0 => file.version = number(3, rng) as u32,
            1..4 => edit(&mut file.keys, &other.keys, rng),
            4..8 => edit(&mut file.tensors, &other.tensors, rng),
            8..16 => file.tensors.get_mut(tensor)?.change(rng),
            _ if other.keys.is_empty() => {}
            _ => file.keys.get_mut(key)?.change(pick(&other.keys, rng).clone(), rng),
        }
    }
    if one_in(2, rng) {
        file.place();
    }
    Some(file.write(rng))
}

/// Returns the size in bytes of a number of this type; `None` for strings, arrays and unknown types.
fn size(kind: u32) -> Option<usize> {
    [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8].get(kind as usize).copied().filter(|size| *size > 0)
}

fn parse(input: &[u8]) -> Option<File> {
    let mut reader = Reader { bytes: input, at: 0 };
    (reader.take(4)? == MAGIC).then_some(())?;
    let version = reader.uint(4)? as u32;
    let (tensors, keys) = (reader.uint(8)?, reader.uint(8)?);
    let keys: Vec<Key> = (0..keys).map(|_| parse_key(&mut reader)).collect::<Option<_>>()?;
    let tensors = (0..tensors).map(|_| parse_tensor(&mut reader)).collect::<Option<_>>()?;
    let start = reader.at.next_multiple_of(alignment(&keys));
    Some(File { version, keys, tensors, data: input.get(start..).unwrap_or_default().to_vec() })
}

fn parse_key(reader: &mut Reader) -> Option<Key> {
    let name = reader.prefixed(8)?.to_vec();
    let mut kind = reader.uint(4)? as u32;
    let is_array = kind == ARRAY;
    let mut count = 1;
    if is_array {
        (kind, count) = (reader.uint(4)? as u32, reader.uint(8)?);
    }
    let item = |_| match size(kind) {
        Some(size) => reader.take(size as u64).map(<[u8]>::to_vec),
        None if kind == STRING => reader.prefixed(8).map(<[u8]>::to_vec),
        None => None,
    };
    let items = (0..count).map(item).collect::<Option<_>>()?;
    Some(Key { name, value: Value { is_array, kind, items } })
}

fn parse_tensor(reader: &mut Reader) -> Option<Tensor> {
    let name = reader.prefixed(8)?.to_vec();
    let axes = reader.uint(4)?;
    let shape = (0..axes).map(|_| reader.uint(8)).collect::<Option<_>>()?;
    Some(Tensor { name, shape, kind: reader.uint(4)? as u32, offset: reader.uint(8)? })
}

/// Returns the alignment that the keys set, or the default of 32 if it is missing, 0 or larger than [`MOST_DATA`].
fn alignment(keys: &[Key]) -> usize {
    let key = keys.iter().find(|key| key.name == b"general.alignment" && key.value.kind != STRING);
    let item = key.and_then(|key| key.value.items.first());
    let set = item.and_then(|item| Reader { bytes: item, at: 0 }.uint(item.len() as u64));
    set.filter(|n| (1..=MOST_DATA).contains(n)).unwrap_or(32) as usize
}

impl Key {
    fn change(&mut self, other: Key, rng: &mut Rng) {
        let Value { is_array, kind, items } = &mut self.value;
        let donor = String::from_utf8_lossy(other.value.items.first().unwrap_or(&other.name)).into_owned();
        let (at, n) = (below(rng, items.len()), items.len());
        match (below(rng, 8), items.get_mut(at)) {
            (0, _) => self.name = other.name,
            (1, _) => self.value = other.value,
            (2, _) => edit_text(&mut self.name, &[&donor], rng),
            (3, _) => {
                *kind = below(rng, 14) as u32;
                items.iter_mut().for_each(|item| item.resize(size(*kind).unwrap_or(item.len()), 0));
            }
            (4, _) if n == 1 => *is_array = !*is_array,
            (4 | 5, _) if *is_array && *kind == other.value.kind => edit(items, &other.value.items, rng),
            (_, Some(item)) if *kind == STRING => edit_text(item, &[&donor], rng),
            (_, Some(item)) => {
                let n = item.len().min(8);
                let value = number(Reader { bytes: item, at: 0 }.uint(n as u64).unwrap_or(0), rng);
                item[..n].copy_from_slice(&value.to_le_bytes()[..n]);
            }
            (_, None) => {}
        }
    }
}

impl Tensor {
    fn change(&mut self, rng: &mut Rng) {
        let at = below(rng, self.shape.len());
        match below(rng, 6) {
            0 => self.kind = below(rng, 41) as u32,
            1 => self.offset = number(self.offset, rng),
            2 => edit(&mut self.shape, &[1, 2, 32, 256], rng),
            3 => edit_text(&mut self.name, &["blk.0.attn_q.weight"], rng),
            _ => self.shape.iter_mut().skip(at).take(1).for_each(|axis| *axis = number(*axis, rng)),
        }
    }

    /// Returns the size of the tensor's data in bytes; `None` if its type is unknown or the size overflows.
    fn nbytes(&self) -> Option<u64> {
        let (columns, rows) = self.shape.split_first()?;
        let row = GgmlType::of(self.kind).ok()?.row_bytes(*columns as usize)?;
        rows.iter().try_fold(row as u64, |n, axis| n.checked_mul(*axis))
    }
}

impl File {
    /// Places the tensors one after the other and gives the data their length. Stops at a tensor whose size is unknown
    /// or too large, and then leaves the data as they are.
    fn place(&mut self) {
        let alignment = alignment(&self.keys) as u64;
        let mut end = 0u64;
        for tensor in &mut self.tensors {
            let start = end.next_multiple_of(alignment);
            let next = tensor.nbytes().and_then(|n| start.checked_add(n)).filter(|next| *next <= MOST_DATA);
            let Some(next) = next else { return };
            (tensor.offset, end) = (start, next);
        }
        self.data.resize(end as usize, 7);
    }

    /// Writes the file. In one of sixteen calls, a count or a length may be wrong.
    fn write(&self, rng: &mut Rng) -> Vec<u8> {
        let mut right = if one_in(16, rng) { below(rng, 64) } else { usize::MAX };
        let mut out = [MAGIC, &self.version.to_le_bytes()].concat();
        let mut count = |out: &mut Vec<u8>, n: usize| {
            right = right.wrapping_sub(1);
            let n = if right == 0 { number(n as u64, rng) } else { n as u64 };
            out.extend(n.to_le_bytes());
        };
        count(&mut out, self.tensors.len());
        count(&mut out, self.keys.len());
        for Key { name, value } in &self.keys {
            count(&mut out, name.len());
            out.extend_from_slice(name);
            if value.is_array {
                out.extend([ARRAY.to_le_bytes(), value.kind.to_le_bytes()].concat());
                count(&mut out, value.items.len());
            } else {
                out.extend(value.kind.to_le_bytes());
            }
            for item in &value.items {
                if value.kind == STRING {
                    count(&mut out, item.len());
                }
                out.extend_from_slice(item);
            }
        }
        for tensor in &self.tensors {
            count(&mut out, tensor.name.len());
            out.extend_from_slice(&tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().for_each(|axis| out.extend(axis.to_le_bytes()));
            out.extend([&tensor.kind.to_le_bytes()[..], &tensor.offset.to_le_bytes()].concat());
        }
        out.resize(out.len().next_multiple_of(alignment(&self.keys)), 0);
        [out, self.data.clone()].concat()
    }
}
