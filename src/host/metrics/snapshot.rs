//! Counters of a model at one moment, for programs in the same process.

use super::model::ModelMetrics;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of an engine since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EngineMetrics {
    /// Texts that are computed.
    pub running: u64,
    /// Texts that wait.
    pub waiting: u64,
    /// Texts that ended.
    pub finished: u64,
    /// Tokens of the prompts of all texts that began.
    pub prompt_tokens: u64,
    /// Tokens of these prompts that came from the prefix cache.
    pub cached_tokens: u64,
    /// Generated tokens.
    pub generated_tokens: u64,
    /// Draft tokens that were verified.
    pub draft_tokens: u64,
    /// Draft tokens that the model accepted.
    pub accepted_draft_tokens: u64,
    /// Steps of the model.
    pub steps: u64,
    /// Time of all steps in seconds.
    pub step_seconds: f64,
    /// Pages of keys and values that running texts use.
    pub pages_used: u64,
    /// Pages of keys and values that only the prefix cache keeps.
    pub pages_cached: u64,
}

impl ModelMetrics {
    /// Returns the counters as they are now.
    pub fn snapshot(&self) -> EngineMetrics {
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let [_, draft_tokens, accepted_draft_tokens] =
            [0, 1, 2].map(|at: usize| self.drafts[at].iter().map(count).sum());
        EngineMetrics {
            running: count(&self.running),
            waiting: count(&self.waiting),
            finished: self.finished.iter().map(count).sum(),
            prompt_tokens: count(&self.prompt_tokens),
            cached_tokens: count(&self.cached_tokens),
            generated_tokens: count(&self.generated_tokens),
            draft_tokens,
            accepted_draft_tokens,
            steps: self.step.buckets().map(|(_, steps)| steps).sum(),
            step_seconds: self.step.sum(),
            pages_used: count(&self.pages_used),
            pages_cached: count(&self.pages_cached),
        }
    }
}
