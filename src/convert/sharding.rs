//! Writes new checkpoints: divides tensors into safetensors files and replaces older checkpoints.
//!
//! The layout is the one the `safetensors` library writes: within a file, wider elements first, then by name; the
//! header is padded with spaces to a multiple of eight; payloads follow without holes.

use crate::dtype::DType;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin;
use crate::output::{
    AtomicFile, DirLock, directory_of, exchange, pretty, refuse_irreplaceable, require_space, reserve, stale,
};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Tensor that will be listed in a header, with the source of its bytes. Its size was checked not to overflow.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed<T> {
    /// Name in the checkpoint.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Source of its bytes.
    pub content: T,
}

impl<T> Listed<T> {
    /// Returns the size in bytes.
    pub fn nbytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.size() as u64
    }
}

/// Safetensors file to be written.
#[derive(Debug)]
pub struct Shard<T> {
    /// `model.safetensors` or `model-00001-of-0000N.safetensors`.
    pub file_name: String,
    /// Length prefix and JSON header, padded.
    pub header: Vec<u8>,
    /// Tensors in file order.
    pub tensors: Vec<Listed<T>>,
}

impl<T> Shard<T> {
    /// Returns the size of the file.
    pub fn nbytes(&self) -> u64 {
        self.header.len() as u64 + self.tensors.iter().map(Listed::nbytes).sum::<u64>()
    }

    /// Returns the start of each tensor's payload in the file.
    pub fn offsets(&self) -> impl Iterator<Item = (&Listed<T>, u64)> {
        self.tensors.iter().scan(self.header.len() as u64, |end, tensor| {
            let start = *end;
            *end += tensor.nbytes();
            Some((tensor, start))
        })
    }

    /// Creates the file, reserves its space and writes its header.
    ///
    /// # Errors
    /// The disk is full.
    pub fn create(&self, dir: &Path) -> Result<AtomicFile> {
        let file = AtomicFile::create(&dir.join(&self.file_name))?;
        require_space(file.path(), self.nbytes(), 0)?;
        reserve(file.file(), self.nbytes(), std::iter::once(0..self.nbytes())).at(file.path())?;
        file.write_at(&self.header, 0)?;
        Ok(file)
    }
}

/// Divides tensors into shards in the given order, up to `max_bytes` of payload each (a larger tensor gets its own
/// shard).
pub fn divide<T>(tensors: Vec<Listed<T>>, max_bytes: u64) -> Vec<Shard<T>> {
    let mut groups: Vec<Vec<Listed<T>>> = Vec::new();
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

fn header<T>(tensors: &[Listed<T>]) -> Vec<u8> {
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

/// Returns name and content of the index file; `None` for a single shard.
pub fn index<T>(shards: &[Shard<T>]) -> Option<(&'static str, Vec<u8>)> {
    if shards.len() < 2 {
        return None;
    }
    let mut entries: Vec<(&str, &str)> =
        shards.iter().flat_map(|s| s.tensors.iter().map(|t| (t.name.as_str(), s.file_name.as_str()))).collect();
    entries.sort_unstable();
    let weight_map: Map<String, Value> = entries.into_iter().map(|(name, file)| (name.into(), file.into())).collect();
    let total_size: u64 = shards.iter().flat_map(|s| &s.tensors).map(Listed::nbytes).sum();
    let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
    Some(("model.safetensors.index.json", pretty(&index)))
}

/// Refuses a directory with a checkpoint, unless `overwrite` is true and the directory can be replaced as a whole.
///
/// # Errors
/// `dir` holds a pack, or a checkpoint that must not or cannot be replaced, or it cannot be read.
pub fn refuse_checkpoint(dir: &Path, overwrite: bool) -> Result<()> {
    stale::remove(dir);
    stale::remove(directory_of(dir));
    let pack = [iebin::JSON_NAME, iebin::BIN_NAME, iebin::DEDUP_JSON_NAME];
    if files::first(pack.map(|name| dir.join(name)))?.is_some() {
        let found = "found a pack, whose configuration a checkpoint would replace";
        return Err(Error::usage(found).at(dir).help("choose another --out-dir"));
    }
    match checkpoint_files(dir)?.first() {
        Some(file) if !overwrite => Err(Error::usage(format!("already holds a checkpoint ({file})"))
            .at(dir)
            .help("give --overwrite to replace it, or another --out-dir")),
        Some(_) => refuse_irreplaceable(dir),
        None => Ok(()),
    }
}

/// Gives the files of a checkpoint their names in `dir`. An old checkpoint is replaced in one step, and an empty
/// directory is filled in one step. In a directory with other files, the new files are renamed one by one in the given
/// order; the last should be `config.json`, without which no reader opens a checkpoint. `allowed`, which fails when
/// files would be lost, is called again before, because another command may have written a checkpoint in the meantime.
///
/// # Errors
/// `allowed` fails, or a file cannot be removed, synced or renamed.
pub fn commit(
    dir: &Path,
    files: impl IntoIterator<Item = AtomicFile>,
    allowed: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let _lock = DirLock::acquire(dir)?;
    allowed()?;
    let is_replaced = if is_new(dir)? { refuse_irreplaceable(dir).is_ok() } else { !checkpoint_files(dir)?.is_empty() };
    if !is_replaced {
        return files.into_iter().try_for_each(AtomicFile::commit);
    }
    exchange(dir, files, |name| !is_checkpoint_file(name))
}

/// Returns true for a directory that is empty except for temporary files of this program.
fn is_new(dir: &Path) -> Result<bool> {
    for entry in std::fs::read_dir(dir).at(dir)? {
        let entry = entry.at(dir)?;
        let is_temporary = entry.file_name().to_string_lossy().starts_with(stale::PREFIX);
        if !is_temporary || entry.file_type().at(dir)?.is_dir() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns true for the names that [`divide`] and [`index`] give: `model.safetensors`, its index, and
/// `model-00001-of-00002.safetensors`. Any other file, even if its name begins with `model`, belongs to the user.
fn is_weight_file(name: &str) -> bool {
    let is_number = |digits: &str| digits.len() >= 5 && digits.bytes().all(|digit| digit.is_ascii_digit());
    let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors")?.split_once("-of-"));
    numbers.is_some_and(|(number, count)| is_number(number) && is_number(count))
        || ["model.safetensors", "model.safetensors.index.json"].contains(&name)
}

fn is_checkpoint_file(name: &str) -> bool {
    name == "config.json" || is_weight_file(name)
}

/// Returns the files in `dir` that belong to a checkpoint, `config.json` first.
fn checkpoint_files(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    if !files::exists(dir)? {
        return Ok(names);
    }
    for entry in std::fs::read_dir(dir).at(dir)? {
        let name = entry.at(dir)?.file_name().to_string_lossy().into_owned();
        if is_checkpoint_file(&name) {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_weight_files_are_replaced() {
        for name in ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"] {
            assert!(is_weight_file(name), "{name}");
        }
        for name in
            ["model.safetensors.bak", "model-notes.safetensors.txt", "model-1-of-2.safetensors", "model-a.safetensors"]
        {
            assert!(!is_weight_file(name), "{name}");
        }
        let sizes = |count: usize| -> Vec<Listed<()>> {
            let tensor = |i| Listed { name: format!("t{i}"), dtype: DType::U8, shape: vec![8], content: () };
            (0..count).map(tensor).collect()
        };
        for count in [1, 3] {
            let shards = divide(sizes(count), 8);
            assert_eq!(shards.len(), count);
            assert!(shards.iter().all(|shard| is_weight_file(&shard.file_name)));
            assert!(index(&shards).is_none_or(|(name, _)| is_weight_file(name)));
        }
    }
}
