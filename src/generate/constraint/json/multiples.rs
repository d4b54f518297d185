//! Limit for the values of `multipleOf` in a JSON schema.
//!
//! A text of digits is a multiple of `d` if its remainder is 0, which an automaton of `d` states reads, and one of `d`
//! states for each decimal place. The compiler makes all of them at once, about 600 bytes each, without a limit.

use serde_json::Value;
use std::collections::BTreeSet;

/// Largest accepted number of states of all automata of a schema; they take about 60 MB.
const STATES: u64 = 100_000;
/// Largest accepted number of decimal places; the compiler computes powers of 10 in 32 bits.
const PLACES: u32 = 8;

/// Distinct values of `multipleOf` in a schema, each as a whole number of units of the last decimal place, and the
/// number of places.
#[derive(Debug, Default)]
pub(super) struct Multiples(BTreeSet<(u64, u32)>);

impl Multiples {
    /// Adds the values of `multipleOf` that hold for the same number, and returns the smallest number that is a
    /// multiple of all.
    ///
    /// # Errors
    /// Says why: one is not a positive number, has too many decimal places, or needs too many states with those before.
    pub(super) fn add(&mut self, values: &[Value]) -> Result<f64, String> {
        let (units, places) = least(values)?;
        self.0.insert((units, places));
        let mut sizes = self.0.iter().map(|(units, places)| units.checked_mul(u64::from(places + 1)));
        match sizes.try_fold(0u64, |sum, size| sum.checked_add(size?)).is_some_and(|states| states <= STATES) {
            true => Ok(units as f64 / 10f64.powi(places as i32)),
            false => {
                let shown = values.iter().map(Value::to_string).collect::<Vec<_>>().join(" with ");
                Err(format!(
                    "{shown}, expected the sum of all `multipleOf`, in units of the last decimal place, of at most \
                     {STATES} divided by the number of decimal places and one"
                ))
            }
        }
    }
}

/// Returns the least common multiple in units of its last decimal place.
fn least(values: &[Value]) -> Result<(u64, u32), String> {
    let parsed = values.iter().map(units).collect::<Result<Vec<_>, _>>()?;
    let places = parsed.iter().map(|(_, places)| *places).max().unwrap_or(0);
    let mut all = 1u64;
    for (units, own) in parsed {
        let common = units.checked_mul(10u64.pow(places - own));
        let product = common.and_then(|units| (all / common_divisor(all, units)).checked_mul(units));
        all = product.ok_or("a multiple of more than 2^64 units")?;
    }
    Ok((all, places))
}

/// Returns a value as a whole number of units of its last decimal place, and the number of places.
fn units(value: &Value) -> Result<(u64, u32), String> {
    let positive = value.as_f64().filter(|number| *number > 0.0);
    let mut units = positive.ok_or_else(|| format!("{value}, expected a number above 0"))?;
    // The compiler finds the decimal places in the same way, so numbers that are not exact have many of them.
    let mut places = 0;
    while units.fract() != 0.0 && places <= PLACES {
        units *= 10.0;
        places += 1;
    }
    match places > PLACES {
        true => Err(format!("{value}, expected at most {PLACES} decimal places")),
        // A float beyond the integers becomes the largest integer.
        false => Ok((units as u64, places)),
    }
}

/// Returns the greatest common divisor of two positive numbers.
fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::super::{ReadOptions, rules};
    use serde_json::{Value, json};

    fn check(schema: Value) -> String {
        rules(&schema, ReadOptions::strict(10)).map_or_else(|e| e.to_string(), |_| "accepted".into())
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
        assert!(large.contains("`multipleOf` at #/items: 2097153, expected the sum of all `multipleOf`"), "{large}");
        for refused in [
            json!({"multipleOf": 1e300}),
            json!({"multipleOf": 1, "items": {"multipleOf": 5e299}}),
            json!({"multipleOf": 99_991.5}),
            json!({"prefixItems": [{"multipleOf": 60_000}, {"multipleOf": 59_999}]}),
            json!({"allOf": [{"multipleOf": 317}, {"multipleOf": 331}]}),
            json!({"anyOf": [{"multipleOf": 317}, {"type": "string"}], "multipleOf": 331}),
            json!({"$ref": "#/$defs/a", "multipleOf": 331, "$defs": {"a": {"multipleOf": 317}}}),
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
