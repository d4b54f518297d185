//! Checks of every call before its method sees it: the permission that its path needs, the key, and the room for its
//! message.

use super::proto::ENGINE;
use super::status::status_of;
use crate::api::error::{ApiError, ApiResult};
use crate::serve::app::{App, Tenants};
use crate::serve::caller::{self, Caller};
use crate::serve::http::body::read_body;
use crate::serve::http::respond;
use crate::serve::keys::Scope;
use crate::serve::openapi::Access;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::middleware::Next;
use axum::response::Response;
use std::sync::Arc;
use std::time::Duration;

/// Largest message of calls that need no key.
pub const SMALL: usize = 16 << 10;
/// Time in which the message of a call that needs no key must come.
const SMALL_TIME: Duration = Duration::from_secs(10);

/// Checks a call, and passes it on.
pub async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let id = caller::id_of(&app, request.headers());
    let tenants = app.tenants();
    let access = access_of(request.uri().path());
    let mut response = match admit(&tenants, access, request.headers()) {
        Err(error) => status_of(&error).into_http(),
        Ok(index) => {
            let caller = Caller { tenants, index, id: id.clone() };
            match read(&app, caller, access, request).await {
                Ok(request) => next.run(request).await,
                Err(error) => status_of(&error).into_http(),
            }
        }
    };
    respond::set(&mut response, "x-request-id", &id);
    response
}

/// Returns the permission that calls of a path need: those of the endpoints of HTTP that do the same.
fn access_of(path: &str) -> Access {
    let (service, method) = path.trim_start_matches('/').split_once('/').unwrap_or_default();
    match (service, method) {
        ("grpc.health.v1.Health", _) => Access::Probe,
        (service, _) if service.starts_with("grpc.reflection.") => Access::Open,
        (ENGINE, "HealthCheck") => Access::Probe,
        (ENGINE, "GetLoads") => Access::Key(Scope::Metrics),
        (ENGINE, "FlushCache" | "StartProfile" | "StopProfile") => Access::Key(Scope::Admin),
        _ => Access::Key(Scope::Infer),
    }
}

/// Returns the index of the key of a call that may be served.
fn admit(tenants: &Tenants, access: Access, headers: &HeaderMap) -> ApiResult<usize> {
    caller::check_single(headers)?;
    match access {
        Access::Key(scope) => caller::key_of(tenants, scope, headers),
        Access::Open | Access::Probe => Ok(0),
    }
}

/// Reads the message of a call, with the limits of bodies of HTTP. Reflection reads a stream of small messages by
/// itself.
async fn read(app: &App, caller: Caller, access: Access, request: Request) -> ApiResult<Request> {
    let (parts, body) = request.into_parts();
    let (bytes, room) = match access {
        Access::Open => return Ok(Request::from_parts(parts, body)),
        Access::Probe => {
            let bytes = tokio::time::timeout(SMALL_TIME, to_bytes(body, SMALL)).await;
            let bytes = bytes.ok().and_then(Result::ok);
            (bytes.ok_or_else(|| ApiError::invalid("the message is too long, or did not come"))?, None)
        }
        Access::Key(_) => {
            let mut whole = Request::new(body);
            *whole.headers_mut() = parts.headers.clone();
            let (bytes, room) = read_body(app, &caller, whole).await?;
            (bytes.into(), Some(room))
        }
    };
    let mut request = Request::from_parts(parts, Body::from(bytes));
    request.extensions_mut().insert(caller);
    // A method drops the room once it has taken from the message what it needs.
    if let Some(room) = room {
        request.extensions_mut().insert(Arc::new(room));
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_need_the_permissions_of_the_endpoints_that_do_the_same() {
        let cases = [
            ("/grpc.health.v1.Health/Check", Access::Probe),
            ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Access::Open),
            ("/vllm.grpc.engine.VllmEngine/HealthCheck", Access::Probe),
            ("/vllm.grpc.engine.VllmEngine/Generate", Access::Key(Scope::Infer)),
            ("/vllm.grpc.engine.VllmEngine/Abort", Access::Key(Scope::Infer)),
            ("/vllm.grpc.engine.VllmEngine/GetTokenizer", Access::Key(Scope::Infer)),
            ("/vllm.grpc.engine.VllmEngine/GetLoads", Access::Key(Scope::Metrics)),
            ("/vllm.grpc.engine.VllmEngine/FlushCache", Access::Key(Scope::Admin)),
            ("/any.Service/HealthCheck", Access::Key(Scope::Infer)),
            ("/", Access::Key(Scope::Infer)),
        ];
        for (path, access) in cases {
            assert_eq!(access_of(path), access, "{path}");
        }
    }
}
