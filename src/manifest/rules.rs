//! Rules of a manifest: ordered patterns over canonical tensor names that choose the quantization of each tensor.

use crate::error::{Error, Result};
use crate::quant_spec::{QuantFields, TensorQuant};
use regex_automata::meta::Regex;
use serde::{Deserialize, Serialize};

/// Largest compiled size of a pattern in bytes. Larger ones are refused, because manifests are untrusted input.
const PATTERN_BYTES: usize = 1 << 20;
/// Largest compiled size of all patterns of a manifest in bytes: about 300 patterns with two `\d+` each, or 3000 names.
const ALL_PATTERNS_BYTES: usize = 4 << 20;
/// Bytes of a compiled pattern that [`Regex::memory_usage`] does not count: its options and its pool of caches.
const PATTERN_OVERHEAD: usize = 1 << 10;

/// One rule: `include` quantizes the tensors that it matches, `exclude` keeps them. The first rule that matches
/// decides.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    /// Regular expression searched in the name (anchor it with `^` and `$`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub include: Option<String>,
    /// Regular expression searched in the names of tensors to be kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclude: Option<String>,
    /// Quantization parameters of included tensors; the `defaults` of the manifest fill the missing ones.
    #[serde(flatten)]
    pub fields: QuantFields,
}

/// Compiled rules.
#[derive(Debug)]
pub struct Rules(Vec<(Regex, Option<Ruled>)>);

/// Decision of a rule about the tensors that it includes.
#[derive(Debug, Clone, Copy)]
struct Ruled {
    quant: TensorQuant,
    /// True when the rule or the defaults name the method.
    names_method: bool,
}

impl Rules {
    /// Compiles rules with their defaults.
    ///
    /// # Errors
    /// A pattern is invalid or too large, all patterns together are larger than 4 MiB, a rule does not have exactly
    /// one of `include` and `exclude`, or parameters contradict each other.
    pub fn compile(rules: &[Rule], defaults: &QuantFields) -> Result<Rules> {
        let mut left = ALL_PATTERNS_BYTES;
        let compiled = rules
            .iter()
            .enumerate()
            .map(|(i, rule)| compile(rule, defaults, &mut left).map_err(|e| e.tensor(format!("rules[{i}]"))));
        compiled.collect::<Result<Vec<_>>>().map(Rules)
    }

    /// Returns the parameters of a tensor; `None` when it is excluded or no rule matches.
    pub fn decide(&self, name: &str) -> Option<TensorQuant> {
        self.ruled(name).map(|ruled| ruled.quant)
    }

    /// Returns true when a rule includes a tensor and this rule or the defaults name the method.
    pub fn names_method(&self, name: &str) -> bool {
        self.ruled(name).is_some_and(|ruled| ruled.names_method)
    }

    fn ruled(&self, name: &str) -> Option<Ruled> {
        self.0.iter().find(|(pattern, _)| pattern.is_match(name)).and_then(|(_, ruled)| *ruled)
    }
}

fn compile(rule: &Rule, defaults: &QuantFields, left: &mut usize) -> Result<(Regex, Option<Ruled>)> {
    match (&rule.include, &rule.exclude) {
        (Some(pattern), None) => {
            let names_method = rule.fields.method.or(defaults.method).is_some();
            let ruled = Ruled { quant: rule.fields.resolve(defaults)?, names_method };
            Ok((compile_within(pattern, left)?, Some(ruled)))
        }
        (None, Some(pattern)) if rule.fields == QuantFields::default() => Ok((compile_within(pattern, left)?, None)),
        (None, Some(_)) => Err(Error::corrupt("found quantization parameters in an exclude rule, expected none")),
        _ => Err(Error::corrupt("expected exactly one of `include` and `exclude`")),
    }
}

/// Compiles a regular expression with a limit on its compiled size.
///
/// # Errors
/// The pattern is not a regular expression, or its compiled program would be larger than 1 MiB.
pub fn compile_pattern(pattern: &str) -> Result<Regex> {
    compile_within(pattern, &mut { ALL_PATTERNS_BYTES })
}

/// Compiled size in bytes that the patterns of a file may still have.
#[derive(Debug)]
pub struct PatternBudget(usize);

impl Default for PatternBudget {
    fn default() -> PatternBudget {
        PatternBudget(ALL_PATTERNS_BYTES)
    }
}

impl PatternBudget {
    /// Compiles a pattern and subtracts its size.
    ///
    /// # Errors
    /// The pattern is not a regular expression, larger than 1 MiB when compiled, or larger than the rest of the budget.
    pub fn compile(&mut self, pattern: &str) -> Result<Regex> {
        compile_within(pattern, &mut self.0)
    }
}

/// Compiles a regular expression and subtracts its size from `left`, the number of bytes that it may take.
fn compile_within(pattern: &str, left: &mut usize) -> Result<Regex> {
    let found = |expected: String| Error::usage(format!("found `{pattern}`, expected {expected}"));
    let too_large = || {
        let (one, all) = (PATTERN_BYTES >> 20, ALL_PATTERNS_BYTES >> 20);
        found(format!("a pattern of at most {one} MiB when compiled, and at most {all} MiB for all patterns of a file"))
    };
    // Names are only matched, never searched for parts: the one-pass automaton and the complete one, which take up to
    // ten times the size of the program, make nothing faster here that counts.
    let config = Regex::config().onepass(false).dfa(false).hybrid_cache_capacity(PATTERN_BYTES);
    let config = config.nfa_size_limit(Some(PATTERN_BYTES.min(*left)));
    let regex = Regex::builder().configure(config).build(pattern).map_err(|e| match e.syntax_error() {
        Some(e) => {
            let message = e.to_string().lines().last().unwrap_or_default().trim().to_string();
            found(format!("a valid regular expression: {message}"))
        }
        None => too_large(),
    })?;
    *left = left.checked_sub(regex.memory_usage() + PATTERN_OVERHEAD).ok_or_else(too_large)?;
    Ok(regex)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheme::{QuantSpec, Scheme};

    fn rule(json: &str) -> Rule {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn the_first_matching_rule_decides() {
        let rules = [
            rule(r#"{"exclude":"layers\\.0\\."}"#),
            rule(r#"{"include":"down_proj","scheme":"int8","method":"search"}"#),
            rule(r#"{"include":"proj"}"#),
        ];
        let rules = Rules::compile(&rules, &QuantFields::default()).unwrap();
        assert_eq!(rules.decide("model.layers.0.mlp.down_proj.weight"), None);
        assert_eq!(rules.decide("model.layers.1.mlp.down_proj.weight").unwrap().spec.scheme, Scheme::Int8);
        assert_eq!(rules.decide("model.layers.1.mlp.up_proj.weight").unwrap().spec, QuantSpec::Q4_0);
        assert_eq!(rules.decide("model.norm.weight"), None);
        assert!(rules.names_method("model.layers.1.mlp.down_proj.weight") && !rules.names_method("model.norm.weight"));
        assert!(!rules.names_method("model.layers.1.mlp.up_proj.weight"));
    }

    #[test]
    fn contradictions_and_bombs_are_refused() {
        for bad in [
            r#"{"include":"a","exclude":"b"}"#,
            r#"{}"#,
            r#"{"exclude":"a","bits":4}"#,
            r#"{"include":"("}"#,
            r#"{"include":"(a{1000}){1000}"}"#,
            r#"{"include":"a","bits":8,"scheme":"q4_0"}"#,
            r#"{"include":"a","bits":7}"#,
            r#"{"include":"a","scheme":"int6","symmetric":false}"#,
            r#"{"include":"a","scheme":"q4_0","group_size":64}"#,
            r#"{"include":"a","scheme":"int8","symmetric":false}"#,
            r#"{"include":"a","clamp":-1}"#,
            r#"{"include":"a","percentile":99,"method":"search"}"#,
        ] {
            assert!(Rules::compile(&[rule(bad)], &QuantFields::default()).is_err(), "{bad}");
        }
    }

    #[test]
    fn patterns_are_refused_when_they_are_too_large_together() {
        let sized = |pattern: &str, count: usize| {
            let rules = vec![Rule { exclude: Some(pattern.into()), ..Rule::default() }; count];
            Rules::compile(&rules, &QuantFields::default()).map_err(|e| e.to_string())
        };
        assert!(sized(r"^model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$", 250).is_ok());
        assert!(sized("lm_head", 3000).is_ok());
        for (pattern, count) in [(r"\pL{20}", 10), ("a", 5000)] {
            assert!(sized(pattern, 1).is_ok());
            let error = sized(pattern, count).unwrap_err();
            assert!(error.contains("rules[") && error.contains("4 MiB for all patterns"), "{error}");
        }
    }
}
