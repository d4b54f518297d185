//! Tests the CUDA runtime without a GPU: a simulated driver runs its kernels, compiled for the host. Everything
//! except the compiler of the real driver is the same code that runs with a GPU.

use crate::common::{all_logits, iec, packed_as};
use crate::golden::{Case, compare, fp32, noise};
use iec::model_config::Mlp;
use iec::runtime::device::{Devices, Offload};
use iec::runtime::{Engine, EngineOptions, Feed, KvType, Precision, Want};
use serde_json::Value;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// Directory of the simulated driver, which is built once.
static DRIVER: LazyLock<PathBuf> = LazyLock::new(|| {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("simulated-cuda");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/simulated-cuda.sh");
    let done = Command::new("bash").arg(script).arg(&out).output().expect("bash runs");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "a C++ compiler builds the simulated driver: {said}");
    out
});

/// Loads the simulated driver into this process, so that later attempts to open libcuda find it.
#[allow(unsafe_code)]
fn load() {
    static LOADED: LazyLock<()> = LazyLock::new(|| {
        let path = CString::new(DRIVER.join("libcuda.so.1").to_str().unwrap()).unwrap();
        // SAFETY: this library belongs to this project; its initializers only set up its own tables.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!handle.is_null(), "the simulated driver loads");
    });
    LazyLock::force(&LOADED);
}

/// Returns the same options with execution on the simulated GPU.
pub fn on_gpu(options: EngineOptions) -> EngineOptions {
    load();
    EngineOptions { offload: Offload { devices: Devices::Cuda(1), layers: None }, ..options }
}

#[test]
fn fp32_gives_the_ids_and_logits_of_hugging_face() {
    let mut failures = Vec::new();
    for case in Case::all() {
        let mut engine = case.engine(on_gpu(fp32()));
        assert_eq!(engine.device(), "cuda:0");
        for (i, prompt) in case.prompts().iter().enumerate().take(3) {
            let found = compare(&mut engine, prompt, 0.0);
            if found.logit > 1e-3 || !found.wrong_ids.is_empty() || found.compared == 0 {
                let (logit, ids) = (found.logit, found.wrong_ids);
                failures.push(format!("{} prompt {i}: logits off by {logit}, ids differ at {ids:?}", case.name));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn half_precisions_give_the_same_ids_wherever_the_choice_is_clearer_than_rounding() {
    let mut failures = Vec::new();
    for case in Case::all() {
        for precision in [Precision::Bf16, Precision::Fp16] {
            let mut engine = case.engine(on_gpu(EngineOptions { precision: Some(precision), ..fp32() }));
            // Where two experts are almost equally likely, rounding exchanges them, which changes logits by more.
            let (noise, limit) = match engine.config().mlp {
                Mlp::Moe { .. } => (noise(Precision::Bf16), f32::INFINITY),
                Mlp::Dense { .. } => (noise(precision), noise(precision)),
            };
            for (i, prompt) in case.prompts().iter().enumerate().take(1) {
                let found = compare(&mut engine, prompt, noise);
                if found.logit > limit || !found.wrong_ids.is_empty() || found.compared == 0 {
                    let what = format!("logits off by {}, ids differ at {:?}", found.logit, found.wrong_ids);
                    failures.push(format!("{} {precision} prompt {i}: {what}", case.name));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Returns the largest difference between the logits of two engines after any token of a text.
fn distance(a: &mut Engine, b: &mut Engine, text: &[u32]) -> f32 {
    let (a, b) = (all_logits(a, text), all_logits(b, text));
    assert!(a.iter().chain(&b).all(|logit| logit.is_finite()));
    a.iter().zip(&b).fold(0f32, |m, (a, b)| m.max((a - b).abs()))
}

fn text_of(case: &Case, length: usize) -> Vec<u32> {
    let ids = |prompt: &Value| -> Vec<u32> {
        prompt["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    case.prompts().iter().flat_map(ids).cycle().take(length).collect()
}

#[test]
fn quantized_weights_give_the_logits_of_the_cpu() {
    let schemes = [
        ("q4_0", r#""scheme":"q4_0""#, Precision::Int4w),
        ("int4-128", r#""scheme":"int4","group_size":128"#, Precision::Int4w),
        ("int4-affine", r#""scheme":"int4","group_size":32,"symmetric":false"#, Precision::Int4w),
        ("nl4", r#""scheme":"nl4""#, Precision::Int4w),
        ("int5-f32", r#""scheme":"int5","group_size":64,"scale_dtype":"f32""#, Precision::Int8w),
        ("int6", r#""scheme":"int6""#, Precision::Int8w),
        ("int8", r#""scheme":"int8","group_size":"row""#, Precision::Int8w),
    ];
    let mut failures = Vec::new();
    for name in ["llama-gqa", "mixtral", "qwen2"] {
        let case = Case::fixture(name);
        let text = text_of(&case, 70);
        for (scheme, fields, precision) in schemes {
            let rules = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cuda-{name}-{scheme}.json"));
            let rule =
                format!(r#"{{"version":1,"rules":[{{"include":"layers.*proj(.weight)?$",{fields},"method":"rtn"}}]}}"#);
            std::fs::write(&rules, rule).unwrap();
            let pack =
                packed_as(&format!("cuda-{name}-{scheme}"), &case.hf_dir, &["--q4-map", rules.to_str().unwrap()]);
            let options = EngineOptions { precision: Some(precision), kv: Some(KvType::F32), ..fp32() };
            let mut cpu = crate::golden::open(&pack, options);
            let mut gpu = crate::golden::open(&pack, on_gpu(options));
            let apart = distance(&mut cpu, &mut gpu, &text);
            if !(apart > 0.0 && apart < 0.02) {
                failures.push(format!("{name} {scheme}: logits {apart} apart"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn an_int8_kv_cache_gives_the_logits_of_the_cpu() {
    // Heads of half a block and of one; windows. In the last two, values are the keys, or layers read those of others;
    // their scores are not scaled, so rounding changes them more.
    let mut failures = Vec::new();
    for (name, limit) in [("llama-gqa", 0.1), ("qwen3", 0.1), ("mistral-swa", 0.1), ("gemma4", 1.0), ("gemma4-e", 1.0)]
    {
        let case = Case::fixture(name);
        let text = text_of(&case, 200);
        let options = |kv| EngineOptions { kv: Some(kv), ..fp32() };
        let mut exact = case.engine(options(KvType::F32));
        let mut cpu = case.engine(options(KvType::Int8));
        let mut gpu = case.engine(on_gpu(options(KvType::Int8)));
        let rounded = distance(&mut exact, &mut cpu, &text);
        let apart = distance(&mut cpu, &mut gpu, &text);
        // The CPU rounds queries and probabilities to bf16, the GPU computes them in f32.
        if apart >= 2.0 * rounded || apart >= limit {
            failures.push(format!("{name}: logits {apart} apart, rounded by {rounded}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn company_chunks_clones_and_taking_back_change_no_more_than_rounding() {
    let case = Case::fixture("gptoss-trained");
    let text = text_of(&case, 300);
    let mut alone = case.engine(on_gpu(fp32()));
    let mut logits = Vec::new();
    let expected = all_logits(&mut alone, &text);
    let vocab = alone.config().vocab;
    let last_of = |position: usize| &expected[(position - 1) * vocab..position * vocab];
    let close = |found: &[f32], position: usize, what: &str| {
        let apart = found.iter().zip(last_of(position)).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(apart < 2e-3, "{what}: {apart} apart");
    };
    for prefill_chunk in [1, 7, 64] {
        let mut engine = case.engine(on_gpu(EngineOptions { prefill_chunk, ..fp32() }));
        let mut whole = engine.new_sequence().unwrap();
        engine
            .forward(&mut [Feed { sequence: &mut whole, tokens: &text[..140], want: Want::Last }], &mut logits)
            .unwrap();
        close(&logits, 140, &format!("chunks of {prefill_chunk}"));
        // A clone shares pages of the KV cache; both sequences continue, and the clone is truncated.
        let mut clone = whole.clone();
        let [a, b] = [&text[140..141], &text[140..150]];
        let mut feeds = [
            Feed { sequence: &mut whole, tokens: a, want: Want::Last },
            Feed { sequence: &mut clone, tokens: b, want: Want::Last },
        ];
        engine.forward(&mut feeds, &mut logits).unwrap();
        close(&logits[..vocab], 141, "one token beside a clone");
        close(&logits[vocab..], 150, "a clone's ten tokens");
        clone.truncate(120);
        let mut feeds = [
            Feed { sequence: &mut clone, tokens: &text[120..260], want: Want::Last },
            Feed { sequence: &mut whole, tokens: &text[141..142], want: Want::Last },
        ];
        engine.forward(&mut feeds, &mut logits).unwrap();
        close(&logits[..vocab], 260, "after taking back");
        close(&logits[vocab..], 142, "a text whose clone went back");
    }
}

/// Returns true on a machine with a real NVIDIA driver, where behaviour without a driver cannot be tested.
pub fn has_driver() -> bool {
    let done = iec().arg("devices").assert().success();
    !String::from_utf8_lossy(&done.get_output().stdout).contains("no NVIDIA driver")
}

/// Returns the directory of the simulated driver.
#[cfg(feature = "serve")]
pub fn driver() -> &'static str {
    DRIVER.to_str().unwrap()
}

/// Returns a command that runs `iec` with the simulated driver.
pub fn simulated() -> assert_cmd::Command {
    let mut command = iec();
    command.env("LD_LIBRARY_PATH", DRIVER.as_os_str());
    command
}

fn line_of(command: &mut assert_cmd::Command, pack: &Path, options: &[&str]) -> Value {
    let common = ["run", "--json", "--precision", "fp32", "--prompt", "Once upon a time", "--max-new", "12"];
    let done = command.args(common).arg("--model-dir").arg(pack).args(options).assert().success();
    serde_json::from_slice(&done.get_output().stdout).unwrap()
}

fn ids_of(command: &mut assert_cmd::Command, pack: &Path, options: &[&str]) -> Value {
    line_of(command, pack, options)["tokens"].clone()
}

#[test]
fn tokens_chosen_on_the_gpu_are_those_that_all_logits_would_give() {
    let pack = packed_as("stories260k", &Case::fixture("stories260k").hf_dir, &[]);
    for sampling in [
        &["--speculate", "off"][..],
        &["--temperature", "0.9", "--top-k", "40", "--seed", "3"],
        &["--temperature", "1.3", "--top-k", "2", "--top-p", "0.9", "--seed", "4"],
        &["--temperature", "0.7", "--seed", "5"],
        &["--repeat-penalty", "1.3"],
    ] {
        let of = |device: &str| ids_of(&mut simulated(), &pack, &[sampling, &["--device", device]].concat());
        assert_eq!(of("cuda"), of("cpu"), "{sampling:?}");
    }
}

#[test]
fn reports_tell_which_gpu_computed_what() {
    let pack = packed_as("stories260k", &Case::fixture("stories260k").hf_dir, &[]);
    let line = line_of(&mut simulated(), &pack, &["--device", "cuda", "--gpu-layers", "2"]);
    assert_eq!(line["device"], "cpu+cuda:0");
    let (gpu, layers) = (&line["gpu"], 5);
    assert_eq!(gpu["devices"][0]["layers"], serde_json::json!([layers - 2, layers]));
    assert!(gpu["kernel_time_s"].as_f64().unwrap() > 0.0);
    assert!(gpu["devices"][0]["memory_taken_bytes"].as_u64().unwrap() > 100_000);
    let line = line_of(&mut simulated(), &pack, &["--device", "cpu"]);
    assert!(line["device"] == "cpu" && line.get("gpu").is_none());
}

#[test]
fn layers_split_between_cpu_and_gpus_give_the_same_text() {
    let case = Case::fixture("stories260k");
    let pack = packed_as("stories260k", &case.hf_dir, &[]);
    let expected = ids_of(&mut simulated(), &pack, &["--device", "cpu"]);
    assert!(expected.is_array());
    for options in [
        &["--device", "cuda"][..],
        &["--device", "cuda", "--gpu-layers", "2"],
        &["--device", "cuda:0,1"],
        &["--device", "cuda:1,2", "--gpu-layers", "3"],
        &["--device", "auto"],
    ] {
        let found = ids_of(simulated().env("IEC_SIM_DEVICES", "3"), &pack, options);
        assert_eq!(found, expected, "{options:?}");
    }
    let old = ids_of(simulated().env("IEC_SIM_CAPABILITY", "7.5"), &pack, &["--device", "cuda"]);
    assert_eq!(old, expected, "without tensor cores");
}

#[test]
fn a_model_whose_layers_belong_together_is_on_one_gpu_or_refused_by_the_name_of_its_property() {
    let pack = packed_as("gemma4-e", &Case::fixture("gemma4-e").hf_dir, &[]);
    let run = |options: &[&str]| {
        let mut command = simulated();
        command.env("IEC_SIM_DEVICES", "2").args(["run", "--prompt", "Once", "--max-new", "2", "--model-dir"]);
        command.arg(&pack).args(options).assert()
    };
    let done = run(&["--device", "cuda", "--gpu-layers", "2"]).code(2);
    let text = String::from_utf8_lossy(&done.get_output().stderr).into_owned();
    assert!(text.contains("`per_layer_input` takes all 5 layers to one device"), "{text}");
    let done = run(&["--device", "cuda:0,1", "--json"]).success();
    let line: Value = serde_json::from_slice(&done.get_output().stdout).unwrap();
    assert_eq!(line["device"], "cuda:1");
    let done = run(&["--device", "auto", "--gpu-layers", "2"]).success();
    let text = String::from_utf8_lossy(&done.get_output().stderr).into_owned();
    assert!(text.contains("the CPU computes") && text.contains("`per_layer_input`"), "{text}");
}

#[test]
fn experts_that_read_narrower_vectors_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let [file, hf, pack] = ["config.json", "hf", "pack"].map(|name| dir.path().join(name));
    let text = std::fs::read(Case::fixture("nemotronh").hf_dir.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    config["moe_latent_size"] = 24.into();
    std::fs::write(&file, config.to_string()).unwrap();
    iec().args(["synth", "--config"]).arg(&file).arg("--out-dir").arg(&hf).assert().success();
    iec().args(["pack", "--hf-dir"]).arg(&hf).arg("--out-dir").arg(&pack).assert().success();
    let run = |device: &str| {
        let mut command = simulated();
        command.args(["bench", "--prompt-len", "2", "--max-new", "2", "--device", device, "--model-dir"]);
        command.arg(&pack).assert()
    };
    let done = run("cuda").code(5);
    let text = String::from_utf8_lossy(&done.get_output().stderr).into_owned();
    assert!(text.contains("`mlp.latent`") && text.contains("--device cpu"), "{text}");
    run("cpu").success();
}

#[test]
fn further_families_are_split_between_cpu_and_gpu_and_run_without_tensor_cores() {
    for name in ["gemma4", "cohere2", "deepseek3"] {
        let pack = packed_as(name, &Case::fixture(name).hf_dir, &[]);
        let expected = ids_of(&mut simulated(), &pack, &["--device", "cpu"]);
        for (variable, value, options) in [
            ("IEC_SIM_DEVICES", "2", &["--device", "cuda:0,1", "--gpu-layers", "2"][..]),
            ("IEC_SIM_CAPABILITY", "7.5", &["--device", "cuda"]),
        ] {
            let found = ids_of(simulated().env(variable, value), &pack, options);
            assert_eq!(found, expected, "{name} {options:?}");
        }
    }
}

#[test]
fn everything_that_was_taken_from_the_driver_is_given_back() {
    let pack = packed_as("gptoss-mxfp4", &Case::fixture("gptoss-mxfp4").hf_dir, &[]);
    let mut command = simulated();
    command.env("IEC_SIM_STRICT", "2").env("IEC_SIM_DEVICES", "2");
    let args = [
        "bench",
        "--device",
        "cuda:0,1",
        "--batch",
        "2",
        "--prompt-len",
        "20",
        "--max-new",
        "4",
        "--runs",
        "1",
        "--model-dir",
    ];
    command.args(args).arg(&pack).assert().success();
}

#[test]
fn a_machine_that_cannot_compute_on_a_gpu_says_why() {
    let pack = packed_as("stories260k", &Case::fixture("stories260k").hf_dir, &[]);
    let run = |command: &mut assert_cmd::Command, device: &str| {
        let args = ["run", "--prompt", "Once", "--max-new", "2", "--device", device, "--model-dir"];
        command.args(args).arg(&pack).assert()
    };
    let cases = [
        ("IEC_SIM_INIT", "100", "finds no device"),
        ("IEC_SIM_INIT", "34", "stub of a CUDA toolkit"),
        ("IEC_SIM_VERSION", "11080", "of CUDA 11.8"),
        ("IEC_SIM_CAPABILITY", "6.1", "compute capability 6.1"),
    ];
    for (variable, value, said) in cases {
        let done = run(simulated().env(variable, value), "cuda").code(5);
        let text = String::from_utf8_lossy(&done.get_output().stderr).into_owned();
        assert!(text.contains(said) && text.contains("--device cpu"), "{variable}={value}: {text}");
        let done = run(simulated().env(variable, value), "auto").success();
        let text = String::from_utf8_lossy(&done.get_output().stderr).into_owned();
        assert!(text.contains("the CPU computes") && text.contains(said), "{variable}={value}: {text}");
    }
    run(&mut simulated(), "cuda:3").code(5);
    if !has_driver() {
        let done = run(&mut iec(), "cuda").code(5);
        assert!(String::from_utf8_lossy(&done.get_output().stderr).contains("no NVIDIA driver"));
    }
    run(simulated().env("IEC_SIM_MEMORY", "100000000"), "cuda").code(6);
}
