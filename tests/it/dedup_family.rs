//! Tests families of packs deduplicated by `iec dedup`: each pack can be opened on its own, and none can be removed
//! while another one is rebuilt from it.

use crate::common::{fixture, iec};
use crate::dedup::{Place, binary, dedup, refused, tuned};
use iec::dedup::{FILE_NAMES, JSON_NAME};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Creates packs of a base model and of two models fine-tuned from it.
fn family(place: &Place) -> [PathBuf; 3] {
    let base = place.pack(&fixture("stories260k"), "base", &[]);
    let members = ["chat", "code"].map(|name| {
        let hf = place.dir(&format!("{name}-hf"));
        tuned(&fixture("stories260k"), &hf, if name == "chat" { 3 } else { 4 });
        place.pack(&hf, name, &[])
    });
    let [chat, code] = members;
    [base, chat, code]
}

/// Runs `iec dedup --base A B ...` and reads its JSON.
fn together(dirs: &[&Path], more: &[&str]) -> Value {
    let run = iec().args(["dedup", "--json", "--base"]).args(dirs).args(more).assert().success();
    serde_json::from_slice(&run.get_output().stdout).unwrap()
}

fn inspect(dir: &Path) -> Value {
    let run = iec().args(["inspect", "--json"]).arg(dir).assert().success();
    serde_json::from_slice(&run.get_output().stdout).unwrap()
}

#[test]
fn a_family_is_made_grows_and_shrinks_while_every_member_keeps_its_bytes() {
    let place = Place::new();
    let [base, chat, code] = family(&place);
    let before = [&base, &chat, &code].map(|dir| binary(dir));
    let made = together(&[&base, &chat], &["--remove-original"]);
    assert_eq!(made["family"].as_array().unwrap().len(), 2, "{made}");
    assert!(made["ratio"].as_f64().unwrap() < 0.8, "{made}");
    // Adding another pack does not change the others.
    let stored = |dir: &Path| FILE_NAMES.map(|name| std::fs::read(dir.join(name)).unwrap());
    let untouched = [stored(&base), stored(&chat)];
    let made = together(&[&base, &chat, &code], &["--remove-original"]);
    assert_eq!((made["made"].as_array().unwrap().len(), made["family"].as_array().unwrap().len()), (1, 3));
    assert!([stored(&base), stored(&chat)] == untouched);
    for (dir, bytes) in [&base, &chat, &code].into_iter().zip(&before) {
        assert_eq!(dedup(dir, &["--verify"])["verified"], true);
        let again = place.dir("again");
        dedup(dir, &["--restore", "--out-dir", again.to_str().unwrap()]);
        assert!(binary(&again) == *bytes, "{}", dir.display());
        std::fs::remove_dir_all(again).unwrap();
    }
    // A pack that others are rebuilt from cannot be removed or overwritten.
    let message = refused(&base, 4, &["--remove"]);
    assert!(message.contains("chat") && message.contains("code") && message.contains("--restore"), "{message}");
    let mut run = iec();
    run.args(["pack", "--overwrite", "--hf-dir"]).arg(place.dir("chat-hf")).arg("--out-dir").arg(&base);
    let message = String::from_utf8(run.assert().code(4).get_output().stderr.clone()).unwrap();
    assert!(message.contains("are rebuilt from it"), "{message}");
    assert_eq!(dedup(&code, &["--remove"])["removed"], code.to_str().unwrap());
    assert!(!code.join(JSON_NAME).exists());
    for (dir, bytes) in [&chat, &base].into_iter().zip([&before[1], &before[0]]) {
        dedup(dir, &["--restore"]);
        assert!(binary(dir) == *bytes);
    }
    // Deduplicated without a base, the last pack needs no other.
    dedup(&chat, &[]);
    assert_eq!(dedup(&base, &["--remove"])["removed"], base.to_str().unwrap());
    dedup(&chat, &["--remove-original"]);
    dedup(&chat, &["--restore"]);
    assert!(binary(&chat) == before[1]);
}

#[test]
fn inspect_tells_what_each_pack_of_a_family_costs() {
    let place = Place::new();
    let [base, chat, code] = family(&place);
    let alone = inspect(&base);
    assert!(alone["family"].is_null(), "{alone}");
    together(&[&base, &chat, &code], &["--remove-original"]);
    for dir in [&base, &chat, &code] {
        let told = inspect(dir);
        let packs = told["family"].as_array().unwrap();
        assert_eq!(packs.len(), 3, "{told}");
        assert!(!told["dedup"]["parts"].as_array().unwrap().is_empty(), "{told}");
        for (pack, dir) in packs.iter().zip([&base, &chat, &code]) {
            let on_disk: u64 = FILE_NAMES
                .iter()
                .chain([&JSON_NAME])
                .map(|name| std::fs::metadata(dir.join(name)).unwrap().len())
                .sum();
            assert_eq!((pack["store_bytes"].as_u64(), pack["binary_bytes"].as_u64()), (Some(on_disk), Some(0)));
        }
        assert_eq!(packs[0]["needed_by"].as_array().unwrap().len(), 2);
        let shared = &packs[1]["bases"][0];
        let sum = shared["same_bytes"].as_u64().unwrap() + shared["delta_bytes"].as_u64().unwrap();
        assert!(sum > 900_000 && sum <= packs[1]["original_bytes"].as_u64().unwrap(), "{shared}");
        let text = iec().arg("inspect").arg(dir).assert().success();
        let text = String::from_utf8(text.get_output().stdout.clone()).unwrap();
        assert!(text.contains("chat") && text.contains("code") && text.contains("rebuilt with"), "{text}");
    }
    iec().args(["inspect", "--stats"]).arg(&chat).assert().success();
}

#[test]
fn a_pack_is_never_its_own_base_however_long_the_way() {
    let place = Place::new();
    let [base, chat, code] = family(&place);
    let name = |dir: &Path| dir.to_str().unwrap().to_string();
    let message = refused(&base, 3, &["--base", &name(&base)]);
    assert!(message.contains("rebuilt from itself"), "{message}");
    // The packs are deduplicated in a cycle while all data files exist; the last data file, on which all would
    // depend, cannot be removed.
    dedup(&base, &["--base", &name(&chat)]);
    dedup(&chat, &["--base", &name(&code)]);
    dedup(&code, &["--base", &name(&base)]);
    dedup(&base, &["--base", &name(&chat), "--remove-original"]);
    dedup(&chat, &["--base", &name(&code), "--remove-original"]);
    let message = refused(&code, 3, &["--base", &name(&base), "--remove-original"]);
    assert!(message.contains("rebuilt from itself"), "{message}");
    assert!(code.join("model.ie.bin").exists());
    // A symbolic link to the data file that would be removed is not accepted as a base, either.
    let link = place.dir("link");
    std::fs::create_dir(&link).unwrap();
    std::fs::copy(code.join("model.ie.json"), link.join("model.ie.json")).unwrap();
    std::os::unix::fs::symlink(code.join("model.ie.bin"), link.join("model.ie.bin")).unwrap();
    refused(&code, 3, &["--base", &name(&link), "--remove-original"]);
    dedup(&code, &["--remove-original"]);
    for dir in [&base, &chat, &code] {
        dedup(dir, &["--verify"]);
    }
}

#[test]
fn bases_that_nothing_was_found_in_are_not_needed() {
    let place = Place::new();
    let [base, chat, _] = family(&place);
    let stranger = place.pack(&fixture("gptoss-mxfp4"), "stranger", &[]);
    let dirs = [&stranger, &base].map(|dir| dir.to_str().unwrap().to_string());
    let summary = dedup(&chat, &["--base", &dirs[0], &dirs[1], "--remove-original"]);
    assert_eq!(summary["bases"].as_array().unwrap().len(), 1, "{summary}");
    dedup(&stranger, &["--remove"]);
    dedup(&chat, &["--verify"]);
    refused(&base, 4, &["--remove"]);
}

#[test]
fn killed_additions_and_removals_leave_every_other_member_intact() {
    let place = Place::new();
    let [base, chat, code] = family(&place);
    let before = [&base, &chat].map(|dir| binary(dir));
    together(&[&base, &chat], &["--remove-original"]);
    let mut rng = iec::rng::Rng::new(6);
    let mut kill = |arguments: &[&str], dirs: &[&Path]| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_iec"))
            .args(["dedup", "--quiet"])
            .args(arguments)
            .args(dirs)
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_micros(rng.next_u64() % 40_000));
        let _ = child.kill();
        child.wait().unwrap();
    };
    for round in 0..8 {
        if !code.join("model.ie.json").exists() || !code.join("model.ie.bin").exists() {
            let _ = std::fs::remove_dir_all(&code);
            place.pack(&place.dir("code-hf"), "code", &[]);
        }
        kill(&["--codec", "zstd", "--remove-original", "--base"], &[&base, &chat, &code]);
        if code.join("model.ie.bin").exists() || round % 2 == 0 {
            kill(&["--remove", "--model-dir"], &[&code]);
        } else {
            dedup(&code, &["--verify"]);
        }
        for dir in [&base, &chat] {
            dedup(dir, &["--verify"]);
        }
    }
    for (dir, before) in [&base, &chat].into_iter().zip(before) {
        let again = place.dir("again");
        dedup(dir, &["--restore", "--out-dir", again.to_str().unwrap()]);
        assert!(binary(&again) == before);
        std::fs::remove_dir_all(again).unwrap();
    }
}
