//! Fuzz targets: every parser of `iec` as a function of bytes. The fuzzer and `cargo test` (tests/fuzz.rs) share this
//! list.
//!
//! A target calls the same functions as the program and then uses what the parser accepted: for example, it reads
//! every accepted byte range.

use iec::convert::adapter;
use iec::convert::arch::{Arch, Fields, expected_tensors};
use iec::convert::gguf::config::config_json;
use iec::convert::gguf::tokenizer_in::tokenizer_files;
use iec::convert::published::{Published, Source};
use iec::convert::source::gguf::Gguf;
use iec::convert::source::layout::Layout;
use iec::convert::source::shard::list;
use iec::convert::source::shards::{Shards, parse_index};
use iec::dedup::Codec;
use iec::dedup::make::{self, MakeOptions};
use iec::generate::constraint::{Constraint, ConstraintSource, Vocabulary};
use iec::generate::text::spelling::{Leading, Spelling};
use iec::generate::text::{ChatTemplate, Message, RenderOptions, Tokenizer};
use iec::iebin::reader::{check_entries, parse_description};
use iec::manifest::Manifest;
use iec::sha256::{Digest, Sha256, hex};
use iec::tools::{Format, OutputEvent, OutputParser, OutputStyle, Tool};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

/// Fuzz target: a parser with its limits.
pub struct Target {
    /// Name of the target and of its directories of seeds and regressions.
    pub name: &'static str,
    /// Memory in bytes that any input may take, however small.
    pub allowance: usize,
    /// Processor time in milliseconds that an input may take.
    pub limit_ms: u64,
    /// Function that parses an input.
    pub run: fn(&[u8]),
}

/// Allowance for parsers of plain lists: tables, error messages and buffers of small inputs.
const LISTS: usize = 1 << 20;
/// Allowance for the compiled patterns of a manifest: 4 MiB for their programs, and as much for caches and a pattern
/// that is being compiled.
const PATTERNS: usize = 8 << 20;
/// Allowance for the deduplication target: its first input creates the store, whose three files are written through
/// buffers of 1 MiB.
const WRITERS: usize = 4 << 20;
/// Allowance for adapters: the compiled patterns of a configuration, and the tensors that are read at once.
const ADAPTERS: usize = 16 << 20;
/// Allowance for tokenizers: a tokenizer compiles several patterns and has caches of fixed size.
const PIPELINES: usize = 96 << 20;
/// Steps of a chat template: one twentieth of what the program allows, because further steps only repeat.
const STEPS: u64 = 100_000;
/// Allowance for chat templates of that many steps. The program renders templates in a process of 512 MiB.
const STEPPED: usize = 64 << 20;
/// Allowance and time limit in milliseconds for constraints: the states of a matcher take up to 60 MB, and a mask takes
/// up to 20 ms.
const MATCHERS: (usize, u64) = (192 << 20, 2000);
/// Allowance for the configuration of a server: the reader of TOML keeps every error of a file, 400 bytes for a byte.
#[cfg(feature = "serve")]
const CONFIGURATION: usize = 2 << 20;
/// Allowance for outputs of models: the tokenizers that all inputs share, and an event per character of an input.
const OUTPUTS: usize = 8 << 20;
/// Allowance for bodies of requests: their trees, copies of schemas, and messages.
#[cfg(feature = "serve")]
const BODIES: usize = 4 << 20;
/// Time limit in milliseconds for all other targets.
const SECOND: u64 = 1000;

/// All fuzz targets.
pub const TARGETS: &[Target] = &[
    Target { name: "safetensors", allowance: LISTS, limit_ms: SECOND, run: safetensors },
    Target { name: "pickle", allowance: LISTS, limit_ms: SECOND, run: weights },
    Target { name: "index", allowance: LISTS, limit_ms: SECOND, run: index },
    Target { name: "ie_json", allowance: LISTS, limit_ms: SECOND, run: ie_json },
    Target { name: "older_pack", allowance: LISTS, limit_ms: SECOND, run: older_pack },
    Target { name: "dedup", allowance: WRITERS, limit_ms: SECOND, run: dedup },
    Target { name: "gguf", allowance: LISTS, limit_ms: SECOND, run: gguf },
    Target { name: "manifest", allowance: PATTERNS, limit_ms: SECOND, run: manifest },
    Target { name: "config", allowance: LISTS, limit_ms: SECOND, run: config },
    Target { name: "published", allowance: PATTERNS, limit_ms: SECOND, run: published },
    Target { name: "adapter", allowance: ADAPTERS, limit_ms: SECOND, run: adapter },
    Target { name: "adapter_pack", allowance: ADAPTERS, limit_ms: SECOND, run: adapter_pack },
    Target { name: "adapter_config", allowance: ADAPTERS, limit_ms: SECOND, run: adapter_config },
    Target { name: "tokenizer", allowance: PIPELINES, limit_ms: SECOND, run: tokenizer },
    Target { name: "tokenizer_files", allowance: PIPELINES, limit_ms: SECOND, run: made_tokenizer },
    Target { name: "prefix_page", allowance: LISTS, limit_ms: SECOND, run: prefix_page },
    Target { name: "template", allowance: STEPPED, limit_ms: SECOND, run: template },
    Target { name: "constraint", allowance: MATCHERS.0, limit_ms: MATCHERS.1, run: constraint },
    #[cfg(feature = "serve")]
    Target { name: "api_keys", allowance: LISTS, limit_ms: SECOND, run: api_keys },
    #[cfg(feature = "serve")]
    Target { name: "serve_config", allowance: CONFIGURATION, limit_ms: SECOND, run: serve_config },
    #[cfg(feature = "serve")]
    Target { name: "key_usage", allowance: LISTS, limit_ms: SECOND, run: key_usage },
    #[cfg(feature = "serve")]
    Target { name: "api_completions", allowance: BODIES, limit_ms: SECOND, run: api_completions },
    #[cfg(feature = "serve")]
    Target { name: "api_chat", allowance: BODIES, limit_ms: SECOND, run: api_chat },
    #[cfg(feature = "serve")]
    Target { name: "api_responses", allowance: BODIES, limit_ms: SECOND, run: api_responses },
    #[cfg(feature = "serve")]
    Target { name: "api_messages", allowance: BODIES, limit_ms: SECOND, run: api_messages },
    #[cfg(feature = "serve")]
    Target { name: "api_ollama", allowance: BODIES, limit_ms: SECOND, run: api_ollama },
    #[cfg(feature = "serve")]
    Target { name: "api_infill", allowance: BODIES, limit_ms: SECOND, run: api_infill },
    #[cfg(feature = "serve")]
    Target { name: "gbnf", allowance: BODIES, limit_ms: SECOND, run: gbnf },
    Target { name: "tool_output", allowance: OUTPUTS, limit_ms: SECOND, run: tool_output },
];

/// Length in bytes of the data files against which descriptions and manifests are validated.
const BINARY: usize = 1 << 16;

thread_local! {
    /// Per-thread directory with the files that descriptions and manifests may refer to.
    static PLACE: tempfile::TempDir = make_place();
}

fn make_place() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let dir = dir.expect("a temporary directory");
    for name in ["model.ie.bin", "model.q4.bin", "model.q4.scales.fp16.bin", "w.bin", "s.bin"] {
        std::fs::write(dir.path().join(name), vec![7; BINARY]).expect("a small file");
    }
    dir
}

fn place() -> PathBuf {
    PLACE.with(|place| place.path().to_path_buf())
}

/// Parses the input as a complete file, and as the header of one.
fn safetensors(data: &[u8]) {
    weights(data);
    let mut file = (data.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(data);
    file.resize(file.len() + 64, 1);
    weights(&file);
}

/// Parses a weight file of any format, which is detected by its first bytes, and reads both ends of every tensor.
fn weights(data: &[u8]) {
    let Ok(listing) = list(&data, 0) else { return };
    for tensor in listing.tensors {
        let mut ends = [0; 16];
        let n = tensor.nbytes.min(ends.len());
        tensor.read(&data, 0, &mut ends[..n]).expect("a range that was accepted");
        tensor.read(&data, tensor.nbytes - n, &mut ends[..n]).expect("a range that was accepted");
    }
}

fn index(data: &[u8]) {
    let _ = parse_index(data);
}

fn ie_json(data: &[u8]) {
    let Ok(mut description) = parse_description(data) else { return };
    let older = description.is_older();
    if let Some(model) = &description.model {
        let _ = model.validate();
    }
    if let Ok(entries) = check_entries(std::mem::take(&mut description.tensors), BINARY, older) {
        assert!(entries.iter().all(|e| e.offset + e.nbytes <= BINARY));
    }
}

fn older_pack(data: &[u8]) {
    let json = place().join("model.ie.json");
    std::fs::write(&json, data).expect("a small file");
    let Ok(shards) = Shards::open(&json) else { return };
    for tensor in shards.tensors() {
        let mut ends = [0; 16];
        let n = tensor.nbytes.min(ends.len());
        shards.read(tensor, tensor.nbytes - n, &mut ends[..n]).expect("a range that was accepted");
    }
}

thread_local! {
    /// Small deduplicated pack without its data file.
    static STORE: tempfile::TempDir = make_store();
}

/// Writes a pack of BF16 tensors, each given by its name, its number of rows of 64 weights, and a mask of bits to
/// flip in the low byte of every fifth weight. A tensor of 32 rows gets the shape of a stack of two matrices.
fn small_pack(dir: &std::path::Path, tensors: &[(&str, usize, u8)]) {
    std::fs::create_dir_all(dir).expect("a temporary directory");
    let (mut bytes, mut entries) = (Vec::new(), Vec::new());
    for (name, rows, turned) in tensors {
        let weight =
            |i: usize| [(i * 37 % 251) as u8 ^ if i.is_multiple_of(5) { *turned } else { 0 }, 63 + (i % 7 > 4) as u8];
        let payload: Vec<u8> = (0..rows * 64).flat_map(weight).collect();
        let shape = if *rows == 32 { "[2,16,64]".to_string() } else { format!("[{rows},64]") };
        let (offset, nbytes, sha256) = (bytes.len(), payload.len(), hex(Sha256::new_with_prefix(&payload)));
        entries.push(format!(
            r#"{{"name":"{name}","dtype":"BF16","shape":{shape},"offset":{offset},"nbytes":{nbytes},"sha256":"{sha256}"}}"#
        ));
        bytes.extend(payload);
    }
    std::fs::write(dir.join("model.ie.json"), format!(r#"{{"version":1,"tensors":[{}]}}"#, entries.join(",")))
        .expect("a small file");
    std::fs::write(dir.join("model.ie.bin"), bytes).expect("a small file");
}

/// Creates a deduplicated pack and its base, in which one of the shared tensors is longer and one is shorter.
fn make_store() -> tempfile::TempDir {
    let dir = tempfile::tempdir_in(place()).expect("a temporary directory");
    let base = dir.path().join("base");
    small_pack(&base, &[("a", 32, 0), ("b", 24, 1), ("c", 12, 3), ("d", 16, 0x40)]);
    small_pack(dir.path(), &[("a", 32, 0), ("b", 16, 2), ("c", 16, 4), ("e", 32, 0x55), ("f", 8, 0x33)]);
    let (model_dir, bases) = (dir.path().to_path_buf(), vec![base]);
    make::dedup(&MakeOptions { model_dir, bases, codec: Codec::Zstd, level: 1, even_if_larger: true }).expect("a pack");
    std::fs::remove_file(dir.path().join("model.ie.bin")).expect("a pack");
    dir
}

/// Parses the description of a deduplicated store, sealed with a correct hash, and rebuilds all data that it lists.
fn dedup(data: &[u8]) {
    let Ok(body) = std::str::from_utf8(data) else { return };
    STORE.with(|store| drop(iec::dedup::verify_as(store.path(), iec::dedup::sealed(body).as_bytes())));
}

/// Parses a GGUF file, reads both ends of every tensor, and derives the configuration and the tokenizer from its
/// metadata.
fn gguf(data: &[u8]) {
    let path = place().join("model.gguf");
    std::fs::write(&path, data).expect("a small file");
    let Ok(model) = Gguf::open(&path) else { return };
    for tensor in &model.tensors {
        let mut ends = [0; 16];
        let n = tensor.nbytes.min(ends.len() as u64);
        model.read(tensor, 0, &mut ends[..n as usize]).expect("a range that was accepted");
        model.read(tensor, tensor.nbytes - n, &mut ends[..n as usize]).expect("a range that was accepted");
    }
    let _ = config_json(&model);
    let _ = tokenizer_files(&model.metadata, 1 << 20);
}

/// Largest number of bytes of the weights of a quantized checkpoint that is made from an input.
const WEIGHTS: u64 = 1 << 16;

/// Makes a quantized checkpoint from its configuration and a header of safetensors, and decodes both ends of each
/// matrix. Bytes of tensors are those of `data`, repeated, or small numbers where an object has none.
fn published(data: &[u8]) {
    let Ok(serde_json::Value::Object(mut map)) = iec::strict_json::parse(data) else { return };
    let (Some(serde_json::Value::Object(config)), Some(serde_json::Value::Object(tensors))) =
        (map.remove("config"), map.remove("tensors"))
    else {
        return;
    };
    let (mut header, mut payload) = (serde_json::Map::new(), Vec::new());
    for (name, tensor) in tensors {
        if name == "__metadata__" {
            header.insert(name, tensor);
            continue;
        }
        let size = tensor["size"].as_u64().unwrap_or(1).clamp(1, 8);
        let dimensions = tensor["shape"].as_array().map_or(&[][..], Vec::as_slice);
        let all = dimensions.iter().try_fold(size, |n, d| n.checked_mul(d.as_u64()?));
        let Some(nbytes) = all.filter(|n| *n <= WEIGHTS - payload.len() as u64) else { return };
        let start = payload.len();
        let text = tensor["data"].as_str().unwrap_or("\u{1}\u{0}\u{0}\u{0}").as_bytes();
        payload.extend(text.iter().chain([0].iter().filter(|_| text.is_empty())).cycle().take(nbytes as usize));
        let offsets = [start, payload.len()];
        let entry = serde_json::json!({"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": offsets});
        header.insert(name, entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &payload].concat();
    let dir = place().join("published");
    std::fs::create_dir_all(&dir).expect("a temporary directory");
    std::fs::write(dir.join("model.safetensors"), file).expect("a small file");
    let beside = dir.join("hf_quant_config.json");
    match map.remove("beside") {
        Some(beside_config) => std::fs::write(beside, beside_config.to_string()).expect("a small file"),
        None => drop(std::fs::remove_file(beside)),
    }
    decode_published(&dir, &config);
}

/// Decodes both ends of each matrix of a quantized checkpoint, and reads its codes if a pack can hold them.
fn decode_published(dir: &Path, config: &serde_json::Map<String, serde_json::Value>) {
    let Ok(layout) = Layout::find(dir) else { return };
    let Ok(shards) = Shards::open_layout(&layout) else { return };
    let path = dir.join("config.json");
    let source = Source { config, path: &path, layout: &layout };
    let Ok(published) = Published::open(&source, &shards, &|_| false) else { return };
    for coded in published.names().filter_map(|name| published.get(name)) {
        let (all, cols) = (coded.shape.iter().product::<usize>(), *coded.shape.last().expect("a matrix"));
        let mut row = vec![0.0; cols];
        for last in [0, all / cols - 1] {
            let (matrix, rows) = coded.place(last, 1);
            let _ = coded.read_rows(&shards, matrix, rows.clone(), &mut row);
            if let Ok(Ok(native)) = coded.native(&shards) {
                let _ = coded.read_codes(&native, &shards, (matrix, rows), |_, _| {});
            }
        }
    }
}

fn manifest(data: &[u8]) {
    if let Ok(manifest) = Manifest::parse(data, &place()) {
        let _ = manifest.decide("model.layers.0.mlp.down_proj.weight", &[64, 64]);
        let again = manifest.document().to_json();
        drop(manifest);
        Manifest::parse(&again, &place()).expect("what is written can be read");
    }
}

/// Largest number of layers, and of experts, for which tensor names are generated. In the program, a checkpoint must
/// contain that many tensors before their names are generated; a bare config has no such bound.
const NAMED: usize = 64;

fn config(data: &[u8]) {
    let Ok(serde_json::Value::Object(map)) = iec::strict_json::parse(data) else { return };
    let fields = Fields::new(&map);
    let Ok(arch) = Arch::of(&fields) else { return };
    let Ok(model) = arch.model_config(&fields, Some(&map)) else { return };
    model.validate().expect("a family's description is valid");
    let experts = match model.mlp {
        iec::model_config::Mlp::Moe { experts, .. } => experts,
        _ => 0,
    };
    if model.n_layers <= NAMED && experts <= NAMED {
        for tensor in expected_tensors(&model) {
            let _ = arch.views(&model, &tensor);
        }
    }
}

/// Models for which adapters are read: small, dense, with experts, with latent attention, and a wrapper with further
/// inputs of its layers.
const MODELS: [&str; 4] = [
    r#"{"architectures":["LlamaForCausalLM"],"hidden_size":8,"intermediate_size":16,"num_attention_heads":2,
        "num_key_value_heads":1,"num_hidden_layers":2,"vocab_size":16}"#,
    r#"{"architectures":["MixtralForCausalLM"],"hidden_size":8,"intermediate_size":16,"num_attention_heads":2,
        "num_key_value_heads":1,"num_hidden_layers":1,"vocab_size":16,"num_local_experts":2}"#,
    r#"{"architectures":["DeepseekV2ForCausalLM"],"hidden_size":8,"intermediate_size":16,"num_attention_heads":2,
        "num_hidden_layers":2,"vocab_size":16,"kv_lora_rank":4,"q_lora_rank":null,"qk_nope_head_dim":4,
        "qk_rope_head_dim":2,"v_head_dim":6,"n_routed_experts":2,"n_shared_experts":1,"num_experts_per_tok":1,
        "moe_intermediate_size":4,"first_k_dense_replace":1,"norm_topk_prob":false,"topk_method":"greedy",
        "scoring_func":"softmax"}"#,
    r#"{"architectures":["Gemma4ForConditionalGeneration"],"model_type":"gemma4","vision_config":{},"text_config":{
        "model_type":"gemma4_text","hidden_size":8,"intermediate_size":16,"num_attention_heads":2,
        "num_key_value_heads":1,"num_hidden_layers":2,"vocab_size":16,"head_dim":4,"global_head_dim":8,
        "hidden_activation":"gelu_pytorch_tanh","hidden_size_per_layer_input":4,"vocab_size_per_layer_input":16,
        "layer_types":["sliding_attention","full_attention"],"sliding_window":4}}"#,
];

/// Configurations with which the tensors of adapters are read.
const ADAPTER_CONFIGS: [&str; 2] = [
    r#"{"peft_type":"LORA","r":2,"lora_alpha":4,"lora_bias":true,"target_parameters":["gate_up_proj","down_proj"]}"#,
    r#"{"peft_type":"LORA","r":2,"lora_alpha":4,"use_dora":true,"use_rslora":true}"#,
];

fn adapter(data: &[u8]) {
    let dir = place();
    std::fs::write(dir.join(adapter::FILE), data).expect("a small file");
    for config in ADAPTER_CONFIGS {
        std::fs::write(dir.join(adapter::CONFIG), config).expect("a small file");
        let _ = adapter::describe(&dir);
        for model in MODELS {
            let Ok(serde_json::Value::Object(map)) = serde_json::from_str(model) else { unreachable!("valid JSON") };
            let fields = Fields::new(&map);
            let arch = Arch::of(&fields).expect("a family that is known");
            let model = arch.model_config(&fields, None).expect("a valid description");
            let Ok(adapter) = adapter::read(&dir, &model) else { continue };
            let mut row = vec![1.0; 8];
            for change in adapter.changes.values().flatten() {
                if let Some(low_rank) =
                    change.low_rank.as_ref().filter(|low_rank| low_rank.a.len() / low_rank.rank == 8)
                {
                    assert!(low_rank.b.len().is_multiple_of(low_rank.rank));
                    change.merge_row(0, 1.0, &mut row);
                }
            }
        }
    }
}

/// Reads the input as the description of a packed adapter for the model that it names, with a correct digest.
fn adapter_pack(data: &[u8]) {
    let Ok(description) = parse_description(data) else { return };
    let Some(model) = description.model.clone().filter(|m| m.n_layers <= NAMED && m.validate().is_ok()) else { return };
    if matches!(model.mlp, iec::model_config::Mlp::Moe { experts, .. } if experts > NAMED) {
        return;
    }
    let dir = place().join("packed");
    std::fs::create_dir_all(&dir).expect("a directory");
    std::fs::write(dir.join("model.ie.bin"), vec![7; BINARY]).expect("a small file");
    std::fs::write(dir.join("model.ie.json"), description.to_text()).expect("a small file");
    let _ = adapter::describe(&dir);
    let Ok(adapter) = adapter::read(&dir, &model) else { return };
    for low_rank in adapter.changes.values().flatten().filter_map(|change| change.low_rank.as_ref()) {
        assert!(low_rank.a.len().is_multiple_of(low_rank.rank) && low_rank.b.len().is_multiple_of(low_rank.rank));
    }
}

fn adapter_config(data: &[u8]) {
    let dir = place();
    std::fs::write(dir.join(adapter::FILE), []).expect("a small file");
    std::fs::write(dir.join(adapter::CONFIG), data).expect("a small file");
    let _ = adapter::describe(&dir);
}

/// Number of bytes that are encoded and of tokens that are decoded: enough for the allowance to be exceeded if steps
/// make texts longer without limit.
const LONG: usize = 2048;

fn tokenizer(data: &[u8]) {
    let Ok(tokenizer) = Tokenizer::parse(data, Path::new("tokenizer.json")) else { return };
    // Many equal letters or spaces are the worst texts for patterns, the file's own words for its replacements.
    let own = String::from_utf8_lossy(&data[..data.len().min(LONG)]).into_owned();
    for text in ["Hello, wörld! 123\n\u{1F600}<s>", &"a".repeat(LONG), &" ".repeat(LONG), &own] {
        if let Ok(ids) = tokenizer.encode(text) {
            let _ = tokenizer.decode(&ids, true);
        }
    }
    let _ = tokenizer.decode(&[0, 1, 2, u32::MAX], false);
    let _ = tokenizer.decode(&(0..LONG as u32).collect::<Vec<_>>(), false);
}

fn first_line(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = data.iter().position(|byte| *byte == b'\n')?;
    Some((&data[..at], &data[at + 1..]))
}

/// A model of SentencePiece to which settings belong.
const MODEL: &[u8] = include_bytes!("../corpus/tokenizer_files/bpe");

/// Settings with which the files of tokenizers are read, and types of the model.
const SETTINGS: [(&str, &str); 4] = [
    (r#"{"tokenizer_class":"LlamaTokenizer","added_tokens_decoder":{"3":{"content":"<x>"}}}"#, "llama"),
    (r#"{"legacy":false,"add_eos_token":true}"#, "gemma2"),
    (r#"{"tokenizer_class":"T5Tokenizer","extra_ids":2,"additional_special_tokens":["<s>","<pad>"]}"#, "kimi_k2"),
    (r#"{"added_tokens_decoder":{"300":{"content":"a"}},"pad_token":"<pad>"}"#, "qwen2"),
];

/// Makes a tokenizer.json from files of a checkpoint. The first line of the input is the name of a file, whose content
/// follows; after the first line of a vocab.json follows the content of merges.txt. Settings are those of a small
/// model. Every tokenizer that is made is used.
fn made_tokenizer(data: &[u8]) {
    use iec::convert::tokenizer_files::{SourceFile, make, names};
    let Some((name, content)) = first_line(data) else { return };
    let Some(name) = names().find(|known| known.as_bytes() == name) else { return };
    let file = |name: &'static str, bytes: &[u8]| SourceFile { name, path: name.into(), bytes: bytes.to_vec() };
    for (settings, model_type) in SETTINGS {
        let mut files = vec![file(name, content)];
        match name {
            "tokenizer_config.json" | "added_tokens.json" | "special_tokens_map.json" => {
                files.extend(first_line(MODEL).map(|(_, model)| file("tokenizer.model", model)));
            }
            _ => files.push(file("tokenizer_config.json", settings.as_bytes())),
        }
        if let Some((vocab, merges)) = first_line(content).filter(|_| name == "vocab.json") {
            files.splice(..1, [file(name, vocab), file("merges.txt", merges)]);
        }
        if let Ok(Some(made)) = make(files, &[model_type]) {
            tokenizer(&made.json);
        }
    }
}

fn template(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else { return };
    let talk = [Message::new("user", "Hi"), Message::new("assistant", "Yes?"), Message::new("user", "é")];
    let _ = ChatTemplate::from_source(source).render_within(&talk, &RenderOptions::default(), 1 << 20, STEPS);
}

/// All bytes and some longer tokens.
static VOCABULARY: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| {
    Arc::new(Vocabulary::new(Spelling { bytes: token_bytes(), leading: Leading::Kept }).expect("a small vocabulary"))
});

fn token_bytes() -> Vec<Vec<u8>> {
    let words = ["{\"", "\":", "\", \"", "true", "null", "12", " the", "aaaa", "\n  ", "}]"];
    (0..=u8::MAX).map(|byte| vec![byte]).chain(words.map(|word| word.as_bytes().to_vec())).collect()
}

/// Number of tokens that follow the masks of a constraint.
const TOKENS: usize = 24;

/// Compiles `{"grammar": …}`, `{"regex": …}`, `{"choice": […]}`, or any other input as a JSON schema, and follows its
/// masks. JSON that is complete must be JSON.
fn constraint(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let input: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
    let texts = |key: &str| {
        input[key].as_array()?.iter().map(|text| text.as_str().map(String::from)).collect::<Option<Vec<_>>>()
    };
    let string = |key: &str| input[key].as_str().map(String::from);
    let source = string("grammar").map(ConstraintSource::Grammar).or(string("regex").map(ConstraintSource::Regex));
    let source = source.or(texts("choice").map(ConstraintSource::Choice));
    let source = source.unwrap_or(ConstraintSource::JsonSchema(text.into()));
    let Ok(constraint) = Constraint::compile_here(&source, &VOCABULARY) else { return };
    let (mut state, tokens, mut generated) = (constraint.start(), token_bytes(), Vec::new());
    for step in 0..TOKENS {
        let Ok(mask) = state.mask() else { return };
        let first = usize::from(data[step % data.len()]);
        let mut ids = (0..tokens.len()).map(|i| (first + i) % tokens.len());
        let Some(id) = ids.find(|id| mask.allows(*id as u32)) else { break };
        state.accept(id as u32).expect("a token that is allowed");
        generated.extend_from_slice(&tokens[id]);
        if state.is_complete() {
            break;
        }
    }
    if state.is_complete() && matches!(source, ConstraintSource::JsonSchema(_)) {
        serde_json::from_slice::<serde_json::Value>(&generated).expect("a complete answer is JSON");
    }
}

/// Reads a page of the prefix cache. The first byte is the length of the expected header, which follows, and then the
/// file; a file that belongs to the header is accepted until one of its bytes is another.
fn prefix_page(data: &[u8]) {
    use iec::runtime::page_content;
    let Some((length, rest)) = data.split_first() else { return };
    let Some((header, file)) = rest.split_at_checked(usize::from(*length)) else { return };
    assert!(page_content(file, header).is_none_or(|payload| file.len() > payload.len()));
    let mut valid = [header, file].concat();
    valid.extend(Sha256::digest(&valid));
    assert_eq!(page_content(&valid, header), Some(file));
    let at = data.iter().map(|byte| usize::from(*byte)).sum::<usize>() % valid.len();
    valid[at] ^= 1;
    assert_eq!(page_content(&valid, header), None, "byte {at} was changed");
}

/// Parses a file of API keys, uses each key, and gives a scheduler those of the file.
#[cfg(feature = "serve")]
fn api_keys(data: &[u8]) {
    use iec::host::KeyChange;
    use iec::sched::{NoCache, Options, Scheduler};
    use iec::serve::keys::{KeyIds, Keys};
    let Ok(keys) = Keys::parse(data) else { return };
    assert_eq!(keys.find(&String::from_utf8_lossy(data)), None, "the file holds digests, not keys");
    let mut scheduler = Scheduler::new(Options::with_pages(8, 512), NoCache);
    let changes = KeyIds::default().update(&keys);
    assert_eq!(changes.len(), keys.list().len());
    for change in changes {
        if let KeyChange::Add(limits) = change {
            let key = scheduler.add_key(limits);
            let request =
                iec::sched::Request { key, priority: 0, prompt: 1, max_tokens: 1, deadline: None, further: false };
            let _ = scheduler.arrive(0, request);
        }
    }
    scheduler.check().expect("limits of a file are valid");
}

/// Parses the configuration of a server, and prints the settings that it results in.
#[cfg(feature = "serve")]
fn serve_config(data: &[u8]) {
    use iec::serve::config::Given;
    use iec::serve::origin::HostPolicy;
    let Ok(given) = Given::parse(data) else { return };
    let Ok(settings) = Given::merge(Given::default(), given) else { return };
    let _ = settings.to_json().to_string();
    let _ = settings.check_host(false);
    assert!(HostPolicy::of(&settings, false).allows("localhost:8080"));
}

/// Parses a file of usage counters; accepted ones are written and read again.
#[cfg(feature = "serve")]
fn key_usage(data: &[u8]) {
    use iec::serve::usage::Saved;
    let Ok(saved) = Saved::parse(data) else { return };
    let again = Saved::parse(&saved.usage.to_bytes(saved.at)).expect("what is written can be read");
    assert_eq!(again, saved);
}

/// Reads the body of a request to continue texts.
#[cfg(feature = "serve")]
fn api_completions(data: &[u8]) {
    body(data, iec::api::job::completions);
}

/// Reads the body of a request to continue a conversation.
#[cfg(feature = "serve")]
fn api_chat(data: &[u8]) {
    body(data, iec::api::job::chat);
}

/// Reads the body of a request in the form of OpenAI's Responses API.
#[cfg(feature = "serve")]
fn api_responses(data: &[u8]) {
    body(data, iec::api::responses::read);
}

/// Reads the body of a request in the form of Anthropic's Messages API.
#[cfg(feature = "serve")]
fn api_messages(data: &[u8]) {
    body(data, iec::api::anthropic::read);
}

/// Reads the body of a request in the form of ollama's API, as one of each kind.
#[cfg(feature = "serve")]
fn api_ollama(data: &[u8]) {
    body(data, iec::api::ollama::chat);
    body(data, iec::api::ollama::generate);
}

/// Reads the body of a request for the middle of a text.
#[cfg(feature = "serve")]
fn api_infill(data: &[u8]) {
    body(data, iec::api::infill::read);
}

/// Turns a grammar of llama.cpp into a regular expression, which has the syntax of one.
#[cfg(feature = "serve")]
fn gbnf(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(expression) = iec::api::gbnf::to_regex(text) else { return };
    regex_syntax::ast::parse::ParserBuilder::new().nest_limit(1000).build().parse(&expression).expect("an expression");
}

/// Reads the body of a request; what is left of it is known, or refused by name.
#[cfg(feature = "serve")]
fn body(data: &[u8], read: iec::api::job::ReadJob) {
    use iec::api::body::Body;
    use iec::api::settings::Limits;
    let limits = Limits { max_n: 16, max_logprobs: 20, strict_fields: false, unloads: true };
    let Ok(mut body) = Body::parse(data) else { return };
    let Ok(job) = read(&mut body, &limits) else { return };
    assert!(job.wanted.texts >= 1 && job.wanted.texts <= limits.max_n);
    let _ = body.rest(false);
}

/// Control tokens of the formats of calls.
const CONTROL: [&str; 12] = [
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<think>",
];

/// Tokenizers with the control tokens of harmony, and with those of the other formats.
static TOKENIZERS: LazyLock<[Tokenizer; 2]> = LazyLock::new(|| [&CONTROL[..7], &CONTROL[7..]].map(control_tokenizer));

fn control_tokenizer(special: &[&str]) -> Tokenizer {
    let token = |(id, content): (usize, &&str)| {
        serde_json::json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false})
    };
    let added: Vec<_> = (1..).zip(special).map(token).collect();
    let model = serde_json::json!({"type": "BPE", "vocab": {" ": 0}, "merges": []});
    let file = serde_json::json!({"version": "1.0", "added_tokens": added, "model": model});
    Tokenizer::parse(file.to_string().as_bytes(), Path::new("tokenizer.json")).expect("a small tokenizer")
}

/// Divides an output into reasoning, content and calls: a JSON array of the name of a format and the texts of tokens.
/// Control tokens have no text. The result does not depend on the lengths of the other tokens.
fn tool_output(data: &[u8]) {
    let Ok(words) = serde_json::from_slice::<Vec<String>>(data) else { return };
    let Some((name, words)) = words.split_first() else { return };
    let format = Format::all().find(|format| format.name() == name);
    let tokenizer = &TOKENIZERS[usize::from(name != "harmony")];
    let divide = |by_letter: bool| {
        let parameters = serde_json::json!({"type": "object", "properties": {
            "s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}, "l": {"type": "array"},
            "o": {"type": "object"}, "e": {"enum": ["red", 1, null]}, "m": {"type": ["string", "null"]},
        }});
        let tools = [("f", Some(parameters)), ("g", None)].map(|(name, parameters)| Tool {
            name: name.into(),
            description: None,
            parameters,
            strict: None,
        });
        let mut parser =
            OutputParser::new(&OutputStyle::without_template(tokenizer).with(format), &tools, tokenizer, &[], 1);
        let mut events = Vec::new();
        for word in words {
            match tokenizer.id(word).filter(|id| *id > 0) {
                Some(id) => parser.push(id, "", &mut events),
                None if by_letter => {
                    let mut letter = [0; 4];
                    word.chars().for_each(|c| parser.push(u32::MAX, c.encode_utf8(&mut letter), &mut events));
                }
                None => parser.push(u32::MAX, word, &mut events),
            }
        }
        parser.finish(true, &mut events);
        let begun = events.iter().filter(|event| matches!(event, OutputEvent::CallBegin { .. })).count();
        assert_eq!(begun, parser.calls());
        events
    };
    assert_eq!(divide(false), divide(true), "the pieces of an output change its parts");
}
