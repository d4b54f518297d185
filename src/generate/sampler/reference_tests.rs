//! Compares every stage with a plain implementation of its definition, which shares no code with it, and with numbers
//! that `transformers` and llama.cpp publish in their tests.

use super::dry::dry;
use super::mirostat::{Mirostat, Version};
use super::penalties::{Occurrences, penalties};
use super::pool::Pool;
use super::truncation::{min_p, temperature, top_k, top_p, typical, xtc};
use super::*;
use crate::rng::Rng;
use proptest::prelude::*;
use std::collections::HashSet;
use std::sync::Arc;

/// Candidates as (id, logit).
type Plain = Vec<(u32, f64)>;
/// A stage with its parameters.
type Apply<'a> = &'a dyn Fn(&mut Pool);

fn pool(logits: &[f32]) -> Pool {
    let mut pool = Pool::default();
    pool.fill((0u32..).zip(logits.iter().copied()));
    pool
}

/// Returns a pool of tokens with these probabilities.
fn pool_of(probabilities: &[f32]) -> Pool {
    pool(&probabilities.iter().map(|p| p.ln()).collect::<Vec<_>>())
}

fn plain(pool: &Pool) -> Plain {
    pool.entries().iter().map(|entry| (entry.id, entry.logit)).collect()
}

fn ids(pool: &Pool) -> Vec<u32> {
    pool.entries().iter().map(|entry| entry.id).collect()
}

/// Returns the normalized probabilities of the candidates.
fn p(pool: &mut Pool) -> Vec<f64> {
    pool.normalize();
    pool.entries().iter().map(|entry| entry.p).collect()
}

fn assert_near(found: &[f64], expected: &[f64], tolerance: f64) {
    let near = found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < tolerance);
    assert!(near, "found {found:?}, expected {expected:?}");
}

fn softmax(all: &Plain) -> Vec<f64> {
    let highest = all.iter().map(|(_, l)| *l).fold(f64::MIN, f64::max);
    let total: f64 = all.iter().map(|(_, l)| (l - highest).exp()).sum();
    all.iter().map(|(_, l)| (l - highest).exp() / total).collect()
}

/// Returns true if candidate `a` comes before `b`: it is more likely, or as likely with a lower id.
fn before(a: (u32, f64), b: (u32, f64)) -> bool {
    a.1 > b.1 || (a.1 == b.1 && a.0 < b.0)
}

/// Keeps the candidates for which `keep(index)` is true.
fn select(all: &Plain, keep: impl Fn(usize) -> bool) -> Vec<u32> {
    (0..all.len()).filter(|i| keep(*i)).map(|i| all[i].0).collect()
}

fn plain_top_k(all: &Plain, k: usize) -> Vec<u32> {
    select(all, |i| k == 0 || all.iter().filter(|other| before(**other, all[i])).count() < k)
}

fn plain_top_p(all: &Plain, top_p: f64) -> Vec<u32> {
    let p = softmax(all);
    let mass_before = |i: usize| (0..all.len()).filter(|j| before(all[*j], all[i])).map(|j| p[j]).sum::<f64>();
    select(all, |i| mass_before(i) < top_p)
}

fn plain_min_p(all: &Plain, min_p: f64) -> Vec<u32> {
    let highest = all.iter().map(|(_, l)| *l).fold(f64::MIN, f64::max);
    select(all, |i| (all[i].1 - highest).exp() >= min_p)
}

fn plain_typical(all: &Plain, mass: f64) -> Vec<u32> {
    let p = softmax(all);
    let information = |i: usize| -p[i].ln();
    let entropy: f64 = (0..all.len()).filter(|i| p[*i] > 0.0).map(|i| p[i] * information(i)).sum();
    let distance = |i: usize| (information(i) - entropy).abs();
    let nearer = |i: usize| (0..all.len()).filter(|j| distance(*j) < distance(i)).map(|j| p[j]).sum::<f64>();
    select(all, |i| mass >= 1.0 || nearer(i) < mass)
}

fn plain_xtc(all: &Plain, threshold: f64) -> Vec<u32> {
    let p = softmax(all);
    let less_likely = |i: usize| (0..all.len()).any(|j| p[j] >= threshold && before(all[i], all[j]));
    select(all, |i| !(p[i] >= threshold && less_likely(i)))
}

fn plain_mirostat(all: &Plain, mirostat: &Mirostat, mu: f64, vocab: usize) -> Vec<u32> {
    if mirostat.version == Version::Two {
        let p = softmax(all);
        return select(all, |i| -p[i].log2() <= mu || !all.iter().any(|other| before(*other, all[i])));
    }
    // The total of the probabilities cancels out in their ratios, and logits do not round small ones to 0.
    let mut sorted: Vec<f64> = all.iter().map(|(_, logit)| *logit).collect();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let (mut over, mut under) = (0.0, 0.0);
    for i in 0..99.min(sorted.len() - 1) {
        let t = ((i + 2) as f64 / (i + 1) as f64).ln();
        over += t * (sorted[i] - sorted[i + 1]);
        under += t * t;
    }
    let s = over / under;
    let k = ((s - 1.0) * mu.exp2() / (1.0 - (vocab as f64).powf(1.0 - s))).powf(1.0 / s);
    plain_top_k(all, (k as usize).max(1))
}

/// Returns the largest penalty exponent of `token` in `text`, by comparing all pairs of positions.
fn plain_dry(text: &[u32], token: u32, allowed: usize, breakers: &[Vec<u32>]) -> Option<usize> {
    if breakers.contains(&vec![token]) {
        return None;
    }
    let breaks = |at: usize| breakers.iter().filter(|b| text[at..].starts_with(b)).map(Vec::len).max();
    let last = (0..text.len()).rev().find_map(|at| breaks(at).map(|length| text.len() - at - length));
    let limit = last.unwrap_or(text.len());
    let repeated = |end: usize| (1..=end).take_while(|n| text[end - n] == text[text.len() - n]).count().min(limit);
    let lengths = (1..text.len()).filter(|end| text[*end] == token).map(repeated);
    lengths.max().filter(|length| *length >= allowed).map(|length| length - allowed)
}

fn logits() -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![8 => -9f32..9.0, 1 => Just(2.5f32), 1 => Just(f32::NEG_INFINITY), 1 => -900f32..900.0];
    prop::collection::vec(value, 1..60).prop_filter("a token is possible", |all| all.iter().any(|l| l.is_finite()))
}

/// Returns a shuffled copy of the logits, and the old index of each new one.
fn shuffled(logits: &[f32], seed: u64) -> (Vec<f32>, Vec<usize>) {
    let mut rng = Rng::new(seed);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    (1..order.len()).rev().for_each(|i| order.swap(i, (rng.next_u64() % (i as u64 + 1)) as usize));
    (order.iter().map(|i| logits[*i]).collect(), order)
}

proptest! {
    #[test]
    fn every_truncation_keeps_what_its_definition_keeps(
        logits in logits(), k in 0usize..70, share in 0.01f64..=1.0, small in 0.001f64..0.5, mu in -2f64..20.0,
    ) {
        let vocab = 1 + logits.len();
        let [one, two] = [Version::One, Version::Two].map(|version| Mirostat { version, tau: 5.0, eta: 0.1 });
        let all = plain(&pool(&logits));
        let stages: [(&str, Vec<u32>, Apply<'_>); 7] = [
            ("top-k", plain_top_k(&all, k), &|pool| top_k(pool, k)),
            ("top-p", plain_top_p(&all, share), &|pool| top_p(pool, share)),
            ("min-p", plain_min_p(&all, share), &|pool| min_p(pool, share)),
            ("typical", plain_typical(&all, share), &|pool| typical(pool, share)),
            ("xtc", plain_xtc(&all, small), &|pool| {
                xtc(pool, &Xtc { probability: 1.0, threshold: small }, &mut Rng::new(0));
            }),
            ("mirostat 1", plain_mirostat(&all, &one, mu, vocab), &|pool| one.keep(pool, mu, vocab)),
            ("mirostat 2", plain_mirostat(&all, &two, mu, vocab), &|pool| two.keep(pool, mu, vocab)),
        ];
        for (name, expected, stage) in stages {
            let mut pool = pool(&logits);
            stage(&mut pool);
            prop_assert_eq!(ids(&pool), expected, "{}", name);
            let total: f64 = p(&mut pool).iter().sum();
            prop_assert!((total - 1.0).abs() < 1e-9, "{}: probabilities add up to {}", name, total);
        }
    }

    #[test]
    fn no_stage_depends_on_the_order_of_the_tokens(logits in logits(), share in 0.01f64..=1.0, k in 1usize..70, seed: u64) {
        // Ties are decided by the id, so equal values are left out.
        let mut seen = HashSet::new();
        let logits: Vec<f32> = logits.into_iter().filter(|l| seen.insert(l.to_bits())).collect();
        let stages: [Apply<'_>; 5] = [
            &|pool| top_k(pool, k),
            &|pool| top_p(pool, share),
            &|pool| min_p(pool, share),
            &|pool| typical(pool, share),
            &|pool| xtc(pool, &Xtc { probability: 1.0, threshold: share / 2.0 }, &mut Rng::new(0)),
        ];
        let (moved, order) = shuffled(&logits, seed);
        for stage in stages {
            let (mut first, mut second) = (pool(&logits), pool(&moved));
            stage(&mut first);
            stage(&mut second);
            let mut back: Vec<u32> = ids(&second).iter().map(|id| order[*id as usize] as u32).collect();
            back.sort_unstable();
            prop_assert_eq!(ids(&first), back);
        }
    }

    #[test]
    fn penalties_count_the_last_tokens(
        logits in logits(), text in prop::collection::vec(0u32..70, 0..80), window in prop::option::of(0usize..90),
        pieces in prop::collection::vec(1usize..20, 1..10), prompt in 0usize..90, of_answer: bool,
        repeat_penalty in 0.5f64..2.0, presence_penalty in -2f64..2.0, frequency_penalty in -2f64..2.0,
    ) {
        let counted = if of_answer { Counted::Answer } else { Counted::Text };
        let sampling = Sampling { repeat_penalty, presence_penalty, frequency_penalty, counted, ..Sampling::default() };
        let (mut occurrences, mut known) = (Occurrences::default(), 0);
        for piece in pieces.into_iter().cycle() {
            let end = text.len().min(known + piece);
            occurrences.update(&text[..end], known, window, prompt);
            known = end;
            if known == text.len() {
                break;
            }
        }
        let mut penalized = pool(&logits);
        penalties(&mut penalized, &occurrences, &sampling);
        let first = text.len().saturating_sub(window.unwrap_or(usize::MAX));
        for ((id, before), (_, after)) in plain(&pool(&logits)).into_iter().zip(plain(&penalized)) {
            let seen = (first..text.len()).filter(|at| text[*at] == id);
            let (in_text, in_answer) = (seen.clone().count(), seen.filter(|at| *at >= prompt).count());
            let repeated = match in_text {
                0 => before,
                _ if before < 0.0 => before * repeat_penalty,
                _ => before / repeat_penalty,
            };
            let count = if of_answer { in_answer } else { in_text };
            let presence = if count > 0 { presence_penalty } else { 0.0 };
            let expected = repeated - presence - count as f64 * frequency_penalty;
            prop_assert!((after - expected).abs() < 1e-9, "token {}: {} and not {}", id, after, expected);
        }
    }

    #[test]
    fn dry_finds_the_longest_repetition(
        text in prop::collection::vec(0u32..4, 0..40), allowed_length in 0usize..5, last_n in prop::option::of(0usize..50),
        breakers in prop::collection::vec(prop::collection::vec(0u32..5, 1..3), 0..2),
    ) {
        let mut table = Breakers::default();
        breakers.iter().for_each(|tokens| table.add(tokens[0], tokens[1..].to_vec()));
        let (multiplier, base) = (0.75, 1.5);
        let parameters = Dry { multiplier, base, allowed_length, last_n, breakers: Arc::new(table) };
        let mut penalized = pool(&[0.0; 5]);
        dry(&mut penalized, &text, &parameters);
        let recent = &text[text.len().saturating_sub(last_n.unwrap_or(usize::MAX))..];
        for (id, logit) in plain(&penalized) {
            let exponent = plain_dry(recent, id, allowed_length, &breakers);
            let expected = exponent.map_or(0.0, |exponent| -multiplier * base.powi(exponent as i32));
            prop_assert!((logit - expected).abs() < 1e-9, "token {}: {} and not {}", id, logit, expected);
        }
    }
}

#[test]
fn truncations_match_the_published_numbers() {
    let four = [0.1, 0.2, 0.3, 0.4];
    let one = |entry: f32| [entry, 0.0274, 0.047, 0.0274];
    let always =
        |threshold: f64| move |pool: &mut Pool| xtc(pool, &Xtc { probability: 1.0, threshold }, &mut Rng::new(0));
    let cases: [(&[f32], Apply<'_>, &[f64]); 16] = [
        (&four, &|pool| temperature(pool, 1.0), &[0.1, 0.2, 0.3, 0.4]),
        (&four, &|pool| top_k(pool, 1), &[1.0]),
        (&four, &|pool| top_k(pool, 3), &[0.222_222, 0.333_333, 0.444_444]),
        (&four, &|pool| top_k(pool, 0), &[0.1, 0.2, 0.3, 0.4]),
        (&four, &|pool| top_p(pool, 0.8), &[0.222_222, 0.333_333, 0.444_444]),
        (&four, &|pool| top_p(pool, 1.0), &[0.1, 0.2, 0.3, 0.4]),
        (&four, &|pool| min_p(pool, 0.24), &[0.1, 0.2, 0.3, 0.4]),
        (&four, &|pool| min_p(pool, 0.26), &[0.222_222, 0.333_333, 0.444_444]),
        (&four, &|pool| min_p(pool, 0.51), &[0.428_571, 0.571_429]),
        (&four, &|pool| min_p(pool, 1.0), &[1.0]),
        (&one(0.9), &|pool| min_p(pool, 0.08), &[1.0]),
        (&[0.97, 0.01, 0.01, 0.01], &|pool| typical(pool, 0.5), &[1.0]),
        (&[0.4, 0.2, 0.2, 0.2], &|pool| typical(pool, 0.5), &[0.333_333; 3]),
        (&[0.4, 0.3, 0.2, 0.1], &always(0.09), &[1.0]),
        (&[0.4, 0.3, 0.2, 0.1], &always(0.19), &[0.666_667, 0.333_333]),
        (&[0.4, 0.3, 0.2, 0.1], &always(0.39), &[0.4, 0.3, 0.2, 0.1]),
    ];
    for (probabilities, stage, expected) in cases {
        let mut pool = pool_of(probabilities);
        stage(&mut pool);
        assert_near(&p(&mut pool), expected, 1e-5);
    }
}

#[test]
fn penalties_match_the_published_numbers() {
    let cases: [(&[u32], f64, f64, [f64; 5]); 6] = [
        (&[0], 50.0, 0.0, [0.0, 0.25, 0.25, 0.25, 0.25]),
        (&[0, 1, 2], 50.0, 0.0, [0.0, 0.0, 0.0, 0.5, 0.5]),
        (&[0, 1, 2, 0, 0], 50.0, 0.0, [0.0, 0.0, 0.0, 0.5, 0.5]),
        (&[0], 1.0, 5.0, [0.000_011, 0.249_997, 0.249_997, 0.249_997, 0.249_997]),
        (&[0, 1, 2], 1.0, 5.0, [0.000_023, 0.000_023, 0.000_023, 0.499_966, 0.499_966]),
        (&[0, 1, 2, 0, 0], 1.0, 5.0, [0.0, 0.000_023, 0.000_023, 0.499_977, 0.499_977]),
    ];
    for (text, repeat_penalty, both, expected) in cases {
        let (presence_penalty, frequency_penalty) = (both, both);
        let sampling = Sampling { repeat_penalty, presence_penalty, frequency_penalty, ..Sampling::default() };
        let (mut occurrences, mut pool) = (Occurrences::default(), pool_of(&[0.2; 5]));
        occurrences.update(text, 0, None, 0);
        penalties(&mut pool, &occurrences, &sampling);
        assert_near(&p(&mut pool), &expected, 1e-5);
    }
}

#[test]
fn dry_matches_the_published_numbers() {
    struct Case {
        text: &'static [u32],
        multiplier: f64,
        allowed_length: usize,
        breaker: Option<u32>,
        expected: &'static [f64],
    }
    let uniform = Case { text: &[0, 1], multiplier: 1.0, allowed_length: 2, breaker: None, expected: &[0.25; 4] };
    let repeated = &[0, 1, 2, 0, 1];
    let cases = [
        Case { text: repeated, expected: &[0.296_923, 0.296_923, 0.109_232, 0.296_923], ..uniform },
        Case { text: &[0, 1, 3, 4, 0, 1], breaker: Some(3), expected: &[0.2; 5], ..uniform },
        Case { text: &[0, 1, 2, 3, 4, 0, 1], allowed_length: 4, expected: &[0.2; 5], ..uniform },
        Case {
            text: repeated,
            multiplier: 2.0,
            expected: &[0.241_818, 0.241_818, 0.032_727, 0.241_818, 0.241_818],
            ..uniform
        },
        uniform,
    ];
    for Case { text, multiplier, allowed_length, breaker, expected } in cases {
        let mut breakers = Breakers::default();
        breaker.into_iter().for_each(|id| breakers.add(id, Vec::new()));
        let parameters = Dry {
            multiplier,
            base: 1.1,
            allowed_length,
            last_n: Some(text.len().max(4)),
            breakers: Arc::new(breakers),
        };
        let mut pool = pool_of(&vec![1.0; expected.len()]);
        dry(&mut pool, text, &parameters);
        assert_near(&p(&mut pool), expected, 1e-5);
    }
}

#[test]
fn repetition_penalty_and_bad_words_match_transformers() {
    let mut logits = pool(&[-0.1, 0.1, 0.1, 0.4]);
    let mut occurrences = Occurrences::default();
    occurrences.update(&[0, 1, 3], 0, None, 0);
    penalties(&mut logits, &occurrences, &Sampling { repeat_penalty: 2.0, ..Sampling::default() });
    let found: Vec<f64> = plain(&logits).iter().map(|(_, logit)| *logit).collect();
    assert_near(&found, &[-0.2, 0.05, 0.1, 0.2], 1e-7);

    let banned = [vec![1], vec![1, 0], vec![0, 1, 2], vec![1, 3, 1, 3], vec![9, 9, 0, 1, 3, 1, 4]];
    let sampling = Sampling { banned: banned.into(), ..Sampling::default() };
    for (text, left) in [([0, 1, 3, 1], [2, 4]), ([0, 1, 0, 1], [3, 4])] {
        let mut pool = pool(&[0.0; 5]);
        bans::bias_and_bans(&mut pool, &text, &sampling);
        assert_eq!(ids(&pool), left);
    }
}

#[test]
fn mirostat_moves_mu_towards_the_target() {
    let mirostat = Mirostat { version: Version::Two, tau: 3.0, eta: 0.5 };
    assert_eq!(mirostat.first_mu(), 6.0);
    let mut pool = pool_of(&[0.5, 0.25, 0.125, 0.125]);
    mirostat.keep(&mut pool, 2.5, 4);
    assert_near(&p(&mut pool), &[0.666_667, 0.333_333], 1e-6);
    // log2(3) bits: mu falls by half of the difference to 3.
    let chosen = pool.entries()[1];
    assert!((mirostat.next_mu(2.5, &chosen) - (2.5 - 0.5 * (3f64.log2() - 3.0))).abs() < 1e-6);
    mirostat.keep(&mut pool, -1.0, 4);
    assert_eq!(ids(&pool), [0]);
}

#[test]
fn mirostat_holds_the_information_content_of_a_long_text() {
    // Zipf's law with 2000 tokens: without Mirostat, draws have 7.4 bits on average.
    let logits: Vec<f32> = (1..=2000).map(|rank| -1.05 * (rank as f32).ln()).collect();
    for version in [Version::One, Version::Two] {
        for tau in [2.0, 4.0] {
            let mirostat = Some(Mirostat { version, tau, eta: 0.1 });
            let mut sampler = Sampler::new(Sampling { temperature: 1.0, mirostat, ..Sampling::default() }, 0);
            let mut bits = 0.0;
            for _ in 0..2000 {
                let id = sampler.sample(&logits).unwrap();
                let chosen = *sampler.pool.entries().iter().find(|entry| entry.id == id).unwrap();
                bits -= chosen.p.log2() / 2000.0;
            }
            assert!((bits - tau).abs() < 0.1, "{version:?}: {bits} bits and not {tau}");
        }
    }
}
