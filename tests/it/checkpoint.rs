//! Reads, writes and damages checkpoints for tests.

use crate::common::fixture;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Tensor in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Reads all tensors of a checkpoint with the reference implementation of safetensors.
pub fn load(dir: &Path) -> BTreeMap<String, Tensor> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let bytes = std::fs::read(path).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
                let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
                all.insert(name.to_string(), Tensor { dtype, shape, bytes });
            }
        }
    }
    all
}

/// Writes `model.safetensors`.
pub fn save(dir: &Path, tensors: &BTreeMap<String, Tensor>) {
    let views = tensors.iter().map(|(n, t)| (n, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}

/// Copies a fixture into a temporary directory, where a test may modify it.
pub fn copy_of(name: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// Copies a fixture with its weights, modified by `edit`, in one file.
pub fn edited(name: &str, edit: impl FnOnce(&mut BTreeMap<String, Tensor>)) -> TempDir {
    let dir = copy_of(name);
    let mut tensors = load(dir.path());
    edit(&mut tensors);
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().contains(".safetensors") {
            std::fs::remove_file(path).unwrap();
        }
    }
    save(dir.path(), &tensors);
    dir
}

/// Changes a JSON file in place.
pub fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    edit(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

/// Removes the digest and the hashes of other files from the description of a pack, so that edited files are read.
pub fn without_digest(pack: &Path) {
    edit_json(&pack.join("model.ie.json"), |description| {
        let fields = description.as_object_mut().unwrap();
        fields.shift_remove("sha256");
        fields.shift_remove("files");
    });
}

/// Changes the header of a safetensors file as text, keeping the data.
pub fn edit_header(path: &Path, edit: impl FnOnce(String) -> String) {
    let bytes = std::fs::read(path).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = edit(String::from_utf8(bytes[8..end].to_vec()).unwrap());
    let mut changed = (header.len() as u64).to_le_bytes().to_vec();
    changed.extend_from_slice(header.as_bytes());
    changed.extend_from_slice(&bytes[end..]);
    std::fs::write(path, changed).unwrap();
}

/// Reads all files of a directory, by name.
pub fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.map(|e| (PathBuf::from(e.file_name()), std::fs::read(e.path()).unwrap())).collect()
}
