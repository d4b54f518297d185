//! The HTTP API: fields of requests and forms of answers, without connections.

pub mod answer;
pub mod anthropic;
pub mod body;
pub mod chat;
pub mod completions;
pub mod constrain;
mod constraint_fields;
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
pub mod openapi;
pub mod other_fields;
pub mod parts;
pub mod prepare;
pub mod responses;
pub mod settings;
pub mod style;
pub mod text;
