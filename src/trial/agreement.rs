//! Agreement test: checks whether a pack chooses the tokens that its Hugging Face checkpoint chooses or that a trace
//! records.
//!
//! The pack continues prompts greedily, or a trace provides the continuations. The independent reference of
//! [`crate::verify`] or the trace provides the expected token of each step. [`Agreement`] collects the results.

use super::Again;
#[cfg(feature = "reference")]
use super::decoded;
#[cfg(feature = "reference")]
use crate::convert::adapter;
use crate::convert::source::layout::Layout;
use crate::convert::tokenizer_files;
use crate::error::{Error, Result};
use crate::files;
use crate::generate::speculate::Speculator;
use crate::generate::text::Tokenizer;
use crate::generate::text::tokenizer::FILE_NAME;
use crate::generate::{Options, Request, generate};
use crate::iebin::{IebinReader, Store};
#[cfg(feature = "reference")]
use crate::interrupt;
use crate::progress;
use crate::runtime::{Engine, Feed, Precision, Want};
use crate::signature::Signature;
use crate::verify::trace::{TracedStep, TracedText};
use crate::verify::{Comparison, RefDtype, Rules, Scores, Step, Trace};
#[cfg(feature = "reference")]
use crate::verify::{Reference, ScoredText};
use std::path::{Path, PathBuf};

/// Number of prompts decoded in one batch.
const BATCH: usize = 8;
/// Default percentage of the tokens that must agree for a quantized pack.
const QUANTIZED_AGREEMENT: f64 = 90.0;
/// Texts with unusual characters and spaces, to which tokenizers with different pipelines give different tokens.
const AWKWARD: [&str; 12] = [
    " leading space",
    "two  spaces and a\ttab",
    "line\n\nbreaks\r\n",
    "trailing space ",
    "don't, I'll, we've",
    "1234567 + 3.14159 = 0x1F",
    "naïve café über ſtraße",
    "e\u{301} vs é",
    "日本語のテキスト",
    "Привет, мир!",
    "🙂👩‍👩‍👧‍👦 emoji",
    "fn main() { println!(\"{}\", x); }",
];

/// Reference of the comparison, and its strictness.
#[derive(Debug, Clone)]
pub struct AgreementOptions {
    /// Directory of the original checkpoint.
    pub hf_dir: Option<PathBuf>,
    /// Prompts to continue.
    pub prompts: Vec<String>,
    /// Number of tokens to compare per prompt.
    pub max_new: usize,
    /// Number of most likely tokens that both predictions must share, in any order.
    pub topk: usize,
    /// Largest difference of logits that counts as noise. By default 0.001 if the engine runs in fp32, 0.03 in fp16,
    /// and 0.25 in all other precisions or if the reference rounds to bf16.
    pub logits_tol: Option<f32>,
    /// Precision to which the reference rounds.
    pub ref_dtype: RefDtype,
    /// Trace of another program, which replaces the prompts.
    pub trace: Option<PathBuf>,
    /// Texts that the engine has generated already, which replace the prompts; none = the engine continues the prompts.
    pub generated: Vec<GeneratedText>,
    /// Percentage of tokens that must agree; by default 100 for a pack of floats and 90 for a quantized one.
    pub min_agreement: Option<f64>,
    /// Adapters that the reference adds to the checkpoint, as the engine does: directories of PEFT with their factors.
    pub adapters: Vec<(PathBuf, f32)>,
}

/// Text that the engine generated greedily. It is compared as it is, so that the result is about this very text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GeneratedText {
    /// Index of the prompt.
    pub index: usize,
    /// Text of the prompt, or a description of a synthetic one.
    pub prompt: String,
    /// All tokens before the first generated one.
    pub ids: Vec<u32>,
    /// Position in `ids` from which on they are the tokens of `prompt`; `None` for a prompt without a text.
    pub encoded_from: Option<usize>,
    /// Generated tokens.
    pub generated: Vec<u32>,
}

impl GeneratedText {
    fn traced(&self) -> TracedText {
        let steps = self.generated.iter().map(|id| TracedStep { id: *id, top: Vec::new() }).collect();
        TracedText { index: self.index, prompt: self.prompt.clone(), ids: self.ids.clone(), steps }
    }
}

impl AgreementOptions {
    /// Checks the numbers.
    ///
    /// # Errors
    /// A number is out of range; the error names it.
    pub fn check(&self) -> Result<()> {
        if self.max_new == 0 || self.topk == 0 {
            return Err(Error::usage("--max-new or --topk: found 0, expected at least 1")
                .help("give a number of at least 1, or leave the option out"));
        }
        if let Some(tolerance) = self.logits_tol.filter(|tolerance| !(tolerance.is_finite() && *tolerance >= 0.0)) {
            return Err(Error::usage(format!("--logits-tol: found {tolerance}, expected a number of at least 0"))
                .help("leave --logits-tol and HF_LOGITS_TOL out for the usual tolerance of the precision"));
        }
        if let Some(percent) = self.min_agreement.filter(|percent| !(0.0..=100.0).contains(percent)) {
            return Err(Error::usage(format!("--min-agreement: found {percent}, expected 0 to 100"))
                .help("give a percentage, or leave --min-agreement out"));
        }
        Ok(())
    }

    /// Opens the checkpoint, so that a mistake in its name is found before a model is opened or measured.
    ///
    /// # Errors
    /// The checkpoint cannot be read, or the reference does not compute models of its kind.
    pub fn check_reference(&self) -> Result<()> {
        self.hf_dir.as_deref().map_or(Ok(()), |dir| {
            checkpoint_tokenizer(dir)?;
            open_reference(dir, self.ref_dtype).map(drop)
        })
    }

    fn rules(&self, engine: &Engine) -> Rules {
        let rounded = match self.ref_dtype {
            RefDtype::Bf16 => Precision::Bf16,
            RefDtype::F32 | RefDtype::F64 => engine.precision(),
        };
        // docs/decisions, 65: the test checkpoints agree within these tolerances; 0.25 is 128 units of rounding of
        // bf16.
        let usual = match rounded {
            Precision::Fp32 => 1e-3,
            Precision::Fp16 => 0.03,
            _ => 0.25,
        };
        Rules { topk: self.topk, logits_tol: self.logits_tol.unwrap_or(usual) }
    }

    /// Returns the percentage of the tokens that must agree, and true if every logit must agree, too.
    fn required(&self, reader: &IebinReader) -> (f64, bool) {
        let exact = !is_quantized(reader);
        let percent = self.min_agreement.unwrap_or(if exact { 100.0 } else { QUANTIZED_AGREEMENT });
        (percent, exact && self.min_agreement.is_none())
    }
}

/// Returns true if the pack has weights that were quantized when it was made. MXFP4 does not count, because gpt-oss is
/// published in it.
fn is_quantized(reader: &IebinReader) -> bool {
    let rounded = |store: &Store| matches!(store, Store::Tiled(spec) if !spec.scheme.info().is_source_format);
    reader.entries().iter().any(|entry| rounded(&entry.store))
}

/// Prompts whose tokens are compared.
#[derive(Debug, Clone, Copy)]
pub enum Prompts<'a> {
    /// Texts without recorded tokens.
    Given(&'a [String]),
    /// The prompts of a trace, which records their tokens.
    Traced(&'a Path),
}

/// Opened pack with its engine.
#[derive(Debug)]
pub struct RunningPack<'a> {
    /// Engine that runs the pack.
    pub engine: &'a mut Engine,
    /// Tokenizer of the pack.
    pub tokenizer: &'a Tokenizer,
    /// Reader of the pack.
    pub reader: &'a IebinReader,
    /// Name of the pack in reports.
    pub name: &'a str,
}

/// Model that was compared, and the rules of the comparison.
#[derive(Debug)]
pub struct Compared {
    /// Name of the pack.
    pub model: String,
    /// Class name of the model.
    pub architecture: String,
    /// Precision of the engine.
    pub precision: Precision,
    /// Type of the KV cache.
    pub kv: String,
    /// Checkpoint that the pack was compared with, and the rounding of the reference, if one was used.
    pub reference: Option<(PathBuf, RefDtype)>,
    /// Adapters that the reference adds to the checkpoint, with their factors.
    pub adapters: Vec<(PathBuf, f32)>,
    /// Rules by which predictions count as equal.
    pub rules: Rules,
    /// Percentage of steps that must agree.
    pub percent: f64,
    /// True if every logit must also agree, within the tolerance of `rules`.
    pub exact: bool,
}

/// Results of all comparisons.
#[derive(Debug, Default)]
pub struct Agreement {
    /// Compared model; `None` when only tokenizers, hashes or a gate were checked.
    pub compared: Option<Compared>,
    /// Results per prompt, in the order of their indices.
    pub prompts: Vec<PromptAgreement>,
    /// Results of all prompts together.
    pub total: Comparison,
    /// True if both tokenizers have the same tokens with the same ids; `None` if not compared.
    pub same_vocabulary: Option<bool>,
    /// Result of the check of recorded hashes.
    pub hashes: Option<CheckedHashes>,
    /// Valid signature of the pack, if it was checked.
    pub signature: Option<Signature>,
    /// Evidence of the gate, measured again.
    pub gate: Option<Again>,
    /// Explanation of the first difference, with the text of its tokens.
    pub explanation: Option<String>,
}

/// Results for one prompt.
#[derive(Debug)]
pub struct PromptAgreement {
    /// Index of the prompt.
    pub index: usize,
    /// Text of the prompt.
    pub text: String,
    /// Number of tokens of the prompt.
    pub tokens: usize,
    /// True if the tokenizer of the pack and that of the checkpoint (or the trace) give the same tokens.
    pub same_ids: bool,
    /// Results of the steps after the prompt.
    pub steps: Option<Comparison>,
}

/// Result of comparing the hashes of tensors with those that the pack records.
#[derive(Debug)]
pub struct CheckedHashes {
    /// Number of tensors that were compared.
    pub tensors: usize,
    /// Descriptions of the tensors whose hash differs.
    pub differing: Vec<String>,
    /// Name of a chat template that is used and not recorded, if there is one.
    pub added_template: Option<&'static str>,
}

impl Agreement {
    /// Adds a prompt, and whether the pack and the reference give it the same tokens.
    fn prompt(&mut self, index: usize, text: &str, ours: &[u32], theirs: &[u32]) {
        let same_ids = self.total.prompt(index, ours, theirs);
        match self.prompts.iter_mut().find(|prompt| prompt.index == index) {
            Some(prompt) => prompt.same_ids &= same_ids,
            None => {
                let text = text.to_string();
                self.prompts.push(PromptAgreement { index, text, tokens: ours.len(), same_ids, steps: None });
            }
        }
    }

    /// Adds the results of the steps of a text.
    fn text(&mut self, index: usize, found: Comparison) {
        if let Some(prompt) = self.prompts.iter_mut().find(|prompt| prompt.index == index) {
            prompt.steps = Some(found.clone());
        }
        self.total.merge(found);
    }

    /// Sets the explanation of the first difference.
    fn spell(&mut self, tokenizer: &Tokenizer) {
        let spell = |id: u32| tokenizer.token(id).map_or_else(String::new, |token| format!("`{token}`"));
        self.explanation = self.total.first_mismatch.as_ref().map(|mismatch| mismatch.explain(spell));
    }

    /// Returns the number of prompts to which the pack and the reference give different tokens.
    pub fn other_prompts(&self) -> usize {
        self.prompts.iter().filter(|prompt| !prompt.same_ids).count()
    }

    /// Returns the percentage of the steps that agree.
    pub fn percent(&self) -> f64 {
        100.0 * self.total.agreement()
    }

    /// Compares the tokens of prompts with those that a trace records, and with those of the tokenizer of a checkpoint.
    /// With a checkpoint, also compares the vocabularies and the tokens of texts with unusual characters.
    ///
    /// # Errors
    /// The trace or the tokenizer of the checkpoint cannot be read, or a text cannot be encoded.
    pub fn tokenizers(&mut self, ours: &Tokenizer, hf_dir: Option<&Path>, prompts: Prompts<'_>) -> Result<()> {
        let texts = match prompts {
            Prompts::Traced(path) => Trace::read(path)?.texts,
            Prompts::Given(prompts) => {
                let text = |(index, prompt): (usize, &String)| TracedText {
                    index,
                    prompt: prompt.clone(),
                    ..TracedText::default()
                };
                prompts.iter().enumerate().map(text).collect()
            }
        };
        let theirs = hf_dir.map(checkpoint_tokenizer).transpose()?;
        for TracedText { index, prompt, ids, .. } in &texts {
            let own = ours.encode(prompt)?;
            if let Prompts::Traced(_) = prompts {
                self.prompt(*index, prompt, &own, ids);
            }
            if let Some(theirs) = &theirs {
                self.prompt(*index, prompt, &own, &theirs.encode(prompt)?);
            }
        }
        if let Some(theirs) = &theirs {
            self.same_vocabulary = Some(ours.has_tokens_of(theirs));
            let first = texts.iter().map(|text| text.index.saturating_add(1)).max().unwrap_or(0);
            for (number, text) in AWKWARD.into_iter().enumerate() {
                self.prompt(first.saturating_add(number), text, &ours.encode(text)?, &theirs.encode(text)?);
            }
        }
        self.spell(ours);
        Ok(())
    }

    /// Compares every step of every text.
    ///
    /// # Errors
    /// The trace or the checkpoint cannot be read or run, or the engine fails. Differences are not errors.
    pub fn texts(&mut self, pack: &mut RunningPack<'_>, options: &AgreementOptions) -> Result<()> {
        options.check()?;
        options.check_reference()?;
        let RunningPack { engine, tokenizer, reader, name } = pack;
        let rules = options.rules(engine);
        let (percent, exact) = options.required(reader);
        self.compared = Some(Compared {
            model: name.to_string(),
            architecture: engine.config().architecture.clone(),
            precision: engine.precision(),
            kv: engine.kv_type().to_string(),
            reference: options.hf_dir.clone().map(|dir| (dir, options.ref_dtype)),
            adapters: if options.hf_dir.is_some() { options.adapters.clone() } else { Vec::new() },
            rules,
            percent,
            exact,
        });
        let texts = match &options.trace {
            Some(trace) => Trace::read(trace)?.texts,
            None if !options.generated.is_empty() => options.generated.iter().map(GeneratedText::traced).collect(),
            None => continuations(engine, tokenizer, &options.prompts, options.max_new)?,
        };
        let checkpoint = options.hf_dir.as_deref().map(checkpoint_tokenizer).transpose()?;
        for (i, text) in texts.iter().enumerate() {
            let generated = options.generated.get(i).filter(|_| options.trace.is_none());
            if let Some(GeneratedText { encoded_from: None, .. }) = generated {
                // A synthetic prompt consists of tokens; there is no text that tokenizers could encode differently.
                self.prompt(text.index, &text.prompt, &text.ids, &text.ids);
                continue;
            }
            // The expected tokens of a prompt come from the checkpoint's tokenizer, or without one from the trace.
            let theirs = match &checkpoint {
                Some(tokenizer) => tokenizer.encode(&text.prompt)?,
                None => text.ids.clone(),
            };
            let ours = match generated.and_then(|text| text.ids.get(text.encoded_from?..)) {
                Some(ids) => ids.to_vec(),
                None => tokenizer.encode(&text.prompt)?,
            };
            let traced = options.trace.is_some();
            self.prompt(text.index, &text.prompt, if traced { &text.ids } else { &ours }, &theirs);
            if traced && ours != theirs {
                self.prompt(text.index, &text.prompt, &ours, &theirs);
            }
        }
        match &options.hf_dir {
            Some(dir) => against_reference(pack, dir, &texts, options, self)?,
            None => against_trace(pack.engine, &texts, &rules, self)?,
        }
        self.spell(pack.tokenizer);
        Ok(())
    }
}

/// Opens the tokenizer of a checkpoint, or makes it from other files.
fn checkpoint_tokenizer(hf_dir: &Path) -> Result<Tokenizer> {
    let path = hf_dir.join(FILE_NAME);
    if !files::exists(&path)? {
        let layout = Layout::find(hf_dir)?;
        if let Some(made) = tokenizer_files::of_checkpoint(&layout, &layout.dir().join("config.json"))? {
            return Tokenizer::parse(&made.json, &made.sources[0].path);
        }
    }
    Tokenizer::open(&path)
}

/// Continues the prompts greedily with the pack.
fn continuations(
    engine: &mut Engine,
    tokenizer: &Tokenizer,
    prompts: &[String],
    max_new: usize,
) -> Result<Vec<TracedText>> {
    let mut texts = Vec::with_capacity(prompts.len());
    let mut requests = Vec::with_capacity(prompts.len());
    for (index, prompt) in prompts.iter().enumerate() {
        let ids = tokenizer.encode(prompt)?;
        requests.push(Request { ids: ids.clone(), max_new, ..Request::default() });
        texts.push(TracedText { index, prompt: prompt.clone(), ids, steps: Vec::new() });
    }
    let options = Options { tokenizer: None, batch: BATCH, eos: &[], ..Options::default() };
    generate(engine, None, &mut Speculator::off(), requests, &options, |event| {
        texts[event.request].steps.push(TracedStep { id: event.id, top: Vec::new() });
        Ok(())
    })?;
    Ok(texts)
}

/// Computes the logits of the pack after the prompt and after each generated token except the last. Fills `logits`
/// with them: `(steps, vocab)`.
fn own_logits(engine: &mut Engine, text: &TracedText, logits: &mut Vec<f32>) -> Result<()> {
    let mut sequence = engine.new_sequence()?;
    let ids = whole(text);
    let (before, asked) = ids.split_at(text.ids.len() - 1);
    if !before.is_empty() {
        engine.forward(&mut [Feed { sequence: &mut sequence, tokens: before, want: Want::Nothing }], logits)?;
    }
    engine.forward(&mut [Feed { sequence: &mut sequence, tokens: asked, want: Want::All }], logits)
}

/// Returns the prompt and the generated tokens except the last one.
fn whole(text: &TracedText) -> Vec<u32> {
    let steps = text.steps.iter().map(|step| step.id);
    let mut ids: Vec<u32> = text.ids.iter().copied().chain(steps).collect();
    if !text.steps.is_empty() {
        ids.pop();
    }
    ids
}

/// Compares the token that the pack chooses at each step of a trace with the one in the trace.
fn against_trace(engine: &mut Engine, texts: &[TracedText], rules: &Rules, found: &mut Agreement) -> Result<()> {
    let vocab = engine.config().vocab;
    let bar = progress::items("texts", texts.len() as u64);
    let mut logits = Vec::new();
    for text in texts.iter().filter(|text| !text.steps.is_empty()) {
        own_logits(engine, text, &mut logits)?;
        let mut steps = Comparison::default();
        for (step, (row, traced)) in logits.chunks_exact(vocab).zip(&text.steps).enumerate() {
            let ours = Scores::All(row);
            let theirs = (traced.id, Scores::Some(&traced.top));
            steps.step(&at(text, step, (ours.best().unwrap_or(0), ours), theirs), rules);
        }
        found.text(text.index, steps);
        bar.inc(1);
    }
    Ok(())
}

/// Returns an error, because this build does not contain the reference.
#[cfg(not(feature = "reference"))]
fn open_reference(_: &Path, _: RefDtype) -> Result<()> {
    Err(Error::engine("this build has no reference to run checkpoints with")
        .help("build it with its default features, or compare with a --trace of another build and without --hf-dir"))
}

/// Returns the error of [`open_reference`].
#[cfg(not(feature = "reference"))]
fn against_reference(
    _: &mut RunningPack<'_>,
    dir: &Path,
    _: &[TracedText],
    options: &AgreementOptions,
    _: &mut Agreement,
) -> Result<()> {
    open_reference(dir, options.ref_dtype)
}

/// Opens the reference of a checkpoint; reads the configuration and the headers of the weights.
#[cfg(feature = "reference")]
fn open_reference(dir: &Path, dtype: RefDtype) -> Result<Reference> {
    Reference::open_decoded(dir, dtype, decoded::of_checkpoint(dir)?)
}

/// Compares the pack, or the pack and a trace, with the reference.
#[cfg(feature = "reference")]
fn against_reference(
    pack: &mut RunningPack<'_>,
    dir: &Path,
    texts: &[TracedText],
    options: &AgreementOptions,
    found: &mut Agreement,
) -> Result<()> {
    let rules = &options.rules(pack.engine);
    let read = |(dir, factor): &(PathBuf, f32)| Ok((adapter::read(dir, pack.engine.config())?, *factor));
    let adapters = options.adapters.iter().map(read).collect::<Result<_>>()?;
    let reference = open_reference(dir, options.ref_dtype)?.with_adapters(adapters);
    let traced = options.trace.is_some();
    let (vocab, expected) = (pack.engine.config().vocab, reference.vocab());
    if vocab != expected {
        let found = format!("found a vocabulary of {vocab}, expected {expected} as in the checkpoint");
        return Err(Error::refused(found)
            .at(pack.name)
            .help("name the checkpoint that the pack was made from with --hf-dir"));
    }
    let texts: Vec<&TracedText> = texts.iter().filter(|text| !text.steps.is_empty()).collect();
    let asked: Vec<ScoredText> =
        texts.iter().map(|text| ScoredText { ids: whole(text), from: text.ids.len() - 1 }).collect();
    let bar = progress::items("layers", reference.layers() as u64);
    let mut own = Vec::new();
    reference.logits(
        &asked,
        || {
            bar.inc(1);
            interrupt::check()
        },
        |index, logits| {
            let text = texts[index];
            own_logits(pack.engine, text, &mut own)?;
            let mut steps = Comparison::default();
            let rows = logits.chunks_exact(vocab).zip(own.chunks_exact(vocab));
            for (step, ((theirs, ours), said)) in rows.zip(&text.steps).enumerate() {
                let theirs = Scores::All(theirs);
                let best = theirs.best().unwrap_or(0);
                if traced {
                    steps.step(&at(text, step, (said.id, Scores::Some(&said.top)), (best, theirs)), rules);
                }
                let own = Scores::All(ours);
                let id = if traced { own.best().unwrap_or(0) } else { said.id };
                steps.step(&at(text, step, (id, own), (best, theirs)), rules);
            }
            found.text(text.index, steps);
            Ok(())
        },
    )
}

fn at<'a>(text: &TracedText, step: usize, ours: (u32, Scores<'a>), theirs: (u32, Scores<'a>)) -> Step<'a> {
    Step { prompt: text.index, step, position: text.ids.len() + step, ours, theirs }
}
