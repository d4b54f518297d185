//! State of a conversation, shared by terminal, pipe and line protocol: answers, commands, and the texts that report
//! them.

use super::completion::SUBJECTS;
use iec::chat::command::{COMMANDS, Command};
use iec::chat::settings::{NAMES, Settings};
use iec::chat::{AnswerPart, ChatOptions, Conversation, History, Reply};
use iec::convert::source::gguf::Gguf;
use iec::error::{Cause, Error, Result};
use iec::files;
use iec::generate::sampler::Sampling;
use iec::generate::{Completion, Finish};
use iec::host::model::Facts;
use iec::host::own::Host;
use iec::iebin::JSON_NAME;
use iec::interrupt;
use iec::output::Inputs;
use iec::session;
use iec::similar::nearest;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Conversation with its model and settings.
pub struct Talk {
    /// Model, and the thread that computes for it.
    pub host: Host,
    /// Properties of the model.
    pub facts: Arc<Facts>,
    pub conversation: Conversation,
    pub settings: Settings,
    pub options: ChatOptions,
    /// Source of the sampling, for the banner.
    pub sampling_source: String,
    /// Files that /save must not replace.
    pub inputs: Inputs,
    /// File that was saved or loaded last; /save may replace it.
    pub file: Option<PathBuf>,
    /// Adapters in use, with the scales that multiply their own.
    pub adapters: Vec<(String, f32)>,
    /// Speed of the last answer as one line of text; `None` before the first answer.
    pub last: Option<String>,
}

/// Message that the model answers: a new one, or the last one again.
#[derive(Debug, Clone)]
pub enum Question {
    /// New message of the user.
    Message(String),
    /// The last message of the history.
    Again,
}

/// Result of a command.
#[derive(Debug)]
pub enum Done {
    /// Lines for the user.
    Said(Vec<String>),
    /// The last message is to be answered again.
    Regenerate,
    /// The conversation ends.
    Exit,
}

impl Talk {
    /// Answers a question; `sink` shows the text. An interrupt ends the answer and not the process, if the options
    /// keep interrupted answers.
    pub fn answer(&mut self, question: Question, sink: impl FnMut(AnswerPart, &str) -> Result<()>) -> Result<Reply> {
        let Talk { host, conversation, settings, options, .. } = self;
        let reply = match question {
            Question::Message(text) => conversation.answer(text, host, settings, options, sink),
            Question::Again => conversation.regenerate(host, settings, options, sink),
        }?;
        if options.keep_interrupted {
            interrupt::take_interrupt();
        }
        let facts = self.facts.clone();
        self.host.model.compute(move |engine| session::note_rebuilds(&facts.details.name, engine));
        self.last = Some(self.describe_speed(&reply.completion));
        Ok(reply)
    }

    /// Runs a command.
    ///
    /// # Errors
    /// An argument is wrong, or a file cannot be read or written.
    pub fn execute(&mut self, command: Command) -> Result<Done> {
        let said = |line: String| Ok(Done::Said(vec![line]));
        match command {
            Command::Help => Ok(Done::Said(help())),
            Command::Exit => Ok(Done::Exit),
            Command::Regenerate => Ok(Done::Regenerate),
            Command::System(None) => said(self.describe_system()),
            Command::System(Some(text)) => {
                self.conversation.set_system(Some(text).filter(|text| !text.is_empty() && text != "\"\""));
                said(self.describe_system())
            }
            Command::Set(None) => Ok(Done::Said(self.list_settings())),
            Command::Set(Some((name, text))) if name == "system" => self.execute(Command::System(Some(text))),
            Command::Set(Some((name, value))) => {
                let before = self.settings.sampling.clone();
                self.settings.set(&name, &value)?;
                let seed = self.settings.sampling.seed;
                if self.settings.sampling != (Sampling { seed, ..before }) && !self.sampling_source.starts_with(BY_SET)
                {
                    self.sampling_source = format!("{BY_SET}{}", self.sampling_source);
                }
                said(format!("{name}: {value}"))
            }
            Command::Show(subject) => self.show(subject.as_deref()).map(Done::Said),
            Command::Save { path, overwrite } => self.save(path, overwrite).and_then(said),
            Command::Edit(_) => Err(Error::usage("/edit: found no terminal, expected one")),
            Command::Load(path) => {
                self.conversation.load(History::load(&path)?);
                let turns = self.conversation.history().turns.len();
                let noun = if turns == 1 { "turn" } else { "turns" };
                let line = format!("loaded {turns} {noun} from {}", path.display());
                self.file = Some(path);
                said(line)
            }
            Command::Undo => match self.conversation.undo() {
                Some(message) => said(format!("removed: {}", beginning(&message))),
                None => Err(Error::usage("/undo: found no message, expected at least one")),
            },
            Command::Clear => {
                self.conversation.clear();
                // Without a name, /save must not replace the file of the former conversation.
                self.file = None;
                said("the conversation is empty".into())
            }
            Command::Adapters(None) => self.describe_adapters().and_then(said),
            Command::Adapters(Some(names)) => {
                self.conversation.use_adapters(&names, &self.host)?;
                self.adapters = names;
                self.describe_adapters().and_then(said)
            }
        }
    }

    fn save(&mut self, path: Option<PathBuf>, overwrite: bool) -> Result<String> {
        let path = path.or_else(|| self.file.clone());
        let path =
            path.ok_or_else(|| Error::usage("/save: found no file name, expected one").help("write /save FILE"))?;
        let overwrite = overwrite || self.file.as_ref() == Some(&path);
        self.conversation.history().save(&path, &self.facts.details.name, overwrite, &self.inputs)?;
        let line = format!("saved to {}", path.display());
        self.file = Some(path);
        Ok(line)
    }

    /// Describes the adapters in use and all that can be chosen in one line.
    fn describe_adapters(&self) -> Result<String> {
        let one = |(name, scale): &(String, f32)| if *scale == 1.0 { name.clone() } else { format!("{name}:{scale}") };
        let used: Vec<String> = self.adapters.iter().map(one).collect();
        let all = self.host.encode(|encoder| Ok(encoder.adapters().names()))?;
        Ok(match (used.is_empty(), all.is_empty()) {
            (_, true) => "no adapters; name them with --lora NAME=DIR when iec starts".into(),
            (true, _) => format!("adapters: none in use, of {}", all.join(", ")),
            (false, _) => format!("adapters: {} in use, of {}", used.join(" "), all.join(", ")),
        })
    }

    fn describe_system(&self) -> String {
        self.conversation.history().system.as_ref().map_or("no system text".into(), |text| format!("system: {text}"))
    }

    fn list_settings(&self) -> Vec<String> {
        let row = |(name, about): &(&str, &str)| {
            format!("{name:<15} {:<8} {about}", self.settings.get(name).unwrap_or_default())
        };
        NAMES.iter().map(row).chain([self.describe_system()]).collect()
    }

    fn show(&self, subject: Option<&str>) -> Result<Vec<String>> {
        Ok(match subject {
            None => vec![self.describe_model(), self.describe_sampling(), self.describe_context()?],
            Some("model" | "precision" | "device") => vec![self.describe_model()],
            Some("context") => vec![self.describe_context()?],
            Some("settings" | "sampling") => self.list_settings(),
            Some("stats") => vec![self.last.clone().unwrap_or_else(|| "no answer yet".into())],
            Some("system") => vec![self.describe_system()],
            Some("template") => vec![format!("template: {}", self.conversation.template_name())],
            Some("history") => self.list_history(),
            Some(other) => {
                let near = nearest(other, SUBJECTS.iter().copied());
                let hint = near.map_or(String::new(), |near| format!("; did you mean {near}?"));
                return Err(Error::usage(format!(
                    "/show: found `{}`, expected a subject of the help{hint}",
                    beginning(other)
                ))
                .help(format!("/show {}", SUBJECTS.join(", "))));
            }
        })
    }

    fn list_history(&self) -> Vec<String> {
        let history = self.conversation.history();
        let mut lines: Vec<String> = history.system.iter().map(|text| format!("system: {text}")).collect();
        for (i, turn) in history.turns.iter().enumerate() {
            let skipped = if i < self.conversation.skipped() { " (left out)" } else { "" };
            lines.push(format!("user{skipped}: {}", turn.message));
            if let Some(answer) = &turn.answer {
                let cut = answer.cut.map_or(String::new(), |cut| format!(" ({})", cut.name()));
                lines.push(format!("assistant{cut}: {}", answer.text));
            }
        }
        if lines.is_empty() { vec!["the conversation is empty".into()] } else { lines }
    }

    /// Describes model, precision, context and device in one line.
    pub fn describe_model(&self) -> String {
        let details = &self.facts.details;
        let device = match details.device.as_str() {
            "cpu" => format!("cpu, {} threads, {}", details.threads, details.isa),
            other => other.to_string(),
        };
        let (name, context) = (&details.name, self.facts.context);
        format!("{name}: {}, {}, context {context}, {device}", details.architecture, details.precision)
    }

    /// Describes the sampling and the seed in one line.
    pub fn describe_sampling(&self) -> String {
        let seed = self.settings.sampling.seed;
        format!("{} ({}), seed {seed}", self.settings.describe_sampling(), self.sampling_source)
    }

    fn describe_context(&self) -> Result<String> {
        let context = self.facts.context;
        let Some(used) = self.conversation.prompt_tokens(&self.host)? else {
            let found = format!("the conversation has more than {context} tokens");
            return Ok(format!("context: {found}; the next answer leaves out the oldest turns"));
        };
        let skipped = match self.conversation.skipped() {
            0 => String::new(),
            turns => format!(", {}", left_out(turns)),
        };
        Ok(format!("context: {used} of {context} tokens{skipped}"))
    }

    /// Describes the speed of an answer in one line.
    fn describe_speed(&self, done: &Completion) -> String {
        let seconds = done.decode_time().as_secs_f64();
        let rate = if seconds > 0.0 { done.ids.len().saturating_sub(1) as f64 / seconds } else { 0.0 };
        format!(
            "{} prompt tokens ({} reused) in {:.2} s, {} new in {seconds:.2} s ({rate:.1} tokens/s), context {} of {}",
            done.prompt_tokens,
            done.reused_tokens,
            done.prefill_time().as_secs_f64(),
            done.ids.len(),
            done.prompt_tokens + done.ids.len(),
            self.facts.context
        )
    }

    /// Returns what the user must know about an answer: turns that were left out, and why it was cut.
    pub fn notes(&self, reply: &Reply) -> Vec<String> {
        let (context, tokens) = (self.facts.context, reply.completion.ids.len());
        let mut notes = Vec::new();
        if reply.newly_skipped > 0 {
            let turns = left_out(self.conversation.skipped());
            notes.push(format!("the context of {context} tokens was full: {turns}"));
        }
        match reply.completion.finish {
            Finish::Length => notes.push(format!("the answer was cut at max_new, after {tokens} tokens")),
            Finish::Context => {
                notes.push(format!("the answer was cut after {tokens} tokens: the context of {context} tokens is full"))
            }
            Finish::Interrupted if reply.is_kept => {
                notes.push("stopped; the answer so far stays in the conversation".into())
            }
            Finish::Interrupted => notes.push("stopped before the first word; the message was removed".into()),
            Finish::Eos | Finish::Complete | Finish::Stop | Finish::Invalid | Finish::Failed => {}
            Finish::Cancelled | Finish::Deadline | Finish::QueueTimeout => {}
        }
        notes
    }

    /// Returns the state of the conversation for programs.
    pub fn state(&self) -> Value {
        let details = &self.facts.details;
        let values = NAMES.iter().filter_map(|(name, _)| Some(((*name).to_string(), self.settings.get(name)?)));
        let values: serde_json::Map<String, Value> = values
            .map(|(name, text)| {
                let number = serde_json::from_str::<Value>(&text).ok().filter(Value::is_number);
                (name, number.unwrap_or(Value::String(text)))
            })
            .collect();
        json!({
            "model": details.name,
            "architecture": details.architecture,
            "precision": details.precision,
            "context": self.facts.context,
            "device": details.device,
            "threads": details.threads,
            "template": self.conversation.template_name(),
            "settings": values,
        })
    }

    /// Returns the banner: model, precision, context and seed. /show has the rest.
    pub fn greeting(&self) -> Vec<String> {
        let details = &self.facts.details;
        let name = details.name.rsplit('/').find(|part| !part.is_empty()).unwrap_or(&details.name);
        vec![
            format!("{name}: {}, context {}", details.precision, self.facts.context),
            format!("seed {}; /help lists the commands", self.settings.sampling.seed),
        ]
    }

    /// Takes what the user chose over from the conversation with another model.
    pub fn take_over(&mut self, former: &Talk) {
        self.conversation.set_system(former.conversation.history().system.clone());
        let sampling = &mut self.settings.sampling;
        if former.sampling_source.starts_with(BY_SET) {
            *sampling = former.settings.sampling.clone();
            self.sampling_source.clone_from(&former.sampling_source);
        } else {
            sampling.seed = former.settings.sampling.seed;
        }
        let Settings { max_new, think, stats, .. } = former.settings;
        self.settings = Settings { max_new, think, stats, ..self.settings.clone() };
        (self.options, self.file) = (former.options.clone(), former.file.clone());
    }
}

/// Beginning of the source of a sampling that /set changed.
const BY_SET: &str = "/set and ";

/// Returns true if a path of /load names a model. A name of JSON and any other file is a conversation.
pub fn names_model(path: &Path) -> Result<bool> {
    Ok(match files::find(path)? {
        Some(found) => found.is_dir() || path.ends_with(JSON_NAME) || Gguf::is_at(path),
        None => path.extension().is_none_or(|extension| extension != "json"),
    })
}

/// Describes how many turns the prompt leaves out.
fn left_out(turns: usize) -> String {
    if turns == 1 { "the oldest turn is left out".into() } else { format!("the oldest {turns} turns are left out") }
}

/// Returns true if the conversation goes on after an error: the user can correct its cause.
pub fn goes_on(error: &Error) -> bool {
    match error.cause() {
        Cause::Usage(_) | Cause::Corrupt(_) | Cause::Unsupported(_) => true,
        // A file of /save or /load. An error of stdin or stdout names no file.
        Cause::Io(_) => error.file().is_some_and(|file| file != "standard input"),
        _ => false,
    }
}

fn help() -> Vec<String> {
    let row = |row: &iec::chat::command::CommandRow| {
        let call = format!("/{} {}", row.names[0], row.arguments);
        let others: Vec<String> = row.names[1..].iter().map(|name| format!("/{name}")).collect();
        let also = if others.is_empty() { String::new() } else { format!(" ({})", others.join(", ")) };
        format!("{call:<28} {}{also}", row.about)
    };
    let keys = [
        "//TEXT                       send a text that begins with a slash",
        "\"\"\"TEXT\"\"\"                   text of several lines; elsewhere, a backslash at the end continues a line",
        "Ctrl-C                       stop the answer; pressed twice at an empty prompt: leave",
    ];
    COMMANDS.iter().map(row).chain(keys.map(String::from)).collect()
}

/// Returns the beginning of a text in one line.
fn beginning(text: &str) -> String {
    let line: String = text.chars().map(|c| if c.is_whitespace() { ' ' } else { c }).take(60).collect();
    if line.len() < text.len() { format!("{line}…") } else { line }
}
