//! Tests of the scheduler: one test per rule, and random sequences of calls with the check after each.

use super::key_tests::limits;
use super::sim::{BlockCache, Head};
use super::*;
use crate::rng::Rng;
use proptest::prelude::*;

/// Scheduler with one key without limits, and 64 pages.
pub fn scheduler(change: impl FnOnce(&mut Options)) -> Scheduler<BlockCache> {
    let mut options = Options::with_pages(64, 64 * PAGE);
    change(&mut options);
    let mut scheduler = Scheduler::new(options, BlockCache::default());
    scheduler.add_key(KeyLimits::default());
    scheduler
}

pub fn request(prompt: u32, max_tokens: u32) -> Request {
    Request { key: 0, priority: 0, prompt, max_tokens, deadline: None, further: false }
}

/// Plans and computes a step that takes a millisecond per row, with one token for each sampling sequence.
pub fn step(scheduler: &mut Scheduler<BlockCache>, now: Micros) -> (Step, Vec<Event>) {
    let step = scheduler.plan(now);
    scheduler.check().unwrap();
    if step.work.is_empty() {
        return (step, Vec::new());
    }
    let outcomes: Vec<Outcome> = step.work.iter().map(|work| Outcome::Tokens(u32::from(work.samples))).collect();
    let rows = step.work.iter().map(Work::rows).sum();
    let events = scheduler.done(Cost { rows, time: 1000 * u64::from(rows) }, &outcomes);
    scheduler.check().unwrap();
    (step, events)
}

fn rows_of(step: &Step, id: RequestId) -> Option<u32> {
    step.work.iter().find(|work| work.id == id).map(|work| work.tokens)
}

fn admitted(step: &Step) -> Vec<RequestId> {
    let id = |event: &Event| if let Event::Admitted { id, .. } = event { Some(*id) } else { None };
    step.events.iter().filter_map(id).collect()
}

#[test]
fn a_request_is_computed_in_chunks_then_decoded_and_its_pages_are_released() {
    let mut s = scheduler(|_| ());
    let id = s.arrive(0, request(700, 3)).unwrap();
    let chunks: Vec<_> = (0..4).map(|now| rows_of(&step(&mut s, now).0, id)).collect();
    assert_eq!(chunks, [Some(512), Some(188), Some(1), Some(1)]);
    assert_eq!(s.pages(), PageCounts { free: 64 - 5, used: 0, cached: 5 }, "700 and 2 positions fill five pages");
    assert_eq!((s.waiting(), s.running()), (0, 0));
}

#[test]
fn prompts_fill_the_time_of_a_step_beside_decoding_sequences() {
    let mut s = scheduler(|_| ());
    let stream = s.arrive(0, request(100, 50)).unwrap();
    step(&mut s, 0);
    let long = s.arrive(1, request(2000, 5)).unwrap();
    let (mixed, _) = step(&mut s, 1);
    assert_eq!((rows_of(&mixed, stream), rows_of(&mixed, long)), (Some(1), Some(199)), "200 ms at 1 ms per row");
}

#[test]
fn a_prompt_advances_by_32_rows_even_if_decoding_fills_the_time() {
    let mut s = scheduler(|options| options.step = 1);
    s.arrive(0, request(100, 50)).unwrap();
    step(&mut s, 0);
    let long = s.arrive(1, request(1000, 5)).unwrap();
    assert_eq!(rows_of(&step(&mut s, 1).0, long), Some(32));
}

#[test]
fn lower_priorities_wait_and_aging_raises_them() {
    let mut s = scheduler(|options| options.max_seqs = 1);
    s.arrive(0, request(10, 2)).unwrap();
    step(&mut s, 0);
    let patient = s.arrive(0, Request { priority: 2, ..request(10, 1) }).unwrap();
    let urgent = s.arrive(19 * SECOND, Request { priority: 0, ..request(10, 1) }).unwrap();
    step(&mut s, 19 * SECOND);
    assert_eq!(admitted(&step(&mut s, 19 * SECOND).0), [urgent], "aged to 1");
    let urgent = s.arrive(20 * SECOND, Request { priority: 0, ..request(10, 1) }).unwrap();
    assert_eq!(admitted(&step(&mut s, 20 * SECOND).0), [patient], "aged to 0, where the earlier one is first");
    assert_eq!(admitted(&step(&mut s, 20 * SECOND).0), [urgent]);
}

#[test]
fn priorities_are_bounded_by_the_key() {
    let mut s = scheduler(|options| options.max_seqs = 1);
    let normal = s.arrive(0, request(10, 1)).unwrap();
    s.arrive(0, Request { priority: -100, ..request(10, 1) }).unwrap();
    assert_eq!(admitted(&step(&mut s, 0).0), [normal]);
}

#[test]
fn keys_with_waiting_requests_are_served_by_weight() {
    let mut s = scheduler(|options| options.max_seqs = 1);
    s.add_key(KeyLimits { weight: 3.0, ..KeyLimits::default() });
    let cost = 8.0 + 4.0 * 2.0;
    let mut served = [0.0f64; 2];
    for _ in 0..400 {
        for key in 0..2 {
            while !s.is_backlogged(key) {
                s.arrive(0, Request { key, ..request(8, 4) }).unwrap();
            }
        }
        let before = [s.counter(0), s.counter(1)];
        step(&mut s, 0);
        let after = [s.counter(0), s.counter(1)];
        (0..2).for_each(|key| served[key] += after[key] - before[key]);
        assert!((served[0] - served[1]).abs() <= cost, "{served:?}: more than one request apart");
    }
    assert!(served[0] > 5.0 * cost && served[1] > 5.0 * cost);
}

#[test]
fn the_service_of_backlogged_keys_differs_by_at_most_one_request_in_any_batch() {
    let mut most = 0.0f64;
    for seed in 0..20 {
        let mut rng = Rng::new(seed);
        let mut any = |from: u64, to: u64| (from + rng.next_u64() % (to - from)) as u32;
        let (mut s, mut largest) = (scheduler(|options| options.max_seqs = any(1, 20) as usize), 0.0f64);
        let weights = [1.0, f64::from(any(1, 9)), 0.5];
        weights[1..].iter().for_each(|weight| _ = s.add_key(KeyLimits { weight: *weight, ..KeyLimits::default() }));
        for now in 0..300 {
            for key in 0..3 {
                while s.queue.classes.get(&(key, 0)).is_none_or(|list| list.len() < 25) {
                    // Answers of one length, so that each request is charged what it will have cost.
                    s.arrive(0, Request { key, ..request(any(1, 300), 20) }).unwrap();
                }
            }
            let cost = 300.0 + 20.0 * s.cost.output_weight();
            largest = weights.iter().fold(largest, |largest, weight| largest.max(cost / weight));
            step(&mut s, now);
            let counters = [0, 1, 2].map(|key| s.counter(key));
            let gap = counters.iter().fold(0.0f64, |gap, a| counters.iter().fold(gap, |gap, b| gap.max(a - b)));
            assert!(gap <= largest, "seed {seed}, step {now}: {counters:?}, more than {largest} apart");
        }
        most = most.max(s.counter(0) / largest);
    }
    assert!(most > 4.0, "only {most} requests were served");
}

#[test]
fn a_request_that_enters_before_a_more_urgent_one_is_reported() {
    let mut s = scheduler(|options| (options.max_seqs, options.pages) = (1, 10));
    let other = s.add_key(KeyLimits::default());
    let of = |key, priority, prompt| Request { key, priority, ..request(prompt, 1) };
    let [late, first] = [of(0, 1, 10), of(0, 0, 10)].map(|request| s.arrive(0, request).unwrap());
    let error = s.check_order(late, 0, false).unwrap_err();
    assert_eq!(error, format!("request {late} entered before request {first}"));
    assert_eq!((s.check_order(first, 0, false), s.check_order(late, 10 * SECOND, false)), (Ok(()), Ok(())));
    let large = s.arrive(0, of(other, 0, 1279)).unwrap();
    s.keys.all[0].counter = 5.0;
    assert!(s.check_order(first, 0, false).unwrap_err().ends_with(&format!("request {large}")));
    s.pool.counts = PageCounts { free: 3, used: 7, cached: 0 };
    assert_eq!(s.check_order(first, 0, true), Ok(()), "the large one does not fit");
}

#[test]
fn a_flood_of_one_key_does_not_delay_another_key_by_more_than_one_request() {
    let mut s = scheduler(|options| options.max_seqs = 1);
    s.add_key(KeyLimits::default());
    (0..200).for_each(|_| _ = s.arrive(0, request(8, 2)).unwrap());
    (0..50).for_each(|now| drop(step(&mut s, now)));
    let polite = s.arrive(50, Request { key: 1, ..request(8, 2) }).unwrap();
    let entered = (0..6).find(|now| admitted(&step(&mut s, 50 + now).0).contains(&polite));
    assert!(entered.is_some_and(|steps| steps <= 4), "{entered:?}");
}

#[test]
fn a_returning_key_has_no_credit() {
    let mut s = scheduler(|_| ());
    let idle = s.add_key(KeyLimits::default());
    for now in 0..100 {
        s.arrive(now, request(50, 1)).unwrap();
        step(&mut s, now);
    }
    s.arrive(100, request(50, 1)).unwrap();
    s.arrive(100, Request { key: idle, ..request(50, 1) }).unwrap();
    assert!(s.counter(idle) >= 5000.0 && s.counter(idle) == s.counter(0), "{} {}", s.counter(idle), s.counter(0));
}

#[test]
fn waiting_requests_end_at_the_timeout_and_all_at_their_deadline() {
    let mut s = scheduler(|options| options.max_seqs = 1);
    let running = s.arrive(0, Request { deadline: Some(90 * SECOND), ..request(10, 100) }).unwrap();
    step(&mut s, 0);
    let (late, slow) = (s.arrive(1, Request { deadline: Some(5), ..request(10, 1) }), s.arrive(1, request(10, 1)));
    assert_eq!(s.next_timer(), Some(5));
    let ended = |id, finish| Event::Ended { id, finish };
    assert_eq!(step(&mut s, 5).0.events, [ended(late.unwrap(), Finish::Deadline)]);
    assert_eq!(step(&mut s, 60 * SECOND + 1).0.events, [ended(slow.unwrap(), Finish::QueueTimeout)]);
    assert_eq!(step(&mut s, 90 * SECOND).0.events, [ended(running, Finish::Deadline)]);
    assert_eq!(s.pages().used, 0);
}

#[test]
fn a_cancelled_request_leaves_with_the_step_in_flight_and_a_failed_one_alone() {
    let mut s = scheduler(|_| ());
    let ids: Vec<_> = (0..3).map(|_| s.arrive(0, request(200, 9)).unwrap()).collect();
    step(&mut s, 0);
    step(&mut s, 1);
    let planned = s.plan(2);
    assert_eq!(planned.work.len(), 3);
    assert!(s.cancel(ids[0]));
    assert_eq!(s.pages().used, 6, "the engine still writes to the pages");
    let events = s.done(Cost { rows: 3, time: 1 }, &[Outcome::Tokens(1), Outcome::Failed, Outcome::Tokens(1)]);
    let expected = [(ids[1], Finish::Failed), (ids[0], Finish::Cancelled)];
    assert_eq!(events, expected.map(|(id, finish)| Event::Ended { id, finish }));
    assert_eq!((s.pages().used, s.running()), (2, 1));
    s.check().unwrap();
}

#[test]
fn a_preempted_sequence_continues_from_its_cached_pages() {
    let mut s = scheduler(|options| (options.pages, options.max_step_tokens) = (7, 2000));
    let first = s.arrive(0, request(380, 20)).unwrap();
    let second = s.arrive(0, Request { priority: 1, ..request(380, 400) }).unwrap();
    let mut seen = Vec::new();
    for now in 0..500 {
        let (planned, events) = step(&mut s, now);
        seen.extend(planned.events.into_iter().chain(events));
    }
    let expected = [
        Event::Admitted { id: first, cached: 0 },
        Event::Admitted { id: second, cached: 0 },
        Event::Preempted(second),
        Event::Ended { id: first, finish: Finish::Length },
        Event::Admitted { id: second, cached: 384 },
        Event::Ended { id: second, finish: Finish::Length },
    ];
    assert_eq!(seen, expected);
}

#[test]
fn without_pages_the_youngest_of_the_lowest_priority_is_preempted_and_all_requests_end() {
    let mut s = scheduler(|options| (options.pages, options.max_step_tokens) = (12, 2000));
    let ids = [0, 1, 1].map(|priority| s.arrive(0, Request { priority, ..request(380, 400) }).unwrap());
    let (mut preempted, mut ended) = (Vec::new(), Vec::new());
    for now in 0..2000 {
        let (planned, events) = step(&mut s, now);
        for event in planned.events.into_iter().chain(events) {
            match event {
                Event::Preempted(id) => preempted.push(id),
                Event::Ended { id, finish } => ended.push((id, finish)),
                Event::Admitted { .. } | Event::Reused { .. } => {}
            }
        }
    }
    assert_eq!(preempted.first(), Some(&ids[2]));
    assert!(!preempted.contains(&ids[0]), "{preempted:?}");
    ended.sort_unstable_by_key(|(id, _)| *id);
    assert_eq!(ended, ids.map(|id| (id, Finish::Length)));
}

#[test]
fn a_common_head_is_computed_once() {
    let mut s = scheduler(|_| ());
    let mut computed = Vec::new();
    for now in 0..2 {
        let id = s.arrive(now, request(1100, 1)).unwrap();
        s.cache().register(id, Head { text: 7, tokens: 1024 });
        let work = (0..4).filter_map(|_| rows_of(&step(&mut s, now).0, id));
        computed.push(work.sum::<u32>());
    }
    assert_eq!(computed, [1100, 76]);
}

#[test]
fn a_paused_sequence_keeps_its_pages_and_the_others_advance() {
    let mut s = scheduler(|_| ());
    let (slow, other) = (s.arrive(0, request(10, 50)).unwrap(), s.arrive(0, request(10, 50)).unwrap());
    step(&mut s, 0);
    s.pause(slow, true);
    let (planned, _) = step(&mut s, 1);
    assert_eq!((rows_of(&planned, slow), rows_of(&planned, other)), (None, Some(1)));
    assert_eq!(s.pages().used, 2);
    s.pause(slow, false);
    assert_eq!(rows_of(&step(&mut s, 2).0, slow), Some(1));
}

#[test]
fn draft_tokens_fit_the_rows_of_the_step_and_the_rest_of_the_answer() {
    let mut s = scheduler(|options| (options.drafts, options.max_step_tokens) = (4, 64));
    let id = s.arrive(0, request(10, 8)).unwrap();
    step(&mut s, 0);
    let planned = s.plan(1);
    assert_eq!(planned.work, [Work { id, start: 10, tokens: 1, drafts: 4, decodes: true, samples: true }]);
    s.done(Cost { rows: 5, time: 5000 }, &[Outcome::Tokens(5)]);
    let planned = s.plan(2);
    assert_eq!(planned.work, [Work { id, start: 15, tokens: 1, drafts: 1, decodes: true, samples: true }]);
    let events = s.done(Cost { rows: 2, time: 2000 }, &[Outcome::Tokens(2)]);
    assert_eq!(events, [Event::Ended { id, finish: Finish::Length }]);
}

#[test]
fn the_check_finds_planted_mistakes() {
    let busy = || {
        let mut s = scheduler(|_| ());
        s.arrive(0, request(300, 9)).unwrap();
        step(&mut s, 0);
        s
    };
    type Mistake = (&'static str, fn(&mut Scheduler<BlockCache>));
    let mistakes: [Mistake; 8] = [
        ("expected a sum of 64 pages", |s| s.pool.counts.free += 1),
        ("the prefix cache has 0 unused pages", |s| (s.pool.counts.cached, s.pool.counts.free) = (1, 60)),
        ("sequences use 3 pages", |s| (s.pool.counts.used, s.pool.counts.free) = (2, 62)),
        ("1 accepted, 1 ended", |s| s.ended += 1),
        ("key 0: counts 2 unfinished requests, has 1", |s| s.keys.all[0].unfinished = 2),
        ("the most urgent priority is 0, not -1", |s| s.keys.most_urgent = -1),
        ("cancelled, not ended", |s| s.running[0].cancelled = true),
        ("0 of 1 decoding sequences advance", |s| s.planned = Some(0)),
    ];
    for (message, mistake) in mistakes {
        let mut s = busy();
        s.check().unwrap();
        mistake(&mut s);
        let found = s.check().unwrap_err();
        assert!(found.contains(message), "{found}: expected {message}");
    }
}

/// Call of the scheduler.
#[derive(Debug, Clone)]
enum Call {
    Arrive {
        key: usize,
        priority: i32,
        prompt: u32,
        max_tokens: u32,
        head: u64,
        deadline: Option<u64>,
    },
    Cancel(u64),
    Pause(u64, bool),
    SetKey(usize, KeyLimits),
    DisableKey(usize),
    Plan,
    /// Outcome of the step; the numbers choose the outcome of each work item.
    Done(u64, u8),
    Wait(u64),
}

fn calls() -> impl Strategy<Value = Call> {
    let arrive = (0..3usize, -1..3, 1..900u32, 0..300u32, 0..3u64, proptest::option::weighted(0.2, 0..SECOND));
    prop_oneof![
        4 => arrive.prop_map(|(key, priority, prompt, max_tokens, head, deadline)| {
            Call::Arrive { key, priority, prompt, max_tokens, head, deadline }
        }),
        1 => any::<u64>().prop_map(Call::Cancel),
        1 => (any::<u64>(), any::<bool>()).prop_map(|(id, paused)| Call::Pause(id, paused)),
        8 => Just(Call::Plan),
        8 => (1..400_000u64, any::<u8>()).prop_map(|(time, choice)| Call::Done(time, choice)),
        1 => (0..20 * SECOND).prop_map(Call::Wait),
        1 => (0..3usize, limits()).prop_map(|(key, limits)| Call::SetKey(key, limits)),
        1 => (0..3usize).prop_map(Call::DisableKey),
    ]
}

/// Makes the calls with the check after each, then lets all requests end, and returns all events.
fn replay(calls: &[Call], pages: u32) -> Result<Vec<Event>, String> {
    let mut s = scheduler(|options| {
        (options.pages, options.max_seqs, options.drafts, options.max_queue) = (pages, 5, 3, 20);
        options.ctx = 1200;
    });
    s.add_key(KeyLimits { weight: 2.0, max_priority: -1, ..KeyLimits::default() });
    s.add_key(KeyLimits { concurrent: Some(3), tpm: Some(5000), ..KeyLimits::default() });
    let (mut now, mut flight, mut events, mut accepted) = (0, Vec::<Work>::new(), Vec::new(), 0);
    let mut disabled = [false; 3];
    let settle = (0..3000).flat_map(|_| [Call::Plan, Call::Done(1000, 1)]);
    let resume = (0..200).map(|id| Call::Pause(id, false));
    for call in calls.iter().cloned().chain(resume).chain(settle) {
        match call {
            Call::Arrive { key, priority, prompt, max_tokens, head, deadline } => {
                let deadline = deadline.map(|after| now + after);
                let arrived = s.arrive(now, Request { key, priority, prompt, max_tokens, deadline, further: false });
                if disabled[key] && arrived.is_ok() {
                    return Err(format!("the disabled key {key} made a request"));
                }
                if let Ok(id) = arrived {
                    s.cache().register(id, Head { text: head, tokens: 400 });
                    accepted += 1;
                }
            }
            Call::Cancel(id) => _ = s.cancel(id % accepted.max(1)),
            Call::Pause(id, paused) => s.pause(id % accepted.max(1), paused),
            Call::Wait(time) => now += time,
            Call::SetKey(key, limits) => {
                s.set_key(now, key, limits);
                disabled[key] = false;
            }
            Call::DisableKey(key) => {
                s.disable_key(key);
                disabled[key] = true;
            }
            Call::Plan if flight.is_empty() => {
                let step = s.plan(now);
                (flight, _) = (step.work, events.extend(step.events));
            }
            Call::Done(time, choice) if !flight.is_empty() => {
                now += time;
                let outcome = |(i, work): (usize, &Work)| match (choice as usize + i) % 40 {
                    0 => Outcome::Failed,
                    7 => Outcome::Stopped(1),
                    n => Outcome::Tokens(if work.samples { 1 + n as u32 % (work.drafts + 1) } else { 0 }),
                };
                let outcomes: Vec<Outcome> = flight.iter().enumerate().map(outcome).collect();
                let rows = flight.iter().map(Work::rows).sum();
                events.extend(s.done(Cost { rows, time }, &outcomes));
                flight.clear();
            }
            Call::Plan | Call::Done(..) => {}
        }
        s.check()?;
    }
    let ends = events.iter().filter_map(|event| if let Event::Ended { id, .. } = event { Some(*id) } else { None });
    let mut ends: Vec<u64> = ends.collect();
    ends.sort_unstable();
    if ends != (0..accepted).collect::<Vec<_>>() {
        return Err(format!("{accepted} accepted requests, ends of {ends:?}"));
    }
    if s.pages().used > 0 {
        return Err(format!("{:?} after the last request", s.pages()));
    }
    Ok(events)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn invariants_hold_after_any_calls_and_the_same_calls_give_the_same_events(
        calls in proptest::collection::vec(calls(), 0..300),
        pages in 10..40u32,
    ) {
        let events = replay(&calls, pages);
        prop_assert!(events.is_ok(), "{:?}", events);
        prop_assert_eq!(replay(&calls, pages), events);
    }
}
