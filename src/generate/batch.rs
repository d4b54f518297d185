//! Batch: the engine, driven by the scheduler. Requests come and go between steps.

use super::choices::{Choices, Errors};
use super::constrained::MaskThreads;
use super::slot::{Likely, Slot};
use super::speculate::{DraftCounts, Speculator};
use super::texts::Texts;
use super::{Completion, Event, Finish, Options, Request};
use crate::error::{Cause, Error, Result};
use crate::progress::{self, ProgressBar};
use crate::runtime::engine::Engine;
use crate::runtime::prefix_cache::{self, PrefixCache};
use crate::runtime::profile::Stage;
use crate::runtime::sequence::Feed;
use crate::sched::{self, Cost, Micros, Outcome, PageCounts, Rejection, RequestId, Scheduler, Work};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

/// Largest number of tokens per step while a progress bar for long prompts is visible.
const PIECE: usize = 128;

/// Number of pages that the scheduler counts with if the pool has no budget.
const UNLIMITED: u32 = u32::MAX / 4;

/// Place of a request in the order of service.
#[derive(Debug, Clone, Copy, Default)]
pub struct Terms {
    /// Key that the request counts for; the first one has number 0.
    pub key: sched::KeyId,
    /// Priority; lower values are served first.
    pub priority: i32,
    /// Time at which the request ends if it has not ended before.
    pub deadline: Option<Micros>,
    /// True for a further answer to the request before it, which a limit of requests per time does not count.
    pub further: bool,
}

/// Requests that are computed together by one engine. Each gets the tokens that it would get alone.
pub struct Batch<'a> {
    pub(super) scheduler: Scheduler<Texts<'a>>,
    /// Requests that have not been in a step.
    waiting: BTreeMap<RequestId, (usize, Request)>,
    /// Texts that have been in a step.
    pub(super) slots: HashMap<RequestId, Slot>,
    pub(super) masks: MaskThreads,
    /// Requests whose readers are slow.
    pub(super) paused: HashSet<RequestId>,
    /// Requests that wait for a mask.
    pub(super) masked: HashSet<RequestId>,
    choices: Choices,
    bar: Option<ProgressBar>,
    /// Whether no progress bar is shown.
    hidden: bool,
}

/// Result of a step.
#[derive(Debug, Default)]
pub struct StepReport {
    /// Work of the step; empty if there was nothing to compute.
    pub work: Vec<Work>,
    /// Result of each work item.
    pub outcomes: Vec<Outcome>,
    /// Rows and time of the step.
    pub cost: Cost,
    /// Whether the step computed parts of prompts.
    pub reads: bool,
    /// Requests that ended, with their texts.
    pub ended: Vec<(RequestId, Completion)>,
    /// Changes of requests in their order.
    pub events: Vec<sched::Event>,
    /// Draft tokens that the step verified.
    pub drafts: DraftCounts,
}

impl<'a> Batch<'a> {
    /// Creates a batch without keys. Its texts use `prefixes`, a prefix cache of this engine, if there is one. Pages,
    /// context and the largest number of tokens of a step are those of the engine, whatever `limits` says.
    pub fn new(engine: &Engine, prefixes: Option<&'a mut PrefixCache>, limits: sched::Options) -> Batch<'a> {
        let pools = engine.pools();
        let limits = sched::Options {
            max_step_tokens: count(engine.step_rows()),
            pages: engine.most_pages().map_or(UNLIMITED, count),
            fixed_pages: count(prefix_cache::snapshot_pages(&pools)),
            ctx: count(engine.context()),
            ..limits
        };
        Batch {
            scheduler: Scheduler::new(limits, Texts::new(prefixes)),
            waiting: BTreeMap::new(),
            slots: HashMap::new(),
            masks: MaskThreads::default(),
            paused: HashSet::new(),
            masked: HashSet::new(),
            choices: Choices::default(),
            bar: None,
            hidden: false,
        }
    }

    /// Shows no progress bar for prompts.
    pub fn hide_progress(&mut self) {
        self.hidden = true;
    }

    /// Returns the limits in force.
    pub fn limits(&self) -> &sched::Options {
        self.scheduler.options()
    }

    /// Adds a key.
    pub fn add_key(&mut self, limits: sched::KeyLimits) -> sched::KeyId {
        self.scheduler.add_key(limits)
    }

    /// Replaces the limits of a key, and enables it if it is disabled. What it has used of its limits per time stays
    /// used.
    ///
    /// # Panics
    /// There is no such key, or the weight is not positive.
    pub fn set_key(&mut self, now: Micros, key: sched::KeyId, limits: sched::KeyLimits) {
        self.scheduler.set_key(now, key, limits);
    }

    /// Disables a key: its accepted requests end normally, new ones are refused with [`Rejection::UnknownKey`].
    ///
    /// # Panics
    /// There is no such key.
    pub fn disable_key(&mut self, key: sched::KeyId) {
        self.scheduler.disable_key(key);
    }

    /// Returns the use of a key at a time, if there is such a key.
    pub fn key_usage(&self, now: Micros, key: sched::KeyId) -> Option<sched::KeyUsage> {
        self.scheduler.key_usage(now, key)
    }

    /// Adds the use of a key in an earlier run to that of this one: its tokens of the day and its totals.
    ///
    /// # Panics
    /// There is no such key.
    pub fn restore_usage(&mut self, now: Micros, key: sched::KeyId, usage: &sched::KeyUsage) {
        self.scheduler.restore_usage(now, key, usage);
    }

    /// Queues a request that [`check`](super::check) allows, and returns its number. `index` is the number that events
    /// of its tokens carry; it also selects the random numbers of a request without a seed.
    ///
    /// # Errors
    /// A limit of the queue, of the key or of memory does not allow the request.
    pub fn arrive(
        &mut self,
        engine: &Engine,
        now: Micros,
        index: usize,
        request: Request,
        terms: Terms,
    ) -> std::result::Result<RequestId, Rejection> {
        let prompt = request.ids.len();
        let most = request.max_new.min((engine.context() + 1).saturating_sub(prompt));
        let Terms { key, priority, deadline, further } = terms;
        let (prompt_tokens, max_tokens) = (count(prompt), count(most));
        let queued = sched::Request { key, priority, prompt: prompt_tokens, max_tokens, deadline, further };
        let id = self.scheduler.arrive(now, queued)?;
        let known = request.known(engine);
        let (owner, reads) = (request.owner(engine), request.score.is_none());
        self.scheduler.cache().add(id, &request.ids, &owner, known, prompt + most, reads);
        self.scheduler.charge_time(id, micros(request.spent));
        self.waiting.insert(id, (index, request));
        Ok(id)
    }

    /// Ends a request with [`Finish::Cancelled`]. The next step reports it.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        self.scheduler.cancel(id)
    }

    /// Returns true if no request is waiting or running.
    pub fn is_empty(&self) -> bool {
        self.scheduler.waiting() + self.scheduler.running() == 0
    }

    /// Returns the number of requests that wait for a slot.
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// Returns true if no request is in the batch; some may wait for a slot.
    pub fn is_idle(&self) -> bool {
        self.scheduler.running() == 0
    }

    /// Returns the number of prompt tokens of the requests that wait for a slot.
    pub fn waiting_tokens(&self) -> u64 {
        self.scheduler.waiting_tokens()
    }

    /// Sets the largest number of prompt tokens of all waiting requests.
    pub fn limit_queue(&mut self, tokens: u64) {
        self.scheduler.limit_queue(tokens);
    }

    /// Returns the number of requests in the batch.
    pub fn running(&self) -> usize {
        self.scheduler.running()
    }

    /// Returns the time at which the next deadline or queue timeout passes: a step is due then, even if there is
    /// nothing to compute.
    pub fn next_timer(&self) -> Option<Micros> {
        self.scheduler.next_timer()
    }

    /// Returns the prefix cache, if there is one, for what concerns its pages on disk.
    pub fn prefixes(&mut self) -> Option<&mut PrefixCache> {
        self.scheduler.cache().prefixes.as_deref_mut()
    }

    /// Empties the prefix cache, on disk too, except for pages that requests use.
    pub fn flush_prefixes(&mut self) {
        self.scheduler.clear_cache();
        self.prefixes().into_iter().for_each(PrefixCache::clear_disk);
    }

    /// Returns the scheduler's count of pages.
    pub fn pages(&self) -> PageCounts {
        self.scheduler.pages()
    }

    /// Tests the invariants of the scheduler.
    ///
    /// # Errors
    /// Describes the first invariant that does not hold.
    pub fn check(&self) -> std::result::Result<(), String> {
        self.scheduler.check()
    }

    /// Computes one step and calls `sink` with each new token.
    ///
    /// A text that cannot be computed ends alone, with the error in its completion.
    ///
    /// # Errors
    /// `sink` fails, the draft model fails, or the user interrupts. The batch must then be dropped, or after an
    /// interrupt continued with [`Batch::interrupt`].
    pub fn step(
        &mut self,
        engine: &mut Engine,
        speculator: &mut Speculator,
        now: Micros,
        options: &Options<'_>,
        sink: &mut dyn FnMut(&Event<'_>) -> Result<()>,
    ) -> Result<StepReport> {
        self.show_prompts(engine);
        let sched::Step { work, events } = self.plan(now);
        let mut report = StepReport { reads: work.iter().any(|work| !work.decodes), work, ..StepReport::default() };
        self.apply(engine, &events, options, &mut report)?;
        report.events = events;
        if report.work.is_empty() {
            return Ok(report);
        }
        let begin = Instant::now();
        let mut failed: HashMap<RequestId, Completion> = HashMap::new();
        let mut active: Vec<(Work, Slot)> = Vec::with_capacity(report.work.len());
        for work in &report.work {
            match self.slot(engine, work, options) {
                Ok(slot) => active.push((*work, slot)),
                Err(completion) => _ = failed.insert(work.id, *completion),
            }
        }
        if active.iter().any(|(_, slot)| !slot.sequence.adapters.is_empty()) {
            // Texts with the same adapters share the products with their factors if they follow one another.
            active.sort_by_cached_key(|(_, slot)| slot.sequence.adapters.key());
        }
        let done = self.compute(engine, speculator, &mut active, options, sink);
        let outcomes: HashMap<RequestId, Outcome> = match &done {
            Ok((_, outcomes, _)) => active.iter().map(|(work, _)| work.id).zip(outcomes.iter().copied()).collect(),
            Err(_) => HashMap::new(),
        };
        for (work, slot) in active {
            if slot.fills_pages(&work) {
                self.scheduler.cache().pass(work.id, slot.read_ids(), || slot.sequence.share());
            }
            self.slots.insert(work.id, slot);
        }
        let (rows, _, drafts) = done?;
        report.drafts = drafts;
        for work in &report.work {
            let spent = self.slots.get_mut(&work.id).map_or(Duration::ZERO, Slot::take_mask_time);
            self.scheduler.charge_time(work.id, micros(spent));
        }
        let outcome = |work: &Work| outcomes.get(&work.id).copied().unwrap_or(Outcome::Failed);
        let outcomes: Vec<Outcome> = report.work.iter().map(outcome).collect();
        report.cost = Cost { rows: count(rows), time: micros(begin.elapsed()) };
        let events = self.scheduler.done(report.cost, &outcomes);
        report.outcomes = outcomes;
        report.work.iter().for_each(|work| self.scheduler.cache().drop_state(work.id));
        report.ended.extend(failed);
        self.apply(engine, &events, options, &mut report)?;
        report.events.extend(events);
        Ok(report)
    }

    /// Ends all requests where they are, with [`Finish::Interrupted`], and returns their texts. The batch may be used
    /// again, also after a step that an interrupt has ended.
    ///
    /// # Errors
    /// The end of a text cannot be decoded.
    pub fn interrupt(&mut self, options: &Options<'_>) -> Result<Vec<Completion>> {
        self.scheduler.end_all();
        self.paused.clear();
        self.masked.clear();
        self.bar = None;
        let mut texts = Vec::new();
        for (id, slot) in self.slots.drain() {
            self.scheduler.cache().remove(id);
            texts.push(slot.complete(options, Finish::Interrupted)?);
        }
        for (id, (index, request)) in std::mem::take(&mut self.waiting) {
            self.scheduler.cache().remove(id);
            texts.push(Completion::without_text(index, request.ids.len(), Finish::Interrupted, None));
        }
        Ok(texts)
    }

    /// Shows a progress bar while prompts are computed, in steps of at most [`PIECE`] tokens.
    fn show_prompts(&mut self, engine: &Engine) {
        if !self.hidden && self.bar.is_none() && self.scheduler.has_prompts() {
            let entering = self.waiting.values().take(self.scheduler.vacancies());
            let waiting: usize = entering.map(|(_, request)| request.ids.len() - request.known(engine)).sum();
            let unread: usize = self.slots.values().map(|slot| slot.unread().len()).sum();
            self.bar = Some(progress::items("prompt", (waiting + unread) as u64));
        }
        let shown = self.bar.as_ref().is_some_and(|bar| !bar.is_hidden());
        let most = if shown { engine.step_rows().min(PIECE) } else { engine.step_rows() };
        self.scheduler.limit_step(count(most));
    }

    /// Applies changes of requests: preempted texts lose their keys and values, ended ones are completed.
    fn apply(
        &mut self,
        engine: &Engine,
        events: &[sched::Event],
        options: &Options<'_>,
        report: &mut StepReport,
    ) -> Result<()> {
        for event in events {
            match *event {
                sched::Event::Preempted(id) => {
                    if let Some(slot) = self.slots.get_mut(&id) {
                        slot.replace(engine.new_sequence()?);
                    }
                    if let Some((_, request)) = self.waiting.get_mut(&id) {
                        request.prefix = None;
                    }
                }
                sched::Event::Ended { id, finish } => {
                    self.scheduler.cache().remove(id);
                    self.paused.remove(&id);
                    self.masked.remove(&id);
                    let finish = ending(finish);
                    if let Some(slot) = self.slots.remove(&id) {
                        report.ended.push((id, slot.complete(options, finish)?));
                    } else if let Some((index, request)) = self.waiting.remove(&id) {
                        report.ended.push((id, Completion::without_text(index, request.ids.len(), finish, None)));
                    }
                }
                sched::Event::Admitted { .. } | sched::Event::Reused { .. } => {}
            }
        }
        Ok(())
    }

    /// Takes the text of a work item out of the batch, ready to be computed from the first token of the work. If it
    /// cannot be created, returns its completion.
    fn slot(
        &mut self,
        engine: &Engine,
        work: &Work,
        options: &Options<'_>,
    ) -> std::result::Result<Slot, Box<Completion>> {
        let (index, prompt, made) = match (self.slots.remove(&work.id), self.waiting.remove(&work.id)) {
            (Some(slot), _) => (slot.index, slot.prompt_tokens, Ok(slot)),
            (None, Some((index, request))) => {
                (index, request.ids.len(), Slot::new(engine, index, request, options, &mut self.masks))
            }
            (None, None) => unreachable!("request {} has work and no text", work.id),
        };
        let made = made.and_then(|mut slot| {
            let start = work.start as usize;
            if let Some((hit, state)) = self.scheduler.cache().take_hit(work.id)
                && slot.sequence.len() < start
            {
                slot.replace(engine.resume(state, &slot.ids[..hit.tokens], slot.ids.len())?);
            }
            if slot.sequence.len() != start {
                let found = format!("found {} computed tokens, expected {start}", slot.sequence.len());
                return Err(Error::engine(found).tensor(format!("request {}", work.id)));
            }
            slot.begin();
            Ok(slot)
        });
        made.map_err(|error| Box::new(Completion::without_text(index, prompt, Finish::Failed, Some(error))))
    }

    /// Computes the work of a step, and returns the number of rows, the outcomes and the numbers of draft tokens.
    fn compute(
        &mut self,
        engine: &mut Engine,
        speculator: &mut Speculator,
        active: &mut [(Work, Slot)],
        options: &Options<'_>,
        sink: &mut dyn FnMut(&Event<'_>) -> Result<()>,
    ) -> Result<(usize, Vec<Outcome>, DraftCounts)> {
        let drafts = draft(engine, speculator, active)?;
        engine.lap(Stage::Other);
        let begin = Instant::now();
        for ((_, slot), draft) in active.iter_mut().zip(&drafts).filter(|(_, draft)| !draft.is_empty()) {
            // The state returns to this point if the first token of the draft is rejected.
            slot.sequence.mark();
            slot.ids.extend(draft);
        }
        self.choices.begin(engine, speculator.width() > 0);
        let (mut errors, mut last_rows) = self.choices.score_prompts(engine, active)?;
        errors.extend(self.run(engine, active)?);
        let decodes = active.iter().all(|(work, _)| work.decodes);
        if decodes && !speculator.is_off() {
            speculator.observe(self.choices.rows(), begin.elapsed());
        }
        self.advance_bar(active);
        let (mut outcomes, mut taken, mut followed) = (Vec::with_capacity(active.len()), 0, 0);
        let (mut computed, mut counts) = (0, DraftCounts::default());
        for (i, ((work, slot), draft)) in active.iter_mut().zip(&drafts).enumerate() {
            computed += work.tokens as usize + draft.len();
            if let Some(error) = errors.remove(&i) {
                slot.fail(draft.len(), error);
                outcomes.push(Outcome::Failed);
                continue;
            }
            let row = last_rows.remove(&i);
            let rows: Vec<Likely<'_>> = match &row {
                Some(row) => vec![Likely::All(row)],
                None if slot.scores(work) => Vec::new(),
                None => {
                    let count = slot.rows(work, draft.len());
                    taken += count;
                    self.choices.rows_from(taken - count, count)
                }
            };
            let (start, end) = (work.start as usize, slot.sequence.len());
            outcomes.push(take(slot, work, rows, draft, engine, options, sink)?);
            counts.add(&slot.take_drafts());
            if speculator.width() > 0 && !slot.scores(work) {
                let computed = &self.choices.hidden()[followed..][..(end - start) * speculator.width()];
                followed += computed.len();
                slot.follow(speculator, start, computed)?;
            }
            if slot.finish.is_some_and(|finish| finish != Finish::Failed) {
                speculator.keep(&slot.owner, &slot.ids);
            }
        }
        Ok((computed, outcomes, counts))
    }

    /// Runs the engine for all texts but those of [`Choices::score_prompts`]. If that fails for another reason than an
    /// interrupt, runs each text alone, and returns the errors of those that fail, by index. If memory is missing, the
    /// prefix cache is emptied first.
    fn run(&mut self, engine: &mut Engine, active: &mut [(Work, Slot)]) -> Result<Errors> {
        let mut active: Vec<(usize, &mut (Work, Slot))> =
            active.iter_mut().enumerate().filter(|(_, (work, slot))| !slot.scores(work)).collect();
        let suffices = active.iter().try_fold(1, |most, (_, (_, slot))| Some(slot.suffices()?.max(most)));
        loop {
            let mut feeds: Vec<Feed<'_>> = active.iter_mut().map(|(_, (work, slot))| slot.feed(work)).collect();
            match self.choices.make(engine, &mut feeds, suffices) {
                Ok(()) => return Ok(HashMap::new()),
                Err(e) if e.is_interrupt() => return Err(e),
                Err(e) => {
                    // A call of the engine changes nothing if it fails, but an earlier one may have succeeded.
                    active.iter_mut().for_each(|(_, (work, slot))| slot.rewind(work));
                    self.choices.clear(engine);
                    if !is_memory(&e) || !self.scheduler.clear_cache() {
                        break;
                    }
                }
            }
        }
        let mut errors = HashMap::new();
        for (i, (work, slot)) in active {
            match self.choices.make(engine, &mut [slot.feed(work)], suffices) {
                Err(e) if e.is_interrupt() => return Err(e),
                Err(e) => _ = errors.insert(i, e),
                Ok(()) => {}
            }
        }
        Ok(errors)
    }

    /// Counts computed tokens of prompts, and removes the bar before text is shown.
    fn advance_bar(&mut self, active: &[(Work, Slot)]) {
        let prompts = active.iter().filter(|(work, _)| !work.decodes);
        self.bar.iter().for_each(|bar| bar.inc(prompts.clone().map(|(work, _)| u64::from(work.tokens)).sum()));
        if active.iter().any(|(work, _)| work.samples) {
            self.bar = None;
        }
    }
}

impl Drop for Batch<'_> {
    /// Ends all requests, so that none uses the prefix cache any more. After a panic the counts may be wrong, and a
    /// second panic would end the process.
    fn drop(&mut self) {
        self.slots.clear();
        if !std::thread::panicking() {
            self.scheduler.end_all();
        }
    }
}

fn micros(time: Duration) -> Micros {
    Micros::try_from(time.as_micros()).unwrap_or(Micros::MAX)
}

/// Converts a count that the scheduler keeps in 32 bits.
fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn is_memory(error: &Error) -> bool {
    matches!(error.cause(), Cause::OutOfMemory(_))
}

/// Returns the reason in the completion for a reason of the scheduler. Texts that reached their end have one of their
/// own.
fn ending(finish: sched::Finish) -> Finish {
    match finish {
        sched::Finish::Stop | sched::Finish::Length => Finish::Length,
        sched::Finish::Cancelled => Finish::Cancelled,
        sched::Finish::Deadline => Finish::Deadline,
        sched::Finish::QueueTimeout => Finish::QueueTimeout,
        sched::Finish::Failed => Finish::Failed,
    }
}

/// Drafts tokens for the texts that decode, as many as the scheduler allows each.
fn draft(engine: &Engine, speculator: &mut Speculator, active: &mut [(Work, Slot)]) -> Result<Vec<Vec<u32>>> {
    let mut drafts = vec![Vec::new(); active.len()];
    if speculator.is_off() {
        return Ok(drafts);
    }
    let decoding = active.iter_mut().enumerate().filter(|(_, (work, _))| work.decodes);
    let (places, mut texts): (Vec<usize>, Vec<_>) =
        decoding.map(|(i, (work, slot))| (i, slot.text_so_far(engine, work.drafts as usize))).unzip();
    if !texts.is_empty() {
        for (place, draft) in places.into_iter().zip(speculator.draft_tokens(&mut texts)?) {
            drafts[place] = draft;
        }
    }
    Ok(drafts)
}

/// Takes the new tokens of a text from its rows. Errors of the text end it alone; errors of `sink` are returned.
fn take(
    slot: &mut Slot,
    work: &Work,
    rows: Vec<Likely<'_>>,
    draft: &[u32],
    engine: &mut Engine,
    options: &Options<'_>,
    sink: &mut dyn FnMut(&Event<'_>) -> Result<()>,
) -> Result<Outcome> {
    if !work.samples {
        return Ok(Outcome::Tokens(0));
    }
    let (before, mut refused) = (slot.generated(), false);
    let mut shown = |event: &Event<'_>| sink(event).inspect_err(|_| refused = true);
    let done = slot.take_drafted(rows.into_iter(), draft, engine, options, &mut shown);
    let new = count(slot.generated() - before);
    match done {
        Err(e) if refused => Err(e),
        Err(e) => {
            slot.fail(0, e);
            Ok(Outcome::Failed)
        }
        Ok(()) if slot.finish.is_some() => Ok(Outcome::Stopped(new)),
        Ok(()) => Ok(Outcome::Tokens(new)),
    }
}
