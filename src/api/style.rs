//! APIs whose form the objects of errors have.

use super::error::ApiError;
use serde_json::{Value, json};

/// API whose objects describe errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// That of OpenAI.
    OpenAi,
    /// That of Anthropic.
    Anthropic,
    /// That of ollama.
    Ollama,
    /// That of Anthropic for requests of its clients, otherwise that of OpenAI.
    ByHeader,
}

impl Style {
    /// Returns the style for a request, which comes from a client of Anthropic's API or another one.
    pub fn of(self, is_anthropic: bool) -> Style {
        match self {
            Style::ByHeader if is_anthropic => Style::Anthropic,
            Style::ByHeader => Style::OpenAi,
            style => style,
        }
    }

    /// Returns the object for an error.
    pub fn error(self, error: &ApiError) -> Value {
        match self {
            Style::OpenAi | Style::ByHeader => error.to_json(),
            Style::Anthropic => error.to_anthropic(),
            Style::Ollama => json!({"error": error.message}),
        }
    }

    /// Returns the name of the schema of an error.
    pub fn schema(self) -> &'static str {
        match self {
            Style::OpenAi | Style::ByHeader => "Error",
            Style::Anthropic => "AnthropicError",
            Style::Ollama => "OllamaError",
        }
    }

    /// Returns the name of the response for a status.
    pub fn response(self, status: u16) -> String {
        format!("{}{status}", self.schema())
    }
}
