//! Sampling options.

use iec::runtime::sampler::Sampling;

/// Heading of these options in the help.
const SAMPLING: &str = "Sampling (greedy unless one of these options is given)";

/// Sampling options; generation is greedy if none is given.
#[derive(Debug, clap::Args)]
pub struct SamplingArgs {
    /// Choose the most likely token at each step; the default
    #[arg(help_heading = SAMPLING, long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p"])]
    greedy: bool,
    /// Divide the logits by T before sampling; 0 is greedy [default: 1 if another sampling option is given]
    #[arg(help_heading = SAMPLING, long, alias = "temp", value_name = "T")]
    temperature: Option<f64>,
    /// Sample from the K most likely tokens
    #[arg(help_heading = SAMPLING, long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample from the smallest set of most likely tokens whose probabilities add up to P
    #[arg(help_heading = SAMPLING, long, value_name = "P")]
    top_p: Option<f64>,
    /// Sample from tokens that are at least P times as likely as the most likely one
    #[arg(help_heading = SAMPLING, long, value_name = "P")]
    min_p: Option<f64>,
    /// Make tokens that occurred in prompt or text less likely; 1 has no effect, 1.1 is a weak penalty
    #[arg(help_heading = SAMPLING, long, value_name = "R")]
    repeat_penalty: Option<f64>,
    /// Seed of the random numbers; prompt number i uses seed + i
    #[arg(help_heading = SAMPLING, long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl SamplingArgs {
    /// Returns the options for the sampler.
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
