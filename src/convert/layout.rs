//! Where in what the user named do the weights lie, and where what accompanies them?
//!
//! A directory holds weights under one of the names below, or in `hf/`, `hf/original/` or `original/` beneath it.
//! Safetensors are preferred to pickles, and both to a pack of an older program. A file stands for itself, with its
//! companions beside it.

use super::older_pack;
use crate::error::{Context, Error, Result};
use std::path::{Path, PathBuf};

const SAFETENSORS: &str = "model.safetensors";
/// Names of weights in a directory, in the order of preference.
pub(in crate::convert) const NAMES: [&str; 4] =
    [SAFETENSORS, "model.safetensors.index.json", "pytorch_model.bin", PICKLE_INDEX];
const PICKLE_INDEX: &str = "pytorch_model.bin.index.json";
/// Directories that are searched, below the one the user named.
const BELOW: [&str; 4] = ["", "hf", "hf/original", "original"];

/// The places of a checkpoint.
#[derive(Debug)]
pub struct Layout {
    /// The weights' directory first, then where their companions may lie.
    pub dirs: Vec<PathBuf>,
    /// The weights.
    pub weights: WeightFiles,
    /// The user named the weight file itself.
    explicit: bool,
}

/// The files that hold the weights.
#[derive(Debug)]
pub enum WeightFiles {
    /// All in one file.
    One(PathBuf),
    /// The files that this index names.
    Index(PathBuf),
    /// A pack of an older program with this description.
    OlderPack(PathBuf),
}

impl Layout {
    /// Finds the weights at `path`: a directory or a weight file.
    ///
    /// # Errors
    /// There are none, or several and nothing says which.
    pub fn find(path: &Path) -> Result<Layout> {
        if path.is_file() {
            let dir = match path.parent() {
                Some(dir) if !dir.as_os_str().is_empty() => dir,
                _ => Path::new("."),
            };
            return Ok(Layout { dirs: vec![dir.to_path_buf()], weights: by_name(path.to_path_buf()), explicit: true });
        }
        for below in BELOW {
            let dir = path.join(below);
            if let Some(weights) = weights_in(&dir)? {
                return Ok(Layout { dirs: search_path(path, below), weights, explicit: false });
            }
        }
        std::fs::metadata(path).at(path).help("name the directory of a Hugging Face checkpoint with --hf-dir")?;
        if path.join("model.ie.json").is_file() {
            return Err(Error::usage("found a pack, expected a Hugging Face checkpoint").at(path).help(format!(
                "use it with `iec run --model-dir {0}`, or turn it back: `iec unpack --model-dir {0} --out-dir DIR`",
                path.display()
            )));
        }
        Err(Error::corrupt(format!("holds no weights (looked for {}, or one other *.safetensors)", NAMES.join(", ")))
            .at(path)
            .help("name the directory of a Hugging Face checkpoint with --hf-dir"))
    }

    /// True when a directory itself holds weights.
    pub fn lies_in(dir: &Path) -> bool {
        !matches!(weights_in(dir), Ok(None))
    }

    /// The directory of the weights.
    pub fn dir(&self) -> &Path {
        &self.dirs[0]
    }

    /// A file that accompanies the weights, if it exists.
    ///
    /// # Errors
    /// It is a link that leads out of the checkpoint.
    pub fn companion(&self, name: &str) -> Result<Option<PathBuf>> {
        let path = self.dirs.iter().map(|dir| dir.join(name)).find(|path| path.exists());
        path.map(|path| self.refuse_escape(&path).map(|()| path)).transpose()
    }

    /// Refuses a link that leads out of the checkpoint: whoever made the directory would choose what is read, and packs
    /// carry copies. A snapshot of the Hugging Face cache links to `blobs` of the same repository.
    ///
    /// # Errors
    /// It is such a link, and not the file that the user named.
    pub fn refuse_escape(&self, file: &Path) -> Result<()> {
        if self.explicit && matches!(&self.weights, WeightFiles::One(named) if named == file) {
            return Ok(());
        }
        let outermost = self.dirs.last().unwrap_or(&self.dirs[0]);
        let dir = outermost.canonicalize().at(outermost)?;
        let target = file.canonicalize().at(file)?;
        let snapshots = dir.ancestors().find(|a| a.file_name().is_some_and(|name| name == "snapshots"));
        let inside = |root: &Path| target.starts_with(root);
        if inside(&dir) || snapshots.and_then(Path::parent).is_some_and(|repo| inside(&repo.join("blobs"))) {
            return Ok(());
        }
        Err(Error::unsupported(format!("is a link to {}, outside the checkpoint", target.display()))
            .at(file)
            .help("name the directory in which the file really lies with --hf-dir, or copy it"))
    }
}

/// The weights' directory, then those above it up to the one that was named.
fn search_path(named: &Path, below: &str) -> Vec<PathBuf> {
    let weights = if below.is_empty() { named.to_path_buf() } else { named.join(below) };
    let above = Path::new(below).components().count();
    let mut dirs: Vec<PathBuf> = weights.ancestors().take(above + 1).map(Path::to_path_buf).collect();
    // `original/` of gpt-oss has weights and configuration; the tokenizer lies above it.
    if let (true, Some(parent)) = (below.is_empty() && named.ends_with("original"), named.parent()) {
        dirs.push(parent.to_path_buf());
    }
    dirs
}

/// A weight file, an index or a description, by its name.
pub(in crate::convert) fn by_name(path: PathBuf) -> WeightFiles {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match () {
        () if name.ends_with(".index.json") => WeightFiles::Index(path),
        () if name.ends_with(".json") => WeightFiles::OlderPack(path),
        () => WeightFiles::One(path),
    }
}

/// The weights of a directory: one of [`NAMES`], an older pack, or the only safetensors file.
fn weights_in(dir: &Path) -> Result<Option<WeightFiles>> {
    let known = NAMES.iter().map(|name| dir.join(name)).find(|path| path.exists());
    if let Some(path) = known {
        return Ok(Some(by_name(path)));
    }
    if let Some(description) = older_pack::description_in(dir) {
        return Ok(Some(WeightFiles::OlderPack(description)));
    }
    let Ok(listing) = std::fs::read_dir(dir) else { return Ok(None) };
    let mut others = Vec::new();
    for entry in listing {
        let path = entry.at(dir)?.path();
        if path.extension().is_some_and(|e| e == "safetensors") && path.is_file() {
            others.push(path);
        }
    }
    others.sort();
    match others.len() {
        0 => Ok(None),
        1 => Ok(others.pop().map(WeightFiles::One)),
        n => Err(Error::corrupt(format!("holds {n} safetensors files, but no index that names them"))
            .at(dir)
            .help("get model.safetensors.index.json, too, or name one file with --hf-dir")),
    }
}
