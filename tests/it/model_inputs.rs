//! Tests `iec pack`, `ptq`, `calib` and `q4` on packs and GGUF files: what is not quantized again keeps its bytes, what
//! is quantized again gets the codes of its decoded values, and the loss is measured and said.

use crate::checkpoint::{edit_json, files, without_digest};
use crate::common::{fixture, iec, packed, packed_as};
use iec::iebin::{Entry, IebinReader, Store};
use iec::manifest::Manifest;
use iec::scheme::QuantSpec;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Runs a command that must succeed; returns its standard output and error.
fn succeed(words: &[&str], paths: &[(&str, &Path)]) -> (String, String) {
    let mut command = iec();
    command.args(words);
    for (option, path) in paths {
        if !option.is_empty() {
            command.arg(option);
        }
        command.arg(path);
    }
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (out, err) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{words:?}: {err}");
    (out, err)
}

/// Runs a command that must fail with a message that has these words.
fn fail(words: &[&str], paths: &[(&str, &Path)], message: &[&str]) {
    let mut command = iec();
    command.args(words);
    for (option, path) in paths {
        command.arg(option).arg(path);
    }
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && !stderr.contains("panicked"), "{words:?}: {stderr}");
    for word in message {
        assert!(stderr.contains(word), "{words:?}: `{stderr}` should say `{word}`");
    }
}

fn gguf(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf").join(name)
}

fn mixed() -> PathBuf {
    gguf("stories260k-mixed.gguf")
}

fn pack(model: &Path, out: &Path, more: &[&str]) -> (String, String) {
    succeed(&[&["pack"], more].concat(), &[("--hf-dir", model), ("--out-dir", out)])
}

fn import(file: &Path, out: &Path) {
    succeed(&["import-gguf"], &[("", file), ("--out-dir", out)]);
}

fn ptq(model: &Path, out: &Path, more: &[&str]) -> (String, String) {
    succeed(&[&["ptq"], more].concat(), &[("", model), ("--out", out)])
}

fn payload(reader: &IebinReader, entry: &Entry) -> Vec<u8> {
    reader.payload(entry).unwrap().to_vec()
}

/// Returns the stored form and the bytes of every tensor of a pack.
fn payloads(dir: &Path) -> BTreeMap<String, (Store, Vec<u8>)> {
    let reader = IebinReader::open(dir).unwrap();
    reader.entries().iter().map(|e| (e.name.clone(), (e.store, payload(&reader, e)))).collect()
}

/// Returns the names of the tensors that a manifest quantizes.
fn quantized(manifest: &Path) -> Vec<String> {
    let manifest = Manifest::load(manifest).unwrap();
    let tensors = manifest.document().tensors.iter();
    tensors.filter(|(_, entry)| entry.quant.is_some()).map(|(name, _)| name.clone()).collect()
}

#[test]
fn a_pack_of_a_pack_has_the_same_files() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    let manifest = path("manifest.json");
    ptq(&fixture("stories260k"), &manifest, &["--bits", "4"]);
    pack(&fixture("stories260k"), &path("quantized"), &["--q4-map", manifest.to_str().unwrap()]);
    import(&mixed(), &path("imported"));
    pack(&fixture("awq"), &path("published"), &[]);
    pack(&fixture("deepseek3"), &path("predictions"), &["--with-mtp"]);
    let checkpoints: Vec<TempDir> =
        ["llama-gqa", "gptoss-bf16", "gptoss-mxfp4", "deepseek2", "gemma4-e"].map(packed).into();
    let packs = ["quantized", "imported", "published", "predictions"].map(path);
    for (number, from) in packs.iter().map(PathBuf::as_path).chain(checkpoints.iter().map(TempDir::path)).enumerate() {
        let (to, from_json) = (path(&format!("to-{number}")), path(&format!("json-{number}")));
        pack(from, &to, &[]);
        assert!(files(&to) == files(from), "{}", from.display());
        pack(&from.join("model.ie.json"), &from_json, &[]);
        assert!(files(&from_json) == files(from), "{}", from.display());
    }
}

#[test]
fn a_gguf_file_packs_as_it_is_imported() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    let blocks = std::fs::read_dir(gguf("blocks")).unwrap().map(|entry| entry.unwrap().path());
    let mut ggufs: Vec<PathBuf> = blocks.filter(|path| path.extension().is_some_and(|e| e == "gguf")).collect();
    assert!(ggufs.len() > 20);
    // Stacked biases of experts, norms minus one, rotated rows, and matrices that GGUF transposes.
    for family in ["gptoss-mxfp4", "gemma3", "llama-gqa", "qwen3moe", "deepseek2", "glm4flash"] {
        let file = path(&format!("{family}.gguf"));
        succeed(&["export-gguf"], &[("--model-dir", packed(family).path()), ("--out", &file)]);
        ggufs.push(file);
    }
    ggufs.push(mixed());
    for (number, file) in ggufs.iter().enumerate() {
        let (imported, direct) = (path(&format!("imported-{number}")), path(&format!("packed-{number}")));
        import(file, &imported);
        pack(file, &direct, &[]);
        assert!(files(&imported) == files(&direct), "{}", file.display());
    }
}

#[test]
fn a_directory_with_one_gguf_file_and_parts_of_a_job_are_taken_too() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir(path("model")).unwrap();
    std::fs::copy(mixed(), path("model/m.gguf")).unwrap();
    let manifest = path("manifest.json");
    ptq(&path("model"), &manifest, &["--bits", "4"]);
    let map = ["--q4-map", manifest.to_str().unwrap()];
    pack(&path("model"), &path("whole"), &map);
    import(&path("model/m.gguf"), &path("imported"));
    for (model, out) in [("model", "parts"), ("imported", "parts-of-pack")] {
        for part in ["1/2", "2/2"] {
            pack(&path(model), &path(out), &[&map[..], &["--part", part]].concat());
        }
        let (_, stderr) = succeed(&["merge"], &[("--out-dir", &path(out))]);
        assert!(stderr.contains("quantized twice"), "{stderr}");
        assert!(files(&path("whole")) == files(&path(out)), "{model}");
    }
}

/// Checks a manifest that was applied to a quantized model: named tensors have the codes that the decoded values get,
/// all others their bytes.
fn check_requantized(model: &Path, applied: &Path, manifest: &Path, dir: &Path) -> usize {
    let (as_it_is, floats, expected) = (dir.join("as-it-is"), dir.join("floats"), dir.join("expected"));
    pack(model, &as_it_is, &[]);
    pack(model, &floats, &["--as", "float"]);
    pack(&floats, &expected, &["--q4-map", manifest.to_str().unwrap()]);
    let [found, before, expected] = [applied, &as_it_is, &expected].map(payloads);
    let named = quantized(manifest);
    for (name, payload) in &found {
        let wanted = if named.contains(name) { &expected[name] } else { &before[name] };
        assert!(payload == wanted, "{}: {name}", model.display());
    }
    assert!(named.iter().any(|name| found[name] != before[name]));
    named.len()
}

#[test]
fn a_manifest_quantizes_the_decoded_values_of_a_gguf_file_and_of_its_pack_alike() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    import(&mixed(), &path("imported"));
    let (of_file, of_pack) = (path("file.json"), path("pack.json"));
    let (summary, stderr) = ptq(&mixed(), &of_file, &["--bits", "4", "--json"]);
    ptq(&path("imported"), &of_pack, &["--bits", "4"]);
    assert!(std::fs::read(&of_file).unwrap() == std::fs::read(&of_pack).unwrap());
    let document: Value = serde_json::from_slice(&std::fs::read(&of_file).unwrap()).unwrap();
    assert_eq!(document["source"]["files"][0]["name"], "stories260k-mixed.gguf");
    assert!(stderr.contains("quantized twice") && stderr.contains("% on average"), "{stderr}");
    let summary: Value = serde_json::from_str(&summary).unwrap();

    let map = ["--q4-map", of_file.to_str().unwrap(), "--json"];
    let (json, stderr) = pack(&mixed(), &path("applied"), &map);
    assert_eq!(stderr.matches("quantized twice").count(), 1, "{stderr}");
    pack(&path("imported"), &path("applied-to-pack"), &map);
    assert!(files(&path("applied")) == files(&path("applied-to-pack")));
    check_requantized(&mixed(), &path("applied"), &of_file, dir.path());

    // Floats of the file are quantized once, and codes of few bits stay.
    let json: Value = serde_json::from_str(&json).unwrap();
    let loss = &json["requantized"];
    let named = quantized(&of_file);
    let count = loss["tensors"].as_u64().unwrap() as usize;
    assert!(0 < count && count <= named.len() && *loss == summary["requantized"], "{loss} {summary}");
    assert!(named.contains(&loss["worst_tensor"].as_str().unwrap().to_string()));
    let (mean, most) = (loss["relative_rms_mean"].as_f64().unwrap(), loss["relative_rms_max"].as_f64().unwrap());
    assert!(0.005 < mean && mean <= most && most < 0.2, "{loss}");
    let kept = payloads(&path("imported"));
    let narrow = |store: &Store| matches!(store, Store::Tiled(spec) if spec.scheme.bits() <= 4);
    for (name, (store, _)) in kept.iter().filter(|(_, (store, _))| narrow(store)) {
        assert!(!named.contains(name), "{name} {store:?}");
    }
}

#[test]
fn the_measured_loss_replaces_that_of_a_manifest_for_other_weights() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    let [eight, four] = ["eight.json", "four.json"].map(path);
    ptq(&fixture("stories260k"), &eight, &["--bits", "8", "--keep", "embedding", "--keep", "lm_head"]);
    ptq(&fixture("stories260k"), &four, &["--bits", "4", "--keep", "embedding", "--keep", "lm_head"]);
    pack(&fixture("stories260k"), &path("int8"), &["--q4-map", eight.to_str().unwrap()]);
    let (_, stderr) = pack(&path("int8"), &path("int4"), &["--q4-map", four.to_str().unwrap()]);
    assert!(stderr.contains("quantized twice"), "{stderr}");
    check_requantized(&path("int8"), &path("int4"), &four, dir.path());
    let (manifest, reader) = (Manifest::load(&four).unwrap(), IebinReader::open(&path("int4")).unwrap());
    for name in quantized(&four) {
        let recorded = reader.get(&name).unwrap().metrics.clone().unwrap()["relative_rms"].as_f64().unwrap();
        let of_floats = manifest.document().tensors[&name].metrics.unwrap().relative_rms;
        assert!(recorded != of_floats && (recorded / of_floats - 1.0).abs() < 0.2, "{name}: {recorded} {of_floats}");
    }
    // The dry run says what happens to each tensor.
    let words = ["pack", "--dry-run", "--q4-map", four.to_str().unwrap()];
    let (plan, _) = succeed(&words, &[("--hf-dir", &path("int8")), ("--out-dir", &path("new"))]);
    assert!(plan.contains("again after int8") && !path("new").exists(), "{plan}");
}

#[test]
fn codes_with_no_more_bits_than_wanted_stay_as_they_are() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    let [first, second] = ["first.json", "second.json"].map(path);
    ptq(&fixture("llama-gqa"), &first, &["--bits", "4"]);
    pack(&fixture("llama-gqa"), &path("one"), &["--q4-map", first.to_str().unwrap()]);
    for bits in ["4", "8"] {
        let (_, stderr) = ptq(&path("one"), &second, &["--bits", bits, "--overwrite"]);
        assert!(!stderr.contains("quantized twice"), "{stderr}");
        assert!(quantized(&second).is_empty());
        let (json, _) =
            pack(&path("one"), &path("two"), &["--q4-map", second.to_str().unwrap(), "--json", "--overwrite"]);
        assert!(!json.contains("requantized"), "{json}");
        assert!(payloads(&path("one")) == payloads(&path("two")));
    }
    // Rules that ask for the scheme that the tensors have change nothing either.
    let rules = path("rules.json");
    std::fs::write(&rules, json!({"version": 1, "rules": [{"include": "self_attn", "scheme": "q4_0"}]}).to_string())
        .unwrap();
    pack(&path("one"), &path("three"), &["--q4-map", rules.to_str().unwrap()]);
    assert!(payloads(&path("one")) == payloads(&path("three")));
}

#[test]
fn q4_writes_the_codes_that_pack_computes_from_a_gguf_file_and_from_a_pack() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    import(&mixed(), &path("imported"));
    let manifest = path("manifest.json");
    ptq(&mixed(), &manifest, &["--bits", "4"]);
    pack(&mixed(), &path("direct"), &["--q4-map", manifest.to_str().unwrap()]);
    for (model, out) in [(mixed(), "q4-file"), (path("imported"), "q4-pack")] {
        let words = ["q4", "--json", "--manifest", manifest.to_str().unwrap()];
        let (json, stderr) = succeed(&words, &[("", &model), ("--out-dir", &path(out))]);
        let json: Value = serde_json::from_str(&json).unwrap();
        assert!(json["requantized"]["tensors"].as_u64().unwrap() > 0, "{json}");
        assert!(stderr.contains("quantized twice"), "{stderr}");
        let (expanded, taken) = (path(out).join("q4_manifest.expanded.json"), path(&format!("{out}-pack")));
        pack(&model, &taken, &["--q4-map", expanded.to_str().unwrap()]);
        assert!(payloads(&taken) == payloads(&path("direct")), "{out}");
    }
    assert!(files(&path("q4-file")) == files(&path("q4-pack")));
}

#[test]
fn statistics_of_a_gguf_file_and_of_its_pack_are_the_same_and_guide_ptq() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/text/tinystories_valid_30k.txt");
    import(&mixed(), &path("imported"));
    for (model, out) in [(mixed(), "file.calib"), (path("imported"), "pack.calib")] {
        let words = ["calib", "--window", "64", "--max-tokens", "256"];
        let (_, stderr) = succeed(&words, &[("", &model), ("--text", &text), ("--out", &path(out))]);
        assert!(stderr.contains("statistics of the quantized model"), "{stderr}");
    }
    assert!(std::fs::read(path("file.calib")).unwrap() == std::fs::read(path("pack.calib")).unwrap());
    let (stats, manifest) = (path("pack.calib"), path("manifest.json"));
    ptq(&mixed(), &manifest, &["--bits", "4", "--calib", stats.to_str().unwrap()]);
    let map = ["--q4-map", manifest.to_str().unwrap(), "--calib", stats.to_str().unwrap()];
    pack(&mixed(), &path("out"), &map);
    let found = payloads(&path("out"));
    assert!(quantized(&manifest).iter().all(|name| matches!(found[name].0, Store::Tiled(_))));
}

#[test]
fn one_step_gates_and_budgets_take_gguf_files_and_packs() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/text/tinystories_valid_30k.txt");
    import(&mixed(), &path("imported"));
    let manifest = path("manifest.json");
    ptq(&path("imported"), &manifest, &["--bits", "4"]);
    pack(&mixed(), &path("two-steps"), &["--q4-map", manifest.to_str().unwrap()]);
    let (_, stderr) = pack(&mixed(), &path("one-step"), &["--bits", "4"]);
    assert_eq!(stderr.matches("quantized twice").count(), 1, "{stderr}");
    assert!(payloads(&path("one-step")) == payloads(&path("two-steps")));

    let gate = ["--bits", "4", "--gate", "kl=2", "--gate-windows", "1", "--gate-text", text.to_str().unwrap()];
    ptq(&path("imported"), &path("gated.json"), &gate);
    let gated: Value = serde_json::from_slice(&std::fs::read(path("gated.json")).unwrap()).unwrap();
    assert!(gated["evidence"]["figures"]["kl"].as_f64().is_some(), "{gated}");

    // A budget leaves codes as they are or gives them fewer bits.
    ptq(&mixed(), &path("budget.json"), &["--target-bpw", "6"]);
    let kept = payloads(&path("imported"));
    let planned = Manifest::load(&path("budget.json")).unwrap();
    for (name, entry) in &planned.document().tensors {
        if let (Some(quant), Store::Tiled(spec)) = (entry.quant, kept[name].0) {
            assert!(quant.spec.scheme.bits() < spec.scheme.bits(), "{name}");
        }
    }
}

#[test]
fn published_codes_that_are_quantized_again_are_warned_of() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    let rules = path("rules.json");
    std::fs::write(&rules, json!({"version": 1, "rules": [{"include": "mlp", "scheme": "nl4"}]}).to_string()).unwrap();
    for name in ["awq", "gptq", "fp8-block"] {
        let from_pack = path(&format!("{name}-again"));
        let map = ["--q4-map", rules.to_str().unwrap(), "--json"];
        let (json, stderr) = pack(&fixture(name), &path(name), &map);
        assert_eq!(stderr.matches("quantized twice").count(), 1, "{name}: {stderr}");
        let json: Value = serde_json::from_str(&json).unwrap();
        let count = json["requantized"]["tensors"].as_u64().unwrap();
        let entries = payloads(&path(name));
        let nl4 = entries.values().filter(|(store, _)| store.name() == "nl4").count() as u64;
        assert!(0 < count && count <= nl4, "{name}: {json}");
        let published = packed_as(&format!("{name}-as-it-is"), &fixture(name), &[]);
        pack(&published, &from_pack, &map[..2]);
        assert!(payloads(&from_pack) == entries, "{name}");
    }
}

#[test]
fn models_that_cannot_be_read_and_options_without_effect_are_refused_by_name() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (model, out) = (packed("llama-gqa"), path("out"));
    let to = ("--out-dir", &*out);
    let config = fixture("llama-gqa").join("config.json");
    fail(&["pack"], &[("--hf-dir", model.path()), ("--config", &config), to], &["--config", "leave --config out"]);
    fail(&["pack", "--with-mtp"], &[("--hf-dir", &mixed()), to], &["--with-mtp", "multi-token prediction"]);
    let itself = ("--out-dir", model.path());
    fail(&["pack", "--overwrite"], &[("--hf-dir", model.path()), itself], &["this command reads", "--out-dir"]);
    fail(&["q4"], &[("--hf-dir", &path("model.onnx")), to], &["model.onnx"]);

    let mut bytes = std::fs::read(model.path().join("model.ie.bin")).unwrap();
    let entry = IebinReader::open(model.path()).unwrap().get("model.layers.1.mlp.up_proj.weight").unwrap().clone();
    bytes[entry.offset + 5] ^= 1;
    std::fs::write(model.path().join("model.ie.bin"), &bytes).unwrap();
    let damaged = ["model.ie.bin", "model.layers.1.mlp.up_proj.weight", "expected the recorded", "backup"];
    fail(&["pack"], &[("--hf-dir", model.path()), to], &damaged);
    fail(&["ptq"], &[("--model-dir", model.path()), ("--out", &path("m.json"))], &damaged);
    fail(&["q4"], &[("--hf-dir", model.path()), to], &damaged);
    assert!(!out.join("model.ie.json").exists() && !path("m.json").exists());

    without_digest(model.path());
    edit_json(&model.path().join("model.ie.json"), |json| {
        json["tensors"].as_array_mut().unwrap().retain(|tensor| tensor["name"] != "model.layers.0.mlp.up_proj.weight");
    });
    let missing = ["model.ie.json", "model.layers.0.mlp.up_proj.weight", "found no such tensor", "expected shape"];
    fail(&["pack"], &[("--hf-dir", model.path()), to], &missing);

    let cut = path("cut.gguf");
    std::fs::write(&cut, &std::fs::read(mixed()).unwrap()[..200_000]).unwrap();
    for command in ["pack", "q4"] {
        fail(&[command], &[("--hf-dir", &cut), to], &["cut.gguf", "damaged"]);
    }
    fail(&["ptq"], &[("--hf-dir", &cut), ("--out", &path("m.json"))], &["cut.gguf"]);
}

#[test]
fn mxfp4_of_a_pack_stays_and_is_decoded_for_a_manifest() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    let model = packed("gptoss-mxfp4");
    let rules = path("rules.json");
    let rule = json!({"version": 1, "rules": [{"include": "experts.down_proj", "scheme": "int8", "group_size": 32}]});
    std::fs::write(&rules, rule.to_string()).unwrap();
    let map = ["--q4-map", rules.to_str().unwrap()];
    pack(model.path(), &path("from-pack"), &map);
    pack(&fixture("gptoss-mxfp4"), &path("from-checkpoint"), &map);
    let found = payloads(&path("from-pack"));
    assert!(found == payloads(&path("from-checkpoint")));
    let spec = |name: &str| found[&format!("model.layers.0.mlp.experts.{name}")].0;
    assert_eq!(spec("down_proj"), Store::Tiled(QuantSpec::Q8_0));
    assert_eq!(spec("gate_up_proj"), Store::Tiled(QuantSpec::MXFP4));
}
