//! Tests the reports of benchmarks: `--report-root`, `--performance-md` and `--compare` present the same measurement
//! in several forms.

use crate::common::iec;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn bench(args: &[&str]) -> assert_cmd::Command {
    let mut command = iec();
    // The command runs outside the repository, so that no pack is found in the current directory.
    command.arg("bench").args(args).current_dir(std::env::temp_dir());
    command
}

/// Returns the files of a directory with this extension, sorted by name.
fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let all = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = all.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
    found.sort();
    found
}

fn json_lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_report_is_three_files_with_the_same_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("a/b");
    let expected = dir.path().join("expected.json");
    std::fs::write(&expected, "[[0]]").unwrap();
    let mut command = bench(&["--max-new", "4", "--runs", "2", "--profile", "--report-root"]);
    command.arg(&root).arg("--expected-tokens").arg(&expected).env("REPORT_TOKENS_MAX", "3");
    let shown = command.assert().code(4).get_output().stdout.clone();
    let shown: Vec<Value> =
        String::from_utf8(shown).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();

    assert_eq!(std::fs::read_dir(&root).unwrap().count(), 3);
    let lines = json_lines(&files(&root, "jsonl")[0]);
    let of = |kind: &str| lines.iter().filter(|line| line["kind"] == kind).cloned().collect::<Vec<_>>();
    let (metas, records, summaries) = (of("meta"), of("record"), of("summary"));
    assert_eq!((metas.len(), records.len(), summaries.len(), lines.len()), (1, 20, 2, 23));
    assert_eq!((&lines[0]["kind"], &metas[0]["settings"]["max_new"]), (&json!("meta"), &json!(4)));
    for (summary, shown) in summaries.iter().zip(&shown) {
        let mut fields = shown.as_object().unwrap().clone();
        fields.shift_remove("prompts");
        assert!(fields.iter().all(|(name, value)| summary[name] == *value) && summary["stages"]["decode"].is_object());
    }
    let last = &records[19];
    assert_eq!((&last["run"], &last["prompt_index"], &last["tokens_generated"]), (&json!(2), &json!(9), &json!(4)));
    assert_eq!((last["tokens"].as_array().unwrap().len(), last["latencies_ms"].as_array().unwrap().len()), (3, 3));
    assert_eq!((&records[0]["expected_ok"], &records[0]["mismatch_index"]), (&json!(false), &json!(0)));
    assert_eq!((&records[1]["expected_present"], &records[1]["expected_ok"]), (&json!(false), &Value::Null));

    let csv = std::fs::read_to_string(&files(&root, "csv")[0]).unwrap();
    let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    let column = |name: &str| rows[0].iter().position(|column| *column == name).unwrap();
    assert!(rows.len() == 21 && rows.iter().all(|row| row.len() == rows[0].len()));
    assert_eq!(rows[20][column("decode_time_s")].parse::<f64>().ok(), last["decode_time_s"].as_f64());
    assert_eq!((rows[1][column("expected_ok")], rows[2][column("expected_ok")]), ("false", ""));

    let page = std::fs::read_to_string(&files(&root, "html")[0]).unwrap();
    assert!(page.contains("<h3>expected tokens</h3><b>0</b> of 2 texts") && page.contains("Where the time goes"));
    assert_eq!(page.matches("<svg").count(), 4);
    for fetched in ["<script", "src=", "href=", "url(", "@import", "NaN"] {
        assert!(!page.contains(fetched), "{fetched}");
    }
}

#[test]
fn prompts_and_texts_of_strangers_do_not_become_markup() {
    let dir = tempfile::tempdir().unwrap();
    let prompts = dir.path().join("prompts.json");
    std::fs::write(&prompts, json!(["</svg><script>alert(1)</script>\u{1b}[31m"]).to_string()).unwrap();
    let mut command = bench(&["--max-new", "3", "--html", "--prompts-file"]);
    command.arg(&prompts).current_dir(dir.path()).assert().success();
    let root = dir.path().join("reports");
    let page = std::fs::read_to_string(&files(&root, "html")[0]).unwrap();
    assert!(!page.contains("<script") && !page.contains('\u{1b}') && page.contains("&lt;script&gt;"));
    // `REPORT=0` turns reports off; `REPORT_ROOT` adds a second report to the first one's directory.
    bench(&["--max-new", "1", "--html"]).current_dir(dir.path()).env("REPORT", "0").assert().success();
    assert_eq!(files(&root, "jsonl").len(), 1);
    bench(&["--max-new", "1"]).env("REPORT_ROOT", &root).assert().success();
    assert_eq!((files(&root, "jsonl").len(), files(&root, "html").len()), (2, 2));
    // `REPORT=1` asks for a report and says where it is.
    let noted = bench(&["--max-new", "1"]).current_dir(dir.path()).env("REPORT", "1").assert().success();
    assert!(String::from_utf8_lossy(&noted.get_output().stderr).contains("report: reports/"));
    assert_eq!(files(&root, "jsonl").len(), 3);
}

#[test]
fn run_reports_its_texts_and_refuses_to_report_a_conversation() {
    let (dir, pack) = (tempfile::tempdir().unwrap(), crate::common::packed("llama-gqa"));
    let run = |args: &[&str]| {
        let mut command = iec();
        command.args(["run", "--prompt", "Hello", "--max-new", "5", "--profile"]).args(args);
        command.arg("--model-dir").arg(pack.path()).arg("--report-root").arg(dir.path());
        command
    };
    let text = String::from_utf8(run(&[]).assert().success().get_output().stdout.clone()).unwrap();
    let lines = json_lines(&files(dir.path(), "jsonl")[0]);
    assert_eq!((&lines[0]["command"], lines.len()), (&json!("run"), 3));
    assert_eq!(lines[1]["text"].as_str().unwrap(), text.strip_suffix('\n').unwrap());
    assert!(lines[2]["stages"]["decode"]["output"].is_number() && lines[2]["stages"]["decode"].get("touch").is_none());
    run(&["--chat"]).assert().code(2);
}

#[test]
fn a_document_gets_one_row_per_kind_of_measurement() {
    let dir = tempfile::tempdir().unwrap();
    let document = dir.path().join("PERFORMANCE.md");
    std::fs::write(&document, "# Speed\n\nBy hand.\n").unwrap();
    let merge = |args: &[&str]| {
        let mut command = bench(&["--prompt-len", "3", "--max-new", "2"]);
        command.args(args).arg("--performance-md").arg(&document).assert().success();
        std::fs::read_to_string(&document).unwrap()
    };
    let first = merge(&[]);
    assert!(first.starts_with("# Speed\n\nBy hand.\n\n<!-- iec bench: begin"));
    let rows = |text: &str| text.lines().filter(|line| line.starts_with("| embedded")).count();
    assert_eq!((rows(&first), rows(&merge(&[])), rows(&merge(&["--batch", "2"]))), (1, 1, 2));
    std::fs::write(&document, first.replace("<!-- iec bench: end -->", "")).unwrap();
    let mut damaged = bench(&["--prompt-len", "3", "--max-new", "2", "--performance-md"]);
    damaged.arg(&document).assert().code(1);
}

/// Writes a report file with one run per decoding time (ms per token).
fn measured(dir: &Path, name: &str, created: &str, ms: &[f64]) -> PathBuf {
    let meta = json!({"kind": "meta", "schema_version": 1, "created": created, "program": "", "command": "bench", "model": "m",
        "architecture": "a", "precision": "int4", "device": "cpu", "isa": "i", "threads": 2, "weights_bytes_per_token": 1,
        "settings": {"batch": 1}, "machine": {}});
    let record = |run: usize, ms: f64| {
        json!({"kind": "record", "run": run, "round": 1, "prompt_index": 0, "prompt": "p", "prompt_id": "id", "prompt_tokens": 4,
        "reused_tokens": 0, "tokens_generated": 3, "tokens": [1, 2, 3], "finish": "length", "prefill_time_s": 0.1,
        "decode_time_s": ms / 500.0, "tps_prefill": 40.0, "tps_decode": 1e3 / ms, "tps_true": 1.0, "latencies_ms": [ms, ms],
        "expected_present": false, "expected_ok": null})
    };
    let summary =
        |ms: f64| json!({"kind": "summary", "tps_prefill": 40.0, "tps_decode": 1e3 / ms, "latency_p95_ms": ms});
    let records = (1..).zip(ms).map(|(run, ms)| record(run, *ms));
    let lines: Vec<String> = [meta]
        .into_iter()
        .chain(records)
        .chain(ms.iter().map(|ms| summary(*ms)))
        .map(|line| line.to_string())
        .collect();
    let path = dir.join(name);
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

#[test]
fn comparing_finds_what_is_slower_and_only_that() {
    let dir = tempfile::tempdir().unwrap();
    let before = measured(dir.path(), "before", "1", &[10.0, 10.2, 10.1, 9.9, 10.3]);
    struct Case {
        after: &'static [f64],
        args: &'static [&'static str],
        code: i32,
        verdict: &'static str,
    }
    let slow: &[f64] = &[11.0, 11.2, 11.1, 10.9, 11.3];
    let cases = [
        Case { after: slow, args: &[], code: 4, verdict: "slower" },
        Case { after: slow, args: &["--tolerance", "15"], code: 0, verdict: "same" },
        Case { after: &[9.0, 9.2, 9.1, 8.9, 9.3], args: &[], code: 0, verdict: "faster" },
        Case { after: &[10.0, 10.2, 10.1, 9.9, 15.0], args: &[], code: 0, verdict: "same" },
        // Two runs are too few for a test of runs, and their tokens too few for a test of tokens.
        Case { after: &[20.0, 20.0], args: &[], code: 0, verdict: "unknown" },
    ];
    for (i, case) in cases.iter().enumerate() {
        let after = measured(dir.path(), &format!("after{i}"), "2", case.after);
        let mut command = bench(&["--compare"]);
        let assert = command.arg(&before).arg(&after).args(case.args).assert().code(case.code);
        let report: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
        assert_eq!(report["verdict"], case.verdict, "case {i}: {report}");
        let said = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
        assert!(said.contains("decode ms per token") && said.contains("error: ") == (case.code == 4), "{said}");
        if case.code == 4 {
            let decode = &report["metrics"][1];
            let near = |name: &str, value: f64| (decode[name].as_f64().unwrap() - value).abs() < 0.001;
            assert!(near("ratio", 11.1 / 10.1) && near("p", 2.0 / 252.0) && decode["unit"] == "run", "{report}");
            assert!(report["alternations"] == 1 && said.contains("not measured in turns"), "{said}");
            assert_eq!((&report["metrics"][0]["verdict"], &report["differences"]), (&json!("same"), &json!([])));
        }
    }
    // Measurements that alternate between both sides, with each side in one file.
    let [a, b] = [["1", "3", "5"], ["2", "4", "6"]].map(|times| {
        let all = times.map(|time| std::fs::read_to_string(measured(dir.path(), time, time, &[10.0, 10.1])).unwrap());
        let path = dir.path().join(format!("all{}", times[0]));
        std::fs::write(&path, all.join("\n")).unwrap();
        path
    });
    let assert = bench(&["--compare"]).arg(&a).arg(&b).assert().success();
    let report: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert_eq!((&report["alternations"], &report["metrics"][1]["samples_a"]), (&json!(5), &json!(6)));
    bench(&["--compare"]).arg(&before).arg(dir.path().join("none")).assert().code(1);
    let other = dir.path().join("other");
    std::fs::write(&other, "{}\n").unwrap();
    let assert = bench(&["--compare"]).arg(&before).arg(&other).assert().code(1);
    assert!(String::from_utf8_lossy(&assert.get_output().stderr).contains("line 1"));
    bench(&["--tolerance", "3"]).assert().code(2);
    bench(&["--html", "--compare"]).arg(&before).arg(&other).assert().code(2);
}

#[test]
fn a_measurement_compared_with_itself_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    bench(&["--max-new", "6", "--report-root"]).arg(dir.path()).assert().success();
    let file = &files(dir.path(), "jsonl")[0];
    let assert = bench(&["--compare"]).arg(file).arg(file).assert().success();
    let report: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert_eq!((&report["metrics"][1]["unit"], &report["metrics"][1]["verdict"]), (&json!("prompt"), &json!("same")));
    assert_eq!((&report["metrics"][1]["ratio"], &report["texts_differ"]), (&json!(1.0), &json!(0)));
}

#[test]
fn a_strict_inspection_of_a_report_finds_wrong_figures() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("reports");
    iec().args(["bench", "--max-new", "3", "--runs", "2", "--report-root"]).arg(&root).assert().success();
    let files = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path());
    let report = files.into_iter().find(|path| path.extension().is_some_and(|e| e == "jsonl")).unwrap();
    let inspect = |path: &Path| iec().args(["inspect", "--strict"]).arg(path).output().unwrap();
    let shown = inspect(&report);
    assert!(shown.status.success() && String::from_utf8_lossy(&shown.stdout).contains("20 in 2 runs"), "{shown:?}");
    let text = std::fs::read_to_string(&report).unwrap();
    let changed = dir.path().join("changed.jsonl");
    for (from, to, expected) in [
        ("\"tokens_generated\":30", "\"tokens_generated\":31", "`tokens_generated`"),
        ("\"latency_p50_ms\":", "\"latency_p50_ms\":9999,\"x\":", "percentiles"),
        ("\"tokens_generated\":3,", "\"tokens_generated\":2,", "token ids"),
        ("\"expected_ok\":null", "\"expected_ok\":false", "not the expected one"),
    ] {
        assert!(text.contains(from), "{from}: {text}");
        std::fs::write(&changed, text.replace(from, to)).unwrap();
        let refused = inspect(&changed);
        let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(4), "{from}: {stderr}");
        assert!(stderr.contains(expected), "{from}: {stderr}");
    }
    assert_eq!(inspect(dir.path()).status.code(), Some(2));
}
