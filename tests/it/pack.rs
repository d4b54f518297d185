//! Tests `iec pack`: a pack contains exactly the values of the checkpoint.

use crate::checkpoint::{Tensor, copy_of, edit_json, edited, files, load, save};
use crate::common::{FAMILIES, FIXTURES, fixture, iec, packed_with};
use half::{bf16, f16};
use iec::dtype::{DType, decode_floats};
use iec::iebin::{Entry, IebinReader, Store};
use iec::quant::block::tile::dequantize_rows;
use iec::scheme::{QuantSpec, Scheme};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A pack in a fresh directory.
struct Pack {
    dir: TempDir,
    out: PathBuf,
}

impl Pack {
    fn make(checkpoint: &Path, arguments: &[&str]) -> Pack {
        let dir = TempDir::new().unwrap();
        let out = dir.path().join("pack");
        iec().arg("pack").arg("--hf-dir").arg(checkpoint).arg("--out-dir").arg(&out).args(arguments).assert().success();
        Pack { dir, out }
    }

    fn open(&self) -> IebinReader {
        IebinReader::open(&self.out).unwrap()
    }
}

/// Returns all values of an entry as f32, in canonical order.
fn values(reader: &IebinReader, entry: &Entry) -> Vec<f32> {
    let payload = reader.payload(entry).unwrap();
    let mut out = vec![f32::NAN; entry.elements()];
    match entry.store {
        Store::Plain(dtype) => decode_floats(dtype, &payload, &mut out).unwrap(),
        Store::Tiled(_) => {
            let layout = entry.layout().unwrap().unwrap();
            let (_, rows, cols) = entry.matrices().unwrap();
            for (tiles, out) in payload.chunks_exact(layout.nbytes()).zip(out.chunks_exact_mut(rows * cols)) {
                dequantize_rows(&layout, tiles, 0..rows, out);
            }
        }
    }
    out
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    let pairs = || tensor.bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match tensor.dtype {
        Dtype::F32 => tensor.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Dtype::BF16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        Dtype::F16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        other => panic!("{other:?}"),
    }
}

/// Decodes MXFP4 as specified: blocks of shape (.., 16) bytes with two codes per byte, low nibble first, times
/// 2^(scale - 127).
fn mxfp4(blocks: &Tensor, scales: &Tensor) -> Vec<f32> {
    let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let code = |c: u8| if c & 8 == 0 { magnitudes[c as usize] } else { -magnitudes[c as usize & 7] };
    let decode = |(block, scale): (&[u8], &u8)| {
        let scale = 2f32.powi(i32::from(*scale) - 127);
        block.iter().flat_map(|b| [code(b & 15) * scale, code(b >> 4) * scale]).collect::<Vec<f32>>()
    };
    blocks.bytes.chunks_exact(16).zip(&scales.bytes).flat_map(decode).collect()
}

fn transposed(tensor: &Tensor) -> Vec<f32> {
    let (stored, [count, height, width]) = (floats(tensor), tensor.shape[..].try_into().unwrap());
    let mut out = Vec::with_capacity(stored.len());
    for m in 0..count {
        for column in 0..width {
            out.extend((0..height).map(|row| stored[(m * height + row) * width + column]));
        }
    }
    out
}

/// Returns the canonical values of tensor `name` from a checkpoint with Hugging Face names.
fn expected(source: &BTreeMap<String, Tensor>, name: &str) -> Vec<f32> {
    match (source.get(name), source.get(&format!("{name}_blocks"))) {
        (Some(tensor), _) if name.ends_with("experts.gate_up_proj") || name.ends_with("experts.down_proj") => {
            transposed(tensor)
        }
        (Some(tensor), _) => floats(tensor),
        (None, Some(blocks)) => mxfp4(blocks, &source[&format!("{name}_scales")]),
        (None, None) => put_together(source, name),
    }
}

/// Assembles a tensor that the source stores in another form: a part of Phi-3's fused matrices, or the separate
/// experts of Mixtral and Qwen3.
fn put_together(source: &BTreeMap<String, Tensor>, name: &str) -> Vec<f32> {
    let (layer, part) = name.split_once(".mlp.").or(name.split_once(".self_attn.")).unwrap();
    // In the fixture q, k and v have the same size.
    let share = |fused: &str, i: usize, n: usize| {
        let all = floats(&source[&format!("{layer}.{fused}.weight")]);
        all[all.len() / n * i..all.len() / n * (i + 1)].to_vec()
    };
    let either = |qwen: &str, mixtral: &str| {
        let names = [format!("{layer}.mlp.{qwen}.weight"), format!("{layer}.block_sparse_moe.{mixtral}.weight")];
        names.into_iter().find_map(|name| source.get(&name))
    };
    let experts = |qwen: &str, mixtral: &str| -> Vec<&Tensor> {
        (0..).map_while(|e| either(&format!("experts.{e}.{qwen}"), &format!("experts.{e}.{mixtral}"))).collect()
    };
    match part {
        "q_proj.weight" => share("self_attn.qkv_proj", 0, 3),
        "k_proj.weight" => share("self_attn.qkv_proj", 1, 3),
        "v_proj.weight" => share("self_attn.qkv_proj", 2, 3),
        "gate_proj.weight" => share("mlp.gate_up_proj", 0, 2),
        "up_proj.weight" => share("mlp.gate_up_proj", 1, 2),
        "router.weight" => floats(either("gate", "gate").unwrap()),
        "experts.down_proj" => experts("down_proj", "w2").into_iter().flat_map(floats).collect(),
        "experts.gate_up_proj" => {
            let mut rows = Vec::new();
            for (gate, up) in experts("gate_proj", "w1").into_iter().zip(experts("up_proj", "w3")) {
                let (cols, gate, up) = (gate.shape[1], floats(gate), floats(up));
                gate.chunks(cols).zip(up.chunks(cols)).for_each(|(gate, up)| rows.extend([gate, up].concat()));
            }
            rows
        }
        _ => panic!("{name} is not in the source"),
    }
}

#[test]
fn every_fixture_packs_with_exactly_its_values() {
    // The independent reader of these tests reads only safetensors.
    for name in FIXTURES.into_iter().filter(|name| *name != "mistral-swa") {
        let source = load(&fixture(name));
        let pack = Pack::make(&fixture(name), &[]);
        let reader = pack.open();
        for entry in reader.entries() {
            assert!(values(&reader, entry) == expected(&source, &entry.name), "{name} {}", entry.name);
            let found = iec::sha256::hex(iec::sha256::Digest::new_with_prefix(&reader.payload(entry).unwrap()[..]));
            assert_eq!(entry.sha256.as_ref(), Some(&found), "{name} {}", entry.name);
        }
        let elements = |(name, tensor): (&String, &Tensor)| match name {
            name if name.ends_with("_scales") => 0,
            name if name.ends_with("_blocks") => 2 * tensor.shape.iter().product::<usize>(),
            _ => tensor.shape.iter().product(),
        };
        let all: usize = source.iter().map(elements).sum();
        assert_eq!(reader.entries().iter().map(Entry::elements).sum::<usize>(), all, "{name}");
        for companion in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
            let original = std::fs::read(fixture(name).join(companion)).unwrap();
            assert_eq!(std::fs::read(pack.out.join(companion)).unwrap(), original, "{name} {companion}");
        }
        assert_eq!(reader.description.tokenizer.as_deref(), Some("tokenizer.json"));
        assert!(reader.description.model.is_some());
        let text = std::fs::read_to_string(pack.out.join("model.ie.json")).unwrap();
        assert!(!text.contains(pack.dir.path().to_str().unwrap()) && !text.contains(env!("CARGO_MANIFEST_DIR")));
    }
}

#[test]
fn experts_stay_in_four_bits_or_are_transposed() {
    let pack = Pack::make(&fixture("gptoss-mxfp4"), &["--dtype", "fp32"]);
    let entry = pack.open().get("model.layers.0.mlp.experts.gate_up_proj").unwrap().clone();
    assert_eq!((entry.store, entry.source_layout), (Store::Tiled(QuantSpec::MXFP4), None));
    let pack = Pack::make(&fixture("gptoss-bf16"), &[]);
    let entry = pack.open().get("model.layers.0.mlp.experts.gate_up_proj").unwrap().clone();
    assert_eq!(entry.source_layout.as_deref(), Some("in_out"));
    assert_eq!(entry.shape, [4, 192, 64]);
}

fn rules(dir: &Path, rules: Value) -> PathBuf {
    let path = dir.join("manifest.json");
    std::fs::write(&path, json!({"version": 1, "rules": rules}).to_string()).unwrap();
    path
}

#[test]
fn the_bytes_do_not_depend_on_the_number_of_threads() {
    let dir = TempDir::new().unwrap();
    let q4 = rules(dir.path(), json!([{"include": "proj", "scheme": "int4", "group_size": "tensor"}]));
    let q4 = q4.to_str().unwrap();
    for (name, arguments) in [
        ("llama-gqa", vec![]),
        ("gptoss-mxfp4", vec!["--dtype", "fp16"]),
        ("gptoss-bf16", vec!["--dtype", "fp32"]),
        ("gptoss-bf16", vec!["--q4-map", q4]),
    ] {
        let packs = ["1", "8"].map(|n| Pack::make(&fixture(name), &[&arguments[..], &["--threads", n]].concat()));
        assert!(files(&packs[0].out) == files(&packs[1].out), "{name} {arguments:?}");
    }
}

#[test]
fn dtype_rounds_every_float_tensor_and_nothing_else() {
    for (flag, dtype) in [("fp32", DType::F32), ("bf16", DType::BF16), ("fp16", DType::F16)] {
        for name in ["stories260k", "gptoss-bf16"] {
            let source = load(&fixture(name));
            let pack = Pack::make(&fixture(name), &["--dtype", flag]);
            let reader = pack.open();
            for entry in reader.entries() {
                assert_eq!(entry.store, Store::Plain(dtype), "{}", entry.name);
                let round = |x: f32| match dtype {
                    DType::BF16 => bf16::from_f32(x).to_f32(),
                    DType::F16 => f16::from_f32(x).to_f32(),
                    _ => x,
                };
                let expected: Vec<f32> = expected(&source, &entry.name).into_iter().map(round).collect();
                assert!(values(&reader, entry) == expected, "{name} {flag} {}", entry.name);
            }
        }
    }
}

#[test]
fn a_weight_that_overflows_the_chosen_dtype_is_refused_by_name() {
    let name = "model.layers.1.mlp.down_proj.weight";
    let dir = edited("llama-gqa", |tensors| {
        tensors.get_mut(name).unwrap().bytes[..2].copy_from_slice(&bf16::from_f32(1e6).to_le_bytes());
    });
    let out = TempDir::new().unwrap();
    let mut pack = iec();
    pack.args(["pack", "--dtype", "fp16", "--overwrite", "--hf-dir"]).arg(dir.path()).arg("--out-dir").arg(out.path());
    let refused = pack.assert().code(1);
    let stderr = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
    assert!(stderr.contains(name) && stderr.contains("out of range for F16"), "{stderr}");
    assert!(files(out.path()).is_empty());
}

/// Renames weights to the names of gpt-oss's `original/` directory.
fn original_names(source: &BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    let mut original = BTreeMap::new();
    let mut qkv: BTreeMap<String, Tensor> = BTreeMap::new();
    for name in source.keys() {
        let tensor = &source[name];
        let Some((layer, part)) = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) else {
            let renamed = match name.as_str() {
                "model.embed_tokens.weight" => "embedding.weight",
                "model.norm.weight" => "norm.scale",
                _ => "unembedding.weight",
            };
            original.insert(renamed.to_string(), tensor.clone());
            continue;
        };
        let leaf = match part {
            "input_layernorm.weight" => "attn.norm.scale",
            "self_attn.sinks" => "attn.sinks",
            "self_attn.o_proj.weight" => "attn.out.weight",
            "self_attn.o_proj.bias" => "attn.out.bias",
            "post_attention_layernorm.weight" => "mlp.norm.scale",
            "mlp.router.weight" => "mlp.gate.weight",
            "mlp.router.bias" => "mlp.gate.bias",
            "mlp.experts.gate_up_proj_blocks" => "mlp.mlp1_weight.blocks",
            "mlp.experts.gate_up_proj_scales" => "mlp.mlp1_weight.scales",
            "mlp.experts.gate_up_proj_bias" => "mlp.mlp1_bias",
            "mlp.experts.down_proj_blocks" => "mlp.mlp2_weight.blocks",
            "mlp.experts.down_proj_scales" => "mlp.mlp2_weight.scales",
            "mlp.experts.down_proj_bias" => "mlp.mlp2_bias",
            _ => {
                let leaf = part.rsplit('.').next().unwrap();
                let joined = qkv.entry(format!("block.{layer}.attn.qkv.{leaf}")).or_insert_with(|| Tensor {
                    dtype: tensor.dtype,
                    shape: [vec![0], tensor.shape[1..].to_vec()].concat(),
                    bytes: Vec::new(),
                });
                if joined.bytes.is_empty() {
                    for projection in ["q", "k", "v"] {
                        let part = &source[&format!("model.layers.{layer}.self_attn.{projection}_proj.{leaf}")];
                        joined.shape[0] += part.shape[0];
                        joined.bytes.extend_from_slice(&part.bytes);
                    }
                }
                continue;
            }
        };
        original.insert(format!("block.{layer}.{leaf}"), tensor.clone());
    }
    original.extend(qkv);
    original
}

/// Creates a copy of gptoss-mxfp4 that has its weights and configuration only in `original/`.
pub fn with_original() -> TempDir {
    let dir = copy_of("gptoss-mxfp4");
    let below = dir.path().join("original");
    std::fs::create_dir(&below).unwrap();
    save(&below, &original_names(&load(dir.path())));
    for name in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    {
        std::fs::remove_file(dir.path().join(name)).unwrap();
    }
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    let config = json!({
        "num_hidden_layers": 4, "num_experts": 8, "experts_per_token": 4, "vocab_size": 512, "hidden_size": 96,
        "intermediate_size": 64, "swiglu_limit": 7.0, "head_dim": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "sliding_window": 16, "initial_context_length": 64, "rope_theta": 150000,
        "rope_scaling_factor": 8.0, "rope_ntk_alpha": 1, "rope_ntk_beta": 32
    });
    std::fs::write(below.join("config.json"), config.to_string()).unwrap();
    dir
}

#[test]
fn the_original_spelling_of_gpt_oss_gives_the_same_pack() {
    let dir = with_original();
    let below = dir.path().join("original");
    let hf = Pack::make(&fixture("gptoss-mxfp4"), &[]);
    for checkpoint in [dir.path(), &below] {
        let original = Pack::make(checkpoint, &[]);
        for name in ["model.ie.bin", "tokenizer.json", "generation_config.json"] {
            assert!(files(&hf.out)[Path::new(name)] == files(&original.out)[Path::new(name)], "{name}");
        }
        assert_eq!(hf.open().entries(), original.open().entries());
        let (mut a, mut b) = (hf.open().description.model.unwrap(), original.open().description.model.unwrap());
        // The original configuration does not state the extended context length, only the scaling factor.
        (a.max_context, b.max_context) = (0, 0);
        assert_eq!(a, b);
    }
}

#[test]
fn a_manifest_of_rules_quantizes_what_it_matches() {
    let dir = TempDir::new().unwrap();
    let manifest = rules(
        dir.path(),
        json!([{"include": "down_proj", "scheme": "int8", "group_size": "row"}, {"include": "self_attn", "scheme": "q4_0"}]),
    );
    for name in ["llama-gqa", "gptoss-bf16"] {
        let source = load(&fixture(name));
        let pack = Pack::make(&fixture(name), &["--q4-map", manifest.to_str().unwrap(), "--dtype", "fp32"]);
        let reader = pack.open();
        for entry in reader.entries() {
            let scheme = match entry.store {
                Store::Plain(dtype) => {
                    assert_eq!(dtype, DType::F32);
                    None
                }
                Store::Tiled(spec) => Some(spec.scheme),
            };
            let is_matrix = entry.shape.len() > 1 && !entry.name.ends_with("bias");
            let wanted = match entry.name.as_str() {
                n if is_matrix && n.contains("down_proj") => Some(Scheme::Int8),
                n if is_matrix && n.contains("self_attn") => Some(Scheme::Q4_0),
                _ => None,
            };
            assert_eq!(scheme, wanted, "{}", entry.name);
            let tolerance = match scheme {
                None => 0.0,
                Some(Scheme::Int8) => 0.01,
                Some(_) => 0.15,
            };
            let (found, expected) = (values(&reader, entry), expected(&source, &entry.name));
            let error: f64 = found.iter().zip(&expected).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            let norm: f64 = expected.iter().map(|b| f64::from(*b).powi(2)).sum();
            assert!(error <= tolerance * tolerance * norm, "{} {}", entry.name, (error / norm).sqrt());
        }
    }
}

#[test]
fn a_manifest_that_does_not_fit_is_refused() {
    let dir = TempDir::new().unwrap();
    let matching_nothing = rules(dir.path(), json!([{"include": "no_such_part", "scheme": "q4_0"}]));
    let out = dir.path().join("out");
    let pack = |checkpoint: &Path, manifest: &Path| {
        let mut pack = iec();
        pack.args(["pack", "--hf-dir"]).arg(checkpoint).arg("--out-dir").arg(&out).arg("--q4-map").arg(manifest);
        let output = pack.output().unwrap();
        assert!(!out.exists());
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, message) = pack(&fixture("llama-gqa"), &matching_nothing);
    assert!(code == Some(2) && message.contains("no rule of the manifest matches"), "{message}");
    let (code, message) = pack(&fixture("llama-gqa"), &dir.path().join("missing.json"));
    assert!(code == Some(1) && message.contains("missing.json"), "{message}");
}

#[test]
fn harmless_leftovers_are_ignored_and_a_tied_head_is_stored_once() {
    let dir = edited("llama3-rope-tied", |tensors| {
        let embedding = tensors["model.embed_tokens.weight"].clone();
        let inv_freq = Tensor { dtype: Dtype::F32, shape: vec![8], bytes: vec![0; 32] };
        tensors.insert("lm_head.weight".into(), embedding);
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), inv_freq);
    });
    let (plain, pack) = (Pack::make(&fixture("llama3-rope-tied"), &[]), Pack::make(dir.path(), &[]));
    assert_eq!(pack.open().entries(), plain.open().entries());
}

#[test]
fn one_file_and_shards_give_the_same_payloads() {
    let (single, sharded) = (edited("llama-gqa", |_| ()), copy_of("llama-gqa"));
    let (a, b) = (Pack::make(single.path(), &[]), Pack::make(sharded.path(), &[]));
    assert!(files(&a.out)[Path::new("model.ie.bin")] == files(&b.out)[Path::new("model.ie.bin")]);
}

#[test]
fn the_summary_is_one_line_of_json() {
    let dir = TempDir::new().unwrap();
    let mut pack = iec();
    pack.args(["pack", "--json", "--quiet", "--hf-dir"]).arg(fixture("gptoss-mxfp4"));
    let output = pack.arg("--out-dir").arg(dir.path()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!((text.lines().count(), output.stderr.len()), (1, 0));
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((json["tensors"].as_u64(), json["quantized_tensors"].as_u64()), (Some(71), Some(8)));
    let size = std::fs::metadata(dir.path().join("model.ie.bin")).unwrap().len();
    assert_eq!(json["bytes"].as_u64(), Some(size));
}

#[test]
fn overwriting_is_asked_for_and_leaves_nothing_of_the_old_pack() {
    let (dir, checkpoint) = (TempDir::new().unwrap(), copy_of("llama-gqa"));
    std::fs::write(checkpoint.path().join("chat_template.jinja"), "{{ messages }}").unwrap();
    let pack = |checkpoint: &Path, arguments: &[&str]| {
        let mut pack = iec();
        pack.args(["pack", "--hf-dir"]).arg(checkpoint).arg("--out-dir").arg(dir.path()).args(arguments);
        pack.assert()
    };
    pack(checkpoint.path(), &[]).success();
    let first = files(dir.path());
    assert!(first.contains_key(Path::new("chat_template.jinja")));
    let refused = pack(&fixture("gptoss-bf16"), &[]).code(2);
    assert!(String::from_utf8_lossy(&refused.get_output().stderr).contains("--overwrite"));
    assert!(files(dir.path()) == first);
    pack(&fixture("gptoss-bf16"), &["--overwrite"]).success();
    assert_eq!(files(dir.path()), files(&Pack::make(&fixture("gptoss-bf16"), &[]).out));
}

#[test]
fn files_that_are_not_a_pack_are_not_replaced() {
    let checkpoint = copy_of("llama-gqa");
    let project = TempDir::new().unwrap();
    std::fs::write(project.path().join("config.json"), "{}").unwrap();
    for (dir, arguments) in [(&checkpoint, &["--overwrite"][..]), (&checkpoint, &[]), (&project, &[])] {
        let before = files(dir.path());
        let mut pack = iec();
        pack.arg("pack").args(arguments).arg("--hf-dir").arg(checkpoint.path()).arg("--out-dir").arg(dir.path());
        pack.assert().code(2);
        assert!(files(dir.path()) == before);
    }
}

#[test]
fn another_tokenizer_can_be_carried_along() {
    let dir = TempDir::new().unwrap();
    let other = dir.path().join("mine.json");
    std::fs::copy(fixture("gptoss-bf16").join("tokenizer.json"), &other).unwrap();
    edit_json(&other, |json| json["version"] = json!("1.0"));
    let pack = Pack::make(&fixture("llama-gqa"), &["--tokenizer", other.to_str().unwrap()]);
    assert_eq!(std::fs::read(pack.out.join("tokenizer.json")).unwrap(), std::fs::read(&other).unwrap());
}

#[test]
fn verbose_tells_tensor_by_tensor_and_quiet_wins() {
    let out = tempfile::tempdir().unwrap();
    let told = |flags: &[&str], variable: &str| {
        let mut command = iec();
        command.args(["pack", "--overwrite", "--hf-dir"]).arg(fixture("stories260k"));
        let output = command.arg("--out-dir").arg(out.path()).args(flags).env("IEC_LOG", variable).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap().contains("model.norm.weight [64]: stored as F32")
    };
    let cases =
        [(&[][..], "", false), (&["-v"], "", false), (&["-vv"], "", true), (&[], "2", true), (&["-vvq"], "", false)];
    for (flags, variable, expected) in cases {
        assert_eq!(told(flags, variable), expected, "{flags:?} IEC_LOG={variable}");
    }
}

#[test]
fn color_is_always_never_or_left_to_the_terminal() {
    for (flags, expected) in [(&["--color", "always"][..], true), (&["--color=never"], false), (&[], false)] {
        for line in [&["pack", "--no-such-flag"][..], &["inspect", "no-such-file"]] {
            let output = iec().args(line).args(flags).output().unwrap();
            assert_eq!(output.stderr.contains(&0x1b), expected, "{line:?} {flags:?}");
        }
    }
}

#[test]
fn texts_of_every_family_end_at_the_tokens_of_generation_config() {
    for name in FAMILIES {
        let dir = packed_with(name, "generation_config.json", json!({"eos_token_id": [5, 7]}));
        let model = IebinReader::open(&dir.path().join("pack")).unwrap().description.model.unwrap();
        assert!([5, 7].iter().all(|id| model.eos.contains(id)), "{name}: {:?}", model.eos);
    }
}

#[test]
fn a_tokenizer_that_run_would_refuse_makes_no_pack() {
    let change = |what: &str, tokenizer: &mut Value| match what {
        "unknown model" => tokenizer["model"]["type"] = "Unknown".into(),
        "no model" => tokenizer["model"] = Value::Null,
        "merge of unknown tokens" => tokenizer["model"]["merges"][0] = serde_json::json!(["nowhere1", "nowhere2"]),
        "merges of another kind" => tokenizer["model"]["merges"] = serde_json::json!([[1, 2]]),
        "unknown step" => tokenizer["pre_tokenizer"] = serde_json::json!({"type": "Unknown"}),
        _ => {}
    };
    let source = fixture("llama-gqa");
    let text = std::fs::read(source.join("tokenizer.json")).unwrap();
    let mut failures = Vec::new();
    for what in
        ["nothing", "unknown model", "no model", "merge of unknown tokens", "merges of another kind", "unknown step"]
    {
        let home = tempfile::tempdir().unwrap();
        let (out, path) = (home.path().join("out"), home.path().join("tokenizer.json"));
        let mut tokenizer: Value = serde_json::from_slice(&text).unwrap();
        change(what, &mut tokenizer);
        std::fs::write(&path, tokenizer.to_string()).unwrap();
        let mut command = iec();
        command.args(["pack", "--hf-dir"]).arg(&source).arg("--out-dir").arg(&out).arg("--tokenizer").arg(&path);
        let ran = command.output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        let expected = what == "nothing";
        let is_named = said.contains("tokenizer.json");
        if ran.status.success() != expected || out.join("model.ie.json").exists() != expected || is_named == expected {
            failures.push(format!("{what}: {:?} {said}", ran.status.code()));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
