//! Endpoints of ollama's API that tell about models. Those that generate text are in [`crate::api::ollama`].

use super::body::read_body;
use super::models::{Listed, listed, timestamp};
use super::respond::{self, Ignored};
use crate::api::body::Body;
use crate::api::error::ApiResult;
use crate::host::model::Facts;
use crate::serve::app::App;
use crate::serve::caller::Caller;
use crate::serve::loading;
use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

/// Time until which a model stays loaded that is not unloaded: one that no client reaches.
const FOREVER: &str = "2262-04-11T23:47:16Z";

/// Tells the version of the program.
pub async fn version() -> Response {
    respond::json(StatusCode::OK, &json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// Lists models and adapters.
pub async fn tags(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Response {
    let models: Vec<Value> = listed(&app, &caller).iter().map(described).collect();
    respond::json(StatusCode::OK, &json!({"models": models}))
}

/// Lists the models that are loaded.
pub async fn running(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Response {
    let loaded = |listed: &Listed| {
        let facts = listed.facts.as_ref().filter(|_| !listed.is_adapter)?;
        let mut object = described(listed);
        let expires = app.models.iter().find(|model| model.name == listed.id);
        let expires = expires.and_then(|model| loading::expires(&app, model));
        let seconds = expires.and_then(|time| Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs()));
        object["expires_at"] = json!(seconds.map_or(FOREVER.into(), timestamp));
        object["size_vram"] = json!(0);
        object["context_length"] = json!(facts.context);
        Some(object)
    };
    let models: Vec<Value> = listed(&app, &caller).iter().filter_map(loaded).collect();
    respond::json(StatusCode::OK, &json!({"models": models}))
}

/// Describes a model.
pub async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> ApiResult<Response> {
    let (bytes, _permit) = read_body(&app, &caller, request).await?;
    let mut body = Body::parse(&bytes)?;
    // Older clients send `name`.
    let name = body.text("model")?.or(body.text("name")?);
    body.flag("verbose", false)?;
    let ignored = Ignored::read(&app, body)?;
    let target = app.target(caller.key().0, name.as_deref(), &[]).await?;
    let facts = &target.facts;
    let mut abilities = vec!["completion"];
    abilities.extend(facts.details.has_tools.then_some("tools"));
    abilities.extend(facts.infill.is_some().then_some("insert"));
    abilities.extend(facts.details.thinks.then_some("thinking"));
    let object = json!({
        "modelfile": "",
        "parameters": parameters(facts),
        "template": facts.template.as_ref().map_or("", |format| format.template.template.source()),
        "details": details(Some(facts), None),
        "model_info": model_info(facts),
        "capabilities": abilities,
        "modified_at": timestamp(target.model.created),
    });
    Ok(ignored.shown_in(respond::json(StatusCode::OK, &object)))
}

/// Returns the object of a model in a list. Names without a tag get the one that ollama gives them.
fn described(listed: &Listed) -> Value {
    let name = match listed.id.contains(':') {
        true => listed.id.clone(),
        false => format!("{}:latest", listed.id),
    };
    let facts = listed.facts.as_deref();
    json!({
        "name": name,
        "model": name,
        "modified_at": timestamp(listed.created),
        "size": facts.map_or(0, |facts| facts.details.bytes),
        "digest": facts.map_or("", |facts| &facts.details.digest),
        "details": details(facts, listed.parent.as_deref()),
    })
}

fn details(facts: Option<&Facts>, parent: Option<&str>) -> Value {
    let details = facts.map(|facts| &facts.details);
    let family = details.map_or("", |details| details.family.as_str());
    json!({
        "parent_model": parent.unwrap_or_default(),
        "format": "iec",
        "family": family,
        "families": if family.is_empty() { Vec::new() } else { vec![family] },
        "parameter_size": details.map(|details| details.parameter_size()).unwrap_or_default(),
        "quantization_level": details.map_or("", |details| details.quantization.as_str()),
    })
}

/// Returns the sampling of requests that name none, as lines of ollama's parameters.
fn parameters(facts: &Facts) -> String {
    let sampling = &facts.sampling;
    let lines = [
        format!("temperature {}", sampling.temperature),
        format!("top_k {}", sampling.top_k),
        format!("top_p {}", sampling.top_p),
        format!("num_ctx {}", facts.context),
    ];
    lines.join("\n")
}

fn model_info(facts: &Facts) -> Value {
    let details = &facts.details;
    let own = |name: &str| format!("{}.{name}", details.family);
    let members = [
        ("general.architecture".to_string(), json!(details.family)),
        ("general.parameter_count".to_string(), json!(details.parameters)),
        (own("context_length"), json!(facts.context)),
        (own("embedding_length"), json!(details.hidden)),
        (own("block_count"), json!(details.layers)),
        (own("attention.head_count"), json!(details.heads.0)),
        (own("attention.head_count_kv"), json!(details.heads.1)),
        (own("vocab_size"), json!(facts.vocab)),
    ];
    Value::Object(Map::from_iter(members))
}
