//! Tests `iec dedup`: it stores a pack in fewer bytes, restores every byte, and detects every changed byte.

use crate::checkpoint::{edit_json, without_digest};
use crate::common::{fixture, iec};
use iec::dedup::{FILE_NAMES, JSON_NAME};
use iec::rng::Rng;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

pub struct Place(TempDir);

impl Place {
    pub fn new() -> Place {
        Place(TempDir::new().unwrap())
    }

    pub fn dir(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn pack(&self, from: &Path, to: &str, more: &[&str]) -> PathBuf {
        let out = self.dir(to);
        iec().args(["pack", "--hf-dir"]).arg(from).arg("--out-dir").arg(&out).args(more).assert().success();
        out
    }
}

/// Runs `iec dedup` on a pack and reads its JSON.
pub fn dedup(dir: &Path, more: &[&str]) -> Value {
    // Most packs here are too small to become smaller.
    let makes = !more.contains(&"--restore") && !more.contains(&"--remove");
    let force: &[&str] = if makes { &["--even-if-larger"] } else { &[] };
    let run = iec().args(["dedup", "--json", "--model-dir"]).arg(dir).args(more).args(force).assert().success();
    serde_json::from_slice(&run.get_output().stdout).unwrap()
}

/// Runs `iec dedup`, which must fail with this exit code, and returns its message.
pub fn refused(dir: &Path, code: i32, more: &[&str]) -> String {
    let run = iec().args(["dedup", "--model-dir"]).arg(dir).args(more).assert().code(code);
    String::from_utf8(run.get_output().stderr.clone()).unwrap()
}

pub fn binary(dir: &Path) -> Vec<u8> {
    std::fs::read(dir.join("model.ie.bin")).unwrap()
}

/// Copies a checkpoint with small random changes to every second number of the first half of its weights, like a
/// fine-tuned model.
pub fn tuned(from: &Path, to: &Path, seed: u64) {
    std::fs::create_dir_all(to).unwrap();
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        let mut bytes = std::fs::read(file.path()).unwrap();
        if file.path().extension().is_some_and(|e| e == "safetensors") {
            let header = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
            let half = header + (bytes.len() - header) / 8 * 4;
            let mut rng = Rng::new(seed);
            for number in bytes[header..half].as_chunks_mut::<4>().0.iter_mut().step_by(2) {
                let x = f32::from_le_bytes(*number);
                *number = (x * (1.0 + 0.001 * rng.next_normal() as f32)).to_le_bytes();
            }
        }
        std::fs::write(to.join(file.file_name()), bytes).unwrap();
    }
}

#[test]
fn every_kind_of_tensor_comes_back_byte_for_byte() {
    let place = Place::new();
    let rules = place.dir("rules.json");
    std::fs::write(
        &rules,
        r#"{"version": 1, "rules": [{"include": "mlp", "scheme": "int4", "group_size": 32, "symmetric": false, "method": "rtn"},
            {"include": "self_attn.*(q|k)_proj", "scheme": "int8", "group_size": "row", "method": "rtn"},
            {"include": "self_attn.*(v|o)_proj", "scheme": "int6"}]}"#,
    )
    .unwrap();
    let rules = rules.to_str().unwrap();
    for (name, more) in [
        ("stories260k", &[][..]),
        ("stories260k", &["--q4-map", rules]),
        ("stories260k", &["--dtype", "fp16"]),
        ("dedup-llama", &[]),
        ("gptoss-mxfp4", &[]),
        ("qwen3moe", &[]),
    ] {
        for (i, codec) in ["auto", "zstd", "none"].into_iter().enumerate() {
            let label = format!("{name}-{}-{i}", more.join("-").replace('/', "_"));
            let dir = place.pack(&fixture(name), &label, more);
            let before = binary(&dir);
            let summary = dedup(&dir, &["--codec", codec, "--remove-original"]);
            assert!(summary["stored_bytes"].as_u64().unwrap() as f64 <= before.len() as f64 * 1.1, "{label} {summary}");
            assert!(!dir.join("model.ie.bin").exists() && summary["removed_original"] == true);
            assert_eq!(dedup(&dir, &["--verify"])["verified"], true);
            let map = |dir: &Path| {
                let map =
                    iec().args(["tensor-map", "--strict", "--out", "-", "--model-dir"]).arg(dir).assert().success();
                map.get_output().stdout.clone()
            };
            let without_binary = map(&dir);
            let again = place.dir(&format!("{label}-again"));
            dedup(&dir, &["--restore", "--out-dir", again.to_str().unwrap()]);
            assert!(binary(&again) == before, "{label} {codec}");
            assert_eq!(without_binary, map(&again), "{label} {codec}");
            dedup(&dir, &["--restore"]);
            assert!(binary(&dir) == before, "{label} {codec}");
        }
    }
}

#[test]
fn bf16_weights_shrink_to_seven_tenths_and_repeated_tensors_are_stored_once() {
    let place = Place::new();
    let dir = place.dir("tiny");
    let (hf, repeated) = (place.dir("hf"), place.pack(&fixture("dedup-llama"), "repeated", &[]));
    iec().args(["synth", "--like", "tinyllama-1.1b", "--layers", "1", "--out-dir"]).arg(&hf).assert().success();
    place.pack(&hf, "tiny", &[]);
    let fast = dedup(&dir, &[])["ratio"].as_f64().unwrap();
    let small = dedup(&dir, &["--codec", "zstd"])["ratio"].as_f64().unwrap();
    assert!(fast <= 0.70 && small <= 0.665, "{fast} {small}");
    let summary = dedup(&repeated, &["--codec", "none"]);
    let same =
        |part: &Value| part["encoding"] == "same" && part["stored_bytes"] == 0 && part["units"].as_u64() > Some(0);
    assert!(summary["parts"].as_array().unwrap().iter().any(same), "{summary}");
}

#[test]
fn a_tuned_model_is_stored_as_its_differences_from_the_base_and_needs_that_base() {
    let place = Place::new();
    let base = place.pack(&fixture("stories260k"), "base", &[]);
    tuned(&fixture("stories260k"), &place.dir("tuned-hf"), 3);
    let dir = place.pack(&place.dir("tuned-hf"), "tuned", &[]);
    let before = binary(&dir);
    let summary = dedup(&dir, &["--base", base.to_str().unwrap(), "--remove-original"]);
    assert!(summary["ratio"].as_f64().unwrap() < 0.46, "{summary}");
    dedup(&dir, &["--restore", "--out-dir", place.dir("again").to_str().unwrap()]);
    assert!(binary(&place.dir("again")) == before);
    // The base may itself be deduplicated.
    dedup(&base, &["--codec", "zstd", "--remove-original"]);
    dedup(&dir, &["--verify"]);
    std::fs::rename(&base, place.dir("elsewhere")).unwrap();
    let message = refused(&dir, 3, &["--verify"]);
    assert!(message.contains("found no pack here"), "{message}");
    place.pack(&place.dir("tuned-hf"), "base", &[]);
    let message = refused(&dir, 3, &["--verify"]);
    assert!(message.contains("found tensor model.embed_tokens.weight of the base pack"), "{message}");
}

#[test]
fn a_copy_of_what_is_stored_as_differences_comes_back_too() {
    let place = Place::new();
    tuned(&fixture("dedup-llama"), &place.dir("base-hf"), 3);
    let base = place.pack(&place.dir("base-hf"), "base", &[]);
    let dir = place.pack(&fixture("dedup-llama"), "pack", &[]);
    let before = binary(&dir);
    let summary = dedup(&dir, &["--base", base.to_str().unwrap(), "--remove-original"]);
    for encoding in ["same", "delta"] {
        assert!(summary["parts"].as_array().unwrap().iter().any(|part| part["encoding"] == encoding), "{summary}");
    }
    dedup(&dir, &["--restore"]);
    assert!(binary(&dir) == before);
}

#[test]
fn every_changed_byte_is_noticed() {
    let place = Place::new();
    let dir = place.pack(&fixture("stories260k"), "pack", &[]);
    dedup(&dir, &["--codec", "zstd", "--remove-original"]);
    let mut rng = Rng::new(11);
    for name in FILE_NAMES.iter().chain([&JSON_NAME]) {
        let path = dir.join(name);
        let bytes = std::fs::read(&path).unwrap();
        for _ in 0..12 {
            let mut changed = bytes.clone();
            let at = rng.next_u64() as usize % changed.len();
            changed[at] ^= 1 << (rng.next_u64() % 8);
            std::fs::write(&path, changed).unwrap();
            let run = iec().args(["dedup", "--verify", "--model-dir"]).arg(&dir).assert().failure();
            assert!(matches!(run.get_output().status.code(), Some(1 | 3 | 4)), "{name} byte {at}");
        }
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        refused(&dir, 3, &["--verify"]);
        std::fs::remove_file(&path).unwrap();
        let message = refused(&dir, 3, &["--restore"]);
        assert!(message.contains(name) || *name == JSON_NAME, "{message}");
        std::fs::write(&path, &bytes).unwrap();
    }
    dedup(&dir, &["--verify"]);
}

#[test]
fn a_pack_that_does_not_verify_keeps_its_binary() {
    let place = Place::new();
    let dir = place.pack(&fixture("stories260k"), "pack", &[]);
    without_digest(&dir);
    edit_json(&dir.join("model.ie.json"), |description| {
        description["tensors"][3]["sha256"] = "0".repeat(64).into();
    });
    let message = refused(&dir, 4, &["--even-if-larger", "--remove-original"]);
    assert!(message.contains("found the SHA-256"), "{message}");
    assert!(dir.join("model.ie.bin").exists());
}

#[test]
fn a_killed_run_never_loses_the_binary() {
    let place = Place::new();
    let dir = place.pack(&fixture("stories260k"), "pack", &[]);
    let before = binary(&dir);
    let mut rng = Rng::new(5);
    for _ in 0..12 {
        let mut child = Command::new(env!("CARGO_BIN_EXE_iec"))
            .args(["dedup", "--quiet", "--codec", "zstd", "--remove-original", "--model-dir"])
            .arg(&dir)
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_micros(rng.next_u64() % 60_000));
        let _ = child.kill();
        child.wait().unwrap();
        if dir.join("model.ie.bin").exists() {
            assert!(binary(&dir) == before);
        } else {
            dedup(&dir, &["--restore"]);
            assert!(binary(&dir) == before);
        }
    }
}
