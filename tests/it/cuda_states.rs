//! Tests the states of texts on a simulated GPU: budget of pages, preemption, prefix cache and pages on disk, by the
//! same code as on the CPU. The bits of a GPU depend on the shape of a step, so greedy texts of a trained model are
//! compared.

use crate::common::packed_as;
use crate::cuda::on_gpu;
use crate::golden::{Case, fp32};
use iec::generate::speculate::Speculator;
use iec::generate::{Batch, Options, Request, Terms, generate};
use iec::iebin::IebinReader;
use iec::runtime::device::Offload;
use iec::runtime::{Engine, EngineOptions, Feed, PrefixCache, Sequence, Want};
use iec::sched::{self, Event, KeyLimits};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Number of tokens that each text generates.
const NEW: usize = 16;

fn pack() -> PathBuf {
    packed_as("stories260k", &Case::fixture("stories260k").hf_dir, &[])
}

fn open(pack: &Path, options: EngineOptions) -> Engine {
    Engine::open(&IebinReader::open(pack).unwrap(), &options).unwrap()
}

/// Returns texts that share a beginning of 100 tokens and reach a second page while they decode.
fn texts() -> Vec<Request> {
    let head: Vec<u32> = (0..100).map(|i| 300 + i * 7 % 150).collect();
    let text = |i: u32| {
        let ids = [&head[..], &(0..18 + i % 4).map(|j| 300 + (i * 31 + j * 11) % 150).collect::<Vec<u32>>()].concat();
        Request { ids, max_new: NEW, ..Request::default() }
    };
    (0..8).map(text).collect()
}

fn options() -> Options<'static> {
    Options { tokenizer: None, batch: 8, eos: &[], ..Options::default() }
}

/// Generates the texts; returns their tokens, and the number of prompt tokens that were not computed.
fn generated(engine: &mut Engine, prefixes: Option<&mut PrefixCache>) -> (Vec<Vec<u32>>, usize) {
    let outcome = generate(engine, prefixes, &mut Speculator::off(), texts(), &options(), |_| Ok(())).unwrap();
    let reused = outcome.completions.iter().map(|done| done.reused_tokens).sum();
    (outcome.completions.into_iter().map(|done| done.ids).collect(), reused)
}

#[test]
fn texts_on_a_gpu_share_beginnings_that_stay_known_on_disk() {
    let pack = pack();
    let (expected, _) = generated(&mut open(&pack, fp32()), None);
    let long: Vec<u32> = (0..300).map(|i| 300 + i * 7 % 150).collect();
    let one = |ids: &[u32]| vec![Request { ids: ids.to_vec(), max_new: 4, ..Request::default() }];
    let whole = on_gpu(fp32());
    let split = EngineOptions { offload: Offload { layers: Some(2), ..whole.offload }, ..whole };
    for (device, options) in [("cuda:0", whole), ("cpu+cuda:0", split)] {
        let mut engine = open(&pack, options);
        assert_eq!(engine.device(), device);
        assert_eq!(generated(&mut engine, None), (expected.clone(), 0), "{device}");
        let mut prefixes = PrefixCache::new(&engine, "pack");
        let (found, reused) = generated(&mut engine, Some(&mut prefixes));
        assert!(found == expected && reused >= 700, "{device}: {reused} tokens were reused");
        let counts = engine.kv_pages();
        assert!(counts.used > 0 && counts.free + counts.used == counts.total, "{device}: {counts:?}");

        let state = tempfile::tempdir().unwrap();
        let continued = |prompt: &[u32]| {
            let mut engine = open(&pack, options);
            let mut prefixes = PrefixCache::new(&engine, "pack");
            prefixes.keep_in(state.path(), 1 << 30).unwrap();
            let (cache, mut off) = (Some(&mut prefixes), Speculator::off());
            let done = generate(&mut engine, cache, &mut off, one(prompt), &self::options(), |_| Ok(()));
            let saved = prefixes.save(usize::MAX).unwrap();
            let one = done.unwrap().completions.remove(0);
            (one.ids, one.reused_tokens, saved.written)
        };
        let (ids, reused, written) = continued(&long);
        assert_eq!((reused, written), (0, 2), "{device}");
        assert_eq!(continued(&long), (ids, 256, 0), "{device}");
    }
}

#[test]
fn a_budget_of_pages_on_a_gpu_preempts_texts_that_are_then_computed_again() {
    let pack = pack();
    let (expected, _) = generated(&mut open(&pack, fp32()), None);
    let free = EngineOptions { kv_memory: Some(64 << 20), ..on_gpu(fp32()) };
    let page = (64 << 20) / open(&pack, free).kv_pages().total as u64;
    for cached in [false, true] {
        let mut engine = open(&pack, EngineOptions { kv_memory: Some(9 * page), ..free });
        assert_eq!((engine.kv_pages().total, engine.context()), (9, 512));
        let mut prefixes = cached.then(|| PrefixCache::new(&engine, "pack"));
        let mut batch = Batch::new(&engine, prefixes.as_mut(), sched::Options::with_pages(0, 0));
        let terms = Terms { key: batch.add_key(KeyLimits::default()), ..Terms::default() };
        for (index, request) in texts().into_iter().enumerate() {
            batch.arrive(&engine, 0, index, request, terms).unwrap();
        }
        let (mut preempted, mut ended) = (0, BTreeMap::new());
        while !batch.is_empty() {
            let report = batch.step(&mut engine, &mut Speculator::off(), 0, &options(), &mut |_| Ok(())).unwrap();
            batch.check().unwrap();
            assert!(engine.kv_pages().used <= 9);
            preempted += report.events.iter().filter(|event| matches!(event, Event::Preempted(_))).count();
            ended.extend(report.ended.into_iter().map(|(_, done)| (done.index, done.ids)));
        }
        assert!(ended.into_values().eq(expected.iter().cloned()), "with a prefix cache: {cached}");
        assert!(preempted > 0, "with a prefix cache: {cached}");
    }
}

/// Reads tokens, and returns the logits after each of them.
fn read(engine: &mut Engine, sequence: &mut Sequence, tokens: &[u32]) -> Vec<f32> {
    let mut logits = Vec::new();
    engine.forward(&mut [Feed { sequence, tokens, want: Want::All }], &mut logits).unwrap();
    logits
}

/// Returns the largest difference of logits.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}

#[test]
fn the_memory_of_recurrent_layers_is_marked_rewound_cloned_and_kept_for_later_texts() {
    for name in ["lfm2", "qwen35", "granite4h"] {
        let case = Case::fixture(name);
        let pack = packed_as(name, &case.hf_dir, &[]);
        let mut engine = open(&pack, on_gpu(fp32()));
        let vocab = engine.config().vocab;
        let ids: Vec<u32> = (0..150).map(|i| i * 7 % 250).collect();
        let mut sequence = engine.new_sequence().unwrap();
        let whole = read(&mut engine, &mut sequence, &ids);
        for piece in [1, 7, 64] {
            let mut sequence = engine.new_sequence().unwrap();
            let pieces: Vec<f32> =
                ids.chunks(piece).flat_map(|tokens| read(&mut engine, &mut sequence, tokens)).collect();
            assert!(apart(&pieces, &whole) < 1e-3, "{name}, pieces of {piece}");
        }
        // Drafts are taken back to the mark, then to where nothing was marked.
        let mut sequence = engine.new_sequence().unwrap();
        read(&mut engine, &mut sequence, &ids[..100]);
        sequence.mark();
        let mut other = sequence.clone();
        read(&mut engine, &mut sequence, &[1, 2, 3, 4, 5, 6]);
        sequence.truncate(100);
        let again = read(&mut engine, &mut sequence, &ids[100..]);
        assert!(apart(&again, &whole[100 * vocab..]) < 1e-3, "{name}: back at the mark");
        sequence.truncate(50);
        let again = read(&mut engine, &mut sequence, &ids[50..60]);
        assert!(apart(&again, &whole[50 * vocab..60 * vocab]) < 1e-3, "{name}: read again");
        let again = read(&mut engine, &mut other, &ids[100..120]);
        assert!(apart(&again, &whole[100 * vocab..120 * vocab]) < 1e-3, "{name}: a clone");
        // Another text of the step has a state of its own.
        let mut two = [engine.new_sequence().unwrap(), engine.new_sequence().unwrap()];
        let mut logits = Vec::new();
        for tokens in [0..40, 40..41, 41..60] {
            let [first, second] = &mut two;
            let feeds = &mut [
                Feed { sequence: first, tokens: &ids[tokens.clone()], want: Want::Nothing },
                Feed { sequence: second, tokens: &ids[90..90 + tokens.len()], want: Want::Nothing },
            ];
            engine.forward(feeds, &mut logits).unwrap();
        }
        let again = read(&mut engine, &mut two[0], &ids[60..70]);
        assert!(apart(&again, &whole[60 * vocab..70 * vocab]) < 1e-3, "{name}: in company");

        let state = tempfile::tempdir().unwrap();
        let golden = case.prompts().iter().max_by_key(|prompt| prompt["ids"].as_array().unwrap().len()).unwrap();
        let [prompt, greedy]: [Vec<u32>; 2] =
            ["ids", "greedy_ids"].map(|field| serde_json::from_value(golden[field].clone()).unwrap());
        let text: Vec<u32> = prompt.iter().chain(&greedy[..greedy.len() / 2]).copied().collect();
        for round in 0..2 {
            let mut engine = open(&pack, on_gpu(fp32()));
            let mut prefixes = PrefixCache::new(&engine, "pack");
            prefixes.keep_in(state.path(), 1 << 30).unwrap();
            let mut continued = |ids: &[u32], max_new: usize| {
                let request = vec![Request { ids: ids.to_vec(), max_new, ..Request::default() }];
                let (cache, mut off) = (Some(&mut prefixes), Speculator::off());
                let done = generate(&mut engine, cache, &mut off, request, &options(), |_| Ok(())).unwrap();
                (done.completions[0].ids.clone(), done.completions[0].reused_tokens)
            };
            let (found, reused) = continued(&prompt, greedy.len());
            assert_eq!(found, greedy, "{name}, round {round}");
            assert!(round == 0 || prompt.len() <= 128 || reused >= 128, "{name}: {reused} tokens from disk");
            let (found, reused) = continued(&text, 2);
            assert_eq!(found, greedy[greedy.len() / 2..][..2], "{name}, round {round}");
            assert!(reused > 0 || text.len() < 128, "{name}: {reused} tokens were reused");
            prefixes.save(usize::MAX).unwrap();
        }
    }
}
