//! Conversations without a terminal: one message per line, and the line protocol for programs.

use crate::common::{iec, packed, packed_with};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Packs the embedded model with a chat template.
fn chatty() -> tempfile::TempDir {
    let pack = packed("stories260k");
    let template = "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}";
    std::fs::write(pack.path().join("chat_template.jinja"), template).unwrap();
    pack
}

/// Returns the events for requests, and the exit code.
fn events(pack: &Path, options: &[&str], requests: &str) -> (Vec<Value>, Option<i32>) {
    let mut command = iec();
    command.args(["chat", "--json", "--greedy", "--max-new", "8", "--model-dir"]).arg(pack).args(options);
    let output = command.current_dir(pack).write_stdin(requests).output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    (lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), output.status.code())
}

/// Joins the texts of the events of one kind.
fn texts<'a>(events: impl IntoIterator<Item = &'a Value>, kind: &str) -> String {
    events.into_iter().filter(|event| event["event"] == kind).filter_map(|event| event["text"].as_str()).collect()
}

#[test]
fn each_request_is_answered_by_events() {
    let pack = chatty();
    let requests = r#"{"message": "Once upon a time"}
{"command": "regen"}
{"command": "set", "name": "max_new", "value": 4}

{"message": "The dog"}
{"command": "undo"}
{"command": "system", "text": "Be brief."}
{"command": "save", "path": "talk.json"}
{"command": "show"}
{"command": "clear"}
{"command": "load", "path": "talk.json"}
{"command": "exit"}
{"message": "not read"}
"#;
    let (events, code) = events(pack.path(), &["--seed", "3"], requests);
    assert_eq!(code, Some(0));
    assert!(events.iter().all(|event| event["schema_version"] == 1), "{events:?}");
    let kinds: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    let mut distinct = kinds.clone();
    distinct.dedup();
    assert_eq!(
        distinct,
        ["ready", "text", "done", "text", "done", "ok", "text", "done", "ok", "state", "ok"],
        "{events:?}"
    );
    let ready = &events[0];
    assert_eq!(
        (&ready["architecture"], &ready["settings"]["seed"]),
        (&"LlamaForCausalLM".into(), &3.into()),
        "{ready}"
    );
    let ends: Vec<usize> = (0..events.len()).filter(|i| kinds[*i] == "done").collect();
    let answers = [&events[1..ends[0]], &events[ends[0]..ends[1]], &events[ends[1]..ends[2]]];
    let [first, again, short] = answers.map(|answer| texts(answer, "text"));
    assert!(!first.is_empty() && first == again && !short.is_empty(), "{first} {again} {short}");
    let usage = |i: usize| &events[ends[i]]["usage"];
    assert_eq!(usage(0)["completion_tokens"], 8);
    assert_eq!(usage(2)["completion_tokens"], 4);
    assert!(usage(2)["reused_tokens"].as_u64().unwrap() > 4, "{events:?}");
    assert_eq!(events[ends[0]]["finish"], "length");
    let state = events.iter().find(|event| event["event"] == "state").unwrap();
    let roles: Vec<&str> =
        state["messages"].as_array().unwrap().iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant"]);
    assert_eq!(state["messages"][2]["content"], first.as_str());
    assert!(state["prompt_tokens"].as_u64().unwrap() > 0);
}

#[test]
fn a_wrong_request_is_an_error_event_and_the_conversation_goes_on() {
    let pack = chatty();
    let long = format!("{{\"message\": \"{}\"}}\n", "word ".repeat(600));
    let requests = ["{\n", "{\"command\": \"dance\"}\n", "{\"command\": \"set\", \"name\": \"top_p\", \"value\": 7}\n"];
    let more = ["{\"command\": \"load\", \"path\": \"nowhere\"}\n", "{\"command\": \"undo\"}\n", &long];
    let all = [&requests.concat(), &more.concat(), "{\"message\": \"Hi\"}\n"].concat();
    let (events, code) = events(pack.path(), &[], &all);
    assert_eq!(code, Some(0));
    let kinds: Vec<&str> = events[1..].iter().filter_map(|event| event["error"]["kind"].as_str()).collect();
    assert_eq!(kinds, ["corrupt", "usage", "usage", "io", "usage", "usage"], "{events:?}");
    assert!(events[1..7].iter().all(|event| event["error"]["message"].is_string()));
    assert_eq!(events.last().unwrap()["event"], "done");
}

#[test]
fn a_line_that_is_no_text_is_an_error_event_and_the_conversation_goes_on() {
    let pack = chatty();
    let mut command = iec();
    command.args(["chat", "--json", "--greedy", "--max-new", "2", "--model-dir"]).arg(pack.path());
    let output = command.write_stdin(&b"{\"message\": \"\xff\"}\n{\"message\": \"Hi\"}\n"[..]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(output.status.success() && events[1]["event"] == "error", "{text}");
    assert_eq!(events.last().unwrap()["event"], "done", "{text}");
}

#[test]
fn a_loaded_conversation_that_is_much_longer_than_the_context_is_answered() {
    let pack = chatty();
    // The template adds more text than the messages have.
    let template = "{% for m in messages %}<<<<<<<<<<<<<<<<{{ m.role }}>>>>>>>>>>>>>>>>{{ m.content }}\n{% endfor %}";
    std::fs::write(pack.path().join("chat_template.jinja"), template).unwrap();
    let messages: Vec<Value> =
        (0..12_000).map(|i| json!({"role": (["user", "assistant"][i % 2]), "content": "a"})).collect();
    std::fs::write(pack.path().join("long.json"), json!(messages).to_string()).unwrap();
    let requests = "{\"command\": \"show\"}\n{\"message\": \"Hi\"}\n{\"command\": \"show\"}\n";
    let (events, code) = events(pack.path(), &["--load", "long.json"], requests);
    let state = |i: usize| events.iter().filter(|event| event["event"] == "state").nth(i).unwrap();
    assert_eq!((code, &state(0)["prompt_tokens"]), (Some(0), &Value::Null), "{:?}", events.last());
    let done = events.iter().find(|event| event["event"] == "done").unwrap();
    let left_out = done["left_out_turns"].as_u64().unwrap();
    assert!((5900..6000).contains(&left_out) && state(1)["prompt_tokens"].as_u64() > Some(100), "{done}");
}

#[test]
fn steps_that_options_choose_replace_the_default_ones() {
    let pack = chatty();
    for options in [&["--mirostat", "2"][..], &["--samplers", "temperature"]] {
        let mut command = iec();
        command.args(["chat", "--prompt", "Hi", "--max-new", "4", "--model-dir"]).arg(pack.path()).args(options);
        command.assert().success();
    }
}

#[test]
fn an_interrupt_ends_the_answer_of_a_program_and_then_the_program() {
    // The context is so long that the answer does not end by itself.
    let home = packed_with("stories260k", "config.json", json!({"max_position_embeddings": 1_000_000}));
    let pack = home.path().join("pack");
    let mut child = Command::new(assert_cmd::cargo::cargo_bin("iec"))
        .args(["run", "--chat", "--json", "--chat-template", "alpaca", "--ignore-eos", "--greedy", "--model-dir"])
        .arg(&pack)
        .env("IEC_DEVICE", "cpu")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let interrupt =
        |pid: u32| assert!(Command::new("kill").args(["-INT", &pid.to_string()]).status().unwrap().success());
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"{\"message\": \"Once upon a time\"}\n").unwrap();
    assert!(lines.by_ref().any(|line| line.contains("\"event\":\"text\"")));
    interrupt(child.id());
    let done = lines.by_ref().find(|line| line.contains("\"event\":\"done\"")).unwrap();
    assert!(done.contains("\"finish\":\"interrupted\"") && done.contains("\"kept\":true"), "{done}");
    stdin.write_all(b"{\"command\": \"undo\"}\n").unwrap();
    assert!(lines.by_ref().any(|line| line.contains("\"command\":\"undo\"")));
    interrupt(child.id());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn the_seed_is_random_unless_it_is_given() {
    let model = json!({"do_sample": true, "temperature": 0.6});
    let home = packed_with("stories260k", "generation_config.json", model);
    let seed = |options: &[&str]| {
        let mut command = iec();
        command.args(["chat", "--json", "--chat-template", "alpaca", "--model-dir"]).arg(home.path().join("pack"));
        let output = command.args(options).write_stdin("").output().unwrap();
        let ready: Value = serde_json::from_slice(&output.stdout).unwrap();
        (ready["settings"]["seed"].as_u64().unwrap(), ready["settings"]["temperature"].as_f64().unwrap())
    };
    let seeds: std::collections::BTreeSet<u64> = (0..4).map(|_| seed(&[]).0).collect();
    assert!(seeds.len() > 1, "{seeds:?}");
    // The sampling is that of the model, unless an option is given; the seed is no such option.
    assert_eq!(seed(&["--seed", "42"]), (42, 0.6));
    assert_eq!(seed(&["--seed", "1", "--temperature", "0.1"]), (1, 0.1));
    assert_eq!(seed(&["--seed", "1", "--greedy"]), (1, 0.0));
}

#[test]
fn one_prompt_or_one_message_per_line_is_answered_on_stdout() {
    let pack = chatty();
    let run = |words: &[&str], input: &str| {
        let mut command = iec();
        command.args(words).args(["--greedy", "--max-new", "8", "--model-dir"]).arg(pack.path());
        let output = command.write_stdin(input).assert().success().get_output().clone();
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (one, said) = run(&["chat", "--prompt", "Once upon a time"], "");
    assert!(said.contains("note: the answer was cut at max_new, after 8 tokens"), "{said}");
    assert_eq!(run(&["run", "--chat", "--prompt", "Once upon a time"], "").0, one);
    let (both, _) = run(&["chat"], "Once upon a time\n/exit is a message here\n");
    assert!(both.starts_with(&one) && both.len() > one.len(), "{both}");
    let (quiet, said) = run(&["chat", "-q"], "Once upon a time\n");
    assert_eq!((quiet, said.as_str()), (one, ""));
}

#[test]
fn options_that_contradict_a_conversation_are_refused() {
    let pack = chatty();
    for (words, expected) in [
        (&["chat", "--json", "--prompt", "a"][..], "--json"),
        (&["chat", "--chat-template", "chatmal"], "chatml"),
        (&["chat", "--think", "loud"], "fold"),
        (&["chat", "--stop", ""], "--stop"),
        (&["chat", "--temperature", "-1"], "temperature"),
        (&["run", "--prompt", "a", "--load", "x"], "--load has no effect without --chat"),
    ] {
        let mut command = iec();
        let output = command.args(words).arg("--model-dir").arg(pack.path()).write_stdin("").output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && said.contains(expected), "{words:?}: {said}");
    }
}

#[test]
fn a_model_without_a_template_is_offered_those_of_the_program() {
    let pack = packed("stories260k");
    let mut bare = iec();
    let output = bare.args(["chat", "--model-dir"]).arg(pack.path()).write_stdin("Hi\n").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said.contains("found no chat template") && said.contains("chatml, llama2") && said.contains("iec run"),
        "{said}"
    );
    for template in ["alpaca", "chatml", "harmony"] {
        let mut named = iec();
        named.args(["chat", "--chat-template", template, "--max-new", "4", "--model-dir"]).arg(pack.path());
        named.write_stdin("Hi\n").assert().success();
    }
}
