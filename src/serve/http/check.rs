//! Checks of every request before its endpoint sees it: host, origin, key.

use super::respond::{self, Style};
use crate::sched::KeyId;
use crate::serve::api::error::ApiError;
use crate::serve::app::{App, Tenants};
use crate::serve::keys::{self, Key, Scope};
use crate::serve::origin::cors_allowed;
use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, AUTHORIZATION, HOST, ORIGIN, VARY,
};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Version};
use axum::middleware::Next;
use axum::response::Response;
use std::sync::Arc;

/// Longest `x-request-id` that is taken over.
const LONGEST_ID: usize = 128;

/// The sender of a request.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Keys at the time of the request; they may change while it is served.
    tenants: Arc<Tenants>,
    /// Index of the key.
    index: usize,
    /// Name of the request.
    pub id: String,
}

impl Caller {
    /// Returns the key, and its number in the schedulers.
    pub fn key(&self) -> (&Key, KeyId) {
        self.tenants.key(self.index)
    }
}

/// Checks a request, and passes it on.
pub async fn check(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let id = request.headers().get("x-request-id").and_then(|id| id.to_str().ok());
    let id = match id.filter(|id| !id.is_empty() && id.len() <= LONGEST_ID) {
        Some(id) => id.to_string(),
        None => app.new_id("req_"),
    };
    let origin = request.headers().get(ORIGIN).cloned();
    let style = Style::of(request.uri().path());
    let tenants = app.tenants();
    let mut response = match admit(&app, &tenants, &request) {
        _ if request.method() == Method::OPTIONS && origin.is_some() => preflight(),
        Err(error) => respond::error(&error, style),
        Ok(index) => {
            request.extensions_mut().insert(Caller { tenants, index, id: id.clone() });
            next.run(request).await
        }
    };
    respond::set(&mut response, "x-request-id", &id);
    if style == Style::Anthropic {
        respond::set(&mut response, "request-id", &id);
    }
    if let Some(origin) = origin.filter(|origin| is_allowed(&app, origin)) {
        let headers = response.headers_mut();
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(VARY, HeaderValue::from_static("Origin"));
        let shown = HeaderValue::from_static("x-request-id, x-iec-seed, x-iec-ignored, retry-after");
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, shown);
    }
    response
}

fn is_allowed(app: &App, origin: &HeaderValue) -> bool {
    origin.to_str().is_ok_and(|origin| cors_allowed(origin, &app.settings.cors_origin))
}

/// Answers the question of a browser whether a page of another origin may send a request. Without the headers of
/// [`check`], the answer is no.
fn preflight() -> Response {
    let mut response = Response::new(axum::body::Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
    let named = "authorization, content-type, x-api-key, x-request-id, x-iec-deadline-ms, anthropic-version";
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static(named));
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    response
}

/// Returns the index of the key of a request that may be served.
fn admit(app: &App, tenants: &Tenants, request: &Request) -> Result<usize, ApiError> {
    let headers = request.headers();
    check_single(headers)?;
    if headers.get(HOST).is_none() && request.version() == Version::HTTP_11 {
        return Err(ApiError::invalid("found no header `host`, expected one"));
    }
    let named = request.uri().authority().map(Authority::as_str);
    if named.is_some_and(|named| headers.get(HOST).is_none_or(|host| host.as_bytes() != named.as_bytes())) {
        return Err(ApiError::invalid("found another host in the request line than in the header `host`"));
    }
    let path = request.uri().path();
    // Probes come from the machine itself and from load balancers, by any name.
    let Some(scope) = scope_of(path) else { return Ok(0) };
    let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if !app.hosts.allows(host) {
        let message = format!(
            "this server does not know the name `{host}` as its own; add it with --allowed-host, or use the address"
        );
        return Err(ApiError::new(StatusCode::FORBIDDEN, message).code("unknown_host"));
    }
    if let Some(origin) = headers.get(ORIGIN)
        && !is_allowed(app, origin)
        && !is_own(origin, host)
    {
        let message = "requests from pages of other origins are off; allow one with --cors-origin";
        return Err(ApiError::new(StatusCode::FORBIDDEN, message).code("unknown_origin"));
    }
    if scope == Needed::Nothing {
        return Ok(0);
    }
    let Some(key) = tenants.keys.authorize(presented(headers)) else {
        let message = "expected a valid API key in `Authorization: Bearer KEY` or `x-api-key: KEY`";
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, message).code("invalid_api_key"));
    };
    let Needed::Scope(scope) = scope else { return Ok(key) };
    match tenants.key(key).0.may(scope) {
        true => Ok(key),
        false => {
            let message = "the API key may not use this endpoint";
            Err(ApiError::new(StatusCode::FORBIDDEN, message).code("insufficient_scope"))
        }
    }
}

/// Refuses headers that decide about access and are there more than once: a proxy may have read another one.
fn check_single(headers: &HeaderMap) -> Result<(), ApiError> {
    let once = ["host", "origin", "authorization", "x-api-key", "x-iec-deadline-ms"];
    match once.into_iter().find(|name| headers.get_all(*name).iter().nth(1).is_some()) {
        None => Ok(()),
        Some(name) => Err(ApiError::invalid(format!("found the header `{name}` more than once, expected it once"))),
    }
}

fn presented(headers: &HeaderMap) -> Option<&str> {
    let authorization = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    keys::presented(authorization, headers.get("x-api-key").and_then(|value| value.to_str().ok()))
}

/// Returns true if a page of this server sent the request.
fn is_own(origin: &HeaderValue, host: &str) -> bool {
    let origin = origin.to_str().unwrap_or_default();
    origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://")).is_some_and(|own| own == host)
}

/// Permission that a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needed {
    /// No key.
    Nothing,
    /// A key that may use the endpoint.
    Scope(Scope),
}

/// Returns what a path needs; `None` for probes.
fn scope_of(path: &str) -> Option<Needed> {
    Some(match path {
        "/livez" | "/readyz" | "/health" => return None,
        "/" | "/version" | "/openapi.json" => Needed::Nothing,
        "/metrics" | "/load" => Needed::Scope(Scope::Metrics),
        "/v1/load_lora_adapter" | "/v1/unload_lora_adapter" | "/v1/lora_adapters" => Needed::Scope(Scope::Admin),
        _ => Needed::Scope(Scope::Infer),
    })
}
