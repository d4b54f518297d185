//! The float model and a quantized one, side by side on the disk for as long as they are compared.

use crate::convert::pack::{PackOptions, PackSummary, pack};
use crate::error::{Context, Result};
use crate::manifest::Document;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Names within the hidden directory.
const FLOAT: &str = "float";
const QUANTIZED: &str = "quantized";
const MANIFEST: &str = "manifest.json";

/// A hidden directory with the model as floats and, after [`Packs::quantize`], as a manifest has it.
#[derive(Debug)]
pub struct Packs {
    /// The checkpoint, its configuration, and the statistics that manifests may need.
    origin: PackOptions,
    dir: TempDir,
    weights: u64,
}

impl Packs {
    /// Packs the checkpoint as it is into a hidden directory within `beside`.
    ///
    /// # Errors
    /// The checkpoint cannot be packed, or there is no room.
    pub fn begin(beside: &Path, origin: PackOptions) -> Result<Packs> {
        let dir = tempfile::Builder::new().prefix(".iec-").suffix(".tmp").tempdir_in(beside).at(beside)?;
        let mut packs = Packs { origin, dir, weights: 0 };
        packs.weights = packs.pack(None, packs.float())?.parameters;
        Ok(packs)
    }

    /// Packs the model as `document` says, in place of the one before.
    ///
    /// # Errors
    /// It cannot be packed, or there is no room.
    pub fn quantize(&self, document: &Document) -> Result<PackSummary> {
        let manifest = self.dir().join(MANIFEST);
        std::fs::write(&manifest, document.to_json()).at(&manifest)?;
        self.pack(Some(manifest), self.quantized())
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Path {
        &self.origin.hf_dir
    }

    /// Where both packs are.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The pack of floats.
    pub fn float(&self) -> PathBuf {
        self.dir().join(FLOAT)
    }

    /// The quantized pack.
    pub fn quantized(&self) -> PathBuf {
        self.dir().join(QUANTIZED)
    }

    /// Weights of the model.
    pub fn weights(&self) -> u64 {
        self.weights
    }

    fn pack(&self, manifest: Option<PathBuf>, out_dir: PathBuf) -> Result<PackSummary> {
        let origin = self.origin.clone();
        let calibration = origin.calibration.filter(|_| manifest.is_some());
        pack(&PackOptions { out_dir, calibration, manifest, overwrite: true, ..origin })
    }
}
