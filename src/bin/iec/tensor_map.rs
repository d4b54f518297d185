//! `iec tensor-map`: name, dtype, shape and byte range of every tensor of a pack, tied to its binary by a hash.

use crate::global::Global;
use iec::error::{Error, Result};
use iec::iebin::IebinReader;
use iec::iebin::tensor_map::tensor_map;
use iec::output::write_atomically;
use iec::units::human_bytes;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    iec tensor-map --model-dir model\n  \
    iec tensor-map --model-dir model --strict --out - | head")]
pub struct Args {
    /// Directory of model.ie.json and model.ie.bin
    #[arg(long, env = "MODEL_DIR", value_name = "DIR")]
    model_dir: PathBuf,
    /// File to write; `-` is stdout [default: DIR/tensor_map.json]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Hash every tensor again and fail when one differs from its record or has none
    #[arg(long)]
    strict: bool,
    /// A summary as one JSON line on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let to_stdout = args.out.as_ref().is_some_and(|out| out.as_os_str() == "-");
    if to_stdout && args.json {
        return Err(Error::usage("`--out -` and `--json` both want stdout; choose one"));
    }
    let reader = IebinReader::open(&args.model_dir).map_err(Error::while_opening_model)?;
    let map = tensor_map(&reader, args.strict).map_err(Error::while_opening_model)?;
    let out = args.out.unwrap_or_else(|| args.model_dir.join("tensor_map.json"));
    if to_stdout {
        std::io::stdout().write_all(map.text.as_bytes())?;
    } else {
        write_atomically(&out, map.text.as_bytes())?;
        let bytes = human_bytes(reader.bin()?.bytes().len() as u64);
        let checked = if args.strict { ", every hash checked" } else { "" };
        global.note(format_args!("{}: {} tensors, {bytes}{checked}", out.display(), reader.entries().len()));
    }
    if args.json {
        let summary = json!({
            "out": out,
            "tensors": reader.entries().len(),
            "bytes": reader.bin()?.bytes().len(),
            "weights_bin_sha256": map.sha256,
            "strict": args.strict,
        });
        println!("{summary}");
    }
    Ok(())
}
