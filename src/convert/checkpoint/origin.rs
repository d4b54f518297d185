//! Files that a model was opened from: the weights, whose hashes identify it, and the files beside them.

use super::stored::Stored;
use super::{BoundView, CONFIG, CanonicalTensor, Checkpoint};
use crate::convert::companions::{self, Companions, TOKENIZER, always_copied};
use crate::convert::executor::Task;
use crate::convert::json::read_limited;
use crate::convert::pack_input;
use crate::convert::source::hub;
use crate::convert::source::layout::Layout;
use crate::convert::source::read_at::InputFile;
use crate::convert::tokenizer_files;
use crate::error::{Context, Result};
use crate::iebin::{IebinReader, PublishedJson};
use crate::job::Fingerprint;
use crate::provenance::Source;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Place that a model was opened from.
#[derive(Debug)]
pub(super) enum Origin {
    /// Hugging Face checkpoint.
    Directory { layout: Layout, config_path: PathBuf },
    /// Pack or GGUF file.
    Stored(Arc<Stored>),
}

impl Checkpoint {
    /// Returns the files that tensors are read from, which [`CanonicalTensor::position`] counts.
    pub fn files(&self) -> &[InputFile] {
        match &self.origin {
            Origin::Directory { .. } => self.shards.files(),
            Origin::Stored(stored) => stored.files(),
        }
    }

    /// Returns the pack that the model was opened from, if it is one.
    pub(in crate::convert) fn pack(&self) -> Option<&IebinReader> {
        match &self.origin {
            Origin::Directory { .. } => None,
            Origin::Stored(stored) => stored.pack(),
        }
    }

    /// Returns the files whose hashes identify the weights: all but the binary of a pack, which records the hash of
    /// each tensor and the files that these come from.
    pub fn hashed_files(&self) -> &[InputFile] {
        if self.pack().is_some() { &[] } else { self.files() }
    }

    /// Returns the task that compares a tensor of a pack with its recorded hash, so that damaged data does not get into
    /// the output; `None` where no hash is recorded.
    pub(in crate::convert) fn check_task<'a>(&'a self, tensor: &'a CanonicalTensor) -> Option<Task<'a>> {
        match &tensor.source {
            BoundView::Stored { model, item } => model.check_task(*item),
            _ => None,
        }
    }

    /// Returns the origin of the weights: for a pack, what it records, otherwise the files, whose hashes are `sha256`
    /// in the order of [`Checkpoint::hashed_files`].
    pub(in crate::convert) fn source(&self, sha256: &[Option<String>]) -> Option<Source> {
        if let Some(reader) = self.pack() {
            return reader.description.source.clone();
        }
        let files = self.files().iter().zip(sha256.iter().flatten());
        let files = files.map(|(file, sha256)| file.source_file(sha256.clone())).collect();
        let repo = match &self.origin {
            Origin::Directory { layout, .. } => hub::repo_of(layout.dir()),
            Origin::Stored(_) => None,
        };
        Some(Source { repo, files })
    }

    /// Returns what a pack records of the quantized checkpoint that the weights come from.
    pub(in crate::convert) fn quantized_source(&self) -> Option<PublishedJson> {
        if let Some(reader) = self.pack() {
            return reader.description.published.clone();
        }
        let format = self.published().format()?.to_string();
        Some(PublishedJson { format, activation_scales: self.published().has_activation_scales() })
    }

    /// Adds everything to `fingerprint` that determines the values of the tensors.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(in crate::convert) fn fingerprint(&self, fingerprint: &mut Fingerprint) -> Result<()> {
        fingerprint.json("config", self.config());
        fingerprint.field("published", self.published().settings());
        self.pack().map_or(Ok(()), |reader| pack_input::fingerprint(reader, fingerprint))?;
        self.hashed_files().iter().try_for_each(|file| fingerprint.file(file.path()))
    }

    /// Reads the files that belong to the weights: configuration, tokenizer, chat template. `tokenizer` replaces the
    /// tokenizer.json; if there is none, it is made from other files.
    ///
    /// # Errors
    /// A file is damaged, is a link that leads out of the checkpoint, or the rules of the tokenizer are not known.
    pub(in crate::convert) fn companions(&self, tokenizer: Option<&Path>) -> Result<Companions> {
        let (layout, config_path) = match &self.origin {
            Origin::Directory { layout, config_path } => (layout, config_path),
            Origin::Stored(stored) => return stored.companions(tokenizer),
        };
        let vocab = self.config().vocab;
        let mut files = Vec::new();
        for name in always_copied() {
            let path = match tokenizer {
                Some(path) if name == TOKENIZER => Some(path.to_path_buf()),
                _ => self.companion(name)?,
            };
            if let Some(path) = path {
                let bytes = read_limited(&path)?;
                companions::check(name, &bytes, vocab).at(&path)?;
                files.push((name, bytes));
            }
        }
        let mut companions = Companions::new(files);
        if companions.tokenizer().is_none()
            && let Some(made) = tokenizer_files::of_checkpoint(layout, config_path)?
        {
            companions::check(TOKENIZER, &made.json, vocab).at(&made.sources[0].path)?;
            companions.add_made(made);
        }
        Ok(companions)
    }

    /// Finds a file that accompanies the weights (`tokenizer.json`, …); returns `None` when there is none. Those of a
    /// GGUF file are part of it.
    ///
    /// # Errors
    /// The file is a symbolic link to a target outside the checkpoint.
    pub fn companion(&self, name: &str) -> Result<Option<PathBuf>> {
        match &self.origin {
            Origin::Directory { config_path, .. } if name == CONFIG => Ok(Some(config_path.clone())),
            Origin::Directory { layout, .. } => layout.companion(name),
            Origin::Stored(stored) => {
                let path = stored.pack().map(|reader| reader.path(name));
                path.map_or(Ok(None), |path| crate::files::first([path]))
            }
        }
    }
}
