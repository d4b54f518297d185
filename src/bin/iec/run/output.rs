//! What the user sees of a run: text on stdout as it comes, probabilities and statistics at the end.

use crate::console;
use iec::error::Result;
use iec::runtime::generate::Event;
use iec::runtime::sampler::Candidate;
use iec::runtime::text::Tokenizer;
use iec::session::Metrics;
use serde_json::{Value, json};

/// Prints texts in the order of their prompts: the first unfinished one streams, later ones wait.
pub struct Printer {
    waiting: Vec<String>,
    finished: Vec<bool>,
    current: usize,
    visible: bool,
}

impl Printer {
    /// A printer for that many texts; one that is not `visible` prints nothing.
    pub fn new(texts: usize, visible: bool) -> Printer {
        Printer { waiting: vec![String::new(); texts], finished: vec![false; texts], current: 0, visible }
    }

    /// Announces the first text.
    pub fn start(&mut self) -> Result<()> {
        let first = self.heading();
        self.print(&first)
    }

    /// Takes a token.
    pub fn token(&mut self, event: &Event<'_>) -> Result<()> {
        self.waiting[event.request].push_str(event.text);
        self.finished[event.request] = event.finish.is_some();
        let mut out = String::new();
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
            console::print(text)?;
        }
        Ok(())
    }
}

/// The chosen token of each step and the most likely ones, as JSON.
pub fn logprobs(steps: &[(Candidate, Vec<Candidate>)], tokenizer: Option<&Tokenizer>) -> Value {
    let spelled =
        |c: &Candidate| json!({"id": c.id, "token": tokenizer.and_then(|t| t.token(c.id)), "logprob": c.logprob});
    let token = |(chosen, top): &(Candidate, Vec<Candidate>)| {
        let mut token = spelled(chosen);
        token["top"] = top.iter().map(spelled).collect();
        token
    };
    steps.iter().map(token).collect()
}

/// Prints the lists of [`logprobs`] for people.
pub fn print_logprobs(lists: &[Option<Value>]) {
    let word =
        |c: &Value| format!("{:?} {:.4}", c["token"].as_str().unwrap_or("?"), c["logprob"].as_f64().unwrap_or(0.0));
    for (prompt, tokens) in lists.iter().enumerate() {
        for (step, token) in tokens.iter().filter_map(Value::as_array).flatten().enumerate() {
            let top: Vec<String> = token["top"].as_array().into_iter().flatten().map(word).collect();
            console::note(format_args!("prompt {prompt} token {step}: {} | {}", word(token), top.join(", ")));
        }
    }
}

/// The statistics line.
pub fn describe(metrics: &Metrics) -> String {
    let guessed = match metrics.tokens_drafted {
        0 => String::new(),
        drafted => format!(", {} of {drafted} guesses right", metrics.tokens_accepted),
    };
    format!(
        "{} prompt tokens in {:.2} s ({:.0} tokens/s), {} new in {:.2} s ({:.1} tokens/s){guessed}, first after {:.1} ms, peak memory {:.0} MB",
        metrics.kv_misses,
        metrics.prefill_time_s,
        metrics.tps_prefill,
        metrics.tokens_generated,
        metrics.decode_time_s,
        metrics.tps_decode,
        metrics.ttft_s * 1e3,
        metrics.rss_peak_mb.unwrap_or(0.0),
    )
}
