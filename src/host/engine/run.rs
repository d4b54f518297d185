//! Steps of a model: takes commands, computes, and sends what happened to the readers.

use super::live::{Live, Lives};
use super::{Shared, UsageOf};
use crate::error::Result;
use crate::generate::speculate::Speculator;
use crate::generate::{self, Batch, Completion, Event, Finish, StepReport, Terms};
use crate::host::KeyChange;
use crate::host::metrics::{
    self, DiskPages, FinishedReason, ModelMetrics, RequestTimes, StepRecord, TokenCounts, TokenKind,
};
use crate::host::model::{Arrival, Command, Compute, Model, Slot};
use crate::host::reply::{Done, Refusal, Reply, Token};
use crate::runtime::{DiskCounts, Engine, Stage};
use crate::sched::{self, KeyId, Micros, Rejection};
use crate::session::{Encoder, Parts};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant, SystemTime};

/// Longest time without a sign of life while there is nothing to do.
const IDLE: Duration = Duration::from_secs(1);
/// Time without work after which pages of the prefix cache are written to disk.
const SAVE_AFTER: Duration = Duration::from_millis(200);
/// Time between two looks at readers that are slow.
const READERS: Duration = Duration::from_millis(20);
/// Weight of the last step in the mean speed of prefill.
const NEWEST: f64 = 0.2;
/// Prompt tokens that may wait by default, as the time that their computation takes.
const QUEUE_SECONDS: f64 = 60.0;

/// Reason why the steps of a session ended.
#[derive(Debug)]
pub(super) enum End {
    /// The server ends. `cut` is true if requests were ended for it.
    Drained { cut: bool },
    /// The model is removed from memory.
    Unloaded,
    /// The engine failed, and must be opened again.
    Failed(String),
}

/// State of the steps.
pub(super) struct Run<'a> {
    model: &'a Model,
    shared: &'a Shared,
    metrics: &'a ModelMetrics,
    engine: &'a mut Engine,
    speculator: &'a mut Speculator,
    options: generate::Options<'a>,
    batch: Batch<'a>,
    lives: Lives,
    /// Number of choices so far.
    count: usize,
    /// Number of keys so far.
    keys: usize,
    /// Use of the keys before these steps, in the order of their numbers.
    earlier: UsageOf,
    started: Instant,
    /// Whether a choice had adapters after the last step. True at first, so that the metric exists.
    had_adapters: bool,
    /// Pages on disk at the last step.
    disk: DiskCounts,
    /// Time at which requests that are left are cut.
    drain: Option<Instant>,
    cut: bool,
    /// Whether the model is to be removed from memory.
    unloads: bool,
    /// Prompt tokens per second.
    prefill_rate: f64,
    /// Whether the last step had work.
    worked: bool,
    /// Computations that the next step does first.
    computations: Vec<Compute>,
    /// Time of the last step that had work, if pages of the prefix cache may not be on disk since.
    unsaved: Option<Instant>,
    #[cfg(test)]
    panics: bool,
}

impl<'a> Run<'a> {
    pub fn new(
        model: &'a Model,
        shared: &'a Shared,
        metrics: &'a ModelMetrics,
        parts: Parts<'a>,
        encoder: &Encoder<'a>,
        eos: &'a [u32],
    ) -> Run<'a> {
        let Parts { engine, prefixes, speculator, .. } = parts;
        let drafts = if speculator.is_off() { 0 } else { u32::MAX };
        let mut batch = Batch::new(engine, prefixes, sched::Options { drafts, ..shared.limits.clone() });
        if !shared.shows_prompts {
            batch.hide_progress();
        }
        engine.profile(true);
        let options =
            generate::Options { tokenizer: encoder.tokenizer().ok(), eos, skip_invalid: true, ..Default::default() };
        Run {
            model,
            shared,
            metrics,
            engine,
            speculator,
            options,
            batch,
            lives: Lives::default(),
            count: 0,
            keys: 0,
            earlier: UsageOf::new(),
            started: Instant::now(),
            had_adapters: true,
            disk: DiskCounts::default(),
            drain: None,
            cut: false,
            unloads: false,
            prefill_rate: 0.0,
            worked: false,
            computations: Vec::new(),
            unsaved: None,
            #[cfg(test)]
            panics: false,
        }
    }

    /// Adds the keys that were known before. `usage` is the use of these and of the next ones before.
    pub fn restore(&mut self, changes: &[KeyChange], usage: UsageOf) {
        self.earlier = usage;
        changes.iter().for_each(|change| self.change(change));
    }

    /// Returns the use of all keys.
    pub fn usage(&self) -> UsageOf {
        (0..self.keys).map(|key| self.batch.key_usage(self.now(), key)).collect()
    }

    /// Computes until the server ends or the engine fails.
    pub fn steps(&mut self, commands: &Receiver<Command>, changes: &mut Vec<KeyChange>) -> End {
        loop {
            if !self.take_commands(commands, changes) {
                return End::Drained { cut: self.cut };
            }
            self.pause_slow_readers();
            if let Some(time) = self.drain {
                if time <= Instant::now() {
                    self.cut |= !self.lives.all.is_empty();
                    return End::Drained { cut: self.cut };
                }
                if self.batch.is_empty() {
                    return End::Drained { cut: self.cut };
                }
            }
            if self.unloads && self.batch.is_empty() {
                return End::Unloaded;
            }
            self.model.beat();
            let turn = self.shared.turns.take(self.model.number);
            // The time since the last step is that of no stage.
            self.engine.lap(Stage::Other);
            self.engine.take_stages();
            let begin = Instant::now();
            let done = catch_unwind(AssertUnwindSafe(|| self.step()));
            drop(turn);
            match done {
                Ok(Ok(report)) => self.after(report, begin),
                Ok(Err(e)) if e.is_interrupt() => match self.batch.interrupt(&self.options) {
                    Ok(ended) => ended.into_iter().for_each(|completion| self.end(completion)),
                    Err(e) => return End::Failed(e.to_string()),
                },
                Ok(Err(e)) => return End::Failed(e.to_string()),
                Err(_) => return End::Failed("a step of the engine panicked".into()),
            }
        }
    }

    /// Ends all requests that are left.
    pub fn finish(self, failed: bool) {
        let refusal = match failed {
            true => Refusal::Stopped("the engine failed and is opened again".into()),
            false => Refusal::Draining,
        };
        let mut answered = std::collections::HashSet::new();
        for live in self.lives.all.values() {
            self.metrics.cancelled(live.phase());
            if answered.insert(live.ticket) {
                live.outlet.send(Reply::Refused(refusal.clone()));
            }
        }
        // A batch that panicked may panic again; nothing uses its prefix cache then.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(self.batch)));
        self.metrics.queue(0, 0);
    }

    /// Takes all commands that wait. While there is nothing to compute, waits for one. Returns false if no more can
    /// come.
    fn take_commands(&mut self, commands: &Receiver<Command>, changes: &mut Vec<KeyChange>) -> bool {
        let idle = (self.batch.is_empty() && !self.unloads) || !self.worked;
        if idle && self.drain.is_none_or(|_| !self.batch.is_empty()) {
            match commands.recv_timeout(self.patience()) {
                Ok(command) => self.obey(command, changes),
                Err(RecvTimeoutError::Timeout) => self.save_prefix(),
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        loop {
            match commands.try_recv() {
                Ok(command) => self.obey(command, changes),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Returns how long the next step can wait if no command comes.
    fn patience(&self) -> Duration {
        if self.batch.is_empty() {
            return self.unsaved.map_or(IDLE, |since| SAVE_AFTER.saturating_sub(since.elapsed()));
        }
        let timer = self.batch.next_timer().map(|at| Duration::from_micros(at.saturating_sub(self.now())));
        let readers = self.lives.all.values().any(|live| live.paused.is_some()).then_some(READERS);
        timer.into_iter().chain(readers).fold(IDLE, Duration::min)
    }

    /// Writes a page of the prefix cache to disk, if there has been nothing to compute for a while.
    fn save_prefix(&mut self) {
        if !self.batch.is_empty() || self.unsaved.is_none_or(|since| since.elapsed() < SAVE_AFTER) {
            return;
        }
        match self.batch.prefixes().map_or(Ok(false), |prefixes| prefixes.save(1).map(|saved| saved.written > 0)) {
            Ok(true) => {}
            Ok(false) => self.unsaved = None,
            // The end of the server tries again, and reports why it failed.
            Err(_) => {
                self.metrics.disk_pages(DiskPages::Failed, 1);
                self.unsaved = None;
            }
        }
        self.tell_disk();
    }

    fn obey(&mut self, command: Command, changes: &mut Vec<KeyChange>) {
        match command {
            Command::Arrive(arrival) => self.arrive(arrival),
            Command::Cancel(ticket) => {
                for live in self.lives.remove_request(ticket) {
                    self.batch.cancel(live.id);
                    self.metrics.cancelled(live.phase());
                }
            }
            Command::Keys(new) => {
                new.iter().for_each(|change| self.change(change));
                changes.extend(new);
            }
            Command::Compute(work) => self.computations.push(work),
            Command::Slots(answer) => answer.send(self.slots()),
            Command::Usage(answer) => _ = answer.send(self.usage()),
            Command::FlushPrefixes(answer) => answer.send(self.flush_prefixes()),
            Command::Load => {}
            Command::Unload => self.unloads = true,
            Command::Drain(timeout) => self.drain = Some(Instant::now() + timeout),
            #[cfg(test)]
            Command::Panic => self.panics = true,
        }
        // A step applies it: a request that was cancelled leaves the batch.
        self.worked = true;
    }

    /// Empties the prefix cache, and forgets earlier texts, if there is nothing to compute. Returns whether it did.
    fn flush_prefixes(&mut self) -> bool {
        let is_idle = self.lives.all.is_empty() && self.batch.is_empty();
        if is_idle {
            self.batch.flush_prefixes();
            self.speculator.forget();
        }
        is_idle
    }

    /// Returns the choices in the batch, in their order.
    fn slots(&self) -> Vec<Slot> {
        let admitted = self.lives.all.iter().filter(|(_, live)| live.admitted.is_some());
        let mut slots: Vec<Slot> = admitted
            .map(|(task, live)| Slot {
                task: *task,
                prompt_tokens: live.prompt_tokens,
                generated: live.generated.get(),
                most: live.most,
            })
            .collect();
        slots.sort_unstable_by_key(|slot| slot.task);
        slots
    }

    fn change(&mut self, change: &KeyChange) {
        match change {
            KeyChange::Add(limits) => {
                let key = self.batch.add_key(limits.clone());
                self.keys += 1;
                if let Some(used) = self.earlier.get_mut(key).and_then(Option::take) {
                    self.batch.restore_usage(self.now(), key, &used);
                }
            }
            KeyChange::Set(key, limits) => self.batch.set_key(self.now(), *key, limits.clone()),
            KeyChange::Disable(key) => self.batch.disable_key(*key),
        }
    }

    /// Queues all choices of a request, or refuses it.
    fn arrive(&mut self, arrival: Arrival) {
        let Arrival { ticket, choices, key, key_name, adapters, deadline, arrived, outlet } = arrival;
        if self.drain.is_some() {
            return outlet.send(Reply::Refused(Refusal::Draining));
        }
        let deadline = deadline.map(|at| micros(at.saturating_duration_since(self.started)));
        let adapters: std::sync::Arc<[String]> = adapters.into();
        for (choice, request) in choices.into_iter().enumerate() {
            let terms = Terms { key, priority: request.priority, deadline, further: choice > 0 };
            let (index, prompt_tokens, most, now) = (self.count, request.ids.len(), request.max_new, self.now());
            self.count += 1;
            match self.batch.arrive(self.engine, now, index, request, terms) {
                Ok(id) => self.lives.add(
                    index,
                    Live {
                        ticket,
                        choice,
                        id,
                        outlet: outlet.clone(),
                        key_id: key,
                        key: key_name.clone(),
                        adapters: adapters.clone(),
                        prompt_tokens,
                        arrived,
                        admitted: None,
                        generated: Default::default(),
                        most,
                        last_token: Default::default(),
                        paused: None,
                    },
                ),
                Err(rejection) => {
                    for live in self.lives.remove_request(ticket) {
                        self.batch.cancel(live.id);
                    }
                    self.metrics.rejected(reason_of(rejection));
                    return outlet.send(Reply::Refused(Refusal::Limit(rejection, self.retry_after(rejection))));
                }
            }
        }
        self.record_use(key, &key_name);
        outlet.send(Reply::Queued);
    }

    /// Records how much a key has used of its limit per day, with all tokens that its unfinished requests may use.
    fn record_use(&self, key: KeyId, name: &str) {
        if let Some(record) = &self.shared.record_use
            && let Some(usage) = self.batch.key_usage(self.now(), key)
            && usage.day_used > 0
        {
            record(&self.model.name, name, usage.day_used, SystemTime::now());
        }
    }

    /// Returns the seconds after which a refused request may fit.
    fn retry_after(&self, rejection: Rejection) -> Option<u64> {
        let seconds = match rejection {
            Rejection::Rate(wait) => wait? as f64 / 1e6,
            Rejection::QueueFull | Rejection::QueueTokens | Rejection::Concurrent => {
                self.batch.waiting_tokens() as f64 / self.prefill_rate.max(1.0)
            }
            Rejection::Context | Rejection::UnknownKey | Rejection::MaxTokens => return None,
        };
        Some((seconds.ceil() as u64).clamp(1, 30))
    }

    /// Pauses the texts of slow readers, and cancels those of readers that take nothing.
    fn pause_slow_readers(&mut self) {
        let (mut gone, patience) = (Vec::new(), self.shared.slow_reader);
        for live in self.lives.all.values_mut() {
            match live.paused {
                None if live.outlet.is_full() => {
                    live.paused = Some(Instant::now());
                    self.batch.pause(live.id, true);
                }
                Some(_) if live.outlet.is_drained() => {
                    live.paused = None;
                    self.batch.pause(live.id, false);
                    self.worked = true;
                }
                Some(since) if patience.is_some_and(|time| since.elapsed() >= time) => gone.push(live.ticket),
                _ => {}
            }
        }
        for ticket in gone {
            for live in self.lives.remove_request(ticket) {
                self.batch.cancel(live.id);
                self.metrics.cancelled(live.phase());
                let why = format!("the client took nothing for {} s", patience.unwrap_or_default().as_secs());
                live.outlet.send(Reply::Refused(Refusal::Stopped(why)));
                self.worked = true;
            }
        }
    }

    fn step(&mut self) -> Result<StepReport> {
        #[cfg(test)]
        assert!(!self.panics, "a panic that a test asked for");
        self.computations.drain(..).for_each(|Compute(work)| work(self.engine));
        let (lives, metrics, now) = (&self.lives, self.metrics, self.now());
        let mut sink = |event: &Event<'_>| {
            if let Some(live) = lives.all.get(&event.request) {
                let time = Instant::now();
                live.generated.set(live.generated.get() + 1);
                match live.last_token.replace(Some(time)) {
                    None => metrics.first_token(time - live.arrived),
                    Some(last) => metrics.token(time - last),
                }
                live.outlet.send(Reply::Token(Token {
                    choice: live.choice,
                    id: event.id,
                    text: event.text.into(),
                    likely: event.likely.cloned(),
                }));
            }
            Ok(())
        };
        self.batch.step(self.engine, self.speculator, now, &self.options, &mut sink)
    }

    /// Tells readers and metrics what a step did that began at `begin`.
    fn after(&mut self, report: StepReport, begin: Instant) {
        let time = begin.elapsed();
        self.worked = !report.work.is_empty();
        for event in &report.events {
            match event {
                sched::Event::Admitted { id, cached } => {
                    if let Some(live) = self.lives.with_id(*id).filter(|live| live.admitted.is_none()) {
                        // The step that admits a choice computes its prompt, too.
                        live.admitted = Some(begin);
                        self.metrics.request_admitted(live.prompt_tokens, *cached as usize);
                        self.metrics.prefix(live.prompt_tokens, *cached as usize);
                    }
                }
                sched::Event::Preempted(_) => self.metrics.preempted(),
                sched::Event::Reused { .. } | sched::Event::Ended { .. } => {}
            }
        }
        let prompt_tokens: u32 = report.work.iter().filter(|work| !work.decodes).map(|work| work.tokens).sum();
        let new = |outcome: &sched::Outcome| match outcome {
            sched::Outcome::Tokens(n) | sched::Outcome::Stopped(n) => *n as usize,
            sched::Outcome::Failed => 0,
        };
        let generated_tokens = report.outcomes.iter().map(new).sum();
        let stages = self.engine.take_stages();
        if self.worked {
            self.unsaved = self.shared.state.as_ref().map(|_| Instant::now());
            let prompt_tokens = prompt_tokens as usize;
            self.metrics.step(&StepRecord { prompt_tokens, generated_tokens, time, stages: Some(&stages) });
        }
        if prompt_tokens > 0 {
            self.learn_rate(f64::from(prompt_tokens), time);
        }
        for (_, completion) in report.ended {
            self.end(completion);
        }
        self.metrics.drafts(&report.drafts);
        let pages = self.batch.pages();
        self.metrics.pages(pages.free as usize, pages.used as usize, pages.cached as usize);
        self.metrics.queue(self.batch.running(), self.batch.waiting());
        self.model.set_load(self.lives.all.len());
        self.tell_adapters();
        self.tell_disk();
    }

    /// Reports pages of the prefix cache that were read from disk since the last step.
    fn tell_disk(&mut self) {
        let Some(now) = self.batch.prefixes().and_then(|prefixes| prefixes.disk_counts()) else { return };
        let before = std::mem::replace(&mut self.disk, now);
        for (result, pages) in [
            (DiskPages::Hit, now.hit - before.hit),
            (DiskPages::Miss, now.miss - before.miss),
            (DiskPages::Damaged, now.damaged - before.damaged),
            (DiskPages::Written, now.written - before.written),
            (DiskPages::Evicted, now.evicted - before.evicted),
        ] {
            if pages > 0 {
                self.metrics.disk_pages(result, pages);
            }
        }
    }

    /// Reports the adapters in use, if there are some or there were some after the last step.
    fn tell_adapters(&mut self) {
        let are_some = self.lives.all.values().any(|live| !live.adapters.is_empty());
        if !(std::mem::replace(&mut self.had_adapters, are_some) || are_some) {
            return;
        }
        let names = |running: bool| {
            let mut names: Vec<&str> = (self.lives.all.values())
                .filter(|live| live.admitted.is_some() == running)
                .flat_map(|live| live.adapters.iter().map(String::as_str))
                .collect();
            names.sort_unstable();
            names.dedup();
            names
        };
        self.metrics.lora(self.shared.max_adapters, &names(true), &names(false));
    }

    /// Learns the speed of prefill, and bounds the queue by it unless a setting does.
    fn learn_rate(&mut self, tokens: f64, time: Duration) {
        let rate = tokens / time.as_secs_f64().max(1e-6);
        self.prefill_rate = match self.prefill_rate {
            0.0 => rate,
            known => known + NEWEST * (rate - known),
        };
        if self.shared.limits.max_queue_tokens == u64::MAX {
            // A prompt that fills the context may always wait.
            let most = (self.prefill_rate * QUEUE_SECONDS) as u64;
            self.batch.limit_queue(most.max(u64::from(self.batch.limits().ctx)));
        }
    }

    /// Sends the end of a choice to its reader.
    fn end(&mut self, completion: Completion) {
        // A request that was cancelled is known no more.
        let Some(live) = self.lives.remove(completion.index) else { return };
        let now = Instant::now();
        let (admitted, generated) = (live.admitted.unwrap_or(now), completion.ids.len());
        let first = completion.marks.first().copied().unwrap_or(now);
        let times = RequestTimes {
            queue: admitted - live.arrived,
            prefill: first.saturating_duration_since(admitted),
            decode: completion.decode_time(),
            total: now - live.arrived,
        };
        let counts = TokenCounts { prompt: completion.prompt_tokens, generated };
        match completion.finish {
            Finish::QueueTimeout => self.metrics.rejected(metrics::Rejection::QueueTimeout),
            Finish::Deadline if live.admitted.is_none() => self.metrics.rejected(metrics::Rejection::Deadline),
            finish => self.metrics.request_finished(&times, finished(finish), counts),
        }
        for (kind, tokens) in [
            (TokenKind::Prompt, completion.prompt_tokens),
            (TokenKind::Cached, completion.reused_tokens),
            (TokenKind::Generated, generated),
        ] {
            if live.admitted.is_some() && tokens > 0 {
                self.shared.metrics.key_tokens(&live.key, kind, tokens as u64);
            }
        }
        self.record_use(live.key_id, &live.key);
        let choice = live.choice;
        live.outlet.send(Reply::Done(Box::new(Done {
            choice,
            completion,
            #[cfg(feature = "otel")]
            arrived: live.arrived,
            #[cfg(feature = "otel")]
            admitted: live.admitted,
        })));
    }

    fn now(&self) -> Micros {
        micros(self.started.elapsed())
    }
}

fn micros(time: Duration) -> Micros {
    Micros::try_from(time.as_micros()).unwrap_or(Micros::MAX)
}

fn reason_of(rejection: Rejection) -> metrics::Rejection {
    match rejection {
        Rejection::QueueFull => metrics::Rejection::QueueLength,
        Rejection::QueueTokens => metrics::Rejection::QueueTokens,
        Rejection::Context => metrics::Rejection::Memory,
        Rejection::UnknownKey | Rejection::MaxTokens | Rejection::Concurrent | Rejection::Rate(_) => {
            metrics::Rejection::KeyLimit
        }
    }
}

fn finished(finish: Finish) -> FinishedReason {
    match finish {
        Finish::Eos | Finish::Complete | Finish::Stop => FinishedReason::Stop,
        Finish::Length | Finish::Context => FinishedReason::Length,
        Finish::Invalid | Finish::Failed => FinishedReason::Error,
        Finish::Interrupted | Finish::Cancelled | Finish::Deadline | Finish::QueueTimeout => FinishedReason::Abort,
    }
}
