//! Files of Python programs may have `NaN`, `Infinity` and `-Infinity`, which are no JSON.

use crate::common::{fixture, iec};
use std::path::Path;
use tempfile::TempDir;

/// Copies a checkpoint, and adds a field at the beginning of one of its files.
fn with_field(file: &str, field: &str) -> TempDir {
    let home = tempfile::tempdir().unwrap();
    let source = home.path().join("source");
    let copied = std::process::Command::new("cp").arg("-r").arg(fixture("llama-gqa")).arg(&source).status();
    assert!(copied.is_ok_and(|status| status.success()));
    let path = source.join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|_| "{\"unused\": 1}".into());
    std::fs::write(path, text.replacen('{', &format!("{{{field}, "), 1)).unwrap();
    home
}

fn run(line: &str, home: &Path) -> (Option<i32>, String) {
    let output = iec().current_dir(home).args(line.split(' ')).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

#[test]
fn numbers_that_are_no_json_are_read_in_unused_fields() {
    let mut wrong = Vec::new();
    for (file, field) in [
        ("config.json", "\"time_step_limit\": [0.0, Infinity]"),
        ("config.json", "\"a\": {\"b\": [-Infinity, NaN]}"),
        ("generation_config.json", "\"a\": NaN"),
        ("tokenizer_config.json", "\"model_max_length\": Infinity"),
        ("special_tokens_map.json", "\"a\": NaN"),
    ] {
        let home = with_field(file, field);
        for line in [
            "pack --hf-dir source --out-dir pack",
            "inspect source",
            "inspect pack",
            "show source",
            "run --model-dir pack --prompt a --max-new 2 --ignore-eos",
            "unpack --model-dir pack --out-dir again",
            "pack --hf-dir again --out-dir twice",
            "export-gguf --model-dir pack --out model.gguf",
            #[cfg(feature = "reference")]
            "verify --model-dir pack --hf-dir source --max-new 2",
        ] {
            let (code, said) = run(line, home.path());
            if code != Some(0) {
                wrong.push(format!("{field} in {file}: {line}: {said}"));
            }
        }
        let [before, after] =
            ["source", "again"].map(|dir| std::fs::read(home.path().join(dir).join(file)).unwrap_or_default());
        if file == "config.json" && before != after {
            wrong.push(format!("{field}: unpack changes {file}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_error_names_the_used_field_that_has_such_a_number() {
    let mut wrong = Vec::new();
    for (field, number) in [("rope_theta", "Infinity"), ("hidden_size", "NaN"), ("rms_norm_eps", "-Infinity")] {
        let home = with_field("generation_config.json", "\"a\": 1");
        let path = home.path().join("source/config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config[field] = "PLACE".into();
        std::fs::write(&path, config.to_string().replace("\"PLACE\"", number)).unwrap();
        let (code, said) = run("pack --hf-dir source --out-dir pack", home.path());
        if code != Some(1) || !said.contains(field) || !said.contains(number) || !said.contains("no JSON number") {
            wrong.push(format!("{field}: {code:?} {said}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
