//! `iec list`: lists the packs in the cache.

use crate::console;
use crate::global::{Global, non_empty_variable};
use iec::error::Result;
use iec::models::{Cache, Places};
use iec::report::models;
use std::time::SystemTime;

/// Arguments of `iec list`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Checkpoints, GGUF files and models of the Hugging Face cache are packed once into IEC_CACHE \
[default: $XDG_CACHE_HOME/iec, otherwise ~/.cache/iec] when a command uses them. IEC_CACHE_MAX limits the size of all \
packs there: after a model is packed, the least recently used ones are removed [default: no limit].\n\n\
Examples:\n  \
iec list\n  \
iec list --json | jq -r '.models[] | [.name, .source] | @tsv'")]
pub struct Args {
    /// Print the list as one JSON line
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let cache = Cache::of(&Places::of(&non_empty_variable)?)?;
    let entries = cache.entries()?;
    if args.json {
        return console::print_json(&models::json(&entries));
    }
    if entries.is_empty() {
        global.note(format_args!("{}: no models", cache.root().display()));
    }
    console::print(models::table(&entries, SystemTime::now()))
}
