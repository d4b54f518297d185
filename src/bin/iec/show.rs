//! `iec show`: describes a pack, checkpoint, GGUF file, downloaded repository or entry of the cache.

use crate::console;
use crate::global::{Global, non_empty_variable};
use iec::error::Result;
use iec::inspect::{Options, describe};
use iec::models::{Description, Places};
use iec::report::models;
use serde_json::Value;
use std::path::PathBuf;
use std::time::SystemTime;

/// Arguments of `iec show`.
#[derive(Debug, clap::Args)]
#[command(after_help = "A model that is not packed yet is described as it is; nothing is packed.\n\n\
Examples:\n  \
iec show TinyLlama/TinyLlama-1.1B-Chat-v1.0\n  \
iec show models/tinyllama\n  \
iec show tinyllama-3f2a91bc --json")]
pub struct Args {
    /// Name as `iec list` shows it, a pack, a checkpoint, a GGUF file, or ORG/NAME of a downloaded model
    model: PathBuf,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Print the description as one JSON line
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, _global: &Global) -> Result<()> {
    let found = Description::of(&args.model, &Places::of(&non_empty_variable)?)?;
    let options = Options { path: found.path.clone(), tensors: args.tensors, json: args.json, ..Options::default() };
    let text = describe(&options)?;
    if !args.json {
        return console::print(format_args!("{}\n{text}", models::description(&found, SystemTime::now())));
    }
    let mut object: Value = serde_json::from_str(&text).unwrap_or_default();
    object["cache"] = found.entry.as_ref().map_or(Value::Null, models::entry_json);
    object["chat_template"] = found.has_template.into();
    object["context"] = object["model"]["max_context"].clone();
    console::print_json(&object)
}
