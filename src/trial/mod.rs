//! Does a quantized model answer as well as the one it was made from, and which of its tensors is to blame?
//!
//! [`Packs`] packs both into a hidden directory that vanishes with it; a [`Trial`] lets them read the same text side by side
//! ([`crate::eval`]). What is measured is the very pack that the manifest makes. `blame` finds the tensors that hurt,
//! [`repair()`] gives them more bits until a gate is content.

mod again;
mod blame;
mod packs;
pub mod repair;

pub use again::Again;
pub use blame::Blame;
pub use packs::{Origin, Packs};
pub use repair::{Promote, repair};

use crate::error::{Context, Error, Result};
use crate::eval::windows::WINDOW;
use crate::eval::{Divergence, Windows, divergence};
use crate::iebin::{IebinReader, SourceFile};
use crate::manifest::{Document, Evidence, Figures};
use crate::runtime::text::{Tokenizer, tokenizer};
use crate::runtime::{Engine, EngineOptions, Precision};
use crate::sha256::{Digest, Sha256, hex};
use std::path::{Path, PathBuf};

/// The precision of the model that is compared with.
const REFERENCE: Precision = Precision::Fp32;

/// What is to be found out.
#[derive(Debug, Clone)]
pub struct Question {
    /// The text that both models read.
    pub text: PathBuf,
    /// Windows of it that are read at most.
    pub windows: Option<usize>,
    /// Threads of the engines.
    pub threads: usize,
}

/// A float model beside which quantized ones are put.
#[derive(Debug)]
pub struct Trial<'a> {
    packs: &'a Packs,
    question: Question,
    reference: Engine,
    windows: Windows,
    text: SourceFile,
}

impl Trial<'_> {
    /// Cuts the text and opens the float model.
    ///
    /// # Errors
    /// The model cannot be run or has no tokenizer, or the text is none or shorter than a window.
    pub fn begin(packs: &Packs, question: Question) -> Result<Trial<'_>> {
        let text = std::fs::read(&question.text).at(&question.text)?;
        let file = SourceFile {
            name: question.text.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            bytes: text.len() as u64,
            sha256: hex(Sha256::new_with_prefix(&text)),
        };
        let text = String::from_utf8(text).map_err(|e| {
            Error::corrupt(format!("byte {} is not UTF-8", e.utf8_error().valid_up_to())).at(&question.text)
        })?;
        let reference = open(&packs.float(), Some(REFERENCE), question.threads)?;
        let path = packs.float().join(tokenizer::FILE_NAME);
        if !path.exists() {
            let error = Error::usage("no tokenizer.json; a gate on answers has to read a text");
            return Err(error.at(packs.checkpoint()));
        }
        let len = WINDOW.min(reference.context());
        let windows = Windows::of_text(&Tokenizer::open(&path)?, &text, len, question.windows).at(&question.text)?;
        Ok(Trial { packs, question, reference, windows, text: file })
    }

    /// Reads as much of the text as was read for `evidence`, in windows of the same length.
    fn read_as(&mut self, evidence: &Evidence) -> Result<()> {
        let each = self.windows.first(1).scored();
        let windows = self.windows.first(evidence.scored / each);
        if (windows.window_len(), windows.scored()) != (evidence.window, evidence.scored) {
            return Err(Error::corrupt(format!(
                "the evidence scores {} tokens of windows of {}; this text in windows of {} has {}",
                evidence.scored,
                evidence.window,
                self.windows.window_len(),
                self.windows.scored()
            )));
        }
        self.windows = windows;
        Ok(())
    }

    /// Lets a model read the text beside the float model.
    fn compare(&mut self, engine: &mut Engine) -> Result<Figures> {
        divergence(engine, &mut self.reference, &self.windows).map(|found| figures(&found))
    }

    /// Packs the model as `document` says, in place of the one before, and measures it; nobody has judged it then.
    ///
    /// # Errors
    /// It cannot be packed or run.
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
