//! Does a quantized model answer as well as the one it was made from, and which of its tensors is to blame?
//!
//! [`Packs`] packs both into a hidden directory that vanishes with it; a [`Trial`] lets them read the same text side by
//! side ([`crate::eval`]). What is measured is the very pack that the manifest makes. `blame` finds the tensors that
//! hurt, [`repair()`] gives them more bits until a gate is content, [`budget`] plans the bits of each tensor under a
//! limit. [`calibrate`] collects the statistics of inputs that methods and plans use.

mod again;
pub mod agreement;
mod blame;
pub mod budget;
pub mod calibrate;
mod packs;
pub mod ptq;
pub mod repair;
pub mod sample;
mod source;

pub use again::Again;
pub use blame::{Blame, WINDOWS};
pub use budget::{Planned, Planner};
pub use packs::Packs;
pub use repair::{Promote, repair};
pub use source::ModelSource;

use crate::error::{Context, Error, Result};
use crate::eval::windows::WINDOW;
use crate::eval::{Divergence, Windows, divergence};
use crate::iebin::IebinReader;
use crate::manifest::Document;
use crate::provenance::SourceFile;
use crate::provenance::{Evidence, Figures};
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
    /// Tokens at its beginning that are passed over, rounded up to whole windows.
    pub skip: usize,
    /// Windows behind these that are read at most.
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
    /// Windows that were passed over.
    skipped: usize,
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
        let skipped = question.skip.div_ceil(len.max(1));
        let limit = question.windows.map(|n| n.saturating_add(skipped));
        let windows = Windows::of_text(&Tokenizer::open(&path)?, &text, len, limit).at(&question.text)?;
        let windows = windows.behind(skipped).ok_or_else(|| {
            let found =
                format!("its {} windows of {len} tokens have all been read for something else", windows.count());
            Error::usage(found).at(&question.text).help("give another text")
        })?;
        Ok(Trial { packs, question, reference, windows, skipped, text: file })
    }

    /// Reads as much of the text as was read for `evidence`, in windows of the same length.
    fn read_as(&mut self, evidence: &Evidence) -> Result<()> {
        if evidence.scored == 0 {
            return Err(Error::corrupt("the evidence scores no token, so it is no evidence")
                .help("measure with `iec ptq --gate kl=X --gate-text FILE` and pack with that manifest"));
        }
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

    /// The divergence of the model that was packed last, with activations as fine as they come.
    fn divergence_of_weights(&mut self) -> Result<f64> {
        let reader = IebinReader::open(&self.packs.quantized())?;
        let mut engine = open_reader(&reader, weights_alone(&reader), self.question.threads)?;
        Ok(divergence(&mut engine, &mut self.reference, &self.windows)?.kl.value)
    }
}

/// The precision in which nothing but the weights of a pack is coarse; `None` where that is its own.
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
        top1: found.top1_agreement.value,
    }
}
