//! Tests the settings of requests in a prompts file: each line gives what a run with the same options gives alone.

use crate::common::{fixture, iec, packed_as};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn pack() -> PathBuf {
    packed_as("stories260k", &fixture("stories260k"), &[])
}

/// Runs `iec run --json` with these words and returns the texts.
fn texts(pack: &Path, words: &[&str]) -> Vec<Value> {
    let length: &[&str] = if words.contains(&"-n") { &[] } else { &["-n", "12"] };
    let output = iec().args(["run", "--json", "--model-dir"]).arg(pack).args(words).args(length).assert().success();
    let line: Value = serde_json::from_slice(&output.get_output().stdout).unwrap();
    line["prompts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|prompt| prompt.get("text").unwrap_or(&line["text"]).clone())
        .collect()
}

/// Writes requests as JSON lines.
fn file(dir: &Path, requests: &[Value]) -> PathBuf {
    let path = dir.join("requests.jsonl");
    std::fs::write(&path, requests.iter().map(|request| format!("{request}\n")).collect::<String>()).unwrap();
    path
}

#[test]
fn settings_of_a_request_are_those_of_the_options_whatever_the_batch() {
    let (pack, dir) = (pack(), tempfile::tempdir().unwrap());
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"],
        "additionalProperties": false});
    let schema_text = schema.to_string();
    let once = "Once upon a time";
    // The settings of a request, and the options of a run of the same prompt alone.
    let cases: Vec<(Value, Vec<&str>)> = vec![
        (json!({}), vec![]),
        (json!({"max_new": 3}), vec!["-n", "3"]),
        (json!({"max_tokens": 5, "stop": " was"}), vec!["-n", "5", "--stop", " was"]),
        (json!({"stop": ["a ", "the"]}), vec!["--stop", "a ", "--stop", "the"]),
        (json!({"temperature": 0.9, "seed": 7}), vec!["--temperature", "0.9", "--seed", "7"]),
        (json!({"top_p": 0.7, "seed": 8}), vec!["--top-p", "0.7", "--seed", "8"]),
        (json!({"top_k": 5, "min_p": 0.1, "seed": 9}), vec!["--top-k", "5", "--min-p", "0.1", "--seed", "9"]),
        (json!({"typical_p": 0.5, "seed": 1}), vec!["--typical", "0.5", "--seed", "1"]),
        (
            json!({"xtc_probability": 1, "xtc_threshold": 0.05, "seed": 2}),
            vec!["--xtc-probability", "1", "--xtc-threshold", "0.05", "--seed", "2"],
        ),
        (
            json!({"mirostat": 2, "mirostat_tau": 3, "mirostat_eta": 0.2, "seed": 3}),
            vec!["--mirostat", "2", "--mirostat-tau", "3", "--mirostat-eta", "0.2", "--seed", "3"],
        ),
        (
            json!({"temperature": 1.5, "top_k": 3, "samplers": "temperature,top_k", "seed": 4}),
            vec!["--temperature", "1.5", "--top-k", "3", "--samplers", "temperature,top_k", "--seed", "4"],
        ),
        (
            json!({"dry_multiplier": 3, "dry_base": 2, "dry_allowed_length": 1, "dry_sequence_breakers": [" the"],
                "dry_penalty_last_n": 5, "max_new": 30}),
            vec![
                "--dry-multiplier",
                "3",
                "--dry-base",
                "2",
                "--dry-allowed-length",
                "1",
                "--dry-sequence-breaker",
                " the",
                "--dry-penalty-last-n",
                "5",
                "-n",
                "30",
            ],
        ),
        (
            json!({"dry_multiplier": 4, "dry_allowed_length": 1, "max_new": 40}),
            vec!["--dry-multiplier", "4", "--dry-allowed-length", "1", "-n", "40"],
        ),
        (json!({"repeat_penalty": 2, "repeat_last_n": 3}), vec!["--repeat-penalty", "2", "--repeat-last-n", "3"]),
        (json!({"repetition_penalty": 1.5}), vec!["--repeat-penalty", "1.5"]),
        (
            json!({"presence_penalty": 1, "frequency_penalty": 2.5}),
            vec!["--presence-penalty", "1", "--frequency-penalty", "2.5"],
        ),
        (json!({"logit_bias": {"403": -100, "was": -5}}), vec!["--logit-bias", "403-100", "--logit-bias", "was-5"]),
        (json!({"bad_words": ["there", "was"]}), vec!["--ban", "there", "--ban", "was"]),
        (json!({"regex": "[a-z]{4} [0-9]"}), vec!["--regex", "[a-z]{4} [0-9]"]),
        (json!({"choice": ["yes", "no"]}), vec!["--choice", "yes,no"]),
        (json!({"json_schema": schema}), vec!["--json-schema", &schema_text]),
    ];
    let requests: Vec<Value> = cases
        .iter()
        .map(|(settings, _)| {
            let mut request = settings.clone();
            request["prompt"] = once.into();
            request
        })
        .collect();
    let alone: Vec<Value> =
        cases.iter().map(|(_, options)| texts(&pack, &[&["-p", once], &options[..]].concat())[0].clone()).collect();
    let distinct: std::collections::HashSet<String> = alone.iter().map(Value::to_string).collect();
    assert!(distinct.len() >= cases.len() - 4, "most settings change the text: {distinct:?}");
    let path = file(dir.path(), &requests);
    for batch in ["1", "4", "16"] {
        let together = texts(&pack, &["--prompts-file", path.to_str().unwrap(), "--batch", batch]);
        for (i, (settings, _)) in cases.iter().enumerate() {
            assert_eq!(together[i], alone[i], "batch {batch}: {settings}");
        }
    }
}

#[test]
fn prompts_are_normalized_and_encoded_as_the_request_says() {
    let (pack, dir) = (pack(), tempfile::tempdir().unwrap());
    let requests = [
        json!({"prompt": "caf\u{e9}"}),
        json!({"prompt": "cafe\u{301}", "normalize": "nfc"}),
        json!({"prompt": "cafe\u{301}"}),
        json!({"prompt": "caf\u{e9}", "add_special_tokens": false}),
        json!({"messages": [{"role": "user", "content": "Hi"}]}),
        json!({"prompt": "Hi"}),
        json!({"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "raw": true,
            "add_special_tokens": false}),
    ];
    let (path, trace) = (file(dir.path(), &requests), dir.path().join("trace.jsonl"));
    let words = ["run", "-n", "1", "--chat-template", "chatml", "--raw"];
    let run = |words: &[&str], path: &Path| {
        let mut command = iec();
        command.args(words).arg("--model-dir").arg(&pack).arg("--prompts-file").arg(path);
        command.arg("--overwrite").arg("--trace-ids").arg(&trace).assert()
    };
    run(&words[..5], &path).success();
    let text = std::fs::read_to_string(&trace).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let ids: Vec<Value> =
        lines.filter(|line| line["kind"] == "prompt").map(|line| line["prompt_token_ids"].clone()).collect();
    // With a template, prompts are messages of a user.
    assert!(ids[0] == ids[1] && ids[1] != ids[2] && ids[0] == ids[3]);
    assert!(ids[4] == ids[5] && ids[5] == ids[6]);
    // Without one, prompts get the first token of a sequence unless the request says otherwise.
    let plain = file(dir.path(), &requests[..4]);
    run(&words[..3], &plain).success();
    let text = std::fs::read_to_string(&trace).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let ids: Vec<Vec<Value>> = lines
        .filter(|line| line["kind"] == "prompt")
        .map(|line| line["prompt_token_ids"].as_array().unwrap().clone())
        .collect();
    assert!(ids[0] == ids[1] && ids[0][1..] == ids[3][..] && ids[1] != ids[2]);
    // Messages need a template; the message names the entry.
    let refused = run(&words[..3], &file(dir.path(), &requests)).code(2);
    let said = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
    assert!(said.contains("prompt 4") && said.contains("--chat-template auto"), "{said}");
}

#[test]
fn a_chat_template_reads_the_variables_of_the_run_and_of_the_request() {
    let (pack, dir) = (pack(), tempfile::tempdir().unwrap());
    let template = dir.path().join("template.jinja");
    std::fs::write(&template, "{{ messages[0].content }}{{ '!' if enable_thinking }}{{ tail }}").unwrap();
    let requests = [
        json!({"prompt": "Hi"}),
        json!({"prompt": "Hi", "chat_template_kwargs": {"enable_thinking": true}}),
        json!({"prompt": "Hi", "chat_template_kwargs": {"tail": "?"}}),
        json!({"prompt": "Hi! you", "raw": true, "add_special_tokens": false}),
        json!({"prompt": "Hi you", "raw": true, "add_special_tokens": false}),
        json!({"prompt": "Hi?", "raw": true, "add_special_tokens": false}),
    ];
    let (path, trace) = (file(dir.path(), &requests), dir.path().join("trace.jsonl"));
    let run = |path: &Path, options: &[&str]| {
        let mut command = iec();
        command.args(["run", "-n", "1", "--overwrite", "--model-dir"]).arg(&pack).arg("--prompts-file").arg(path);
        command.arg("--trace-ids").arg(&trace).args(options).assert()
    };
    let template = template.to_str().unwrap();
    run(&path, &["--chat-template", template, "--chat-template-kwargs", r#"{"tail": " you"}"#]).success();
    let text = std::fs::read_to_string(&trace).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let ids: Vec<Value> =
        lines.filter(|line| line["kind"] == "prompt").map(|line| line["prompt_token_ids"].clone()).collect();
    assert_eq!((&ids[0], &ids[1], &ids[2]), (&ids[4], &ids[3], &ids[5]));
    // Variables without a template that reads them are refused, and so are those that the conversation sets.
    let alone = file(dir.path(), &[requests[1].clone()]);
    let reserved = file(dir.path(), &[json!({"prompt": "Hi", "chat_template_kwargs": {"messages": []}})]);
    let cases: [(&Path, &[&str], &str); 3] = [
        (&alone, &[], "`chat_template_kwargs`"),
        (&alone, &["--chat-template-kwargs", "{}"], "--chat-template-kwargs cannot be used with a raw prompt"),
        (&reserved, &["--chat-template", template], "`messages`"),
    ];
    for (path, options, said) in cases {
        let refused = run(path, options).code(2);
        let stderr = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
        assert!(stderr.contains(said), "{options:?}: {stderr}");
    }
}

#[test]
fn settings_of_steps_that_are_off_are_refused_by_name() {
    let (pack, dir) = (pack(), tempfile::tempdir().unwrap());
    for (field, value) in [
        ("repeat_last_n", json!(3)),
        ("dry_base", json!(2)),
        ("dry_allowed_length", json!(2)),
        ("dry_penalty_last_n", json!(2)),
        ("dry_sequence_breakers", json!(["."])),
        ("xtc_threshold", json!(0.2)),
        ("mirostat_tau", json!(2)),
        ("mirostat_eta", json!(0.2)),
        ("mirostat", json!(3)),
        ("sampler `top_z`", json!("top_z")),
    ] {
        let name = if field.starts_with("sampler") { "samplers" } else { field };
        let path = file(dir.path(), &[json!({"prompt": "Hi", name: value})]);
        let output = iec().args(["run", "-n", "1", "--model-dir"]).arg(&pack).arg("--prompts-file").arg(path).assert();
        let stderr = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(!output.get_output().status.success() && stderr.contains(field), "{field}: {stderr}");
    }
}

#[test]
fn a_request_with_a_wrong_value_fails_alone() {
    let (pack, dir) = (pack(), tempfile::tempdir().unwrap());
    let requests = [json!({"prompt": "Once"}), json!({"prompt": "Once", "temperature": -1}), json!({"prompt": "Lily"})];
    let output = iec()
        .args(["run", "-n", "4", "--model-dir"])
        .arg(&pack)
        .arg("--prompts-file")
        .arg(file(dir.path(), &requests))
        .assert()
        .code(2);
    let (stdout, stderr) = (&output.get_output().stdout, &output.get_output().stderr);
    let (stdout, stderr) = (String::from_utf8_lossy(stdout), String::from_utf8_lossy(stderr));
    assert!(
        stderr.contains("1 of 3 prompts") && stderr.contains("prompt 1") && stderr.contains("temperature"),
        "{stderr}"
    );
    let lines: Vec<&str> = stdout.lines().collect();
    assert!(lines.contains(&"== prompt 2 ==") && lines.len() >= 5, "{stdout}");
}

#[test]
fn prompts_are_encoded_ahead_in_order_and_invalid_ones_fail_alone() {
    let (pack, dir) = (pack(), tempfile::tempdir().unwrap());
    // Every 10th prompt cannot be encoded, because its constraint or its text is invalid.
    let request = |i: usize| match i % 10 {
        3 => json!({"prompt": "Once", "regex": "("}),
        7 => json!({"prompt": "Lily ".repeat(9000)}),
        _ => json!({"prompt": format!("{i} cats"), "max_new": 1 + i % 3, "regex": "[a-z ]*"}),
    };
    let requests: Vec<Value> = (0..95).map(request).collect();
    let path = file(dir.path(), &requests);
    let run = |options: &[&str]| {
        let trace = dir.path().join("trace.jsonl");
        let output = iec()
            .args(["run", "--overwrite", "--model-dir"])
            .arg(&pack)
            .arg("--prompts-file")
            .arg(&path)
            .arg("--trace-ids")
            .arg(&trace)
            .args(options)
            .assert()
            .code(2);
        let stderr = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(stderr.contains("19 of 95 prompts were not continued"), "{stderr}");
        assert!(["prompt 3:", "prompt 17:", "prompt 53:"].iter().all(|name| stderr.contains(name)), "{stderr}");
        let trace = std::fs::read_to_string(&trace).unwrap();
        let prompts = trace.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let prompts: Vec<u64> = prompts
            .filter(|line| line["kind"] == "prompt")
            .map(|line| line["prompt_index"].as_u64().unwrap())
            .collect();
        assert!(prompts.is_sorted() && prompts.len() == 76, "{prompts:?}");
        String::from_utf8(output.get_output().stdout.clone()).unwrap()
    };
    let whole = run(&["--batch", "1"]);
    assert_eq!(whole.lines().filter(|line| line.starts_with("== prompt ")).count(), 95);
    for options in
        [["--batch", "1", "--prefetch", "1"], ["--batch", "7", "--prefetch", "1"], ["--batch", "7", "--prefetch", "40"]]
    {
        assert_eq!(run(&options), whole, "{options:?}");
    }
}

#[test]
fn settings_are_refused_where_they_would_be_ignored() {
    let (pack, dir) = (pack(), tempfile::tempdir().unwrap());
    let path = file(dir.path(), &[json!({"prompt": "Once", "max_new": 4})]);
    for command in ["bench", "verify"] {
        let more: &[&str] = if command == "verify" { &["--tokenizer-only", "--hf-dir"] } else { &["--max-new", "2"] };
        let mut words = vec![command.to_string()];
        words.extend(more.iter().map(|word| word.to_string()));
        if command == "verify" {
            words.push(fixture("stories260k").display().to_string());
        }
        let output = iec().args(words).arg("--model-dir").arg(&pack).arg("--prompts-file").arg(&path).assert();
        let stderr = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(stderr.contains("`max_new`") && stderr.contains("only `iec run`"), "{command}: {stderr}");
    }
}
