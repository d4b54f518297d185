//! Finds what a user names as a model: a pack, a GGUF file, a checkpoint, or a repository of the Hugging Face Hub.

use super::Places;
use super::cache::Cache;
use crate::convert::source::gguf::{self, Gguf};
use crate::convert::source::hub::{self, RepoSpec, cache as hub_cache};
use crate::convert::source::layout::{Layout, WeightFiles};
use crate::error::{Cause, Context, Error, Result};
use crate::files;
use crate::iebin::{self, BIN_NAME, JSON_NAME};
use crate::job::Fingerprint;
use crate::output::{Inputs, directory_of};
use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Most file names that an error lists.
const LISTED: usize = 8;
/// Extensions of weight files of checkpoints that a user may name directly.
const WEIGHTS: [&str; 4] = ["safetensors", "bin", "pt", "pth"];

/// Kind of a model on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKind {
    /// Pack: ready to run.
    Pack,
    /// Hugging Face checkpoint, which is packed into the cache.
    Checkpoint,
    /// GGUF file, which is imported into the cache.
    Gguf,
    /// Entry of the cache, named as `iec list` shows it.
    Cached,
}

impl ModelKind {
    /// Returns the name in records and in the output of `iec list --json`.
    pub fn name(self) -> &'static str {
        match self {
            ModelKind::Pack => "pack",
            ModelKind::Checkpoint => "checkpoint",
            ModelKind::Gguf => "gguf",
            ModelKind::Cached => "cached",
        }
    }

    /// Returns the name shown to the user.
    pub fn shown(self) -> &'static str {
        match self {
            ModelKind::Pack => "pack",
            ModelKind::Checkpoint => "Hugging Face checkpoint",
            ModelKind::Gguf => "GGUF file",
            ModelKind::Cached => "entry of the cache",
        }
    }
}

/// A model on disk.
#[derive(Debug, Clone)]
pub struct FoundModel {
    /// Kind of the model.
    pub kind: ModelKind,
    /// Path as the user named it, or of the snapshot or the cache entry that was found by its name.
    pub path: PathBuf,
    /// `ORG/NAME` if the model lies in a Hugging Face cache.
    pub repo: Option<String>,
}

/// State of the files of a source, by which a change is noticed.
#[derive(Debug)]
pub(super) struct FilesState {
    /// Canonical path of the source.
    pub path: PathBuf,
    /// Digest of the path and of the name, size, modification time and inode of each file, in hex.
    pub fingerprint: String,
}

impl FoundModel {
    /// Finds the model that `spec` names: an existing path, otherwise an entry of the cache by its full name, otherwise
    /// a repository `ORG/NAME[@REVISION]` in the Hugging Face cache, otherwise the most recently used entry of the
    /// cache that [`Cache::named`] finds. Nothing is downloaded or written.
    ///
    /// # Errors
    /// Nothing has this name, or it is no model.
    pub fn find(spec: &Path, places: &Places) -> Result<FoundModel> {
        match files::find(spec).map_err(Error::while_opening_model)? {
            Some(found) => FoundModel::at(spec, &found),
            None => FoundModel::named(spec, places),
        }
    }

    /// Determines the kind of what exists at `path`.
    fn at(path: &Path, found: &Metadata) -> Result<FoundModel> {
        let kind = if found.is_dir() { None } else { Some(kind_of_file(path)?) };
        let (kind, path) = match kind {
            Some(kind) => (kind, path.to_path_buf()),
            None => in_directory(path)?,
        };
        let repo = hub::repo_of(if found.is_dir() && kind != ModelKind::Gguf { &path } else { directory_of(&path) });
        Ok(FoundModel { kind, path, repo })
    }

    /// Finds a model by a name that is no path.
    fn named(spec: &Path, places: &Places) -> Result<FoundModel> {
        let entries = places.cache.as_ref().map(|_| Cache::of(places)?.named(spec)).transpose()?.unwrap_or_default();
        let cached =
            entries.first().map(|entry| FoundModel { kind: ModelKind::Cached, path: entry.dir.clone(), repo: None });
        let is_exact = entries.iter().any(|entry| Path::new(&entry.name) == spec);
        let repo = spec.to_str().and_then(|text| text.parse::<RepoSpec>().ok());
        // The Hugging Face cache may have a newer revision than the one that was packed.
        match (&repo, &places.hub, cached) {
            (_, _, Some(cached)) if is_exact => Ok(cached),
            (Some(repo), Some(root), _) if hub_cache::holds(root, repo).map_err(Error::while_opening_model)? => {
                let snapshot = hub_cache::snapshot(root, repo).map_err(Error::while_opening_model)?;
                FoundModel::at(&snapshot, &std::fs::metadata(&snapshot).at(&snapshot)?)
            }
            (_, _, Some(cached)) => Ok(cached),
            (repo, _, None) => Err(missing(spec, repo.as_ref())),
        }
    }

    /// Adds the files of the model to the inputs of a command, which its outputs must not replace.
    pub fn add_to(&self, inputs: Inputs) -> Inputs {
        match self.kind {
            ModelKind::Checkpoint => inputs.checkpoints([&self.path]),
            ModelKind::Gguf => inputs.files(gguf::parts_of(&self.path)),
            ModelKind::Pack | ModelKind::Cached => {
                let is_dir = matches!(files::is_dir(&self.path), Ok(true));
                let dir = if is_dir { self.path.clone() } else { self.path.with_file_name("") };
                inputs.packs([dir], &iebin::members())
            }
        }
    }

    /// Reads the state of the files of a model. Files of the directory that packing does not read
    /// count, too, because which ones it reads depends on their contents.
    ///
    /// # Errors
    /// A file or directory cannot be read.
    pub(super) fn state(&self) -> Result<FilesState> {
        let path = canonical(&self.path)?;
        let mut fingerprint = Fingerprint::new("cache");
        fingerprint.field("path", path.as_os_str().as_bytes().escape_ascii());
        for file in self.files()? {
            // A link without a target counts as a missing file; packing reports it if it needs the file.
            if file.is_symlink() && !file.try_exists().at(&file)? {
                fingerprint.field("link", file.as_os_str().as_bytes().escape_ascii());
                continue;
            }
            let Some(found) = files::find(&file)?.filter(Metadata::is_file) else { continue };
            // The same directory under the name of a link is the same source.
            let file = canonical(&file)?;
            let name = file.as_os_str().as_bytes().escape_ascii();
            let (size, inode) = (found.len(), found.ino());
            let modified = format_args!("{}.{:09}", found.mtime(), found.mtime_nsec()).to_string();
            fingerprint.field("file", format_args!("{name} {size} {modified} {inode}"));
        }
        Ok(FilesState { path, fingerprint: fingerprint.finish() })
    }

    /// Lists the files in a fixed order.
    fn files(&self) -> Result<BTreeSet<PathBuf>> {
        match self.kind {
            ModelKind::Checkpoint => {}
            ModelKind::Gguf => return Ok(BTreeSet::from_iter(gguf::parts_of(&self.path))),
            ModelKind::Pack | ModelKind::Cached => {
                let dir = if files::is_dir(&self.path)? { &self.path } else { directory_of(&self.path) };
                let named = [self.path.clone()].into_iter();
                let read = [JSON_NAME, BIN_NAME].into_iter().chain(iebin::COMPANIONS);
                return Ok(named.chain(read.map(|name| dir.join(name))).collect());
            }
        }
        let layout = Layout::find(&self.path)?;
        let named = match &layout.weights {
            WeightFiles::One(file) if *file == self.path => Some(file),
            _ => None,
        };
        let mut all = BTreeSet::from_iter(named.cloned());
        for dir in &layout.dirs {
            for entry in std::fs::read_dir(dir).at(dir)? {
                let path = entry.at(dir)?.path();
                if counts(&path, named.is_some()) {
                    all.insert(path);
                }
            }
        }
        Ok(all)
    }

    /// Returns a short readable name: of the repository, the directory or the file.
    pub(super) fn readable_name(&self) -> String {
        let stem = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let directory = |path: &Path| {
            let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
            path.file_name().unwrap_or_default().to_string_lossy().into_owned()
        };
        let name = match (&self.repo, self.kind) {
            (Some(repo), ModelKind::Checkpoint) => repo.rsplit('/').next().unwrap_or_default().to_string(),
            (_, ModelKind::Gguf) => stem(&self.path),
            _ if matches!(files::is_dir(&self.path), Ok(true)) => directory(&self.path),
            _ => directory(self.path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))),
        };
        let plain = |c: char| if c.is_ascii_alphanumeric() || ['.', '_', '-'].contains(&c) { c } else { '-' };
        let name: String = name.chars().map(plain).take(READABLE).collect();
        let name = name.trim_matches(['-', '.']);
        if name.is_empty() { "model".to_string() } else { name.to_string() }
    }
}

/// Longest readable part of the name of an entry, so that tables fit a terminal.
const READABLE: usize = 24;
/// Help for a name that is no model.
pub(super) const NAME_A_MODEL: &str = "name a pack, a checkpoint directory, a GGUF file or ORG/NAME of a downloaded \
     model; `iec list` shows the packed ones";

/// Returns true if a change of this file of a checkpoint may change the pack. `named` is true if the user named the
/// weight file itself; then other weight files do not count.
fn counts(path: &Path, named: bool) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    !name.starts_with('.') && extension != "md" && !(named && WEIGHTS.contains(&extension))
}

/// Determines what a file is by its first bytes and its name.
fn kind_of_file(path: &Path) -> Result<ModelKind> {
    if Gguf::is_at(path) {
        return Ok(ModelKind::Gguf);
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    let wrong = |found: &str, help: String| Err(Error::new(Cause::Model(found.into())).at(path).help(help));
    let dir = directory_of(path).display();
    match () {
        () if name == BIN_NAME => {
            wrong("found the weights of a pack, expected the pack", format!("name its directory: {dir}"))
        }
        () if name.ends_with(".index.json") || WEIGHTS.contains(&extension) => Ok(ModelKind::Checkpoint),
        () if name == "config.json" => wrong(
            "found the configuration of a checkpoint, expected the checkpoint",
            format!("name its directory: {dir}"),
        ),
        () if extension == "json" => Ok(ModelKind::Pack),
        () if extension == "gguf" => {
            wrong("found no GGUF header", "the file is damaged or incomplete; get it again".into())
        }
        () => wrong("found a file of an unknown kind, expected a model", NAME_A_MODEL.into()),
    }
}

/// Finds the model in a directory: a pack, a checkpoint, or the only GGUF file.
fn in_directory(dir: &Path) -> Result<(ModelKind, PathBuf)> {
    if files::exists(&dir.join(JSON_NAME)).map_err(Error::while_opening_model)? {
        return Ok((ModelKind::Pack, dir.to_path_buf()));
    }
    let why = match Layout::find(dir) {
        Ok(_) => return Ok((ModelKind::Checkpoint, dir.to_path_buf())),
        Err(e) => e,
    };
    let ggufs = gguf::files_in(dir)?;
    let names = |paths: &[PathBuf]| {
        let names =
            paths.iter().take(LISTED).map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned());
        names.collect::<Vec<_>>().join(", ")
    };
    match &ggufs[..] {
        [only] => Ok((ModelKind::Gguf, only.clone())),
        [first, ..] => Err(Error::new(Cause::Model(format!("found {} GGUF files: {}", ggufs.len(), names(&ggufs))))
            .at(dir)
            .help(format!("name one of them, for example {}", first.display()))),
        [] if holds_weights(dir)? => Err(why.while_opening_model()),
        [] => {
            let expected = format!("a pack ({JSON_NAME}), a checkpoint (config.json and weights) or a GGUF file");
            Err(Error::new(Cause::Model(format!("found no model in this directory, expected {expected}")))
                .at(dir)
                .help(NAME_A_MODEL))
        }
    }
}

/// Returns true if the directory has weights of a checkpoint, even if they cannot be used.
fn holds_weights(dir: &Path) -> Result<bool> {
    Layout::lies_in(dir).map_err(Error::while_opening_model)
}

/// Builds the error for a name that no model has.
fn missing(spec: &Path, repo: Option<&RepoSpec>) -> Error {
    let (found, help) = match repo {
        Some(repo) if repo.id.contains('/') => (
            "found no file or directory of this name, and no such model in the Hugging Face cache",
            format!("check the path, or download the model: {}", repo.download_commands()),
        ),
        _ => ("found no file or directory of this name, expected a model", NAME_A_MODEL.to_string()),
    };
    Error::new(Cause::Model(found.to_string())).at(spec).help(help)
}

/// Returns the absolute path of a directory or file with the links of its directories resolved. A file keeps its name:
/// in a Hugging Face cache it is a link to a file whose name is a hash.
pub(super) fn canonical(path: &Path) -> Result<PathBuf> {
    match path.file_name() {
        Some(name) if !files::is_dir(path)? => Ok(directory_of(path).canonicalize().at(path)?.join(name)),
        _ => path.canonicalize().at(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nowhere() -> Places {
        Places { cache: None, hub: None, limit: None }
    }

    #[test]
    fn every_kind_is_recognized_and_others_are_named() {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name);
        for dir in ["pack", "checkpoint", "gguf", "split", "two", "empty", "plain"] {
            std::fs::create_dir(at(dir)).unwrap();
        }
        for name in
            ["pack/model.ie.json", "pack/model.ie.bin", "checkpoint/config.json", "checkpoint/model.safetensors"]
        {
            std::fs::write(at(name), "{}").unwrap();
        }
        for name in
            ["gguf/a.gguf", "split/m-00001-of-00002.gguf", "split/m-00002-of-00002.gguf", "two/a.gguf", "two/b.gguf"]
        {
            std::fs::write(at(name), "GGUF").unwrap();
        }
        for (spec, kind, path) in [
            ("pack", ModelKind::Pack, "pack"),
            ("pack/model.ie.json", ModelKind::Pack, "pack/model.ie.json"),
            ("checkpoint", ModelKind::Checkpoint, "checkpoint"),
            ("checkpoint/model.safetensors", ModelKind::Checkpoint, "checkpoint/model.safetensors"),
            ("gguf", ModelKind::Gguf, "gguf/a.gguf"),
            ("two/b.gguf", ModelKind::Gguf, "two/b.gguf"),
            ("split", ModelKind::Gguf, "split/m-00001-of-00002.gguf"),
        ] {
            let found = FoundModel::find(&at(spec), &nowhere()).unwrap();
            assert_eq!((found.kind, found.path), (kind, at(path)), "{spec}");
        }
        for (spec, expected) in [
            ("two", "found 2 GGUF files: a.gguf, b.gguf"),
            ("empty", "found no model in this directory"),
            ("pack/model.ie.bin", "found the weights of a pack"),
            ("checkpoint/config.json", "found the configuration of a checkpoint"),
            ("nope", "found no file or directory of this name"),
        ] {
            let refused = FoundModel::find(&at(spec), &nowhere()).unwrap_err();
            assert!(refused.to_string().contains(expected) && refused.help_text().is_some(), "{spec}: {refused}");
            assert_eq!(refused.cause().exit_code(), 3, "{spec}");
        }
    }

    #[test]
    fn a_change_of_any_file_but_notes_shows() {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name);
        std::fs::write(at("config.json"), "{}").unwrap();
        std::fs::write(at("model.safetensors"), "weights").unwrap();
        let source = FoundModel { kind: ModelKind::Checkpoint, path: home.path().to_path_buf(), repo: None };
        let print = || source.state().unwrap().fingerprint;
        let first = print();
        std::fs::write(at("README.md"), "notes").unwrap();
        assert_eq!(print(), first);
        std::fs::write(at("tokenizer.json"), "{}").unwrap();
        let second = print();
        assert_ne!(second, first);
        // A file of the same size and time that takes the place of another one.
        let modified = at("model.safetensors").metadata().unwrap().modified().unwrap();
        std::fs::write(at("new"), "WEIGHTS").unwrap();
        std::fs::File::options().append(true).open(at("new")).unwrap().set_modified(modified).unwrap();
        std::fs::rename(at("new"), at("model.safetensors")).unwrap();
        assert_ne!(print(), second);
    }

    #[test]
    fn readable_names_are_short_and_plain() {
        let name = |kind, path: &str, repo: Option<&str>| {
            FoundModel { kind, path: path.into(), repo: repo.map(Into::into) }.readable_name()
        };
        assert_eq!(name(ModelKind::Gguf, "/m/tiny llama.Q4_0.gguf", None), "tiny-llama.Q4_0");
        assert_eq!(name(ModelKind::Checkpoint, "/c/snapshots/0", Some("org/Tiny-1.1B")), "Tiny-1.1B");
        assert_eq!(name(ModelKind::Checkpoint, "/m/llama/model.safetensors", None), "llama");
        assert_eq!(name(ModelKind::Gguf, "/m/...gguf", None), "model");
        assert_eq!(name(ModelKind::Gguf, &format!("/m/{}.gguf", "n".repeat(99)), None).len(), READABLE);
    }
}
