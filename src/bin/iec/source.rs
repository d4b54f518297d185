//! Options that name the checkpoint a command reads: a directory, or a repository in the Hugging Face cache.

use crate::global::non_empty_variable;
use iec::convert::source::hub::{RepoSpec, cache};
use iec::error::Result;
use iec::files;
use iec::trial::ModelSource;
use std::path::{Path, PathBuf};

/// Options that name the checkpoint. Each command says in an argument group whether one is required.
#[derive(Debug, clap::Args)]
pub struct SourceArgs {
    /// The checkpoint: a path as for --hf-dir, or the id ORG/NAME of a repository in the Hugging Face cache
    #[arg(value_name = "CHECKPOINT", conflicts_with_all = ["hf_dir", "hf_repo"])]
    checkpoint: Option<PathBuf>,
    /// The Hugging Face checkpoint: a directory (config.json, weights, tokenizer), a single weight file, or a pack of
    /// the predecessor
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
    /// Returns the path of the checkpoint, if one was named.
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

    /// Returns the pack in `model_dir`, if one was named, otherwise the checkpoint.
    ///
    /// # Errors
    /// None was named, or the repository is not in the cache.
    pub fn model(&self, model_dir: Option<&PathBuf>) -> Result<ModelSource> {
        match model_dir {
            Some(dir) => Ok(ModelSource::Pack(dir.clone())),
            None => Ok(ModelSource::Checkpoint { hf_dir: self.required()?, config: self.config.clone() }),
        }
    }

    /// Returns the path of the checkpoint.
    ///
    /// # Errors
    /// None was named, or the repository is not in the cache.
    pub fn required(&self) -> Result<PathBuf> {
        self.path()?.ok_or_else(|| iec::error::Error::usage("one of --hf-dir and --hf-repo is needed"))
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
