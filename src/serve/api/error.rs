//! Errors of the HTTP API.

use crate::sched::Rejection;
use crate::serve::reply::Refusal;
use axum::http::StatusCode;
use serde_json::{Value, json};

/// An error that a client gets: status, and the object of OpenAI's API that describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// Status of the response.
    pub status: StatusCode,
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
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        let message = message.into();
        ApiError { status, message, param: None, code: None, retry_after: None, final_refusal: false }
    }

    /// Creates the error for a field with a wrong value.
    pub fn field(param: &str, message: impl std::fmt::Display) -> ApiError {
        let error = ApiError::new(StatusCode::BAD_REQUEST, format!("`{param}`: {message}"));
        ApiError { param: Some(param.to_string()), ..error }
    }

    /// Creates the error for a request that is wrong as a whole.
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// Sets the name for programs.
    pub fn code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// Converts a refusal of the engine.
    pub fn of_refusal(refusal: &Refusal) -> ApiError {
        let (rejection, wait) = match refusal {
            Refusal::Stopped(why) => return ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why),
            Refusal::Draining => {
                let message = "the server is shutting down";
                let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).code("draining");
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
                return ApiError::new(StatusCode::UNAUTHORIZED, "the API key was removed").code("invalid_api_key");
            }
            Rejection::MaxTokens => {
                return ApiError::field("max_tokens", "the API key does not allow so long an answer");
            }
            Rejection::Concurrent => {
                ("the API key has its largest number of unfinished requests", "rate_limit_exceeded")
            }
            Rejection::Rate(None) => {
                let message = "the request alone has more tokens than the API key may use per minute or per day";
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).code("rate_limit_exceeded");
                return ApiError { final_refusal: true, ..error };
            }
            Rejection::Rate(Some(_)) => ("a limit of the API key per minute or day is reached", "rate_limit_exceeded"),
        };
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).code(code);
        ApiError { retry_after: wait, ..error }
    }

    /// Returns the type in the API of OpenAI.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
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
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "api_error",
            _ => self.kind(),
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}})
    }
}
