//! Does a quantized model answer as well as the one it was made from, and which of its tensors is to blame?
//!
//! A [`Trial`] packs both into a hidden directory that vanishes with it and lets them read the same text side by side
//! ([`crate::eval`]). What is measured is the very pack that the manifest makes. `blame` finds the tensors that hurt,
//! [`repair()`] gives them more bits until a gate is content.

mod blame;
pub mod repair;

pub use blame::Blame;
pub use repair::{Promote, repair};

use crate::convert::pack::{PackOptions, PackSummary, pack};
use crate::error::{Context, Error, Result};
use crate::eval::windows::WINDOW;
use crate::eval::{Divergence, Windows, divergence};
use crate::iebin::{IebinReader, SourceFile};
use crate::manifest::{Document, Evidence, Figures};
use crate::runtime::text::{Tokenizer, tokenizer};
use crate::runtime::{Engine, EngineOptions, Precision};
use crate::sha256::{Digest, Sha256, hex};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The precision of the model that is compared with.
const REFERENCE: Precision = Precision::Fp32;
/// Names within the hidden directory.
const FLOAT: &str = "float";
const QUANTIZED: &str = "quantized";
const MANIFEST: &str = "manifest.json";

/// What is to be found out.
#[derive(Debug, Clone)]
pub struct Question {
    /// The checkpoint.
    pub hf_dir: PathBuf,
    /// The configuration, instead of the checkpoint's `config.json`.
    pub config: Option<PathBuf>,
    /// Statistics that its manifests may need.
    pub calibration: Option<PathBuf>,
    /// The text that both models read.
    pub text: PathBuf,
    /// Windows of it that are read at most.
    pub windows: Option<usize>,
    /// Threads of the engines.
    pub threads: usize,
}

/// A float model beside which quantized ones are put.
#[derive(Debug)]
pub struct Trial {
    question: Question,
    dir: TempDir,
    reference: Engine,
    weights: u64,
    windows: Windows,
    text: SourceFile,
}

impl Trial {
    /// Packs the checkpoint as it is into a hidden directory within `beside`, and cuts the text.
    ///
    /// # Errors
    /// The checkpoint cannot be packed or run or has no tokenizer, or the text is none or shorter than a window.
    pub fn begin(beside: &Path, question: Question) -> Result<Trial> {
        let text = std::fs::read(&question.text).at(&question.text)?;
        let file = SourceFile {
            name: question.text.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            bytes: text.len() as u64,
            sha256: hex(Sha256::new_with_prefix(&text)),
        };
        let text = String::from_utf8(text).map_err(|e| {
            Error::corrupt(format!("byte {} is not UTF-8", e.utf8_error().valid_up_to())).at(&question.text)
        })?;
        let dir = tempfile::Builder::new().prefix(".iec-").suffix(".tmp").tempdir_in(beside).at(beside)?;
        let weights = packed(&question, None, &dir.path().join(FLOAT))?.parameters;
        let reference = open(&dir.path().join(FLOAT), Some(REFERENCE), question.threads)?;
        let path = dir.path().join(FLOAT).join(tokenizer::FILE_NAME);
        if !path.exists() {
            return Err(Error::usage("no tokenizer.json; a gate on answers has to read a text").at(&question.hf_dir));
        }
        let len = WINDOW.min(reference.context());
        let windows = Windows::of_text(&Tokenizer::open(&path)?, &text, len, question.windows).at(&question.text)?;
        Ok(Trial { question, dir, reference, weights, windows, text: file })
    }

    /// Packs the model as `document` says, in place of the one before, and measures it; nobody has judged it then.
    ///
    /// # Errors
    /// It cannot be packed or run.
    pub fn measure(&mut self, document: &Document) -> Result<Evidence> {
        let manifest = self.dir.path().join(MANIFEST);
        std::fs::write(&manifest, document.to_json()).at(&manifest)?;
        let out = self.dir.path().join(QUANTIZED);
        let summary = packed(&self.question, Some(manifest), &out)?;
        let mut engine = open(&out, None, self.question.threads)?;
        let found = divergence(&mut engine, &mut self.reference, &self.windows)?;
        Ok(Evidence {
            text: self.text.clone(),
            window: self.windows.window_len(),
            scored: self.windows.scored(),
            precision: engine.precision().to_string(),
            reference_precision: self.reference.precision().to_string(),
            bits_per_weight: summary.bits_per_weight,
            figures: figures(&found),
            promoted: Vec::new(),
            objections: Vec::new(),
        })
    }
}

fn packed(question: &Question, manifest: Option<PathBuf>, out_dir: &Path) -> Result<PackSummary> {
    pack(&PackOptions {
        hf_dir: question.hf_dir.clone(),
        config: question.config.clone(),
        out_dir: out_dir.to_path_buf(),
        calibration: question.calibration.clone().filter(|_| manifest.is_some()),
        manifest,
        overwrite: true,
        ..PackOptions::default()
    })
}

fn open(dir: &Path, precision: Option<Precision>, threads: usize) -> Result<Engine> {
    open_reader(&IebinReader::open(dir)?, precision, threads)
}

fn open_reader(reader: &IebinReader, precision: Option<Precision>, threads: usize) -> Result<Engine> {
    Engine::open(reader, &EngineOptions { precision, threads, ..EngineOptions::default() })
}

fn figures(found: &Divergence) -> Figures {
    Figures {
        kl: found.kl.value,
        kl_stderr: found.kl.stderr,
        kl_p99: found.kl_spread.p99,
        perplexity: found.model.perplexity.value,
        perplexity_ratio: found.perplexity_ratio.value,
        perplexity_ratio_stderr: found.perplexity_ratio.stderr,
        top1: found.top1_agreement.value,
    }
}
