//! Tests the output of `inspect` and `tensor-map` for packs, checkpoints, weight files and manifests.

use crate::checkpoint::{copy_of, edit_header, edit_json, edited};
use crate::common::{FAMILIES, FIXTURES, fixture, iec};
use iec::dtype::{DType, encode_floats};
use iec::iebin::writer::{DescriptionParts, Layout, PlannedTensor, commit};
use iec::iebin::{BIN_NAME, JSON_NAME, Store};
use iec::output::AtomicFile;
use iec::quant::Quantizer;
use iec::quant_spec::{Method, TensorQuant};
use iec::scheme::QuantSpec;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

const PLAIN: &str = "model.norm.weight";
const TILED: &str = "model.layers.0.mlp.up_proj.weight";

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Writes a pack of one plain and one quantized tensor.
fn small_pack(dir: &Path) {
    let planned = |name: &str, shape: &[usize], store| PlannedTensor {
        name: name.into(),
        shape: shape.to_vec(),
        store,
        source_layout: None,
        metrics: None,
    };
    let plan =
        vec![planned(PLAIN, &[5], Store::Plain(DType::F32)), planned(TILED, &[20, 32], Store::Tiled(QuantSpec::Q4_0))];
    let mut plain = Vec::new();
    encode_floats(DType::F32, &[1.0, -2.0, 0.0, f32::NAN, 4.0], &mut plain).unwrap();
    let quant = TensorQuant { spec: QuantSpec::Q4_0, method: Method::Rtn, clamp: None, percentile: None };
    let quantizer = Quantizer::new(quant, 20, 32).unwrap();
    let mut tiles = vec![0; quantizer.layout().nbytes()];
    let weights: Vec<f32> = (0..640).map(|i| (i % 16) as f32 - 8.0).collect();
    quantizer.encode_tiles(&weights, &mut tiles).unwrap();
    let layout = Layout::new(plan).unwrap();
    let mut bin = AtomicFile::create(&dir.join(BIN_NAME)).unwrap();
    bin.write_all(&plain).unwrap();
    bin.file().write_all_at(&tiles, layout.entries[1].offset as u64).unwrap();
    let work = dir.join(".iec-0123456789abcdef.partial");
    std::fs::create_dir(&work).unwrap();
    let hashes = vec![sha256(&plain), sha256(&tiles)];
    commit(layout, bin, &work, DescriptionParts::default(), hashes, || Ok(())).unwrap();
    std::fs::remove_dir(&work).unwrap();
}

fn described(args: &[&str], path: &Path) -> Value {
    let output = iec().args(args).arg(path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn inspect_adds_up_a_checkpoint_by_part_of_the_model() {
    let report = described(&["inspect", "--json"], &fixture("gptoss-mxfp4"));
    assert_eq!(report["architecture"], "GptOssForCausalLM");
    assert_eq!(report["kind"], "Hugging Face checkpoint");
    let index = read_json(&fixture("gptoss-mxfp4").join("model.safetensors.index.json"));
    assert_eq!(report["total"]["bytes"], index["metadata"]["total_size"]);
    assert_eq!(report["total"]["tensors"], index["weight_map"].as_object().unwrap().len());
    // 4 layers of 8 experts: gate and up 2 x 64 x 96, down 96 x 64; 4.25 bits per weight.
    assert_eq!(report["roles"]["experts"]["weights"], 4 * 8 * 3 * 64 * 96);
    assert_eq!(report["roles"]["experts"]["bits_per_weight"], 4.25);
    assert_eq!(report["roles"]["embedding"]["bits_per_weight"], 16.0);
    assert!(report.get("tensors").is_none());
}

#[test]
fn inspect_prints_a_table_that_a_person_can_read() {
    let output = iec().arg("inspect").arg(fixture("llama-gqa")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("Hugging Face checkpoint") && text.contains("LlamaForCausalLM"), "{text}");
    let total = text.lines().find(|l| l.trim_start().starts_with("total")).unwrap();
    assert!(total.contains("100.0 %") && total.contains("16.000"), "{total}");
    assert!(text.lines().all(|line| line == line.trim_end()), "{text}");
}

/// Checkpoints with tensors for the prediction of further tokens.
const PREDICTS: [&str; 6] = ["deepseek3", "glm4moe", "minimaxm2", "qwen35", "qwen35moe", "qwen3next"];

#[test]
fn every_checkpoint_of_the_repository_runs_and_its_other_parts_are_named() {
    for name in FIXTURES.iter().chain(&FAMILIES) {
        let report = described(&["inspect", "--json"], &fixture(name));
        assert_eq!((&report["runs"], &report["obstacles"]), (&json!(true), &json!([])), "{name}");
        assert!(report["model"]["n_layers"].as_u64().is_some(), "{name}");
        let parts = |kind: &str| {
            let listed = report["left_out"].as_array().unwrap().iter();
            listed.filter(|part| part["kind"] == kind && part["tensors"].as_u64() > Some(0)).count()
        };
        let wrapper = fixture(name).join("config.json");
        assert_eq!(parts("tower") > 0, read_json(&wrapper)["vision_config"].is_object(), "{name}");
        assert_eq!(parts("prediction"), usize::from(PREDICTS.contains(name)), "{name}");
        assert_eq!(parts("unread") > 0, *name == "gemma4-e", "{name}");
        let is_quantized = name.starts_with("gptoss-mxfp4") || name.starts_with("gptoss-trained");
        assert_eq!(report["quantization"]["method"] == "mxfp4", is_quantized, "{name}");
    }
}

#[test]
fn what_stands_in_the_way_of_a_checkpoint_is_named_with_its_file_and_value() {
    struct Case {
        base: &'static str,
        fields: Value,
        obstacles: &'static [(&'static str, &'static str)],
    }
    let case = |base, fields, obstacles| Case { base, fields, obstacles };
    let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 128, "ignore": ["lm_head"]});
    for Case { base, fields, obstacles } in [
        case("llama-gqa", json!({"architectures": ["MambaForCausalLM"]}), &[("architectures", "Mamba")]),
        case("llama-gqa", json!({"architectures": null, "model_type": "rwkv"}), &[("model_type", "rwkv")]),
        case("llama-gqa", json!({"attn_logit_softcapping": 30.0}), &[("attn_logit_softcapping", "30.0")]),
        case("llama-gqa", json!({"quantization_config": awq}), &[("quantization_config.quant_method", "awq")]),
        case(
            "llama-gqa",
            json!({"quantization_config": awq, "hidden_act": "relu"}),
            &[("quantization_config.quant_method", "awq"), ("hidden_act", "relu")],
        ),
        case("llama-gqa", json!({"num_hidden_layers": 4}), &[("model.layers.3.input_layernorm.weight", "missing")]),
        case("llama-gqa", json!({"num_hidden_layers": 2}), &[("model.layers.2", "unexpected")]),
        case("llama-gqa", json!({"vocab_size": 511}), &[("model.embed_tokens.weight", "[512, 96]")]),
        case("llama-gqa", json!({"text_config": 7}), &[("text_config", "7")]),
        case("qwen3vlmoe", json!({"text_config": {"model_type": "x\u{1b}[2J"}}), &[("text_config.model_type", "x")]),
    ] {
        let dir = copy_of(base);
        let config = dir.path().join("config.json");
        edit_json(&config, |config| {
            fields.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
        });
        let report = described(&["inspect", "--json"], dir.path());
        assert_eq!(report["runs"], false, "{fields}");
        let found = report["obstacles"].as_array().unwrap();
        assert_eq!(found.len(), obstacles.len(), "{fields}: {found:?}");
        for (found, (field, value)) in found.iter().zip(obstacles) {
            assert!(found["field"].as_str().unwrap().starts_with(field), "{fields}: {found}");
            assert!(found["message"].as_str().unwrap().contains(value), "{fields}: {found}");
            assert!(found["file"].as_str().unwrap().contains(dir.path().to_str().unwrap()), "{fields}: {found}");
            assert!(!found["help"].as_str().unwrap().is_empty(), "{fields}: {found}");
        }
        if fields.get("quantization_config").is_some() {
            let expected = json!({"method": "awq", "settings": {"bits": 4, "group_size": 128}});
            assert_eq!((&report["quantization"], report["model"].is_null()), (&expected, obstacles.len() > 1));
        }
        let text = iec().arg("inspect").arg(dir.path()).output().unwrap();
        let text = String::from_utf8(text.stdout).unwrap();
        assert!(text.contains("  runs          no\n") && text.contains("  because       "), "{text}");
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text}");
        assert!(text.contains("  total "), "{text}");
    }
}

#[test]
fn weights_and_tokenizers_that_stand_in_the_way_are_named_too() {
    let obstacle = |dir: &Path| {
        let report = described(&["inspect", "--json"], dir);
        assert_eq!((&report["runs"], report["obstacles"].as_array().unwrap().len()), (&json!(false), 1), "{report}");
        report["obstacles"][0].clone()
    };
    let dir = copy_of("llama-gqa");
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    assert!(obstacle(dir.path())["help"].as_str().unwrap().contains("--tokenizer"));
    std::fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
    assert!(obstacle(dir.path())["file"].as_str().unwrap().ends_with("tokenizer.json"));
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    assert!(obstacle(dir.path())["file"].as_str().unwrap().ends_with("config.json"));

    // Matrices of 8-bit floats are listed; types that are unknown are named.
    let dir = edited("llama-gqa", |tensors| {
        let tensor = tensors.get_mut("model.layers.0.mlp.up_proj.weight").unwrap();
        tensor.dtype = safetensors::Dtype::F8_E4M3;
        tensor.bytes.truncate(tensor.bytes.len() / 2);
    });
    let found = obstacle(dir.path());
    assert_eq!(found["field"], "model.layers.0.mlp.up_proj.weight");
    let report = described(&["inspect", "--json", "--tensors"], dir.path());
    assert!(report["tensors"].as_array().unwrap().iter().any(|tensor| tensor["dtype"] == "F8_E4M3"));
    edit_header(&dir.path().join("model.safetensors"), |header| header.replace("F8_E4M3", "F6_E2M3"));
    assert!(obstacle(dir.path())["message"].as_str().unwrap().contains("F6_E2M3"));
}

#[test]
fn inspect_lists_the_tensors_of_one_weight_file() {
    let report = described(&["inspect", "--json", "--tensors"], &fixture("stories260k").join("model.safetensors"));
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!(tensors[0]["name"], "model.embed_tokens.weight");
    assert_eq!(tensors[0]["shape"], serde_json::json!([512, 64]));
    assert_eq!(tensors[0]["role"], "embedding");
}

#[test]
fn inspect_measures_plain_and_quantized_weights_of_a_pack() {
    let dir = tempfile::tempdir().unwrap();
    small_pack(dir.path());
    let report = described(&["inspect", "--json", "--stats"], dir.path());
    let plain = &report["tensors"][0]["stats"];
    assert_eq!((&plain["min"], &plain["max"]), (&(-2.0).into(), &4.0.into()));
    assert_eq!((&plain["zeros"], &plain["nan"]), (&1.into(), &1.into()));
    let tiled = &report["tensors"][1];
    assert_eq!(tiled["dtype"], "q4_0");
    assert_eq!((&tiled["stats"]["min"], &tiled["stats"]["max"]), (&(-8.0).into(), &7.0.into()));
    assert_eq!(tiled["stats"]["zeros"], 40);
    let table = iec().args(["inspect", "--tensors"]).arg(dir.path().join(JSON_NAME)).output().unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    let hash = tiled["sha256"].as_str().unwrap();
    assert!(table.contains(TILED) && table.contains("20 x 32") && table.contains(&hash[..12]), "{table}");
}

#[test]
fn inspect_tells_what_a_manifest_decides() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rules.json");
    let rules = r#"{"version": 1, "rules": [{"exclude": "lm_head"}, {"include": "_proj", "scheme": "q4_0"}]}"#;
    std::fs::write(&path, rules).unwrap();
    let output = iec().arg("inspect").arg(&path).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("quantization manifest") && text.contains("lm_head") && text.contains("q4_0"), "{text}");
    assert_eq!(iec().args(["inspect", "--stats"]).arg(&path).output().unwrap().status.code(), Some(2));
}

#[test]
fn inspect_refuses_what_holds_no_weights() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let text = dir.path().join("notes.txt");
    let broken = dir.path().join("broken.safetensors");
    std::fs::write(&text, "hello").unwrap();
    std::fs::write(&broken, [255; 64]).unwrap();
    for path in [dir.path(), &missing, &text, &broken] {
        let output = iec().args(["inspect", "--json"]).arg(path).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", path.display());
        let object: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(object["error"]["message"].as_str().unwrap().contains(path.to_str().unwrap()), "{object}");
    }
}

#[test]
fn tensor_map_gives_the_range_of_every_tensor_and_the_hash_of_the_binary() {
    let dir = tempfile::tempdir().unwrap();
    small_pack(dir.path());
    let summary = described(&["tensor-map", "-q", "--strict", "--json", "--model-dir"], dir.path());
    let map = read_json(&dir.path().join("tensor_map.json"));
    let bin = std::fs::read(dir.path().join(BIN_NAME)).unwrap();
    assert_eq!(map["format"], "tensor_map_v1");
    assert_eq!(map["weights_bin"], BIN_NAME);
    assert_eq!(map["weights_bin_sha256"], sha256(&bin));
    assert_eq!(summary["weights_bin_sha256"], map["weights_bin_sha256"]);
    let description = read_json(&dir.path().join(JSON_NAME));
    let described = description["tensors"].as_array().unwrap();
    let mapped = map["tensors"].as_array().unwrap();
    assert_eq!(mapped.len(), described.len());
    for (entry, tensor) in mapped.iter().zip(described) {
        for (key, other) in
            [("name", "name"), ("dtype", "dtype"), ("shape", "shape"), ("offset", "offset"), ("size_bytes", "nbytes")]
        {
            assert_eq!(entry[key], tensor[other]);
        }
    }
    let stdout = iec().args(["tensor-map", "-q", "--out", "-", "--model-dir"]).arg(dir.path()).output().unwrap().stdout;
    assert_eq!(stdout, std::fs::read(dir.path().join("tensor_map.json")).unwrap());
}

#[test]
fn strict_tensor_map_names_the_tensor_whose_bytes_changed_and_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    small_pack(dir.path());
    let bin = dir.path().join(BIN_NAME);
    let mut bytes = std::fs::read(&bin).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&bin, bytes).unwrap();
    let strict = || iec().args(["tensor-map", "--strict", "--model-dir"]).arg(dir.path()).output().unwrap();
    let output = strict();
    let message = String::from_utf8_lossy(&output.stderr).to_string();
    assert_eq!(output.status.code(), Some(4), "{message}");
    assert!(message.contains(TILED) && message.contains("help:"), "{message}");
    assert!(!dir.path().join("tensor_map.json").exists());

    let json_path = dir.path().join(JSON_NAME);
    let mut description = read_json(&json_path);
    description["tensors"][0].as_object_mut().unwrap().remove("sha256");
    description.as_object_mut().unwrap().remove("sha256");
    std::fs::write(&json_path, description.to_string()).unwrap();
    let message = String::from_utf8_lossy(&strict().stderr).to_string();
    assert!(message.contains(PLAIN) && message.contains("no recorded sha256"), "{message}");
}

#[test]
fn tensor_map_without_a_pack_is_a_missing_model() {
    let dir = tempfile::tempdir().unwrap();
    iec().args(["tensor-map", "--model-dir"]).arg(dir.path()).assert().code(3);
}
