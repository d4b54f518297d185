//! Checkpoints whose configuration ties the output matrix to the embedding, but which have an output matrix of their
//! own.

use crate::checkpoint::{load, save};
use crate::common::{fixture, iec};
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

const EMBEDDING: &str = "model.embed_tokens.weight";
const OUTPUT: &str = "lm_head.weight";

/// Returns a directory with `plain`, a checkpoint that is not tied, and `tied`, the same with a configuration that ties
/// both matrices.
fn home() -> TempDir {
    let home = tempfile::tempdir().unwrap();
    for name in ["plain", "tied"] {
        let copied =
            std::process::Command::new("cp").arg("-r").arg(fixture("qwen3")).arg(home.path().join(name)).status();
        assert!(copied.is_ok_and(|status| status.success()));
    }
    let path = home.path().join("tied/config.json");
    let mut config = json_of(&path);
    config["tie_word_embeddings"] = json!(true);
    std::fs::write(path, config.to_string()).unwrap();
    home
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn run(line: &str, home: &Path) -> (Option<i32>, String) {
    let output = iec().current_dir(home).args(line.split(' ')).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn done(line: &str, home: &Path) -> String {
    let (code, said) = run(line, home);
    assert_eq!(code, Some(0), "{line}: {said}");
    said
}

#[test]
fn an_output_matrix_of_its_own_is_packed_measured_and_unpacked() {
    let home = home();
    let (home, bytes) = (home.path(), |name: &str| std::fs::read(home.path().join(name)).unwrap());
    done("pack --hf-dir plain --out-dir plain-pack", home);
    let said = done("pack --hf-dir tied --out-dir tied-pack", home);
    assert!(said.contains(OUTPUT) && said.contains("differs from the embedding"), "{said}");
    assert!(bytes("plain-pack/model.ie.bin") == bytes("tied-pack/model.ie.bin"));
    // Manifests and codes have it, too.
    for line in [
        "ptq --hf-dir tied --bits 8 --include-lm-head --out map.json",
        "pack --hf-dir tied --q4-map map.json --out-dir int8-pack",
        "q4 --hf-dir tied --include-lm-head --scheme q4_0 --out-dir codes",
        "export-gguf --model-dir tied-pack --out model.gguf",
        "import-gguf model.gguf --out-dir again",
        "unpack --model-dir tied-pack --out-dir unpacked",
    ] {
        done(line, home);
    }
    assert!(json_of(&home.join("map.json"))["tensors"].get(OUTPUT).is_some());
    let weights = load(&home.join("unpacked"));
    assert!(weights[OUTPUT] == load(&home.join("tied"))[OUTPUT], "the matrix of the file");
    // Programs that believe the field would drop the matrix.
    assert_eq!(json_of(&home.join("unpacked/config.json"))["tie_word_embeddings"], json!(false));
    assert_eq!(json_of(&home.join("again/model.ie.json"))["model"]["tied_embeddings"], json!(false));
}

#[test]
fn an_output_matrix_that_equals_the_embedding_is_stored_once() {
    let home = home();
    let home = home.path();
    let mut weights = load(&home.join("tied"));
    weights.insert(OUTPUT.to_string(), weights[EMBEDDING].clone());
    save(&home.join("tied"), &weights);
    let said = done("pack --hf-dir tied --out-dir pack", home);
    assert!(!said.contains("differs"), "{said}");
    assert_eq!(json_of(&home.join("pack/model.ie.json"))["model"]["tied_embeddings"], json!(true));
    weights.remove(OUTPUT);
    save(&home.join("plain"), &weights);
    std::fs::copy(home.join("tied/config.json"), home.join("plain/config.json")).unwrap();
    done("pack --hf-dir plain --out-dir once", home);
    assert!(
        std::fs::read(home.join("pack/model.ie.bin")).unwrap()
            == std::fs::read(home.join("once/model.ie.bin")).unwrap()
    );
}

#[cfg(feature = "reference")]
#[test]
fn verify_uses_the_output_matrix_of_the_file() {
    let home = home();
    let home = home.path();
    done("pack --hf-dir tied --out-dir pack", home);
    done("verify --model-dir pack --hf-dir tied --max-new 4", home);
    // A pack that ties both matrices is another model.
    let mut weights = load(&home.join("tied"));
    weights.remove(OUTPUT);
    save(&home.join("plain"), &weights);
    std::fs::copy(home.join("tied/config.json"), home.join("plain/config.json")).unwrap();
    done("pack --hf-dir plain --out-dir wrong", home);
    assert_eq!(run("verify --model-dir wrong --hf-dir tied --max-new 4", home).0, Some(4));
    done("verify --model-dir wrong --hf-dir plain --max-new 4", home);
}
