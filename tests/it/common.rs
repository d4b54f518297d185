//! Helpers for integration tests: paths of fixtures, packs, golden values, and the command under test.

use iec::runtime::{Engine, Feed, Want};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex};

/// Checkpoints of the repository with golden values; only the last two were trained on real text.
pub const FIXTURES: [&str; 16] = [
    "llama-gqa",
    "llama3-rope-tied",
    "dedup-llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "qwen3moe-dense",
    "mistral-swa",
    "mixtral",
    "gemma2",
    "gemma3",
    "phi3",
    "gptoss-bf16",
    "gptoss-mxfp4",
    "gptoss-trained",
    "stories260k",
];

/// Checkpoints of further families, with two prompts each.
pub const FAMILIES: [&str; 30] = [
    "gemma3-vl",
    "qwen3vl",
    "qwen25vl",
    "ministral3",
    "granite",
    "smollm3",
    "olmo2",
    "olmo3",
    "cohere2",
    "glm4moe",
    "museglimmer",
    "deepseek2",
    "deepseek3",
    "glm4flash",
    "mistral4",
    "gemma4",
    "gemma4-moe",
    "gemma4-e",
    "gemma4-unified",
    "minimaxm2",
    "qwen3vlmoe",
    "lfm2",
    "lfm2moe",
    "lfm3",
    "qwen35",
    "qwen35-text",
    "qwen35moe",
    "qwen3next",
    "granite4h",
    "nemotronh",
];

/// Further families with recurrent layers.
pub const RECURRENT: [&str; 9] =
    ["lfm2", "lfm2moe", "lfm3", "qwen35", "qwen35-text", "qwen35moe", "qwen3next", "granite4h", "nemotronh"];

/// Checkpoints in the formats of other quantizers, with the SHA-256 of their exact values.
pub const PUBLISHED: [&str; 15] = [
    "fp8-block",
    "fp8-tensor",
    "ct-w4a16",
    "ct-w4a16-asym",
    "ct-w8a8",
    "ct-fp8",
    "ct-nvfp4",
    "modelopt-nvfp4",
    "awq",
    "gptq",
    "gptq-actorder",
    "bnb-nf4",
    "bnb-int8",
    "torchao-int4",
    "mlx-4bit",
];

/// Returns the path of a checkpoint of the repository: the embedded model or one under tests/fixtures.
pub fn fixture(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if FAMILIES.contains(&name) {
        return decompressed(name, &root.join("tests/fixtures/families").join(name));
    }
    if PUBLISHED.contains(&name) {
        return decompressed(name, &root.join("tests/fixtures/published").join(name));
    }
    let asset = root.join("assets").join(name);
    if asset.is_dir() { asset } else { root.join("tests/fixtures").join(name) }
}

/// Decompresses the files of a checkpoint that end in `.zst`, once per test run, and copies the others.
fn decompressed(name: &str, from: &Path) -> PathBuf {
    static DONE: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("families").join(name);
    let mut done = DONE.lock().unwrap_or_else(|e| e.into_inner());
    if done.insert(name.to_string()) {
        std::fs::create_dir_all(&to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let path = entry.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            let file = path.file_name().unwrap().to_str().unwrap();
            match file.strip_suffix(".zst") {
                Some(file) => std::fs::write(to.join(file), zstd::decode_all(&bytes[..]).unwrap()).unwrap(),
                None => std::fs::write(to.join(file), bytes).unwrap(),
            }
        }
    }
    to
}

/// Returns a command that runs the real binary without the environment variables that it reads.
pub fn iec() -> assert_cmd::Command {
    let mut command = assert_cmd::Command::cargo_bin("iec").expect("the binary is built with the tests");
    command
        .env_clear()
        .envs(std::env::vars().filter(|(k, _)| matches!(k.as_str(), "PATH" | "HOME" | "TMPDIR" | "LD_LIBRARY_PATH")))
        .env("IEC_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"))
        // This gives tests the same results on machines with a GPU.
        .env("IEC_DEVICE", "cpu");
    command
}

/// Packs a fixture without quantization into a temporary directory, which is removed when the result is dropped.
pub fn packed(name: &str) -> tempfile::TempDir {
    use iec::convert::pack::{PackOptions, pack};
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = PackOptions { hf_dir: fixture(name), out_dir: dir.path().to_path_buf(), ..PackOptions::default() };
    pack(&options).expect("fixtures can be packed");
    dir
}

/// Packs a fixture with other fields of one of its JSON files into `pack` of the returned directory.
pub fn packed_with(name: &str, file: &str, fields: serde_json::Value) -> tempfile::TempDir {
    use iec::convert::pack::{PackOptions, pack};
    let dir = tempfile::tempdir().expect("a temporary directory");
    let source = dir.path().join("source");
    let copied = std::process::Command::new("cp").arg("-r").arg(fixture(name)).arg(&source).status();
    assert!(copied.is_ok_and(|status| status.success()));
    let text = std::fs::read_to_string(source.join(file)).expect("a file of the fixture");
    let mut content: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for (field, value) in fields.as_object().expect("fields") {
        content[field] = value.clone();
    }
    std::fs::write(source.join(file), content.to_string()).expect("a writable copy");
    pack(&PackOptions { hf_dir: source, out_dir: dir.path().join("pack"), ..PackOptions::default() })
        .expect("fixtures can be packed");
    dir
}

/// Packs a checkpoint with the real binary, once per test run and `name`, and returns the directory.
pub fn packed_as(name: &str, hf_dir: &Path, options: &[&str]) -> PathBuf {
    static DONE: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packs").join(name);
    let mut done = DONE.lock().unwrap_or_else(|e| e.into_inner());
    if done.insert(name.to_string()) {
        let mut command = iec();
        command.args(["pack", "--overwrite", "--hf-dir"]).arg(hf_dir).arg("--out-dir").arg(&out);
        command.args(options).assert().success();
    }
    out
}

/// Returns the logits after every token of a text.
pub fn all_logits(engine: &mut Engine, tokens: &[u32]) -> Vec<f32> {
    let (mut sequence, mut logits) = (engine.new_sequence().unwrap(), Vec::new());
    engine.forward(&mut [Feed { sequence: &mut sequence, tokens, want: Want::All }], &mut logits).unwrap();
    logits
}

/// Reads the golden values of a fixture.
pub fn golden(name: &str) -> serde_json::Value {
    let text = std::fs::read_to_string(fixture(name).join("golden.json")).expect("fixtures have golden values");
    serde_json::from_str(&text).expect("golden values are JSON")
}

/// Returns the command with which errors advise to download a model of the Hub: a build without downloads cannot do it
/// itself.
pub fn download_of(model: &str) -> String {
    let program = if cfg!(feature = "hub") { "iec pull" } else { "hf download" };
    format!("{program} {model}")
}
