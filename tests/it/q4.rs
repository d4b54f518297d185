//! Tests `iec q4`: `pack` copies its codes, and they are the bytes that `pack` itself would compute.

use crate::checkpoint::{Tensor, edit_json, edited, files};
use crate::common::{fixture, iec};
use iec::catalogue::Role;
use iec::iebin::{IebinReader, Store};
use iec::manifest::Manifest;
use iec::scheme::QuantSpec;
use iec::sha256::{Digest, Sha256, hex};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const NAMES: [&str; 3] = ["model.q4.bin", "model.q4.scales.fp16.bin", "q4_manifest.expanded.json"];

fn q4(checkpoint: &Path, out: &Path, arguments: &[&str]) {
    iec()
        .args(["q4", "--overwrite", "--hf-dir"])
        .arg(checkpoint)
        .arg("--out-dir")
        .arg(out)
        .args(arguments)
        .assert()
        .success();
}

fn pack(checkpoint: &Path, out: &Path, manifest: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut command = iec();
    command.args(["pack", "--hf-dir"]).arg(checkpoint).arg("--out-dir").arg(out).arg("--q4-map").arg(manifest);
    command.assert().success();
    files(out)
}

#[test]
fn packing_finished_bytes_equals_packing_the_manifest() {
    for (model, arguments) in [
        ("stories260k", vec!["--bits", "4"]),
        ("stories260k", vec!["--bits", "4", "--affine"]),
        ("stories260k", vec!["--bits", "8", "--include-lm-head"]),
        ("llama-gqa", vec!["--group-size", "row", "--force"]),
        ("gptoss-bf16", vec!["--bits", "4"]),
        ("gptoss-bf16", vec!["--group-size", "tensor", "--force"]),
        ("gptoss-trained", vec!["--bits", "4"]),
        ("stories260k", vec!["--group-size", "row", "--keep-failing", "bf16"]),
        ("mixtral", vec!["--bits", "4"]),
        ("qwen3moe", vec!["--bits", "8"]),
        ("phi3", vec!["--bits", "4", "--group-size", "64", "--force"]),
        ("gemma2", vec!["--bits", "4", "--force"]),
    ] {
        let dir = TempDir::new().unwrap();
        let path = |name: &str| dir.path().join(name);
        let manifest = path("manifest.json");
        let mut ptq = iec();
        ptq.args(["ptq", "--hf-dir"]).arg(fixture(model)).arg("--out").arg(&manifest).args(&arguments);
        ptq.assert().success();
        q4(&fixture(model), &path("q4"), &["--manifest", manifest.to_str().unwrap(), "--chunk-rows", "5"]);
        let expanded = path("q4").join(NAMES[2]);
        let direct = pack(&fixture(model), &path("direct"), &manifest);
        let taken = pack(&fixture(model), &path("taken"), &expanded);
        assert!(direct == taken, "{model} {arguments:?}");
    }
}

#[test]
fn the_files_do_not_depend_on_chunks_or_threads_and_replace_older_ones() {
    let dir = TempDir::new().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    q4(&fixture("llama-gqa"), &b, &["--scheme", "int4-row"]);
    let rows = files(&b);
    q4(&fixture("llama-gqa"), &a, &["--threads", "1", "--chunk-rows", "1"]);
    q4(&fixture("llama-gqa"), &b, &["--threads", "5"]);
    assert_eq!(files(&a).into_keys().collect::<Vec<_>>(), NAMES.map(PathBuf::from));
    assert!(files(&a) == files(&b) && files(&b) != rows);
}

#[test]
fn plain_q4_0_is_byte_identical_to_ggml() {
    let dir = TempDir::new().unwrap();
    let rules = dir.path().join("rules.json");
    std::fs::write(&rules, r#"{"version":1,"rules":[{"include":"_proj","scheme":"q4_0","method":"rtn"}]}"#).unwrap();
    q4(&fixture("stories260k"), dir.path(), &["--manifest", rules.to_str().unwrap()]);
    let [codes, scales] = [0, 1].map(|i| std::fs::read(dir.path().join(NAMES[i])).unwrap());
    let manifest = Manifest::load(&dir.path().join(NAMES[2])).unwrap();
    let mut blocks = Vec::new();
    // GGML cannot quantize the down projections, whose 172 columns are not divisible by 32.
    for (name, entry) in manifest.document().tensors.iter().filter(|(_, e)| e.cols % 32 == 0) {
        let range = manifest.decide(name, &[entry.rows, entry.cols]).unwrap().unwrap().packed.unwrap();
        let slice = |bytes: &[u8], r: &std::ops::Range<u64>| bytes[r.start as usize..r.end as usize].to_vec();
        let (codes, scales) = (slice(&codes, &range.codes), slice(&scales, &range.scales));
        for (code, scale) in codes.chunks_exact(16).zip(scales.chunks_exact(2)) {
            blocks.extend_from_slice(scale);
            blocks.extend_from_slice(code);
        }
    }
    // SHA-256 of the output of ggml_quantize_chunk(GGML_TYPE_Q4_0) of llama.cpp (November 2026) for the same tensors
    // in the same order.
    let ggml = "cd271dc52b4438ca89a788a2a3471c76ad7bd1ca5b2be2b4e12c23f491688903";
    assert_eq!((blocks.len(), hex(Sha256::new_with_prefix(&blocks)).as_str()), (96_480, ggml));
}

#[test]
fn finished_bytes_become_tiles() {
    let dir = TempDir::new().unwrap();
    q4(&fixture("stories260k"), dir.path(), &[]);
    let manifest = Manifest::load(&dir.path().join(NAMES[2])).unwrap();
    let decision = manifest.decide("model.layers.0.self_attn.q_proj.weight", &[64, 64]).unwrap().unwrap();
    assert_eq!(decision.quant.spec, QuantSpec::Q4_0);
    let range = decision.packed.unwrap();
    // 64 rows of two blocks, each with 16 bytes of codes and two of scale.
    assert_eq!((range.codes.end - range.codes.start, range.scales.end - range.scales.start), (64 * 32, 64 * 4));
    let layout = iec::scheme::TileLayout::new(QuantSpec::Q4_0, 64, 64).unwrap();
    let mut tiles = vec![0; layout.nbytes()];
    range.read_tiles(&layout, 0, 0..64, &mut tiles).unwrap();
    // The first block of the matrix must be in the first lane of the first tile.
    let codes = std::fs::read(&range.bin).unwrap();
    let start = range.codes.start as usize;
    for (j, byte) in codes[start..start + 16].iter().enumerate() {
        assert_eq!(tiles[layout.codes_offset + 64 * (j / 4) + j % 4], *byte);
    }
}

#[test]
fn the_output_matrix_is_included_by_flag_or_variable() {
    let has_head = |arguments: &[&str], variable: Option<&str>| {
        let dir = TempDir::new().unwrap();
        let mut command = iec();
        command.args(["q4", "--hf-dir"]).arg(fixture("llama-gqa")).arg("--out-dir").arg(dir.path()).args(arguments);
        if let Some(value) = variable {
            command.env("IE_Q4_INCLUDE_LM_HEAD", value).env("CHUNK_ROWS", "3");
        }
        command.assert().success();
        Manifest::load(&dir.path().join(NAMES[2])).unwrap().document().tensors.contains_key("lm_head.weight")
    };
    assert!(!has_head(&[], None));
    assert!(has_head(&["--include-lm-head"], None));
    assert!(has_head(&[], Some("1")));
    assert!(!has_head(&[], Some("0")));
}

#[test]
fn changed_bytes_and_other_weights_are_refused() {
    let dir = TempDir::new().unwrap();
    q4(&fixture("llama-gqa"), dir.path(), &[]);
    let refused = |checkpoint: &Path, words: &str| {
        let out = TempDir::new().unwrap();
        let mut command = iec();
        command.args(["pack", "--hf-dir"]).arg(checkpoint).arg("--out-dir").arg(out.path().join("pack"));
        let output = command.arg("--q4-map").arg(dir.path().join(NAMES[2])).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(words), "{stderr}");
    };
    let other = edited("llama-gqa", |tensors| tensors.values_mut().next().unwrap().bytes[0] ^= 1);
    let manifest = dir.path().join(NAMES[2]);
    let mut again = iec();
    again
        .args(["q4", "--hf-dir"])
        .arg(other.path())
        .arg("--manifest")
        .arg(&manifest)
        .arg("--out-dir")
        .arg(dir.path().join("again"));
    again.assert().code(1);

    let codes = dir.path().join(NAMES[0]);
    let mut bytes = std::fs::read(&codes).unwrap();
    bytes[1000] ^= 0x10;
    std::fs::write(&codes, &bytes).unwrap();
    refused(&fixture("llama-gqa"), "SHA-256");
    bytes.pop();
    std::fs::write(&codes, &bytes).unwrap();
    refused(&fixture("llama-gqa"), "past the end");
    edit_json(&manifest, |m| m["tensors"]["model.layers.0.mlp.up_proj.weight"]["q4_nbytes"] = 1.into());
    refused(&fixture("llama-gqa"), "q4_nbytes: found 1");
}

#[test]
fn a_failure_leaves_no_file_behind() {
    let broken = edited("llama-gqa", |tensors: &mut BTreeMap<String, Tensor>| {
        let last = "model.layers.2.mlp.up_proj.weight";
        tensors.get_mut(last).unwrap().bytes[..2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    });
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("q4");
    iec().args(["q4", "--hf-dir"]).arg(broken.path()).arg("--out-dir").arg(&out).assert().code(1);
    assert!(!out.exists());
    // Files of an earlier successful run are kept.
    q4(&fixture("llama-gqa"), &out, &[]);
    let before = files(&out);
    iec().args(["q4", "--overwrite", "--hf-dir"]).arg(broken.path()).arg("--out-dir").arg(&out).assert().code(1);
    assert!(files(&out) == before);
}

#[test]
fn attention_is_appended_to_a_pack_as_packing_would_have_done() {
    let dir = TempDir::new().unwrap();
    let (manifest, expected) = (dir.path().join("m.json"), dir.path().join("expected"));
    let attention = ["--bits", "4", "--include", "self_attn"];
    let mut ptq = iec();
    ptq.args(["ptq", "--hf-dir"]).arg(fixture("gptoss-trained")).arg("--out").arg(&manifest).args(attention);
    ptq.assert().success();
    let expected = pack(&fixture("gptoss-trained"), &expected, &manifest);

    for from_checkpoint in [false, true] {
        let packed = crate::common::packed("gptoss-trained");
        let mut append = iec();
        append.args(["q4", "--append-attn", "--model-dir"]).arg(packed.path());
        if from_checkpoint {
            append.arg("--hf-dir").arg(fixture("gptoss-trained"));
        }
        append.assert().success();
        assert!(files(packed.path()) == expected, "from checkpoint: {from_checkpoint}");
        let reader = IebinReader::open(packed.path()).unwrap();
        let attention = reader.entries().iter().filter(|e| Role::of(&e.name) == Role::Attention && e.shape.len() == 2);
        assert!(attention.clone().count() == 16 && attention.clone().all(|e| e.store == Store::Tiled(QuantSpec::Q4_0)));
    }
}

#[test]
fn attention_of_another_model_is_not_appended() {
    let packed = crate::common::packed("gptoss-trained");
    let before = files(packed.path());
    let other = edited("gptoss-trained", |tensors| tensors.values_mut().next().unwrap().bytes[0] ^= 1);
    for checkpoint in [fixture("llama-gqa"), other.path().to_path_buf()] {
        let mut append = iec();
        append.args(["q4", "--append-attn", "--model-dir"]).arg(packed.path()).arg("--hf-dir").arg(checkpoint);
        let output = append.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && stderr.contains("other weights"), "{stderr}");
    }
    assert!(files(packed.path()) == before);
}

#[test]
fn contradictory_options_are_usage_errors() {
    for arguments in [
        &["q4"][..],
        &["q4", "--hf-dir", "x"],
        &["q4", "--append-attn"],
        &["q4", "--hf-dir", "x", "--out-dir", "y", "--scheme", "q4_0", "--manifest", "m"],
        &["q4", "--hf-dir", "x", "--out-dir", "y", "--chunk-rows", "0"],
        &["q4", "--hf-dir", "x", "--out-dir", "y", "--model-dir", "z"],
    ] {
        iec().args(arguments).assert().code(2);
    }
}
