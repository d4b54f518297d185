//! Tests of the limits of keys, and of changes of keys while requests are computed.

use super::sim::Head;
use super::tests::{request, scheduler, step};
use super::*;
use proptest::prelude::*;

#[test]
fn limits_refuse_requests_at_the_door() {
    let limits =
        KeyLimits { rpm: Some(3), tpm: Some(1000), concurrent: Some(2), max_tokens: Some(100), ..KeyLimits::default() };
    let mut s = scheduler(|options| (options.max_queue, options.max_queue_tokens) = (2, 900));
    let key = s.add_key(limits);
    let of = |prompt, max_tokens| Request { key, ..request(prompt, max_tokens) };
    assert_eq!(s.arrive(0, of(10, 101)), Err(Rejection::MaxTokens));
    assert_eq!(s.arrive(0, of(0, 10)), Err(Rejection::Context));
    assert_eq!(s.arrive(0, of(u32::MAX, u32::MAX)), Err(Rejection::Context));
    assert_eq!(s.arrive(0, Request { key: 9, ..request(1, 1) }), Err(Rejection::UnknownKey));
    assert_eq!(s.arrive(0, of(901, 10)), Err(Rejection::QueueTokens));
    let first = s.arrive(0, of(800, 100)).unwrap();
    assert_eq!(s.arrive(0, of(50, 100)), Err(Rejection::Rate(Some(3 * SECOND))), "50 tokens at 1000 per minute");
    s.arrive(0, of(10, 10)).unwrap();
    assert_eq!(s.arrive(0, of(1, 1)), Err(Rejection::QueueFull));
    step(&mut s, 0);
    assert_eq!(s.arrive(0, of(1, 1)), Err(Rejection::Concurrent));
    assert!(s.cancel(first) && !s.cancel(first));
    s.arrive(0, of(50, 50)).unwrap();
    assert!(s.cancel(2));
    assert_eq!(s.arrive(0, of(1, 1)), Err(Rejection::Rate(Some(20 * SECOND))), "the fourth request of the minute");
    s.arrive(0, Request { further: true, ..of(1, 1) }).unwrap();
    s.check().unwrap();
}

#[test]
fn changed_limits_of_a_key_count_what_it_has_used() {
    let day = |tokens| KeyLimits { tokens_per_day: Some(tokens), rpm: Some(4), ..KeyLimits::default() };
    let mut s = scheduler(|_| ());
    let key = s.add_key(day(1000));
    let of = |max_tokens| Request { key, ..request(100, max_tokens) };
    s.arrive(0, of(500)).unwrap();
    s.arrive(0, of(10)).unwrap();
    assert_eq!(s.key_usage(0, key).unwrap().day_used, 710);
    s.set_key(0, key, day(900));
    assert_eq!(s.key_usage(0, key).unwrap().day_used, 710);
    assert!(s.arrive(0, of(91)).is_err());
    s.arrive(0, of(90)).unwrap();
    s.set_key(0, key, KeyLimits { rpm: Some(3), ..day(500) });
    assert_eq!(s.key_usage(0, key).unwrap().day_used, 500, "the new limit");
    let refilled = 4 * 3600 * SECOND;
    assert_eq!(s.key_usage(refilled, key).unwrap().day_used, 417, "a sixth of 500 is refilled");
    s.set_key(15 * SECOND, key, KeyLimits { rpm: Some(3), ..KeyLimits::default() });
    assert_eq!(s.arrive(15 * SECOND, of(1)), Err(Rejection::Rate(Some(5 * SECOND))), "3 - 3 + 0.75 requests");
    s.set_key(0, key, KeyLimits::default());
    assert_eq!(s.key_usage(0, key).unwrap().day_used, 0, "no limit");
    s.check().unwrap();
    s.keys.all[key].unfinished += 1;
    assert!(s.check().unwrap_err().contains("counts 4 unfinished requests, has 3"));
}

#[test]
fn a_disabled_key_ends_its_requests_and_makes_no_new_ones() {
    let mut s = scheduler(|_| ());
    let key = s.add_key(KeyLimits { max_priority: -5, ..KeyLimits::default() });
    let of = || Request { key, priority: -5, ..request(10, 2) };
    let running = s.arrive(0, of()).unwrap();
    step(&mut s, 0);
    let waiting = s.arrive(0, of()).unwrap();
    s.disable_key(key);
    assert_eq!(s.arrive(0, of()), Err(Rejection::UnknownKey));
    assert_eq!(s.keys.most_urgent, -5, "requests of the key are unfinished");
    let mut ended: Vec<_> = (1..4).flat_map(|now| step(&mut s, now).1).collect();
    ended.sort_unstable_by_key(|event| format!("{event:?}"));
    let expected = [running, waiting].map(|id| Event::Ended { id, finish: Finish::Length });
    assert_eq!((ended, s.keys.most_urgent), (expected.to_vec(), 0));
    s.set_key(9, key, KeyLimits { max_priority: -2, ..KeyLimits::default() });
    assert_eq!((s.arrive(9, of()).is_ok(), s.keys.most_urgent), (true, -2));
    s.keys.most_urgent = -3;
    assert_eq!(s.check().unwrap_err(), "the most urgent priority is -2, not -3");
}

#[test]
fn a_changed_weight_counts_for_later_requests_only() {
    let mut s = scheduler(|options| options.max_seqs = 1);
    let id = s.arrive(0, request(100, 100)).unwrap();
    step(&mut s, 0);
    let charged = s.counter(0);
    s.set_key(1, 0, KeyLimits { weight: 10.0, ..KeyLimits::default() });
    assert!(s.cancel(id));
    step(&mut s, 2);
    assert!(charged > 100.0 && s.counter(0) < charged, "the charge for the rest of the answer is given back");
    let before = s.counter(0);
    s.arrive(3, request(128, 0)).unwrap();
    step(&mut s, 3);
    assert_eq!(s.counter(0), before + 12.8);
}

#[test]
fn time_outside_of_the_steps_counts_for_the_key() {
    let mut s = scheduler(|options| options.max_seqs = 1);
    let limits = KeyLimits { weight: 2.0, ..KeyLimits::default() };
    let (slow, other) = (s.add_key(limits.clone()), s.add_key(limits));
    let id = s.arrive(0, Request { key: slow, ..request(100, 3) }).unwrap();
    s.charge_time(id, 1_000);
    assert_eq!(s.counter(slow), 0.0, "the time of a row is not known");
    step(&mut s, 0);
    let (before, waiting) = (s.counter(slow), s.arrive(1, Request { key: slow, ..request(100, 3) }).unwrap());
    s.charge_time(waiting, 0);
    assert_eq!(s.counter(slow), before);
    s.charge_time(waiting, SECOND);
    s.charge_time(id, SECOND);
    s.charge_time(99, SECOND);
    assert!(s.counter(slow) > before + 200.0 && s.counter(other) == 0.0);
    s.check().unwrap();
}

#[test]
fn the_use_of_a_key_is_counted_and_continues_after_a_restart() {
    let limits = KeyLimits { tokens_per_day: Some(100_000), ..KeyLimits::default() };
    let mut s = scheduler(|_| ());
    let key = s.add_key(limits.clone());
    for now in 0..2 {
        let id = s.arrive(now, Request { key, ..request(1100, 3) }).unwrap();
        s.cache().register(id, Head { text: 7, tokens: 1024 });
        (0..6).for_each(|_| drop(step(&mut s, now)));
    }
    let usage = s.key_usage(0, key).unwrap();
    let (day_used, unfinished) = (2 * 1103, 0);
    let expected = KeyUsage { day_used, unfinished, prompt_tokens: 2200, cached_tokens: 1024, generated_tokens: 6 };
    assert_eq!((usage, s.key_usage(0, 9)), (expected, None));
    let mut later = scheduler(|_| ());
    assert_eq!(later.add_key(limits), key);
    later.restore_usage(5, key, &usage);
    assert_eq!(later.key_usage(5, key), Some(usage));
    later.restore_usage(5, key, &KeyUsage { day_used: u64::MAX, prompt_tokens: u64::MAX, ..usage });
    let full = later.key_usage(5, key).unwrap();
    assert_eq!((full.day_used, full.prompt_tokens, full.cached_tokens), (100_000, u64::MAX, 2048));
    later.check().unwrap();
}

/// Generates limits of a key.
pub fn limits() -> impl Strategy<Value = KeyLimits> {
    let limit = |most: u64| proptest::option::weighted(0.5, 1..most);
    let limits = (1..100u32, limit(30), limit(9000), limit(20_000), limit(9), limit(300), -3..3);
    limits.prop_map(|(weight, rpm, tpm, tokens_per_day, concurrent, max_tokens, max_priority)| KeyLimits {
        weight: f64::from(weight) / 10.0,
        rpm,
        tpm,
        tokens_per_day,
        concurrent: concurrent.map(|n| n as usize),
        max_tokens: max_tokens.map(|n| n as u32),
        max_priority,
    })
}
