//! Scheduler: decides which sequence computes how many tokens in the next step of the engine.
//!
//! The scheduler is a state machine without clock, threads and input or output. Times are microseconds that the caller
//! passes in, so a server and a simulation drive the same code:
//!
//! ```text
//! arrive(now, request)  a request is queued or refused
//! cancel(now, id)       a request ends within one step
//! plan(now) -> Step     the work of the next step, and what happened to requests
//! done(now, ...)        the measured time of the step and the outcome of each work item
//! ```
//!
//! Between `plan` and `done` a step is in flight: its pages stay allocated until `done`. A step mixes decoding and
//! chunks of prompts (continuous batching, chunked prefill). Pages of 128 positions are counted here: every page is
//! free, used by a sequence, or kept in the prefix cache only. [`PrefixCache`] is the interface to that cache.
//! [`Scheduler::check`] tests the invariants that docs/guide/scheduler.md lists.

mod check;
mod cost;
#[cfg(test)]
mod key_tests;
mod keys;
mod pages;
mod plan;
mod queue;
mod request;
mod scheduler;
pub mod sim;
#[cfg(test)]
mod tests;

pub use keys::{KeyLimits, KeyUsage};
pub use pages::{Hit, NoCache, PageCounts, PrefixCache, Released};
pub use request::{Cost, Event, Finish, KeyId, Outcome, Rejection, Request, RequestId, Step, Work};
pub use scheduler::Scheduler;

/// Time in microseconds since a moment that the caller chooses.
pub type Micros = u64;

/// Microseconds of a second.
pub const SECOND: Micros = 1_000_000;

/// Positions of a page of the KV cache.
pub const PAGE: u32 = 128;

/// Smallest number of prompt tokens that a step computes when a prompt waits for prefill.
const LEAST_PREFILL: u32 = 32;

/// Limits of the scheduler. [`Options::with_pages`] has the default values.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Largest number of sequences in the batch.
    pub max_seqs: usize,
    /// Largest number of tokens (rows) of a step.
    pub max_step_tokens: u32,
    /// Time that a step with decoding sequences may take.
    pub step: Micros,
    /// Largest number of waiting requests.
    pub max_queue: usize,
    /// Largest number of prompt tokens of all waiting requests.
    pub max_queue_tokens: u64,
    /// Time after which a request that was never in the batch ends with [`Finish::QueueTimeout`].
    pub queue_timeout: Micros,
    /// Time of waiting that raises a request by one priority.
    pub aging: Micros,
    /// Number of pages for the states of sequences.
    pub pages: u32,
    /// Number of pages that the state of a sequence takes whatever its length, besides those of its positions.
    pub fixed_pages: u32,
    /// Largest number of positions of a sequence: prompt and answer, except the last token of the answer, whose keys
    /// and values are never computed.
    pub ctx: u32,
    /// Largest number of draft tokens that a decoding sequence may verify in a step.
    pub drafts: u32,
    /// Whether no sequence decodes while a prompt can be computed. This suits a fixed list of requests: it takes no
    /// longer, and the times of prompts and of answers can be measured apart.
    pub prompts_first: bool,
}

impl Options {
    /// Returns the default limits for a KV cache of `pages` pages and sequences of at most `ctx` positions.
    pub fn with_pages(pages: u32, ctx: u32) -> Options {
        Options {
            max_seqs: 32,
            max_step_tokens: 512,
            step: 200_000,
            max_queue: 256,
            max_queue_tokens: u64::MAX,
            queue_timeout: 60 * SECOND,
            aging: 10 * SECOND,
            pages,
            fixed_pages: 0,
            ctx,
            drafts: 0,
            prompts_first: false,
        }
    }
}
