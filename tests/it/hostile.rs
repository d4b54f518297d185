//! Tests damaged, contradictory and malicious input: the documented exit code, a message that names the cause, no
//! panic, and nothing left in the output directory.

use crate::checkpoint::{copy_of, edit_header, edit_json, edited, files, without_digest};
use crate::common::{fixture, iec};
use half::bf16;
use iec::convert::Checkpoint;
use iec::iebin::IebinReader;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const Q: &str = "model.layers.1.self_attn.q_proj.weight";
const FIRST: &str = "model-00001-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Runs `iec pack --json` and expects a failure whose message on stderr names `culprits` and is repeated as JSON on
/// stdout.
fn pack_is_refused(checkpoint: &Path, arguments: &[&OsStr], code: i32, culprits: &[&str]) {
    let place = TempDir::new().unwrap();
    let out = place.path().join("pack");
    let mut pack = iec();
    pack.args(["pack", "--json", "--hf-dir"]).arg(checkpoint).arg("--out-dir").arg(&out).args(arguments);
    let output = pack.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert!(stderr.starts_with("error: ") && !stderr.contains("panicked"), "{stderr}");
    for culprit in culprits {
        assert!(stderr.contains(culprit), "`{culprit}` is not in: {stderr}");
    }
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(stderr.contains(json["error"]["message"].as_str().unwrap()), "{json}");
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "something was left behind");
}

fn refused(checkpoint: &TempDir, culprits: &[&str]) {
    pack_is_refused(checkpoint.path(), &[], 1, culprits);
}

#[test]
fn a_truncated_shard_is_refused() {
    let dir = copy_of("llama-gqa");
    let file = std::fs::File::options().write(true).open(dir.path().join(FIRST)).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1000).unwrap();
    refused(&dir, &[FIRST, "model.layers.1.mlp.down_proj.weight", "reach past the file", "help: "]);
}

#[test]
fn a_header_longer_than_the_file_is_refused() {
    let dir = copy_of("llama3-rope-tied");
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[..8].copy_from_slice(&90_000_000u64.to_le_bytes());
    std::fs::write(&path, &bytes).unwrap();
    refused(&dir, &["model.safetensors", "longer than the file"]);
    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    std::fs::write(&path, &bytes).unwrap();
    refused(&dir, &["model.safetensors", "expected at most 100000000"]);
}

#[test]
fn overlapping_offsets_are_refused() {
    let dir = copy_of("llama-gqa");
    edit_header(&dir.path().join(FIRST), |header| header.replace("[98304,196608]", "[98302,196606]"));
    refused(&dir, &[FIRST, "model.embed_tokens.weight", "overlaps tensor lm_head.weight"]);
}

#[test]
fn offsets_outside_the_file_are_refused() {
    let dir = copy_of("llama-gqa");
    edit_header(&dir.path().join(FIRST), |header| {
        header.replace("[98304,196608]", "[18446744073709453311,18446744073709551615]")
    });
    refused(&dir, &[FIRST, "model.embed_tokens.weight", "reach past the file"]);
}

#[test]
fn a_shape_whose_product_overflows_is_refused() {
    let dir = copy_of("llama-gqa");
    let huge = "\"shape\":[4294967296,4294967297],\"data_offsets\":[98304,196608]";
    edit_header(&dir.path().join(FIRST), |h| h.replace("\"shape\":[512,96],\"data_offsets\":[98304,196608]", huge));
    refused(&dir, &[FIRST, "model.embed_tokens.weight", "overflows"]);
}

#[test]
fn duplicate_names_are_refused() {
    let dir = copy_of("llama-gqa");
    edit_header(&dir.path().join(FIRST), |header| header.replace("model.embed_tokens.weight", "lm_head.weight"));
    refused(&dir, &[FIRST, "lm_head.weight", "found this tensor twice"]);
    let dir = copy_of("llama-gqa");
    std::fs::copy(dir.path().join(FIRST), dir.path().join("copy.safetensors")).unwrap();
    edit_json(&dir.path().join(INDEX), |json| json["weight_map"][Q] = "copy.safetensors".into());
    refused(&dir, &["in two shards"]);
}

#[test]
fn an_unknown_dtype_is_refused() {
    let dir = copy_of("llama-gqa");
    edit_header(&dir.path().join(FIRST), |header| header.replacen("\"BF16\"", "\"F4\"", 1));
    refused(&dir, &[FIRST, "lm_head.weight", "found dtype `F4`"]);
}

#[test]
fn an_index_that_names_a_missing_shard_is_refused() {
    let dir = copy_of("llama-gqa");
    std::fs::remove_file(dir.path().join(FIRST)).unwrap();
    refused(&dir, &[INDEX, FIRST, "no such file"]);
}

#[test]
fn an_index_that_leaves_its_directory_is_refused() {
    let elsewhere = copy_of("llama-gqa");
    let absolute = elsewhere.path().join(FIRST);
    for path in [absolute.to_str().unwrap(), "../model.safetensors", "sub/model.safetensors", "..", ""] {
        let dir = copy_of("llama-gqa");
        edit_json(&dir.path().join(INDEX), |json| json["weight_map"]["lm_head.weight"] = path.into());
        refused(&dir, &[INDEX, "weight_map", "expected a plain file name"]);
    }
}

#[test]
fn an_index_that_disagrees_with_its_shards_is_refused() {
    let dir = copy_of("llama-gqa");
    edit_json(&dir.path().join(INDEX), |json| json["weight_map"]["model.extra.weight"] = FIRST.into());
    refused(&dir, &[INDEX, "model.extra.weight", FIRST]);
    std::fs::write(dir.path().join(INDEX), "{\"weight_map\":").unwrap();
    refused(&dir, &[INDEX, "invalid JSON"]);
}

/// Asserts that `ptq`, `q4` and a quantizing `pack` refuse a q projection whose fifth weight is `value`.
fn weight_is_refused(value: f32) {
    let dir = edited("llama-gqa", |tensors| {
        tensors.get_mut(Q).unwrap().bytes[8..10].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
    });
    let rules = dir.path().join("rules.json");
    std::fs::write(&rules, json!({"version": 1, "rules": [{"include": "q_proj", "scheme": "q4_0"}]}).to_string())
        .unwrap();
    pack_is_refused(
        dir.path(),
        &["--q4-map".as_ref(), rules.as_ref()],
        1,
        &["model.safetensors", Q, "cannot be quantized"],
    );
    for (command, output) in [("ptq", "--out"), ("q4", "--out-dir")] {
        let place = TempDir::new().unwrap();
        let mut quantize = iec();
        quantize.arg(command).arg("--hf-dir").arg(dir.path()).arg(output).arg(place.path().join("q4"));
        let refused = quantize.assert().code(1);
        let stderr = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
        assert!(stderr.contains(Q) && stderr.contains("cannot be quantized"), "{command}: {stderr}");
        assert!(files(place.path()).is_empty(), "{command}");
    }
    // Without quantization, the value is copied like any other.
    let out = TempDir::new().unwrap();
    iec().args(["pack", "--hf-dir"]).arg(dir.path()).arg("--out-dir").arg(out.path()).assert().success();
}

#[test]
fn a_weight_that_is_not_a_number_cannot_be_quantized() {
    weight_is_refused(f32::NAN);
}

#[test]
fn an_infinite_weight_cannot_be_quantized() {
    weight_is_refused(f32::NEG_INFINITY);
}

/// Runs `iec q4` into a fresh directory and returns the path of the expanded manifest.
fn q4_files(checkpoint: &Path) -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("q4");
    iec().arg("q4").arg("--hf-dir").arg(checkpoint).arg("--out-dir").arg(&out).assert().success();
    let manifest = out.join("q4_manifest.expanded.json");
    (dir, manifest)
}

#[test]
fn q4_files_of_another_checkpoint_are_refused() {
    let (_dir, manifest) = q4_files(edited("llama-gqa", |_| ()).path());
    let other = edited("llama-gqa", |tensors| tensors.get_mut(Q).unwrap().bytes[8] ^= 1);
    let arguments = ["--q4-map".as_ref(), manifest.as_os_str()];
    pack_is_refused(other.path(), &arguments, 1, &["q4_manifest.expanded.json", "another `model.safetensors`"]);
    pack_is_refused(&fixture("llama3-rope-tied"), &arguments, 1, &["q4_manifest.expanded.json", "not in the model"]);
}

#[test]
fn damaged_q4_files_are_refused() {
    let (_dir, manifest) = q4_files(&fixture("llama-gqa"));
    let bin = manifest.with_file_name("model.q4.bin");
    let mut bytes = std::fs::read(&bin).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&bin, &bytes).unwrap();
    let arguments = ["--q4-map".as_ref(), manifest.as_os_str()];
    pack_is_refused(&fixture("llama-gqa"), &arguments, 1, &["model.q4.bin", "SHA-256"]);
    bytes.truncate(2000);
    std::fs::write(&bin, &bytes).unwrap();
    pack_is_refused(&fixture("llama-gqa"), &arguments, 1, &["q4_manifest.expanded.json", "model.layers."]);
}

#[test]
fn a_block_scale_that_is_not_a_number_is_refused() {
    let name = "model.layers.2.mlp.experts.down_proj_scales";
    let dir = edited("gptoss-mxfp4", |tensors| tensors.get_mut(name).unwrap().bytes[77] = 255);
    refused(&dir, &["model.safetensors", name]);
}

fn config_is_refused(name: &str, field: &str, value: Value, culprits: &[&str]) {
    let dir = copy_of(name);
    edit_json(&dir.path().join("config.json"), |json| json[field] = value);
    refused(&dir, culprits);
}

#[test]
fn heads_that_do_not_divide_are_refused() {
    config_is_refused("llama-gqa", "num_key_value_heads", 4.into(), &["config.json", "6 query heads", "4 key/value"]);
    config_is_refused(
        "stories260k",
        "num_attention_heads",
        7.into(),
        &["config.json", "found hidden_size 64, expected a multiple of the 7 heads"],
    );
}

#[test]
fn what_the_program_does_not_know_is_refused_by_field() {
    for (field, value) in [
        ("architectures", json!(["MambaForCausalLM"])),
        ("hidden_act", json!("gelu")),
        ("rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0})),
        ("quantization_config", json!({"quant_method": "exl3"})),
    ] {
        config_is_refused("llama-gqa", field, value, &["config.json", field, "is not supported"]);
    }
}

#[test]
fn a_configuration_that_contradicts_the_tensors_is_refused() {
    config_is_refused("llama-gqa", "intermediate_size", 128.into(), &[FIRST, "mlp.gate_proj.weight", "[128, 96]"]);
    config_is_refused(
        "llama-gqa",
        "num_hidden_layers",
        4.into(),
        &["model.layers.3.input_layernorm.weight", "missing"],
    );
    config_is_refused("llama-gqa", "num_hidden_layers", 2.into(), &["model.layers.2.", "unexpected tensor"]);
    config_is_refused("llama-gqa", "num_hidden_layers", 9999.into(), &["num_hidden_layers", "30 tensors"]);
    config_is_refused("gptoss-mxfp4", "hidden_size", 64.into(), &["model.embed_tokens.weight", "[512, 64]"]);
}

#[test]
fn a_missing_configuration_is_refused() {
    let dir = copy_of("llama-gqa");
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    refused(&dir, &["config.json", "No such file", "--hf-dir"]);
    std::fs::write(dir.path().join("config.json"), "[]").unwrap();
    refused(&dir, &["config.json", "expected a JSON object"]);
    pack_is_refused(Path::new("/no/such/checkpoint"), &[], 1, &["/no/such/checkpoint", "No such file"]);
}

#[test]
fn missing_weights_are_refused() {
    let dir = copy_of("stories260k");
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    refused(&dir, &["found no weights", "model.safetensors"]);
    std::fs::write(dir.path().join("pytorch_model.bin"), "PK").unwrap();
    refused(&dir, &["pytorch_model.bin", "expected a safetensors file"]);
}

#[test]
fn a_broken_tokenizer_is_refused() {
    for (text, culprit) in [
        ("{\"model\":", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ("{}", "model"),
        ("{\"model\":3}", "tokenizer"),
    ] {
        let dir = copy_of("llama-gqa");
        std::fs::write(dir.path().join("tokenizer.json"), text).unwrap();
        refused(&dir, &["tokenizer.json", culprit]);
    }
    let missing = Path::new("/no/such/tokenizer.json");
    pack_is_refused(
        &fixture("llama-gqa"),
        &["--tokenizer".as_ref(), missing.as_ref()],
        1,
        &["/no/such/tokenizer.json"],
    );
}

#[cfg(unix)]
#[test]
fn a_full_disk_leaves_nothing_behind() {
    // A limit on the size of files simulates the full disk.
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("pack");
    let binary = assert_cmd::cargo::cargo_bin("iec");
    let script = "trap '' XFSZ; ulimit -f 200; exec \"$@\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).arg(binary).args(["pack", "--hf-dir"]).arg(fixture("gptoss-trained"));
    let output = shell.arg("--out-dir").arg(&out).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("model.ie.bin") && stderr.contains("large"), "{stderr}");
    assert!(!out.exists());
}

/// Creates a checkpoint whose embedding and head are holes of 512 MiB in a sparse file: quick to create, but slow
/// enough to pack that the command can be interrupted.
fn large_checkpoint() -> TempDir {
    let dir = TempDir::new().unwrap();
    let (vocab, hidden) = (1 << 18, 1024);
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "num_attention_heads": 8, "vocab_size": vocab,
        "num_hidden_layers": 1, "intermediate_size": 1024
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let layer = "model.layers.0";
    let square = [hidden, hidden];
    let mut tensors = vec![("lm_head.weight".to_string(), vec![vocab, hidden])];
    tensors.extend(["model.embed_tokens.weight".to_string()].map(|n| (n, vec![vocab, hidden])));
    for name in ["q", "k", "v", "o"] {
        tensors.push((format!("{layer}.self_attn.{name}_proj.weight"), square.to_vec()));
    }
    for name in ["gate", "up", "down"] {
        tensors.push((format!("{layer}.mlp.{name}_proj.weight"), square.to_vec()));
    }
    for name in [format!("{layer}.input_layernorm"), format!("{layer}.post_attention_layernorm"), "model.norm".into()] {
        tensors.push((format!("{name}.weight"), vec![hidden]));
    }
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let bytes = 2 * shape.iter().product::<usize>();
        header.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": [end, end + bytes]}));
        end += bytes;
    }
    let header = Value::Object(header).to_string();
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
    dir
}

#[cfg(unix)]
#[test]
fn an_interrupt_leaves_nothing_under_a_final_name() {
    let checkpoint = large_checkpoint();
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("pack");
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("iec"));
    command.args(["pack", "--hf-dir"]).arg(checkpoint.path()).arg("--out-dir").arg(&out);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    // The temporary data file exists once weights are being written.
    while !out.exists() || files_are_missing(&out) {
        assert!(Instant::now() < deadline, "packing never began");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    // Finished work, if any, is kept in a hidden directory.
    let names = std::fs::read_dir(&out).into_iter().flatten().map(|e| e.unwrap().file_name());
    assert!(names.into_iter().all(|name| name.to_string_lossy().ends_with(".partial")));
}

fn files_are_missing(out: &Path) -> bool {
    std::fs::read_dir(out).map_or(true, |mut entries| entries.next().is_none())
}

fn packed(name: &str) -> (TempDir, PathBuf) {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("pack");
    iec().args(["pack", "--hf-dir"]).arg(fixture(name)).arg("--out-dir").arg(&out).assert().success();
    (dir, out)
}

#[test]
fn damaged_descriptions_and_configurations_never_panic_the_readers() {
    let (_pack, out) = packed("gptoss-mxfp4");
    let checkpoint = copy_of("gptoss-mxfp4");
    let before = files(checkpoint.path());
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig { cases: 64, ..ProptestConfig::default() });
    let edits = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4);
    for path in [
        out.join("model.ie.json"),
        checkpoint.path().join("config.json"),
        checkpoint.path().join("generation_config.json"),
        checkpoint.path().join(INDEX),
        checkpoint.path().join(FIRST),
    ] {
        let good = std::fs::read(&path).unwrap();
        let head = good.len().min(3000);
        runner
            .run(&edits, |edits| {
                let mut bytes = good.clone();
                for (at, byte) in edits {
                    bytes[at.index(head)] = byte;
                }
                std::fs::write(&path, bytes).unwrap();
                let _ = IebinReader::open(&out);
                let _ = Checkpoint::open(checkpoint.path());
                Ok(())
            })
            .unwrap();
        std::fs::write(&path, good).unwrap();
    }
    assert!(files(checkpoint.path()) == before);
    assert!(IebinReader::open(&out).is_ok() && Checkpoint::open(checkpoint.path()).is_ok());
}

#[test]
fn a_dense_layer_without_its_tensors_is_refused() {
    for name in ["gate_proj", "up_proj", "down_proj"] {
        let missing = format!("model.layers.1.mlp.{name}.weight");
        let dir = edited("qwen3moe-dense", |tensors| drop(tensors.remove(&missing).unwrap()));
        refused(&dir, &[&missing, "missing from the checkpoint"]);
    }
    // The checkpoint has experts there.
    let dir = copy_of("qwen3moe-dense");
    edit_json(&dir.path().join("config.json"), |json| json["mlp_only_layers"] = json!([1, 2]));
    refused(&dir, &["model.layers.2.mlp.gate_proj.weight", "missing from the checkpoint"]);
    edit_json(&dir.path().join("config.json"), |json| json["mlp_only_layers"] = json!([3]));
    refused(&dir, &["mlp_only_layers", "[3]", "below 3"]);
}

#[test]
fn a_pack_with_a_wrong_list_of_dense_layers_is_refused() {
    for (layers, complaint) in [
        (json!([3]), "found layer 3, expected numbers below 3"),
        (json!([1, 1]), "1 follows 1"),
        (json!([0, 1]), "model.layers.0.mlp.gate_proj.weight"),
    ] {
        let (_dir, pack) = packed("qwen3moe-dense");
        without_digest(&pack);
        edit_json(&pack.join("model.ie.json"), |json| json["model"]["dense_layers"]["layers"] = layers);
        let run = iec().args(["run", "--prompt", "x", "--max-new", "1", "--model-dir"]).arg(&pack).assert();
        let message = String::from_utf8_lossy(&run.failure().get_output().stderr).into_owned();
        assert!(message.contains(complaint), "{message}");
    }
}
