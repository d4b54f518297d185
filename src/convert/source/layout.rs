//! Locates the weight files of a checkpoint and the files that accompany them, from the path the user named.
//!
//! A directory holds weights under one of the names below, or in its subdirectories `hf/`, `hf/original/` or
//! `original/`. Safetensors are preferred to pickles, and both to a pack written by an older program. When the user
//! names a weight file, exactly this file is used; its companions are expected in the same directory.

use super::older_pack;
use crate::error::{Cause, Context, Error, Result};
use crate::files;
use crate::iebin::{TOOL_TEMPLATE_NAME, TOOL_TEMPLATE_SOURCE};
use std::path::{Path, PathBuf};

const SAFETENSORS: &str = "model.safetensors";
/// File names of weights in a directory, in order of preference.
pub(in crate::convert) const NAMES: [&str; 4] =
    [SAFETENSORS, "model.safetensors.index.json", "pytorch_model.bin", PICKLE_INDEX];
const PICKLE_INDEX: &str = "pytorch_model.bin.index.json";
/// Subdirectories that are searched below the directory the user named.
const BELOW: [&str; 4] = ["", "hf", "hf/original", "original"];

/// Advice for a path without weights.
const NAME_A_CHECKPOINT: &str = "name the directory of a Hugging Face checkpoint, which holds config.json and weights";

/// Location of a checkpoint's files.
#[derive(Debug)]
pub struct Layout {
    /// Directories to search: the one with the weights first, then others that may hold the companion files.
    pub dirs: Vec<PathBuf>,
    /// The weight files.
    pub weights: WeightFiles,
    /// True when the user named the weight file itself.
    explicit: bool,
}

/// The files that hold the weights.
#[derive(Debug)]
pub enum WeightFiles {
    /// A single file with all weights.
    One(PathBuf),
    /// Index file that lists the weight files.
    Index(PathBuf),
    /// Description file of a pack written by an older program.
    OlderPack(PathBuf),
}

impl Layout {
    /// Finds the weights at `path`: a directory or a weight file.
    ///
    /// # Errors
    /// No weights are found, or several candidates are found and no index chooses between them.
    pub fn find(path: &Path) -> Result<Layout> {
        let found = std::fs::metadata(path).at(path).help(NAME_A_CHECKPOINT)?;
        if !found.is_dir() {
            files::open(path)?;
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
        if files::is_file(&path.join("model.ie.json"))? {
            return Err(Error::usage("found a pack, expected a Hugging Face checkpoint").at(path).help(format!(
                "name it with --model-dir, as in `iec run --model-dir {0}`, or turn it back into a checkpoint: \
                 `iec unpack --model-dir {0} --out-dir DIR`",
                path.display()
            )));
        }
        Err(Error::corrupt(format!("found no weights, expected {}, or one other *.safetensors", NAMES.join(", ")))
            .at(path)
            .help(NAME_A_CHECKPOINT))
    }

    /// Returns true when `dir` itself (not a subdirectory) holds weights.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn lies_in(dir: &Path) -> Result<bool> {
        match weights_in(dir) {
            Err(e) if matches!(e.cause(), Cause::Io(_)) => Err(e),
            // Other errors mean that there are weights, which cannot be used.
            found => Ok(!matches!(found, Ok(None))),
        }
    }

    /// Returns the directory of the weights.
    pub fn dir(&self) -> &Path {
        &self.dirs[0]
    }

    /// Finds a file that accompanies the weights; returns `None` when there is none.
    ///
    /// # Errors
    /// The file is a symbolic link to a target outside the checkpoint or to none, or the system cannot tell whether it
    /// exists.
    pub fn companion(&self, name: &str) -> Result<Option<PathBuf>> {
        let name = if name == TOOL_TEMPLATE_NAME { TOOL_TEMPLATE_SOURCE } else { name };
        let path = files::first(self.dirs.iter().map(|dir| dir.join(name)))?;
        path.map(|path| self.refuse_escape(&path).map(|()| path)).transpose()
    }

    /// Refuses a symbolic link to a target outside the checkpoint. Otherwise the author of the directory could choose
    /// any file of this machine to be read and copied into a pack. Links from a snapshot of the Hugging Face cache to
    /// `blobs` of the same repository are allowed.
    ///
    /// # Errors
    /// The file is such a link, and is not the weight file that the user named.
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
        Err(Error::unsupported(format!("found a link to {}, outside the checkpoint", target.display()))
            .at(file)
            .help("replace the link by a copy of the file, or name the directory that holds the files themselves"))
    }
}

/// Lists the directory of the weights, then its ancestors up to the directory that the user named.
fn search_path(named: &Path, below: &str) -> Vec<PathBuf> {
    let weights = if below.is_empty() { named.to_path_buf() } else { named.join(below) };
    let above = Path::new(below).components().count();
    let mut dirs: Vec<PathBuf> = weights.ancestors().take(above + 1).map(Path::to_path_buf).collect();
    // In `original/` of gpt-oss there are weights and configuration; the tokenizer is one directory above.
    if let (true, Some(parent)) = (below.is_empty() && named.ends_with("original"), named.parent()) {
        dirs.push(parent.to_path_buf());
    }
    dirs
}

/// Classifies a path by its file name: index, description of an older pack, or weight file.
pub(in crate::convert) fn by_name(path: PathBuf) -> WeightFiles {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match () {
        () if name.ends_with(".index.json") => WeightFiles::Index(path),
        () if name.ends_with(".json") => WeightFiles::OlderPack(path),
        () => WeightFiles::One(path),
    }
}

/// Finds the weights in a directory: one of [`NAMES`], an older pack, or the only safetensors file.
fn weights_in(dir: &Path) -> Result<Option<WeightFiles>> {
    if let Some(path) = files::first(NAMES.iter().map(|name| dir.join(name)))? {
        return Ok(Some(by_name(path)));
    }
    if let Some(description) = older_pack::description_in(dir)? {
        return Ok(Some(WeightFiles::OlderPack(description)));
    }
    if !files::is_dir(dir)? {
        return Ok(None);
    }
    let mut others = Vec::new();
    for entry in std::fs::read_dir(dir).at(dir)? {
        let path = entry.at(dir)?.path();
        if path.extension().is_some_and(|e| e == "safetensors") && files::is_file(&path)? {
            others.push(path);
        }
    }
    others.sort();
    match others.len() {
        0 => Ok(None),
        1 => Ok(others.pop().map(WeightFiles::One)),
        n => Err(Error::corrupt(format!("found {n} safetensors files, but no index that lists them"))
            .at(dir)
            .help("get model.safetensors.index.json, too, or name one file instead of the directory")),
    }
}
