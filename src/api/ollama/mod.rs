//! `/api/chat` and `/api/generate`: the API of ollama. Its requests are translated to the fields of
//! `/v1/chat/completions`; answers are lines of JSON, or one object without `stream`.

mod form;
mod request;
#[cfg(test)]
mod tests;

use super::body::Body;
use super::chat::ChatRequest;
use super::error::ApiResult;
use super::job::Job;
use super::prepare::{Conversation, PromptSource, Wanted};
use super::settings::{Limits, Settings};
use crate::generate::text::{Message, RenderOptions};
use crate::session::infill::Gap;
use crate::tools::ToolChoice;
use form::{Endpoint, OllamaAnswer};
use request::KeepAlive;
use serde_json::json;
use std::time::Duration;

/// Reads a request of `/api/chat`.
///
/// # Errors
/// A field has a wrong value, or needs something that this server does not have.
pub fn chat(body: &mut Body, limits: &Limits) -> ApiResult<Job> {
    let keep_alive = request::translate(body, limits)?;
    let messages = request::messages(body)?;
    if messages.is_empty() {
        return only_loads(body, limits, Endpoint::Chat, keep_alive);
    }
    body.set("messages", json!(messages));
    let ChatRequest { source, settings, max_tokens, .. } = ChatRequest::take(body, limits)?;
    Ok(job(vec![source], settings, max_tokens, Endpoint::Chat, keep_alive))
}

/// Reads a request of `/api/generate`.
///
/// # Errors
/// A field has a wrong value, or needs something that this server does not have.
pub fn generate(body: &mut Body, limits: &Limits) -> ApiResult<Job> {
    let keep_alive = request::translate(body, limits)?;
    body.refuse("template", &json!(""), "this server takes the chat template of the model; leave it out")?;
    body.refuse("context", &json!([]), "this server returns no context; send the conversation to /api/chat")?;
    let raw = body.flag("raw", false)?;
    let system = body.text("system")?.filter(|text| !text.is_empty());
    let suffix = body.text("suffix")?.filter(|text| !text.is_empty());
    let prompt = request::prompt(body)?;
    if prompt.is_empty() && suffix.is_none() {
        return only_loads(body, limits, Endpoint::Generate, keep_alive);
    }
    let max_tokens = body.count("max_tokens", 1, usize::MAX)?;
    let variables = body.object("chat_template_kwargs")?.unwrap_or_default();
    let settings = Settings::take(body, limits)?;
    let messages = system.iter().map(|text| Message::new("system", text.clone()));
    let messages = messages.chain([Message::new("user", prompt.clone())]).collect();
    let chat = Box::new(Conversation {
        field: "prompt",
        schema_field: "function.parameters",
        messages,
        options: RenderOptions { variables, ..RenderOptions::default() },
        tools: Vec::new(),
        choice: ToolChoice::None,
        parallel: false,
    });
    let source = match (suffix, raw, system) {
        (Some(suffix), _, _) => PromptSource::Gap(Box::new(Gap { prefix: prompt, suffix, ..Gap::default() })),
        (None, true, _) => PromptSource::Text(prompt, true),
        (None, false, None) => PromptSource::TextOrChat(prompt, chat),
        (None, false, Some(_)) => PromptSource::Chat(chat),
    };
    Ok(job(vec![source], settings, max_tokens, Endpoint::Generate, keep_alive))
}

/// Reads the settings of a request without a prompt, which only asks for the model to be loaded.
fn only_loads(body: &mut Body, limits: &Limits, kind: Endpoint, keep_alive: KeepAlive) -> ApiResult<Job> {
    let (settings, max_tokens) = (Settings::take(body, limits)?, body.count("max_tokens", 1, usize::MAX)?);
    Ok(job(Vec::new(), settings, max_tokens, kind, keep_alive))
}

fn job(
    sources: Vec<PromptSource>,
    settings: Settings,
    max_tokens: Option<usize>,
    kind: Endpoint,
    keep_alive: KeepAlive,
) -> Job {
    // A request without a prompt that keeps the model for no time unloads it.
    let unloads = sources.is_empty() && keep_alive == Some(Some(Duration::ZERO));
    Job {
        wanted: Wanted::new(sources, settings, max_tokens),
        keep_alive,
        id: "ollama-",
        form: Box::new(move |named, _, prepared| Box::new(OllamaAnswer::of(kind, named.model, unloads, prepared))),
    }
}
