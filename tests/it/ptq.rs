//! Tests `iec ptq`: error metrics, the quality gate and the written manifest.

use crate::checkpoint::{Tensor, edited, files};
use crate::common::{fixture, iec};
use iec::manifest::{Keep, Manifest, TensorEntry, Verdict};
use iec::quant_spec::Method;
use iec::scheme::{Granularity, QuantSpec, ScaleType, Scheme};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;
use tempfile::TempDir;

/// A run of `iec ptq` into a fresh directory.
struct Ptq {
    _dir: TempDir,
    out: PathBuf,
    output: Output,
}

impl Ptq {
    fn run(checkpoint: &Path, arguments: &[&str]) -> Ptq {
        let dir = TempDir::new().unwrap();
        let out = dir.path().join("manifest.json");
        let mut command = iec();
        command.arg("ptq").arg("--hf-dir").arg(checkpoint).arg("--out").arg(&out).args(arguments);
        Ptq { output: command.output().unwrap(), out, _dir: dir }
    }

    fn code(&self) -> Option<i32> {
        self.output.status.code()
    }

    fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    /// Reads the manifest of a run, which must have succeeded.
    fn manifest(&self) -> Manifest {
        assert_eq!(self.code(), Some(0), "{}", self.stderr());
        Manifest::load(&self.out).unwrap()
    }

    fn entries(&self) -> BTreeMap<String, TensorEntry> {
        self.manifest().document().tensors.clone()
    }

    /// Asserts that the run failed with this exit code, that its message contains these words, and that it wrote
    /// nothing.
    fn fails(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code(), Some(code), "{}", self.stderr());
        for word in words {
            assert!(self.stderr().contains(word), "`{}` should say `{word}`", self.stderr());
        }
        assert!(!self.out.exists());
    }
}

fn mean<'a>(entries: impl IntoIterator<Item = &'a TensorEntry>) -> f64 {
    let errors: Vec<f64> = entries.into_iter().map(|e| e.metrics.unwrap().relative_rms.powi(2)).collect();
    errors.iter().sum::<f64>() / errors.len() as f64
}

#[test]
fn trained_models_pass_the_default_gate_in_four_and_eight_bits() {
    for (bits, scheme, granularity) in
        [("4", Scheme::Q4_0, Granularity::Group(32)), ("8", Scheme::Int8, Granularity::Row)]
    {
        for model in ["stories260k", "gptoss-trained"] {
            let ptq = Ptq::run(&fixture(model), &["--bits", bits]);
            for (name, entry) in ptq.entries() {
                if entry.keep.is_some() {
                    assert!(name.contains(".experts."), "{name}");
                    assert_eq!((entry.keep, entry.verdict), (Some(Keep::Source), Some(Verdict::Kept)), "{name}");
                    continue;
                }
                let spec = entry.quant.unwrap().spec;
                assert_eq!(entry.verdict, Some(Verdict::Accepted), "{name}");
                if ["model.embed_tokens.weight", "lm_head.weight"].contains(&name.as_str()) {
                    assert_eq!(spec, QuantSpec::Q8_0, "{name}");
                    continue;
                }
                assert_eq!((spec.scheme, spec.granularity), (scheme, granularity), "{name}");
                assert!(name.contains("_proj.weight"), "{name} was not asked for");
            }
        }
    }
}

#[test]
fn searched_scales_beat_plain_ones_by_a_tenth_of_the_squared_error() {
    let run = |method| mean(Ptq::run(&fixture("stories260k"), &["--bits", "4", "--method", method]).entries().values());
    assert!(run("search") < 0.9 * run("rtn"));
}

#[test]
fn one_int4_scale_per_row_is_refused_and_written_only_by_force() {
    let row = ["--scheme", "int4", "--group-size", "row", "--method", "rtn"];
    let refused = Ptq::run(&fixture("stories260k"), &row);
    refused.fails(4, &["the gate refuses", "mean row cosine", "help: try"]);
    let forced = Ptq::run(&fixture("stories260k"), &[&row[..], &["--force"]].concat());
    let manifest = forced.manifest();
    assert!(manifest.document().refused);
    let bad = manifest.document().tensors.values().find(|e| e.verdict == Some(Verdict::Refused)).unwrap();
    assert!(bad.reasons[0].contains("is below 0.995"), "{:?}", bad.reasons);
}

#[test]
fn the_gate_is_what_the_user_says() {
    let model = fixture("stories260k");
    Ptq::run(&model, &["--bits", "4", "--gate", "cosine=0.999"]).fails(4, &["is below 0.999"]);
    Ptq::run(&model, &["--bits", "4", "--gate", "cosine-min=0.995"]).fails(4, &["worst row cosine"]);
    Ptq::run(&model, &["--bits", "4", "--gate", "cosine=1.5"]).fails(2, &["from 0 to 1"]);
    Ptq::run(&model, &["--bits", "4", "--gate", "kl=0.01"]).fails(2, &["--gate-text"]);
    let loose = ["--scheme", "int4", "--group-size", "row", "--gate", "cosine=0.9", "--gate", "cosine-min=0.5"];
    assert!(!Ptq::run(&model, &loose).manifest().document().refused);
}

#[test]
fn failing_tensors_are_kept_in_the_type_that_was_asked_for() {
    let keep = |kind| {
        let arguments = ["--scheme", "int4", "--group-size", "row", "--method", "rtn", "--exclude", "embed"];
        Ptq::run(&fixture("stories260k"), &[&arguments[..], &["--keep-failing", kind]].concat()).entries()
    };
    let (fp16, int8) = (keep("fp16"), keep("int8"));
    let kept = |e: &&TensorEntry| e.keep == Some(Keep::Fp16) && e.verdict == Some(Verdict::Kept);
    assert_eq!(fp16.values().filter(kept).count(), 33);
    assert_eq!(fp16.values().filter(|e| e.quant.is_some()).count(), 2);
    let scheme = |scheme| int8.values().filter(|e| e.quant.unwrap().spec.scheme == scheme).count();
    assert_eq!((scheme(Scheme::Int8), scheme(Scheme::Int4)), (33, 2));
    assert!(int8.values().all(|e| e.verdict == Some(Verdict::Accepted)));
    let int6 = keep("int6");
    let scheme = |scheme| int6.values().filter(|e| e.quant.unwrap().spec.scheme == scheme).count();
    assert_eq!((scheme(Scheme::Int6), scheme(Scheme::Int4)), (33, 2));
}

#[test]
fn what_six_bits_do_not_help_gets_eight_and_what_these_do_not_help_is_kept() {
    let gated = |cosine: &str| {
        let arguments = ["--bits", "4", "--exclude", "embed", "--keep-failing", "int6", "--gate", cosine];
        Ptq::run(&fixture("stories260k"), &[&arguments[..], &["--gate", "cosine-min=0"]].concat()).entries()
    };
    let schemes = |entries: BTreeMap<String, TensorEntry>, scheme: Option<Scheme>| {
        entries.values().filter(|e| e.quant.map(|quant| quant.spec.scheme) == scheme).count()
    };
    assert_eq!(schemes(gated("cosine=0.9995"), Some(Scheme::Int6)), 35);
    assert_eq!(schemes(gated("cosine=0.9999"), Some(Scheme::Int8)), 35);
    assert_eq!(schemes(gated("cosine=1"), None), 35);
}

/// Packs a checkpoint with a manifest and returns the dequantized weights as a checkpoint.
fn decoded(checkpoint: &Path, manifest: &Path, dtype: &str) -> TempDir {
    let (pack, floats) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let arguments = ["pack", "--overwrite", "--q4-map", manifest.to_str().unwrap(), "--hf-dir"];
    iec().args(arguments).arg(checkpoint).arg("--out-dir").arg(pack.path()).assert().success();
    let arguments = ["unpack", "--overwrite", "--dtype", dtype, "--model-dir"];
    iec().args(arguments).arg(pack.path()).arg("--out-dir").arg(floats.path()).assert().success();
    floats
}

/// Reads the floats of `width` bytes of a checkpoint, with -0 (from 0 times a negative scale) replaced by 0.
fn numbers(checkpoint: &Path, width: usize) -> Vec<u8> {
    let mut bytes = std::fs::read(checkpoint.join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let mut data = bytes.split_off(8 + header);
    for number in data.chunks_exact_mut(width) {
        let (sign, rest) = number.split_last_mut().unwrap();
        if *sign == 0x80 && rest.iter().all(|byte| *byte == 0) {
            *sign = 0;
        }
    }
    data
}

#[test]
fn weights_that_are_codes_already_are_recovered_whatever_the_method_also_from_bf16() {
    let ordinary = fixture("stories260k");
    for scheme in ["q4_0", "nl4"] {
        let first = Ptq::run(&ordinary, &["--scheme", scheme, "--exclude", "embed"]);
        for dtype in ["fp32", "fp16", "bf16"] {
            let floats = decoded(&ordinary, &first.out, dtype);
            let again = ["--scheme", scheme, "--method", "rtn", "--exclude", "embed"];
            let again = Ptq::run(floats.path(), &again);
            for (name, entry) in again.entries() {
                assert_eq!(entry.quant.unwrap().method, Method::Exact, "{scheme} {dtype} {name}");
                let most = [("fp32", 0.0), ("fp16", 0.0005), ("bf16", 0.003)].iter().find(|(name, _)| *name == dtype);
                let rms = entry.metrics.unwrap().relative_rms;
                assert!(rms <= most.unwrap().1, "{scheme} {dtype} {name}: {rms}");
            }
            // Another scale with other codes may represent the same numbers, so the dequantized numbers are compared.
            let back = decoded(floats.path(), &again.out, dtype);
            let [before, after] = [&floats, &back].map(|dir| numbers(dir.path(), if dtype == "fp32" { 4 } else { 2 }));
            assert!(before == after, "{scheme} {dtype}: other numbers");
        }
    }
    Ptq::run(&ordinary, &["--bits", "4", "--method", "exact"]).fails(1, &["are not codes of q4_0"]);
    Ptq::run(&ordinary, &["--bits", "8", "--method", "exact"]).fails(2, &["method exact does not support scheme int8"]);
}

#[test]
fn bits_name_a_scheme_and_a_plan_tells_what_it_costs() {
    for (bits, scheme, least) in [("5", Scheme::Int5, 0.998), ("6", Scheme::Int6, 0.9995)] {
        let entries = Ptq::run(&fixture("llama-gqa"), &["--bits", bits, "--include", "_proj"]).entries();
        let quants: Vec<_> = entries.values().map(|e| (e.quant.unwrap(), e.metrics.unwrap())).collect();
        assert!(quants.iter().all(|(q, _)| q.spec == iec::scheme::QuantSpec::usual(scheme)), "{quants:?}");
        assert!(quants.iter().all(|(_, metrics)| metrics.cosine_mean > least), "{quants:?}");
    }
}

#[test]
fn patterns_choose_the_tensors() {
    let names = |arguments: &[&str]| {
        let ptq = Ptq::run(&fixture("llama-gqa"), &[&["--bits", "4"], arguments].concat());
        ptq.entries().into_keys().collect::<Vec<_>>()
    };
    assert_eq!(names(&[]).len(), 23);
    assert_eq!(names(&["--include", "q_proj", "--include", r"layers\.2\.mlp"]).len(), 6);
    assert!(names(&["--exclude", "down_proj"]).iter().all(|n| !n.contains("down_proj")));
    let model = fixture("llama-gqa");
    Ptq::run(&model, &["--include", "nothing"]).fails(2, &["no tensor is selected"]);
    Ptq::run(&model, &["--include", "norm"]).fails(2, &["no tensor is selected"]);
    Ptq::run(&model, &["--include", "("]).fails(2, &["regular expression"]);
}

#[test]
fn the_embedding_and_the_output_matrix_are_stored_in_eight_bits_unless_they_are_kept() {
    struct Case {
        model: &'static str,
        arguments: &'static [&'static str],
        /// Formats of the embedding, of the embedding of further inputs, and of the output matrix, if the model has it.
        expected: [&'static str; 3],
    }
    let case = |model, arguments, expected| Case { model, arguments, expected };
    let cases = [
        case("llama-gqa", &["--bits", "4"], ["int8", "-", "int8"]),
        case("llama-gqa", &["--scheme", "nl4"], ["int8", "-", "int8"]),
        case("llama-gqa", &["--bits", "4", "--keep", "embedding"], ["kept", "-", "int8"]),
        case("llama-gqa", &["--bits", "4", "--keep", "lm_head"], ["int8", "-", "kept"]),
        case("llama-gqa", &["--bits", "4", "--keep", "embedding", "--keep", "output"], ["kept", "-", "kept"]),
        case("llama-gqa", &["--bits", "4", "--include-lm-head"], ["int8", "-", "q4_0"]),
        case("llama-gqa", &["--bits", "4", "--exclude", "embed"], ["-", "-", "int8"]),
        case("llama-gqa", &["--bits", "4", "--include", "q_proj"], ["-", "-", "-"]),
        case("llama3-rope-tied", &["--bits", "8"], ["int8", "-", "-"]),
        case("llama3-rope-tied", &["--bits", "8", "--keep", "embedding"], ["kept", "-", "-"]),
        case("llama3-rope-tied", &["--bits", "8", "--keep", "lm_head"], ["kept", "-", "-"]),
        case("gemma4-e", &["--bits", "4", "--gate", "cosine=0.9"], ["int8", "int8", "-"]),
        case("gemma4-e", &["--bits", "4", "--keep", "embedding"], ["kept", "kept", "-"]),
    ];
    let mut wrong = Vec::new();
    for Case { model, arguments, expected } in cases {
        let loose = ["--gate", "cosine=0.9", "--gate", "cosine-min=0.8"];
        let entries = Ptq::run(&fixture(model), &[arguments, &loose].concat()).entries();
        let found =
            ["model.embed_tokens.weight", "model.embed_tokens_per_layer.weight", "lm_head.weight"].map(|name| {
                let Some(entry) = entries.get(name) else { return "-" };
                entry.quant.map_or("kept", |quant| {
                    assert!(quant.spec.scheme != Scheme::Int8 || quant.spec == QuantSpec::Q8_0, "{name}");
                    quant.spec.scheme.name()
                })
            });
        if found != expected {
            wrong.push(format!("{model} {arguments:?}: found {found:?}, expected {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let both = ["--include-lm-head", "--keep", "lm_head"];
    Ptq::run(&fixture("llama-gqa"), &both).fails(2, &["--include-lm-head together with --keep lm_head"]);
}

#[test]
fn a_matrix_that_is_kept_is_not_quantized_by_the_rules_either() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("rules.json");
    std::fs::write(&file, r#"{"version":1,"rules":[{"include":"embed_tokens|_proj","scheme":"int6"}]}"#).unwrap();
    // The output matrix of this model is its embedding.
    let model = fixture("llama3-rope-tied");
    let ptq = Ptq::run(&model, &["--rules", file.to_str().unwrap(), "--keep", "lm_head"]);
    let pack = dir.path().join("pack");
    let arguments = ["pack", "--dtype", "bf16", "--q4-map", ptq.out.to_str().unwrap(), "--hf-dir"];
    iec().args(arguments).arg(&model).arg("--out-dir").arg(&pack).assert().success();
    let reader = iec::iebin::IebinReader::open(&pack).unwrap();
    assert_eq!(reader.get("model.embed_tokens.weight").unwrap().store.name(), "BF16");
    assert_eq!(reader.get("model.layers.0.self_attn.q_proj.weight").unwrap().store.name(), "int6");
}

#[test]
fn tokens_without_training_do_not_fail_the_gate() {
    // Rows of the embedding that training never changed are zeros or far smaller than the others.
    let source = edited("llama3-rope-tied", |tensors| {
        let tensor = tensors.get_mut("model.embed_tokens.weight").unwrap();
        let row = tensor.shape[1] * 4;
        for (token, factor) in [(5, 0.0), (17, 1e-25), (18, 1e-7), (600, 1e-5)] {
            for number in tensor.bytes[token * row..][..row].as_chunks_mut::<4>().0 {
                *number = (f32::from_le_bytes(*number) * factor).to_le_bytes();
            }
        }
    });
    let loose = ["--bits", "4", "--gate", "cosine=0.9", "--gate", "cosine-min=0.8"];
    let entry = &Ptq::run(source.path(), &loose).entries()["model.embed_tokens.weight"];
    assert_eq!((entry.quant.unwrap().spec, entry.verdict), (QuantSpec::Q8_0, Some(Verdict::Accepted)));
}

#[test]
fn rules_decide_per_tensor() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("rules.json");
    let rules = |rules: Value| std::fs::write(&file, json!({"version": 1, "rules": rules}).to_string()).unwrap();
    rules(json!([
        {"exclude": r"layers\.0\."},
        {"include": "down_proj", "scheme": "int8", "group_size": 64},
        {"include": "(gate|up)_proj", "scheme": "int4", "group_size": 32, "symmetric": false}
    ]));
    let arguments = ["--rules", file.to_str().unwrap()];
    let entries = Ptq::run(&fixture("llama-gqa"), &arguments).entries();
    assert_eq!(entries.len(), 6);
    let down = entries["model.layers.1.mlp.down_proj.weight"].quant.unwrap();
    assert_eq!((down.spec.scheme, down.spec.granularity), (Scheme::Int8, Granularity::Group(64)));
    assert!(!entries["model.layers.2.mlp.up_proj.weight"].quant.unwrap().spec.symmetric);

    let model = fixture("llama-gqa");
    Ptq::run(&model, &["--rules", arguments[1], "--include", "x"]).fails(2, &["--rules", "--include"]);
    // Options apply where the rules leave fields open, with the same meaning as without rules.
    rules(json!([{"include": "down_proj", "scheme": "int8"}, {"include": "up_proj"}]));
    let entries = Ptq::run(&model, &["--rules", arguments[1], "--bits", "4", "--group-size", "64"]).entries();
    let spec = |name: &str| entries[&format!("model.layers.1.mlp.{name}.weight")].quant.unwrap().spec;
    assert_eq!((spec("up_proj").scheme, spec("up_proj").granularity), (Scheme::Int4, Granularity::Group(64)));
    assert_eq!((spec("down_proj").scheme, spec("down_proj").granularity), (Scheme::Int8, Granularity::Row));
    rules(json!([{"include": "x", "schem": "q4_0"}]));
    Ptq::run(&model, &arguments).fails(1, &["rules.json", "rules[0]", "unknown field `schem`"]);
    rules(json!([{"include": "(", "scheme": "q4_0"}]));
    Ptq::run(&model, &arguments).fails(2, &["rules.json", "regular expression"]);
    rules(json!([{"pattern": "x", "dtype": "int4w", "group": 32}]));
    Ptq::run(&model, &arguments).fails(2, &["no tensor is selected"]);
}

#[test]
fn an_expanded_manifest_can_be_measured_again_and_keeps_what_it_kept() {
    let model = fixture("stories260k");
    let row = ["--scheme", "int4", "--group-size", "row", "--method", "rtn", "--keep-failing", "fp16"];
    let first = Ptq::run(&model, &row);
    let again = Ptq::run(&model, &["--rules", first.out.to_str().unwrap()]);
    assert_eq!(first.entries(), again.entries());
    Ptq::run(&fixture("llama-gqa"), &["--rules", first.out.to_str().unwrap()]).fails(1, &["not in the model"]);
}

#[test]
fn the_manifest_is_the_same_for_any_number_of_threads() {
    for (model, arguments) in [
        ("stories260k", vec!["--bits", "4"]),
        ("gptoss-bf16", vec!["--group-size", "tensor", "--force"]),
        ("llama-gqa", vec!["--bits", "4", "--affine", "--group-size", "64"]),
    ] {
        let [one, many] = ["1", "7"].map(|n| {
            let ptq = Ptq::run(&fixture(model), &[&arguments[..], &["--threads", n]].concat());
            ptq.manifest();
            std::fs::read(&ptq.out).unwrap()
        });
        assert!(one == many, "{model}");
    }
}

#[test]
fn a_pack_with_floats_gives_the_decisions_of_its_checkpoint() {
    let pack = crate::common::packed("llama-gqa");
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("manifest.json");
    iec().args(["ptq", "--bits", "4", "--model-dir"]).arg(pack.path()).arg("--out").arg(&out).assert().success();
    let direct = Ptq::run(&fixture("llama-gqa"), &["--bits", "4"]);
    assert!(std::fs::read(out).unwrap() == std::fs::read(&direct.out).unwrap());
}

const DOWN: &str = "model.layers.1.mlp.down_proj.weight";

/// Creates a copy of stories260k in which `edit` has replaced weights (f32) of one tensor.
fn with_weights(edit: impl Fn(usize, f32) -> f32) -> TempDir {
    edited("stories260k", |tensors: &mut BTreeMap<String, Tensor>| {
        let bytes = &mut tensors.get_mut(DOWN).unwrap().bytes;
        for (i, four) in bytes.chunks_exact_mut(4).enumerate() {
            let value = f32::from_le_bytes(four.try_into().unwrap());
            four.copy_from_slice(&edit(i, value).to_le_bytes());
        }
    })
}

#[test]
fn weights_that_are_no_numbers_are_refused_by_name() {
    for (bad, word) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let checkpoint = with_weights(|i, x| if i == 700 { bad } else { x });
        for method in ["rtn", "search"] {
            let ptq = Ptq::run(checkpoint.path(), &["--bits", "4", "--method", method]);
            ptq.fails(1, &[DOWN, word, "cannot be quantized", "help:"]);
        }
        let ptq = Ptq::run(checkpoint.path(), &["--group-size", "tensor"]);
        ptq.fails(1, &[DOWN, word]);
    }
}

#[test]
fn scales_that_do_not_fit_fp16_become_f32_or_are_refused_by_name() {
    for factor in [1e8f32, 1e-9] {
        let checkpoint = with_weights(|_, x| x * factor);
        let ptq = Ptq::run(checkpoint.path(), &["--bits", "8"]);
        let entries = ptq.entries();
        assert_eq!(entries[DOWN].quant.unwrap().spec.scale_dtype, ScaleType::F32, "{factor}");
        let others = entries.values().filter(|e| e.quant.unwrap().spec.scale_dtype == ScaleType::F16);
        assert_eq!(others.count(), entries.len() - 1);
    }
    let checkpoint = with_weights(|_, x| x * 1e8);
    Ptq::run(checkpoint.path(), &["--bits", "4"]).fails(1, &[DOWN, "for fp16", "int4 or int8"]);
    // The quality gate detects weights that underflow to zero in fp16.
    let checkpoint = with_weights(|_, x| x * 1e-9);
    Ptq::run(checkpoint.path(), &["--bits", "4"]).fails(4, &[DOWN]);
}

#[test]
fn contradictions_are_refused_before_anything_is_read() {
    let nowhere = Path::new("/nonexistent");
    for (arguments, word) in [
        (vec!["--bits", "8", "--scheme", "q4_0"], "8 bits"),
        (vec!["--scheme", "q4_0", "--group-size", "64"], "groups of 32"),
        (vec!["--scheme", "int8", "--affine"], "zero points"),
        (vec!["--bits", "6", "--affine"], "zero points"),
        (vec!["--bits", "7"], "4, 5, 6 or 8"),
        (vec!["--bits", "4", "--percentile", "99", "--method", "search"], "percentile"),
        (vec!["--bits", "4", "--clamp", "0"], "clamp"),
        (vec!["--bits", "4", "--weights-only", "0"], "weights-only"),
        (vec!["--bits", "4", "--group-size", "48"], "group size"),
    ] {
        let ptq = Ptq::run(nowhere, &arguments);
        assert!(matches!(ptq.code(), Some(1 | 2)), "{arguments:?}");
        assert!(ptq.stderr().contains(word), "{arguments:?}: {}", ptq.stderr());
    }
}

#[test]
fn clamp_and_percentile_change_the_scales() {
    let run = |extra: &[&str]| {
        let arguments = [&["--bits", "8", "--gate", "cosine=0", "--gate", "cosine-min=0"], extra].concat();
        Ptq::run(&fixture("stories260k"), &arguments).entries()[DOWN].metrics.unwrap()
    };
    let (plain, clamped, percentile) = (run(&[]), run(&["--clamp", "0.1"]), run(&["--percentile", "90"]));
    assert!(clamped.max_abs_error > 2.0 * plain.max_abs_error);
    assert!(percentile.max_abs_error > 2.0 * plain.max_abs_error);
}

#[test]
fn the_summary_is_one_line_of_json_and_refusals_are_errors_there_too() {
    let ptq = Ptq::run(&fixture("gptoss-trained"), &["--bits", "4", "--json"]);
    let text = String::from_utf8(ptq.output.stdout.clone()).unwrap();
    assert_eq!(text.lines().count(), 1);
    let summary: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&summary["roles"]["attention"]["accepted"], &summary["roles"]["experts"]["kept"]),
        (&16.into(), &8.into())
    );
    let refused = Ptq::run(&fixture("gptoss-trained"), &["--bits", "4", "--gate", "cosine=1", "--json"]);
    let error: Value = serde_json::from_slice(&refused.output.stdout).unwrap();
    assert_eq!((refused.code(), &error["error"]["kind"]), (Some(4), &"refused".into()));
    assert_eq!(files(refused.out.parent().unwrap()).len(), 0);
}

#[test]
fn rows_near_zero_do_not_fail_the_gate() {
    let source = edited("llama-gqa", |tensors| {
        let tensor = tensors.get_mut("model.layers.0.self_attn.q_proj.weight").unwrap();
        let row = tensor.shape[1] * 2;
        for dead in [3, 40] {
            for number in tensor.bytes[dead * row..][..row].chunks_exact_mut(2) {
                let value = half::bf16::from_le_bytes([number[0], number[1]]).to_f32() * 1e-7;
                number.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
            }
        }
    });
    let mut wrong = Vec::new();
    for bits in ["4", "8"] {
        let out = tempfile::tempdir().unwrap();
        let mut command = iec();
        command
            .args(["pack", "--bits", bits, "--hf-dir"])
            .arg(source.path())
            .arg("--out-dir")
            .arg(out.path().join("p"));
        let output = command.output().unwrap();
        if !output.status.success() {
            wrong.push(format!("{bits} bits: {}", String::from_utf8_lossy(&output.stderr)));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn trellises_are_packed_run_and_refused_where_no_file_holds_them() {
    let checkpoint = fixture("stories260k");
    for (bits, scheme, group) in [("3", "t3", None), ("2", "t2", None), ("3", "t3", Some("32"))] {
        let mut options = vec!["--bits", bits];
        options.extend(group.iter().flat_map(|size| ["--group-size", size]));
        let run = Ptq::run(&checkpoint, &options);
        let entries = run.entries();
        let spec = entries["model.layers.0.mlp.up_proj.weight"].quant.unwrap().spec;
        assert_eq!((spec.scheme.name(), spec.scale_dtype), (scheme, ScaleType::I8Row));
        assert_eq!(spec.granularity.to_string(), group.unwrap_or("128"));
        let pack = run.out.with_file_name("pack");
        let packed = iec()
            .arg("pack")
            .arg("--hf-dir")
            .arg(&checkpoint)
            .arg("--q4-map")
            .arg(&run.out)
            .arg("--out-dir")
            .arg(&pack)
            .output()
            .unwrap();
        assert!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
        let said = |arguments: &[&str]| {
            let output = iec().args(arguments).arg(&pack).output().unwrap();
            (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
        };
        assert!(
            said(&["inspect"]).1.contains(&format!("{scheme} g{}", group.unwrap_or("128"))),
            "{}",
            said(&["inspect"]).1
        );
        assert_eq!(said(&["verify", "--hashes"]).0, Some(0), "{}", said(&["verify", "--hashes"]).1);
        let texts: Vec<String> = ["scalar", "auto"]
            .map(|isa| {
                let mut command = iec();
                if isa != "auto" {
                    command.env("IEC_ISA", isa);
                }
                let run = ["run", "--greedy", "-n", "16", "--prompt", "Once upon a time", "--precision", "int4"];
                let output = command.args(run).arg("--model-dir").arg(&pack).output().unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                String::from_utf8(output.stdout).unwrap()
            })
            .into();
        assert_eq!(texts[0], texts[1]);
        // Neither q4 files nor GGUF have such codes.
        let q4 = iec()
            .arg("q4")
            .arg("--hf-dir")
            .arg(&checkpoint)
            .arg("--manifest")
            .arg(&run.out)
            .arg("--out-dir")
            .arg(run.out.with_file_name("q4"))
            .output()
            .unwrap();
        assert_ne!(q4.status.code(), Some(0));
        let (code, message) = said(&["export-gguf", "--out", run.out.with_file_name("m.gguf").to_str().unwrap()]);
        assert!(code != Some(0) && message.contains(scheme), "{message}");
    }
    Ptq::run(&checkpoint, &["--bits", "3", "--scale-type", "f16"]).fails(1, &["t3", "F16", "leave the"]);
    Ptq::run(&checkpoint, &["--bits", "2", "--affine"]).fails(1, &["t2"]);
    Ptq::run(&checkpoint, &["--scheme", "t3", "--group-size", "256"]).fails(1, &["t3", "256", "128"]);
    Ptq::run(&checkpoint, &["--bits", "3", "--percentile", "99", "--method", "rtn"]).fails(2, &["t3", "--percentile"]);
    Ptq::run(&checkpoint, &["--bits", "3", "--method", "exact"]).fails(2, &["exact", "t3"]);
}
