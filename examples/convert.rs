//! Converts a Hugging Face checkpoint into a pack of 4-bit weights, shows its progress, and prints what it writes:
//! `cargo run --release --example convert -- HF_DIR OUT_DIR`

use iec::{Engine, OpenOptions, PackRequest, PackSummary, Progress, Request};
use std::io::Write;
use std::path::Path;

fn main() -> iec::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [hf_dir, out_dir] = &arguments[..] else {
        return Err(iec::Error::usage("found other arguments, expected HF_DIR OUT_DIR")
            .help("name the checkpoint, and a directory for the pack"));
    };
    let summary = iec::with_progress(show, || convert(hf_dir.as_ref(), out_dir.as_ref()))?;
    let mut out = std::io::stdout();
    writeln!(out, "{} tensors, {:.2} bits per weight", summary.tensors, summary.bits_per_weight)?;
    let engine = Engine::open(out_dir, &OpenOptions::default())?;
    let answer = engine.generate(&Request::text("Once upon a time").max_tokens(64).temperature(0.0))?;
    writeln!(out, "Once upon a time{}", answer.text())?;
    Ok(())
}

/// Shows the progress of a conversion. Returning false would cancel it.
fn show(progress: Progress<'_>) -> bool {
    if let Progress::Advanced { label, done, total, .. } = progress {
        let _ = write!(std::io::stderr(), "\r{label}: {done} of {total} ");
    }
    true
}

/// Packs the checkpoint in `hf_dir` with 4 bits; an existing pack in `out_dir` is not replaced.
pub fn convert(hf_dir: &Path, out_dir: &Path) -> iec::Result<PackSummary> {
    let mut request = PackRequest::new(hf_dir, out_dir);
    request.bits = Some(4);
    iec::pack(&request)
}
