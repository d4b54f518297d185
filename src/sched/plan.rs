//! Plan of a step: pages for decoding sequences, rows for prompts, admission.

use super::pages::pages_of;
use super::scheduler::{PREEMPTIONS, Scheduler, Sequence};
use super::{Event, Finish, Hit, LEAST_PREFILL, Micros, PAGE, PrefixCache, RequestId, Step, Work};
use std::cmp::Reverse;

impl<C: PrefixCache> Scheduler<C> {
    /// Decides the next step. If it has work, the step is in flight until `done`.
    ///
    /// # Panics
    /// A step is in flight.
    pub fn plan(&mut self, now: Micros) -> Step {
        assert!(self.flight.is_empty(), "the outcome of a step is taken before the next one is planned");
        self.expire(now);
        let most = self.options.max_step_tokens;
        let mut work = Vec::new();
        if self.options.prompts_first {
            self.read_prompts(now, most, &mut work);
        }
        if work.is_empty() {
            self.get_pages_to_decode();
            let budget = most.min(self.cost.rows_within(self.options.step).unwrap_or(most));
            work = self.decode(budget);
            let rows: u32 = work.iter().map(|(_, work)| work.rows()).sum();
            let left = if work.is_empty() { most } else { budget.saturating_sub(rows).max(LEAST_PREFILL.min(most)) };
            if !self.options.prompts_first {
                self.read_prompts(now, left, &mut work);
            }
        }
        self.flight.clone_from(&work);
        self.planned = Some(now);
        Step { work: work.into_iter().map(|(_, work)| work).collect(), events: std::mem::take(&mut self.events) }
    }

    /// Adds chunks of prompts, at most `left` rows: first those of the batch, then those of requests that enter it.
    fn read_prompts(&mut self, now: Micros, mut left: u32, work: &mut Vec<(usize, Work)>) {
        self.prefill(now, &mut left, work);
        self.admit(now, &mut left, work);
    }

    /// Ends requests whose deadline or queue timeout has passed.
    fn expire(&mut self, now: Micros) {
        while let Some(Reverse((time, id))) = self.timers.peek().copied()
            && time <= now
        {
            self.timers.pop();
            if let Some(sequence) = self.queue.waiting.get(&id) {
                let late = sequence.request.deadline.is_some_and(|deadline| deadline <= now);
                let timed_out =
                    sequence.charge.is_none() && now.saturating_sub(sequence.arrived) >= self.options.queue_timeout;
                let finish = if late { Finish::Deadline } else { Finish::QueueTimeout };
                if (late || timed_out)
                    && let Some(sequence) = self.queue.remove(id)
                {
                    self.end(&sequence, finish);
                }
                continue;
            }
            let late = |sequence: &Sequence| {
                sequence.id == id && sequence.request.deadline.is_some_and(|deadline| deadline <= now)
            };
            if let Some(at) = self.running.iter().position(late) {
                let sequence = self.running.remove(at);
                self.end(&sequence, Finish::Deadline);
            }
        }
    }

    /// Gives each decoding sequence a page for its next position. If no page is left, sequences are preempted.
    fn get_pages_to_decode(&mut self) {
        let mut at = 0;
        while at < self.running.len() {
            let sequence = &self.running[at];
            let full = sequence.decoding && !sequence.paused && sequence.computed == sequence.pages * PAGE;
            if !full {
                at += 1;
            } else if self.pool.take(1) {
                self.running[at].pages += 1;
                at += 1;
            } else {
                let victim = self.victim().expect("the sequence itself can be preempted");
                self.preempt(victim);
                // The sequence at `at` moved, or is the victim and the next one took its place.
                at -= usize::from(victim < at);
            }
        }
    }

    /// Finds the sequence to preempt: the one with the least urgent priority, and among these the youngest.
    fn victim(&self) -> Option<usize> {
        let all = self.running.iter().enumerate().filter(|(_, sequence)| sequence.preemptions < PREEMPTIONS);
        all.max_by_key(|(_, sequence)| (sequence.request.priority, sequence.id)).map(|(at, _)| at)
    }

    /// Moves a sequence back to the queue. Its full pages stay in the prefix cache until they are evicted.
    fn preempt(&mut self, at: usize) {
        let mut sequence = self.running.remove(at);
        self.pool.release(sequence.id, sequence.pages);
        (sequence.pages, sequence.computed, sequence.decoding, sequence.started) = (0, 0, false, false);
        sequence.preemptions += 1;
        self.events.push(Event::Preempted(sequence.id));
        self.queue.insert(sequence);
    }

    /// Returns the work of the decoding sequences: a token for each, and draft tokens as far as rows and pages allow.
    fn decode(&mut self, budget: u32) -> Vec<(usize, Work)> {
        let decoding = self.running.iter().filter(|sequence| sequence.decoding && !sequence.paused).count() as u32;
        let drafts = (budget / decoding.max(1)).saturating_sub(1).min(self.options.drafts);
        let mut work = Vec::with_capacity(self.running.len());
        for (at, sequence) in self.running.iter_mut().enumerate() {
            if !sequence.decoding || sequence.paused {
                continue;
            }
            let left = sequence.request.max_tokens - sequence.generated;
            let mut drafts = drafts.min(left.saturating_sub(1));
            let pages = pages_of(sequence.computed + 1 + drafts).saturating_sub(sequence.pages);
            if self.pool.take(pages) {
                sequence.pages += pages;
            } else {
                drafts = sequence.pages * PAGE - sequence.computed - 1;
            }
            let Sequence { id, computed: start, .. } = *sequence;
            work.push((at, Work { id, start, tokens: 1, drafts, decodes: true, samples: true }));
        }
        work
    }

    /// Adds chunks of the prompts of the batch, by priority and then in the order in which they entered. A prompt whose
    /// computation has not begun waits while another one of the batch computes a longer beginning of it.
    fn prefill(&mut self, now: Micros, left: &mut u32, work: &mut Vec<(usize, Work)>) {
        let (aging, most_urgent) = (self.options.aging, self.keys.most_urgent);
        let pending = self.running.iter().enumerate().filter(|(_, sequence)| !sequence.decoding);
        let mut order: Vec<(i32, usize)> =
            pending.map(|(at, sequence)| (sequence.aged(now, aging, most_urgent), at)).collect();
        order.sort_unstable();
        for (_, at) in order {
            if *left > 0 && self.start(at) {
                work.extend(chunk(&self.running[at], left, self.options.fixed_pages > 0).map(|chunk| (at, chunk)));
            }
        }
    }

    /// Returns true if the next chunk of a prompt can be computed now. Before the first one, the prefix cache is
    /// searched again.
    fn start(&mut self, at: usize) -> bool {
        let sequence = &self.running[at];
        if sequence.started {
            return true;
        }
        let (id, pages, most) = (sequence.id, sequence.pages, sequence.tokens() - 1);
        if self.pool.cache.peek(id, most).tokens > sequence.computed {
            let Hit { tokens: cached, .. } = self.pool.renew(id, most, pages);
            self.running[at].computed = cached;
            let first = self.running[at].preemptions == 0;
            if let Some(charge) = self.running[at].charge.as_mut().filter(|_| first) {
                let more = cached.saturating_sub(charge.cached);
                charge.cached = cached;
                self.keys.all[self.running[at].request.key].totals.cached += u64::from(more);
            }
            self.events.push(Event::Reused { id, cached });
        }
        let computing = self.running.iter().filter(|other| other.started && !other.decoding);
        let computing: Vec<RequestId> = computing.map(|other| other.id).collect();
        self.running[at].started = !self.pool.cache.awaits(id, &computing);
        self.running[at].started
    }

    /// Moves requests from the queue to the batch while rows are left. A request that does not fit blocks those after
    /// it, so that large requests do not starve. Only if the step would have no work, the first one that fits enters.
    fn admit(&mut self, now: Micros, left: &mut u32, work: &mut Vec<(usize, Work)>) {
        while *left > 0 && self.running.len() < self.options.max_seqs {
            let next = if work.is_empty() {
                let order = self.queue.in_order(now, self.options.aging, &self.keys);
                order.into_iter().find(|id| self.fits(&self.queue.waiting[id]))
            } else {
                let next = self.queue.next(now, self.options.aging, &self.keys);
                next.filter(|id| self.fits(&self.queue.waiting[id]))
            };
            let Some(id) = next else { break };
            if let Err(rule) = self.check_order(id, now, work.is_empty()) {
                self.broken = Some(rule);
            }
            self.enter(id);
            let at = self.running.len() - 1;
            if self.start(at) {
                work.extend(chunk(&self.running[at], left, self.options.fixed_pages > 0).map(|chunk| (at, chunk)));
            }
        }
    }

    /// Tests whether a waiting request may enter the batch: there are pages for its tokens and one more page, and 5 %
    /// of all pages remain. The share of 5 % does not apply when the batch is empty.
    pub(super) fn fits(&self, sequence: &Sequence) -> bool {
        let hit = self.pool.cache.peek(sequence.id, sequence.tokens() - 1);
        let needed = self.options.fixed_pages + (sequence.entry_pages() + 1).min(sequence.all_pages()) - hit.shared;
        let remaining = if self.running.is_empty() { 0 } else { self.options.pages / 20 };
        needed + remaining <= self.pool.counts.available()
    }

    /// Moves a request that fits from the queue to the end of the batch.
    fn enter(&mut self, id: RequestId) {
        let mut sequence = self.queue.remove(id).expect("the queue found it");
        let pages = sequence.entry_pages();
        let hit = self.pool.admit(id, sequence.tokens() - 1, pages);
        (sequence.pages, sequence.computed) = (pages, hit.tokens);
        if sequence.charge.is_none() {
            self.charge(&mut sequence, hit.tokens);
            let earlier = self.last_admitted.insert(sequence.class(), id);
            if earlier.is_some_and(|earlier| earlier > id) {
                self.broken = Some(format!("request {id} entered after {earlier:?} of the same key and priority"));
            }
        }
        self.events.push(Event::Admitted { id, cached: hit.tokens });
        self.running.push(sequence);
    }
}

/// Returns the next chunk of a prompt, at most `left` rows, which it subtracts; `None` if no row is left. If the state
/// has memory of fixed size (`fixed`), a chunk ends with the last full page that another text with this prompt could
/// reuse, because the prefix cache can keep that memory at the end of a chunk only.
fn chunk(sequence: &Sequence, left: &mut u32, fixed: bool) -> Option<Work> {
    let pending = sequence.tokens() - sequence.computed;
    let full = (sequence.tokens() - 1) / PAGE * PAGE;
    let wanted = if fixed && sequence.computed < full { full - sequence.computed } else { pending };
    let tokens = wanted.min(*left);
    *left -= tokens;
    let samples = tokens == pending && sequence.request.max_tokens > sequence.generated;
    let work = Work { id: sequence.id, start: sequence.computed, tokens, drafts: 0, decodes: false, samples };
    (tokens > 0).then_some(work)
}
