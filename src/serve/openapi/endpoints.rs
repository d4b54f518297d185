//! Descriptions of endpoints.

use crate::api::style::Style;
use crate::serve::keys::Scope;

/// An endpoint.
#[derive(Debug)]
pub struct Endpoint {
    /// Path, with the names of variable parts in braces.
    pub path: &'static str,
    /// Method in lower case.
    pub method: &'static str,
    /// Group of the endpoint.
    pub tag: &'static str,
    /// Summary of what the endpoint does.
    pub summary: &'static str,
    /// Permission that requests need.
    pub access: Access,
    /// API that errors follow.
    pub style: Style,
    /// Schema of the body of requests.
    pub body: Option<&'static str>,
    /// Body of the answer.
    pub answer: AnswerBody,
    /// Statuses of errors.
    pub errors: &'static [u16],
}

/// Permission that a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// None: probes come from the machine itself and from load balancers, by any name of the host.
    Probe,
    /// A host and an origin that are allowed, and no key.
    Open,
    /// A key of this scope.
    Key(Scope),
}

/// Body of an answer.
#[derive(Debug, Clone, Copy)]
pub enum AnswerBody {
    /// No body. The status alone tells whether requests are served.
    Probe,
    /// No body.
    Empty,
    /// A JSON object of this schema.
    Json(&'static str),
    /// A text of this media type.
    Text(&'static str),
    /// A JSON object of the first schema, or a stream of objects of the second.
    Generated(&'static str, &'static str),
    /// A JSON object of this schema, or a stream of lines with such objects.
    Lines(&'static str),
}

impl Endpoint {
    /// Returns the name of the operation: method and path.
    pub fn id(&self) -> String {
        let words = self.path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        let words: Vec<&str> = std::iter::once(self.method).chain(words).collect();
        if words.len() == 1 { format!("{}_page", self.method) } else { words.join("_") }
    }

    /// Returns true if the endpoint generates text.
    pub fn generates(&self) -> bool {
        matches!(self.answer, AnswerBody::Generated(..) | AnswerBody::Lines(_))
    }
}

/// Statuses of errors, with their meaning.
pub const ERRORS: &[(u16, &str)] = &[
    (400, "A field is wrong, which `param` names, or the body is not valid."),
    (401, "There is no valid API key."),
    (403, "The key, the name of the host or the origin may not do this."),
    (404, "There is no such model or adapter."),
    (408, "The body did not come in time."),
    (409, "The adapter exists already or is in use."),
    (413, "The body is too long."),
    (429, "A limit of the key is reached, or the queue is full."),
    (500, "The engine failed."),
    (501, "Not implemented."),
    (503, "The model is loading, or the server is shutting down."),
    (504, "The deadline of the request passed."),
];
