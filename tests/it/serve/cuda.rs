//! A server whose model is on a simulated GPU.

use super::client::{Server, story_pack};
use crate::cuda::driver;
use serde_json::{Value, json};

#[test]
fn a_server_on_a_gpu_answers_as_on_the_cpu_and_reuses_prompts() {
    let home = story_pack(512);
    let pack = home.path().join("pack");
    let prompt = "Once upon a time there was a big dog who lived in a small house. ".repeat(3);
    let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0, "n": 3}).to_string();
    let answers = |device: &str| {
        let options = ["--model-dir", pack.to_str().unwrap(), "--device", device, "--precision", "fp32"];
        let server = Server::spawn(&options, &[("LD_LIBRARY_PATH", driver())]);
        server.wait_until_ready();
        let ask = || serde_json::from_str::<Value>(&server.send("POST", "/v1/completions", &[], &body).body).unwrap();
        let (first, second) = (ask(), ask());
        let metrics = server.get("/metrics").body;
        assert!(metrics.contains("iec_kv_pages{"), "{metrics}");
        (first["choices"].clone(), second["choices"].clone(), second["usage"].clone())
    };
    let (first, second, usage) = answers("cuda");
    assert_eq!((&first, first.as_array().map(Vec::len)), (&second, Some(3)));
    assert!(usage["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(40), "{usage}");
    let texts = |choices: &Value| choices.as_array().unwrap().iter().map(|one| one["text"].clone()).collect::<Vec<_>>();
    assert_eq!(texts(&first), texts(&answers("cpu").0));
}
