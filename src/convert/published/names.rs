//! Names of modules in quantization settings: exact names and regular expressions, with or without the prefix of a
//! wrapper. Patterns are untrusted input, so their length and their compiled size together are limited.

use crate::error::{Error, Result};
use crate::manifest::PatternBudget;
use regex_automata::meta::Regex;

/// Largest length of a pattern in bytes.
const LONGEST: usize = 1000;

/// Compiles the patterns of a checkpoint.
#[derive(Debug, Default)]
pub(super) struct Patterns(PatternBudget);

/// Pattern that names are matched against from their beginning, but not necessarily to their end.
#[derive(Debug)]
pub(super) struct Pattern(Regex);

impl Patterns {
    /// Compiles a regular expression that must match at the beginning of a name, as Python's `re.match`.
    ///
    /// # Errors
    /// The pattern is not valid, too long, or too large with those before it.
    pub fn compile(&mut self, pattern: &str) -> Result<Pattern> {
        let shown: String = pattern.chars().take(60).collect();
        let help = "write the pattern in a simpler way in the quantization settings";
        if pattern.len() > LONGEST {
            let found = format!("found a pattern of {} bytes, `{shown}…`, expected at most {LONGEST}", pattern.len());
            return Err(Error::unsupported(found).help(help));
        }
        let compiled = self.0.compile(&format!("^(?:{pattern})"));
        compiled.map(Pattern).map_err(|_| {
            Error::unsupported(format!(
                "found the pattern `{shown}`, expected a regular expression without look-around that is small when \
                 compiled, together with the patterns before it"
            ))
            .help(help)
        })
    }
}

impl Pattern {
    /// Returns true if the pattern matches at the beginning of one of the spellings of a module's name.
    pub fn matches(&self, module: &str) -> bool {
        spellings(module).any(|name| self.0.is_match(&name))
    }
}

/// Returns the spellings that settings may have for a module: its name in the weights, and that without the prefix of
/// a wrapper.
pub(super) fn spellings(module: &str) -> impl Iterator<Item = String> {
    let inner = module.strip_prefix("model.language_model.").map(|rest| format!("model.{rest}"));
    let outer = module.strip_prefix("language_model.").map(str::to_string);
    let bare = module.strip_prefix("model.").map(str::to_string);
    [Some(module.to_string()), inner, outer, bare].into_iter().flatten()
}

/// Returns true if an entry of a list of excluded modules names this module or one that contains it. Libraries write
/// whole names, parents, and single components (`lm_head`, `mlp.gate`).
pub(super) fn names_or_contains(entry: &str, module: &str) -> bool {
    let is_parent = |name: &str| name.strip_prefix(entry).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    let is_within = module.split('.').any(|component| component == entry) || module.contains(&format!(".{entry}."));
    is_within || module.ends_with(&format!(".{entry}")) || spellings(module).any(|name| is_parent(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_at_the_beginning_with_or_without_the_prefix_of_a_wrapper() {
        let mut patterns = Patterns::default();
        for (pattern, module, expected) in [
            (".*mlp.gate$", "model.layers.0.mlp.gate", true),
            (".*mlp.gate$", "model.layers.0.mlp.gate_proj", false),
            ("model.layers.0", "model.layers.0.mlp.up_proj", true),
            ("layers.0", "model.layers.0.mlp.up_proj", true),
            ("mlp", "model.layers.0.mlp.up_proj", false),
            ("model.layers.1.", "model.language_model.layers.1.x", true),
            (r"model\.layers\.\d+\.x|y", "y", true),
        ] {
            assert_eq!(patterns.compile(pattern).unwrap().matches(module), expected, "{pattern} {module}");
        }
    }

    #[test]
    fn huge_patterns_are_refused() {
        for pattern in ["x{1000}{1000}", "((((a{50}){50}){50}){50})", "(?=a)", "(", &"a".repeat(3000)] {
            let refused = Patterns::default().compile(pattern).unwrap_err();
            assert!(refused.to_string().contains("expected"), "{refused}");
        }
        let mut patterns = Patterns::default();
        let refused = (0..100_000).find_map(|_| patterns.compile("a").err());
        assert!(refused.unwrap().to_string().contains("together"));
    }

    #[test]
    fn excluded_modules_are_named_by_themselves_or_by_a_parent() {
        let module = "model.layers.3.mlp.gate";
        for entry in ["model.layers.3.mlp.gate", "model.layers.3", "layers.3.mlp", "mlp.gate", "gate"] {
            assert!(names_or_contains(entry, module), "{entry}");
        }
        for entry in ["model.layers.33", "gat", "mlp.gate_proj", "model.layers.3.mlp.gate_proj"] {
            assert!(!names_or_contains(entry, module), "{entry}");
        }
    }
}
