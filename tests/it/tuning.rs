//! Tests the tuning options of `run` and `bench`: they change no token, the report lists their values, and options
//! without effect are reported.

use crate::common::{iec, packed};
use serde_json::Value;
use std::path::Path;

/// Runs `iec run --json` and returns its JSON line and stderr.
fn run(dir: &Path, options: &[&str], variables: &[(&str, &str)]) -> (Value, String) {
    let mut command = iec();
    command.args(["run", "--prompt", "Once upon a time", "--max-new", "8", "--json", "--model-dir"]).arg(dir);
    let output = command.args(options).envs(variables.iter().copied()).assert().success().get_output().clone();
    (serde_json::from_slice(&output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn no_tuning_option_changes_a_token() {
    let dir = packed("stories260k");
    let (plain, notes) = run(dir.path(), &[], &[]);
    assert!(!notes.contains("no effect"), "{notes}");
    let cases: [&[&str]; 11] = [
        &["--affinity", "compact"],
        &["--affinity", "scatter", "--threads", "1"],
        &["--affinity", "compact", "--threads", "9"],
        &["--prefetch", "on"],
        &["--prefetch", "off"],
        &["--prefetch", "auto"],
        &["--prefetch", "4"],
        &["--pin"],
        &["--pretranspose", "all"],
        &["--pretranspose", "woh"],
        &["--numa", "none"],
    ];
    for options in cases {
        let (line, _) = run(dir.path(), options, &[]);
        assert_eq!(line["tokens"], plain["tokens"], "{options:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn the_report_says_which_processors_the_threads_were_bound_to() {
    let dir = packed("stories260k");
    let (free, _) = run(dir.path(), &["--threads", "1"], &[]);
    assert_eq!((&free["placement"]["affinity"], &free["placement"]["numa"]), (&"auto".into(), &"none".into()));
    assert_eq!(free["placement"]["threads"], serde_json::json!([]));
    let (bound, _) = run(dir.path(), &["--threads", "1"], &[("IEC_AFFINITY", "scatter")]);
    assert_eq!(bound["placement"]["affinity"], "scatter");
    let threads = bound["placement"]["threads"].as_array().unwrap();
    assert_eq!((threads.len(), threads[0].as_array().unwrap().len()), (1, 1));
}

#[test]
fn what_has_no_effect_says_so_once() {
    let dir = packed("stories260k");
    let variables = [("IE_NT_LOADS", "1"), ("IE_L3_BYTES", "32M"), ("IE_PREFETCH_DISTANCE", ""), ("HF_PY", "python3")];
    let (_, notes) = run(dir.path(), &["--pretranspose", "wxh"], &variables);
    for name in ["--pretranspose", "HF_PY", "IE_NT_LOADS", "IE_L3_BYTES"] {
        let said = format!("{name}: accepted, no effect on this backend");
        assert_eq!(notes.matches(&said).count(), 1, "{name}: {notes}");
    }
    assert!(!notes.contains("IE_PREFETCH_DISTANCE"), "{notes}");
    let (_, quiet) = run(dir.path(), &["--quiet", "--pretranspose", "wxh"], &variables);
    assert_eq!(quiet, "");
    let help = iec().args(["bench", "--help"]).assert().success().get_output().clone();
    let help = String::from_utf8(help.stdout).unwrap();
    for name in ["IE_PREFETCH_DISTANCE", "IE_NT_LOADS", "IE_L3_BYTES", "IE_NT_THRESHOLD_RATIO", "--pretranspose"] {
        assert!(help.contains(name), "{name}");
    }
}

#[test]
fn a_memory_node_that_is_not_there_is_an_engine_error() {
    let dir = packed("stories260k");
    let output = iec()
        .args(["run", "--prompt", "a", "--numa", "node:999", "--model-dir"])
        .arg(dir.path())
        .assert()
        .code(5)
        .get_output()
        .clone();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("found node 999") && text.contains("help:"), "{text}");
    for wrong in [
        ["--numa", "nodes"],
        ["--prefetch", "maybe"],
        ["--prefetch", "0"],
        ["--affinity", "near"],
        ["--pretranspose", "some"],
    ] {
        iec().args(["run", "--prompt", "a", "--model-dir"]).arg(dir.path()).args(wrong).assert().code(2);
    }
}

#[test]
fn inspect_tells_the_processors_and_memory_nodes() {
    let dir = packed("stories260k");
    let output = iec().args(["inspect", "--json"]).arg(dir.path()).assert().success().get_output().clone();
    let machine = &serde_json::from_slice::<Value>(&output.stdout).unwrap()["machine"];
    let processors = machine["processors"].as_array().unwrap().len() as u64;
    let cores = machine["cores"].as_u64().unwrap();
    assert!(processors >= 1 && (1..=processors).contains(&cores), "{machine}");
    assert!(machine["nodes"].is_array());
}
