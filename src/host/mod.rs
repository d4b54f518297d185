//! Engine host: a thread per model that owns its [`Session`](crate::session::Session) and its batch, below every way
//! in which requests come in.
//!
//! A request is submitted to a [`model::Model`] from any thread, and its [`reply::Inlet`] delivers typed events:
//! queued, tokens, the end of each text. A thread waits for them, or a task of any asynchronous runtime polls them. All
//! requests that run at the same time share steps. A request whose [`model::Ticket`] is dropped is cancelled within one
//! step; one whose reader is slow pauses. A few more threads per model encode prompts ([`model::Model::encode`]).
//!
//! ```text
//! reader --Job--> encoder threads --requests--> reader --Command--> engine thread --Reply--> reader
//! ```

pub mod channel;
pub mod details;
pub mod engine;
pub mod jobs;
pub mod lease;
mod log_line;
pub mod metrics;
pub mod model;
pub mod own;
pub mod reply;
pub mod token_text;
pub mod turns;

pub use log_line::LogLine;
pub use model::KeyChange;
