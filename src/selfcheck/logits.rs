//! Checks factor and softcap of logits and the search for the largest logits.

use super::random::normals;
use super::rig::{Case, EPS, Expected, Rig};
use crate::error::Result;
use crate::runtime::cuda::best::Best;
use std::cmp::Ordering;

/// Maximum number of largest logits per row that the checks request.
const MOST: usize = 64;

/// Checks the softcap and the search.
pub fn check(rig: &mut Rig<'_>) -> Result<()> {
    for (n, vocab) in [(3, 100), (1, 1000), (2, 32_003), (1, 128_256), (64, 5)] {
        let best = Best::new(rig.context, n, vocab, MOST.min(vocab))?;
        let mut logits = normals(&mut rig.rng, n * vocab, 25.0);
        // Ties, infinity and NaN.
        logits[vocab - 1] = 200.0;
        logits[1..4].copy_from_slice(&[f32::NEG_INFINITY, f32::NAN, 200.0]);
        for cap in [None, Some(30.0)] {
            for scale in [1.0, 0.3] {
                largest(rig, &best, &logits, n, scale, cap)?;
            }
        }
        for k in [2, 5, 40, MOST].into_iter().filter(|k| *k <= vocab) {
            largest_of(rig, &best, &logits, n, k)?;
        }
    }
    Ok(())
}

fn largest(rig: &mut Rig<'_>, best: &Best, logits: &[f32], n: usize, scale: f32, cap: Option<f32>) -> Result<()> {
    let vocab = logits.len() / n;
    let case = rig.begin("logits_parts", format!("{n} rows of {vocab}, factor {scale}, cap {cap:?}"))?;
    let array = rig.array(logits)?;
    best.largest(&rig.ops, array.view(), n, scale, cap)?;
    let found = array.read()?;
    rig.compare(&case, vocab, &found, |i| {
        let logit = f64::from(logits[i] * scale);
        let Some(cap) = cap.map(f64::from) else { return Expected::exact(logit) };
        let value = cap * (logit / cap).tanh();
        Expected { value, tolerance: 8.0 * EPS * value.abs() }
    });
    take(rig, &case, best, &found, n, 1)
}

fn largest_of(rig: &mut Rig<'_>, best: &Best, logits: &[f32], n: usize, k: usize) -> Result<()> {
    let case = rig.begin("top_k", format!("the largest {k} of {n} rows of {}", logits.len() / n))?;
    let array = rig.array(logits)?;
    best.largest_of(&rig.ops, array.view(), n, k)?;
    take(rig, &case, best, logits, n, k)
}

/// Compares the results with those of a sort: the lowest token of equal logits comes first, NaN last.
fn take(rig: &mut Rig<'_>, case: &Case, best: &Best, logits: &[f32], n: usize, k: usize) -> Result<()> {
    let vocab = logits.len() / n;
    let mut output = rig.context.alloc_pinned(4 * best.output_len())?;
    let found = best.take(rig.context, &mut output, n, k)?;
    let order = |a: &f32, b: &f32| match (a.is_nan(), b.is_nan()) {
        (false, false) => b.partial_cmp(a).unwrap_or(Ordering::Equal),
        (a, b) => a.cmp(&b),
    };
    // The bits of a NaN are irrelevant.
    let bits = |value: f32| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() };
    for (row, found) in logits.chunks_exact(vocab).zip(found) {
        let mut ids: Vec<u32> = (0..vocab as u32).collect();
        ids.sort_by(|a, b| order(&row[*a as usize], &row[*b as usize]));
        let expected = ids.iter().take(k).map(|id| (*id, bits(row[*id as usize])));
        let found: Vec<(u32, u32)> = found.iter().map(|(id, value)| (*id, bits(*value))).collect();
        rig.same(case, "choice", &found, &expected.collect::<Vec<_>>());
    }
    Ok(())
}
