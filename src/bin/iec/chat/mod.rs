//! `iec chat`: a conversation on a terminal, one message per line of standard input, or a line protocol for programs.

mod completion;
mod editor;
mod external;
mod flow;
mod history_file;
mod json;
mod screen;
mod talk;
mod terminal;

use crate::global::Global;
use crate::model::{ModelArgs, Opener};
use crate::names::offering;
use crate::sampling::SamplingArgs;
use editor::Editor;
use iec::chat::settings::{Settings, Think};
use iec::chat::{ChatOptions, Conversation, History};
use iec::error::{Context, Error, Result};
use iec::files::Stream;
use iec::generate::sampler::Sampling;
use iec::generate::text::Variables;
use iec::host::engine::Shared;
use iec::host::model::{ChatFormat, Facts, Served};
use iec::host::own::Host;
use iec::interrupt;
use iec::sched;
use iec::session::chat_templates::{self, Template, TemplateChoice};
use iec::session::{Session, prompts};
use iec::units::parse_count;
use std::hash::{BuildHasher, RandomState};
use std::io::{BufReader, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use talk::{Question, Talk};

/// Arguments of `iec chat`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
On a terminal: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.\n\
Otherwise each line of standard input is a message, and the answers go to standard output.\n\n\
Examples:\n  \
iec chat packs/tinyllama\n  \
iec chat packs/tinyllama --system \"Answer briefly.\" --temperature 0.7 --seed 1\n  \
echo '{\"message\": \"Hello\"}' | iec chat packs/tinyllama --json")]
pub struct Args {
    /// Answer this message only
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Largest number of tokens of an answer; 0 = up to the end of the context [default: 0]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    max_new: Option<usize>,
    /// End an answer where TEXT would appear; repeatable
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Line protocol for programs: requests on standard input, events on standard output, one JSON object per line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Options of a conversation, which `iec run --chat` has, too.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ConversationArgs {
    /// System text at the beginning of the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Chat template (auto: that of the model, the path of a file, or a built-in one: chatml, llama2, llama3, mistral,
    /// gemma, zephyr, phi3, harmony, deepseek, command-r, vicuna or alpaca) [default: auto]
    #[arg(long, alias = "template", value_name = "auto|NAME|FILE")]
    pub chat_template: Option<TemplateChoice>,
    /// Variables of the chat template, such as '{"enable_thinking": false}'
    #[arg(long, value_name = "JSON", value_parser = variables)]
    pub chat_template_kwargs: Option<Variables>,
    /// Continue the conversation of a file that /save wrote
    #[arg(long, value_name = "FILE")]
    pub load: Option<PathBuf>,
    /// Display of reasoning (on: dimmed, off: hidden, fold: only its length) [default: on]
    #[arg(long, value_name = "on|off|fold", hide_possible_values = true)]
    #[arg(value_parser = offering(&["on", "off", "fold"], str::parse::<Think>))]
    pub think: Option<Think>,
    /// Do not read or write the history of typed lines (iec/history in XDG_STATE_HOME or ~/.local/state)
    #[arg(long)]
    pub no_history: bool,
}

/// Reads variables of a chat template.
fn variables(json: &str) -> std::result::Result<Variables, String> {
    serde_json::from_str(json).map_err(|e| format!("expected an object of JSON: {e}"))
}

impl ConversationArgs {
    /// Opens a chat template, with the variables of the options.
    ///
    /// # Errors
    /// The template cannot be read, or a variable has another source.
    pub fn open_template(&self, choice: &TemplateChoice, session: &Session) -> Result<Template> {
        self.with_variables(choice.open(session)?)
    }

    /// Returns the chat template of an opened model and what ends a turn, with the variables of the options.
    ///
    /// # Errors
    /// The model has no template, or a variable has another source.
    fn format(&self, facts: &Facts) -> Result<ChatFormat> {
        let format = facts.template.clone().ok_or_else(|| chat_templates::missing(&facts.root))?;
        Ok(ChatFormat { template: self.with_variables(format.template)?, ..format })
    }

    fn with_variables(&self, mut template: Template) -> Result<Template> {
        if let Some(variables) = &self.chat_template_kwargs {
            template.template = template.template.with_variables(variables.clone())?;
        }
        Ok(template)
    }
}

/// A conversation to be held, from the arguments of `iec chat` or `iec run --chat`.
pub struct Start<'a> {
    pub model: &'a ModelArgs,
    pub conversation: &'a ConversationArgs,
    pub sampling: &'a SamplingArgs,
    pub prompt: Option<&'a str>,
    pub max_new: Option<usize>,
    pub options: ChatOptions,
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    start(
        Start {
            model: &args.model,
            conversation: &args.conversation,
            sampling: &args.sampling,
            prompt: args.prompt.as_deref(),
            max_new: args.max_new,
            options: ChatOptions { stop: args.stop.clone(), ..ChatOptions::default() },
            json: args.json,
        },
        global,
    )
}

/// Opens the model and holds the conversation.
///
/// # Errors
/// An option is wrong, the model cannot be opened, or the conversation fails.
pub fn start(start: Start<'_>, global: &Global) -> Result<()> {
    start.check()?;
    let loaded = start.conversation.load.as_deref().map(History::load).transpose()?;
    start.model.note_prompts_ahead(global);
    let interactive = std::io::stdin().is_terminal() && !start.json && start.prompt.is_none();
    let mut talk = start.talk(start.model.to_answer(global)?, loaded, global)?;
    if !start.json && !interactive && talk.settings.sampling.temperature > 0.0 {
        global.note(format_args!("sampling: {}", talk.describe_sampling()));
    }
    if start.json {
        talk.options.keep_interrupted = true;
        interrupt::allow_repeats(true);
        json::serve(&mut talk)?;
    } else if let Some(prompt) = start.prompt {
        terminal::answer(&mut talk, Question::Message(prompt.into()), global)?;
    } else if interactive {
        let path = if start.conversation.no_history { None } else { history_file::default_path() };
        let mut editor = Editor::new(path, global.colors())?;
        talk.options.keep_interrupted = true;
        interrupt::allow_repeats(true);
        talk.greeting().iter().for_each(|line| global.note(line));
        terminal::hold(&start, &mut talk, &mut editor, global)?;
    } else {
        let mut input = BufReader::new(Stream::of(std::io::stdin()));
        while let Some(line) = prompts::read_line(&mut input).at("standard input")? {
            if !line.trim().is_empty() {
                terminal::answer(&mut talk, Question::Message(line), global)?;
            }
        }
    }
    Ok(())
}

impl Start<'_> {
    /// Goes on with another model: the messages, the system text and what /set chose stay.
    ///
    /// # Errors
    /// The model cannot be opened, or has no chat template. The conversation then stays as it was.
    fn change_model(&self, talk: &mut Talk, model: &Path, global: &Global) -> Result<()> {
        let opener = self.model.other_to_answer(model, global)?;
        let mut other = self.talk(opener, Some(talk.conversation.history().clone()), global)?;
        other.take_over(talk);
        other.inputs = self.model.inputs_with(model);
        *talk = other;
        Ok(())
    }

    fn check(&self) -> Result<()> {
        self.sampling.check()?;
        if self.options.stop.iter().any(String::is_empty) {
            return Err(
                Error::usage("--stop: found an empty text, expected at least one character").help("leave --stop out")
            );
        }
        if self.json && self.conversation.think.is_some() {
            return Err(Error::usage("--think has no effect with --json").help("reasoning has events of its own"));
        }
        if self.json && self.prompt.is_some() {
            return Err(
                Error::usage("--prompt cannot be used with --json").help("send {\"message\": TEXT} on standard input")
            );
        }
        Ok(())
    }

    /// Opens the model, and returns the conversation with its settings. All adapters of the model are in use.
    fn talk(&self, opener: Opener, loaded: Option<History>, global: &Global) -> Result<Talk> {
        let host = self.host(opener, global)?;
        let facts = host.facts()?;
        let mut conversation = Conversation::new(self.conversation.format(&facts)?);
        conversation.load(loaded.unwrap_or_default());
        if let Some(system) = &self.conversation.system {
            conversation.set_system(Some(system.clone()));
        }
        let names = host.encode(|encoder| Ok(encoder.adapters().names()))?;
        let adapters: Vec<(String, f32)> = names.into_iter().map(|name| (name, 1.0)).collect();
        conversation.use_adapters(&adapters, &host)?;
        let mut default = facts.recommended.clone();
        if let Some(note) = default.note() {
            global.note(note);
        }
        default.sampling.seed = self.sampling.seed().unwrap_or_else(random_seed);
        let mut plain = default.sampling.clone();
        if self.sampling.chooses_steps() {
            // Default steps that remove tokens would contradict the options.
            let Sampling { top_k, top_p, min_p, typical_p, .. } = Sampling::default();
            plain = Sampling { top_k, top_p, min_p, typical_p, ..plain };
        }
        let (texts, numbers) = self.sampling.unresolved(plain)?;
        let mut sampling =
            host.encode(move |encoder| texts.resolve(numbers, || encoder.tokenizer(), encoder.vocab()))?;
        sampling.add_bans(&default.sampling);
        sampling.validate()?;
        let sampling_source = match sampling == default.sampling {
            true => default.source.to_string(),
            false => format!("options and {}", default.source),
        };
        let stats = global.is_verbose();
        let think = self.conversation.think.unwrap_or(Think::On);
        let settings = Settings { sampling, max_new: self.max_new.filter(|most| *most > 0), think, stats };
        let inputs = self.model.inputs();
        let file = self.conversation.load.clone();
        Ok(Talk {
            host,
            facts,
            conversation,
            settings,
            options: self.options.clone(),
            sampling_source,
            inputs,
            file,
            adapters,
            last: None,
        })
    }

    /// Opens the model on a thread of its own. The conversation keeps the KV cache of its earlier turns, so no prefix
    /// cache is needed.
    fn host(&self, opener: Opener, global: &Global) -> Result<Host> {
        let (shared, notes) = (Shared::without_limits(), global.clone());
        let served = Served {
            name: "chat".into(),
            open: Box::new(move || opener.open()),
            template: self.conversation.chat_template.clone().unwrap_or_default(),
            plan: None,
            on_request: false,
        };
        let limits = sched::Options { max_seqs: 1, prompts_first: true, step: sched::Micros::MAX, ..shared.limits };
        Host::start(
            served,
            Shared {
                log: Arc::new(move |line| notes.note(line)),
                shows_prompts: true,
                prefix_cache: false,
                limits,
                ..shared
            },
        )
    }
}

/// Returns a seed that differs from run to run, short enough to be typed.
fn random_seed() -> u64 {
    RandomState::new().hash_one(0) % 1_000_000
}
