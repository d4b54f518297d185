//! Measures the scheduler with the real engine, and compares the simulation with it.
//!
//! Run with `cargo bench --bench schedule -- PACK [SECONDS [HOST:PORT]]`. `IEC_THREADS` sets the number of threads
//! (default: all). The load of the comparison takes about `SECONDS` (default: 120). The prompts are random tokens. With
//! the address of a `llama-server` that runs the same model, the same loads are sent to it, while the engine waits.
//!
//! - come and go: 64 requests of different lengths in a batch of at most 16, against the time that their tokens take at
//!   the speeds of a fixed batch of 16 equal requests
//! - head: prompt tokens computed for a common beginning of 1024 tokens with 32 endings, against the smallest number
//! - gap: the longest time between two tokens of a text beside which a prompt of 2048 tokens arrives, against the
//!   budget of a step
//! - load: times of requests that arrive at random, measured and simulated
#![allow(missing_docs, clippy::disallowed_methods, clippy::print_stdout)]

mod server;

use iec::generate::speculate::Speculator;
use iec::generate::{Batch, Completion, Options, Request, Terms, generate};
use iec::iebin::IebinReader;
use iec::rng::Rng;
use iec::runtime::{Engine, EngineOptions, PrefixCache};
use iec::sched::sim::{Arrival, Arrivals, Histogram, Lengths, Load, Machine, Setup, simulate};
use iec::sched::{self, KeyLimits, Micros, SECOND};
use server::Server;
use std::path::Path;
use std::time::{Duration, Instant};

/// Largest number of texts in the batch.
const SEQUENCES: usize = 16;
/// Budget of a step.
const STEP: Micros = SECOND / 5;
/// Longest text.
const CONTEXT: usize = 2560;
/// Tokens of the prompt that arrives beside a text.
const GAP_PROMPT: usize = 2048;

/// Prompts, and the tokens of their answers.
struct Loads {
    come_and_go: Vec<(Vec<u32>, usize)>,
    heads: Vec<(Vec<u32>, usize)>,
    /// The text beside which the long prompt arrives.
    stream: Vec<u32>,
    long: Vec<u32>,
}

impl Loads {
    fn new(vocab: usize) -> Loads {
        let mut rng = Rng::new(2);
        let mut random = |least: usize, count: usize| least + rng.next_u64() as usize % count;
        let lengths: Vec<(usize, usize)> = (0..64).map(|_| (random(64, 384), random(16, 96))).collect();
        let come_and_go = lengths.iter().map(|(prompt, answer)| (ids(&mut rng, *prompt, vocab), *answer)).collect();
        let head = ids(&mut rng, 1024, vocab);
        let heads = (0..32).map(|_| ([&head[..], &ids(&mut rng, 32, vocab)].concat(), 2)).collect();
        let [stream, long] = [32, GAP_PROMPT].map(|count| ids(&mut rng, count, vocab));
        Loads { come_and_go, heads, stream, long }
    }
}

/// Times of requests.
#[derive(Default)]
struct Times {
    first_token: Histogram,
    gap: Histogram,
    whole: Histogram,
}

fn requests(load: &[(Vec<u32>, usize)]) -> Vec<Request> {
    load.iter().map(|(ids, count)| Request { ids: ids.clone(), max_new: *count, ..Request::default() }).collect()
}

fn main() {
    let mut words = std::env::args().skip(1).filter(|word| !word.starts_with("--"));
    let Some(pack) = words.next() else {
        println!("usage: cargo bench --bench schedule -- PACK [SECONDS [HOST:PORT]]");
        return;
    };
    let seconds: f64 = words.next().and_then(|word| word.parse().ok()).unwrap_or(120.0);
    let threads = std::env::var("IEC_THREADS").ok().and_then(|t| t.parse().ok());
    let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let reader = IebinReader::open(Path::new(&pack)).expect("a pack");
    let options = EngineOptions { threads, context: Some(CONTEXT), ..EngineOptions::default() };
    let mut engine = Engine::open(&reader, &options).expect("an engine");
    println!("{pack}, {threads} threads, {}", engine.precision());
    let (server, loads) = (words.next().map(Server), Loads::new(engine.config().vocab));
    let speeds = Speeds::measure(&mut engine);
    come_and_go(&mut engine, &speeds, &loads);
    gap(&mut engine, &loads);
    load(&mut engine, &speeds, seconds, server.as_ref());
    common_head(&mut engine, &loads);
    if let Some(server) = server {
        server.measure(&loads);
    }
}

fn ids(rng: &mut Rng, count: usize, vocab: usize) -> Vec<u32> {
    (0..count).map(|_| (rng.next_u64() % vocab as u64) as u32).collect()
}

fn request(rng: &mut Rng, engine: &Engine, prompt: usize, answer: usize) -> Request {
    Request { ids: ids(rng, prompt, engine.config().vocab), max_new: answer, ..Request::default() }
}

/// Generates all texts in batches of at most `batch`; returns the texts, and the times of prefill and decode.
fn texts(
    engine: &mut Engine,
    prefixes: Option<&mut PrefixCache>,
    requests: Vec<Request>,
    batch: usize,
) -> (Vec<Completion>, f64, f64) {
    let options = Options { tokenizer: None, batch, eos: &[], ..Options::default() };
    let done = generate(engine, prefixes, &mut Speculator::off(), requests, &options, |_| Ok(())).expect("texts");
    (done.completions, done.prefill_time.as_secs_f64(), done.decode_time.as_secs_f64())
}

/// Numbers of texts whose steps are measured.
const ROWS: [usize; 5] = [1, 2, 4, 8, SEQUENCES];

/// Speeds of fixed batches.
struct Speeds {
    /// Prompt tokens per second.
    prefill: f64,
    /// Seconds of a step with each number of texts in [`ROWS`].
    steps: [f64; ROWS.len()],
}

impl Speeds {
    fn measure(engine: &mut Engine) -> Speeds {
        let mut rng = Rng::new(1);
        let mut fixed = |count: usize| {
            let requests = (0..count).map(|_| request(&mut rng, engine, 256, 65)).collect();
            let (_, prefill, decode) = texts(engine, None, requests, count);
            (256.0 * count as f64 / prefill, decode / 64.0)
        };
        fixed(SEQUENCES);
        let all = ROWS.map(&mut fixed);
        let (prefill, steps) = (all[ROWS.len() - 1].0, all.map(|(_, step)| step));
        let times: Vec<String> = ROWS.iter().zip(&steps).map(|(n, step)| format!("{n}: {:.1}", step * 1e3)).collect();
        println!("fixed batches: {prefill:.1} prompt tokens/s; ms of a step with {}", times.join(", "));
        Speeds { prefill, steps }
    }

    /// Returns the seconds of a step with [`SEQUENCES`] texts.
    fn full(&self) -> f64 {
        self.steps[ROWS.len() - 1]
    }
}

fn come_and_go(engine: &mut Engine, speeds: &Speeds, loads: &Loads) {
    let begin = Instant::now();
    let (done, ..) = texts(engine, None, requests(&loads.come_and_go), SEQUENCES);
    let seconds = begin.elapsed().as_secs_f64();
    let prompts: usize = loads.come_and_go.iter().map(|(prompt, _)| prompt.len()).sum();
    let answers: usize = done.iter().map(|done| done.ids.len()).sum();
    // The first token of each answer comes with its prompt.
    let decoded = (answers - done.len()) as f64;
    let ideal = prompts as f64 / speeds.prefill + decoded * speeds.full() / SEQUENCES as f64;
    println!(
        "come and go: {prompts} prompt and {answers} answer tokens in {seconds:.1} s, {:.1} answer tokens/s; {:.3} of \
         the speed of fixed batches",
        answers as f64 / seconds,
        ideal / seconds
    );
}

fn common_head(engine: &mut Engine, loads: &Loads) {
    let mut prefixes = PrefixCache::new(engine, "benchmark");
    let begin = Instant::now();
    let (done, ..) = texts(engine, Some(&mut prefixes), requests(&loads.heads), SEQUENCES);
    let seconds = begin.elapsed().as_secs_f64();
    let computed: usize = done.iter().map(|done| done.prompt_tokens - done.reused_tokens).sum();
    let ideal = 1024 + 32 * 32;
    let share = computed as f64 / ideal as f64;
    println!("head: {computed} prompt tokens computed, {share:.3} of {ideal}, {seconds:.1} s");
}

/// A batch of the engine in real time.
struct Live<'a> {
    engine: &'a mut Engine,
    batch: Batch<'a>,
    key: usize,
    begin: Instant,
    /// Arrival and last token of each request.
    arrived: Vec<(Micros, Option<Micros>)>,
    times: Times,
}

impl<'a> Live<'a> {
    fn new(engine: &'a mut Engine, limits: sched::Options) -> Live<'a> {
        let mut batch = Batch::new(engine, None, limits);
        let key = batch.add_key(KeyLimits::default());
        Live { engine, batch, key, begin: Instant::now(), arrived: Vec::new(), times: Times::default() }
    }

    fn now(&self) -> Micros {
        self.begin.elapsed().as_micros() as Micros
    }

    fn arrive(&mut self, time: Micros, ids: &[u32], max_new: usize) {
        let request = Request { ids: ids.to_vec(), max_new, ..Request::default() };
        let terms = Terms { key: self.key, ..Terms::default() };
        self.batch.arrive(self.engine, self.now(), self.arrived.len(), request, terms).expect("room for the request");
        self.arrived.push((time, None));
    }

    fn step(&mut self) {
        let (now, options) = (self.now(), Options { tokenizer: None, eos: &[], ..Options::default() });
        let (begin, arrived, times) = (self.begin, &mut self.arrived, &mut self.times);
        let mut sink = |event: &iec::generate::Event<'_>| {
            let now = begin.elapsed().as_micros() as Micros;
            let (arrival, last) = &mut arrived[event.request];
            match last.replace(now) {
                None => times.first_token.add(now - *arrival),
                Some(last) => times.gap.add(now - last),
            }
            Ok(())
        };
        let report = self.batch.step(self.engine, &mut Speculator::off(), now, &options, &mut sink).expect("a step");
        for (_, completion) in report.ended {
            let (arrival, last) = self.arrived[completion.index];
            self.times.whole.add(last.expect("a token") - arrival);
        }
    }
}

fn limits(engine: &Engine) -> sched::Options {
    let pages = (SEQUENCES * CONTEXT.div_ceil(sched::PAGE as usize)) as u32;
    sched::Options { max_seqs: SEQUENCES, step: STEP, ..sched::Options::with_pages(pages, engine.context() as u32) }
}

fn gap(engine: &mut Engine, loads: &Loads) {
    let limits = limits(engine);
    let mut live = Live::new(engine, limits);
    live.arrive(0, &loads.stream, 200);
    // The cost of steps with more tokens must be known, as it is in a server that runs for a while.
    for prompt in [64, 128, 256, 512] {
        live.arrive(0, &loads.long[..prompt], 2);
    }
    while live.times.whole.count() < 4 {
        live.step();
    }
    live.times.gap = Histogram::default();
    let now = live.now();
    live.arrive(now, &loads.long, 2);
    while live.times.whole.count() < 5 {
        live.step();
    }
    let (largest, budget) = (live.times.gap.largest(), STEP as f64 / 1e6);
    println!(
        "gap: {:.0} ms beside a prompt of {GAP_PROMPT} tokens, {:.2} of the budget",
        largest * 1e3,
        largest / budget
    );
}

fn load(engine: &mut Engine, speeds: &Speeds, seconds: f64, server: Option<&Server>) {
    let (prompt, answer) = (Lengths { median: 96.0, sigma: 0.5 }, Lengths { median: 32.0, sigma: 0.5 });
    let steps = ROWS.iter().zip(&speeds.steps).map(|(rows, step)| (*rows as u32, (step * 1e6) as Micros));
    let machine = Machine { prefill_rate: speeds.prefill, steps: steps.collect(), acceptance: 0.0 };
    // About 60 % of what the machine can do.
    let cost = 110.0 / speeds.prefill + 36.0 * speeds.full() / SEQUENCES as f64;
    let rate = 0.6 / cost;
    let load = Load {
        requests: (seconds * rate) as u64,
        rate,
        bursts: None,
        keys: 1,
        zipf: 0.0,
        flood: 0.0,
        background: 0.0,
        prompt,
        answer,
        max_tokens: 256,
        heads: 0,
        head_tokens: 0,
        adapters: 1,
        giants: 0.0,
        disconnects: 0.0,
        slow_readers: 0.0,
    };
    let (options, seed) = (limits(engine), 5);
    let setup = Setup {
        options: options.clone(),
        key: KeyLimits::default(),
        load: load.clone(),
        machine,
        key_changes: None,
        seed,
    };
    let simulated = simulate(&setup, &|| false).expect("the rules of the scheduler");
    let (mut rng, vocab) = (Rng::new(4), engine.config().vocab);
    // The real model has no end of its own, so the answer is cut where the simulated one ends.
    let arrival = |Arrival { time, request, client, .. }: Arrival| {
        let answer = client.answer.min(request.max_tokens) as usize;
        (time, ids(&mut rng, request.prompt as usize, vocab), answer)
    };
    let arrivals: Vec<_> = Arrivals::new(&load, options.ctx, seed).map(arrival).collect();
    let real = live(engine, options, &arrivals);
    println!(
        "load: {} requests at {rate:.2} per second, engine busy {:.0} %",
        load.requests,
        100.0 * simulated.busy / simulated.seconds
    );
    println!("{:<12} {:>22} {:>22}", "seconds", "p50: real, simulated", "p99: real, simulated");
    for (name, real, simulated) in [
        ("first token", &real.first_token, &simulated.first_token),
        ("gap", &real.gap, &simulated.gap),
        ("whole", &real.whole, &simulated.latency),
    ] {
        let columns = [0.5, 0.99].map(|share| {
            let (real, simulated) = (real.quantile(share), simulated.quantile(share));
            format!("{real:.3} {simulated:.3} ({:.2})", simulated / real)
        });
        println!("{name:<12} {:>22} {:>22}", columns[0], columns[1]);
    }
    let Some(server) = server else { return };
    let other = server.load(&arrivals);
    println!("{:<12} {:>22} {:>22}", "seconds", "p50: engine, server", "p99: engine, server");
    for (name, real, other) in [
        ("first token", &real.first_token, &other.first_token),
        ("gap", &real.gap, &other.gap),
        ("whole", &real.whole, &other.whole),
    ] {
        let columns = [0.5, 0.99].map(|share| format!("{:.3} {:.3}", real.quantile(share), other.quantile(share)));
        println!("{name:<12} {:>22} {:>22}", columns[0], columns[1]);
    }
}

/// Computes requests that arrive at these times and returns the times that they take.
fn live(engine: &mut Engine, options: sched::Options, arrivals: &[(Micros, Vec<u32>, usize)]) -> Times {
    let (mut live, mut arrivals) = (Live::new(engine, options), arrivals.iter().peekable());
    while arrivals.peek().is_some() || !live.batch.is_empty() {
        while let Some((time, prompt, answer)) = arrivals.next_if(|(time, ..)| *time <= live.now()) {
            live.arrive(*time, prompt, *answer);
        }
        match arrivals.peek() {
            Some((time, ..)) if live.batch.is_empty() => {
                let wait = time.saturating_sub(live.now());
                std::thread::sleep(Duration::from_micros(wait.min(10_000)));
            }
            _ => live.step(),
        }
    }
    live.times
}
