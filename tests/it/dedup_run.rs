//! Tests running deduplicated packs without their data file: results have the same bits, and memory stays within the
//! limit.

use crate::common::{all_logits, fixture, golden, iec};
use assert_cmd::assert::Assert;
use iec::dedup::source::{self, Trust};
use iec::dedup::{FILE_NAMES, JSON_NAME};
use iec::iebin::reader::read_description;
use iec::iebin::rebuild::Keep;
use iec::iebin::seal::{sealed, unsealed};
use iec::iebin::{EntryJson, IebinReader};
use iec::runtime::{Engine, EngineOptions, Precision, Residency};
use iec::windowed::Windowed;
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Pack of a fixture, and its deduplicated form without the data file.
struct Pair {
    _place: TempDir,
    raw: PathBuf,
    reduced: PathBuf,
}

fn pair(name: &str, codec: &str, more: &[&str]) -> Pair {
    let place = TempDir::new().unwrap();
    let [raw, reduced] = ["raw", "reduced"].map(|dir| place.path().join(dir));
    for dir in [&raw, &reduced] {
        iec().args(["pack", "--hf-dir"]).arg(fixture(name)).arg("--out-dir").arg(dir).args(more).assert().success();
    }
    iec()
        .args(["dedup", "--remove-original", "--even-if-larger", "--codec", codec, "--model-dir"])
        .arg(&reduced)
        .assert()
        .success();
    Pair { _place: place, raw, reduced }
}

fn text(name: &str) -> Vec<u32> {
    let ids = |value: &Value| value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    ids(&golden(name)["perplexity"]["ids"])
}

fn bits(mut engine: Engine, tokens: &[u32]) -> (Vec<u32>, Engine) {
    (all_logits(&mut engine, tokens).iter().map(|v| v.to_bits()).collect(), engine)
}

fn open(dir: &Path, keep: Keep, options: &EngineOptions) -> Engine {
    let json = dir.join("model.ie.json");
    let source = source::open(&json, dir, Trust::Nothing).unwrap();
    let reader = IebinReader::open_rebuilt(read_description(&json).unwrap(), &json, source, keep).unwrap();
    Engine::open(&reader, options).unwrap()
}

/// Returns the size in bytes of the largest matrix, which is used as a whole.
fn largest(dir: &Path) -> u64 {
    let description = read_description(&dir.join("model.ie.json")).unwrap();
    // In memory, codes of 5 or more bits take 8 bits.
    let bytes = |t: &EntryJson| t.nbytes * if t.quant.as_ref().is_some_and(|quant| quant.bits > 4) { 2 } else { 1 };
    description.tensors.iter().map(bytes).max().unwrap()
}

#[test]
fn logits_are_those_of_the_binary_bit_for_bit_however_little_is_kept() {
    let q4 = TempDir::new().unwrap();
    let rules = q4.path().join("rules.json");
    let text_of_rules = r#"{"version":1,"rules":[{"include":"mlp","scheme":"q4_0","method":"rtn"},
        {"include":"self_attn.*proj","scheme":"int6"},{"include":"embed_tokens|lm_head","scheme":"int5"}]}"#;
    std::fs::write(&rules, text_of_rules).unwrap();
    let rules = ["--q4-map", rules.to_str().unwrap()];
    let mut evicted = 0;
    for (name, codec, more, precision) in [
        ("llama-gqa", "auto", &[][..], None),
        ("llama-gqa", "auto", &["--dtype", "bf16"], None),
        ("llama-gqa", "auto", &["--dtype", "bf16"], Some(Precision::Fp32)),
        ("llama-gqa", "zstd", &["--dtype", "bf16"], None),
        ("llama-gqa", "none", &["--dtype", "fp16"], None),
        ("llama-gqa", "auto", &[], Some(Precision::Bf16)),
        ("llama-gqa", "zstd", &rules, None),
        ("stories260k", "auto", &["--dtype", "bf16"], None),
        ("stories260k", "zstd", &[], Some(Precision::Bf16)),
        ("gptoss-mxfp4", "auto", &[], None),
        ("gptoss-mxfp4", "zstd", &[], Some(Precision::Int4)),
        ("qwen3moe", "auto", &["--dtype", "bf16"], None),
    ] {
        let pair = pair(name, codec, more);
        let tokens = text(name);
        let raw = |threads| {
            let options = EngineOptions { threads, precision, ..EngineOptions::default() };
            Engine::open(&IebinReader::open(&pair.raw).unwrap(), &options).unwrap()
        };
        let (expected, _) = bits(raw(2), &tokens);
        let largest = largest(&pair.raw);
        for (threads, limit, residency) in
            [(1, None, Residency::OnDemand), (5, None, Residency::Whole), (2, Some(largest), Residency::OnDemand)]
        {
            let options = EngineOptions { threads, precision, residency, ..EngineOptions::default() };
            let (found, engine) = bits(open(&pair.reduced, Keep { limit, ..Keep::default() }, &options), &tokens);
            let what = format!("{name} {codec} {more:?} {precision:?}: {threads} threads, {limit:?}");
            assert!(found == expected, "{what}: other bits");
            let rebuilds = engine.rebuilds().unwrap();
            assert!(limit.is_none_or(|limit| rebuilds.peak_bytes <= limit), "{what}: {rebuilds:?}");
            assert!(limit.is_some() || rebuilds.evicted == 0, "{what}: {rebuilds:?}");
            evicted += rebuilds.evicted;
            let as_stored = codec == "auto" && more == ["--dtype", "bf16"];
            if as_stored && Windowed::is_fast() {
                assert_eq!(rebuilds.matrices, 0, "{what}: what can be computed with as it is stored was rebuilt");
            }
        }
    }
    assert!(evicted > 0, "everything fitted");
}

#[test]
fn hot_weights_are_rebuilt_first_and_never_again() {
    let pair = pair("llama-gqa", "zstd", &[]);
    let tokens = text("llama-gqa");
    let options = EngineOptions::default();
    let down = "model.layers.1.mlp.down_proj.weight";
    let hot =
        |hot: &[&str], hot_bytes, limit| Keep { limit, hot: hot.iter().map(|n| n.to_string()).collect(), hot_bytes };
    let before = |keep| open(&pair.reduced, keep, &options).rebuilds().unwrap();
    assert_eq!(before(hot(&[], 0, None)).matrices, 0);
    assert_eq!(before(hot(&[down], 0, None)).matrices, 1);
    let first = before(hot(&[], 100_000, None));
    assert!(first.matrices > 0 && first.bytes <= 100_000, "{first:?}");
    // Hot tensors are rebuilt once; all others are rebuilt at each use, since nothing else fits into the limit.
    let limit = largest(&pair.raw);
    let again = |keep| bits(open(&pair.reduced, keep, &options), &tokens[..3]).1.rebuilds().unwrap();
    let size = before(hot(&[down], 0, None)).bytes;
    let (cold, warm) = (again(hot(&[], 0, Some(limit))), again(hot(&[down], 0, Some(limit + size))));
    assert!(warm.bytes <= cold.bytes && warm.peak_bytes <= limit + size, "{cold:?} {warm:?}");
}

fn run(dir: &Path, more: &[&str]) -> Assert {
    let mut command = iec();
    command.args(["run", "--prompt", "Once upon a time", "--max-new", "12", "-v", "--model-dir"]).arg(dir).args(more);
    command.assert()
}

fn stderr(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

#[test]
fn everything_that_runs_or_looks_takes_the_pack_as_it_is() {
    let pair = pair("stories260k", "auto", &[]);
    let expected = run(&pair.raw, &[]).success().get_output().stdout.clone();
    assert!(!expected.is_empty());
    let found = run(&pair.reduced, &[]).success();
    assert_eq!(found.get_output().stdout, expected);
    assert!(stderr(&found).contains("rebuilt"), "{}", stderr(&found));
    let bounded =
        run(&pair.reduced, &["--dedup-cache-mb", "1", "--dedup-hot-bytes", "64K", "--dedup-strict"]).success();
    assert_eq!(bounded.get_output().stdout, expected);
    iec()
        .args([
            "bench",
            "--max-new",
            "2",
            "--rounds",
            "1",
            "--bytes-per-token",
            "4096",
            "--verify-touch",
            "--model-dir",
        ])
        .arg(&pair.reduced)
        .assert()
        .success();
    let original = fixture("stories260k");
    let mut verify = iec();
    verify
        .args(["verify", "--hashes", "--max-new", "3", "--hf-dir"])
        .arg(original)
        .arg("--model-dir")
        .arg(&pair.reduced);
    verify.assert().success();
    for (command, option, file) in [("unpack", "--out-dir", "model.safetensors"), ("export-gguf", "--out", "")] {
        let [of_raw, of_reduced] = [&pair.raw, &pair.reduced].map(|dir| {
            let out = dir.with_extension(command);
            iec().arg(command).arg("--model-dir").arg(dir).arg(option).arg(&out).assert().success();
            std::fs::read(if file.is_empty() { out } else { out.join(file) }).unwrap()
        });
        assert!(of_raw == of_reduced, "{command}: other bytes");
    }
    let inspect = iec().args(["inspect", "--stats"]).arg(&pair.reduced).assert().success();
    let raw = iec().args(["inspect", "--stats"]).arg(&pair.raw).assert().success();
    let table =
        |a: &Assert| String::from_utf8(a.get_output().stdout.clone()).unwrap().split("\n\n").last().map(String::from);
    assert_eq!(table(&inspect), table(&raw));
    assert!(String::from_utf8_lossy(&inspect.get_output().stdout).contains("deduplicated IEBIN pack"));
}

#[test]
fn options_choose_between_the_binary_and_the_store() {
    let pair = pair("stories260k", "auto", &[]);
    let message = stderr(&run(&pair.reduced, &["--dedup", "off"]).code(3));
    assert!(message.contains("iec dedup --restore"), "{message}");
    run(&pair.reduced, &["--dedup-policy", "none"]).code(3);
    let both = stderr(&run(&pair.reduced, &["--dedup-policy", "none", "--dedup", "on"]).code(2));
    assert!(both.contains("contradicts"), "{both}");
    // The data file is preferred; `--dedup` selects the store of this or another directory.
    let notes = stderr(&run(&pair.raw, &["--dedup-cache-mb", "1"]).success());
    assert!(notes.contains("IE_DEDUP_CACHE_MB: no effect") && !notes.contains("rebuilt"), "{notes}");
    let elsewhere = stderr(&run(&pair.raw, &["--dedup", pair.reduced.to_str().unwrap()]).success());
    assert!(elsewhere.contains("rebuilt"), "{elsewhere}");
    let missing = stderr(&run(&pair.raw, &["--dedup", "on"]).code(3));
    assert!(missing.contains(JSON_NAME), "{missing}");
    iec().env("IE_DEDUP", "0").args(["run", "--prompt", "x", "--model-dir"]).arg(&pair.reduced).assert().code(3);
    let unknown = stderr(&run(&pair.reduced, &["--dedup-hot-list", "model.none"]).code(2));
    assert!(unknown.contains("model.none") && unknown.contains("iec inspect"), "{unknown}");
    let small = stderr(&run(&pair.reduced, &["--dedup-cache-mb", "0"]).code(2));
    assert!(small.contains("IE_DEDUP_CACHE_MB") && small.contains("at least 1"), "{small}");
}

#[test]
fn a_missing_or_changed_file_is_named() {
    let pair = pair("stories260k", "auto", &[]);
    for name in FILE_NAMES {
        let path = pair.reduced.join(name);
        let bytes = std::fs::read(&path).unwrap();
        for at in [0, bytes.len() / 2, bytes.len() - 1] {
            let mut changed = bytes.clone();
            changed[at] ^= 4;
            std::fs::write(&path, changed).unwrap();
            run(&pair.reduced, &["--dedup-strict"]).code(3);
        }
        std::fs::remove_file(&path).unwrap();
        let message = stderr(&run(&pair.reduced, &[]).code(3));
        assert!(message.contains(name) && message.contains("help: restore it"), "{message}");
        std::fs::write(&path, bytes).unwrap();
    }
    run(&pair.reduced, &["--dedup-strict"]).success();
}

/// Names of the files of a deduplicated store.
const STORE: [&str; 4] =
    ["model.dedup.json", "model.dedup.defaults.bin", "model.dedup.masks.bin", "model.dedup.exceptions.bin"];

#[test]
fn a_store_of_another_pack_is_never_run() {
    let pair = pair("stories260k", "auto", &["--dtype", "bf16"]);
    let place = TempDir::new().unwrap();
    // The description of an earlier version does not record its pack.
    let text = std::fs::read_to_string(pair.reduced.join(STORE[0])).unwrap();
    let lines: Vec<&str> = unsealed(&text).unwrap().lines().filter(|line| !line.contains("pack_sha256")).collect();
    let unbound = sealed(&lines.join("\n"));
    for (case, description) in [("bound", &text), ("unbound", &unbound)] {
        let dir = place.path().join(case);
        let mut pack = iec();
        pack.args(["pack", "--dtype", "fp16", "--hf-dir"]).arg(fixture("stories260k")).arg("--out-dir").arg(&dir);
        pack.assert().success();
        for name in &STORE[1..] {
            std::fs::copy(pair.reduced.join(name), dir.join(name)).unwrap();
        }
        std::fs::write(dir.join(STORE[0]), description).unwrap();
        run(&dir, &[]).success();
        run(&dir, &["--dedup", "on"]).code(3);
        std::fs::remove_file(dir.join("model.ie.bin")).unwrap();
        let message = stderr(&run(&dir, &[]).code(3));
        assert!(case == "unbound" || message.contains("found a store of another pack"), "{message}");
        // Replacing the pack removes the store.
        let mut pack = iec();
        pack.args(["pack", "--overwrite", "--hf-dir"]).arg(fixture("stories260k")).arg("--out-dir").arg(&dir);
        pack.assert().success();
        assert!(STORE.iter().all(|name| !dir.join(name).exists()), "{case}");
    }
    // With its own pack, the description of an earlier version is used.
    std::fs::write(pair.reduced.join(STORE[0]), &unbound).unwrap();
    run(&pair.reduced, &[]).success();
}
