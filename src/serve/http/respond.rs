//! Responses with JSON, and responses for errors.

use crate::serve::api::error::ApiError;
use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::Value;

/// Header that tells clients of OpenAI whether to repeat a request.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// API whose objects describe errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// That of OpenAI.
    OpenAi,
    /// That of Anthropic.
    Anthropic,
}

impl Style {
    /// Returns the style of the endpoint with this path.
    pub fn of(path: &str) -> Style {
        let is_anthropic = path == "/v1/messages" || path.starts_with("/v1/messages/");
        if is_anthropic { Style::Anthropic } else { Style::OpenAi }
    }
}

/// Builds a response with a JSON object.
pub fn json(status: StatusCode, value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Builds the response for an error.
pub fn error(error: &ApiError, style: Style) -> Response {
    let object = match style {
        Style::OpenAi => error.to_json(),
        Style::Anthropic => error.to_anthropic(),
    };
    let mut response = json(error.status, &object);
    let headers = response.headers_mut();
    if let Some(seconds) = error.retry_after {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.final_refusal {
        headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    }
    if error.status == StatusCode::UNAUTHORIZED {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        error(&self, Style::OpenAi)
    }
}

/// Sets a header from a text; one that no header can hold is left out.
pub fn set(response: &mut Response, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(HeaderName::from_static(name), value);
    }
}
