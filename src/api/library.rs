//! Errors of the library in the words of the API. The library names its settings as the command line does, and its
//! advice is about options; a client knows the fields of its request only.

use super::error::{ApiError, ApiStatus};
use super::settings::{SAMPLING, TOKEN_LISTS};
use crate::error::{Cause, Error};
use crate::resources::is_exhausted;

/// Options whose fields have other names, in lower case with `_` between the words.
const FIELDS: [(&str, &str); 5] = [
    ("temp", "temperature"),
    ("typical", "typical_p"),
    ("repeat_penalty", "repetition_penalty"),
    ("ban", "bad_words"),
    ("dry_sequence_breaker", "dry_sequence_breakers"),
];

/// Returns the field of the API that an option or a setting of the library stands for.
fn field_of(name: &str) -> Option<&'static str> {
    let name = name.trim_start_matches("--").replace('-', "_");
    let other = FIELDS.iter().find(|(option, _)| *option == name).map(|(_, field)| *field);
    let same = || SAMPLING.iter().chain(&TOKEN_LISTS).find(|field| **field == name).copied();
    other.or_else(same)
}

/// Replaces the names of options by those of their fields; `None` if an option has no field.
fn in_words(text: &str) -> Option<String> {
    let mut pieces = text.split("--");
    let mut words = pieces.next()?.to_string();
    for piece in pieces {
        let end = piece.find(|c: char| !c.is_ascii_alphanumeric() && c != '-').unwrap_or(piece.len());
        let (option, rest) = piece.split_at(end);
        words += &format!("`{}`{rest}", field_of(option)?);
    }
    Some(words)
}

/// Returns the message of an error, with its advice unless that is about options which have no field.
fn message(error: &Error) -> String {
    let found = error.cause().to_string();
    // What has no field is a setting of the server, which a client cannot change but its operator can.
    let found = in_words(&found).unwrap_or(found);
    match error.help_text().and_then(in_words) {
        Some(help) => format!("{found}; {help}"),
        None => found,
    }
}

/// An error of the library: what the request is to blame for has status 400. An error about a setting that is a field
/// of the request names the field.
impl From<&Error> for ApiError {
    fn from(error: &Error) -> ApiError {
        let field = error.setting_name().and_then(field_of);
        let status = match error.cause() {
            Cause::Usage(_) | Cause::Corrupt(_) | Cause::Unsupported(_) => ApiStatus::BAD_REQUEST,
            // Steps that are not there, which a request named.
            Cause::Engine(_) if field.is_some() => ApiStatus::BAD_REQUEST,
            Cause::OutOfMemory(_) => ApiStatus::SERVICE_UNAVAILABLE,
            Cause::Io(e) if is_exhausted(e) => ApiStatus::SERVICE_UNAVAILABLE,
            _ => ApiStatus::INTERNAL_SERVER_ERROR,
        };
        let converted = match field {
            Some(field) => ApiError::field(field, message(error)),
            None => ApiError::new(status, message(error)),
        };
        let retry_after = (status == ApiStatus::SERVICE_UNAVAILABLE).then_some(5);
        ApiError { status, retry_after, ..converted }
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> ApiError {
        ApiError::from(&error)
    }
}

impl ApiError {
    /// Converts an error of the library about the field `param`, unless the error names a field itself.
    pub fn of_field(param: &str, error: &Error) -> ApiError {
        let converted = ApiError::from(error);
        match converted.param {
            Some(_) => converted,
            None => {
                let ApiError { status, retry_after, message, .. } = converted;
                ApiError { status, retry_after, ..ApiError::field(param, message) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_lacks_now_may_be_asked_again() {
        for (errno, status, wait) in [(24, 503, Some(5)), (12, 503, Some(5)), (5, 500, None)] {
            let error = ApiError::from(Error::from(std::io::Error::from_raw_os_error(errno)));
            assert_eq!((error.status.as_u16(), error.retry_after), (status, wait), "{errno}");
        }
        let error = ApiError::from(Error::new(Cause::OutOfMemory("x".into())));
        assert_eq!((error.status.as_u16(), error.retry_after), (503, Some(5)));
    }

    #[test]
    fn options_become_fields() {
        struct Case {
            error: Error,
            param: Option<&'static str>,
            message: &'static str,
        }
        let usage = |text: &str| Error::usage(text);
        let cases = [
            Case { error: usage("found 2").setting("top-p"), param: Some("top_p"), message: "`top_p`: found 2" },
            Case {
                error: usage("two tokens").setting("--logit-bias").help("exclude the text with --ban"),
                param: Some("logit_bias"),
                message: "`logit_bias`: two tokens; exclude the text with `bad_words`",
            },
            Case {
                error: usage("found --mirostat").setting("mirostat").help("see --device"),
                param: Some("mirostat"),
                message: "`mirostat`: found `mirostat`",
            },
            Case { error: usage("too long").help("raise --ctx"), param: None, message: "too long" },
            Case {
                error: Error::engine("no such step").setting("samplers"),
                param: Some("samplers"),
                message: "`samplers`: no such step",
            },
        ];
        for Case { error, param, message } in cases {
            let found = ApiError::from(&error);
            let expected = (400, param, message);
            assert_eq!((found.status.as_u16(), found.param.as_deref(), found.message.as_str()), expected);
        }
        let broken = ApiError::of_field("prompt", &Error::engine("the device is lost"));
        assert_eq!((broken.status.as_u16(), broken.param.as_deref()), (500, Some("prompt")));
        let named = ApiError::of_field("response_format", &usage("x").setting("seed-of-another-kind"));
        assert_eq!(named.param.as_deref(), Some("response_format"));
    }
}
