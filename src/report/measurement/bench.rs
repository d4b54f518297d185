//! Runs the benchmark: measures prefill, decode and latency. The timed window contains only generation and, if it is
//! requested, the work-touch: reads of the weights after each token (touch.rs).

use super::Measurement;
use super::expected;
use super::line::{Measured, MeasurementLine};
use super::record::{Meta, Record};
use super::touch::Touch;
use crate::error::{Cause, Error, Result};
use crate::generate::speculate::Speculator;
use crate::generate::{CachedPrefix, Request};
use crate::resources;
use crate::rng::Rng;
use crate::session::{GenerateOptions, Generation, Session};
use crate::trial::agreement::GeneratedText;
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::time::Instant;

/// Lower bound of the memory of a request without its tokens, in bytes.
const REQUEST_BYTES: usize = 256;

/// Options of a benchmark.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// Prompts that are read before tokens are generated.
    pub prompts: BenchPrompts,
    /// Number of runs; each produces one line unless `aggregate` is set.
    pub runs: usize,
    /// Number of passes over all prompts in one run.
    pub rounds: usize,
    /// Number of prompts decoded together.
    pub batch: usize,
    /// Number of tokens to generate per prompt.
    pub max_new: usize,
    /// Number of tokens to generate before the first run, outside of all measurements.
    pub warmup: usize,
    /// Number of tokens in the KV cache of each text before the timed window starts.
    pub depth: usize,
    /// True for one line for all runs together.
    pub aggregate: bool,
    /// Work-touch: bytes of weights covered per generated token; 0 turns it off.
    pub bytes_per_token: u64,
    /// Stride of the work-touch in bytes: it reads one byte per stride; at least 1.
    pub stride_bytes: u64,
    /// True to check after each run that the work-touch made all its reads.
    pub verify_touch: bool,
    /// File of expected token ids, which the generated ones are compared with.
    pub expected_tokens: Option<PathBuf>,
    /// True to measure the stages of prefill and decode.
    pub profile: bool,
    /// Drafts that are made up, to measure what a drafter would save.
    pub imitation: Option<DraftImitation>,
}

/// Drafts that are made from the known continuation.
#[derive(Debug, Clone, Copy)]
pub struct DraftImitation {
    /// Probability that a draft token is the right one.
    pub acceptance: f64,
    /// Number of draft tokens of each text in each step.
    pub tokens: usize,
}

/// Prompts of a benchmark.
#[derive(Debug, Clone)]
pub enum BenchPrompts {
    /// Texts that the user gave.
    Texts(Vec<String>),
    /// Synthetic prompts, one for each text of the batch, of this many random tokens each.
    Synthetic(usize),
}

impl BenchOptions {
    /// Checks the counts.
    ///
    /// # Errors
    /// A count is 0; the error names it.
    pub fn validate(&self) -> Result<()> {
        let counts = [
            ("runs", self.runs),
            ("rounds", self.rounds),
            ("batch", self.batch),
            ("max-new", self.max_new),
            ("prompt-len", self.prompt_len().unwrap_or(1)),
        ];
        let zero = counts.iter().find(|(_, n)| *n == 0);
        zero.map_or(Ok(()), |(name, _)| Err(Error::usage(format!("--{name}: found 0, expected at least 1"))))
    }

    fn prompt_len(&self) -> Option<usize> {
        match self.prompts {
            BenchPrompts::Texts(_) => None,
            BenchPrompts::Synthetic(tokens) => Some(tokens),
        }
    }

    /// Returns the options for reports.
    fn settings(&self) -> Map<String, Value> {
        let settings = json!({
            "batch": self.batch,
            "max_new": self.max_new,
            "prompt_len": self.prompt_len(),
            "depth": self.depth,
            "runs": self.runs,
            "rounds": self.rounds,
            "warmup": self.warmup,
            "bytes_per_token": self.bytes_per_token,
            "stride_bytes": self.stride_bytes,
            "profile": self.profile,
        });
        settings.as_object().cloned().unwrap_or_default()
    }

    /// Checks, before synthetic prompts are made, that their tokens fit into the context and into memory.
    fn check_size(&self, session: &Session, tokens: usize) -> Result<()> {
        let context = session.engine.context();
        if tokens.saturating_add(self.depth) > context {
            let found = format!("--prompt-len {tokens} with --depth {}: expected at most {context} tokens", self.depth);
            let help = "use a shorter prompt or depth, or raise --ctx if it is below the context length of the model";
            return Err(Error::usage(found).help(help));
        }
        let bytes = self.batch.saturating_mul(REQUEST_BYTES + size_of::<u32>() * tokens);
        if !resources::is_left(bytes) {
            let found = format!("no memory for --batch {} prompts of {tokens} tokens", self.batch);
            return Err(Error::new(Cause::OutOfMemory(found)).help("use a smaller batch or shorter prompts"));
        }
        Ok(())
    }

    /// Returns the texts and the tokens of the prompts.
    fn encode(&self, session: &Session) -> Result<(Vec<String>, Vec<Vec<u32>>)> {
        match &self.prompts {
            BenchPrompts::Synthetic(tokens) => {
                self.check_size(session, *tokens)?;
                let synthetic = |i| format!("synthetic {i} of {tokens} tokens");
                let ids = (0..self.batch).map(|i| random_ids(session, *tokens, i as u64));
                Ok(((0..self.batch).map(synthetic).collect(), ids.collect()))
            }
            BenchPrompts::Texts(texts) => {
                let ids = texts.iter().map(|text| session.encode(text)).collect::<Result<_>>()?;
                Ok((texts.clone(), ids))
            }
        }
    }
}

/// Runs the benchmark on a session; `each` is called with every line as soon as it is measured.
///
/// # Errors
/// A count is 0, a prompt does not fit, the file of expected tokens cannot be read, or the work-touch did not make
/// all its reads.
pub fn bench(
    session: &mut Session,
    options: &BenchOptions,
    mut each: impl FnMut(&MeasurementLine) -> Result<()>,
) -> Result<Measurement> {
    options.validate()?;
    let begin = Instant::now();
    let (prompts, ids) = options.encode(session)?;
    let encoding = begin.elapsed();
    let expected = match &options.expected_tokens {
        Some(file) => expected::read(file, &prompts)?,
        None => Vec::new(),
    };
    let mut bench = Bench { options, ids, touched: 0 };
    bench.warm_up(session)?;
    bench.imitate_drafts(session)?;
    session.engine.profile(options.profile);
    let meta = Meta::new("bench", session, options.settings());
    let mut measurement = Measurement { meta, records: Vec::new(), lines: Vec::new(), texts: Vec::new() };
    let mut rounds = Vec::new();
    for run in 1..=options.runs {
        let measured = bench.measure(session)?;
        measured.iter().for_each(|round| bench.keep_texts(session, round, &prompts, &mut measurement.texts));
        rounds.extend(measured);
        if !options.aggregate || run == options.runs {
            let measured = Measured {
                session,
                prompts: &prompts,
                rounds: &rounds,
                run,
                bytes_touched: bench.touched,
                bytes_per_token: options.bytes_per_token,
                sink: "touch",
                encoding,
                expected: &expected,
                with_text: false,
                logprobs: &[],
            };
            let line = measured.line();
            each(&line)?;
            measurement.lines.push(line);
            measurement.records.extend(Record::all(&measured));
            (rounds, bench.touched) = (Vec::new(), 0);
        }
    }
    Ok(measurement)
}

/// Returns pseudorandom token ids; the same seed gives the same ids.
fn random_ids(session: &Session, tokens: usize, seed: u64) -> Vec<u32> {
    let mut rng = Rng::new(seed);
    (0..tokens).map(|_| (rng.next_u64() % session.engine.config().vocab as u64) as u32).collect()
}

struct Bench<'a> {
    options: &'a BenchOptions,
    /// Tokens of the prompts.
    ids: Vec<Vec<u32>>,
    touched: u64,
}

impl Bench<'_> {
    fn warm_up(&self, session: &mut Session) -> Result<()> {
        if self.options.warmup == 0 {
            return Ok(());
        }
        let request = Request { ids: self.ids[0].clone(), max_new: self.options.warmup, ..Request::default() };
        let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::default() };
        session.generate(vec![request], &options, |_| Ok(())).map(|_| ())
    }

    /// Generates the texts once without drafts, and makes the later drafts from them, if the options ask for it.
    fn imitate_drafts(&self, session: &mut Session) -> Result<()> {
        let Some(DraftImitation { acceptance, tokens }) = self.options.imitation else { return Ok(()) };
        let speculator = std::mem::replace(&mut session.speculator, Speculator::off());
        let round = self.round(session, &mut Touch::new(session.reader.files()[0].clone(), 0, 1));
        session.speculator = speculator;
        let (before, round) = (self.before(session), round?);
        let texts = self.ids.iter().zip(&round.outcome.completions);
        let texts = texts.map(|(ids, done)| [&before[..], ids, &done.ids].concat()).collect();
        session.speculator.imitate(texts, acceptance, tokens);
        Ok(())
    }

    fn measure(&mut self, session: &mut Session) -> Result<Vec<Generation>> {
        let weights = session.reader.files()[0].clone();
        let mut touch = Touch::new(weights, self.options.bytes_per_token, self.options.stride_bytes);
        let rounds = (0..self.options.rounds).map(|_| self.round(session, &mut touch)).collect::<Result<Vec<_>>>()?;
        self.touched += touch.bytes();
        if self.options.verify_touch {
            let completions = rounds.iter().flat_map(|round| &round.outcome.completions);
            touch.verify(completions.map(|done| done.ids.len()).sum())?;
        }
        Ok(rounds)
    }

    fn round(&self, session: &mut Session, touch: &mut Touch) -> Result<Generation> {
        // Rounds repeat the prompts, whose answers would otherwise be known.
        session.speculator.forget();
        let requests = self.requests(session)?;
        let options = GenerateOptions { batch: self.options.batch, ignore_eos: true, ..GenerateOptions::default() };
        session.generate(requests, &options, |_| {
            touch.token();
            Ok(())
        })
    }

    /// Adds the texts of a round to `texts`, except those that an earlier round generated, too.
    fn keep_texts(&self, session: &Session, round: &Generation, prompts: &[String], texts: &mut Vec<GeneratedText>) {
        let is_text = matches!(self.options.prompts, BenchPrompts::Texts(_));
        for (index, done) in round.outcome.completions.iter().enumerate() {
            if !texts.iter().any(|text| text.index == index && text.generated == done.ids) {
                let ids = [&self.before(session)[..], &self.ids[index]].concat();
                let encoded_from = is_text.then_some(self.options.depth);
                texts.push(GeneratedText {
                    index,
                    prompt: prompts[index].clone(),
                    ids,
                    encoded_from,
                    generated: done.ids.clone(),
                });
            }
        }
    }

    /// Returns the tokens of `depth`.
    fn before(&self, session: &Session) -> Vec<u32> {
        random_ids(session, self.options.depth, u64::MAX)
    }

    /// Creates the requests of a round. The tokens of `depth` are read here, outside of the timed window, once for
    /// all requests.
    fn requests(&self, session: &mut Session) -> Result<Vec<Request>> {
        let before = self.before(session);
        let prefix = CachedPrefix::read(&mut session.engine, before.clone())?;
        let request = |ids: &Vec<u32>| Request {
            ids: [&before[..], ids].concat(),
            max_new: self.options.max_new,
            prefix: Some(prefix.clone()),
            ..Request::default()
        };
        Ok(self.ids.iter().map(request).collect())
    }
}
