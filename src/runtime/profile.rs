//! Where does the time go? Stopwatch laps between the stages of a step, one clock reading each.
//!
//! The thread that drives the engine takes the laps: [`Profile::lap`] gives the time since the last lap to one stage.
//! What that thread waited for other threads in between is told apart, so the stages add up to the whole. A profile
//! that is switched off is one branch per lap.

use super::cpu::Cpu;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a step of generation consists of, in the order of reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Text of tokens.
    Tokenizer,
    /// Rows of the embedding.
    Embedding,
    /// The products that give queries, keys and values, and that take the attended values back.
    Projections,
    /// Rotation, the writing of keys and values, scores and weighted sums.
    Attention,
    /// The dense block, or router and experts.
    Mlp,
    /// Norms, rounding of their results to int8, and adding to the residual stream.
    Norms,
    /// Final product and its softcap.
    LmHead,
    /// The layers that lie on GPUs, and the way there and back.
    Device,
    /// Choosing tokens.
    Sampling,
    /// What the caller of [`super::generate::generate`] does with each token.
    Sink,
    /// The driving thread waited for others at the end of a parallel region.
    BarrierWait,
    /// Whatever lies between.
    Other,
}

impl Stage {
    /// Every stage, in order, with its word for reports.
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
        (Stage::Sink, "sink"),
        (Stage::BarrierWait, "barrier_wait"),
        (Stage::Other, "other"),
    ];

    /// Every stage.
    pub fn all() -> impl Iterator<Item = Stage> {
        Stage::NAMES.iter().map(|(stage, _)| *stage)
    }

    /// The word for reports.
    pub fn name(self) -> &'static str {
        Stage::NAMES[self as usize].1
    }
}

/// Time per stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stages([Duration; Stage::NAMES.len()]);

impl Stages {
    /// Time of a stage.
    pub fn get(&self, stage: Stage) -> Duration {
        self.0[stage as usize]
    }

    /// Gives time to a stage.
    pub fn add(&mut self, stage: Stage, time: Duration) {
        self.0[stage as usize] += time;
    }

    /// Adds the times of `other`.
    pub fn merge(&mut self, other: &Stages) {
        self.0.iter_mut().zip(other.0).for_each(|(own, other)| *own += other);
    }

    /// Time of all stages.
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }
}

/// The stopwatch.
#[derive(Debug)]
pub struct Profile {
    /// The threads that the driving thread waits for.
    cpu: Arc<Cpu>,
    /// The last lap, and what the driving thread had waited then; `None` when switched off.
    last: Option<(Instant, Duration)>,
    spent: Stages,
}

impl Profile {
    /// A stopwatch that is switched off, for a thread that drives `cpu`.
    pub fn new(cpu: Arc<Cpu>) -> Profile {
        Profile { cpu, last: None, spent: Stages::default() }
    }

    /// Switches the stopwatch on or off and forgets what it measured.
    pub fn restart(&mut self, on: bool) {
        self.cpu.time_waits(on);
        self.last = on.then(|| (Instant::now(), self.cpu.waited()));
        self.spent = Stages::default();
    }

    /// True when switched on.
    pub fn is_on(&self) -> bool {
        self.last.is_some()
    }

    /// Gives the time since the last lap to `stage`, and to [`Stage::BarrierWait`] what of it was waiting.
    pub fn lap(&mut self, stage: Stage) {
        let Some(last) = &mut self.last else { return };
        let now = (Instant::now(), self.cpu.waited());
        let (elapsed, waited) = (now.0 - last.0, now.1 - last.1);
        self.spent.add(stage, elapsed.saturating_sub(waited));
        self.spent.add(Stage::BarrierWait, waited);
        *last = now;
    }

    /// Hands over what was measured and goes on from zero.
    pub fn take(&mut self) -> Stages {
        std::mem::take(&mut self.spent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laps_add_up_and_waiting_is_told_apart() {
        let cpu = Arc::new(Cpu::new(2).unwrap());
        let mut profile = Profile::new(cpu.clone());
        profile.lap(Stage::Mlp);
        assert_eq!(profile.take(), Stages::default());
        let begin = Instant::now();
        profile.restart(true);
        // Each thread has one chunk; the second one takes long, and the first does not take it over while it runs.
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
