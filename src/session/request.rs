//! Encodes the prompts of a prompts file, each with its own settings over those of the run, and continues them.

use super::adapters::Adapters;
use super::ahead::{Ahead, Taken};
use super::prompt_request::PromptRequest;
use super::recent::Recent;
use super::{Encoder, GenerateOptions, Generation, Session};
use crate::error::{Error, Result};
use crate::generate::constraint::{Constraint, ConstraintSource};
use crate::generate::sampler::{Breakers, Sampling};
use crate::generate::text::{ChatTemplate, Message, Variables};
use crate::generate::{self, Event, Next, Request, RequestSource, generate_from};
use crate::tools::{OutputStyle, answer_constraint};
use std::cell::RefCell;
use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

/// Settings of a run that its requests may replace.
#[derive(Debug)]
pub struct RunSettings<'a> {
    /// Chat template that renders prompts and messages; `None` = prompts are continued as they are.
    pub template: Option<&'a ChatTemplate>,
    /// Texts that end a turn of the template, besides those of `stop`.
    pub ends: &'a [String],
    /// System text before a prompt that the template renders.
    pub system: Option<&'a str>,
    /// Constraint of all answers, if there is one. It begins behind the reasoning that a chat template allows.
    pub constraint: Option<&'a ConstraintSource>,
    /// Request without a prompt: length, sampling, texts to stop at.
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
        let (parts, encoder) = self.parts();
        let style = run.template.and_then(|template| Some(OutputStyle::of(template, encoder.tokenizer().ok()?)));
        let (constraints, breakers) = (Recent::default(), Recent::default());
        let encoding = Encoding { run, style, constraints, breakers, time: Mutex::default() };
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
            let mut source = Encoded {
                piece: first.into_iter(),
                postponed: None,
                ring: &ring,
                adapters: encoder.adapters(),
                taken: 0,
                progress: &progress,
            };
            let mut sink = |event: &Event<'_>| progress.borrow_mut().token(event);
            parts.generate(options, |(engine, prefixes, speculator), run| {
                let run = generate::Options { waiting, ..*run };
                generate_from(engine, prefixes, speculator, &mut source, &run, &mut sink)
            })
        })?;
        let time = *encoding.time.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((generation, time))
    }
}

/// Request of a prompt, and the names of its adapters with their scales; `None` = all adapters of the run.
type Prepared = (Request, Option<Vec<(String, f32)>>);

/// Requests of prompts that other threads encode.
struct Encoded<'a, 'b> {
    /// Rest of the piece of which requests are taken.
    piece: std::vec::IntoIter<Result<Prepared>>,
    /// Request for whose adapters there was no room.
    postponed: Option<Prepared>,
    ring: &'a Ahead<Vec<Result<Prepared>>>,
    adapters: &'a Adapters,
    /// Number of requests that were taken.
    taken: usize,
    progress: &'a RefCell<&'b mut dyn Progress>,
}

impl RequestSource for Encoded<'_, '_> {
    fn next(&mut self, wait: bool) -> Result<Next> {
        let all = || self.adapters.together();
        loop {
            if let Some(prepared) = self.postponed.take().map(Ok).or_else(|| self.piece.next()) {
                let request = match prepared {
                    Err(e) => Err(e),
                    // Adapters are loaded when their text is about to be computed, and stay in memory until it ends.
                    Ok((request, names)) => match names.as_ref().map_or_else(all, |names| self.adapters.set(names)) {
                        Ok(Some(set)) => Ok(Request { adapters: Some(set), ..request }),
                        Ok(None) => {
                            self.postponed = Some((request, names));
                            return Ok(Next::Later);
                        }
                        Err(e) => Err(e),
                    },
                };
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
    /// Style of the answers to conversations, if a template renders them.
    style: Option<OutputStyle>,
    constraints: Recent<ConstraintSource, Constraint>,
    breakers: Recent<Option<Vec<String>>, Breakers>,
    /// Time that all threads took.
    time: Mutex<Duration>,
}

impl Encoding<'_> {
    /// Encodes prompts and builds their requests. An error concerns its prompt only.
    fn encode(&self, encoder: &Encoder<'_>, prompts: &[PromptRequest]) -> Vec<Result<Prepared>> {
        let begin = Instant::now();
        let ids = self.encode_texts(encoder, prompts);
        let request = |(prompt, ids): (&PromptRequest, Result<Vec<u32>>)| {
            let request = self.request(encoder, prompt, ids?)?;
            encoder.check(&request)?;
            if let Some(names) = &prompt.adapters {
                encoder.adapters().check(names)?;
            }
            Ok((request, prompt.adapters.clone()))
        };
        let requests = prompts.iter().zip(ids).map(request).collect();
        *self.time.lock().unwrap_or_else(PoisonError::into_inner) += begin.elapsed();
        requests
    }

    fn encode_texts(&self, encoder: &Encoder<'_>, prompts: &[PromptRequest]) -> Vec<Result<Vec<u32>>> {
        let conversations: Vec<_> = prompts.iter().map(|prompt| self.conversation(prompt)).collect();
        // Conversations with variables of their own are rendered one by one, all others together.
        let common = |(prompt, conversation): (&PromptRequest, &Result<Option<Vec<Message>>>)| {
            conversation.as_ref().ok()?.clone().filter(|_| prompt.chat_template_kwargs.is_empty())
        };
        let together: Vec<Vec<Message>> = prompts.iter().zip(&conversations).filter_map(common).collect();
        let mut together = self.encode_conversations(encoder, &together).into_iter();
        let encode = |(prompt, conversation): (&PromptRequest, Result<Option<Vec<Message>>>)| match conversation? {
            Some(_) if prompt.chat_template_kwargs.is_empty() => together.next().expect("tokens for each conversation"),
            Some(messages) => self.encode_with(encoder, messages, prompt.chat_template_kwargs.clone()),
            None => encode_raw(encoder, prompt),
        };
        prompts.iter().zip(conversations).map(encode).collect()
    }

    /// Returns the conversation that the chat template renders; `None` for a prompt that is continued as it is.
    fn conversation(&self, prompt: &PromptRequest) -> Result<Option<Vec<Message>>> {
        if !prompt.chat_template_kwargs.is_empty() && (prompt.raw || self.run.template.is_none()) {
            return Err(Error::usage("found `chat_template_kwargs` for a prompt without a chat template")
                .help("leave it out, or add --chat-template auto to the run"));
        }
        match self.run.template {
            Some(_) => prompt.conversation(self.run.system),
            None if prompt.messages.is_empty() => Ok(None),
            None => Err(Error::usage("found `messages`, expected `prompt` in a run without a chat template")
                .help("add --chat-template auto, or the name of a built-in template")),
        }
    }

    /// Encodes a conversation with variables of its own.
    fn encode_with(&self, encoder: &Encoder<'_>, messages: Vec<Message>, variables: Variables) -> Result<Vec<u32>> {
        let template = self.run.template.expect("a template that made the conversation").clone();
        encoder.encode_chats(&template.with_variables(variables)?, &[messages]).map(|ids| ids.concat())
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
        let source = prompt.sources().next().or_else(|| self.run.constraint.cloned());
        let source = match (source, self.style.as_ref().filter(|_| !prompt.raw)) {
            (Some(source), Some(style)) => Some(answer_constraint(style, encoder.tokenizer()?, &ids, &source)),
            (source, _) => source,
        };
        let constraint =
            source.map(|source| self.constraints.get(source, |source| encoder.constraint(source))).transpose()?;
        let stop = prompt.stop.as_ref().unwrap_or(&plain.stop);
        let ends = if prompt.raw { &[] } else { self.run.ends };
        Ok(Request {
            ids,
            max_new: prompt.max_new.unwrap_or(plain.max_new),
            sampling: self.sampling(encoder, prompt)?,
            seed: prompt.seed,
            stop: stop.iter().chain(ends).cloned().collect(),
            constraint,
            logprobs: plain.logprobs,
            priority: prompt.priority,
            ..Request::default()
        })
    }

    /// Returns the sampling of a request, over that of the run.
    fn sampling(&self, encoder: &Encoder<'_>, prompt: &PromptRequest) -> Result<Sampling> {
        let plain = &self.run.plain.sampling;
        let mut sampling = prompt.sampling(encoder, plain.clone())?;
        prompt.check_effects(&sampling)?;
        let own = &prompt.dry_sequence_breakers;
        if sampling.dry.is_active() && (own.is_some() || !plain.dry.is_active()) {
            let breakers = |texts: &Option<Vec<String>>| encoder.breakers(texts.as_deref());
            sampling.dry.breakers = self.breakers.get(own.clone(), breakers)?;
        }
        Ok(sampling)
    }
}

/// Encodes a prompt that is continued as it is.
fn encode_raw(encoder: &Encoder<'_>, prompt: &PromptRequest) -> Result<Vec<u32>> {
    let text = prompt.prompt.as_deref().unwrap_or_default();
    let text = prompt.normalize.map_or_else(|| Ok(text.to_string()), |form| form.of(text))?;
    encoder.encode(&text, prompt.add_special_tokens.unwrap_or(true))
}
