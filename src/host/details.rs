//! Description of a loaded model for clients that choose a model by its family, size and abilities.

use crate::session::chat_templates::Template;
use crate::session::{Session, pack_digest};
use crate::tools::Format;

/// Words in a chat template that has a place for reasoning.
const THINKING: [&str; 4] = ["enable_thinking", "reasoning_effort", "<think>", "thinking"];

/// Description of a model.
#[derive(Debug, Clone, Default)]
pub struct Details {
    /// Name of the model in reports.
    pub name: String,
    /// Family in lower case, such as `llama`.
    pub family: String,
    /// Name of the architecture in the configuration of the checkpoint, such as `LlamaForCausalLM`.
    pub architecture: String,
    /// Number of parameters.
    pub parameters: u64,
    /// Size of the weights in bytes.
    pub bytes: u64,
    /// SHA-256 of the description of the pack, which has the hashes of all tensors.
    pub digest: String,
    /// Type of most weights.
    pub quantization: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of query heads, and of heads of keys and values.
    pub heads: (usize, usize),
    /// Type in which products read the weights, such as `int4w`.
    pub precision: String,
    /// Name of the device: `cpu`, or that of the GPUs.
    pub device: String,
    /// Number of threads.
    pub threads: usize,
    /// Instruction set of the CPU's kernels.
    pub isa: &'static str,
    /// Whether the chat template has a known form of calls.
    pub has_tools: bool,
    /// Whether the chat template has a place for reasoning.
    pub thinks: bool,
}

impl Details {
    /// Describes the model of a session.
    ///
    /// # Errors
    /// The pack has no tokenizer.
    pub fn of(session: &Session, template: Option<&Template>) -> crate::error::Result<Details> {
        let (engine, description) = (&session.engine, &session.reader.description);
        let config = engine.config();
        let tokenizer = session.tokenizer()?;
        let family = config.architecture.to_ascii_lowercase();
        let family = ["forcausallm", "forconditionalgeneration"].iter().find_map(|end| family.strip_suffix(end));
        let source = template.map(|template| template.template.source());
        Ok(Details {
            name: session.name.clone(),
            family: family.map_or_else(|| config.architecture.to_ascii_lowercase(), String::from),
            architecture: config.architecture.clone(),
            parameters: session.reader.entries().iter().map(|entry| entry.elements() as u64).sum(),
            bytes: session.reader.total_bytes(),
            digest: pack_digest(&session.reader),
            quantization: description.dtype.clone().unwrap_or_default(),
            hidden: config.hidden,
            layers: config.n_layers,
            heads: (config.n_heads, config.n_kv_heads),
            precision: engine.precision().to_string(),
            device: engine.device(),
            threads: engine.threads(),
            isa: engine.isa(),
            has_tools: template.is_some_and(|template| Format::of(&template.template, tokenizer).is_some()),
            thinks: source.is_some_and(|source| THINKING.iter().any(|word| source.contains(word))),
        })
    }

    /// Returns the number of parameters as people write it: `260K`, `1.1B`.
    pub fn parameter_size(&self) -> String {
        let units = [("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)];
        let count = self.parameters as f64;
        match units.iter().find(|(_, unit)| count >= *unit) {
            Some((name, unit)) if count / unit < 10.0 => format!("{:.1}{name}", count / unit),
            Some((name, unit)) => format!("{:.0}{name}", count / unit),
            None => self.parameters.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_counted_in_units() {
        let size = |parameters| Details { parameters, ..Details::default() }.parameter_size();
        let cases = [(999, "999"), (1000, "1.0K"), (260_032, "260K"), (1_100_048_384, "1.1B"), (70_000_000_000, "70B")];
        for (parameters, text) in cases {
            assert_eq!(size(parameters), text, "{parameters}");
        }
    }
}
