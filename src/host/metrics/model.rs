//! Recorder of one model's events. The engine thread and the handlers of requests call it; it never waits for a reader.
//!
//! All counts are relaxed atomics: each is exact, and two counts read at the same time may differ by the events of that
//! moment. The only lock is held for the copy of a few names of adapters.

use super::buckets;
use super::events::{DiskPages, FinishedReason, Phase, Rejection, RequestTimes, StepRecord, TokenCounts};
use super::histogram::Histogram;
use crate::generate::speculate::{DraftCounts, Drafter};
use crate::runtime::Stage;
use crate::runtime::cpu::counters::Counts as Events;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Hardware events of a stage in all steps: instructions, cycles, and misses of the last-level cache.
#[derive(Debug, Default)]
pub(super) struct StageEvents([AtomicU64; 3]);

impl StageEvents {
    fn add(&self, counts: &Events) {
        let counts = [counts.instructions, counts.cycles, counts.cache_misses];
        self.0.iter().zip(counts).for_each(|(sum, count)| _ = sum.fetch_add(count, Ordering::Relaxed));
    }

    /// Returns the names of the events, and their numbers.
    pub(super) fn named(&self) -> impl Iterator<Item = (&'static str, &AtomicU64)> {
        ["instructions", "cycles", "cache_misses"].into_iter().zip(&self.0)
    }
}

/// Facts about a model that its metrics show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    /// Served name.
    pub name: String,
    /// Largest number of tokens of a prompt and its answer.
    pub max_model_len: usize,
    /// Positions of a page of the KV cache.
    pub page_tokens: usize,
    /// Pages of the KV cache.
    pub pages: usize,
}

/// One count per value of a label.
type Counts<const VALUES: usize> = [AtomicU64; VALUES];

/// Adapters in use, as the labels of one series.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct AdapterSets {
    /// Largest number of adapters in memory.
    pub(super) max: usize,
    /// Names of adapters of running requests, separated by commas.
    pub(super) running: String,
    /// Names of adapters of waiting requests, separated by commas.
    pub(super) waiting: String,
    /// Unix time of the last report in seconds.
    pub(super) time: f64,
}

/// Metrics of one model.
#[derive(Debug)]
pub struct ModelMetrics {
    pub(super) name: String,
    pub(super) page_tokens: AtomicU64,
    pub(super) pages_total: AtomicU64,
    pub(super) running: AtomicU64,
    pub(super) waiting: AtomicU64,
    pub(super) pages_free: AtomicU64,
    pub(super) pages_used: AtomicU64,
    pub(super) pages_cached: AtomicU64,
    pub(super) prompt_tokens: AtomicU64,
    pub(super) cached_tokens: AtomicU64,
    pub(super) generated_tokens: AtomicU64,
    pub(super) prefix_queries: AtomicU64,
    pub(super) prefix_hits: AtomicU64,
    pub(super) preemptions: AtomicU64,
    /// Drafts, their tokens, and those of them that were accepted.
    pub(super) drafts: [Counts<{ Drafter::ALL.len() }>; 3],
    pub(super) finished: Counts<{ FinishedReason::ALL.len() }>,
    pub(super) rejections: Counts<{ Rejection::ALL.len() }>,
    pub(super) cancelled: Counts<{ Phase::ALL.len() }>,
    pub(super) disk_pages: Counts<{ DiskPages::ALL.len() }>,
    /// Tensors that are as recorded, and that differ.
    pub(super) checked_tensors: Counts<2>,
    pub(super) first_token: Histogram,
    pub(super) between_tokens: Histogram,
    pub(super) per_output_token: Histogram,
    pub(super) total: Histogram,
    pub(super) queue: Histogram,
    pub(super) prefill: Histogram,
    pub(super) decode: Histogram,
    pub(super) request_prompt_tokens: Histogram,
    pub(super) request_generated_tokens: Histogram,
    pub(super) step_tokens: Histogram,
    pub(super) step: Histogram,
    /// Times of the stages of steps, with their names.
    pub(super) stages: Vec<(&'static str, Histogram)>,
    /// Hardware events of the stages, in the same order.
    pub(super) stage_events: Vec<StageEvents>,
    pub(super) adapters: Mutex<Option<AdapterSets>>,
}

impl ModelMetrics {
    pub(super) fn new(info: &ModelInfo) -> ModelMetrics {
        let tokens = || Histogram::tokens(buckets::tokens_up_to(info.max_model_len));
        let latency = || Histogram::seconds(buckets::LATENCY);
        let step = || Histogram::seconds(buckets::STEP);
        ModelMetrics {
            name: info.name.clone(),
            page_tokens: AtomicU64::new(info.page_tokens as u64),
            pages_total: AtomicU64::new(info.pages as u64),
            running: AtomicU64::default(),
            waiting: AtomicU64::default(),
            pages_free: AtomicU64::new(info.pages as u64),
            pages_used: AtomicU64::default(),
            pages_cached: AtomicU64::default(),
            prompt_tokens: AtomicU64::default(),
            cached_tokens: AtomicU64::default(),
            generated_tokens: AtomicU64::default(),
            prefix_queries: AtomicU64::default(),
            prefix_hits: AtomicU64::default(),
            preemptions: AtomicU64::default(),
            drafts: Default::default(),
            finished: Default::default(),
            rejections: Default::default(),
            cancelled: Default::default(),
            disk_pages: Default::default(),
            checked_tensors: Default::default(),
            first_token: Histogram::seconds(buckets::FIRST_TOKEN),
            between_tokens: Histogram::seconds(buckets::BETWEEN_TOKENS),
            per_output_token: Histogram::seconds(buckets::BETWEEN_TOKENS),
            total: latency(),
            queue: latency(),
            prefill: latency(),
            decode: latency(),
            request_prompt_tokens: tokens(),
            request_generated_tokens: tokens(),
            step_tokens: Histogram::tokens(buckets::STEP_TOKENS),
            step: step(),
            stages: Stage::all().map(|stage| (stage.name(), step())).collect(),
            stage_events: Stage::all().map(|_| StageEvents::default()).collect(),
            adapters: Mutex::new(None),
        }
    }

    /// Replaces the number and size of the pages, after the engine was opened again.
    pub(super) fn set_pages(&self, info: &ModelInfo) {
        self.page_tokens.store(info.page_tokens as u64, Ordering::Relaxed);
        self.pages_total.store(info.pages as u64, Ordering::Relaxed);
    }

    /// Counts the first admission of a request into the batch. `cached_tokens` of its `prompt_tokens` come from the
    /// prefix cache. Not to be called again when a request returns after a preemption.
    pub fn request_admitted(&self, prompt_tokens: usize, cached_tokens: usize) {
        add(&self.prompt_tokens, prompt_tokens);
        add(&self.cached_tokens, cached_tokens);
    }

    /// Counts a look-up in the prefix cache: `hit_tokens` of the `queried_tokens` were found.
    pub fn prefix(&self, queried_tokens: usize, hit_tokens: usize) {
        add(&self.prefix_queries, queried_tokens);
        add(&self.prefix_hits, hit_tokens);
    }

    /// Counts the first token of a request, this long after its arrival.
    pub fn first_token(&self, ttft: Duration) {
        self.first_token.observe(ttft);
    }

    /// Counts a later token of a request, this long after the one before it.
    pub fn token(&self, itl: Duration) {
        self.between_tokens.observe(itl);
    }

    /// Counts a request that ended in another way than by [`ModelMetrics::cancelled`].
    pub fn request_finished(&self, times: &RequestTimes, reason: FinishedReason, tokens: TokenCounts) {
        add(&self.finished[reason as usize], 1);
        self.total.observe(times.total);
        self.queue.observe(times.queue);
        self.prefill.observe(times.prefill);
        self.decode.observe(times.decode);
        self.request_prompt_tokens.observe_tokens(tokens.prompt);
        self.request_generated_tokens.observe_tokens(tokens.generated);
        if let Some(later @ 1..) = tokens.generated.checked_sub(1) {
            let per_token = times.decode.as_nanos() / later as u128;
            self.per_output_token.observe(Duration::from_nanos(u64::try_from(per_token).unwrap_or(u64::MAX)));
        }
    }

    /// Counts a step of the engine.
    pub fn step(&self, step: &StepRecord<'_>) {
        add(&self.generated_tokens, step.generated_tokens);
        self.step_tokens.observe_tokens(step.prompt_tokens.saturating_add(step.generated_tokens));
        self.step.observe(step.time);
        if let Some(stages) = step.stages {
            for (stage, ((_, histogram), events)) in Stage::all().zip(self.stages.iter().zip(&self.stage_events)) {
                let time = stages.get(stage);
                if !time.is_zero() {
                    histogram.observe(time);
                }
                if let Some(counts) = stages.counts(stage) {
                    events.add(&counts);
                }
            }
        }
    }

    /// Counts a request that was not admitted.
    pub fn rejected(&self, reason: Rejection) {
        add(&self.rejections[reason as usize], 1);
    }

    /// Counts a request that its client cancelled. It also counts as a request that ended by
    /// [`FinishedReason::Abort`], without times.
    pub fn cancelled(&self, phase: Phase) {
        add(&self.cancelled[phase as usize], 1);
        add(&self.finished[FinishedReason::Abort as usize], 1);
    }

    /// Reports the pages of the KV cache: free ones, those that hold running sequences, and those that only the prefix
    /// cache keeps.
    pub fn pages(&self, free: usize, used: usize, cached: usize) {
        self.pages_free.store(free as u64, Ordering::Relaxed);
        self.pages_used.store(used as u64, Ordering::Relaxed);
        self.pages_cached.store(cached as u64, Ordering::Relaxed);
    }

    /// Reports the number of requests in the batch and of those that wait for a place in it.
    pub fn queue(&self, running: usize, waiting: usize) {
        self.running.store(running as u64, Ordering::Relaxed);
        self.waiting.store(waiting as u64, Ordering::Relaxed);
    }

    /// Counts a preemption: a sequence gave up its pages and waits again.
    pub fn preempted(&self) {
        add(&self.preemptions, 1);
    }

    /// Counts drafts of a step, and what became of their tokens.
    pub fn drafts(&self, counts: &DraftCounts) {
        for (drafter, count) in counts.each() {
            let counts = [count.drafts, count.tokens, count.accepted];
            self.drafts.iter().zip(counts).for_each(|(sums, count)| add(&sums[drafter as usize], count));
        }
    }

    /// Counts pages of the prefix cache on disk.
    pub fn disk_pages(&self, result: DiskPages, pages: usize) {
        add(&self.disk_pages[result as usize], pages);
    }

    /// Counts a tensor that was compared with its recorded hash.
    pub fn checked_tensor(&self, is_same: bool) {
        add(&self.checked_tensors[usize::from(!is_same)], 1);
    }

    /// Reports the adapters that running and waiting requests use; at most `max` adapters are in memory. The series
    /// with the earlier names vanishes.
    pub fn lora(&self, max: usize, running: &[&str], waiting: &[&str]) {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let sets = AdapterSets { max, running: running.join(","), waiting: waiting.join(","), time };
        *self.adapters.lock().unwrap_or_else(PoisonError::into_inner) = Some(sets);
    }
}

fn add(count: &AtomicU64, more: usize) {
    count.fetch_add(more as u64, Ordering::Relaxed);
}
