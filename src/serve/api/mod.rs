//! The HTTP API: fields of requests and forms of answers, without connections.

pub mod answer;
pub mod body;
pub mod chat;
pub mod completions;
pub mod error;
pub mod form;
pub mod job;
pub mod messages_in;
pub mod openapi;
pub mod prepare;
pub mod settings;
pub mod text;
