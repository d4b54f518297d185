//! Requests and answers as JSON, without connections: the fields that a request may have in the APIs of OpenAI,
//! Anthropic and ollama, how it becomes work for a [`crate::host::model::Model`], and the form of its answer.

pub mod answer;
pub mod anthropic;
pub mod body;
pub mod chat;
pub mod completions;
pub mod constrain;
pub(crate) mod constraint_fields;
pub mod dialogue;
pub mod error;
pub mod form;
pub mod gbnf;
pub mod infill;
pub mod job;
mod json_error;
mod library;
mod members;
pub mod messages_in;
pub mod object;
pub mod ollama;
pub mod other_fields;
pub mod parts;
pub mod prepare;
pub mod responses;
pub mod settings;
pub mod style;
pub mod text;
