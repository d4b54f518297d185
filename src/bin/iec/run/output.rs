//! Output of `iec run`: text on stdout while it is generated, probabilities and statistics at the end.

use crate::console;
use crate::global::Global;
use iec::error::{Error, Result};
use iec::generate::sampler::Candidate;
use iec::generate::text::Tokenizer;
use iec::generate::{Event, Finish, Request};
use iec::report::measurement::MeasurementLine;
use iec::session::request::Progress;
use iec::session::trace::Trace;
use iec::session::{Generation, Metrics, Session};
use iec::units::human_bytes;
use serde_json::{Value, json};

/// Prints texts in the order of their prompts: the first unfinished one streams, later ones wait.
pub struct Printer {
    waiting: Vec<String>,
    finished: Vec<bool>,
    current: usize,
    /// Whether the heading of the first text was printed.
    started: bool,
    visible: bool,
}

/// The token of each step of a text with the most likely ones.
pub type Likely = Vec<(Candidate, Vec<Candidate>)>;

/// Shows what is generated: text on stdout, and tokens in a trace.
pub struct Live<'a> {
    /// Prompts for people.
    pub prompts: &'a [String],
    pub printer: Printer,
    pub trace: Option<Trace>,
    /// The tokens of each prompt, if they are wanted.
    pub likely: Option<Vec<Likely>>,
}

impl Progress for Live<'_> {
    fn prompt(&mut self, index: usize, request: &Result<Request>) -> Result<()> {
        match (request, &mut self.trace) {
            (Err(_), _) => self.printer.skip(index),
            (Ok(request), Some(trace)) => trace.prompt(index, &self.prompts[index], &request.ids)?,
            (Ok(_), None) => {}
        }
        Ok(())
    }

    fn token(&mut self, event: &Event<'_>) -> Result<()> {
        self.printer.token(event)?;
        if let Some(likely) = &mut self.likely {
            likely[event.request].extend(event.likely.cloned());
        }
        self.trace.as_mut().map_or(Ok(()), |trace| trace.step(event))
    }
}

impl Printer {
    /// Creates a printer of `texts` texts. A printer that is not `visible` prints nothing.
    pub fn new(texts: usize, visible: bool) -> Printer {
        Printer {
            waiting: vec![String::new(); texts],
            finished: vec![false; texts],
            current: 0,
            started: false,
            visible,
        }
    }

    /// Takes a text that gets no token.
    fn skip(&mut self, text: usize) {
        self.finished[text] = true;
    }

    /// Adds a token to its text.
    fn token(&mut self, event: &Event<'_>) -> Result<()> {
        self.waiting[event.request].push_str(event.text);
        self.finished[event.request] = event.finish.is_some();
        self.advance()
    }

    /// Prints the rest when no further token comes: a text that failed has no last token.
    pub fn end(&mut self) -> Result<()> {
        self.finished.fill(true);
        self.advance()
    }

    /// Prints what can be printed in the order of the prompts.
    fn advance(&mut self) -> Result<()> {
        let mut out = if self.started { String::new() } else { self.heading() };
        self.started = true;
        while let Some(text) = self.waiting.get_mut(self.current) {
            out += &std::mem::take(text);
            if !self.finished[self.current] {
                break;
            }
            out.push('\n');
            self.current += 1;
            out += &self.heading();
        }
        self.print(&out)
    }

    fn heading(&self) -> String {
        let several = self.waiting.len() > 1 && self.current < self.waiting.len();
        if several { format!("== prompt {} ==\n", self.current) } else { String::new() }
    }

    fn print(&self, text: &str) -> Result<()> {
        if self.visible && !text.is_empty() {
            console::print_data(text)?;
        }
        Ok(())
    }
}

/// Returns, for each of `texts` texts, the chosen token of each step and the most likely ones as JSON; `None` if they
/// are not wanted.
pub fn logprobs(likely: Option<Vec<Likely>>, texts: usize, tokenizer: Option<&Tokenizer>) -> Vec<Option<Value>> {
    let spelled =
        |c: &Candidate| json!({"id": c.id, "token": tokenizer.and_then(|t| t.token(c.id)), "logprob": c.logprob});
    let token = |(chosen, top): &(Candidate, Vec<Candidate>)| {
        let mut token = spelled(chosen);
        token["top"] = top.iter().map(spelled).collect();
        token
    };
    match likely {
        Some(likely) => likely.iter().map(|steps| Some(steps.iter().map(token).collect())).collect(),
        None => vec![None; texts],
    }
}

/// Prints the JSON line with `json`, and otherwise the probabilities for people, if there are any; then notes the
/// statistics.
pub fn show(line: &MeasurementLine, logprobs: &[Option<Value>], json: bool, global: &Global) -> Result<()> {
    match json {
        true => console::print_json(line)?,
        false => print_logprobs(logprobs),
    }
    global.note(describe(&line.metrics));
    line.stages.iter().for_each(|stages| global.note_stages(stages));
    Ok(())
}

/// Prints the lists of [`logprobs`] for people.
fn print_logprobs(lists: &[Option<Value>]) {
    let word =
        |c: &Value| format!("{:?} {:.4}", c["token"].as_str().unwrap_or("?"), c["logprob"].as_f64().unwrap_or(0.0));
    for (prompt, tokens) in lists.iter().enumerate() {
        for (step, token) in tokens.iter().filter_map(Value::as_array).flatten().enumerate() {
            let top: Vec<String> = token["top"].as_array().into_iter().flatten().map(word).collect();
            console::note(format_args!("prompt {prompt} token {step}: {} | {}", word(token), top.join(", ")));
        }
    }
}

/// Fails with the error of the first prompt if all prompts are invalid.
///
/// # Errors
/// All prompts are invalid.
pub fn refuse_invalid(mut generation: Generation) -> Result<Generation> {
    let completions = &mut generation.outcome.completions;
    let all = completions.iter().all(|done| done.finish == Finish::Invalid);
    match completions.first_mut().and_then(|done| done.error.take_if(|_| all)) {
        Some(error) => Err(error),
        None => Ok(generation),
    }
}

/// Notes which texts ended because the context was full, and fails if prompts were invalid or could not be computed.
///
/// # Errors
/// A prompt was invalid (exit code 2) or could not be computed (exit code 5); the error names each.
pub fn finish(generation: &Generation, session: &Session, max_new: usize, global: &Global) -> Result<()> {
    note_full_context(generation, session, max_new, global);
    note_incomplete(generation, max_new, global);
    let completions = &generation.outcome.completions;
    let errors: Vec<&Error> = completions.iter().filter_map(|done| done.error.as_ref()).collect();
    let Some(first) = errors.first() else { return Ok(()) };
    let reasons = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    let found = format!("{} of {} prompts were not continued: {reasons}", errors.len(), completions.len());
    let failed = completions.iter().any(|done| done.finish == Finish::Failed);
    let error = if failed { Error::engine(found) } else { Error::usage(found) };
    Err(error.help(first.help_text().unwrap_or("leave these prompts out")))
}

fn note_full_context(generation: &Generation, session: &Session, max_new: usize, global: &Global) {
    let full: Vec<_> = generation.outcome.completions.iter().filter(|done| done.finish == Finish::Context).collect();
    if let Some(first) = full.first() {
        let (texts, tokens, context) = (full.len(), first.ids.len(), session.engine.context());
        global.note(format_args!(
            "note: the context of {context} tokens was full: {texts} of {} texts ended before --max-new {max_new} \
             (the first after {tokens}); shorten the prompts, lower --max-new, or raise --ctx if it is below \
             the context length of the model",
            generation.outcome.completions.len()
        ));
    }
}

/// Notes which texts ended before they satisfied their constraint.
fn note_incomplete(generation: &Generation, max_new: usize, global: &Global) {
    let completions = &generation.outcome.completions;
    let cut: Vec<Finish> =
        completions.iter().filter(|done| done.constraint_met == Some(false)).map(|done| done.finish).collect();
    if let Some(finish) = cut.first() {
        global.note(format_args!(
            "note: {} of {} texts ended before they satisfied the constraint (the first by {}, with --max-new \
             {max_new}); raise --max-new",
            cut.len(),
            completions.len(),
            finish.name()
        ));
    }
}

/// Formats the statistics of a run as one line.
fn describe(metrics: &Metrics) -> String {
    let speculation = match metrics.tokens_drafted {
        0 => String::new(),
        drafted => format!(", {} of {drafted} draft tokens accepted", metrics.tokens_accepted),
    };
    format!(
        "{} prompt tokens in {:.2} s ({:.0} tokens/s), {} new in {:.2} s ({:.1} tokens/s){speculation}, first after \
         {:.1} ms, peak memory {}",
        metrics.kv_misses,
        metrics.prefill_time_s,
        metrics.tps_prefill,
        metrics.tokens_generated,
        metrics.decode_time_s,
        metrics.tps_decode,
        metrics.ttft_s * 1e3,
        human_bytes((metrics.rss_peak_mb.unwrap_or(0.0) * 1e6) as u64),
    )
}
