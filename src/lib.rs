//! `iec`: an offline model-conversion and quantization toolchain with its own runtime.
//!
//! The parts of the crate and what each may import (`tests/house.rs` holds the table):
//!
//! | module | question it answers | may import |
//! |---|---|---|
//! | ground (tools): `error files interrupt mapped progress resources rng sha256 simd task units windowed` | what does any code need? errors, reading and mapping, memory, progress, hashes, random numbers | nothing |
//! | ground (writing): `job output strict_json` | how are files written so that only complete ones have final names, and long work can go on? | ground (tools) |
//! | ground (model): `adapter calibration catalogue dtype iebin manifest model_config provenance quant_spec scheme tokenizer_limits` | what is a model, an artifact, a tensor, a scheme? | ground (tools), ground (writing) |
//! | `quant` | how do floats become blocks, and was it good enough? | ground |
//! | `dedup` | which bytes are stored twice? | ground |
//! | `convert` | how does a Hugging Face checkpoint become an artifact? | ground, `quant` |
//! | `sched` | which sequence computes how many tokens in the next step? (no clock, threads or I/O) | ground |
//! | `runtime` | how does an artifact compute logits? | ground |
//! | `generate` | how do prompts become answers? tokenizer, chat template, batches, drafts, constraints, samplers | ground, `sched`, `runtime` |
//! | `eval` | how well does it answer? | ground, `runtime`, `generate` |
//! | `verify` | is the answer the one Hugging Face gives? (candle-core as an independent reference) | ground |
//! | `signature` | who made a pack, and was it changed since? | ground |
//! | `trial` | is a quantized model as good as the original, and which tensor is to blame? | ground, `quant`, `convert`, `eval`, `runtime`, `generate`, `verify`, `signature` |
//! | `selfcheck` | does a GPU compute what the CPU computes, and how fast? | ground, `runtime` |
//! | `tools` | which tools may an answer call, and which parts of a text are calls and reasoning? | ground, `generate` |
//! | `session` | what does an opened pack need to answer? template, sampling, adapters, plan of memory, metrics | ground, `dedup`, `convert::adapter`, `runtime`, `generate`, `tools` |
//! | `models` | what does a user mean by a model? pack, checkpoint, GGUF file or name; cache of packs | ground, `convert`, `runtime`, `generate`, `trial`, `session` |
//! | `host` | which thread owns a session, and how do requests reach it? (events, cancellation, metrics, drain) | ground, `runtime`, `generate`, `sched`, `tools`, `session` |
//! | `api` | what may a request ask, and how does its answer look as JSON? | ground, `runtime`, `generate`, `sched`, `tools`, `session`, `host` |
//! | `serve` | how do many clients use models over HTTP? | ground, `convert`, `runtime`, `generate`, `sched`, `tools`, `session`, `models`, `host`, `api` |
//! | `facade` | which names may other programs rely on? an engine that answers, conversions, errors | ground, `quant`, `convert`, `runtime`, `generate`, `sched`, `tools`, `session`, `models`, `host`, `api`, `report`, `inspect`, `signature`, `trial` |
//! | `report` | how are results shown? | ground, `quant`, `convert`, `runtime`, `generate`, `eval`, `verify`, `signature`, `trial`, `session`, `models`, `sched` |
//! | `inspect` | what does a checkpoint, pack, weight file or manifest hold? | ground, `quant`, `dedup`, `convert`, `runtime`, `report` |
//! | `bin/iec` | which command does what? | everything |
//!
//! To generate text, open a [`session::Session`] (`examples/generate.rs`); to make a pack of a checkpoint, call
//! [`convert::pack::pack()`] (`examples/convert.rs`). docs/DESIGN.md explains the design.

#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod adapter;
pub mod api;
pub mod calibration;
pub mod catalogue;
pub mod convert;
pub mod dedup;
pub mod dtype;
pub mod error;
pub mod eval;
mod facade;
pub mod files;
pub mod generate;
pub mod host;
pub mod iebin;
pub mod inspect;
pub mod interrupt;
pub mod job;
pub mod manifest;
pub mod mapped;
pub mod model_config;
pub mod models;
pub mod output;
pub mod progress;
pub mod provenance;
pub mod quant;
pub mod quant_spec;
pub mod report;
pub mod resources;
pub mod rng;
pub mod runtime;
pub mod sched;
pub mod scheme;
pub mod selfcheck;
#[cfg(feature = "serve")]
pub mod serve;
pub mod session;
pub mod sha256;
pub mod signature;
pub mod simd;
pub mod strict_json;
pub mod task;
pub mod tokenizer_limits;
pub mod tools;
pub mod trial;
pub mod units;
pub mod verify;
pub mod windowed;

pub use convert::pack::PackSummary;
pub use error::{Cause, Context, Error, Result, Signal};
pub use facade::*;
pub use generate::text::Message;
pub use progress::Unit;
pub use runtime::device::Devices;
pub use runtime::{KvType, Precision};
pub use scheme::Scheme;
pub use session::chat::TemplateChoice;
pub use task::Progress;
