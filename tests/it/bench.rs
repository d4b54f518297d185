//! Tests `iec bench`: the JSON line, its arithmetic, the bytes touched per token, expected tokens, exit codes.

use crate::common::{golden, iec, packed};
use serde_json::{Value, json};

const KEYS: [&str; 41] = [
    "schema_version",
    "model",
    "architecture",
    "precision",
    "device",
    "threads",
    "isa",
    "run",
    "tokens_generated",
    "tokens",
    "wall_time_s",
    "prefill_time_s",
    "decode_time_s",
    "ttft_s",
    "tps_true",
    "tps_decode",
    "tps_prefill",
    "latency_p50_ms",
    "latency_p95_ms",
    "latency_p99_ms",
    "rss_peak_mb",
    "cpu_user_s",
    "cpu_system_s",
    "page_faults_minor",
    "page_faults_major",
    "context_switches_voluntary",
    "context_switches_involuntary",
    "kv_hits",
    "kv_misses",
    "tokens_drafted",
    "tokens_accepted",
    "bytes_touched",
    "bytes_per_token",
    "weights_bytes_per_token",
    "effective_bandwidth_gbps",
    "weights_in_huge_pages",
    "prompts_count",
    "rounds",
    "prompts",
    "placement",
    "end",
];

const PROMPT_KEYS: [&str; 12] = [
    "prompt_index",
    "prompt",
    "prompt_id",
    "prompt_tokens",
    "tokens_generated",
    "window_time_s",
    "prefill_time_s",
    "decode_time_s",
    "tps_true",
    "expected_present",
    "expected_ok",
    "rounds",
];

/// Runs a command and returns the lines on its stdout, parsed as JSON.
fn lines(command: &mut assert_cmd::Command) -> Vec<Value> {
    parsed(&command.assert().success().get_output().stdout)
}

fn parsed(stdout: &[u8]) -> Vec<Value> {
    let text = String::from_utf8(stdout.to_vec()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn bench(args: &[&str]) -> assert_cmd::Command {
    let mut command = iec();
    // The command runs outside the repository, so that no pack is found in the current directory.
    command.arg("bench").args(args).current_dir(std::env::temp_dir());
    command
}

#[test]
fn the_embedded_model_gives_one_line_with_every_key_in_order() {
    let found = lines(&mut bench(&["--prompt-len", "9", "--max-new", "12", "--threads", "2"]));
    assert_eq!(found.len(), 1);
    let line = found[0].as_object().unwrap();
    assert_eq!(line.keys().map(String::as_str).chain(["end"]).collect::<Vec<_>>(), KEYS);
    let prompt = line["prompts"][0].as_object().unwrap();
    assert_eq!(prompt.keys().map(String::as_str).take(12).collect::<Vec<_>>(), PROMPT_KEYS);
    assert_eq!((&line["model"], &line["threads"]), (&json!("embedded:stories260k"), &json!(2)));
    assert_eq!((&line["tokens_generated"], &line["kv_misses"]), (&json!(12), &json!(9)));
    let number = |key: &str| line[key].as_f64().unwrap();
    assert!((number("tps_true") - 12.0 / number("wall_time_s")).abs() < 1e-6 * number("tps_true"));
    assert!((number("tps_decode") - 11.0 / number("decode_time_s")).abs() < 1e-6 * number("tps_decode"));
    assert!(number("prefill_time_s") + number("decode_time_s") <= number("wall_time_s"));
    assert!(
        number("latency_p50_ms") <= number("latency_p95_ms") && number("latency_p95_ms") <= number("latency_p99_ms")
    );
    // Linux divides the time of so short a run between the program and the kernel by samples: one of them can be 0.
    assert!(number("cpu_user_s") + number("cpu_system_s") > 0.0);
    assert!(number("rss_peak_mb") > 1.0 && number("weights_bytes_per_token") > 1e6);
}

#[test]
fn a_profile_gives_the_stages_of_prefill_and_decode() {
    let mut command =
        bench(&["--max-new", "5", "--profile", "--bytes-per-token", "4096", "--threads", "2", "--verbose"]);
    let output = command.assert().success().get_output().clone();
    let line = &parsed(&output.stdout)[0];
    let notes = String::from_utf8(output.stderr).unwrap();
    let counted = line["stages"].get("decode_counters").is_some();
    assert_ne!(counted, notes.contains("no hardware events"), "events are counted, or the reason is noted: {notes}");
    assert_eq!(counted, notes.contains("instr/cycle"));
    let sum = |part: &str| line["stages"][part].as_object().unwrap().values().map(|v| v.as_f64().unwrap()).sum::<f64>();
    let tokenizer = line["stages"]["prefill"]["tokenizer"].as_f64().unwrap();
    assert!(tokenizer > 0.0 && sum("decode") > 0.0);
    // Tokenization happens before the measured time; everything else is within it.
    assert!(sum("prefill") - tokenizer + sum("decode") <= line["wall_time_s"].as_f64().unwrap());
    for stage in ["embedding", "projections", "attention", "mlp", "norms", "lm_head", "sampling", "touch"] {
        for part in ["prefill", "decode"] {
            assert!(line["stages"][part][stage].as_f64().unwrap() > 0.0, "{part} {stage}: {line}");
        }
    }
    assert!(lines(&mut bench(&["--prompt-len", "2", "--max-new", "1"]))[0].get("stages").is_none());
}

#[test]
fn ten_built_in_prompts_runs_rounds_and_aggregate() {
    let found = lines(&mut bench(&["--max-new", "3", "--runs", "2", "--rounds", "2", "--batch", "4"]));
    assert_eq!(found.iter().map(|line| line["run"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2]);
    for line in &found {
        assert_eq!(
            (&line["prompts_count"], &line["rounds"], &line["tokens_generated"]),
            (&json!(10), &json!(2), &json!(60))
        );
        assert_eq!(line["prompts"][9]["rounds"].as_array().unwrap().len(), 2);
        assert_eq!(line["prompts"][9]["tokens_generated"], 6);
    }
    let merged = lines(&mut bench(&["--max-new", "3", "--runs", "2", "--rounds", "2", "--aggregate"]));
    assert_eq!(merged.len(), 1);
    assert_eq!((&merged[0]["run"], &merged[0]["tokens_generated"]), (&json!(2), &json!(120)));
}

#[test]
fn variables_stand_for_flags_and_flags_win() {
    let mut command = bench(&["--max-new", "2"]);
    for (name, value) in [("MAX_NEW", "50"), ("RUNS", "2"), ("ROUNDS", "3"), ("BATCH", "2"), ("WARMUP_TOKENS", "1")] {
        command.env(name, value);
    }
    let found =
        lines(command.env("IE_BYTES_PER_TOKEN", "4096").env("IE_STRIDE_BYTES", "128").env("IE_VERIFY_TOUCH", "1"));
    assert_eq!(found.len(), 2);
    assert_eq!((&found[0]["tokens_generated"], &found[0]["bytes_touched"]), (&json!(60), &json!(60 * 4096)));
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "one prompt").unwrap();
    let mut command = bench(&["--max-new", "2"]);
    command.env("PROMPTS", file.path()).env("IE_PRECISION", "").env("PRECISION", "bf16");
    let found = lines(&mut command);
    assert_eq!((&found[0]["prompts"][0]["prompt"], &found[0]["precision"]), (&json!("one prompt"), &json!("bf16")));
    lines(bench(&["--prompt-len", "2", "--max-new", "1"]).env("PROMPTS", "/nowhere"));
}

#[test]
fn depth_is_read_before_the_window() {
    let found = lines(&mut bench(&["--prompt-len", "5", "--depth", "100", "--max-new", "2", "--verify-touch"]));
    assert_eq!((&found[0]["kv_hits"], &found[0]["kv_misses"]), (&json!(100), &json!(5)));
}

#[test]
fn expected_tokens_are_compared_and_a_difference_is_exit_code_4() {
    let (pack, golden) = (packed("llama-gqa"), golden("llama-gqa"));
    let file = |name: &str, value: Value| {
        let path = pack.path().join(name);
        std::fs::write(&path, value.to_string()).unwrap();
        path
    };
    let prompts = golden["prompts"].as_array().unwrap();
    let texts = file("prompts.json", prompts.iter().map(|p| p["text"].clone()).collect());
    let mut ids: Vec<Value> = prompts.iter().map(|p| p["greedy_ids"].clone()).collect();
    ids[1] = Value::Null;
    let run = |expected: &std::path::Path| {
        let mut command = bench(&["--max-new", "20", "--precision", "fp32", "--batch", "3", "--model-dir"]);
        command.arg(pack.path()).arg("--prompts-file").arg(&texts).arg("--expected-tokens").arg(expected);
        command
    };
    let found = lines(&mut run(&file("right.json", json!(ids))));
    let of = |line: &Value, i: usize| {
        (line["prompts"][i]["expected_present"].clone(), line["prompts"][i]["expected_ok"].clone())
    };
    assert_eq!(of(&found[0], 0), (json!(true), json!(true)));
    assert_eq!(of(&found[0], 1), (json!(false), json!(null)));

    ids[2][7] = json!(1);
    let wrong = run(&file("wrong.json", json!(ids))).assert().code(4);
    let found = parsed(&wrong.get_output().stdout);
    assert_eq!(of(&found[0], 2), (json!(true), json!(false)));
    assert_eq!(found[0]["prompts"][2]["mismatch_index"], 7);
    assert_eq!(of(&found[0], 0), (json!(true), json!(true)));

    // The trace of a run can be used as expected tokens, too.
    let trace = pack.path().join("trace.jsonl");
    let mut traced = iec();
    traced.args(["run", "--max-new", "20", "--precision", "fp32", "--model-dir"]).arg(pack.path());
    traced.arg("--prompts-file").arg(&texts).arg("--trace-ids").arg(&trace).assert().success();
    assert_eq!(of(&lines(&mut run(&trace))[0], 5), (json!(true), json!(true)));
}

#[test]
fn failures_have_their_exit_codes() {
    struct Case {
        code: i32,
        args: &'static [&'static str],
        said: &'static str,
    }
    let cases = [
        Case { code: 3, args: &["--require-model"], said: "--model-dir" },
        Case { code: 3, args: &["--model-dir", "/nowhere"], said: "/nowhere: found no file" },
        Case { code: 5, args: &["--precision", "int4"], said: "int4" },
        Case { code: 5, args: &["--device", "ze"], said: "docs/decisions/0010" },
        Case { code: 2, args: &["--prefetch", "soon"], said: "--prefetch" },
        Case { code: 2, args: &["--runs", "0"], said: "--runs" },
        Case { code: 2, args: &["--stride-bytes", "0"], said: "stride" },
        Case { code: 1, args: &["--prompts-file", "/nowhere.txt"], said: "/nowhere.txt" },
    ];
    for case in cases {
        let assert = bench(case.args).assert().code(case.code);
        let said = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
        assert!(assert.get_output().stdout.is_empty() && said.contains(case.said), "{:?}: {said}", case.args);
    }
    bench(&[]).env("IE_REQUIRE_MODEL", "1").assert().code(3);
    bench(&["--prompt-len", "2", "--max-new", "1"]).env("IE_REQUIRE_MODEL", "0").assert().success();
    let json = bench(&["--require-model", "--json"]).assert().code(3);
    assert_eq!(parsed(&json.get_output().stdout)[0]["error"]["kind"], "model");
}

#[test]
fn drafts_of_a_chosen_acceptance_change_no_token() {
    let run = |options: &[&str]| {
        let args = [&["--prompt-len", "8", "--max-new", "60", "--batch", "2", "--warmup", "0", "--runs", "2"], options];
        lines(&mut bench(&args.concat()))
    };
    let tokens = |line: &Value| {
        let prompts = line["prompts"].as_array().unwrap();
        prompts.iter().map(|prompt| prompt["tokens"].clone()).collect::<Vec<_>>()
    };
    let plain = run(&[]);
    for (acceptance, tokens_per_draft) in [("0", 0.0..=0.0), ("0.5", 0.7..=1.4), ("1", 2.5..=3.0)] {
        for line in run(&["--draft-acceptance", acceptance, "--draft-tokens", "3"]) {
            assert_eq!(tokens(&line), tokens(&plain[0]), "{acceptance}");
            let count = |name: &str| line["drafters"]["ngram"][name].as_f64().unwrap();
            assert!(tokens_per_draft.contains(&(count("accepted") / count("drafts"))), "{acceptance}: {line}");
        }
    }
    bench(&["--draft-acceptance", "1.5"]).assert().code(2);
    bench(&["--draft-tokens", "3"]).assert().code(2);
}

#[test]
fn rounds_do_not_copy_the_answers_of_earlier_rounds() {
    let line =
        &lines(&mut bench(&["--prompt-len", "8", "--max-new", "40", "--rounds", "3", "--speculate", "ngram"]))[0];
    // Random tokens continue as no other text does, so that nearly nothing of a first answer can be copied.
    let copied = line["tokens_accepted"].as_u64().unwrap();
    assert!(copied < 40, "{copied} of 120 tokens were copied");
}
