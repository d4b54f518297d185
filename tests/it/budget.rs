//! Tests `iec ptq --target-bpw` and `--target-size`: the quality for a given budget, and how an interrupted search is
//! resumed.

use crate::common::{fixture, iec};
use iec::manifest::Manifest;
use iec::manifest::plan::{Plan, Yardstick};
use iec::sha256::{Digest, Sha256, hex};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;
use tempfile::TempDir;

fn text(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/text").join(name)
}

const STORIES: &str = "tinystories_valid_30k.txt";
const SHERLOCK: &str = "heldback_sherlock_40k.txt";

/// Collects statistics from the first 3000 tokens of a text and returns the path of the file.
fn calibrated(dir: &Path, name: &str, more: &[&str]) -> PathBuf {
    let out = dir.join("stats.calib");
    let mut calib = iec();
    calib.arg("calib").arg("--hf-dir").arg(fixture("stories260k")).arg("--text").arg(text(name));
    calib.args(["--overwrite", "--max-tokens", "3000"]).arg("--out").arg(&out).args(more).assert().success();
    out
}

fn ptq(model: &str, out: &Path, arguments: &[&str]) -> Output {
    let mut ptq = iec();
    ptq.args(["ptq", "--overwrite", "--hf-dir"]).arg(fixture(model)).arg("--out").arg(out).args(arguments);
    ptq.output().unwrap()
}

/// Runs `iec ptq` on the embedded model, which must succeed.
fn plan(out: &Path, arguments: &[&str]) -> (Manifest, Plan) {
    let done = ptq("stories260k", out, arguments);
    assert_eq!(done.status.code(), Some(0), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    let manifest = Manifest::load(out).unwrap();
    let plan = manifest.document().plan.clone().unwrap();
    (manifest, plan)
}

fn hidden(dir: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with('.')).collect()
}

#[test]
fn a_budget_is_reached_from_below_and_better_spent_than_evenly() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("m.json");
    let (stats, stories) = (calibrated(dir.path(), SHERLOCK, &[]), text(STORIES));
    let (stats, stories) = (stats.to_str().unwrap(), stories.to_str().unwrap());
    let gate = ["--gate-text", stories, "--gate-windows", "8", "--calib", stats];
    let even = [&gate[..], &["--scheme", "int4", "--affine", "--include", ".", "--gate", "cosine=0.9"]].concat();
    assert!(ptq("stories260k", &out, &even).status.success());
    let even = Manifest::load(&out).unwrap().document().evidence.clone().unwrap();
    let target = even.bits_per_weight.to_string();
    let (manifest, plan) = plan(&out, &[&gate[..], &["--target-bpw", &target, "--plan-text", stories]].concat());
    let planned = manifest.document().evidence.clone().unwrap();
    assert!(planned.figures.kl < 0.7 * even.figures.kl, "{} {}", planned.figures.kl, even.figures.kl);
    assert_eq!(planned.bits_per_weight, plan.bits_per_weight, "the plan knows the pack to the byte");
    let share = plan.bits_per_weight / even.bits_per_weight;
    assert!(share <= 1.0 && share > 0.99, "{share}");
    // On windows that the gate has not read, the result is close to the prediction.
    assert_eq!(plan.yardstick, Yardstick::Divergence);
    assert_eq!(plan.text.as_ref().map(|text| (text.skipped, text.windows)), Some((8, 2)));
    let shown = iec().arg("inspect").arg(&out).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.contains("  plan          ") && shown.contains(" measured"), "{shown}");
    let measured = plan.measured.unwrap();
    assert!((0.5..2.0).contains(&(measured / plan.predicted)), "{measured} {}", plan.predicted);
    assert!(plan.predicted < plan.uniform.unwrap().predicted);
    // The embedding is also the output matrix: it is stored once and is sensitive.
    assert_eq!(plan.tensors.len(), 36);
    assert!(plan.tensors["model.embed_tokens.weight"].bits > 5.0, "{plan:?}");
    let kinds =
        |plan: &Plan| plan.tensors.values().map(|t| t.stored.clone()).collect::<std::collections::BTreeSet<_>>();
    assert!(kinds(&plan).len() >= 3, "{:?}", kinds(&plan));
}

#[test]
fn a_divergence_is_reached_with_the_bytes_that_it_needs() {
    let dir = TempDir::new().unwrap();
    let (out, stories) = (dir.path().join("m.json"), text(STORIES));
    let stories = stories.to_str().unwrap();
    let plans: Vec<Plan> = ["0.2", "0.02", "0.001"]
        .iter()
        .map(|kl| plan(&out, &["--target-kl", kl, "--plan-text", stories, "--plan-windows", "1"]).1)
        .collect();
    let bits: Vec<f64> = plans.iter().map(|plan| plan.bits_per_weight).collect();
    assert!(bits[0] < bits[1] && bits[1] < bits[2] && bits[0] < 5.0, "{bits:?}");
    for (plan, most) in plans.iter().zip([0.2, 0.02, 0.001]) {
        assert!(plan.predicted <= most && plan.measured.is_some(), "{} {most}", plan.predicted);
    }
    // The same bytes buy no lower divergence.
    let bytes = plans[1].bytes.to_string();
    let same = plan(&out, &["--target-size", &bytes, "--plan-text", stories, "--plan-windows", "1"]).1;
    assert!(same.predicted > 0.8 * plans[1].predicted, "{} {}", same.predicted, plans[1].predicted);
    for wrong in [
        &["--target-kl", "0.1"][..],
        &["--target-kl", "1e-9", "--plan-text", stories, "--plan-windows", "1"],
        &["--target-kl", "-1", "--plan-text", stories],
        &["--target-kl", "nan", "--plan-text", stories],
    ] {
        assert_eq!(ptq("stories260k", &out, wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn a_speed_is_reached_with_the_bytes_that_fit_into_its_time() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("m.json");
    // A memory of a megabyte per second.
    let at = |speed: &str| plan(&out, &["--target-speed", speed, "--bandwidth", "0.001"]).1;
    let plans = ["3", "5"].map(at);
    for (plan, least) in plans.iter().zip([3.0, 5.0]) {
        let speed = plan.speed.as_ref().unwrap();
        assert!(speed.tokens_per_second >= least && speed.tokens_per_second < 1.1 * least, "{speed:?}");
        assert!(speed.rates.is_empty());
    }
    assert!(plans[0].bytes > plans[1].bytes && plans[0].predicted < plans[1].predicted);
    let refused = |wrong: &[&str]| {
        let output = ptq("stories260k", &out, wrong);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&["--target-speed", "0"]).contains("--target-speed: found 0, expected tokens per second"));
    let limited = |speed: &'static str| refused(&["--target-speed", speed, "--bandwidth", "0.001"]);
    assert!(limited("1000").contains("out of reach: the fastest possible pack has"), "{}", limited("1000"));
    assert!(limited("0.1").contains("met without quantizing anything"), "{}", limited("0.1"));
    assert!(refused(&["--target-speed", "3", "--bandwidth", "-1"]).contains("--bandwidth: found -1"));
    assert!(refused(&["--target-speed", "3", "--target-bpw", "4"]).contains("--target-bpw"));
}

#[test]
fn a_dry_run_draws_the_best_packs_of_all_sizes() {
    let dir = TempDir::new().unwrap();
    let (out, page) = (dir.path().join("m.json"), dir.path().join("curve.html"));
    let options = |more: &[&str]| {
        let page = page.to_str().unwrap();
        ptq("stories260k", &out, &[&["--dry-run", "--report", page], more].concat())
    };
    let output = options(&["--target-bpw", "4.5", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let points = found["curve"].as_array().unwrap();
    let of = |name: &str| points.iter().map(|point| point[name].as_f64().unwrap()).collect::<Vec<_>>();
    let (bits, costs) = (of("bits_per_weight"), of("predicted"));
    assert!(points.len() > 30 && bits.is_sorted() && costs.iter().rev().is_sorted(), "{found}");
    assert!(bits[0] < 3.3 && *bits.last().unwrap() > 8.0, "{bits:?}");
    assert!(
        of("tokens_per_second").iter().all(|speed| *speed > 0.0) && found["tokens_per_second"].as_f64() > Some(0.0)
    );
    assert!(found["parts"].as_array().unwrap().iter().any(|part| part["part"] == "the first layer"), "{found}");
    let html = std::fs::read_to_string(&page).unwrap();
    assert_eq!(html.matches("<polyline").count(), 2);
    assert!(html.contains("bits per weight") && html.contains("model.layers.0.mlp.down_proj.weight"));
    assert!(!out.exists());
    let without = options(&["--bits", "4"]);
    assert_eq!(without.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&without.stderr).contains("--dry-run and --report without a budget"));
}

#[test]
fn a_budget_of_bytes_holds_for_the_file_that_pack_writes() {
    let dir = TempDir::new().unwrap();
    let (out, pack) = (dir.path().join("m.json"), dir.path().join("pack"));
    for (bytes, more) in [(200_000u64, &[][..]), (300_000, &["--exclude", "embed"])] {
        let size = bytes.to_string();
        let (_, plan) = plan(&out, &[&["--target-size", &size], more].concat());
        assert!(plan.bytes <= bytes && plan.bytes > bytes - bytes / 50, "{}", plan.bytes);
        assert_eq!((plan.yardstick, plan.measured), (Yardstick::Weights, None));
        let mut command = iec();
        command.arg("pack").arg("--hf-dir").arg(fixture("stories260k")).arg("--q4-map").arg(&out);
        command.arg("--overwrite").arg("--out-dir").arg(&pack).assert().success();
        assert_eq!(std::fs::metadata(pack.join("model.ie.bin")).unwrap().len(), plan.bytes);
        assert_eq!(plan.tensors.contains_key("model.embed_tokens.weight"), more.is_empty());
    }
}

#[test]
fn experts_in_mxfp4_stay_and_routers_are_left_alone() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("m.json");
    let done = ptq("gptoss-trained", &out, &["--target-bpw", "6", "--json"]);
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    let summary: Value = serde_json::from_slice(&done.stdout).unwrap();
    let tensors = summary["plan"]["tensors"].as_object().unwrap();
    let stored = |part: &str| -> Vec<&Value> {
        tensors.iter().filter(|(name, _)| name.contains(part)).map(|(_, tensor)| &tensor["stored"]).collect()
    };
    assert_eq!(stored(".experts."), vec!["mxfp4"; 8]);
    assert!(stored("router").is_empty());
    assert!(stored("q_proj").iter().all(|stored| *stored == "int8/32"), "{summary}");
    let bits = summary["plan"]["bits_per_weight"].as_f64().unwrap();
    assert!(bits <= 6.0 && bits > 5.94, "{bits}");
}

#[test]
fn the_manifest_of_a_budget_is_the_same_for_any_number_of_threads() {
    let dir = TempDir::new().unwrap();
    let made = |threads: &str| {
        let dir = dir.path().join(threads);
        std::fs::create_dir(&dir).unwrap();
        let stats = calibrated(&dir, STORIES, &["--hessian", "--threads", threads]);
        let (out, plain) = (dir.join("m.json"), dir.join("gptq.json"));
        let (stories, sherlock) = (text(STORIES), text(SHERLOCK));
        let common = ["--calib", stats.to_str().unwrap(), "--threads", threads];
        let gate = ["--gate", "kl=9", "--gate-windows", "2", "--gate-text", sherlock.to_str().unwrap()];
        let budget = ["--target-bpw", "5.2", "--plan-windows", "1", "--plan-text", stories.to_str().unwrap()];
        let (_, plan) = plan(&out, &[&common[..], &gate, &budget].concat());
        assert!(plan.measured.is_some());
        let done = ptq("stories260k", &plain, &[&common[..], &["--bits", "4", "--method", "gptq"]].concat());
        assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
        [stats, out, plain].map(|path| std::fs::read(path).unwrap())
    };
    let (one, many) = (made("1"), made("3"));
    for (name, (one, many)) in ["statistics", "budget", "gptq"].iter().zip(one.iter().zip(&many)) {
        assert!(one == many, "{name}");
    }
}

/// Formats a journal line: a prefix of the SHA-256 of the text, then the text.
fn line(text: &str) -> String {
    format!("{} {text}", &hex(Sha256::new_with_prefix(text))[..16])
}

#[test]
fn a_plan_that_was_cut_short_goes_on_with_what_it_has_measured() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("m.json");
    let stories = text(STORIES);
    let budget = ["--target-bpw", "5", "--plan-windows", "1", "--plan-text", stories.to_str().unwrap()];
    let (_, expected) = plan(&out, &budget);
    let manifest = std::fs::read(&out).unwrap();
    std::fs::remove_file(&out).unwrap();
    assert!(hidden(dir.path()).is_empty(), "a finished run leaves nothing");

    // A dry run prints the same plan and leaves only its measurements.
    let dry = ptq("stories260k", &out, &[&budget[..], &["--dry-run", "--json"]].concat());
    assert_eq!(dry.status.code(), Some(0), "{}", String::from_utf8_lossy(&dry.stderr));
    let mut printed: serde_json::Value = serde_json::from_slice(&dry.stdout).unwrap();
    let fields = printed.as_object_mut().unwrap();
    assert_eq!(fields.remove("schema_version"), Some(1.into()));
    assert!(["curve", "parts", "tokens_per_second"].iter().all(|name| fields.remove(*name).is_some()));
    let printed: Plan = serde_json::from_value(printed).unwrap();
    assert_eq!(printed, Plan { measured: None, ..expected.clone() });
    assert!(!out.exists());
    let [partial] = &hidden(dir.path())[..] else { panic!("one directory of measurements") };
    let journal = partial.join("journal");
    let written = std::fs::read_to_string(&journal).unwrap();
    let lines: Vec<&str> = written.lines().collect();

    // With a journal cut after some measurements of single tensors, the result has the same bytes.
    let alone = lines.iter().position(|line| line.contains("window 0 with")).unwrap();
    std::fs::write(&journal, lines[..alone + 5].join("\n") + "\n").unwrap();
    assert_eq!(plan(&out, &budget).1, expected);
    assert!(std::fs::read(&out).unwrap() == manifest && hidden(dir.path()).is_empty());

    // The resumed run must take its measurements from the journal, also for another target; changed values there must
    // change the plan.
    ptq("stories260k", &out, &[&budget[..], &["--dry-run"]].concat());
    let written = std::fs::read_to_string(&journal).unwrap();
    let edited: Vec<String> = written
        .lines()
        .map(|record| match record.split_once(' ') {
            Some((_, text)) if text.contains(r#""task":"alone""#) => {
                let at = text.find(r#""kl":"#).unwrap() + 5;
                let end = at + text[at..].find(['}', ',']).unwrap();
                line(&format!("{}77.0{}", &text[..at], &text[end..]))
            }
            _ => record.to_string(),
        })
        .collect();
    std::fs::write(&journal, edited.join("\n") + "\n").unwrap();
    let (_, other) = plan(&out, &[&["--target-bpw", "6"], &budget[2..]].concat());
    assert!(other.uniform.unwrap().predicted > 77.0);
}

#[test]
fn budgets_that_cannot_be_met_or_make_no_sense_are_refused() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("m.json");
    let (stories, stats) = (text(STORIES), calibrated(dir.path(), STORIES, &[]));
    let (stories, stats) = (stories.to_str().unwrap(), stats.to_str().unwrap());
    let cases: &[(&[&str], &str)] = &[
        (&["--target-bpw", "0"], "expected bits per weight"),
        (&["--target-bpw", "nan"], "expected bits per weight"),
        (&["--target-bpw=-4"], "expected bits per weight"),
        (&["--target-bpw", "inf"], "expected bits per weight"),
        (&["--target-bpw", "2"], "the smallest possible pack has 3."),
        (&["--target-size", "1K"], "the smallest possible pack has 3."),
        (&["--target-bpw", "5", "--exclude", "mlp"], "the smallest possible pack has"),
        (&["--target-bpw", "33"], "without quantizing anything"),
        (&["--target-size", "0"], "1 to 9e15 bytes"),
        (&["--target-bpw", "5", "--target-size", "1M"], "cannot be used with"),
        (&["--target-bpw", "5", "--bits", "4"], "cannot be used with"),
        (&["--target-bpw", "5", "--rules", "x.json"], "cannot be used with"),
        (&["--target-bpw", "5", "--keep-failing", "int8"], "--max-bpw"),
        (&["--bits", "4", "--plan-text", stories], "--target-bpw"),
        (&["--target-bpw", "5", "--plan-text", stories, "--gate-text", stories], "--gate-windows"),
        (
            &["--target-bpw", "5", "--plan-text", stories, "--gate-text", stories, "--gate-windows", "99"],
            "all used by calibration or the gate",
        ),
        (&["--target-bpw", "5", "--plan-windows", "2"], "--plan-text"),
        (&["--target-bpw", "5", "--plan-windows", "0", "--plan-text", stories], "--plan-windows"),
        (&["--target-bpw", "5", "--calib", stats, "--gate-text", stories], "this text was used for calibration"),
    ];
    for (arguments, words) in cases {
        let done = ptq("stories260k", &out, arguments);
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: `{said}` should say `{words}`");
    }
    assert!(!out.exists());
}
