//! Tests `iec unpack`, which converts a pack back into the checkpoint it was made from.

use crate::checkpoint::{edited, files, without_digest};
use crate::common::{FAMILIES, fixture, golden, iec};
use iec::convert::json::read_json;
use iec::convert::source::shards::Shards;
use iec::dtype::{DType, decode_floats, encode_floats};
use iec::iebin::{IebinReader, Store};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const FIXTURES: &[&str] = &[
    "stories260k",
    "dedup-llama",
    "gemma2",
    "gemma3",
    "gptoss-bf16",
    "gptoss-mxfp4",
    "llama-gqa",
    "llama3-rope-tied",
    "mistral-swa",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "qwen3moe-dense",
];

struct Place(TempDir);

impl Place {
    fn new() -> Place {
        Place(TempDir::new().unwrap())
    }

    fn run(&self, command: &str, from: (&str, &Path), to: &str, more: &[&str]) -> PathBuf {
        let out = self.0.path().join(to);
        let mut iec = iec();
        iec.arg(command).arg(from.0).arg(from.1).arg("--out-dir").arg(&out).args(more).assert().success();
        out
    }

    fn pack(&self, from: &Path, to: &str, more: &[&str]) -> PathBuf {
        self.run("pack", ("--hf-dir", from), to, more)
    }

    fn unpack(&self, from: &Path, to: &str, more: &[&str]) -> PathBuf {
        self.run("unpack", ("--model-dir", from), to, more)
    }
}

/// Reads type, shape and bytes of every tensor of a checkpoint in any format.
fn tensors(dir: &Path) -> BTreeMap<String, (DType, Vec<usize>, Vec<u8>)> {
    let shards = Shards::open(dir).unwrap();
    let read = |tensor: &iec::convert::source::source_tensor::SourceTensor| {
        let mut bytes = vec![0xee; tensor.nbytes];
        shards.read(tensor, 0, &mut bytes).unwrap();
        (tensor.name.clone(), (tensor.dtype, tensor.shape.clone(), bytes))
    };
    shards.tensors().map(read).collect()
}

fn same_tensors(name: &str, found: &Path, expected: &Path) {
    let (found, mut expected) = (tensors(found), tensors(expected));
    // A redundant copy of tied embeddings is not packed.
    expected.retain(|tensor, _| found.contains_key(tensor) || tensor != "lm_head.weight");
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{name}");
    for (tensor, value) in &expected {
        assert!(found[tensor] == *value, "{name}: {tensor}");
    }
}

fn entries(dir: &Path) -> Value {
    read_json::<Value>(&dir.join("model.ie.json")).unwrap()["tensors"].clone()
}

fn bin(dir: &Path) -> Vec<u8> {
    std::fs::read(dir.join("model.ie.bin")).unwrap()
}

#[test]
fn every_fixture_survives_the_way_there_and_back() {
    for name in FIXTURES {
        let place = Place::new();
        let pack = place.pack(&fixture(name), "pack", &[]);
        let back = place.unpack(&pack, "back", &[]);
        same_tensors(name, &back, &fixture(name));
        for companion in ["config.json", "tokenizer.json", "generation_config.json"] {
            let read = |dir: &Path| std::fs::read(dir.join(companion)).ok();
            assert!(read(&back) == read(&fixture(name)), "{name} {companion}");
        }
        let again = place.pack(&back, "again", &[]);
        assert!(bin(&again) == bin(&pack), "{name}");
        assert_eq!(entries(&again), entries(&pack), "{name}");
    }
}

/// Checks that the other parts of wrappers stay out, and that stacks of experts come back as separate tensors where the
/// family has both forms.
#[test]
fn the_language_model_of_every_family_survives_the_way_there_and_back() {
    for name in FAMILIES {
        let place = Place::new();
        let pack = place.pack(&fixture(name), "pack", &[]);
        let back = place.unpack(&pack, "back", &[]);
        let (found, source) = (tensors(&back), tensors(&fixture(name)));
        for (tensor, value) in &found {
            match source.get(tensor) {
                Some(original) => assert!(value == original, "{name}: {tensor}"),
                None => assert!(tensor.contains(".experts."), "{name}: {tensor}"),
            }
        }
        let again = place.pack(&back, "again", &[]);
        assert!(bin(&again) == bin(&pack), "{name}");
        assert_eq!(entries(&again), entries(&pack), "{name}");
    }
}

#[test]
fn transposed_stacks_of_experts_are_read_in_either_order_of_their_axes() {
    let place = Place::new();
    let pack = place.pack(&fixture("qwen3vlmoe"), "pack", &[]);
    let upright = edited("qwen3vlmoe", |tensors| {
        for (_, tensor) in tensors.iter_mut().filter(|(name, _)| name.contains(".experts.")) {
            let [count, rows, cols] = tensor.shape[..] else { panic!("found {:?}", tensor.shape) };
            let (elements, _) = tensor.bytes.as_chunks::<2>();
            let at = |index: usize| (index / (rows * cols), index / rows % cols, index % rows);
            let swapped = (0..count * rows * cols).map(at).map(|(m, c, r)| elements[(m * rows + r) * cols + c]);
            (tensor.bytes, tensor.shape) = (swapped.flatten().collect(), vec![count, cols, rows]);
        }
    });
    assert!(bin(&place.pack(upright.path(), "upright", &[])) == bin(&pack));
    // Both orders are of the family, so a pack comes back in the one in which models are published.
    let back = place.unpack(&pack, "back", &[]);
    let source = tensors(&fixture("qwen3vlmoe"));
    assert!(tensors(&back).iter().all(|(name, tensor)| source[name] == *tensor));
}

#[test]
fn tensors_of_multi_token_prediction_come_back_byte_for_byte() {
    let named = edited("qwen3vl", |tensors| {
        let norm = tensors["model.language_model.norm.weight"].clone();
        tensors.insert("mtp.norm.weight".into(), norm.clone());
        tensors.insert("mtp.layers.0.self_attn.q_norm.weight".into(), norm);
    });
    let sources = ["deepseek3", "glm4moe", "qwen35", "qwen3next", "minimaxm2"];
    let sources = sources.map(|name| (name, fixture(name)));
    for (name, source) in sources.into_iter().chain([("qwen3vl", named.path().to_path_buf())]) {
        let place = Place::new();
        let rules = place.0.path().join("rules.json");
        std::fs::write(&rules, r#"{"version":1,"rules":[{"include":"layers.*proj(.weight)?$","scheme":"int8","group_size":"row","method":"rtn"}]}"#)
            .unwrap();
        let pack = place.pack(&source, "pack", &["--with-mtp"]);
        let quantized =
            place.pack(&source, "quantized", &["--with-mtp", "--dtype", "fp32", "--q4-map", rules.to_str().unwrap()]);
        let without = place.pack(&source, "without", &[]);
        let is_tower = |tensor: &str| tensor.contains("visual.");
        let expected: BTreeMap<_, _> = tensors(&source).into_iter().filter(|(tensor, _)| !is_tower(tensor)).collect();
        let back = tensors(&place.unpack(&pack, "back", &[]));
        assert!(back.keys().eq(expected.keys()), "{name}");
        assert!(back.iter().all(|(tensor, value)| expected[tensor] == *value), "{name}");
        // Types hold for the language model only, rules for the matrices of layers that are computed, too.
        let left = tensors(&place.unpack(&without, "left", &[]));
        let other = tensors(&place.unpack(&quantized, "other", &["--dtype", "fp32"]));
        let kept = expected.iter().filter(|(tensor, _)| !left.contains_key(*tensor));
        let may_differ = |tensor: &str| tensor.contains("_proj") && !tensor.contains("eh_proj");
        let is_wrong = |tensor: &str, value: &(DType, Vec<usize>, Vec<u8>)| {
            other[tensor].1 != value.1 || other[tensor] != *value && !may_differ(tensor)
        };
        let wrong: Vec<&String> =
            kept.clone().filter(|(tensor, value)| is_wrong(tensor, value)).map(|(tensor, _)| tensor).collect();
        assert!(kept.count() > 1 && wrong.is_empty(), "{name}: {wrong:?}");
        let described = iec().arg("inspect").arg(&pack).output().unwrap();
        assert!(String::from_utf8_lossy(&described.stdout).contains("prediction"), "{name}");
        let run = |pack: &Path| {
            let args = ["run", "--prompt", "Once", "--max-new", "8", "--greedy", "-q", "--model-dir"];
            let output = iec().args(args).arg(pack).output().unwrap();
            assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
            output.stdout
        };
        assert_eq!(run(&pack), run(&without), "{name}");
        let exported = |pack: &Path, file: &str| {
            let output =
                iec().arg("export-gguf").arg(pack).arg("--out").arg(place.0.path().join(file)).output().unwrap();
            assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stderr).unwrap()
        };
        let note = "left out: tensors that no layer of the model computes";
        assert!(exported(&pack, "with.gguf").contains(note) && !exported(&without, "without.gguf").contains(note));
    }
    let place = Place::new();
    let mut pack = iec();
    pack.args(["pack", "--with-mtp", "--hf-dir"])
        .arg(fixture("llama-gqa"))
        .arg("--out-dir")
        .arg(place.0.path().join("x"));
    let output = pack.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no tensors of multi-token prediction"));
}

#[test]
fn the_names_of_original_come_back() {
    let source = crate::pack::with_original();
    let place = Place::new();
    let pack = place.pack(source.path(), "pack", &[]);
    let back = place.unpack(&pack, "back", &[]);
    same_tensors("original", &back, &source.path().join("original"));
    assert!(bin(&place.pack(&back, "again", &[])) == bin(&pack));
}

#[test]
fn shards_are_as_large_as_asked_and_an_index_names_them() {
    let place = Place::new();
    let pack = place.pack(&fixture("mixtral"), "pack", &[]);
    let back = place.unpack(&pack, "back", &["--max-shard-size", "100K"]);
    let sizes: Vec<usize> = files(&back)
        .into_iter()
        .filter(|(n, _)| n.extension().is_some_and(|e| e == "safetensors"))
        .map(|f| f.1.len())
        .collect();
    assert!(sizes.len() > 3 && sizes.iter().all(|size| *size < 110 << 10), "{sizes:?}");
    assert!(back.join("model.safetensors.index.json").exists());
    same_tensors("mixtral", &back, &fixture("mixtral"));
}

#[test]
fn quantized_tensors_are_decoded_and_counted() {
    let place = Place::new();
    let rules = place.0.path().join("rules.json");
    let text = json!({"version": 1, "rules": [
        {"include": "self_attn\\.(q|k)_proj", "scheme": "q4_0"},
        {"include": "mlp\\.", "scheme": "int8"},
    ]});
    for (name, dtype, word) in
        [("llama-gqa", DType::BF16, None), ("phi3", DType::F32, Some("fp32")), ("gptoss-bf16", DType::BF16, None)]
    {
        std::fs::write(&rules, text.to_string()).unwrap();
        let pack = place.pack(&fixture(name), &format!("{name}.pack"), &["--q4-map", rules.to_str().unwrap()]);
        let out = place.0.path().join(format!("{name}.back"));
        let mut command = iec();
        command.args(["unpack", "--json", "--model-dir"]).arg(&pack).arg("--out-dir").arg(&out);
        if let Some(word) = word {
            // Phi-3's quantized q and k are fused with v, which is F16, so only the MLP tensors can be written in
            // another type.
            command.args(["--dtype", word]);
        }
        let output = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && stderr.contains("they are not the source's numbers"), "{name}: {stderr}");
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        let reader = IebinReader::open(&pack).unwrap();
        let quantized: Vec<&str> =
            reader.entries().iter().filter(|e| matches!(e.store, Store::Tiled(_))).map(|e| e.name.as_str()).collect();
        assert_eq!(summary["dequantized"], json!(quantized), "{name}");
        assert!(!quantized.is_empty());
        let (found, source) = (tensors(&out), tensors(&fixture(name)));
        assert_eq!(found.keys().collect::<Vec<_>>(), source.keys().collect::<Vec<_>>(), "{name}");
        let o_proj = "model.layers.0.self_attn.o_proj.weight";
        assert!(found[o_proj] == source[o_proj], "{name}: what stayed floats is unchanged");
        if name == "phi3" {
            assert_eq!(found["model.layers.0.self_attn.qkv_proj.weight"].0, DType::F16);
            assert_eq!(found["model.layers.0.mlp.gate_up_proj.weight"].0, dtype);
        }
        // The written values are the decoded ones, rounded to the type.
        if name == "llama-gqa" {
            let entry = reader.get("model.layers.1.self_attn.q_proj.weight").unwrap();
            let layout = entry.layout().unwrap().unwrap();
            let mut values = vec![f32::NAN; entry.elements()];
            let payload = reader.payload(entry).unwrap();
            iec::quant::block::tile::dequantize_rows(&layout, &payload, 0..entry.shape[0], &mut values);
            let mut bytes = Vec::new();
            encode_floats(dtype, &values, &mut bytes).unwrap();
            assert!(found[&entry.name].2 == bytes);
        }
        // The values are close to the source, and both load in the same way.
        let floats = |(dtype, shape, bytes): &(DType, Vec<usize>, Vec<u8>)| {
            let mut values = vec![0f32; shape.iter().product()];
            decode_floats(*dtype, bytes, &mut values).unwrap();
            values
        };
        for (tensor, value) in &found {
            let (a, b) = (floats(value), floats(&source[tensor]));
            let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(x * y)).sum::<f64>();
            assert!(dot(&a, &b) / (dot(&a, &a) * dot(&b, &b)).sqrt() > 0.99, "{name} {tensor}");
        }
        place.pack(&out, &format!("{name}.again"), &[]);
    }
}

#[test]
fn decoded_experts_are_not_announced_as_mxfp4() {
    let place = Place::new();
    let rules = place.0.path().join("rules.json");
    std::fs::write(
        &rules,
        json!({"version": 1, "rules": [{"include": "experts\\.(gate_up|down)_proj$", "scheme": "int8"}]}).to_string(),
    )
    .unwrap();
    let pack = place.pack(&fixture("gptoss-mxfp4"), "pack", &["--q4-map", rules.to_str().unwrap()]);
    let back = place.unpack(&pack, "back", &[]);
    let config: Value = read_json(&back.join("config.json")).unwrap();
    assert!(config.get("quantization_config").is_none() && config["hidden_size"] == 96);
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    assert_eq!(tensors(&back)[name].1, [8, 96, 128], "experts are stored (experts, in, out)");
    let again = place.pack(&back, "again", &[]);
    let ids = |dir: &Path| {
        let text = golden("gptoss-mxfp4")["prompts"][0]["text"].as_str().unwrap().to_string();
        let mut run = iec();
        run.args(["run", "--max-new", "4", "--prompt", &text, "--model-dir"]).arg(dir);
        run.output().unwrap().status.success()
    };
    assert!(ids(&again));
}

#[test]
fn damage_and_contradictions_are_refused_and_leave_nothing() {
    let place = Place::new();
    let pack = place.pack(&fixture("llama3-rope-tied"), "pack", &[]);
    let out = place.0.path().join("out");
    let refused = |code: i32, messages: &[&str]| {
        let output = iec().args(["unpack", "--model-dir"]).arg(&pack).arg("--out-dir").arg(&out).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(messages.iter().all(|m| stderr.contains(m)) && !out.exists(), "{stderr}");
    };
    without_digest(&pack);
    let config = std::fs::read_to_string(pack.join("config.json")).unwrap();
    std::fs::write(pack.join("config.json"), config.replace("\"intermediate_size\": 192", "\"intermediate_size\": 64"))
        .unwrap();
    refused(1, &["mlp.gate_proj.weight", "expected [64, 64] from config.json"]);
    std::fs::write(pack.join("config.json"), config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1"))
        .unwrap();
    refused(1, &["model.layers.1.", "not described by config.json"]);
    std::fs::remove_file(pack.join("config.json")).unwrap();
    refused(1, &["config.json", "`iec pack` wrote"]);
    std::fs::write(pack.join("config.json"), &config).unwrap();

    let mut bytes = bin(&pack);
    bytes[5000] ^= 1;
    std::fs::write(pack.join("model.ie.bin"), &bytes).unwrap();
    refused(1, &["SHA-256", "the pack is damaged"]);
    bytes[5000] ^= 1;
    std::fs::write(pack.join("model.ie.bin"), &bytes).unwrap();
    std::fs::remove_file(pack.join("model.ie.json")).unwrap();
    refused(3, &["model.ie.json"]);
}

#[test]
fn a_checkpoint_that_is_there_is_not_replaced_unasked() {
    let place = Place::new();
    let pack = place.pack(&fixture("qwen2"), "pack", &[]);
    let back = place.unpack(&pack, "back", &[]);
    let before = files(&back);
    let code = |arguments: &[&str], out: &Path| {
        iec()
            .args(["unpack", "--model-dir"])
            .arg(&pack)
            .arg("--out-dir")
            .arg(out)
            .args(arguments)
            .output()
            .unwrap()
            .status
            .code()
    };
    assert_eq!(code(&[], &back), Some(2));
    assert_eq!(code(&[], &pack), Some(2));
    assert!(files(&back) == before);
    assert_eq!(code(&["--overwrite", "--max-shard-size", "100K"], &back), Some(0));
    assert!(!back.join("model.safetensors").exists());
    same_tensors("qwen2", &back, &fixture("qwen2"));
}
