//! Conversation with a model: history, commands, settings, and answers that reuse the KV cache of earlier turns.
//!
//! The model is that of a [`Host`], whose thread computes while this one shows the text. The whole history is rendered
//! with the chat template for each turn; the tokens at its beginning that equal those of the turn before are not
//! computed again. If prompt and answer would not fit the context, the oldest turns are left out of the prompt, and the
//! caller learns how many. The system text always stays.

pub mod command;
pub mod history;
mod prompt;
pub mod settings;

use crate::api::error::ApiError;
use crate::error::{Cause, Error, Result};
use crate::generate::{CachedPrefix, Completion, Ends, Finish, Request};
use crate::host::model::{ChatFormat, Ticket};
use crate::host::own::Host;
use crate::host::reply::{Refusal, Reply as HostReply};
use crate::interrupt;
use crate::runtime::adapters::AdapterSet;
use crate::tools::{OutputEvent, OutputParser, OutputStyle};
pub use history::{Answer, History, Turn};
use prompt::Dialogue;
use settings::Settings;
use std::time::Instant;

/// Part of an answer that a piece of text belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerPart {
    /// Answer for the user.
    Answer,
    /// Reasoning of the model, outside of the answer.
    Reasoning,
}

/// Conversation with the KV cache of the part that the model has already read.
#[derive(Debug)]
pub struct Conversation {
    /// Template, with what ends a turn.
    format: ChatFormat,
    history: History,
    /// Oldest turns that no longer fit the context.
    skipped: usize,
    prefix: Option<CachedPrefix>,
    adapters: AdapterSet,
    /// Number of answers generated, which is added to the seed.
    answers: u64,
}

/// An answer that was generated, with its measurements.
#[derive(Debug)]
pub struct Reply {
    /// Tokens, times and the reason why the answer ended.
    pub completion: Completion,
    /// Number of turns that this answer left out of its prompt in addition to earlier ones.
    pub newly_skipped: usize,
    /// False if the answer was interrupted before its first text; its message is then removed from the history.
    pub is_kept: bool,
}

impl Conversation {
    /// Creates an empty conversation.
    pub fn new(format: ChatFormat) -> Conversation {
        let (history, adapters) = Default::default();
        Conversation { format, history, skipped: 0, prefix: None, adapters, answers: 0 }
    }

    /// Returns the history.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Returns the name of the template.
    pub fn template_name(&self) -> &str {
        &self.format.template.name
    }

    /// Computes the following answers with these adapters, each with a scale that multiplies its own. They are loaded
    /// if necessary.
    ///
    /// # Errors
    /// A name is unknown, an adapter cannot be loaded, or they cannot be used together; the former ones stay in use.
    pub fn use_adapters(&mut self, names: &[(String, f32)], host: &Host) -> Result<()> {
        // The former ones may have to leave memory. What they have read is of no use with other ones.
        let before = std::mem::take(&mut self.adapters);
        self.prefix = None;
        let names = names.to_vec();
        let set = host.encode(move |encoder| encoder.adapters().set(&names)).and_then(|set| {
            set.ok_or_else(|| {
                Error::new(Cause::OutOfMemory("found no room for these adapters in --lora-memory".into()))
            })
        });
        let (set, outcome) = set.map_or_else(|e| (before, Err(e)), |set| (set, Ok(())));
        self.adapters = set;
        outcome
    }

    /// Returns the number of oldest turns that no longer fit the context.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Replaces the history.
    pub fn load(&mut self, history: History) {
        (self.history, self.skipped) = (history, 0);
    }

    /// Removes all turns. The system text stays.
    pub fn clear(&mut self) {
        self.history.turns.clear();
        self.skipped = 0;
    }

    /// Sets or removes the system text.
    pub fn set_system(&mut self, text: Option<String>) {
        self.history.system = text;
    }

    /// Removes the last turn, and returns its message; `None` if there is none.
    pub fn undo(&mut self) -> Option<String> {
        let turn = self.history.turns.pop()?;
        self.skipped = 0;
        Some(turn.message)
    }

    /// Generates the answer to a message; `sink` is called with each piece of text as it is generated. If generation
    /// fails, or is interrupted before the first text, the history stays as it was.
    ///
    /// # Errors
    /// The message does not fit the context, the template fails, the engine fails, `sink` fails, or the user interrupts
    /// and the options do not keep what there is.
    pub fn answer(
        &mut self,
        message: impl Into<String>,
        host: &Host,
        settings: &Settings,
        options: &ChatOptions,
        sink: impl FnMut(AnswerPart, &str) -> Result<()>,
    ) -> Result<Reply> {
        let skipped = self.skipped;
        self.history.turns.push(Turn { message: message.into(), answer: None });
        let reply = self.next_answer(host, settings, options, sink);
        if !matches!(&reply, Ok(reply) if reply.is_kept) {
            self.history.turns.pop();
            self.skipped = skipped;
        }
        reply
    }

    /// Generates another answer to the last message. If that fails, the former answer stays.
    ///
    /// # Errors
    /// There is no message, and the errors of [`Conversation::answer`].
    pub fn regenerate(
        &mut self,
        host: &Host,
        settings: &Settings,
        options: &ChatOptions,
        sink: impl FnMut(AnswerPart, &str) -> Result<()>,
    ) -> Result<Reply> {
        let Some(last) = self.history.turns.last_mut() else {
            return Err(Error::usage("there is no message to answer again"));
        };
        let (former, skipped) = (last.answer.take(), self.skipped);
        let reply = self.next_answer(host, settings, options, sink);
        if !matches!(&reply, Ok(reply) if reply.is_kept) {
            self.history.turns.last_mut().expect("there was one").answer = former;
            self.skipped = skipped;
        }
        reply
    }

    /// Counts the tokens of the prompt for the next turn, without a new message; `None` if the prompt is so long that
    /// the next answer will leave turns out.
    ///
    /// # Errors
    /// The template fails.
    pub fn prompt_tokens(&self, host: &Host) -> Result<Option<usize>> {
        let dialogue = self.dialogue();
        host.encode(move |encoder| dialogue.tokens(encoder))
    }

    fn dialogue(&self) -> Dialogue {
        Dialogue {
            template: self.format.template.template.clone(),
            history: self.history.clone(),
            skipped: self.skipped,
        }
    }

    /// Generates the answer to the last turn and adds it to the history.
    fn next_answer(
        &mut self,
        host: &Host,
        settings: &Settings,
        options: &ChatOptions,
        mut sink: impl FnMut(AnswerPart, &str) -> Result<()>,
    ) -> Result<Reply> {
        let arrived = Instant::now();
        let (dialogue, max_new) = (self.dialogue(), settings.max_new);
        let (request, skipped, parser) = host.encode({
            let request = self.request(settings, options);
            move |encoder| {
                let tokenizer = encoder.tokenizer()?;
                let (ids, skipped) = dialogue.fitting(encoder, max_new)?;
                let style = OutputStyle::of(&dialogue.template, tokenizer);
                let parser = OutputParser::new(&style, &[], tokenizer, &ids, 0);
                let request = Request { ids, ..request };
                encoder.check(&request)?;
                Ok((request, skipped, parser))
            }
        })?;
        let request = Request { prefix: self.prefix.take(), ..request };
        let newly_skipped = skipped.saturating_sub(self.skipped);
        self.skipped = skipped;
        self.answers += 1;
        let mut division = Division { parser, shown: 0 };
        let mut answer = Answer::default();
        let mut keep = |events: Vec<OutputEvent>| answer.add(events, &mut sink);
        let ticket = host.submit(vec![request], Vec::new(), arrived);
        let mut completion = wait(ticket, |id, text| keep(division.push(id, text)))?;
        if completion.finish == Finish::Interrupted && !options.keep_interrupted {
            interrupt::check()?;
        }
        self.prefix = completion.prefix.take();
        keep(division.finish(&completion.text))?;
        let interrupted = completion.finish == Finish::Interrupted;
        let is_kept = !(interrupted && answer.text.is_empty() && answer.reasoning.is_empty());
        if is_kept {
            answer.cut = Some(completion.finish)
                .filter(|finish| !matches!(finish, Finish::Eos | Finish::Complete | Finish::Stop));
            self.history.turns.last_mut().expect("the turn that is answered").answer = Some(answer);
        }
        Ok(Reply { completion, newly_skipped, is_kept })
    }

    /// Returns the request for the next answer without its prompt.
    fn request(&self, settings: &Settings, options: &ChatOptions) -> Request {
        let (tokens, texts) = match options.ignore_eos {
            true => Default::default(),
            false => (self.format.end_tokens.clone(), self.format.end_texts.clone()),
        };
        Request {
            max_new: settings.max_new.unwrap_or(usize::MAX),
            sampling: settings.sampling.clone(),
            seed: Some(settings.sampling.seed.wrapping_add(self.answers)),
            stop: [texts, options.stop.clone()].concat(),
            keep_prefix: true,
            adapters: Some(self.adapters.clone()),
            ends: Ends { ignore_eos: options.ignore_eos, tokens, ..Ends::default() },
            show_special: options.show_special,
            ..Request::default()
        }
    }
}

/// Waits for the end of a request with one choice; `sink` is called with each token and its text.
fn wait(mut ticket: Ticket, mut sink: impl FnMut(u32, &str) -> Result<()>) -> Result<Completion> {
    loop {
        match ticket.inlet.wait() {
            Some(HostReply::Queued) => {}
            Some(HostReply::Token(token)) => sink(token.id, &token.text)?,
            Some(HostReply::Done(done)) => {
                let mut completion = done.completion;
                return completion.error.take().map_or(Ok(completion), Err);
            }
            Some(HostReply::Refused(refusal)) => return Err(ApiError::of_refusal(&refusal).into()),
            None => return Err(ApiError::of_refusal(&Refusal::Stopped("the engine has ended".into())).into()),
        }
    }
}

/// Division of an output into reasoning and answer.
struct Division {
    parser: OutputParser,
    /// Number of bytes of the text that were read.
    shown: usize,
}

impl Division {
    fn push(&mut self, id: u32, text: &str) -> Vec<OutputEvent> {
        let mut events = Vec::new();
        self.shown += text.len();
        self.parser.push(id, text, &mut events);
        events
    }

    /// Ends the output, whose whole text is given. Text that was held back when an interrupt came has had no event, and
    /// has no token.
    fn finish(&mut self, whole: &str) -> Vec<OutputEvent> {
        let held = whole.get(self.shown..).unwrap_or_default();
        let mut events = if held.is_empty() { Vec::new() } else { self.push(u32::MAX, held) };
        self.parser.finish(false, &mut events);
        events
    }
}

impl Answer {
    /// Adds pieces of an output, and shows them. A conversation has no tools, so there are no calls.
    fn add(&mut self, events: Vec<OutputEvent>, sink: &mut impl FnMut(AnswerPart, &str) -> Result<()>) -> Result<()> {
        events.into_iter().try_for_each(|event| match event {
            OutputEvent::Content(text) => {
                self.text.push_str(&text);
                sink(AnswerPart::Answer, &text)
            }
            OutputEvent::Reasoning(text) => {
                self.reasoning.push_str(&text);
                sink(AnswerPart::Reasoning, &text)
            }
            OutputEvent::CallBegin { .. } | OutputEvent::CallArguments { .. } => Ok(()),
        })
    }
}

/// Options that stay the same for all answers.
#[derive(Debug, Clone, Default)]
pub struct ChatOptions {
    /// Texts that end an answer.
    pub stop: Vec<String>,
    /// Do not end an answer at the end tokens of the model and the template.
    pub ignore_eos: bool,
    /// Show special tokens in the text.
    pub show_special: bool,
    /// Let an interrupt (SIGINT) end the answer where it is instead of failing.
    pub keep_interrupted: bool,
}
