//! `iec simulate`: simulates the scheduler under a load of requests.

use crate::console;
use crate::global::Global;
use iec::error::{Error, Result};
use iec::interrupt;
use iec::output::{Inputs, Rules, Target};
use iec::report::simulation;
use iec::sched::sim::{Lengths, Load, Machine, Setup, simulate};
use iec::sched::{KeyLimits, Micros, Options};
use std::path::PathBuf;

/// Heading of the options that describe the requests.
const REQUESTS: &str = "Requests";
/// Heading of the limits of the scheduler.
const LIMITS: &str = "Limits of the scheduler";
/// Heading of the options that describe the speed of the engine.
const MACHINE: &str = "Machine";

/// Arguments of `iec simulate`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The default speed is that of TinyLlama 1.1B in q4_0 on 2 cores (docs/PERFORMANCE.md); `iec bench` \
measures yours. docs/guide/scheduler.md explains the limits. Virtual time costs nothing: a million requests take less than a \
minute, and the same options and seed give the same results.\n\n\
Examples:\n  \
iec simulate --rate 0.7 --out page.html\n  \
iec simulate --rate 2 --bursts 60:240 --keys 20 --flood 0.3 --json\n  \
iec simulate --prefill-rate 8000 --step-times 1=6,64=19 --rate 12 --max-seqs 64 --pages 4096\n  \
iec simulate --heads 4 --head-tokens 1024 --disconnects 0.1 --seed 7 --out page.html --overwrite"
)]
pub struct Args {
    /// Number of requests
    #[arg(long, value_name = "N", default_value_t = 10_000, help_heading = REQUESTS)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    requests: u64,
    /// Mean number of requests per second; the times between them are exponential (Poisson process)
    #[arg(long, value_name = "X", default_value_t = 0.5, help_heading = REQUESTS, value_parser = positive)]
    rate: f64,
    /// Seconds with and without arrivals, in turn, at the same mean rate [default: no pauses]
    #[arg(long, value_name = "ON:OFF", help_heading = REQUESTS, value_parser = bursts)]
    bursts: Option<(f64, f64)>,
    /// Number of keys
    #[arg(long, value_name = "N", default_value_t = 10, help_heading = REQUESTS, value_parser = number::<1, 100_000>)]
    keys: usize,
    /// Exponent of Zipf's law for keys, heads and adapters; 0: all equally frequent
    #[arg(long, value_name = "X", default_value_t = 1.1, help_heading = REQUESTS, value_parser = exponent)]
    zipf: f64,
    /// Share of requests from one more key, which always asks for the most urgent priority
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, help_heading = REQUESTS, value_parser = share)]
    flood: f64,
    /// Share of requests with priority 2 instead of 0
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, help_heading = REQUESTS, value_parser = share)]
    background: f64,
    /// Median length of prompts; lengths are lognormal
    #[arg(long, value_name = "N", default_value_t = 512.0, help_heading = REQUESTS, value_parser = positive)]
    prompt_tokens: f64,
    /// Standard deviation of the logarithm of prompt lengths
    #[arg(long, value_name = "X", default_value_t = 0.6, help_heading = REQUESTS, value_parser = exponent)]
    prompt_sigma: f64,
    /// Median length of answers; lengths are lognormal
    #[arg(long, value_name = "N", default_value_t = 64.0, help_heading = REQUESTS, value_parser = positive)]
    answer_tokens: f64,
    /// Standard deviation of the logarithm of answer lengths
    #[arg(long, value_name = "X", default_value_t = 0.6, help_heading = REQUESTS, value_parser = exponent)]
    answer_sigma: f64,
    /// Largest answer that each request asks for
    #[arg(long, value_name = "N", default_value_t = 256, help_heading = REQUESTS)]
    #[arg(value_parser = number::<1, 1_000_000>)]
    max_tokens: usize,
    /// Number of texts at the head of prompts that requests share, such as system messages
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = REQUESTS, value_parser = number::<0, 1_000_000>)]
    heads: usize,
    /// Tokens of each of these texts, in addition to the prompt
    #[arg(long, value_name = "N", default_value_t = 256, help_heading = REQUESTS)]
    #[arg(value_parser = number::<1, 1_000_000>)]
    head_tokens: usize,
    /// Number of adapters; requests with different adapters share no pages
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = REQUESTS, value_parser = number::<1, 100_000>)]
    adapters: usize,
    /// Share of requests whose prompt fills the context
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, help_heading = REQUESTS, value_parser = share)]
    giants: f64,
    /// Share of requests whose client closes the connection, after 10 seconds on average
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, help_heading = REQUESTS, value_parser = share)]
    disconnects: f64,
    /// Share of requests whose reader stops for up to 60 seconds; after 30 they are cancelled
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, help_heading = REQUESTS, value_parser = share)]
    slow_readers: f64,
    /// Seed of all random numbers
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = REQUESTS)]
    seed: u64,

    /// Largest number of sequences in the batch
    #[arg(long, value_name = "N", default_value_t = 32, help_heading = LIMITS, value_parser = number::<1, 100_000>)]
    max_seqs: usize,
    /// Largest number of tokens of a step
    #[arg(long, value_name = "N", default_value_t = 512, help_heading = LIMITS, value_parser = number::<1, 1_000_000>)]
    max_step_tokens: usize,
    /// Time of a step, in milliseconds, while sequences decode; it limits the chunks of prompts
    #[arg(long, value_name = "MS", default_value_t = 200.0, help_heading = LIMITS, value_parser = positive)]
    step_ms: f64,
    /// Largest number of waiting requests
    #[arg(long, value_name = "N", default_value_t = 256, help_heading = LIMITS, value_parser = number::<1, 1_000_000>)]
    max_queue: usize,
    /// Largest number of prompt tokens of all waiting requests [default: 60 seconds of prefill]
    #[arg(long, value_name = "N", help_heading = LIMITS)]
    max_queue_tokens: Option<u64>,
    /// Seconds after which a waiting request is refused
    #[arg(long, value_name = "S", default_value_t = 60.0, help_heading = LIMITS, value_parser = positive)]
    queue_timeout: f64,
    /// Seconds of waiting that raise a request by one priority
    #[arg(long, value_name = "S", default_value_t = 10.0, help_heading = LIMITS, value_parser = positive)]
    aging: f64,
    /// Largest number of positions of a sequence, prompt and answer
    #[arg(long, value_name = "N", default_value_t = 2048, help_heading = LIMITS)]
    #[arg(value_parser = number::<2, 100_000_000>)]
    ctx: usize,
    /// Number of pages of the KV cache; a page has 128 positions
    #[arg(long, value_name = "N", default_value_t = 256, help_heading = LIMITS)]
    #[arg(value_parser = number::<1, 100_000_000>)]
    pages: usize,
    /// Requests per minute of each key [default: no limit]
    #[arg(long, value_name = "N", help_heading = LIMITS, value_parser = clap::value_parser!(u64).range(1..))]
    rpm: Option<u64>,
    /// Tokens per minute of each key, prompt and answer [default: no limit]
    #[arg(long, value_name = "N", help_heading = LIMITS, value_parser = clap::value_parser!(u64).range(1..))]
    tpm: Option<u64>,
    /// Unfinished requests of each key [default: no limit]
    #[arg(long, value_name = "N", help_heading = LIMITS, value_parser = number::<1, 1_000_000>)]
    concurrent: Option<usize>,

    /// Prompt tokens per second in large chunks
    #[arg(long, value_name = "X", default_value_t = 576.0, help_heading = MACHINE, value_parser = positive)]
    prefill_rate: f64,
    /// Times of steps that decode ROWS sequences, in milliseconds; those in between are on a straight line
    #[arg(
        long,
        value_name = "ROWS=MS,...",
        default_value = "1=14.9,16=44.9",
        help_heading = MACHINE,
        value_parser = step_times
    )]
    step_times: StepTimes,
    /// Largest number of draft tokens per sequence and step
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = MACHINE, value_parser = number::<0, 64>)]
    drafts: usize,
    /// Share of draft tokens that are accepted, one after another
    #[arg(long, value_name = "SHARE", default_value_t = 0.6, help_heading = MACHINE, value_parser = share)]
    acceptance: f64,

    /// HTML page with charts to write; - is stdout
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace the page if it exists
    #[arg(long)]
    overwrite: bool,
    /// Print the results as one JSON line on stdout
    #[arg(long)]
    pub json: bool,
}

/// Parses a positive number of at most 1e9.
fn positive(text: &str) -> std::result::Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (1e-6..=1e9).contains(value));
    value.ok_or_else(|| "expected a number from 0.000001 to 1e9".into())
}

/// Parses a share.
fn share(text: &str) -> std::result::Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (0.0..=1.0).contains(value));
    value.ok_or_else(|| "expected a number from 0 to 1".into())
}

/// Parses an exponent or a standard deviation of a logarithm.
fn exponent(text: &str) -> std::result::Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (0.0..=10.0).contains(value));
    value.ok_or_else(|| "expected a number from 0 to 10".into())
}

/// Parses a count from `MIN` to `MAX`.
fn number<const MIN: usize, const MAX: usize>(text: &str) -> std::result::Result<usize, String> {
    let value = iec::units::parse_count(text)?;
    if (MIN..=MAX).contains(&value) { Ok(value) } else { Err(format!("expected {MIN} to {MAX}")) }
}

fn bursts(text: &str) -> std::result::Result<(f64, f64), String> {
    let (on, off) = text.split_once(':').ok_or("expected two numbers of seconds, like 60:240")?;
    Ok((positive(on)?, positive(off)?))
}

fn micros(value: f64, unit: f64) -> Micros {
    (value * unit).round().max(1.0) as Micros
}

/// Number of rows and time of some steps.
#[derive(Debug, Clone)]
struct StepTimes(Vec<(u32, Micros)>);

/// Parses a list such as `1=15,16=45`.
fn step_times(text: &str) -> std::result::Result<StepTimes, String> {
    let expected =
        || format!("found `{text}`, expected a list such as 1=15,16=45, with more rows and time at each entry");
    let one = |entry: &str| {
        let (rows, time) = entry.split_once('=')?;
        let (rows, time): (u32, f64) = (rows.trim().parse().ok()?, time.trim().parse().ok()?);
        (time > 0.0 && time < 1e9 && rows <= 1 << 20).then(|| (rows, micros(time, 1e3)))
    };
    let times: Vec<(u32, Micros)> = text.split(',').map(one).collect::<Option<_>>().ok_or_else(expected)?;
    let rises = times.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1);
    if rises { Ok(StepTimes(times)) } else { Err(expected()) }
}

impl Args {
    fn setup(&self) -> Setup {
        let options = Options {
            max_seqs: self.max_seqs,
            max_step_tokens: self.max_step_tokens as u32,
            step: micros(self.step_ms, 1e3),
            max_queue: self.max_queue,
            max_queue_tokens: self.max_queue_tokens.unwrap_or((self.prefill_rate * 60.0) as u64),
            queue_timeout: micros(self.queue_timeout, 1e6),
            aging: micros(self.aging, 1e6),
            drafts: self.drafts as u32,
            ..Options::with_pages(self.pages as u32, self.ctx as u32)
        };
        let load = Load {
            requests: self.requests,
            rate: self.rate,
            bursts: self.bursts,
            keys: self.keys,
            zipf: self.zipf,
            flood: self.flood,
            background: self.background,
            prompt: Lengths { median: self.prompt_tokens, sigma: self.prompt_sigma },
            answer: Lengths { median: self.answer_tokens, sigma: self.answer_sigma },
            max_tokens: self.max_tokens as u32,
            heads: self.heads,
            head_tokens: self.head_tokens as u32,
            adapters: self.adapters,
            giants: self.giants,
            disconnects: self.disconnects,
            slow_readers: self.slow_readers,
        };
        let machine =
            Machine { prefill_rate: self.prefill_rate, steps: self.step_times.0.clone(), acceptance: self.acceptance };
        let key = KeyLimits { rpm: self.rpm, tpm: self.tpm, concurrent: self.concurrent, ..KeyLimits::default() };
        Setup { options, key, load, machine, key_changes: None, seed: self.seed }
    }
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    if args.max_tokens >= args.ctx {
        let message = format!("--max-tokens: found {}, expected less than --ctx {}", args.max_tokens, args.ctx);
        return Err(Error::usage(message));
    }
    let rules = Rules { inputs: &Inputs::default(), overwrite: args.overwrite, stdout: !args.json };
    let target = args.out.as_deref().map(|path| Target::check(path, rules)).transpose()?;
    let setup = args.setup();
    let results = simulate(&setup, &|| interrupt::check().is_err());
    interrupt::check()?;
    let results = results.map_err(|rule| Error::corrupt(format!("the scheduler broke a rule {rule}")))?;
    if let Some(target) = &target {
        target.write(simulation::page(&setup, &results).as_bytes())?;
    }
    global.note(format_args!("{}{}", simulation::table(&results), simulation::summary(&results)));
    if args.json { console::print_json(&simulation::json(&results)) } else { Ok(()) }
}
