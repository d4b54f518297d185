//! Tests `iec calib` and the use of its statistics by `ptq`, `pack` and `q4`.

use crate::common::{all_logits, fixture, iec, packed};
use iec::calibration::{Calibration, Half};
use iec::generate::score::log_sum_exp;
use iec::generate::text::Tokenizer;
use iec::iebin::IebinReader;
use iec::manifest::Manifest;
use iec::quant_spec::Method;
use iec::runtime::{Engine, EngineOptions, Precision};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Returns the path of a text of the repository.
pub fn text(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/text").join(name)
}

/// Runs a command that must succeed.
fn succeed(words: &[&str], paths: &[(&str, &Path)]) {
    let mut command = iec();
    command.args(words);
    for (option, path) in paths {
        command.arg(option).arg(path);
    }
    command.assert().success();
}

/// Runs a command that must fail with this exit code and a message that contains these words.
fn fail(code: i32, words: &[&str], paths: &[(&str, &Path)], message: &[&str]) {
    let mut command = iec();
    command.args(words);
    for (option, path) in paths {
        command.arg(option).arg(path);
    }
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    for word in message {
        assert!(stderr.contains(word), "`{stderr}` should say `{word}`");
    }
}

/// Collects statistics of a fixture from the beginning of a text and returns the path of the file.
fn calibrate(dir: &Path, model: &str, tokens: &str, more: &[&str]) -> PathBuf {
    let out = dir.join(format!("{model}.calib"));
    let words = [&["calib", "--overwrite", "--window", "128", "--max-tokens", tokens], more].concat();
    let from = text("tinystories_valid_30k.txt");
    succeed(&words, &[("--hf-dir", &fixture(model)), ("--text", &from), ("--out", &out)]);
    out
}

#[test]
fn statistics_do_not_depend_on_threads_or_passes() {
    let dir = TempDir::new().unwrap();
    for model in ["llama-gqa", "gptoss-mxfp4"] {
        let one = std::fs::read(calibrate(dir.path(), model, "600", &["--hessian", "--threads", "1"])).unwrap();
        let three = calibrate(dir.path(), model, "600", &["--hessian", "--threads", "3", "--memory", "1K"]);
        assert!(one == std::fs::read(three).unwrap(), "{model}");
    }
}

/// Kills `iec calib` as soon as `ready` accepts its hidden directory of partial output; returns false if the process
/// ended before.
pub fn killed(arguments: &[String], dir: &Path, ready: impl Fn(&Path) -> bool) -> bool {
    let mut child = Command::new(env!("CARGO_BIN_EXE_iec"))
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    loop {
        let hidden = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
        let partial = hidden.filter(|p| p.extension().is_some_and(|e| e == "partial")).find(|p| ready(p));
        if partial.is_some() {
            child.kill().unwrap();
            child.wait().unwrap();
            return true;
        }
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_killed_calibration_goes_on_where_its_sums_were_saved() {
    let dir = TempDir::new().unwrap();
    let undisturbed = dir.path().join("undisturbed.calib");
    // Long enough for saved sums within a shard.
    let long = dir.path().join("long.txt");
    std::fs::write(&long, std::fs::read_to_string(text("tinystories_valid_30k.txt")).unwrap().repeat(4)).unwrap();
    let text = long.display().to_string();
    let model = fixture("stories260k").display().to_string();
    let arguments = |out: &Path, more: &[&str]| -> Vec<String> {
        let words = [
            "calib",
            "--overwrite",
            "--window",
            "64",
            "--checkpoint-every",
            "1",
            "--json",
            "--hf-dir",
            &model,
            "--text",
            &text,
        ];
        let words = words.iter().chain(more).map(|word| word.to_string());
        words.chain(["--out".to_string(), out.display().to_string()]).collect()
    };
    // The process is killed within a shard, after a shard, and between two passes.
    let saved = |partial: &Path| {
        let names = std::fs::read_dir(partial).into_iter().flatten().flatten().map(|entry| entry.file_name());
        names.into_iter().any(|name| name.to_string_lossy().starts_with("shard-0.windows-"))
    };
    let records =
        |partial: &Path, task| std::fs::read_to_string(partial.join("journal")).is_ok_and(|j| j.contains(task));
    let shard = |partial: &Path| records(partial, "of shard 2");
    let pass = |partial: &Path| records(partial, "layers 1 to 1");
    type Ready<'a> = &'a dyn Fn(&Path) -> bool;
    let products = &["--hessian", "--memory", "1K"][..];
    for (more, ready) in [(&[][..], &saved as Ready<'_>), (&[], &shard), (products, &pass)] {
        iec().args(arguments(&undisturbed, more)).assert().success();
        let home = TempDir::new().unwrap();
        let out = home.path().join("undisturbed.calib");
        assert!(killed(&arguments(&out, more), home.path(), ready), "{more:?}: it was too fast to be killed");
        assert!(!out.exists());
        let again = iec().args(arguments(&out, more)).output().unwrap();
        assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
        let summary: Value = serde_json::from_slice(&again.stdout).unwrap();
        assert!(summary["taken_over_tokens"].as_u64().unwrap() > 0, "{more:?}: {summary}");
        assert!(std::fs::read(&out).unwrap() == std::fs::read(&undisturbed).unwrap(), "{more:?}");
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1, "{more:?}: something is left");
    }
}

#[test]
fn a_merge_is_the_sum_of_its_parts() {
    let dir = TempDir::new().unwrap();
    let (a, b, both) = (dir.path().join("a.calib"), dir.path().join("b.calib"), dir.path().join("both.calib"));
    let pack = packed("mixtral");
    for (name, out) in [("tinystories_valid_30k.txt", &a), ("heldback_sherlock_40k.txt", &b)] {
        let words = ["calib", "--window", "64", "--max-tokens", "500", "--hessian"];
        succeed(&words, &[("--model-dir", pack.path()), ("--text", &text(name)), ("--out", out)]);
    }
    let mut command = iec();
    command.args(["calib", "--merge"]).arg(&a).arg(&b).arg("--out").arg(&both).assert().success();
    let [a_stats, b_stats, sum] = [&a, &b, &both].map(|path| Calibration::open(path).unwrap());
    assert_eq!(sum.description().texts.len(), 2);
    for site in sum.sites() {
        let mut expected = a_stats.sums(&site.name).unwrap();
        expected.iter_mut().zip(&b_stats.sums(&site.name).unwrap()).for_each(|(sum, other)| sum.plus(other));
        assert!(expected.iter().flat_map(|half| &half.counts).sum::<f64>() > 0.0);
        assert_eq!(sum.sums(&site.name).unwrap(), expected, "{}", site.name);
    }
    let mut command = iec();
    command.args(["calib", "--overwrite", "--merge"]).arg(&a).arg(&a).arg("--out").arg(&both);
    let output = command.output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("in two files of statistics"));
}

#[test]
fn experts_have_inputs_of_their_own_and_rarely_chosen_ones_lean_on_the_others() {
    let dir = TempDir::new().unwrap();
    let stats = Calibration::open(&calibrate(dir.path(), "qwen3moe", "300", &[])).unwrap();
    let counts = stats.counts("layers.0.experts");
    assert_eq!(counts.len(), 8);
    // The router sends each token to three experts.
    assert_eq!(counts.iter().sum::<f64>(), 3.0 * stats.counts("layers.0.attention")[0]);
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let inputs = |matrix| stats.inputs(name, (8, 64), matrix, None, false).unwrap().unwrap().squares;
    let distinct: std::collections::BTreeSet<Vec<u32>> =
        (0..8).map(|e| inputs(e).iter().map(|x| x.to_bits()).collect()).collect();
    assert_eq!(distinct.len(), counts.iter().filter(|n| **n > 0.0).count() + usize::from(counts.contains(&0.0)));
    assert!((0..8).all(|e| inputs(e).iter().all(|x| x.is_finite() && *x > 0.0)));
    assert!(stats.inputs(name, (8, 32), 0, Some(Half::First), false).is_err(), "another shape");
    assert!(stats.inputs("model.embed_tokens.weight", (1, 64), 0, None, false).unwrap().is_none());
}

#[test]
fn damaged_statistics_are_refused() {
    let dir = TempDir::new().unwrap();
    let path = calibrate(dir.path(), "llama-gqa", "300", &["--hessian"]);
    let good = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let bad = dir.path().join("bad.calib");
    let flipped = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    let mut cases =
        vec![Vec::new(), good[..good.len() - 1].to_vec(), [&good[..], &[0]].concat(), good[..header].to_vec()];
    cases.extend([0, 7, 9, header / 2, header, (header + good.len()) / 2, good.len() - 1].map(flipped));
    for (i, bytes) in cases.into_iter().enumerate() {
        std::fs::write(&bad, bytes).unwrap();
        assert!(Calibration::open(&bad).is_err(), "case {i}");
    }
    assert!(Calibration::open(&path).is_ok());
}

/// Computes the mean KL divergence of a pack from the float model, in nats, over part of a text that was not used for
/// calibration.
fn divergence(reference: &Path, other: &Path) -> f64 {
    let tokenizer = Tokenizer::open(&reference.join("tokenizer.json")).unwrap();
    let ids = tokenizer.encode_plain(&std::fs::read_to_string(text("tinystories_valid_30k.txt")).unwrap()).unwrap();
    let engine = |dir: &Path, precision| {
        let options = EngineOptions { precision: Some(precision), ..EngineOptions::default() };
        Engine::open(&IebinReader::open(dir).unwrap(), &options).unwrap()
    };
    let (mut reference, mut other) = (engine(reference, Precision::Fp32), engine(other, Precision::Int4w));
    let (mut total, mut n) = (0.0, 0);
    for window in ids.rchunks_exact(256).take(12) {
        let (p, q) = (all_logits(&mut reference, window), all_logits(&mut other, window));
        let vocab = reference.config().vocab;
        for (p, q) in p.chunks_exact(vocab).zip(q.chunks_exact(vocab)).skip(64) {
            let (of_p, of_q) = (log_sum_exp(p), log_sum_exp(q));
            let each = p.iter().zip(q).map(|(p, q)| (f64::from(*p) - of_p, f64::from(*q) - of_q));
            total += each.map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            n += 1;
        }
    }
    total / f64::from(n)
}

#[test]
fn calibration_brings_a_trained_model_closer_to_itself_on_text_it_was_not_calibrated_with() {
    let dir = TempDir::new().unwrap();
    let hf_dir = fixture("stories260k");
    let stats = calibrate(dir.path(), "stories260k", "6000", &["--hessian"]);
    let reference = packed("stories260k");
    let rules = dir.path().join("rules.json");
    std::fs::write(&rules, r#"{"version":1,"rules":[{"include":"_proj","scheme":"q4_0","method":"search"}]}"#).unwrap();
    let quantized = |method: &str| {
        let (manifest, pack) = (dir.path().join(format!("{method}.json")), dir.path().join(method));
        let how = match method {
            "best" => vec!["--bits", "4", "--exclude", "embed"],
            "ruled" => vec!["--rules", rules.to_str().unwrap()],
            _ => vec!["--bits", "4", "--exclude", "embed", "--method", method],
        };
        succeed(&[&["ptq"], &how[..]].concat(), &[("--hf-dir", &hf_dir), ("--out", &manifest), ("--calib", &stats)]);
        let paths = [("--hf-dir", &*hf_dir), ("--q4-map", &manifest), ("--calib", &stats), ("--out-dir", &pack)];
        succeed(&["pack"], &paths);
        let document = Manifest::load(&manifest).unwrap().document().clone();
        let errors: Vec<f64> = document.tensors.values().filter_map(|e| e.metrics?.output_error).collect();
        assert_eq!(errors.len(), 35, "every matrix is judged by its outputs");
        let methods: Vec<Method> = document.tensors.values().filter_map(|e| Some(e.quant?.method)).collect();
        (divergence(reference.path(), &pack), errors.iter().sum::<f64>() / 35.0, methods)
    };
    let (search, imatrix, gptq, best) =
        (quantized("search"), quantized("imatrix"), quantized("gptq"), quantized("best"));
    let ruled = quantized("ruled");
    assert!(imatrix.1 < search.1 && gptq.1 < 0.9 * search.1, "{} {} {}", search.1, imatrix.1, gptq.1);
    assert!(gptq.0 < 0.85 * search.0, "{} {}", search.0, gptq.0);
    assert!(ruled.2.iter().all(|method| *method == Method::Search), "{:?}", ruled.2);
    assert!(best.1 <= gptq.1 && best.2.contains(&Method::Gptq), "{:?}", best.2);
}

#[test]
fn a_manifest_that_was_made_with_statistics_wants_the_same_again() {
    let dir = TempDir::new().unwrap();
    let (hf_dir, manifest, out) = (fixture("llama-gqa"), dir.path().join("m.json"), dir.path().join("pack"));
    let others = calibrate(dir.path(), "llama-gqa", "300", &[]);
    std::fs::rename(&others, dir.path().join("other.calib")).unwrap();
    let others = dir.path().join("other.calib");
    let stats = calibrate(dir.path(), "llama-gqa", "600", &[]);
    let ptq = ["ptq", "--bits", "4", "--method", "imatrix"];
    fail(2, &ptq, &[("--hf-dir", &hf_dir), ("--out", &manifest)], &["--calib"]);
    let gptq = ["ptq", "--bits", "4", "--method", "gptq"];
    fail(2, &gptq, &[("--hf-dir", &hf_dir), ("--out", &manifest), ("--calib", &stats)], &["--hessian"]);
    succeed(&ptq, &[("--hf-dir", &hf_dir), ("--out", &manifest), ("--calib", &stats)]);
    let pack = [("--hf-dir", &*hf_dir), ("--q4-map", &manifest), ("--out-dir", &out)];
    fail(2, &["pack"], &pack, &["imatrix", "tinystories_valid_30k.txt"]);
    fail(2, &["pack"], &[&pack[..], &[("--calib", &others)]].concat(), &["found statistics with the hash"]);
    succeed(&["pack"], &[&pack[..], &[("--calib", &stats)]].concat());
    // `q4` makes the same codes, after which the statistics are no longer needed.
    let q4 = dir.path().join("q4");
    let from = [("--hf-dir", &*hf_dir), ("--manifest", &manifest), ("--out-dir", &q4)];
    fail(2, &["q4"], &from, &["imatrix"]);
    succeed(&["q4"], &[&from[..], &[("--calib", &stats)]].concat());
    let (expanded, again) = (q4.join("q4_manifest.expanded.json"), dir.path().join("again"));
    succeed(&["pack"], &[("--hf-dir", &*hf_dir), ("--q4-map", &expanded), ("--out-dir", &again)]);
    let bin = |dir: &Path| std::fs::read(dir.join("model.ie.bin")).unwrap();
    assert!(bin(&out) == bin(&again));
    let wrong = fixture("llama3-rope-tied");
    fail(
        2,
        &["ptq", "--overwrite", "--bits", "4"],
        &[("--hf-dir", &wrong), ("--out", &manifest), ("--calib", &stats)],
        &["iec calib"],
    );
}
