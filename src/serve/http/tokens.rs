//! Endpoints of the tokenizer.

use super::body::read_body;
use super::respond::{self, Ignored};
use crate::api::body::{Body, Prompts};
use crate::api::chat::ChatRequest;
use crate::api::error::{ApiError, ApiResult};
use crate::api::prepare::{PromptSource, encode_chat, encode_error, no_template};
use crate::api::settings::Limits;
use crate::api::{anthropic, responses};
use crate::serve::app::{App, Target};
use crate::serve::caller::Caller;
use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;

/// Reads a body and finds its model.
async fn read(app: &App, caller: &Caller, request: Request) -> ApiResult<(Body, Target)> {
    let (bytes, _room) = read_body(app, caller, request).await?;
    let mut body = Body::parse(&bytes)?;
    let model = body.text("model")?;
    let target = app.target(caller.key().0, model.as_deref(), &[]).await?;
    Ok((body, target))
}

/// Encodes a text or a conversation.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> ApiResult<Response> {
    let (mut body, target) = read(&app, &caller, request).await?;
    let (special, names) = (body.flag("add_special_tokens", true)?, body.flag("return_token_strs", false)?);
    let source = match body.take_prompts()? {
        Some(Prompts::Texts(mut texts)) if texts.len() == 1 => PromptSource::Text(texts.swap_remove(0), special),
        Some(_) => return Err(ApiError::field("prompt", "expected one text")),
        None => ChatRequest::take(&mut body, &app.limits)?.source,
    };
    let ignored = Ignored::read(&app, body)?;
    let ids = ids_of(&app, &target, source).await?;
    let mut object = json!({"count": ids.len(), "max_model_len": target.facts.context, "tokens": ids});
    if names {
        object["token_strs"] = ids.iter().map(|id| Value::from(target.facts.tokens.text(*id))).collect();
    }
    Ok(ignored.shown_in(respond::json(StatusCode::OK, &object)))
}

/// Renders a conversation as the prompt that the model gets.
pub async fn apply_template(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> ApiResult<Response> {
    let (mut body, target) = read(&app, &caller, request).await?;
    let source = ChatRequest::take(&mut body, &app.limits)?.source;
    let ignored = Ignored::read(&app, body)?;
    let facts = target.facts.clone();
    let rendered = target.model.encode(move |encoder| -> ApiResult<String> {
        let PromptSource::Chat(chat) = &source else { return Ok(String::new()) };
        let template = facts.template.as_ref().ok_or_else(|| no_template(chat))?;
        let rendered = encoder.render_chat(&template.template.template, &chat.messages, &chat.options);
        rendered.map_err(|e| encode_error(chat.field, &e))
    });
    let prompt = rendered.await.unwrap_or_else(|| Err(app.engine_ended()))?;
    Ok(ignored.shown_in(respond::json(StatusCode::OK, &json!({"prompt": prompt}))))
}

/// Counts the tokens of a conversation in the form of Anthropic's API.
pub async fn count(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> ApiResult<Response> {
    let (tokens, ignored) = count_source(&app, &caller, request, anthropic::read_count).await?;
    Ok(ignored.shown_in(respond::json(StatusCode::OK, &json!({"input_tokens": tokens}))))
}

/// Counts the tokens of a conversation in the form of the Responses API.
pub async fn count_input(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> ApiResult<Response> {
    let (tokens, ignored) = count_source(&app, &caller, request, responses::read_count).await?;
    let object = json!({"object": "response.input_tokens", "input_tokens": tokens});
    Ok(ignored.shown_in(respond::json(StatusCode::OK, &object)))
}

/// Reads the text or the conversation of a request.
type ReadSource = fn(&mut Body, &Limits) -> ApiResult<PromptSource>;

async fn count_source(
    app: &App,
    caller: &Caller,
    request: Request,
    read_source: ReadSource,
) -> ApiResult<(usize, Ignored)> {
    let (mut body, target) = read(app, caller, request).await?;
    let source = read_source(&mut body, &app.limits).map_err(|e| body.names.shown(e))?;
    let ignored = Ignored::read(app, body)?;
    Ok((ids_of(app, &target, source).await?.len(), ignored))
}

/// Encodes a text or a conversation on another thread.
///
/// # Errors
/// The text is too long, or the template refuses the conversation.
pub async fn ids_of(app: &App, target: &Target, source: PromptSource) -> ApiResult<Vec<u32>> {
    let facts = target.facts.clone();
    let encoded = target.model.encode(move |encoder| -> ApiResult<Vec<u32>> {
        match &source {
            PromptSource::Ids(ids) => Ok(ids.clone()),
            PromptSource::Text(text, special) => encoder.encode(text, *special).map_err(|e| encode_error("prompt", &e)),
            // Requests for tokens have no gaps.
            PromptSource::Gap(gap) => encoder.encode(&gap.prefix, true).map_err(|e| encode_error("prompt", &e)),
            PromptSource::Chat(chat) | PromptSource::TextOrChat(_, chat) => {
                encode_chat(encoder, &facts, chat, &chat.messages)
            }
        }
    });
    encoded.await.unwrap_or_else(|| Err(app.engine_ended()))
}

/// Decodes tokens.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> ApiResult<Response> {
    let (mut body, target) = read(&app, &caller, request).await?;
    let ids = body.take_tokens()?.ok_or_else(|| ApiError::field("tokens", "found none, expected token ids"))?;
    let skip = body.flag("skip_special_tokens", false)?;
    let ignored = Ignored::read(&app, body)?;
    if let Some(id) = ids.iter().find(|id| **id as usize >= target.facts.vocab) {
        let most = target.facts.vocab;
        return Err(ApiError::field("tokens", format!("found the token id {id}, expected an id below {most}")));
    }
    let decoded = target.model.encode(move |encoder| encoder.tokenizer()?.decode(&ids, skip)).await;
    match decoded {
        Some(text) => Ok(ignored.shown_in(respond::json(StatusCode::OK, &json!({"prompt": text?})))),
        None => Err(app.engine_ended()),
    }
}

/// Shows the configuration of the tokenizer, with tokens as texts and with the chat template.
pub async fn info(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> ApiResult<Response> {
    let target = app.target(caller.key().0, None, &[]).await?;
    let facts = &target.facts;
    let mut object = facts.tokenizer_config.as_object().cloned().unwrap_or_default();
    for (name, value) in &mut object {
        if name.ends_with("_token")
            && let Some(text) = value.get("content").cloned()
        {
            *value = text;
        }
    }
    if let Some(format) = &facts.template {
        object.insert("chat_template".into(), json!(format.template.template.source()));
    }
    object.entry("tokenizer_class").or_insert(json!("PreTrainedTokenizerFast"));
    object.insert("max_chars_per_token".into(), json!(facts.tokens.longest()));
    Ok(respond::json(StatusCode::OK, &Value::Object(object)))
}
