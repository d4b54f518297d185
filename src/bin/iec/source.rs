//! Options that name the model a command reads: a checkpoint, a pack, a GGUF file, or a repository in the Hugging Face
//! cache.

use crate::global::non_empty_variable;
use iec::convert::source::hub::{RepoSpec, cache};
use iec::convert::source::kind::SourceKind;
use iec::error::Result;
use iec::files;
use iec::output::Inputs;
use iec::trial::ModelSource;
use std::path::{Path, PathBuf};

/// Options that name the model. Each command says in an argument group whether one is required.
#[derive(Debug, clap::Args)]
pub struct SourceArgs {
    /// The model: a path as for --hf-dir, or the id ORG/NAME of a repository in the Hugging Face cache
    #[arg(value_name = "MODEL", conflicts_with_all = ["hf_dir", "hf_repo"])]
    checkpoint: Option<PathBuf>,
    /// The Hugging Face checkpoint: a directory (config.json, weights, tokenizer), a single weight file, or a pack of
    /// the predecessor; or a pack, or a GGUF file (of a split model its first file)
    #[arg(long, value_name = "DIR")]
    hf_dir: Option<PathBuf>,
    /// The checkpoint in the Hugging Face cache, by repository id; nothing is downloaded
    #[arg(long, value_name = "ORG/NAME[@REV]", conflicts_with = "hf_dir")]
    hf_repo: Option<RepoSpec>,
    /// The model's config.json, if the directory has none (a pack of the predecessor)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

impl SourceArgs {
    /// Returns the path of the model, if one was named.
    ///
    /// # Errors
    /// The repository is not in the cache.
    pub fn path(&self) -> Result<Option<PathBuf>> {
        match (&self.checkpoint, &self.hf_dir, &self.hf_repo) {
            (Some(word), ..) => Ok(Some(in_cache(word)?.unwrap_or_else(|| word.clone()))),
            (None, Some(dir), _) => Ok(Some(dir.clone())),
            (None, None, Some(repo)) => cache::snapshot(&cache::root(&non_empty_variable)?, repo).map(Some),
            (None, None, None) => Ok(None),
        }
    }

    /// Returns the pack in `model_dir`, if one was named, otherwise the model.
    ///
    /// # Errors
    /// None was named, or the repository is not in the cache.
    pub fn model(&self, model_dir: Option<&PathBuf>) -> Result<ModelSource> {
        let path = model_dir.map_or_else(|| self.required(), |dir| Ok(dir.clone()))?;
        Ok(ModelSource { path, config: self.config.clone() })
    }

    /// Adds the files of the model, or of the pack in `model_dir`, to those that outputs must not replace.
    ///
    /// # Errors
    /// The repository is not in the cache, or the path is no model.
    pub fn add_to(&self, inputs: Inputs, model_dir: Option<&PathBuf>) -> Result<Inputs> {
        let paths = [self.path()?, model_dir.cloned()];
        paths.into_iter().flatten().try_fold(inputs, |inputs, path| Ok(SourceKind::of(&path)?.add_to(inputs)))
    }

    /// Returns the path of the model.
    ///
    /// # Errors
    /// None was named, or the repository is not in the cache.
    pub fn required(&self) -> Result<PathBuf> {
        self.path()?
            .ok_or_else(|| iec::error::Error::usage("a model is needed; name it first, or with --hf-dir or --hf-repo"))
    }
}

/// Returns the directory of a repository in the Hugging Face cache if `word` is its id and not a path that exists.
fn in_cache(word: &Path) -> Result<Option<PathBuf>> {
    let repo = word.to_str().and_then(|text| text.parse::<RepoSpec>().ok());
    match repo {
        Some(repo) if !files::exists(word)? => Ok(cache::snapshot(&cache::root(&non_empty_variable)?, &repo).ok()),
        _ => Ok(None),
    }
}
