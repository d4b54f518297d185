//! Endpoints that tell about the server.

use super::check::Caller;
use super::respond::{self, Style};
use crate::serve::api::error::{ApiError, ApiResult};
use crate::serve::api::openapi;
use crate::serve::app::App;
use crate::serve::keys::Key;
use crate::serve::metrics;
use crate::serve::model::Status;
use crate::serve::rights::Usable;
use axum::Extension;
use axum::extract::{Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Time without a sign of life of an engine after which the server counts as dead.
const SILENCE: Duration = Duration::from_secs(60);

/// Tells whether the process is alive: each engine that is open shows signs of life.
pub async fn alive(State(app): State<Arc<App>>) -> Response {
    let is_stuck = |status: Status, silence: Duration| matches!(status, Status::Ready(_)) && silence > SILENCE;
    match app.models.iter().find(|model| is_stuck(model.status(), model.silence())) {
        None => StatusCode::OK.into_response(),
        Some(model) => {
            // Probes need no key, so the name of the model is not for them.
            let message = format!("the engine of a model has not moved for {} s", model.silence().as_secs());
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).into_response()
        }
    }
}

/// Tells whether requests are served.
pub async fn health(State(app): State<Arc<App>>) -> Response {
    if app.is_ready() { StatusCode::OK.into_response() } else { StatusCode::SERVICE_UNAVAILABLE.into_response() }
}

/// Tells the version of the program.
pub async fn version() -> Response {
    respond::json(StatusCode::OK, &json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// Tells how many requests are being served, as vLLM does.
pub async fn load(State(app): State<Arc<App>>) -> Response {
    let load: usize = app.models.iter().map(|model| model.load()).sum();
    respond::json(StatusCode::OK, &json!({"server_load": load}))
}

/// Shows the metrics.
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], app.metrics.render()).into_response()
}

/// Describes the API.
pub async fn openapi() -> Response {
    respond::json(StatusCode::OK, &openapi::document())
}

/// Lists models and adapters.
pub async fn models(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Response {
    let (key, _) = caller.key();
    let all: Vec<Value> = app.usable(key).iter().map(|usable| object(usable, key)).collect();
    respond::json(StatusCode::OK, &json!({"object": "list", "data": all}))
}

/// Shows a model or an adapter.
pub async fn model(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> ApiResult<Response> {
    let (key, _) = caller.key();
    match app.usable_as(key, &id) {
        Some(usable) => Ok(respond::json(StatusCode::OK, &object(&usable, key))),
        None => {
            let error = ApiError::new(StatusCode::NOT_FOUND, format!("there is no model `{id}`"));
            Err(error.code("model_not_found"))
        }
    }
}

/// Describes a model or an adapter. Of its path, only the last name is shown: the directories are the operator's.
fn object(usable: &Usable, key: &Key) -> Value {
    let facts = match usable.model.status() {
        Status::Ready(facts) => Some(facts),
        _ => None,
    };
    let last_name = |path: &std::path::Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let root = match &usable.adapter {
        Some(adapter) => last_name(&adapter.source.dir),
        None => facts.as_ref().and_then(|facts| last_name(&facts.root)),
    };
    json!({
        "id": usable.name,
        "object": "model",
        "created": usable.adapter.as_ref().map_or(usable.model.created, |adapter| adapter.created),
        "owned_by": "iec",
        "root": root,
        "parent": usable.parent(key),
        "max_model_len": facts.map(|facts| facts.context),
    })
}

/// Refuses embeddings.
pub async fn embeddings() -> ApiError {
    let message = "no model family of this server is trained for embeddings";
    ApiError::new(StatusCode::NOT_IMPLEMENTED, message).code("not_implemented")
}

/// Answers for paths without an endpoint.
pub async fn unknown(method: Method, uri: Uri) -> Response {
    let message = format!("there is no endpoint {method} {}", uri.path());
    respond::error(&ApiError::new(StatusCode::NOT_FOUND, message).code("not_found"), Style::of(uri.path()))
}

/// Answers for endpoints that are called with another method.
pub async fn wrong_method(method: Method, uri: Uri) -> Response {
    let message = format!("{} has no method {method}", uri.path());
    let error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).code("method_not_allowed");
    respond::error(&error, Style::of(uri.path()))
}
