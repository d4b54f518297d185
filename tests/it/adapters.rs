//! Compares adapters with PEFT, and texts with adapters in batches with each text alone.

use crate::common::{all_logits, fixture, iec, packed_as};
use crate::golden::{fp32, open, packed};
use crate::random_adapter::{self, with_magnitudes};
use iec::adapter::{Adapter, Change, LowRank};
use iec::convert::adapter;
use iec::dtype::DType;
use iec::rng::Rng;
use iec::runtime::adapters::{AdapterSet, BoundAdapter};
use iec::runtime::{Engine, EngineOptions, Feed, Precision, Want};
use iec::session::adapters::{AdapterPrecision, AdapterSource, Adapters};
use iec::session::{Session, SessionOptions};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Adapters that are refused, with a part of the message.
pub const REFUSED: [(&str, &str); 2] =
    [("tied-ensured", "ensure_weight_tying"), ("tied-save-ensured", "ensure_weight_tying")];

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn golden(dir: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap()
}

pub fn bound(engine: &Engine, dir: &Path) -> Arc<BoundAdapter> {
    let read = adapter::read(dir, engine.config()).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    engine.adapter_binder().bind(&read).unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
}

/// Generates greedily after a prompt; returns the logits after the prompt and the tokens.
pub fn greedy(engine: &mut Engine, set: &AdapterSet, prompt: &[u32], count: usize) -> (Vec<f32>, Vec<u32>) {
    let mut sequence = engine.new_sequence().unwrap();
    sequence.adapt(set.clone());
    let (mut tokens, mut logits, mut first) = (prompt.to_vec(), Vec::new(), Vec::new());
    let mut chosen = Vec::new();
    for step in 0..count {
        let feed = Feed { sequence: &mut sequence, tokens: &tokens, want: Want::Last };
        engine.forward(&mut [feed], &mut logits).unwrap();
        if step == 0 {
            first = logits.clone();
        }
        let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as u32;
        chosen.push(best);
        tokens = vec![best];
    }
    (first, chosen)
}

/// Compares the prompts of a golden file; returns what differs.
pub fn differences(
    engine: &mut Engine,
    set: &AdapterSet,
    prompts: &[Value],
    logits: fn(&Value) -> &Value,
) -> Vec<String> {
    let mut found = Vec::new();
    for prompt in prompts {
        let expected = ids(&prompt["greedy_ids"]);
        let (ours, chosen) = greedy(engine, set, &ids(&prompt["ids"]), expected.len());
        let theirs = logits(prompt).as_array().unwrap();
        assert_eq!(ours.len(), theirs.len());
        let apart =
            ours.iter().zip(theirs).map(|(a, b)| (f64::from(*a) - b.as_f64().unwrap()).abs()).fold(0.0, f64::max);
        if apart > 1e-3 || chosen != expected {
            found.push(format!("{}: logits {apart:.2e} apart, {chosen:?} instead of {expected:?}", prompt["text"]));
        }
    }
    found
}

/// Compares all adapters with what PEFT computed, in an engine with these options; returns what differs.
pub fn differences_from_peft(options: EngineOptions) -> Vec<String> {
    let mut failures = Vec::new();
    let mut cases: Vec<PathBuf> =
        std::fs::read_dir(fixture("adapters")).unwrap().map(|entry| entry.unwrap().path()).collect();
    cases.sort();
    assert!(cases.len() >= 32);
    for dir in cases {
        let name = dir.file_name().unwrap().to_str().unwrap().to_string();
        let golden = golden(&dir);
        let base = golden["base"].as_str().unwrap();
        let mut engine = open(&packed(base, &fixture(base)), options);
        if let Some((_, said)) = REFUSED.iter().find(|(refused, _)| *refused == name) {
            let message = adapter::read(&dir, engine.config()).unwrap_err().to_string();
            assert!(message.contains(said), "{message}");
            continue;
        }
        let set = AdapterSet::new([(bound(&engine, &dir), 1.0)]).unwrap();
        let prompts = golden["prompts"].as_array().unwrap();
        let differences = differences(&mut engine, &set, prompts, |prompt| &prompt["last_logits"]);
        failures.extend(differences.into_iter().map(|difference| format!("{name}: {difference}")));
    }
    failures
}

#[test]
fn every_adapter_gives_the_ids_and_logits_of_peft() {
    let failures = differences_from_peft(fp32());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn rows_of_a_batch_use_their_own_adapters_with_the_bits_of_each_alone() {
    let golden = golden(&fixture("lora-llama-gqa"));
    let mut engine = open(&packed("llama-gqa", &fixture("llama-gqa")), fp32());
    let set = |engine: &Engine, name: &str| match name {
        "base" => AdapterSet::default(),
        name => AdapterSet::new([(bound(engine, &fixture("lora-llama-gqa").join(name)), 1.0)]).unwrap(),
    };
    for (name, prompts) in golden["single"].as_object().unwrap() {
        let set = set(&engine, name);
        let prompts = prompts.as_array().unwrap();
        let found = differences(&mut engine, &set, prompts, |prompt| &prompt["prompt_last_logits"]["full"]);
        assert!(found.is_empty(), "{name}: {}", found.join("\n"));
    }
    let prompt = |text: &str| {
        let all = golden["single"]["base"].as_array().unwrap();
        ids(&all.iter().find(|prompt| prompt["text"] == text).unwrap()["ids"])
    };
    for batch in golden["batches"].as_array().unwrap() {
        let rows: Vec<(AdapterSet, Vec<u32>, Vec<u32>)> = batch["rows"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| {
                let set = set(&engine, row["adapter"].as_str().unwrap());
                (set, prompt(row["text"].as_str().unwrap()), ids(&row["greedy_ids"]))
            })
            .collect();
        let mut sequences: Vec<_> = rows.iter().map(|_| engine.new_sequence().unwrap()).collect();
        sequences.iter_mut().zip(&rows).for_each(|(sequence, (set, ..))| sequence.adapt(set.clone()));
        let mut tokens: Vec<Vec<u32>> = rows.iter().map(|(_, prompt, _)| prompt.clone()).collect();
        let mut logits = Vec::new();
        for step in 0..rows[0].2.len() {
            let mut feeds: Vec<Feed<'_>> = sequences
                .iter_mut()
                .zip(&tokens)
                .map(|(sequence, tokens)| Feed { sequence, tokens, want: Want::Last })
                .collect();
            engine.forward(&mut feeds, &mut logits).unwrap();
            let vocab = engine.config().vocab;
            let together = logits.clone();
            for (i, (set, prompt, expected)) in rows.iter().enumerate() {
                let row = &together[i * vocab..][..vocab];
                let best = (0..vocab).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32;
                assert_eq!(best, expected[step], "row {i}, step {step}");
                if step == 0 {
                    let (alone, _) = greedy(&mut engine, set, prompt, 1);
                    assert_eq!(alone, row, "row {i}");
                }
                tokens[i] = vec![best];
            }
        }
    }
}

#[test]
fn several_adapters_add_up_in_any_order_and_factors_scale_them() {
    let mut engine = open(&packed("llama-gqa", &fixture("llama-gqa")), fp32());
    let of = |engine: &Engine, name: &str| bound(engine, &fixture("lora-llama-gqa").join(name));
    let (qv, all) = (of(&engine, "r8-qv"), of(&engine, "r16-all"));
    let text: Vec<u32> = (1..60).collect();
    let mut logits = |adapters: Vec<(Arc<BoundAdapter>, f32)>| {
        engine.set_adapters(AdapterSet::new(adapters).unwrap());
        all_logits(&mut engine, &text)
    };
    let base = logits(Vec::new());
    assert_eq!(logits(vec![(qv.clone(), 0.0)]), base);
    assert_eq!(logits(vec![(qv.clone(), 1.0), (qv.clone(), -1.0)]), base);
    assert_eq!(logits(vec![(qv.clone(), 0.25), (qv.clone(), 0.25)]), logits(vec![(qv.clone(), 0.5)]));
    let both = logits(vec![(qv.clone(), 1.0), (all.clone(), 0.5)]);
    assert_eq!(logits(vec![(all.clone(), 0.5), (qv.clone(), 1.0)]), both);
    assert_ne!(both, logits(vec![(qv, 1.0)]));
    let dora = of(&engine, "r32-dora");
    for wrong in [vec![(dora.clone(), 0.5)], vec![(dora, 1.0), (all, 1.0)]] {
        assert!(AdapterSet::new(wrong).unwrap_err().to_string().contains("DoRA"));
    }
}

/// Makes an adapter of this rank with random factors for some matrices of `llama-gqa`.
fn random_adapter(engine: &Engine, rank: usize) -> Adapter {
    let mut rng = Rng::new(rank as u64);
    let (hidden, vocab) = (engine.config().hidden, engine.config().vocab);
    let mut change = |rows: usize, cols: usize| {
        let mut numbers = |count: usize| (0..count).map(|_| 0.05 * rng.next_normal() as f32).collect::<Vec<f32>>();
        let (a, b) = (numbers(rank * cols), numbers(rows * rank));
        let low_rank = Some(LowRank { rank, scale: 0.5, a, b, dtype: DType::F32, int8: [None, None] });
        vec![Change { low_rank, ..Change::default() }]
    };
    let changes = BTreeMap::from([
        ("model.layers.0.self_attn.o_proj.weight".to_string(), change(hidden, hidden)),
        ("model.layers.1.self_attn.o_proj.weight".to_string(), change(hidden, hidden)),
        ("lm_head.weight".to_string(), change(vocab, hidden)),
    ]);
    Adapter { hash: format!("{rank}"), changes }
}

#[test]
fn factors_in_int8_are_close_to_those_of_the_file_and_keep_the_bits_of_each_text_alone() {
    let map = ["--bits", "4", "--keep", "embedding", "--keep", "lm_head"];
    let quantized = packed_as("llama-gqa-int8-factors", &fixture("llama-gqa"), &map);
    let plain = packed("llama-gqa", &fixture("llama-gqa"));
    for (pack, precision) in [
        (&plain, Precision::Fp32),
        (&plain, Precision::Bf16),
        (&plain, Precision::Fp16),
        (&quantized, Precision::Int4),
        (&quantized, Precision::Int4w),
    ] {
        let mut engine = open(pack, EngineOptions { precision: Some(precision), threads: 2, ..fp32() });
        let read = |name: &str| adapter::read(&fixture("lora-llama-gqa").join(name), engine.config()).unwrap();
        let all = [read("r16-all"), read("r32-dora"), random_adapter(&engine, 33), random_adapter(&engine, 48)];
        let binder = engine.adapter_binder();
        let bind = |adapter: &Adapter| binder.bind(adapter).unwrap();
        let int8 = all.clone().map(|mut adapter| {
            adapter::round_to_int8(&mut adapter).unwrap();
            bind(&adapter)
        });
        let sets = |of: &[Arc<BoundAdapter>]| {
            let set = |used: &[usize]| AdapterSet::new(used.iter().map(|i| (of[*i].clone(), 1.0))).unwrap();
            [set(&[]), set(&[0]), set(&[1]), set(&[2]), set(&[2, 0, 3])]
        };
        let (of_file, of_int8) = (sets(&all.each_ref().map(bind)), sets(&int8));
        let prompts: Vec<Vec<u32>> = (0..5).map(|i| (1..30 + i).collect()).collect();
        let mut alone = Vec::new();
        for i in 0..5 {
            let [file, rounded] = [&of_file, &of_int8].map(|sets| greedy(&mut engine, &sets[i], &prompts[i], 1).0);
            let none = greedy(&mut engine, &of_file[0], &prompts[i], 1).0;
            let apart = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| (x - y).powi(2)).sum::<f32>().sqrt();
            let (rounding, effect) = (apart(&file, &rounded), apart(&file, &none));
            // With int8 activations, any change of a number lets many later ones round differently.
            let most = if precision == Precision::Int4 { 0.3 } else { 0.06 };
            assert!(rounding <= most * effect && (rounding > 0.0) == (i > 0), "{precision} {i}: {rounding} {effect}");
            alone.extend(rounded);
        }
        let mut sequences: Vec<_> = prompts.iter().map(|_| engine.new_sequence().unwrap()).collect();
        sequences.iter_mut().zip(of_int8).for_each(|(sequence, set)| sequence.adapt(set));
        let feeds = sequences.iter_mut().zip(&prompts);
        let feeds = feeds.map(|(sequence, tokens)| Feed { sequence, tokens, want: Want::Last });
        let mut logits = Vec::new();
        engine.forward(&mut feeds.collect::<Vec<_>>(), &mut logits).unwrap();
        assert_eq!(logits, alone, "{precision}");
    }
}

#[test]
fn adapters_of_a_quantized_model_change_it_and_keep_the_bits_of_each_text_alone() {
    let rule = r#"{"version":1,"rules":[{"include":"proj","scheme":"int4","group_size":32,"method":"rtn"}]}"#;
    let rules = Path::new(env!("CARGO_TARGET_TMPDIR")).join("adapters-int4.json");
    std::fs::write(&rules, rule).unwrap();
    let map = ["--q4-map", rules.to_str().unwrap()];
    for (base, adapters) in [
        ("qwen3moe", ["adapters/qwen3moe-experts", "adapters/qwen3moe-modules"]),
        ("llama-gqa", ["lora-llama-gqa/r16-all", "lora-llama-gqa/r32-dora"]),
        ("deepseek3", ["random", "random-dora"]),
        ("gemma4-e", ["random", "random-dora"]),
    ] {
        let pack = packed_as(&format!("{base}-int4-adapters"), &fixture(base), &map);
        for precision in [Precision::Int4, Precision::Int4w] {
            let mut engine = open(&pack, EngineOptions { precision: Some(precision), threads: 2, ..fp32() });
            let mut sets: Vec<AdapterSet> = vec![AdapterSet::default()];
            let mut rng = Rng::new(9);
            let mut random = || random_adapter::random_adapter(engine.config(), &mut rng);
            let bind = |adapter| engine.adapter_binder().bind(&adapter).unwrap();
            let adapters = adapters.map(|name| match name {
                "random" => bind(random()),
                "random-dora" => bind(with_magnitudes(random(), &mut Rng::new(10))),
                name => bound(&engine, &fixture(name)),
            });
            sets.extend(adapters.map(|adapter| AdapterSet::new([(adapter, 1.0)]).unwrap()));
            let prompts: Vec<Vec<u32>> = (0..5).map(|i| (1..30 + i).collect()).collect();
            let set = |i: usize| sets[i % sets.len()].clone();
            let alone: Vec<Vec<f32>> =
                prompts.iter().enumerate().map(|(i, prompt)| greedy(&mut engine, &set(i), prompt, 1).0).collect();
            let plain = greedy(&mut engine, &sets[0], &prompts[1], 1).0;
            assert!(alone[1] != plain && alone.iter().flatten().all(|logit| logit.is_finite()));
            let mut sequences: Vec<_> = prompts.iter().map(|_| engine.new_sequence().unwrap()).collect();
            sequences.iter_mut().enumerate().for_each(|(i, sequence)| sequence.adapt(set(i)));
            let feeds = sequences.iter_mut().zip(&prompts);
            let mut feeds: Vec<Feed<'_>> =
                feeds.map(|(sequence, tokens)| Feed { sequence, tokens, want: Want::Last }).collect();
            let mut logits = Vec::new();
            engine.forward(&mut feeds, &mut logits).unwrap();
            assert_eq!(logits, alone.concat(), "{base}, {precision}");
        }
    }
}

#[test]
fn ten_thousand_adapters_are_registered_without_being_read() {
    let engine = open(&packed("llama-gqa", &fixture("llama-gqa")), fp32());
    let adapters = Adapters::new(engine.adapter_binder(), AdapterPrecision::Auto, Some(1 << 20));
    let dir = fixture("lora-llama-gqa").join("r8-qv");
    for i in 0..10_000 {
        adapters.add(AdapterSource { name: format!("a{i}"), dir: dir.clone(), scale: 1.0, root: None }).unwrap();
    }
    for i in 0..100 {
        assert!(adapters.set(&[(format!("a{}", i * 97), 1.0)]).unwrap().is_some());
    }
    assert_eq!(adapters.used().iter().map(|one| one.loads).sum::<u64>(), 100);
    assert!(adapters.used().iter().map(|one| one.bytes).sum::<u64>() <= 1 << 20);
    let unknown = adapters.set(&[("b".into(), 1.0)]).unwrap_err();
    assert!(unknown.help_text().unwrap().contains("9990 more"), "{unknown}");
}

/// Returns ten adapters by name: three directories under several names.
fn ten() -> Vec<AdapterSource> {
    let dirs = ["r8-qv", "r16-all", "r32-dora"].map(|name| fixture("lora-llama-gqa").join(name));
    (0..10).map(|i| AdapterSource { name: format!("a{i}"), dir: dirs[i % 3].clone(), scale: 1.0, root: None }).collect()
}

#[test]
fn adapters_leave_memory_for_others_and_every_text_stays_the_same() {
    let pack = packed_as("llama-gqa", &fixture("llama-gqa"), &[]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("prompts.jsonl");
    let prompt =
        |i: usize| json!({"prompt": "Once upon", "adapters": [format!("a{}", i * 7 % 10)], "max_new": 3 + i % 5});
    std::fs::write(&path, (0..40).map(|i| format!("{}\n", prompt(i))).collect::<String>()).unwrap();
    let run = |options: &[&str]| {
        let mut command = iec();
        command.args(["run", "--json", "--precision", "fp32", "--ignore-eos", "--model-dir"]).arg(&pack);
        for AdapterSource { name, dir, .. } in ten() {
            command.arg("--lora").arg(format!("{name}={}", dir.display()));
        }
        command.arg("--prompts-file").arg(&path).args(options).assert()
    };
    let line =
        |options: &[&str]| -> Value { serde_json::from_slice(&run(options).success().get_output().stdout).unwrap() };
    let texts = |line: &Value| -> Vec<Value> {
        line["prompts"].as_array().unwrap().iter().map(|prompt| prompt["text"].clone()).collect()
    };
    let number = |line: &Value, field: &str| -> u64 {
        line["adapters"].as_array().unwrap().iter().map(|one| one[field].as_u64().unwrap()).sum()
    };
    let all = line(&["--batch", "4"]);
    assert_eq!((number(&all, "loads"), number(&all, "hits")), (10, 40));
    let largest = all["adapters"].as_array().unwrap().iter().map(|one| one["bytes"].as_u64().unwrap()).max().unwrap();
    // Room for one, two or five of the largest, which is less than the batch needs or less than all.
    for (room, batch) in [(1, "4"), (2, "1"), (2, "16"), (5, "3")] {
        let limit = (largest * room).to_string();
        let few = line(&["--lora-memory", &limit, "--batch", batch]);
        assert_eq!(texts(&few), texts(&all), "room for {room}, batch {batch}");
        assert!(number(&few, "bytes") <= largest * room && number(&few, "loads") > 10, "{}", few["adapters"]);
        assert_eq!(number(&few, "loads") + number(&few, "hits"), 40);
    }
    // A limit below the size of one adapter is found before or after it was loaded.
    let too_small = [(1000, 6, "adapter `a0` needs"), (largest - 1, 2, "12 of 40 prompts were not continued")];
    for (limit, code, said) in too_small {
        let refused = run(&["--lora-memory", &limit.to_string()]).code(code);
        let stderr = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
        assert!(stderr.contains(said) && stderr.contains("--lora-memory"), "{stderr}");
    }
    // Four at a time need more than there is: these prompts fail, the others do not.
    let four = json!({"prompt": "Once", "adapters": ["a0", "a1", "a3", "a4"]});
    std::fs::write(&path, format!("{four}\n{}\n", prompt(0))).unwrap();
    let refused = run(&["--lora-memory", &largest.to_string()]).code(2);
    let stderr = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
    assert!(stderr.contains("1 of 2 prompts") && stderr.contains("the adapters of one text need"), "{stderr}");
}

#[test]
fn adapters_are_loaded_and_removed_by_other_threads_while_an_engine_computes() {
    let pack = packed_as("llama-gqa", &fixture("llama-gqa"), &[]);
    let prompt = [5, 9, 200, 31, 7];
    let mut whole = Session::open(&pack, &SessionOptions { adapters: ten(), ..SessionOptions::default() }).unwrap();
    let expected: Vec<_> = (0..3)
        .map(|i| {
            let set = whole.adapters.set(&[(format!("a{i}"), 1.0)]).unwrap().unwrap();
            greedy(&mut whole.engine, &set, &prompt, 4)
        })
        .collect();
    let largest = whole.adapters.used().iter().map(|one| one.bytes).max().unwrap();
    let limited = SessionOptions { adapters: ten(), adapter_memory: Some(3 * largest), ..SessionOptions::default() };
    let mut session = Session::open(&pack, &limited).unwrap();
    let (engine, adapters, done) = (&mut session.engine, &session.adapters, AtomicBool::new(false));
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let done = &done;
            scope.spawn(move || {
                let mut rng = Rng::new(seed);
                while !done.load(Ordering::Relaxed) {
                    let name = format!("a{}", rng.next_u64() % 10);
                    match rng.next_u64() % 8 {
                        // Only the name that this thread alone removes may be missing for a moment.
                        0 if seed == 0 => {
                            let source = ten().into_iter().find(|source| source.name == "a9").unwrap();
                            if adapters.remove("a9").is_ok() {
                                adapters.add(source).unwrap();
                            }
                        }
                        _ => _ = adapters.set(&[(name, 1.0)]),
                    }
                    assert!(adapters.used().iter().map(|one| one.bytes).sum::<u64>() <= 3 * largest);
                }
            });
        }
        let mut rng = Rng::new(9);
        for _ in 0..60 {
            let i = (rng.next_u64() % 9) as usize;
            let Some(set) = adapters.set(&[(format!("a{i}"), 1.0)]).unwrap() else { continue };
            assert_eq!(greedy(engine, &set, &prompt, 4), expected[i % 3], "a{i}");
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(adapters.set(&[("a1".into(), 1.0)]).unwrap().is_some());
    let error = adapters.add(ten()[0].clone()).unwrap_err();
    assert!(error.to_string().contains("two adapters with the name `a0`"), "{error}");
    let held = adapters.set(&[("a0".into(), 1.0)]).unwrap();
    assert!(adapters.remove("a0").unwrap_err().to_string().contains("in use"));
    drop(held);
    adapters.remove("a0").unwrap();
    assert!(adapters.set(&[("a0".into(), 1.0)]).unwrap_err().to_string().contains("no adapter `a0`"));
}

#[test]
fn a_prompts_file_chooses_adapters_and_every_text_is_that_of_a_run_alone() {
    let pack = packed_as("llama-gqa", &fixture("llama-gqa"), &[]);
    let dir = tempfile::tempdir().unwrap();
    let lora = |name: &str| format!("{name}={}", fixture("lora-llama-gqa").join(name).display());
    let texts = |words: &[&str]| -> Vec<String> {
        let output =
            iec().args(["run", "--json", "--ignore-eos", "-n", "12", "--model-dir"]).arg(&pack).args(words).assert();
        let line: Value = serde_json::from_slice(&output.success().get_output().stdout).unwrap();
        let text = |prompt: &Value| prompt.get("text").unwrap_or(&line["text"]).as_str().unwrap().to_string();
        line["prompts"].as_array().unwrap().iter().map(text).collect()
    };
    let once = "Once upon a time";
    let (qv, all, dora) = (lora("r8-qv"), lora("r16-all"), lora("r32-dora"));
    let (half, plain) = (format!("{all}:0.5"), texts(&["-p", once]));
    let cases: [(Value, Vec<&str>); 5] = [
        (json!([]), vec![]),
        (json!(["r8-qv"]), vec!["--lora", &qv]),
        (json!([{"name": "r16-all", "scale": 0.5}]), vec!["--lora", &half]),
        (json!(["r32-dora"]), vec!["--lora", &dora]),
        (json!(["r8-qv", {"name": "r16-all", "scale": 0.5}]), vec!["--lora", &half, "--lora", &qv]),
    ];
    let mut alone = Vec::new();
    for (_, options) in &cases {
        alone.push(texts(&[&["-p", once], &options[..]].concat())[0].clone());
    }
    assert_eq!(alone[0], plain[0]);
    let distinct: std::collections::HashSet<&String> = alone.iter().collect();
    assert_eq!(distinct.len(), cases.len(), "{alone:?}");
    // Twice, so that texts with the same adapters, and only those, share their beginnings.
    let lines: String = cases
        .iter()
        .chain(&cases)
        .map(|(names, _)| format!("{}\n", json!({"prompt": once, "adapters": names})))
        .collect();
    let path = dir.path().join("prompts.jsonl");
    std::fs::write(&path, lines).unwrap();
    let loaded = ["--lora", &qv, "--lora", &all, "--lora", &dora, "--prompts-file", path.to_str().unwrap()];
    for batch in ["1", "3", "16"] {
        let together = texts(&[&loaded[..], &["--batch", batch]].concat());
        assert_eq!(together, [&alone[..], &alone[..]].concat(), "batch {batch}");
    }
    let planned = |more: &[&str]| -> u64 {
        let output = iec().args(["run", "--plan", "--json", "--precision", "fp32"]).arg(&pack).args(more).assert();
        let plan: Value = serde_json::from_slice(&output.success().get_output().stdout).unwrap();
        plan["weights_owned_bytes"].as_u64().unwrap()
    };
    // 3 layers, rank 8, 96 + 96 and 96 + 32 numbers per rank, 4 bytes each.
    assert_eq!(planned(&["--lora", &qv]) - planned(&[]), 3 * 8 * (192 + 128) * 4);
    // Prompts that choose none use all; these cannot be used together.
    std::fs::write(&path, format!("{}\n", json!({"prompt": once}))).unwrap();
    for (words, said) in [(&loaded[..], "DoRA"), (&["--lora", "nowhere", "-p", once][..], "adapter_config.json")] {
        let output = iec().args(["run", "--model-dir"]).arg(&pack).args(words).assert().failure();
        let stderr = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(stderr.contains(said), "{stderr}");
    }
    std::fs::write(&path, format!("{}\n", json!({"prompt": once, "adapters": ["r9"]}))).unwrap();
    let output = iec().args(["run", "--model-dir"]).arg(&pack).args(loaded).assert().code(2);
    let stderr = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(stderr.contains("no adapter `r9`") && stderr.contains("r16-all, r32-dora, r8-qv"), "{stderr}");
}

#[test]
fn merged_weights_give_the_logits_of_the_adapter_beside_them() {
    let dir = tempfile::tempdir().unwrap();
    let mut failures = Vec::new();
    let cases = [
        "rslora",
        "lora-bias-qwen2",
        "base-bias",
        "phi3-fused",
        "qwen3moe-experts",
        "mixtral-modules",
        "gptoss-experts",
        "dora-rslora",
        "save-embeddings",
    ];
    for name in cases {
        let adapter = fixture("adapters").join(name);
        let golden = golden(&adapter);
        let base = golden["base"].as_str().unwrap();
        // In f32, so that merging rounds nothing.
        let pack = packed_as(&format!("{base}-fp32"), &fixture(base), &["--dtype", "fp32"]);
        let merged = dir.path().join(name);
        let mut unpack = iec();
        unpack.arg("unpack").arg(&pack).arg("--lora").arg(&adapter).arg("--out-dir").arg(&merged).assert().success();
        let mut engine = open(&packed_as(&format!("merged-{name}"), &merged, &[]), fp32());
        let prompts = golden["prompts"].as_array().unwrap();
        let found = differences(&mut engine, &AdapterSet::default(), prompts, |prompt| &prompt["last_logits"]);
        failures.extend(found.into_iter().map(|difference| format!("{name}: {difference}")));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    for (name, said) in [("tied-embed", "uses as its output matrix"), ("lora-bias", "a matrix that has none")] {
        let adapter = fixture("adapters").join(name);
        let base = golden(&adapter)["base"].as_str().unwrap().to_string();
        let mut unpack = iec();
        unpack.arg("unpack").arg(packed(&base, &fixture(&base))).arg("--lora").arg(&adapter);
        let output = unpack.arg("--out-dir").arg(dir.path().join("refused")).assert().failure();
        let stderr = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(stderr.contains(said) && !dir.path().join("refused").exists(), "{name}: {stderr}");
    }
}

#[test]
fn changes_of_parts_for_images_are_left_out_and_named() {
    let (dir, adapter) = (tempfile::tempdir().unwrap(), fixture("adapters/wrapper-all-linear"));
    let base = packed_as("gemma4-e", &fixture("gemma4-e"), &[]);
    let said = "changes of parts for images or sound are left out: embed_vision (1), vision_tower (8)";
    let output = iec().arg("inspect").arg(&adapter).assert().success();
    assert!(String::from_utf8_lossy(&output.get_output().stdout).contains(said));
    let output = iec().args(["inspect", "--json"]).arg(&adapter).assert().success();
    let summary: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    let number = |field: &str| summary["adapter"][field].as_u64().unwrap();
    assert!(2 * number("parameters") < number("bytes"), "only the numbers that are used count: {summary}");
    let mut pack = iec();
    pack.arg("pack").arg(&adapter).arg("--base").arg(&base).arg("--out-dir").arg(dir.path().join("packed"));
    let output = pack.arg("--json").assert().success();
    let summary: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    assert_eq!(summary["unused"], json!({"embed_vision": 1, "vision_tower": 8}), "{summary}");
    for (lora, noted) in [(&adapter, true), (&dir.path().join("packed"), false)] {
        let mut run = iec();
        run.args(["run", "--prompt", "Once", "-n", "2", "--model-dir"]).arg(&base).arg("--lora").arg(lora);
        let stderr = String::from_utf8_lossy(&run.assert().success().get_output().stderr).into_owned();
        assert_eq!(stderr.contains(&format!("note: adapter `wrapper-all-linear`: {said}")), noted, "{stderr}");
    }
}

#[test]
fn an_adapter_is_described_and_damaged_ones_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let output = iec().args(["inspect", "--json"]).arg(fixture("adapters/dora-rslora")).assert().success();
    let line: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    let summary = &line["adapter"];
    assert_eq!((summary["method"].as_str(), summary["rank"].as_u64()), (Some("DoRA"), Some(5)), "{line}");
    assert_eq!((summary["targets"]["q_proj"].as_u64(), summary["base"].as_str()), (Some(3), Some("llama-gqa")));

    let engine = open(&packed("llama-gqa", &fixture("llama-gqa")), fp32());
    let good = fixture("lora-llama-gqa/r8-qv");
    let bytes = std::fs::read(good.join("adapter_model.safetensors")).unwrap();
    let config = std::fs::read_to_string(good.join("adapter_config.json")).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let text = String::from_utf8(bytes[8..8 + header].to_vec()).unwrap();
    let with_header = |text: &str| {
        let padded = format!("{text:header$}");
        [&(padded.len() as u64).to_le_bytes()[..], padded.as_bytes(), &bytes[8 + header..]].concat()
    };
    let refused = |name: &str, config: &str, bytes: &[u8]| {
        let adapter = dir.path().join(name);
        std::fs::create_dir(&adapter).unwrap();
        std::fs::write(adapter.join("adapter_config.json"), config).unwrap();
        std::fs::write(adapter.join("adapter_model.safetensors"), bytes).unwrap();
        let error = adapter::read(&adapter, engine.config()).map(|_| ()).unwrap_err();
        format!("{error}; {}", error.help_text().unwrap_or_default())
    };
    let mut not_a_number = bytes.clone();
    not_a_number[8 + header..8 + header + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let huge = text.replacen("[8,96]", "[2147483648,96]", 1);
    let renamed = |from: &str, to: &str| with_header(&text.replace(from, to));
    let cases: Vec<(&str, String, Vec<u8>, &str)> = vec![
        ("truncated", config.clone(), bytes[..bytes.len() - 4].to_vec(), "truncated"),
        ("nan", config.clone(), not_a_number, "finite"),
        ("rank", config.clone(), with_header(&huge), "data_offsets"),
        (
            "half",
            config.clone(),
            renamed("layers.0.self_attn.q_proj.lora_B", "layers.0.self_attn.k_proj.lora_B"),
            "only one of",
        ),
        ("module", config.clone(), renamed("layers.2.self_attn.q_proj", "layers.9.self_attn.q_proj"), "layers.9"),
        (
            "path",
            config.clone(),
            renamed("base_model.model.model.layers.0", "../../../../../../../../../../x.0"),
            "no part of a LoRA",
        ),
        ("method", config.replace("\"LORA\"", "\"IA3\""), bytes.clone(), "IA3"),
        ("dora", config.replace("\"use_dora\": false", "\"use_dora\": true"), bytes.clone(), "use_dora"),
        ("field", config.replacen('{', "{\"next_year\": 1,", 1), bytes.clone(), "next_year"),
        ("json", "[]".into(), bytes.clone(), "JSON object"),
    ];
    for (name, config, bytes, said) in cases {
        let message = refused(name, &config, &bytes);
        assert!(message.contains(said), "{name}: {message}");
    }
    let other = open(&packed("qwen2", &fixture("qwen2")), fp32());
    let message = adapter::read(&good, other.config()).unwrap_err().to_string();
    assert!(message.contains("expected lora_A (r, in)"), "{message}");
    let binder = engine.adapter_binder();
    assert!(binder.bind(&adapter::read(&good, engine.config()).unwrap()).is_ok());
}
