//! Tests that files of every earlier version of the formats are still read. The program of that version wrote them; a
//! change of a format adds a directory here and never changes one.
//!
//! `without-digest` (November 2026): from the fixture `qwen2`. The description of a pack has no digest, no hashes of
//! other files and no `reader_version`, and the deduplicated store does not record which pack it belongs to.

use crate::checkpoint::files;
use crate::common::{fixture, iec};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn old(name: &str) -> PathBuf {
    fixture("formats").join("without-digest").join(name)
}

fn tokens(pack: &Path) -> Value {
    let args = ["run", "--prompt", "Once upon", "--max-new", "12", "--ignore-eos", "--json", "--quiet", "--model-dir"];
    let output = iec().args(args).arg(pack).assert().success();
    serde_json::from_slice::<Value>(&output.get_output().stdout).unwrap()["tokens"].take()
}

#[test]
fn packs_and_stores_without_a_digest_give_the_same_tokens() {
    let packed = serde_json::json!([196, 41, 3, 486, 469, 124, 457, 255, 324, 221, 41, 411]);
    let floats = serde_json::json!([142, 70, 324, 465, 283, 378, 236, 61, 372, 258, 465, 153]);
    assert_eq!(tokens(&old("pack")), packed);
    assert_eq!(tokens(&old("store")), floats);
    for pack in ["pack", "store"] {
        iec().args(["verify", "--hashes", "--model-dir"]).arg(old(pack)).assert().success();
        iec().arg("inspect").arg(old(pack)).assert().success();
    }
}

#[test]
fn a_store_without_a_digest_restores_the_binary_of_today() {
    let dir = tempfile::tempdir().unwrap();
    let [restored, packed] = ["restored", "packed"].map(|name| dir.path().join(name));
    iec()
        .args(["dedup", "--restore", "--model-dir"])
        .arg(old("store"))
        .arg("--out-dir")
        .arg(&restored)
        .assert()
        .success();
    iec().args(["pack", "--hf-dir"]).arg(fixture("qwen2")).arg("--out-dir").arg(&packed).assert().success();
    let binary = |dir: &Path| std::fs::read(dir.join("model.ie.bin")).unwrap();
    assert!(binary(&restored) == binary(&packed));
}

#[test]
fn manifests_q4_files_and_statistics_are_read_and_give_the_same_codes() {
    let dir = tempfile::tempdir().unwrap();
    let [pack, q4, manifest] = ["pack", "q4", "manifest.json"].map(|name| dir.path().join(name));
    let map = old("q4").join("q4_manifest.expanded.json");
    iec()
        .args(["pack", "--hf-dir"])
        .arg(fixture("qwen2"))
        .arg("--q4-map")
        .arg(map)
        .arg("--out-dir")
        .arg(&pack)
        .assert()
        .success();
    assert!(files(&pack)[Path::new("model.ie.bin")] == files(&old("pack"))[Path::new("model.ie.bin")]);
    let rules = old("manifest.json");
    iec()
        .args(["q4", "--hf-dir"])
        .arg(fixture("qwen2"))
        .arg("--manifest")
        .arg(rules)
        .arg("--out-dir")
        .arg(&q4)
        .assert()
        .success();
    assert!(files(&q4)[Path::new("model.q4.bin")] == files(&old("q4"))[Path::new("model.q4.bin")]);
    let statistics = old("calibration.safetensors");
    let ptq = ["ptq", "--bits", "4", "--method", "imatrix", "--hf-dir"];
    iec().args(ptq).arg(fixture("qwen2")).arg("--calib").arg(statistics).arg("--out").arg(manifest).assert().success();
}
