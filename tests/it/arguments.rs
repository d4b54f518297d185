//! Tests error messages for mistyped arguments and paths: they state what was found, what was expected, and what to
//! type instead.

use crate::common::{fixture, iec};
use std::path::PathBuf;

/// Returns a pack of the smallest fixture, which is made once.
fn pack() -> &'static PathBuf {
    static PACK: std::sync::LazyLock<(tempfile::TempDir, PathBuf)> = std::sync::LazyLock::new(|| {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("pack");
        iec().args(["pack", "--hf-dir"]).arg(fixture("stories260k")).arg("--out-dir").arg(&out).assert().success();
        (dir, out)
    });
    &PACK.1
}

/// Runs `iec run` on the pack with these further arguments and returns exit code and stderr.
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
    let output = iec().args(["tensor-map", "--out", "-", "--model-dir"]).arg(fixture("stories260k")).output().unwrap();
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
    std::fs::write(&file, "{\"prompt\":\"a\",\"temprature\":0.9}\n").unwrap();
    let (code, stderr) = run(&["--prompts-file", file.to_str().unwrap()]);
    assert_ne!(code, 0, "{stderr}");
    assert!(stderr.contains("unknown field `temprature`") && stderr.contains("`temperature`"), "{stderr}");
}

#[test]
fn arguments_that_are_not_utf_8_do_not_panic() {
    use std::os::unix::ffi::OsStrExt;
    let word = std::ffi::OsStr::from_bytes(b"\xff");
    for words in [vec![word], vec!["--version".as_ref(), word], vec!["--version".as_ref(), "-v".as_ref(), word]] {
        let status = iec().args(&words).output().unwrap().status;
        assert!(matches!(status.code(), Some(0 | 2)), "{words:?}: {status}");
    }
}

#[test]
fn empty_stop_texts_and_contexts_are_usage_errors() {
    for (args, said) in
        [(["--stop", ""], "--stop: found an empty text"), (["--ctx", "0"], "--ctx: found 0 tokens, expected 1 to")]
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

#[test]
fn variables_without_a_prefix_act_on_bench_only() {
    let run = |command: &str, variables: &[(&str, &str)]| {
        let mut iec = iec();
        iec.args([command, "--max-new", "2", "--json", "--model-dir"]).arg(pack());
        if command == "run" {
            iec.args(["--prompt", "a"]);
        }
        let output = iec.envs(variables.iter().copied()).output().unwrap();
        let line = String::from_utf8(output.stdout).unwrap();
        (output.status.code().unwrap(), line, String::from_utf8(output.stderr).unwrap())
    };
    let common = [
        ("THREADS", "many"),
        ("PRECISION", "int9"),
        ("AFFINITY", "x"),
        ("PREFETCH", "x"),
        ("REPORT", "x"),
        ("BATCH", "x"),
    ];
    let (code, _, stderr) = run("run", &common);
    assert_eq!((code, stderr.contains("environment")), (0, false), "{stderr}");
    for (name, value) in common.into_iter().filter(|(name, _)| *name != "REPORT") {
        let (code, line, stderr) = run("bench", &[(name, value)]);
        assert_eq!(code, 2, "{name}: {stderr}");
        assert!(stderr.contains(&format!("environment variable {name}")), "{name}: {stderr}");
        let error: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&error["schema_version"], &error["error"]["kind"]), (&1.into(), &"usage".into()), "{line}");
    }
    let (code, _, stderr) = run("run", &[("IE_THREADS", "many")]);
    assert!(code == 2 && stderr.contains("IE_THREADS"), "{stderr}");
    assert_eq!(run("bench", &[("THREADS", "auto"), ("IE_THREADS", "many"), ("RUNS", "")]).0, 0);

    let mut unnamed = iec();
    let output = unnamed.args(["run", "--prompt", "a"]).env("MODEL_DIR", "/nowhere/x").output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("the environment variable MODEL_DIR"), "{stderr}");
}

#[test]
fn commands_of_similar_programs_are_answered_with_ours() {
    for (name, expected) in [("server", "iec serve"), ("quantize", "iec pack"), ("packs", "'pack'")] {
        let output = iec().arg(name).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(expected) && !stderr.contains("merge"), "{name}: {stderr}");
    }
}

#[test]
fn groups_of_options_in_the_short_help_do_not_run_into_each_other() {
    let help = |option: &str| String::from_utf8(iec().args(["run", option]).output().unwrap().stdout).unwrap();
    let (short, long) = (help("-h"), help("--help"));
    assert!(!short.contains("--affinity") && !short.contains("--dedup") && long.contains("--affinity"), "{short}");
    let at = |text: &str| long.find(text).unwrap_or_else(|| panic!("{text}: {long}"));
    assert!(at("--prompt <TEXT>") < at("\nTuning:") && at("--json") < at("\nTuning:"), "{long}");
}

#[test]
fn a_prompt_that_is_too_long_fails_alone_and_a_full_context_is_noted() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let long = "once upon a time there was a girl ".repeat(9);
    std::fs::write(file.path(), format!("Once\n{long}\nThe\n")).unwrap();
    let prompts = ["--prompts-file", file.path().to_str().unwrap()];
    let output =
        iec().args(["run", "--ctx", "40", "--max-new", "3", "--model-dir"]).arg(pack()).args(prompts).output().unwrap();
    let (stdout, stderr) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("1 of 3 prompts were not continued: prompt 1: "), "{stderr}");
    let texts: Vec<&str> = stdout.split("== prompt ").skip(1).collect();
    assert!(texts.len() == 3 && texts[0].len() > 6 && texts[1].trim() == "1 ==" && texts[2].len() > 6, "{stdout}");

    let (code, stderr) = run(&["--ctx", "6", "--max-new", "50", "--prompt", "Once upon a time"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("the context of 6 tokens was full") && stderr.contains("--max-new 50"), "{stderr}");
    // As the only prompt, the same prompt makes the command fail at once.
    let (code, stderr) = run(&["--ctx", "40", "--prompt", &long]);
    assert!(code == 2 && stderr.contains("do not fit the context of 40"), "{stderr}");
}

#[test]
fn the_prompts_file_of_older_guides_is_built_in() {
    let dir = tempfile::tempdir().unwrap();
    let output = iec()
        .args(["bench", "--max-new", "1", "--prompts-file", "manifests/prompts_10..txt", "--model-dir"])
        .arg(pack())
        .current_dir(dir.path())
        .output()
        .unwrap();
    let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(line["prompts_count"], 10);
}

#[test]
fn variables_of_the_predecessor_verify_after_bench_and_check_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let wrong = dir.path().join("wrong.json");
    std::fs::write(&wrong, "[[1]]").unwrap();
    let bench = |variables: &[(&str, &std::path::Path)]| {
        let mut iec = iec();
        iec.args(["bench", "--max-new", "2", "--model-dir"]).arg(pack()).envs(variables.iter().copied());
        let output = iec.output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let checkpoint = fixture("stories260k");
    let (code, stderr) = bench(&[("VERIFY", "1".as_ref()), ("HF_DIR", &checkpoint)]);
    assert!(code == 0 && stderr.contains("320 compared: 320 the same"), "{stderr}");
    let (code, stderr) = bench(&[("VERIFY_HF_IDS", "1".as_ref())]);
    assert!(code == 2 && stderr.contains("--hf-dir"), "{stderr}");
    assert_eq!(bench(&[("VERIFY", "0".as_ref())]).0, 0);
    let (code, stderr) = bench(&[("EXPECTED_TOKENS", &wrong)]);
    assert!(code == 4 && stderr.contains("differ from the expected tokens"), "{stderr}");
}
