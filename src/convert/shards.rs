//! Which files make up a checkpoint, and which tensors do they hold together?

use super::json::{Pairs, read_json};
use super::safetensors::{Shard, SourceTensor};
use crate::error::{Context, Error, Result};
use crate::iebin::reader::plain_file_name;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// All weight files of a checkpoint, opened and checked.
#[derive(Debug)]
pub struct Shards {
    files: Vec<Shard>,
    tensors: BTreeMap<String, SourceTensor>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: Pairs<String>,
}

impl Shards {
    /// True when a directory holds weights.
    pub fn lie_in(dir: &Path) -> bool {
        [SINGLE, INDEX].iter().any(|name| dir.join(name).exists())
    }

    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// There are no weights, a shard or one of its tensors is missing, a shard lies outside `dir`, or a file is damaged.
    pub fn open(dir: &Path) -> Result<Shards> {
        let single = dir.join(SINGLE);
        if single.exists() {
            return Shards::open_files(dir, &[SINGLE.to_string()]);
        }
        let index_path = dir.join(INDEX);
        if !index_path.exists() {
            return Err(no_weights(dir));
        }
        let index: Index = read_json(&index_path)?;
        let weight_map = check_index(index.weight_map.0).at(&index_path)?;
        let names: BTreeSet<String> = weight_map.values().cloned().collect();
        for name in &names {
            plain_file_name(name).tensor("weight_map").at(&index_path)?;
            if !dir.join(name).exists() {
                let missing = format!("names the shard `{name}`, which does not exist");
                return Err(Error::corrupt(missing).at(&index_path).help("the download is incomplete; get that file"));
            }
        }
        let shards = Shards::open_files(dir, &names.into_iter().collect::<Vec<_>>())?;
        for (tensor, file) in &weight_map {
            match shards.get(tensor) {
                Some(found) if shards.file_name(found) == file => {}
                _ => return Err(Error::corrupt(format!("is not in `{file}`")).at(&index_path).tensor(tensor)),
            }
        }
        Ok(shards)
    }

    fn open_files(dir: &Path, names: &[String]) -> Result<Shards> {
        let (mut files, mut tensors) = (Vec::new(), BTreeMap::new());
        for (number, name) in names.iter().enumerate() {
            let (shard, listed) = Shard::open(&dir.join(name), number)?;
            for tensor in listed {
                let name = tensor.name.clone();
                if tensors.insert(name.clone(), tensor).is_some() {
                    return Err(Error::corrupt("is in two shards").at(shard.path()).tensor(name));
                }
            }
            files.push(shard);
        }
        Ok(Shards { files, tensors })
    }

    /// The files, in the order of their names.
    pub fn files(&self) -> &[Shard] {
        &self.files
    }

    /// All tensors by name.
    pub fn tensors(&self) -> impl Iterator<Item = &SourceTensor> {
        self.tensors.values()
    }

    /// How many tensors there are.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// A tensor by its name in the source.
    pub fn get(&self, name: &str) -> Option<&SourceTensor> {
        self.tensors.get(name)
    }

    /// The file a tensor lies in.
    pub fn path(&self, tensor: &SourceTensor) -> &Path {
        self.files[tensor.shard].path()
    }

    /// Fills `out` with the data of a tensor from byte `offset` on.
    pub fn read(&self, tensor: &SourceTensor, offset: usize, out: &mut [u8]) -> Result<()> {
        debug_assert!(offset + out.len() <= tensor.nbytes);
        self.files[tensor.shard].read_at(tensor.start + offset as u64, out).tensor(&tensor.name)
    }

    fn file_name(&self, tensor: &SourceTensor) -> &str {
        self.path(tensor).file_name().and_then(|n| n.to_str()).unwrap_or_default()
    }
}

fn check_index(pairs: Vec<(String, String)>) -> Result<HashMap<String, String>> {
    let mut map = HashMap::with_capacity(pairs.len());
    for (tensor, file) in pairs {
        if map.insert(tensor.clone(), file).is_some() {
            return Err(Error::corrupt("listed twice in weight_map").tensor(tensor));
        }
    }
    if map.is_empty() { Err(Error::corrupt("weight_map is empty")) } else { Ok(map) }
}

fn no_weights(dir: &Path) -> Error {
    let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|name| dir.join(name).exists());
    if pickled {
        return Error::unsupported("holds pytorch_model.bin weights only")
            .at(dir)
            .help("save the model once with `save_pretrained(dir, safe_serialization=True)`");
    }
    Error::corrupt(format!("holds neither {SINGLE} nor {INDEX}"))
        .at(dir)
        .help("name the directory of a Hugging Face checkpoint with --hf-dir")
}
