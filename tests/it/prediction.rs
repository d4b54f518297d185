//! Layers of multi-token prediction, against what the published code computes.

use crate::common::{fixture, golden, iec, packed, packed_as};
use iec::generate::speculate::{Drafter, Memory, Speculator, TextSoFar};
use iec::generate::{Completion, Options, Request, generate};
use iec::iebin::IebinReader;
use iec::runtime::{Engine, EngineOptions, Feed, Output, Precision, Predictor, Want};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Fixtures with such layers: behind the layers of the model, or apart from them.
const FIXTURES: [&str; 5] = ["qwen35", "qwen35moe", "qwen3next", "deepseek3", "glm4moe"];

fn with_mtp(name: &str) -> PathBuf {
    packed_as(&format!("{name}-with-mtp"), &fixture(name), &["--with-mtp"])
}

fn open(pack: &Path, precision: Precision) -> (Engine, Vec<Predictor>) {
    let reader = IebinReader::open(pack).unwrap();
    let options = EngineOptions { precision: Some(precision), threads: 2, ..EngineOptions::default() };
    let engine = Engine::open(&reader, &options).unwrap();
    let predictors = engine.predictors(&reader).unwrap();
    (engine, predictors)
}

/// Returns the logits and the output for all tokens, read in steps of at most `piece` tokens.
fn read(engine: &mut Engine, tokens: &[u32], piece: usize) -> (Vec<f32>, Vec<f32>) {
    let mut sequence = engine.new_sequence().unwrap();
    let (mut logits, mut hidden) = (Vec::new(), Vec::new());
    for tokens in tokens.chunks(piece) {
        let feed = Feed { sequence: &mut sequence, tokens, want: Want::All };
        engine.step(&mut [feed], Output::Hidden { logits: &mut logits, hidden: &mut hidden }).unwrap();
    }
    (logits, hidden)
}

fn best(row: &[f32]) -> u32 {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32
}

/// Returns the logits of a layer for every token of a text, then those of two further drafts.
fn predict(predictor: &mut Predictor, tokens: &[u32], previous: &[f32], piece: usize) -> Vec<Vec<f32>> {
    let (vocab, width) = (predictor.config().vocab, predictor.config().hidden);
    let mut sequence = predictor.new_sequence().unwrap();
    let (mut logits, mut hidden) = (Vec::new(), Vec::new());
    for (tokens, previous) in tokens.chunks(piece).zip(previous.chunks(piece * width)) {
        let feed = Feed { sequence: &mut sequence, tokens, want: Want::All };
        predictor.step(&mut [feed], previous, [&mut logits, &mut hidden]).unwrap();
    }
    let mut rows: Vec<Vec<f32>> = logits.chunks_exact(vocab).map(<[f32]>::to_vec).collect();
    let mut previous = hidden[hidden.len() - width..].to_vec();
    for _ in 0..2 {
        let token = best(rows.last().unwrap());
        let (mut logits, mut hidden) = (Vec::new(), Vec::new());
        let feed = Feed { sequence: &mut sequence, tokens: &[token], want: Want::Last };
        predictor.step(&mut [feed], &previous, [&mut logits, &mut hidden]).unwrap();
        rows.push(logits);
        previous = hidden;
    }
    rows
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn layers_of_multi_token_prediction_compute_what_the_published_code_computes() {
    for name in FIXTURES {
        let golden = &golden(name)["prediction"];
        let (mut engine, mut predictors) = open(&with_mtp(name), Precision::Fp32);
        assert_eq!(predictors.len(), 1, "{name}");
        let tokens = ids(&golden["ids"]);
        let (_, hidden) = read(&mut engine, &tokens[..tokens.len() - 1], 512);
        let rows = predict(&mut predictors[0], &tokens[1..], &hidden, 512);
        let choices: Vec<u32> = rows.iter().map(|row| best(row)).collect();
        let of_text = tokens.len() - 1;
        assert_eq!(choices[..of_text], ids(&golden["choices"]), "{name}");
        assert_eq!(choices[of_text - 1..], ids(&golden["drafts"]), "{name}");
        for (row, expected) in rows[of_text - 1..].iter().zip(golden["logits"].as_array().unwrap()) {
            let expected: Vec<f32> = serde_json::from_value(expected.clone()).unwrap();
            let largest = row.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(largest < 1e-3, "{name}: {largest}");
        }
    }
}

#[test]
fn predictions_have_the_same_bits_in_pieces_of_any_size() {
    for name in ["qwen35moe", "deepseek3"] {
        let golden = &golden(name)["prediction"];
        let dir = with_mtp(name);
        let tokens = ids(&golden["ids"]);
        for precision in [Precision::Fp32, Precision::Bf16] {
            let (mut engine, mut predictors) = open(&dir, precision);
            let whole = read(&mut engine, &tokens[..tokens.len() - 1], 512);
            let rows = predict(&mut predictors[0], &tokens[1..], &whole.1, 512);
            for piece in [1, 7, 64] {
                let (logits, hidden) = read(&mut engine, &tokens[..tokens.len() - 1], piece);
                assert!(logits == whole.0 && hidden == whole.1, "{name}, {piece}");
                assert!(predict(&mut predictors[0], &tokens[1..], &hidden, piece) == rows, "{name}, {piece}");
            }
        }
    }
}

#[test]
fn the_output_of_the_final_norm_comes_for_all_tokens_and_logits_for_the_wanted_ones() {
    let dir = with_mtp("qwen3next");
    let (mut engine, mut predictors) = open(&dir, Precision::Fp32);
    let tokens = [3, 14, 15, 92, 65, 35];
    let (logits, hidden) = read(&mut engine, &tokens, 512);
    let (vocab, width) = (engine.config().vocab, engine.config().hidden);
    let mut sequences = [engine.new_sequence().unwrap(), engine.new_sequence().unwrap()];
    let [first, second] = &mut sequences;
    let feeds = &mut [
        Feed { sequence: first, tokens: &tokens, want: Want::Last },
        Feed { sequence: second, tokens: &tokens[..4], want: Want::Nothing },
    ];
    let (mut last, mut all) = (vec![7.0], vec![8.0]);
    engine.step(feeds, Output::Hidden { logits: &mut last, hidden: &mut all }).unwrap();
    assert!(last[0] == 7.0 && last[1..] == logits[5 * vocab..], "results are appended");
    assert!(all[0] == 8.0 && all[1..=6 * width] == hidden && all[1 + 6 * width..] == hidden[..4 * width]);
    let mut sequence = predictors[0].new_sequence().unwrap();
    let feed = Feed { sequence: &mut sequence, tokens: &tokens[1..], want: Want::All };
    let wrong = predictors[0].step(&mut [feed], &hidden[1..5 * width], [&mut Vec::new(), &mut Vec::new()]);
    assert!(wrong.unwrap_err().to_string().contains("5 tokens"));
}

#[test]
fn eval_measures_the_layers() {
    let dir = with_mtp("qwen35");
    let place = TempDir::new().unwrap();
    let text = place.path().join("text.txt");
    std::fs::write(&text, "The quick brown fox jumps over the lazy dog. ".repeat(40)).unwrap();
    let eval = |pack: &Path, more: &[&str]| {
        iec()
            .arg("eval")
            .arg(pack)
            .arg("--text")
            .arg(&text)
            .args(["--ctx", "96", "--windows", "2"])
            .args(more)
            .output()
            .unwrap()
    };
    let measured = eval(&dir, &["--precision", "fp32", "--mtp", "--json"]);
    assert!(measured.status.success(), "{}", String::from_utf8_lossy(&measured.stderr));
    let line: Value = serde_json::from_slice(&measured.stdout).unwrap();
    let plain: Value = serde_json::from_slice(&eval(&dir, &["--precision", "fp32", "--json"]).stdout).unwrap();
    assert_eq!(line["perplexity"], plain["perplexity"]);
    let layer = &line["mtp"][0];
    assert!(
        layer["value"].as_f64().unwrap() > 1.0 && (0.0..=1.0).contains(&layer["accepted"]["value"].as_f64().unwrap())
    );
    let shown = String::from_utf8(eval(&dir, &["--mtp"]).stdout).unwrap();
    assert!(shown.contains("first drafts that the model accepts"), "{shown}");

    let reader = IebinReader::open(&dir).unwrap();
    let offset = reader.get("mtp.layers.0.norm.weight").unwrap().offset;
    let damaged = place.path().join("damaged");
    assert!(std::process::Command::new("cp").arg("-r").arg(&dir).arg(&damaged).status().unwrap().success());
    let mut bytes = std::fs::read(dir.join("model.ie.bin")).unwrap();
    bytes[offset..offset + 4].fill(0xff);
    std::fs::write(damaged.join("model.ie.bin"), bytes).unwrap();
    let refused = eval(&damaged, &["--mtp"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("found logits that are NaN"), "{said}");

    let without = packed("qwen35");
    let refused = eval(without.path(), &["--mtp"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && said.contains("--with-mtp"), "{said}");
}

#[test]
fn layers_that_are_incomplete_or_unknown_are_refused_by_name() {
    let place = TempDir::new().unwrap();
    let source = place.path().join("source");
    let copied = std::process::Command::new("cp").arg("-r").arg(fixture("qwen3next")).arg(&source).status();
    assert!(copied.unwrap().success());
    let edit = |file: &str, change: &dyn Fn(&mut Value)| {
        let path = source.join(file);
        let mut content: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut content);
        std::fs::write(&path, content.to_string()).unwrap();
    };
    let refuse = |expected: &[&str]| {
        let out = place.path().join("pack");
        let made =
            iec().args(["pack", "--with-mtp", "--hf-dir"]).arg(&source).arg("--out-dir").arg(&out).output().unwrap();
        let said = String::from_utf8_lossy(&made.stderr).into_owned();
        assert!(!made.status.success() && !out.exists(), "{said}");
        assert!(expected.iter().all(|part| said.contains(part)), "{said}");
    };
    edit("config.json", &|config| config["mtp_num_hidden_layers"] = 2.into());
    refuse(&["mtp_num_hidden_layers", "at most 1"]);
    edit("config.json", &|config| {
        config["mtp_num_hidden_layers"] = 1.into();
        config["mtp_use_dedicated_embeddings"] = true.into();
    });
    refuse(&["mtp_use_dedicated_embeddings"]);
    edit("config.json", &|config| config["mtp_use_dedicated_embeddings"] = false.into());
    edit("model.safetensors.index.json", &|index| {
        index["weight_map"].as_object_mut().unwrap().retain(|name, _| !name.starts_with("mtp.fc"));
    });
    let shard = source.join("model-00002-of-00002.safetensors");
    rename_tensor(&shard, "mtp.fc.weight", "mtp.fd.weight");
    edit("model.safetensors.index.json", &|index| {
        index["weight_map"]["mtp.fd.weight"] = "model-00002-of-00002.safetensors".into();
    });
    refuse(&["mtp.layers.0.eh_proj.weight", "mtp.fc.weight", "leave out --with-mtp"]);

    // A description that promises layers which the pack lacks.
    let pack = packed("qwen3next");
    let json = pack.path().join("model.ie.json");
    let mut description: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    for (layers, expected) in [(1_u64, "mtp.layers.0."), (2, "mtp.layers.0."), (1_u64 << 40, "prediction_layers")] {
        description["model"]["prediction_layers"] = layers.into();
        description.as_object_mut().unwrap().remove("sha256");
        std::fs::write(&json, description.to_string()).unwrap();
        let text = place.path().join("text.txt");
        std::fs::write(&text, "to be or not to be ".repeat(99)).unwrap();
        let run = iec().arg("eval").arg(pack.path()).args(["--mtp", "--text"]).arg(text).output().unwrap();
        let said = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(!run.status.success() && said.contains(expected), "{said}");
    }
}

/// Renames a tensor in the header of a safetensors file; both names have the same length.
fn rename_tensor(file: &Path, from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(file).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    std::fs::write(file, bytes).unwrap();
}

/// Returns three drafts of a layer for a text, after the model has read all but its last token in steps of at most
/// `piece` tokens.
fn drafts(dir: &Path, tokens: &[u32], piece: usize) -> Vec<u32> {
    let (mut engine, mut predictors) = open(dir, Precision::Fp32);
    let (width, (_, hidden)) = (engine.config().hidden, read(&mut engine, &tokens[..tokens.len() - 1], 512));
    let mut speculator = Speculator::layer(predictors.remove(0), &engine).unwrap().always(3);
    let mut memory = Memory::default();
    for (i, computed) in hidden.chunks(piece * width).enumerate() {
        let known = (piece * (i + 1)).min(tokens.len() - 1);
        let text = TextSoFar { ids: &tokens[..known], room: 0, owner: b"", memory: &mut memory };
        speculator.follow(text, piece * i, computed).unwrap();
    }
    let text = TextSoFar { ids: tokens, room: 9, owner: b"", memory: &mut memory };
    speculator.draft_tokens(&mut [text]).unwrap().remove(0)
}

#[test]
fn texts_get_the_drafts_of_the_published_code() {
    for name in FIXTURES {
        let (golden, dir) = (&golden(name)["prediction"], with_mtp(name));
        let tokens = ids(&golden["ids"]);
        for piece in [1, 7, 512] {
            assert_eq!(drafts(&dir, &tokens, piece), ids(&golden["drafts"]), "{name}, {piece}");
        }
    }
    let long: Vec<u32> = (0..150).map(|i| (i * i + 7 * i) % 90).collect();
    let dir = with_mtp("glm4moe");
    let whole = drafts(&dir, &long, 512);
    for piece in [1, 33, 64] {
        assert_eq!(drafts(&dir, &long, piece), whole, "{piece}");
    }
}

fn complete(engine: &mut Engine, speculator: &mut Speculator, requests: Vec<Request>) -> Vec<Completion> {
    let options = Options { batch: requests.len(), ..Options::default() };
    generate(engine, None, speculator, requests, &options, |_| Ok(())).unwrap().completions
}

#[test]
fn texts_are_the_same_with_drafts_of_a_layer() {
    for name in FIXTURES {
        let dir = with_mtp(name);
        let (mut engine, mut predictors) = open(&dir, Precision::Bf16);
        let request = |n: u32| Request {
            ids: (0..40 + 30 * n).map(|i| (i * i + n) % 60).collect(),
            max_new: 40,
            keep_prefix: n == 0,
            ..Request::default()
        };
        let requests: Vec<Request> = (0..3).map(request).collect();
        let plain = complete(&mut engine, &mut Speculator::off(), requests.clone());
        let mut speculator = Speculator::layer(predictors.remove(0), &engine).unwrap().always(4);
        let drafted = complete(&mut engine, &mut speculator, requests.clone());
        for (drafted, plain) in drafted.iter().zip(&plain) {
            assert_eq!(drafted.ids, plain.ids, "{name}");
            let counts = drafted.drafts.each().find(|(drafter, _)| *drafter == Drafter::Layer).unwrap().1;
            assert!(counts.tokens > 0 && counts == drafted.drafts.total(), "{name}: {counts:?}");
        }
        // A later turn goes on with the state of the layer.
        let next = |first: &Completion| Request {
            ids: [&requests[0].ids, &first.ids[..], &[5, 6, 7]].concat(),
            prefix: first.prefix.clone(),
            max_new: 20,
            ..Request::default()
        };
        let expected = complete(&mut engine, &mut Speculator::off(), vec![next(&plain[0])]);
        let found = complete(&mut engine, &mut speculator, vec![next(&drafted[0])]);
        assert_eq!(found[0].ids, expected[0].ids, "{name}");
        assert!(found[0].reused_tokens > 0 && found[0].drafts.total().tokens > 0);
    }
}

#[test]
fn the_command_line_drafts_with_the_layer_of_the_pack() {
    let dir = with_mtp("qwen35");
    let run = |how: &str| -> Value {
        let args = ["run", "--prompt", "one two three", "-n", "24", "--json", "--speculate", how, "--model-dir"];
        let output = iec().args(args).arg(&dir).assert().success().get_output().stdout.clone();
        serde_json::from_slice(&output).unwrap()
    };
    let plain = run("off");
    for how in ["mtp", "auto"] {
        let found = run(how);
        assert_eq!(found["tokens"], plain["tokens"], "{how}");
        let drafted = |name: &str| found["drafters"][name]["tokens"].as_u64().unwrap_or(0);
        assert_eq!(found["tokens_drafted"], drafted("mtp") + drafted("ngram"), "{how}");
        assert!(how == "auto" || drafted("mtp") > 0 && drafted("ngram") == 0, "{found}");
    }
}

#[test]
fn quantized_packs_quantize_the_layer_like_the_last_one() {
    for name in ["qwen35", "glm4moe"] {
        let dir = packed_as(&format!("{name}-with-mtp-4"), &fixture(name), &["--with-mtp", "--recipe", "nl4"]);
        let reader = IebinReader::open(&dir).unwrap();
        let store = |tensor: &str| reader.entries().iter().find(|entry| entry.name == tensor).unwrap().store;
        let layers = reader.description.model.as_ref().unwrap().n_layers;
        let mut quantized = 0;
        for entry in reader.entries() {
            let Some(leaf) = entry.name.strip_prefix("mtp.layers.0.") else { continue };
            let names = (0..layers).rev().map(|n| format!("model.layers.{n}.{leaf}"));
            if let Some(like) = names.into_iter().find(|name| reader.entries().iter().any(|entry| entry.name == *name))
            {
                assert_eq!(entry.store, store(&like), "{leaf}");
                quantized += usize::from(matches!(entry.store, iec::iebin::Store::Tiled(_)));
            }
        }
        assert!(quantized > 3, "{name}: {quantized}");
        let (mut engine, _) = open(&dir, Precision::Int4);
        let mut speculator =
            Speculator::layer(engine.predictors(&reader).unwrap().remove(0), &engine).unwrap().always(3);
        let request = Request { ids: (0..50).map(|i| (7 * i) % 60).collect(), max_new: 30, ..Request::default() };
        let plain = complete(&mut engine, &mut Speculator::off(), vec![request.clone()]);
        let drafted = complete(&mut engine, &mut speculator, vec![request]);
        assert_eq!(drafted[0].ids, plain[0].ids, "{name}");
        assert!(drafted[0].drafts.total().tokens > 0);
        let unpacked = tempfile::tempdir().unwrap();
        iec()
            .args(["unpack", "-q", "--model-dir"])
            .arg(&dir)
            .arg("--out-dir")
            .arg(unpacked.path().join("hf"))
            .assert()
            .success();
    }
}
