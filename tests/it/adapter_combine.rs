//! Compares `iec unpack --lora ... --merge HOW` with `add_weighted_adapter` of PEFT.

use crate::common::{all_logits, fixture, iec, packed_as};
use crate::golden::{fp32, open};
use serde_json::Value;
use std::path::Path;

/// Name of an adapter of the fixtures, and its weight.
type Weighted = (&'static str, f64);

/// Runs `iec unpack` with several adapters of the fixtures.
fn unpack(pack: &Path, adapters: &[(&str, f64)], merge: &[&str], out: &Path) -> assert_cmd::assert::Assert {
    let mut command = iec();
    command.arg("unpack").arg(pack).arg("--out-dir").arg(out).args(merge);
    for (name, weight) in adapters {
        command.arg("--lora").arg(format!("{}:{weight}", fixture(name).display()));
    }
    command.assert()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn combined_adapters_give_the_ids_and_logits_of_peft() {
    let path = fixture("combined-adapters").join("golden.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    // In f32, so that merging rounds nothing.
    let pack = packed_as("llama-gqa-fp32", &fixture("llama-gqa"), &["--dtype", "fp32"]);
    let dir = tempfile::tempdir().unwrap();
    let mut failures = Vec::new();
    for (number, case) in golden["cases"].as_array().unwrap().iter().enumerate() {
        let merge = case["merge"].as_str().unwrap();
        let adapters: Vec<(&str, f64)> = (case["adapters"].as_array().unwrap().iter())
            .map(|pair| (pair[0].as_str().unwrap(), pair[1].as_f64().unwrap()))
            .collect();
        let merged = dir.path().join(number.to_string());
        unpack(&pack, &adapters, &["--merge", merge], &merged).success();
        let mut engine = open(&packed_as(&format!("combined-{number}"), &merged, &[]), fp32());
        for prompt in case["prompts"].as_array().unwrap() {
            let (before, mut said) = (ids(&prompt["ids"]), ids(&prompt["greedy_ids"]));
            let expected = said.clone();
            said.pop();
            let (last, vocab) = (before.len() - 1, engine.config().vocab);
            let logits = all_logits(&mut engine, &[before, said].concat());
            let rows: Vec<&[f32]> = logits.chunks_exact(vocab).skip(last).collect();
            let best = |row: &&[f32]| (0..vocab).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32;
            let theirs = prompt["last_logits"].as_array().unwrap();
            let apart = rows[0].iter().zip(theirs).map(|(a, b)| (f64::from(*a) - b.as_f64().unwrap()).abs());
            let (apart, chosen) = (apart.fold(0.0, f64::max), rows.iter().map(best).collect::<Vec<u32>>());
            if apart > 1e-3 || chosen != expected {
                failures.push(format!("{merge} of {adapters:?}: logits {apart:.2e} apart, chose {chosen:?}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn the_default_is_the_sum_and_what_cannot_be_combined_is_refused() {
    let pack = packed_as("llama-gqa-fp32", &fixture("llama-gqa"), &["--dtype", "fp32"]);
    let dir = tempfile::tempdir().unwrap();
    let (qv, rslora) = (("lora-llama-gqa/r8-qv", 0.75), ("adapters/rslora", 1.0));
    let weights = |name: &str, merge: &[&str]| {
        let out = dir.path().join(name);
        unpack(&pack, &[qv, rslora], merge, &out).success();
        std::fs::read(out.join("model.safetensors")).unwrap()
    };
    let cat = weights("cat", &["--merge", "cat"]);
    assert!(weights("default", &[]) == cat);
    assert!(weights("linear", &["--merge", "linear"]) != cat);
    let one = ("lora-llama-gqa/r8-qv", 1.0);
    let cases: [(&[Weighted], &str, &str); 7] = [
        (&[one], "ties", "at least two"),
        (&[one, ("lora-llama-gqa/r16-all", 1.0)], "ties", "adapters of the same rank"),
        (&[one, ("lora-llama-gqa/r32-dora", 1.0)], "linear", "magnitudes of DoRA"),
        (&[one, ("adapters/save-embeddings", 1.0)], "ties:0.5", "a whole weight"),
        (&[one, ("adapters/lora-bias", 1.0)], "ties:0.5", "a bias"),
        (&[one, ("adapters/qwen3moe-gate-up", 1.0)], "ties", "factors of parameters"),
        (&[one, rslora], "ties:2", "a density from 0 to 1"),
    ];
    for (adapters, merge, said) in cases {
        let refused = unpack(&pack, adapters, &["--merge", merge], &dir.path().join("refused")).failure();
        let stderr = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
        assert!(stderr.contains(said) && !dir.path().join("refused").exists(), "{merge} of {adapters:?}: {stderr}");
    }
}
