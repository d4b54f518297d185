//! Errors as statuses of gRPC.

use crate::api::error::{ApiError, ApiStatus};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};

/// Converts an error. Its metadata have `retry-after` with the seconds after which the call may succeed, if they are
/// known, and `x-iec-code` with the name of the error for programs.
pub fn status_of(error: &ApiError) -> Status {
    let code = match error.status {
        ApiStatus::BAD_REQUEST => Code::InvalidArgument,
        ApiStatus::UNAUTHORIZED => Code::Unauthenticated,
        ApiStatus::FORBIDDEN => Code::PermissionDenied,
        ApiStatus::NOT_FOUND => Code::NotFound,
        ApiStatus::CONFLICT => Code::FailedPrecondition,
        ApiStatus::PAYLOAD_TOO_LARGE | ApiStatus::TOO_MANY_REQUESTS => Code::ResourceExhausted,
        ApiStatus::METHOD_NOT_ALLOWED | ApiStatus::NOT_IMPLEMENTED => Code::Unimplemented,
        ApiStatus::SERVICE_UNAVAILABLE => Code::Unavailable,
        ApiStatus::GATEWAY_TIMEOUT | ApiStatus::REQUEST_TIMEOUT => Code::DeadlineExceeded,
        _ => Code::Internal,
    };
    let mut metadata = MetadataMap::new();
    if let Some(seconds) = error.retry_after {
        metadata.insert("retry-after", MetadataValue::from(seconds));
    }
    if let Some(name) = error.code {
        metadata.insert("x-iec-code", MetadataValue::from_static(name));
    }
    let message = match error.code {
        Some("deadline_exceeded") => "the deadline of the call (grpc-timeout) passed",
        _ => error.message.as_str(),
    };
    Status::with_metadata(code, message, metadata)
}

/// Builds the error of a call whose deadline passed before the engine had it.
pub fn late() -> ApiError {
    let message = "the deadline of the call passed";
    ApiError::new(ApiStatus::GATEWAY_TIMEOUT, message).code("deadline_exceeded")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_of_http_have_a_code_of_grpc_and_say_when_to_repeat_the_call() {
        let cases = [
            (ApiStatus::BAD_REQUEST, Code::InvalidArgument),
            (ApiStatus::UNAUTHORIZED, Code::Unauthenticated),
            (ApiStatus::FORBIDDEN, Code::PermissionDenied),
            (ApiStatus::NOT_FOUND, Code::NotFound),
            (ApiStatus::CONFLICT, Code::FailedPrecondition),
            (ApiStatus::PAYLOAD_TOO_LARGE, Code::ResourceExhausted),
            (ApiStatus::TOO_MANY_REQUESTS, Code::ResourceExhausted),
            (ApiStatus::NOT_IMPLEMENTED, Code::Unimplemented),
            (ApiStatus::SERVICE_UNAVAILABLE, Code::Unavailable),
            (ApiStatus::GATEWAY_TIMEOUT, Code::DeadlineExceeded),
            (ApiStatus::INTERNAL_SERVER_ERROR, Code::Internal),
        ];
        for (status, code) in cases {
            assert_eq!(status_of(&ApiError::new(status, "why")).code(), code, "{status:?}");
        }
        let full = ApiError::new(ApiStatus::TOO_MANY_REQUESTS, "full").code("queue_full");
        let status = status_of(&ApiError { retry_after: Some(7), ..full });
        let text = |name: &str| status.metadata().get(name).and_then(|value| value.to_str().ok());
        assert_eq!((text("retry-after"), text("x-iec-code")), (Some("7"), Some("queue_full")));
        assert!(status_of(&late()).message().contains("grpc-timeout"));
    }
}
