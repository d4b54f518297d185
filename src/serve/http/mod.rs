//! Connections: routes, checks of every request, and the bodies of answers.

mod adapters;
pub(super) mod body;
mod check;
mod cors;
mod generate;
mod info;
pub(super) mod listen;
pub(super) mod models;
mod ollama;
pub(super) mod respond;
mod routes;
mod slots;
mod stream;
mod tokens;

pub use listen::{Address, Listeners};
#[cfg(test)]
pub use routes::endpoints;
pub use routes::router;
