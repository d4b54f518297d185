//! The options that say how tokens are chosen.

use iec::runtime::sampler::Sampling;

/// Heading of these options in the help.
const SAMPLING: &str = "Sampling (greedy unless one of these options is given)";

/// Greedy unless one of the sampling options is given.
#[derive(Debug, clap::Args)]
pub struct SamplingArgs {
    /// Always the most likely token; the default
    #[arg(help_heading = SAMPLING, long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p"])]
    greedy: bool,
    /// Divides the logits before drawing; 0 is greedy [default: 1 when another sampling option is given]
    #[arg(help_heading = SAMPLING, long, alias = "temp", value_name = "T")]
    temperature: Option<f64>,
    /// Draw among the K most likely tokens
    #[arg(help_heading = SAMPLING, long, value_name = "K")]
    top_k: Option<usize>,
    /// Draw among the fewest most likely tokens that hold this much probability
    #[arg(help_heading = SAMPLING, long, value_name = "P")]
    top_p: Option<f64>,
    /// Draw among tokens at least P times as likely as the most likely one
    #[arg(help_heading = SAMPLING, long, value_name = "P")]
    min_p: Option<f64>,
    /// Make tokens that occurred less likely, prompt included; 1.1 is a little
    #[arg(help_heading = SAMPLING, long, value_name = "R")]
    repeat_penalty: Option<f64>,
    /// Seed of the draws; prompt number i draws with seed + i
    #[arg(help_heading = SAMPLING, long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl SamplingArgs {
    /// The options as the sampler takes them.
    pub fn sampling(&self) -> Sampling {
        let drawn = self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        Sampling {
            temperature: self.temperature.unwrap_or(if drawn { 1.0 } else { 0.0 }),
            top_k: self.top_k.unwrap_or(0),
            top_p: self.top_p.unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            repeat_penalty: self.repeat_penalty.unwrap_or(1.0),
            seed: self.seed,
        }
    }
}
