//! Tests of the simulation: loads of each kind, with the check of invariants after each event.

use super::*;
use crate::sched::{KeyLimits, Options, SECOND};
use proptest::prelude::*;

/// A load of about 60 % of the machine's capacity.
fn setup() -> Setup {
    let (prompt, answer) = (Lengths { median: 300.0, sigma: 0.7 }, Lengths { median: 40.0, sigma: 0.7 });
    Setup {
        options: Options::with_pages(256, 4096),
        key: KeyLimits::default(),
        load: Load {
            requests: 3000,
            rate: 4.0,
            bursts: None,
            keys: 8,
            zipf: 1.1,
            flood: 0.0,
            background: 0.0,
            prompt,
            answer,
            max_tokens: 300,
            heads: 0,
            head_tokens: 0,
            adapters: 1,
            giants: 0.0,
            disconnects: 0.0,
            slow_readers: 0.0,
        },
        machine: Machine { prefill_rate: 4000.0, steps: vec![(0, 5_000), (8, 9_000)], acceptance: 0.6 },
        key_changes: None,
        seed: 1,
    }
}

#[test]
fn below_capacity_every_request_gets_its_answer() {
    let results = simulate(&setup(), &|| false).unwrap();
    assert_eq!((results.requests, results.completed()), (3000, 3000), "{:?}", results.ends);
    assert!(results.wait.quantile(0.99) < 2.0 && results.busy < results.seconds);
    assert_eq!(results.keys.iter().map(|key| key.requests).sum::<u64>(), 3000);
    assert!(results.keys[0].requests > 3 * results.keys[7].requests, "Zipf's law");
}

#[test]
fn the_same_seed_gives_the_same_trace_and_another_seed_another_one() {
    let trace = |seed| simulate(&Setup { seed, ..setup() }, &|| false).unwrap().trace;
    assert_eq!(trace(7), trace(7));
    assert_ne!(trace(7), trace(8));
}

#[test]
fn all_troubles_together_break_no_invariant() {
    let mut setup = setup();
    setup.options.drafts = 3;
    setup.options.pages = 64;
    let load = &mut setup.load;
    (load.rate, load.bursts, load.flood, load.background) = (12.0, Some((20.0, 40.0)), 0.5, 0.2);
    (load.heads, load.head_tokens, load.adapters, load.giants) = (20, 512, 4, 0.02);
    load.answer.median = 150.0;
    (load.disconnects, load.slow_readers, load.requests) = (0.2, 0.05, 20_000);
    let results = simulate(&setup, &|| false).unwrap();
    assert_eq!(results.ends.values().sum::<u64>(), 20_000, "each request ends once");
    for end in ["stop", "length", "cancelled", "queue_full"] {
        assert!(results.ends.get(end).is_some_and(|count| *count > 5), "{end}: {:?}", results.ends);
    }
    assert!(results.preemptions > 10 && results.cached > 100_000, "{results:?}");
    assert!(results.wait.largest() < 62.0, "the queue timeout bounds waiting");
}

#[test]
fn a_flooding_key_does_not_take_the_share_of_the_others() {
    let mut setup = setup();
    (setup.load.rate, setup.load.flood, setup.load.requests) = (40.0, 0.95, 20_000);
    setup.key.concurrent = Some(100);
    let results = simulate(&setup, &|| false).unwrap();
    let flood = &results.keys[8];
    let others = results.keys[..8].iter().map(|key| key.completed as f64 / key.requests as f64);
    assert!(others.fold(1.0, f64::min) > 0.99, "{results:?}");
    assert!(flood.refused > 5000 && flood.wait.quantile(0.5) > 5.0 * results.keys[0].wait.quantile(0.5));
}

#[test]
fn changes_of_keys_while_requests_are_computed_break_no_invariant() {
    let mut setup = setup();
    (setup.load.rate, setup.load.requests, setup.load.disconnects) = (8.0, 10_000, 0.1);
    setup.key_changes = Some(SECOND / 2);
    let results = simulate(&setup, &|| false).unwrap();
    assert_eq!(results.ends.values().sum::<u64>(), 10_000, "each request ends once");
    for end in ["stop", "unknown_key", "rate", "concurrent"] {
        assert!(results.ends.get(end).is_some_and(|count| *count > 5), "{end}: {:?}", results.ends);
    }
}

#[test]
fn shared_heads_are_computed_once_per_adapter() {
    let mut setup = setup();
    (setup.load.heads, setup.load.head_tokens, setup.load.adapters) = (1, 1024, 2);
    let results = simulate(&setup, &|| false).unwrap();
    assert!(results.cached > 2900 * 1024 && results.cached + results.computed == results.prompt_tokens, "{results:?}");
}

#[test]
fn more_step_time_gives_larger_gaps_and_earlier_first_tokens() {
    let mut setup = setup();
    (setup.load.prompt.median, setup.load.rate) = (2500.0, 0.8);
    let run = |step| {
        simulate(&Setup { options: Options { step, ..setup.options.clone() }, ..setup.clone() }, &|| false).unwrap()
    };
    let (short, long) = (run(20_000), run(SECOND));
    assert!(short.gap.quantile(0.99) * 2.0 < long.gap.quantile(0.99));
    assert!(short.first_token.quantile(0.5) > long.first_token.quantile(0.5));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn invariants_hold_for_any_load(
        (seed, rate, pages, seqs) in (any::<u64>(), 0.5..50.0f64, 40..300u32, 1..40usize),
        (flood, giants, disconnects, slow) in (0.0..0.9f64, 0.0..0.3f64, 0.0..0.5f64, 0.0..0.3f64),
        (step_tokens, drafts, heads, on) in (1..800u32, 0..5u32, 0..5usize, proptest::option::of(1.0..50.0f64)),
        key_changes in proptest::option::of(SECOND / 20..10 * SECOND),
    ) {
        let mut setup = setup();
        (setup.seed, setup.key_changes) = (seed, key_changes);
        let options = &mut setup.options;
        (options.pages, options.max_seqs, options.max_step_tokens, options.drafts) = (pages, seqs, step_tokens, drafts);
        let load = &mut setup.load;
        (load.requests, load.rate, load.flood, load.giants, load.heads) = (300, rate, flood, giants, heads);
        (load.disconnects, load.slow_readers, load.head_tokens) = (disconnects, slow, 700);
        load.bursts = on.map(|on| (on, 30.0));
        let results = simulate(&setup, &|| false);
        prop_assert!(results.as_ref().is_ok_and(|results| results.ends.values().sum::<u64>() == 300), "{:?}", results);
    }
}
