//! Tests `iec eval --kv-gate`: the verdict about a type of the KV cache is kept beside the pack, and all commands that
//! run the model know it.

use crate::common::{iec, packed};
use std::path::Path;
use std::process::Output;
use std::time::Duration;

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/text/heldback_sherlock_40k.txt");
const FILE: &str = "model.ie.kv.json";

fn eval(pack: &Path, kv: &str) -> (i32, serde_json::Value, String) {
    let mut command = iec();
    command.args(["eval", "--text", TEXT, "--windows", "2", "--kv", kv, "--kv-gate", "--json"]).arg(pack);
    let Output { status, stdout, stderr } = command.output().unwrap();
    let stdout = String::from_utf8(stdout).unwrap();
    // The error of a refusal follows as a second line.
    let line = stdout.lines().next().unwrap();
    (status.code().unwrap(), serde_json::from_str(line).unwrap(), String::from_utf8(stderr).unwrap())
}

fn run(pack: &Path, options: &[&str]) -> (i32, String) {
    let output = iec().args(["run", "--prompt", "Once", "--max-new", "2"]).args(options).arg(pack).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_kv_type_that_raises_the_perplexity_is_refused_for_this_pack() {
    // Heads of 8 values lose much with 4 bits and nothing with 8.
    let pack = packed("stories260k");
    let pack = pack.path();
    let (code, stderr) = run(pack, &["--kv", "int4"]);
    assert!(code == 0 && stderr.contains("was not measured"), "{stderr}");

    let (code, line, stderr) = eval(pack, "int4");
    let gate = &line["kv_gate"];
    assert!(code == 4 && stderr.contains("expected at most +0.5 %") && stderr.contains(FILE), "{stderr}");
    assert_eq!((&gate["passes"], &gate["baseline_kv"]), (&false.into(), &"f32".into()));
    let increase = 100.0 * (number(&line["perplexity"]["value"]) / number(&gate["baseline_perplexity"]) - 1.0);
    assert!(increase > 5.0 && (increase - number(&gate["increase_percent"])).abs() < 1e-9, "{line}");
    let (code, line, stderr) = eval(pack, "int8");
    assert!(code == 0 && line["kv_gate"]["passes"] == true, "{line} {stderr}");

    let (code, stderr) = run(pack, &["--kv", "int4"]);
    assert!(code == 4 && stderr.contains("% higher than with --kv f32") && stderr.contains(FILE), "{stderr}");
    for options in [&["--kv", "int8"][..], &[]] {
        let (code, stderr) = run(pack, options);
        assert!(code == 0 && !stderr.contains("was not measured"), "{stderr}");
    }
    // Measuring again is possible, and every command that only uses the type refuses it in the same words.
    assert_eq!(eval(pack, "int4").0, 4);
    let commands: [&[&str]; 8] = [
        &["run", "--prompt", "Once"],
        &["run", "--plan"],
        &["chat", "--prompt", "Once", "--chat-template", "chatml"],
        &["bench", "--max-new", "1"],
        &["eval", "--text", TEXT, "--windows", "1"],
        &["verify", "--hf-dir", concat!(env!("CARGO_MANIFEST_DIR"), "/assets/stories260k"), "--max-new", "1"],
        &["serve", "--check"],
        &["serve", "--port", "0"],
    ];
    for command in commands {
        let mut command_line = iec();
        command_line.args(command).args(["--kv", "int4"]).arg(pack).timeout(Duration::from_secs(60));
        let output = command_line.output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        let refused = output.status.code() == Some(4) && stderr.contains("% higher than with --kv f32");
        assert!(refused && stderr.contains("help: use --kv f32"), "{command:?}: {:?} {stderr}", output.status);
    }

    let (file, text) = (pack.join(FILE), std::fs::read_to_string(pack.join(FILE)).unwrap());
    let planted = |from: &str, to: &str| {
        assert!(text.contains(from), "{text}");
        std::fs::write(&file, text.replace(from, to)).unwrap();
        run(pack, &["--kv", "int4"])
    };
    let (code, stderr) = planted("\"pack_sha256\": \"", "\"pack_sha256\": \"0");
    assert!(code == 0 && stderr.contains("was not measured"), "another pack: {stderr}");
    for (from, to, expected) in [
        ("\"schema_version\": 1", "\"schema_version\": 2", "found schema_version 2, expected 1"),
        ("\"perplexity\": ", "\"perplexity\": -", "expected numbers of at least 1"),
        ("\"kv\"", "\"type\"", "invalid verdicts about KV caches"),
        ("{", "", "invalid verdicts about KV caches"),
    ] {
        let (code, stderr) = planted(from, to);
        assert!(code == 1 && stderr.contains(expected) && stderr.contains("remove the file"), "{code} {stderr}");
    }
    std::fs::remove_file(&file).unwrap();
    assert_eq!(run(pack, &["--kv", "int4"]).0, 0);
}

fn number(value: &serde_json::Value) -> f64 {
    value.as_f64().unwrap()
}
