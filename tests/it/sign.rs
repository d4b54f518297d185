//! Tests `iec sign` and `iec verify --key`.

use crate::checkpoint::files;
use crate::common::{fixture, iec, packed};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::signature::Ed25519KeyPair;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;

const KEYS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/keys");

fn run(args: &[&str], pack: &Path) -> Output {
    iec().args(args).arg("--model-dir").arg(pack).output().unwrap()
}

fn done(args: &[&str], pack: &Path) -> String {
    let output = run(args, pack);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn refused(args: &[&str], pack: &Path, code: i32, word: &str) {
    let output = run(args, pack);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(code) && said.contains(word), "{args:?}: {:?} {said}", output.status);
}

#[test]
fn a_signed_pack_is_accepted_until_a_file_changes() {
    let pack = packed("stories260k");
    for name in ["ed25519", "p256", "p384"] {
        let (private, public) = (format!("{KEYS}/{name}.pem"), format!("{KEYS}/{name}.pub.pem"));
        let signed: Value =
            serde_json::from_str(&done(&["sign", "--overwrite", "--json", "--key", &private], pack.path())).unwrap();
        assert!(signed["signature"]["algorithm"].as_str().unwrap().ends_with(name), "{signed}");
        let found: Value = serde_json::from_str(&done(&["verify", "--json", "--key", &public], pack.path())).unwrap();
        assert!(found["ok"] == true && found["signature"] == signed["signature"], "{found}");
    }
    let key = format!("{KEYS}/p384.pub.pem");
    let check = ["verify", "--key", key.as_str()];
    refused(&["verify", "--key", &format!("{KEYS}/p256.pub.pem")], pack.path(), 4, "was made with the key");
    refused(&["sign", "--key", &format!("{KEYS}/p384.pem")], pack.path(), 2, "exists already");
    let bin = pack.path().join("model.ie.bin");
    let good = std::fs::read(&bin).unwrap();
    let mut bad = good.clone();
    bad[70_000] ^= 1;
    std::fs::write(&bin, bad).unwrap();
    refused(&check, pack.path(), 4, "model.ie.bin");
    std::fs::write(&bin, good).unwrap();
    std::fs::write(pack.path().join("chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    refused(&check, pack.path(), 4, "not covered by the signature");
    std::fs::remove_file(pack.path().join("chat_template.jinja")).unwrap();
    std::fs::remove_file(pack.path().join("config.json")).unwrap();
    refused(&check, pack.path(), 1, "config.json");
}

#[test]
fn a_signature_holds_for_the_deduplicated_pack_and_not_for_the_next_one() {
    let pack = packed("stories260k");
    let (private, public) = (format!("{KEYS}/ed25519.pem"), format!("{KEYS}/ed25519.pub.pem"));
    done(&["sign", "--key", &private], pack.path());
    done(&["dedup", "--even-if-larger", "--remove-original"], pack.path());
    assert!(!pack.path().join("model.ie.bin").exists());
    done(&["verify", "--key", &public], pack.path());
    let source = fixture("stories260k");
    iec()
        .args(["pack", "--overwrite", "--dtype", "fp16", "--hf-dir"])
        .arg(source)
        .arg("--out-dir")
        .arg(pack.path())
        .assert()
        .success();
    assert!(!pack.path().join("model.sig").exists());
}

#[test]
fn a_new_key_is_readable_by_its_owner_only_and_checks_its_signatures() {
    let pack = packed("stories260k");
    let home = tempfile::tempdir().unwrap();
    let key = home.path().join("maker.pem");
    iec().args(["sign", "--new-key"]).arg(&key).assert().success();
    assert_eq!(key.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let before = files(home.path());
    let again = iec().args(["sign", "--new-key"]).arg(&key).assert().code(2);
    assert!(String::from_utf8_lossy(&again.get_output().stderr).contains("a key is never replaced"));
    iec().args(["sign", "--overwrite", "--new-key"]).arg(&key).assert().code(2);
    assert!(files(home.path()) == before);
    // The rerun after a kill between the two files.
    let public = home.path().join("maker.pem.pub");
    std::fs::remove_file(&public).unwrap();
    iec().args(["sign", "--new-key"]).arg(&key).assert().success();
    assert!(files(home.path()) == before);
    let (key, public) = (key.display().to_string(), format!("{}.pub", key.display()));
    let signature = home.path().join("elsewhere.sig").display().to_string();
    done(&["sign", "--key", &key, "--out", &signature], pack.path());
    done(&["verify", "--key", &public, "--signature", &signature], pack.path());
    refused(&["verify", "--key", &key, "--signature", &signature], pack.path(), 1, "not the private one");
    refused(&["verify", "--key", &public], pack.path(), 1, "model.sig");
}

/// Flips a bit of the weights.
fn damage(pack: &Path) {
    let bin = pack.join("model.ie.bin");
    let mut bytes = std::fs::read(&bin).unwrap();
    bytes[70_000] ^= 1;
    std::fs::write(&bin, bytes).unwrap();
}

#[test]
fn a_damaged_pack_is_not_signed() {
    let pack = packed("stories260k");
    damage(pack.path());
    refused(&["sign", "--key", &format!("{KEYS}/ed25519.pem")], pack.path(), 4, "found the sha256");
    assert!(!pack.path().join("model.sig").exists());
}

/// Signs a pack as it is, without a look at its hashes, by putting the hash of its weights into a good signature.
fn sign_blindly(pack: &Path) {
    let path = pack.join("model.sig");
    let mut bundle: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let payload = BASE64.decode(bundle["dsseEnvelope"]["payload"].as_str().unwrap()).unwrap();
    let mut statement: Value = serde_json::from_slice(&payload).unwrap();
    let hex = |hash: Sha256| hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let weights = hex(Sha256::new_with_prefix(std::fs::read(pack.join("model.ie.bin")).unwrap()));
    let mut all = Sha256::new();
    for resource in statement["predicate"]["resources"].as_array_mut().unwrap() {
        if resource["name"] == "model.ie.bin" {
            resource["digest"] = weights.clone().into();
        }
        let digest = resource["digest"].as_str().unwrap();
        all.update((0..32).map(|i| u8::from_str_radix(&digest[2 * i..2 * i + 2], 16).unwrap()).collect::<Vec<_>>());
    }
    statement["subject"][0]["digest"]["sha256"] = hex(all).into();
    let payload = serde_json::to_vec(&statement).unwrap();
    let kind = "application/vnd.in-toto+json";
    let message = [format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len()).as_bytes(), &payload].concat();
    let key = std::fs::read_to_string(format!("{KEYS}/ed25519.pem")).unwrap();
    let key: String = key.lines().filter(|line| !line.starts_with("-----")).collect();
    let key = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&BASE64.decode(key).unwrap()).unwrap();
    bundle["dsseEnvelope"]["payload"] = BASE64.encode(&payload).into();
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = BASE64.encode(key.sign(&message)).into();
    std::fs::write(path, bundle.to_string()).unwrap();
}

#[test]
fn a_signature_over_damaged_weights_does_not_hide_the_damage() {
    let pack = packed("stories260k");
    let public = format!("{KEYS}/ed25519.pub.pem");
    done(&["sign", "--key", &format!("{KEYS}/ed25519.pem")], pack.path());
    sign_blindly(pack.path());
    done(&["verify", "--key", &public], pack.path());
    damage(pack.path());
    sign_blindly(pack.path());
    let found = run(&["verify", "--json", "--key", &public], pack.path());
    let line = String::from_utf8(found.stdout).unwrap();
    let report: Value = serde_json::from_str(line.lines().next().unwrap_or_default()).unwrap();
    assert_eq!((found.status.code(), &report["ok"]), (Some(4), &Value::Bool(false)), "{report}");
    assert_eq!(report["hashes"]["differing"].as_array().map(Vec::len), Some(1), "{report}");
    assert!(report["signature"]["key_sha256"].is_string(), "the signature itself is valid: {report}");
}

#[test]
fn a_new_key_and_a_pack_are_not_taken_for_a_signature() {
    let pack = packed("stories260k");
    let key = pack.path().join("new.pem");
    for named in [&["sign"][..], &["sign", "--model-dir"]] {
        let output = iec().args(named).arg(pack.path()).arg("--new-key").arg(&key).assert().code(2);
        let said = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert!(said.contains("does not sign") && said.contains("--key"), "{said}");
        assert!(!key.exists() && !pack.path().join("model.sig").exists());
    }
    iec().args(["sign", "--new-key"]).arg(&key).env("MODEL_DIR", pack.path()).assert().success();
}
