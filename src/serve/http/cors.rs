//! Headers that let pages of allowed origins read answers (CORS). Without them, a browser keeps answers from pages of
//! other origins, and does not send requests with the headers of an SDK.

use super::respond;
use crate::serve::app::App;
use crate::serve::origin::cors_allowed;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS, ORIGIN, VARY,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::Response;

/// Methods of requests that pages may send.
const METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, OPTIONS");
/// Headers of a request on which the answer to a preflight depends.
const ASKED: HeaderValue = HeaderValue::from_static(
    "Origin, Access-Control-Request-Method, Access-Control-Request-Headers, Access-Control-Request-Private-Network",
);
/// Question whether a page of a public network may send a request to this one.
const ASKS_PRIVATE: HeaderName = HeaderName::from_static("access-control-request-private-network");
/// Its answer.
const ALLOWS_PRIVATE: HeaderName = HeaderName::from_static("access-control-allow-private-network");

/// The page that sent a request.
#[derive(Debug)]
pub struct Page {
    /// Origin of the page, if it is allowed.
    allowed: Option<HeaderValue>,
    /// Whether answers depend on the origin.
    varies: bool,
}

impl Page {
    /// Reads the headers of a request.
    pub fn of(app: &App, headers: &HeaderMap) -> Page {
        let list = &app.settings.cors_origin;
        let allowed = |origin: &&HeaderValue| origin.to_str().is_ok_and(|origin| cors_allowed(origin, list));
        Page { allowed: headers.get(ORIGIN).filter(allowed).cloned(), varies: !list.is_empty() }
    }

    /// Returns true if the page is one of an allowed origin.
    pub fn is_allowed(&self) -> bool {
        self.allowed.is_some()
    }

    /// Answers the question of a browser whether a page may send a request with certain headers. The answer names the
    /// same headers, since clients send headers of their own (the SDK of OpenAI describes its platform), and the server
    /// ignores those that it does not know. To a page of another origin the answer is no: it names nothing.
    pub fn preflight(&self, asked: &HeaderMap) -> Response {
        let mut response = Response::new(axum::body::Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        headers.insert(VARY, ASKED);
        if !self.is_allowed() {
            return response;
        }
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        if let Some(names) = requested(asked) {
            headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, names);
        }
        if asked.get(ASKS_PRIVATE).is_some_and(|asks| asks == "true") {
            headers.insert(ALLOWS_PRIVATE, HeaderValue::from_static("true"));
        }
        response
    }

    /// Adds the headers that let the page read an answer.
    pub fn show(self, response: &mut Response) {
        let headers = response.headers_mut();
        if self.varies && !headers.contains_key(VARY) {
            headers.insert(VARY, HeaderValue::from_static("Origin"));
        }
        if let Some(origin) = self.allowed {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(respond::SHOWN));
        }
    }
}

/// Returns the names of the headers that a page wants to send; `None` if there are none.
fn requested(asked: &HeaderMap) -> Option<HeaderValue> {
    let lists = asked.get_all(ACCESS_CONTROL_REQUEST_HEADERS).into_iter().filter_map(|list| list.to_str().ok());
    let names = lists.flat_map(|list| list.split(',')).map(str::trim);
    let names: Vec<&str> = names.filter(|name| HeaderName::from_bytes(name.as_bytes()).is_ok()).collect();
    HeaderValue::from_str(&names.join(", ")).ok().filter(|names| !names.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_a_preflight_names_the_headers_that_were_asked_for() {
        struct Case(&'static [&'static str], Option<&'static str>);
        let cases = [
            Case(&[], None),
            Case(&[""], None),
            Case(&["content-type"], Some("content-type")),
            Case(&["authorization,content-type"], Some("authorization, content-type")),
            Case(&["X-Stainless-OS , x-stainless-lang"], Some("X-Stainless-OS, x-stainless-lang")),
            Case(&["a", "b,c"], Some("a, b, c")),
            Case(&["a b, (d), ok"], Some("ok")),
            Case(&["é"], None),
        ];
        for Case(lists, expected) in cases {
            let mut asked = HeaderMap::new();
            for list in lists {
                if let Ok(list) = HeaderValue::from_bytes(list.as_bytes()) {
                    asked.append(ACCESS_CONTROL_REQUEST_HEADERS, list);
                }
            }
            let named = requested(&asked);
            assert_eq!(named.as_ref().and_then(|names| names.to_str().ok()), expected, "{lists:?}");
        }
    }
}
