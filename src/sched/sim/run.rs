//! Event loop of the simulation.
//!
//! Events are arrivals, ends of steps, timers of the scheduler, and actions of clients. After each event the invariants
//! of the scheduler are checked; when no step is in flight, the next one is planned.

use super::blocks::BlockCache;
use super::load::{Arrival, Arrivals, Load};
use super::results::Results;
use crate::rng::Rng;
use crate::sched::{
    Cost, Event, Finish, KeyLimits, Micros, Options, Outcome, RequestId, SECOND, Scheduler, Step, Work,
};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Time after which a request whose reader has stopped is cancelled.
const SLOW_READER: Micros = 30 * SECOND;

/// Speed of the engine.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// Prompt tokens per second in large chunks.
    pub prefill_rate: f64,
    /// Times of steps that decode some rows (sequences and draft tokens), by ascending number of rows; at least one.
    /// Times in between, and beyond the ends, are on the straight line through the nearest two.
    pub steps: Vec<(u32, Micros)>,
    /// Share of the draft tokens that are accepted, one after another.
    pub acceptance: f64,
}

impl Machine {
    /// Returns the time of a step.
    fn time(&self, work: &[Work]) -> Micros {
        let rows = |decodes| work.iter().filter(move |work| work.decodes == decodes).map(Work::rows).sum::<u32>();
        let (decode, prefill) = (rows(true), rows(false));
        let prefill = f64::from(prefill) / self.prefill_rate * SECOND as f64;
        (self.decode_time(decode) + prefill as Micros).max(1)
    }

    /// Returns the time of a step that decodes this number of rows, or that reads the weights only for 0.
    fn decode_time(&self, rows: u32) -> Micros {
        let after = self.steps.partition_point(|(known, _)| *known < rows).clamp(1, self.steps.len().max(2) - 1);
        let point = |i: usize| self.steps.get(i).map_or((0.0, 0.0), |(rows, time)| (f64::from(*rows), *time as f64));
        let ((from, time), (until, later)) = (point(after - 1), point(after));
        let slope = if until > from { (later - time) / (until - from) } else { 0.0 };
        (time + slope * (f64::from(rows) - from)).max(0.0) as Micros
    }
}

/// Everything that determines a simulation; the same setup gives the same results.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Limits of the scheduler.
    pub options: Options,
    /// Limits of every key.
    pub key: KeyLimits,
    /// Requests.
    pub load: Load,
    /// Speed of the engine.
    pub machine: Machine,
    /// Time between two changes of keys, each of which disables a random key or gives it random limits; `None`: keys
    /// keep their limits.
    pub key_changes: Option<Micros>,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Accepted request.
#[derive(Debug)]
pub(super) struct Live {
    pub arrival: Arrival,
    pub admitted: bool,
    /// Tokens that came from the prefix cache when it entered the batch.
    pub cached: u32,
    pub generated: u32,
    /// Time of the last token.
    pub last: Micros,
}

/// Action of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Action {
    Disconnect,
    Continue,
}

/// Running simulation.
struct Simulation {
    machine: Machine,
    scheduler: Scheduler<BlockCache>,
    arrivals: std::iter::Peekable<Arrivals>,
    /// Accepted requests by number, without the ended ones at the front.
    live: VecDeque<Option<Live>>,
    /// Number of the request at the front of `live`.
    first: RequestId,
    actions: BinaryHeap<Reverse<(Micros, RequestId, Action)>>,
    /// Step in flight and the time of its end.
    flight: Option<(Micros, Vec<Work>)>,
    now: Micros,
    /// Random numbers for draft tokens.
    rng: Rng,
    changes: KeyChanges,
    results: Results,
}

/// Changes of keys.
struct KeyChanges {
    every: Option<Micros>,
    next: Option<Micros>,
    rng: Rng,
    keys: usize,
    /// Limits of every key at the start.
    limits: KeyLimits,
}

/// Number of events between two calls of the function that may stop a simulation.
const EVENTS: u64 = 10_000;

/// Runs a simulation to the end of its last request, or until `stop` returns true.
///
/// # Errors
/// Describes the invariant of the scheduler that did not hold, and when. A simulation that was stopped has no results.
pub fn simulate(setup: &Setup, stop: &dyn Fn() -> bool) -> Result<Results, String> {
    let mut scheduler = Scheduler::new(setup.options.clone(), BlockCache::default());
    let keys = setup.load.keys.max(1) + usize::from(setup.load.flood > 0.0);
    (0..keys).for_each(|_| _ = scheduler.add_key(setup.key.clone()));
    let mut simulation = Simulation {
        machine: setup.machine.clone(),
        scheduler,
        arrivals: Arrivals::new(&setup.load, setup.options.ctx, setup.seed).peekable(),
        live: VecDeque::new(),
        first: 0,
        actions: BinaryHeap::new(),
        flight: None,
        now: 0,
        rng: Rng::new(!setup.seed),
        changes: KeyChanges {
            every: setup.key_changes,
            next: setup.key_changes,
            rng: Rng::new(setup.seed ^ 0xC0FF_EE00),
            keys,
            limits: setup.key.clone(),
        },
        results: Results::new(keys),
    };
    let mut events = 0u64;
    while simulation.advance().map_err(|rule| format!("at {} µs: {rule}", simulation.now))? {
        events += 1;
        if events.is_multiple_of(EVENTS) && stop() {
            return Err("the simulation was stopped".into());
        }
    }
    simulation.results.seconds = simulation.now as f64 / 1e6;
    Ok(simulation.results)
}

impl Simulation {
    /// Handles the next event. Returns false if there is none.
    fn advance(&mut self) -> Result<bool, String> {
        let arrival = self.arrivals.peek().map(|arrival| arrival.time);
        let action = self.actions.peek().map(|Reverse((time, ..))| *time);
        let busy = self.scheduler.waiting() + self.scheduler.running() > 0;
        let engine = match &self.flight {
            Some((end, _)) => Some(*end),
            None => self.scheduler.next_timer().filter(|_| busy),
        };
        let change = self.changes.next;
        let next = [arrival, action, engine, change].into_iter().flatten().min();
        let Some(next) = next.filter(|_| arrival.is_some() || busy) else { return Ok(false) };
        self.measure(next);
        if engine == Some(next) {
            self.finish_step();
        } else if action == Some(next) {
            self.act();
        } else if change == Some(next) {
            self.change_key();
        } else if let Some(arrival) = self.arrivals.next() {
            self.arrive(arrival);
        }
        self.scheduler.check()?;
        if self.flight.is_none() {
            self.plan();
            self.scheduler.check()?;
        }
        Ok(true)
    }

    /// Moves the time forward, and enters the state that has lasted until then.
    fn measure(&mut self, next: Micros) {
        self.now = self.now.max(next);
        let pages = self.scheduler.pages();
        let (waiting, running) = (self.scheduler.waiting() as f64, self.scheduler.running() as f64);
        let values = [waiting, running, f64::from(pages.free), f64::from(pages.used), f64::from(pages.cached)];
        self.results.series.add(self.now, values);
        self.results.most_waiting = self.results.most_waiting.max(self.scheduler.waiting());
    }

    fn arrive(&mut self, arrival: Arrival) {
        let key = arrival.request.key;
        self.results.requests += 1;
        self.results.keys[key].requests += 1;
        let id = match self.scheduler.arrive(self.now, arrival.request.clone()) {
            Ok(id) => id,
            Err(rejection) => {
                self.results.refuse(self.now, key, rejection);
                return;
            }
        };
        self.scheduler.cache().register(id, arrival.head);
        let disconnect = arrival.client.disconnects_after.map(|after| self.now + after);
        self.actions.extend(disconnect.map(|time| Reverse((time, id, Action::Disconnect))));
        self.live.push_back(Some(Live { arrival, admitted: false, cached: 0, generated: 0, last: self.now }));
    }

    fn act(&mut self) {
        let Some(Reverse((_, id, action))) = self.actions.pop() else { return };
        match action {
            Action::Disconnect => _ = self.scheduler.cancel(id),
            Action::Continue => self.scheduler.pause(id, false),
        }
    }

    /// Disables a random key, or gives it random limits.
    fn change_key(&mut self) {
        let KeyChanges { every, rng, keys, limits, .. } = &mut self.changes;
        let key = (rng.next_u64() % *keys as u64) as usize;
        let mut limit = |most: u64| Some(1 + rng.next_u64() % most).filter(|limit| limit.is_multiple_of(2));
        let (rpm, tpm, tokens_per_day) = (limit(600), limit(200_000), limit(50_000_000));
        let (concurrent, weight, priority) = (limit(50).map(|n| n as usize), limit(40), limit(6));
        match limit(8) {
            Some(_) => {
                let weight = weight.map_or(limits.weight, |tenths| tenths as f64 / 10.0);
                let max_priority = priority.map_or(limits.max_priority, |n| n as i32 - 3);
                let limits = KeyLimits { weight, rpm, tpm, tokens_per_day, concurrent, max_priority, ..limits.clone() };
                self.scheduler.set_key(self.now, key, limits);
            }
            None if rng.next_u64().is_multiple_of(2) => self.scheduler.disable_key(key),
            None => self.scheduler.set_key(self.now, key, limits.clone()),
        }
        self.changes.next = every.map(|every| self.now + every);
    }

    fn plan(&mut self) {
        let Step { work, events } = self.scheduler.plan(self.now);
        self.handle(events);
        if !work.is_empty() {
            let time = self.machine.time(&work);
            self.results.steps += 1;
            self.results.busy += time as f64 / 1e6;
            self.flight = Some((self.now + time, work));
        }
    }

    /// Computes the outcome of the step in flight, if there is one.
    fn finish_step(&mut self) {
        let Some((_, work)) = self.flight.take() else { return };
        let cost = Cost { rows: work.iter().map(Work::rows).sum(), time: self.machine.time(&work) };
        let outcomes: Vec<Outcome> = work.iter().map(|work| self.compute(work)).collect();
        let events = self.scheduler.done(cost, &outcomes);
        self.handle(events);
    }

    /// Returns the outcome of a work item.
    fn compute(&mut self, work: &Work) -> Outcome {
        let at = (work.id - self.first) as usize;
        let Some(live) = self.live.get_mut(at).and_then(Option::as_mut) else { return Outcome::Failed };
        let prefill = if live.generated == 0 { work.tokens } else { work.tokens - 1 };
        self.results.computed += u64::from(prefill);
        if !work.samples {
            return Outcome::Tokens(0);
        }
        let accepted = (0..work.drafts).take_while(|_| self.rng.next_f64() < self.machine.acceptance).count() as u32;
        let answer = live.arrival.client.answer;
        let tokens = (1 + accepted).min(answer.saturating_sub(live.generated).max(1));
        self.results.token(self.now, live, tokens);
        if let Some(stop) = live.arrival.client.stops_for.take() {
            self.scheduler.pause(work.id, true);
            let (after, action) =
                if stop < SLOW_READER { (stop, Action::Continue) } else { (SLOW_READER, Action::Disconnect) };
            self.actions.push(Reverse((self.now + after, work.id, action)));
        }
        if live.generated >= answer { Outcome::Stopped(tokens) } else { Outcome::Tokens(tokens) }
    }

    fn handle(&mut self, events: Vec<Event>) {
        for event in events {
            self.results.mix(self.now, event);
            let (Event::Admitted { id, .. }
            | Event::Reused { id, .. }
            | Event::Preempted(id)
            | Event::Ended { id, .. }) = event;
            let slot = (id - self.first) as usize;
            let Some(live) = self.live.get_mut(slot).and_then(Option::as_mut) else {
                unreachable!("request {id} has an event after its end");
            };
            match event {
                Event::Admitted { cached, .. } => self.results.admit(self.now, live, cached),
                Event::Reused { cached, .. } => self.results.reuse(live, cached),
                Event::Preempted(_) => self.results.preemptions += 1,
                Event::Ended { finish, .. } => {
                    self.results.end(self.now, live, finish);
                    self.scheduler.cache().forget(id);
                    self.live[slot] = None;
                }
            }
        }
        while let Some(None) = self.live.front() {
            self.live.pop_front();
            self.first += 1;
        }
    }
}

/// Returns true if the request got its whole answer.
pub(super) fn is_complete(finish: Finish) -> bool {
    matches!(finish, Finish::Stop | Finish::Length)
}
