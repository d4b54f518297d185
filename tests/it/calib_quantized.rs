//! Tests `iec calib --quantized`: statistics and corrections along a quantized model, and the packs made with them.

use crate::common::{fixture, iec, packed};
use iec::calibration::Calibration;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn text(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/text").join(name)
}

/// Runs a command on the embedded model that must end with this exit code, and returns its messages.
fn run(code: i32, words: &[&str], paths: &[(&str, &Path)]) -> String {
    let mut command = iec();
    command.args(words).arg("--hf-dir").arg(fixture("stories260k"));
    for (option, path) in paths {
        command.arg(option).arg(path);
    }
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{words:?}: {stderr}");
    stderr
}

/// Returns the divergence of a pack from the float model on held-back text.
fn divergence(pack: &Path, float: &Path) -> f64 {
    let mut eval = iec();
    eval.args(["eval", "--json", "--precision", "int4w", "--windows", "6", "--text"]);
    eval.arg(text("heldback_sherlock_40k.txt")).arg("--model-dir").arg(pack).arg("--kl-ref").arg(float);
    let line: serde_json::Value = serde_json::from_slice(&eval.output().unwrap().stdout).unwrap();
    line["reference"]["kl"]["mean"].as_f64().unwrap()
}

#[test]
fn a_pack_along_the_quantized_model_diverges_less() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let from = text("tinystories_valid_30k.txt");
    let calib = ["calib", "--window", "256", "--max-tokens", "6000"];
    run(0, &[&calib[..], &["--hessian"]].concat(), &[("--text", &from), ("--out", &at("float.calib"))]);
    let ptq = ["ptq", "--scheme", "t3", "--group-size", "32", "--keep", "lm_head", "--force"];
    run(0, &ptq, &[("--calib", &at("float.calib")), ("--out", &at("m.json"))]);
    let along = [("--text", &*from), ("--quantized", &*at("m.json"))];
    for (name, threads) in [("along.calib", "1"), ("again.calib", "2")] {
        let words = [&calib[..], &["--threads", threads]].concat();
        run(0, &words, &[&along[..], &[("--out", &*at(name))]].concat());
    }
    let bytes = std::fs::read(at("along.calib")).unwrap();
    assert!(bytes == std::fs::read(at("again.calib")).unwrap(), "other bytes with two threads");

    let statistics = Calibration::open(&at("along.calib")).unwrap();
    let corrected: Vec<_> =
        statistics.sites().filter(|site| site.correction_rows > 0).map(|site| &*site.name).collect();
    assert_eq!(corrected.len(), 10, "two matrices of each of five layers: {corrected:?}");
    assert!(corrected.iter().all(|name| name.ends_with("attention_output") || name.ends_with("mlp_middle")));
    assert!(statistics.sites().all(|site| site.products) && statistics.description().quantized.is_some());

    let float = packed("stories260k");
    let found = ["float.calib", "along.calib"].map(|statistics| {
        let pack = at(&format!("pack-{statistics}"));
        run(0, &["pack"], &[("--q4-map", &at("m.json")), ("--calib", &at(statistics)), ("--out-dir", &pack)]);
        divergence(&pack, float.path())
    });
    assert!(found[1] < 0.9 * found[0], "{found:?}");
}

#[test]
fn statistics_along_a_quantized_model_belong_to_its_manifest() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let from = text("tinystories_valid_30k.txt");
    let calib = ["calib", "--window", "64", "--max-tokens", "200"];
    for (name, scheme) in [("m.json", "nl4"), ("other.json", "int4")] {
        run(0, &["ptq", "--scheme", scheme, "--force"], &[("--out", &at(name))]);
    }
    let out = at("along.calib");
    run(0, &calib, &[("--text", &from), ("--quantized", &at("m.json")), ("--out", &out)]);
    let pack = at("pack");
    let other = [("--q4-map", &*at("other.json")), ("--calib", &*out), ("--out-dir", &*pack)];
    assert!(run(2, &["pack"], &other).contains("along a model that another manifest quantizes"));
    assert!(!pack.exists());
    let refused = run(2, &["ptq", "--bits", "4"], &[("--calib", &out), ("--out", &at("n.json"))]);
    assert!(refused.contains("which only `iec pack` and `iec q4` read"), "{refused}");
    let merged =
        iec().args(["calib", "--merge"]).args([&out, &out]).arg("--out").arg(at("sum.calib")).output().unwrap();
    assert_eq!(merged.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&merged.stderr).contains("cannot be added up"));
    // A manifest that quantizes no tensor of the model.
    std::fs::write(at("empty.json"), "{\"version\": 1}").unwrap();
    let empty = [("--text", &*from), ("--quantized", &*at("empty.json")), ("--out", &*at("x.calib"))];
    assert!(run(2, &calib, &empty).contains("without a tensor of this model"));
    // Damage is found when the file is opened.
    let mut bytes = std::fs::read(&out).unwrap();
    let middle = bytes.len() - 100;
    bytes[middle] ^= 1;
    std::fs::write(&out, bytes).unwrap();
    let own = [("--q4-map", &*at("m.json")), ("--calib", &*out), ("--out-dir", &*pack)];
    assert!(run(1, &["pack"], &own).contains("damaged"));
}
