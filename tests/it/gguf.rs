//! Tests GGUF in both directions: exported models can be imported again, files made by llama.cpp are read, and what
//! cannot be converted is refused.

use crate::checkpoint::{copy_of, edit_json, edited, without_digest};
use crate::common::{FAMILIES, fixture, iec, packed, packed_as, packed_with};
use iec::convert::gguf::writer::{GgufEntry, lay_out};
use iec::convert::source::gguf::types::GgmlType;
use iec::convert::source::gguf::value::Value as Meta;
use iec::convert::source::gguf::{Gguf, GgufTensor};
use iec::dtype::decode_floats;
use iec::iebin::{Entry, IebinReader, Store};
use iec::model_config::{ModelConfig, RopeScaling};
use iec::quant::block::tile::dequantize_rows;
use iec::scheme::TileLayout;
use serde_json::json;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const MIXED: &str = "stories260k-mixed.gguf";

fn succeed(args: &[&str]) -> String {
    let output = iec().args(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {stderr}");
    stderr
}

/// Asserts that the command fails with this exit code and a message that contains these words.
fn fails(code: i32, args: &[&str], words: &[&str]) {
    let output = iec().args(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "{args:?}: `{stderr}` should say `{word}`");
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Round trip of a pack: the exported GGUF file and the pack imported from it.
struct There {
    dir: TempDir,
}

impl There {
    fn and_back(pack: &Path, export: &[&str], import: &[&str]) -> There {
        let there = There { dir: TempDir::new().unwrap() };
        let mut args = vec!["export-gguf", "--model-dir", text(pack), "--out"];
        let (file, back) = (there.file(), there.back());
        args.push(text(&file));
        succeed(&[&args, export].concat());
        succeed(&[&["import-gguf", text(&file), "--out-dir", text(&back)][..], import].concat());
        there
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("model.gguf")
    }

    fn back(&self) -> PathBuf {
        self.dir.path().join("back")
    }
}

fn golden_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf").join(name)
}

/// Runs the pack for a few tokens and returns the trace with their ids and logits.
fn trace(pack: &Path, precision: &str) -> String {
    let out = TempDir::new().unwrap();
    let path = out.path().join("trace.jsonl");
    let args = ["run", "--greedy", "--precision", precision, "--max-new", "8", "--prompt", "The quick", "--model-dir"];
    succeed(&[&args[..], &[text(pack), "--trace-ids", text(&path)]].concat());
    std::fs::read_to_string(path).unwrap()
}

/// Returns the values of a tensor as f32.
fn values(reader: &IebinReader, entry: &Entry) -> Vec<f32> {
    let payload = reader.payload(entry).unwrap();
    let mut out = vec![0.0; entry.elements()];
    match entry.store {
        Store::Plain(dtype) => decode_floats(dtype, &payload, &mut out).unwrap(),
        Store::Tiled(spec) => {
            let (count, rows, cols) = entry.matrices().unwrap();
            let layout = TileLayout::new(spec, rows, cols).unwrap();
            for matrix in 0..count {
                let tiles = &payload[matrix * layout.nbytes()..][..layout.nbytes()];
                dequantize_rows(&layout, tiles, 0..rows, &mut out[matrix * rows * cols..][..rows * cols]);
            }
        }
    }
    out
}

/// Asserts that every tensor exists in both packs with the same values, and with the same bytes where both store it
/// in the same format. Returns the number of tensors with identical bytes.
fn assert_same_tensors(name: &str, before: &Path, after: &Path) -> usize {
    let (before, after) = (IebinReader::open(before).unwrap(), IebinReader::open(after).unwrap());
    assert_eq!(before.entries().len(), after.entries().len(), "{name}");
    let mut identical = 0;
    for old in before.entries() {
        let new = after.get(&old.name).unwrap_or_else(|| panic!("{name}: {} is lost", old.name));
        assert_eq!(new.shape, old.shape, "{name}: {}", old.name);
        if new.store == old.store {
            assert!(
                before.payload(old).unwrap()[..] == after.payload(new).unwrap()[..],
                "{name}: bytes of {}",
                old.name
            );
            identical += 1;
        }
        let (ours, theirs) = (values(&before, old), values(&after, new));
        // GGUF stores the norm weights w of Gemma and Muse as 1 + w, which rounds w by at most 2^-24.
        let plus_one = name.starts_with("gemma") || name == "museglimmer";
        let tolerance = if plus_one && old.name.ends_with("norm.weight") { 6e-8 } else { 0.0 };
        let far = ours.iter().zip(&theirs).find(|(a, b)| (*a - *b).abs() > tolerance);
        assert!(far.is_none(), "{name}: values of {}: {far:?}", old.name);
    }
    identical
}

#[test]
fn every_fixture_comes_back_with_the_same_weights_tokens_and_logits() {
    for name in [
        "stories260k",
        "llama-gqa",
        "llama3-rope-tied",
        "gptoss-mxfp4",
        "gptoss-bf16",
        "mistral-swa",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3moe",
        "gemma2",
        "gemma3",
        "phi3",
        "phi3 with half of each head rotated",
    ] {
        let checkpoint = copy_of(name.split(' ').next().unwrap());
        let edit = |key: &str, value: f64| edit_json(&checkpoint.path().join("config.json"), |c| c[key] = value.into());
        match name {
            // llama.cpp does not read the attention scale from the file, so it must have the usual value.
            "gemma2" => edit("query_pre_attn_scalar", 24.0),
            "phi3 with half of each head rotated" => edit("partial_rotary_factor", 0.5),
            _ => {}
        }
        let pack = TempDir::new().unwrap();
        succeed(&["pack", "--hf-dir", text(checkpoint.path()), "--out-dir", text(pack.path())]);
        let there = There::and_back(pack.path(), &[], &[]);
        let identical = assert_same_tensors(name, pack.path(), &there.back());
        assert!(identical > 0, "{name}");
        assert_eq!(trace(pack.path(), "fp32"), trace(&there.back(), "fp32"), "{name}");
    }
}

/// Returns the description of a pack's model, without the name of its architecture, which GGUF does not record exactly.
fn description(pack: &Path) -> ModelConfig {
    let model = IebinReader::open(pack).unwrap().description.model.clone().unwrap();
    ModelConfig { architecture: String::new(), ..model }
}

#[test]
fn further_families_come_back_with_the_same_description_weights_and_logits() {
    // llama.cpp does not know LFM3, and Mamba-2 comes back in another layout.
    let others = ["lfm3", "granite4h", "nemotronh"];
    for name in FAMILIES.into_iter().filter(|name| !others.contains(name) && !DELTA_NETS.contains(name)) {
        let pack = packed(name);
        let there = There::and_back(pack.path(), &[], &[]);
        assert_eq!(description(pack.path()), description(&there.back()), "{name}");
        assert_same_tensors(name, pack.path(), &there.back());
        assert_eq!(trace(pack.path(), "fp32"), trace(&there.back(), "fp32"), "{name}");
    }
}

/// Families with gated delta nets, whose packs of GGUF files have another layout. In the last one, a head of keys is
/// not as wide as one of values.
const DELTA_NETS: [&str; 4] = ["qwen35", "qwen35moe", "qwen3next", "qwen35-text"];

/// Returns the prompt and the ids of a trace.
fn ids_of(trace: &str) -> Vec<serde_json::Value> {
    let lines = trace.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.map(|line| json!([line["prompt_ids"], line["ids"], line["id"]])).collect()
}

#[test]
fn linear_attention_comes_back_in_the_layout_of_gguf_and_leaves_as_the_same_file() {
    for name in DELTA_NETS[..3].iter().chain(&["granite4h", "nemotronh"]) {
        for rules in [None, Some(r#""scheme":"q4_0""#)] {
            let dir = TempDir::new().unwrap();
            let (checkpoint, map, pack) = (fixture(name), dir.path().join("rules.json"), dir.path().join("pack"));
            let mut args = vec!["pack", "--hf-dir", text(&checkpoint), "--out-dir", text(&pack)];
            if let Some(scheme) = rules {
                // The columns of the output projection are moved with their scales if heads are as wide as blocks;
                // those of the fixtures are narrower.
                let rule =
                    format!(r#"{{"include":"attn.(q|k|v|z|o|gate|up|down)_proj.weight$",{scheme},"method":"rtn"}}"#);
                std::fs::write(&map, format!(r#"{{"version":1,"rules":[{rule}]}}"#)).unwrap();
                args.extend(["--q4-map", text(&map)]);
            }
            succeed(&args);
            let there = There::and_back(&pack, &[], &[]);
            let precision = if rules.is_some() { "int4w" } else { "fp32" };
            assert_eq!(ids_of(&trace(&pack, precision)), ids_of(&trace(&there.back(), precision)), "{name}");
            let again = There::and_back(&there.back(), &[], &[]);
            assert!(std::fs::read(there.file()).unwrap() == std::fs::read(again.file()).unwrap(), "{name}");
            assert_same_tensors(name, &there.back(), &again.back());
            let out = dir.path().join("hf");
            let words = ["recurrent.mixer", "in the form of GGUF files", "export-gguf"];
            fails(1, &["unpack", "--model-dir", text(&there.back()), "--out-dir", text(&out)], &words);
        }
    }
    let narrow = packed(DELTA_NETS[3]);
    let file = narrow.path().join("out.gguf");
    let words = ["recurrent.mixer", "heads of other widths"];
    fails(1, &["export-gguf", "--model-dir", text(narrow.path()), "--out", text(&file)], &words);
}

#[test]
fn numbers_that_multiply_the_scales_of_nvfp4_are_exported_and_read() {
    for name in ["modelopt-nvfp4", "ct-nvfp4"] {
        let pack = packed_as(&format!("{name}-published"), &fixture(name), &[]);
        let there = There::and_back(&pack, &[], &[]);
        assert!(assert_same_tensors(name, &pack, &there.back()) >= 14, "{name}");
        let gguf = Gguf::open(&there.file()).unwrap();
        let scale = gguf.tensors.iter().find(|tensor| tensor.name == "blk.1.ffn_up.scale").unwrap();
        assert_eq!((scale.kind, &scale.shape[..]), (GgmlType::F32, &[1][..]));
        let mut bytes = std::fs::read(there.file()).unwrap();
        bytes[scale.start as usize..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
        std::fs::write(there.file(), &bytes).unwrap();
        let out = there.dir.path().join("damaged");
        fails(1, &["import-gguf", text(&there.file()), "--out-dir", text(&out)], &["ffn_up.scale", "found NaN"]);
    }
}

#[test]
fn quantized_keys_of_latent_attention_are_refused_or_written_as_floats() {
    for name in ["deepseek2", "mistral4"] {
        let dir = TempDir::new().unwrap();
        let (checkpoint, rules, pack) = (fixture(name), dir.path().join("rules.json"), dir.path().join("pack"));
        let rule = r#"{"include":"kv_b_proj","scheme":"int8","group_size":32,"method":"rtn"}"#;
        std::fs::write(&rules, format!(r#"{{"version":1,"rules":[{rule}]}}"#)).unwrap();
        let from = ["--hf-dir", text(&checkpoint), "--q4-map", text(&rules)];
        succeed(&[&["pack", "--out-dir", text(&pack)], &from[..]].concat());
        let file = dir.path().join("out.gguf");
        let words = ["kv_b_proj", "found quantized codes, but GGUF stores this matrix transposed", "--dequantize"];
        fails(1, &["export-gguf", "--model-dir", text(&pack), "--out", text(&file)], &words);
        assert!(!file.exists());
        let there = There::and_back(&pack, &["--dequantize", "--dtype", "f32"], &[]);
        assert_same_tensors(name, &pack, &there.back());
        let back = IebinReader::open(&there.back()).unwrap();
        let is_float = |entry: &Entry| matches!(entry.store, Store::Plain(_));
        assert!(back.entries().iter().filter(|entry| entry.name.contains("kv_b_proj")).all(is_float), "{name}");
    }
}

#[test]
fn what_llama_cpp_does_not_compute_in_further_families_is_refused_by_its_field() {
    struct Case {
        name: &'static str,
        fields: serde_json::Value,
        words: &'static [&'static str],
    }
    let case = |name, fields, words| Case { name, fields, words };
    let cases = [
        case("smollm3", json!({"no_rope_layers": [1, 1, 0, 1, 1]}), &["exceptions.unrotated", "smollm3"]),
        case("deepseek3", json!({"rope_interleave": false}), &["rope.pairs", "deepseek2"]),
        case(
            "deepseek2",
            json!({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
            &["mlp.selection", "deepseek2"],
        ),
    ];
    for Case { name, fields, words } in cases {
        let pack = packed_with(name, "config.json", fields);
        let (dir, file) = (pack.path().join("pack"), pack.path().join("out.gguf"));
        fails(1, &["export-gguf", "--model-dir", text(&dir), "--out", text(&file)], words);
        assert!(!file.exists());
    }
}

#[test]
fn tied_models_of_families_that_llama_cpp_never_ties_are_refused() {
    for (name, family) in [("minimaxm2", "minimax-m2"), ("olmo2", "olmo2")] {
        let source = edited(name, |tensors| drop(tensors.remove("lm_head.weight")));
        let path = source.path().join("config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config["tie_word_embeddings"] = json!(true);
        std::fs::write(path, config.to_string()).unwrap();
        let dir = TempDir::new().unwrap();
        let (pack, file) = (dir.path().join("pack"), dir.path().join("out.gguf"));
        succeed(&["pack", "--hf-dir", text(source.path()), "--out-dir", text(&pack)]);
        let words = ["tied_embeddings", family];
        fails(1, &["export-gguf", "--model-dir", text(&pack), "--out", text(&file)], &words);
        assert!(!file.exists());
    }
}

/// Packs the embedded model with its matrices quantized by `ptq` with these arguments.
fn quantized(arguments: &[&str]) -> TempDir {
    let dir = TempDir::new().unwrap();
    let (checkpoint, manifest) = (fixture("stories260k"), dir.path().join("manifest.json"));
    let ptq = ["ptq", "--hf-dir", text(&checkpoint), "--force", "--exclude", "down_proj", "--out", text(&manifest)];
    succeed(&[&ptq[..], arguments].concat());
    succeed(&["pack", "--hf-dir", text(&checkpoint), "--out-dir", text(dir.path()), "--q4-map", text(&manifest)]);
    dir
}

#[test]
fn codes_and_scales_of_q4_0_iq4_nl_q5_0_and_q8_0_come_back_bit_for_bit() {
    for (arguments, precision) in [
        (&["--bits", "4"][..], "int4w"),
        (&["--scheme", "nl4"], "int4"),
        (&["--bits", "5"], "int8"),
        (&["--bits", "8", "--group-size", "32"], "int8w"),
    ] {
        let pack = quantized(arguments);
        let there = There::and_back(pack.path(), &["--dtype", "f32"], &[]);
        let all = IebinReader::open(pack.path()).unwrap().entries().len();
        assert_eq!(assert_same_tensors("quantized", pack.path(), &there.back()), all, "{arguments:?}");
        assert_eq!(trace(pack.path(), precision), trace(&there.back(), precision), "{arguments:?}");
    }
}

#[test]
fn six_bits_run_with_the_bits_of_an_int8_pack_of_the_same_codes() {
    let pack = quantized(&["--bits", "6", "--keep", "embedding"]);
    let there = There::and_back(pack.path(), &["--dtype", "f32"], &[]);
    assert_same_tensors("int6", pack.path(), &there.back());
    let scheme = |pack: &Path| {
        let reader = IebinReader::open(pack).unwrap();
        let quantized =
            reader.entries().iter().map(|entry| entry.store.dtype_name()).filter(|name| name.starts_with("INT"));
        quantized.map(str::to_string).collect::<Vec<_>>()
    };
    assert_eq!(scheme(pack.path()), vec!["INT6"; 30]);
    assert_eq!(scheme(&there.back()), vec!["INT8"; 30]);
    for precision in ["int8w", "int8", "auto"] {
        assert_eq!(trace(pack.path(), precision), trace(&there.back(), precision), "{precision}");
    }
}

#[test]
fn coarser_scales_are_repeated_and_mean_the_same() {
    for (arguments, kind) in [
        (&["--bits", "4", "--scheme", "int4", "--group-size", "row"][..], GgmlType::Q4_0),
        (&["--bits", "4", "--scheme", "int4", "--group-size", "64"], GgmlType::Q4_0),
        (&["--bits", "5", "--group-size", "row"], GgmlType::Q5_0),
        (&["--bits", "6", "--group-size", "128"], GgmlType::Q8_0),
        (&["--bits", "8"], GgmlType::Q8_0),
        (&["--bits", "4"], GgmlType::Q8_0),
    ] {
        let pack = quantized(arguments);
        let there = There::and_back(pack.path(), &[], &[]);
        let file = Gguf::open(&there.file()).unwrap();
        assert!(file.tensors.iter().any(|t| t.kind == kind), "{arguments:?}");
        assert_same_tensors("coarse", pack.path(), &there.back());
    }
}

#[test]
fn a_mixture_with_dense_layers_is_refused_by_name() {
    let checkpoint = copy_of("qwen3moe-dense");
    let (dir, out) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let file = out.path().join("out.gguf");
    succeed(&["pack", "--hf-dir", text(checkpoint.path()), "--out-dir", text(dir.path())]);
    let export = ["export-gguf", "--model-dir", text(dir.path()), "--out", text(&file)];
    fails(1, &export, &["dense_layers", "llama.cpp does not support this for qwen3moe"]);
    assert!(!file.exists());
}

#[test]
fn what_ggml_has_no_type_for_is_refused_or_written_as_floats() {
    let pack = quantized(&["--bits", "4", "--scheme", "int4", "--affine", "--keep", "embedding"]);
    let file = pack.path().join("out.gguf");
    let export = ["export-gguf", "--model-dir", text(pack.path()), "--out", text(&file)];
    fails(1, &export, &["int4 with group size 32 and zero points, which has no type in GGML", "--dequantize"]);
    assert!(!file.exists());
    succeed(&[&export[..], &["--dequantize"]].concat());
    assert!(Gguf::open(&file).unwrap().tensors.iter().all(|t| t.kind == GgmlType::F32));
    fails(2, &export, &["exists already", "--overwrite"]);
    let all = quantized(&["--bits", "4"]);
    let export = ["export-gguf", "--model-dir", text(all.path()), "--out", text(&file), "--overwrite"];
    succeed(&[&export[..], &["--dequantize=all", "--dtype", "f16"]].concat());
    let kinds: Vec<GgmlType> = Gguf::open(&file).unwrap().tensors.iter().map(|t| t.kind).collect();
    assert!(kinds.iter().all(|k| matches!(k, GgmlType::F16 | GgmlType::F32)), "{kinds:?}");
}

#[test]
fn a_file_of_llama_cpp_is_understood_and_comes_back_byte_for_byte() {
    let dir = TempDir::new().unwrap();
    let (file, pack, again) = (golden_file(MIXED), dir.path().join("pack"), dir.path().join("again.gguf"));
    let said = succeed(&["import-gguf", text(&file), "--out-dir", text(&pack)]);
    assert!(!said.contains("decoded"), "{said}");
    let run = ["run", "--prompt", "Once upon a time", "--max-new", "30", "--greedy", "-q", "--model-dir", text(&pack)];
    let story = iec().args(run).output().unwrap().stdout;
    // Output of llama-completion from the same file (build of November 2026).
    let expected =
        ", there was a little girl named Lily. She loved to play with her toys and her friends. One day, she";
    assert_eq!(String::from_utf8(story).unwrap().trim_end(), expected);
    succeed(&["export-gguf", "--model-dir", text(&pack), "--out", text(&again)]);
    let (old, new) = (Gguf::open(&file).unwrap(), Gguf::open(&again).unwrap());
    let mut identical = 0;
    for tensor in &old.tensors {
        let ours = new.tensors.iter().find(|t| t.name == tensor.name).unwrap();
        assert_eq!((ours.kind, data(&new, ours)), (tensor.kind, data(&old, tensor)), "{}", tensor.name);
        identical += 1;
    }
    assert_eq!(identical, 47);
}

fn data(gguf: &Gguf, tensor: &GgufTensor) -> Vec<u8> {
    let mut bytes = vec![0; tensor.nbytes as usize];
    gguf.read(tensor, 0, &mut bytes).unwrap();
    bytes
}

#[test]
fn decoded_weights_are_rounded_only_when_asked_and_it_is_said() {
    let dir = TempDir::new().unwrap();
    let file = golden_file("blocks/iq2_xs.gguf");
    let said = succeed(&["import-gguf", text(&file), "--out-dir", text(dir.path()), "--dtype", "bf16"]);
    assert!(said.contains("and rounded to the --dtype"), "{said}");
    let reader = IebinReader::open(dir.path()).unwrap();
    assert!(reader.entries().iter().all(|e| e.store.dtype_name() == "BF16" || matches!(e.store, Store::Tiled(_))));
}

#[test]
fn an_export_is_the_same_bytes_for_any_number_of_threads() {
    let pack = packed("gptoss-mxfp4");
    let dir = TempDir::new().unwrap();
    let files = ["1", "2", "5"].map(|threads| {
        let file = dir.path().join(format!("{threads}.gguf"));
        succeed(&["export-gguf", "--threads", threads, "--model-dir", text(pack.path()), "--out", text(&file)]);
        std::fs::read(file).unwrap()
    });
    assert!(files[0] == files[1] && files[1] == files[2]);
}

/// Writes a GGUF file with the given metadata and tensors of another file.
fn write_gguf(path: &Path, source: &Gguf, metadata: &[(String, Meta)], tensors: &[&GgufTensor]) {
    let planned: Vec<GgufEntry> = tensors
        .iter()
        .map(|t| GgufEntry { name: t.name.clone(), kind: t.kind, shape: t.shape.clone(), nbytes: t.nbytes })
        .collect();
    let layout = lay_out(metadata, &planned);
    let mut bytes = layout.header;
    bytes.resize(layout.total as usize, 0);
    for (tensor, start) in tensors.iter().zip(layout.starts) {
        bytes[start as usize..][..tensor.nbytes as usize].copy_from_slice(&data(source, tensor));
    }
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_split_model_is_one_model() {
    let dir = TempDir::new().unwrap();
    let whole = Gguf::open(&golden_file(MIXED)).unwrap();
    let (first, second) = whole.tensors.split_at(20);
    let mut paths = Vec::new();
    for (number, tensors) in [first, second].into_iter().enumerate() {
        let mut metadata = if number == 0 { whole.metadata.entries().to_vec() } else { Vec::new() };
        metadata.push(("split.no".into(), Meta::u32(number as u32)));
        metadata.push(("split.count".into(), Meta::u32(2)));
        metadata.push(("split.tensors.count".into(), Meta::u32(47)));
        paths.push(dir.path().join(format!("m-{:05}-of-00002.gguf", number + 1)));
        write_gguf(&paths[number], &whole, &metadata, &tensors.iter().collect::<Vec<_>>());
    }
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    succeed(&["import-gguf", text(&golden_file(MIXED)), "--out-dir", text(&one)]);
    succeed(&["import-gguf", text(&paths[0]), "--out-dir", text(&two)]);
    let bin = |dir: &Path| std::fs::read(dir.join("model.ie.bin")).unwrap();
    assert!(bin(&one) == bin(&two));
    fails(
        2,
        &["import-gguf", text(&paths[1]), "--out-dir", text(&one), "--overwrite"],
        &["part 2 of 2", "m-00001-of-00002"],
    );
    std::fs::remove_file(&paths[1]).unwrap();
    fails(1, &["import-gguf", text(&paths[0]), "--out-dir", text(&one), "--overwrite"], &["m-00002-of-00002.gguf"]);
}

#[test]
fn the_magnitude_of_yarn_is_that_of_the_file() {
    let (pack, dir) = (packed("olmo3"), TempDir::new().unwrap());
    let (plain, changed, out) = (dir.path().join("a.gguf"), dir.path().join("b.gguf"), dir.path().join("out"));
    succeed(&["export-gguf", "--model-dir", text(pack.path()), "--out", text(&plain)]);
    let file = Gguf::open(&plain).unwrap();
    let tensors: Vec<&GgufTensor> = file.tensors.iter().collect();
    let magnitude = |model: ModelConfig| match model.rope.scaling {
        RopeScaling::Yarn { attention_factor, .. } => attention_factor,
        other => panic!("{other:?}"),
    };
    let usual = magnitude(description(pack.path()));
    // llama.cpp's converter writes the factor of the checkpoint as f32. 1 stands for none.
    for (stated, expected) in [(usual as f32, usual), (1.0, usual), (1.5, 1.5)] {
        let mut metadata = file.metadata.entries().to_vec();
        metadata.push(("olmo2.rope.scaling.yarn_attn_factor".into(), Meta::f32(stated)));
        write_gguf(&changed, &file, &metadata, &tensors);
        succeed(&["import-gguf", text(&changed), "--out-dir", text(&out), "--overwrite"]);
        assert_eq!(magnitude(description(&out)), expected, "{stated}");
    }
}

#[test]
fn metadata_that_cannot_be_honoured_is_refused_by_its_key() {
    let dir = TempDir::new().unwrap();
    let whole = Gguf::open(&golden_file(MIXED)).unwrap();
    let tensors: Vec<&GgufTensor> = whole.tensors.iter().collect();
    let path = dir.path().join("bad.gguf");
    let out = dir.path().join("out");
    let import = ["import-gguf", text(&path), "--out-dir", text(&out)];
    let set = |key: &str, value: Meta| {
        let mut metadata = whole.metadata.entries().to_vec();
        metadata.retain(|(k, _)| k != key);
        metadata.push((key.to_string(), value));
        metadata
    };
    let word = |text: &str| Meta::String(text.into());
    for (key, value, words) in [
        ("general.architecture", word("rwkv7"), &["general.architecture: found `rwkv7`", "llama, gpt-oss"][..]),
        ("llama.block_count", Meta::u32(u32::MAX), &["llama.block_count: found 4294967295 layers"]),
        ("llama.block_count", Meta::u32(6), &["blk.5.attn_norm.weight: missing from the file"]),
        ("llama.block_count", Meta::u32(4), &["blk.4.", "the architecture has no tensor of this name"]),
        ("llama.embedding_length", Meta::u32(128), &["token_embd.weight: found shape [512, 64], expected [512, 128]"]),
        (
            "llama.embedding_length",
            word("64"),
            &["llama.embedding_length: found another type or value, expected a whole number"],
        ),
        ("llama.rope.scaling.type", word("dynamic"), &["rope"]),
        ("llama.expert_count", Meta::u32(8), &["llama.expert_used_count: missing"]),
        ("tokenizer.ggml.model", word("bert"), &["tokenizer.ggml.model: found `bert`", "--tokenizer"]),
        ("tokenizer.ggml.bos_token_id", Meta::u32(512), &["token"]),
        (
            "tokenizer.ggml.tokens",
            Meta::Strings(vec!["a".into()]),
            &["found 512 types, expected one for each of 1 tokens"],
        ),
    ] {
        let mut metadata = set(key, value);
        if key == "llama.rope.scaling.type" {
            metadata.push(("llama.rope.scaling.factor".into(), Meta::f32(2.0)));
        }
        write_gguf(&path, &whole, &metadata, &tensors);
        fails(1, &import, words);
        assert!(!out.exists());
    }
    std::fs::write(&path, &std::fs::read(golden_file(MIXED)).unwrap()[..200_000]).unwrap();
    fails(1, &import, &["reach past the end of the file", "get it again"]);
    std::fs::write(&path, "no model").unwrap();
    fails(1, &import, &["other first bytes than `GGUF`"]);
}

#[test]
fn a_tokenizer_without_a_name_in_llama_cpp_needs_one_from_the_user() {
    let pack = packed("llama-gqa");
    without_digest(pack.path());
    edit_json(&pack.path().join("tokenizer.json"), |t| t["normalizer"] = serde_json::json!({"type": "Lowercase"}));
    let file = pack.path().join("out.gguf");
    let export = ["export-gguf", "--model-dir", text(pack.path()), "--out", text(&file)];
    fails(1, &export, &["Lowercase", "--pre"]);
    succeed(&[&export[..], &["--pre", "llama-bpe"]].concat());
    let pre = Gguf::open(&file).unwrap();
    assert_eq!(pre.metadata.text("tokenizer.ggml.pre").unwrap(), "llama-bpe");
}

#[test]
fn inspect_shows_metadata_types_and_tensors() {
    let file = golden_file(MIXED);
    let shown = iec().args(["inspect", text(&file), "--tensors"]).output().unwrap().stdout;
    let shown = String::from_utf8(shown).unwrap();
    for words in ["GGUF file, version 3", "general.architecture", "llama", "blk.0.ffn_up.weight", "Q5_1", "172 x 64"] {
        assert!(shown.contains(words), "{shown} should say {words}");
    }
    let json = iec().args(["inspect", text(&file), "--json", "--tensors"]).output().unwrap().stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["metadata"]["llama.block_count"], 5);
    assert_eq!(json["types"]["Q8_0"]["tensors"], 6);
    assert_eq!(json["tensors"].as_array().unwrap().len(), 47);
    fails(2, &["inspect", text(&file), "--stats"], &["import-gguf"]);
}

#[test]
fn a_gguf_file_where_something_else_is_wanted_is_recognized() {
    let file = golden_file(MIXED);
    let opened = iec::session::Session::open(&file, &iec::session::SessionOptions::default()).unwrap_err();
    assert!(opened.to_string().contains("found a GGUF file"), "{opened}");
    assert!(opened.help_text().unwrap().contains("iec import-gguf"), "{opened}");
}
