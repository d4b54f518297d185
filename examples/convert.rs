//! Converts a Hugging Face checkpoint into a pack of 4-bit weights and prints what it writes:
//! `cargo run --release --example convert -- HF_DIR OUT_DIR`

use iec::convert::pack::{PackOptions, PackSummary, pack};
use iec::session::{Session, SessionOptions};
use std::io::Write;
use std::path::Path;

/// Manifest that quantizes the matrices of attention and MLP; all other tensors keep their type.
const MANIFEST: &str = r#"{
    "version": 1,
    "defaults": { "bits": 4, "group_size": 32 },
    "rules": [{ "include": "^model\\.layers\\.\\d+\\.(self_attn|mlp)\\.\\w+_proj\\.weight$" }]
}"#;

fn main() -> iec::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [hf_dir, out_dir] = &arguments[..] else {
        return Err(iec::Error::usage("found other arguments, expected HF_DIR OUT_DIR")
            .help("name the checkpoint, and a directory for the pack"));
    };
    let summary = convert(hf_dir.as_ref(), out_dir.as_ref())?;
    let mut out = std::io::stdout();
    writeln!(out, "{} tensors, {:.2} bits per weight", summary.tensors, summary.bits_per_weight)?;
    let mut session = Session::open(out_dir.as_ref(), &SessionOptions::default())?;
    writeln!(out, "Once upon a time{}", session.complete("Once upon a time", 64)?)?;
    Ok(())
}

/// Packs the checkpoint in `hf_dir`; an existing pack in `out_dir` is not replaced.
pub fn convert(hf_dir: &Path, out_dir: &Path) -> iec::Result<PackSummary> {
    let manifest = tempfile::NamedTempFile::new()?;
    std::fs::write(manifest.path(), MANIFEST)?;
    pack(&PackOptions {
        hf_dir: hf_dir.into(),
        out_dir: out_dir.into(),
        manifest: Some(manifest.path().into()),
        ..PackOptions::default()
    })
}
