//! `iec eval`: figures by the rules of other tools, held against plain arithmetic on all logits.

use crate::common::{all_logits, fixture, iec, packed, packed_as};
use iec::eval::windows::leading_token;
use iec::eval::{Windows, divergence, perplexity};
use iec::iebin::IebinReader;
use iec::runtime::text::Tokenizer;
use iec::runtime::{Engine, EngineOptions, Precision};
use serde_json::Value;
use std::path::{Path, PathBuf};

const TEXT: &str = "tests/text/tinystories_valid_30k.txt";

fn open(pack: &Path, precision: Option<Precision>) -> Engine {
    let options = EngineOptions { precision, threads: 2, ..EngineOptions::default() };
    Engine::open(&IebinReader::open(pack).unwrap(), &options).unwrap()
}

fn text() -> (PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(TEXT);
    let text = std::fs::read_to_string(&path).unwrap();
    (path, text)
}

/// The embedded model in 4 bits.
fn four_bits() -> PathBuf {
    let rules = Path::new(env!("CARGO_TARGET_TMPDIR")).join("eval-q4_0.json");
    std::fs::write(&rules, r#"{"version":1,"rules":[{"include":"layers.*proj(.weight)?$","scheme":"q4_0"}]}"#).unwrap();
    packed_as("eval-q4_0", &fixture("stories260k"), &["--q4-map", rules.to_str().unwrap()])
}

/// Natural logarithms of the probabilities that a row of logits stands for.
fn ln_p(row: &[f32]) -> Vec<f64> {
    let sum: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
    row.iter().map(|v| f64::from(*v) - sum.ln()).collect()
}

#[test]
fn figures_are_those_of_plain_arithmetic_on_all_logits() {
    let float = packed("stories260k");
    let tokenizer = Tokenizer::open(&float.path().join("tokenizer.json")).unwrap();
    let (mut model, mut reference) = (open(&four_bits(), Some(Precision::Int4w)), open(float.path(), None));
    let windows = Windows::of_text(&tokenizer, &text().1, 300, Some(3)).unwrap();
    assert_eq!(leading_token(&tokenizer).unwrap(), Some(1));
    let found = divergence(&mut model, &mut reference, &windows).unwrap();
    assert_eq!(found.model, perplexity(&mut model, &windows).unwrap());
    let (mut nll, mut kl, mut same, mut count) = (0.0, 0.0, 0, 0);
    let vocab = model.config().vocab;
    let argmax = |p: &[f64]| (0..vocab).max_by(|a, b| p[*a].total_cmp(&p[*b])).unwrap();
    for window in windows.iter() {
        assert_eq!((window.len(), window[0]), (300, 1));
        let (ours, theirs) = (all_logits(&mut model, &window), all_logits(&mut reference, &window));
        for i in 150..299 {
            let row = |logits: &[f32]| ln_p(&logits[i * vocab..(i + 1) * vocab]);
            let (ours, theirs) = (row(&ours), row(&theirs));
            nll -= ours[window[i + 1] as usize];
            kl += theirs.iter().zip(&ours).map(|(t, o)| t.exp() * (t - o)).sum::<f64>();
            same += u32::from(argmax(&ours) == argmax(&theirs));
            count += 1;
        }
    }
    assert_eq!(windows.scored(), count);
    let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{a} {b}");
    close(found.model.nll.value, nll / count as f64);
    close(found.kl.value, kl / count as f64);
    close(found.top1_agreement.value, f64::from(same) / count as f64);
    assert!(found.kl.value > 1e-3 && found.perplexity_ratio.value > 1.0, "{found:?}");
}

#[test]
fn a_model_does_not_diverge_from_itself() {
    let float = packed("stories260k");
    let tokenizer = Tokenizer::open(&float.path().join("tokenizer.json")).unwrap();
    let windows = Windows::of_text(&tokenizer, &text().1, 128, Some(2)).unwrap();
    let found = divergence(&mut open(float.path(), None), &mut open(float.path(), None), &windows).unwrap();
    assert_eq!((found.kl_spread.max, found.top1_agreement.value, found.rms_delta_p.value), (0.0, 1.0, 0.0));
    assert_eq!((found.model, found.perplexity_ratio.value), (found.reference, 1.0));
}

/// Needs `llama-trained`, which is not in the repository.
#[test]
fn second_halves_of_windows_have_the_perplexity_of_hugging_face() {
    let Some(extra) = std::env::var_os("IEC_EXTRA_FIXTURES").map(PathBuf::from) else { return };
    let hf_dir = extra.join("llama-trained");
    let golden: Value = serde_json::from_slice(&std::fs::read(hf_dir.join("golden.json")).unwrap()).unwrap();
    let text = std::fs::read_to_string(extra.join(golden["eval_text_file"].as_str().unwrap())).unwrap();
    let golden = &golden["perplexity_512_second_half"];
    let tokenizer = Tokenizer::open(&hf_dir.join("tokenizer.json")).unwrap();
    let windows = Windows::of_text(&tokenizer, &text, 512, None).unwrap();
    assert_eq!(windows.scored() as u64, golden["n"].as_u64().unwrap());
    let pack = packed_as("llama-trained", &hf_dir, &[]);
    let found = perplexity(&mut open(&pack, Some(Precision::Fp32)), &windows).unwrap();
    let nll = golden["nll_mean"].as_f64().unwrap();
    assert!((found.nll.value - nll).abs() < 1e-5, "{} {nll}", found.nll.value);
}

#[test]
fn the_report_tells_model_reference_and_text() {
    let float = packed("stories260k");
    let run = |more: &[&str]| {
        let mut command = iec();
        command.args(["eval", "--ctx", "128", "--windows", "2", "--model-dir"]).arg(four_bits());
        command.arg("--text").arg(text().0).args(more);
        command.assert()
    };
    let reference = float.path().to_str().unwrap();
    let json = run(&["--kl-ref", reference, "--json"]).success();
    let line: Value = serde_json::from_slice(&json.get_output().stdout).unwrap();
    assert_eq!((&line["ctx"], &line["windows"], &line["tokens_scored"]), (&128.into(), &2.into(), &126.into()));
    assert_eq!((&line["precision"], &line["reference"]["precision"]), (&"int4".into(), &"fp32".into()));
    assert_eq!(line["text"]["sha256"].as_str().unwrap().len(), 64);
    let at = |path: &str| line.pointer(path).unwrap_or_else(|| panic!("{path} in {line}")).as_f64().unwrap();
    let ratio = at("/perplexity/value") / at("/reference/perplexity/value");
    assert!((ratio / at("/reference/perplexity_ratio/value") - 1.0).abs() < 1e-9);
    assert!(at("/reference/kl/mean") > 0.0 && at("/reference/kl/max") >= at("/reference/kl/p99"));
    assert!(at("/perplexity/ci95/0") < at("/perplexity/value") && at("/perplexity/stderr") > 0.0);
    let table = run(&[]).success();
    assert!(String::from_utf8_lossy(&table.get_output().stdout).contains("95 % interval"));
    run(&["--kl-ref", "no/such/pack"]).code(3);
    let other = packed("llama-gqa");
    run(&["--kl-ref", other.path().to_str().unwrap()]).code(2);
    iec().args(["eval", "--model-dir", reference]).assert().code(2);
    let short = float.path().join("short.txt");
    std::fs::write(&short, "Once").unwrap();
    iec().args(["eval", "--model-dir", reference, "--text"]).arg(&short).assert().code(2);
}
