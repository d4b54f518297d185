//! Runs random schedules of the real engine: requests arrive, pause and are cancelled between steps, under random
//! limits and budgets of pages. Every text must have the bits that it has alone, and the rules of the scheduler must
//! hold. Requests use different adapters. One model has a state that cannot be cut. Without a prefix cache, a scheduler
//! without an engine gets the same calls and the measured times, and must decide the same, as in a simulation.
//!
//! `IEC_SCHEDULES=4000 cargo test --release --test it -- schedules::` runs that many per pack.

use crate::common::{fixture, packed_as};
use crate::random_adapter::{random_adapter, with_magnitudes};
use crate::recurrent;
use iec::adapter::Adapter;
use iec::convert::adapter;
use iec::generate::sampler::Sampling;
use iec::generate::speculate::Speculator;
use iec::generate::{Batch, Event, Finish, Options, Request, StepReport, Terms, generate};
use iec::iebin::IebinReader;
use iec::rng::Rng;
use iec::runtime::adapters::AdapterSet;
use iec::runtime::{Engine, EngineOptions, KvType, PrefixCache};
use iec::sched::{self, KeyLimits, NoCache, SECOND, Scheduler};
use std::collections::BTreeMap;
use std::path::Path;

/// Tokens of a text with the bits of their log-probabilities and of those of the two most likely tokens.
type Trace = Vec<(u32, u64)>;

/// Random numbers from a seed.
struct Dice(Rng);

impl Dice {
    /// Returns a number from `from` to `to - 1`.
    fn between(&mut self, from: usize, to: usize) -> usize {
        from + self.0.next_u64() as usize % (to - from)
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.between(0, n) == 0
    }
}

/// Returns requests whose prompts share beginnings. Many end shortly before a page is full, so that they need a new
/// page while they decode.
fn requests(count: usize, longest: usize) -> Vec<Request> {
    let (mut dice, mut requests) = (Dice(Rng::new(23)), Vec::<Request>::new());
    for i in 0..count {
        let mut ids = match i % 3 {
            0 => Vec::new(),
            _ => {
                let one = &requests[dice.between(0, requests.len())].ids;
                one[..dice.between(0, one.len() + 1)].to_vec()
            }
        };
        let len = match dice.between(0, 3) {
            0 => dice.between(1, 60),
            1 => 128 - dice.between(1, 8),
            _ => longest.min(256) - dice.between(1, 8),
        };
        ids.truncate(len);
        ids.resize_with(len, || dice.between(0, 250) as u32);
        let sampling = match dice.one_in(2) {
            true => Sampling { temperature: 0.9, ..Sampling::default() },
            false => Sampling::default(),
        };
        let (seed, max_new) = (Some(i as u64), dice.between(1, 14));
        requests.push(Request { ids, max_new, sampling, seed, logprobs: Some(2), ..Request::default() });
    }
    requests
}

fn options(batch: usize) -> Options<'static> {
    Options { tokenizer: None, batch, eos: &[7, 8], skip_invalid: true, ..Options::default() }
}

fn add(trace: &mut Trace, event: &Event<'_>) {
    let (own, others) = event.likely.unwrap();
    trace.extend(std::iter::once(own).chain(others).map(|c| (c.id, c.logprob.to_bits())));
}

/// Returns each text as it is alone, without a prefix cache.
fn alone(engine: &mut Engine, requests: &[Request]) -> Vec<(Trace, Finish)> {
    let one = |request: &Request| {
        let mut trace = Trace::new();
        let sink = |event: &Event<'_>| {
            add(&mut trace, event);
            Ok(())
        };
        let outcome = generate(engine, None, &mut Speculator::off(), vec![request.clone()], &options(1), sink).unwrap();
        (trace, outcome.completions[0].finish)
    };
    requests.iter().map(one).collect()
}

/// Counts of what the schedules contained.
#[derive(Debug, Default)]
struct Seen {
    preempted: usize,
    reused: usize,
    cancelled: usize,
    accepted: usize,
    mixed: usize,
    /// Steps that the scheduler without an engine repeated.
    repeated: usize,
}

/// Scheduler without an engine, which repeats what a batch did.
struct Twin(Scheduler<NoCache>);

impl Twin {
    fn arrive(&mut self, now: u64, request: &Request, Terms { key, priority, deadline, further }: Terms) -> u64 {
        let room = self.0.options().ctx as usize + 1 - request.ids.len();
        let (prompt, max_tokens) = (request.ids.len() as u32, request.max_new.min(room) as u32);
        self.0.arrive(now, sched::Request { key, priority, prompt, max_tokens, deadline, further }).unwrap()
    }

    /// Plans and ends a step with the cost and the outcomes of the batch; returns the work and the changes of requests.
    fn step(&mut self, now: u64, report: &StepReport) -> (Vec<sched::Work>, Vec<sched::Event>) {
        let sched::Step { work, mut events } = self.0.plan(now);
        if !work.is_empty() {
            events.extend(self.0.done(report.cost, &report.outcomes));
        }
        (work, events)
    }
}

/// Runs one schedule.
fn run(
    engine: &mut Engine,
    mut prefixes: Option<&mut PrefixCache>,
    draft: &mut Speculator,
    (requests, expected): (&[Request], &[(Trace, Finish)]),
    seed: u64,
    seen: &mut Seen,
) {
    let mut dice = Dice(Rng::new(seed));
    let mut other = match dice.between(0, 4) {
        0 => Some(Speculator::ngram().always(dice.between(1, 4))),
        1 => None,
        _ => Some(Speculator::off()),
    };
    let speculator = other.as_mut().unwrap_or(draft);
    let limits = sched::Options {
        max_seqs: dice.between(1, 9),
        step: [1, 500, 5_000, SECOND][dice.between(0, 4)],
        prompts_first: dice.one_in(3),
        drafts: dice.between(0, 6) as u32,
        queue_timeout: 1_000_000 * SECOND,
        ..sched::Options::with_pages(0, 0)
    };
    let cached = prefixes.is_some();
    let mut batch = Batch::new(engine, prefixes.as_deref_mut(), limits);
    let parts = engine.parts().len();
    let budget = engine.kv_pages().total;
    let bounded = batch.pages().free < 1 << 20;
    let mut twin = (!cached).then(|| Twin(Scheduler::new(batch.limits().clone(), NoCache)));
    let keys = [1.0, 2.5].map(|weight| {
        let limits = KeyLimits { weight, ..KeyLimits::default() };
        twin.iter_mut().for_each(|twin| _ = twin.0.add_key(limits.clone()));
        batch.add_key(limits)
    });
    let (mut traces, mut waiting) = (BTreeMap::new(), dice.between(1, 12));
    let (mut accepted, mut paused, mut cancelled, mut now) = (0, Vec::new(), Vec::new(), 0);
    while waiting > 0 || !batch.is_empty() {
        while waiting > 0 && (batch.is_empty() || dice.one_in(3)) {
            waiting -= 1;
            let index = dice.between(0, requests.len());
            let terms =
                Terms { key: keys[dice.between(0, 2)], priority: dice.between(0, 3) as i32, ..Terms::default() };
            let id = batch.arrive(engine, now, traces.len(), requests[index].clone(), terms).unwrap();
            twin.iter_mut().for_each(|twin| assert_eq!(twin.arrive(now, &requests[index], terms), id));
            traces.insert(traces.len(), (index, Trace::new()));
            accepted = id + 1;
        }
        if dice.one_in(12) {
            let id = dice.between(0, accepted as usize) as u64;
            let done = batch.cancel(id);
            twin.iter_mut().for_each(|twin| assert_eq!(twin.0.cancel(id), done));
            cancelled.extend(done.then_some(id));
        }
        if dice.one_in(8) {
            let id = dice.between(0, accepted as usize) as u64;
            batch.pause(id, true);
            twin.iter_mut().for_each(|twin| twin.0.pause(id, true));
            paused.push(id);
        }
        if dice.one_in(3) {
            for id in paused.drain(..) {
                batch.pause(id, false);
                twin.iter_mut().for_each(|twin| twin.0.pause(id, false));
            }
        }
        let mut sink = |event: &Event<'_>| {
            add(&mut traces.get_mut(&event.request).unwrap().1, event);
            Ok(())
        };
        let report = batch.step(engine, speculator, now, &options(0), &mut sink).unwrap();
        batch.check().unwrap_or_else(|rule| panic!("schedule {seed}: {rule}"));
        if let Some(twin) = &mut twin {
            assert_eq!(twin.step(now, &report), (report.work.clone(), report.events.clone()), "schedule {seed}");
            seen.repeated += 1;
        }
        let counts = engine.kv_pages();
        assert!(!bounded || counts.total == budget && counts.used <= budget, "schedule {seed}: {counts:?}");
        let planned = batch.pages();
        assert!(
            counts.used <= parts * (planned.used + planned.cached) as usize,
            "schedule {seed}: {counts:?}, {planned:?}"
        );
        let decodes = report.work.iter().filter(|work| work.decodes).count();
        seen.mixed += usize::from(0 < decodes && decodes < report.work.len());
        for event in &report.events {
            match event {
                sched::Event::Preempted(_) => seen.preempted += 1,
                sched::Event::Admitted { cached, .. } | sched::Event::Reused { cached, .. } => {
                    seen.reused += *cached as usize;
                }
                sched::Event::Ended { .. } => {}
            }
        }
        for (id, completion) in report.ended {
            assert!(completion.error.is_none(), "schedule {seed}: {:?}", completion.error);
            let (index, trace) = &traces[&completion.index];
            let (text, finish) = &expected[*index];
            seen.accepted += completion.drafts.total().accepted;
            if completion.finish == Finish::Cancelled {
                assert!(cancelled.contains(&id) && text.starts_with(trace), "schedule {seed}, request {index}");
                seen.cancelled += 1;
            } else {
                assert_eq!((trace, completion.finish), (text, *finish), "schedule {seed}, request {index}");
            }
        }
        now += dice.between(1, 50_000) as u64;
    }
    drop(batch);
    let (counts, kept) = (engine.kv_pages(), prefixes.map_or(0, |prefixes| prefixes.pages()));
    assert!(counts.used <= parts * kept && (kept > 0) == (counts.used > 0), "schedule {seed}: {counts:?}, {kept}");
}

/// State of a text besides its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// None.
    Pages,
    /// That of a part around the last layers, which cannot be cut.
    Wrapped,
    /// That of recurrent layers.
    Recurrent,
}

/// Pack, and the state of its texts.
#[derive(Clone, Copy)]
struct Model<'a> {
    pack: &'a Path,
    kv: KvType,
    state: State,
}

/// Opens the engine with a budget of pages; 0 = none.
fn open(Model { pack, kv, state }: Model<'_>, threads: usize, chunk: usize, pages: u64, longest: usize) -> Engine {
    let options = EngineOptions { kv: Some(kv), threads, prefill_chunk: chunk, ..EngineOptions::default() };
    let reader = IebinReader::open(pack).unwrap();
    let bytes = Engine::open(&reader, &EngineOptions { kv_memory: Some(64 << 20), ..options });
    let page = (64 << 20) / bytes.unwrap().kv_pages().total as u64;
    let kv_memory = (pages > 0).then_some(pages * page);
    let options = EngineOptions { kv_memory, context: Some(longest), ..options };
    match state {
        State::Wrapped => recurrent::engine(&reader, &options),
        State::Pages | State::Recurrent => Engine::open(&reader, &options).unwrap(),
    }
}

/// Returns sets of adapters: none, each alone, and the first two together with factors. Without names, there are two
/// random adapters and one of DoRA that change all matrices.
fn sets(engine: &Engine, adapters: &[&str]) -> Vec<AdapterSet> {
    let (binder, mut rng) = (engine.adapter_binder(), Rng::new(3));
    let mut all: Vec<Adapter> =
        adapters.iter().map(|name| adapter::read(&fixture(name), engine.config()).unwrap()).collect();
    if all.is_empty() {
        all.extend([0; 2].map(|_| random_adapter(engine.config(), &mut rng)));
        all.push(with_magnitudes(random_adapter(engine.config(), &mut rng), &mut Rng::new(4)));
    }
    let bound: Vec<_> = all.iter().map(|adapter| binder.bind(adapter).unwrap()).collect();
    let together = bound.iter().take(2).cloned().zip([0.5, 1.5]);
    let alone = bound.iter().map(|adapter| AdapterSet::new([(adapter.clone(), 1.0)]).unwrap());
    [AdapterSet::default()].into_iter().chain(alone).chain([AdapterSet::new(together).unwrap()]).collect()
}

fn check(name: &str, kv: KvType, state: State, adapters: &[&str]) {
    let pack = packed_as(name, &fixture(name), &[]);
    let model = Model { pack: &pack, kv, state };
    let recurrent = state != State::Pages;
    let plain = open(model, 1, 512, 0, 64);
    let fixed = u64::from(Batch::new(&plain, None, sched::Options::with_pages(0, 0)).limits().fixed_pages);
    let longest = plain.config().max_context.min(270);
    let mut requests = requests(40, longest - 14);
    let sets = sets(&plain, adapters);
    requests.iter_mut().enumerate().for_each(|(i, one)| one.adapters = Some(sets[i / 2 % sets.len()].clone()));
    let expected = alone(&mut open(model, 1, 512, 0, longest), &requests);
    let schedules: u64 = std::env::var("IEC_SCHEDULES").map_or(60, |n| n.parse().unwrap());
    // Fewer texts find a beginning whose state is known.
    let schedules = if recurrent { 4 * schedules } else { schedules };
    let mut seen = Seen::default();
    let forms = [(1, 512, 0, false), (2, 64, 4, false), (1, 33, 5, true), (3, 512, 9, true), (1, 7, 4, true)];
    for (form, (threads, chunk, pages, prefixes)) in forms.into_iter().enumerate() {
        // A state that cannot be cut takes some pages more of each text, and as many of each snapshot. Two texts that
        // both need one more page then find one.
        let pages = match (pages, prefixes) {
            (0, _) => 0,
            (_, false) => pages + 2 * fixed - fixed.min(1),
            (_, true) => (1 + 2 * fixed) * pages + 2 * fixed,
        };
        let mut engine = open(model, threads, chunk, pages, longest);
        let mut prefixes = prefixes.then(|| PrefixCache::new(&engine, "pack"));
        let seeds = (0..schedules).filter(|seed| *seed as usize % forms.len() == form);
        // The model drafts for itself, so that drafts are accepted.
        let mut draft = Speculator::draft(open(model, threads, 512, 0, longest), &engine).always(3);
        let texts = (&requests[..], &expected[..]);
        seeds.for_each(|seed| run(&mut engine, prefixes.as_mut(), &mut draft, texts, seed, &mut seen));
    }
    let Seen { preempted, reused, cancelled, accepted, mixed, repeated } = seen;
    // The texts of Granite 4 rarely grow at the same time.
    assert!(
        (preempted > 0 || name == "granite4h") && reused > 1000 && cancelled > 5 && mixed > 20 && accepted > 20,
        "{seen:?}"
    );
    assert!(repeated > 100, "{seen:?}");
}

#[test]
fn texts_of_a_plain_model_have_the_bits_that_they_have_alone() {
    check(
        "llama-gqa",
        KvType::F16,
        State::Pages,
        &["lora-llama-gqa/r16-all", "lora-llama-gqa/r8-qv", "lora-llama-gqa/r32-dora"],
    );
}

#[test]
fn texts_of_a_model_with_sliding_windows_and_sinks_have_the_bits_that_they_have_alone() {
    check("gptoss-trained", KvType::Bf16, State::Pages, &[]);
}

#[test]
fn texts_of_a_mixture_of_experts_have_the_bits_that_they_have_alone() {
    check("qwen3moe", KvType::Int8, State::Pages, &["adapters/qwen3moe-experts", "adapters/qwen3moe-modules"]);
}

#[test]
fn texts_of_latent_attention_have_the_bits_that_they_have_alone() {
    check("deepseek3", KvType::F16, State::Pages, &[]);
}

#[test]
fn texts_of_layers_that_share_keys_and_values_have_the_bits_that_they_have_alone() {
    check("gemma4-e", KvType::Int8, State::Pages, &[]);
}

#[test]
fn texts_of_a_state_that_cannot_be_cut_have_the_bits_that_they_have_alone() {
    check("llama-gqa", KvType::F16, State::Wrapped, &["lora-llama-gqa/r16-all"]);
}

#[test]
fn texts_of_short_convolutions_have_the_bits_that_they_have_alone() {
    check("lfm2", KvType::F16, State::Recurrent, &[]);
}

#[test]
fn texts_of_delta_nets_have_the_bits_that_they_have_alone() {
    check("qwen35", KvType::F16, State::Recurrent, &[]);
}

#[test]
fn texts_of_mamba_have_the_bits_that_they_have_alone() {
    check("granite4h", KvType::F16, State::Recurrent, &[]);
}

#[test]
fn texts_of_layers_of_one_block_have_the_bits_that_they_have_alone() {
    check("nemotronh", KvType::F16, State::Recurrent, &[]);
}

#[test]
fn a_request_that_cannot_be_computed_fails_alone_and_one_past_its_deadline_keeps_its_text() {
    let pack = packed_as("llama-gqa", &fixture("llama-gqa"), &[]);
    let mut engine = open(Model { pack: &pack, kv: KvType::F16, state: State::Pages }, 1, 512, 8, 270);
    let requests: Vec<Request> = requests(2, 256).into_iter().map(|one| Request { max_new: 10, ..one }).collect();
    let expected = alone(&mut engine, &requests);
    let outside = Request { ids: vec![1, 1 << 20, 2], ..requests[0].clone() };
    let mut batch = Batch::new(&engine, None, sched::Options::with_pages(0, 0));
    let key = batch.add_key(KeyLimits::default());
    let terms = Terms { key, ..Terms::default() };
    let mut arrive = |index: usize, request: &Request, deadline| {
        batch.arrive(&engine, 0, index, request.clone(), Terms { deadline, ..terms }).unwrap()
    };
    let ids = [arrive(0, &requests[0], None), arrive(1, &outside, None), arrive(2, &requests[1], Some(3 * SECOND))];
    let (mut traces, mut ended) = (vec![Trace::new(); 3], BTreeMap::new());
    for now in 0..20 {
        let mut sink = |event: &Event<'_>| {
            add(&mut traces[event.request], event);
            Ok(())
        };
        let report = batch.step(&mut engine, &mut Speculator::off(), now * SECOND, &options(0), &mut sink).unwrap();
        batch.check().unwrap();
        ended.extend(report.ended);
    }
    assert!(batch.is_empty());
    let error = ended[&ids[1]].error.as_ref().unwrap().to_string();
    assert!(ended[&ids[1]].finish == Finish::Failed && error.contains("outside the vocabulary"), "{error}");
    assert_eq!((&traces[0], ended[&ids[0]].finish), (&expected[0].0, expected[0].1));
    assert_eq!((ended[&ids[2]].finish, ended[&ids[2]].ids.len()), (Finish::Deadline, 3));
    assert!(expected[1].0.starts_with(&traces[2][..3 * 3]), "three tokens with two others each");
    drop(batch);
    assert_eq!(engine.kv_pages().used, 0);
}
