//! Tests the reference of `iec verify` with adapters: it computes the logits of PEFT, and `iec verify --lora` compares
//! the engine with it.

use crate::common::{FAMILIES, all_logits, fixture, iec, packed, packed_as};
use crate::random_adapter::{random_adapter, with_magnitudes};
use iec::convert::adapter;
use iec::convert::arch::{Arch, Fields};
use iec::iebin::IebinReader;
use iec::model_config::ModelConfig;
use iec::rng::Rng;
use iec::runtime::adapters::AdapterSet;
use iec::runtime::{Engine, EngineOptions, Precision};
use iec::verify::{RefDtype, Reference, ScoredText};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn golden(dir: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap()
}

/// Reads the configuration of a checkpoint as the converter does.
fn model_config(dir: &Path) -> ModelConfig {
    let text = std::fs::read(dir.join("config.json")).unwrap();
    let config: Map<String, Value> = serde_json::from_slice(&text).unwrap();
    let fields = Fields::new(&config);
    Arch::of(&fields).unwrap().model_config(&fields, None).unwrap()
}

/// Compares the reference with adapters with the prompts of a golden file; returns what differs.
fn differences(base: &Path, adapters: &[(PathBuf, f32)], golden: &Value) -> Vec<String> {
    let config = model_config(base);
    let read = |(dir, factor): &(PathBuf, f32)| (adapter::read(dir, &config).unwrap(), *factor);
    let reference = Reference::open(base, RefDtype::F32).unwrap();
    let reference = reference.with_adapters(adapters.iter().map(read).collect());
    let prompts = golden["prompts"].as_array().unwrap();
    let text = |prompt: &Value| {
        let (before, mut said) = (ids(&prompt["ids"]), ids(&prompt["greedy_ids"]));
        said.pop();
        ScoredText { from: before.len() - 1, ids: [before, said].concat() }
    };
    let texts: Vec<ScoredText> = prompts.iter().map(text).collect();
    let (vocab, mut found) = (reference.vocab(), Vec::new());
    let compare = |index: usize, logits: &[f32]| {
        let prompt = &prompts[index];
        let best = |row: &[f32]| (0..vocab).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32;
        let chosen: Vec<u32> = logits.chunks_exact(vocab).map(best).collect();
        let theirs = prompt["last_logits"].as_array().unwrap();
        let apart = logits.iter().zip(theirs).map(|(a, b)| (f64::from(*a) - b.as_f64().unwrap()).abs());
        let apart = apart.fold(0.0, f64::max);
        if apart > 1e-4 || chosen != ids(&prompt["greedy_ids"]) {
            found.push(format!("{}: logits {apart:.2e} apart, chose {chosen:?}", prompt["text"]));
        }
        Ok(())
    };
    reference.logits(&texts, || Ok(()), compare).unwrap();
    found
}

#[test]
fn the_reference_gives_the_ids_and_logits_of_peft() {
    let (mut failures, mut compared) = (Vec::new(), 0);
    for entry in std::fs::read_dir(fixture("adapters")).unwrap() {
        let dir = entry.unwrap().path();
        let golden = golden(&dir);
        // These two are refused when they are read.
        if dir.ends_with("tied-ensured") || dir.ends_with("tied-save-ensured") {
            continue;
        }
        let base = fixture(golden["base"].as_str().unwrap());
        let found = differences(&base, &[(dir.clone(), 1.0)], &golden);
        failures.extend(found.into_iter().map(|difference| format!("{}: {difference}", dir.display())));
        compared += 1;
    }
    assert!(failures.is_empty() && compared >= 27, "{compared} compared\n{}", failures.join("\n"));
}

/// Runs `iec verify` with a report on stdout.
fn verify(pack: &Path, hf_dir: &Path, options: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = iec();
    command.args(["verify", "--json", "--threads", "2", "--max-new", "12", "--model-dir"]).arg(pack);
    command.arg("--hf-dir").arg(hf_dir).args(options).assert()
}

fn report(assert: &assert_cmd::assert::Assert) -> Value {
    let stdout = String::from_utf8_lossy(&assert.get_output().stdout).into_owned();
    serde_json::from_str(stdout.lines().next().unwrap_or_default()).unwrap_or_else(|e| panic!("{e}: {stdout}"))
}

#[test]
fn a_pack_with_adapters_is_verified_against_its_base_and_against_a_merged_checkpoint() {
    let base = fixture("llama-gqa");
    let pack = packed_as("llama-gqa-fp32", &base, &["--dtype", "fp32"]);
    let [qv, all, dora] = ["r8-qv", "r16-all", "r32-dora"].map(|name| {
        let dir = fixture("lora-llama-gqa").join(name);
        format!("{name}={}", dir.display())
    });
    let (half, save) = (format!("{all}:0.5"), fixture("adapters/save-embeddings").display().to_string());
    let cases: [&[&str]; 4] =
        [&["--lora", &qv], &["--lora", &qv, "--lora", &half], &["--lora", &dora], &["--lora", &save]];
    for options in cases {
        let found = report(&verify(&pack, &base, options).success());
        assert_eq!((&found["steps"], &found["differing"]), (&json!(120), &json!(0)), "{options:?}");
        assert!(found["max_logit_difference"].as_f64().unwrap() < 1e-3, "{options:?}: {found}");
        assert_eq!(found["ref_adapters"].as_array().unwrap().len(), options.len() / 2);
        // A reference without the adapters differs.
        verify(&pack, &base, &[options, &["--merged"]].concat()).code(4);
    }
    assert_eq!(report(&verify(&pack, &base, &["--lora", &half]).success())["ref_adapters"][0]["scale"], 0.5);

    let dir = tempfile::tempdir().unwrap();
    let merged = dir.path().join("merged");
    let mut unpack = iec();
    unpack.arg("unpack").arg(&pack).args(["--lora", &qv, "--lora", &half, "--out-dir"]).arg(&merged);
    unpack.assert().success();
    let both = ["--lora", &qv, "--lora", &half];
    let found = report(&verify(&pack, &merged, &[&both[..], &["--merged"]].concat()).success());
    assert!(found["differing"] == 0 && found.get("ref_adapters").is_none(), "{found}");
    verify(&pack, &merged, &both).code(4);
}

#[test]
fn experts_fused_and_tied_matrices_with_adapters_are_verified() {
    for name in ["qwen3moe-experts", "mixtral-modules", "gptoss-experts", "phi3-fused", "tied-both", "base-bias"] {
        let dir = fixture("adapters").join(name);
        let base = golden(&dir)["base"].as_str().unwrap().to_string();
        let pack = packed_as(&base, &fixture(&base), &[]);
        let found = report(&verify(&pack, &fixture(&base), &["--lora", dir.to_str().unwrap()]).success());
        assert_eq!((&found["steps"], &found["differing"]), (&json!(120), &json!(0)), "{name}: {found}");
    }
}

#[test]
fn adapters_that_nothing_would_compute_are_refused() {
    let pack = packed_as("llama-gqa", &fixture("llama-gqa"), &[]);
    let [lora, dora] = ["r8-qv", "r32-dora"].map(|name| fixture("lora-llama-gqa").join(name).display().to_string());
    let base = fixture("llama-gqa");
    verify(&pack, &base, &["--merged"]).code(2);
    verify(&pack, &base, &["--lora", &lora, "--tokenizer-only"]).code(2);
    iec().arg("verify").arg(&pack).args(["--hashes", "--lora", &lora]).assert().code(2);
    let refused = verify(&pack, &base, &["--lora", &lora, "--lora", &dora]).code(2);
    let stderr = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
    assert!(stderr.contains("DoRA"), "{stderr}");
}

#[test]
fn engine_and_reference_agree_with_adapters_of_the_further_families() {
    let (mut failures, mut rng) = (Vec::new(), Rng::new(7));
    for (number, name) in FAMILIES.into_iter().enumerate() {
        let dir = fixture(name);
        let mut adapter = random_adapter(&model_config(&dir), &mut rng);
        if number % 2 == 1 {
            adapter = with_magnitudes(adapter, &mut rng);
        }
        let ids: Vec<u32> = (0..40).map(|i| (i * i * 7 + 13) % 480).collect();
        let pack = packed(name);
        let reader = IebinReader::open(pack.path()).unwrap();
        let options = EngineOptions { precision: Some(Precision::Fp32), prefill_chunk: 11, ..Default::default() };
        let mut engine = Engine::open(&reader, &options).unwrap();
        let plain = all_logits(&mut engine, &ids);
        let bound = engine.adapter_binder().bind(&adapter).unwrap();
        engine.set_adapters(AdapterSet::new(vec![(bound, 1.0)]).unwrap());
        let changed = all_logits(&mut engine, &ids);
        let apart = |found: &[f32], from: &[f32]| {
            found.iter().zip(from).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max)
        };
        let reference = Reference::open(&dir, RefDtype::F32).unwrap().with_adapters(vec![(adapter, 1.0)]);
        let mut of_reference = f64::NAN;
        let take = |_, logits: &[f32]| {
            of_reference = apart(&changed, logits);
            Ok(())
        };
        reference.logits(&[ScoredText { ids, from: 0 }], || Ok(()), take).unwrap();
        let without = apart(&changed, &plain);
        if of_reference > 1e-3 || without < 0.1 {
            failures.push(format!("{name}: {of_reference:e} from the reference, {without:e} without the adapter"));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
