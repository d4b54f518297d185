//! How tensors are divided into safetensors files, and where each row lies in its file.
//!
//! The layout is the one the `safetensors` library writes: within a file, wider elements first, then by name; the header
//! is padded with spaces to a multiple of eight; payloads follow without holes.

use super::tensors::Tensor;
use serde_json::{Map, Value, json};

/// One safetensors file to be written.
#[derive(Debug)]
pub struct Shard {
    /// `model.safetensors` or `model-00001-of-0000N.safetensors`.
    pub file_name: String,
    /// Length prefix and JSON header, padded.
    pub header: Vec<u8>,
    /// Tensors in file order.
    pub tensors: Vec<Tensor>,
}

impl Shard {
    /// Size of the file.
    pub fn nbytes(&self) -> u64 {
        self.header.len() as u64 + self.tensors.iter().map(Tensor::nbytes).sum::<u64>()
    }

    /// Start of each tensor's payload in the file.
    pub fn offsets(&self) -> impl Iterator<Item = (&Tensor, u64)> {
        self.tensors.iter().scan(self.header.len() as u64, |end, tensor| {
            let start = *end;
            *end += tensor.nbytes();
            Some((tensor, start))
        })
    }
}

/// Fills shards in model order up to `max_bytes` of payload each (a larger tensor gets a shard of its own).
pub fn divide(tensors: Vec<Tensor>, max_bytes: u64) -> Vec<Shard> {
    let mut groups: Vec<Vec<Tensor>> = Vec::new();
    let mut filled = 0u64;
    for tensor in tensors {
        let nbytes = tensor.nbytes();
        match groups.last_mut() {
            Some(group) if filled.saturating_add(nbytes) <= max_bytes => group.push(tensor),
            _ => {
                groups.push(vec![tensor]);
                filled = 0;
            }
        }
        filled += nbytes;
    }
    let count = groups.len();
    groups
        .into_iter()
        .enumerate()
        .map(|(i, mut tensors)| {
            tensors.sort_by(|a, b| b.dtype.size().cmp(&a.dtype.size()).then_with(|| a.name.cmp(&b.name)));
            let file_name = match count {
                1 => "model.safetensors".into(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
            };
            Shard { file_name, header: header(&tensors), tensors }
        })
        .collect()
}

fn header(tensors: &[Tensor]) -> Vec<u8> {
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut end = 0;
    for tensor in tensors {
        let start = end;
        end += tensor.nbytes();
        let entry = json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [start, end]});
        entries.insert(tensor.name.clone(), entry);
    }
    let mut text = serde_json::to_vec(&entries).expect("JSON values serialize");
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    header
}

/// `model.safetensors.index.json`; only for several shards.
pub fn index(shards: &[Shard]) -> Option<Value> {
    if shards.len() < 2 {
        return None;
    }
    let mut entries: Vec<(&str, &str)> =
        shards.iter().flat_map(|s| s.tensors.iter().map(|t| (t.name.as_str(), s.file_name.as_str()))).collect();
    entries.sort_unstable();
    let weight_map: Map<String, Value> = entries.into_iter().map(|(name, file)| (name.into(), file.into())).collect();
    let total_size: u64 = shards.iter().flat_map(|s| &s.tensors).map(Tensor::nbytes).sum();
    Some(json!({"metadata": {"total_size": total_size}, "weight_map": weight_map}))
}
