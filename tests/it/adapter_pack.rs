//! Packs of adapters: the same numbers as those of PEFT, int8, and damaged or misplaced packs.

use crate::common::{fixture, iec};
use crate::golden::packed;
use iec::adapter::Adapter;
use iec::convert::adapter::pack::{AdapterPackOptions, FactorNumbers, pack};
use iec::convert::adapter::{read, round_to_int8};
use iec::iebin::reader::read_description;
use iec::iebin::{Description, IebinReader, JSON_NAME};
use iec::model_config::ModelConfig;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn model(base: &Path) -> ModelConfig {
    IebinReader::open(base).unwrap().description.model.unwrap()
}

fn packed_adapter(adapter: &Path, base: &Path, out_dir: &Path, numbers: FactorNumbers) {
    let (adapter, base, out_dir) = (adapter.to_path_buf(), base.to_path_buf(), out_dir.to_path_buf());
    pack(&AdapterPackOptions { adapter, base, out_dir, numbers, overwrite: false }).unwrap();
}

/// Returns the changes without the types of the files.
fn numbers(adapter: &Adapter) -> Adapter {
    let mut adapter = Adapter { hash: String::new(), ..adapter.clone() };
    let factors = adapter.changes.values_mut().flatten().filter_map(|change| change.low_rank.as_mut());
    factors.for_each(|factors| factors.dtype = iec::dtype::DType::F32);
    adapter
}

#[test]
fn packs_have_the_numbers_of_peft_or_their_int8_form() {
    let dir = tempfile::tempdir().unwrap();
    let mut adapters: Vec<(PathBuf, String)> = ["r8-qv", "r16-all", "r32-dora"]
        .map(|name| (fixture("lora-llama-gqa").join(name), "llama-gqa".to_string()))
        .into();
    for entry in std::fs::read_dir(fixture("adapters")).unwrap() {
        let path = entry.unwrap().path();
        let golden: Value = serde_json::from_slice(&std::fs::read(path.join("golden.json")).unwrap()).unwrap();
        adapters.push((path, golden["base"].as_str().unwrap().to_string()));
    }
    let mut compared = 0;
    for (path, base) in adapters {
        let base = packed(&base, &fixture(&base));
        let model = model(&base);
        let Ok(expected) = read(&path, &model) else { continue };
        let name = path.file_name().unwrap();
        let [kept, int8] = ["kept", "int8"].map(|kind| dir.path().join(kind).join(name));
        packed_adapter(&path, &base, &kept, FactorNumbers::Keep);
        let found = read(&kept, &model).unwrap();
        assert!(numbers(&found).changes == numbers(&expected).changes, "{}", path.display());
        assert!(found.hash.len() == 64 && found.hash != expected.hash);
        let mut rounded = expected.clone();
        if round_to_int8(&mut rounded).is_ok() {
            packed_adapter(&path, &base, &int8, FactorNumbers::Int8);
            let found = numbers(&read(&int8, &model).unwrap());
            assert!(found.changes == numbers(&rounded).changes, "{}", path.display());
        }
        compared += 1;
    }
    assert!(compared >= 30, "{compared}");
}

#[test]
fn a_packed_adapter_runs_and_is_described_like_the_directory_of_peft() {
    let base = packed("llama-gqa", &fixture("llama-gqa"));
    let adapter = fixture("lora-llama-gqa").join("r16-all");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("poems");
    let without = iec().arg("pack").arg(&adapter).arg("--out-dir").arg(&out).assert().code(2);
    assert!(text(&without.get_output().stderr).contains("--base"));
    let mut command = iec();
    command.arg("pack").arg(&adapter).arg("--base").arg(&base).arg("--out-dir").arg(&out);
    let summary = text(&command.assert().success().get_output().stderr);
    assert!(summary.contains("packed an adapter (LoRA) of LlamaForCausalLM: "), "{summary}");
    command.assert().code(2);
    command.args(["--overwrite", "--bits", "8", "--json"]);
    let json: Value = serde_json::from_slice(&command.assert().success().get_output().stdout).unwrap();
    assert_eq!((&json["kind"], &json["rank"]), (&"adapter".into(), &16.into()));
    assert!(json["bytes"].as_u64() < json["bytes_in"].as_u64());
    command.args(["--dtype", "fp16"]).assert().code(2);
    let run = |lora: &Path| {
        let mut command = iec();
        command.args(["run", "--json", "--ignore-eos", "-n", "8", "-p", "Once upon", "--model-dir"]).arg(&base);
        let line = command.args(["--precision", "fp32", "--lora"]).arg(lora).assert().success();
        let line: Value = serde_json::from_slice(&line.get_output().stdout).unwrap();
        (line["text"].clone(), line["adapters"][0]["bytes"].as_u64().unwrap())
    };
    let ((of_peft, floats), (of_pack, codes)) = (run(&adapter), run(&out));
    assert_eq!(of_peft, of_pack);
    assert!(codes < floats);
    let described = text(&iec().arg("inspect").arg(&out).assert().success().get_output().stdout);
    assert!(described.contains("packed adapter") && described.contains("q_proj"), "{described}");
    let wrong = iec().args(["run", "-p", "a", "--model-dir"]).arg(&out).assert().code(2);
    assert!(text(&wrong.get_output().stderr).contains("--lora"));
    let wrong = iec().args(["run", "-p", "a", "--model-dir"]).arg(&base).arg("--lora").arg(&base).assert().code(2);
    assert!(text(&wrong.get_output().stderr).contains("found the pack of a model"));
}

#[test]
fn a_conversation_changes_its_adapters() {
    let base = packed("llama-gqa", &fixture("llama-gqa"));
    let adapter = |name: &str| fixture("lora-llama-gqa").join(name);
    let chat = |input: &str, options: &[&str]| -> Vec<Value> {
        let mut command = iec();
        command.args(["chat", "--json", "--greedy", "--max-new", "8", "--precision", "fp32", "--chat-template"]);
        command.args(["chatml", "--model-dir"]).arg(&base).args(options);
        for name in ["r8-qv", "r16-all"] {
            command.arg("--lora").arg(adapter(name));
        }
        let output = command.write_stdin(input).assert().success().get_output().stdout.clone();
        text(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let answers = |events: &[Value]| -> Vec<String> {
        let mut answers = vec![String::new()];
        for event in events {
            match event["event"].as_str().unwrap() {
                "text" => answers.last_mut().unwrap().push_str(event["text"].as_str().unwrap()),
                "done" => answers.push(String::new()),
                _ => {}
            }
        }
        answers
    };
    let ask = "{\"message\": \"Once upon\"}\n";
    let choose =
        |list: &str| format!("{{\"command\": \"adapter\", \"adapters\": {list}}}\n{{\"command\": \"regen\"}}\n");
    let input = [ask, &choose("[]"), &choose(r#"["r16-all"]"#), &choose(r#"["r8-qv", {"name": "r16-all"}]"#)].concat();
    for options in [&[] as &[&str], &["--lora-memory", "512K"]] {
        let events = chat(&input, options);
        let texts = answers(&events);
        assert_eq!((events.iter().filter(|event| event["event"] == "ok").count(), texts.len()), (3, 5));
        assert!(texts[0] == texts[3] && texts[0] != texts[1] && texts[1] != texts[2], "{texts:?}");
    }
    let events = chat(&[&choose(r#"["sea"]"#), ask].concat(), &[]);
    assert!(events[1].to_string().contains("found no adapter `sea`"), "{events:?}");
}

#[test]
fn damaged_packs_and_packs_for_other_models_are_refused_by_name() {
    let base = packed("llama-gqa", &fixture("llama-gqa"));
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("poems");
    packed_adapter(&fixture("lora-llama-gqa").join("r16-all"), &base, &out, FactorNumbers::Int8);
    let json = out.join(JSON_NAME);
    let good = std::fs::read(&json).unwrap();
    let model = model(&base);
    let q_proj = "model.layers.0.self_attn.q_proj.weight";
    type Damage = fn(&mut Description);
    let damages: [(Damage, &str); 7] = [
        (|d| drop(d.adapter.as_mut().unwrap().tensors.remove("model.layers.0.self_attn.q_proj.weight")), "no change"),
        (|d| d.adapter.as_mut().unwrap().tensors.values_mut().for_each(|s| s.push(None)), "2 matrices"),
        (
            |d| d.adapter.as_mut().unwrap().tensors.values_mut().for_each(|s| s[0] = None),
            "expected all of them or none",
        ),
        (|d| d.tensors.retain(|tensor| !tensor.name.ends_with("lora_B")), "expected all of them or none"),
        (|d| d.tensors.iter_mut().for_each(|t| t.name = t.name.replace("lora_A", "lora_C")), "no change"),
        (|d| d.model.as_mut().unwrap().architecture = "Qwen3ForCausalLM".into(), "Qwen3ForCausalLM"),
        (|d| drop(d.adapter.take()), "found the pack of a model"),
    ];
    for (damage, said) in damages {
        let mut description: Description = serde_json::from_slice(&good).unwrap();
        damage(&mut description);
        std::fs::write(&json, description.to_text()).unwrap();
        let message = read(&out, &model).unwrap_err().to_string();
        assert!(message.contains(said), "{said}: {message}");
    }
    // Factors of another size.
    let mut description: Description = serde_json::from_slice(&good).unwrap();
    let entry = description.tensors.iter_mut().find(|t| t.name == format!("{q_proj}.0.lora_B")).unwrap();
    entry.shape.reverse();
    std::fs::write(&json, description.to_text()).unwrap();
    let message = read(&out, &model).unwrap_err().to_string();
    assert!(message.contains("lora_B") && message.contains("shape"), "{message}");
    // Without its digest, two adapters could not be told apart.
    let text = String::from_utf8(good.clone()).unwrap();
    std::fs::write(&json, format!("{}\n}}", text.rsplit_once(",\n  \"sha256\"").unwrap().0)).unwrap();
    assert!(read(&out, &model).unwrap_err().to_string().contains("digest"));
    std::fs::write(&json, &good).unwrap();
    let bin = out.join("model.ie.bin");
    let bytes = std::fs::read(&bin).unwrap();
    std::fs::write(&bin, &bytes[..bytes.len() - 1]).unwrap();
    assert!(read(&out, &model).is_err());
    assert!(read_description(&json).unwrap().adapter.is_some());
}
