//! Requests of a prompts file: a prompt with settings of its own, which replace those of the run.

use super::ahead::{Ahead, Taken};
use super::sampling::SamplingTexts;
use super::{Encoder, GenerateOptions, Generation, Session};
use crate::error::{Error, Result};
use crate::runtime::constraint::{Constraint, ConstraintSource};
use crate::runtime::generate::{self, Event, Next, Request, Source, generate_from};
use crate::runtime::sampler::Sampling;
use crate::runtime::text::{ChatTemplate, Message, UnicodeForm};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::num::NonZero;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

/// A prompt and the settings of its request. A setting that is absent is that of the run.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PromptRequest {
    /// Text to continue; as the message of a user if the run has a chat template.
    #[serde(alias = "text")]
    pub prompt: Option<String>,
    /// Conversation to answer, in place of `prompt`; the run must have a chat template.
    pub messages: Vec<Message>,
    /// True to continue `prompt` as it is, although the run has a chat template.
    pub raw: bool,
    /// False to leave out the special tokens that the tokenizer adds to a text, such as the beginning of the sequence.
    pub add_special_tokens: Option<bool>,
    /// Unicode form to which the texts are converted first.
    pub normalize: Option<UnicodeForm>,
    /// Largest number of tokens to generate.
    #[serde(alias = "max_tokens")]
    pub max_new: Option<usize>,
    /// Texts at which the generated text ends, in place of those of the run.
    #[serde(deserialize_with = "one_or_several")]
    pub stop: Option<Vec<String>>,
    /// Seed of this request. The seed of the run is that of its first request; request number i draws from seed + i.
    pub seed: Option<u64>,
    /// Order of computation, 0 by default: of the next 64 prompts, those with the lowest value are computed first.
    pub priority: i32,
    /// Adapters of this request by their names in the run, with their scales; none = `[]`, absent = all of the run.
    #[serde(deserialize_with = "adapters")]
    pub adapters: Option<Vec<(String, f32)>>,
    /// Divisor of the logits; 0 = greedy.
    pub temperature: Option<f64>,
    /// Number of most likely tokens to sample from; 0 = all.
    pub top_k: Option<usize>,
    /// Total probability of the most likely tokens to sample from.
    pub top_p: Option<f64>,
    /// Smallest probability of the tokens to sample from, as a fraction of that of the most likely one.
    pub min_p: Option<f64>,
    /// Total probability of the tokens with the most typical information content to sample from.
    pub typical_p: Option<f64>,
    /// Penalty for tokens that occurred; 1 = none.
    #[serde(alias = "repetition_penalty")]
    pub repeat_penalty: Option<f64>,
    /// Number subtracted from the logits of tokens that occurred.
    pub presence_penalty: Option<f64>,
    /// Number subtracted from the logits of tokens for each of their occurrences.
    pub frequency_penalty: Option<f64>,
    /// Numbers added to the logits of tokens; a key is an id or a text of one token.
    pub logit_bias: BTreeMap<String, f64>,
    /// Texts that are not generated.
    pub bad_words: Vec<String>,
    /// JSON schema of the generated text.
    pub json_schema: Option<Value>,
    /// Grammar of the generated text.
    pub grammar: Option<String>,
    /// Regular expression that matches the whole generated text.
    pub regex: Option<String>,
    /// Texts of which one is generated.
    pub choice: Vec<String>,
}

/// Reads a text or a list of texts.
fn one_or_several<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a text or a list of texts")]
    enum Texts {
        One(String),
        Several(Vec<String>),
    }
    Ok(Some(match Texts::deserialize(from)? {
        Texts::One(text) => vec![text],
        Texts::Several(texts) => texts,
    }))
}

/// Reads a list of names, or of objects with `name` and `scale`.
fn adapters<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Option<Vec<(String, f32)>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Scaled {
        name: String,
        #[serde(default = "one")]
        scale: f32,
    }
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected names of adapters, or objects with `name` and `scale`")]
    enum Entry {
        Name(String),
        Scaled(Scaled),
    }
    let entries = Vec::<Entry>::deserialize(from)?.into_iter().map(|entry| match entry {
        Entry::Name(name) => (name, 1.0),
        Entry::Scaled(Scaled { name, scale }) => (name, scale),
    });
    Ok(Some(entries.collect()))
}

fn one() -> f32 {
    1.0
}

impl From<String> for PromptRequest {
    fn from(prompt: String) -> PromptRequest {
        PromptRequest::new(prompt)
    }
}

impl PromptRequest {
    /// Creates the request of a text without settings.
    pub fn new(prompt: impl Into<String>) -> PromptRequest {
        PromptRequest { prompt: Some(prompt.into()), ..PromptRequest::default() }
    }

    /// Checks that there is one prompt and at most one constraint, and that no text of `stop` is empty.
    ///
    /// # Errors
    /// One of these is not the case; the message names the fields.
    pub fn check(&self) -> Result<()> {
        match (&self.prompt, self.messages.is_empty()) {
            (None, true) => return Err(Error::corrupt("found neither `prompt` nor `messages`, expected one of them")),
            (Some(_), false) => return Err(Error::corrupt("found `prompt` and `messages`, expected one of them")),
            (None, false) if self.raw => {
                return Err(Error::corrupt("found `raw` with `messages`, expected it with `prompt` only"));
            }
            _ => {}
        }
        if self.sources().count() > 1 {
            let fields = "`json_schema`, `grammar`, `regex` or `choice`";
            return Err(Error::corrupt(format!("found several constraints, expected at most one of {fields}")));
        }
        match self.stop.iter().flatten().any(String::is_empty) {
            true => Err(Error::corrupt("`stop`: found an empty text, expected at least one character")),
            false => Ok(()),
        }
    }

    /// Returns the text that stands for the prompt in reports: the prompt, or the last message.
    pub fn shown(&self) -> &str {
        let last = || self.messages.last().map(|message| message.content.as_str());
        self.prompt.as_deref().or_else(last).unwrap_or_default()
    }

    /// Returns the conversation that a chat template renders: the messages, or the prompt as the message of a user
    /// after the system text of the run; `None` if the prompt is continued as it is.
    ///
    /// # Errors
    /// A text cannot be converted to the Unicode form.
    fn conversation(&self, system: Option<&str>) -> Result<Option<Vec<Message>>> {
        let mut messages = match &self.prompt {
            _ if self.raw => return Ok(None),
            Some(prompt) => {
                let system = system.map(|text| Message::new("system", text));
                system.into_iter().chain([Message::new("user", prompt)]).collect()
            }
            None => self.messages.clone(),
        };
        if let Some(form) = self.normalize {
            for message in &mut messages {
                message.content = form.of(&message.content)?;
            }
        }
        Ok(Some(messages))
    }

    fn sources(&self) -> impl Iterator<Item = ConstraintSource> + '_ {
        let schema = self.json_schema.as_ref().map(|schema| match schema {
            Value::String(text) => ConstraintSource::JsonSchema(text.clone()),
            schema => ConstraintSource::JsonSchema(schema.to_string()),
        });
        let grammar = self.grammar.clone().map(ConstraintSource::Grammar);
        let regex = self.regex.clone().map(ConstraintSource::Regex);
        let choice = (!self.choice.is_empty()).then(|| ConstraintSource::Choice(self.choice.clone()));
        schema.into_iter().chain(grammar).chain(regex).chain(choice)
    }

    /// Returns the sampling of the request, over that of the run.
    fn sampling(&self, encoder: &Encoder<'_>, plain: Sampling) -> Result<Sampling> {
        let draws = [self.top_p, self.min_p, self.typical_p].iter().any(Option::is_some) || self.top_k.is_some();
        let unnamed = if draws && plain.temperature == 0.0 { 1.0 } else { plain.temperature };
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(unnamed),
            top_k: self.top_k.unwrap_or(plain.top_k),
            top_p: self.top_p.unwrap_or(plain.top_p),
            min_p: self.min_p.unwrap_or(plain.min_p),
            typical_p: self.typical_p.unwrap_or(plain.typical_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(plain.repeat_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(plain.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(plain.frequency_penalty),
            ..plain
        };
        if self.logit_bias.is_empty() && self.bad_words.is_empty() {
            return Ok(sampling);
        }
        let texts = SamplingTexts {
            logit_bias: self.logit_bias.iter().map(|(token, bias)| format!("{token}={bias}")).collect(),
            banned: self.bad_words.clone(),
            dry_breakers: None,
        };
        // The sequence breakers of the run stay.
        let breakers = sampling.dry.breakers.clone();
        let mut sampling = texts.resolve(sampling, || encoder.tokenizer(), encoder.vocab())?;
        sampling.dry.breakers = breakers;
        Ok(sampling)
    }
}

/// Settings of a run that its requests may replace.
#[derive(Debug)]
pub struct RunSettings<'a> {
    /// Chat template that renders prompts and messages; `None` = prompts are continued as they are.
    pub template: Option<&'a ChatTemplate>,
    /// Texts that end a turn of the template, besides those of `stop`.
    pub ends: &'a [String],
    /// System text before a prompt that the template renders.
    pub system: Option<&'a str>,
    /// Request without a prompt: length, sampling, texts to stop at, constraint.
    pub plain: Request,
}

/// Receiver of what [`Session::generate_prompts`] does.
pub trait Progress {
    /// Takes a prompt that was encoded or is invalid. Prompts come in their order, each before its first token.
    ///
    /// # Errors
    /// The generation must end.
    fn prompt(&mut self, index: usize, request: &Result<Request>) -> Result<()>;

    /// Takes a token that was generated.
    ///
    /// # Errors
    /// The generation must end.
    fn token(&mut self, event: &Event<'_>) -> Result<()>;
}

/// Largest number of prompts that a thread encodes at a time. Chat templates are rendered in a process per piece.
const PIECE: usize = 16;
/// Largest number of threads that encode prompts. One of them encodes much faster than an engine computes.
const THREADS: usize = 4;
/// Largest number of constraints that are kept for requests with the same one.
const COMPILED: usize = 64;

impl Session {
    /// Encodes prompts and continues them, each with its own settings over those of the run. The first ones are encoded
    /// before anything is computed, the others by other threads while the engine computes, at most `ahead` (at least
    /// one) before they are needed. Returns the texts and the time that encoding took on all threads together.
    ///
    /// # Errors
    /// `progress` fails, a prompt is invalid and `skip_invalid` is not set (the message names the number of the
    /// prompt), and those of [`Session::generate`].
    pub fn generate_prompts(
        &mut self,
        prompts: &[PromptRequest],
        run: &RunSettings<'_>,
        options: &GenerateOptions,
        ahead: usize,
        progress: &mut dyn Progress,
    ) -> Result<(Generation, Duration)> {
        let pieces: Vec<&[PromptRequest]> = prompts.chunks(ahead.clamp(1, PIECE)).collect();
        let encoding = Encoding { run, compiled: Mutex::default(), time: Mutex::default() };
        let (parts, encoder) = self.parts();
        let first = pieces.first().map_or_else(Vec::new, |piece| encoding.encode(&encoder, piece));
        let later = pieces.get(1..).unwrap_or_default();
        // Half of the prompts ahead wait in the batch, where priorities order them.
        let waiting = (ahead / 2).max(1);
        let ring = Ahead::new(later.len(), (ahead - waiting.min(ahead)) / PIECE);
        let threads = later.len().min(THREADS).min(available_parallelism().map_or(1, NonZero::get));
        let progress = RefCell::new(progress);
        let generation = std::thread::scope(|scope| {
            let _stop = ring.stop();
            for _ in 0..threads {
                scope.spawn(|| ring.work(|i| encoding.encode(&encoder, later[i])));
            }
            let mut source = Encoded { piece: first.into_iter(), ring: &ring, taken: 0, progress: &progress };
            let mut sink = |event: &Event<'_>| progress.borrow_mut().token(event);
            parts.generate(options, |engine, speculator, run| {
                let run = generate::Options { waiting, ..*run };
                generate_from(engine, speculator, &mut source, &run, &mut sink)
            })
        })?;
        let time = *encoding.time.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((generation, time))
    }
}

/// Requests of prompts that other threads encode.
struct Encoded<'a, 'b> {
    /// Rest of the piece of which requests are taken.
    piece: std::vec::IntoIter<Result<Request>>,
    ring: &'a Ahead<Vec<Result<Request>>>,
    /// Number of requests that were taken.
    taken: usize,
    progress: &'a RefCell<&'b mut dyn Progress>,
}

impl Source for Encoded<'_, '_> {
    fn next(&mut self, wait: bool) -> Result<Next> {
        loop {
            if let Some(request) = self.piece.next() {
                self.progress.borrow_mut().prompt(self.taken, &request)?;
                self.taken += 1;
                return Ok(Next::Request(Box::new(request)));
            }
            match self.ring.next(wait) {
                Taken::Ready(piece) => self.piece = piece.into_iter(),
                Taken::Pending => return Ok(Next::Later),
                Taken::End => return Ok(Next::End),
            }
        }
    }
}

/// State of the threads that encode the prompts of a run.
struct Encoding<'a> {
    run: &'a RunSettings<'a>,
    /// Constraints that were compiled last.
    compiled: Mutex<VecDeque<(ConstraintSource, Arc<Constraint>)>>,
    /// Time that all threads took.
    time: Mutex<Duration>,
}

impl Encoding<'_> {
    /// Encodes prompts and builds their requests. An error concerns its prompt only.
    fn encode(&self, encoder: &Encoder<'_>, prompts: &[PromptRequest]) -> Vec<Result<Request>> {
        let begin = Instant::now();
        let ids = self.encode_texts(encoder, prompts);
        let request = |(prompt, ids): (&PromptRequest, Result<Vec<u32>>)| {
            let request = self.request(encoder, prompt, ids?)?;
            encoder.check(&request)?;
            Ok(request)
        };
        let requests = prompts.iter().zip(ids).map(request).collect();
        *self.time.lock().unwrap_or_else(PoisonError::into_inner) += begin.elapsed();
        requests
    }

    fn encode_texts(&self, encoder: &Encoder<'_>, prompts: &[PromptRequest]) -> Vec<Result<Vec<u32>>> {
        let conversations: Vec<_> = prompts.iter().map(|prompt| self.conversation(prompt)).collect();
        let rendered: Vec<Vec<Message>> =
            conversations.iter().flatten().filter_map(|conversation| conversation.clone()).collect();
        let mut rendered = self.encode_conversations(encoder, &rendered).into_iter();
        let encode = |(prompt, conversation): (&PromptRequest, Result<Option<Vec<Message>>>)| match conversation? {
            Some(_) => rendered.next().expect("tokens for each conversation"),
            None => encode_raw(encoder, prompt),
        };
        prompts.iter().zip(conversations).map(encode).collect()
    }

    /// Returns the conversation that the chat template renders; `None` for a prompt that is continued as it is.
    fn conversation(&self, prompt: &PromptRequest) -> Result<Option<Vec<Message>>> {
        match self.run.template {
            Some(_) => prompt.conversation(self.run.system),
            None if prompt.messages.is_empty() => Ok(None),
            None => Err(Error::usage("found `messages`, expected `prompt` in a run without a chat template")
                .help("add --chat-template auto, or the name of a built-in template")),
        }
    }

    /// Encodes conversations together, or each alone if one of them fails.
    fn encode_conversations(&self, encoder: &Encoder<'_>, conversations: &[Vec<Message>]) -> Vec<Result<Vec<u32>>> {
        let Some(template) = self.run.template.filter(|_| !conversations.is_empty()) else { return Vec::new() };
        match encoder.encode_chats(template, conversations) {
            Ok(ids) => ids.into_iter().map(Ok).collect(),
            Err(e) if conversations.len() == 1 => vec![Err(e)],
            Err(_) => {
                let alone = |one: &Vec<Message>| encoder.encode_chats(template, std::slice::from_ref(one));
                conversations.iter().map(|one| alone(one).map(|ids| ids.concat())).collect()
            }
        }
    }

    fn request(&self, encoder: &Encoder<'_>, prompt: &PromptRequest, ids: Vec<u32>) -> Result<Request> {
        let plain = self.run.plain.clone();
        let constraint = match prompt.sources().next() {
            None => plain.constraint,
            Some(source) => Some(self.constraint(encoder, source)?),
        };
        let stop = prompt.stop.as_ref().unwrap_or(&plain.stop);
        let ends = if prompt.raw { &[] } else { self.run.ends };
        Ok(Request {
            ids,
            max_new: prompt.max_new.unwrap_or(plain.max_new),
            sampling: prompt.sampling(encoder, plain.sampling)?,
            seed: prompt.seed,
            stop: stop.iter().chain(ends).cloned().collect(),
            constraint,
            logprobs: plain.logprobs,
            prefix: None,
            priority: prompt.priority,
            adapters: match &prompt.adapters {
                Some(named) => Some(encoder.adapters().set(named)?),
                None => Some(encoder.adapters().together()?),
            },
            salt: Vec::new(),
        })
    }

    /// Returns the compiled form of a constraint, which requests with the same one share.
    fn constraint(&self, encoder: &Encoder<'_>, source: ConstraintSource) -> Result<Arc<Constraint>> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, constraint)) = compiled.iter().find(|(known, _)| *known == source) {
            return Ok(constraint.clone());
        }
        let constraint = encoder.constraint(&source)?;
        compiled.truncate(COMPILED - 1);
        compiled.push_front((source, constraint.clone()));
        Ok(constraint)
    }
}

/// Encodes a prompt that is continued as it is.
fn encode_raw(encoder: &Encoder<'_>, prompt: &PromptRequest) -> Result<Vec<u32>> {
    let text = prompt.prompt.as_deref().unwrap_or_default();
    let text = prompt.normalize.map_or_else(|| Ok(text.to_string()), |form| form.of(text))?;
    encoder.encode(&text, prompt.add_special_tokens.unwrap_or(true))
}
