//! The promised names of the library: an engine answers requests of several threads as a session alone does.

use crate::common;
use iec::{
    AdapterOptions, Delta, Engine, FinishReason, OpenOptions, PackRequest, Pooling, Progress, QuantizeRequest, Request,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

fn options() -> OpenOptions {
    OpenOptions::from_json(r#"{"threads": 1, "device": "cpu"}"#).unwrap()
}

fn embedded() -> Engine {
    Engine::open_embedded(&options()).unwrap()
}

fn greedy(prompt: &str, tokens: usize) -> Request {
    Request::text(prompt).max_tokens(tokens).temperature(0.0)
}

fn ids(engine: &Engine, request: &Request) -> Vec<u32> {
    engine.generate(request).unwrap().choices[0].tokens.iter().map(|token| token.id).collect()
}

#[test]
fn an_engine_generates_what_a_session_generates() {
    let mut session = iec::models::embedded::open_session(&Default::default()).unwrap();
    let expected = session.complete("Once upon a time", 40).unwrap();
    let engine = embedded();
    let answer = engine.generate(&greedy("Once upon a time", 40)).unwrap();
    assert_eq!(answer.text(), expected);
    assert_eq!((answer.usage.completion_tokens, answer.choices[0].finish), (40, Some(FinishReason::Length)));
    let again = engine.generate(&greedy("Once upon a time", 40)).unwrap();
    assert!(again.usage.cached_tokens > 0, "{:?}", again.usage);
    assert_eq!(again.text(), expected);
    let metrics = engine.metrics();
    assert_eq!((metrics.generated_tokens, metrics.finished), (80, 2));
    assert!(engine.prometheus().contains("vllm:generation_tokens_total"));
}

#[test]
fn joined_events_are_the_answer() {
    let engine = embedded();
    let request = Request::text("The dog").max_tokens(30).seed(3).temperature(0.9).n(3).logprobs(2);
    let whole = engine.generate(&request).unwrap();
    let mut stream = engine.stream(&request).unwrap();
    let (mut texts, mut tokens, mut ends) = (vec![String::new(); 3], vec![Vec::new(); 3], 0);
    for event in stream.by_ref() {
        let event = event.unwrap();
        match event.delta {
            Delta::Text(text) => texts[event.choice] += &text,
            Delta::End(reason) => {
                assert_eq!(reason, FinishReason::Length);
                ends += 1;
            }
            other => panic!("{other:?}"),
        }
        tokens[event.choice].extend(event.tokens);
    }
    assert_eq!(ends, 3);
    assert_eq!(stream.into_answer().choices, whole.choices);
    for (choice, (text, tokens)) in whole.choices.iter().zip(texts.iter().zip(&tokens)) {
        assert_eq!((&choice.text, &choice.tokens), (text, tokens));
        assert!(tokens.iter().all(|token| token.top.len() == 2 && token.logprob.unwrap() <= 0.0));
    }
}

#[test]
fn the_best_of_several_texts_have_the_largest_means() {
    let engine = embedded();
    let base = Request::text("The cat").max_tokens(12).seed(5).temperature(1.2).logprobs(0);
    let all = engine.generate(&base.clone().n(6)).unwrap();
    let best = engine.generate(&base.n(2).field("best_of", 6)).unwrap();
    let mean = |choice: &iec::Choice| choice.tokens.iter().map(|token| token.logprob.unwrap()).sum::<f64>();
    let mut means: Vec<f64> = all.choices.iter().map(mean).collect();
    means.sort_by(|a, b| b.total_cmp(a));
    assert_eq!(best.choices.iter().map(mean).collect::<Vec<_>>(), means[..2]);
}

#[test]
fn a_conversation_and_its_echo_are_answered() {
    let engine = embedded();
    let chat = Request::chat([("user", "Once upon a time")]).max_tokens(8).temperature(0.0);
    let answer = engine.generate(&chat).unwrap();
    assert_eq!(answer.text(), engine.generate(&greedy("Once upon a time", 8)).unwrap().text().trim_start());
    assert_eq!(engine.prompt_ids(&chat).unwrap(), engine.tokenize("Once upon a time", true).unwrap());
    let echo = engine.generate(&greedy("Once", 4).field("echo", true)).unwrap();
    assert!(echo.text().starts_with("Once"), "{}", echo.text());
}

#[test]
fn a_cancelled_request_ends_where_it_is() {
    let engine = embedded();
    let mut stream = engine.stream(&greedy("Once upon a time", 400).field("ignore_eos", true)).unwrap();
    stream.next().unwrap().unwrap();
    let handle = stream.cancel_handle();
    std::thread::spawn(move || handle.cancel());
    let answer = stream.finish().unwrap();
    assert_eq!(answer.choices[0].finish, Some(FinishReason::Cancelled));
    assert!(answer.usage.completion_tokens < 400);
    drop(engine.stream(&greedy("Once", 400)).unwrap());
    assert_eq!(ids(&engine, &greedy("Once", 3)).len(), 3);
}

#[test]
fn threads_get_the_bits_of_requests_alone() {
    let engine = embedded();
    let request = |at: usize| Request::text("The sun").max_tokens(24).seed(at as u64).temperature(1.0);
    let alone: Vec<_> = (0..8).map(|at| ids(&engine, &request(at))).collect();
    std::thread::scope(|scope| {
        for (at, expected) in alone.iter().enumerate() {
            let engine = engine.clone();
            scope.spawn(move || (0..3).for_each(|_| assert_eq!(ids(&engine, &request(at)), *expected)));
        }
    });
}

#[test]
fn logits_scores_and_hidden_states_belong_together() {
    for kv in ["null", "4194304"] {
        let options = OpenOptions::from_json(&format!(r#"{{"threads": 1, "device": "cpu", "kv_memory": {kv}}}"#));
        let engine = Engine::open_embedded(&options.unwrap()).unwrap();
        let story = engine.generate(&greedy("Once upon a time", 150).field("ignore_eos", true)).unwrap();
        let text = format!("Once upon a time{}", story.text());
        let prompt = engine.tokenize(&text, true).unwrap();
        assert!(prompt.len() > 128, "more than a piece");
        let logits = engine.logits(&prompt).unwrap();
        let scores = engine.score(&prompt, 1).unwrap();
        assert_eq!((logits.rows(), scores.len()), (prompt.len(), prompt.len() - 1));
        for (at, score) in scores.iter().enumerate() {
            let row = logits.row(at);
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            let expected = f64::from(row[prompt[at + 1] as usize]) - sum.ln();
            assert_eq!(score.id, prompt[at + 1]);
            assert!((score.logprob.unwrap() - expected).abs() < 1e-9, "{at}: {score:?} {expected}");
        }
        let next = logits.row(prompt.len() - 1).iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
        assert_eq!(ids(&engine, &Request::ids(&prompt).max_tokens(1).temperature(0.0)), [next as u32]);
        let states = engine.hidden_states(&prompt).unwrap();
        assert_eq!((states.rows(), states.columns()), (prompt.len(), 64));
        let vector = engine.embed(&text, Pooling::Mean).unwrap();
        let length: f32 = vector.iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5);
        let last = engine.embed(&text, Pooling::Last).unwrap();
        let row = states.row(prompt.len() - 1);
        let ratio = row[0] / last[0];
        assert!(row.iter().zip(&last).all(|(a, b)| (a - b * ratio).abs() < 1e-4 * ratio.abs()));
    }
}

#[test]
fn wrong_requests_are_usage_errors_that_name_the_field() {
    let engine = embedded();
    let cases = [
        (Request::text("a").field("temprature", 1), "temprature"),
        (Request::text("a").temperature(-1.0), "temperature"),
        (Request::ids(&[]), "prompt"),
        (Request::ids(&[100_000]), "prompt"),
        (Request::text("a").n(2).field("best_of", 1), "best_of"),
        (Request::text("a").field("adapters", serde_json::json!(["none"])), "adapters"),
        (Request::chat([("nobody", "a")]), "messages"),
        (Request::text("word ".repeat(2000)), "prompt"),
    ];
    for (request, field) in cases {
        let error = engine.generate(&request).unwrap_err();
        assert_eq!(error.cause().exit_code(), 2, "{error}");
        assert!(error.to_string().contains(field), "{field}: {error}");
    }
    assert!(engine.logits(&[]).is_err() && engine.logits(&[512]).is_err() && engine.detokenize(&[512], true).is_err());
    assert_eq!(ids(&engine, &greedy("a", 2)).len(), 2, "the engine goes on");
    let missing = Engine::open("/no/such/model", &options()).unwrap_err();
    assert_eq!(missing.cause().exit_code(), 3, "{missing}");
}

#[test]
fn an_engine_that_is_closed_refuses_requests() {
    let engine = embedded();
    let other = engine.clone();
    let stream = engine.stream(&greedy("Once", 10)).unwrap();
    engine.close(Duration::from_secs(60)).unwrap();
    assert_eq!(stream.finish().unwrap().usage.completion_tokens, 10, "close waits for requests");
    assert_eq!(other.generate(&greedy("Once", 1)).unwrap_err().cause().exit_code(), 5);
}

#[test]
fn adapters_are_loaded_named_and_removed() {
    let home = tempfile::tempdir().unwrap();
    let fixture = common::fixture("lora-llama-gqa");
    iec::pack(&PackRequest::new(common::fixture("llama-gqa"), home.path().join("pack"))).unwrap();
    let engine = Engine::open(home.path().join("pack"), &options()).unwrap();
    let plain = ids(&engine, &Request::ids(&[1, 5, 9]).max_tokens(12).temperature(0.0));
    engine.load_adapter(&AdapterOptions::new("a", fixture.join("r8-qv"))).unwrap();
    assert_eq!(engine.adapters().unwrap(), ["a"]);
    assert!(engine.load_adapter(&AdapterOptions::new("a", fixture.join("r8-qv"))).is_err());
    let adapted = Request::ids(&[1, 5, 9]).max_tokens(12).temperature(0.0).adapter("a", 4.0);
    assert_ne!(ids(&engine, &adapted), plain);
    assert_eq!(ids(&engine, &Request::ids(&[1, 5, 9]).max_tokens(12).temperature(0.0)), plain);
    engine.unload_adapter("a").unwrap();
    assert!(engine.generate(&adapted).is_err() && engine.unload_adapter("a").is_err());
}

#[test]
fn conversions_report_progress_and_stop_where_the_caller_says_so() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let home = tempfile::tempdir().unwrap();
    let (model, pack) = (home.path().join("model"), home.path().join("pack"));
    iec::models::embedded::write_to(&model).unwrap();
    let request = PackRequest::new(&model, &pack);
    let stopped = iec::with_progress(|_| false, || iec::pack(&request)).unwrap_err();
    assert_eq!(stopped.cause().exit_code(), 130, "{stopped}");
    assert!(!pack.join("model.ie.json").exists());
    let count = |progress: Progress<'_>| {
        CALLS.fetch_add(usize::from(matches!(progress, Progress::Advanced { .. })), Ordering::Relaxed);
        true
    };
    let summary = iec::with_progress(count, || iec::pack(&request)).unwrap();
    assert!(summary.tensors > 40 && CALLS.load(Ordering::Relaxed) > 0);
    let found = iec::inspect(&iec::InspectRequest::new(&pack)).unwrap();
    assert_eq!(found["architecture"], "LlamaForCausalLM");
    assert_eq!(iec::verify(&iec::VerifyRequest::new(&pack)).unwrap().differences, Vec::<String>::new());
    let manifest = home.path().join("manifest.json");
    let mut quantize = QuantizeRequest::new(&model, &manifest);
    quantize.bits = Some(8);
    iec::quantize(&quantize).unwrap();
    let mut second = PackRequest::new(&model, home.path().join("q8"));
    second.q4_map = Some(manifest);
    assert!(iec::pack(&second).unwrap().quantized_tensors > 0);
    assert_eq!(iec::quantize(&quantize).unwrap_err().cause().exit_code(), 2, "the manifest is not replaced");
}

#[test]
fn engines_are_opened_and_closed_without_growth() {
    let home = tempfile::tempdir().unwrap();
    let pack = iec::models::embedded::pack_into(home.path()).unwrap();
    let resident = || {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    };
    let cycle = || {
        let engine = Engine::open(&pack, &options()).unwrap();
        assert_eq!(ids(&engine, &greedy("Once", 2)).len(), 2);
    };
    (0..20).for_each(|_| cycle());
    let before = resident();
    (0..100).for_each(|_| cycle());
    let grown = resident().saturating_sub(before);
    // One session of this model has some 3 MB; a leak of it would be 300 MB.
    assert!(grown < 60 << 20, "{grown} bytes more");
}
