//! Quantizes and packs a model in one step: a recipe selects the types, a gate checks
//! the error of each matrix, and the pack is written.
//!
//! The steps are those of `iec ptq` and `iec pack --q4-map`; the manifest between them lies in a hidden directory
//! beside the pack. The pack records the gate and the errors that were measured, as every pack of a manifest does.

use super::ModelSource;
use super::ptq::{Ptq, PtqOptions};
use crate::convert::dry_run::DryRun;
use crate::convert::pack::{self, PackOptions, PackSummary};
use crate::convert::quantize::judge::OnFailure;
use crate::convert::quantize::ptq::Measured;
use crate::convert::quantize::select::{OuterStorage, SelectionOptions};
use crate::error::{Context, Error, Result};
use crate::job::{self, RunOptions};
use crate::manifest::recipes::Recipe;
use crate::output::{Inputs, Rules, Target, directory_of, make_dir, stale};
use crate::provenance::Gate;
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Names in the hidden directory.
const RULES: &str = "recipe.json";
const MANIFEST: &str = "manifest.json";

/// Options of [`OneStep::run`].
#[derive(Debug, Clone)]
pub struct OneStep {
    /// Model, output directory and options of packing; no manifest.
    pub pack: PackOptions,
    /// Rules that select the tensors and their schemes.
    pub recipe: &'static Recipe,
    /// Storage of the embedding; `Kept` overrules the recipe.
    pub embedding: OuterStorage,
    /// Storage of the output matrix; `Kept` overrules the recipe.
    pub lm_head: OuterStorage,
    /// Thresholds for the error of each matrix.
    pub gate: Gate,
    /// Action for matrices that the gate rejects.
    pub on_failure: OnFailure,
    /// Number of threads.
    pub threads: usize,
}

impl OneStep {
    /// Quantizes and packs. `measured` is called with the measurements before the pack is written.
    ///
    /// # Errors
    /// The gate rejects matrices (exit code 4; no pack is written), or the errors of [`Ptq`] and [`pack::pack`].
    pub fn run(&self, measured: impl FnOnce(&Measured) -> Result<()>) -> Result<PackSummary> {
        let out_dir = &self.pack.out_dir;
        stale::remove(directory_of(out_dir));
        // Directories in which files would be lost are refused before the work. The pack of an interrupted run of the
        // same job is none of them; only the manifest tells whether it is the same job, and then `pack` decides.
        if !job::any_has_begun_commit(out_dir) {
            pack::dry_run(&self.pack)?;
        }
        let files = HiddenFiles::beside(out_dir)?;
        let ptq = self.ptq(&files)?;
        let quantized = ptq.quantize()?;
        measured(&quantized.measured)?;
        let manifest = files.dir.path().join(MANIFEST);
        let rules = Rules { inputs: &Inputs::default(), overwrite: true, stdout: false };
        Target::check(&manifest, rules)?.write(&quantized.manifest()?)?;
        pack::pack(&PackOptions { manifest: Some(manifest), ..self.pack.clone() })
    }

    /// Returns the planned scheme of each quantized tensor, without measuring or writing anything.
    ///
    /// # Errors
    /// The errors of [`OneStep::run`] that are known before the work begins.
    pub fn dry_run(&self) -> Result<DryRun> {
        pack::dry_run(&self.pack)?;
        let files = HiddenFiles::temporary()?;
        self.ptq(&files)?.dry_run()
    }

    fn ptq(&self, files: &HiddenFiles) -> Result<Ptq> {
        if self.gate.asks_the_model() {
            return Err(Error::usage(
                "--gate: found a gate on outputs (kl, ppl, top1, task), expected cosine or \
                 cosine-min",
            )
            .help("use `iec ptq --gate-text FILE`, then `iec pack --q4-map`"));
        }
        let rules = files.dir.path().join(RULES);
        std::fs::write(&rules, self.recipe.text).at(&rules)?;
        let PackOptions { hf_dir, config, calibration, run, .. } = self.pack.clone();
        Ptq::open(PtqOptions {
            model: ModelSource { path: hf_dir, config },
            // Interrupted measurements continue under this name; nothing is written to it.
            out: manifest_name(&self.pack.out_dir),
            selection: SelectionOptions {
                embedding: self.embedding,
                lm_head: self.lm_head,
                ..SelectionOptions::default()
            },
            rules: Some(rules),
            calibration,
            gate: self.gate.clone(),
            gate_text: None,
            on_failure: self.on_failure,
            max_bits: None,
            budget: None,
            force: false,
            pack: false,
            shown_tensor: None,
            threads: self.threads,
            run: RunOptions { share: job::Share::Whole, ..run },
        })
    }
}

/// Returns the name beside the pack under which measurements are kept.
fn manifest_name(out_dir: &Path) -> PathBuf {
    let mut name = out_dir.file_name().map_or_else(|| OsString::from("pack"), OsString::from);
    name.push(".q4_manifest.json");
    directory_of(out_dir).join(name)
}

/// Hidden directory with the recipe and the manifest; removed at the end.
struct HiddenFiles {
    dir: TempDir,
    /// Shows other processes that the directory is in use.
    _lock: Option<File>,
}

impl HiddenFiles {
    /// Creates the directory beside the pack.
    fn beside(out_dir: &Path) -> Result<HiddenFiles> {
        let parent = directory_of(out_dir);
        make_dir(parent)?;
        let (dir, lock) = stale::directory(parent).at(parent)?;
        Ok(HiddenFiles { dir, _lock: Some(lock) })
    }

    /// Creates the directory where the system keeps temporary files.
    fn temporary() -> Result<HiddenFiles> {
        Ok(HiddenFiles { dir: tempfile::tempdir()?, _lock: None })
    }
}
