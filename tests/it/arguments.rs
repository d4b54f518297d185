//! What people type: near misses of arguments and paths are answered with what was found, what was expected, and what to
//! type instead.

use crate::common::{fixture, iec};
use std::path::PathBuf;

/// A pack of the smallest fixture, made once.
fn pack() -> &'static PathBuf {
    static PACK: std::sync::LazyLock<(tempfile::TempDir, PathBuf)> = std::sync::LazyLock::new(|| {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("pack");
        iec().args(["pack", "--hf-dir"]).arg(fixture("stories260k")).arg("--out-dir").arg(&out).assert().success();
        (dir, out)
    });
    &PACK.1
}

/// Exit code and stderr of `iec run` on the pack, with these further arguments.
fn run(args: &[&str]) -> (i32, String) {
    let output = iec().args(["run", "--model-dir"]).arg(pack()).args(args).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn negative_numbers_are_values_of_their_option() {
    for (option, said) in
        [("--threads", "'-1' for '--threads"), ("--seed", "'-1' for '--seed"), ("--temperature", "temperature")]
    {
        let (code, stderr) = run(&[option, "-1", "--prompt", "a"]);
        assert_eq!(code, 2, "{option}: {stderr}");
        assert!(stderr.contains(said) && !stderr.contains("unexpected"), "{option}: {stderr}");
    }
}

#[test]
fn other_spellings_of_options_and_values_are_accepted() {
    let mut run = iec();
    run.args(["run", "--model"]).arg(pack()).args(["--temp", "0", "--precision", "f32", "--max-new", "2"]);
    run.args(["--prompt", "a"]).assert().success();
    let dir = tempfile::tempdir().unwrap();
    let mut ptq = iec();
    ptq.args(["ptq", "--scheme", "iq4_nl", "--hf-dir"])
        .arg(fixture("stories260k"))
        .arg("--out")
        .arg(dir.path().join("m.json"));
    ptq.assert().success();
    assert!(std::fs::read_to_string(dir.path().join("m.json")).unwrap().contains("\"nl4\""));
}

#[test]
fn a_checkpoint_given_as_a_pack_and_the_reverse_are_named() {
    let output = iec().args(["run", "--prompt", "a", "--model-dir"]).arg(fixture("stories260k")).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("is a Hugging Face checkpoint; make a pack of it: `iec pack --hf-dir"), "{stderr}");

    let dir = tempfile::tempdir().unwrap();
    let output =
        iec().args(["pack", "--hf-dir"]).arg(pack()).arg("--out-dir").arg(dir.path().join("x")).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("found a pack, expected a Hugging Face checkpoint"), "{stderr}");
    assert!(stderr.contains("iec run --model-dir"), "{stderr}");
}

#[test]
fn unknown_fields_of_a_prompts_file_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.jsonl");
    std::fs::write(&file, "{\"prompt\":\"a\",\"temperature\":0.9}\n").unwrap();
    let (code, stderr) = run(&["--prompts-file", file.to_str().unwrap()]);
    assert_ne!(code, 0, "{stderr}");
    assert!(stderr.contains("temperature") && stderr.contains("expected `prompt` or `text`"), "{stderr}");
}

#[test]
fn empty_stop_texts_and_contexts_are_usage_errors() {
    for (args, said) in
        [(["--stop", ""], "--stop: found an empty text"), (["--ctx", "0"], "--ctx 0: found 0 tokens, expected 1 to")]
    {
        let (code, stderr) = run(&[args[0], args[1], "--prompt", "a"]);
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains(said), "{stderr}");
    }
    let (code, stderr) = run(&["--ctx", "99999", "--prompt", "a"]);
    assert_eq!(code, 5, "{stderr}");
}

#[test]
fn the_log_variable_is_a_filter_of_levels() {
    let cases = [
        ("info", Some(false)),
        ("debug", Some(false)),
        ("trace", Some(true)),
        ("2", Some(true)),
        ("hyper=trace,iec=warn", Some(false)),
        ("warn,iec=TRACE", Some(true)),
        ("loud", None),
    ];
    for (filter, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        let mut command = iec();
        command.args(["pack", "--hf-dir"]).arg(fixture("stories260k")).arg("--out-dir").arg(dir.path().join("p"));
        let output = command.env("IEC_LOG", filter).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(if expected.is_some() { 0 } else { 2 }), "{filter}: {stderr}");
        match expected {
            Some(each) => {
                assert_eq!(stderr.contains("model.norm.weight [64]: stored as F32"), each, "{filter}: {stderr}")
            }
            None => assert!(stderr.contains("IEC_LOG: found `loud`, expected off, error"), "{stderr}"),
        }
    }
}

#[test]
fn layers_for_a_gpu_that_is_not_there_are_noted() {
    let mut run = iec();
    run.args(["run", "--device", "auto", "--gpu-layers", "1", "--max-new", "1", "--prompt", "a", "--model-dir"])
        .arg(pack());
    let stderr = String::from_utf8(run.output().unwrap().stderr).unwrap();
    assert!(stderr.contains("the CPU computes: "), "{stderr}");
}
