//! Questions about regular expressions, which the library of the matcher answers by their derivatives.

use super::node::Text;
use super::text;
use llguidance::derivre::{RegexAst, RegexBuilder};
use std::rc::Rc;

/// Largest number of states that are looked at; where more are needed, nothing is known.
const STATES: u64 = 10_000;

/// Returns true if an expression matches the spelling of a text.
pub(super) fn matches(pattern: &str, constant: &str) -> bool {
    let mut builder = RegexBuilder::new();
    let spelled = serde_json::Value::from(constant).to_string();
    let built = builder.mk_regex(pattern).and_then(|expression| builder.to_regex_limited(expression, STATES));
    built.is_ok_and(|mut regex| regex.is_match(&spelled))
}

/// Returns true if no text satisfies all conditions.
pub(super) fn are_empty(conditions: &Text) -> bool {
    let mut patterns = conditions.patterns.clone();
    if patterns.is_empty() {
        return false;
    }
    if conditions.min > 0 || conditions.max.is_some() {
        patterns.push(text::of_length(conditions.min, conditions.max).into());
    }
    is_empty(&patterns) == Some(true)
}

/// Returns whether no text matches all expressions; `None` if that is not known.
pub(super) fn is_empty(patterns: &[Rc<str>]) -> Option<bool> {
    let mut builder = RegexBuilder::new();
    let all = patterns.iter().map(|pattern| RegexAst::Regex(pattern.to_string())).collect();
    let expression = builder.mk(&RegexAst::And(all)).ok()?;
    if builder.exprset().is_positive(expression) {
        return Some(false);
    }
    builder.to_regex_limited(expression, STATES).ok().map(|mut regex| regex.always_empty())
}
