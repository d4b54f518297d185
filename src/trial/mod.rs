//! Trials of a quantized model: compares its outputs with those of the float model and finds the tensors that cause
//! the difference.
//!
//! [`Packs`] packs both models into a hidden temporary directory, and a [`Trial`] runs them on the same text side by
//! side ([`crate::eval`]). The measured pack is exactly the one that the manifest produces. `blame` measures the
//! divergence that each tensor causes, [`repair()`] gives the worst tensors more bits until a gate passes, and
//! [`budget`] plans the bits of each tensor under a limit. [`calibrate`] collects the input statistics that methods
//! and plans use.

mod again;
pub mod agreement;
mod blame;
pub mod budget;
pub mod calibrate;
#[cfg(feature = "reference")]
mod decoded;
pub mod one_step;
mod packs;
pub mod parts;
pub mod ptq;
pub mod rates;
pub mod repair;
pub mod sample;
mod source;
pub mod task_gate;

pub use again::{Again, GateFiles, TaskAgain};
pub use blame::{Blame, WINDOWS};
pub use budget::{Planned, Planner};
pub use packs::Packs;
pub use repair::{Promote, RepairOptions, repair};
pub use source::ModelSource;
pub use task_gate::TaskTrial;

use crate::error::{Context, Error, Result};
use crate::eval::windows::WINDOW;
use crate::eval::{Divergence, Windows, divergence};
use crate::files;
use crate::generate::text::{Tokenizer, tokenizer};
use crate::iebin::IebinReader;
use crate::manifest::Document;
use crate::provenance::SourceFile;
use crate::provenance::{Evidence, Figures};
use crate::runtime::{Engine, EngineOptions, Precision};
use crate::sha256::{Digest, Sha256, hex};
use packs::REFERENCE;
use std::path::{Path, PathBuf};

/// Text and engine options of a trial.
#[derive(Debug, Clone)]
pub struct Question {
    /// Text that both models process.
    pub text: PathBuf,
    /// Number of tokens at the beginning of the text that are skipped, rounded up to whole windows.
    pub skip: usize,
    /// Largest number of windows that are processed after the skipped tokens.
    pub windows: Option<usize>,
    /// Number of threads of the engines.
    pub threads: usize,
}

/// Float model with a text on which quantized models are compared with it.
#[derive(Debug)]
pub struct Trial<'a> {
    packs: &'a Packs,
    question: Question,
    reference: Engine,
    windows: Windows,
    /// Number of windows that were skipped.
    skipped: usize,
    text: SourceFile,
}

impl Trial<'_> {
    /// Divides the text into windows and opens the float model.
    ///
    /// # Errors
    /// The model cannot be run or has no tokenizer, or the text is not valid UTF-8 or is shorter than a window.
    pub fn begin(packs: &Packs, question: Question) -> Result<Trial<'_>> {
        let text = files::read(&question.text)?;
        let file = SourceFile {
            name: question.text.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            bytes: text.len() as u64,
            sha256: hex(Sha256::new_with_prefix(&text)),
        };
        let text = files::utf8(text).at(&question.text)?;
        let reference = open(&packs.float(), Some(REFERENCE), question.threads)?;
        let path = packs.float().join(tokenizer::FILE_NAME);
        if !files::exists(&path)? {
            let error = Error::usage("found no tokenizer.json, expected one to encode the text")
                .help("copy the tokenizer.json of the model into this directory");
            return Err(error.at(packs.checkpoint()));
        }
        let len = WINDOW.min(reference.context());
        let skipped = question.skip.div_ceil(len.max(1));
        let limit = question.windows.map(|n| n.saturating_add(skipped));
        let windows = Windows::of_text(&Tokenizer::open(&path)?, &text, len, limit).at(&question.text)?;
        let windows = windows.behind(skipped).ok_or_else(|| {
            let found =
                format!("found {} windows of {len} tokens, all used by calibration or the gate", windows.count());
            Error::usage(found).at(&question.text).help("choose another text")
        })?;
        Ok(Trial { packs, question, reference, windows, skipped, text: file })
    }

    /// Limits the text to the windows that `evidence` was measured on, and checks that they have the same length.
    fn read_as(&mut self, evidence: &Evidence) -> Result<()> {
        if evidence.scored == 0 {
            return Err(Error::corrupt("found a measurement without scored tokens")
                .help("measure with `iec ptq --gate kl=X --gate-text FILE` and pack with that manifest"));
        }
        let each = self.windows.first(1).scored();
        let windows = self.windows.first(evidence.scored / each);
        if (windows.window_len(), windows.scored()) != (evidence.window, evidence.scored) {
            return Err(Error::corrupt(format!(
                "found {} scored tokens in windows of {}, but this text in windows of {} has {}",
                evidence.scored,
                evidence.window,
                self.windows.window_len(),
                self.windows.scored()
            ))
            .help("measure with `iec ptq --gate kl=X --gate-text FILE` and pack with that manifest"));
        }
        self.windows = windows;
        Ok(())
    }

    /// Runs a model and the float model on the text and compares their predictions.
    fn compare(&mut self, engine: &mut Engine) -> Result<Figures> {
        divergence(engine, &mut self.reference, &self.windows).map(|found| figures(&found))
    }

    /// Packs the model as `document` specifies, replacing the previous pack, and measures it. The returned evidence
    /// contains no objections or promotions yet.
    ///
    /// # Errors
    /// The model cannot be packed or run.
    pub fn measure(&mut self, document: &Document) -> Result<Evidence> {
        let summary = self.packs.quantize(document)?;
        let mut engine = open(&self.packs.quantized(), None, self.question.threads)?;
        let figures = self.compare(&mut engine)?;
        Ok(Evidence {
            text: self.text.clone(),
            window: self.windows.window_len(),
            scored: self.windows.scored(),
            precision: engine.precision().to_string(),
            reference_precision: self.reference.precision().to_string(),
            bits_per_weight: summary.bits_per_weight,
            figures,
            promoted: Vec::new(),
            objections: Vec::new(),
        })
    }

    /// Returns the divergence of the model that was packed last, with activations in the finest available precision.
    fn divergence_of_weights(&mut self) -> Result<f64> {
        let reader = IebinReader::open(&self.packs.quantized())?;
        let mut engine = open_reader(&reader, weights_alone(&reader), self.question.threads)?;
        Ok(divergence(&mut engine, &mut self.reference, &self.windows)?.kl.value)
    }
}

/// Returns the precision that multiplies the quantized weights of a pack by 16-bit activations, so that the error of
/// the weights is measured almost alone. Returns `None` if the default precision of the pack rounds no further.
fn weights_alone(reader: &IebinReader) -> Option<Precision> {
    match Precision::resolve(None, reader).ok()? {
        Precision::Int4 => Some(Precision::Int4w),
        Precision::Int8 => Some(Precision::Int8w),
        _ => None,
    }
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
        top1_agreement: found.top1_agreement.value,
    }
}
