//! Tests that packs and quantization manifests of older programs are converted to exactly the bytes that the
//! checkpoint itself gives.

use crate::checkpoint::{Tensor, files, load};
use crate::common::{fixture, golden, iec};
use half::bf16;
use iec::iebin::IebinReader;
use iec::runtime::{Engine, EngineOptions, Feed, Precision, Want};
use safetensors::tensor::Dtype;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Pack format of one of the older programs.
struct Writer {
    /// Alignment of tensors in bytes.
    align: usize,
    /// Whether tensors with equal bytes are stored once.
    shares: bool,
    /// Whether all tensors are converted to fp32.
    widens: bool,
    /// Makes the JSON entry of a tensor from its name, the tensor and its offset.
    entry: fn(&str, &Tensor, usize) -> Value,
    /// Makes the description of the pack from the entries.
    top: fn(Vec<Value>) -> Value,
}

fn as_list(entries: Vec<Value>) -> Value {
    json!({"format": "iebin_v1", "version": 1, "weights_bin": "model.ie.bin", "dtype": 2, "tensors": entries})
}

fn as_dict(entries: Vec<Value>) -> Value {
    let mut tensors = Map::new();
    for mut entry in entries {
        let name = entry.as_object_mut().unwrap().remove("name").unwrap();
        tensors.insert(name.as_str().unwrap().to_string(), entry);
    }
    json!({"source": {"hf_dir": "/somewhere/else", "commit": null}, "tensors": tensors})
}

fn with_tokenizer_paths(entries: Vec<Value>) -> Value {
    json!({"format": "iebin.v1", "version": 1, "bin": "model.ie.bin", "dtype": "fp32", "tensors": entries,
        "tokenizer": {"vocab": null, "tokenizer_json": "/somewhere/tokenizer.json"}, "source": {"hf_dir": "/x"}})
}

fn code(dtype: Dtype) -> u64 {
    match dtype {
        Dtype::F64 => 0,
        Dtype::F16 => 1,
        Dtype::BF16 => 2,
        Dtype::F32 => 3,
        Dtype::I8 => 4,
        Dtype::U8 => 8,
        other => panic!("{other:?}"),
    }
}

fn torch(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F16 => "torch.float16",
        Dtype::BF16 => "torch.bfloat16",
        Dtype::F32 => "torch.float32",
        Dtype::U8 => "torch.uint8",
        other => panic!("{other:?}"),
    }
}

const CODES: Writer = Writer {
    align: 64,
    shares: false,
    widens: false,
    entry: |name, t, at| json!({"name": name, "dtype": code(t.dtype), "shape": t.shape, "offset": at, "size_bytes": t.bytes.len()}),
    top: as_list,
};
const TORCH: Writer = Writer {
    align: 1,
    entry: |name, t, at| json!({"name": name, "dtype": torch(t.dtype), "shape": t.shape, "offset_bytes": at, "size": t.bytes.len()}),
    ..CODES
};
const DICT: Writer = Writer {
    entry: |name, t, at| {
        let numpy = torch(t.dtype).trim_start_matches("torch.");
        json!({"name": name, "dtype": numpy, "shape": t.shape, "offset": at, "nbytes": t.bytes.len()})
    },
    top: as_dict,
    ..CODES
};
const WIDENED: Writer = Writer {
    shares: true,
    widens: true,
    entry: |name, t, at| json!({"name": name, "dtype": "fp32", "shape": t.shape, "offset": at}),
    top: with_tokenizer_paths,
    ..CODES
};

impl Writer {
    /// Writes `tensors` in the format of this program, with the other files of the fixture in the same directory.
    fn write(&self, name: &str, tensors: &BTreeMap<String, Tensor>) -> TempDir {
        let dir = TempDir::new().unwrap();
        for (file, bytes) in files(&fixture(name)) {
            if file.extension().is_some_and(|e| e == "json" || e == "jinja") && !file.ends_with("golden.json") {
                std::fs::write(dir.path().join(file), bytes).unwrap();
            }
        }
        let _ = std::fs::remove_file(dir.path().join("model.safetensors.index.json"));
        let (mut bin, mut entries, mut stored) = (Vec::new(), Vec::new(), BTreeMap::new());
        for (name, tensor) in tensors {
            let tensor = if self.widens { widened(tensor) } else { tensor.clone() };
            let at = match stored.get(&tensor.bytes) {
                Some(at) if self.shares => *at,
                _ => {
                    bin.resize(usize::next_multiple_of(bin.len(), self.align), 0);
                    bin.extend_from_slice(&tensor.bytes);
                    bin.len() - tensor.bytes.len()
                }
            };
            stored.insert(tensor.bytes.clone(), at);
            entries.push((self.entry)(name, &tensor, at));
        }
        std::fs::write(dir.path().join("model.ie.bin"), bin).unwrap();
        std::fs::write(dir.path().join("model.ie.json"), (self.top)(entries).to_string()).unwrap();
        dir
    }
}

fn widened(tensor: &Tensor) -> Tensor {
    let bytes = match tensor.dtype {
        Dtype::BF16 => {
            let values = tensor.bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32());
            values.flat_map(f32::to_le_bytes).collect()
        }
        Dtype::F32 => tensor.bytes.clone(),
        other => panic!("{other:?}"),
    };
    Tensor { dtype: Dtype::F32, shape: tensor.shape.clone(), bytes }
}

/// Packs with the real binary.
fn pack(source: &Path, arguments: &[&str]) -> TempDir {
    let out = TempDir::new().unwrap();
    iec().args(["pack", "--hf-dir"]).arg(source).arg("--out-dir").arg(out.path()).args(arguments).assert().success();
    out
}

/// Asserts that both packs have the same tensors with the same bytes.
fn assert_same_pack(found: &Path, expected: &Path, what: &str) {
    let (found, expected) = (IebinReader::open(found).unwrap(), IebinReader::open(expected).unwrap());
    let description = |reader: &IebinReader| {
        let mut entries = reader.entries().to_vec();
        // Error metrics exist only in the pack whose codes this program has quantized.
        entries.iter_mut().for_each(|entry| entry.metrics = None);
        entries
    };
    assert_eq!(description(&found), description(&expected), "{what}");
    assert_eq!(found.description.model, expected.description.model, "{what}");
    assert!(found.bin().unwrap().bytes() == expected.bin().unwrap().bytes(), "{what}: other bytes");
}

fn assert_golden(pack: &Path, name: &str) {
    let options = EngineOptions { precision: Some(Precision::Fp32), threads: 2, ..EngineOptions::default() };
    let mut engine = Engine::open(&IebinReader::open(pack).unwrap(), &options).unwrap();
    let prompt = &golden(name)["prompts"][0];
    let ids =
        |value: &Value| value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect::<Vec<_>>();
    let (mut tokens, mut greedy) = (ids(&prompt["ids"]), Vec::new());
    let mut sequence = engine.new_sequence().unwrap();
    let mut logits = Vec::new();
    for _ in 0..32 {
        let feed = Feed { sequence: &mut sequence, tokens: &tokens, want: Want::Last };
        engine.forward(&mut [feed], &mut logits).unwrap();
        let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        tokens = vec![best as u32];
        greedy.push(best as u32);
    }
    assert_eq!(greedy, ids(&prompt["greedy_ids"]), "{name}");
}

#[test]
fn a_pack_in_every_older_spelling_converts_to_what_the_checkpoint_gives() {
    for (name, writers) in [
        ("llama-gqa", &[&CODES, &TORCH, &DICT][..]),
        ("gptoss-mxfp4", &[&CODES, &DICT]),
        ("llama3-rope-tied", &[&TORCH]),
    ] {
        let expected = pack(&fixture(name), &[]);
        for (i, writer) in writers.iter().enumerate() {
            let old = writer.write(name, &load(&fixture(name)));
            let new = pack(old.path(), &[]);
            assert_same_pack(new.path(), expected.path(), &format!("{name}, writer {i}"));
            if i == 0 {
                assert_golden(new.path(), name);
            }
        }
    }
}

#[test]
fn a_widened_pack_that_stores_equal_tensors_once_converts() {
    let old = WIDENED.write("dedup-llama", &load(&fixture("dedup-llama")));
    let new = pack(old.path(), &[]);
    assert_same_pack(new.path(), pack(&fixture("dedup-llama"), &["--dtype", "fp32"]).path(), "dedup-llama");
    assert_golden(new.path(), "dedup-llama");
}

#[test]
fn a_configuration_can_be_given_where_the_pack_has_none() {
    let old = CODES.write("llama-gqa", &load(&fixture("llama-gqa")));
    let config = old.path().join("config.json");
    let elsewhere = TempDir::new().unwrap();
    let moved = elsewhere.path().join("llama.json");
    std::fs::rename(&config, &moved).unwrap();
    let mut without = iec();
    without.args(["pack", "--hf-dir"]).arg(old.path()).arg("--out-dir").arg(elsewhere.path().join("out"));
    let message = String::from_utf8(without.assert().code(1).get_output().stderr.clone()).unwrap();
    assert!(message.contains("--config"), "{message}");
    let new = pack(old.path(), &["--config", moved.to_str().unwrap()]);
    assert_same_pack(new.path(), pack(&fixture("llama-gqa"), &[]).path(), "with --config");
    assert_eq!(std::fs::read(new.path().join("config.json")).unwrap(), std::fs::read(&moved).unwrap());
    let manifest = elsewhere.path().join("m.json");
    let mut ptq = iec();
    ptq.args(["ptq", "--bits", "8", "--hf-dir"]).arg(old.path()).arg("--config").arg(&moved);
    ptq.arg("--out").arg(&manifest).assert().success();
    assert!(manifest.exists());
}

#[test]
fn running_an_older_pack_ends_with_the_command_that_converts_it() {
    let place = TempDir::new().unwrap();
    let old = place.path().join("old");
    std::fs::rename(CODES.write("llama-gqa", &load(&fixture("llama-gqa"))).keep(), &old).unwrap();
    let mut run = iec();
    run.args(["run", "--prompt", "x", "--model-dir"]).arg(&old);
    let message = String::from_utf8(run.assert().code(3).get_output().stderr.clone()).unwrap();
    let command = message.split("convert it once: iec ").nth(1).unwrap().trim();
    iec().args(command.split(' ')).assert().success();
    let mut run = iec();
    run.args(["run", "--max-new", "4", "--prompt", "x", "--model-dir"]).arg(place.path().join("old-iec"));
    run.assert().success();
}

#[test]
fn an_older_pack_can_be_inspected_and_mapped_as_it_is() {
    let old = WIDENED.write("dedup-llama", &load(&fixture("dedup-llama")));
    let mut map = iec();
    map.args(["tensor-map", "--out", "-", "--model-dir"]).arg(old.path());
    let map: Value = serde_json::from_slice(&map.assert().success().get_output().stdout).unwrap();
    assert_eq!(map["tensors"].as_array().unwrap().len(), load(&fixture("dedup-llama")).len());
    let mut inspect = iec();
    inspect.args(["inspect", "--json"]).arg(old.path()).assert().success();
}

#[test]
fn an_older_pack_is_not_overwritten_by_its_conversion() {
    let old = CODES.write("llama-gqa", &load(&fixture("llama-gqa")));
    let before = files(old.path());
    let mut pack = iec();
    pack.args(["pack", "--overwrite", "--hf-dir"]).arg(old.path()).arg("--out-dir").arg(old.path());
    let message = String::from_utf8(pack.assert().code(2).get_output().stderr.clone()).unwrap();
    assert!(message.contains("--out-dir"), "{message}");
    assert!(files(old.path()) == before);
}

/// Name, rows, columns, codes and scales of a tensor.
type Codes<'a> = (String, u64, u64, &'a [u8], &'a [u8]);

/// Quantized codes of a fixture with one scale per row, and the pack made with them.
struct Q4 {
    dir: TempDir,
    manifest: Value,
    codes: Vec<u8>,
    scales: Vec<u8>,
    packed: TempDir,
}

impl Q4 {
    fn new(name: &str) -> Q4 {
        let dir = TempDir::new().unwrap();
        let mut q4 = iec();
        q4.args(["q4", "--scheme", "int4-row", "--hf-dir"]).arg(fixture(name)).arg("--out-dir").arg(dir.path());
        q4.assert().success();
        let path = dir.path().join("q4_manifest.expanded.json");
        let packed = pack(&fixture(name), &["--q4-map", path.to_str().unwrap()]);
        let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
        let manifest = serde_json::from_slice(&read("q4_manifest.expanded.json")).unwrap();
        let (codes, scales) = (read("model.q4.bin"), read("model.q4.scales.fp16.bin"));
        Q4 { dir, manifest, codes, scales, packed }
    }

    /// Returns all tensors in the order of their codes in the file.
    fn tensors(&self) -> Vec<Codes<'_>> {
        let mut tensors: Vec<_> = self.manifest["tensors"].as_object().unwrap().iter().collect();
        tensors.sort_by_key(|(_, entry)| entry["q4_offset"].as_u64());
        let range = |bytes: &'_ [u8], entry: &Value, what: &str| -> std::ops::Range<usize> {
            let number = |field: String| entry[field].as_u64().unwrap() as usize;
            let start = number(format!("{what}_offset"));
            let range = start..start + number(format!("{what}_nbytes"));
            assert!(range.end <= bytes.len());
            range
        };
        tensors
            .into_iter()
            .map(|(name, entry)| {
                let codes = &self.codes[range(&self.codes, entry, "q4")];
                let scales = &self.scales[range(&self.scales, entry, "scale")];
                (name.clone(), entry["rows"].as_u64().unwrap(), entry["cols"].as_u64().unwrap(), codes, scales)
            })
            .collect()
    }

    /// Packs `source` with a manifest in another format and asserts that the pack is the same.
    fn packs_the_same(&self, source: &Path, manifest: &Path, what: &str) {
        let new = pack(source, &["--q4-map", manifest.to_str().unwrap()]);
        assert_same_pack(new.path(), self.packed.path(), what);
    }
}

/// Returns the entries as a streaming quantizer wrote them: one per tensor, without offsets, with absolute paths.
fn streamed(q4: &Q4) -> Map<String, Value> {
    let entry = |(name, rows, cols, ..): Codes| {
        let entry = json!({"dtype": "int4", "scheme": "weight_only", "per": "row", "bits": 4, "pack": "nibble_lohi",
            "scale_dtype": "fp16", "zero_point": 0, "symmetric": true, "align": 256, "rows": rows, "cols": cols,
            "packed_bin": "/old/models/x/model.q4.bin", "scale_bin": "/old/models/x/model.q4.scales.fp16.bin"});
        (name, entry)
    };
    q4.tensors().into_iter().map(entry).collect()
}

#[test]
fn expanded_manifests_give_their_bytes_with_and_without_offsets() {
    let q4 = Q4::new("llama-gqa");
    let path = q4.dir.path().join("old.json");
    let mut entries = streamed(&q4);
    std::fs::write(&path, Value::from(entries.clone()).to_string()).unwrap();
    q4.packs_the_same(&fixture("llama-gqa"), &path, "without offsets");
    for (name, entry) in &mut entries {
        let own = &q4.manifest["tensors"][name];
        for field in ["q4_offset", "q4_nbytes", "scale_offset", "scale_nbytes"] {
            entry[field] = own[field].clone();
        }
    }
    std::fs::write(&path, Value::from(entries.clone()).to_string()).unwrap();
    q4.packs_the_same(&fixture("llama-gqa"), &path, "with offsets");
    let lines = entries.iter().map(|(name, entry)| {
        let mut entry = entry.clone();
        entry["name"] = name.as_str().into();
        entry.to_string() + "\n"
    });
    std::fs::write(&path, lines.collect::<String>()).unwrap();
    q4.packs_the_same(&fixture("llama-gqa"), &path, "a line per entry");
}

#[test]
fn an_expanded_manifest_whose_files_are_of_another_length_is_refused() {
    let q4 = Q4::new("llama-gqa");
    let path = q4.dir.path().join("old.json");
    let mut entries = streamed(&q4);
    let first = entries.keys().next().unwrap().clone();
    entries.remove(&first);
    std::fs::write(&path, Value::from(entries).to_string()).unwrap();
    let out = TempDir::new().unwrap();
    let mut pack = iec();
    pack.args(["pack", "--hf-dir"])
        .arg(fixture("llama-gqa"))
        .arg("--out-dir")
        .arg(out.path())
        .arg("--q4-map")
        .arg(&path);
    let message = String::from_utf8(pack.assert().code(1).get_output().stderr.clone()).unwrap();
    assert!(message.contains("model.q4.bin") && message.contains("no offsets"), "{message}");
}

/// Writes the codes and scales of each tensor into separate files and returns a manifest that lists them; `bias` is
/// added to every code.
fn listed(q4: &Q4, bias: u8) -> PathBuf {
    let mut list = Vec::new();
    for (i, (name, rows, cols, codes, scales)) in q4.tensors().into_iter().enumerate() {
        let (int4_bin, scale_bin) = (format!("t{i}.q4.bin"), format!("t{i}.scales.bin"));
        let shifted: Vec<u8> = codes.iter().map(|b| if bias == 8 { b ^ 0x88 } else { *b }).collect();
        std::fs::write(q4.dir.path().join(&int4_bin), shifted).unwrap();
        std::fs::write(q4.dir.path().join(&scale_bin), scales).unwrap();
        let mut entry = json!({"name": name, "int4_bin": int4_bin, "scale_bin": format!("./q4/{scale_bin}"), "per": "row",
            "rows": rows, "cols": cols, "scale_dtype": "fp16", "pack": "nibble_lohi", "zp": 0, "symmetric": true});
        if bias != 0 {
            entry["bias"] = bias.into();
        }
        list.push(entry);
    }
    let path = q4.dir.path().join("list.json");
    std::fs::write(&path, Value::from(list).to_string()).unwrap();
    path
}

#[test]
fn a_list_of_files_and_biased_codes_give_the_same_pack() {
    let q4 = Q4::new("llama-gqa");
    for bias in [0, 8] {
        q4.packs_the_same(&fixture("llama-gqa"), &listed(&q4, bias), &format!("bias {bias}"));
    }
}

#[test]
fn codes_inside_an_older_pack_become_tiles_without_being_computed_again() {
    let q4 = Q4::new("llama-gqa");
    let mut tensors = load(&fixture("llama-gqa"));
    for (name, ..) in q4.tensors() {
        tensors.remove(&name);
    }
    // The remaining tensors are written first; the codes are then appended as older packers did.
    let old = DICT.write("llama-gqa", &tensors);
    // The pack still lacks the quantized matrices, which a manifest can supply.
    q4.packs_the_same(old.path(), &q4.dir.path().join("q4_manifest.expanded.json"), "the pack lacks the matrices");
    let mut bin = std::fs::read(old.path().join("model.ie.bin")).unwrap();
    let json_path = old.path().join("model.ie.json");
    let mut description: Value = serde_json::from_slice(&std::fs::read(&json_path).unwrap()).unwrap();
    for (i, (name, rows, cols, codes, scales)) in q4.tensors().into_iter().enumerate() {
        let scale_bin = format!("s{i}.fp16.bin");
        std::fs::write(old.path().join(&scale_bin), scales).unwrap();
        description["tensors"][&name] = json!({"dtype": "int4", "shape": [rows, cols], "offset": bin.len(), "nbytes": codes.len(),
            "quant": {"per": "row", "scale_bin": format!("/old/{scale_bin}"), "scale_dtype": "fp16", "pack": "nibble_lohi",
                "zp": 0, "symmetric": true}});
        bin.extend_from_slice(codes);
    }
    std::fs::write(&json_path, description.to_string()).unwrap();
    std::fs::write(old.path().join("model.ie.bin"), bin).unwrap();
    let new = pack(old.path(), &[]);
    assert_same_pack(new.path(), q4.packed.path(), "codes in the pack");
    // Some packs store codes without their quantization parameters, which only the manifest has.
    for (name, ..) in q4.tensors() {
        description["tensors"][&name].as_object_mut().unwrap().remove("quant");
    }
    std::fs::write(&json_path, description.to_string()).unwrap();
    q4.packs_the_same(old.path(), &q4.dir.path().join("q4_manifest.expanded.json"), "codes without terms");
    let (out, mut without) = (TempDir::new().unwrap(), iec());
    without.args(["pack", "--hf-dir"]).arg(old.path()).arg("--out-dir").arg(out.path().join("pack"));
    let message = String::from_utf8(without.assert().code(1).get_output().stderr.clone()).unwrap();
    assert!(message.contains("--q4-map"), "{message}");
    // `iec run` cannot read the untiled codes; its error message must show the command that converts the pack.
    let mut run = iec();
    run.args(["run", "--prompt", "x", "--model-dir"]).arg(old.path());
    let message = String::from_utf8(run.assert().code(3).get_output().stderr.clone()).unwrap();
    assert!(message.contains("iec pack --hf-dir"), "{message}");
}

#[test]
fn older_rules_quantize_what_they_name_and_exclusions_win() {
    let place = TempDir::new().unwrap();
    let quantized = |rules: Value| {
        let path = place.path().join("rules.json");
        std::fs::write(&path, rules.to_string()).unwrap();
        let packed = pack(&fixture("llama-gqa"), &["--q4-map", path.to_str().unwrap()]);
        let reader = IebinReader::open(packed.path()).unwrap();
        let tiled = reader.entries().iter().filter_map(|e| Some((e.name.clone(), e.layout()?.unwrap().spec)));
        tiled.collect::<BTreeMap<_, _>>()
    };
    let pattern = quantized(json!({"version": 1, "rules": [
        {"pattern": r".*\.self_attn\.[qk]_proj\.weight$", "dtype": "int4w", "group": 64, "zero": 0, "scale": "fp16"}]}));
    assert_eq!(pattern.len(), 6);
    assert!(pattern.values().all(|spec| spec.groups(128) == 2 && spec.symmetric));
    let regexes = quantized(json!({"defaults": {"dtype": "int4w", "per": "row"},
        "rules": [{"include_re": r"\.mlp\..*weight$"}, {"exclude_re": "down_proj"}]}));
    assert_eq!(regexes.len(), 6);
    assert!(regexes.iter().all(|(name, spec)| !name.contains("down_proj") && spec.groups(256) == 1));
}

#[test]
fn fields_of_older_manifests_without_meaning_here_are_refused_by_name() {
    let place = TempDir::new().unwrap();
    let entry = |field: &str, value: Value| {
        let mut entry = json!({"name": "w", "int4_bin": "w.bin", "scale_bin": "s.bin", "rows": 2, "cols": 4});
        entry[field] = value;
        json!([entry])
    };
    for (manifest, culprit) in [
        (entry("pack", json!("nibble_hilo")), "pack"),
        (entry("zp", json!(3)), "zp"),
        (entry("surprise", json!(1)), "surprise"),
        (entry("rows", json!(-2)), "rows"),
        (entry("rows", json!(u64::MAX)), "overflows"),
        (entry("int4_bin", json!("..")), "packed_bin"),
        (entry("q4_offset", json!(-1)), "q4_offset"),
        (entry("q4_nbytes", json!(5)), "q4_nbytes"),
        (json!({"rules": [{"pattern": "x", "dtype": "int3"}]}), "dtype"),
        (json!({"rules": [{"pattern": "x", "speed": "max"}]}), "speed"),
        (json!({"rules": [{"pattern": "x", "zero": "perhaps"}]}), "zero"),
        (json!({"rules": [{"include_re": "x"}, {}]}), "rules[1]"),
        (json!({"version": 7, "rules": [{"pattern": "x"}]}), "version"),
        (json!([3]), "[0]"),
    ] {
        let path = place.path().join("m.json");
        std::fs::write(&path, manifest.to_string()).unwrap();
        let error = iec::manifest::Manifest::load(&path).unwrap_err().to_string();
        assert!(error.contains(culprit), "{manifest}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn files_of_codes_cannot_be_links_to_somewhere_else() {
    let (place, elsewhere) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let secret = elsewhere.path().join("secret");
    std::fs::write(&secret, [7; 4]).unwrap();
    std::fs::write(place.path().join("w.bin"), [7; 4]).unwrap();
    std::os::unix::fs::symlink(&secret, place.path().join("s.bin")).unwrap();
    let entry = json!({"name": "w", "int4_bin": "w.bin", "scale_bin": "s.bin", "rows": 2, "cols": 4});
    let manifest = place.path().join("m.json");
    std::fs::write(&manifest, json!([entry]).to_string()).unwrap();
    let error = iec::manifest::Manifest::load(&manifest).unwrap_err().to_string();
    assert!(error.contains("s.bin") && error.contains("outside its directory"), "{error}");
    std::fs::remove_file(place.path().join("s.bin")).unwrap();
    std::os::unix::fs::symlink("w.bin", place.path().join("s.bin")).unwrap();
    assert!(iec::manifest::Manifest::load(&manifest).is_ok(), "links within the directory are fine");
}
