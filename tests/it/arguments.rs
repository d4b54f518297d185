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
fn a_checkpoint_given_as_a_pack_is_named() {
    let output = iec().args(["tensor-map", "--out", "-", "--model-dir"]).arg(fixture("stories260k")).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("is a Hugging Face checkpoint; make a pack of it: `iec pack --hf-dir"), "{stderr}");
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
fn every_error_has_a_next_step() {
    let (dir, checkpoint) = (tempfile::tempdir().unwrap(), fixture("stories260k").display().to_string());
    let (pack, out) = (pack().display().to_string(), dir.path().join("out").display().to_string());
    let cases: [(&[&str], &str); 10] = [
        (&["pack", &checkpoint, "--q4-map", "nope.json", "--out-dir", &out], "iec ptq --out MANIFEST"),
        (&["bench", &pack, "--prompts-file", "nope.txt"], "have built-in prompts"),
        (&["bench", &pack, "--expected-tokens", "nope.json"], "iec run --trace-ids"),
        (&["bench", &pack, "--runs", "0"], "iec help COMMAND"),
        (&["run", &pack, "-p", "a", "--ctx", "100000"], "leave --ctx out"),
        (&["ptq", &checkpoint, "--scheme", "q4_0", "--group-size", "row", "--out", &out], "choose scheme int4"),
        (&["q4", &checkpoint, "--out-dir", &out, "--model-dir", &pack], "iec help COMMAND"),
        (&["inspect", "nope"], "check the path"),
        (&["ptq", &checkpoint, "--bits", "4", "--out", "no/such/dir/m.json"], "check the path"),
        (&["run", &pack, "-p", "a", "--batch", "0"], "iec help COMMAND"),
    ];
    for (words, expected) in cases {
        let output = iec().args(words).current_dir(dir.path()).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        let help = stderr.lines().find(|line| line.starts_with("help: ")).unwrap_or_default();
        assert!(!output.status.success() && help.contains(expected), "{words:?}: {stderr}");
    }
}

#[test]
fn options_that_select_nothing_are_noted() {
    let dir = tempfile::tempdir().unwrap();
    let out = |name: &str| dir.path().join(name).display().to_string();
    let (manifest, q4, pack) = (out("m.json"), out("q4"), out("pack"));
    let cases: [(&[&str], &str); 5] = [
        (&["q4", "--include-lm-head", "--out-dir", &q4], "--include-lm-head has no effect: the output matrix is tied"),
        (
            &["ptq", "--include-lm-head", "--out", &manifest],
            "--include-lm-head has no effect: the output matrix is tied",
        ),
        (&["ptq", "--overwrite", "--exclude", "nothing", "--out", &manifest], "--exclude nothing has no effect"),
        (&["ptq", "--overwrite", "--gate", "cosine=0.9999", "--force", "--out", &manifest], ""),
        (&["pack", "--dry-run", "--q4-map", &manifest, "--out-dir", &pack], "the gate refused this quantization"),
    ];
    for (words, expected) in cases {
        let output = iec().args(words).arg("--hf-dir").arg(fixture("stories260k")).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(stderr.matches(expected).count().min(1), 1, "{words:?}: {stderr}");
    }
}

#[test]
fn names_and_values_of_similar_programs_and_of_the_predecessor_get_a_tip() {
    let cases: [(&[&str], &str); 28] = [
        (&["hf_to_iebin"], "iec pack CHECKPOINT"),
        (&["hf_to_iebin.py"], "iec pack CHECKPOINT"),
        (&["scripts/hf_to_iebin_stream_pt.py"], "iec pack CHECKPOINT"),
        (&["ptq_from_hf"], "iec ptq CHECKPOINT"),
        (&["ptq-from-bin"], "iec ptq --model-dir PACK"),
        (&["gen_q4_bytes_stream"], "iec q4 CHECKPOINT"),
        (&["append_q4_attn_from_hf.py"], "--append-attn"),
        (&["run_quant_and_dedup.sh"], "iec dedup"),
        (&["rebuild_dedup_and_quant"], "--restore"),
        (&["make_tensor_map_from_iejson"], "iec tensor-map"),
        (&["verify_hf_generation_ids"], "iec verify"),
        (&["build-cuda"], "cargo build"),
        (&["build"], "cargo build"),
        (&["bench-report"], "--report-root"),
        (&["inference-engine"], "iec run"),
        (&["update"], "nothing updates itself"),
        (&["serve", "--tp", "2"], "--device cuda:0,1"),
        (&["serve", "--tensor-parallel-size=2"], "--device cuda:0,1"),
        (&["serve", "--served-model-name", "x"], "--model NAME=MODEL"),
        (&["run", "--image", "x.png"], "only texts are read"),
        (&["run", "--mmproj", "x"], "only texts are read"),
        (&["serve", "--jinja"], "always rendered"),
        (&["serve", "--api-key", "secret"], "IEC_API_KEY"),
        (&["run", "--prompt", "x", "--rounds", "2"], "iec bench"),
        (&["run", "-n", "-1"], "there is no number for `unlimited`"),
        (&["run", "--seed", "-1"], "leave --seed out"),
        (&["chat", "-c", "-1"], "leave --ctx out"),
        (&["run", "-ngl", "all"], "leave --gpu-layers out"),
    ];
    for (words, expected) in cases {
        let output = iec().args(words).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && stderr.contains(expected), "{words:?}: {stderr}");
    }
}

#[test]
fn shells_complete_the_fixed_values_of_options_and_files_for_paths_only() {
    let script = String::from_utf8(iec().args(["completions", "bash"]).output().unwrap().stdout).unwrap();
    let run = script.split("iec__subcmd__run)").nth(1).or_else(|| script.split("iec__run)").nth(1)).unwrap();
    let run = run.split("\n        iec__").next().unwrap();
    let after = |option: &str| {
        let rest = run.split(&format!("{option})\n")).nth(1).unwrap_or_else(|| panic!("{option}: {run}"));
        rest.split(";;").next().unwrap().to_string()
    };
    for (option, word) in [
        ("--precision", "int4w"),
        ("--device", "cuda"),
        ("--kv", "fp8"),
        ("--attention", "reference"),
        ("--think", "fold"),
    ] {
        assert!(after(option).contains("compgen -W") && after(option).contains(word), "{option}: {}", after(option));
    }
    for (option, files) in [("--max-new", false), ("--seed", false), ("--tokenizer", true), ("--model-dir", true)] {
        assert_eq!(after(option).contains("compgen -f"), files, "{option}: {}", after(option));
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
    assert!(String::from_utf8(output.stderr).unwrap().contains("these are the built-in prompts"));
}

#[test]
fn the_variable_of_the_log_level_does_not_set_the_format_of_the_server_s_log() {
    for (name, value, format) in
        [("IEC_LOG", "info", "text"), ("IEC_LOG", "debug", "text"), ("IEC_LOG_FORMAT", "json", "json")]
    {
        let output = iec().args(["serve", "--check"]).arg(pack()).env(name, value).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{name}={value}: {stderr}");
        let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(line["settings"]["log"], format, "{name}={value}");
    }
}

#[test]
fn variables_of_the_predecessor_verify_after_bench_and_check_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let wrong = dir.path().join("wrong.json");
    std::fs::write(&wrong, "[[1]]").unwrap();
    let (code, _, stderr) = verified_bench(&[], &[("VERIFY_HF_IDS", "1"), ("HF_DIR", "")]);
    assert!(code == 2 && stderr.contains("--hf-dir"), "{stderr}");
    assert_eq!(verified_bench(&[], &[("VERIFY", "0")]).0, 0);
    let (code, _, stderr) = verified_bench(&[], &[("VERIFY", "0"), ("EXPECTED_TOKENS", wrong.to_str().unwrap())]);
    assert!(code == 4 && stderr.contains("differ from the expected tokens"), "{stderr}");
}

/// Runs `iec bench` with the checkpoint in HF_DIR and VERIFY=1, which `variables` may replace.
fn verified_bench(options: &[&str], variables: &[(&str, &str)]) -> (i32, String, String) {
    let checkpoint = fixture("stories260k");
    let mut iec = iec();
    iec.args(["bench", "--max-new", "2"]).args(options).arg("--model-dir").arg(pack());
    iec.env("VERIFY", "1").env("HF_DIR", checkpoint).envs(variables.iter().copied());
    let output = iec.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn bench_verifies_the_texts_that_it_measured() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "one prompt").unwrap();
    let one = ("PROMPTS", file.path().to_str().unwrap());
    struct Case<'a> {
        options: &'a [&'a str],
        variables: &'a [(&'a str, &'a str)],
        prompts: usize,
        steps: usize,
    }
    let cases = [
        Case { options: &[], variables: &[], prompts: 10, steps: 20 },
        Case { options: &[], variables: &[one], prompts: 1, steps: 2 },
        Case { options: &["--runs", "2", "--rounds", "2"], variables: &[one], prompts: 1, steps: 2 },
        Case { options: &["--depth", "9", "--aggregate"], variables: &[one], prompts: 1, steps: 2 },
        Case { options: &["--prompt-len", "12", "--batch", "3"], variables: &[one], prompts: 3, steps: 6 },
    ];
    for Case { options, variables, prompts, steps } in cases {
        let notes = [variables, &[("IE_L3_BYTES", "1")]].concat();
        let (code, _, stderr) = verified_bench(options, &notes);
        let same = format!("{prompts} of {prompts} have the same tokens");
        let compared = format!("{steps} compared: {steps} the same");
        assert!(code == 0 && stderr.contains(&same) && stderr.contains(&compared), "{options:?}: {stderr}");
        // The model is opened once, so its notes appear once.
        assert_eq!(stderr.matches("IE_L3_BYTES").count(), 1, "{stderr}");
    }
    // The texts are compared in the precision that was measured.
    let (_, _, stderr) = verified_bench(&["--precision", "bf16"], &[one]);
    assert!(stderr.contains("up to 0.25 counts as rounding"), "{stderr}");
}

#[test]
fn variables_of_the_comparison_are_checked_before_the_measurement() {
    let cases = [
        ("HF_DTYPE", "fp16", 2, "the value comes from the environment variable HF_DTYPE"),
        ("HF_TOPK", "abc", 2, "the value comes from the environment variable HF_TOPK"),
        ("HF_TOPK", "0", 2, "expected at least 1"),
        ("HF_LOGITS_TOL", "nan", 2, "HF_LOGITS_TOL"),
        ("HF_LOGITS_TOL", "-1", 2, "HF_LOGITS_TOL"),
        ("HF_DIR", "/nowhere/x", 1, "environment variable HF_DIR"),
    ];
    for (name, value, expected, said) in cases {
        let (code, stdout, stderr) = verified_bench(&[], &[(name, value)]);
        assert!(code == expected && stdout.is_empty(), "{name}={value}: {code} {stdout} {stderr}");
        assert!(stderr.contains(said) && stderr.matches("error:").count() == 1, "{name}={value}: {stderr}");
    }
    // Without the comparison they have no effect.
    assert_eq!(verified_bench(&[], &[("VERIFY", "0"), ("HF_TOPK", "abc")]).0, 0);
}
