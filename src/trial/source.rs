//! Source of the model that is calibrated or quantized.

use crate::convert::quantize::weights::Weights;
use crate::error::Result;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Model to read: a Hugging Face checkpoint, a pack, or a GGUF file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ModelSource {
    /// Directory or file.
    pub path: PathBuf,
    /// Path of a configuration that replaces the config.json of a checkpoint.
    pub config: Option<PathBuf>,
}

impl ModelSource {
    /// Opens the weights.
    ///
    /// # Errors
    /// The model is missing, unreadable or invalid.
    pub fn weights(&self) -> Result<Weights> {
        Weights::open(&self.path, self.config.as_deref())
    }

    /// Returns the last component of the model's path.
    pub fn name(&self) -> String {
        let path: &Path = &self.path.canonicalize().unwrap_or(self.path.clone());
        path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}
