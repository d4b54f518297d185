//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.

mod form;
mod messages;
mod request;

use super::body::Body;
use super::error::{ApiError, ApiResult};
use super::job::Job;
use super::prepare::{PromptSource, Wanted};
use super::settings::Limits;
use form::AnthropicMessage;
use request::MessagesRequest;

/// Reads a request of `/v1/messages`.
///
/// # Errors
/// A field has a wrong value, or needs something that this server does not have.
pub fn read(body: &mut Body, limits: &Limits) -> ApiResult<Job> {
    let MessagesRequest { source, settings, max_tokens } = MessagesRequest::take(body, limits)?;
    if max_tokens.is_none() {
        return Err(ApiError::field("max_tokens", "found none, expected the largest number of tokens of the answer"));
    }
    Ok(Job {
        wanted: Wanted::new(vec![source], settings, max_tokens),
        keep_alive: None,
        id: "msg_",
        form: Box::new(|named, plan, prepared| Box::new(AnthropicMessage::of(named, plan, prepared))),
    })
}

/// Reads a request of `/v1/messages/count_tokens`, which has the fields of `/v1/messages`.
///
/// # Errors
/// A field has a wrong value, or needs something that this server does not have.
pub fn read_count(body: &mut Body, limits: &Limits) -> ApiResult<PromptSource> {
    Ok(MessagesRequest::take(body, limits)?.source)
}
