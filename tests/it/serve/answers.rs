//! Answers of the endpoints: the same texts as `iec run`, and all fields honoured.

use super::client::{Server, story_pack};
use crate::common::iec;
use serde_json::{Value, json};

fn text(object: &Value) -> &str {
    object["choices"][0]["text"].as_str().unwrap()
}

#[test]
fn the_embedded_model_answers_as_run_does() {
    let server = Server::start(&[]);
    let home = story_pack(512);
    let pack = home.path().join("pack");
    let ran_pack = iec().arg("run").arg(&pack).args(["-p", "Once upon a time", "-n", "24"]).output().unwrap();
    let answer = server.ask(
        "/v1/completions",
        &json!({"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "model": "stories260k"}),
    );
    assert_eq!(text(&answer).trim(), String::from_utf8(ran_pack.stdout).unwrap().trim());
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    assert_eq!(answer["object"], "text_completion");
    let models = server.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "stories260k");
    assert_eq!(server.get("/v1/models/stories260k").json()["max_model_len"], 512);
    assert_eq!(server.get("/v1/models/other").status, 404);
}

#[test]
fn sampling_is_reproducible_and_choices_draw_from_seeds_of_their_own() {
    let server = Server::start(&[]);
    let ask = |seed: u64, n: usize| {
        let body = json!({"prompt": "Once", "max_tokens": 20, "temperature": 1.0, "seed": seed, "n": n});
        let answer = server.ask("/v1/completions", &body);
        let texts = answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].to_string());
        texts.collect::<Vec<_>>()
    };
    let three = ask(5, 3);
    assert_eq!(three, [&ask(5, 1)[..], &ask(6, 1), &ask(7, 1)].concat());
    assert!(three[0] != three[1] && three[1] != three[2]);
    let unnamed = server.post("/v1/completions", &json!({"prompt": "Once", "max_tokens": 12, "temperature": 1.0}));
    let seed: u64 = unnamed.header("x-iec-seed").unwrap().parse().unwrap();
    let again = json!({"prompt": "Once", "max_tokens": 12, "temperature": 1.0, "seed": seed});
    assert_eq!(text(&unnamed.json()), text(&server.ask("/v1/completions", &again)));
}

#[test]
fn the_best_texts_have_the_largest_mean_log_probability() {
    let server = Server::start(&[]);
    let body = |n: usize, best_of: usize| {
        json!({"prompt": ["Once", "One day"], "max_tokens": 8, "temperature": 1.0, "seed": 3, "n": n,
               "best_of": best_of, "logprobs": 0})
    };
    let all = server.ask("/v1/completions", &body(4, 4));
    let mean = |choice: &Value| {
        let list: Vec<f64> =
            choice["logprobs"]["token_logprobs"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        list.iter().sum::<f64>() / list.len() as f64
    };
    let best = server.ask("/v1/completions", &body(1, 4));
    for prompt in 0..2 {
        let of_prompt = &all["choices"].as_array().unwrap()[4 * prompt..4 * prompt + 4];
        let expected = of_prompt.iter().max_by(|a, b| mean(a).total_cmp(&mean(b))).unwrap();
        assert_eq!(best["choices"][prompt]["text"], expected["text"]);
        assert_eq!(best["choices"][prompt]["index"], prompt);
    }
}

#[test]
fn an_answer_ends_where_the_request_says() {
    let server = Server::start(&[]);
    let ask = |fields: Value| {
        let mut body = json!({"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0});
        fields.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        server.ask("/v1/completions", &body)["choices"][0].clone()
    };
    let whole = ask(json!({}))["text"].as_str().unwrap().to_string();
    assert!(whole.starts_with(", there was a little"), "{whole}");
    let cut = ask(json!({"stop": ["a little"]}));
    assert_eq!((cut["text"].as_str(), cut["finish_reason"].as_str()), (Some(", there was "), Some("stop")));
    assert_eq!(cut["stop_reason"], "a little");
    let shown = ask(json!({"stop": "a little", "include_stop_str_in_output": true}));
    assert_eq!(shown["text"], ", there was a little");
    let late = ask(json!({"stop": ["there"], "min_tokens": 10}));
    assert!(late["text"].as_str().unwrap().starts_with(", there was a little"), "{late}");
    // The token of a comma ends the text, and is not shown.
    let ids = server.ask("/tokenize", &json!({"prompt": "time,", "add_special_tokens": false}));
    let comma = ids["tokens"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(ask(json!({"stop_token_ids": [comma]}))["text"], "");
    let banned = ask(json!({"logit_bias": {comma.to_string(): -100}}));
    assert!(!banned["text"].as_str().unwrap().starts_with(','));
    let allowed = ask(json!({"allowed_token_ids": [comma], "max_tokens": 3}));
    assert_eq!(allowed["text"], ",,,");
    assert!(!ask(json!({"bad_words": [" little", "little"]}))["text"].as_str().unwrap().contains("little"));
    assert_eq!(ask(json!({"truncate_prompt_tokens": 2, "max_tokens": 1}))["finish_reason"], "length");
}

#[test]
fn constraints_hold() {
    let server = Server::start(&[]);
    let ask = |fields: Value| {
        let mut body = json!({"prompt": "Once", "max_tokens": 60, "temperature": 1.0, "seed": 1});
        fields.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        server.ask("/v1/completions", &body)["choices"][0].clone()
    };
    let regex = ask(json!({"structured_outputs": {"regex": "[0-9]{3}"}}));
    assert!(regex["text"].as_str().unwrap().parse::<u32>().is_ok(), "{regex}");
    let choice = ask(json!({"structured_outputs": {"choice": ["yes", "no"]}}));
    assert!(["yes", "no"].contains(&choice["text"].as_str().unwrap()));
    let schema = json!({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                        "additionalProperties": false});
    let object =
        ask(json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}));
    let parsed: Value = serde_json::from_str(object["text"].as_str().unwrap()).unwrap();
    assert!(parsed["a"] == 1 || parsed["a"] == 2);
    assert_eq!(object["finish_reason"], "stop");
    // The parser reaches the limit of its work only when the text begins.
    let words: Vec<String> = (0..5200).map(|i| format!("\"{i}\"")).collect();
    let grammar = format!("start: word+\nword: {}\n", words.join(" | "));
    let refused = server.post("/v1/completions", &json!({"prompt": "Once", "guided_grammar": grammar}));
    let error = &refused.json()["error"];
    assert_eq!((refused.status, error["type"].as_str()), (400, Some("invalid_request_error")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("use a simpler"), "{error}");
}

#[test]
fn conversations_are_rendered_by_the_template() {
    let home = story_pack(512);
    let pack = home.path().join("pack").display().to_string();
    let server = Server::start(&[&pack]);
    let raw = server.ask("/v1/completions", &json!({"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}));
    let chat = server.ask(
        "/v1/chat/completions",
        &json!({"messages": [{"role": "system", "content": "Once upon"},
                             {"role": "user", "content": [{"type": "text", "text": "a time"}]}],
                "max_completion_tokens": 12, "temperature": 0, "logprobs": true, "top_logprobs": 2}),
    );
    let choice = &chat["choices"][0];
    assert_eq!(choice["message"]["content"].as_str().unwrap().trim(), text(&raw).trim());
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), 12);
    assert_eq!(choice["logprobs"]["content"][0]["top_logprobs"].as_array().unwrap().len(), 2);
    let tokens = server.ask("/tokenize", &json!({"messages": [{"role": "user", "content": "Once upon a time"}]}));
    let of_text = server.ask("/tokenize", &json!({"prompt": "Once upon a time"}));
    assert_eq!(tokens["tokens"], of_text["tokens"]);
    let back = server.ask("/detokenize", &json!({"tokens": tokens["tokens"], "skip_special_tokens": true}));
    assert_eq!(back["prompt"], "Once upon a time");
    assert!(server.get("/tokenizer_info").json()["chat_template"].as_str().unwrap().contains("bos_token"));
}

#[test]
fn several_models_are_served_side_by_side() {
    let home = story_pack(256);
    let pack = home.path().join("pack").display().to_string();
    let (a, b) = (format!("a={pack}"), format!("b={pack}"));
    let server = Server::start(&["--model", &a, "--model", &b]);
    let names: Vec<Value> =
        server.get("/v1/models").json()["data"].as_array().unwrap().iter().map(|model| model["id"].clone()).collect();
    assert_eq!(names, ["a", "b"]);
    let body =
        |model: &str| json!({"model": model, "prompt": "Once", "max_tokens": 64, "temperature": 0, "ignore_eos": true});
    let texts: Vec<String> = std::thread::scope(|scope| {
        let server = &server;
        let threads: Vec<_> = (0..6)
            .map(|i| scope.spawn(move || text(&server.ask("/v1/completions", &body(["a", "b"][i % 2]))).to_string()))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "x"})).status, 400);
}

#[test]
fn requests_in_parallel_get_the_texts_that_they_get_alone() {
    let server = Server::start(&["--max-seqs", "3"]);
    let prompts = ["Once upon a time", "One day", "Lily", "Tom and", "The dog", "A cat", "Mom said", "It was"];
    let body = |i: usize| json!({"prompt": prompts[i % 8], "max_tokens": 40, "temperature": 1.0, "seed": i});
    let alone: Vec<String> = (0..16).map(|i| text(&server.ask("/v1/completions", &body(i))).to_string()).collect();
    let together: Vec<String> = std::thread::scope(|scope| {
        let server = &server;
        let threads: Vec<_> =
            (0..16).map(|i| scope.spawn(move || text(&server.ask("/v1/completions", &body(i))).to_string())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
}
