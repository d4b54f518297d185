//! Compares every block type of GGUF files with the values, ids and logits in `golden.json` of the files: values decoded
//! by the Python package `gguf` and by llama.cpp, logits computed from them by `transformers` in float32.

use crate::common::{all_logits, iec};
use crate::cuda::{on_gpu, simulated};
use crate::golden::{fp32, open};
use iec::convert::source::gguf::{Gguf, GgufTensor};
use iec::dtype::decode_floats;
use iec::iebin::{Entry, IebinReader, Store};
use iec::quant::block::tile::dequantize_rows;
use iec::runtime::{Engine, EngineOptions, Feed, Precision, Want};
use iec::scheme::TileLayout;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf/blocks")
}

fn golden() -> Vec<Value> {
    let golden: Value = serde_json::from_slice(&std::fs::read(directory().join("golden.json")).unwrap()).unwrap();
    let files = golden["files"].as_array().unwrap().clone();
    assert_eq!(files.len(), 21);
    files
}

fn path(file: &Value) -> PathBuf {
    directory().join(file["file"].as_str().unwrap())
}

fn sha256(values: &[f32]) -> String {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the values of a tensor of a pack.
fn values(reader: &IebinReader, entry: &Entry) -> Vec<f32> {
    let payload = reader.payload(entry).unwrap();
    let mut out = vec![0.0; entry.elements()];
    match entry.store {
        Store::Plain(dtype) => decode_floats(dtype, &payload, &mut out).unwrap(),
        Store::Tiled(spec) => {
            let (_, rows, cols) = entry.matrices().unwrap();
            dequantize_rows(&TileLayout::new(spec, rows, cols).unwrap(), &payload, 0..rows, &mut out);
        }
    }
    out
}

/// Returns the name in the pack of a tensor whose rows keep their order.
fn canonical(name: &str) -> Option<String> {
    if name == "token_embd.weight" {
        return Some("model.embed_tokens.weight".into());
    }
    let (layer, leaf) = name.strip_prefix("blk.")?.split_once('.')?;
    let leaf = match leaf {
        "attn_v.weight" => "self_attn.v_proj",
        "attn_output.weight" => "self_attn.o_proj",
        "ffn_gate.weight" => "mlp.gate_proj",
        "ffn_up.weight" => "mlp.up_proj",
        "ffn_down.weight" => "mlp.down_proj",
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{leaf}.weight"))
}

fn run(args: &[&str], paths: [&Path; 2], flags: [&str; 2]) {
    iec().args(args).arg(flags[0]).arg(paths[0]).arg(flags[1]).arg(paths[1]).assert().success();
}

fn import(file: &Value, pack: &Path) {
    iec().arg("import-gguf").arg(path(file)).arg("--out-dir").arg(pack).assert().success();
}

#[test]
fn every_tensor_has_the_values_of_the_reference_in_the_file_and_in_the_pack() {
    for file in golden() {
        let (name, dir) = (file["file"].as_str().unwrap(), TempDir::new().unwrap());
        let pack = dir.path().join("pack");
        import(&file, &pack);
        let (gguf, reader) = (Gguf::open(&path(&file)).unwrap(), IebinReader::open(&pack).unwrap());
        let expected = file["tensors"].as_object().unwrap();
        assert_eq!(gguf.tensors.len(), expected.len(), "{name}");
        let mut in_pack = 0;
        for tensor in &gguf.tensors {
            let golden = &expected[&tensor.name];
            assert_eq!(golden["type"], tensor.kind.to_string(), "{name}: {}", tensor.name);
            let hash = &golden["dequantized_sha256"];
            assert_eq!(*hash, sha256(&gguf.floats(tensor).unwrap()), "{name}: {}", tensor.name);
            if let Some(canonical) = canonical(&tensor.name) {
                let entry = reader.get(&canonical).unwrap_or_else(|| panic!("{name}: {canonical}"));
                assert_eq!(*hash, sha256(&values(&reader, entry)), "{name}: {canonical}");
                in_pack += 1;
            }
        }
        assert!(in_pack >= 6, "{name}");
    }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Returns the largest difference of a listed logit after the prompt, and the greedy ids.
fn answer(engine: &mut Engine, prompt: &Value) -> (f32, Vec<u32>) {
    let (mut sequence, mut logits) = (engine.new_sequence().unwrap(), Vec::new());
    let (mut feed, mut found, mut worst) = (ids(&prompt["ids"]), Vec::new(), 0f32);
    for step in 0..prompt["greedy_ids"].as_array().unwrap().len() {
        engine.forward(&mut [Feed { sequence: &mut sequence, tokens: &feed, want: Want::Last }], &mut logits).unwrap();
        if step == 0 {
            let number = |value: &Value| value.as_f64().unwrap() as f32;
            let listed = prompt["first_top5"].as_array().unwrap().iter();
            let all = prompt["first_logits"].as_array().into_iter().flatten().enumerate();
            let pairs = listed.map(|p| (p[0].as_u64().unwrap() as usize, number(&p[1])));
            for (id, golden) in pairs.chain(all.map(|(id, value)| (id, number(value)))) {
                worst = worst.max((logits[id] - golden).abs());
            }
        }
        let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        feed = vec![best as u32];
        found.push(best as u32);
    }
    (worst, found)
}

/// Unpacks to floats first, so that the comparison does not depend on the arithmetic of coded matrices.
#[test]
fn the_floats_of_every_file_give_the_ids_and_logits_of_the_reference() {
    let mut failures = Vec::new();
    for file in golden() {
        let (name, dir) = (file["file"].as_str().unwrap(), TempDir::new().unwrap());
        let [coded, floats, pack] = ["coded", "floats", "pack"].map(|name| dir.path().join(name));
        import(&file, &coded);
        run(&["unpack", "--dtype", "fp32"], [&coded, &floats], ["--model-dir", "--out-dir"]);
        run(&["pack"], [&floats, &pack], ["--hf-dir", "--out-dir"]);
        let mut engine = open(&pack, fp32());
        for (i, prompt) in file["prompts"].as_array().unwrap().iter().enumerate() {
            let (worst, found) = answer(&mut engine, prompt);
            if worst > 1e-3 || found != ids(&prompt["greedy_ids"]) {
                failures.push(format!("{name} prompt {i}: logits differ by {worst}, ids {found:?}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Types whose codes packs do not have; they become floats.
const DECODED: [&str; 10] =
    ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ2_0", "Q1_0", "Q2_0"];

/// Returns true for a file all of whose quantized tensors keep their codes.
fn is_kept(file: &Value) -> bool {
    file["types"].as_object().unwrap().keys().all(|kind| !DECODED.contains(&kind.as_str()))
}

#[test]
fn kept_files_come_back_byte_for_byte_and_keep_their_size() {
    let mut kept = 0;
    for file in golden().into_iter().filter(is_kept) {
        let (name, dir) = (file["file"].as_str().unwrap(), TempDir::new().unwrap());
        let [pack, again] = ["pack", "again.gguf"].map(|name| dir.path().join(name));
        import(&file, &pack);
        run(&["export-gguf"], [&pack, &again], ["--model-dir", "--out"]);
        let (old, new) = (Gguf::open(&path(&file)).unwrap(), Gguf::open(&again).unwrap());
        let data = |gguf: &Gguf, tensor: &GgufTensor| {
            let mut bytes = vec![0; tensor.nbytes as usize];
            gguf.read(tensor, 0, &mut bytes).unwrap();
            bytes
        };
        let mut bytes = 0;
        for tensor in &old.tensors {
            let ours = new.tensors.iter().find(|t| t.name == tensor.name).unwrap();
            assert_eq!((ours.kind, &ours.shape), (tensor.kind, &tensor.shape), "{name}: {}", tensor.name);
            assert!(data(&new, ours) == data(&old, tensor), "{name}: {} has other bytes", tensor.name);
            bytes += tensor.nbytes;
        }
        let reader = IebinReader::open(&pack).unwrap();
        // The sections of a tile are padded to 64 bytes, which is 1 % of these short rows, and 303 rows to 304.
        let stored: u64 = reader.entries().iter().map(|entry| entry.nbytes as u64).sum();
        assert!(stored as f64 <= 1.07 * bytes as f64, "{name}: {stored} bytes of {bytes}");
        kept += 1;
    }
    assert_eq!(kept, 11);
}

#[test]
fn kept_codes_give_the_ids_and_logits_of_the_reference_on_a_gpu() {
    let mut failures = Vec::new();
    for file in golden().into_iter().filter(is_kept) {
        let (name, dir) = (file["file"].as_str().unwrap(), TempDir::new().unwrap());
        let pack = dir.path().join("pack");
        import(&file, &pack);
        let options = EngineOptions { precision: Some(wide_precision(&pack)), ..fp32() };
        let mut engine = open(&pack, on_gpu(options));
        let prompt = &file["prompts"][0];
        let (worst, found) = answer(&mut engine, prompt);
        if worst > 2e-2 || found != ids(&prompt["greedy_ids"]) {
            failures.push(format!("{name}: logits differ by {worst}, ids {found:?}"));
        }
        // A GPU without tensor cores has other kernels.
        let tokens = |extra: &[&str]| {
            let precision = wide_precision(&pack).to_string();
            let args = ["run", "--json", "--max-new", "8", "--prompt", "Once upon a time there was", "--precision"];
            let mut command = simulated();
            command
                .env("IEC_SIM_CAPABILITY", "7.5")
                .args(args)
                .arg(precision)
                .args(extra)
                .arg("--model-dir")
                .arg(&pack);
            let done = command.assert().success();
            serde_json::from_slice::<Value>(&done.get_output().stdout).unwrap()["tokens"].clone()
        };
        if tokens(&["--device", "cuda"]) != tokens(&["--device", "cpu"]) {
            failures.push(format!("{name}: other tokens without tensor cores"));
        }
        // Kernels for 9 to 64 rows, and for many; activations of 16 and 8 bits.
        let narrow = if wide_precision(&pack) == Precision::Int4w { Precision::Int4 } else { Precision::Int8 };
        for rows in [5, 9, 150] {
            let text: Vec<u32> = ids(&prompt["ids"]).into_iter().cycle().take(rows).collect();
            let exact = all_logits(&mut open(&pack, options), &text);
            for (precision, limit) in [(wide_precision(&pack), 0.05), (narrow, 0.6)] {
                let options = EngineOptions { precision: Some(precision), ..fp32() };
                let gpu = all_logits(&mut open(&pack, on_gpu(options)), &text);
                let far = exact.iter().zip(&gpu).find(|(a, b)| (*a - *b).abs() > limit || b.is_nan());
                if let Some((a, b)) = far {
                    failures.push(format!("{name}: {rows} rows with {precision:?}: a logit is {b}, on the CPU {a}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Returns the precision with activations of 16 bits that a pack supports.
fn wide_precision(pack: &Path) -> Precision {
    let reader = IebinReader::open(pack).unwrap();
    let narrow = reader.entries().iter().any(|e| matches!(e.store, Store::Tiled(spec) if spec.scheme.bits() <= 4));
    if narrow { Precision::Int4w } else { Precision::Int8w }
}

/// Rounding activations to 16 bits, and keys and values to f16, changes logits by less than the tolerance.
#[test]
fn kept_codes_give_the_ids_and_logits_of_the_reference() {
    let mut failures = Vec::new();
    for file in golden().into_iter().filter(is_kept) {
        let (name, dir) = (file["file"].as_str().unwrap(), TempDir::new().unwrap());
        let pack = dir.path().join("pack");
        import(&file, &pack);
        let mut engine = open(&pack, EngineOptions { precision: Some(wide_precision(&pack)), ..fp32() });
        for (i, prompt) in file["prompts"].as_array().unwrap().iter().enumerate() {
            let (worst, found) = answer(&mut engine, prompt);
            if worst > 2e-2 || found != ids(&prompt["greedy_ids"]) {
                failures.push(format!("{name} prompt {i}: logits differ by {worst}, ids {found:?}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
