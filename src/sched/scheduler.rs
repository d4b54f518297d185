//! State of the scheduler, and the calls that change requests: arrival, cancellation, the outcome of a step.

use super::cost::CostModel;
use super::keys::Keys;
use super::pages::{Pool, pages_of};
use super::queue::{Class, Queue};
use super::{
    Cost, Event, Finish, KeyId, KeyLimits, KeyUsage, Micros, Options, Outcome, PAGE, PageCounts, PrefixCache,
    Rejection, Request, RequestId, Work,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Number of preemptions after which a sequence enters the batch only with all pages that it may need. It then never
/// asks for a page and is never preempted again.
pub const PREEMPTIONS: u8 = 2;

/// Accepted request that has not ended.
#[derive(Debug)]
pub struct Sequence {
    pub id: RequestId,
    /// The request, with its priority within the bound of its key.
    pub request: Request,
    pub arrived: Micros,
    /// Tokens of the answer so far.
    pub generated: u32,
    /// Positions whose keys and values are computed.
    pub computed: u32,
    /// Pages that the sequence uses; 0 while it waits.
    pub pages: u32,
    pub preemptions: u8,
    /// True when only the last generated token is not computed yet.
    pub decoding: bool,
    /// True once a step has computed a part of the sequence since it entered the batch.
    pub started: bool,
    /// True while the reader of the answer is too slow: the sequence keeps its pages and does not decode.
    pub paused: bool,
    /// True when the request is cancelled and its step is not done yet.
    pub cancelled: bool,
    /// Charge of the key when the sequence entered the batch for the first time.
    pub charge: Option<Charge>,
}

/// Charge for a request in the counter of its key.
#[derive(Debug, Clone, Copy)]
pub struct Charge {
    /// Cost that was added to the counter, before division by the weight.
    booked: f64,
    /// Weight of the key at that time.
    weight: f64,
    /// Cached tokens of the prompt, which cost nothing.
    pub cached: u32,
    /// Cost of a token of the answer.
    output_weight: f64,
}

impl Sequence {
    /// Returns the list of the queue that the sequence belongs to.
    pub fn class(&self) -> Class {
        (self.request.key, self.request.priority)
    }

    /// Counts the tokens of prompt and answer so far.
    pub fn tokens(&self) -> u32 {
        self.request.prompt + self.generated
    }

    /// Counts the pages of the longest possible sequence. The last token of the answer is never computed.
    pub fn all_pages(&self) -> u32 {
        pages_of(self.request.prompt + self.request.max_tokens.saturating_sub(1))
    }

    /// Counts the pages that the sequence gets when it enters the batch.
    pub fn entry_pages(&self) -> u32 {
        if self.preemptions < PREEMPTIONS { pages_of(self.tokens()) } else { self.all_pages() }
    }

    /// Returns the priority, raised by one for each `aging` of waiting, but not beyond the most urgent one of all keys.
    /// Requests that have reached it are in the order of fair share.
    pub fn aged(&self, now: Micros, aging: Micros, most_urgent: i32) -> i32 {
        let raised = now.saturating_sub(self.arrived).checked_div(aging).unwrap_or(0);
        let raised = i64::try_from(raised).unwrap_or(i64::MAX);
        let aged = i64::from(self.request.priority).saturating_sub(raised).max(i64::from(most_urgent));
        i32::try_from(aged).unwrap_or(self.request.priority)
    }
}

/// Scheduler of one engine. The module describes its use.
#[derive(Debug)]
pub struct Scheduler<C> {
    pub(super) options: Options,
    pub(super) keys: Keys,
    pub(super) queue: Queue,
    /// Sequences in the batch, in the order in which they entered.
    pub(super) running: Vec<Sequence>,
    pub(super) pool: Pool<C>,
    pub(super) cost: CostModel,
    /// Work of the step in flight, with indices of `running`.
    pub(super) flight: Vec<(usize, Work)>,
    /// Events since the last call of `plan` or `done`.
    pub(super) events: Vec<Event>,
    /// Times of queue timeouts and deadlines. Entries of ended requests are skipped when their time comes.
    pub(super) timers: BinaryHeap<Reverse<(Micros, RequestId)>>,
    pub(super) accepted: u64,
    pub(super) ended: u64,
    /// Number of the last request of each class that entered the batch for the first time.
    pub(super) last_admitted: BTreeMap<Class, RequestId>,
    /// Description of a broken rule that only shows while the state changes.
    pub(super) broken: Option<String>,
    /// Time of the last call of `plan`, until the next call of another function changes the state.
    pub(super) planned: Option<Micros>,
}

impl<C: PrefixCache> Scheduler<C> {
    /// Creates a scheduler without keys.
    pub fn new(options: Options, cache: C) -> Scheduler<C> {
        Scheduler {
            pool: Pool::new(options.pages, options.fixed_pages, cache),
            options,
            keys: Keys::default(),
            queue: Queue::default(),
            running: Vec::new(),
            cost: CostModel::default(),
            flight: Vec::new(),
            events: Vec::new(),
            timers: BinaryHeap::new(),
            accepted: 0,
            ended: 0,
            last_admitted: BTreeMap::new(),
            broken: None,
            planned: None,
        }
    }

    /// Adds a key.
    pub fn add_key(&mut self, limits: KeyLimits) -> KeyId {
        self.keys.add(limits)
    }

    /// Replaces the limits of a key, and enables it if it is disabled. What it has used of its limits per time stays
    /// used, up to the new limits; accepted requests keep their priorities and lengths.
    ///
    /// # Panics
    /// There is no such key, or the weight is not positive.
    pub fn set_key(&mut self, now: Micros, key: KeyId, limits: KeyLimits) {
        self.planned = None;
        self.keys.set(now, key, limits);
    }

    /// Disables a key: its accepted requests end normally, new ones are refused with [`Rejection::UnknownKey`].
    ///
    /// # Panics
    /// There is no such key.
    pub fn disable_key(&mut self, key: KeyId) {
        self.planned = None;
        self.keys.disable(key);
    }

    /// Returns the use of a key at a time, if there is such a key.
    pub fn key_usage(&self, now: Micros, key: KeyId) -> Option<KeyUsage> {
        self.keys.usage(now, key)
    }

    /// Adds the use of a key in an earlier run to that of this one: its tokens of the day and its totals.
    ///
    /// # Panics
    /// There is no such key.
    pub fn restore_usage(&mut self, now: Micros, key: KeyId, usage: &KeyUsage) {
        self.keys.restore(now, key, usage);
    }

    /// Queues a request and returns its number.
    ///
    /// # Errors
    /// A limit of the queue, of the key or of memory does not allow the request.
    pub fn arrive(&mut self, now: Micros, mut request: Request) -> Result<RequestId, Rejection> {
        let longest = u64::from(request.prompt) + u64::from(request.max_tokens.saturating_sub(1));
        let pages = longest.div_ceil(u64::from(PAGE)) + u64::from(self.options.fixed_pages);
        if request.prompt == 0 || longest > u64::from(self.options.ctx) || pages > u64::from(self.options.pages) {
            return Err(Rejection::Context);
        }
        if self.queue.waiting.len() >= self.options.max_queue {
            return Err(Rejection::QueueFull);
        }
        if self.queue.tokens.saturating_add(u64::from(request.prompt)) > self.options.max_queue_tokens {
            return Err(Rejection::QueueTokens);
        }
        self.keys.enter(now, &request)?;
        self.planned = None;
        request.priority = request.priority.max(self.keys.all[request.key].limits.max_priority);
        let id = self.accepted;
        self.accepted += 1;
        self.timers.push(Reverse((now.saturating_add(self.options.queue_timeout), id)));
        self.timers.extend(request.deadline.map(|deadline| Reverse((deadline, id))));
        self.queue.insert(Sequence {
            id,
            request,
            arrived: now,
            generated: 0,
            computed: 0,
            pages: 0,
            preemptions: 0,
            decoding: false,
            started: false,
            paused: false,
            cancelled: false,
            charge: None,
        });
        Ok(id)
    }

    /// Ends a request: at once if no step is in flight or the request is waiting, otherwise when the step is done.
    /// Returns false if no unfinished request has this number.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        self.planned = None;
        if let Some(sequence) = self.queue.remove(id) {
            self.end(&sequence, Finish::Cancelled);
            return true;
        }
        let Some(at) = self.running.iter().position(|sequence| sequence.id == id) else { return false };
        if self.flight.is_empty() {
            let sequence = self.running.remove(at);
            self.end(&sequence, Finish::Cancelled);
        } else {
            self.running[at].cancelled = true;
        }
        true
    }

    /// Stops (`true`) or continues the decoding of a request whose reader is slow. Other requests are not affected.
    pub fn pause(&mut self, id: RequestId, paused: bool) {
        self.planned = None;
        let running = self.running.iter_mut().find(|sequence| sequence.id == id);
        if let Some(sequence) = running.or_else(|| self.queue.waiting.get_mut(&id)) {
            sequence.paused = paused;
        }
    }

    /// Charges the key of a request for time that was spent for it outside of the steps, such as the masks of
    /// its tokens.
    pub fn charge_time(&mut self, id: RequestId, time: Micros) {
        let running = self.running.iter().find(|sequence| sequence.id == id);
        if let Some(sequence) = running.or_else(|| self.queue.waiting.get(&id)) {
            let (key, cost) = (sequence.request.key, self.cost.rows_of(time));
            if cost > 0.0 {
                self.planned = None;
                self.keys.charge(key, cost);
            }
        }
    }

    /// Takes the outcome of the step in flight, one for each work item in their order, and returns what happened to
    /// requests. A missing outcome counts as a failure of its sequence.
    pub fn done(&mut self, cost: Cost, outcomes: &[Outcome]) -> Vec<Event> {
        self.planned = None;
        let flight = std::mem::take(&mut self.flight);
        let decode_only = flight.iter().all(|(at, _)| self.running[*at].decoding);
        if !flight.is_empty() {
            self.cost.observe(cost.rows, decode_only, cost.time);
        }
        let mut finished: Vec<(usize, Finish)> = Vec::new();
        for (i, (at, work)) in flight.iter().enumerate() {
            let outcome = outcomes.get(i).copied().unwrap_or(Outcome::Failed);
            finished.extend(self.advance(*at, work, outcome).map(|finish| (*at, finish)));
        }
        for (at, _) in self.running.iter().enumerate().filter(|(_, sequence)| sequence.cancelled) {
            finished.retain(|(other, _)| *other != at);
            finished.push((at, Finish::Cancelled));
        }
        finished.sort_unstable_by_key(|(at, _)| Reverse(*at));
        for (at, finish) in finished {
            let sequence = self.running.remove(at);
            self.end(&sequence, finish);
        }
        std::mem::take(&mut self.events)
    }

    /// Applies the outcome of a work item, and returns the reason if the sequence ends.
    fn advance(&mut self, at: usize, work: &Work, outcome: Outcome) -> Option<Finish> {
        let sequence = &mut self.running[at];
        let (tokens, stopped) = match outcome {
            Outcome::Tokens(tokens) => (tokens, false),
            Outcome::Stopped(tokens) => (tokens, true),
            Outcome::Failed => return Some(Finish::Failed),
        };
        let left = sequence.request.max_tokens - sequence.generated;
        let tokens = if work.samples { tokens.clamp(1, work.drafts + 1).min(left) } else { 0 };
        let (full_pages, was_decoding) = (sequence.computed / PAGE, sequence.decoding);
        if sequence.decoding {
            sequence.computed += tokens;
        } else {
            sequence.computed += work.tokens;
            sequence.decoding = sequence.computed == sequence.tokens();
        }
        sequence.generated += tokens;
        self.keys.all[sequence.request.key].totals.generated += u64::from(tokens);
        if sequence.computed / PAGE > full_pages {
            self.pool.fill(sequence.id, sequence.computed);
        }
        if !was_decoding && sequence.decoding {
            self.pool.share_tail(sequence.id, sequence.computed);
        }
        let complete = sequence.decoding && sequence.generated == sequence.request.max_tokens;
        match () {
            () if stopped => Some(Finish::Stop),
            () if complete => Some(Finish::Length),
            () => None,
        }
    }

    /// Releases what a request holds, and reports its end. The sequence is in neither the queue nor the batch.
    pub(super) fn end(&mut self, sequence: &Sequence, finish: Finish) {
        if sequence.pages > 0 {
            self.pool.release(sequence.id, sequence.pages);
        }
        let correction = sequence.charge.map_or(0.0, |charge| {
            let computed = if sequence.generated > 0 { sequence.request.prompt } else { sequence.computed };
            let prompt = computed.min(sequence.request.prompt).saturating_sub(charge.cached);
            let cost = f64::from(prompt) + charge.output_weight * f64::from(sequence.generated);
            (cost - charge.booked) / charge.weight
        });
        let key = sequence.request.key;
        self.keys.leave(key, sequence.request.max_tokens - sequence.generated, correction);
        if matches!(finish, Finish::Stop | Finish::Length) {
            self.keys.observe(key, sequence.generated);
        }
        self.ended += 1;
        self.events.push(Event::Ended { id: sequence.id, finish });
    }

    /// Charges the key of a sequence that enters the batch for the first time.
    pub(super) fn charge(&mut self, sequence: &mut Sequence, cached: u32) {
        let output_weight = self.cost.output_weight();
        let Request { key, prompt, max_tokens, .. } = sequence.request;
        let answer = output_weight * self.keys.expected(key, max_tokens);
        let booked = f64::from(prompt.saturating_sub(cached)) + answer;
        let weight = self.keys.charge(key, booked);
        sequence.charge = Some(Charge { booked, weight, cached, output_weight });
        let totals = &mut self.keys.all[key].totals;
        totals.prompt += u64::from(prompt);
        totals.cached += u64::from(cached);
    }

    /// Ends all requests, also those of a step in flight, without events.
    pub fn end_all(&mut self) {
        self.flight.clear();
        for sequence in std::mem::take(&mut self.running) {
            self.end(&sequence, Finish::Cancelled);
        }
        let waiting: Vec<RequestId> = self.queue.waiting.keys().copied().collect();
        for sequence in waiting.into_iter().filter_map(|id| self.queue.remove(id)).collect::<Vec<_>>() {
            self.end(&sequence, Finish::Cancelled);
        }
        self.events.clear();
    }

    /// Limits the tokens of the following steps.
    pub fn limit_step(&mut self, tokens: u32) {
        self.options.max_step_tokens = tokens.max(1);
    }

    /// Sets the largest number of prompt tokens of all waiting requests.
    pub fn limit_queue(&mut self, tokens: u64) {
        self.options.max_queue_tokens = tokens;
    }

    /// Returns the limits in force.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Returns the number of sequences that may still enter the batch.
    pub fn vacancies(&self) -> usize {
        self.options.max_seqs - self.running.len()
    }

    /// Returns true if the next step may compute prompts: one of the batch is not complete, or another one may enter.
    pub fn has_prompts(&self) -> bool {
        self.running.iter().any(|sequence| !sequence.decoding) || self.waiting() > 0 && self.vacancies() > 0
    }

    /// Empties the prefix cache except for pages that sequences use; returns false if there are no others. Without a
    /// budget of pages, this gives memory back when the machine has none left.
    pub fn clear_cache(&mut self) -> bool {
        self.pool.clear_cache()
    }

    /// Returns the time of the next queue timeout or deadline, at which `plan` is to be called even if nothing else
    /// happens.
    pub fn next_timer(&self) -> Option<Micros> {
        self.timers.peek().map(|Reverse((time, _))| *time)
    }

    /// Counts the pages by state.
    pub fn pages(&self) -> PageCounts {
        self.pool.counts
    }

    /// Counts the waiting requests.
    pub fn waiting(&self) -> usize {
        self.queue.waiting.len()
    }

    /// Counts the prompt tokens of the waiting requests.
    pub fn waiting_tokens(&self) -> u64 {
        self.queue.tokens
    }

    /// Counts the sequences in the batch.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Returns the counter of fair share of a key: cost of its requests, in prompt tokens, divided by its weight.
    pub fn counter(&self, key: KeyId) -> f64 {
        self.keys.all[key].counter
    }

    /// Returns true if a request of the key is waiting.
    pub fn is_backlogged(&self, key: KeyId) -> bool {
        self.queue.classes.range((key, i32::MIN)..=(key, i32::MAX)).next().is_some()
    }

    /// Returns the prefix cache, for the registration of prompts.
    pub fn cache(&mut self) -> &mut C {
        &mut self.pool.cache
    }
}
