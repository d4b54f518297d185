//! `iec rm`: removes packs from the cache.

use crate::console;
use crate::global::{Global, non_empty_variable};
use iec::error::Result;
use iec::models::{Cache, Places};
use iec::report::models;
use serde_json::json;
use std::path::PathBuf;

/// Arguments of `iec rm`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Only packs in the cache are removed, never a checkpoint, a GGUF file or a pack elsewhere. An \
entry that a process uses stays, and the exit code is 1.\n\n\
Examples:\n  \
iec rm tinyllama-3f2a91bc\n  \
iec rm models/tinyllama TinyLlama/TinyLlama-1.1B-Chat-v1.0\n  \
iec rm --all")]
pub struct Args {
    /// Names as `iec list` shows them, or the checkpoints, GGUF files or ORG/NAME that the packs were made from
    #[arg(value_name = "MODEL", required_unless_present = "all")]
    models: Vec<PathBuf>,
    /// Remove all packs in the cache
    #[arg(long, conflicts_with = "models")]
    all: bool,
    /// Print the removed names and the freed bytes as one JSON line
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let cache = Cache::of(&Places::of(&non_empty_variable)?)?;
    let entries = if args.all { cache.entries()? } else { cache.all_named(&args.models)? };
    let (removed, refused) = cache.remove_all(&entries);
    if args.json {
        console::print_json(&json!({"removed": removed.names, "bytes": removed.bytes}))?;
    }
    global.note(models::removed(&removed));
    refused.map_or(Ok(()), Err)
}
