//! Tests `iec run`: it generates the tokens and texts of Hugging Face with any batch size and number of threads; stop
//! texts, seeds, streaming, exit codes.

use crate::common::{FIXTURES, fixture, golden, iec, packed};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;

/// Trace of a run: the lines of the prompts and, for each prompt and step, the line of the step.
struct Trace {
    prompts: Vec<Value>,
    steps: BTreeMap<(u64, u64), Value>,
}

impl Trace {
    fn read(path: &Path) -> Trace {
        let mut trace = Trace { prompts: Vec::new(), steps: BTreeMap::new() };
        for line in std::fs::read_to_string(path).unwrap().lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            match line["kind"].as_str().unwrap() {
                "prompt" => trace.prompts.push(line),
                "gen_step" => {
                    let at = (line["prompt_index"].as_u64().unwrap(), line["step"].as_u64().unwrap());
                    assert!(trace.steps.insert(at, line).is_none(), "step {at:?} twice");
                }
                other => panic!("kind {other}"),
            }
        }
        trace
    }

    fn ids(&self, prompt: usize) -> Vec<u64> {
        let steps = self.steps.range((prompt as u64, 0)..(prompt as u64 + 1, 0));
        steps.map(|(_, line)| line["next_id"].as_u64().unwrap()).collect()
    }
}

/// Continues all golden prompts of a packed fixture and returns the trace and the output.
fn continued(pack: &Path, prompts: &Value, more: &[&str]) -> (Trace, String) {
    let (file, trace) = (pack.join("prompts.json"), pack.join("trace.jsonl"));
    let texts: Vec<&Value> = prompts.as_array().unwrap().iter().map(|p| &p["text"]).collect();
    std::fs::write(&file, json!(texts).to_string()).unwrap();
    let output = iec()
        .args(["run", "--max-new", "32", "--precision", "fp32", "--overwrite"])
        .arg("--model-dir")
        .arg(pack)
        .arg("--prompts-file")
        .arg(&file)
        .arg("--trace-ids")
        .arg(&trace)
        .args(more)
        .assert()
        .success();
    (Trace::read(&trace), String::from_utf8(output.get_output().stdout.clone()).unwrap())
}

fn ids(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn every_fixture_gives_the_ids_and_logits_of_hugging_face() {
    for name in FIXTURES {
        let (pack, golden) = (packed(name), golden(name));
        let prompts = &golden["prompts"];
        let (trace, _) = continued(pack.path(), prompts, &["--ignore-eos"]);
        let (until_eos, _) = continued(pack.path(), prompts, &["--batch", "4"]);
        for (i, prompt) in prompts.as_array().unwrap().iter().enumerate() {
            assert_eq!(trace.prompts[i]["prompt"], prompt["text"], "{name}");
            assert_eq!(trace.prompts[i]["prompt_token_ids"], prompt["ids"], "{name} {}", prompt["text"]);
            assert_eq!(trace.ids(i), ids(&prompt["greedy_ids"]), "{name} {}", prompt["text"]);
            assert_eq!(until_eos.ids(i), ids(&prompt["generate_ids_until_eos"]), "{name} {}", prompt["text"]);
            for (step, golden) in prompt["steps"].as_array().unwrap().iter().enumerate() {
                let line = &trace.steps[&(i as u64, step as u64)];
                let logits = line["topk_logits"].as_array().unwrap();
                for (ours, golden) in logits.iter().zip(golden["top5"].as_array().unwrap()) {
                    let difference = ours.as_f64().unwrap() - golden[1].as_f64().unwrap();
                    assert!(difference.abs() < 1e-3, "{name} prompt {i} step {step}: {line} {golden}");
                }
            }
        }
    }
}

#[test]
fn a_text_does_not_depend_on_batch_or_threads() {
    for name in ["stories260k", "gptoss-mxfp4"] {
        let (pack, golden) = (packed(name), golden(name));
        let prompts = &golden["prompts"];
        let some = ["--temperature", "0.9", "--top-p", "0.95", "--seed", "11", "--repeat-penalty", "1.1"];
        let others = "--temp 0.9 --mirostat 2 --mirostat-tau 4 --dry-multiplier 0.5 --frequency-penalty 0.1 --ban she";
        let others: Vec<&str> = others.split(' ').collect();
        for sampling in [&[][..], &some, &others] {
            let run = |more: &[&str]| continued(pack.path(), prompts, &[sampling, more].concat());
            let (alone, text) = run(&["--threads", "1"]);
            for more in [["--threads", "4", "--batch", "3"], ["--threads", "2", "--batch", "64"]] {
                let (together, same_text) = run(&more);
                assert_eq!(alone.steps, together.steps, "{name} {more:?}");
                assert_eq!(text, same_text, "{name} {more:?}");
            }
        }
    }
}

/// Runs a pack of the embedded model with one prompt.
fn story(pack: &Path, args: &[&str]) -> assert_cmd::assert::Assert {
    iec().arg("run").arg("--model-dir").arg(pack).args(["--prompt", "Once upon a time", "--quiet"]).args(args).assert()
}

fn text_of(assert: assert_cmd::assert::Assert) -> String {
    String::from_utf8(assert.success().get_output().stdout.clone()).unwrap()
}

#[test]
fn the_story_is_the_one_of_hugging_face() {
    let (pack, golden) = (packed("stories260k"), golden("stories260k"));
    let expected = format!("{}\n", golden["prompts"][0]["greedy_text"].as_str().unwrap());
    assert_eq!(golden["prompts"][0]["text"], "Once upon a time");
    assert_eq!(text_of(story(pack.path(), &["--max-new", "32"])), expected);
    // The prompt comes from standard input, and the pack is found in the current directory or through a variable.
    let piped = || {
        let mut command = iec();
        command.args(["run", "--max-new", "32", "-q"]).write_stdin("Once upon a time\n");
        command
    };
    assert_eq!(text_of(piped().current_dir(pack.path()).assert()), expected);
    for variable in ["MODEL_DIR", "IE_MODEL_DIR"] {
        assert_eq!(text_of(piped().env(variable, pack.path()).assert()), expected);
    }
}

#[test]
fn a_seed_reproduces_a_text_and_another_seed_gives_another() {
    let pack = packed("stories260k");
    let drawn = |seed| text_of(story(pack.path(), &["--temperature", "1", "--seed", seed, "--max-new", "40"]));
    assert_eq!(drawn("3"), drawn("3"));
    assert_ne!(drawn("3"), drawn("4"));
    let greedy = text_of(story(pack.path(), &["--greedy", "--max-new", "20"]));
    assert_eq!(text_of(story(pack.path(), &["--top-k", "1", "--temperature", "2", "--max-new", "20"])), greedy);
    assert_eq!(text_of(story(pack.path(), &["--temperature", "0", "--max-new", "20"])), greedy);
}

#[test]
fn other_names_of_sampling_options_mean_the_same() {
    let pack = packed("stories260k");
    let said = |options: &str| {
        let options: Vec<&str> = options.split(' ').chain(["--max-new", "64"]).collect();
        text_of(story(pack.path(), &options))
    };
    let greedy = said("--greedy");
    for (name, other) in [
        ("--temperature 0.9 --typical 0.6", "--temp 0.9 --typical-p 0.6"),
        ("--mirostat 1 --mirostat-tau 6 --mirostat-eta 0.3", "--mirostat 1 --mirostat-ent 6 --mirostat-lr 0.3"),
        ("--temp 1.5 --min-p 0.2 --samplers min_p,temperature", "--temp 1.5 --min-p 0.2 --samplers min-p;temp"),
        ("--xtc-probability 1 --xtc-threshold 0.1", "--xtc-probability 1"),
        (
            "--dry-multiplier 50 --dry-allowed-length 0 --dry-sequence-breaker none",
            "--dry-multiplier 50 --dry-allowed-length 0 --dry-sequence-breaker none --dry-base 1.75",
        ),
        ("--presence-penalty 9 --repeat-last-n 30", "--repeat-last-n 30 --presence-penalty 9"),
    ] {
        let text = said(name);
        assert_eq!(text, said(other), "{name}");
        assert_ne!(text, greedy, "{name}");
    }
    assert_eq!(said("--mirostat 0 --dry-multiplier 0 --presence-penalty 9 --repeat-last-n 0"), greedy);
}

#[test]
fn banned_texts_do_not_appear_and_biased_tokens_do() {
    let pack = packed("stories260k");
    let text = |args: &[&str]| text_of(story(pack.path(), &[args, &["--max-new", "60"]].concat()));
    assert!(text(&[]).contains("Lily"));
    assert!(!text(&["--ban", "Lily", "--ban", "Tim"]).contains("Lily"));
    let always = text(&["--logit-bias", "was+1000"]);
    assert_eq!(always.matches("was").count(), 60, "{always}");
    let never = text(&["--logit-bias", "was=-inf"]);
    assert!(text(&[]).contains(" was ") && !never.contains(" was "), "{never}");
    let refused = refused(2, &["--prompt", "a", "--logit-bias", "elephants+1"], pack.path());
    assert!(refused.contains("expected one token") && refused.contains("--ban"), "{refused}");
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let pack = packed("stories260k");
    let whole = text_of(story(pack.path(), &["--max-new", "60"]));
    for stop in ["girl", "tle gi", ". She", "y."] {
        let text = text_of(story(pack.path(), &["--max-new", "60", "--stop", stop, "--stop", "never said"]));
        let expected = &whole[..whole.find(stop).unwrap()];
        assert_eq!(text.trim_end_matches('\n'), expected, "{stop}");
    }
    let json = text_of(story(pack.path(), &["--max-new", "60", "--stop", "girl", "--json"]));
    let line: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&line["prompts"][0]["finish"], &line["text"]), (&json!("stop"), &json!(", there was a little ")));
}

#[test]
fn json_is_one_line_with_text_tokens_and_log_probabilities() {
    let (pack, golden) = (packed("stories260k"), golden("stories260k"));
    let json = text_of(story(pack.path(), &["--max-new", "32", "--json", "--logprobs", "3"]));
    assert_eq!(json.lines().count(), 1);
    let line: Value = serde_json::from_str(&json).unwrap();
    let prompt = &golden["prompts"][0];
    assert_eq!((&line["text"], &line["tokens"]), (&prompt["greedy_text"], &prompt["greedy_ids"]));
    assert_eq!(line["prompts"][0]["prompt_id"], "4d01a780ce25dd1c");
    let tokens = line["prompts"][0]["logprobs"].as_array().unwrap();
    assert_eq!(tokens.len(), 32);
    for token in tokens {
        let top = token["top"].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["id"]), (3, &token["id"]));
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
    }
    let on_stderr = iec()
        .args(["run", "--prompt", "Once", "--max-new", "2", "--logprobs", "2", "--model-dir"])
        .arg(pack.path())
        .assert()
        .success();
    let stderr = String::from_utf8_lossy(&on_stderr.get_output().stderr).into_owned();
    assert!(stderr.contains("prompt 0 token 1: ") && stderr.contains("tokens/s"), "{stderr}");
}

#[test]
fn random_models_stream_valid_utf_8_that_is_the_decoded_text() {
    let (pack, golden) = (packed("llama-gqa"), golden("llama-gqa"));
    let (_, printed) = continued(pack.path(), &golden["prompts"], &["--ignore-eos", "--special", "--quiet"]);
    let mut expected = String::new();
    for (i, prompt) in golden["prompts"].as_array().unwrap().iter().enumerate() {
        expected += &format!("== prompt {i} ==\n{}\n", prompt["greedy_text"].as_str().unwrap());
    }
    assert_eq!(printed, expected);
}

#[test]
fn a_full_context_ends_the_text_and_a_longer_prompt_is_refused() {
    let pack = packed("stories260k");
    let json = text_of(story(pack.path(), &["--ctx", "20", "--max-new", "500", "--ignore-eos", "--json"]));
    let line: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&line["prompts"][0]["finish"], &line["tokens_generated"]), (&json!("context"), &json!(16)));
    let refused = story(pack.path(), &["--ctx", "4"]).code(2);
    let stderr = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
    assert!(stderr.contains("5 prompt tokens") && stderr.contains("--ctx"), "{stderr}");
}

/// Runs `iec run` with arguments that must fail and returns its stderr.
fn refused(code: i32, args: &[&str], dir: &Path) -> String {
    let assert = iec().arg("run").args(args).current_dir(dir).write_stdin("x").assert().code(code);
    assert!(assert.get_output().stdout.is_empty(), "{args:?}");
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

#[test]
fn without_a_model_run_and_chat_use_the_embedded_one_and_say_so() {
    let (empty, temporary, pack) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), packed("stories260k"));
    let of = |args: &[&str]| {
        let mut command = iec();
        command.args(args).current_dir(empty.path()).env("TMPDIR", temporary.path()).write_stdin("");
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let prompt = ["--prompt", "Once upon a time", "--max-new", "6"];
    let named = of(&[&["run", pack.path().to_str().unwrap()][..], &prompt].concat());
    assert!(!named.2.contains("embedded"), "{named:?}");
    let cases: [(&[&str], &str); 4] = [
        (&["run"], &named.1),
        (&["run", "--chat", "--greedy"], &named.1),
        (&["chat", "--greedy"], &named.1),
        (&["run", "--plan"], "memory"),
    ];
    for (command, expected) in cases {
        let (code, stdout, stderr) = of(&[command, &prompt].concat());
        assert!(code == Some(0) && stderr.contains("note: no model named; "), "{command:?}: {stderr}");
        assert!(stdout.contains(expected), "{command:?}: {stdout} {stderr}");
    }
    let left: Vec<_> = std::fs::read_dir(temporary.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    // A model that was named and is missing is another matter.
    iec().args(["run", "--prompt", "x"]).env("MODEL_DIR", "nowhere").current_dir(empty.path()).assert().code(3);
}

#[test]
fn failures_have_their_exit_codes_and_name_the_culprit() {
    let pack = packed("stories260k");
    struct Case {
        code: i32,
        args: &'static [&'static str],
        said: &'static str,
    }
    let cases = [
        Case { code: 3, args: &["--model-dir", "nowhere"], said: "nowhere: found no file or directory" },
        Case { code: 3, args: &["--model-json", "none.json"], said: "none.json" },
        Case { code: 3, args: &["--model-bin", "none.bin"], said: "none.bin" },
        Case { code: 3, args: &["--tokenizer", "none.json"], said: "none.json" },
        Case { code: 5, args: &["--device", "ze"], said: "docs/decisions/0010" },
        Case { code: 2, args: &["--precision", "int3"], said: "int3" },
        Case { code: 2, args: &["--pretranspose", "some"], said: "--pretranspose" },
        Case { code: 2, args: &["--prompt", "a", "--greedy", "--top-k", "3"], said: "--greedy" },
        Case { code: 2, args: &["--top-p", "0"], said: "top-p" },
        Case { code: 2, args: &["--greedy", "--typical", "0.9"], said: "--greedy" },
        Case { code: 2, args: &["--repeat-last-n", "64"], said: "--repeat-penalty" },
        Case { code: 2, args: &["--presence-penalty", "1", "--repeat-last-n", "-2"], said: "-1 for all" },
        Case { code: 2, args: &["--dry-base", "2"], said: "--dry-multiplier" },
        Case { code: 2, args: &["--mirostat", "3"], said: "0..=2" },
        Case { code: 2, args: &["--mirostat", "2", "--top-k", "40"], said: "top_k" },
        Case { code: 2, args: &["--samplers", "top_k,temperature", "--min-p", "0.1"], said: "min_p" },
        Case { code: 5, args: &["--samplers", "top_k,top_n_sigma"], said: "top_n_sigma" },
        Case { code: 2, args: &["--logit-bias", "5"], said: "TOKEN+BIAS" },
        Case { code: 2, args: &["--prompt", "a", "--logit-bias", "5000+1"], said: "below 512" },
        Case { code: 2, args: &["--ban", ""], said: "--ban" },
        Case { code: 2, args: &["--system", "be nice"], said: "--chat" },
        Case { code: 2, args: &["--max-new", "0"], said: "at least 1" },
        Case { code: 2, args: &["--batch", "0"], said: "--batch" },
        Case { code: 1, args: &["--prompts-file", "none.txt"], said: "none.txt" },
        Case { code: 1, args: &["--trace-ids", "no/such/dir/t.jsonl"], said: "t.jsonl" },
        Case { code: 1, args: &["--chat"], said: "--chat-template" },
        Case { code: 1, args: &["--chat-template", "auto"], said: "--chat-template" },
    ];
    for case in cases {
        let said = refused(case.code, case.args, pack.path());
        assert!(said.contains(case.said), "{:?}: {said}", case.args);
    }
    let wrong = iec().arg("run").env("IE_PRECISION", "int9").current_dir(pack.path()).write_stdin("x").assert().code(2);
    assert!(String::from_utf8_lossy(&wrong.get_output().stderr).contains("IE_PRECISION"));
}

#[test]
fn a_broken_tokenizer_is_named_and_nothing_panics() {
    let pack = packed("stories260k");
    let path = pack.path().join("tokenizer.json");
    let good = std::fs::read_to_string(&path).unwrap();
    for broken in ["", "{\"model\":", "[]", &good[..good.len() - 100], &"{\"a\":".repeat(50_000)] {
        std::fs::write(&path, broken).unwrap();
        let said = refused(3, &["--prompt", "x"], pack.path());
        assert!(said.contains("tokenizer.json") && !said.contains("panicked"), "{said}");
    }
    std::fs::remove_file(&path).unwrap();
    assert!(refused(3, &["--prompt", "x"], pack.path()).contains("--tokenizer"));
    // A tokenizer of another model gives ids that this model does not have.
    let other = fixture("gptoss-trained").join("tokenizer.json");
    let said = refused(3, &["--tokenizer", other.to_str().unwrap(), "--prompt", "<|return|>"], pack.path());
    assert!(said.contains("vocabulary of 512"), "{said}");
}

#[test]
fn an_interrupted_trace_leaves_no_file() {
    let pack = packed("stories260k");
    let trace = pack.path().join("t.jsonl");
    let said = refused(2, &["--prompt", "x", "--ctx", "1", "--trace-ids", "t.jsonl"], pack.path());
    assert!(said.contains("context"), "{said}");
    assert!(!trace.exists());
}

#[test]
fn a_closed_pipe_is_success() {
    let pack = packed("stories260k");
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("iec"))
        .args(["run", "--ignore-eos", "--max-new", "400", "--prompt", "Once", "--model-dir"])
        .arg(pack.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && !String::from_utf8_lossy(&output.stderr).contains("error"), "{output:?}");
}

#[test]
#[cfg(unix)]
fn an_interrupt_ends_with_130() {
    use std::io::{BufRead, BufReader, Read, Write};
    let pack = chatty();
    // The commands are a chat that waits for its next message, and measurements that would take hours.
    for args in [&["run", "--chat", "--stop", "\n"][..], &["bench", "--runs", "1000000"]] {
        let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("iec"))
            .args(args)
            .arg("--model-dir")
            .arg(pack.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(b"Hello\n").unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut String::new()).unwrap();
        let pid = child.id().to_string();
        assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
        stdout.read_to_end(&mut Vec::new()).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130), "{args:?}");
        drop(stdin);
    }
}

/// Packs the embedded model with a chat template.
fn chatty() -> tempfile::TempDir {
    let pack = packed("stories260k");
    let template = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}Tell: {{ m.content }}\n\
                    {% else %}{{ m.content }}\n{% endif %}{% endfor %}";
    std::fs::write(pack.path().join("chat_template.jinja"), template).unwrap();
    pack
}

#[test]
fn template_auto_wraps_the_prompt_as_the_model_expects() {
    let pack = chatty();
    let trace = pack.path().join("t.jsonl");
    story(pack.path(), &["--template", "auto", "--max-new", "4", "--trace-ids", trace.to_str().unwrap()]).success();
    let wrapped = Trace::read(&trace);
    let mut raw = iec();
    raw.args(["run", "--prompt", "Tell: Once upon a time\n", "--max-new", "4", "--model-dir"]).arg(pack.path());
    raw.arg("--overwrite").arg("--trace-ids").arg(&trace).assert().success();
    let raw = Trace::read(&trace);
    assert_eq!(wrapped.prompts[0]["prompt_token_ids"], raw.prompts[0]["prompt_token_ids"]);
    assert_eq!(wrapped.ids(0), raw.ids(0));
}

#[test]
fn a_chat_over_a_pipe_answers_each_line_and_keeps_what_was_read() {
    let pack = chatty();
    let talk = |input: &str| {
        let mut command = iec();
        command
            .args(["run", "-v", "--chat", "--greedy", "--max-new", "12", "--stop", "\n", "--model-dir"])
            .arg(pack.path());
        command.write_stdin(input).assert().success()
    };
    let both = talk("Once upon a time\n\nThe dog\n");
    let stdout = String::from_utf8(both.get_output().stdout.clone()).unwrap();
    let stderr = String::from_utf8(both.get_output().stderr.clone()).unwrap();
    assert_eq!(stdout.lines().count(), 2, "{stdout}");
    let first = String::from_utf8(talk("Once upon a time").get_output().stdout.clone()).unwrap();
    assert_eq!(stdout.lines().next(), first.lines().next());
    let reused: Vec<&str> = stderr.lines().filter(|line| line.contains("reused")).collect();
    assert!(reused[0].contains("(0 reused)") && !reused[1].contains("(0 reused)"), "{stderr}");
}

#[test]
fn a_reused_conversation_gives_the_same_answer_as_a_fresh_one() {
    use iec::generate::speculate::Speculator;
    use iec::generate::{CachedPrefix, Completion, Options, Request, generate};
    use iec::iebin::IebinReader;
    use iec::runtime::{Engine, EngineOptions};
    let pack = packed("gptoss-mxfp4");
    let mut engine = Engine::open(&IebinReader::open(pack.path()).unwrap(), &EngineOptions::default()).unwrap();
    let mut continued = |ids: &[u32], prefix: Option<CachedPrefix>| -> Completion {
        let request = Request { ids: ids.to_vec(), max_new: 8, prefix, keep_prefix: true, ..Request::default() };
        let options = Options { tokenizer: None, batch: 1, eos: &[], ..Options::default() };
        generate(&mut engine, None, &mut Speculator::off(), vec![request], &options, |_| Ok(()))
            .unwrap()
            .completions
            .remove(0)
    };
    let prompt = [5, 9, 200, 31, 77, 12];
    let first = continued(&prompt, None);
    // The cases are the same prompt, a longer one, and one that diverges from it in the middle.
    let longer = [&prompt[..], &first.ids, &[40, 41]].concat();
    let other = [5, 9, 200, 99];
    for ids in [&prompt[..], &longer, &other] {
        let prefix = continued(&prompt, None).prefix;
        let (fresh, reused) = (continued(ids, None), continued(ids, prefix));
        assert_eq!(fresh.ids, reused.ids);
        assert!(reused.reused_tokens >= 3 && reused.reused_tokens < ids.len(), "{}", reused.reused_tokens);
    }
}

#[test]
fn help_names_every_variable_and_gives_examples() {
    for (command, variables) in [
        ("run", &["MODEL_DIR", "IE_MODEL_DIR", "IE_PRECISION", "IE_THREADS", "IEC_AFFINITY"][..]),
        (
            "bench",
            &[
                "THREADS",
                "PRECISION",
                "PROMPTS",
                "RUNS",
                "ROUNDS",
                "BATCH",
                "MAX_NEW",
                "WARMUP_TOKENS",
                "IE_BYTES_PER_TOKEN",
                "IE_STRIDE_BYTES",
                "IE_VERIFY_TOUCH",
                "IE_REQUIRE_MODEL",
            ],
        ),
    ] {
        let output = iec().args([command, "--help"]).assert().success();
        let help = String::from_utf8(output.get_output().stdout.clone()).unwrap();
        for variable in variables {
            assert!(help.contains(variable), "{command}: {variable}");
        }
        assert!(help.contains("Examples:"), "{command}");
    }
}
