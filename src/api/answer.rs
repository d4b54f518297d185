//! Answers: what all endpoints know about a request that is being computed.

use super::error::{ApiError, ApiStatus};
use crate::error::{Cause, Error};
use crate::generate::sampler::Candidate;
use crate::generate::{Completion, Finish, Likelihood};
use crate::host::model::Facts;
use serde_json::{Value, json};

/// Log-probability of a token that cannot occur; JSON has no infinity.
pub const LOWEST: f64 = -9999.0;

/// Number of tokens of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of all prompts.
    pub prompt: usize,
    /// Tokens of all answers.
    pub generated: usize,
    /// Tokens of the prompts that came from the prefix cache.
    pub cached: usize,
}

impl Usage {
    /// Returns the object of OpenAI's API.
    pub fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

/// Returns the reason why a text ended, in the API of OpenAI.
pub fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Length | Finish::Context => "length",
        _ => "stop",
    }
}

/// Returns what ended a text, as the field `stop_reason` of vLLM does: a stop text, or one of the tokens `stops` that
/// the request names; null if an end token of the model did.
pub fn stop_reason(completion: &Completion, stops: &[u32]) -> Value {
    let token = completion.ids.last().filter(|id| completion.finish == Finish::Eos && stops.contains(id));
    match (&completion.stopped_by, token) {
        (Some(stop), _) => json!(stop),
        (None, Some(token)) => json!(token),
        (None, None) => Value::Null,
    }
}

/// Returns the `kept` choices with the largest mean log-probability of every group of `generated` choices, the texts of
/// a prompt. The order of groups stays; choices of equal means keep theirs.
pub fn best_choices(means: &[f64], generated: usize, kept: usize) -> Vec<usize> {
    let of_group = |group: usize| {
        let mut choices: Vec<usize> = (group * generated..(group + 1) * generated).collect();
        if generated > kept {
            choices.sort_by(|a, b| means[*b].total_cmp(&means[*a]).then(a.cmp(b)));
            choices.truncate(kept);
        }
        choices
    };
    (0..means.len() / generated).flat_map(of_group).collect()
}

/// Returns true if the last tokens of a text may be those of its end, which the text does not show.
pub fn hides_end(finish: Finish) -> bool {
    matches!(finish, Finish::Eos | Finish::Stop)
}

/// Returns the text by which reported probabilities name a token: its own, or its id.
pub fn token_name(facts: &Facts, id: u32, as_id: bool) -> String {
    if as_id { format!("token_id:{id}") } else { facts.tokens.text(id) }
}

/// Returns the entry of a token in a list of log-probabilities of the chat and the Responses API.
pub fn likelihood(facts: &Facts, likely: &Likelihood, as_ids: bool) -> Value {
    let one = |candidate: &Candidate| {
        let (id, logprob) = (candidate.id, candidate.logprob.max(LOWEST));
        json!({"token": token_name(facts, id, as_ids), "logprob": logprob, "bytes": facts.tokens.bytes(id)})
    };
    let mut object = one(&likely.0);
    object["top_logprobs"] = likely.1.iter().map(one).collect();
    object
}

/// Converts the error of a step. The request was checked before, so that almost all that fails now is not its fault;
/// but only while a text is generated does it show that a constraint and the allowed tokens exclude each other, or that
/// a grammar needs more work per token than its parser may do.
fn of_step(error: &Error) -> ApiError {
    match error.cause() {
        Cause::Usage(_) | Cause::Unsupported(_) => ApiError::from(error),
        _ => ApiError { status: ApiStatus::INTERNAL_SERVER_ERROR, ..ApiError::from(error) },
    }
}

/// Returns the error of a text that did not reach its end.
pub fn failure(completion: &Completion) -> Option<ApiError> {
    if let Some(error) = &completion.error {
        return Some(of_step(error));
    }
    match completion.finish {
        Finish::Deadline => {
            let message = "the deadline of the request (x-iec-deadline-ms) passed";
            Some(ApiError::new(ApiStatus::GATEWAY_TIMEOUT, message).code("deadline_exceeded"))
        }
        Finish::QueueTimeout => {
            let message = "the request waited longer than --queue-timeout";
            let error = ApiError::new(ApiStatus::TOO_MANY_REQUESTS, message).code("queue_timeout");
            Some(ApiError { final_refusal: true, ..error })
        }
        Finish::Cancelled | Finish::Interrupted | Finish::Invalid | Finish::Failed => {
            let message = format!("the request ended early ({})", completion.finish.name());
            Some(ApiError::new(ApiStatus::INTERNAL_SERVER_ERROR, message))
        }
        Finish::Eos | Finish::Complete | Finish::Stop | Finish::Length | Finish::Context => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_excludes_every_token_is_to_blame_and_an_engine_that_fails_is_not() {
        for error in [Error::usage("found no token that may follow"), Error::unsupported("the grammar is too large")] {
            assert_eq!(of_step(&error).status, ApiStatus::BAD_REQUEST, "{error}");
        }
        for error in [Error::engine("the device is lost"), Error::corrupt("a block is damaged")] {
            assert_eq!(of_step(&error).status, ApiStatus::INTERNAL_SERVER_ERROR, "{error}");
        }
    }
}
