//! Rules of a manifest: ordered patterns over canonical tensor names that choose the quantization of each tensor.

use crate::error::{Error, Result};
use crate::quant_spec::{QuantFields, TensorQuant};
use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};

/// Largest compiled size of a pattern in bytes. Larger ones are refused, because manifests are untrusted input.
const PATTERN_BYTES: usize = 1 << 20;

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
    /// A pattern is invalid or too large, a rule does not have exactly one of `include` and `exclude`, or parameters
    /// contradict each other.
    pub fn compile(rules: &[Rule], defaults: &QuantFields) -> Result<Rules> {
        let compiled = rules
            .iter()
            .enumerate()
            .map(|(i, rule)| compile(rule, defaults).map_err(|e| e.tensor(format!("rules[{i}]"))));
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

fn compile(rule: &Rule, defaults: &QuantFields) -> Result<(Regex, Option<Ruled>)> {
    match (&rule.include, &rule.exclude) {
        (Some(pattern), None) => {
            let names_method = rule.fields.method.or(defaults.method).is_some();
            Ok((compile_pattern(pattern)?, Some(Ruled { quant: rule.fields.resolve(defaults)?, names_method })))
        }
        (None, Some(pattern)) if rule.fields == QuantFields::default() => Ok((compile_pattern(pattern)?, None)),
        (None, Some(_)) => Err(Error::corrupt("found quantization parameters in an exclude rule, expected none")),
        _ => Err(Error::corrupt("expected exactly one of `include` and `exclude`")),
    }
}

/// Compiles a regular expression with a limit on its compiled size.
///
/// # Errors
/// The pattern is not a regular expression, or its compiled program would be larger than 1 MiB.
pub fn compile_pattern(pattern: &str) -> Result<Regex> {
    RegexBuilder::new(pattern).size_limit(PATTERN_BYTES).dfa_size_limit(PATTERN_BYTES).build().map_err(|e| {
        let message = e.to_string().lines().last().unwrap_or_default().trim().to_string();
        Error::usage(format!("found `{pattern}`, expected a valid regular expression: {message}"))
    })
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
}
