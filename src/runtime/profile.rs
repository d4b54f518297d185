//! Profiling: measures the time of each stage of a step with one clock reading at the end of the stage.
//!
//! The driving thread, which is the one that calls the engine, calls [`Profile::lap`] at the end of each stage. This
//! adds the time since the last call to that stage, except for the time in which the driving thread waited for other
//! threads: that is a stage of its own, so all stages add up to the whole time. A disabled profile costs one branch per
//! call.
//!
//! Where the machine has hardware counters and the system allows to read them, each lap also reads those of the driving
//! thread. The other threads work in the same stage at the same time and have about the same counts.

use super::cpu::Cpu;
use super::cpu::counters::{Counters, Counts};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Stages of generation, in the order of reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Conversion of tokens to text.
    Tokenizer,
    /// Reading rows of the embedding.
    Embedding,
    /// Products that compute queries, keys and values, and the output projection of attention.
    Projections,
    /// Rotary position embedding, writing of keys and values, scores, and weighted sums of values.
    Attention,
    /// The dense MLP, or router and experts.
    Mlp,
    /// Norms, rounding of their results to the forms that products read, and adding to the residual stream.
    Norms,
    /// Product with the output matrix, and softcap of the logits.
    LmHead,
    /// Layers on GPUs, transfers included.
    Device,
    /// Choice of tokens.
    Sampling,
    /// The callback `sink` of [`crate::generate::generate`], which receives each token.
    Sink,
    /// Waiting of the driving thread for other threads at the end of a parallel region.
    BarrierWait,
    /// Everything else.
    Other,
}

impl Stage {
    /// Returns the stage of the arithmetic between products of this stage.
    pub fn before(self) -> Stage {
        if self == Stage::Projections { Stage::Attention } else { self }
    }

    /// All stages, in order, with their names in reports.
    const NAMES: [(Stage, &str); 12] = [
        (Stage::Tokenizer, "tokenizer"),
        (Stage::Embedding, "embedding"),
        (Stage::Projections, "projections"),
        (Stage::Attention, "attention"),
        (Stage::Mlp, "mlp"),
        (Stage::Norms, "norms"),
        (Stage::LmHead, "lm_head"),
        (Stage::Device, "device"),
        (Stage::Sampling, "sampling"),
        (Stage::Sink, "output"),
        (Stage::BarrierWait, "barrier_wait"),
        (Stage::Other, "other"),
    ];

    /// Returns all stages in order.
    pub fn all() -> impl Iterator<Item = Stage> {
        Stage::NAMES.iter().map(|(stage, _)| *stage)
    }

    /// Returns the stage's name in reports.
    pub fn name(self) -> &'static str {
        Stage::NAMES[self as usize].1
    }
}

/// Time per stage, and hardware events of the driving thread where they were counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stages {
    times: [Duration; Stage::NAMES.len()],
    counts: Option<[Counts; Stage::NAMES.len()]>,
}

impl Stages {
    /// Returns the time of a stage.
    pub fn get(&self, stage: Stage) -> Duration {
        self.times[stage as usize]
    }

    /// Returns the hardware events of a stage; `None` if they were not counted. [`Stage::BarrierWait`] has none: the
    /// events of waiting count for the stage that waits.
    pub fn counts(&self, stage: Stage) -> Option<Counts> {
        self.counts.map(|counts| counts[stage as usize])
    }

    /// Adds time to a stage.
    pub fn add(&mut self, stage: Stage, time: Duration) {
        self.times[stage as usize] += time;
    }

    /// Adds hardware events to a stage.
    pub fn add_counts(&mut self, stage: Stage, counts: &Counts) {
        self.counts.get_or_insert_default()[stage as usize].add(counts);
    }

    /// Adds the times and events of `other`.
    pub fn merge(&mut self, other: &Stages) {
        self.times.iter_mut().zip(other.times).for_each(|(own, other)| *own += other);
        for stage in Stage::all() {
            other.counts(stage).iter().for_each(|counts| self.add_counts(stage, counts));
        }
    }

    /// Returns the total time of all stages.
    pub fn total(&self) -> Duration {
        self.times.iter().sum()
    }
}

/// Stopwatch for the stages of an engine.
#[derive(Debug)]
pub struct Profile {
    /// Threads that the driving thread waits for.
    cpu: Arc<Cpu>,
    /// Time of the last lap and the waiting time up to then; `None` when disabled.
    last: Option<(Instant, Duration)>,
    /// Counters of the driving thread and their values at the last lap; `None` when disabled or not available.
    counters: Option<(Counters, Counts)>,
    spent: Stages,
}

impl Profile {
    /// Creates a disabled stopwatch for a thread that drives `cpu`.
    pub fn new(cpu: Arc<Cpu>) -> Profile {
        Profile { cpu, last: None, counters: None, spent: Stages::default() }
    }

    /// Enables or disables the stopwatch and discards its measurements. The calling thread becomes the driving one,
    /// whose hardware events are counted.
    pub fn restart(&mut self, on: bool) {
        self.cpu.time_waits(on);
        self.counters = on.then(Counters::open).and_then(|opened| opened.ok()).map(|open| (open, Counts::default()));
        self.last = on.then(|| (Instant::now(), self.cpu.waited()));
        self.spent = Stages::default();
    }

    /// Returns true when the stopwatch is enabled.
    pub fn is_on(&self) -> bool {
        self.last.is_some()
    }

    /// Adds the time since the last lap to `stage`, except for waiting time, which is added to
    /// [`Stage::BarrierWait`].
    pub fn lap(&mut self, stage: Stage) {
        let Some(last) = &mut self.last else { return };
        let now = (Instant::now(), self.cpu.waited());
        let (elapsed, waited) = (now.0 - last.0, now.1 - last.1);
        self.spent.add(stage, elapsed.saturating_sub(waited));
        self.spent.add(Stage::BarrierWait, waited);
        *last = now;
        if let Some((counters, last)) = &mut self.counters
            && let Some(now) = counters.read()
        {
            self.spent.add_counts(stage, &now.since(last));
            *last = now;
        }
    }

    /// Returns the measurements and resets them to zero.
    pub fn take(&mut self) -> Stages {
        std::mem::take(&mut self.spent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_added_per_stage() {
        let counts = Counts { instructions: 30, cycles: 20, cache_misses: 1 };
        let mut stages = Stages::default();
        stages.merge(&Stages::default());
        assert_eq!(stages.counts(Stage::Mlp), None, "times alone are no events");
        let mut more = Stages::default();
        more.add_counts(Stage::Mlp, &counts);
        stages.merge(&more);
        stages.merge(&more);
        assert_eq!(stages.counts(Stage::Mlp), Some(Counts { instructions: 60, cycles: 40, cache_misses: 2 }));
        assert_eq!(stages.counts(Stage::Norms), Some(Counts::default()));
    }

    #[test]
    fn laps_add_up_and_waiting_is_told_apart() {
        let cpu = Arc::new(Cpu::new(2).unwrap());
        let mut profile = Profile::new(cpu.clone());
        profile.lap(Stage::Mlp);
        assert_eq!(profile.take(), Stages::default());
        let begin = Instant::now();
        profile.restart(true);
        // Each thread has one chunk. The chunk of 25 ms runs on the other thread, so the driving thread waits for it.
        let slept = |i: usize, _: &mut [u8]| std::thread::sleep(Duration::from_millis(if i == 0 { 5 } else { 25 }));
        cpu.for_chunks(&mut [0; 2], 1, slept);
        profile.lap(Stage::Attention);
        profile.lap(Stage::Other);
        let elapsed = begin.elapsed();
        let stages = profile.take();
        assert!(stages.total() <= elapsed && stages.total() >= Duration::from_millis(25));
        assert!(stages.get(Stage::Attention) >= Duration::from_millis(5));
        assert_eq!(stages.total() - stages.get(Stage::Other), {
            stages.get(Stage::Attention) + stages.get(Stage::BarrierWait)
        });
        assert_eq!(profile.take(), Stages::default());
    }

    #[test]
    fn every_stage_has_its_own_place_and_name() {
        for (i, stage) in Stage::all().enumerate() {
            assert_eq!(stage as usize, i);
            assert!(Stage::all().take(i).all(|other| other.name() != stage.name()));
        }
    }
}
