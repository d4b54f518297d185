//! Limit for the values of `multipleOf` in a JSON schema.
//!
//! A text of digits is a multiple of `d` if its remainder is 0, which an automaton of `d` states reads, and one of `d`
//! states for each decimal place. The compiler makes all of them at once, about 600 bytes each, without a limit.

use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Largest accepted number of states of all automata of a schema; they take about 60 MB.
const STATES: u64 = 100_000;
/// Largest accepted number of decimal places; the compiler computes powers of 10 in 32 bits.
const PLACES: u32 = 8;

/// Values of `multipleOf` in a schema.
#[derive(Default)]
pub(super) struct Multiples {
    /// Distinct values, each as a whole number of units of the last decimal place, and the number of places.
    values: BTreeSet<(u64, u32)>,
    /// Whether several of them may apply to the same number, so that the compiler combines them to their least common
    /// multiple.
    combined: bool,
}

impl Multiples {
    /// Notes whether the compiler may combine subschemas of the schema with these members at `place`.
    ///
    /// # Errors
    /// The values so far need too many states if they are combined.
    pub(super) fn see(&mut self, members: &Map<String, Value>, place: &str) -> Result<()> {
        let has = |names: &[&str]| names.iter().filter(|name| members.contains_key(**name)).count();
        let chosen = has(&["$ref", "anyOf", "oneOf"]);
        let own = has(&["multipleOf", "properties", "additionalProperties", "items", "prefixItems", "additionalItems"]);
        if has(&["allOf", "patternProperties"]) + usize::from(chosen > 1 || chosen == 1 && own > 0) == 0 {
            return Ok(());
        }
        self.combined = true;
        self.check(|| format!("subschemas that are combined at {place}"))
    }

    /// Adds the value of `multipleOf` at `place`.
    ///
    /// # Errors
    /// It is not a positive number, has too many decimal places, or needs too many states with those before.
    pub(super) fn add(&mut self, value: &Value, place: &str) -> Result<()> {
        let found = || format!("{value} at {place}");
        let positive = value.as_f64().filter(|number| *number > 0.0);
        let mut units = positive.ok_or_else(|| refused(&found(), "a number above 0"))?;
        // The compiler finds the decimal places in the same way, so numbers that are not exact have many of them.
        let mut places = 0;
        while units.fract() != 0.0 && places <= PLACES {
            units *= 10.0;
            places += 1;
        }
        if places > PLACES {
            return Err(refused(&found(), &format!("at most {PLACES} decimal places")));
        }
        // A float beyond the integers becomes the largest integer.
        self.values.insert((units as u64, places));
        self.check(found)
    }

    /// Checks the number of states.
    fn check(&self, found: impl Fn() -> String) -> Result<()> {
        if self.states().is_some_and(|states| states <= STATES) {
            return Ok(());
        }
        let what = if self.combined { "the least common multiple" } else { "the sum" };
        let expected = format!("{what} of all `multipleOf`, in units of the last decimal place, of at most {STATES}");
        Err(refused(&found(), &format!("{expected} divided by the number of decimal places and one")))
    }

    /// Returns the number of states of all automata; `None` if it does not fit 64 bits.
    fn states(&self) -> Option<u64> {
        if !self.combined {
            let mut sizes = self.values.iter().map(|(units, places)| units.checked_mul(u64::from(places + 1)));
            return sizes.try_fold(0u64, |sum, size| sum.checked_add(size?));
        }
        let places = self.values.iter().map(|(_, places)| *places).max().unwrap_or(0);
        let mut all = 1u64;
        for (units, own) in &self.values {
            let units = units.checked_mul(10u64.pow(places - own))?;
            all = (all / common_divisor(all, units)).checked_mul(units)?;
        }
        all.checked_mul(u64::from(places + 1))
    }
}

fn refused(found: &str, expected: &str) -> Error {
    Error::unsupported(format!("JSON schema: found {found}, expected {expected}"))
        .help("leave `multipleOf` out, and check the number when it is read")
}

/// Returns the greatest common divisor of two positive numbers.
fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::super::schema::check_within;
    use serde_json::{Value, json};

    fn check(schema: Value) -> String {
        check_within(&schema, 10).map_or_else(|e| e.to_string(), |()| "accepted".into())
    }

    #[test]
    fn usual_multiples_are_accepted() {
        let fields = [0.01, 0.5, 5.0, 60.0, 3600.0, 86400.0, 0.000_001].map(|of| json!({"multipleOf": of}));
        assert_eq!(check(json!({"prefixItems": fields})), "accepted");
        assert_eq!(check(json!({"allOf": [{"multipleOf": 0.25}, {"multipleOf": 7}, {"multipleOf": 0.1}]})), "accepted");
    }

    #[test]
    fn multiples_that_take_too_much_memory_are_refused() {
        // One automaton of these took 1.3 GB.
        let large = check(json!({"items": {"multipleOf": 2_097_153}}));
        assert!(large.contains("found 2097153 at #/items/multipleOf, expected the sum of all `multipleOf`"), "{large}");
        for refused in [
            json!({"multipleOf": 1e300}),
            json!({"multipleOf": 1, "items": {"multipleOf": 5e299}}),
            json!({"multipleOf": 99_991.5}),
            json!({"prefixItems": [{"multipleOf": 60_000}, {"multipleOf": 59_999}]}),
            json!({"allOf": [{"multipleOf": 317}, {"multipleOf": 331}]}),
            json!({"anyOf": [{"multipleOf": 317}, {}], "multipleOf": 331}),
            json!({"$ref": "#/$defs/a", "multipleOf": 331, "$defs": {"a": {"multipleOf": 317}}}),
            json!({"prefixItems": [{"multipleOf": 317}, {"multipleOf": 331}], "patternProperties": {"a": {}}}),
            json!({"allOf": [{"items": {"multipleOf": 1e15}}, {"multipleOf": 99_989}]}),
        ] {
            assert!(check(refused.clone()).contains("of at most 100000"), "{refused}");
        }
    }

    #[test]
    fn multiples_that_are_not_exact_or_not_positive_are_refused() {
        for exact in [0.07, 1e-9] {
            assert!(check(json!({"multipleOf": exact})).contains("expected at most 8 decimal places"), "{exact}");
        }
        for value in [json!(0), json!(-2), json!("2"), json!(null)] {
            assert!(check(json!({"multipleOf": value})).contains("expected a number above 0"), "{value}");
        }
    }
}
