//! `iec`: language models on machines you own: conversion, quantization, and an engine for CPUs and NVIDIA GPUs.
//!
//! This page has the names that other programs may rely on. An [`Engine`] is an opened model. It answers [`Request`]s
//! of any number of threads, which share the steps of the model:
//!
//! ```
//! use iec::{Engine, OpenOptions, Request};
//!
//! // `Engine::open` takes a pack, a checkpoint directory, a GGUF file or ORG/NAME of a downloaded model.
//! let engine = Engine::open_embedded(&OpenOptions::default())?;
//! let answer = engine.generate(&Request::text("Once upon a time").max_tokens(8).temperature(0.0))?;
//! println!("{}", answer.text());
//! # assert_eq!(answer.usage.completion_tokens, 8);
//! # Ok::<(), iec::Error>(())
//! ```
//!
//! | to | call |
//! |---|---|
//! | open a model | [`Engine::open`] with [`OpenOptions`] |
//! | answer a prompt or a conversation | [`Engine::generate`] with a [`Request`]; the result is an [`Answer`] |
//! | read an answer while it is generated | [`Engine::stream`]: a [`Stream`] of [`StreamEvent`]s, a [`CancelHandle`] |
//! | encode and decode texts | [`Engine::tokenize`], [`Engine::detokenize`], [`Engine::prompt_ids`] |
//! | compute logits or hidden states | [`Engine::logits`], [`Engine::hidden_states`] |
//! | compute embeddings or log-probabilities | [`Engine::embed`], [`Engine::score`] |
//! | use adapters (LoRA, DoRA) | [`Engine::load_adapter`], [`Request::adapter`] |
//! | watch an engine | [`Engine::metrics`], [`Engine::prometheus`], [`Engine::description`] |
//! | convert and quantize models | [`pack()`], [`quantize`], [`inspect()`], [`verify()`]; [`with_progress`] |
//!
//! A request has the fields of the server's API, by the same names. Options and results are `#[non_exhaustive]`: later
//! versions add to them. An [`Error`] has a [`Cause`], which is also the exit code of the program, and advice. Nothing
//! is printed, and no environment variable is read. The modules behind these names are hidden here and may change at
//! any time; docs/DESIGN.md describes them.

#![cfg_attr(test, allow(clippy::disallowed_methods))]

#[doc(hidden)]
pub mod adapter;
#[doc(hidden)]
pub mod api;
#[doc(hidden)]
pub mod calibration;
#[doc(hidden)]
pub mod catalogue;
#[doc(hidden)]
pub mod chat;
#[doc(hidden)]
pub mod convert;
#[doc(hidden)]
pub mod dedup;
#[doc(hidden)]
pub mod dtype;
#[doc(hidden)]
pub mod error;
#[doc(hidden)]
pub mod eval;
mod facade;
#[doc(hidden)]
pub mod files;
#[doc(hidden)]
pub mod generate;
#[doc(hidden)]
pub mod host;
#[doc(hidden)]
pub mod iebin;
#[doc(hidden)]
pub mod inspect;
#[doc(hidden)]
pub mod interrupt;
#[doc(hidden)]
pub mod job;
#[doc(hidden)]
pub mod manifest;
#[doc(hidden)]
pub mod mapped;
#[doc(hidden)]
pub mod model_config;
#[doc(hidden)]
pub mod models;
#[doc(hidden)]
pub mod output;
#[doc(hidden)]
pub mod progress;
#[doc(hidden)]
pub mod provenance;
#[doc(hidden)]
pub mod quant;
#[doc(hidden)]
pub mod quant_spec;
#[doc(hidden)]
pub mod report;
#[doc(hidden)]
pub mod resources;
#[doc(hidden)]
pub mod rng;
#[doc(hidden)]
pub mod runtime;
#[doc(hidden)]
pub mod sched;
#[doc(hidden)]
pub mod scheme;
#[doc(hidden)]
pub mod selfcheck;
#[cfg(feature = "serve")]
#[doc(hidden)]
pub mod serve;
#[doc(hidden)]
pub mod session;
#[doc(hidden)]
pub mod sha256;
#[doc(hidden)]
pub mod signature;
#[doc(hidden)]
pub mod simd;
#[doc(hidden)]
pub mod similar;
#[doc(hidden)]
pub mod strict_json;
#[doc(hidden)]
pub mod task;
#[doc(hidden)]
pub mod tokenizer_limits;
#[doc(hidden)]
pub mod tools;
#[doc(hidden)]
pub mod trial;
#[doc(hidden)]
pub mod units;
#[doc(hidden)]
pub mod verify;
#[doc(hidden)]
pub mod windowed;

#[doc(inline)]
pub use convert::pack::PackSummary;
#[doc(inline)]
pub use error::{Cause, Context, Error, Result, Signal};
pub use facade::*;
#[doc(inline)]
pub use generate::text::Message;
#[doc(inline)]
pub use progress::Unit;
#[doc(inline)]
pub use runtime::device::Devices;
#[doc(inline)]
pub use runtime::{KvType, Precision};
#[doc(inline)]
pub use scheme::Scheme;
#[doc(inline)]
pub use session::chat_templates::TemplateChoice;
#[doc(inline)]
pub use task::Progress;
