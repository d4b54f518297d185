//! Tests `iec devices`, which lists GPUs, checks their kernels, and detects broken ones.

use crate::common::iec;
use crate::cuda::{has_driver, simulated};
use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;

fn json(command: &mut assert_cmd::Command, args: &[&str], code: i32) -> Value {
    let done = command.arg("devices").args(args).arg("--json").assert().code(code);
    let line = String::from_utf8_lossy(&done.get_output().stdout).into_owned();
    serde_json::from_str(line.lines().next().unwrap_or_default()).expect("one JSON object")
}

fn stdout(command: &mut assert_cmd::Command, args: &[&str]) -> String {
    let done = command.arg("devices").args(args).assert().success();
    String::from_utf8_lossy(&done.get_output().stdout).into_owned()
}

#[test]
fn a_machine_without_a_driver_has_a_list_that_says_so_but_nothing_to_check() {
    if !has_driver() {
        let found = json(&mut iec(), &[], 0);
        assert_eq!(found["devices"], serde_json::json!([]));
        assert!(found["reason"].as_str().unwrap().contains("no NVIDIA driver"), "{found}");
        let refused = json(&mut iec(), &["--check"], 5);
        assert_eq!(refused["error"]["kind"], "engine");
    }
    json(simulated().env("IEC_SIM_INIT", "100"), &["--check"], 5);
    json(&mut simulated(), &["--check", "--device", "cuda:1"], 5);
    iec().args(["devices", "--quick"]).assert().code(2);
}

#[test]
fn every_gpu_is_listed_with_what_it_has() {
    let found = json(simulated().env("IEC_SIM_DEVICES", "2").env("IEC_SIM_MEMORY", "6000000000"), &[], 0);
    assert_eq!(found["cuda"], "12.8");
    let devices = found["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    for (i, device) in devices.iter().enumerate() {
        assert_eq!((device["number"].as_u64(), device["capability"].as_str()), (Some(i as u64), Some("8.0")));
        assert_eq!(device["memory_bytes"], 6_000_000_000u64);
        let free = device["memory_free_bytes"].as_u64().unwrap();
        assert!(free > 5_000_000_000 && free <= 6_000_000_000, "{free}");
        assert_eq!(device["simulated"], true);
    }
    let text = stdout(&mut simulated(), &[]);
    assert!(text.contains("Simulated GPU") && text.contains("8.0") && text.contains("8.00 GiB"), "{text}");
    let old = json(simulated().env("IEC_SIM_CAPABILITY", "6.1"), &[], 0);
    assert_eq!(old["devices"][0]["usable"], false);
    assert!(old["devices"][0]["reason"].as_str().unwrap().contains("compute capability 6.1"), "{old}");
}

fn check(capability: &str, trace: Option<&Path>) -> Value {
    let mut command = simulated();
    command.env("IEC_SIM_CAPABILITY", capability).env("IEC_SIM_STRICT", "2");
    if let Some(trace) = trace {
        command.env("IEC_SIM_TRACE", trace);
    }
    let found = json(&mut command, &["--check", "--quick"], 0);
    assert_eq!(found["ok"], true);
    let kernels = found["kernels"].as_array().unwrap();
    for kernel in kernels {
        let (cases, worst) = (kernel["cases"].as_u64().unwrap(), kernel["worst"].as_f64().unwrap());
        assert!(cases > 0 && (0.0..=1.0).contains(&worst) && kernel["ok"] == true, "{kernel}");
    }
    assert_eq!(found["measurements"], serde_json::json!([]));
    found
}

/// Returns the names of the kernels in the embedded PTX of a target.
fn kernels_of(target: &str) -> HashSet<String> {
    let ptx = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("src/runtime/cuda/kernels/{target}.ptx"));
    let ptx = std::fs::read_to_string(ptx).unwrap();
    let name = |line: &str| Some(line.split_once(".entry ")?.1.split('(').next()?.to_string());
    ptx.lines().filter_map(name).collect()
}

#[test]
fn every_kernel_of_the_program_computes_what_the_cpu_does() {
    let dir = tempfile::tempdir().unwrap();
    for (capability, target) in [("8.0", "compute_80"), ("7.5", "compute_75")] {
        let trace = dir.path().join(target);
        check(capability, Some(&trace));
        let launches = std::fs::read_to_string(&trace).unwrap();
        let launched: HashSet<String> =
            launches.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_string())).collect();
        let mut unchecked: Vec<String> = kernels_of(target).difference(&launched).cloned().collect();
        unchecked.sort();
        assert!(unchecked.is_empty(), "{target}: never launched: {unchecked:?}");
    }
}

#[test]
fn a_kernel_that_loses_a_block_is_found_and_named() {
    for (kernel, line) in
        [("norm", "norm"), ("matmul_bf16_int4_1_8", "matmul, int4 x bf16, few rows"), ("rope", "rope and cache")]
    {
        let found = json(simulated().env("IEC_SIM_LOSE", kernel), &["--check", "--quick"], 4);
        assert_eq!(found["ok"], false);
        let failed: Vec<&Value> = found["kernels"].as_array().unwrap().iter().filter(|k| k["ok"] == false).collect();
        let named = failed.iter().find(|failed| failed["kernel"] == line);
        assert!(
            named.is_some_and(|failed| failed["failure"].as_str().unwrap().contains("row")),
            "{kernel}: {failed:?}"
        );
        let others = failed.iter().filter(|failed| !failed["kernel"].as_str().unwrap().starts_with(&line[..4])).count();
        assert_eq!(others, 0, "{kernel}: {failed:?}");
    }
    let done = simulated().env("IEC_SIM_LOSE", "norm").args(["devices", "--check", "--quick"]).assert().code(4);
    let (out, said) =
        (String::from_utf8_lossy(&done.get_output().stdout), String::from_utf8_lossy(&done.get_output().stderr));
    assert!(out.contains("FAILED") && said.contains("gave wrong results"), "{out}{said}");
}

#[test]
fn a_driver_that_fails_while_kernels_are_checked_is_an_error() {
    let found = json(simulated().env("IEC_SIM_FAIL", "cuLaunchKernel:5:700"), &["--check", "--quick"], 5);
    assert_eq!(found["error"]["kind"], "engine");
}
