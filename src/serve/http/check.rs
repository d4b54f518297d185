//! Checks of every request before its endpoint sees it: host, origin, key.

use super::cors::Page;
use super::respond;
use crate::api::error::{ApiError, ApiStatus};
use crate::api::style::Style;
use crate::serve::app::{App, Tenants};
use crate::serve::caller::Caller;
use crate::serve::keys;
use crate::serve::openapi::Access;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// Longest `x-request-id` that is taken over.
const LONGEST_ID: usize = 128;

/// State and rules for the checks of an endpoint.
#[derive(Clone)]
pub struct Gate {
    /// State of the server.
    pub app: Arc<App>,
    /// Permission that requests need.
    pub access: Access,
    /// API that errors follow.
    pub style: Style,
}

/// Checks a request to an endpoint, and passes it on.
pub async fn check(State(gate): State<Gate>, mut request: Request, next: Next) -> Response {
    let Gate { app, access, style } = gate;
    let id = request.headers().get("x-request-id").and_then(|id| id.to_str().ok());
    let id = match id.filter(|id| !id.is_empty() && id.len() <= LONGEST_ID) {
        Some(id) => id.to_string(),
        None => app.new_id("req_"),
    };
    let style = style.of(respond::is_anthropic(request.headers()));
    let page = Page::of(&app, request.headers());
    let tenants = app.tenants();
    let mut response = match admit(&app, &tenants, access, &page, &request) {
        _ if request.method() == Method::OPTIONS && request.headers().contains_key(ORIGIN) => {
            page.preflight(request.headers())
        }
        Err(error) => error.into_response(),
        Ok(index) => {
            request.extensions_mut().insert(Caller { tenants, index, id: id.clone() });
            next.run(request).await
        }
    };
    respond::restyle(&mut response, style);
    respond::set(&mut response, "x-request-id", &id);
    if style == Style::Anthropic {
        respond::set(&mut response, "request-id", &id);
    }
    page.show(&mut response);
    response
}

/// Returns the index of the key of a request that may be served.
fn admit(app: &App, tenants: &Tenants, access: Access, page: &Page, request: &Request) -> Result<usize, ApiError> {
    let headers = request.headers();
    check_single(headers)?;
    if headers.get(HOST).is_none() && request.version() == Version::HTTP_11 {
        return Err(ApiError::invalid("found no header `host`, expected one"));
    }
    let named = request.uri().authority().map(Authority::as_str);
    if named.is_some_and(|named| headers.get(HOST).is_none_or(|host| host.as_bytes() != named.as_bytes())) {
        return Err(ApiError::invalid("found another host in the request line than in the header `host`"));
    }
    if access == Access::Probe {
        return Ok(0);
    }
    let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if !app.hosts.allows(host) {
        let message = format!(
            "this server does not know the name `{host}` as its own; add it with --allowed-host, or use the address"
        );
        return Err(ApiError::new(ApiStatus::FORBIDDEN, message).code("unknown_host"));
    }
    if let Some(origin) = headers.get(ORIGIN)
        && !page.is_allowed()
        && !is_own(origin, host)
    {
        let message = "requests from pages of other origins are off; allow one with --cors-origin";
        return Err(ApiError::new(ApiStatus::FORBIDDEN, message).code("unknown_origin"));
    }
    let Access::Key(scope) = access else { return Ok(0) };
    let Some(key) = tenants.keys.authorize(presented(headers)) else {
        let message = "expected a valid API key in `Authorization: Bearer KEY` or `x-api-key: KEY`";
        return Err(ApiError::new(ApiStatus::UNAUTHORIZED, message).code("invalid_api_key"));
    };
    match tenants.key(key).0.may(scope) {
        true => Ok(key),
        false => {
            let message = "the API key may not use this endpoint";
            Err(ApiError::new(ApiStatus::FORBIDDEN, message).code("insufficient_scope"))
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
