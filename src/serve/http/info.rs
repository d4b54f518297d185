//! Endpoints that tell about the server.

use super::{respond, routes};
use crate::api::error::{ApiError, ApiStatus};
use crate::host::metrics;
use crate::host::model::Status;
use crate::serve::app::App;
use crate::serve::openapi;
use crate::serve::page;
use axum::extract::State;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::json;
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
            ApiError::new(ApiStatus::SERVICE_UNAVAILABLE, message).into_response()
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
    respond::json(StatusCode::OK, &openapi::document(routes::endpoints()))
}

/// Refuses embeddings.
pub async fn embeddings() -> ApiError {
    let message = "no model family of this server is trained for embeddings";
    ApiError::new(ApiStatus::NOT_IMPLEMENTED, message).code("not_implemented")
}

/// Shows the page for people.
pub async fn page() -> Response {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, page::csp()),
        (REFERRER_POLICY, "no-referrer"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, page::HTML).into_response()
}

/// Answers for paths without an endpoint.
pub async fn unknown(method: Method, uri: Uri) -> ApiError {
    let message = format!("there is no endpoint {method} {}", uri.path());
    ApiError::new(ApiStatus::NOT_FOUND, message).code("not_found")
}

/// Answers for endpoints that are called with another method.
pub async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} has no method {method}", uri.path());
    ApiError::new(ApiStatus::METHOD_NOT_ALLOWED, message).code("method_not_allowed")
}
