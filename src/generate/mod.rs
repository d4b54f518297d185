//! Generation: continues prompts in batches.
//!
//! [`text`] converts text to tokens and back, [`speculate`] drafts tokens, [`constraint`] masks those that a schema or
//! grammar does not allow, [`sampler`] chooses them, and [`score`] computes perplexities.
//!
//! [`Batch`] drives the engine with the steps of the scheduler ([`crate::sched`]): requests come and go between steps.
//! [`generate`] runs a fixed list of requests. Its steps compute prompts first, and then all active texts advance by
//! one token per step, or by several if [`speculate`] drafted them, so that the time of a step counts as prefill or
//! decode in reports. Engine and sampler give each text the same tokens as if it were alone, so other sequences in the
//! batch and draft tokens change only the speed. A text with a constraint is sampled from masked logits; `constrained`
//! computes the masks during the steps.

mod batch;
mod choices;
mod constrained;
pub mod constraint;
pub mod sampler;
pub mod score;
mod slot;
pub mod speculate;
pub mod text;
mod texts;
mod waits;
mod written;

pub use batch::{Batch, StepReport, Terms};

use crate::error::{Context, Error, Result};
use crate::runtime::adapters::AdapterSet;
use crate::runtime::engine::Engine;
use crate::runtime::prefix_cache::PrefixCache;
use crate::runtime::profile::{Stage, Stages};
use crate::runtime::sequence::{Feed, Sequence, Want};
use crate::sched::{self, Micros};
use constraint::Constraint;
use sampler::{Candidate, Sampling};
use speculate::model::DraftState;
use speculate::{DraftCounts, Speculator};
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::Tokenizer;

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
    /// Constraint that the generated text satisfies when it ends by itself. A constraint of the whole text excludes
    /// special tokens.
    pub constraint: Option<Arc<Constraint>>,
    /// Time that its constraint took to compile, which counts in the fair share of its key.
    pub spent: Duration,
    /// Prefix cache: tokens read before. Those at the beginning of the prompt are not computed again.
    pub prefix: Option<CachedPrefix>,
    /// Whether the completion returns its prefix cache for a later request.
    pub keep_prefix: bool,
    /// Order of computation: of the requests that wait, those with the lowest value are computed first.
    pub priority: i32,
    /// Adapters with which the text is computed; `None` = those of the engine.
    pub adapters: Option<AdapterSet>,
    /// Divides the prefix cache of the engine: texts reuse the computation of texts with the same salt only.
    pub salt: Vec<u8>,
    /// Rules for the end of the text, besides the end tokens of the run.
    pub ends: Ends,
    /// Show special tokens in this text, whatever the run does.
    pub show_special: bool,
    /// Whether the text continues that of the prompt: a space before its first word is then part of it. Otherwise, it
    /// is decoded as a text of its own.
    pub continues: bool,
    /// Tokens that may be generated, in ascending order; empty = all.
    pub allowed: Arc<[u32]>,
    /// `Some(k)`: report the probability of each token of the prompt but the first, and the `k` most likely ones. The
    /// whole prompt is then computed: its beginning is not taken from the prefix cache. Such a request may generate
    /// nothing (`max_new` 0).
    pub score: Option<usize>,
}

/// Rules for the end of one text.
#[derive(Debug, Clone, Default)]
pub struct Ends {
    /// Do not end the text at the end tokens of the run.
    pub ignore_eos: bool,
    /// Tokens that end this text, in addition to the end tokens of the run.
    pub tokens: Vec<u32>,
    /// Number of tokens before which no end token is chosen and stop strings have no effect.
    pub min_new: usize,
    /// Show the stop string, or the token of `tokens`, that ends the text.
    pub include_stop: bool,
}

impl Ends {
    /// Returns the tokens that end the text, where `run` are the end tokens of the run.
    fn all(&self, run: &[u32]) -> Vec<u32> {
        if self.ignore_eos { self.tokens.clone() } else { [run, &self.tokens].concat() }
    }
}

impl Request {
    /// Returns what divides the prefix cache: the adapters by their content, and the salt. No two pairs have the same
    /// bytes.
    fn owner(&self, engine: &Engine) -> Vec<u8> {
        let key = self.adapters(engine).key();
        [&(key.len() as u64).to_le_bytes(), &key[..], &self.salt].concat()
    }

    /// Returns the adapters of the text: its own, or those of new sequences.
    fn adapters<'a>(&'a self, engine: &'a Engine) -> &'a AdapterSet {
        self.adapters.as_ref().unwrap_or(engine.adapters())
    }

    /// Returns the number of tokens at the beginning of the prompt that the given sequence has read with the same
    /// adapters. The last token is read again because its logits are needed.
    fn known(&self, engine: &Engine) -> usize {
        let common = |prefix: &CachedPrefix| prefix.ids.iter().zip(&self.ids).take_while(|(a, b)| a == b).count();
        let adapters = self.adapters(engine);
        let usable =
            self.prefix.as_ref().filter(|prefix| prefix.sequence.adapters.is(adapters) && self.score.is_none());
        usable.map_or(0, common).min(self.ids.len().saturating_sub(1))
    }
}

/// A sequence and the tokens it has read, for requests that begin with them (prefix cache). A clone shares memory until
/// one of the two reads more tokens.
#[derive(Debug, Clone)]
pub struct CachedPrefix {
    sequence: Sequence,
    ids: Vec<u32>,
    /// State in the model that drafts, if any.
    draft: Option<DraftState>,
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
    /// Largest number of requests that wait in the batch while all its slots are in use; at most 64, 0 = 64.
    pub waiting: usize,
    /// Tokens that end a text.
    pub eos: &'a [u32],
    /// Whether special tokens are shown in the text.
    pub show_special: bool,
    /// Whether an invalid request fails alone: its completion carries the error. Otherwise it fails the whole run
    /// before anything is computed.
    pub skip_invalid: bool,
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
    /// The user interrupted.
    Interrupted,
    /// The request was invalid and nothing was generated.
    Invalid,
    /// The text could not be computed further; other texts were not affected.
    Failed,
    /// The request was cancelled.
    Cancelled,
    /// The deadline of the request passed.
    Deadline,
    /// The request waited longer than the queue timeout.
    QueueTimeout,
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
            Finish::Failed => "failed",
            Finish::Cancelled => "cancelled",
            Finish::Deadline => "deadline",
            Finish::QueueTimeout => "queue_timeout",
        }
    }
}

/// A token with its probability, and the most likely tokens at its place, most likely first.
pub type Likelihood = (Candidate, Vec<Candidate>);

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
    pub likely: Option<&'a Likelihood>,
    /// Reason why the text ends; set with the last token.
    pub finish: Option<Finish>,
}

/// A finished text.
#[derive(Debug)]
pub struct Completion {
    /// Index of the request.
    pub index: usize,
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
    /// Numbers of draft tokens.
    pub drafts: DraftCounts,
    /// Whether the text satisfies the constraint of its request; `None` without a constraint. A text that was cut by a
    /// stop string does not count.
    pub constraint_met: Option<bool>,
    /// Stop string that ended the text.
    pub stopped_by: Option<String>,
    /// Probabilities of the tokens of the prompt except the first, if [`Request::score`] asks for them.
    pub scores: Vec<Likelihood>,
    /// Prefix cache of the whole text for a later request, if [`Request::keep_prefix`] is set.
    pub prefix: Option<CachedPrefix>,
    /// Reason why the request was invalid or failed.
    pub error: Option<Error>,
}

impl Completion {
    /// Returns the completion of a request that has not been in a step.
    fn without_text(index: usize, prompt_tokens: usize, finish: Finish, error: Option<Error>) -> Completion {
        Completion {
            index,
            ids: Vec::new(),
            text: String::new(),
            finish,
            prompt_tokens,
            reused_tokens: 0,
            started: Instant::now(),
            marks: Vec::new(),
            drafts: DraftCounts::default(),
            constraint_met: None,
            stopped_by: None,
            scores: Vec::new(),
            prefix: None,
            error,
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

/// Requests of a run, which may become known while others are computed.
pub trait RequestSource {
    /// Returns the next request in their order. With `wait`, the call blocks until there is one, except for a request
    /// that must wait for the end of an earlier one.
    ///
    /// # Errors
    /// The whole run must end. A request that is invalid alone is [`Next::Request`] with its error.
    fn next(&mut self, wait: bool) -> Result<Next>;
}

/// Next request of a [`RequestSource`].
#[derive(Debug)]
pub enum Next {
    /// The request, or the reason why it is invalid.
    Request(Box<Result<Request>>),
    /// The request is not known yet, or must wait for the end of an earlier one.
    Later,
    /// There are no more requests.
    End,
}

/// Requests that are known.
impl RequestSource for std::vec::IntoIter<Request> {
    fn next(&mut self, _wait: bool) -> Result<Next> {
        Ok(Iterator::next(self).map_or(Next::End, |request| Next::Request(Box::new(Ok(request)))))
    }
}

/// Generates all texts and calls `sink` with each token as it is generated. All requests are checked before anything
/// is computed. Texts use a prefix cache, if there is one.
///
/// # Errors
/// A request is invalid or fails and `skip_invalid` is not set, the draft model fails, `sink` fails, or the user
/// interrupts.
pub fn generate(
    engine: &mut Engine,
    prefixes: Option<&mut PrefixCache>,
    speculator: &mut Speculator,
    requests: Vec<Request>,
    options: &Options<'_>,
    mut sink: impl FnMut(&Event<'_>) -> Result<()>,
) -> Result<Outcome> {
    if !options.skip_invalid {
        requests
            .iter()
            .enumerate()
            .try_for_each(|(i, request)| check(request, engine).tensor(&format!("prompt {i}")))?;
    }
    generate_from(engine, prefixes, speculator, &mut requests.into_iter(), options, &mut sink)
}

/// Generates all texts of a source and calls `sink` with each token as it is generated. A request is checked when it
/// becomes known.
///
/// # Errors
/// The same as those of [`generate`].
pub fn generate_from(
    engine: &mut Engine,
    prefixes: Option<&mut PrefixCache>,
    speculator: &mut Speculator,
    source: &mut dyn RequestSource,
    options: &Options<'_>,
    sink: &mut dyn FnMut(&Event<'_>) -> Result<()>,
) -> Result<Outcome> {
    let limits = sched::Options {
        max_seqs: options.batch.max(1),
        step: Micros::MAX,
        max_queue: usize::MAX,
        queue_timeout: Micros::MAX,
        drafts: if speculator.is_off() { 0 } else { u32::MAX },
        prompts_first: true,
        ..sched::Options::with_pages(0, 0)
    };
    let mut batch = Batch::new(engine, prefixes, limits);
    let key = batch.add_key(sched::KeyLimits { max_priority: i32::MIN, ..sched::KeyLimits::default() });
    let (prefill, decode) = Default::default();
    let mut run = GenerationRun { source, key, more: true, completions: Vec::new(), prefill, decode };
    run.steps(&mut batch, engine, speculator, options, sink)?;
    Ok(Outcome {
        completions: run.completions.into_iter().flatten().collect(),
        prefill_time: run.prefill.0,
        decode_time: run.decode.0,
        prefill_stages: run.prefill.1,
        decode_stages: run.decode.1,
    })
}

/// Smallest number of requests that wait for a slot, if the source has them: priorities order these.
const WAITING: usize = 64;

/// State of [`generate_from`].
struct GenerationRun<'a> {
    source: &'a mut dyn RequestSource,
    /// Key of all requests.
    key: sched::KeyId,
    /// Whether the source may have more requests.
    more: bool,
    /// One element per request that came so far.
    completions: Vec<Option<Completion>>,
    prefill: (Duration, Stages),
    decode: (Duration, Stages),
}

impl GenerationRun<'_> {
    /// Computes steps until all requests have ended.
    fn steps(
        &mut self,
        batch: &mut Batch<'_>,
        engine: &mut Engine,
        speculator: &mut Speculator,
        options: &Options<'_>,
        sink: &mut dyn FnMut(&Event<'_>) -> Result<()>,
    ) -> Result<()> {
        engine.profile(engine.profiles());
        loop {
            self.fill(batch, engine, options)?;
            if batch.is_empty() {
                return Ok(());
            }
            let begin = Instant::now();
            let report = batch.step(engine, speculator, 0, options, sink)?;
            let (time, stages) = if report.reads { &mut self.prefill } else { &mut self.decode };
            *time += begin.elapsed();
            engine.lap(Stage::Other);
            stages.merge(&engine.take_stages());
            for (_, completion) in report.ended {
                self.end(completion, options)?;
            }
        }
    }

    /// Takes requests from the source, so that some wait for a slot. While nothing is being computed, waits until there
    /// is one for each slot.
    fn fill(&mut self, batch: &mut Batch<'_>, engine: &Engine, options: &Options<'_>) -> Result<()> {
        let slots = options.batch.max(1);
        let waiting = if options.waiting == 0 { WAITING } else { options.waiting.min(WAITING) };
        while self.more && batch.waiting() < slots.max(waiting) {
            let request = match self.source.next(batch.is_idle() && batch.waiting() < slots)? {
                Next::Later if batch.is_empty() => {
                    return Err(Error::engine("found a request that waits for another one, but no other one"));
                }
                Next::Later => return Ok(()),
                Next::End => {
                    self.more = false;
                    return Ok(());
                }
                Next::Request(request) => *request,
            };
            let index = self.completions.len();
            self.completions.push(None);
            let tokens = request.as_ref().map_or(0, |request| request.ids.len());
            let checked = request.and_then(|request| check(&request, engine).map(|()| request));
            match checked.tensor(&format!("prompt {index}")) {
                Ok(request) => {
                    let terms = Terms { key: self.key, priority: request.priority, ..Terms::default() };
                    batch.arrive(engine, 0, index, request, terms).expect("a request that was checked, without limits");
                }
                Err(e) => self.end(Completion::without_text(index, tokens, Finish::Invalid, Some(e)), options)?,
            }
        }
        Ok(())
    }

    fn end(&mut self, mut completion: Completion, options: &Options<'_>) -> Result<()> {
        let index = completion.index;
        match completion.error.take_if(|_| !options.skip_invalid) {
            Some(error) if self.completions.len() > 1 => Err(error).tensor(&format!("prompt {index}")),
            Some(error) => Err(error),
            None => {
                self.completions[index] = Some(completion);
                Ok(())
            }
        }
    }
}

/// Checks a request before anything is computed.
///
/// # Errors
/// The same as those of [`check_within`].
pub fn check(request: &Request, engine: &Engine) -> Result<()> {
    check_within(request, engine.context(), engine.config().vocab)
}

/// Checks a request for a model whose sequences have at most `context` tokens out of `vocab`.
///
/// # Errors
/// The prompt is empty or longer than the context, a token is not in the vocabulary, or a parameter is out of range.
pub fn check_within(request: &Request, context: usize, vocab: usize) -> Result<()> {
    request.sampling.validate()?;
    let tokens = request.ids.len();
    if tokens == 0 {
        return Err(Error::usage("the prompt is empty and the tokenizer adds no token to it")
            .help("give at least one character of prompt"));
    }
    if tokens > context {
        let found = format!("{tokens} prompt tokens do not fit the context of {context}");
        return Err(
            Error::usage(found).help("shorten the prompt, or raise --ctx up to the context length of the model")
        );
    }
    if request.max_new == 0 && request.score.is_none() {
        return Err(Error::usage("found 0 tokens to generate, expected at least 1"));
    }
    for (field, ids) in [("stop_token_ids", &request.ends.tokens[..]), ("allowed_token_ids", &request.allowed[..])] {
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            let found = format!("found token {id}, expected an id below {vocab}, the size of the vocabulary");
            return Err(Error::usage(found).setting(field));
        }
    }
    match request.ids.iter().find(|id| **id as usize >= vocab) {
        Some(id) => {
            let found = format!("token {id} is outside the model's vocabulary of {vocab}");
            Err(Error::corrupt(found).help("the tokenizer does not belong to this model"))
        }
        None => Ok(()),
    }
}
