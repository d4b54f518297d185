//! Temporary packs of the float model and a quantized one, for comparison.

use crate::convert::pack::{PackOptions, PackSummary, PublishedForm, pack};
use crate::error::{Context, Result};
use crate::iebin::IebinReader;
use crate::manifest::Document;
use crate::output::stale;
use crate::runtime::Precision;
use std::fs::File;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Precision of the float reference model.
pub(super) const REFERENCE: Precision = Precision::Fp32;
/// Names of the two packs and of the manifest in the hidden directory.
const FLOAT: &str = "float";
const QUANTIZED: &str = "quantized";
const MANIFEST: &str = "manifest.json";

/// Hidden directory with the float pack and, after [`Packs::quantize`], the pack that a manifest specifies.
#[derive(Debug)]
pub struct Packs {
    /// Model, its configuration, and the statistics that manifests may need.
    origin: PackOptions,
    dir: TempDir,
    /// Shows other processes that the directory is in use.
    _lock: File,
    weights: u64,
}

impl Packs {
    /// Packs the model without further quantization, as floats, into a hidden directory in the directory `beside`.
    ///
    /// # Errors
    /// The model cannot be packed, or the disk is full.
    pub fn begin(beside: &Path, origin: PackOptions) -> Result<Packs> {
        stale::remove(beside);
        let (dir, lock) = stale::directory(beside).at(beside)?;
        let mut packs = Packs { origin, dir, _lock: lock, weights: 0 };
        packs.weights = packs.pack(None, packs.float())?.weights;
        // Codes of the source that only quantized precisions compute with become the floats that they mean.
        let float = IebinReader::open(&packs.float())?;
        if Precision::resolve(Some(REFERENCE), &float).is_err() {
            drop(float);
            packs.origin.published = PublishedForm::Float;
            packs.pack(None, packs.float())?;
            packs.origin.published = PublishedForm::Published;
        }
        Ok(packs)
    }

    /// Packs the model as `document` specifies, replacing the previous pack.
    ///
    /// # Errors
    /// The model cannot be packed, or the disk is full.
    pub fn quantize(&self, document: &Document) -> Result<PackSummary> {
        let manifest = self.dir().join(MANIFEST);
        std::fs::write(&manifest, document.to_json()).at(&manifest)?;
        self.pack(Some(manifest), self.quantized())
    }

    /// Returns the path of the model that is packed.
    pub fn checkpoint(&self) -> &Path {
        &self.origin.hf_dir
    }

    /// Returns the directory of both packs.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the path of the float pack.
    pub fn float(&self) -> PathBuf {
        self.dir().join(FLOAT)
    }

    /// Returns the path of the quantized pack.
    pub fn quantized(&self) -> PathBuf {
        self.dir().join(QUANTIZED)
    }

    /// Returns the number of weights of the model.
    pub fn weights(&self) -> u64 {
        self.weights
    }

    fn pack(&self, manifest: Option<PathBuf>, out_dir: PathBuf) -> Result<PackSummary> {
        let origin = self.origin.clone();
        let calibration = origin.calibration.filter(|_| manifest.is_some());
        pack(&PackOptions { out_dir, calibration, manifest, overwrite: true, ..origin })
    }
}
