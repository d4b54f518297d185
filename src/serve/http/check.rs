//! Checks of every request before its endpoint sees it: host, origin, key.

use super::cors::Page;
use super::respond;
use crate::api::error::{ApiError, ApiStatus};
use crate::api::style::Style;
use crate::serve::app::{App, Tenants};
use crate::serve::caller::{self, Caller};
use crate::serve::openapi::Access;
use axum::extract::{Request, State};
use axum::http::header::{HOST, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, Method, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

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
    let id = caller::id_of(&app, request.headers());
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
    caller::check_single(headers)?;
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
    caller::key_of(tenants, scope, headers)
}

/// Returns true if a page of this server sent the request.
fn is_own(origin: &HeaderValue, host: &str) -> bool {
    let origin = origin.to_str().unwrap_or_default();
    origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://")).is_some_and(|own| own == host)
}
