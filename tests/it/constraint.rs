//! Tests structured output: answers are valid for 300 schemas, with any batch size, with draft tokens and on a GPU; the
//! options of `iec run`.

use crate::common::{FIXTURES, fixture, iec, packed_as};
use crate::cuda::on_gpu;
use crate::schemas::{self, validate::problem};
use iec::generate::constraint::{ConstraintSource, Marker, MarkerPlace, Phase, Phases};
use iec::generate::sampler::Sampling;
use iec::generate::speculate::Speculator;
use iec::generate::{Completion, Finish, Options, Request, generate};
use iec::runtime::{EngineOptions, Precision};
use iec::session::{GenerateOptions, Session, SessionOptions};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn pack(name: &str) -> PathBuf {
    packed_as(name, &fixture(name), &[])
}

fn session(name: &str, engine: EngineOptions) -> Session {
    Session::open(&pack(name), &SessionOptions { engine, ..SessionOptions::default() }).unwrap()
}

fn one_thread() -> EngineOptions {
    EngineOptions { threads: 1, precision: Some(Precision::Fp32), ..EngineOptions::default() }
}

fn choice(texts: &[&str]) -> ConstraintSource {
    ConstraintSource::Choice(texts.iter().map(|text| text.to_string()).collect())
}

/// Samples one answer per schema. The seeds differ, so the answers do.
fn answers(session: &mut Session, schemas: &[Value]) -> Vec<Completion> {
    let request = |schema: &Value| {
        let constraint = session.constraint(&ConstraintSource::JsonSchema(schema.to_string()));
        let constraint = constraint.unwrap_or_else(|e| panic!("{schema}: {e}"));
        let sampling = Sampling { temperature: 1.0, seed: 5, ..Sampling::default() };
        Request { max_new: 900, constraint: Some(constraint), sampling, ..session.request(vec![1, 2, 3]) }
    };
    let requests = schemas.iter().map(request).collect();
    let options = GenerateOptions { batch: 8, ..GenerateOptions::default() };
    session.generate(requests, &options, |_| Ok(())).unwrap().outcome.completions
}

/// Two models have random weights and a byte-level or byte-fallback tokenizer; the third writes English stories. All
/// answers are written to a file that scripts/check-schemas.py checks with another validator.
#[test]
fn answers_to_300_schemas_are_valid() {
    let all = schemas::all();
    assert_eq!(all.len(), schemas::COUNT);
    let (mut failures, mut ended, mut lines) = (Vec::new(), 0, String::new());
    for (name, schemas) in ["llama-gqa", "gemma2", "stories260k"].iter().zip(all.chunks(schemas::COUNT / 3)) {
        let mut session = session(name, one_thread());
        for (schema, done) in schemas.iter().zip(answers(&mut session, schemas)) {
            if matches!(done.finish, Finish::Length | Finish::Context) {
                continue;
            }
            ended += 1;
            assert_eq!(done.constraint_met, Some(true));
            match serde_json::from_str::<Value>(&done.text) {
                Ok(value) => {
                    writeln!(lines, "{}", json!({"schema": schema, "answer": done.text})).unwrap();
                    failures.extend(problem(schema, schema, &value).map(|why| format!("{name} {schema}: {why}")));
                }
                Err(e) => failures.push(format!("{name} {schema}: {e}: {:?}", done.text)),
            }
        }
    }
    std::fs::write(Path::new(env!("CARGO_TARGET_TMPDIR")).join("schemas.jsonl"), lines).unwrap();
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    // A model with random weights may write a number with more digits than fit.
    assert!(ended * 20 >= schemas::COUNT * 19, "only {ended} answers ended");
}

/// Constraint of a text whose sentences end with three digits in brackets.
fn numbered_sentences() -> ConstraintSource {
    let period = Marker { text: ".".into(), token: None, place: MarkerPlace::Anywhere };
    ConstraintSource::Phases(Phases(vec![
        Phase::Free { ends: true, markers: vec![(period, 1)] },
        Phase::Grammar { lark: "start: \"[\" /[0-9]{3}/ \"]\"".into(), exits: vec![(None, 0)] },
    ]))
}

/// Requests with several constraints and one without, greedy and sampled.
fn mixed(session: &Session) -> Vec<Request> {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "array",
        "items": {"enum": ["yes", "no"]}, "maxItems": 3}}, "required": ["a", "b"], "additionalProperties": false});
    let sources = [
        Some(ConstraintSource::JsonSchema(schema.to_string())),
        Some(ConstraintSource::Regex("(ab|cd){2,6}[0-9]{3}".into())),
        None,
        Some(choice(&["the dog", "the cat", "the"])),
        Some(ConstraintSource::Grammar("start: (\"yes \" | \"no \")* \"end\"".into())),
        Some(numbered_sentences()),
    ];
    let request = |(i, source): (usize, Option<ConstraintSource>)| Request {
        max_new: 40,
        constraint: source.map(|source| session.constraint(&source).unwrap()),
        sampling: Sampling { temperature: if i < 3 { 0.0 } else { 1.0 }, seed: 3, ..Sampling::default() },
        ..session.request(vec![1, 403, 407, 261, 378])
    };
    sources.into_iter().enumerate().map(request).collect()
}

fn ids(session: &mut Session, speculator: &mut Speculator, batch: usize) -> Vec<(Vec<u32>, &'static str)> {
    let requests = mixed(session);
    let eos = session.engine.config().eos.clone();
    let options = Options { tokenizer: session.tokenizer.as_ref(), batch, eos: &eos, ..Options::default() };
    let outcome = generate(&mut session.engine, None, speculator, requests, &options, |_| Ok(())).unwrap();
    outcome.completions.into_iter().map(|done| (done.ids, done.finish.name())).collect()
}

#[test]
fn batches_draft_tokens_and_a_gpu_change_no_constrained_text() {
    let mut cpu = session("stories260k", one_thread());
    let alone = ids(&mut cpu, &mut Speculator::off(), 1);
    // The schema has a string that a model may continue for long; all other constraints have an end.
    assert!([1, 3, 4].iter().all(|i| alone[*i].1 == "complete"), "{alone:?}");
    let text = cpu.tokenizer().unwrap().decode(&alone[5].0, true).unwrap();
    let ends: Vec<&str> = text.split('.').skip(1).filter(|rest| rest.len() >= 5).collect();
    let is_number = |end: &&str| end.starts_with('[') && end[1..4].parse::<u32>().is_ok() && &end[4..5] == "]";
    assert!(!ends.is_empty() && ends.iter().all(is_number), "{text}");
    assert_eq!(ids(&mut cpu, &mut Speculator::off(), 5), alone);
    for batch in [1, 3] {
        assert_eq!(ids(&mut cpu, &mut Speculator::ngram().always(4), batch), alone);
        let small = session("stories260k", one_thread()).engine;
        let mut small = Speculator::draft(small, &cpu.engine).always(5);
        assert_eq!(ids(&mut cpu, &mut small, batch), alone);
    }
    let mut gpu = session("stories260k", on_gpu(one_thread()));
    assert_eq!(ids(&mut gpu, &mut Speculator::off(), 5), alone);
}

fn run(name: &str, args: &[&str]) -> std::process::Output {
    iec().args(["run", "--prompt", "Once", "--model-dir"]).arg(pack(name)).args(args).output().unwrap()
}

#[test]
fn every_family_chooses_one_of_the_choices() {
    for name in FIXTURES {
        for more in [&["--greedy"][..], &["--temperature", "3", "--seed", "7"]] {
            let output = run(name, &[&["--choice", "red,dark green", "--choice", "blue"], more].concat());
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(["red\n", "dark green\n", "blue\n"].contains(&text.as_str()), "{name}: {text:?}");
        }
    }
}

#[test]
fn the_json_line_tells_how_the_text_ended() {
    let output = run("stories260k", &["--json", "--regex", "[0-9]{3}", "--logprobs", "2"]);
    let line: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = line["text"].as_str().unwrap();
    assert!(text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_digit()), "{line}");
    assert_eq!(line["prompts"][0]["finish"], "complete", "{line}");
    // Log-probabilities are those of the model, without the mask.
    let chosen = line["prompts"][0]["logprobs"][0]["logprob"].as_f64().unwrap_or(-1.0);
    assert!(chosen < 0.0, "{line}");
}

#[test]
fn a_text_that_is_cut_is_noted() {
    let cut = run("stories260k", &["--regex", "[ab]{50}", "--max-new", "3"]);
    let note = String::from_utf8(cut.stderr).unwrap();
    assert!(cut.status.success() && note.contains("1 of 1 texts ended before they satisfied the constraint"), "{note}");
    assert!(note.contains("length") && note.contains("raise --max-new"), "{note}");
    let whole = String::from_utf8(run("stories260k", &["--regex", "[ab]+", "--max-new", "3"]).stderr).unwrap();
    assert!(!whole.contains("constraint"), "{whole}");
}

#[test]
fn schemas_and_grammars_come_from_files() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_string()
    };
    let schema =
        file("schema.json", r#"{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}"#);
    let text = String::from_utf8(run("stories260k", &["--json-schema", &schema]).stdout).unwrap();
    assert_eq!(serde_json::from_str::<Vec<bool>>(&text).unwrap().len(), 2);
    let inline = run("stories260k", &["--json-schema", r#"{"const": {"a": [1, "x"]}}"#]);
    assert_eq!(serde_json::from_slice::<Value>(&inline.stdout).unwrap(), json!({"a": [1, "x"]}));
    let grammar = file("pairs.lark", "start: pair+ \".\"\npair: \"<\" WORD \">\"\nWORD: /[a-z]{1,3}/\n");
    let text = String::from_utf8(run("stories260k", &["--grammar", &grammar, "--max-new", "200"]).stdout).unwrap();
    assert!(text.starts_with('<') && text.trim_end().ends_with(['.', '>', '<']) || text.len() > 100, "{text}");
}

#[test]
fn constraints_that_cannot_be_used_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let gbnf = dir.path().join("a.gbnf");
    std::fs::write(&gbnf, "root ::= \"yes\" | \"no\"\n").unwrap();
    let unique = dir.path().join("unique.json");
    std::fs::write(&unique, r#"{"type": "array", "uniqueItems": true}"#).unwrap();
    let (gbnf, unique) = (gbnf.to_str().unwrap(), unique.to_str().unwrap());
    struct Case<'a>(&'a [&'a str], i32, &'a [&'a str]);
    let cases = [
        Case(&["--grammar", gbnf], 1, &["a.gbnf", "`::=` in line 1", "GBNF"]),
        Case(&["--json-schema", unique], 1, &["unique.json", "`uniqueItems`"]),
        Case(&["--json-schema", "nope.json"], 1, &["nope.json"]),
        Case(&["--json-schema", r#"{"type": "#], 1, &["JSON schema"]),
        Case(&["--regex", "(a"], 2, &["unclosed group"]),
        Case(&["--regex", "a", "--choice", "a"], 2, &["cannot be used with"]),
        Case(&["--choice", "a", "--ignore-eos"], 2, &["cannot be used with"]),
        Case(&["--choice", "a", "--chat"], 2, &["cannot be used with"]),
        Case(&["--choice", "a,,b"], 2, &["empty choice"]),
    ];
    let mut failures = Vec::new();
    for Case(args, code, parts) in cases {
        let output = run("stories260k", args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.code() != Some(code) || !parts.iter().all(|part| said.contains(part)) {
            failures.push(format!("{args:?}: {:?} {said}", output.status.code()));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
