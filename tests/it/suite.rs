//! Tests `iec eval --suite`, `--run-code` and `--against`: files of public benchmarks are recognized, answered by one
//! or two models, and programs are run only by the command that the user names.

use crate::common::{fixture, iec, packed, packed_as};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn lines(values: &[Value]) -> String {
    values.iter().map(|value| format!("{value}\n")).collect()
}

/// Creates a directory with tiny files of all benchmarks.
fn benchmarks() -> TempDir {
    let dir = TempDir::new().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let hellaswag = |label: u32| {
        json!({"ind": 4, "activity_label": "Story", "ctx_a": "Once upon a time,", "ctx_b": "there was a little",
            "ctx": "Once upon a time, there was a little", "endings": ["girl named Lily.", "zzzz"], "label": label})
    };
    write("hellaswag_val.jsonl", &lines(&[hellaswag(0), hellaswag(1), hellaswag(0)]));
    let ai2 = json!({"id": "M", "answerKey": "B", "question": {"stem": "Who is it?", "choices":
        [{"text": "a girl", "label": "A"}, {"text": "xq zk", "label": "B"}]}});
    write("ARC/ARC-Easy-Test.jsonl", &lines(&[ai2]));
    let hub = json!({"id": "M", "question": "Who is it?", "choices": {"text": ["a girl", "xq zk"], "label": ["1", "2"]},
        "answerKey": "1"});
    write("arc_challenge.jsonl", &lines(&[hub]));
    write("mmlu/test/art_test.csv", "\"Which, of these?\",a,b,c,d,A\nWhich?,a,b,c,d,B\n");
    write("mmlu/test/law_test.csv", "Which?,a,b,c,d,C\n");
    write("mmlu/dev/art_dev.csv", &"What?,1,2,3,4,D\n".repeat(5));
    write("gsm/test.jsonl", &lines(&[json!({"question": "How many?", "answer": "1 + 1 = 2\n#### 2"})]));
    let problem = |task: u32, test: &str| {
        json!({"task_id": format!("HumanEval/{task}"), "prompt": "Once upon a time", "entry_point": "f",
            "canonical_solution": " PASS", "test": test})
    };
    write("HumanEval.jsonl", &lines(&[problem(0, "nothing"), problem(1, "PASS")]));
    write("HumanEval.jsonl.gz", "\u{1f}");
    std::fs::write(dir.path().join("HumanEval.jsonl.gz"), [0x1f, 0x8b, 8, 0]).unwrap();
    write("notes.txt", "These are my files.\n");
    dir
}

fn eval(pack: &Path, arguments: &[&str]) -> Output {
    let mut command = iec();
    command.args(["eval", "--threads", "2"]).arg(pack).args(arguments);
    command.output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs `iec eval --json` and returns the line.
fn line(pack: &Path, arguments: &[&str]) -> Value {
    let output = eval(pack, &[arguments, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn detail_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn files_of_benchmarks_are_recognized_and_measured() {
    let (pack, suite, out) = (packed("stories260k"), benchmarks(), TempDir::new().unwrap());
    let (suite, details) = (suite.path().to_str().unwrap(), out.path().join("details.jsonl"));
    let output = eval(pack.path(), &["--suite", suite, "--json", "--details", details.to_str().unwrap()]);
    let words = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{words}");
    for part in [
        "hellaswag_val.jsonl: read as HellaSwag (`endings`), 3 questions",
        "ARC/ARC-Easy-Test.jsonl: read as ARC (`question.stem`, the form of AI2), 1 questions",
        "mmlu/test, 2 files: read as MMLU",
        "HumanEval.jsonl: skipped; HumanEval runs code that the model writes; name a command for it with --run-code",
        "HumanEval.jsonl.gz: skipped; not recognized: it is compressed with gzip; run `gunzip --keep` on it",
        "mmlu/dev/art_dev.csv: skipped; used as the solved examples of MMLU",
        "notes.txt: skipped; not recognized",
    ] {
        assert!(words.contains(part), "{part} in {words}");
    }
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let tasks = found["tasks"].as_array().unwrap();
    let names: Vec<_> = tasks.iter().map(|t| (t["task"].as_str().unwrap(), t["questions"].as_u64().unwrap())).collect();
    assert_eq!(names, [("HellaSwag", 3), ("ARC", 1), ("ARC", 1), ("MMLU", 3), ("GSM8K", 1)]);
    assert_eq!(
        (&tasks[3]["files"][0]["name"], &tasks[3]["files"][1]["questions"]),
        (&json!("art_test.csv"), &json!(1))
    );
    assert_eq!(tasks[0]["files"][0]["sha256"].as_str().unwrap().len(), 64);
    // The model tells stories: the ending that continues one is by far more likely.
    assert_eq!((&tasks[0]["accuracy"]["right"], &tasks[1]["accuracy"]["right"]), (&json!(2), &json!(0)));
    assert_eq!(tasks[2]["accuracy_normalized"]["value"], 1.0);
    assert!(tasks[3]["accuracy_normalized"].is_null() && !tasks[4]["exact_match"].is_null());
    let interval = |at: usize| tasks[0]["accuracy"]["ci95"][at].as_f64().unwrap();
    assert!((interval(0) - 0.2077).abs() < 1e-4 && (interval(1) - 0.9385).abs() < 1e-4, "{}", tasks[0]);
    assert_eq!(found["skipped"].as_array().unwrap().len(), 4);
    let details = detail_lines(&details);
    assert_eq!((details.len(), &details[0]["file"]), (9, &json!("hellaswag_val.jsonl")));

    let output = eval(pack.path(), &["--suite", suite, "--limit", "1"]);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(table.contains("accuracy, by length") && table.contains("mmlu/test (2 files)"), "{table}");
}

#[test]
fn mmlu_is_asked_with_five_examples_and_letters() {
    let (pack, suite, out) = (packed("stories260k"), benchmarks(), TempDir::new().unwrap());
    let mmlu = suite.path().join("mmlu");
    let details = out.path().join("details.jsonl");
    line(pack.path(), &["--suite", mmlu.to_str().unwrap(), "--details", details.to_str().unwrap()]);
    let head = "The following are multiple choice questions (with answers) about art.\n\n";
    let example = "What?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: D\n\n".repeat(5);
    let context = format!("{head}{example}Which, of these?\nA. a\nB. b\nC. c\nD. d\nAnswer:");
    let requests = ["A", "B", "C", "D"].map(|l| json!({"context": context, "continuation": format!(" {l}")}));
    let file = out.path().join("requests.jsonl");
    std::fs::write(&file, lines(&requests)).unwrap();
    let output = eval(pack.path(), &["--loglikelihood", file.to_str().unwrap()]);
    let answers: Vec<Value> =
        String::from_utf8_lossy(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let expected: Vec<&Value> = answers.iter().map(|answer| &answer["logprob"]).collect();
    let found = detail_lines(&details).remove(0);
    assert_eq!(found["logprobs"].as_array().unwrap().iter().collect::<Vec<_>>(), expected);
}

/// Writes a suite that has only HumanEval, and returns the results of its programs.
fn run_code(command: &str, more: &[&str]) -> (Output, Vec<String>, Duration) {
    let (pack, suite, out) = (packed("stories260k"), benchmarks(), TempDir::new().unwrap());
    let code = out.path().join("code");
    std::fs::create_dir(&code).unwrap();
    std::fs::copy(suite.path().join("HumanEval.jsonl"), code.join("any name")).unwrap();
    let details = out.path().join("details.jsonl");
    let begin = Instant::now();
    let arguments = ["--suite", code.to_str().unwrap(), "--json", "--details", details.to_str().unwrap()];
    let output = eval(pack.path(), &[&arguments[..], &["--run-code", command], more].concat());
    let results = match output.status.success() {
        true => detail_lines(&details).iter().map(|l| l["result"].as_str().unwrap().to_string()).collect(),
        false => Vec::new(),
    };
    (output, results, begin.elapsed())
}

#[test]
fn programs_are_run_by_the_command_of_the_user() {
    let (output, results, _) = run_code("grep -q PASS", &[]);
    assert_eq!(results, ["status 1", "passed"], "{}", stderr(&output));
    assert!(stderr(&output).contains("`grep -q PASS` executes programs that the model writes"));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["tasks"][0]["pass_at_1"]["value"], &found["tasks"][0]["questions"]), (&json!(0.5), &json!(2)));
    // The program consists of prompt, completion, test and call.
    let (_, results, _) = run_code("tr '\\n' ' ' | grep -q '^Once upon a time.* PASS check(f) $'", &[]);
    assert!(results.is_empty(), "the canonical solution of the first problem has another test: {results:?}");
    let (output, results, _) = run_code("tr '\\n' ' ' | grep -q '^Once upon a time.* check(f) $'", &[]);
    assert_eq!(results, ["passed", "passed"], "{}", stderr(&output));
}

#[test]
fn a_program_that_does_not_end_is_killed_with_its_children() {
    let dir = TempDir::new().unwrap();
    let pid = dir.path().join("pid");
    let command = format!("grep -q PASS || {{ sleep 1000 & echo $! > {}; wait; }}", pid.display());
    let (output, results, time) = run_code(&command, &["--code-timeout", "1"]);
    assert_eq!(results, ["timeout", "passed"], "{}", stderr(&output));
    assert!(time < Duration::from_secs(300), "{time:?}");
    let child = std::fs::read_to_string(&pid).unwrap();
    let stat = PathBuf::from(format!("/proc/{}/stat", child.trim()));
    let has_ended = || std::fs::read_to_string(&stat).map_or(true, |state| state.contains(") Z "));
    assert!((0..500).any(|_| has_ended() || {
        std::thread::sleep(Duration::from_millis(10));
        false
    }));
}

#[test]
fn a_command_that_cannot_run_programs_is_refused() {
    let (output, _, _) = run_code("no-such-program", &[]);
    let words = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("--run-code: the canonical solution of HumanEval/0 does not pass (status 127)"), "{words}");
    let pack = packed("stories260k");
    let output = eval(pack.path(), &["--choices", "f", "--run-code", "sh"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn unusable_suites_are_refused() {
    let (pack, dir) = (packed("stories260k"), TempDir::new().unwrap());
    let refused = |files: &[(&str, &str)], code: i32, expected: &str| {
        let dir = dir.path().join(format!("suite{code}-{}", files.len()));
        std::fs::create_dir_all(&dir).unwrap();
        files.iter().for_each(|(name, text)| std::fs::write(dir.join(name), text).unwrap());
        let output = eval(pack.path(), &["--suite", dir.to_str().unwrap()]);
        let words = stderr(&output);
        assert!(output.status.code() == Some(code) && words.contains(expected), "{:?} {words}", output.status.code());
    };
    refused(&[], 2, "found no files, expected files of benchmarks");
    refused(&[("a.csv", "a,b\n")], 2, "a.csv: not recognized: its first line is neither");
    let arc = r#"{"question": {"stem": "q", "choices": [{"text": "a", "label": "A"}]}, "answerKey": "A"}"#;
    refused(&[("a.jsonl", &format!("{arc}\n{}", arc.replace(r#""q""#, "7")))], 1, "a.jsonl: line 2: `stem`");
    let long = format!("{{\"question\": \"{}\", \"answer\": \"#### 2\"}}", "word ".repeat(3000));
    refused(&[("a.jsonl", &long), ("b", "")], 2, "a.jsonl: question 0: found a prompt of");
    let output = eval(pack.path(), &["--suite", "no/such/directory"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let inside = dir.path().join("suite1-1/details.jsonl");
    let suite = dir.path().join("suite1-1");
    let output = eval(pack.path(), &["--suite", suite.to_str().unwrap(), "--details", inside.to_str().unwrap()]);
    assert!(output.status.code() == Some(2) && stderr(&output).contains("--details"), "{}", stderr(&output));
}

/// Packs the embedded model in four bits.
fn four_bits() -> PathBuf {
    let rules = Path::new(env!("CARGO_TARGET_TMPDIR")).join("suite-q4_0.json");
    std::fs::write(&rules, r#"{"version":1,"rules":[{"include":"layers.*proj(.weight)?$","scheme":"q4_0"}]}"#).unwrap();
    packed_as("suite-q4_0", &fixture("stories260k"), &["--q4-map", rules.to_str().unwrap()])
}

#[test]
fn two_models_are_compared_question_by_question() {
    let (float, quantized, out) = (packed("stories260k"), four_bits(), TempDir::new().unwrap());
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(crate::eval::TEXT)).unwrap();
    let words: Vec<&str> = text.split_whitespace().collect();
    // Which of two words continues the text, where the float model is often wrong, too.
    let question = |at: usize| {
        let context = words[at - 12..at].join(" ");
        json!({"query": context, "choices": [words[at], words[at + 40]], "answer": 0})
    };
    let questions: Vec<Value> = (0..60).map(|n| question(20 + 7 * n)).collect();
    let (file, details) = (out.path().join("questions.jsonl"), out.path().join("details.jsonl"));
    std::fs::write(&file, lines(&questions)).unwrap();
    let against = ["--against", float.path().to_str().unwrap()];
    let choices = ["--choices", file.to_str().unwrap()];
    let mut command = iec();
    command.args(["eval", "--json", "--details"]).arg(&details).arg(&quantized).args(choices).args(against);
    let found: Value = serde_json::from_slice(&command.assert().success().get_output().stdout).unwrap();
    let answers = detail_lines(&details);
    assert_eq!(answers.len(), 120);
    let right = |line: &Value| line["chosen"] == line["answer"];
    let pairs: Vec<(bool, bool)> = (0..60).map(|n| (right(&answers[n]), right(&answers[60 + n]))).collect();
    let count = |ours: bool, theirs: bool| pairs.iter().filter(|pair| **pair == (ours, theirs)).count();
    let (gained, lost) = (count(true, false), count(false, true));
    let difference = &found["difference"]["accuracy"];
    assert_eq!((&difference["became_right"], &difference["became_wrong"]), (&json!(gained), &json!(lost)));
    let mean = (gained as f64 - lost as f64) / 60.0;
    assert!((difference["value"].as_f64().unwrap() - mean).abs() < 1e-12, "{difference}");
    let squares = (gained + lost) as f64 - 60.0 * mean * mean;
    let half = 1.959_963_984_540_054 * (squares / (60.0 * 59.0)).sqrt();
    assert!((difference["ci95"][1].as_f64().unwrap() - mean - half).abs() < 1e-12, "{difference}");
    assert_ne!(found["model"], found["against"]["model"]);

    let same = line(float.path(), &[&choices[..], &against[..]].concat());
    assert_eq!(
        (&same["difference"]["accuracy"]["p_value"], &same["reference"]["accuracy"]),
        (&json!(1.0), &same["accuracy"])
    );
    let suite = benchmarks();
    let output = eval(&quantized, &["--suite", suite.path().to_str().unwrap(), against[0], against[1]]);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        table.contains("became wrong") && table.contains("ARC ARC/ARC-Easy-Test.jsonl"),
        "{table}{}",
        stderr(&output)
    );
}
