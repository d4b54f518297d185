//! Endpoints of llama.cpp's server, fill-in-the-middle, and chat templates of the server's own choice.

use super::client::{Server, story_pack};
use super::known::{self, GO, KnownModel};
use serde_json::{Value, json};
use std::io::Read;

#[test]
fn a_conversation_is_rendered_as_the_prompt_of_the_model() {
    let home = story_pack(256);
    let server = Server::start(&[&home.path().join("pack").display().to_string()]);
    let messages = json!([{"role": "system", "content": "Once"}, {"role": "user", "content": "upon"}]);
    let prompt = server.ask("/apply-template", &json!({"messages": messages}))["prompt"].clone();
    assert_eq!(prompt, json!("<s>Once upon"));
    let counted = server.ask("/tokenize", &json!({"prompt": prompt, "add_special_tokens": false}));
    let own = server.ask("/tokenize", &json!({"messages": messages}));
    assert_eq!(counted["tokens"], own["tokens"], "the text is the prompt of chat completions");
    assert_eq!(server.post("/apply-template", &json!({"messages": []})).status, 400);
}

#[test]
fn properties_and_slots_are_told() {
    let home = story_pack(256);
    let server = Server::start(&[&home.path().join("pack").display().to_string(), "--max-seqs", "2"]);
    let props = server.get("/props").json();
    assert_eq!((&props["total_slots"], &props["model_alias"]), (&json!(2), &json!("pack")));
    assert_eq!(props["default_generation_settings"]["n_ctx"], 256);
    assert_eq!(props["chat_template"], json!(super::client::TEMPLATE));
    assert_eq!(server.get("/props?model=pack").status, 200);
    assert_eq!(server.get("/props?model=..%2Fpack").status, 404);

    let idle = server.get("/slots").json();
    assert_eq!((idle.as_array().map(Vec::len), &idle[0]["is_processing"]), (Some(2), &json!(false)), "{idle}");
    let body = json!({"prompt": "Once", "max_tokens": 250, "ignore_eos": true, "stream": true}).to_string();
    let mut stream = server.begin("POST", "/v1/completions", &[], &body);
    let mut some = [0; 400];
    stream.read_exact(&mut some).unwrap();
    let busy = server.get("/slots").json();
    // A fast machine may have finished.
    if busy[0]["is_processing"] == true {
        assert!(busy[0]["n_prompt_tokens"].as_u64() > Some(0), "{busy}");
        assert!(busy[0]["next_token"][0]["n_decoded"].as_u64() > Some(0), "{busy}");
    }
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    server.wait("an idle slot", || server.get("/slots").json()[0]["is_processing"] == false);
}

#[test]
fn gaps_are_filled_by_models_with_tokens_for_it() {
    let home = tempfile::tempdir().unwrap();
    // The answer follows the trigger and the mark of the gap.
    let coder = KnownModel::new(GO)
        .special(&["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
        .opening("<fim_middle>")
        .text("return x;");
    let server = known::serve(home.path(), &[("coder", coder)], &[]);
    let mut body = json!({"prompt": "def f(x):", "suffix": "<|g1|>", "max_tokens": 40, "temperature": 0});
    let choice = server.ask("/v1/completions", &body)["choices"][0].clone();
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("return x;"), &json!("stop")));
    body["stream"] = json!(true);
    let events = server.post("/v1/completions", &body).events();
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "return x;");

    let mut body = json!({"input_prefix": "def f(x):", "input_suffix": "<|g1|>", "n_predict": 40, "temperature": 0,
                          "input_extra": [{"filename": "a.py", "text": "x = 1"}]});
    let answer = server.ask("/infill", &body);
    assert_eq!((&answer["content"], &answer["stop_type"]), (&json!("return x;"), &json!("eos")), "{answer}");
    body["stream"] = json!(true);
    let streamed = server.post("/infill", &body);
    let events: Vec<Value> = (streamed.body.split_terminator("\n\n"))
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
        .collect();
    let text: String = events.iter().map(|event| event["content"].as_str().unwrap()).collect();
    assert_eq!((text.as_str(), &events.last().unwrap()["stop"]), ("return x;", &json!(true)));
    body["n_predict"] = json!(0);
    let nothing = server.post("/infill", &body);
    assert!(nothing.body.contains("\"content\":\"\"") && !nothing.body.contains("return"), "{}", nothing.body);

    let options = json!({"temperature": 0, "num_predict": 40});
    let body = json!({"prompt": "def f(x):", "suffix": "<|g1|>", "options": options, "stream": false});
    assert_eq!(server.ask("/api/generate", &body)["response"], "return x;");
    assert_eq!(server.ask("/api/show", &json!({"model": "coder"}))["capabilities"][1], "insert");
}

#[test]
fn a_model_without_tokens_for_gaps_says_so() {
    let server = Server::start(&[]);
    let cases = [
        ("/v1/completions", json!({"prompt": "x", "suffix": "y"})),
        ("/infill", json!({"input_prefix": "x", "input_suffix": "y"})),
        ("/api/generate", json!({"prompt": "x", "suffix": "y"})),
    ];
    for (path, body) in cases {
        let response = server.post(path, &body);
        assert_eq!(response.status, 400, "{path}: {}", response.body);
        assert!(response.body.contains("fill-in-the-middle"), "{path}: {}", response.body);
    }
    let empty = server.post("/v1/completions", &json!({"prompt": "x", "suffix": "", "max_tokens": 1}));
    assert_eq!(empty.status, 200, "{}", empty.body);
    for (body, param) in [
        (json!({"prompt": "x", "suffix": "y", "echo": true}), "suffix"),
        (json!({"prompt": [1], "suffix": "y"}), "suffix"),
        (json!({"prompt": "x", "suffix": 1}), "suffix"),
    ] {
        let response = server.post("/v1/completions", &body);
        assert_eq!((response.status, response.json()["error"]["param"].as_str()), (400, Some(param)), "{body}");
    }
}

#[test]
fn the_chat_template_of_a_server_can_be_chosen() {
    let hello = json!({"messages": [{"role": "user", "content": "Hi"}]});
    let chatml = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    let server = Server::start(&["--chat-template", "chatml"]);
    assert_eq!(server.ask("/apply-template", &hello)["prompt"], json!(chatml));
    let mut body = hello.clone();
    body["max_tokens"] = json!(2);
    server.ask("/v1/chat/completions", &body);

    let home = story_pack(256);
    let pack = home.path().join("pack").display().to_string();
    let file = home.path().join("own.jinja");
    std::fs::write(&file, "[{{ messages[0].content }}]").unwrap();
    let config = home.path().join("serve.toml");
    let models = format!(
        "chat-template = \"chatml\"\n[[model]]\nname = \"a\"\npath = {pack:?}\n\
         [[model]]\nname = \"b\"\npath = {pack:?}\nchat-template = {file:?}\n\
         [[model]]\nname = \"c\"\npath = {pack:?}\nchat-template = \"auto\"\n"
    );
    std::fs::write(&config, models).unwrap();
    let server = Server::start(&["--config", &config.display().to_string()]);
    for (model, expected) in [("a", chatml), ("b", "[Hi]"), ("c", "<s>Hi")] {
        let mut body = hello.clone();
        body["model"] = json!(model);
        assert_eq!(server.ask("/apply-template", &body)["prompt"], json!(expected), "{model}");
    }
    let mut command = crate::common::iec();
    let ran = command.args(["serve", "--port", "0", "--chat-template", "nonsense"]).output().unwrap();
    assert_eq!(ran.status.code(), Some(2), "{}", String::from_utf8_lossy(&ran.stderr));
}
