//! Tests the file layouts of checkpoints: nested directories, unusual names, explicit files, symbolic links.

use crate::checkpoint::{copy_of, edited, files};
use crate::common::{fixture, iec};
use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::Path;

fn pack(source: &Path) -> (Option<i32>, String, BTreeMap<std::path::PathBuf, Vec<u8>>) {
    let out = tempfile::tempdir().unwrap();
    let output = iec().arg("pack").arg("--hf-dir").arg(source).arg("--out-dir").arg(out.path()).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned(), files(out.path()))
}

fn packs(source: &Path, expected: &[u8]) {
    let (code, stderr, files) = pack(source);
    assert_eq!(code, Some(0), "{}: {stderr}", source.display());
    assert!(files[Path::new("model.ie.bin")] == expected, "{}", source.display());
    assert!(files.contains_key(Path::new("tokenizer.json")), "{}", source.display());
}

fn refused(source: &Path, messages: &[&str]) {
    let (code, stderr, files) = pack(source);
    assert_eq!(code, Some(1), "{}: {stderr}", source.display());
    assert!(files.is_empty());
    for message in messages {
        assert!(stderr.contains(message), "`{message}` is not in: {stderr}");
    }
}

fn expected() -> Vec<u8> {
    pack(&fixture("llama3-rope-tied")).2.remove(Path::new("model.ie.bin")).unwrap()
}

#[test]
fn weights_are_found_below_the_directory_that_was_named() {
    let expected = expected();
    for below in ["hf", "original", "hf/original"] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join(below);
        std::fs::create_dir_all(&dir).unwrap();
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(fixture("llama3-rope-tied").join(name), dir.join(name)).unwrap();
        }
        // The tokenizer may be in the directory above the weights.
        let tokenizer = dir.parent().unwrap().join("tokenizer.json");
        std::fs::copy(fixture("llama3-rope-tied").join("tokenizer.json"), tokenizer).unwrap();
        packs(root.path(), &expected);
    }
}

#[test]
fn one_weight_file_may_have_any_name_or_be_named_itself() {
    let expected = expected();
    let dir = copy_of("llama3-rope-tied");
    let odd = dir.path().join("Llama-ft.v2.safetensors");
    std::fs::rename(dir.path().join("model.safetensors"), &odd).unwrap();
    packs(dir.path(), &expected);
    packs(&odd, &expected);
    std::fs::copy(&odd, dir.path().join("other.safetensors")).unwrap();
    packs(&odd, &expected);
    refused(dir.path(), &["2 safetensors files", "help: ", "name one file"]);
    packs(&fixture("llama-gqa").join("model.safetensors.index.json"), &{
        pack(&fixture("llama-gqa")).2.remove(Path::new("model.ie.bin")).unwrap()
    });
}

#[test]
fn safetensors_are_preferred_to_pickles() {
    let dir = copy_of("llama3-rope-tied");
    std::fs::write(dir.path().join("pytorch_model.bin"), "damaged").unwrap();
    packs(dir.path(), &expected());
}

#[test]
fn links_out_of_the_checkpoint_are_refused() {
    let elsewhere = copy_of("llama3-rope-tied");
    let dir = copy_of("llama3-rope-tied");
    let weights = dir.path().join("model.safetensors");
    std::fs::remove_file(&weights).unwrap();
    symlink(elsewhere.path().join("model.safetensors"), &weights).unwrap();
    refused(dir.path(), &["model.safetensors", "outside the checkpoint"]);
    // A link that the user names explicitly is followed.
    packs(&weights, &expected());
    std::fs::remove_file(&weights).unwrap();
    symlink("inside.bin", &weights).unwrap();
    std::fs::copy(elsewhere.path().join("model.safetensors"), dir.path().join("inside.bin")).unwrap();
    packs(dir.path(), &expected());
}

#[test]
fn what_lies_beside_the_weights_is_not_taken_from_elsewhere() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "{\"password\": 1}").unwrap();
    for name in ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"] {
        let dir = copy_of("llama3-rope-tied");
        let _ = std::fs::remove_file(dir.path().join(name));
        symlink(secret.path(), dir.path().join(name)).unwrap();
        refused(dir.path(), &[name, "outside the checkpoint"]);
        refused(&dir.path().join("model.safetensors"), &[name, "outside the checkpoint"]);
    }
}

#[test]
fn an_index_cannot_lead_out_of_the_checkpoint() {
    let outside = tempfile::NamedTempFile::with_suffix(".safetensors").unwrap();
    for (name, message) in
        [("../secret.safetensors", "expected a plain file name"), ("link.safetensors", "outside the checkpoint")]
    {
        let dir = copy_of("llama-gqa");
        symlink(outside.path(), dir.path().join("link.safetensors")).unwrap();
        let index = dir.path().join("model.safetensors.index.json");
        let text = std::fs::read_to_string(&index).unwrap().replace("model-00001-of-00002.safetensors", name);
        std::fs::write(&index, text).unwrap();
        refused(dir.path(), &[message]);
        refused(&dir.path().join("model.safetensors.index.json"), &[message]);
    }
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let dir = copy_of("llama-gqa");
    let whole = edited("llama-gqa", |_| ());
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        std::fs::copy(whole.path().join("model.safetensors"), dir.path().join(shard)).unwrap();
    }
    refused(dir.path(), &["in two shards"]);
}
