//! Tests `--dry-run` and refused output paths: both are decided before the first byte is written.

use crate::checkpoint::{copy_of, files};
use crate::common::{fixture, iec};
use crate::resume::checkpoint_with_a_hole;
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

fn rules(dir: &Path, rules: Value) -> String {
    let path = dir.join("rules.json");
    std::fs::write(&path, json!({"version": 1, "rules": rules}).to_string()).unwrap();
    path.to_str().unwrap().to_string()
}

/// Runs a command and returns exit code, stdout and stderr.
fn answer(arguments: &[&str], checkpoint: &Path, out: &Path) -> (i32, String, String) {
    let (command, arguments) = arguments.split_first().unwrap();
    let mut iec = iec();
    let output =
        iec.arg(command).arg("--hf-dir").arg(checkpoint).arg("--out-dir").arg(out).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_dry_run_tells_exactly_what_pack_then_does_and_writes_nothing() {
    let dir = TempDir::new().unwrap();
    let manifest = rules(
        dir.path(),
        json!([
            {"include": "_proj", "scheme": "q4_0", "method": "rtn"},
            {"include": "embed_tokens", "scheme": "int8"},
        ]),
    );
    let cases: &[(&str, &[&str])] = &[
        ("llama-gqa", &[]),
        ("llama-gqa", &["--dtype", "fp16"]),
        ("llama-gqa", &["--q4-map", &manifest]),
        ("gptoss-mxfp4", &[]),
    ];
    for (model, arguments) in cases {
        let out = dir.path().join("out");
        let dry = [&["pack", "--dry-run", "--json"], *arguments].concat();
        let (code, stdout, stderr) = answer(&dry, &fixture(model), &out);
        assert_eq!((code, stderr.as_str(), out.exists()), (0, "", false), "{model} {arguments:?}");
        let plan: Value = serde_json::from_str(&stdout).unwrap();

        let (code, ..) = answer(&[&["pack"], *arguments].concat(), &fixture(model), &out);
        assert_eq!(code, 0);
        let pack: Value = serde_json::from_slice(&std::fs::read(out.join("model.ie.json")).unwrap()).unwrap();
        let column = |table: &Value, name: &str| -> Vec<Value> {
            table.as_array().unwrap().iter().map(|row| row[name].clone()).collect()
        };
        assert_eq!(column(&plan["tensors"], "name"), column(&pack["tensors"], "name"), "{model} {arguments:?}");
        assert_eq!(column(&plan["tensors"], "bytes"), column(&pack["tensors"], "nbytes"));
        assert_eq!(plan["disk"]["needed"], pack["total_bytes"]);
        for (row, entry) in plan["tensors"].as_array().unwrap().iter().zip(pack["tensors"].as_array().unwrap()) {
            let (stored, why) = (row["stored"].as_str().unwrap(), row["why"].as_str().unwrap());
            match entry["quant"]["scheme"].as_str() {
                Some("mxfp4") => assert_eq!((stored, why), ("mxfp4", "4-bit codes stay as they are")),
                Some(scheme) => assert!(stored.starts_with(scheme) && why == "manifest rule, rtn", "{row}"),
                None => assert_eq!(stored, entry["dtype"].as_str().unwrap(), "{row}"),
            }
        }
        std::fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn the_table_adds_up_and_names_the_disk() {
    let dir = TempDir::new().unwrap();
    for command in ["pack", "q4"] {
        let (code, stdout, stderr) = answer(&[command, "--dry-run"], &fixture("llama-gqa"), &dir.path().join("out"));
        assert_eq!((code, stderr.as_str()), (0, ""), "{command}");
        for words in ["model.layers.2.mlp.up_proj.weight", "256 x 96", "bits per weight", "disk: ", " free"] {
            assert!(stdout.contains(words), "{command}: {words}: {stdout}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn the_dry_run_of_q4_tells_the_sizes_of_its_files() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    for arguments in [&["--include-lm-head"][..], &["--scheme", "int4-row"]] {
        let dry = [&["q4", "--overwrite", "--dry-run", "--json"], arguments].concat();
        let plan: Value = serde_json::from_str(&answer(&dry, &fixture("llama-gqa"), &out).1).unwrap();
        assert_eq!(answer(&[&["q4", "--overwrite"], arguments].concat(), &fixture("llama-gqa"), &out).0, 0);
        let written = files(&out);
        let size = |name: &str| written[Path::new(name)].len();
        let both = size("model.q4.bin") + size("model.q4.scales.fp16.bin");
        assert_eq!((plan["bytes"].as_u64(), plan["disk"]["needed"].as_u64()), (Some(both as u64), Some(both as u64)));
    }
}

#[test]
fn the_dry_run_of_ptq_names_what_would_be_quantized() {
    let dir = TempDir::new().unwrap();
    let mut ptq = iec();
    ptq.args(["ptq", "--dry-run", "--json", "--bits", "4", "--group-size", "64", "--hf-dir"]).arg(fixture("llama-gqa"));
    let output = ptq.arg("--out").arg(dir.path().join("m.json")).output().unwrap();
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = plan["tensors"].as_array().unwrap();
    let planned =
        |stored: &str, why: &str| rows.iter().filter(|row| row["stored"] == stored && row["why"] == why).count();
    assert_eq!((planned("int4/64", "search"), planned("int8/32", "rtn"), rows.len()), (21, 2, 23), "{plan}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_disk_that_is_too_small_is_noticed_before_the_first_byte() {
    // The checkpoint has 8 TiB, more than any test machine has free, as a hole in a sparse file.
    let checkpoint = checkpoint_with_a_hole(1 << 28, 1 << 14);
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let (code, stdout, stderr) = answer(&["pack", "--dry-run", "--json"], checkpoint.path(), &out);
    let plan: Value = serde_json::from_str(stdout.lines().next().unwrap()).unwrap();
    assert!(code == 1 && plan["disk"]["fits"] == false, "{stderr}");
    let (code, _, said) = answer(&["pack"], checkpoint.path(), &out);
    assert_eq!(code, 1);
    for said in [stderr, said] {
        let told = ["needs 8.00 TiB, the disk has ", " left\n", "free some disk space"];
        assert!(told.iter().all(|words| said.contains(words)), "{said}");
    }
    assert!(!out.exists());
}

#[test]
fn output_into_a_checkpoint_is_refused() {
    let checkpoint = copy_of("llama-gqa");
    let before = files(checkpoint.path());
    let link = TempDir::new().unwrap();
    std::os::unix::fs::symlink(checkpoint.path(), link.path().join("link")).unwrap();
    for command in ["pack", "q4"] {
        for out in [checkpoint.path().to_path_buf(), checkpoint.path().join("pack"), link.path().join("link/a/b")] {
            for dry in [&[][..], &["--dry-run"]] {
                let (code, stdout, stderr) = answer(&[&[command], dry].concat(), checkpoint.path(), &out);
                assert!(code == 2 && stdout.is_empty() && stderr.contains("--out-dir"), "{command}: {stderr}");
                assert!(files(checkpoint.path()) == before);
            }
        }
    }
}
