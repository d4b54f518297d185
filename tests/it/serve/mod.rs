//! The server as its clients see it: `iec serve` in a process of its own, with requests over real sockets.

mod adapters;
mod answers;
mod bodies;
mod client;
mod cuda;
mod errors;
mod events;
mod fields;
#[cfg(feature = "grpc")]
mod grpc;
mod items;
mod keys;
mod known;
mod life;
mod llama_cpp;
mod logs;
mod models_dir;
mod notations;
mod ollama;
mod probabilities;
mod rights;
mod routes;
mod said;
mod schemas;
mod state;
mod streams;
mod texts;
mod tools;
#[cfg(feature = "otel")]
mod traces;
