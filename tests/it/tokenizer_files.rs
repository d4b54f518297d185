//! Tests checkpoints without tokenizer.json: the tokenizer that is made from their other files gives the ids of the
//! library that defines these files. tests/reference/make_tokenizers.py made the fixtures.

use crate::common::iec;
use iec::generate::text::Tokenizer;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Files by name.
type Files = BTreeMap<String, Vec<u8>>;

/// Reads the files of a fixture, decompressed.
fn fixture(name: &str) -> Files {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers").join(name);
    let read = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.unwrap().path();
        let (file, bytes) = (path.file_name().unwrap().to_str().unwrap().to_string(), std::fs::read(&path).unwrap());
        match file.strip_suffix(".zst") {
            Some(file) => (file.to_string(), zstd::decode_all(&bytes[..]).unwrap()),
            None => (file, bytes),
        }
    };
    std::fs::read_dir(dir).unwrap().map(read).collect()
}

fn cases() -> Vec<String> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers");
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Returns the directory of a small model without a tokenizer.
fn weights() -> &'static Path {
    static WEIGHTS: OnceLock<PathBuf> = OnceLock::new();
    WEIGHTS.get_or_init(|| {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap().keep();
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
            "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 1000,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16"
        });
        std::fs::write(dir.join("shapes.json"), config.to_string()).unwrap();
        iec().args(["synth", "--config"]).arg(dir.join("shapes.json")).arg("--out-dir").arg(&dir).assert().success();
        for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            std::fs::remove_file(dir.join(name)).unwrap();
        }
        dir
    })
}

/// Writes a checkpoint of the small model with these files; `config.json` among them changes the one of the model.
fn checkpoint(files: &Files) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(weights()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    for (name, bytes) in files.iter().filter(|(name, _)| *name != "golden.json") {
        let mut bytes = bytes.clone();
        if name == "config.json" {
            let parse = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
            let mut config = parse(&std::fs::read(dir.path().join(name)).unwrap());
            config["model_type"] = parse(&bytes)["model_type"].clone();
            bytes = config.to_string().into_bytes();
        }
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

/// Packs a checkpoint with the real program; returns the pack and what the program printed as JSON.
fn packed(checkpoint: &Path) -> (tempfile::TempDir, Value) {
    let dir = tempfile::tempdir().unwrap();
    let run = iec().arg("pack").arg(checkpoint).arg("--json").arg("--out-dir").arg(dir.path()).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    (dir, serde_json::from_slice(&run.stdout).unwrap())
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn made_tokenizers_give_the_ids_of_the_library_that_defines_the_files() {
    let mut wrong = Vec::new();
    for name in cases() {
        let files = fixture(&name);
        let (pack, _) = packed(checkpoint(&files).path());
        let tokenizer = Tokenizer::open(&pack.path().join("tokenizer.json")).unwrap();
        let golden: Value = serde_json::from_slice(&files["golden.json"]).unwrap();
        let texts = golden["tokenization"].as_array().unwrap();
        assert!(texts.len() > 40, "{name}");
        for case in texts {
            let text = case["text"].as_str().unwrap();
            let plain = ids(&case["ids_no_special"]);
            let found = (
                tokenizer.encode(text).unwrap(),
                tokenizer.encode_plain(text).unwrap(),
                tokenizer.decode(&plain, false).unwrap(),
            );
            if found != (ids(&case["ids"]), plain, case["decoded"].as_str().unwrap().to_string()) {
                wrong.push((name.clone(), text.to_string(), found));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_checkpoint_without_tokenizer_json_is_run_from_its_directory() {
    for name in ["llama", "qwen2", "kimi", "tekken"] {
        let files = fixture(name);
        let checkpoint = checkpoint(&files);
        let golden: Value = serde_json::from_slice(&files["golden.json"]).unwrap();
        let cases = golden["tokenization"].as_array().unwrap();
        let fits = |case: &&Value| (1..=200).contains(&ids(&case["ids"]).len());
        let cases: Vec<&Value> = cases.iter().filter(fits).collect();
        let place = tempfile::tempdir().unwrap();
        let (prompts, trace) = (place.path().join("prompts.json"), place.path().join("trace.jsonl"));
        std::fs::write(&prompts, json!(cases.iter().map(|case| &case["text"]).collect::<Vec<_>>()).to_string())
            .unwrap();
        let mut command = iec();
        command.env("IEC_CACHE", place.path().join("cache")).args(["run", "--max-new", "1", "--model-dir"]);
        command.arg(checkpoint.path()).arg("--prompts-file").arg(&prompts).arg("--trace-ids").arg(&trace);
        command.assert().success();
        let lines = std::fs::read_to_string(&trace).unwrap();
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let prompts: Vec<Value> = lines.filter(|line| line["kind"] == "prompt").collect();
        assert_eq!(prompts.len(), cases.len(), "{name}");
        for (case, line) in cases.iter().zip(prompts) {
            assert_eq!(line["prompt_token_ids"], case["ids"], "{name}: {}", case["text"]);
        }
    }
}

#[test]
fn unpack_gives_back_the_files_of_the_tokenizer_byte_for_byte() {
    for name in ["llama", "gpt2", "kimi", "tekken"] {
        let files = fixture(name);
        let checkpoint = checkpoint(&files);
        let (pack, _) = packed(checkpoint.path());
        assert!(pack.path().join("tokenizer.json").is_file());
        let mut verify = iec();
        verify.arg("verify").arg(pack.path()).arg("--tokenizer-only").arg("--hf-dir").arg(checkpoint.path());
        verify.assert().success();
        let out = tempfile::tempdir().unwrap();
        iec().arg("unpack").arg("--model-dir").arg(pack.path()).arg("--out-dir").arg(out.path()).assert().success();
        let listed = |dir: &Path| -> Vec<String> {
            let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> = names.filter(|name| name != "shapes.json").collect();
            names.sort();
            names
        };
        assert_eq!(listed(out.path()), listed(checkpoint.path()), "{name}: no file more, no file less");
        for file in listed(out.path()).into_iter().filter(|name| name != "model.safetensors") {
            let [found, expected] = [out.path(), checkpoint.path()].map(|dir| std::fs::read(dir.join(&file)).unwrap());
            assert!(found == expected, "{name}: {file}");
        }
        let (again, _) = packed(out.path());
        let [first, second] = [pack.path(), again.path()].map(|dir| std::fs::read(dir.join("tokenizer.json")).unwrap());
        assert!(first == second, "{name}: packing gives the same tokenizer again");
    }
}

#[test]
fn the_files_from_which_a_tokenizer_was_made_are_told() {
    let files = fixture("gpt2");
    let checkpoint = checkpoint(&files);
    let plan = iec().arg("pack").arg(checkpoint.path()).args(["--dry-run", "--out-dir", "none"]).output().unwrap();
    let plan = String::from_utf8(plan.stdout).unwrap();
    assert!(plan.contains("tokenizer.json: made from vocab.json, merges.txt"), "{plan}");
    let (pack, summary) = packed(checkpoint.path());
    assert_eq!(summary["tokenizer_from"], json!(["vocab.json", "merges.txt"]));
    let inspect = iec().arg("inspect").arg(pack.path()).output().unwrap();
    let inspect = String::from_utf8(inspect.stdout).unwrap();
    assert!(inspect.contains("made from vocab.json, merges.txt"), "{inspect}");
    iec().args(["verify", "--hashes", "--model-dir"]).arg(pack.path()).assert().success();
}

#[test]
fn a_tokenizer_json_is_preferred_to_other_files() {
    let mut files = fixture("llama");
    let (made, _) = packed(checkpoint(&files).path());
    let json = std::fs::read(made.path().join("tokenizer.json")).unwrap();
    files.insert("tokenizer.json".into(), json);
    files.insert("tokenizer.model".into(), b"not a model".to_vec());
    let (pack, summary) = packed(checkpoint(&files).path());
    assert!(summary["tokenizer"] == true && summary.get("tokenizer_from").is_none(), "{summary}");
    assert!(!pack.path().join("tokenizer.model").exists());
}

#[test]
fn files_whose_rules_are_not_known_are_refused_by_name() {
    let with = |name: &str, file: &str, content: Option<&str>| {
        let mut files = fixture(name);
        match content {
            Some(content) => files.insert(file.into(), content.into()),
            None => files.remove(file),
        };
        files
    };
    let class = |name: &str, class: &str| {
        with(name, "tokenizer_config.json", Some(&json!({ "tokenizer_class": class }).to_string()))
    };
    for (files, expected) in [
        (class("llama", "XLNetTokenizer"), &["tokenizer.model", "XLNetTokenizer", "LlamaTokenizer"][..]),
        (class("gpt2", "BertTokenizerFast"), &["vocab.json", "BertTokenizer", "Qwen2Tokenizer"]),
        (class("kimi", "HYTokenizer"), &["tiktoken.model", "HYTokenizer", "TikTokenTokenizer"]),
        (with("gpt2", "tokenizer_config.json", None), &["vocab.json", "model type `llama`", "GPT2Tokenizer"]),
        (with("gpt2", "merges.txt", None), &["vocab.json", "no merges.txt"]),
        (with("gpt2", "merges.txt", Some("a b c\n")), &["merges.txt", "line 1", "a b c"]),
        (with("gpt2", "vocab.json", Some(r#"{"a": 1, "a": 2}"#)), &["vocab.json", "`a` with the ids 1 and 2"]),
        (with("kimi", "tiktoken.model", Some("IQ== 0\nIg==\n")), &["tiktoken.model", "line 2", "Ig=="]),
        (with("llama3", "tokenizer_config.json", None), &["tokenizer.model", "added_tokens_decoder"]),
        (with("tekken", "tekken.json", Some("{}")), &["tekken.json", "config"]),
        (with("llama", "tokenizer.model", Some("\n\u{5}abc")), &["tokenizer.model", "expected 5"]),
        (with("llama", "added_tokens.json", Some(r#"{"<x>": 5}"#)), &["tokenizer.model", "the id 5", "<x>"]),
    ] {
        let checkpoint = checkpoint(&files);
        let run = iec().arg("pack").arg(checkpoint.path()).args(["--out-dir", "none"]).output().unwrap();
        let message = String::from_utf8(run.stderr).unwrap();
        assert_eq!(run.status.code(), Some(1), "{message}");
        assert!(expected.iter().all(|part| message.contains(part)), "{expected:?}: {message}");
        assert!(message.contains("--tokenizer FILE"), "{message}");
        assert!(!Path::new("none").exists());
    }
}
