//! `iec tensor-map`: writes name, dtype, shape, byte range and hash of every tensor of a pack.

use crate::console;
use crate::global::Global;
use crate::pack_arg::PackArg;
use iec::error::{Error, Result};
use iec::iebin;
use iec::iebin::tensor_map::tensor_map;
use iec::output::{Inputs, Rules, Target};
use iec::session::dedup::DedupOptions;
use iec::units::human_bytes;
use serde_json::json;
use std::path::PathBuf;

/// Arguments of `iec tensor-map`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    iec tensor-map model\n  \
    iec tensor-map model --strict --out - | head")]
pub struct Args {
    #[command(flatten)]
    pack: PackArg,
    /// File to write; `-` is stdout [default: DIR/tensor_map.json]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace the file if it is there
    #[arg(long)]
    overwrite: bool,
    /// Hash every tensor again and fail if one differs from its recorded hash or has none
    #[arg(long)]
    strict: bool,
    /// Print the summary as one JSON line on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let dir = args.pack.dir()?;
    let out = args.out.unwrap_or_else(|| dir.join("tensor_map.json"));
    let reader = DedupOptions::default().open_pack(&dir).map_err(Error::while_opening_model)?;
    let inputs = Inputs::default().packs([&dir], &iebin::members());
    let rules = Rules { inputs: &inputs, overwrite: args.overwrite, stdout: !args.json };
    let target = Target::check(&out, rules)?;
    let map = tensor_map(&reader, args.strict)?;
    target.write(map.text.as_bytes())?;
    let (tensors, bytes) = (reader.entries().len(), reader.total_bytes());
    if !target.is_stdout() {
        let checked = if args.strict { ", every hash checked" } else { "" };
        global.note(format_args!("{}: {tensors} tensors, {}{checked}", out.display(), human_bytes(bytes)));
    }
    if args.json {
        console::print_json(&json!({"out": out, "tensors": tensors, "bytes": bytes, "weights_bin_sha256": map.sha256,
            "strict": args.strict}))?;
    }
    Ok(())
}
