//! `/v1/responses`: OpenAI's Responses API without state. The server keeps no conversation: each request has all items.

mod form;
mod input;
mod request;

use super::body::Body;
use super::error::ApiResult;
use super::job::Job;
use super::prepare::{PromptSource, Wanted};
use super::settings::Limits;
use form::Responses;
use request::ResponsesRequest;

/// Reads a request of `/v1/responses`.
///
/// # Errors
/// A field has a wrong value, or needs something that this server does not have.
pub fn read(body: &mut Body, limits: &Limits) -> ApiResult<Job> {
    let ResponsesRequest { source, settings, max_tokens, logprobs, echo } = ResponsesRequest::take(body, limits)?;
    Ok(Job {
        wanted: Wanted { logprobs, ..Wanted::new(vec![source], settings, max_tokens) },
        keep_alive: None,
        id: "resp_",
        form: Box::new(move |named, plan, prepared| Box::new(Responses::of(named, echo, plan, prepared))),
    })
}

/// Reads a request of `/v1/responses/input_tokens`, which has the fields of `/v1/responses`.
///
/// # Errors
/// A field has a wrong value, or needs something that this server does not have.
pub fn read_count(body: &mut Body, limits: &Limits) -> ApiResult<PromptSource> {
    Ok(ResponsesRequest::take(body, limits)?.source)
}
