//! gRPC: the service `vllm.grpc.engine.VllmEngine` of vLLM's engine, which routers call, with `grpc.health.v1` and
//! reflection.
//!
//! A call is a request of HTTP/2. Its path decides which permission it needs, its metadata are headers with the same
//! keys as those of HTTP, and its message becomes the same work for the engine ([`super::submit`]). The messages are
//! generated from `proto/`, see `scripts/grpc.sh`.
//!
//! ```text
//! listen -> check (key, room for the message) -> engine -> request -> submit -> answer (a stream of messages)
//! ```

mod answer;
mod check;
mod engine;
mod flush;
mod health;
mod info;
mod listen;
mod proto;
mod request;
mod running;
mod services;
mod status;
mod tokenizer;

pub use listen::serve;
