//! Tests `iec export-hf`: a reader written here from the rules of each format decodes the checkpoints, and finds the
//! values that `iec unpack` decodes from the same pack.

use crate::checkpoint::files;
use crate::common::{fixture, iec};
use half::f16;
use iec::convert::json::read_json;
use iec::convert::source::shards::Shards;
use iec::convert::source::source_tensor::SourceTensor;
use iec::dtype::{DType, decode_floats};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

type Tensors = BTreeMap<String, (DType, Vec<usize>, Vec<u8>)>;

fn tensors(dir: &Path) -> Tensors {
    let shards = Shards::open(dir).unwrap();
    let read = |tensor: &SourceTensor| {
        let mut bytes = vec![0xee; tensor.nbytes];
        shards.read(tensor, 0, &mut bytes).unwrap();
        (tensor.name.clone(), (tensor.dtype, tensor.shape.clone(), bytes))
    };
    shards.tensors().map(read).collect()
}

fn floats((dtype, shape, bytes): &(DType, Vec<usize>, Vec<u8>)) -> Vec<f32> {
    let mut out = vec![0.0; shape.iter().product()];
    decode_floats(*dtype, bytes, &mut out).unwrap();
    out
}

/// A pack of a fixture, and the directories of commands that read it.
struct Place {
    dir: TempDir,
}

impl Place {
    /// Packs a fixture with rules of quantization; without a rule, all tensors are floats.
    fn new(name: &str, rules: &Value) -> Place {
        let place = Place { dir: TempDir::new().unwrap() };
        let manifest = place.path("rules.json");
        std::fs::write(&manifest, json!({"version": 1, "rules": rules}).to_string()).unwrap();
        let mut pack = iec();
        pack.arg("pack").arg("--hf-dir").arg(fixture(name)).arg("--out-dir").arg(place.path("pack"));
        if rules != &json!([]) {
            pack.arg("--q4-map").arg(manifest);
        }
        pack.assert().success();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, words: &[&str], out: &str) -> std::process::Output {
        let mut command = iec();
        command.args(words).arg("--model-dir").arg(self.path("pack")).arg("--out-dir").arg(self.path(out));
        command.output().unwrap()
    }

    /// Exports the pack; returns the summary.
    fn export(&self, format: &str, more: &[&str], out: &str) -> Value {
        let output = self.command(&[&["export-hf", "--json", "--format", format], more].concat(), out);
        assert!(output.status.success(), "{format}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Asserts that an export fails with a message that has these words.
    fn refused(&self, format: &str, words: &[&str]) {
        let output = self.command(&["export-hf", "--format", format], "refused");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        words.iter().for_each(|word| assert!(said.contains(word), "`{said}` should say `{word}`"));
        assert!(!self.path("refused").join("config.json").exists());
    }

    /// Returns the tensors of the pack as floats under the names of the checkpoint.
    fn unpacked(&self) -> Tensors {
        let output = self.command(&["unpack", "--dtype", "fp32"], "unpacked");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        tensors(&self.path("unpacked"))
    }

    fn config(&self, out: &str) -> Value {
        read_json::<Value>(&self.path(out).join("config.json")).unwrap()["quantization_config"].clone()
    }
}

/// Returns `n` bits from bit `at` of a little-endian stream on.
fn bits(bytes: &[u8], at: usize, n: usize) -> i32 {
    (0..n).fold(0, |found, i| found | i32::from(bytes[(at + i) / 8] >> ((at + i) % 8) & 1) << i)
}

/// Decodes a module of compressed-tensors with `weights` of its group.
fn compressed(all: &Tensors, module: &str, weights: &Value) -> Vec<f32> {
    let packed = &all[&format!("{module}.weight_packed")];
    let scale = &all[&format!("{module}.weight_scale")];
    let (rows, groups) = (packed.1[0], scale.1[1]);
    if weights["type"] == "float" {
        let cols = packed.1[1] * 2;
        let e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
        let value = |i: usize| e2m1[bits(&packed.2, 4 * i, 4) as usize] * 2f32.powi(i32::from(scale.2[i / 32]) - 127);
        return (0..rows * cols).map(value).collect();
    }
    let shape = &all[&format!("{module}.weight_shape")].2;
    let cols = bits(shape, 64, 31) as usize;
    assert_eq!((bits(shape, 0, 31) as usize, packed.0), (rows, DType::I32));
    let (n, scales) = (weights["num_bits"].as_u64().unwrap() as usize, floats(scale));
    let row_bits = 32 * packed.1[1];
    assert_eq!(row_bits, (cols * n).next_multiple_of(32));
    assert_eq!(weights["strategy"], if weights["group_size"].is_null() { "channel" } else { "group" });
    let size = weights["group_size"].as_u64().map_or(cols, |size| size as usize);
    assert_eq!(size * groups, cols);
    let zeros = all.get(&format!("{module}.weight_zero_point"));
    assert_eq!(zeros.is_none(), weights["symmetric"] == true);
    let value = |row: usize, col: usize| {
        let half = 1 << (n - 1);
        let group = col / size;
        // Zero points are packed along the rows: word `row * n / 32` of column `group`.
        let zero = zeros.map_or(0, |(_, shape, bytes)| {
            assert_eq!(shape[..], [(rows * n).div_ceil(32), groups]);
            let word = row * n / 32 * groups + group;
            bits(bytes, 32 * word + row * n % 32, n) - half
        });
        (bits(&packed.2, row_bits * row + n * col, n) - half - zero) as f32 * scales[row * groups + group]
    };
    (0..rows * cols).map(|i| value(i / cols, i % cols)).collect()
}

/// Returns the modules of a configuration with the `weights` of their groups.
fn modules(config: &Value) -> Vec<(String, Value)> {
    let groups = config["config_groups"].as_object().unwrap().values();
    let of_group = |group: &Value| {
        let names = group["targets"].as_array().unwrap().clone();
        names.into_iter().map(|name| (name.as_str().unwrap().to_string(), group["weights"].clone())).collect::<Vec<_>>()
    };
    groups.flat_map(of_group).collect()
}

fn assert_same(name: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    // The sign of a zero is not compared: a code of 0 has none.
    let wrong = found.iter().zip(expected).position(|(a, b)| a != b);
    assert!(wrong.is_none(), "{name}: element {wrong:?}");
}

/// Checks that all tensors that are no part of a module are those of `iec unpack`, whatever their float type.
fn assert_rest(found: &Tensors, expected: &Tensors, modules: &[String]) {
    let belongs = |name: &str| {
        modules.iter().any(|module| name.strip_prefix(module.as_str()).is_some_and(|r| r.starts_with('.')))
    };
    let rest = |all: &Tensors| all.keys().filter(|name| !belongs(name)).cloned().collect::<Vec<_>>();
    let weights = |name: &String| name.strip_suffix(".bias").is_none();
    assert_eq!(rest(found), rest(expected));
    for name in rest(found).iter().filter(|name| weights(name)) {
        assert_same(name, &floats(&found[name]), &floats(&expected[name]));
    }
}

#[test]
fn compressed_tensors_hold_the_codes_and_scales_of_the_pack() {
    let rule = |include: &str, scheme: &str, group: Value, symmetric: bool| {
        let groups = json!({"group_size": group, "symmetric": symmetric, "method": "rtn"});
        let mut rule = json!({"include": include, "scheme": scheme});
        rule.as_object_mut().unwrap().extend(groups.as_object().unwrap().clone());
        rule
    };
    let all = [
        rule("q_proj", "int4", json!(32), true),
        rule("k_proj", "int4", json!(32), false),
        rule("v_proj", "int8", json!("tensor"), true),
        rule("o_proj", "q4_0", json!(32), true),
        rule("gate_proj", "int5", json!(32), true),
        rule("up_proj", "int6", json!("row"), true),
        rule("layers.0.*down_proj", "mxfp4", json!(32), true),
        rule("down_proj", "int4", json!("row"), false),
    ];
    for (name, rules, groups) in [
        ("llama-gqa", json!(all), 7),
        ("llama-gqa", json!([rule("proj", "int8", json!(32), true)]), 1),
        ("phi3", json!([rule("proj", "int4", json!(32), false)]), 1),
        ("mixtral", json!([rule("self_attn|experts", "int4", json!(32), true)]), 1),
    ] {
        let place = Place::new(name, &rules);
        let summary = place.export("compressed-tensors", &["--max-shard-size", "60k"], "out");
        let (config, found, expected) = (place.config("out"), tensors(&place.path("out")), place.unpacked());
        let modules = modules(&config);
        assert_eq!(config["config_groups"].as_object().unwrap().len(), groups, "{name}: {config}");
        assert_eq!(summary["quantized_modules"], modules.len(), "{name}");
        assert_eq!(summary["dequantized"], json!([]));
        for (module, weights) in &modules {
            assert_same(module, &compressed(&found, module, weights), &floats(&expected[&format!("{module}.weight")]));
        }
        let names: Vec<String> = modules.into_iter().map(|(name, _)| name).collect();
        assert_rest(&found, &expected, &names);
        assert!(config["ignore"].as_array().unwrap().contains(&json!("lm_head")), "{config}");
        assert!(place.path("out/tokenizer.json").exists());
    }
}

/// Decodes a module of GPTQ, first version.
fn gptq(all: &Tensors, module: &str, config: &Value) -> Vec<f32> {
    let tensor = |name: &str| &all[&format!("{module}.{name}")];
    let (weight, zeros, groups) = (tensor("qweight"), tensor("qzeros"), tensor("g_idx"));
    let (n, rows, cols) = (config["bits"].as_u64().unwrap() as usize, weight.1[1], groups.1[0]);
    let scales: Vec<f32> = tensor("scales").2.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
    assert_eq!((weight.1[0], tensor("scales").1[1]), (cols * n / 32, rows));
    let value = |row: usize, col: usize| {
        let group = bits(&groups.2, 32 * col, 31) as usize;
        assert_eq!(group as u64, config["group_size"].as_u64().map_or(0, |size| col as u64 / size));
        let code = bits(&weight.2, 32 * (col * n / 32 * rows + row) + col * n % 32, n);
        let zero = bits(&zeros.2, n * (group * rows + row), n) + 1;
        (code - zero) as f32 * scales[group * rows + row]
    };
    (0..rows * cols).map(|i| value(i / cols, i % cols)).collect()
}

#[test]
fn gptq_holds_the_codes_and_scales_of_the_pack() {
    let rule = |scheme: &str, group: Value| json!([{"include": "proj", "scheme": scheme, "group_size": group}]);
    for (name, rules) in [
        ("llama-gqa", rule("q4_0", json!(32))),
        ("llama-gqa", rule("int8", json!("row"))),
        ("phi3", rule("int4", json!(32))),
    ] {
        let place = Place::new(name, &rules);
        place.export("gptq", &[], "out");
        let (config, found, expected) = (place.config("out"), tensors(&place.path("out")), place.unpacked());
        let modules: Vec<String> =
            found.keys().filter_map(|name| name.strip_suffix(".qweight").map(String::from)).collect();
        assert!(modules.len() >= 8, "{name}");
        for module in &modules {
            assert_same(module, &gptq(&found, module, &config), &floats(&expected[&format!("{module}.weight")]));
        }
        assert_rest(&found, &expected, &modules);
        assert_eq!((&config["checkpoint_format"], &config["desc_act"]), (&json!("gptq"), &json!(false)));
    }
}

#[test]
fn fp8_rounds_each_block_to_its_own_scale() {
    let e4m3 = |code: u8| {
        let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = if exponent == 0 { fraction / 512.0 } else { (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7) };
        if code >> 7 == 1 { -magnitude } else { magnitude }
    };
    for name in ["llama-gqa", "phi3", "qwen3moe"] {
        let place = Place::new(name, &json!([]));
        place.export("fp8", &[], "out");
        let (config, found, expected) = (place.config("out"), tensors(&place.path("out")), place.unpacked());
        let modules: Vec<String> =
            found.keys().filter_map(|name| name.strip_suffix(".weight_scale_inv").map(String::from)).collect();
        assert!(modules.len() >= 8, "{name}");
        for module in &modules {
            let (weight, scale) = (&found[&format!("{module}.weight")], &found[&format!("{module}.weight_scale_inv")]);
            let (values, scales, cols) = (floats(&expected[&format!("{module}.weight")]), floats(scale), weight.1[1]);
            assert_eq!((weight.0, scale.1[1]), (DType::F8E4M3, cols.div_ceil(128)));
            let mut largest = vec![0.0; scales.len()];
            for (i, (value, code)) in values.iter().zip(&weight.2).enumerate() {
                let block = i / cols / 128 * scale.1[1] + i % cols / 128;
                let (value, scale) = (f64::from(*value), f64::from(scales[block]));
                // Half a step: 2^-4 of the number, or 2^-10 for numbers below 2^-6.
                let allowed = (value.abs() / 16.0).max(scale / 1024.0) * 1.000_001;
                assert!((e4m3(*code) * scale - value).abs() <= allowed, "{name}: {module}: {i}");
                largest[block] = f32::max(largest[block], value.abs() as f32);
            }
            let expected: Vec<f32> = largest.iter().map(|largest| largest / 448.0).collect();
            assert_eq!(scales, expected, "{module}");
        }
        assert_rest(&found, &expected, &modules);
        assert!(config["modules_to_not_convert"].as_array().unwrap().contains(&json!("lm_head")));
        assert!(!modules.iter().any(|module| module.ends_with(".mlp.gate")), "a router stays floats");
    }
}

#[test]
fn what_a_format_has_no_equivalent_for_is_refused_by_name_or_decoded() {
    let rules = json!([
        {"include": "layers.0.*o_proj", "scheme": "nl4", "method": "rtn"},
        {"include": "layers.0.*q_proj", "scheme": "int4", "group_size": 64, "method": "rtn"},
        {"include": "proj", "scheme": "int4", "group_size": 32, "method": "rtn"},
    ]);
    let place = Place::new("llama-gqa", &rules);
    // Rows of 96 weights are no whole groups of 64.
    place
        .refused("compressed-tensors", &["layers.0.self_attn.q_proj", "multiple of the group size 64", "--dequantize"]);
    place.refused("fp8", &["expected floats", "--dequantize"]);
    let summary = place.export("compressed-tensors", &["--dequantize"], "out");
    let names = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"];
    assert_eq!(summary["dequantized"], json!(names.map(|name| format!("{name}.weight"))));
    let (found, config) = (tensors(&place.path("out")), place.config("out"));
    for name in names {
        assert!(found.contains_key(&format!("{name}.weight")));
        assert!(config["ignore"].as_array().unwrap().contains(&json!(name)));
    }
    let fp8 = place.export("fp8", &["--dequantize"], "fp8");
    assert_eq!(fp8["dequantized"].as_array().unwrap().len() as u64, fp8["quantized_modules"].as_u64().unwrap());

    let two = json!([
        {"include": "q_proj", "scheme": "int8", "group_size": 32, "method": "rtn"},
        {"include": "proj", "scheme": "int4", "group_size": 32, "method": "rtn"},
    ]);
    Place::new("llama-gqa", &two).refused("gptq", &["4 bits, group size 32", "8 bits", "compressed-tensors"]);
    let fused =
        Place::new("phi3", &json!([{"include": "q_proj", "scheme": "int4", "group_size": 32, "method": "rtn"}]));
    fused.refused("compressed-tensors", &["qkv_proj", "floats", "one specification"]);
    let affine = json!([{"include": "proj", "scheme": "int4", "symmetric": false, "group_size": 32, "method": "rtn"}]);
    Place::new("llama-gqa", &affine).refused("gptq", &["zero points", "symmetric integers"]);
}

#[test]
fn a_pack_without_codes_and_a_taken_directory_are_refused() {
    let place = Place::new("llama-gqa", &json!([]));
    for format in ["compressed-tensors", "gptq"] {
        let output = place.command(&["export-hf", "--format", format], "out");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("--format fp8"), "{said}");
    }
    place.export("fp8", &[], "out");
    let before = files(&place.path("out"));
    assert_eq!(place.command(&["export-hf", "--format", "fp8"], "out").status.code(), Some(2));
    place.export("fp8", &["--overwrite"], "out");
    assert!(files(&place.path("out")) == before);
    let within = place.command(&["export-hf", "--format", "fp8"], "pack/out");
    assert_eq!(within.status.code(), Some(2), "{}", String::from_utf8_lossy(&within.stderr));
}
