//! Opens a model, or the one that is embedded in the library, and streams the text that follows a prompt:
//! `cargo run --release --example generate -- ["PROMPT" [MODEL]]`. MODEL is a pack, a checkpoint directory, a GGUF file
//! or ORG/NAME of a downloaded model.

use iec::{Delta, Engine, EngineMetrics, OpenOptions, Request};
use std::io::Write;
use std::path::Path;

fn main() -> iec::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let prompt = arguments.first().map_or("Once upon a time", |text| text);
    let metrics = generate(prompt, arguments.get(1).map(Path::new), &mut std::io::stdout())?;
    let rate = metrics.generated_tokens as f64 / metrics.step_seconds;
    writeln!(std::io::stderr(), "\n{} tokens, {rate:.1} per second", metrics.generated_tokens)?;
    Ok(())
}

/// Writes the text that follows `prompt` to `out` while it is generated, and returns the counters of the engine.
pub fn generate(prompt: &str, model: Option<&Path>, out: &mut impl Write) -> iec::Result<EngineMetrics> {
    let mut options = OpenOptions::default().with_caches(&|name| std::env::var_os(name))?;
    options.speculate = true;
    let engine = match model {
        Some(model) => Engine::open(model, &options)?,
        None => Engine::open_embedded(&options)?,
    };
    for event in engine.stream(&Request::text(prompt).max_tokens(128).temperature(0.0))? {
        if let Delta::Text(text) = event?.delta {
            out.write_all(text.as_bytes())?;
            out.flush()?;
        }
    }
    Ok(engine.metrics())
}
