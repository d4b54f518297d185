//! Opens all weight files of a checkpoint and lists their tensors.

use super::checksum;
use super::layout::{Layout, WeightFiles};
use super::older_pack;
use super::read_at::InputFile;
use super::safetensors;
use super::shard;
use super::source_tensor::SourceTensor;
use crate::convert::json::{Pairs, read_limited};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::reader::plain_file_name;
use crate::manifest::FinishedTensor;
use crate::progress;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// All weight files of a checkpoint, opened and checked.
#[derive(Debug, Default)]
pub struct Shards {
    pub(super) files: Vec<InputFile>,
    pub(in crate::convert) tensors: BTreeMap<String, SourceTensor>,
    /// Matrices with finished codes, by their name in the source.
    pub(in crate::convert) packed: BTreeMap<String, FinishedTensor>,
    /// Names of matrices of 4-bit codes whose scales are only in a manifest.
    pub(in crate::convert) unexplained: BTreeSet<String>,
}

/// Index of a checkpoint, such as `model.safetensors.index.json`: the file of each tensor.
#[derive(Deserialize)]
struct Index {
    weight_map: Pairs<String>,
}

impl Shards {
    /// Opens the weight files that [`Layout::find`] finds at `path`.
    ///
    /// # Errors
    /// There are no weights, a shard or one of its tensors is missing, a shard lies outside the checkpoint, or a file
    /// is damaged.
    pub fn open(path: &Path) -> Result<Shards> {
        Shards::open_layout(&Layout::find(path)?)
    }

    /// Opens the weight files of a layout.
    ///
    /// # Errors
    /// The same as for [`Shards::open`].
    pub fn open_layout(layout: &Layout) -> Result<Shards> {
        let index_path = match &layout.weights {
            WeightFiles::One(path) => {
                layout.refuse_escape(path)?;
                return Shards::open_files(&[path]);
            }
            WeightFiles::OlderPack(path) => {
                let pack = older_pack::open(path)?;
                return layout.refuse_escape(pack.files[0].path()).map(|()| pack);
            }
            WeightFiles::Index(path) => path,
        };
        let weight_map = read_index(index_path)?;
        let dir = layout.dir();
        let names: BTreeSet<&String> = weight_map.values().collect();
        let paths: Vec<_> = names.iter().map(|name| dir.join(name)).collect();
        for (name, path) in names.iter().zip(&paths) {
            plain_file_name(name).tensor("weight_map").at(index_path)?;
            if !files::exists(path)? {
                let missing = format!("found the shard `{name}` in the index, but no such file");
                return Err(Error::corrupt(missing)
                    .at(index_path)
                    .help("the download is incomplete; download that file"));
            }
            layout.refuse_escape(path)?;
        }
        let shards = Shards::open_files(&paths)?;
        for (tensor, file) in &weight_map {
            match shards.get(tensor) {
                Some(found) if shards.file_name(found) == file => {}
                _ => {
                    return Err(Error::corrupt(format!(
                        "this tensor is not in `{file}`, the file that the index names for it"
                    ))
                    .help("index and weight files are of different versions; download the checkpoint again")
                    .at(index_path)
                    .tensor(tensor));
                }
            }
        }
        Ok(shards)
    }

    fn open_files(paths: &[impl AsRef<Path>]) -> Result<Shards> {
        let (mut files, mut tensors) = (Vec::new(), BTreeMap::new());
        for (number, path) in paths.iter().enumerate() {
            let (shard, listed) = shard::open(path.as_ref(), number)?;
            for tensor in listed {
                let name = tensor.name.clone();
                if tensors.insert(name.clone(), tensor).is_some() {
                    return Err(Error::corrupt("found this tensor in two shards")
                        .at(shard.path())
                        .tensor(name)
                        .help("the shards are of different checkpoints; get them again"));
                }
            }
            files.push(shard);
        }
        Ok(Shards { files, tensors, packed: BTreeMap::new(), unexplained: BTreeSet::new() })
    }

    /// Reads all parts of the files that have a recorded checksum, and compares their checksums.
    ///
    /// # Errors
    /// A checksum differs, a file cannot be read, or the user interrupts.
    pub(super) fn compare_checksums(&self) -> Result<()> {
        let all = self.files.iter().flat_map(InputFile::checksums);
        let bar = progress::bytes("verifying", all.map(|entry| entry.range.end - entry.range.start).sum());
        self.files.iter().try_for_each(|file| checksum::compare(file, file.checksums(), &bar).at(file.path()))
    }

    /// Returns the files, in the order of their names.
    pub fn files(&self) -> &[InputFile] {
        &self.files
    }

    /// Returns all tensors by name.
    pub fn tensors(&self) -> impl Iterator<Item = &SourceTensor> {
        self.tensors.values()
    }

    /// Returns a tensor by its name in the source.
    pub fn get(&self, name: &str) -> Option<&SourceTensor> {
        self.tensors.get(name)
    }

    /// Returns the path of the file of a tensor.
    pub fn path(&self, tensor: &SourceTensor) -> &Path {
        self.files[tensor.shard].path()
    }

    /// Fills `out` with the data of a tensor from byte `offset` on, in row-major order.
    pub fn read(&self, tensor: &SourceTensor, offset: usize, out: &mut [u8]) -> Result<()> {
        tensor.read(&self.files[tensor.shard], offset, out).tensor(&tensor.name)
    }

    /// Returns the texts of `__metadata__` of all safetensors files; that of the last file counts where several have a
    /// key.
    ///
    /// # Errors
    /// A file is no safetensors file, or damaged.
    pub fn metadata(&self) -> Result<BTreeMap<String, String>> {
        let mut all = BTreeMap::new();
        for file in &self.files {
            all.extend(safetensors::metadata(file).at(file.path())?);
        }
        Ok(all)
    }

    fn file_name(&self, tensor: &SourceTensor) -> &str {
        self.path(tensor).file_name().and_then(|n| n.to_str()).unwrap_or_default()
    }
}

/// Reads an index, which maps tensors to files.
///
/// # Errors
/// The file is not an index, is empty, or lists a tensor twice.
pub fn read_index(path: &Path) -> Result<HashMap<String, String>> {
    parse_index(&read_limited(path)?).at(path).help("the index is damaged; get it again")
}

/// Parses the text of an index.
///
/// # Errors
/// The same as for [`read_index`].
pub fn parse_index(text: &[u8]) -> Result<HashMap<String, String>> {
    let index: Index = serde_json::from_slice(text).map_err(|e| Error::corrupt(format!("invalid JSON: {e}")))?;
    check_index(index.weight_map.0)
}

fn check_index(pairs: Vec<(String, String)>) -> Result<HashMap<String, String>> {
    let mut map = HashMap::with_capacity(pairs.len());
    for (tensor, file) in pairs {
        if map.insert(tensor.clone(), file).is_some() {
            return Err(Error::corrupt("found this tensor twice in weight_map").tensor(tensor));
        }
    }
    if map.is_empty() { Err(Error::corrupt("weight_map is empty")) } else { Ok(map) }
}
