//! Tests `iec dedup` on synthetic packs: it finds repetitions in tensors of every kind and size, and every pack can
//! be restored without loss.

use crate::common::{fixture, iec};
use crate::dedup::{Place, binary, dedup};
use half::bf16;
use iec::dedup::make::{self, MakeOptions};
use iec::dedup::{Codec, FILE_NAMES, JSON_NAME};
use iec::rng::Rng;
use iec::sha256::{Digest, Sha256, hex};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

/// Name, dtype as written in packs, shape and bytes of a tensor.
type Tensor = (String, &'static str, Vec<usize>, Vec<u8>);

/// Writes a pack of these tensors, each aligned to 64 bytes.
fn write_pack(dir: &Path, tensors: &[Tensor], model: Value) {
    std::fs::create_dir_all(dir).unwrap();
    let mut bytes: Vec<u8> = Vec::new();
    let mut entries = Vec::new();
    for (name, dtype, shape, payload) in tensors {
        bytes.resize(bytes.len().next_multiple_of(64), 0);
        let sha256 = hex(Sha256::new_with_prefix(payload));
        entries.push(json!({"name": name, "dtype": dtype, "shape": shape, "offset": bytes.len(),
            "nbytes": payload.len(), "sha256": sha256}));
        bytes.extend_from_slice(payload);
    }
    let mut description = json!({"version": 1, "tensors": entries, "total_bytes": bytes.len()});
    if !model.is_null() {
        description["model"] = model;
    }
    std::fs::write(dir.join("model.ie.json"), description.to_string()).unwrap();
    std::fs::write(dir.join("model.ie.bin"), bytes).unwrap();
}

/// Deduplicates the pack, restores it, asserts that its bytes are the same, and returns the summary of `iec dedup`.
fn round_trip(dir: &Path, options: &[&str]) -> Value {
    let before = binary(dir);
    let summary = dedup(dir, &[options, &["--remove-original"]].concat());
    dedup(dir, &["--restore"]);
    assert!(binary(dir) == before, "{summary}");
    summary
}

fn weights(rng: &mut Rng, count: usize, std: f32) -> Vec<f32> {
    (0..count).map(|_| rng.next_normal() as f32 * std).collect()
}

fn bytes_of(weights: &[f32]) -> Vec<u8> {
    weights.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect()
}

/// Returns the sum of the original bytes of the parts with this encoding.
fn before(summary: &Value, encoding: &str) -> u64 {
    let parts = summary["parts"].as_array().unwrap().iter().filter(|part| part["encoding"] == encoding);
    parts.map(|part| part["original_bytes"].as_u64().unwrap()).sum()
}

#[test]
fn a_tuned_model_finds_its_base_whatever_the_tensors_are_called() {
    let place = Place::new();
    let (base, tuned) = (place.dir("base"), place.dir("tuned"));
    let mut rng = Rng::new(1);
    let layers: Vec<Vec<f32>> = (0..6).map(|_| weights(&mut rng, 64 * 96, 0.02)).collect();
    let norm: Vec<f32> = weights(&mut rng, 512, 0.1).iter().map(|x| x + 1.0).collect();
    let pack = |dir: &Path, name: &dyn Fn(usize) -> String, changed: &mut dyn FnMut(usize, &[f32]) -> Vec<f32>| {
        let mut tensors: Vec<Tensor> =
            layers.iter().enumerate().map(|(i, w)| (name(i), "BF16", vec![64, 96], bytes_of(&changed(i, w)))).collect();
        tensors.push((name(9), "BF16", vec![512], bytes_of(&changed(9, &norm))));
        // The tuned model also has another order of tensors.
        if name(0) != "layer.0" {
            tensors.reverse();
        }
        write_pack(dir, &tensors, Value::Null);
    };
    pack(&base, &|i| format!("layer.{i}"), &mut |_, w| w.to_vec());
    let mut rng = Rng::new(2);
    // Tensor 3 is unchanged; the names of the others refer to different tensors of the base.
    pack(&tuned, &|i| format!("layer.{}", (i + 2) % 6 + i / 9 * 20), &mut |i, w| {
        let step = if i == 3 { 0.0 } else { 0.0001 };
        w.iter().map(|x| x + step * rng.next_normal() as f32).collect()
    });
    let name = base.to_str().unwrap().to_string();
    for codec in ["auto", "zstd"] {
        let summary = round_trip(&tuned, &["--base", &name, "--codec", codec]);
        assert_eq!(before(&summary, "frames"), 0, "{summary}");
        assert_eq!(before(&summary, "same"), 64 * 96 * 2, "{summary}");
    }
    dedup(&base, &["--codec", "zstd", "--remove-original"]);
    let summary = round_trip(&tuned, &["--base", &name]);
    assert_eq!(before(&summary, "frames"), 0, "{summary}");
}

#[test]
fn a_merged_adapter_leaves_untouched_tensors_for_free() {
    let place = Place::new();
    let (base, merged) = (place.pack(&fixture("llama-gqa"), "base", &[]), place.dir("merged"));
    let description: Value = serde_json::from_slice(&std::fs::read(base.join("model.ie.json")).unwrap()).unwrap();
    let bytes = binary(&base);
    let mut rng = Rng::new(7);
    let (mut tensors, mut untouched): (Vec<Tensor>, u64) = (Vec::new(), 0);
    for entry in description["tensors"].as_array().unwrap() {
        let number = |field: &str| entry[field].as_u64().unwrap() as usize;
        let mut payload = bytes[number("offset")..][..number("nbytes")].to_vec();
        let name = entry["name"].as_str().unwrap();
        let shape: Vec<usize> =
            entry["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap() as usize).collect();
        if name.contains("q_proj") || name.contains("v_proj") {
            // The weight is W + B A with a product of rank 8.
            let (a, b) = (weights(&mut rng, 8 * shape[1], 0.01), weights(&mut rng, shape[0] * 8, 0.02));
            for (i, number) in payload.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let (row, col) = (i / shape[1], i % shape[1]);
                let step: f32 = (0..8).map(|k| b[row * 8 + k] * a[k * shape[1] + col]).sum();
                *number = bf16::from_f32(bf16::from_le_bytes(*number).to_f32() + step).to_le_bytes();
            }
        } else {
            untouched += payload.len() as u64;
        }
        assert_eq!(entry["dtype"], "BF16");
        tensors.push((name.to_string(), "BF16", shape, payload));
    }
    write_pack(&merged, &tensors, description["model"].clone());
    let summary = round_trip(&merged, &["--base", base.to_str().unwrap()]);
    assert_eq!(before(&summary, "same"), untouched, "{summary}");
    assert_eq!(before(&summary, "frames"), 0, "{summary}");
    let parts = summary["parts"].as_array().unwrap();
    assert!(parts.iter().all(|part| part["encoding"] != "same" || part["stored_bytes"] == 0), "{summary}");
}

#[test]
fn a_vocabulary_that_has_grown_costs_its_new_rows() {
    let place = Place::new();
    let (base, tuned) = (place.dir("base"), place.dir("tuned"));
    let mut rng = Rng::new(5);
    let old = weights(&mut rng, 3000 * 64, 0.02);
    let mut new = old.clone();
    new.extend(weights(&mut rng, 16 * 64, 0.02));
    let tensor = |rows: usize, w: &[f32]| -> Tensor { ("embed".into(), "BF16", vec![rows, 64], bytes_of(w)) };
    for (longer, shorter, dir, other) in
        [(&new, &old, &tuned, &base), (&old, &new, &place.dir("cut"), &place.dir("long"))]
    {
        write_pack(dir, &[tensor(longer.len() / 64, longer)], Value::Null);
        write_pack(other, &[tensor(shorter.len() / 64, shorter)], Value::Null);
        let summary = round_trip(dir, &["--base", other.to_str().unwrap()]);
        assert_eq!(before(&summary, "frames"), 0, "{summary}");
        assert!(summary["stored_bytes"].as_u64().unwrap() < 16 * 64 * 2 + 1500, "{summary}");
    }
}

#[test]
fn heads_and_experts_that_repeat_are_stored_once() {
    let place = Place::new();
    let dir = place.dir("pack");
    let from = place.pack(&fixture("stories260k"), "from", &[]);
    let model: Value = serde_json::from_slice(&std::fs::read(from.join("model.ie.json")).unwrap()).unwrap();
    let mut rng = Rng::new(4);
    // 8 heads of 8 rows: the second of each pair is a copy, except for the last, which is nearly one.
    let heads: Vec<Vec<f32>> = (0..5).map(|_| weights(&mut rng, 8 * 64, 0.05)).collect();
    let mut expanded: Vec<f32> = [0, 0, 1, 1, 2, 2, 3].iter().flat_map(|h| heads[*h].clone()).collect();
    expanded.extend(heads[3].iter().map(|x| x + 0.0002));
    let other: Vec<f32> = [4, 1, 0, 2].iter().flat_map(|h| heads[*h].clone()).collect();
    let experts: Vec<f32> = [0, 1, 0, 2, 1].iter().flat_map(|h| heads[*h].clone()).collect();
    let tensors: Vec<Tensor> = vec![
        ("k".into(), "BF16", vec![64, 64], bytes_of(&expanded)),
        ("v".into(), "BF16", vec![32, 64], bytes_of(&other)),
        ("plain".into(), "BF16", vec![64, 64], bytes_of(&weights(&mut rng, 64 * 64, 0.05))),
        ("experts".into(), "BF16", vec![5, 8, 64], bytes_of(&experts)),
    ];
    write_pack(&dir, &tensors, model["model"].clone());
    for codec in ["auto", "zstd", "none"] {
        let summary = round_trip(&dir, &["--codec", codec]);
        let units = |encoding: &str| -> u64 {
            let parts = summary["parts"].as_array().unwrap().iter().filter(|part| part["encoding"] == encoding);
            parts.map(|part| part["units"].as_u64().unwrap()).sum()
        };
        // Stored in full: five heads and the matrix without repetition. The nearly equal head is stored as a
        // difference, except with codec `none`, which stores it in full.
        let near = u64::from(codec != "none");
        assert_eq!((units("frames"), units("delta"), units("same")), (7 - near, near, 3 + 3 + 5), "{codec} {summary}");
    }
}

#[test]
fn every_changed_byte_of_a_small_store_is_noticed() {
    let place = Place::new();
    let dir = place.dir("pack");
    let mut rng = Rng::new(8);
    let first = weights(&mut rng, 24 * 32, 0.02);
    let near: Vec<f32> = first.iter().map(|x| x + 0.0001 * rng.next_normal() as f32).collect();
    let tensors: Vec<Tensor> = vec![
        ("a".into(), "BF16", vec![24, 32], bytes_of(&first)),
        ("b".into(), "BF16", vec![24, 32], bytes_of(&near)),
        ("c".into(), "BF16", vec![24, 32], bytes_of(&first)),
        ("d".into(), "F32", vec![77], weights(&mut rng, 77, 1.0).iter().flat_map(|x| x.to_le_bytes()).collect()),
        ("e".into(), "I8", vec![100], (0..100).collect()),
    ];
    for codec in [Codec::Auto, Codec::Zstd] {
        write_pack(&dir, &tensors, Value::Null);
        make::dedup(&MakeOptions { model_dir: dir.clone(), bases: Vec::new(), codec, level: 1, even_if_larger: true })
            .unwrap();
        iec::dedup::remove_original(&dir).unwrap();
        for name in FILE_NAMES.iter().chain([&JSON_NAME]) {
            let path = dir.join(name);
            let bytes = std::fs::read(&path).unwrap();
            for at in 0..bytes.len() {
                // One bit of every byte is flipped, and every bit of each 16th byte.
                for bit in (0..8).filter(|bit| at % 16 == 0 || at % 8 == *bit) {
                    let mut changed = bytes.clone();
                    changed[at] ^= 1 << bit;
                    std::fs::write(&path, changed).unwrap();
                    assert!(iec::dedup::verify(&dir).is_err(), "{name}: bit {bit} of byte {at}");
                }
            }
            std::fs::write(&path, bytes).unwrap();
        }
        iec::dedup::verify(&dir).unwrap();
    }
}

/// Generates bytes like those of weights, of noise and of damaged data.
fn payload() -> impl Strategy<Value = Vec<u8>> {
    let noise = prop::collection::vec(any::<u8>(), 0..3000);
    let equal = (any::<u8>(), 0usize..6000).prop_map(|(byte, n)| vec![byte; n]);
    // NaN with payloads, infinities, denormals and zeros of both signs, as f32 and, cut, as bf16 and f16.
    let odd = prop::collection::vec(
        prop_oneof![
            (0u32..1 << 23).prop_map(|x| 0x7f80_0000 | x),
            (0u32..1 << 23).prop_map(|x| 0x8000_0000 | x),
            Just(0),
            Just(1 << 31),
            any::<u32>()
        ],
        0..700,
    )
    .prop_map(|x| x.iter().flat_map(|x| x.to_le_bytes()).collect());
    let normal = (any::<u64>(), 0usize..5000, 0i32..40)
        .prop_map(|(seed, n, scale)| bytes_of(&weights(&mut Rng::new(seed), n, 2f32.powi(-scale))));
    // Adversarial to windows of exponents: blocks of 2048 values with very different exponents.
    let adversarial = (any::<u8>(), 1usize..9000).prop_map(|(step, n)| {
        (0..n).map(|i| (i as u8).wrapping_mul(step) ^ ((i / 2048) as u8).wrapping_mul(85)).collect()
    });
    prop_oneof![noise, equal, odd, normal, adversarial]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn tensors_of_any_bytes_and_any_dtype_come_back(
        payloads in prop::collection::vec((payload(), 0usize..9), 1..6), codec in 0usize..3, again in any::<bool>()) {
        const DTYPES: [(&str, usize); 9] = [("F32", 4), ("F16", 2), ("BF16", 2), ("F64", 8), ("I8", 1), ("U8", 1),
            ("I32", 4), ("I64", 8), ("BOOL", 1)];
        let place = Place::new();
        let (dir, base) = (place.dir("pack"), place.dir("base"));
        let tensors: Vec<Tensor> = payloads.iter().enumerate().map(|(i, (bytes, dtype))| {
            let (dtype, size) = DTYPES[*dtype];
            let count = bytes.len() / size;
            (format!("t{i}"), dtype, vec![count], bytes[..count * size].to_vec())
        }).collect();
        write_pack(&dir, &tensors, Value::Null);
        let changed: Vec<Tensor> = tensors.iter().cloned().map(|(name, dtype, shape, mut bytes)| {
            bytes.iter_mut().step_by(7).for_each(|byte| *byte = byte.wrapping_add(1));
            (name, dtype, shape, bytes)
        }).collect();
        write_pack(&base, &changed, Value::Null);
        let before = binary(&dir);
        let codec = [Codec::Auto, Codec::Zstd, Codec::None][codec];
        let bases = if again { vec![base] } else { Vec::new() };
        make::dedup(&MakeOptions { model_dir: dir.clone(), bases, codec, level: 1, even_if_larger: true }).unwrap();
        iec::dedup::remove_original(&dir).unwrap();
        iec::dedup::restore(&dir, &dir).unwrap();
        prop_assert!(binary(&dir) == before);
    }
}

#[test]
fn a_pack_of_which_nothing_is_gained_stays_as_it_is_unless_asked() {
    let place = Place::new();
    let mut rng = Rng::new(8);
    for (name, nbytes) in [("tiny", 64), ("some", 3000), ("large", 2 << 20)] {
        let dir = place.dir(name);
        let noise: Vec<u8> = (0..nbytes).map(|_| rng.next_u64() as u8).collect();
        write_pack(&dir, &[("noise".to_string(), "U8", vec![nbytes], noise)], Value::Null);
        let before = binary(&dir);
        for options in [&["--remove-original"][..], &["--codec", "none"], &["--codec", "zstd", "--verify"]] {
            let run = iec().args(["dedup", "--json", "--model-dir"]).arg(&dir).args(options).assert().success();
            let summary: Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
            let told = ["written", "verified", "removed_original"].map(|field| summary[field].as_bool().unwrap());
            assert_eq!((told, summary["ratio"].as_f64()), ([false; 3], Some(1.0)), "{summary}");
            assert_eq!(summary["stored_bytes"], nbytes, "{summary}");
            assert!(String::from_utf8_lossy(&run.get_output().stderr).contains("nothing is gained"));
            assert!(binary(&dir) == before && FILE_NAMES.iter().all(|file| !dir.join(file).exists()));
            assert!(!dir.join(JSON_NAME).exists());
        }
        let forced = round_trip(&dir, &[]);
        assert_eq!(forced["written"], true, "{forced}");
        let limit = nbytes as f64 * 1.001 + 600.0;
        assert!((forced["stored_bytes"].as_u64().unwrap() as f64) < limit, "{forced}");
    }
}
