//! Tests `iec eval`: its metrics follow the rules of other tools and are compared with direct computation from all
//! logits.

use crate::common::{all_logits, fixture, iec, packed, packed_as};
use iec::eval::windows::leading_tokens;
use iec::eval::{Windows, divergence, perplexity};
use iec::generate::text::Tokenizer;
use iec::iebin::IebinReader;
use iec::runtime::{Engine, EngineOptions, Precision};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

pub const TEXT: &str = "tests/text/tinystories_valid_30k.txt";

fn open(pack: &Path, precision: Option<Precision>) -> Engine {
    let options = EngineOptions { precision, threads: 2, ..EngineOptions::default() };
    Engine::open(&IebinReader::open(pack).unwrap(), &options).unwrap()
}

fn text() -> (PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(TEXT);
    let text = std::fs::read_to_string(&path).unwrap();
    (path, text)
}

/// Packs the embedded model in 4 bits and returns the directory.
fn four_bits() -> PathBuf {
    let rules = Path::new(env!("CARGO_TARGET_TMPDIR")).join("eval-q4_0.json");
    std::fs::write(&rules, r#"{"version":1,"rules":[{"include":"layers.*proj(.weight)?$","scheme":"q4_0"}]}"#).unwrap();
    packed_as("eval-q4_0", &fixture("stories260k"), &["--q4-map", rules.to_str().unwrap()])
}

/// Returns the natural logarithms of the probabilities given by a row of logits.
fn ln_p(row: &[f32]) -> Vec<f64> {
    let sum: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
    row.iter().map(|v| f64::from(*v) - sum.ln()).collect()
}

#[test]
fn figures_are_those_of_plain_arithmetic_on_all_logits() {
    let float = packed("stories260k");
    let tokenizer = Tokenizer::open(&float.path().join("tokenizer.json")).unwrap();
    let (mut model, mut reference) = (open(&four_bits(), Some(Precision::Int4w)), open(float.path(), None));
    let windows = Windows::of_text(&tokenizer, &text().1, 300, Some(3)).unwrap();
    assert_eq!(leading_tokens(&tokenizer).unwrap(), [1]);
    let found = divergence(&mut model, &mut reference, &windows).unwrap();
    assert_eq!(found.model, perplexity(&mut model, &windows).unwrap());
    let (mut nll, mut kl, mut same, mut count) = (0.0, 0.0, 0, 0);
    let vocab = model.config().vocab;
    let argmax = |p: &[f64]| (0..vocab).max_by(|a, b| p[*a].total_cmp(&p[*b])).unwrap();
    for window in windows.iter() {
        assert_eq!((window.len(), window[0]), (300, 1));
        let (ours, theirs) = (all_logits(&mut model, &window), all_logits(&mut reference, &window));
        for i in 150..299 {
            let row = |logits: &[f32]| ln_p(&logits[i * vocab..(i + 1) * vocab]);
            let (ours, theirs) = (row(&ours), row(&theirs));
            nll -= ours[window[i + 1] as usize];
            kl += theirs.iter().zip(&ours).map(|(t, o)| t.exp() * (t - o)).sum::<f64>();
            same += u32::from(argmax(&ours) == argmax(&theirs));
            count += 1;
        }
    }
    assert_eq!(windows.scored(), count);
    let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{a} {b}");
    close(found.model.nll.value, nll / count as f64);
    close(found.kl.value, kl / count as f64);
    close(found.top1_agreement.value, f64::from(same) / count as f64);
    assert!(found.kl.value > 1e-3 && found.perplexity_ratio.value > 1.0, "{found:?}");
}

#[test]
fn a_model_does_not_diverge_from_itself() {
    let float = packed("stories260k");
    let tokenizer = Tokenizer::open(&float.path().join("tokenizer.json")).unwrap();
    let windows = Windows::of_text(&tokenizer, &text().1, 128, Some(2)).unwrap();
    let found = divergence(&mut open(float.path(), None), &mut open(float.path(), None), &windows).unwrap();
    assert_eq!((found.kl_spread.max, found.top1_agreement.value, found.rms_delta_p.value), (0.0, 1.0, 0.0));
    assert_eq!((found.model, found.perplexity_ratio.value), (found.reference, 1.0));
}

/// Requires `llama-trained`, which is not in the repository.
#[test]
fn second_halves_of_windows_have_the_perplexity_of_hugging_face() {
    let Some(extra) = std::env::var_os("IEC_EXTRA_FIXTURES").map(PathBuf::from) else { return };
    let hf_dir = extra.join("llama-trained");
    let golden: Value = serde_json::from_slice(&std::fs::read(hf_dir.join("golden.json")).unwrap()).unwrap();
    let text = std::fs::read_to_string(extra.join(golden["eval_text_file"].as_str().unwrap())).unwrap();
    let golden = &golden["perplexity_512_second_half"];
    let tokenizer = Tokenizer::open(&hf_dir.join("tokenizer.json")).unwrap();
    let windows = Windows::of_text(&tokenizer, &text, 512, None).unwrap();
    assert_eq!(windows.scored() as u64, golden["n"].as_u64().unwrap());
    let pack = packed_as("llama-trained", &hf_dir, &[]);
    let found = perplexity(&mut open(&pack, Some(Precision::Fp32)), &windows).unwrap();
    let nll = golden["nll_mean"].as_f64().unwrap();
    assert!((found.nll.value - nll).abs() < 1e-5, "{} {nll}", found.nll.value);
}

#[test]
fn the_report_tells_model_reference_and_text() {
    let float = packed("stories260k");
    let run = |more: &[&str]| {
        let mut command = iec();
        command.args(["eval", "--ctx", "128", "--windows", "2", "--model-dir"]).arg(four_bits());
        command.arg("--text").arg(text().0).args(more);
        command.assert()
    };
    let reference = float.path().to_str().unwrap();
    let json = run(&["--kl-ref", reference, "--json"]).success();
    let line: Value = serde_json::from_slice(&json.get_output().stdout).unwrap();
    assert_eq!((&line["ctx"], &line["windows"], &line["tokens_scored"]), (&128.into(), &2.into(), &126.into()));
    assert_eq!((&line["precision"], &line["reference"]["precision"]), (&"int4".into(), &"fp32".into()));
    assert_eq!(line["text"]["sha256"].as_str().unwrap().len(), 64);
    let at = |path: &str| line.pointer(path).unwrap_or_else(|| panic!("{path} in {line}")).as_f64().unwrap();
    let ratio = at("/perplexity/value") / at("/reference/perplexity/value");
    assert!((ratio / at("/reference/perplexity_ratio/value") - 1.0).abs() < 1e-9);
    assert!(at("/reference/kl/mean") > 0.0 && at("/reference/kl/max") >= at("/reference/kl/p99"));
    assert!(at("/perplexity/ci95/0") < at("/perplexity/value") && at("/perplexity/stderr") > 0.0);
    let interval = [0, 1].map(|side| at(&format!("/reference/perplexity_ratio/ci95/{side}")));
    assert!(interval[0] < ratio && ratio < interval[1] && at("/reference/top1_agreement/value") < 1.0);
    let table = run(&["--kl-ref", reference]).success();
    let table = String::from_utf8_lossy(&table.get_output().stdout).into_owned();
    for figure in ["same most likely token", "99 % of KL divergences below", "95 % interval of the ratio"] {
        assert!(table.contains(figure), "{table}");
    }
    let table = run(&[]).success();
    assert!(String::from_utf8_lossy(&table.get_output().stdout).contains("95 % interval"));
    run(&["--kl-ref", "no/such/pack"]).code(3);
    let other = packed("llama-gqa");
    run(&["--kl-ref", other.path().to_str().unwrap()]).code(2);
    iec().args(["eval", "--model-dir", reference]).assert().code(2);
    let short = float.path().join("short.txt");
    std::fs::write(&short, "Once").unwrap();
    iec().args(["eval", "--model-dir", reference, "--text"]).arg(&short).assert().code(2);
}

/// Runs `iec eval` on the embedded model and returns the lines of its output.
fn answers(option: &str, lines: &[Value], more: &[&str]) -> Vec<Value> {
    answers_of("stories260k", option, lines, more)
}

fn answers_of(fixture: &str, option: &str, lines: &[Value], more: &[&str]) -> Vec<Value> {
    let pack = packed(fixture);
    let file = pack.path().join("questions.jsonl");
    std::fs::write(&file, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let mut command = iec();
    command.args(["eval", "--precision", "fp32", "--threads", "2", "--model-dir"]).arg(pack.path());
    let output = command.arg(option).arg(&file).args(more).assert().success();
    let stdout = String::from_utf8_lossy(&output.get_output().stdout).into_owned();
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the log-probability of `text[from..]` after the preceding tokens, and whether it is the greedy
/// continuation.
fn plain_likelihood(engine: &mut Engine, text: &[u32], from: usize) -> (f64, bool) {
    let (logits, vocab) = (all_logits(engine, text), engine.config().vocab);
    let rows: Vec<&[f32]> = logits.chunks_exact(vocab).collect();
    let best = |row: &[f32]| (0..vocab).fold(0, |best, i| if row[i] > row[best] { i } else { best });
    (from..text.len()).fold((0.0, true), |(sum, greedy), at| {
        let (row, id) = (rows[at - 1], text[at] as usize);
        (sum + ln_p(row)[id], greedy && best(row) == id)
    })
}

#[test]
fn likelihoods_are_those_of_plain_arithmetic_in_the_order_of_the_requests() {
    let pack = packed("stories260k");
    let tokenizer = Tokenizer::open(&pack.path().join("tokenizer.json")).unwrap();
    let mut engine = open(pack.path(), Some(Precision::Fp32));
    let requests = [
        json!({"context": "Once upon a time, there was a", "continuation": " little girl"}),
        json!({"context": "Once upon a time, there was a", "continuation": " stone", "id": "s1"}),
        json!(["Once upon a time,", " there was"]),
        json!({"context_ids": [1, 403, 407], "continuation_ids": [261, 378]}),
        json!({"context": "Once upon a time, there was a", "continuation": " little"}),
        json!({"text": "The dog ran."}),
        json!({"context": "", "continuation": "The dog ran."}),
    ];
    let found = answers("--loglikelihood", &requests, &[]);
    assert_eq!(found.len(), requests.len());
    for (index, (request, found)) in requests.iter().zip(&found).enumerate() {
        let text = |key: &str, place: usize| request[key].as_str().or(request[place].as_str());
        let (whole, from) = match (request["context_ids"].as_array(), text("context", 0)) {
            (Some(_), _) => (vec![1, 403, 407, 261, 378], 3),
            (None, context) => {
                let context = context.unwrap_or("");
                let continuation = text("continuation", 1).or(request["text"].as_str()).unwrap();
                let before = tokenizer.encode_plain(context).unwrap().len();
                (tokenizer.encode(&format!("{context}{continuation}")).unwrap(), 1 + before)
            }
        };
        let (logprob, greedy) = plain_likelihood(&mut engine, &whole, from);
        assert!((found["logprob"].as_f64().unwrap() / logprob - 1.0).abs() < 1e-9, "{request} {found} {logprob}");
        assert_eq!((&found["is_greedy"], &found["index"]), (&json!(greedy), &json!(index)), "{request} {found}");
        assert_eq!((&found["tokens"], &found["truncated"]), (&json!(whole.len() - from), &json!(false)));
    }
    assert_eq!(found[1]["id"], "s1");
    assert!(found[0]["is_greedy"] == true && found[1]["is_greedy"] == false);
}

#[test]
fn both_tokens_that_glm_puts_before_a_text_begin_windows_and_contexts() {
    let pack = packed("glm4flash");
    let tokenizer = Tokenizer::open(&pack.path().join("tokenizer.json")).unwrap();
    let prefix = leading_tokens(&tokenizer).unwrap();
    let spelled: Vec<String> = prefix.iter().map(|id| tokenizer.token(*id).unwrap()).collect();
    assert_eq!(spelled, ["[gMASK]", "<sop>"]);
    let windows = Windows::of_text(&tokenizer, &text().1, 64, Some(3)).unwrap();
    let plain = tokenizer.encode_plain(&text().1).unwrap();
    assert_eq!(windows.count(), 3);
    for (number, window) in windows.iter().enumerate() {
        assert_eq!((&window[..2], &window[2..]), (&prefix[..], &plain[number * 64..number * 64 + 62]));
    }
    let mut engine = open(pack.path(), Some(Precision::Fp32));
    let lines =
        [json!({"context": "Once upon a time,", "continuation": " there was"}), json!({"text": "The dog ran."})];
    let found = answers_of("glm4flash", "--loglikelihood", &lines, &[]);
    for (context, continuation, found) in
        [("Once upon a time,", " there was", &found[0]), ("", "The dog ran.", &found[1])]
    {
        let whole = tokenizer.encode(&format!("{context}{continuation}")).unwrap();
        let from = 2 + tokenizer.encode_plain(context).unwrap().len();
        assert_eq!(whole[..2], prefix);
        let (logprob, _) = plain_likelihood(&mut engine, &whole, from);
        assert!((found["logprob"].as_f64().unwrap() / logprob - 1.0).abs() < 1e-9, "{found} {logprob}");
        assert_eq!(found["tokens"], whole.len() - from);
    }
}

#[test]
fn a_text_longer_than_the_context_is_scored_window_by_window() {
    let text: String = text().1.chars().take(3000).collect();
    let pack = packed("stories260k");
    let tokenizer = Tokenizer::open(&pack.path().join("tokenizer.json")).unwrap();
    let ids = tokenizer.encode_plain(&text).unwrap();
    assert!(ids.len() > 700);
    let found = &answers("--loglikelihood", &[json!({"text": text})], &["--ctx", "300"])[0];
    assert_eq!(found["tokens"], ids.len());
    // Direct computation: 300 tokens after BOS, then 300 more after the last one, then the rest after as many tokens
    // as fit.
    let mut engine = open(pack.path(), Some(Precision::Fp32));
    let mut sum = plain_likelihood(&mut engine, &[&[1], &ids[..300]].concat(), 1).0;
    let mut done = 300;
    while done < ids.len() {
        let end = (done + 300).min(ids.len());
        let begin = (end - 1).saturating_sub(300);
        sum += plain_likelihood(&mut engine, &ids[begin..end], done - begin).0;
        done = end;
    }
    assert!((found["logprob"].as_f64().unwrap() / sum - 1.0).abs() < 1e-9, "{found} {sum}");
    // A context that is too long is truncated at its beginning.
    let long = json!({"context": text, "continuation": " the end"});
    assert_eq!(answers("--loglikelihood", &[long], &["--ctx", "64"])[0]["truncated"], true);
}

#[test]
fn choices_are_judged_by_likelihood_and_length() {
    let questions = [
        json!({"query": "Once upon a", "choices": ["time", "stone", "zebra"], "answer": 0}),
        json!({"ctx": "Once upon a time, there was a little", "endings": ["girl", "purple axiom"], "label": "0"}),
        json!({"question": "x", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}),
    ];
    let details = Path::new(env!("CARGO_TARGET_TMPDIR")).join("choices.jsonl");
    let found =
        &answers("--choices", &questions, &["--json", "--overwrite", "--details", details.to_str().unwrap()])[0];
    assert_eq!((&found["questions"], &found["task"]), (&json!(3), &json!("choices")));
    let lines = std::fs::read_to_string(&details).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&lines[0]["chosen"], &lines[1]["chosen"]), (&json!(0), &json!(0)));
    let right = lines.iter().filter(|line| line["chosen"] == line["answer"]).count() as f64;
    assert!((found["accuracy"]["value"].as_f64().unwrap() - right / 3.0).abs() < 1e-12);
    let requests: Vec<Value> = ["time", "stone", "zebra"]
        .map(|choice| json!({"context": "Once upon a", "continuation": format!(" {choice}")}))
        .into();
    let likelihoods = answers("--loglikelihood", &requests, &[]);
    for (place, likelihood) in likelihoods.iter().enumerate() {
        assert_eq!(lines[0]["logprobs"][place], likelihood["logprob"]);
    }
    assert_eq!(answers("--choices", &questions, &["--json", "--limit", "1"])[0]["accuracy"]["value"], 1.0);
}

#[test]
fn exact_matches_are_found_in_greedy_answers() {
    let tasks = [
        json!({"prompt": "Once upon a time", "answer": "girl", "regex": "little (\\w+)"}),
        json!({"prompt": "Once upon a time", "answer": "boy", "regex": "little (\\w+)"}),
        json!({"question": "How many?", "answer": "1 + 1 = 2\n#### 2"}),
    ];
    let details = Path::new(env!("CARGO_TARGET_TMPDIR")).join("exact.jsonl");
    let run = |batch: &str| {
        let more =
            ["--json", "--max-new", "12", "--batch", batch, "--overwrite", "--details", details.to_str().unwrap()];
        let found = answers("--exact-match", &tasks, &more).remove(0);
        (found, std::fs::read_to_string(&details).unwrap())
    };
    let (found, lines) = run("1");
    assert_eq!(found["questions"], 3);
    assert!((found["exact_match"]["value"].as_f64().unwrap() - 1.0 / 3.0).abs() < 1e-12, "{lines}");
    assert_eq!(run("3").1, lines);
}

#[test]
fn a_broken_line_is_named() {
    let pack = packed("stories260k");
    let file = pack.path().join("broken.jsonl");
    std::fs::write(&file, "{\"text\": \"a\"}\n{\"context\": \"a\"}\n").unwrap();
    for option in ["--loglikelihood", "--choices", "--exact-match"] {
        let output = iec().args(["eval", "--model-dir"]).arg(pack.path()).arg(option).arg(&file).assert().code(1);
        let stderr = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(stderr.contains("broken.jsonl: line ") && stderr.contains("found no "), "{stderr}");
    }
}
