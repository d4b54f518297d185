//! Tests adapters on a simulated GPU: against PEFT, against the CPU, in mixed batches, and when layers are split.

use crate::adapters::{bound, differences_from_peft, golden, greedy, ids};
use crate::common::{all_logits, fixture, iec, packed_as};
use crate::cuda::{on_gpu, simulated};
use crate::golden::{fp32, open, packed};
use crate::random_adapter::{random_adapter, with_magnitudes};
use iec::rng::Rng;
use iec::runtime::adapters::AdapterSet;
use iec::runtime::{Engine, EngineOptions, Feed, KvType, Precision, Want};
use serde_json::{Value, json};
use std::path::Path;

/// Returns the largest difference of two lists of finite numbers.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert!(a.len() == b.len() && a.iter().chain(b).all(|x| x.is_finite()));
    a.iter().zip(b).fold(0f32, |most, (a, b)| most.max((a - b).abs()))
}

/// Returns the set of these adapters of an engine with their factors.
fn set(engine: &Engine, adapters: &[(&str, f32)]) -> AdapterSet {
    AdapterSet::new(adapters.iter().map(|(name, factor)| (bound(engine, &fixture(name)), *factor))).unwrap()
}

#[test]
fn every_adapter_gives_the_ids_and_logits_of_peft_on_a_gpu() {
    let failures = differences_from_peft(on_gpu(fp32()));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Two sets that are added, one of DoRA, and none.
const SETS: [&[(&str, f32)]; 5] = [
    &[],
    &[("lora-llama-gqa/r8-qv", 1.0)],
    &[("lora-llama-gqa/r16-all", 1.0)],
    &[("lora-llama-gqa/r8-qv", 0.5), ("lora-llama-gqa/r16-all", 1.5)],
    &[("lora-llama-gqa/r32-dora", 1.0)],
];

#[test]
fn texts_of_a_mixed_batch_have_the_logits_that_the_cpu_computes_for_each_alone() {
    let pack = packed("llama-gqa", &fixture("llama-gqa"));
    let mut cpu = open(&pack, fp32());
    let (mut whole, mut split) = (on_gpu(fp32()), on_gpu(fp32()));
    whole.prefill_chunk = 33;
    split.offload.layers = Some(1);
    let texts: Vec<Vec<u32>> = (0..10).map(|i| (0..23 + 5 * i).map(|k| (k * 7 + i * 13) % 300 + 3).collect()).collect();
    let alone: Vec<Vec<f32>> = texts
        .iter()
        .enumerate()
        .map(|(i, text)| {
            let set = set(&cpu, SETS[i % SETS.len()]);
            cpu.set_adapters(set);
            all_logits(&mut cpu, text)
        })
        .collect();
    for options in [on_gpu(fp32()), whole, split] {
        let mut engine = open(&pack, options);
        let sets = SETS.map(|adapters| set(&engine, adapters));
        let mut sequences: Vec<_> = texts.iter().map(|_| engine.new_sequence().unwrap()).collect();
        sequences.iter_mut().enumerate().for_each(|(i, sequence)| sequence.adapt(sets[i % sets.len()].clone()));
        let (vocab, mut logits) = (engine.config().vocab, Vec::new());
        // All prompts but the last six tokens, and then these one by one: the last steps replay graphs.
        for step in 0..7 {
            let part = |text: &Vec<u32>| match step {
                0 => 0..text.len() - 6,
                step => text.len() - 7 + step..text.len() - 6 + step,
            };
            let want = |i: usize| if step == 0 && i % 2 == 1 { Want::All } else { Want::Last };
            let mut feeds: Vec<Feed<'_>> = sequences
                .iter_mut()
                .zip(&texts)
                .enumerate()
                .map(|(i, (sequence, text))| Feed { sequence, tokens: &text[part(text)], want: want(i) })
                .collect();
            engine.forward(&mut feeds, &mut logits).unwrap();
            let mut found = logits.as_slice();
            for (i, text) in texts.iter().enumerate() {
                let rows = part(text);
                let rows = if want(i) == Want::All { rows } else { rows.end - 1..rows.end };
                let own;
                (own, found) = found.split_at(rows.len() * vocab);
                let apart = apart(own, &alone[i][rows.start * vocab..rows.end * vocab]);
                assert!(apart < 1e-3, "text {i}, step {step}: logits {apart} apart, {}", engine.device());
            }
        }
    }
}

#[test]
fn adapters_of_quantized_models_give_the_logits_of_the_cpu() {
    let rule = r#"{"version":1,"rules":[{"include":"proj","scheme":"int4","group_size":32,"method":"rtn"}]}"#;
    let rules = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-adapters-int4.json");
    std::fs::write(&rules, rule).unwrap();
    let mut failures = Vec::new();
    for (base, adapters) in [
        ("qwen3moe", ["adapters/qwen3moe-experts", "adapters/qwen3moe-modules"]),
        ("llama-gqa", ["lora-llama-gqa/r16-all", "lora-llama-gqa/r32-dora"]),
        ("llama-gqa", ["adapters/save-embeddings", "adapters/dora-embeddings"]),
    ] {
        let map = ["--q4-map", rules.to_str().unwrap()];
        let pack = packed_as(&format!("{base}-int4-cuda-adapters"), &fixture(base), &map);
        let options = EngineOptions { precision: Some(Precision::Int4w), kv: Some(KvType::F32), ..fp32() };
        let (mut cpu, mut gpu) = (open(&pack, options), open(&pack, on_gpu(options)));
        let text: Vec<u32> = (1..50).collect();
        let plain = all_logits(&mut cpu, &text);
        for adapter in adapters {
            let both = [&mut cpu, &mut gpu].map(|engine| {
                let set = set(engine, &[(adapter, 1.0)]);
                engine.set_adapters(set);
                all_logits(engine, &text)
            });
            let (changed, apart) = (apart(&plain, &both[0]), apart(&both[0], &both[1]));
            if !(apart > 0.0 && apart < 0.02 && apart < changed / 4.0) {
                failures.push(format!("{base} {adapter}: logits {apart} apart, changed by {changed}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn adapters_of_the_further_families_give_the_logits_of_the_cpu() {
    let (mut failures, mut rng) = (Vec::new(), Rng::new(7));
    // Values that are the keys, layers that read keys of others, gates of outputs, MLPs beside experts, latent attention.
    for (number, name) in
        ["gemma4", "gemma4-e", "gemma4-moe", "museglimmer", "glm4moe", "glm4flash", "deepseek2"].into_iter().enumerate()
    {
        let pack = packed(name, &fixture(name));
        let text: Vec<u32> = (0..30).map(|i| (i * i * 7 + 13) % 480).collect();
        let mut base = open(&pack, fp32());
        let (mut adapter, plain) = (random_adapter(base.config(), &mut rng), all_logits(&mut base, &text));
        if number % 2 == 1 {
            adapter = with_magnitudes(adapter, &mut rng);
        }
        let mut split = on_gpu(fp32());
        // Further inputs take all layers to one device.
        split.offload.layers = (name != "gemma4-e").then_some(1);
        let [cpu, gpus @ ..] = [fp32(), on_gpu(fp32()), split].map(|options| {
            let mut engine = open(&pack, options);
            let bound = engine.adapter_binder().bind(&adapter).unwrap();
            engine.set_adapters(AdapterSet::new(vec![(bound, 1.0)]).unwrap());
            all_logits(&mut engine, &text)
        });
        let (changed, apart) = (apart(&plain, &cpu), gpus.map(|gpu| apart(&cpu, &gpu)));
        if changed < 0.1 || apart.iter().any(|apart| *apart > 1e-3) {
            failures.push(format!("{name}: logits {apart:?} apart, changed by {changed}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn an_adapter_that_was_dropped_and_bound_again_gives_the_same_bits() {
    let mut engine = open(&packed("llama-gqa", &fixture("llama-gqa")), on_gpu(fp32()));
    let prompt = [5, 9, 200, 31, 7];
    let plain = greedy(&mut engine, &AdapterSet::default(), &prompt, 4);
    let mut found = Vec::new();
    for adapters in [SETS[2], SETS[4], SETS[2], SETS[4]] {
        let set = set(&engine, adapters);
        found.push(greedy(&mut engine, &set, &prompt, 4));
        assert_eq!(greedy(&mut engine, &set, &prompt, 4), found[found.len() - 1]);
        drop(set);
        assert_eq!(greedy(&mut engine, &AdapterSet::default(), &prompt, 4), plain);
    }
    assert!(found[0] == found[2] && found[1] == found[3] && found[0].0 != found[1].0 && found[0].0 != plain.0);
}

#[test]
fn a_prompts_file_chooses_adapters_on_a_gpu_as_on_the_cpu() {
    let pack = packed_as("llama-gqa", &fixture("llama-gqa"), &[]);
    let dir = tempfile::tempdir().unwrap();
    let all = golden(&fixture("lora-llama-gqa"));
    assert!(!ids(&all["single"]["base"][0]["ids"]).is_empty());
    let lines: String = [json!([]), json!(["r8-qv"]), json!([{"name": "r16-all", "scale": 0.5}]), json!(["r32-dora"])]
        .iter()
        .map(|names| format!("{}\n", json!({"prompt": "Once upon a time", "adapters": names})))
        .collect();
    let path = dir.path().join("prompts.jsonl");
    std::fs::write(&path, lines).unwrap();
    let loras: Vec<String> = ["r8-qv", "r16-all", "r32-dora"]
        .iter()
        .flat_map(|name| ["--lora".into(), format!("{name}={}", fixture("lora-llama-gqa").join(name).display())])
        .collect();
    let line = |command: &mut assert_cmd::Command, words: &[&str]| -> Value {
        command.args(["run", "--json", "--ignore-eos", "-n", "12", "--precision", "fp32", "--model-dir"]).arg(&pack);
        let output = command.args(&loras).arg("--prompts-file").arg(&path).args(words).assert().success();
        serde_json::from_slice(&output.get_output().stdout).unwrap()
    };
    let texts = |line: &Value| -> Vec<Value> {
        line["prompts"].as_array().unwrap().iter().map(|prompt| prompt["text"].clone()).collect()
    };
    let expected = texts(&line(&mut iec(), &["--device", "cpu"]));
    for (capability, words) in [
        ("9.0", &["--device", "cuda", "--batch", "4"][..]),
        ("7.5", &["--device", "cuda", "--batch", "3"]),
        ("9.0", &["--device", "cuda", "--gpu-layers", "2"]),
        ("9.0", &["--device", "cuda:0,1", "--batch", "2"]),
    ] {
        let mut command = simulated();
        command.env("IEC_SIM_CAPABILITY", capability).env("IEC_SIM_DEVICES", "2");
        assert_eq!(texts(&line(&mut command, words)), expected, "{words:?}");
    }
    // Factors leave the GPU with the adapters that leave the memory of the host.
    let one_by_one = ["--device", "cuda", "--batch", "1"];
    let all = line(&mut simulated(), &one_by_one);
    let bytes: Vec<u64> =
        all["adapters"].as_array().unwrap().iter().map(|one| one["bytes"].as_u64().unwrap()).collect();
    let limit = bytes.iter().max().unwrap().to_string();
    let few = line(&mut simulated(), &[&one_by_one[..], &["--lora-memory", &limit]].concat());
    assert_eq!([texts(&all), texts(&few)], [expected.clone(), expected]);
    let taken = |line: &Value| line["gpu"]["devices"][0]["memory_taken_bytes"].as_u64().unwrap();
    let rest = bytes.iter().sum::<u64>() - bytes.iter().max().unwrap();
    assert!(taken(&all) - taken(&few) > rest / 2, "{} {} {bytes:?}", taken(&all), taken(&few));
}
