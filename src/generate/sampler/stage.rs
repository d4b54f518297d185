//! Stages of sampling: their names, and the order in which they are applied.

use crate::error::{Error, Result};
use std::sync::Arc;

/// A step that changes logits or removes candidates before a token is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Repetition, presence and frequency penalties.
    Penalties,
    /// DRY, a penalty on repeated sequences.
    Dry,
    /// Division of the logits by the temperature.
    Temperature,
    /// The k most likely candidates.
    TopK,
    /// The most likely candidates up to a total probability.
    TopP,
    /// Candidates with a probability relative to the largest.
    MinP,
    /// Locally typical candidates.
    Typical,
    /// XTC, which removes all likely candidates but one.
    Xtc,
}

/// Stages in the default order, that of `transformers`, each with its name and with other names in use.
const STAGES: [(Stage, &str, &[&str]); 8] = [
    (Stage::Penalties, "penalties", &[]),
    (Stage::Dry, "dry", &[]),
    (Stage::Temperature, "temperature", &["temp"]),
    (Stage::TopK, "top_k", &[]),
    (Stage::TopP, "top_p", &["nucleus"]),
    (Stage::MinP, "min_p", &[]),
    (Stage::Typical, "typ_p", &["typical", "typical_p", "typ"]),
    (Stage::Xtc, "xtc", &[]),
];

/// Names of samplers of other programs that are not implemented.
const ABSENT: [&str; 13] = [
    "top_n_sigma",
    "top_nsigma",
    "dynatemp",
    "temperature_ext",
    "quadratic",
    "smoothing",
    "tfs_z",
    "top_a",
    "epsilon_cutoff",
    "eta_cutoff",
    "adaptive_p",
    "infill",
    "beam_search",
];

impl Stage {
    /// Returns the name of the stage, that of llama.cpp.
    pub fn name(self) -> &'static str {
        STAGES.iter().find(|(stage, ..)| *stage == self).map_or("", |(_, name, _)| name)
    }

    /// Returns true for stages that change logits also when the most likely token is chosen (greedy). The others
    /// concern only draws.
    pub fn is_penalty(self) -> bool {
        matches!(self, Stage::Penalties | Stage::Dry)
    }

    fn parse(name: &str) -> Result<Stage> {
        let plain = name.to_lowercase().replace('-', "_");
        if let Some((stage, ..)) = STAGES.iter().find(|(_, main, others)| plain == *main || others.contains(&&*plain)) {
            return Ok(*stage);
        }
        let names = STAGES.map(|(_, name, _)| name).join(", ");
        if plain.starts_with("mirostat") {
            return Err(Error::usage(format!("found the sampler `{name}`, expected some of {names}")).help(
                "choose it with --mirostat 1 or --mirostat 2; it comes after the penalties and the temperature",
            ));
        }
        if ABSENT.contains(&&*plain) {
            return Err(Error::engine(format!("the sampler `{name}` is not implemented"))
                .help(format!("leave it out; the samplers are {names}")));
        }
        Err(Error::usage(format!("found the sampler `{name}`, expected some of {names}")))
    }
}

/// Stages in the order in which they are applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order(Arc<[Stage]>);

impl Default for Order {
    fn default() -> Order {
        Order(STAGES.iter().map(|(stage, ..)| *stage).collect())
    }
}

impl Order {
    /// Parses names that are separated by commas or, as in llama.cpp, by semicolons.
    ///
    /// # Errors
    /// A name is unknown, not implemented, or appears twice, or there is none.
    pub fn parse(list: &str) -> Result<Order> {
        let mut stages = Vec::new();
        for name in list.split([',', ';']).map(str::trim) {
            let stage = Stage::parse(name).map_err(|e| e.setting("samplers"))?;
            if stages.contains(&stage) {
                let found = format!("found the sampler `{}` twice, expected each once", stage.name());
                return Err(Error::usage(found).setting("samplers"));
            }
            stages.push(stage);
        }
        Ok(Order(stages.into()))
    }

    /// Returns the stages.
    pub fn stages(&self) -> &[Stage] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Cause;

    #[test]
    fn names_and_separators_of_llama_cpp_are_understood() {
        let order = Order::parse("penalties;dry;top-k;typ_p;nucleus, min_p;xtc;temp").unwrap();
        let names: Vec<_> = order.stages().iter().map(|stage| stage.name()).collect();
        assert_eq!(names, ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]);
        assert_eq!(Order::parse(&STAGES.map(|(_, name, _)| name).join(",")).unwrap(), Order::default());
    }

    #[test]
    fn other_names_are_refused_by_name() {
        for name in ABSENT {
            let error = Order::parse(&format!("top_k,{name}")).unwrap_err();
            assert!(matches!(error.cause(), Cause::Engine(_)) && error.to_string().contains(name), "{error}");
        }
        for (list, said) in [("top_k,top-k", "twice"), ("", "``"), ("top_q", "top_q"), ("mirostat", "mirostat")] {
            let error = Order::parse(list).unwrap_err();
            assert!(matches!(error.cause(), Cause::Usage(_)) && error.to_string().contains(said), "{error}");
        }
    }
}
