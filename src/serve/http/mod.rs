//! Connections: routes, checks of every request, and the bodies of answers.

mod adapters;
mod body;
mod check;
mod cors;
mod generate;
mod info;
mod listen;
mod models;
mod ollama;
mod respond;
mod routes;
mod slots;
mod stream;
mod tokens;

pub use listen::{Address, Listeners};
#[cfg(test)]
pub use routes::endpoints;
pub use routes::router;
