//! Generation: continues prompts in batches. Up to `batch` texts are decoded together; a free slot takes the next
//! request.
//!
//! Prompts are read first, in pieces of at most [`Engine::step_rows`] tokens per step; then all active texts advance by
//! one token per step, or by several if [`super::speculate`] drafted them. A step either reads prompts or generates, so
//! that its time counts as one or the other in reports, although [`Engine::step`] would take both. Engine and sampler
//! give each text the same tokens as if it were alone, so other sequences in the batch and draft tokens change only the
//! speed. A text with a constraint is sampled from masked logits; `constrained` computes the masks during the steps.

mod constrained;
mod slot;

use super::constraint::Constraint;
use super::engine::Engine;
use super::profile::{Stage, Stages};
use super::sampler::{Candidate, Sampling};
use super::sequence::{Feed, Output, Sequence, Want};
use super::speculate::Speculator;
use super::text::Tokenizer;
use crate::error::{Context, Error, Result};
use crate::progress::{self, ProgressBar};
use constrained::MaskThread;
use slot::{Likely, Slot};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Largest number of tokens per step while a progress bar for long prompts is visible.
const PIECE: usize = 128;

/// A text to be continued.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Tokens of the prompt; at least one.
    pub ids: Vec<u32>,
    /// Largest number of tokens to generate; at least one.
    pub max_new: usize,
    /// Sampling parameters. Their seed is that of the run: request number i draws from that seed + i.
    pub sampling: Sampling,
    /// Seed of this request alone, in place of the seed of the run.
    pub seed: Option<u64>,
    /// Strings that end the text; they are not shown.
    pub stop: Vec<String>,
    /// `Some(k)`: report the probability of each token and the `k` most likely ones.
    pub logprobs: Option<usize>,
    /// Constraint that the generated text satisfies when it ends by itself. Special tokens are not generated.
    pub constraint: Option<Arc<Constraint>>,
    /// Prefix cache: tokens read before. Those at the beginning of the prompt are not computed again.
    pub prefix: Option<CachedPrefix>,
    /// Divides the prefix cache of the engine: texts reuse the computation of texts with the same salt only.
    pub salt: Vec<u8>,
}

/// A sequence and the tokens it has read, for requests that begin with them (prefix cache). A clone shares memory until
/// one of the two reads more tokens.
#[derive(Debug, Clone)]
pub struct CachedPrefix {
    sequence: Sequence,
    ids: Vec<u32>,
    /// Sequence of the draft model, if any.
    draft: Option<Sequence>,
}

impl CachedPrefix {
    /// Reads `ids` with the engine.
    pub fn read(engine: &mut Engine, ids: Vec<u32>) -> Result<CachedPrefix> {
        let mut sequence = engine.new_sequence()?;
        if !ids.is_empty() {
            engine
                .forward(&mut [Feed { sequence: &mut sequence, tokens: &ids, want: Want::Nothing }], &mut Vec::new())?;
        }
        Ok(CachedPrefix { sequence, ids, draft: None })
    }
}

/// Options that are the same for all requests of a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    /// Decodes the tokens to text; without it there is no text and there are no stop strings.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Largest number of texts decoded together; 0 is treated as 1.
    pub batch: usize,
    /// Tokens that end a text.
    pub eos: &'a [u32],
    /// Whether special tokens are shown in the text.
    pub show_special: bool,
    /// Whether completions return their prefix cache for a later request.
    pub keep_prefixes: bool,
    /// Whether an invalid request fails alone: its completion carries the error. Otherwise it fails the whole run
    /// before anything is computed.
    pub skip_invalid: bool,
    /// Whether an interrupt (SIGINT) ends the texts where they are, with [`Finish::Interrupted`], instead of failing
    /// the run. Requests that still wait for a slot get no completion.
    pub keep_interrupted: bool,
}

/// Reason why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model chose an end token.
    Eos,
    /// The text satisfies its constraint, which allows no further token.
    Complete,
    /// A stop string appeared.
    Stop,
    /// `max_new` tokens were generated.
    Length,
    /// The context was full.
    Context,
    /// The user interrupted, and [`Options::keep_interrupted`] is set.
    Interrupted,
    /// The request was invalid and nothing was generated.
    Invalid,
}

impl Finish {
    /// Returns the name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Eos => "eos",
            Finish::Complete => "complete",
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Context => "context",
            Finish::Interrupted => "interrupted",
            Finish::Invalid => "invalid",
        }
    }
}

/// Event of a generated token.
#[derive(Debug)]
pub struct Event<'a> {
    /// Index of the request.
    pub request: usize,
    /// Number of the token in its text, from 0.
    pub step: usize,
    /// Id of the token.
    pub id: u32,
    /// Text that can be shown now.
    pub text: &'a str,
    /// The token's probability and the most likely tokens, if requested.
    pub likely: Option<&'a (Candidate, Vec<Candidate>)>,
    /// Reason why the text ends; set with the last token.
    pub finish: Option<Finish>,
}

/// A finished text.
#[derive(Debug)]
pub struct Completion {
    /// Generated tokens, including an EOS.
    pub ids: Vec<u32>,
    /// Generated text, without the stop string.
    pub text: String,
    /// Reason why the text ended.
    pub finish: Finish,
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of prompt tokens taken from the prefix cache.
    pub reused_tokens: usize,
    /// Time at which the request got its slot.
    pub started: Instant,
    /// Time at which each token was generated.
    pub marks: Vec<Instant>,
    /// Number of draft tokens that were verified.
    pub drafted_tokens: usize,
    /// Number of draft tokens that were accepted.
    pub accepted_tokens: usize,
    /// Whether the text satisfies the constraint of its request; `None` without a constraint. A text that was cut by a
    /// stop string does not count.
    pub constraint_met: Option<bool>,
    /// Prefix cache of the whole text for a later request, if [`Options::keep_prefixes`] is set.
    pub prefix: Option<CachedPrefix>,
    /// Reason why the request was invalid.
    pub error: Option<Error>,
}

impl Completion {
    /// Returns the completion of an invalid request.
    fn invalid(request: &Request, error: Error) -> Completion {
        Completion {
            ids: Vec::new(),
            text: String::new(),
            finish: Finish::Invalid,
            prompt_tokens: request.ids.len(),
            reused_tokens: 0,
            started: Instant::now(),
            marks: Vec::new(),
            drafted_tokens: 0,
            accepted_tokens: 0,
            constraint_met: None,
            prefix: None,
            error: Some(error),
        }
    }

    /// Returns the time from the slot to the first token.
    pub fn prefill_time(&self) -> Duration {
        self.marks.first().map_or(Duration::ZERO, |first| *first - self.started)
    }

    /// Returns the time from the first token to the last.
    pub fn decode_time(&self) -> Duration {
        self.marks.first().zip(self.marks.last()).map_or(Duration::ZERO, |(first, last)| *last - *first)
    }
}

/// All texts of a run in the order of the requests, with timings.
#[derive(Debug)]
pub struct Outcome {
    /// One completion per request.
    pub completions: Vec<Completion>,
    /// Time of the steps that read prompts, including their first tokens.
    pub prefill_time: Duration,
    /// Time of the steps that generate, including sampling and the calls of `sink`.
    pub decode_time: Duration,
    /// Time of each stage while reading prompts; zero unless the engine profiles.
    pub prefill_stages: Stages,
    /// Time of each stage while generating; zero unless the engine profiles.
    pub decode_stages: Stages,
}

/// Generates all texts and calls `sink` with each token as it is generated.
///
/// # Errors
/// A request is invalid and `skip_invalid` is not set, the engine fails, `sink` fails, or the user interrupts.
pub fn generate(
    engine: &mut Engine,
    speculator: &mut Speculator,
    requests: Vec<Request>,
    options: &Options<'_>,
    mut sink: impl FnMut(&Event<'_>) -> Result<()>,
) -> Result<Outcome> {
    let mut completions = invalid_ones(&requests, engine, options)?;
    let valid = requests.into_iter().enumerate().filter(|(i, _)| completions[*i].is_none());
    let mut waiting: VecDeque<(usize, Request)> = valid.collect();
    let mut masks = MaskThread::default();
    let mut slots: Vec<Slot> = Vec::new();
    let (mut choices, mut bar) = (Choices::default(), PromptBar::default());
    let (mut prefill, mut decode) = ((Duration::ZERO, Stages::default()), (Duration::ZERO, Stages::default()));
    engine.profile(engine.profiles());
    loop {
        while slots.len() < options.batch.max(1)
            && let Some((index, request)) = waiting.pop_front()
        {
            slots.push(Slot::new(engine, index, request, options, &mut masks)?);
        }
        if slots.is_empty() {
            break;
        }
        let begin = Instant::now();
        let reading = slots.iter().any(Slot::is_fresh);
        let mut stepped: Vec<&mut Slot> = slots.iter_mut().filter(|slot| slot.is_fresh() == reading).collect();
        let speculator = Some(&mut *speculator).filter(|speculator| !speculator.is_off());
        let done = match reading {
            true => {
                let mut reader = Reader { choices: &mut choices, bar: &mut bar, more: !waiting.is_empty() };
                reader.read(engine, &mut stepped, options, &mut sink)
            }
            false => step(engine, speculator, &mut stepped, &mut choices, options, &mut sink),
        };
        match done {
            Err(e) if options.keep_interrupted && e.is_sigint() => {
                waiting.clear();
                slots.iter_mut().try_for_each(|slot| slot.interrupt(options))?;
            }
            stepped => stepped?,
        }
        let (time, stages) = if reading { &mut prefill } else { &mut decode };
        *time += begin.elapsed();
        engine.lap(Stage::Other);
        stages.merge(&engine.take_stages());
        for slot in slots.extract_if(.., |slot| slot.finish.is_some()) {
            let index = slot.index;
            slot.keep(engine);
            completions[index] = slot.complete(options.keep_prefixes);
        }
    }
    Ok(Outcome {
        completions: completions.into_iter().flatten().collect(),
        prefill_time: prefill.0,
        decode_time: decode.0,
        prefill_stages: prefill.1,
        decode_stages: decode.1,
    })
}

/// Checks all requests. Returns the completion of each invalid one if these are to be skipped.
fn invalid_ones(requests: &[Request], engine: &Engine, options: &Options<'_>) -> Result<Vec<Option<Completion>>> {
    let one = |(i, request): (usize, &Request)| match check(request, engine).tensor(&format!("prompt {i}")) {
        Ok(()) => Ok(None),
        Err(e) if options.skip_invalid => Ok(Some(Completion::invalid(request, e))),
        Err(e) => Err(e),
    };
    requests.iter().enumerate().map(one).collect()
}

/// Checks a request before anything is computed.
///
/// # Errors
/// The prompt is empty or longer than the context, a token is not in the vocabulary, or a parameter is out of range.
pub fn check(request: &Request, engine: &Engine) -> Result<()> {
    request.sampling.validate()?;
    let (config, tokens) = (engine.config(), request.ids.len());
    if tokens == 0 {
        return Err(Error::usage("the prompt is empty and the tokenizer adds no token to it")
            .help("give at least one character of prompt"));
    }
    if tokens > engine.context() {
        let found = format!("{tokens} prompt tokens do not fit the context of {}", engine.context());
        return Err(
            Error::usage(found).help("shorten the prompt, or raise --ctx up to the context length of the model")
        );
    }
    if request.max_new == 0 {
        return Err(Error::usage("found 0 tokens to generate, expected at least 1"));
    }
    match request.ids.iter().find(|id| **id as usize >= config.vocab) {
        Some(id) => {
            let found = format!("token {id} is outside the model's vocabulary of {}", config.vocab);
            Err(Error::corrupt(found).help("the tokenizer does not belong to this model"))
        }
        None => Ok(()),
    }
}

/// State of the steps that read prompts.
struct Reader<'a> {
    choices: &'a mut Choices,
    bar: &'a mut PromptBar,
    /// Whether further prompts wait for a slot.
    more: bool,
}

impl Reader<'_> {
    /// Runs one step over the next tokens of prompts, slot by slot. A slot whose prompt ends takes its first token.
    fn read(
        &mut self,
        engine: &mut Engine,
        slots: &mut [&mut Slot],
        options: &Options<'_>,
        sink: &mut impl FnMut(&Event<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut room = self.bar.limit(engine.step_rows(), slots);
        let mut counts = vec![0; slots.len()];
        for i in 0..slots.len() {
            let (earlier, rest) = slots.split_at_mut(i);
            if room > 0 && rest[0].search(engine, earlier) {
                counts[i] = rest[0].unread().len().min(room);
                room -= counts[i];
            }
        }
        engine.lap(Stage::Other);
        let more = self.more || slots.iter().any(|slot| slot.is_unsearched());
        let mut read: Vec<(&mut Slot, usize)> =
            slots.iter_mut().map(|slot| &mut **slot).zip(counts).filter(|(_, count)| *count > 0).collect();
        let suffices = suffices(read.iter().map(|(slot, _)| &**slot));
        let mut feeds: Vec<Feed<'_>> = read.iter_mut().map(|(slot, count)| slot.feed_prompt(*count)).collect();
        self.choices.make(engine, &mut feeds, suffices)?;
        self.bar.advance(read.iter().map(|(_, count)| count).sum());
        if read.iter().any(|(slot, _)| slot.unread().is_empty()) {
            // Removes the bar before text is shown.
            *self.bar = PromptBar::default();
        }
        let mut rows = self.choices.iter();
        for (slot, _) in read.into_iter().filter(|(slot, _)| slot.unread().is_empty()) {
            if more {
                slot.keep(engine);
            }
            slot.take_drafted(rows.by_ref().take(1), &[], engine, options, sink)?;
        }
        Ok(())
    }
}

/// Progress bar of the prompts that are being read.
#[derive(Default)]
struct PromptBar(Option<ProgressBar>);

impl PromptBar {
    /// Returns the number of tokens of the next step: at most `most`, and less if a bar is shown.
    fn limit(&mut self, most: usize, slots: &[&mut Slot]) -> usize {
        let bar = self.0.get_or_insert_with(|| {
            let unread: usize = slots.iter().map(|slot| slot.unread().len()).sum();
            progress::items("prompt", unread as u64)
        });
        if bar.is_hidden() { most } else { most.min(PIECE) }
    }

    fn advance(&mut self, tokens: usize) {
        self.0.iter().for_each(|bar| bar.inc(tokens as u64));
    }
}

/// Runs one forward pass over `slots` and the draft tokens of `speculator`, if there is one. Each slot takes new tokens
/// until it chooses one that differs from the draft.
fn step(
    engine: &mut Engine,
    mut speculator: Option<&mut Speculator>,
    slots: &mut [&mut Slot],
    choices: &mut Choices,
    options: &Options<'_>,
    sink: &mut impl FnMut(&Event<'_>) -> Result<()>,
) -> Result<()> {
    let drafts = match &mut speculator {
        Some(speculator) => {
            let mut texts: Vec<_> = slots.iter_mut().map(|slot| slot.text_so_far(engine)).collect();
            speculator.draft_tokens(&mut texts)?
        }
        None => vec![Vec::new(); slots.len()],
    };
    engine.lap(Stage::Other);
    let begin = Instant::now();
    let suffices = suffices(slots.iter().map(|slot| &**slot));
    let mut feeds = Vec::with_capacity(slots.len());
    for (slot, draft) in slots.iter_mut().zip(&drafts) {
        slot.ids.extend(draft);
        feeds.push(slot.feed());
    }
    choices.make(engine, &mut feeds, suffices)?;
    if let Some(speculator) = speculator {
        speculator.observe(choices.rows(), begin.elapsed());
    }
    let mut rows = choices.iter();
    for (slot, draft) in slots.iter_mut().zip(&drafts) {
        let own: Vec<Likely<'_>> = rows.by_ref().take(1 + draft.len()).collect();
        slot.take_drafted(own.into_iter(), draft, engine, options, sink)?;
    }
    Ok(())
}

/// Returns how many of the largest logits are enough for all slots; `None` when all are needed.
fn suffices<'a>(mut slots: impl Iterator<Item = &'a Slot>) -> Option<usize> {
    slots.try_fold(1, |most, slot| Some(slot.suffices()?.max(most)))
}

/// Logits from which the tokens of a step are chosen, row by row.
#[derive(Default)]
struct Choices {
    /// All logits, `(rows, vocab)`; empty if `best` is used.
    logits: Vec<f32>,
    vocab: usize,
    /// The largest logits of each row, if the device selects them.
    best: Vec<Vec<(u32, f32)>>,
}

impl Choices {
    /// Runs the engine. For each row it returns only the `suffices` largest logits if it can select them, else all.
    /// More tokens than a step takes are divided among several steps.
    fn make(&mut self, engine: &mut Engine, mut feeds: &mut [Feed<'_>], suffices: Option<usize>) -> Result<()> {
        self.best.clear();
        self.logits.clear();
        self.vocab = engine.config().vocab;
        let best = suffices.filter(|k| engine.finds_best(*k));
        while !feeds.is_empty() {
            let mut tokens = 0;
            let fits = |feed: &&Feed<'_>| {
                tokens += feed.tokens.len();
                tokens <= engine.step_rows()
            };
            let count = feeds.iter().take_while(fits).count().max(1);
            let (now, later) = feeds.split_at_mut(count);
            feeds = later;
            match best {
                Some(k) => engine.step(now, Output::Best(k, &mut self.best))?,
                None => engine.step(now, Output::Logits(&mut self.logits))?,
            }
        }
        Ok(())
    }

    fn rows(&self) -> usize {
        if self.best.is_empty() { self.logits.len() / self.vocab } else { self.best.len() }
    }

    fn iter(&self) -> impl Iterator<Item = Likely<'_>> {
        let all = self.logits.chunks_exact(self.vocab.max(1)).map(Likely::All);
        all.chain(self.best.iter().map(|best| Likely::Best(best)))
    }
}
