//! A request of any endpoint that generates text.

use super::body::Body;
use super::chat::{Chat, ChatForm, ChatRequest};
use super::completions::{CompletionRequest, Completions};
use super::error::ApiResult;
use super::form::Form;
use super::prepare::{Plan, Prepared, Wanted};
use super::settings::Limits;
use std::time::Duration;

/// Names in an answer.
#[derive(Debug, Clone)]
pub struct Named {
    /// Id of the answer.
    pub id: String,
    /// Name of the model, as the client wrote it.
    pub model: String,
    /// Time in seconds since 1970.
    pub created: u64,
}

/// Builds the form of an answer to a request that was prepared.
pub type MakeForm = Box<dyn FnOnce(Named, &Plan, &mut Prepared) -> Box<dyn Form> + Send>;

/// A request that was read and not yet encoded.
pub struct Job {
    /// Texts to generate.
    pub wanted: Wanted,
    /// Idle time after which the model is unloaded; the inner `None` = never, the outer one = that of the settings.
    pub keep_alive: Option<Option<Duration>>,
    /// Beginning of the id of the answer.
    pub id: &'static str,
    /// Builds the form of the answer.
    pub form: MakeForm,
}

/// Reads the request of an endpoint.
pub type ReadJob = fn(&mut Body, &Limits) -> ApiResult<Job>;

/// Reads a request of `/v1/completions`.
///
/// # Errors
/// A field has a wrong value.
pub fn completions(body: &mut Body, limits: &Limits) -> ApiResult<Job> {
    let mut request = CompletionRequest::take(body, limits)?;
    Ok(Job {
        wanted: Wanted {
            logprobs: request.answer_logprobs(),
            score: request.score(),
            echo: request.echo,
            texts: request.best_of,
            ..Wanted::new(std::mem::take(&mut request.sources), request.settings.clone(), Some(request.max_tokens))
        },
        keep_alive: None,
        id: "cmpl-",
        form: Box::new(move |named, plan, prepared| Box::new(Completions::new(named, &request, plan, prepared))),
    })
}

/// Reads a request of `/v1/chat/completions`.
///
/// # Errors
/// A field has a wrong value.
pub fn chat(body: &mut Body, limits: &Limits) -> ApiResult<Job> {
    let ChatRequest { source, settings, max_tokens, logprobs, shows_reasoning } = ChatRequest::take(body, limits)?;
    let form = ChatForm { logprobs: logprobs.is_some(), shows_reasoning };
    Ok(Job {
        wanted: Wanted { logprobs, texts: settings.n, ..Wanted::new(vec![source], settings, max_tokens) },
        keep_alive: None,
        id: "chatcmpl-",
        form: Box::new(move |named, plan, prepared| Box::new(Chat::new(named, &form, plan, prepared))),
    })
}
