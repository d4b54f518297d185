//! Responses with JSON, and responses for errors.

use crate::api::body::Body as RequestBody;
use crate::api::error::{ApiError, ApiResult, ApiStatus};
use crate::api::style::Style;
use crate::serve::app::App;
use axum::body::Body;
use axum::http::header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::Value;

/// Header that tells clients of OpenAI whether to repeat a request.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// Names of the headers of answers that pages of other origins may read.
pub const SHOWN: &str =
    "x-request-id, request-id, x-iec-seed, x-iec-ignored, retry-after, x-should-retry, www-authenticate";

/// Builds a response with a JSON object.
pub fn json(status: StatusCode, value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Builds the response for an error in the form of OpenAI's API; `restyle` puts it into that of another API.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status.as_u16()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = json(status, &Style::OpenAi.error(&self));
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.final_refusal {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if self.status == ApiStatus::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.code == Some("draining") {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

/// Puts the error of a response into the form of an API.
pub fn restyle(response: &mut Response, style: Style) {
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        *response.body_mut() = Body::from(style.error(&error).to_string());
    }
}

/// Returns true if the headers are those of a client of Anthropic's API.
pub fn is_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// Sets a header from a text; one that no header can hold is left out.
pub fn set(response: &mut Response, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(HeaderName::from_static(name), value);
    }
}

/// Names of the fields of a request that are unknown, and of parts of schemas that cannot be enforced: they were
/// ignored.
#[derive(Debug)]
pub struct Ignored(Vec<String>);

impl Ignored {
    /// Checks the fields of a body that were not read, and counts those that are ignored.
    ///
    /// # Errors
    /// As [`RequestBody::rest`].
    pub fn read(app: &App, body: RequestBody) -> ApiResult<Ignored> {
        let names = body.rest(app.limits.strict_fields)?;
        app.metrics.ignored_fields(names.len() as u64);
        Ok(Ignored(names))
    }

    /// Adds parts of fields that are known and cannot be honoured.
    pub fn extend(&mut self, names: Vec<String>) {
        self.0.extend(names);
    }

    /// Adds the header that names the fields, if there are some.
    pub fn shown_in(&self, mut response: Response) -> Response {
        if !self.0.is_empty() {
            set(&mut response, "x-iec-ignored", &self.0.join(", "));
        }
        response
    }
}
