//! Errors of the HTTP API.

use crate::error::{Cause, Error};
use crate::host::reply::Refusal;
use crate::sched::Rejection;
use serde_json::{Value, json};

/// Status of an error, with the numbers of HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ApiStatus(u16);

impl ApiStatus {
    /// The request has a fault.
    pub const BAD_REQUEST: ApiStatus = ApiStatus(400);
    /// There is no valid key.
    pub const UNAUTHORIZED: ApiStatus = ApiStatus(401);
    /// The key does not allow it.
    pub const FORBIDDEN: ApiStatus = ApiStatus(403);
    /// The model, adapter or path that the request names does not exist.
    pub const NOT_FOUND: ApiStatus = ApiStatus(404);
    /// The path takes other methods.
    pub const METHOD_NOT_ALLOWED: ApiStatus = ApiStatus(405);
    /// The request came too slowly.
    pub const REQUEST_TIMEOUT: ApiStatus = ApiStatus(408);
    /// The state of what the request names does not allow it now.
    pub const CONFLICT: ApiStatus = ApiStatus(409);
    /// The request is too large.
    pub const PAYLOAD_TOO_LARGE: ApiStatus = ApiStatus(413);
    /// A limit is reached.
    pub const TOO_MANY_REQUESTS: ApiStatus = ApiStatus(429);
    /// The engine failed.
    pub const INTERNAL_SERVER_ERROR: ApiStatus = ApiStatus(500);
    /// There is no such function.
    pub const NOT_IMPLEMENTED: ApiStatus = ApiStatus(501);
    /// The model is not ready, or the system lacks something.
    pub const SERVICE_UNAVAILABLE: ApiStatus = ApiStatus(503);
    /// The deadline passed.
    pub const GATEWAY_TIMEOUT: ApiStatus = ApiStatus(504);

    /// Returns the number.
    pub fn as_u16(self) -> u16 {
        self.0
    }

    /// Returns true if the request is not to blame.
    pub fn is_server_error(self) -> bool {
        self.0 >= 500
    }
}

/// An error that a client gets: status, and the object of OpenAI's API that describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// Status of the response.
    pub status: ApiStatus,
    /// Description: the fault, and the expected value.
    pub message: String,
    /// Field of the request that is wrong.
    pub param: Option<String>,
    /// Name of the error for programs.
    pub code: Option<&'static str>,
    /// Seconds after which the request may succeed.
    pub retry_after: Option<u64>,
    /// True if clients must not repeat the request by themselves.
    pub final_refusal: bool,
}

/// Result of a part of the API.
pub type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    /// Creates an error.
    pub fn new(status: ApiStatus, message: impl Into<String>) -> ApiError {
        let message = message.into();
        ApiError { status, message, param: None, code: None, retry_after: None, final_refusal: false }
    }

    /// Creates the error for a field with a wrong value.
    pub fn field(param: &str, message: impl std::fmt::Display) -> ApiError {
        let error = ApiError::new(ApiStatus::BAD_REQUEST, format!("`{param}`: {message}"));
        ApiError { param: Some(param.to_string()), ..error }
    }

    /// Creates the error for a request that is wrong as a whole.
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(ApiStatus::BAD_REQUEST, message)
    }

    /// Sets the name for programs.
    pub fn code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// Converts a refusal of the engine.
    pub fn of_refusal(refusal: &Refusal) -> ApiError {
        let (rejection, wait) = match refusal {
            Refusal::Stopped(why) => return ApiError::new(ApiStatus::INTERNAL_SERVER_ERROR, why),
            Refusal::Draining => {
                let message = "the server is shutting down";
                let error = ApiError::new(ApiStatus::SERVICE_UNAVAILABLE, message).code("draining");
                return ApiError { retry_after: Some(30), ..error };
            }
            Refusal::Limit(rejection, wait) => (rejection, *wait),
        };
        let (message, code) = match rejection {
            Rejection::QueueFull => ("the queue has its largest number of requests (--max-queue)", "queue_full"),
            Rejection::QueueTokens => {
                ("the waiting prompts have their largest number of tokens (--max-queue-tokens)", "queue_full")
            }
            Rejection::Context => {
                let message = "prompt and answer need more memory than the KV cache has (--kv-memory); \
                               use a shorter prompt or a smaller max_tokens";
                return ApiError::invalid(message).code("context_length_exceeded");
            }
            Rejection::UnknownKey => {
                return ApiError::new(ApiStatus::UNAUTHORIZED, "the API key was removed").code("invalid_api_key");
            }
            Rejection::MaxTokens => {
                return ApiError::field("max_tokens", "the API key does not allow so long an answer");
            }
            Rejection::Concurrent => {
                ("the API key has its largest number of unfinished requests", "rate_limit_exceeded")
            }
            Rejection::Rate(None) => {
                let message = "the request alone has more tokens than the API key may use per minute or per day";
                let error = ApiError::new(ApiStatus::TOO_MANY_REQUESTS, message).code("rate_limit_exceeded");
                return ApiError { final_refusal: true, ..error };
            }
            Rejection::Rate(Some(_)) => ("a limit of the API key per minute or day is reached", "rate_limit_exceeded"),
        };
        let error = ApiError::new(ApiStatus::TOO_MANY_REQUESTS, message).code(code);
        ApiError { retry_after: wait, ..error }
    }

    /// Returns the type in the API of OpenAI.
    fn kind(&self) -> &'static str {
        match self.status {
            ApiStatus::UNAUTHORIZED => "authentication_error",
            ApiStatus::FORBIDDEN => "permission_error",
            ApiStatus::NOT_FOUND => "not_found_error",
            ApiStatus::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// Returns the object of OpenAI's API.
    pub fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind(), "param": self.param, "code": self.code}})
    }

    /// Returns the object of Anthropic's API.
    pub fn to_anthropic(&self) -> Value {
        let kind = match self.status {
            ApiStatus::PAYLOAD_TOO_LARGE => "request_too_large",
            ApiStatus::SERVICE_UNAVAILABLE => "overloaded_error",
            ApiStatus::GATEWAY_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "api_error",
            _ => self.kind(),
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}})
    }
}

impl From<ApiError> for Error {
    /// Converts the error of a request: what the request is to blame for is [`Cause::Usage`].
    fn from(error: ApiError) -> Error {
        let ApiError { status, message, code, .. } = error;
        let cause = match (status.is_server_error(), status == ApiStatus::SERVICE_UNAVAILABLE) {
            (true, true) if code.is_none() => Cause::OutOfMemory(message),
            (true, _) => Cause::Engine(message),
            (false, _) => Cause::Usage(message),
        };
        Error::new(cause)
    }
}
