//! Checkpoints in the formats of other quantizers: exact values, kept codes, and what is refused.

use crate::common::{PUBLISHED, fixture, golden, iec, packed_as};
use crate::cuda::on_gpu;
use crate::golden::{Case, compare, fp32, noise, open};
use iec::convert::Checkpoint;
use iec::convert::json::read_object;
use iec::convert::published::{Coded, Published, Source};
use iec::convert::source::layout::Layout;
use iec::convert::source::shards::Shards;
use iec::iebin::{IebinReader, Store};
use iec::quant::block::tile::dequantize_rows;
use iec::runtime::{EngineOptions, Precision};
use iec::sha256::{Digest, Sha256, hex};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Opens the quantized matrices of a checkpoint.
fn matrices(dir: &Path) -> (Shards, Published) {
    let layout = Layout::find(dir).unwrap();
    let shards = Shards::open_layout(&layout).unwrap();
    let path = dir.join("config.json");
    let config = read_object(&path).unwrap();
    let published = Published::open(&Source { config: &config, path: &path, layout: &layout }, &shards, &|_| false);
    (shards, published.unwrap())
}

/// Reads all values of a matrix, `step` rows at a time.
fn values(coded: &Coded, shards: &Shards, step: usize) -> Vec<f32> {
    let (rows, cols) = (coded.shape[0], coded.shape[1]);
    let mut all = vec![f32::NAN; rows * cols];
    for (number, chunk) in all.chunks_mut(step * cols).enumerate() {
        let first = number * step;
        coded.read_rows(shards, 0, first..first + chunk.len() / cols, chunk).unwrap();
    }
    all
}

fn sha256(values: &[f32]) -> String {
    let mut hash = Sha256::new();
    values.iter().for_each(|value| hash.update(value.to_le_bytes()));
    hex(hash)
}

fn digests(name: &str) -> BTreeMap<String, Value> {
    let listed = golden(name)["quantized_checkpoint"]["dequantized_sha256"].clone();
    listed.as_object().unwrap().clone().into_iter().collect()
}

#[test]
fn every_matrix_has_the_values_that_the_library_of_its_format_gives() {
    let mut failures = Vec::new();
    for name in PUBLISHED {
        let (shards, published) = matrices(&fixture(name));
        let expected = digests(name);
        let found: Vec<&str> = published.names().collect();
        if found != expected.keys().map(String::as_str).collect::<Vec<_>>() {
            failures.push(format!("{name}: found {found:?}"));
        }
        for (matrix, digest) in &expected {
            let Some(coded) = published.get(matrix) else { continue };
            for step in [coded.shape[0], 7] {
                if json!(sha256(&values(coded, &shards, step))) != *digest {
                    failures.push(format!("{name} {matrix}, {step} rows at a time"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn packs_in_both_forms_give_the_ids_and_logits_of_the_exact_values() {
    let mut failures = Vec::new();
    for name in PUBLISHED {
        let case = Case::fixture(name);
        for form in ["published", "float"] {
            let pack = packed_as(&format!("{name}-{form}"), &case.hf_dir, &["--as", form]);
            let kept = KEPT.iter().find(|(other, _)| *other == name && form == "published").and_then(|(_, kept)| *kept);
            let precision = match kept {
                Some(scheme) if scheme.starts_with("int4") || scheme == "nvfp4" => Precision::Int4w,
                Some(_) => Precision::Int8w,
                None => Precision::Fp32,
            };
            let mut engine = open(&pack, EngineOptions { precision: Some(precision), ..fp32() });
            // Precisions of codes round activations and the KV cache to 16 bits.
            let (noise, limit) =
                if kept.is_some() { (noise(Precision::Fp16), noise(Precision::Fp16)) } else { (0.0, 1e-3) };
            for (i, prompt) in case.prompts().iter().enumerate() {
                let found = compare(&mut engine, prompt, noise);
                if found.logit > limit || !found.wrong_ids.is_empty() || found.compared == 0 {
                    let ids = found.wrong_ids;
                    failures.push(format!("{name} {form} prompt {i}: logits off by {}, {ids:?}", found.logit));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn codes_of_fp8_and_nvfp4_give_the_ids_and_logits_of_the_exact_values_on_a_gpu() {
    for (name, precision) in [("fp8-block", Precision::Int8w), ("modelopt-nvfp4", Precision::Int4w)] {
        let case = Case::fixture(name);
        let pack = packed_as(&format!("{name}-published"), &case.hf_dir, &["--as", "published"]);
        let mut engine = open(&pack, on_gpu(EngineOptions { precision: Some(precision), ..fp32() }));
        let limit = noise(Precision::Fp16);
        for prompt in case.prompts() {
            let found = compare(&mut engine, prompt, limit);
            assert!(found.compared > 0 && found.wrong_ids.is_empty(), "{name}: {:?}", found.wrong_ids);
            assert!(found.logit <= limit, "{name}: logits off by {}", found.logit);
        }
    }
}

/// Scheme that holds the codes of each fixture; `None` for formats that become floats.
const KEPT: [(&str, Option<&str>); 15] = [
    ("fp8-block", Some("fp8/128")),
    ("fp8-tensor", Some("fp8/row")),
    ("ct-w4a16", Some("int4/row")),
    ("ct-w4a16-asym", Some("int4/32 affine")),
    ("ct-w8a8", Some("int8/row")),
    ("ct-fp8", Some("fp8/row")),
    ("ct-nvfp4", Some("nvfp4")),
    ("modelopt-nvfp4", Some("nvfp4")),
    ("awq", Some("int4/128 affine")),
    ("gptq", Some("int4/128")),
    ("gptq-actorder", None),
    ("bnb-nf4", None),
    ("bnb-int8", Some("int8/row")),
    ("torchao-int4", Some("int4/32")),
    ("mlx-4bit", None),
];

/// Fixtures with scales of activations.
const STATIC: [&str; 3] = ["fp8-tensor", "ct-nvfp4", "modelopt-nvfp4"];

/// Fixtures whose packs hold rounded scales: products with the factor of bitsandbytes, and for NVFP4 of
/// compressed-tensors products with a reciprocal instead of quotients.
const ROUNDED: [&str; 2] = ["bnb-int8", "ct-nvfp4"];

/// Decodes a tensor of a pack.
fn decoded(reader: &IebinReader, name: &str) -> Vec<f32> {
    let entry = reader.get(name).unwrap();
    let (count, rows, cols) = entry.matrices().unwrap();
    let payload = reader.payload(entry).unwrap();
    let mut all = vec![f32::NAN; count * rows * cols];
    match (entry.layout(), entry.store) {
        (Some(layout), _) => {
            let layout = layout.unwrap();
            for (tiles, out) in payload.chunks(layout.nbytes()).zip(all.chunks_mut(rows * cols)) {
                dequantize_rows(&layout, tiles, 0..rows, out);
            }
        }
        (None, Store::Plain(dtype)) => iec::dtype::decode_floats(dtype, &payload, &mut all).unwrap(),
        (None, _) => unreachable!(),
    }
    all
}

#[test]
fn kept_codes_have_the_exact_values_and_survive_unpack() {
    let mut failures = Vec::new();
    for (name, kept) in KEPT {
        let dir = fixture(name);
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let forms = checkpoint.forms().unwrap();
        let expected = |form: &Option<String>| match kept {
            // Rows that are as wide as a group have one scale each.
            Some(kept) => form.as_deref().is_some_and(|form| {
                form == kept || form == kept.replace("128", "row") || kept == "int4/row" && form == "int4/128"
            }),
            None => form.is_none(),
        };
        failures.extend(forms.iter().filter(|form| !expected(&form.kept_as)).map(|form| format!("{name}: {form:?}")));
        let packs = ["published", "float"].map(|form| packed_as(&format!("{name}-{form}"), &dir, &["--as", form]));
        let [codes, floats] = packs.each_ref().map(|pack| IebinReader::open(pack).unwrap());
        for reader in [&codes, &floats] {
            let recorded = reader.description.published.as_ref().expect(name);
            assert_eq!(recorded.activation_scales, STATIC.contains(&name), "{name}: {recorded:?}");
        }
        for form in &forms {
            let [a, b] = [&codes, &floats].map(|reader| decoded(reader, &form.tensor));
            let tolerance = if ROUNDED.contains(&name) { 1e-6 } else { 0.0 };
            if !a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= tolerance * b.abs()) {
                failures.push(format!("{name} {}: values differ", form.tensor));
            }
        }
        let out = tempfile::tempdir().unwrap();
        let unpacked = out.path().join("checkpoint");
        let mut unpack = iec();
        unpack.args(["unpack", "--dtype", "fp32", "--model-dir"]).arg(&packs[0]).arg("--out-dir").arg(&unpacked);
        unpack.assert().success();
        let again = Checkpoint::open(&unpacked).unwrap();
        for form in forms.iter().filter(|_| !ROUNDED.contains(&name)) {
            let read = |checkpoint: &Checkpoint| {
                let tensor = checkpoint.get(&form.tensor).unwrap();
                let (count, rows, cols) = tensor.matrices();
                let mut all = vec![f32::NAN; count * rows * cols];
                for (matrix, out) in all.chunks_mut(rows * cols).enumerate() {
                    checkpoint.read_rows_f32(tensor, matrix, 0..rows, out).unwrap();
                }
                all
            };
            if read(&checkpoint) != read(&again) {
                failures.push(format!("{name} {}: values differ after unpack", form.tensor));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// The pack of floats must choose every token that the reference chooses with the values of the checkpoint.
#[test]
fn verify_reads_the_quantized_matrices_of_the_checkpoint() {
    let mut failures = Vec::new();
    for name in PUBLISHED {
        let pack = packed_as(&format!("{name}-float"), &fixture(name), &["--as", "float"]);
        let mut verify = iec();
        verify.args(["verify", "--max-new", "6", "--precision", "fp32", "--model-dir"]);
        let output = verify.arg(&pack).arg("--hf-dir").arg(fixture(name)).output().unwrap();
        if !output.status.success() {
            failures.push(format!("{name}: {}", String::from_utf8_lossy(&output.stderr)));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// A copy of a fixture that may be changed.
struct Copy {
    dir: tempfile::TempDir,
}

impl Copy {
    fn of(name: &str) -> Copy {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(fixture(name)).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
        Copy { dir }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    fn edit(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let mut content: Value = serde_json::from_slice(&std::fs::read(self.path(file)).unwrap()).unwrap();
        change(&mut content);
        std::fs::write(self.path(file), content.to_string()).unwrap();
    }

    fn settings(&self, change: impl FnOnce(&mut Value)) {
        self.edit("config.json", |config| change(&mut config["quantization_config"]));
    }

    /// Overwrites the first bytes of a tensor.
    fn bytes(&self, tensor: &str, bytes: &[u8]) {
        for entry in std::fs::read_dir(self.dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let mut file = std::fs::read(&path).unwrap();
            let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            let header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
            if let Some(start) = header[tensor]["data_offsets"][0].as_u64() {
                let start = 8 + length + start as usize;
                file[start..start + bytes.len()].copy_from_slice(bytes);
                std::fs::write(&path, file).unwrap();
                return;
            }
        }
        panic!("no tensor {tensor}");
    }

    /// Renames a tensor, or changes its type or shape, without a change of the file's length.
    fn header(&self, from: &str, to: &str) {
        let path = self.path("model.safetensors");
        let mut file = std::fs::read(&path).unwrap();
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let header = String::from_utf8(file[8..8 + length].to_vec()).unwrap();
        assert!(header.contains(from) && to.len() <= from.len(), "{from}");
        let changed = format!("{:1$}", header.replacen(from, to, 1), length);
        file[8..8 + length].copy_from_slice(changed.as_bytes());
        std::fs::write(&path, file).unwrap();
    }

    /// Returns what packing as floats says.
    fn refusal(&self) -> Option<String> {
        let work = tempfile::tempdir().unwrap();
        let out = work.path().join("pack");
        let mut pack = iec();
        pack.args(["pack", "--as", "float", "--hf-dir"]).arg(self.dir.path()).arg("--out-dir").arg(&out);
        let output = pack.output().unwrap();
        assert!(!output.status.success() || out.join("model.ie.json").is_file());
        (!output.status.success()).then(|| String::from_utf8(output.stderr).unwrap())
    }
}

#[test]
fn a_bias_of_zeros_beside_a_quantized_matrix_is_ignored_and_another_is_not() {
    for (value, is_refused) in [(0, false), (1, true)] {
        let (source, work) = (fixture("gptq"), tempfile::tempdir().unwrap());
        let mut tensors = tensors_of(&source);
        tensors.push(("model.layers.0.mlp.up_proj.bias".into(), "F16".into(), vec![256], vec![value; 512]));
        write_checkpoint(&source, work.path(), None, &tensors);
        assert_eq!(Checkpoint::open(work.path()).is_err(), is_refused, "{value}");
    }
}

/// Damaged or contradictory checkpoint, and words of the message.
type Hostile = (&'static str, fn(&Copy), &'static [&'static str]);

const NAN16: [u8; 2] = [0xFF, 0x7F];

const HOSTILE: &[Hostile] = &[
    ("awq", |c| c.settings(|q| q["group_size"] = json!(100)), &["multiple of the group size 100"]),
    ("awq", |c| c.settings(|q| q["group_size"] = json!(64)), &["scales", "expected floats of shape"]),
    ("awq", |c| c.settings(|q| q["bits"] = json!(8)), &["quantization_config.bits", "expected 4"]),
    ("awq", |c| c.settings(|q| q["version"] = json!("gemv_fast")), &["version", "expected gemm"]),
    ("awq", |c| c.bytes("model.layers.0.mlp.up_proj.scales", &[0, 0x7C]), &["up_proj.scales", "scale inf"]),
    ("awq", |c| c.bytes("model.layers.0.mlp.up_proj.scales", &[0, 0]), &["up_proj.scales", "scale 0 of row 0"]),
    ("gptq-actorder", |c| c.bytes("model.layers.0.mlp.up_proj.scales", &[0, 0x80]), &["up_proj.scales", "scale 0"]),
    ("gptq", |c| c.settings(|q| q["bits"] = json!(8)), &["model.layers.0", "expected"]),
    ("gptq", |c| c.settings(|q| q["bits"] = json!(5)), &["bits", "expected 2, 3, 4 or 8"]),
    ("gptq", |c| c.settings(|q| q["checkpoint_format"] = json!("marlin")), &["checkpoint_format", "marlin"]),
    ("gptq", |c| c.bytes("model.layers.1.mlp.up_proj.g_idx", &[7, 0, 0, 0]), &["g_idx", "group 7"]),
    ("gptq", |c| c.bytes("model.layers.1.mlp.up_proj.g_idx", &[0xFF; 4]), &["g_idx", "group -1"]),
    (
        "gptq",
        |c| c.settings(|q| q["dynamic"] = json!({"(a{99}){99}{99}": {"bits": 8}})),
        &["(a{99}){99}{99}", "regular expression"],
    ),
    ("gptq", |c| c.edit("config.json", |c| c["quantization"] = json!({"group_size": 64})), &["GPTQ", "MLX"]),
    ("gptq", |c| c.settings(|q| q["quant_method"] = json!("awq")), &["model.layers.0", "expected"]),
    ("fp8-tensor", |c| c.bytes("model.layers.0.mlp.up_proj.weight_scale_inv", &NAN16), &["scale NaN"]),
    ("fp8-tensor", |c| c.bytes("model.layers.0.mlp.up_proj.weight_scale_inv", &[0; 2]), &["scale 0 of row 0"]),
    ("fp8-tensor", |c| c.bytes("model.layers.0.mlp.up_proj.weight", &[0x7F]), &["up_proj.weight", "NaN"]),
    ("fp8-tensor", |c| c.settings(|q| q["weight_block_size"] = json!([0, 128])), &["weight_block_size"]),
    ("fp8-tensor", |c| c.settings(|q| q["fmt"] = json!("e4m3fnuz")), &["fmt", "e4m3fnuz"]),
    ("fp8-block", |c| c.settings(|q| q["weight_block_size"] = json!([64, 64])), &["blocks of 64 x 64"]),
    ("fp8-block", |c| c.settings(|q| q["weight_block_size"] = Value::Null), &["expected one scale"]),
    ("ct-w8a8", |c| c.settings(|q| q["config_groups"] = json!({})), &["no group"]),
    ("ct-w8a8", |c| c.settings(|q| q["config_groups"]["group_0"]["targets"] = json!(["re:(?=a)"])), &["(?=a)"]),
    ("ct-w8a8", |c| c.settings(|q| q["sparsity_config"] = json!({"format": "sparse-24"})), &["sparse-24"]),
    (
        "ct-w4a16",
        |c| c.settings(|q| q["config_groups"]["group_0"]["weights"]["num_bits"] = json!(8)),
        &["weight_packed", "codes of 8 bits"],
    ),
    (
        "ct-w4a16",
        |c| c.bytes("model.layers.0.mlp.up_proj.weight_shape", &[1, 0, 0, 0, 0, 0, 0, 0]),
        &["weight_shape", "rows"],
    ),
    ("ct-nvfp4", |c| c.bytes("model.layers.0.mlp.up_proj.weight_global_scale", &[0; 4]), &["expected a finite"]),
    ("ct-nvfp4", |c| c.bytes("model.layers.0.mlp.up_proj.weight_scale", &[0x7F]), &["scale NaN"]),
    ("ct-nvfp4", |c| c.bytes("model.layers.0.mlp.up_proj.weight_scale", &[0]), &["scale 0 of row 0, group 0"]),
    ("bnb-nf4", |c| c.bytes("model.layers.0.mlp.up_proj.weight.quant_map", &[0xFF; 4]), &["quant_map", "NaN"]),
    (
        "bnb-nf4",
        |c| c.bytes("model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4", b"["),
        &["quant_state", "JSON"],
    ),
    ("bnb-int8", |c| c.bytes("model.layers.0.mlp.up_proj.weight_format", &[2]), &["weight_format"]),
    ("torchao-int4", |c| c.bytes("model.layers.0.mlp.up_proj._weight_qdata", &[100]), &["code 100", "4 bits"]),
    ("torchao-int4", |c| c.header("IntxUnpackedToInt8Tensor", "Int4Tensor"), &["Int4Tensor", "metadata"]),
    ("mlx-4bit", |c| c.edit("config.json", |c| c["quantization_config"]["bits"] = json!(8)), &["expected"]),
    ("mlx-4bit", |c| c.settings(|q| q["mode"] = json!("nvfp4")), &["mode", "affine"]),
    ("mlx-4bit", |c| c.edit("config.json", |c| c["model_type"] = json!("gemma3_text")), &["gemma3_text"]),
    ("modelopt-nvfp4", |c| c.settings(|q| q["quant_algo"] = json!("FP8_PB_WO")), &["quant_algo", "FP8_PB_WO"]),
    ("modelopt-nvfp4", |c| c.settings(|q| q["quant_method"] = json!("gptq")), &["GPTQ", "ModelOpt"]),
    ("ct-w8a8", |c| c.settings(|q| q["quant_method"] = json!("exl3")), &["exl3", "Hadamard", "iec pack --bits 4"]),
    ("ct-w8a8", |c| c.settings(|q| q["quant_method"] = json!("hqq")), &["hqq", "is not supported"]),
];

#[test]
fn damaged_and_contradictory_checkpoints_are_refused_by_name() {
    let mut failures = Vec::new();
    for (number, (name, damage, words)) in HOSTILE.iter().enumerate() {
        let copy = Copy::of(name);
        damage(&copy);
        match copy.refusal() {
            None => failures.push(format!("case {number} of {name} {words:?}: accepted")),
            Some(text) if text.contains("panicked") || !words.iter().all(|word| text.contains(word)) => {
                failures.push(format!("case {number} of {name} {words:?}: {text}"));
            }
            Some(_) => {}
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Name, type, shape and bytes.
type RawTensor = (String, String, Vec<usize>, Vec<u8>);

/// Returns all tensors of a checkpoint.
fn tensors_of(dir: &Path) -> Vec<RawTensor> {
    let shards = Shards::open(dir).unwrap();
    let read = |tensor: &iec::convert::source::source_tensor::SourceTensor| {
        let mut bytes = vec![0; tensor.nbytes];
        shards.read(tensor, 0, &mut bytes).unwrap();
        (tensor.name.clone(), tensor.dtype.name().to_string(), tensor.shape.clone(), bytes)
    };
    shards.tensors().map(read).collect()
}

fn write_checkpoint(from: &Path, to: &Path, settings: Option<Value>, tensors: &[RawTensor]) {
    std::fs::create_dir_all(to).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(to.join("model.safetensors"), file).unwrap();
    std::fs::copy(from.join("tokenizer.json"), to.join("tokenizer.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    if let Some(settings) = settings {
        config["quantization_config"] = settings;
    }
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
}

/// Families whose tensors are gathered from rows of fused matrices, stacks of separate ones, or alternating rows.
const GATHERED: [&str; 7] = ["phi3", "qwen3moe", "mixtral", "deepseek3", "glm4moe", "mistral-swa", "gemma3-vl"];

#[test]
fn rows_of_quantized_matrices_are_gathered_as_those_of_floats() {
    let mut failures = Vec::new();
    for name in GATHERED {
        let (source, work) = (fixture(name), tempfile::tempdir().unwrap());
        let (mut codes, mut floats) = (Vec::new(), Vec::new());
        let mut quantized = 0;
        for (tensor, dtype, shape, bytes) in tensors_of(&source) {
            let is_linear = tensor.contains("layers.") && shape.len() == 2 && !tensor.ends_with("gate.weight");
            if !is_linear || !tensor.ends_with(".weight") || tensor.contains("vision") {
                codes.push((tensor.clone(), dtype.clone(), shape.clone(), bytes.clone()));
                floats.push((tensor, dtype, shape, bytes));
                continue;
            }
            quantized += 1;
            let (rows, cols) = (shape[0], shape[1]);
            let mut values = vec![0.0; rows * cols];
            let dtype = iec::dtype::DType::parse(&dtype).unwrap();
            iec::dtype::decode_floats(dtype, &bytes, &mut values).unwrap();
            let (mut numbers, mut scales, mut exact) = (Vec::new(), Vec::new(), Vec::new());
            for row in values.chunks(cols) {
                let scale = row.iter().fold(0f32, |peak, x| peak.max(x.abs())) / 127.0;
                scales.extend(scale.to_le_bytes());
                for x in row {
                    let code = (x / scale).round() as i8;
                    numbers.push(code as u8);
                    exact.extend((f32::from(code) * scale).to_le_bytes());
                }
            }
            let module = tensor.strip_suffix(".weight").unwrap();
            codes.push((format!("{module}.weight_scale"), "F32".into(), vec![rows, 1], scales));
            codes.push((tensor.clone(), "I8".into(), shape.clone(), numbers));
            floats.push((tensor, "F32".into(), shape, exact));
        }
        let settings = json!({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups":
            {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}});
        let [coded, plain] = ["coded", "plain"].map(|kind| work.path().join(kind));
        write_checkpoint(&source, &coded, Some(settings), &codes);
        write_checkpoint(&source, &plain, None, &floats);
        let pack = |from: &Path, form: &str, to: &str| {
            let out = work.path().join(to);
            let mut command = iec();
            command.args(["pack", "--as", form, "--hf-dir"]).arg(from).arg("--out-dir").arg(&out);
            let output = command.output().unwrap();
            assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
            IebinReader::open(&out).unwrap()
        };
        let (exact, plain) = (pack(&coded, "float", "exact"), pack(&plain, "published", "floats"));
        let kept = pack(&coded, "published", "kept");
        let count = kept.entries().iter().filter(|entry| matches!(entry.store, Store::Tiled(_))).count();
        if count == 0 || quantized == 0 {
            failures.push(format!("{name}: {count} tensors of {quantized} matrices are kept"));
        }
        for entry in plain.entries() {
            let same = *exact.payload(exact.get(&entry.name).unwrap()).unwrap() == *plain.payload(entry).unwrap();
            if !same || entry.shape.len() > 1 && decoded(&kept, &entry.name) != decoded(&plain, &entry.name) {
                failures.push(format!("{name} {}", entry.name));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
