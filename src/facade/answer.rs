//! Answers of an [`Engine`](super::Engine).

use crate::api::answer::stop_reason;
use crate::generate::sampler::Candidate;
use crate::generate::{Completion, Finish, Likelihood};
use serde::Serialize;
use serde_json::Value;

/// Answer to a request.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Answer {
    /// Texts: those of the first prompt come first.
    pub choices: Vec<Choice>,
    /// Number of tokens.
    pub usage: UsageCounts,
    /// Seed of the first text. The seeds of the others follow it.
    pub seed: u64,
    /// Paths of parts of JSON schemas that could not be enforced.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignored: Vec<String>,
}

impl Answer {
    /// Returns the text of the first choice.
    pub fn text(&self) -> &str {
        self.choices.first().map_or("", |choice| &choice.text)
    }
}

/// A text of an answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Choice {
    /// Number of the choice: that of the prompt times `n`, plus that among the texts of the prompt.
    pub index: usize,
    /// The text; of a conversation, the content without reasoning and calls.
    pub text: String,
    /// Reasoning before the answer to a conversation.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reasoning: String,
    /// Calls of tools that the model asks for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolUse>,
    /// Generated tokens, with that which ended the text.
    pub tokens: Vec<TokenInfo>,
    /// Tokens of the prompt but the first, if the request asks for their probabilities.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prompt_tokens: Vec<TokenInfo>,
    /// Reason why the text ended; `None` while it is generated.
    pub finish: Option<FinishReason>,
    /// Stop text, or stop token of the request, that ended the text; null if the model did.
    pub stop_reason: Value,
}

/// A call of a tool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ToolUse {
    /// Id to which the result refers.
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// Arguments: a JSON text.
    pub arguments: String,
}

/// A token.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TokenInfo {
    /// Id.
    pub id: u32,
    /// Natural logarithm of its probability before sampling, if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprob: Option<f64>,
    /// Most likely tokens at its place with their log-probabilities, most likely first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<(u32, f64)>,
}

impl TokenInfo {
    pub(super) fn of(id: u32, likely: Option<&Likelihood>) -> TokenInfo {
        let top = |(_, top): &Likelihood| top.iter().map(|one: &Candidate| (one.id, one.logprob)).collect();
        TokenInfo { id, logprob: likely.map(|(own, _)| own.logprob), top: likely.map(top).unwrap_or_default() }
    }
}

/// Reason why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishReason {
    /// The model ended it, a stop text appeared, or it satisfies its constraint.
    Stop,
    /// It has its largest number of tokens, or the context is full.
    Length,
    /// The model waits for the results of tools.
    ToolCalls,
    /// The caller cancelled it.
    Cancelled,
}

impl FinishReason {
    /// Returns the name in the APIs of the server, and `cancelled`.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
            FinishReason::Cancelled => "cancelled",
        }
    }
}

/// Number of tokens of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UsageCounts {
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Tokens of all answers.
    pub completion_tokens: usize,
    /// Tokens of the prompts that came from the prefix cache.
    pub cached_tokens: usize,
}

impl Choice {
    /// Takes the end of the text. `stop_ids` are the tokens of the request that end it.
    pub(super) fn end(&mut self, completion: &Completion, stop_ids: &[u32]) {
        self.finish = Some(match completion.finish {
            Finish::Length | Finish::Context => FinishReason::Length,
            _ if !self.tool_calls.is_empty() => FinishReason::ToolCalls,
            _ => FinishReason::Stop,
        });
        self.stop_reason = stop_reason(completion, stop_ids);
        self.prompt_tokens = completion.scores.iter().map(|likely| TokenInfo::of(likely.0.id, Some(likely))).collect();
    }

    /// Returns the mean log-probability of the generated tokens.
    pub(super) fn mean_logprob(&self) -> f64 {
        let sum: f64 = self.tokens.iter().filter_map(|token| token.logprob).sum();
        sum / self.tokens.len().max(1) as f64
    }
}
