//! Conversation with a model: history, templates, and answers that reuse the KV cache of earlier turns.
//!
//! The whole history is rendered with the chat template for each turn; the tokens at its beginning that equal those of
//! the turn before are not computed again. If prompt and answer would not fit the context, the oldest turns are left
//! out of the prompt, and the caller learns how many. The system text always stays.

pub mod command;
pub mod defaults;
pub mod history;
pub mod settings;
pub mod templates;

use super::{GenerateOptions, Session};
use crate::error::{Error, Result};
use crate::generate::{CachedPrefix, Completion, Finish, Request};
use crate::tools::{OutputEvent, OutputParser, OutputStyle};
pub use history::{Answer, History, Turn};
use settings::Settings;
use std::path::Path;
pub use templates::{Template, TemplateChoice};

/// Divisor of the context length; the quotient is the number of tokens kept free for an answer.
const RESERVED_PART: usize = 4;
/// Largest number of tokens that are kept free for an answer.
const MOST_RESERVED: usize = 1024;

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
    template: Template,
    history: History,
    /// Oldest turns that no longer fit the context.
    skipped: usize,
    prefix: Option<CachedPrefix>,
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
    pub fn new(template: Template, system: Option<String>) -> Conversation {
        let history = History { system, turns: Vec::new() };
        Conversation { template, history, skipped: 0, prefix: None, answers: 0 }
    }

    /// Returns the history.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Returns the template.
    pub fn template(&self) -> &Template {
        &self.template
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
    /// The message does not fit the context, and the errors of
    /// [`Encoder::encode_chats`](super::Encoder::encode_chats) and [`Session::generate`].
    pub fn answer(
        &mut self,
        message: impl Into<String>,
        session: &mut Session,
        settings: &Settings,
        options: &ChatOptions,
        sink: impl FnMut(AnswerPart, &str) -> Result<()>,
    ) -> Result<Reply> {
        let skipped = self.skipped;
        self.history.turns.push(Turn { message: message.into(), answer: None });
        let reply = self.next_answer(session, settings, options, sink);
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
        session: &mut Session,
        settings: &Settings,
        options: &ChatOptions,
        sink: impl FnMut(AnswerPart, &str) -> Result<()>,
    ) -> Result<Reply> {
        let Some(last) = self.history.turns.last_mut() else {
            return Err(Error::usage("there is no message to answer again"));
        };
        let (former, skipped) = (last.answer.take(), self.skipped);
        let reply = self.next_answer(session, settings, options, sink);
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
    /// The same as those of [`Encoder::encode_chats`](super::Encoder::encode_chats).
    pub fn prompt_tokens(&self, session: &Session) -> Result<Option<usize>> {
        if self.history.turns.is_empty() && self.history.system.is_none() {
            return Ok(Some(0));
        }
        if self.skipped < self.first_candidate(session)? {
            return Ok(None);
        }
        Ok(self.prompt_without(self.skipped, session)?.map(|ids| ids.len()))
    }

    /// Generates the answer to the last turn and adds it to the history.
    fn next_answer(
        &mut self,
        session: &mut Session,
        settings: &Settings,
        options: &ChatOptions,
        mut sink: impl FnMut(AnswerPart, &str) -> Result<()>,
    ) -> Result<Reply> {
        let (ids, skipped) = self.fitting_prompt(session, settings.max_new)?;
        let newly_skipped = skipped.saturating_sub(self.skipped);
        self.skipped = skipped;
        let (mut stop_tokens, mut stop) = self.template.ends(session)?;
        if options.ignore_eos {
            (stop_tokens, stop) = (Vec::new(), Vec::new());
        }
        stop.extend(options.stop.iter().cloned());
        let mut sampling = settings.sampling.clone();
        sampling.seed = sampling.seed.wrapping_add(self.answers);
        self.answers += 1;
        let generate = GenerateOptions {
            batch: 1,
            keep_prefixes: true,
            keep_interrupted: options.keep_interrupted,
            stop_tokens,
            ignore_eos: options.ignore_eos,
            show_special: options.show_special,
            ..GenerateOptions::default()
        };
        let style = OutputStyle::of(&self.template.template, session.tokenizer()?);
        let mut division = Division { parser: OutputParser::new(&style, &[], session.tokenizer()?, &ids, 0), shown: 0 };
        let mut answer = Answer::default();
        let mut keep = |events: Vec<OutputEvent>| answer.add(events, &mut sink);
        let max_new = settings.max_new.unwrap_or(usize::MAX);
        let request = Request { max_new, sampling, stop, prefix: self.prefix.take(), ..session.request(ids) };
        let generation =
            session.generate(vec![request], &generate, |event| keep(division.push(event.id, event.text)))?;
        let mut completion = generation.outcome.completions.into_iter().next().expect("one completion per request");
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

    /// Returns the tokens of the longest prompt that leaves room for an answer, and the number of oldest turns that it
    /// leaves out. The last turn is never left out.
    fn fitting_prompt(&self, session: &Session, max_new: Option<usize>) -> Result<(Vec<u32>, usize)> {
        let context = session.engine.context();
        let reserved = (context / RESERVED_PART).min(MOST_RESERVED).min(max_new.unwrap_or(usize::MAX));
        let last = self.history.turns.len().saturating_sub(1);
        let fitting = |skipped: usize| {
            let ids = self.prompt_without(skipped, session)?;
            Ok::<_, Error>(ids.filter(|ids| ids.len() + reserved <= context))
        };
        // The smallest number of turns lies in `low..=high`.
        let (mut low, mut high) = (self.skipped.max(self.first_candidate(session)?).min(last), last);
        if low < high
            && let Some(ids) = fitting(low)?
        {
            return Ok((ids, low));
        }
        let mut found = None;
        while low < high {
            let middle = low + (high - low) / 2;
            match fitting(middle)? {
                Some(ids) => (found, high) = (Some(ids), middle),
                None => low = middle + 1,
            }
        }
        match found {
            Some(ids) => Ok((ids, high)),
            None => match self.prompt_without(last, session)? {
                Some(ids) if ids.len() <= context => Ok((ids, last)),
                Some(ids) => Err(too_long(&format!("{} tokens", ids.len()), context)),
                None => Err(too_long("a longer text", context)),
            },
        }
    }

    /// Returns the number of oldest turns without which the messages could fit the context at all: a message takes at
    /// least one token, and a text of more bytes than the longest prompt has more tokens than the context.
    fn first_candidate(&self, session: &Session) -> Result<usize> {
        let context = session.engine.context();
        let longest = session.tokenizer()?.longest_prompt(context);
        let (mut bytes, mut messages) = (self.history.system.as_ref().map_or(0, String::len), 0);
        let fits = |turn: &&Turn| {
            bytes += turn.message.len() + turn.answer.as_ref().map_or(0, |answer| answer.text.len());
            messages += 1 + usize::from(turn.answer.is_some());
            bytes <= longest && messages <= context
        };
        Ok(self.history.turns.len() - self.history.turns.iter().rev().take_while(fits).count())
    }

    /// Returns the tokens of the prompt without the `skipped` oldest turns; `None` if its text is longer than any
    /// prompt that fits the context.
    fn prompt_without(&self, skipped: usize, session: &Session) -> Result<Option<Vec<u32>>> {
        let tokenizer = session.tokenizer()?;
        let longest = tokenizer.longest_prompt(session.engine.context());
        let messages = self.history.messages(skipped);
        let bytes: usize = messages.iter().map(|message| message.content.len()).sum();
        if bytes > longest {
            return Ok(None);
        }
        // The template may add its own text to each message.
        let rendered = longest + TEMPLATE_TEXT * (1 + messages.len());
        let text = session.encoder().render_chats(&self.template.template, &[messages], rendered)?.concat();
        if text.len() > longest { Ok(None) } else { tokenizer.encode_plain(&text).map(Some) }
    }

    /// Writes the conversation to a file.
    ///
    /// # Errors
    /// The same as those of [`History::save`].
    pub fn save(&self, path: &Path, session: &Session, overwrite: bool, inputs: &crate::output::Inputs) -> Result<()> {
        self.history.save(path, &session.name, overwrite, inputs)
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

/// Largest number of bytes that a template usually adds to a message.
const TEMPLATE_TEXT: usize = 4096;

fn too_long(found: &str, context: usize) -> Error {
    Error::usage(format!(
        "the message and the system text: found {found}, expected at most {context} tokens of context"
    ))
    .help("shorten the message, or raise --ctx up to the context length of the model")
}
