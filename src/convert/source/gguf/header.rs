//! Parses the header of a GGUF file as untrusted input: every count, length, type and offset is checked here.

use super::group_size;
use super::reader::{GgufTensor, MAGIC};
use super::types::GgmlType;
use super::value::{ARRAY, Metadata, Number, STRING, Scalar, Value};
use crate::convert::source::read_at::ReadAt;
use crate::error::{Context, Error, Result};

/// Maximum length of a key in bytes, as the format defines it; tensor names are shorter.
const NAME_LIMIT: u64 = 65_535;
/// Alignment of the data in bytes, unless `general.alignment` sets another.
pub(in crate::convert) const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest accepted alignment in bytes, which bounds the padding; no writer uses a larger one.
const ALIGNMENT_LIMIT: u64 = 1 << 20;

/// Checked header of a GGUF file.
#[derive(Debug)]
pub struct Header {
    /// Format version.
    pub version: u32,
    /// Metadata keys and values.
    pub metadata: Metadata,
    /// Tensors in the order of the file.
    pub tensors: Vec<GgufTensor>,
}

/// Parses and checks the header of a file; `number` is its index among the files of a split model.
///
/// # Errors
/// The file is not a GGUF file of a supported version, or a count, length, type or offset in it is impossible.
pub fn parse(source: &dyn ReadAt, number: usize) -> Result<Header> {
    let mut cursor = Cursor { source, at: 0, window: Vec::new(), start: 0 };
    let version = read_version(&mut cursor)?;
    let tensors = cursor.count("tensor_count", MIN_TENSOR)?;
    let keys = cursor.count("metadata_kv_count", MIN_KEY)?;
    let mut entries = Vec::with_capacity(keys);
    for _ in 0..keys {
        let key = cursor.string(NAME_LIMIT)?;
        let value = cursor.value().tensor(&key)?;
        entries.push((key, value));
    }
    let metadata = Metadata::new(entries)?;
    let mut infos = Vec::with_capacity(tensors);
    for _ in 0..tensors {
        let name = cursor.string(NAME_LIMIT)?;
        infos.push(cursor.tensor(name, number)?);
    }
    let alignment = alignment(&metadata)?;
    let data = cursor.at.next_multiple_of(alignment);
    group_size::choose(&mut infos, source.nbytes().saturating_sub(data), alignment)?;
    for tensor in &mut infos {
        place(tensor, data, alignment, source.nbytes()).tensor(&tensor.name.clone())?;
    }
    refuse_overlap(&infos)?;
    Ok(Header { version, metadata, tensors: infos })
}

/// Minimum size in bytes of a key with its value: 8 for the length of the name, 4 for the type, 1 for the value.
const MIN_KEY: u64 = 8 + 4 + 1;
/// Minimum size in bytes of a tensor's description: length of the name, number of dimensions, one
/// dimension, type, offset.
const MIN_TENSOR: u64 = 8 + 4 + 8 + 4 + 8;

fn read_version(cursor: &mut Cursor) -> Result<u32> {
    if cursor.left() < 4 || cursor.take(4)? != MAGIC {
        return Err(Error::corrupt("found other first bytes than `GGUF`").help("give a GGUF model file"));
    }
    match cursor.u32()? {
        version @ (2 | 3) => Ok(version),
        1 => Err(Error::unsupported("found GGUF version 1, expected 2 or 3")
            .help("llama.cpp does not read it any more either: get a newer file, or convert the checkpoint")),
        version if (1..=3).contains(&version.swap_bytes()) => {
            Err(Error::unsupported("found a big-endian GGUF file, expected a little-endian one")
                .help("convert a copy in place with `gguf-convert-endian COPY little` of the Python package gguf"))
        }
        version => Err(Error::unsupported(format!("found GGUF version {version}, expected 2 or 3"))
            .help("convert the checkpoint with a version of llama.cpp that writes version 3")),
    }
}

fn alignment(metadata: &Metadata) -> Result<u64> {
    const KEY: &str = "general.alignment";
    let alignment = metadata.count_opt(KEY)?.map_or(DEFAULT_ALIGNMENT, |n| n as u64);
    if alignment.is_power_of_two() && alignment <= ALIGNMENT_LIMIT {
        return Ok(alignment);
    }
    Err(Error::corrupt(format!("found {alignment}, expected a power of two up to {ALIGNMENT_LIMIT}")).tensor(KEY))
}

/// Converts `tensor.start` from an offset within the data to a position in the file, and checks that the
/// range lies in the file.
fn place(tensor: &mut GgufTensor, data: u64, alignment: u64, file_len: u64) -> Result<()> {
    let offset = tensor.start;
    if !offset.is_multiple_of(alignment) {
        return Err(Error::corrupt(format!("found offset {offset}, expected a multiple of {alignment}"))
            .help("the file is damaged; get it again"));
    }
    let nbytes = tensor.nbytes;
    let start = data.checked_add(offset).filter(|start| start.checked_add(nbytes).is_some_and(|end| end <= file_len));
    tensor.start = start.ok_or_else(|| {
        let found = format!("{nbytes} bytes at offset {offset} of the data reach past the end of the file");
        Error::corrupt(format!("{found} ({file_len} bytes)")).help("the file is truncated or damaged; get it again")
    })?;
    Ok(())
}

fn refuse_overlap(tensors: &[GgufTensor]) -> Result<()> {
    let mut order: Vec<&GgufTensor> = tensors.iter().collect();
    order.sort_unstable_by_key(|t| t.start);
    for pair in order.windows(2) {
        if pair[0].start + pair[0].nbytes > pair[1].start {
            return Err(
                Error::corrupt(format!("found data that overlaps tensor {}", pair[0].name)).tensor(&pair[1].name)
            );
        }
    }
    Ok(())
}

/// Number of bytes read ahead.
const WINDOW: usize = 1 << 16;

/// Sequential reader of a file with a small buffer.
struct Cursor<'a> {
    source: &'a dyn ReadAt,
    at: u64,
    window: Vec<u8>,
    start: u64,
}

impl Cursor<'_> {
    fn left(&self) -> u64 {
        self.source.nbytes().saturating_sub(self.at)
    }

    fn require(&self, n: u64) -> Result<()> {
        if n <= self.left() {
            return Ok(());
        }
        Err(Error::corrupt(format!("{n} bytes at position {} reach past the end of the file", self.at))
            .help("the file is truncated or damaged; get it again"))
    }

    /// Returns the next `n` bytes; `n` is at most [`WINDOW`].
    fn take(&mut self, n: usize) -> Result<&[u8]> {
        self.require(n as u64)?;
        let end = self.start + self.window.len() as u64;
        if self.at + n as u64 > end {
            let length = self.left().min(WINDOW as u64) as usize;
            self.window.resize(length, 0);
            self.source.read_at(self.at, &mut self.window)?;
            self.start = self.at;
        }
        let from = (self.at - self.start) as usize;
        self.at += n as u64;
        Ok(&self.window[from..from + n])
    }

    fn u32(&mut self) -> Result<u32> {
        let raw = self.take(4)?;
        Ok(u32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]))
    }

    fn u64(&mut self) -> Result<u64> {
        let mut raw = [0; 8];
        raw.copy_from_slice(self.take(8)?);
        Ok(u64::from_le_bytes(raw))
    }

    /// Reads a number of items that take at least `each` bytes; refuses numbers for which the rest
    /// of the file is too short.
    fn count(&mut self, what: &str, each: u64) -> Result<usize> {
        let n = self.u64()?;
        if n > self.left() / each {
            return Err(Error::corrupt(format!("found a count of {n}, but only {} bytes follow", self.left()))
                .tensor(what)
                .help("the file is truncated or damaged; get it again"));
        }
        Ok(n as usize)
    }

    fn bytes(&mut self, n: u64) -> Result<Vec<u8>> {
        self.require(n)?;
        let mut out = vec![0; n as usize];
        if n <= WINDOW as u64 {
            out.copy_from_slice(self.take(n as usize)?);
        } else {
            self.source.read_at(self.at, &mut out)?;
            self.at += n;
        }
        Ok(out)
    }

    fn string(&mut self, limit: u64) -> Result<String> {
        let n = self.u64()?;
        if n > limit {
            return Err(Error::corrupt(format!(
                "found a name of {n} bytes at position {}, expected at most {limit}",
                self.at
            )));
        }
        let at = self.at;
        String::from_utf8(self.bytes(n)?)
            .map_err(|_| Error::corrupt(format!("found a text at position {at} that is not UTF-8")))
    }

    fn value(&mut self) -> Result<Value> {
        match self.u32()? {
            STRING => self.string(u64::MAX).map(Value::String),
            ARRAY => self.array(),
            id => {
                let kind = Scalar::of(id)?;
                Ok(Value::Number(Number::new(kind, self.take(kind.size())?)))
            }
        }
    }

    fn array(&mut self) -> Result<Value> {
        let id = self.u32()?;
        match id {
            ARRAY => Err(Error::unsupported("found a list of lists, which is not supported")),
            STRING => {
                let n = self.count("list", 8)?;
                let mut list = Vec::with_capacity(n);
                for _ in 0..n {
                    list.push(self.string(u64::MAX)?);
                }
                Ok(Value::Strings(list))
            }
            _ => {
                let kind = Scalar::of(id)?;
                let n = self.count("list", kind.size() as u64)?;
                Ok(Value::Numbers(kind, self.bytes((n * kind.size()) as u64)?))
            }
        }
    }

    fn tensor(&mut self, name: String, file: usize) -> Result<GgufTensor> {
        let axes = self.u32()?;
        if !(1..=4).contains(&axes) {
            return Err(Error::corrupt(format!("found {axes} dimensions, expected 1 to 4")).tensor(name));
        }
        let mut shape = (0..axes).map(|_| self.u64()).collect::<Result<Vec<_>>>()?;
        shape.reverse();
        let (kind, start) = (self.u32()?, self.u64()?);
        let kind = GgmlType::of(kind).tensor(&name)?;
        let (shape, nbytes) = size(kind, &shape).tensor(&name)?;
        Ok(GgufTensor { name, kind, shape, file, start, nbytes })
    }
}

/// Returns the shape as `usize` and the size of the data in bytes; refuses empty shapes and sizes that overflow.
fn size(kind: GgmlType, shape: &[u64]) -> Result<(Vec<usize>, u64)> {
    let overflow = || Error::corrupt(format!("found shape {shape:?} of {kind}, whose size overflows or is 0"));
    let shape: Vec<usize> = shape
        .iter()
        .map(|d| usize::try_from(*d).ok().filter(|d| *d > 0))
        .collect::<Option<_>>()
        .ok_or_else(overflow)?;
    // The number of elements must fit in `usize`, too.
    shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).ok_or_else(overflow)?;
    let cols = shape[shape.len() - 1];
    if !cols.is_multiple_of(kind.block()) {
        let found = format!("found rows of {cols} elements, expected a multiple of {} for {kind} blocks", kind.block());
        return Err(Error::corrupt(found));
    }
    let row = kind.row_bytes(cols).ok_or_else(overflow)?;
    let total = shape[..shape.len() - 1].iter().try_fold(row, |n, d| n.checked_mul(*d)).ok_or_else(overflow)?;
    Ok((shape, total as u64))
}
