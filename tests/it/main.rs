//! End-to-end and whole-model tests in one binary, so that a release build links only once.

#![allow(clippy::disallowed_methods)]

mod checkpoint;
mod common;
mod cuda;
mod cuda_adapters;
mod cuda_states;
mod pty;
mod random_adapter;
mod schemas;
mod torch_file;

mod adapter_combine;
#[cfg(feature = "reference")]
mod adapter_f64;
mod adapter_pack;
#[cfg(feature = "reference")]
mod adapter_reference;
mod adapters;
mod added_files;
mod answers;
mod arguments;
mod attention;
mod bench;
mod bombs;
mod budget;
mod calib;
mod calib_parts;
mod calib_quantized;
mod chat;
mod chat_pipe;
mod console;
mod constraint;
mod decode;
mod dedup;
mod dedup_family;
mod dedup_run;
mod dedup_units;
mod demo;
mod determinism;
mod device;
mod devices;
mod documents;
mod eval;
mod examples;
mod export_hf;
mod formats;
#[cfg(any(feature = "reference", feature = "serve"))]
mod forward_f64;
mod gguf;
mod gguf_blocks;
mod golden;
#[cfg(feature = "reference")]
mod guide;
mod help;
mod hostile;
mod hub;
mod inspect;
mod irregular;
mod kv_gate;
mod latent;
mod layouts;
mod library;
mod model_inputs;
mod models;
#[cfg(feature = "reference")]
mod odd_families;
#[cfg(feature = "reference")]
mod odd_shapes;
mod output_matrix;
mod outputs;
mod pack;
mod parity;
mod parts;
mod pickle;
mod plan;
mod predecessor;
mod prediction;
mod prefix_cache;
mod ptq;
mod published;
#[cfg(feature = "hub")]
mod pull;
mod python_json;
mod q4;
#[cfg(feature = "reference")]
mod random_checkpoint;
mod recipes;
mod recurrent;
mod replacement;
mod reports;
mod requests;
mod resources;
mod resume;
mod run;
mod schedules;
#[cfg(feature = "serve")]
mod serve;
mod sign;
mod signals;
mod speculate;
mod state_dir;
mod suite;
mod synth;
mod task_gate;
mod template_process;
mod terminal_text;
mod tokenizer_files;
mod tuning;
mod typing;
mod unpack;
mod verify;
