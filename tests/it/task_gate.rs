//! Tests `iec ptq --gate task=FILE:-X%`: the accuracy of the quantized model on a file of questions is compared with
//! that of the float model, refused or repaired, recorded, and measured again by `iec verify --gate`.

use crate::common::{fixture, iec, packed};
use iec::manifest::Manifest;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Output;
use tempfile::TempDir;

fn text() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(crate::eval::TEXT)
}

/// Writes questions that the float model answers correctly: which of two words continues a text.
fn questions(dir: &Path) -> PathBuf {
    let text = std::fs::read_to_string(text()).unwrap();
    let words: Vec<&str> = text.split_whitespace().collect();
    let question = |at: usize| {
        let choices = [words[at], words[at + 40]];
        json!({"query": words[at - 12..at].join(" "), "choices": choices, "answer": 0})
    };
    let all: Vec<Value> = (0..80).map(|n| question(20 + 7 * n)).collect();
    let (file, details) = (dir.join("questions.jsonl"), dir.join("details.jsonl"));
    let write = |lines: &[&Value]| {
        std::fs::write(&file, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    };
    write(&all.iter().collect::<Vec<_>>());
    let float = packed("stories260k");
    let mut command = iec();
    command.args(["eval", "--precision", "fp32", "--choices"]).arg(&file).arg("--details").arg(&details);
    command.arg(float.path()).assert().success();
    let answers = std::fs::read_to_string(&details).unwrap();
    let answers: Vec<Value> = answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    std::fs::remove_file(&details).unwrap();
    let right: Vec<&Value> =
        all.iter().zip(&answers).filter(|(_, a)| a["chosen"] == a["answer"]).map(|(q, _)| q).collect();
    assert!((40..80).contains(&right.len()), "{}", right.len());
    write(&right);
    file
}

/// Quantizes the embedded model; `clamp` limits its weights.
fn ptq(out: &Path, clamp: &str, gates: &[String], more: &[&str]) -> Output {
    let mut command = iec();
    command.arg("ptq").arg(fixture("stories260k")).args(["--bits", "4", "--clamp", clamp, "--overwrite"]);
    command.args(["--gate", "cosine=0", "--gate", "cosine-min=0"]);
    command.args(gates.iter().flat_map(|gate| ["--gate", gate]));
    command.arg("--out").arg(out).args(more).output().unwrap()
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn task(file: &Path, drop: &str) -> String {
    format!("task={}:-{drop}%", file.display())
}

/// Weight limit that changes no weight, and one that damages the model.
const HARMLESS: &str = "100";
const HARMFUL: &str = "0.02";

#[test]
fn a_gate_on_tasks_leaves_its_evidence_in_manifest_and_pack() {
    let dir = TempDir::new().unwrap();
    let (file, out, pack) = (questions(dir.path()), dir.path().join("manifest.json"), dir.path().join("pack"));
    let gsm = dir.path().join("gsm.jsonl");
    std::fs::write(&gsm, "{\"question\": \"How many?\", \"answer\": \"#### 2\"}\n").unwrap();
    let done = ptq(&out, HARMLESS, &[task(&file, "60"), task(&gsm, "0")], &["--json"]);
    assert_eq!(done.status.code(), Some(0), "{}", words(&done));
    assert!(words(&done).contains("multiple choice questions.jsonl"), "{}", words(&done));
    let document = Manifest::load(&out).unwrap().document().clone();
    let [first, second] = &document.task_evidence[..] else { panic!("{:?}", document.task_evidence) };
    assert_eq!((first.reference_accuracy, first.precision.as_str()), (1.0, "int4"));
    assert!(
        first.accuracy > 0.5 && (first.difference - first.accuracy + 1.0).abs() < 1e-12 && first.objection.is_none()
    );
    assert_eq!(first.file.bytes, std::fs::metadata(&file).unwrap().len());
    assert_eq!((second.task.as_str(), second.questions), ("GSM8K", 1));
    let bound = &document.gate.as_ref().unwrap().tasks[0];
    assert_eq!((bound.file.as_str(), bound.largest_drop), ("questions.jsonl", 0.6));
    let recorded = std::fs::read_to_string(&out).unwrap();
    assert!(!recorded.contains(dir.path().to_str().unwrap()), "the manifest has no paths of its machine");

    let mut command = iec();
    command.arg("pack").arg(fixture("stories260k")).arg("--q4-map").arg(&out).arg("--out-dir").arg(&pack);
    command.assert().success();
    let shown = iec().arg("inspect").arg(&pack).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("accuracy on questions.jsonl at most 60.00 points lower"), "{shown}");
    assert!(shown.contains("questions.jsonl (multiple choice): ") && shown.contains("after 100.00 %"), "{shown}");
    measured_again(&pack, &[&file, &gsm]);
}

/// Checks that `iec verify --gate` measures the accuracies again and finds those that are not true.
fn measured_again(pack: &Path, files: &[&Path]) {
    let verify = |files: &[&Path]| {
        let mut command = iec();
        command.args(["verify", "--gate", "--json", "--hf-dir"]).arg(fixture("stories260k")).arg(pack);
        command.args(files.iter().map(|file| format!("--gate-task={}", file.display())));
        let output = command.output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        let report: Value = stdout.lines().next().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default();
        (output.status.code(), report, words(&output))
    };
    let (code, report, said) = verify(files);
    assert_eq!((code, &report["gate"]["differs"]), (Some(0), &json!(false)), "{said}");
    assert_eq!(report["gate"]["tasks"][0]["recorded"], report["gate"]["tasks"][0]["found"]);
    let (code, _, said) = verify(&files[1..]);
    assert!(code == Some(2) && said.contains("--gate-task") && said.contains("`questions.jsonl`"), "{said}");
    let json = pack.join("model.ie.json");
    crate::checkpoint::without_digest(pack);
    let mut description: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    description["quality"]["task_evidence"][0]["accuracy"] = 0.123.into();
    std::fs::write(&json, description.to_string()).unwrap();
    let (code, report, said) = verify(files);
    assert_eq!((code, &report["gate"]["differs"]), (Some(4), &json!(true)), "{said}");
    assert!(said.contains("expected 12.30 % after 100.00 %"), "{said}");
    description["quality"]["task_evidence"] = json!([]);
    std::fs::write(&json, description.to_string()).unwrap();
    assert_eq!(verify(files).0, Some(2));
}

#[test]
fn a_model_that_answers_worse_is_refused_or_repaired() {
    let dir = TempDir::new().unwrap();
    let (file, out) = (questions(dir.path()), dir.path().join("manifest.json"));
    let gate = [task(&file, "5")];
    let refused = ptq(&out, HARMFUL, &gate, &[]);
    assert_eq!(refused.status.code(), Some(4), "{}", words(&refused));
    let expected = "the gate refuses the model's outputs: accuracy on questions.jsonl drops by ";
    assert!(words(&refused).contains(expected), "{}", words(&refused));
    assert!(!out.exists());
    let forced = ptq(&out, HARMFUL, &gate, &["--force"]);
    assert_eq!(forced.status.code(), Some(0), "{}", words(&forced));
    let document = Manifest::load(&out).unwrap().document().clone();
    assert!(document.refused && document.task_evidence[0].objection.is_some() && document.evidence.is_none());

    let (story, repair) = (text(), ["--keep-failing", "fp16"]);
    let without_text = ptq(&out, HARMFUL, &gate, &repair);
    assert_eq!(without_text.status.code(), Some(2), "{}", words(&without_text));
    assert!(words(&without_text).contains("--gate-text"), "{}", words(&without_text));
    let on_text = [&repair[..], &["--gate-windows", "3", "--gate-text", story.to_str().unwrap()]].concat();
    let repaired = ptq(&out, HARMFUL, &gate, &on_text);
    assert_eq!(repaired.status.code(), Some(0), "{}", words(&repaired));
    let document = Manifest::load(&out).unwrap().document().clone();
    assert!(!document.evidence.unwrap().promoted.is_empty() && !document.refused);
    let evidence = &document.task_evidence[0];
    assert!(evidence.difference >= -0.05 && evidence.objection.is_none(), "{evidence:?}");
}

#[test]
fn unsuitable_files_are_refused_before_the_work() {
    let dir = TempDir::new().unwrap();
    let (file, out) = (dir.path().join("file"), dir.path().join("manifest.json"));
    let code = r#"{"task_id": "t", "prompt": "p", "entry_point": "f", "canonical_solution": "", "test": ""}"#;
    for (text, exit, expected) in [
        (code, 2, "found HumanEval, whose answers are programs"),
        ("a,b\n", 1, "found no questions of a known form"),
        ("{\"query\": \"q\", \"choices\": [\"a\"], \"answer\": 4}", 1, "line 1: found no valid `answer`"),
    ] {
        std::fs::write(&file, text).unwrap();
        let output = ptq(&out, HARMLESS, &[task(&file, "1")], &[]);
        assert!(output.status.code() == Some(exit) && words(&output).contains(expected), "{}", words(&output));
    }
    let nameless = ptq(&out, HARMLESS, &["task=file:1%".into()], &[]);
    assert!(nameless.status.code() == Some(2) && words(&nameless).contains("task=FILE:-X%"), "{}", words(&nameless));
    let missing = ptq(&out, HARMLESS, &[task(&dir.path().join("none"), "1")], &[]);
    assert_eq!(missing.status.code(), Some(1), "{}", words(&missing));
    std::fs::write(&file, "{\"query\": \"q\", \"choices\": [\"a\"], \"answer\": 0}").unwrap();
    let replaced = ptq(&file, HARMLESS, &[task(&file, "1")], &[]);
    assert_eq!(replaced.status.code(), Some(2), "{}", words(&replaced));
}
