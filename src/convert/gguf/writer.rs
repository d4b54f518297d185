//! Writes the header of a GGUF file and computes the position of each tensor's data.

use crate::convert::source::gguf::header::DEFAULT_ALIGNMENT;
use crate::convert::source::gguf::types::GgmlType;
use crate::convert::source::gguf::value::{ARRAY, STRING, Value};

/// Format version of written files.
const VERSION: u32 = 3;

/// A tensor to be written.
#[derive(Debug, Clone)]
pub struct GgufEntry {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub kind: GgmlType,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Length of the data in bytes.
    pub nbytes: u64,
}

/// Header of a file and positions of its data.
#[derive(Debug)]
pub struct GgufLayout {
    /// All bytes before the data, padding included.
    pub header: Vec<u8>,
    /// Position of each tensor's data in the file, in bytes.
    pub starts: Vec<u64>,
    /// Length of the file in bytes.
    pub total: u64,
}

/// Lays out a file: metadata and tensors in the given order, data aligned to 32 bytes.
pub fn lay_out(metadata: &[(String, Value)], tensors: &[GgufEntry]) -> GgufLayout {
    let mut header = b"GGUF".to_vec();
    header.extend_from_slice(&VERSION.to_le_bytes());
    put_u64(&mut header, tensors.len());
    put_u64(&mut header, metadata.len());
    for (key, value) in metadata {
        put_text(&mut header, key);
        put_value(&mut header, value);
    }
    let mut offset = 0u64;
    let mut offsets = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        put_text(&mut header, &tensor.name);
        put_u32(&mut header, tensor.shape.len() as u32);
        tensor.shape.iter().rev().for_each(|d| put_u64(&mut header, *d));
        put_u32(&mut header, tensor.kind.id());
        header.extend_from_slice(&offset.to_le_bytes());
        offsets.push(offset);
        offset = (offset + tensor.nbytes).next_multiple_of(DEFAULT_ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(DEFAULT_ALIGNMENT as usize), 0);
    let data = header.len() as u64;
    // The data of the last tensor is padded, too, as other programs write it.
    GgufLayout { starts: offsets.iter().map(|offset| data + offset).collect(), total: data + offset, header }
}

fn put_u32(out: &mut Vec<u8>, n: u32) {
    out.extend_from_slice(&n.to_le_bytes());
}

fn put_u64(out: &mut Vec<u8>, n: usize) {
    out.extend_from_slice(&(n as u64).to_le_bytes());
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_u64(out, text.len());
    out.extend_from_slice(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Number(n) => {
            put_u32(out, n.kind().id());
            out.extend_from_slice(n.bytes());
        }
        Value::String(text) => {
            put_u32(out, STRING);
            put_text(out, text);
        }
        Value::Strings(list) => {
            put_u32(out, ARRAY);
            put_u32(out, STRING);
            put_u64(out, list.len());
            list.iter().for_each(|text| put_text(out, text));
        }
        Value::Numbers(kind, bytes) => {
            put_u32(out, ARRAY);
            put_u32(out, kind.id());
            put_u64(out, bytes.len() / kind.size());
            out.extend_from_slice(bytes);
        }
    }
}
