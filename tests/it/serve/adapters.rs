//! Adapters of a server: named by requests, loaded and unloaded while it runs.

use super::client::Server;
use crate::common::{fixture, golden, iec, packed_as};
use serde_json::{Value, json};
use std::path::Path;

/// Returns the names of the models and adapters.
fn names(server: &Server) -> Vec<String> {
    let listed = server.get("/v1/models").json();
    listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_string()).collect()
}

fn ids(server: &Server, model: &str) -> Value {
    let body = json!({"model": model, "prompt": [1, 5, 9, 14], "max_tokens": 8, "temperature": 0, "ignore_eos": true,
                      "return_token_ids": true});
    server.ask("/v1/completions", &body)["choices"][0]["token_ids"].clone()
}

#[test]
fn adapters_change_answers_and_come_and_go() {
    let pack = packed_as("lora-llama-gqa-base", &fixture("llama-gqa"), &[]);
    let all = fixture("lora-llama-gqa");
    let adapter =
        std::fs::read_dir(&all).unwrap().flatten().find(|entry| entry.path().join("adapter_config.json").exists());
    let adapter = adapter.expect("an adapter").path();
    let (pack_text, root) = (pack.display().to_string(), all.display().to_string());
    let state = tempfile::tempdir().unwrap();
    let state_text = state.path().display().to_string();
    let options = [pack_text.as_str(), "--adapter-dir", &root, "--precision", "fp32", "--state-dir", &state_text];
    let mut server = Server::start(&options);
    let base = names(&server)[0].clone();
    let plain = ids(&server, &base);
    let name = adapter.file_name().unwrap().to_string_lossy().into_owned();
    let load = |server: &Server, path: &str| {
        server.post("/v1/load_lora_adapter", &json!({"lora_name": "x", "lora_path": path}))
    };
    let strange = server.post("/v1/load_lora_adapter", &json!({"lora_name": "a=../x", "lora_path": name}));
    assert_eq!((strange.status, strange.json()["error"]["param"].as_str()), (400, Some("lora_name")));
    for outside in ["/etc", "../llama-gqa", ".", "nothing"] {
        assert_eq!(load(&server, outside).status, 400, "{outside}");
    }
    assert_eq!(load(&server, &name).status, 200, "{}", server.log());
    assert_eq!(load(&server, &name).status, 409, "the name is in use");
    assert_eq!(names(&server), [base.as_str(), "x"]);
    let adapted = ids(&server, "x");
    let lora = format!("x={}", adapter.display());
    let ran = iec()
        .args(["run", &pack_text, "--precision", "fp32", "--lora", &lora, "--json", "-n", "1", "-p", "x"])
        .output();
    assert!(ran.unwrap().status.success());
    assert_ne!(plain, adapted, "the adapter changes the answer");
    let mixed = json!({"prompt": [1, 5, 9, 14], "max_tokens": 8, "temperature": 0, "ignore_eos": true,
                       "return_token_ids": true, "adapters": [{"name": "x", "scale": 0.0}]});
    assert_eq!(server.ask("/v1/completions", &mixed)["choices"][0]["token_ids"], plain, "a scale of 0 has no effect");

    // The list survives a restart.
    server.signal("TERM");
    assert_eq!(server.end().code(), Some(0), "{}", server.log());
    let server = Server::start(&options);
    server.wait("the adapter", || names(&server).len() == 2);
    assert_eq!(ids(&server, "x"), adapted);
    let unload = || server.post("/v1/unload_lora_adapter", &json!({"lora_name": "x"})).status;
    assert_eq!((unload(), unload()), (200, 404));
    assert_eq!(names(&server), [base]);
}

/// Copies an adapter of the fixtures, with another `adapter_config.json` and another last number of its tensors.
fn copied(from: &str, to: &Path, r: Option<Value>, last: Option<f32>) {
    let from = fixture("lora-llama-gqa").join(from);
    std::fs::create_dir_all(to).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(from.join("adapter_config.json")).unwrap()).unwrap();
    if let Some(r) = r {
        config["r"] = r;
    }
    std::fs::write(to.join("adapter_config.json"), config.to_string()).unwrap();
    let mut tensors = std::fs::read(from.join("adapter_model.safetensors")).unwrap();
    if let Some(last) = last {
        let end = tensors.len() - 4;
        tensors[end..].copy_from_slice(&last.to_le_bytes());
    }
    std::fs::write(to.join("adapter_model.safetensors"), tensors).unwrap();
}

/// Starts a server that loads adapters from a directory.
fn loading(root: &Path, more: &[&str]) -> Server {
    let pack = packed_as("lora-llama-gqa-base", &fixture("llama-gqa"), &[]).display().to_string();
    let root = root.display().to_string();
    Server::start(&[&[pack.as_str(), "--adapter-dir", &root, "--precision", "fp32"], more].concat())
}

#[test]
fn an_adapter_that_cannot_be_replaced_stays_and_its_name_can_be_loaded_again() {
    let home = tempfile::tempdir().unwrap();
    let dir = |name: &str| home.path().join(name);
    copied("r16-all", &dir("old"), None, None);
    copied("r8-qv", &dir("new"), None, None);
    copied("r8-qv", &dir("not-finite"), None, Some(f32::NAN));
    copied("r8-qv", &dir("other-rank"), Some(json!(4)), None);
    copied("r8-qv", &dir("cut"), None, None);
    std::fs::write(dir("cut").join("adapter_model.safetensors"), "x").unwrap();
    copied("r8-qv", &dir("half"), None, None);
    std::fs::remove_file(dir("half").join("adapter_model.safetensors")).unwrap();
    // There is room for one of them only.
    for more in [&[][..], &["--lora-memory", "400K"]] {
        let server = loading(home.path(), more);
        let load = |path: &str, in_place: bool| {
            let body = json!({"lora_name": "x", "lora_path": path, "load_inplace": in_place});
            server.post("/v1/load_lora_adapter", &body)
        };
        assert_eq!(load("not-finite", false).status, 400);
        assert_eq!(load("old", false).status, 200, "a name that was not loaded is free");
        let of_old = ids(&server, "x");
        for bad in ["not-finite", "other-rank", "cut", "half", "nothing"] {
            let refused = load(bad, true);
            assert_eq!(refused.status, 400, "{bad}: {}", refused.body);
            assert_eq!(ids(&server, "x"), of_old, "{bad}: the former adapter answers");
        }
        let loaded = load("new", true);
        assert_eq!(loaded.status, 200, "{}", loaded.body);
        assert_ne!(ids(&server, "x"), of_old);
        assert_eq!(load("old", true).status, 200);
        assert_eq!(ids(&server, "x"), of_old);
        assert_eq!(server.post("/v1/unload_lora_adapter", &json!({"lora_name": "x"})).status, 200);
        assert_eq!(load("new", true).status, 200, "there is nothing to replace");
    }
}

#[test]
fn links_out_of_the_directory_of_adapters_are_refused_and_no_bytes_of_files_are_shown() {
    let home = tempfile::tempdir().unwrap();
    let (root, outside) = (home.path().join("adapters"), home.path().join("outside"));
    copied("r8-qv", &outside, None, None);
    std::fs::write(outside.join("secret"), "ABCDEFGHIJKLMNOP").unwrap();
    let names = ["adapter_config.json", "adapter_model.safetensors"];
    let link = |to: &Path, at: &str| std::os::unix::fs::symlink(to, root.join(at)).unwrap();
    for dir in ["tensors", "config", "secret", "nowhere", "pack", "within", "junk", "words"] {
        copied("r8-qv", &root.join(dir), None, None);
    }
    for (dir, name, target) in [
        ("tensors", names[1], outside.join(names[1])),
        ("config", names[0], outside.join(names[0])),
        ("secret", names[1], outside.join("secret")),
        ("nowhere", names[1], home.path().join("none")),
        ("within", names[1], "../junk/tensors".into()),
    ] {
        std::fs::remove_file(root.join(dir).join(name)).unwrap();
        link(&target, &format!("{dir}/{name}"));
    }
    link(&outside.join("secret"), "pack/model.ie.json");
    link(&outside, "whole");
    std::fs::rename(root.join("junk").join(names[1]), root.join("junk/tensors")).unwrap();
    std::fs::write(root.join("junk").join(names[1]), "ABCDEFGHIJKLMNOP").unwrap();
    std::fs::write(root.join("words").join(names[0]), r#"{"peft_type": "ABCDEFGH"} IJKL"#).unwrap();
    let server = loading(&root, &[]);
    let load = |path: &str| server.post("/v1/load_lora_adapter", &json!({"lora_name": "x", "lora_path": path}));
    for dir in ["tensors", "config", "secret", "nowhere", "pack", "whole", "junk", "words"] {
        let refused = load(dir);
        assert_eq!(refused.status, 400, "{dir}: {}", refused.body);
        let shown = ["ABCDEFGH", "5208208757389214273", "IJKL", "outside", "none\""];
        assert!(!shown.iter().any(|text| refused.body.contains(text)), "{dir}: {}", refused.body);
    }
    let within = load("within");
    assert_eq!(within.status, 200, "{}", within.body);
}

#[test]
fn without_a_directory_no_adapter_is_loaded() {
    let server = Server::start(&[]);
    let response = server.post("/v1/load_lora_adapter", &json!({"lora_name": "x", "lora_path": "y"}));
    assert_eq!((response.status, response.json()["error"]["code"].as_str()), (403, Some("adapters_off")));
}

#[test]
fn the_adapters_of_the_configuration_are_read_again() {
    let pack = packed_as("lora-llama-gqa-base", &fixture("llama-gqa"), &[]).display().to_string();
    let all = fixture("lora-llama-gqa");
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("serve.toml");
    let write = |loras: &[(&str, &str)]| {
        let entry = |(name, dir): &(&str, &str)| {
            format!("[[lora]]\nname = \"{name}\"\ndir = \"{}\"\n", all.join(dir).display())
        };
        std::fs::write(&file, loras.iter().map(entry).collect::<String>()).unwrap();
    };
    write(&[("a", "r16-all")]);
    let server = Server::start(&[&pack, "--precision", "fp32", "--config", &file.display().to_string()]);
    let base = names(&server)[0].clone();
    assert_eq!(names(&server), [base.as_str(), "a"]);
    let of_a = ids(&server, "a");
    write(&[("b", "r8-qv"), ("c", "nothing")]);
    server.signal("HUP");
    server.wait("the refusal", || server.log().contains("stay in use"));
    assert_eq!(names(&server), [base.as_str(), "a"], "all of them or none");
    write(&[("b", "r8-qv"), ("c", "r16-all")]);
    server.signal("HUP");
    server.wait("the new adapters", || server.log().contains("were read again"));
    assert_eq!(names(&server), [base.as_str(), "b", "c"]);
    assert_eq!(ids(&server, "c"), of_a);
    assert_eq!(server.post("/v1/completions", &json!({"model": "a", "prompt": [1]})).status, 404);
}

#[test]
fn latent_and_shared_caches_give_the_tokens_of_hugging_face_with_and_without_adapters() {
    let prompts = |golden: &Value| -> Vec<[Value; 2]> {
        let prompts = golden["prompts"].as_array().unwrap().iter();
        prompts.map(|prompt| [prompt["ids"].clone(), prompt["greedy_ids"].clone()]).collect()
    };
    for (family, adapter) in
        [("deepseek3", "latent-all-linear"), ("glm4flash", "latent-dora"), ("gemma4-e", "wrapper-all-linear")]
    {
        let dir = fixture("adapters").join(adapter);
        let (pack, lora) = (packed_as(family, &fixture(family), &[]), format!("adapter={}", dir.display()));
        let pack = pack.display().to_string();
        let server = Server::start(&[&pack, "--lora", &lora, "--precision", "fp32", "--kv", "f32"]);
        let base = names(&server)[0].clone();
        let of_adapter: Value = serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap();
        let plain = prompts(&golden(family)).into_iter().map(|prompt| (base.as_str(), prompt));
        let all: Vec<_> = plain.chain(prompts(&of_adapter).into_iter().map(|prompt| ("adapter", prompt))).collect();
        // The second time, beginnings of the prompts are in the prefix cache.
        for round in 0..2 {
            std::thread::scope(|scope| {
                for (model, [ids, expected]) in &all {
                    let server = &server;
                    scope.spawn(move || {
                        let count = expected.as_array().unwrap().len();
                        let body = json!({"model": model, "prompt": ids, "max_tokens": count, "temperature": 0,
                                          "ignore_eos": true, "return_token_ids": true});
                        let found = server.ask("/v1/completions", &body)["choices"][0]["token_ids"].clone();
                        assert_eq!(found, *expected, "{family}, {model}, round {round}, {ids}");
                    });
                }
            });
        }
    }
}
