//! Tests of `--attention`: the reference of attention gives the logits of the fast kernel, in every kind of layer.

use crate::common::{all_logits, fixture, golden, iec, packed_as};
use crate::cuda::on_gpu;
use iec::iebin::IebinReader;
use iec::runtime::{AttentionKernel, Engine, EngineOptions, Precision};
use serde_json::Value;

/// Models with windows and softcaps, sinks, several sizes of heads and shared keys, and latent attention.
const MODELS: [&str; 4] = ["gemma2", "gptoss-bf16", "gemma4-e", "glm4flash"];

#[test]
fn the_reference_gives_the_logits_of_the_fast_kernel() {
    for name in MODELS {
        let pack = packed_as(name, &fixture(name), &[]);
        // Longer than a page of the cache and every window.
        let golden = golden(name);
        let ids = golden["perplexity"]["ids"].as_array().unwrap();
        let tokens: Vec<u32> = ids.iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let logits = |attention| {
            let options =
                EngineOptions { precision: Some(Precision::Fp32), attention, threads: 2, ..Default::default() };
            all_logits(&mut Engine::open(&IebinReader::open(&pack).unwrap(), &options).unwrap(), &tokens)
        };
        let [fast, reference] = [AttentionKernel::Fast, AttentionKernel::Reference].map(logits);
        let apart = fast.iter().zip(&reference).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(apart < 1e-4, "{name}: {apart}");
        assert!(fast != reference, "{name}: the reference adds in f64, so some last bits differ");
    }
}

#[test]
fn the_option_chooses_the_kernel_and_reports_name_it() {
    let pack = packed_as("gemma2", &fixture("gemma2"), &[]);
    let run = |args: &[&str]| {
        let mut command = iec();
        command.args(["run", "--json", "--precision", "fp32", "--prompt", "Once", "--max-new", "8"]).arg(&pack);
        let stdout = command.args(args).assert().success().get_output().stdout.clone();
        serde_json::from_slice::<Value>(&stdout).unwrap()
    };
    let (fast, reference) = (run(&[]), run(&["--attention", "reference"]));
    assert_eq!((&reference["attention"], fast.get("attention")), (&Value::from("reference"), None));
    assert_eq!(reference["text"], fast["text"]);
    let output = iec().args(["run", "--attention", "exact"]).assert().code(2).get_output().stderr.clone();
    assert!(String::from_utf8(output).unwrap().contains("expected fast or reference"));
    let options = EngineOptions { attention: AttentionKernel::Reference, ..on_gpu(EngineOptions::default()) };
    let error = Engine::open(&IebinReader::open(&pack).unwrap(), &options).unwrap_err();
    assert!(error.to_string().contains("computes on the CPU, not on a GPU"), "{error}");
}
