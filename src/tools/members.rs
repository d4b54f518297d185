//! Grammars of arguments that are written one by one with their names, in any order.
//!
//! The schema of a function says which arguments there must be. A rule for each set of required arguments that were
//! written says what may follow, so that any order is allowed and none is forgotten; with too many of them, a call that
//! must come has them in the order of the schema, and another one is not held to them.

use super::rules::CallRules;
use serde_json::Value;
use std::fmt::Write;

/// Largest number of required arguments whose sets are rules.
const REQUIRED: usize = 5;
/// Largest number of alternatives of all rules for the sets of a function.
const ALTERNATIVES: usize = 400;

/// Notation of arguments.
pub(super) struct Members<'a> {
    /// Part of a grammar between arguments.
    pub(super) separator: &'a str,
    /// Returns an argument with this name, as a part of a grammar; `None` stands for any name. The second argument is
    /// its schema, the third the schema of all, which has the definitions.
    pub(super) member: &'a dyn Fn(Option<&str>, &Value, &Value) -> String,
}

impl CallRules<'_> {
    /// Returns the rule `call` of a grammar: for each tool what `call` returns for its name and the part of a grammar
    /// with its arguments.
    pub(super) fn calls_with_members(&self, members: &Members<'_>, call: impl Fn(&str, &str) -> String) -> String {
        let names: Vec<String> = (0..self.tools.len()).map(|i| format!("call_{i}")).collect();
        let mut rules = format!("call: {}\n", names.join(" | "));
        for (i, tool) in self.tools.iter().enumerate() {
            // Writing to a text cannot fail.
            let _ = writeln!(rules, "call_{i}: {}", call(&tool.name, &format!("members_{i}")));
            rules += &members.rules(i, tool.parameters.as_ref().unwrap_or(&Value::Null), self.forced);
        }
        rules
    }
}

impl Members<'_> {
    /// Returns the rule `members_N` with its parts.
    fn rules(&self, number: usize, schema: &Value, forced: bool) -> String {
        let empty = serde_json::Map::new();
        let properties = schema["properties"].as_object().unwrap_or(&empty);
        let is_required =
            |key: &String| schema["required"].as_array().is_some_and(|list| list.iter().any(|name| name == key));
        let mut rules = String::new();
        let (mut required, mut optional) = (Vec::new(), Vec::new());
        for (i, (key, property)) in properties.iter().enumerate() {
            let rule = format!("member_{number}_{i}");
            let _ = writeln!(rules, "{rule}: {}", (self.member)(Some(key), property, schema));
            let list = if is_required(key) { &mut required } else { &mut optional };
            list.push(rule);
        }
        let others = &schema["additionalProperties"];
        if others.is_object() || others == true || properties.is_empty() && schema.is_object() && others != false {
            let rule = format!("member_{number}_any");
            let _ = writeln!(rules, "{rule}: {}", (self.member)(None, others, schema));
            optional.push(rule);
        }
        let alternatives = (required.len() + optional.len()) << required.len().min(REQUIRED);
        rules += &match required.len() <= REQUIRED && alternatives <= ALTERNATIVES {
            true => self.sets(number, &required, &optional),
            false => self.row(number, &required, &optional, forced),
        };
        rules
    }

    /// Returns rules with one for each set of required arguments.
    fn sets(&self, number: usize, required: &[String], optional: &[String]) -> String {
        let all = (1usize << required.len()) - 1;
        let next = |set: usize, before: &str| {
            let missing = required.iter().enumerate().filter(|(i, _)| set >> i & 1 == 0);
            let missing = missing.map(|(i, rule)| format!("{before} {rule} set_{number}_{}", set | 1 << i));
            let others = optional.iter().map(|rule| format!("{before} {rule} set_{number}_{set}"));
            let list = missing.chain(others).collect::<Vec<_>>().join(" | ");
            match (list.is_empty(), set == all) {
                (true, _) => "\"\"".into(),
                (false, true) => format!("({list})?"),
                (false, false) => list,
            }
        };
        let mut rules = format!("members_{number}: {}\n", next(0, ""));
        for set in 0..=all {
            let _ = writeln!(rules, "set_{number}_{set}: {}", next(set, self.separator));
        }
        rules
    }

    /// Returns rules for many arguments: the required ones in a row, or any of them.
    fn row(&self, number: usize, required: &[String], optional: &[String], forced: bool) -> String {
        let separator = self.separator;
        let all = required.iter().chain(optional).cloned().collect::<Vec<_>>().join(" | ");
        match forced && !required.is_empty() {
            true => {
                let row = required.join(&format!(" {separator} "));
                format!("members_{number}: {row} ({separator} other_{number})*\nother_{number}: {all}\n")
            }
            false => {
                let other = format!("other_{number}");
                format!("members_{number}: ({other} ({separator} {other})*)?\n{other}: {all}\n")
            }
        }
    }
}
