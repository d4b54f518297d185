//! Data that callers and the scheduler exchange: requests, steps, outcomes, events.

use super::Micros;

/// Number of a request. The scheduler assigns the numbers in the order of arrival.
pub type RequestId = u64;

/// Number of a key: its index in the order of [`Scheduler::add_key`](super::Scheduler::add_key).
pub type KeyId = usize;

/// Request to generate tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Key that the request counts for.
    pub key: KeyId,
    /// Priority; lower values are served first. The key bounds it.
    pub priority: i32,
    /// Tokens of the prompt, at least one.
    pub prompt: u32,
    /// Largest number of tokens of the answer; 0 only computes the prompt.
    pub max_tokens: u32,
    /// Time at which the request ends with [`Finish::Deadline`], if it is still waiting or running.
    pub deadline: Option<Micros>,
    /// True for a further answer to the request before it, which a limit of requests per time does not count.
    pub further: bool,
}

/// Reason why a request is refused at arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rejection {
    /// The queue has its largest number of requests.
    QueueFull,
    /// The waiting prompts have their largest number of tokens.
    QueueTokens,
    /// The prompt is empty, or prompt and answer exceed the context or all pages.
    Context,
    /// The key has no such number.
    UnknownKey,
    /// The answer may be longer than the key allows.
    MaxTokens,
    /// The key has its largest number of unfinished requests.
    Concurrent,
    /// A limit of requests or tokens per time is reached. The request fits after this time; `None`: it is larger than
    /// the limit.
    Rate(Option<Micros>),
}

/// Reason why an accepted request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The engine reported the end of the answer.
    Stop,
    /// The answer has its largest number of tokens.
    Length,
    /// The caller cancelled the request.
    Cancelled,
    /// The deadline of the request passed.
    Deadline,
    /// The request waited longer than the queue timeout.
    QueueTimeout,
    /// The engine could not compute this sequence.
    Failed,
}

/// Change of a request that the caller must act on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The request entered the batch; `cached` tokens of its prompt need not be computed.
    Admitted {
        /// Request that entered.
        id: RequestId,
        /// Tokens at the start whose keys and values come from the prefix cache.
        cached: u32,
    },
    /// Before the first step of a request in the batch, other requests have computed more of its beginning: `cached`
    /// tokens of its prompt need not be computed.
    Reused {
        /// Request in the batch.
        id: RequestId,
        /// Tokens at the start whose keys and values come from the prefix cache.
        cached: u32,
    },
    /// The request left the batch because no page was left; it is queued again and will be recomputed.
    Preempted(RequestId),
    /// The request ended. This is the last event of each accepted request.
    Ended {
        /// Request that ended.
        id: RequestId,
        /// Reason of the end.
        finish: Finish,
    },
}

/// Work of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Request to compute.
    pub id: RequestId,
    /// Position of the first token to compute.
    pub start: u32,
    /// Tokens to compute: a chunk of the prompt, or 1 when the sequence decodes.
    pub tokens: u32,
    /// Largest number of draft tokens to verify after them.
    pub drafts: u32,
    /// True if the sequence decodes: the token to compute is the last one of its answer.
    pub decodes: bool,
    /// True if a token is sampled after the last one. False within a prompt, and for requests without an answer.
    pub samples: bool,
}

impl Work {
    /// Returns the largest number of rows of this work.
    pub fn rows(&self) -> u32 {
        self.tokens + self.drafts
    }
}

/// Next step of the engine.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Step {
    /// Work items; at most one for each sequence. If there are none, no step is in flight and `done` is not called.
    pub work: Vec<Work>,
    /// Changes of requests since the last call of `plan` or `done`, in their order.
    pub events: Vec<Event>,
}

/// Measured cost of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Rows that the engine computed, draft tokens included.
    pub rows: u32,
    /// Time that the step took.
    pub time: Micros,
}

/// Outcome of one work item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// New tokens of the answer: 0 if the work does not sample, otherwise 1 and the accepted draft tokens.
    Tokens(u32),
    /// New tokens of the answer, the last of which ended it.
    Stopped(u32),
    /// The sequence could not be computed; the others of the step are not affected.
    Failed,
}
