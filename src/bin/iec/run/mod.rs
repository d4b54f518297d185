//! `iec run`: generates text.

mod output;
mod plan;

use crate::chat::{self, ConversationArgs};
use crate::compat;
use crate::constraint_args::ConstraintArgs;
use crate::global::Global;
use crate::model::ModelArgs;
use crate::names::{ON_OR_OFF, named};
use crate::report_args::ReportArgs;
use crate::sampling::SamplingArgs;
use iec::chat::ChatOptions;
use iec::error::{Context, Error, Result};
use iec::files::Stream;
use iec::generate::Request;
use iec::generate::sampler::Sampling;
use iec::output::{Rules, Target};
use iec::report::measurement::record::Meta;
use iec::report::measurement::{Measured, Measurement};
use iec::runtime::Saved;
use iec::session::prompt_request::PromptRequest;
use iec::session::request::RunSettings;
use iec::session::trace::Trace;
use iec::session::{GenerateOptions, MAX_NEW, Session, prompts};
use iec::units::{human_bytes, parse_count, parse_size};
use output::{Live, Printer};
use serde_json::json;
use std::io::IsTerminal;
use std::path::PathBuf;

/// Alternatives per token in a trace without `--logprobs`.
const TRACE_TOP: usize = 5;

/// Arguments of `iec run`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{}\n{}\n\n{}\n\n\
Several prompts: each text follows a line `== prompt N ==`, in the order of the prompts.\n\n\
Examples:\n  \
iec run packs/tinyllama -p \"Once upon a time\" -n 64\n  \
iec run packs/tinyllama -p \"Is rain wet?\" --choice yes,no\n  \
iec run packs/tinyllama --prompts-file prompts.txt --batch 4 --json",
    prompts::FILE_HELP, prompts::SETTINGS_HELP, compat::VARIABLES_HELP))]
pub struct Args {
    /// Text to continue, as the second argument instead of --prompt
    #[arg(value_name = "TEXT", index = 2, conflicts_with_all = ["prompt", "prompts_file"])]
    text: Option<String>,
    /// Text to continue; without any prompt option it is read from standard input (at most 64 MiB)
    #[arg(long, value_name = "TEXT", conflicts_with = "prompts_file")]
    prompt: Option<String>,
    /// Continue every prompt of a file (forms: see below)
    #[arg(long, value_name = "FILE", conflicts_with = "chat")]
    prompts_file: Option<PathBuf>,
    /// Hold a conversation, as `iec chat` does; with --prompt answer only that message
    #[arg(long, conflicts_with = "ConstraintArgs")]
    chat: bool,
    /// Continue the prompt as it is; the default
    #[arg(long, conflicts_with_all = ["chat_template", "chat"])]
    raw: bool,
    #[command(flatten)]
    conversation: ConversationArgs,
    /// Largest number of tokens to generate per prompt [default: 128; with --chat up to the end of the context]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    max_new: Option<usize>,
    /// Number of prompts that are decoded together; each gets the same tokens as alone
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "chat")]
    batch: usize,
    /// Whether prompts that begin alike share the computation of their common beginning. On the CPU, the texts are the
    /// same either way
    #[arg(long, value_name = "on|off", value_parser = named(ON_OR_OFF), conflicts_with = "chat")]
    #[arg(action = clap::ArgAction::Set, default_value = "on")]
    prefix_cache: bool,
    /// Directory that keeps the prefix cache, so that later runs need not compute a beginning that they share with this
    /// one. It shows what the texts were about; only its owner can read it
    #[arg(long, value_name = "DIR", conflicts_with = "chat")]
    state_dir: Option<PathBuf>,
    /// Largest size of the prefix cache in --state-dir; what was used least recently leaves first
    #[arg(long, value_name = "SIZE", default_value = "8G", value_parser = parse_size, requires = "state_dir")]
    state_disk: u64,
    /// End the text where TEXT would appear; repeatable
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue after the end-of-sequence token
    #[arg(long, conflicts_with = "ConstraintArgs")]
    ignore_eos: bool,
    /// Show special tokens in the text
    #[arg(long)]
    special: bool,
    /// Print the log-probability of each token and of the K most likely ones: in the JSON line, otherwise on stderr at
    /// the end
    #[arg(long, value_name = "K", conflicts_with = "chat")]
    logprobs: Option<usize>,
    /// Write prompt ids, token ids and the most likely tokens (K of --logprobs, otherwise 5) as JSON lines
    #[arg(long, value_name = "FILE", conflicts_with = "chat")]
    trace_ids: Option<PathBuf>,
    /// Replace the file of --trace-ids if it is there
    #[arg(long, requires = "trace_ids")]
    overwrite: bool,
    /// Measure the time of each stage of prefill and decode: a table on stderr, and `stages` in the JSON line
    #[arg(long, conflicts_with = "chat")]
    profile: bool,
    #[command(flatten)]
    report: ReportArgs,
    /// Print the JSON line of `iec bench`, with the text, instead of the text; with --chat the line protocol of
    /// `iec chat`
    #[arg(long)]
    pub json: bool,
    /// Print how much memory the model, its context and the batch need, and what would fit (exit code 4 if it does not
    /// fit). No weights are read, except to pack a model that is not a pack
    #[arg(long, alias = "dry-run", conflicts_with_all = ["draft_model_dir", "trace_ids"])]
    plan: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    constraint: ConstraintArgs,
    // Last, as clap passes the heading of its options on to the fields that follow.
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    args.check()?;
    match (args.plan, args.chat) {
        (true, _) => plan::print(&args.model.plan(global, args.batch)?, args.json),
        (false, true) => chat::start(args.conversation(), global),
        (false, false) => generate(&args, global),
    }
}

fn generate(args: &Args, global: &Global) -> Result<()> {
    args.report.prepare()?;
    let trace = args.trace_target()?;
    let source = args.constraint.source()?;
    let opener = args.model.to_answer(global)?;
    let mut session = opener.open()?;
    session.sampling = args.sampling.sampling(&session, Sampling::default())?;
    let requested = args.prompts()?;
    let prompts: Vec<String> = requested.iter().map(|request| request.shown().to_string()).collect();
    let conversation = &args.conversation;
    let open = |choice| conversation.open_template(choice, &session);
    let template = conversation.chat_template.as_ref().map(open).transpose()?;
    args.constraint.check(source.as_ref(), &session)?;
    let (stop_tokens, ends) = template.as_ref().map_or(Ok(Default::default()), |template| template.ends(&session))?;
    let settings = RunSettings {
        template: template.as_ref().map(|template| &template.template),
        ends: &ends,
        system: args.conversation.system.as_deref(),
        constraint: source.as_ref(),
        plain: args.request(&session),
    };
    let options =
        GenerateOptions { batch: args.batch, stop_tokens, skip_invalid: prompts.len() > 1, ..args.generate_options() };
    session.engine.profile(args.profile);
    args.enable_prefix_cache(&mut session, prompts.len())?;
    let mut live = Live {
        prompts: &prompts,
        printer: Printer::new(prompts.len(), !args.json),
        trace: trace.as_ref().map(Trace::create).transpose()?,
        likely: args.logprobs.map(|_| vec![Vec::new(); prompts.len()]),
    };
    let (generation, encoding) =
        session.generate_prompts(&requested, &settings, &options, args.model.prompts_ahead(), &mut live)?;
    let generation = output::refuse_invalid(generation)?;
    let rounds = [generation];
    live.printer.end()?;
    let logprobs = output::logprobs(live.likely, prompts.len(), session.tokenizer.as_ref());
    let measured = Measured {
        session: &session,
        prompts: &prompts,
        rounds: &rounds,
        run: 1,
        bytes_touched: 0,
        bytes_per_token: 0,
        sink: "output",
        encoding,
        expected: &[],
        with_text: true,
        logprobs: &logprobs,
    };
    let mut measurement = Measurement::of_run(args.meta(&session), &measured);
    // The trace comes after the report: its name alone would refuse the run that repeats an interrupted one.
    args.report.save(&mut measurement, global)?;
    live.trace.map_or(Ok(()), Trace::commit)?;
    output::show(&measurement.lines[0], &logprobs, args.json, global)?;
    session.note_rebuilds();
    args.save_prefixes(&mut session, global)?;
    output::finish(&rounds[0], &session, args.max_new(), global)?;
    // The process ends now, and the system frees all memory at once; dropping the model buffer by buffer takes 5 ms.
    std::mem::forget(session);
    Ok(())
}

impl Args {
    fn check(&self) -> Result<()> {
        self.sampling.check()?;
        if self.batch == 0 {
            return Err(Error::usage("--batch: found 0, expected at least 1"));
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(
                Error::usage("--stop: found an empty text, expected at least one character").help("leave --stop out")
            );
        }
        let conversation = &self.conversation;
        let of_template = [
            ("--system", conversation.system.is_some()),
            ("--chat-template-kwargs", conversation.chat_template_kwargs.is_some()),
        ];
        let raw = !self.chat && conversation.chat_template.is_none();
        if let Some((name, _)) = of_template.iter().find(|(_, given)| *given && raw) {
            return Err(Error::usage(format!("{name} cannot be used with a raw prompt"))
                .help("add --chat or --chat-template auto"));
        }
        let of_chat = [
            ("--load", conversation.load.is_some()),
            ("--think", conversation.think.is_some()),
            ("--no-history", conversation.no_history),
        ];
        if let Some((name, _)) = of_chat.iter().find(|(_, given)| *given && !self.chat) {
            return Err(
                Error::usage(format!("{name} has no effect without --chat")).help("add --chat, or leave it out")
            );
        }
        if self.chat && self.report.is_wanted() {
            return Err(Error::usage("--chat cannot write a report")
                .help("leave out --report-root, --html and REPORT_ROOT, or set REPORT=0"));
        }
        Ok(())
    }

    /// Enables the prefix cache where texts may have a common beginning.
    fn enable_prefix_cache(&self, session: &mut Session, prompts: usize) -> Result<()> {
        let wanted = self.prefix_cache && (prompts > 1 || self.state_dir.is_some());
        let prefixes = wanted.then(|| session.enable_prefix_cache());
        match (&self.state_dir, prefixes) {
            (Some(state), Some(prefixes)) => prefixes.keep_in(state, self.state_disk),
            (Some(_), None) => Err(Error::usage("--state-dir: found a run without a prefix cache")
                .help("use --prefix-cache on, or leave --state-dir out")),
            (None, _) => Ok(()),
        }
    }

    /// Keeps the prefix cache in --state-dir.
    fn save_prefixes(&self, session: &mut Session, global: &Global) -> Result<()> {
        let saved = session.prefixes.as_mut().map_or(Ok(Saved::default()), |prefixes| prefixes.save(usize::MAX));
        let saved = saved.help("the texts are complete; only --state-dir is not up to date")?;
        if saved.written > 0 {
            let bytes = human_bytes(saved.bytes);
            global.note(format_args!("kept {} pages of the prefix cache ({bytes}) on disk", saved.written));
        }
        Ok(())
    }

    /// Returns the description of the run and its settings for reports.
    fn meta(&self, session: &Session) -> Meta {
        let settings = json!({"batch": self.batch, "max_new": self.max_new(), "profile": self.profile});
        Meta::new("run", session, settings.as_object().cloned().unwrap_or_default())
    }

    /// Checks before any work that the file of `--trace-ids` may be written.
    fn trace_target(&self) -> Result<Option<Target>> {
        let inputs = self.model.inputs().files(&self.prompts_file).files(self.constraint.files());
        let rules = Rules { inputs: &inputs, overwrite: self.overwrite, stdout: false };
        self.trace_ids.as_deref().map(|path| Target::check(path, rules)).transpose()
    }

    /// Returns the prompt of the command line, if there is one.
    fn prompt(&self) -> Option<&String> {
        self.prompt.as_ref().or(self.text.as_ref())
    }

    fn prompts(&self) -> Result<Vec<PromptRequest>> {
        match (self.prompt(), &self.prompts_file) {
            (Some(prompt), _) => Ok(vec![PromptRequest::new(prompt)]),
            (None, Some(file)) => prompts::read_requests(file),
            (None, None) => self.prompt_from_stdin().map(|prompt| vec![PromptRequest::new(prompt)]),
        }
    }

    /// Returns all of standard input, without the line break that `echo` adds.
    fn prompt_from_stdin(&self) -> Result<String> {
        let stdin = std::io::stdin();
        if stdin.is_terminal() {
            return Err(Error::usage("no prompt")
                .help("give --prompt TEXT or --prompts-file FILE; `iec chat` holds a conversation"));
        }
        prompts::read_one(Stream::of(stdin)).at("standard input")
    }

    /// Returns the largest number of tokens per prompt.
    fn max_new(&self) -> usize {
        self.max_new.unwrap_or(MAX_NEW)
    }

    /// Returns the conversation of `--chat`.
    fn conversation(&self) -> chat::Start<'_> {
        chat::Start {
            model: &self.model,
            conversation: &self.conversation,
            sampling: &self.sampling,
            prompt: self.prompt().map(String::as_str),
            max_new: self.max_new,
            options: ChatOptions {
                stop: self.stop.clone(),
                ignore_eos: self.ignore_eos,
                show_special: self.special,
                ..ChatOptions::default()
            },
            json: self.json,
        }
    }

    fn generate_options(&self) -> GenerateOptions {
        GenerateOptions { ignore_eos: self.ignore_eos, show_special: self.special, ..GenerateOptions::default() }
    }

    /// Returns the request without a prompt that the options describe.
    fn request(&self, session: &Session) -> Request {
        let traced = self.trace_ids.as_ref().map(|_| TRACE_TOP);
        Request {
            max_new: self.max_new(),
            stop: self.stop.clone(),
            logprobs: self.logprobs.or(traced),
            ..session.request(Vec::new())
        }
    }
}
