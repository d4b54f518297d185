//! Senders of requests: the key and the name of a request, from its headers. The metadata of gRPC are headers, too.

use super::app::{App, Tenants};
use super::keys::{self, Key, Scope};
use crate::api::error::{ApiError, ApiResult, ApiStatus};
use crate::sched::KeyId;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use std::sync::Arc;

/// Longest `x-request-id` that is taken over.
const LONGEST_ID: usize = 128;

/// The sender of a request.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Keys at the time of the request; they may change while it is served.
    pub tenants: Arc<Tenants>,
    /// Index of the key.
    pub index: usize,
    /// Name of the request.
    pub id: String,
}

impl Caller {
    /// Returns the key, and its number in the schedulers.
    pub fn key(&self) -> (&Key, KeyId) {
        self.tenants.key(self.index)
    }
}

/// Returns the name of a request: that of its header `x-request-id`, or a new one.
pub fn id_of(app: &App, headers: &HeaderMap) -> String {
    let id = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    match id.filter(|id| !id.is_empty() && id.len() <= LONGEST_ID) {
        Some(id) => id.to_string(),
        None => app.new_id("req_"),
    }
}

/// Returns the index of the key that the headers of a request present, if it may make requests of this scope.
///
/// # Errors
/// There is no valid key, or it lacks the scope.
pub fn key_of(tenants: &Tenants, scope: Scope, headers: &HeaderMap) -> ApiResult<usize> {
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
///
/// # Errors
/// There is such a header.
pub fn check_single(headers: &HeaderMap) -> ApiResult<()> {
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
