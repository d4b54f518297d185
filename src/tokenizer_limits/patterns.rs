//! Bounds the memory and the time of regular expressions.
//!
//! The crate `fancy-regex` hands an expression to the automata of the crate `regex`, whose time is linear, unless it
//! has look-around, back references, atomic groups or word boundaries. A branch (alternative) with one of these runs on
//! a backtracking machine: from each position of a text it may try a number of ways that is exponential in the length
//! of the text. Here a branch may try at most one way per character of the text, so a search costs at most the square
//! of its length.

use crate::error::{Error, Result};
use fancy_regex::{Assertion, Expr};

/// Largest accepted number of characters and classes in a pattern with repetitions written out. A class takes up to
/// 60 KB in a compiled pattern; patterns of known models have up to 80 of them.
const SIZE: f64 = 1024.0;
/// Largest accepted [`Cost::ways`] of a branch.
const WAYS: f64 = 1024.0;

/// Refuses a pattern that is invalid, becomes large when it is compiled, or is slow.
pub(super) fn check(pattern: &str) -> Result<()> {
    let tree = Expr::parse_tree(pattern)
        .map_err(|e| Error::corrupt(format!("found a pattern that cannot be used: {e}, expected a valid one")))?;
    let size = size(&tree.expr);
    if size > SIZE {
        return Err(Error::corrupt(format!("found a pattern of {size:.3e} characters, expected at most {SIZE}")));
    }
    if !is_fast(&tree.expr) {
        let found = "found a pattern that backtracks more than once per character, expected a faster one";
        return Err(Error::corrupt(found));
    }
    Ok(())
}

/// Returns a lower bound of the number of bytes in a match.
pub(super) fn shortest_match(pattern: &str) -> usize {
    Expr::parse_tree(pattern).map_or(0, |tree| shortest(&tree.expr))
}

fn shortest(expr: &Expr) -> usize {
    match expr {
        // Another case of a letter may be as short as one byte.
        Expr::Literal { val, casei: true } => val.chars().count(),
        Expr::Literal { val, casei: false } => val.len(),
        Expr::Any { .. } => 1,
        Expr::Delegate { size, .. } => *size,
        Expr::Concat(parts) => parts.iter().map(shortest).sum(),
        Expr::Alt(parts) => parts.iter().map(shortest).min().unwrap_or(0),
        Expr::Group(inner) | Expr::AtomicGroup(inner) => shortest(inner),
        Expr::Repeat { child, lo, .. } => lo.saturating_mul(shortest(child)),
        _ => 0,
    }
}

/// Returns the number of characters and classes of a pattern with repetitions written out.
fn size(expr: &Expr) -> f64 {
    match expr {
        Expr::Literal { val, .. } => val.chars().count() as f64,
        Expr::Concat(parts) | Expr::Alt(parts) => parts.iter().map(size).sum(),
        Expr::Group(inner) | Expr::AtomicGroup(inner) | Expr::LookAround(inner, _) => size(inner),
        Expr::Repeat { child, lo, hi, .. } => {
            let times = if *hi == usize::MAX { (*lo).max(1) } else { *hi };
            times as f64 * size(child).max(1.0)
        }
        _ => 1.0,
    }
}

/// Returns true when the branches that backtrack do so at most once per character.
fn is_fast(expr: &Expr) -> bool {
    match expr {
        _ if is_linear(expr) => true,
        Expr::Alt(branches) => branches.iter().all(is_fast),
        Expr::Group(inner) => is_fast(inner),
        // What follows the last part that backtracks is handed to an automaton.
        Expr::Concat(parts) => {
            let tail = parts.iter().rev().take_while(|part| is_linear(part)).count();
            concat(&parts[..parts.len() - tail]).is_some_and(Cost::is_accepted)
        }
        _ => cost(expr).is_some_and(Cost::is_accepted),
    }
}

/// Returns true when an expression is handed to an automaton, unless something that backtracks follows it.
fn is_linear(expr: &Expr) -> bool {
    match expr {
        Expr::Empty | Expr::Any { .. } | Expr::Literal { .. } | Expr::Delegate { .. } => true,
        Expr::Assertion(assertion) => matches!(
            assertion,
            Assertion::StartText | Assertion::EndText | Assertion::StartLine { .. } | Assertion::EndLine { .. }
        ),
        Expr::Concat(parts) | Expr::Alt(parts) => parts.iter().all(is_linear),
        Expr::Group(inner) => is_linear(inner),
        Expr::Repeat { child, .. } => is_linear(child),
        _ => false,
    }
}

/// Cost of matching at one position.
#[derive(Clone, Copy)]
struct Cost {
    /// Number of ways to match, without the factor that grows with the length of the text.
    ways: f64,
    /// Degree of that factor, a polynomial in the length of the text.
    degree: u32,
    /// Degree of the time to try all ways, a polynomial in the length of the text.
    time: u32,
}

impl Cost {
    const ONE: Cost = Cost { ways: 1.0, degree: 0, time: 0 };

    fn is_accepted(self) -> bool {
        self.ways <= WAYS && self.time <= 1
    }
}

/// Returns the cost on the backtracking machine, or `None` if it may be exponential or is unknown.
fn cost(expr: &Expr) -> Option<Cost> {
    match expr {
        Expr::Empty | Expr::Any { .. } | Expr::Literal { .. } | Expr::Delegate { .. } | Expr::Assertion(_) => {
            Some(Cost::ONE)
        }
        Expr::Concat(parts) => concat(parts),
        Expr::Alt(parts) => parts.iter().try_fold(Cost { ways: 0.0, ..Cost::ONE }, |sum, part| {
            let part = cost(part)?;
            let (degree, time) = (sum.degree.max(part.degree), sum.time.max(part.time));
            Some(Cost { ways: sum.ways + part.ways, degree, time })
        }),
        Expr::Group(inner) => cost(inner),
        // What is inside is matched in one way or not at all, and an automaton scans the text once.
        Expr::LookAround(inner, _) | Expr::AtomicGroup(inner) if is_linear(inner) => {
            Some(Cost { time: u32::from(repeats(inner)), ..Cost::ONE })
        }
        Expr::LookAround(inner, _) | Expr::AtomicGroup(inner) => Some(Cost { degree: 0, ..cost(inner)? }),
        Expr::Repeat { child, lo, hi, .. } => {
            let child = cost(child)?;
            if *hi == usize::MAX {
                let single = child.ways <= 1.0 && child.degree == 0;
                return single.then_some(Cost { ways: 1.0, degree: 1, time: 1 + child.time });
            }
            let ways = hi.saturating_sub(*lo).saturating_add(1) as f64 * child.ways.powf(*hi as f64);
            Some(Cost { ways, degree: child.degree.saturating_mul(*hi as u32), time: child.time })
        }
        _ => None,
    }
}

/// Returns the cost of a sequence: every way to match the parts before a part leads to an attempt to match it.
fn concat(parts: &[Expr]) -> Option<Cost> {
    parts.iter().try_fold(Cost::ONE, |before, part| {
        let part = cost(part)?;
        let time = before.time.max(before.degree.saturating_add(part.time));
        Some(Cost { ways: before.ways * part.ways, degree: before.degree.saturating_add(part.degree), time })
    })
}

/// Returns true when the length of a match is not bounded.
fn repeats(expr: &Expr) -> bool {
    match expr {
        Expr::Concat(parts) | Expr::Alt(parts) => parts.iter().any(repeats),
        Expr::Group(inner) => repeats(inner),
        Expr::Repeat { child, hi, .. } => *hi == usize::MAX || repeats(child),
        _ => false,
    }
}
