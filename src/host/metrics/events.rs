//! Data of the events that the metrics count, and the label values of their series.

use crate::runtime::Stages;
use std::time::Duration;

/// Times of a finished request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestTimes {
    /// Time from its arrival to its first admission into the batch.
    pub queue: Duration,
    /// Time from its admission to its first token.
    pub prefill: Duration,
    /// Time from its first token to its last.
    pub decode: Duration,
    /// Time from its arrival to the delivery of its last token.
    pub total: Duration,
}

/// Numbers of tokens of a finished request, all its answers together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Tokens of the prompt, those from the prefix cache included.
    pub prompt: usize,
    /// Generated tokens.
    pub generated: usize,
}

/// Work of one step of the engine.
#[derive(Debug, Clone, Copy)]
pub struct StepRecord<'a> {
    /// Prompt tokens that were computed.
    pub prompt_tokens: usize,
    /// Tokens that were chosen.
    pub generated_tokens: usize,
    /// Time of the whole step.
    pub time: Duration,
    /// Time of each stage of the step, and its hardware events; `None` unless the engine profiles.
    pub stages: Option<&'a Stages>,
}

/// Defines an enumeration whose variants are values of a label.
macro_rules! label_values {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$doc])* $variant,)*
        }

        impl $name {
            /// All values in order; `value as usize` is the position of a value.
            pub(super) const ALL: &[$name] = &[$($name::$variant,)*];

            /// Returns the value of the label.
            pub fn name(self) -> &'static str {
                match self {
                    $($name::$variant => $text,)*
                }
            }
        }
    };
}

label_values! {
    /// Reason why a request ended. The names are those of vLLM, where tool calls count as `stop`.
    FinishedReason {
        /// The model ended its answer, or a stop string was found.
        Stop = "stop",
        /// A limit of tokens was reached.
        Length = "length",
        /// The client cancelled the request or closed the connection.
        Abort = "abort",
        /// The engine failed.
        Error = "error",
    }
}

label_values! {
    /// Kind of the tokens that a key is charged for.
    TokenKind {
        /// Tokens of prompts, those from the prefix cache included.
        Prompt = "prompt",
        /// The part of the prompt tokens that came from the prefix cache.
        Cached = "cached",
        /// Generated tokens.
        Generated = "generated",
    }
}

label_values! {
    /// Phase in which a request was cancelled.
    Phase {
        /// It waited for its first admission.
        Queued = "queued",
        /// Its prompt was being computed.
        Prefill = "prefill",
        /// It was generating.
        Decode = "decode",
    }
}

label_values! {
    /// Reason why a request was not admitted. The first two names are those that vLLM proposes.
    Rejection {
        /// The queue holds as many requests as it may.
        QueueLength = "max_num_queued_reqs",
        /// The prompts in the queue have as many tokens as they may.
        QueueTokens = "max_num_queued_tokens",
        /// The request waited longer than the queue timeout.
        QueueTimeout = "queue_timeout",
        /// A limit of the client's key was reached.
        KeyLimit = "key_limit",
        /// The deadline of the request had passed.
        Deadline = "deadline",
        /// The request needs more pages than the KV cache has.
        Memory = "memory",
        /// The model is being loaded.
        Loading = "loading",
        /// The server is about to stop.
        Draining = "draining",
    }
}

label_values! {
    /// Result of looking up, writing or deleting pages of the prefix cache on disk.
    DiskPages {
        /// They were read instead of computed.
        Hit = "hit",
        /// They were looked up and not found.
        Miss = "miss",
        /// They were written.
        Written = "written",
        /// They failed verification and were deleted.
        Damaged = "damaged",
        /// They could not be written.
        Failed = "failed",
        /// They were deleted to make room.
        Evicted = "evicted",
    }
}
