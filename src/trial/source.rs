//! Source of the model that is calibrated or quantized.

use crate::convert::quantize::weights::Weights;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// Model with float weights.
#[derive(Debug, Clone)]
pub enum ModelSource {
    /// Directory of a pack.
    Pack(PathBuf),
    /// Hugging Face checkpoint.
    Checkpoint {
        /// Directory or weight file.
        hf_dir: PathBuf,
        /// Path of a configuration that replaces the checkpoint's config.json.
        config: Option<PathBuf>,
    },
}

impl ModelSource {
    /// Opens the weights.
    ///
    /// # Errors
    /// The model is missing, unreadable or invalid.
    pub fn weights(&self) -> Result<Weights> {
        match self {
            ModelSource::Pack(dir) => Weights::open_pack(dir).map_err(Error::while_opening_model),
            ModelSource::Checkpoint { hf_dir, config } => Weights::open_checkpoint(hf_dir, config.as_deref()),
        }
    }

    /// Returns an error if the model is a pack and `option`, which names a text to measure the model on, is set.
    pub(super) fn refuse_pack(&self, option: &str) -> Result<()> {
        match self {
            ModelSource::Checkpoint { .. } => Ok(()),
            ModelSource::Pack(_) => Err(Error::usage(format!(
                "{option} cannot be used with --model-dir, because the measurement packs the model from its checkpoint"
            ))
            .help("name the checkpoint that the pack was made from with --hf-dir instead")),
        }
    }

    /// Returns the last component of the model's path.
    pub fn name(&self) -> String {
        let (ModelSource::Pack(path) | ModelSource::Checkpoint { hf_dir: path, .. }) = self;
        let path: &Path = &path.canonicalize().unwrap_or(path.clone());
        path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}
