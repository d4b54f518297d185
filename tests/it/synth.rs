//! Tests `iec synth`: a synthetic checkpoint is a valid Hugging Face directory, the same on every machine, and never
//! left incomplete.

use crate::common::{fixture, iec};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;

/// Reads every file of a directory.
fn snapshot(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    files.map(|p| (p.file_name().unwrap().to_str().unwrap().to_string(), std::fs::read(p).unwrap())).collect()
}

/// Reads dtype and shape of every tensor of a checkpoint with the strict reader of the `safetensors` crate.
fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<usize>)> {
    let mut all = BTreeMap::new();
    for (name, bytes) in snapshot(dir) {
        if name.ends_with(".safetensors") {
            let file = SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(bytes.len() % 2, 0, "{name}");
            for (tensor, view) in file.tensors() {
                let entry = (format!("{:?}", view.dtype()), view.shape().to_vec());
                assert!(all.insert(tensor.clone(), entry).is_none(), "{tensor} twice");
            }
        }
    }
    all
}

fn synth(config: &Path, dir: &Path) -> assert_cmd::Command {
    let mut command = iec();
    command.args(["synth", "-q", "--config"]).arg(config).arg("--out-dir").arg(dir);
    command
}

#[test]
fn a_synthetic_copy_has_the_tensors_of_the_model_it_imitates() {
    let families = ["qwen2", "qwen3", "qwen3moe", "qwen3moe-dense", "mixtral", "gemma2", "gemma3", "phi3"];
    for name in ["llama-gqa", "llama3-rope-tied", "gptoss-mxfp4", "gptoss-bf16"].into_iter().chain(families) {
        let dir = tempfile::tempdir().unwrap();
        synth(&fixture(name).join("config.json"), dir.path()).assert().success().stdout("");
        assert_eq!(tensors(dir.path()), tensors(&fixture(name)), "{name}");
        let config = |dir: &Path| -> serde_json::Value {
            serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap()
        };
        assert_eq!(config(dir.path()), config(&fixture(name)), "{name}");
    }
}

#[test]
fn the_bytes_depend_on_the_seed_only() {
    let config = fixture("gptoss-mxfp4").join("config.json");
    let run = |extra: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        synth(&config, dir.path()).args(extra).assert().success();
        snapshot(dir.path())
    };
    let one = run(&["--threads", "1"]);
    assert!(one == run(&["--threads", "5"]), "threads change the bytes");
    assert!(one != run(&["--seed", "1"]), "the seed changes nothing");
}

#[test]
fn shards_hold_the_same_tensors_under_an_index() {
    let config = fixture("gptoss-mxfp4").join("config.json");
    let (whole, shards) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    synth(&config, whole.path()).assert().success();
    synth(&config, shards.path()).args(["--max-shard-size", "200K"]).assert().success();
    assert!(whole.path().join("model.safetensors").is_file());
    assert!(!whole.path().join("model.safetensors.index.json").exists());
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(shards.path().join("model.safetensors.index.json")).unwrap()).unwrap();
    let single = std::fs::read(whole.path().join("model.safetensors")).unwrap();
    let single = SafeTensors::deserialize(&single).unwrap();
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), single.len());
    let total: usize = single.tensors().iter().map(|(_, v)| v.data().len()).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    for (name, file) in map {
        let bytes = std::fs::read(shards.path().join(file.as_str().unwrap())).unwrap();
        let shard = SafeTensors::deserialize(&bytes).unwrap();
        assert!(shard.tensor(name).unwrap().data() == single.tensor(name).unwrap().data(), "{name} differs");
    }
}

#[test]
fn a_published_model_is_imitated_by_name_with_fewer_layers() {
    let dir = tempfile::tempdir().unwrap();
    let output = iec()
        .args(["synth", "--like", "tinyllama-1.1b", "--layers", "1", "--json", "--out-dir"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert!(output.status.success());
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["tensors"], 12);
    // The model has an embedding and an output matrix, one layer, and three norms.
    let layer = 2048 * 2048 * 2 + 2048 * 256 * 2 + 3 * 2048 * 5632;
    assert_eq!(report["weights"], 2 * 32_000 * 2048 + layer + 3 * 2048);
    assert_eq!(tensors(dir.path())["model.layers.0.self_attn.k_proj.weight"], ("BF16".into(), vec![256, 2048]));
}

#[test]
fn an_existing_checkpoint_is_replaced_only_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    let config = fixture("llama-gqa").join("config.json");
    synth(&config, dir.path()).args(["--max-shard-size", "200K"]).assert().success();
    let before = snapshot(dir.path());
    let refused = synth(&config, dir.path()).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--overwrite"));
    assert!(before == snapshot(dir.path()));
    synth(&config, dir.path()).arg("--overwrite").assert().success();
    let names: Vec<_> = snapshot(dir.path()).into_keys().collect();
    let expected =
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(names, expected, "shards of the old checkpoint are gone");
}

#[test]
fn products_of_dimensions_that_overflow_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(fixture("gptoss-mxfp4").join("config.json")).unwrap()).unwrap();
    for (field, value) in [("hidden_size", 1u64 << 27), ("intermediate_size", 1 << 27), ("num_local_experts", 65_536)] {
        config[field] = value.into();
    }
    std::fs::write(&path, config.to_string()).unwrap();
    let output = synth(&path, &dir.path().join("out")).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).to_string();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("experts") && message.contains("overflows"), "{message}");
}

#[test]
fn configurations_that_cannot_be_made_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let good: serde_json::Value =
        serde_json::from_slice(&std::fs::read(fixture("gptoss-mxfp4").join("config.json")).unwrap()).unwrap();
    let cases = [
        ("architectures", serde_json::json!(["MambaForCausalLM"]), "Mamba"),
        ("hidden_size", serde_json::json!(100), "hidden_size"),
        ("hidden_size", serde_json::json!("wide"), "hidden_size"),
        ("num_hidden_layers", serde_json::json!(0), "layers"),
        ("vocab_size", serde_json::json!(100), "vocab"),
        ("vocab_size", serde_json::json!(1u64 << 27), "vocab_size"),
        ("intermediate_size", serde_json::json!(1u64 << 60), "intermediate"),
        ("num_local_experts", serde_json::json!(1u64 << 40), "experts"),
        ("quantization_config", serde_json::json!({"quant_method": "awq"}), "awq"),
    ];
    for (field, value, word) in cases {
        let mut config = good.clone();
        config[field] = value.clone();
        std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
        let out = dir.path().join("out");
        let output = synth(&path, &out).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).to_string();
        assert!(matches!(output.status.code(), Some(1 | 2 | 5)), "{field} = {value}: {message}");
        assert!(message.contains(word), "{field} = {value}: {message}");
        assert!(!out.exists(), "{field} = {value} left files");
    }
}

#[test]
fn a_synthetic_checkpoint_packs() {
    for name in ["llama3-rope-tied", "gptoss-mxfp4", "gptoss-bf16"] {
        let dir = tempfile::tempdir().unwrap();
        let (hf, pack) = (dir.path().join("hf"), dir.path().join("pack"));
        synth(&fixture(name).join("config.json"), &hf).args(["--max-shard-size", "300K"]).assert().success();
        iec().args(["pack", "-q", "--hf-dir"]).arg(&hf).arg("--out-dir").arg(&pack).assert().success();
        let reader = iec::iebin::IebinReader::open(&pack).unwrap();
        assert!(reader.description.tokenizer.is_some() && reader.description.model.is_some(), "{name}");
    }
}

#[test]
fn layers_of_multi_token_prediction_are_made_if_wanted() {
    let dir = tempfile::tempdir().unwrap();
    synth(&fixture("qwen35").join("config.json"), dir.path()).arg("--with-mtp").assert().success();
    let layer = |dir: &Path| -> BTreeMap<_, _> {
        tensors(dir).into_iter().filter(|(name, _)| name.starts_with("mtp.")).collect()
    };
    assert_eq!(layer(dir.path()), layer(&fixture("qwen35")));
    assert!(!layer(dir.path()).is_empty());
    let refused = tempfile::tempdir().unwrap();
    let output = synth(&fixture("llama-gqa").join("config.json"), refused.path()).arg("--with-mtp").assert().code(2);
    assert!(String::from_utf8_lossy(&output.get_output().stderr).contains("without layers of multi-token prediction"));
}
