//! Tests the prefix cache and the budget of KV pages: texts are the same with them, and pages are counted exactly.

use crate::common::{fixture, iec, packed_as, packed_with};
use crate::recurrent;
use iec::generate::speculate::Speculator;
use iec::generate::{Batch, Completion, Options, Request, generate};
use iec::iebin::IebinReader;
use iec::rng::Rng;
use iec::runtime::{Engine, EngineOptions, Feed, KvType, Output, PrefixCache, Want};
use iec::sched;
use serde_json::json;
use std::path::Path;

/// Number of tokens that each text generates.
const NEW: usize = 6;

fn open(pack: &Path, options: EngineOptions) -> Engine {
    Engine::open(&IebinReader::open(pack).unwrap(), &options).unwrap()
}

/// Returns texts that share beginnings of random lengths.
fn overlapping(count: usize, longest: usize) -> Vec<Vec<u32>> {
    let (mut rng, mut texts) = (Rng::new(11), Vec::<Vec<u32>>::new());
    for i in 0..count {
        let mut text = match i % 4 {
            0 => Vec::new(),
            _ => {
                let one = &texts[rng.next_u64() as usize % texts.len()];
                one[..rng.next_u64() as usize % (one.len() + 1)].to_vec()
            }
        };
        let more = 1 + rng.next_u64() as usize % (longest - text.len()).max(1);
        text.extend((0..more).map(|_| (rng.next_u64() % 250) as u32));
        texts.push(text);
    }
    texts
}

/// An engine with its prefix cache, if it has one.
type Cached<'a> = (&'a mut Engine, Option<&'a mut PrefixCache>);

fn completions((engine, prefixes): Cached<'_>, texts: &[Vec<u32>], batch: usize) -> Vec<Completion> {
    // Log-probabilities show differences that change no token.
    let request = |ids: &Vec<u32>| Request { ids: ids.clone(), max_new: NEW, logprobs: Some(3), ..Request::default() };
    let options = Options { tokenizer: None, batch, eos: &[], ..Options::default() };
    let (requests, mut speculator) = (texts.iter().map(request).collect(), Speculator::ngram());
    generate(engine, prefixes, &mut speculator, requests, &options, |_| Ok(())).unwrap().completions
}

/// Returns the bits of the log-probabilities of all tokens of all texts.
fn likely((engine, prefixes): Cached<'_>, texts: &[Vec<u32>], batch: usize) -> (Vec<Vec<(u32, u64)>>, usize) {
    let mut likely = vec![Vec::new(); texts.len()];
    let request = |ids: &Vec<u32>| Request { ids: ids.clone(), max_new: NEW, logprobs: Some(3), ..Request::default() };
    let options = Options { tokenizer: None, batch, eos: &[], ..Options::default() };
    let requests = texts.iter().map(request).collect();
    let outcome = generate(engine, prefixes, &mut Speculator::off(), requests, &options, |event| {
        let (own, others) = event.likely.unwrap();
        likely[event.request].extend(std::iter::once(own).chain(others).map(|c| (c.id, c.logprob.to_bits())));
        Ok(())
    });
    let reused = outcome.unwrap().completions.iter().map(|done| done.reused_tokens).sum();
    (likely, reused)
}

#[test]
fn texts_that_reuse_beginnings_have_the_bits_of_texts_that_do_not() {
    for (name, kv) in [
        ("llama-gqa", KvType::F16),
        ("mistral-swa", KvType::Int8),
        ("gptoss-trained", KvType::Bf16),
        ("qwen3moe", KvType::F32),
        ("deepseek3", KvType::F16),
        ("gemma4-e", KvType::Bf16),
    ] {
        let pack = packed_as(name, &fixture(name), &[]);
        let plain = EngineOptions { kv: Some(kv), ..EngineOptions::default() };
        let longest = open(&pack, plain).context().min(400) - NEW;
        let texts = overlapping(24, longest);
        let (expected, none) = likely((&mut open(&pack, plain), None), &texts, 1);
        assert_eq!(none, 0, "{name}: reuse without a prefix cache");
        let page = page_bytes(&pack, plain);
        for (batch, threads, chunk, pages) in
            [(1, 1, 512, None), (1, 2, 50, Some(5)), (3, 1, 64, Some(14)), (8, 3, 512, None)]
        {
            let options = EngineOptions {
                threads,
                prefill_chunk: chunk,
                kv_memory: pages.map(|pages: u64| pages * page),
                context: Some(longest + NEW),
                ..plain
            };
            let mut engine = open(&pack, options);
            let mut prefixes = PrefixCache::new(&engine, "pack");
            for round in 0..2 {
                let (found, reused) = likely((&mut engine, Some(&mut prefixes)), &texts, batch);
                assert!(found == expected, "{name}: batch {batch}, {threads} threads, {pages:?} pages, round {round}");
                assert!(reused > 0, "{name}: nothing was reused");
            }
            let counts = engine.kv_pages();
            assert_eq!((counts.used, counts.free + counts.used), (prefixes.pages(), counts.total), "{counts:?}");
            assert!(counts.used > 0 && pages.is_none_or(|pages| counts.total == pages as usize), "{counts:?}");
        }
    }
}

#[test]
fn texts_of_a_state_that_cannot_be_cut_are_reused_where_it_was_kept_also_from_disk() {
    let reader = |name: &str| IebinReader::open(&packed_as(name, &fixture(name), &[])).unwrap();
    let [llama, lfm, qwen] = ["llama-gqa", "lfm2", "qwen35"].map(reader);
    reuse_a_state_that_cannot_be_cut(&|| recurrent::engine(&llama, &EngineOptions::default()));
    for hybrid in [lfm, qwen] {
        reuse_a_state_that_cannot_be_cut(&|| Engine::open(&hybrid, &EngineOptions::default()).unwrap());
    }
}

fn reuse_a_state_that_cannot_be_cut(open: &dyn Fn() -> Engine) {
    let head: Vec<u32> = (0..300).map(|i| i * 7 % 250).collect();
    let texts: Vec<Vec<u32>> = (0..4).map(|i| [&head[..], &[200 + i, 9]].concat()).collect();
    let (expected, _) = likely((&mut open(), None), &texts, 1);
    let state = tempfile::tempdir().unwrap();
    // Three texts begin with the 256 tokens of two pages, then all do.
    for reused in [3 * 256, 4 * 256] {
        let mut engine = open();
        let mut prefixes = PrefixCache::new(&engine, "pack");
        prefixes.keep_in(state.path(), 1 << 30).unwrap();
        assert_eq!(likely((&mut engine, Some(&mut prefixes)), &texts, 1), (expected.clone(), reused));
        prefixes.save(usize::MAX).unwrap();
    }
    // A text that goes on is known up to its end.
    let mut engine = open();
    let mut prefixes = PrefixCache::new(&engine, "pack");
    let (first, _) = likely((&mut engine, Some(&mut prefixes)), &texts[..1], 1);
    let answer: Vec<u32> = first[0].iter().step_by(4).map(|(id, _)| *id).collect();
    let longer = vec![[&texts[0][..], &answer, &[5, 6]].concat()];
    let (expected, _) = likely((&mut open(), None), &longer, 1);
    let read = texts[0].len() + answer.len() - 1;
    assert_eq!(likely((&mut engine, Some(&mut prefixes)), &longer, 1), (expected, read));
    // One that goes on in another way is known up to the end of the prompt, although the answer has grown its page.
    let other = vec![[&texts[0][..], &[77; 20]].concat()];
    let (expected, _) = likely((&mut open(), None), &other, 1);
    assert_eq!(likely((&mut engine, Some(&mut prefixes)), &other, 1), (expected, texts[0].len()));
}

#[test]
fn snapshots_of_a_long_prompt_take_no_more_memory_than_its_pages() {
    let dir = packed_with("qwen35-text", "config.json", json!({"max_position_embeddings": 8192}));
    let mut engine = open(&dir.path().join("pack"), EngineOptions { prefill_chunk: 128, ..EngineOptions::default() });
    let mut prefixes = PrefixCache::new(&engine, "pack");
    let none = sched::Options::with_pages(0, 0);
    let fixed = Batch::new(&engine, None, none).limits().fixed_pages as usize;
    let pages = 2 * fixed + 2;
    assert!(fixed > 1 && pages * 128 + 60 < engine.context(), "{fixed} pages");
    let long: Vec<u32> = (0..pages as u32 * 128 + 60).map(|i| i * 7 % 250).collect();
    let texts = vec![long.clone()];
    let (expected, _) = likely((&mut engine, None), &texts, 1);
    assert_eq!(likely((&mut engine, Some(&mut prefixes)), &texts, 1), (expected, 0));
    // Snapshots: two between, one behind the last full page, one at the end of the prompt, and one of the answer.
    assert_eq!(prefixes.pages(), pages + 1 + 5 * fixed);
    let early = vec![[&long[..(fixed + 1) * 128], &[9; 30]].concat()];
    let (expected, _) = likely((&mut engine, None), &early, 1);
    assert_eq!(likely((&mut engine, Some(&mut prefixes)), &early, 1), (expected, fixed * 128));
}

#[test]
fn a_snapshot_of_a_prompt_takes_the_place_of_what_was_not_used_lately() {
    let pack = packed_as("qwen35", &fixture("qwen35"), &[]);
    let engine = open(&pack, EngineOptions::default());
    let fixed = u64::from(Batch::new(&engine, None, sched::Options::with_pages(0, 0)).limits().fixed_pages);
    let kv_memory = Some((4 * fixed + 12) * page_bytes(&pack, EngineOptions::default()));
    let mut engine = open(&pack, EngineOptions { kv_memory, ..EngineOptions::default() });
    let mut prefixes = PrefixCache::new(&engine, "pack");
    for text in 0..12 {
        let prompt: Vec<u32> = (0..150).map(|i| (i * 7 + text * 31) % 250).collect();
        let (first, second) = (vec![prompt.clone()], vec![[&prompt[..], &[5; 9]].concat()]);
        likely((&mut engine, Some(&mut prefixes)), &first, 1);
        let (_, reused) = likely((&mut engine, Some(&mut prefixes)), &second, 1);
        assert_eq!(reused, 128, "text {text}: the end of a prompt is near the snapshot before it");
        let other = vec![[&prompt[..], &[6; 60], &[8]].concat()];
        likely((&mut engine, Some(&mut prefixes)), &other, 1);
        let (_, reused) = likely((&mut engine, Some(&mut prefixes)), &[[&other[0][..], &[3, 4]].concat()], 1);
        assert_eq!(reused, 211, "text {text}");
    }
}

/// Returns the bytes of a KV page.
fn page_bytes(pack: &Path, options: EngineOptions) -> u64 {
    let enough = EngineOptions { kv_memory: Some(64 << 20), ..options };
    (64 << 20) / open(pack, enough).kv_pages().total as u64
}

#[test]
fn a_common_beginning_is_computed_once_in_any_batch() {
    let pack = packed_as("llama-gqa", &fixture("llama-gqa"), &[]);
    let head: Vec<u32> = (0..150).map(|i| i * 7 % 250).collect();
    let texts: Vec<Vec<u32>> = (0..6).map(|i| [&head[..], &[251, 200 + i, 9]].concat()).collect();
    for batch in [1, 4, 6] {
        let mut engine = open(&pack, EngineOptions::default());
        let mut prefixes = PrefixCache::new(&engine, "pack");
        let done = completions((&mut engine, Some(&mut prefixes)), &texts, batch);
        let reused: Vec<usize> = done.iter().map(|done| done.reused_tokens).collect();
        assert_eq!(reused, [0, 151, 151, 151, 151, 151], "batch {batch}");
        // The whole prompt is known now, and only its last token is computed.
        let done = completions((&mut engine, Some(&mut prefixes)), &texts, batch);
        assert!(done.iter().all(|done| done.reused_tokens == 152));
    }
}

#[test]
fn texts_of_another_salt_are_not_reused() {
    let mut engine = open(&packed_as("llama-gqa", &fixture("llama-gqa"), &[]), EngineOptions::default());
    let mut prefixes = PrefixCache::new(&engine, "pack");
    let mut reused = |salt: &[u8]| {
        let request = Request { ids: (1..40).collect(), max_new: 2, salt: salt.to_vec(), ..Request::default() };
        let options = Options { tokenizer: None, batch: 1, eos: &[], ..Options::default() };
        let (prefixes, mut off) = (Some(&mut prefixes), Speculator::off());
        let outcome = generate(&mut engine, prefixes, &mut off, vec![request], &options, |_| Ok(())).unwrap();
        outcome.completions[0].reused_tokens
    };
    let found = [&b"a"[..], b"b", b"a", b"", b"b", b""].map(&mut reused);
    assert_eq!(found, [0, 0, 38, 0, 38, 38]);
}

#[test]
fn a_step_mixes_prompts_and_running_texts_and_takes_no_more_than_its_rows() {
    let pack = packed_as("qwen3moe", &fixture("qwen3moe"), &[]);
    let options = EngineOptions { prefill_chunk: 12, ..EngineOptions::default() };
    let mut engine = open(&pack, options);
    let (a, b, c): (Vec<u32>, Vec<u32>, Vec<u32>) = ((0..20).collect(), (30..36).collect(), (50..52).collect());
    let alone = |engine: &mut Engine, ids: &[u32], want| {
        let (mut sequence, mut logits) = (engine.new_sequence().unwrap(), Vec::new());
        engine.forward(&mut [Feed { sequence: &mut sequence, tokens: ids, want }], &mut logits).unwrap();
        logits
    };
    let expected = [
        alone(&mut engine, &b[..5], Want::Last),
        alone(&mut engine, &c, Want::All),
        alone(&mut engine, &b, Want::Last),
        alone(&mut engine, &a, Want::Last),
    ]
    .concat();
    let [mut x, mut y, mut z] = [0; 3].map(|_| engine.new_sequence().unwrap());
    let (mut logits, vocab) = (Vec::new(), engine.config().vocab);
    let mut first = [
        Feed { sequence: &mut x, tokens: &a[..5], want: Want::Nothing },
        Feed { sequence: &mut y, tokens: &b[..5], want: Want::Last },
        Feed { sequence: &mut z, tokens: &c, want: Want::All },
    ];
    engine.step(&mut first, Output::Logits(&mut logits)).unwrap();
    assert_eq!(logits.len(), 3 * vocab);
    let mut feeds = [
        Feed { sequence: &mut y, tokens: &b[5..], want: Want::Last },
        Feed { sequence: &mut x, tokens: &a[5..], want: Want::Last },
    ];
    let error = engine.step(&mut feeds, Output::Logits(&mut logits)).unwrap_err();
    assert!(error.to_string().contains("16 tokens in one step, expected at most 12"), "{error}");
    assert_eq!((logits.len(), feeds[0].sequence.len()), (3 * vocab, 5));
    feeds[1].tokens = &a[5..13];
    feeds[1].want = Want::Nothing;
    engine.step(&mut feeds, Output::Logits(&mut logits)).unwrap();
    engine
        .step(&mut [Feed { sequence: &mut x, tokens: &a[13..], want: Want::Last }], Output::Logits(&mut logits))
        .unwrap();
    assert!(logits.iter().map(|v| v.to_bits()).eq(expected.iter().map(|v| v.to_bits())));
}

#[test]
fn a_long_text_of_a_model_with_longrope_is_reused_for_long_texts_only() {
    let factors = |from: f64| (0..12).map(|i| from + 0.3 * f64::from(i)).collect::<Vec<f64>>();
    let scaling = json!({"type": "longrope", "short_factor": factors(1.0), "long_factor": factors(2.5)});
    let fields = json!({"original_max_position_embeddings": 150, "rope_scaling": scaling});
    let dir = packed_with("phi3", "config.json", fields);
    let pack = dir.path().join("pack");
    let mut engine = open(&pack, EngineOptions { prefill_chunk: 9, ..EngineOptions::default() });
    let limit = match engine.config().rope.scaling {
        iec::model_config::RopeScaling::LongRope { original_max_position, .. } => original_max_position,
        _ => unreachable!("the fixture has LongRoPE"),
    };
    let text: Vec<u32> = (0..limit as u32 + 10).map(|i| i * 5 % 250).collect();
    let lengths = [limit - 12, limit - 10, limit + 4, limit + 9, limit - 8, limit + 1];
    let texts: Vec<Vec<u32>> = lengths.iter().map(|len| text[..*len].to_vec()).collect();
    let (expected, _) = likely((&mut open(&pack, EngineOptions::default()), None), &texts, 1);
    let mut prefixes = PrefixCache::new(&engine, "pack");
    let (found, reused) = likely((&mut engine, Some(&mut prefixes)), &texts, 1);
    assert!(found == expected);
    assert!(reused > 0);
}

#[test]
fn a_budget_lowers_the_context_and_refuses_a_longer_one_with_exit_code_6() {
    let pack = packed_as("llama-gqa", &fixture("llama-gqa"), &[]);
    let page = page_bytes(&pack, EngineOptions::default());
    let run = |options: &[&str]| {
        let mut command = iec();
        command.args(["run", "--prompt", "a", "--max-new", "2", "--kv-memory", &page.to_string()]).args(options);
        let output = command.arg(&pack).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, stderr) = run(&[]);
    assert!(code == 0 && stderr.contains("holds a context of 128 tokens"), "{code} {stderr}");
    let (code, stderr) = run(&["--ctx", "129"]);
    assert!(code == 6 && stderr.contains("--ctx: 129 tokens need") && stderr.contains("--ctx 128 or less"), "{stderr}");
    let (code, stderr) = run(&["--kv", "f32", "--ctx", "5"]);
    assert!(code == 6 && stderr.contains("for one page of 128 positions"), "{stderr}");
}

#[test]
fn run_reports_prompt_tokens_that_it_did_not_compute() {
    let dir = packed_with("stories260k", "config.json", json!({}));
    let pack = dir.path().join("pack");
    let prompts = dir.path().join("prompts.txt");
    std::fs::write(&prompts, "Once upon a time there was a dog\nOnce upon a time there was a cat\n").unwrap();
    let run = |cache: &str| -> serde_json::Value {
        let mut command = iec();
        command.args(["run", "--json", "--max-new", "4", "--prefix-cache", cache, "--prompts-file"]);
        let output = command.arg(&prompts).arg(&pack).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let (on, off) = (run("on"), run("off"));
    let count = |line: &serde_json::Value, name: &str| line[name].as_u64().unwrap();
    assert_eq!(count(&off, "kv_hits"), 0);
    assert!(count(&on, "kv_hits") > 5, "{on}");
    assert_eq!(count(&on, "kv_hits") + count(&on, "kv_misses"), count(&off, "kv_misses"));
    for (a, b) in on["prompts"].as_array().unwrap().iter().zip(off["prompts"].as_array().unwrap()) {
        assert_eq!((&a["tokens"], &a["text"]), (&b["tokens"], &b["text"]));
    }
}
