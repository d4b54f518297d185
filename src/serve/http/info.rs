//! Endpoints that tell about the server.

use super::check::Caller;
use super::respond::{self, Style};
use crate::serve::api::error::{ApiError, ApiResult};
use crate::serve::api::openapi;
use crate::serve::app::App;
use crate::serve::metrics;
use crate::serve::model::Status;
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
            let message = format!("the engine of `{}` has not moved for {} s", model.name, model.silence().as_secs());
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
    let all: Vec<Value> = listed(&app, &caller).into_iter().map(|(_, object)| object).collect();
    respond::json(StatusCode::OK, &json!({"object": "list", "data": all}))
}

/// Shows a model or an adapter.
pub async fn model(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> ApiResult<Response> {
    match listed(&app, &caller).into_iter().find(|(name, _)| *name == id) {
        Some((_, object)) => Ok(respond::json(StatusCode::OK, &object)),
        None => {
            let error = ApiError::new(StatusCode::NOT_FOUND, format!("there is no model `{id}`"));
            Err(error.code("model_not_found"))
        }
    }
}

/// Returns the objects of all models and adapters that a caller may use.
fn listed(app: &App, caller: &Caller) -> Vec<(String, Value)> {
    let (key, _) = caller.key();
    let mut all = Vec::new();
    for model in app.models.iter().filter(|model| key.may_use_model(&model.name)) {
        let (context, root) = match model.status() {
            Status::Ready(facts) => (Some(facts.context), Some(facts.root.clone())),
            _ => (None, None),
        };
        let object = json!({
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "iec",
            "root": root,
            "parent": null,
            "max_model_len": context,
        });
        all.push((model.name.clone(), object));
        for (name, adapter) in app.adapters().iter().filter(|(_, adapter)| adapter.model == model.number) {
            let object = json!({
                "id": name,
                "object": "model",
                "created": adapter.created,
                "owned_by": "iec",
                "root": adapter.source.dir,
                "parent": model.name,
                "max_model_len": context,
            });
            all.push((name.clone(), object));
        }
    }
    all
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
