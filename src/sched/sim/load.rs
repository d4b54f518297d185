//! Load of a simulation: when requests arrive, from which key, with which lengths, and what their clients do.

use super::blocks::Head;
use crate::rng::Rng;
use crate::sched::{Micros, Request, SECOND};

/// Lengths with a lognormal distribution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lengths {
    /// Median in tokens.
    pub median: f64,
    /// Standard deviation of the logarithm; 0 gives always the median.
    pub sigma: f64,
}

impl Lengths {
    fn draw(&self, rng: &mut Rng) -> u32 {
        (self.median * (self.sigma * rng.next_normal()).exp()).round().clamp(1.0, 1e8) as u32
    }
}

/// Description of the requests. Shares are numbers from 0 to 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// Number of requests.
    pub requests: u64,
    /// Mean number of requests per second; the times between them are exponential (a Poisson process).
    pub rate: f64,
    /// Seconds with and without arrivals, in turn; the mean rate stays the same. `None`: always with arrivals.
    pub bursts: Option<(f64, f64)>,
    /// Number of keys; the number of requests of each follows Zipf's law.
    pub keys: usize,
    /// Exponent of Zipf's law for keys, heads and adapters; 0 makes all equally frequent.
    pub zipf: f64,
    /// Share of requests of one more key, which always asks for the most urgent priority.
    pub flood: f64,
    /// Share of requests with priority 2 instead of 0.
    pub background: f64,
    /// Lengths of prompts, without the shared head.
    pub prompt: Lengths,
    /// Lengths of answers.
    pub answer: Lengths,
    /// Largest answer that requests ask for; longer ones are cut.
    pub max_tokens: u32,
    /// Number of texts at the head of prompts that requests share; 0: no shared heads.
    pub heads: usize,
    /// Tokens of each of these texts.
    pub head_tokens: u32,
    /// Number of adapters; requests with different adapters share no pages.
    pub adapters: usize,
    /// Share of requests whose prompt fills the context.
    pub giants: f64,
    /// Share of requests whose client closes the connection, after a time with a mean of 10 seconds.
    pub disconnects: f64,
    /// Share of requests whose reader stops for up to 60 seconds; after 30 the request is cancelled.
    pub slow_readers: f64,
}

/// Actions of a client, besides waiting for its answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Client {
    /// Length of the answer if nothing cuts it.
    pub answer: u32,
    /// Time from arrival to the end of the connection.
    pub disconnects_after: Option<Micros>,
    /// Time for which the reader stops after the first token.
    pub stops_for: Option<Micros>,
}

/// Request of the load.
#[derive(Debug, Clone, PartialEq)]
pub struct Arrival {
    /// Time of arrival.
    pub time: Micros,
    /// The request.
    pub request: Request,
    /// Shared head of the prompt.
    pub head: Head,
    /// Behavior of the client.
    pub client: Client,
}

/// Distribution of Zipf's law, as a table of cumulative shares.
#[derive(Debug)]
struct Zipf(Vec<f64>);

impl Zipf {
    fn new(count: usize, exponent: f64) -> Zipf {
        let shares = (1..=count.max(1)).map(|rank| (rank as f64).powf(-exponent));
        let sums = shares.scan(0.0, |sum, share| {
            *sum += share;
            Some(*sum)
        });
        Zipf(sums.collect())
    }

    fn draw(&self, rng: &mut Rng) -> usize {
        let at = rng.next_f64() * self.0.last().copied().unwrap_or(1.0);
        self.0.partition_point(|sum| *sum <= at).min(self.0.len() - 1)
    }
}

/// Generator of arrivals: an iterator in the order of time.
#[derive(Debug)]
pub struct Arrivals {
    load: Load,
    ctx: u32,
    rng: Rng,
    left: u64,
    /// Seconds with arrivals that have passed.
    seconds: f64,
    keys: Zipf,
    heads: Zipf,
    adapters: Zipf,
}

impl Arrivals {
    /// Creates the generator. The same load, context and seed give the same arrivals.
    pub fn new(load: &Load, ctx: u32, seed: u64) -> Arrivals {
        let zipf = |count| Zipf::new(count, load.zipf);
        let (keys, heads, adapters) = (zipf(load.keys), zipf(load.heads), zipf(load.adapters));
        let rng = Rng::new(seed);
        Arrivals { load: load.clone(), ctx, rng, left: load.requests, seconds: 0.0, keys, heads, adapters }
    }

    /// Draws the time of the next arrival.
    fn time(&mut self) -> Micros {
        let (on, off) = self.load.bursts.unwrap_or((1.0, 0.0));
        let rate = self.load.rate * (on + off) / on;
        self.seconds += -(1.0 - self.rng.next_f64()).ln() / rate;
        let pauses = (self.seconds / on).floor() * off;
        ((self.seconds + pauses) * SECOND as f64) as Micros
    }

    fn happens(&mut self, share: f64) -> bool {
        self.rng.next_f64() < share
    }

    fn client(&mut self) -> Client {
        let answer = self.load.answer.draw(&mut self.rng);
        let disconnects = self.happens(self.load.disconnects);
        let stops = self.happens(self.load.slow_readers);
        let [after, time] = [(); 2].map(|()| self.rng.next_f64());
        let after = (-(1.0 - after).ln() * 10.0 * SECOND as f64) as Micros;
        let time = (time * 60.0 * SECOND as f64) as Micros;
        Client { answer, disconnects_after: disconnects.then_some(after), stops_for: stops.then_some(time) }
    }
}

impl Iterator for Arrivals {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        self.left = self.left.checked_sub(1)?;
        let time = self.time();
        let flood = self.happens(self.load.flood);
        let key = if flood { self.load.keys } else { self.keys.draw(&mut self.rng) };
        let background = self.happens(self.load.background);
        let head = self.heads.draw(&mut self.rng) as u64;
        let adapter = self.adapters.draw(&mut self.rng) as u64;
        let head_tokens = if self.load.heads > 0 { self.load.head_tokens } else { 0 };
        let max_tokens = self.load.max_tokens;
        let longest = self.ctx.saturating_sub(max_tokens).max(1);
        let drawn = self.load.prompt.draw(&mut self.rng).saturating_add(head_tokens);
        let prompt = if self.happens(self.load.giants) { longest } else { drawn.min(longest) };
        let priority = match (flood, background) {
            (true, _) => i32::MIN,
            (_, true) => 2,
            _ => 0,
        };
        let head = Head { text: head << 32 | adapter, tokens: head_tokens.min(prompt) };
        let request = Request { key, priority, prompt, max_tokens, deadline: None, further: false };
        Some(Arrival { time, request, head, client: self.client() })
    }
}
