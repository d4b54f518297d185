//! Scores of prompts, as lm-evaluation-harness reads them.

use super::client::Server;
use crate::common::{all_logits, fixture, packed_as};
use crate::forward_f64;
use iec::runtime::Precision;
use iec::runtime::{Engine, EngineOptions};
use iec::session::Session;
use iec::session::SessionOptions;
use serde_json::{Value, json};

fn log_softmax(row: &[f32], id: usize) -> f64 {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|x| f64::from(x - most).exp()).sum();
    f64::from(row[id] - most) - sum.ln()
}

#[test]
fn the_scores_of_a_prompt_are_those_of_the_model() {
    let pack = packed_as("stories260k", &fixture("stories260k"), &[]);
    let options = SessionOptions {
        engine: EngineOptions { precision: Some(Precision::Fp32), ..EngineOptions::default() },
        ..SessionOptions::default()
    };
    let mut session = Session::open(&pack, &options).unwrap();
    // Longer than the number of rows that are scored together, and than a page of the KV cache.
    let text = "Once upon a time, there was a little girl named Lily. She loved to play outside. ".repeat(6);
    let prompts = [session.encode("Once upon a time").unwrap(), session.encode(&text).unwrap()];
    assert!(prompts[1].len() > 140);
    let server = Server::start(&[&pack.display().to_string(), "--precision", "fp32"]);
    for again in 0..2 {
        let body = json!({"prompt": prompts, "max_tokens": again, "echo": true, "logprobs": 3, "temperature": 0});
        let answer = server.ask("/v1/completions", &body);
        for (ids, choice) in prompts.iter().zip(answer["choices"].as_array().unwrap()) {
            check(&mut session.engine, ids, &choice["logprobs"], again);
        }
    }
}

/// The scores of the server are those of the definition of the model, computed in f64: within 1e-3 nat, the bar for
/// lm-evaluation-harness, which reads them.
#[test]
fn the_scores_of_a_prompt_are_those_of_a_forward_pass_in_f64() {
    let dir = fixture("stories260k");
    let pack = packed_as("stories260k", &dir, &[]);
    let config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    let mut config = config;
    let head_dim = config["hidden_size"].as_u64().unwrap() / config["num_attention_heads"].as_u64().unwrap();
    config["head_dim"] = head_dim.into();
    let weights = forward_f64::read(&dir);
    let session = Session::open(&pack, &SessionOptions::default()).unwrap();
    let ids = session.encode("Once upon a time, there was a little girl named Lily. She had a dog.").unwrap();
    let logits = forward_f64::Model { config: &config, weights: &weights }.logits(&ids);
    let vocab = logits.len() / ids.len();
    let server = Server::start(&[&pack.display().to_string(), "--precision", "fp32"]);
    let body = json!({"prompt": ids, "max_tokens": 0, "echo": true, "logprobs": 0});
    let answer = server.ask("/v1/completions", &body);
    let found = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
    for (at, id) in ids.iter().enumerate().skip(1) {
        let expected = forward_f64::softmax(&logits[(at - 1) * vocab..at * vocab])[*id as usize].ln();
        assert!((found[at].as_f64().unwrap() - expected).abs() < 1e-3, "token {at}: {}, not {expected}", found[at]);
    }
}

fn check(engine: &mut Engine, ids: &[u32], logprobs: &Value, generated: usize) {
    let vocab = engine.config().vocab;
    let logits = all_logits(engine, ids);
    let found = logprobs["token_logprobs"].as_array().unwrap();
    assert_eq!(found.len(), ids.len() + generated);
    assert!(found[0].is_null());
    let mut offset = 0;
    for (at, id) in ids.iter().enumerate().skip(1) {
        let row = &logits[(at - 1) * vocab..at * vocab];
        let expected = log_softmax(row, *id as usize);
        assert!((found[at].as_f64().unwrap() - expected).abs() < 1e-4, "token {at}");
        let top = logprobs["top_logprobs"][at].as_object().unwrap();
        let largest = top.values().map(|value| value.as_f64().unwrap()).fold(f64::NEG_INFINITY, f64::max);
        let best = (0..vocab).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
        assert!((largest - log_softmax(row, best)).abs() < 1e-4);
        assert!(top.len() == 3 || top.len() == 4, "the three largest, and the token itself");
        assert_eq!(best == *id as usize, found[at].as_f64().unwrap() == largest, "greedy is the largest value");
        let next = logprobs["text_offset"][at].as_u64().unwrap();
        assert!(next >= offset);
        offset = next;
    }
}
