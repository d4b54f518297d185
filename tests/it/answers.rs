//! Tests `iec ptq` with quality gates on the output of the whole model: measurement, repair, refusal, and the
//! evidence that packs carry.

use crate::common::{fixture, iec};
use iec::manifest::Manifest;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;
use tempfile::TempDir;

const TEXT: &str = "tests/text/tinystories_valid_30k.txt";

fn text() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(TEXT)
}

/// Runs `iec ptq` on the embedded model with a gate measured on six windows of the text.
fn ptq(out: &Path, arguments: &[&str]) -> Output {
    let mut command = iec();
    command.arg("ptq").arg("--hf-dir").arg(fixture("stories260k")).args(["--bits", "4", "--gate", "cosine=0.9"]);
    command.args(["--gate", "cosine-min=0.5", "--gate-windows", "6", "--gate-text"]).arg(text());
    command.arg("--overwrite").arg("--out").arg(out).args(arguments).output().unwrap()
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Lists the file names in a directory, hidden ones included.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_content_gate_leaves_its_evidence_in_manifest_and_pack() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("manifest.json");
    let done = ptq(&out, &["--gate", "kl=0.5", "--gate", "ppl=+50%", "--gate", "top1=50%", "--json"]);
    assert_eq!(done.status.code(), Some(0), "{}", words(&done));
    assert_eq!(names(dir.path()), ["manifest.json"]);
    let summary: Value = serde_json::from_slice(&done.stdout).unwrap();
    let manifest = Manifest::load(&out).unwrap();
    let evidence = manifest.document().evidence.clone().unwrap();
    assert_eq!(summary["evidence"], serde_json::to_value(&evidence).unwrap());
    assert_eq!((evidence.window, evidence.scored), (512, 6 * 255));
    assert_eq!(evidence.text.bytes, std::fs::metadata(text()).unwrap().len());
    assert!(evidence.objections.is_empty() && evidence.promoted.is_empty());
    let f = evidence.figures;
    assert!(
        f.kl > 0.0 && f.kl < 0.2 && f.kl_stderr < f.kl && f.top1_agreement > 0.7 && f.top1_agreement < 1.0,
        "{f:?}"
    );
    assert!(f.perplexity_ratio > 1.0 && f.perplexity_ratio < 1.2, "{f:?}");

    let pack = dir.path().join("pack");
    let packed = |more: &[&str]| {
        let mut command = iec();
        command.arg("pack").arg("--hf-dir").arg(fixture("stories260k")).arg("--q4-map").arg(&out);
        command.arg("--out-dir").arg(&pack).arg("--overwrite").args(more).assert().success();
        let description = std::fs::read(pack.join("model.ie.json")).unwrap();
        serde_json::from_slice::<Value>(&description).unwrap()["quality"].clone()
    };
    let quality = packed(&[]);
    assert_eq!(quality["evidence"], summary["evidence"]);
    assert_eq!(quality["gate"]["kl"], 0.5);
    let shown = iec().arg("inspect").arg(&pack).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains("same most likely token"), "{shown:?}");
    evidence_can_be_measured_again(&pack);
    // With another type of floats the model differs from the measured one, so the pack has no evidence.
    assert!(packed(&["--dtype", "fp16"])["evidence"].is_null());
}

fn evidence_can_be_measured_again(pack: &Path) {
    let verify = |text: &Path| {
        let mut command = iec();
        command
            .args(["verify", "--gate", "--json", "--model-dir"])
            .arg(pack)
            .arg("--hf-dir")
            .arg(fixture("stories260k"));
        let output = command.arg("--gate-text").arg(text).output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        let report: Value = stdout.lines().next().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default();
        (output.status.code(), report, words(&output))
    };
    let (code, report, words) = verify(&text());
    assert_eq!((code, &report["ok"]), (Some(0), &Value::Bool(true)), "{words}");
    assert_eq!(report["gate"]["recorded"], report["gate"]["found"]);
    let (code, _, words) = verify(&fixture("stories260k").join("config.json"));
    assert!(code == Some(2) && words.contains("another text than that of the gate"), "{code:?} {words}");

    let json = pack.join("model.ie.json");
    let sealed = std::fs::read_to_string(&json).unwrap();
    crate::checkpoint::without_digest(pack);
    let told = std::fs::read_to_string(&json).unwrap();
    let mut lie: Value = serde_json::from_str(&told).unwrap();
    lie["quality"]["evidence"]["figures"]["kl"] = 0.000001.into();
    std::fs::write(&json, lie.to_string()).unwrap();
    let (code, report, words) = verify(&text());
    assert_eq!((code, &report["gate"]["differs"]), (Some(4), &Value::Bool(true)), "{words}");
    assert!(words.contains("expected 0.000001"), "{words}");
    let mut empty: Value = serde_json::from_str(&told).unwrap();
    empty["quality"]["evidence"]["scored"] = 0.into();
    empty["quality"]["evidence"]["figures"]["perplexity"] = 1e300.into();
    std::fs::write(&json, empty.to_string()).unwrap();
    let (code, _, words) = verify(&text());
    assert!(code == Some(1) && words.contains("without scored tokens"), "{code:?} {words}");
    let shown = iec().arg("inspect").arg(pack).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("1.000e300") && shown.lines().all(|line| line.chars().count() < 200), "{shown}");
    // The recorded figures are true but fail a stricter gate.
    let mut strict: Value = serde_json::from_str(&told).unwrap();
    strict["quality"]["gate"]["kl"] = 0.0001.into();
    std::fs::write(&json, strict.to_string()).unwrap();
    let (code, _, words) = verify(&text());
    assert!(code == Some(4) && words.contains("above 0.0001"), "{code:?} {words}");
    std::fs::write(&json, sealed).unwrap();
}

#[test]
fn the_report_shows_errors_sizes_the_gate_weights_and_texts() {
    let dir = TempDir::new().unwrap();
    let [out, page] = ["manifest.json", "report.html"].map(|name| dir.path().join(name));
    let refused = ptq(
        &out,
        &[
            "--gate",
            "kl=0.0001",
            "--report-tensor",
            "model.layers.1.mlp.up_proj.weight",
            "--report",
            page.to_str().unwrap(),
        ],
    );
    assert_eq!(refused.status.code(), Some(4), "{}", words(&refused));
    assert_eq!(names(dir.path()), ["report.html"]);
    let text = std::fs::read_to_string(&page).unwrap();
    for part in [
        ">refused<",
        "is above 0.0001",
        "Divergence of each tensor on its own",
        "up_proj, layer 4: ",
        "Where the bytes are",
        "The weights of model.layers.1.mlp.up_proj.weight",
        "class=\"outline\"",
        "<th>floats</th><th>quantized</th>",
        "<mark>",
    ] {
        assert!(text.contains(part), "no `{part}` in the page");
    }
    assert!(!text.contains("://") && !text.contains("<script") && !text.contains("NaN"));
    for (bad, why) in [(out.clone(), "name the same file"), (dir.path().join("no/page.html"), "No such file")] {
        let refused = ptq(&out, &["--report", bad.to_str().unwrap()]);
        assert!(!refused.status.success() && words(&refused).contains(why), "{}", words(&refused));
    }
    let unknown = ptq(&out, &["--report", page.to_str().unwrap(), "--report-tensor", "model.norm.weight"]);
    assert!(unknown.status.code() == Some(2) && words(&unknown).contains("model.norm.weight"), "{}", words(&unknown));
}

#[test]
fn a_refusal_names_the_tensors_that_hurt_and_leaves_nothing_behind() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("manifest.json");
    let refused = ptq(&out, &["--gate", "kl=0.0001"]);
    assert_eq!(refused.status.code(), Some(4), "{}", words(&refused));
    for part in ["divergence", "above 0.0001", "divergence of single tensors: model.layers.", "--keep-failing"] {
        assert!(words(&refused).contains(part), "`{}` should say `{part}`", words(&refused));
    }
    assert!(names(dir.path()).is_empty());
    let forced = ptq(&out, &["--gate", "kl=0.0001", "--force"]);
    assert_eq!(forced.status.code(), Some(0), "{}", words(&forced));
    let document = Manifest::load(&out).unwrap().document().clone();
    assert!(document.refused && !document.evidence.unwrap().objections.is_empty());
}

#[test]
fn what_hurts_most_gets_more_bits_until_the_gate_is_content() {
    let dir = TempDir::new().unwrap();
    let [out, again] = ["a.json", "b.json"].map(|name| dir.path().join(name));
    let plain = ptq(&out, &["--gate", "kl=1"]);
    assert_eq!(plain.status.code(), Some(0), "{}", words(&plain));
    let before = Manifest::load(&out).unwrap().document().evidence.clone().unwrap();
    let goal = format!("kl={}", before.figures.kl / 2.0);
    let repaired = ptq(&out, &["--gate", &goal, "--keep-failing", "int8", "--threads", "1"]);
    assert_eq!(repaired.status.code(), Some(0), "{}", words(&repaired));
    let document = Manifest::load(&out).unwrap().document().clone();
    let evidence = document.evidence.clone().unwrap();
    assert!(evidence.figures.kl <= before.figures.kl / 2.0);
    assert!(evidence.bits_per_weight > before.bits_per_weight);
    assert!((1..35).contains(&evidence.promoted.len()), "{:?}", evidence.promoted);
    for promotion in &evidence.promoted {
        assert_eq!((&promotion.from[..], &promotion.to[..]), ("q4_0", "int8/row"));
        assert!(words(&repaired).contains(&promotion.tensor));
        assert_eq!(document.tensors[&promotion.tensor].quant.unwrap().spec.scheme, iec::scheme::Scheme::Int8);
    }
    let other_threads = ptq(&again, &["--gate", &goal, "--keep-failing", "int8", "--threads", "3"]);
    assert_eq!(other_threads.status.code(), Some(0), "{}", words(&other_threads));
    assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(&again).unwrap());

    let most = format!("{}", (before.bits_per_weight + evidence.bits_per_weight) / 2.0);
    let bounded = ptq(&again, &["--gate", &goal, "--keep-failing", "int8", "--max-bpw", &most, "--force"]);
    assert_eq!(bounded.status.code(), Some(0), "{}", words(&bounded));
    let bounded = Manifest::load(&again).unwrap().document().evidence.clone().unwrap();
    assert!(bounded.bits_per_weight <= most.parse().unwrap() && !bounded.promoted.is_empty());
    assert!(bounded.figures.kl < before.figures.kl && !bounded.objections.is_empty());
}

#[test]
fn a_gate_on_answers_needs_a_text() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("manifest.json");
    let says = |arguments: &[&str], part: &str| {
        let output = iec().arg("ptq").arg("--out").arg(&out).args(["--bits", "4"]).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", words(&output));
        assert!(words(&output).contains(part), "`{}` should say `{part}`", words(&output));
    };
    let checkpoint = fixture("stories260k");
    let checkpoint = checkpoint.to_str().unwrap();
    says(&["--hf-dir", checkpoint, "--gate", "kl=0.1"], "--gate-text");
    says(&["--hf-dir", checkpoint, "--max-bpw", "5"], "--gate-text");
    let short = dir.path().join("short.txt");
    std::fs::write(&short, "Once").unwrap();
    says(
        &[
            "--hf-dir",
            checkpoint,
            "--gate",
            "cosine=0.9",
            "--gate",
            "cosine-min=0",
            "--gate-text",
            short.to_str().unwrap(),
        ],
        "window",
    );
    assert_eq!(names(dir.path()), ["short.txt"]);
}
