//! How do prompts become texts? Up to `batch` of them are decoded together; a slot that becomes free takes the next.
//!
//! Prompts are read by themselves, then all active texts advance one token per step. Engine and sampler give each text
//! the same tokens as if it were alone, so the company changes only the speed.

use super::engine::{Engine, Feed, Sequence, Want};
use super::profile::{Stage, Stages};
use super::sampler::{Candidate, Sampler, Sampling, candidates};
use super::text::{StopMatcher, TextStream, Tokenizer};
use crate::error::{Context, Error, Result};
use crate::progress;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// With a visible progress bar, prompts are read in pieces of so many tokens.
const PIECE: usize = 128;

/// A text to be continued.
#[derive(Debug, Default)]
pub struct Request {
    /// The prompt; at least one token.
    pub ids: Vec<u32>,
    /// Most tokens to generate; at least one.
    pub max_new: usize,
    /// How tokens are chosen. The seed is the run's; each request draws from `seed + its index`.
    pub sampling: Sampling,
    /// Strings that end the text; they are not shown.
    pub stop: Vec<String>,
    /// `Some(k)`: report the probability of each token and the `k` most likely ones.
    pub logprobs: Option<usize>,
    /// Tokens read before; the part that the prompt begins with is not computed again.
    pub session: Option<Session>,
}

/// A sequence and the tokens it has read. A clone shares memory until one of the two reads on.
#[derive(Debug, Clone)]
pub struct Session {
    sequence: Sequence,
    ids: Vec<u32>,
}

impl Session {
    /// A session that has read `ids`.
    pub fn read(engine: &mut Engine, ids: Vec<u32>) -> Result<Session> {
        let mut sequence = engine.new_sequence()?;
        if !ids.is_empty() {
            engine.forward(&mut [Feed { sequence: &mut sequence, tokens: &ids }], Want::Last, &mut Vec::new())?;
        }
        Ok(Session { sequence, ids })
    }
}

/// What is the same for all requests of a run.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Makes text of the tokens; without it there is no text and no stop string.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Texts decoded together.
    pub batch: usize,
    /// Tokens that end a text.
    pub eos: &'a [u32],
    /// Show special tokens in the text.
    pub show_special: bool,
    /// Give the sequences back with the completions, for a later request.
    pub keep_sessions: bool,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model said so.
    Eos,
    /// A stop string appeared.
    Stop,
    /// `max_new` tokens were generated.
    Length,
    /// The context is full.
    Context,
}

impl Finish {
    /// The word for reports.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Eos => "eos",
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Context => "context",
        }
    }
}

/// A token was generated.
#[derive(Debug)]
pub struct Event<'a> {
    /// Index of the request.
    pub request: usize,
    /// Number of the token in its text, from 0.
    pub step: usize,
    /// The token.
    pub id: u32,
    /// Text that can be shown now.
    pub text: &'a str,
    /// The token's probability and the most likely tokens, if asked for.
    pub likely: Option<&'a (Candidate, Vec<Candidate>)>,
    /// Set with the last token.
    pub finish: Option<Finish>,
}

/// A finished text.
#[derive(Debug)]
pub struct Completion {
    /// The generated tokens, an EOS included.
    pub ids: Vec<u32>,
    /// The generated text, without the stop string.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that a session had read before.
    pub reused_tokens: usize,
    /// When the request got its slot.
    pub started: Instant,
    /// When each token was there.
    pub marks: Vec<Instant>,
    /// What was read, if sessions are kept.
    pub session: Option<Session>,
}

impl Completion {
    /// From the slot to the first token.
    pub fn prefill_time(&self) -> Duration {
        self.marks.first().map_or(Duration::ZERO, |first| *first - self.started)
    }

    /// From the first token to the last.
    pub fn decode_time(&self) -> Duration {
        self.marks.first().zip(self.marks.last()).map_or(Duration::ZERO, |(first, last)| *last - *first)
    }
}

/// All texts of a run, in the order of the requests, and where the time went.
#[derive(Debug)]
pub struct Outcome {
    /// One per request.
    pub completions: Vec<Completion>,
    /// Time of the steps that read prompts, their first tokens included.
    pub prefill_time: Duration,
    /// Time of the steps that generate, choosing and reporting tokens included.
    pub decode_time: Duration,
    /// What the stages of reading prompts cost; zero unless the engine profiles.
    pub prefill_stages: Stages,
    /// The same for generating.
    pub decode_stages: Stages,
}

/// Generates all texts; `sink` sees each token as it comes.
///
/// # Errors
/// A request is impossible (checked before anything is computed), the engine fails, `sink` fails, or the user interrupts.
pub fn generate(
    engine: &mut Engine,
    requests: Vec<Request>,
    options: &Options<'_>,
    mut sink: impl FnMut(&Event<'_>) -> Result<()>,
) -> Result<Outcome> {
    for (i, request) in requests.iter().enumerate() {
        check(request, engine).tensor(&format!("prompt {i}"))?;
    }
    let mut completions: Vec<Option<Completion>> = requests.iter().map(|_| None).collect();
    let mut waiting: VecDeque<(usize, Request)> = requests.into_iter().enumerate().collect();
    let mut slots: Vec<Slot> = Vec::new();
    let mut logits = Vec::new();
    let (mut prefill, mut decode) = ((Duration::ZERO, Stages::default()), (Duration::ZERO, Stages::default()));
    engine.profile(engine.profiles());
    loop {
        while slots.len() < options.batch.max(1)
            && let Some((index, request)) = waiting.pop_front()
        {
            slots.push(Slot::new(engine, index, request, options)?);
        }
        if slots.is_empty() {
            break;
        }
        let begin = Instant::now();
        let reading = slots.iter().any(Slot::is_fresh);
        let mut stepped: Vec<&mut Slot> = slots.iter_mut().filter(|slot| slot.is_fresh() == reading).collect();
        if reading {
            read_ahead(engine, &mut stepped, &mut logits)?;
        }
        step(engine, &mut stepped, &mut logits, options, &mut sink)?;
        let (time, stages) = if reading { &mut prefill } else { &mut decode };
        *time += begin.elapsed();
        engine.lap(Stage::Other);
        stages.merge(&engine.take_stages());
        for slot in slots.extract_if(.., |slot| slot.finish.is_some()) {
            let index = slot.index;
            completions[index] = slot.complete(options.keep_sessions);
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

fn check(request: &Request, engine: &Engine) -> Result<()> {
    request.sampling.validate()?;
    let (config, tokens) = (engine.config(), request.ids.len());
    if tokens == 0 {
        return Err(Error::usage("the prompt is empty and the tokenizer adds no token to it")
            .help("give at least one character of prompt"));
    }
    if tokens > engine.context() {
        let found = format!("{tokens} prompt tokens do not fit the context of {}", engine.context());
        return Err(Error::usage(found).help("shorten the prompt, or raise --ctx up to what the model was made for"));
    }
    if request.max_new == 0 {
        return Err(Error::usage("0 tokens to generate; expected at least 1"));
    }
    match request.ids.iter().find(|id| **id as usize >= config.vocab) {
        Some(id) => {
            let found = format!("token {id} is outside the model's vocabulary of {}", config.vocab);
            Err(Error::corrupt(found).help("the tokenizer does not belong to this model"))
        }
        None => Ok(()),
    }
}

/// Reads all but the ends of long prompts piece by piece, so that a bar can show how far it is. The pieces change no
/// bit; without a bar to show there are none.
fn read_ahead(engine: &mut Engine, slots: &mut [&mut Slot], logits: &mut Vec<f32>) -> Result<()> {
    let unread: usize = slots.iter().map(|slot| slot.unread().len()).sum();
    let bar = progress::items("prompt", unread as u64);
    if unread <= PIECE || bar.is_hidden() {
        return Ok(());
    }
    for slot in slots {
        while slot.unread().len() > PIECE {
            let read = slot.sequence.len();
            let piece = Feed { sequence: &mut slot.sequence, tokens: &slot.ids[read..read + PIECE] };
            engine.forward(&mut [piece], Want::Last, logits)?;
            bar.inc(PIECE as u64);
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// One forward pass over `slots` and one new token for each.
fn step(
    engine: &mut Engine,
    slots: &mut [&mut Slot],
    logits: &mut Vec<f32>,
    options: &Options<'_>,
    sink: &mut impl FnMut(&Event<'_>) -> Result<()>,
) -> Result<()> {
    let mut feeds: Vec<Feed<'_>> = slots
        .iter_mut()
        .map(|slot| {
            let read = slot.sequence.len();
            Feed { sequence: &mut slot.sequence, tokens: &slot.ids[read..] }
        })
        .collect();
    engine.forward(&mut feeds, Want::Last, logits)?;
    let vocab = engine.config().vocab;
    for (slot, row) in slots.iter_mut().zip(logits.chunks_exact(vocab)) {
        slot.take_token(row, engine, options, sink)?;
    }
    Ok(())
}

/// A text in the making.
struct Slot {
    index: usize,
    sequence: Sequence,
    /// Prompt and generated tokens; those from `sequence.len()` on are not read yet.
    ids: Vec<u32>,
    prompt_tokens: usize,
    reused_tokens: usize,
    max_new: usize,
    logprobs: Option<usize>,
    sampler: Sampler,
    stream: TextStream,
    stop: StopMatcher,
    text: String,
    finish: Option<Finish>,
    started: Instant,
    marks: Vec<Instant>,
}

impl Slot {
    fn new(engine: &Engine, index: usize, request: Request, options: &Options<'_>) -> Result<Slot> {
        let started = Instant::now();
        let prompt_tokens = request.ids.len();
        let sequence = match request.session {
            Some(Session { mut sequence, ids }) => {
                let common = ids.iter().zip(&request.ids).take_while(|(a, b)| a == b).count();
                // The last token is read again: its logits are wanted.
                sequence.truncate(common.min(prompt_tokens - 1));
                sequence
            }
            None => engine.new_sequence()?,
        };
        let mut sampler = Sampler::new(request.sampling, index);
        sampler.observe(&request.ids);
        let most = request.max_new.min(engine.context() + 1 - prompt_tokens);
        let mut ids = request.ids;
        ids.reserve(most);
        Ok(Slot {
            index,
            reused_tokens: sequence.len(),
            sequence,
            ids,
            prompt_tokens,
            max_new: request.max_new,
            logprobs: request.logprobs,
            sampler,
            stream: TextStream::new(!options.show_special),
            stop: StopMatcher::new(&request.stop),
            text: String::new(),
            finish: None,
            started,
            marks: Vec::with_capacity(most),
        })
    }

    /// True before the first token.
    fn is_fresh(&self) -> bool {
        self.marks.is_empty()
    }

    /// Tokens the model has not read yet.
    fn unread(&self) -> &[u32] {
        &self.ids[self.sequence.len()..]
    }

    fn take_token(
        &mut self,
        logits: &[f32],
        engine: &mut Engine,
        options: &Options<'_>,
        sink: &mut impl FnMut(&Event<'_>) -> Result<()>,
    ) -> Result<()> {
        let id = self.sampler.sample(logits)?;
        self.sampler.observe(&[id]);
        self.ids.push(id);
        self.marks.push(Instant::now());
        engine.lap(Stage::Sampling);
        self.finish = self.finish_of(id, engine.context(), options);
        let shown = self.text.len();
        if let Some(tokenizer) = options.tokenizer {
            self.extend_text(tokenizer, id)?;
        }
        engine.lap(Stage::Tokenizer);
        let likely = self.logprobs.map(|k| candidates(logits, id, k));
        sink(&Event {
            request: self.index,
            step: self.marks.len() - 1,
            id,
            text: &self.text[shown..],
            likely: likely.as_ref(),
            finish: self.finish,
        })?;
        engine.lap(Stage::Sink);
        Ok(())
    }

    fn finish_of(&self, id: u32, context: usize, options: &Options<'_>) -> Option<Finish> {
        if options.eos.contains(&id) {
            Some(Finish::Eos)
        } else if self.marks.len() >= self.max_new {
            Some(Finish::Length)
        } else if self.ids.len() > context {
            Some(Finish::Context)
        } else {
            None
        }
    }

    /// Adds what can be shown; with the last token, all that was held back.
    fn extend_text(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<()> {
        let mut piece = String::new();
        if self.finish != Some(Finish::Eos) {
            piece += &self.stream.push(tokenizer, id)?;
        }
        if self.finish.is_some() {
            piece += &self.stream.finish(tokenizer)?;
        }
        let shown = self.stop.push(&piece);
        self.text += &shown.text;
        if shown.stopped {
            self.finish = Some(Finish::Stop);
        } else if self.finish.is_some() {
            self.text += &self.stop.finish();
        }
        Ok(())
    }

    fn complete(self, keep_session: bool) -> Option<Completion> {
        let generated = self.ids[self.prompt_tokens..].to_vec();
        let mut read = self.ids;
        read.truncate(self.sequence.len());
        Some(Completion {
            ids: generated,
            text: self.text,
            finish: self.finish?,
            prompt_tokens: self.prompt_tokens,
            reused_tokens: self.reused_tokens,
            started: self.started,
            marks: self.marks,
            session: keep_session.then_some(Session { sequence: self.sequence, ids: read }),
        })
    }
}
