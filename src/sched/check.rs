//! Check of the invariants of the scheduler.

use super::scheduler::{PREEMPTIONS, Scheduler, Sequence};
use super::{Micros, PAGE, PrefixCache, RequestId};
use std::collections::BTreeMap;

impl<C: PrefixCache> Scheduler<C> {
    /// Tests the invariants. The check takes time in proportion to the batch, the lists of the queue and the
    /// keys, so that a simulation can call it after every event.
    ///
    /// # Errors
    /// Describes the first invariant that does not hold.
    pub fn check(&self) -> Result<(), String> {
        self.check_pages()?;
        self.check_requests()?;
        self.check_keys()?;
        if let Some(now) = self.planned {
            self.check_plan(now)?;
        }
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// Tests that no waiting request should enter the batch before `id`. More urgent ones come first, with each `aging`
    /// of waiting counted as one priority, so waiting is bounded; among equal ones, the key with the least service;
    /// then the earliest. In a step without other work (`skips`), requests for which pages are missing are passed over.
    pub(super) fn check_order(&self, id: RequestId, now: Micros, skips: bool) -> Result<(), String> {
        let rank = |sequence: &Sequence| {
            let priority = sequence.aged(now, self.options.aging, self.keys.most_urgent);
            (priority, self.keys.all[sequence.request.key].counter, sequence.id)
        };
        let own = rank(&self.queue.waiting[&id]);
        let is_before = |other: &&Sequence| {
            let other = rank(other);
            other.0 < own.0 || other.0 == own.0 && (other.1 < own.1 || other.1 == own.1 && other.2 < own.2)
        };
        let firsts = self.queue.classes.values().filter_map(|list| list.front()).map(|id| &self.queue.waiting[id]);
        let passed = firsts.filter(is_before).find(|other| !skips || self.fits(other));
        passed.map_or(Ok(()), |passed| Err(format!("request {id} entered before request {}", passed.id)))
    }

    /// Tests that free, used and cached pages are all pages, and that each used page has a sequence.
    fn check_pages(&self) -> Result<(), String> {
        let counts = self.pool.counts;
        let sum = u64::from(counts.free) + u64::from(counts.used) + u64::from(counts.cached);
        ensure(sum == u64::from(self.options.pages), || {
            format!("{counts:?}: expected a sum of {} pages", self.options.pages)
        })?;
        let (idle, repeated) = (self.pool.cache.idle(), self.pool.cache.repeated_uses());
        ensure(counts.cached == idle, || format!("{counts:?}: the prefix cache has {idle} unused pages"))?;
        let uses: u32 = self.running.iter().map(|sequence| sequence.pages + self.options.fixed_pages).sum();
        ensure(counts.used + repeated == uses, || {
            format!("{counts:?}: sequences use {uses} pages, {repeated} of them repeatedly")
        })?;
        let short = self.running.iter().find(|sequence| sequence.computed > sequence.pages * PAGE);
        short.map_or(Ok(()), |sequence| Err(format!("request {}: too few pages", sequence.id)))
    }

    /// Tests that each request is in one place, that cancelled ones leave with the step, and that preemption ends.
    fn check_requests(&self) -> Result<(), String> {
        let (running, waiting) = (self.running.len() as u64, self.queue.waiting.len() as u64);
        ensure(self.accepted == self.ended + running + waiting, || {
            format!("{} accepted, {} ended, {running} running, {waiting} waiting", self.accepted, self.ended)
        })?;
        ensure(self.running.len() <= self.options.max_seqs, || format!("{running} sequences in the batch"))?;
        for sequence in &self.running {
            let id = sequence.id;
            ensure(!(sequence.cancelled && self.flight.is_empty()), || format!("request {id}: cancelled, not ended"))?;
            ensure(sequence.preemptions <= PREEMPTIONS, || format!("request {id}: preempted again"))?;
        }
        Ok(())
    }

    /// Tests that each key counts its requests, and that what is left of its limits is within them.
    fn check_keys(&self) -> Result<(), String> {
        let mut unfinished = BTreeMap::new();
        let lists = self.queue.classes.iter().map(|((key, _), list)| (*key, list.len()));
        let running = self.running.iter().map(|sequence| (sequence.request.key, 1));
        lists.chain(running).for_each(|(key, count)| *unfinished.entry(key).or_insert(0) += count);
        self.keys.check(&unfinished)
    }

    /// Tests a plan: all decoding sequences advance, no step is idle while a request fits, no wait exceeds the timeout.
    fn check_plan(&self, now: Micros) -> Result<(), String> {
        let reading = self.options.prompts_first && self.flight.iter().any(|(at, _)| !self.running[*at].decoding);
        let ready = self.running.iter().filter(|sequence| sequence.decoding && !sequence.paused).count();
        let advancing = self.flight.iter().filter(|(at, _)| self.running[*at].decoding).count();
        ensure(ready == advancing || reading && advancing == 0, || {
            format!("{advancing} of {ready} decoding sequences advance")
        })?;
        let firsts = || self.queue.classes.values().filter_map(|list| list.front()).map(|id| &self.queue.waiting[id]);
        if self.flight.is_empty() {
            let pending = self.running.iter().any(|sequence| !sequence.decoding);
            let fits = self.running.len() < self.options.max_seqs && firsts().any(|sequence| self.fits(sequence));
            ensure(!pending && !fits, || "the step is idle while a request fits".to_string())?;
        }
        let late = |waited: Micros| waited >= self.options.queue_timeout;
        let late = firsts().find(|first| first.charge.is_none() && late(now.saturating_sub(first.arrived)));
        late.map_or(Ok(()), |first| Err(format!("request {}: waits longer than the queue timeout", first.id)))
    }
}

fn ensure(holds: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(message()) }
}
