//! Tests of latent attention: the cache holds one vector per position, prompts have the same bits in any pieces, and
//! quantized matrices of keys and values give the logits of the floats that they stand for.

use crate::common::{all_logits, fixture, golden, iec, packed_as};
use iec::iebin::IebinReader;
use iec::runtime::{Engine, EngineOptions, KvType, Precision};
use serde_json::Value;
use std::path::{Path, PathBuf};

const MODELS: [&str; 4] = ["deepseek2", "deepseek3", "glm4flash", "mistral4"];

fn text(name: &str) -> Vec<u32> {
    golden(name)["perplexity"]["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn logits(pack: &Path, precision: Precision, kv: KvType, prefill_chunk: usize, tokens: &[u32]) -> Vec<f32> {
    let options =
        EngineOptions { precision: Some(precision), kv: Some(kv), prefill_chunk, threads: 2, ..Default::default() };
    all_logits(&mut Engine::open(&IebinReader::open(pack).unwrap(), &options).unwrap(), tokens)
}

#[test]
fn prompts_have_the_same_bits_in_pieces_of_any_size() {
    for name in MODELS {
        let (pack, tokens) = (packed_as(name, &fixture(name), &[]), text(name));
        for (precision, kv) in [(Precision::Fp32, KvType::F32), (Precision::Bf16, KvType::F16)] {
            let bits = |piece| {
                let logits = logits(&pack, precision, kv, piece, &tokens);
                logits.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
            };
            let expected = bits(512);
            for piece in [1, 63, 64, 65, 256] {
                assert!(bits(piece) == expected, "{name} {precision} {kv}: pieces of {piece}");
            }
        }
    }
}

/// Packs a checkpoint with all matrices of attention in a scheme, and the floats that these codes stand for.
fn quantized(name: &str, scheme: &str) -> [PathBuf; 2] {
    let id = format!("latent-{name}-{}", scheme.split('"').nth(3).unwrap());
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (rules, floats) = (dir.join(format!("{id}.json")), dir.join(format!("{id}-floats")));
    let rule = format!(r#"{{"include":"self_attn.*proj.*weight$",{scheme},"method":"rtn"}}"#);
    std::fs::write(&rules, format!(r#"{{"version":1,"rules":[{rule}]}}"#)).unwrap();
    let codes = packed_as(&id, &fixture(name), &["--q4-map", rules.to_str().unwrap()]);
    let unpack = ["--dtype", "fp32", "--overwrite", "--out-dir"];
    iec().arg("unpack").arg(&codes).args(unpack).arg(&floats).assert().success();
    let floats = packed_as(&format!("{id}-floats"), &floats, &[]);
    [codes, floats]
}

#[test]
fn quantized_keys_and_values_give_the_logits_of_the_floats_that_they_stand_for() {
    let schemes = [
        (r#""scheme":"q4_0""#, Precision::Int4w),
        (r#""scheme":"mxfp4""#, Precision::Int4w),
        (r#""scheme":"int6","group_size":32"#, Precision::Int8w),
        (r#""scheme":"int8","group_size":"row""#, Precision::Int8w),
    ];
    for name in MODELS {
        let tokens = &text(name)[..96];
        for (scheme, precision) in schemes {
            let [codes, floats] = quantized(name, scheme);
            let expected = logits(&floats, Precision::Fp32, KvType::F32, 512, tokens);
            let found = logits(&codes, precision, KvType::F32, 512, tokens);
            let apart = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            let spread = expected.iter().fold(0f32, |most, logit| most.max(logit.abs()));
            assert!(apart <= 2e-3 * spread, "{name} {scheme}: {apart} of {spread}");
        }
    }
}

#[test]
fn a_memory_plan_counts_one_vector_per_position() {
    // Layers, and values of a vector and of the rotated part of a key.
    for (name, layers, width) in [("deepseek2", 3, 24 + 16), ("deepseek3", 3, 24 + 16), ("glm4flash", 3, 24 + 8)] {
        let pack = packed_as(name, &fixture(name), &[]);
        let plan = iec().arg("run").arg(&pack).args(["--plan", "--json", "--ctx", "256", "--kv", "f16"]).assert();
        let stdout = String::from_utf8(plan.success().get_output().stdout.clone()).unwrap();
        let plan: Value = serde_json::from_str(stdout.lines().next().unwrap()).unwrap();
        assert_eq!(plan["kv_bytes"], layers * 256 * width * 2, "{name}: {plan}");
        assert!(plan["weights_owned_bytes"].as_u64().unwrap() > 0, "{name}: {plan}");
    }
}
