//! Opens a model, or the one that is embedded in the library, and streams the text that follows a prompt:
//! `cargo run --release --example generate -- ["PROMPT" [MODEL]]`. MODEL is a pack, a checkpoint directory, a GGUF file
//! or ORG/NAME of a downloaded model.

use iec::models::{self, Places, embedded};
use iec::session::{GenerateOptions, Metrics, SessionOptions, Speculation};
use std::io::Write;
use std::path::Path;

fn main() -> iec::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let prompt = arguments.first().map_or("Once upon a time", |text| text);
    let metrics = generate(prompt, arguments.get(1).map(Path::new), &mut std::io::stdout())?;
    writeln!(std::io::stderr(), "\n{} tokens, {:.1} per second", metrics.tokens_generated, metrics.tps_decode)?;
    Ok(())
}

/// Writes the text that follows `prompt` to `out` while it is generated, and returns its timings.
pub fn generate(prompt: &str, model: Option<&Path>, out: &mut impl Write) -> iec::Result<Metrics> {
    let options = SessionOptions { speculation: Speculation::Ngram, ..SessionOptions::default() };
    let mut session = match model {
        Some(model) => models::open_session(model, &options, &Places::of(&|name| std::env::var_os(name))?)?,
        None => embedded::open_session(&options)?,
    };
    let request = session.request(session.tokenizer()?.encode(prompt)?);
    let generation = session.generate(vec![request], &GenerateOptions::default(), |token| {
        out.write_all(token.text.as_bytes())?;
        Ok(out.flush()?)
    })?;
    Ok(Metrics::new(&session, &[generation]))
}
