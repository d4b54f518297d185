//! Connections: routes, checks of every request, and the bodies of answers.

mod adapters;
mod body;
mod check;
mod generate;
mod info;
mod listen;
mod respond;
mod stream;
mod tokens;

pub use check::Caller;
pub use listen::{Address, Listeners};

use super::api::{anthropic, job, responses};
use super::app::App;
use super::page;
use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use std::sync::Arc;

/// Builds the routes of the server.
pub fn router(app: Arc<App>) -> Router {
    let checked = axum::middleware::from_fn_with_state(app.clone(), check::check);
    Router::new()
        .route("/", get(show_page))
        .route("/livez", get(info::alive))
        .route("/health", get(info::health))
        .route("/readyz", get(info::health))
        .route("/version", get(info::version))
        .route("/load", get(info::load))
        .route("/metrics", get(info::metrics))
        .route("/openapi.json", get(info::openapi))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*id}", get(info::model))
        .route("/v1/completions", post(generate::endpoint(job::completions)))
        .route("/v1/chat/completions", post(generate::endpoint(job::chat)))
        .route("/v1/responses", post(generate::endpoint(responses::read)))
        .route("/v1/responses/input_tokens", post(tokens::count_input))
        .route("/v1/messages", post(generate::styled(anthropic::read, respond::Style::Anthropic)))
        .route("/v1/messages/count_tokens", post(tokens::count))
        .route("/v1/embeddings", post(info::embeddings))
        .route("/v1/load_lora_adapter", post(adapters::load))
        .route("/v1/unload_lora_adapter", post(adapters::unload))
        .route("/v1/lora_adapters", get(adapters::list))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/tokenizer_info", get(tokens::info))
        .fallback(info::unknown)
        .method_not_allowed_fallback(info::wrong_method)
        .layer(checked)
        .with_state(app)
}

/// Shows the page for people.
async fn show_page() -> Response {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, page::csp()),
        (REFERRER_POLICY, "no-referrer"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, page::HTML).into_response()
}
