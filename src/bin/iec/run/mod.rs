//! `iec run`: generates text.

mod chat;
mod output;

use crate::compat;
use crate::global::Global;
use crate::model::ModelArgs;
use crate::report_args::ReportArgs;
use crate::sampling::SamplingArgs;
use clap::ValueEnum;
use iec::error::{Context, Error, Result};
use iec::files::Stream;
use iec::output::{Rules, Target};
use iec::report::measurement::record::Meta;
use iec::report::measurement::{Measured, Measurement};
use iec::runtime::generate::Request;
use iec::runtime::text::{ChatTemplate, Message};
use iec::session::trace::Trace;
use iec::session::{GenerateOptions, Session, Speculation, prompts};
use output::Printer;
use serde_json::json;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Instant;

/// Alternatives per token in a trace without `--logprobs`.
const TRACE_TOP: usize = 5;

/// Arguments of `iec run`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{}\n\n{}\n\n\
Several prompts: each text follows a line `== prompt N ==`, in the order of the prompts.\n\n\
Examples:\n  \
iec run --model-dir packs/tinyllama --prompt \"Once upon a time\" --max-new 64\n  \
iec run --model-dir packs/tinyllama --chat --temperature 0.7 --top-p 0.9\n  \
iec run --model-dir packs/tinyllama --prompts-file prompts.txt --batch 4 --trace-ids trace.jsonl",
    prompts::FILE_HELP, compat::VARIABLES_HELP))]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to continue; without any prompt option it is read from standard input (at most 64 MiB)
    #[arg(long, value_name = "TEXT", conflicts_with = "prompts_file")]
    prompt: Option<String>,
    /// Continue every prompt of a file (forms: see below)
    #[arg(long, value_name = "FILE", conflicts_with = "chat")]
    prompts_file: Option<PathBuf>,
    /// Hold a conversation: on a terminal turn by turn, otherwise one message per line of standard input; with --prompt
    /// only that message
    #[arg(long)]
    chat: bool,
    /// System message of --chat and --template
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Continue the prompt as it is; the default
    #[arg(long, conflicts_with_all = ["template", "chat"])]
    raw: bool,
    /// auto: wrap each prompt in the model's chat template, as one user message
    #[arg(long, value_enum, conflicts_with = "chat")]
    template: Option<Template>,
    /// Largest number of tokens to generate per prompt
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new: usize,
    /// Number of prompts that are decoded together; each gets the same tokens as alone
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "chat")]
    batch: usize,
    /// End the text where TEXT would appear; repeatable
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue after the end-of-sequence token
    #[arg(long)]
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
    /// Print the JSON line of `iec bench`, with the text, instead of the text
    #[arg(long, conflicts_with = "chat")]
    pub json: bool,
    // Last, as clap passes the heading of its options on to the fields that follow.
    #[command(flatten)]
    sampling: SamplingArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Template {
    /// The model's own template
    Auto,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    args.check()?;
    args.report.prepare()?;
    let trace = args.trace_target()?;
    let mut session = args.model.open(global, Speculation::Ngram)?;
    session.sampling = args.sampling.sampling(&session)?;
    if args.chat {
        return chat::chat(&args, &mut session, global);
    }
    let prompts = args.prompts()?;
    let template = args.template.map(|Template::Auto| session.chat_template()).transpose()?;
    let begin = Instant::now();
    let ids = args.encode(&session, template.as_ref(), &prompts)?;
    let encoding = begin.elapsed();
    let mut trace = trace.as_ref().map(Trace::create).transpose()?;
    if let Some(trace) = &mut trace {
        (0..).zip(prompts.iter().zip(&ids)).try_for_each(|(i, (text, ids))| trace.prompt(i, text, ids))?;
    }
    let requests: Vec<Request> = ids.into_iter().map(|ids| args.request(&session, ids)).collect();
    let invalid = invalid_requests(&requests, &session);
    let skip_invalid = invalid.contains(&true);
    let mut printer = Printer::new(invalid, !args.json);
    let mut likely = vec![Vec::new(); prompts.len()];
    let end_of_turn = template.map_or(Ok(None), |template| session.end_of_turn(&template))?;
    let stop_tokens = Vec::from_iter(end_of_turn);
    let options = GenerateOptions { batch: args.batch, stop_tokens, skip_invalid, ..args.generate_options() };
    session.engine.profile(args.profile);
    printer.start()?;
    let rounds = [session.generate(requests, &options, |event| {
        printer.token(event)?;
        likely[event.request].extend(event.likely.filter(|_| args.logprobs.is_some()).cloned());
        trace.as_mut().map_or(Ok(()), |trace| trace.step(event))
    })?];
    trace.map_or(Ok(()), Trace::commit)?;
    let logprobs = output::logprobs(&likely, args.logprobs.is_some(), session.tokenizer.as_ref());
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
    let line = &measurement.lines[0];
    output::show(line, &logprobs, args.json)?;
    global.note(output::describe(&line.metrics));
    line.stages.iter().for_each(|stages| global.note(stages.table()));
    session.note_rebuilds();
    args.report.save(&mut measurement, global)?;
    output::finish(&rounds[0], &session, args.max_new, global)?;
    // The process ends now, and the system frees all memory at once; dropping the model buffer by buffer takes 5 ms.
    std::mem::forget(session);
    Ok(())
}

/// Returns, for each request, whether it is invalid and must be skipped. If all requests are invalid, none is marked,
/// so that generation fails with the error of the first one.
fn invalid_requests(requests: &[Request], session: &Session) -> Vec<bool> {
    let invalid: Vec<bool> = requests.iter().map(|request| session.check(request).is_err()).collect();
    if invalid.contains(&false) { invalid } else { vec![false; requests.len()] }
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
        if self.system.is_some() && !self.chat && self.template.is_none() {
            return Err(Error::usage("--system cannot be used with a raw prompt").help("add --chat or --template auto"));
        }
        if self.chat && self.report.is_wanted() {
            return Err(Error::usage("--chat cannot write a report")
                .help("leave out --report-root, --html and REPORT_ROOT, or set REPORT=0"));
        }
        Ok(())
    }

    /// Returns the description of the run and its settings for reports.
    fn meta(&self, session: &Session) -> Meta {
        let settings = json!({"batch": self.batch, "max_new": self.max_new, "profile": self.profile});
        Meta::new("run", session, settings.as_object().cloned().unwrap_or_default())
    }

    /// Checks before any work that the file of `--trace-ids` may be written.
    fn trace_target(&self) -> Result<Option<Target>> {
        let inputs = self.model.inputs().files(&self.prompts_file);
        let rules = Rules { inputs: &inputs, overwrite: self.overwrite, stdout: false };
        self.trace_ids.as_deref().map(|path| Target::check(path, rules)).transpose()
    }

    fn prompts(&self) -> Result<Vec<String>> {
        match (&self.prompt, &self.prompts_file) {
            (Some(prompt), _) => Ok(vec![prompt.clone()]),
            (None, Some(file)) => prompts::read(file),
            (None, None) => self.prompt_from_stdin().map(|prompt| vec![prompt]),
        }
    }

    /// Returns all of standard input, without the line break that `echo` adds.
    fn prompt_from_stdin(&self) -> Result<String> {
        let stdin = std::io::stdin();
        if stdin.is_terminal() {
            return Err(Error::usage("no prompt").help("give --prompt TEXT, --prompts-file FILE or --chat"));
        }
        prompts::read_one(Stream::of(stdin)).at("standard input")
    }

    fn encode(&self, session: &Session, template: Option<&ChatTemplate>, prompts: &[String]) -> Result<Vec<Vec<u32>>> {
        let Some(template) = template else {
            return prompts.iter().map(|prompt| session.encode(prompt)).collect();
        };
        let system = || self.system.iter().map(|text| Message::new("system", text));
        let conversation = |prompt| system().chain([Message::new("user", prompt)]).collect();
        session.encode_chats(template, &prompts.iter().map(conversation).collect::<Vec<_>>())
    }

    fn generate_options(&self) -> GenerateOptions {
        GenerateOptions { ignore_eos: self.ignore_eos, show_special: self.special, ..GenerateOptions::default() }
    }

    fn request(&self, session: &Session, ids: Vec<u32>) -> Request {
        let traced = self.trace_ids.as_ref().map(|_| TRACE_TOP);
        Request {
            max_new: self.max_new,
            stop: self.stop.clone(),
            logprobs: self.logprobs.or(traced),
            ..session.request(ids)
        }
    }
}
