//! Tests that a pack or checkpoint is replaced in one step, and that damaged packs are neither run nor passed on.

use crate::checkpoint::files;
use crate::common::{fixture, iec, packed};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Output;

const PARTIAL: &str = ".iec-0123456789abcdef.partial";

fn run(args: &str, dir: &Path) -> Output {
    iec().args(args.split(' ')).current_dir(dir).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn done(args: &str, dir: &Path) -> String {
    let output = run(args, dir);
    assert!(output.status.success(), "{args}: {}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn text_of(pack: &str, dir: &Path) -> String {
    done(&format!("run --model-dir {pack} --prompt Once --max-new 8 --ignore-eos --quiet"), dir)
}

/// Makes two packs of one model with different weights: `old` and `new`.
fn two_packs() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let config = fixture("stories260k");
    for (seed, name) in [(1, "old"), (2, "new")] {
        let mut synth = iec();
        synth.args(["synth", "--overwrite", "--seed", &seed.to_string(), "--out-dir"]).arg(home.path().join("source"));
        synth.arg("--config").arg(config.join("config.json")).assert().success();
        std::fs::copy(config.join("tokenizer.json"), home.path().join("source/tokenizer.json")).unwrap();
        done(&format!("pack --hf-dir source --out-dir {name}"), home.path());
    }
    home
}

/// Brings `old` into each state in which a killed process can leave its replacement by `new`: after the swap, the first
/// `moved` files have their names.
fn swapped(home: &Path, moved: usize) -> PathBuf {
    let out = home.join(format!("out{moved}"));
    std::fs::create_dir(&out).unwrap();
    let copy = |from: &str, to: &Path| {
        for entry in std::fs::read_dir(home.join(from)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    };
    copy("old", &out);
    let work = out.join(PARTIAL);
    std::fs::create_dir(&work).unwrap();
    copy("new", &work);
    std::fs::remove_file(out.join("model.ie.json")).unwrap();
    std::os::unix::fs::symlink(Path::new(PARTIAL).join("model.ie.json"), out.join("model.ie.json")).unwrap();
    for name in ["model.ie.bin", "config.json", "tokenizer.json"].iter().take(moved) {
        std::fs::rename(work.join(name), out.join(name)).unwrap();
    }
    out
}

#[test]
fn an_interrupted_replacement_shows_the_new_pack_and_is_completed_by_the_next_command() {
    let home = two_packs();
    let (old, new) = (text_of("old", home.path()), text_of("new", home.path()));
    assert_ne!(old, new);
    for moved in 0..=3 {
        let out = swapped(home.path(), moved);
        let name = out.file_name().unwrap().to_str().unwrap();
        assert_eq!(text_of(name, home.path()), new, "{moved} files moved");
        done(&format!("verify --hashes --model-dir {name}"), home.path());
        done(&format!("dedup --even-if-larger --model-dir {name}"), home.path());
        done(&format!("dedup --remove --model-dir {name}"), home.path());
        assert!(!out.join("model.ie.json").exists());
        let out = swapped(home.path(), moved + 4);
        done(&format!("q4 --append-attn --model-dir out{}", moved + 4), home.path());
        let is_link = out.join("model.ie.json").symlink_metadata().unwrap().is_symlink();
        assert!(!is_link && !out.join(PARTIAL).join("model.ie.bin").exists());
    }
}

#[test]
fn a_pack_that_appears_meanwhile_is_not_replaced_without_overwrite() {
    let home = two_packs();
    let refused = run("pack --hf-dir source --out-dir old", home.path());
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    // The lock is held by another command: the pack waits at its swap, and then finds a pack there.
    let out = home.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let lock = std::fs::File::create(out.join(".iec-lock")).unwrap();
    lock.lock().unwrap();
    let program = iec().get_program().to_owned();
    let mut waiting = std::process::Command::new(program)
        .args(["pack", "--hf-dir", "source", "--out-dir", "out"])
        .current_dir(home.path())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut notes = BufReader::new(waiting.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(notes.any(|line| line.contains("waiting for another command")));
    for entry in std::fs::read_dir(home.path().join("old")).unwrap().flatten() {
        std::fs::copy(entry.path(), out.join(entry.file_name())).unwrap();
    }
    std::fs::remove_file(out.join(".iec-lock")).unwrap();
    drop(lock);
    let rest: Vec<String> = notes.collect();
    assert_eq!(waiting.wait().unwrap().code(), Some(2), "{rest:?}");
    assert_eq!(text_of("out", home.path()), text_of("old", home.path()));
}

#[test]
fn a_changed_description_or_tokenizer_is_refused() {
    let pack = packed("stories260k");
    let refused = |name: &str, from: &str, to: &str| {
        let path = pack.path().join(name);
        let good = std::fs::read_to_string(&path).unwrap();
        assert!(good.contains(from), "{name}: {from}");
        std::fs::write(&path, good.replacen(from, to, 1)).unwrap();
        let output = iec().args(["run", "--prompt", "x", "--max-new", "1", "--model-dir"]).arg(pack.path()).output();
        let (output, strict) =
            (output.unwrap(), iec().args(["tensor-map", "--strict", "--model-dir"]).arg(pack.path()).output());
        std::fs::write(&path, good).unwrap();
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        assert!(said(&output).contains(name) && said(&output).contains("SHA-256"), "{}", said(&output));
        assert!(!strict.unwrap().status.success());
    };
    refused("model.ie.json", "\"theta\": 10000", "\"theta\": 14000");
    refused("tokenizer.json", "\"▁the\": 265", "\"▁the\": 366");
    refused("tokenizer.json", "{", " {");
    done("run --prompt x --max-new 1 --model-dir .", pack.path());
}

#[test]
fn damage_is_not_passed_on() {
    let pack = packed("stories260k");
    let bin = pack.path().join("model.ie.bin");
    let mut bytes = std::fs::read(&bin).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&bin, &bytes).unwrap();
    let before = files(pack.path());
    std::fs::write(pack.path().join("text"), "Once upon a time there was a little girl. ".repeat(40)).unwrap();
    for (code, command) in [
        (1, "q4 --append-attn --model-dir ."),
        (4, "dedup --even-if-larger --model-dir ."),
        (1, "export-gguf --model-dir . --out out.gguf"),
        (1, "unpack --model-dir . --out-dir ../unpacked"),
        (4, "calib --model-dir . --text text --out statistics"),
    ] {
        let output = run(command, pack.path());
        assert_eq!(output.status.code(), Some(code), "{command}: {}", said(&output));
        let message = said(&output).to_ascii_lowercase();
        assert!(message.contains("sha256") || message.contains("sha-256"), "{command}: {message}");
    }
    std::fs::remove_file(pack.path().join("text")).unwrap();
    assert!(files(pack.path()) == before);
}

#[test]
fn a_checkpoint_is_replaced_as_a_whole_and_files_of_the_user_stay() {
    let home = two_packs();
    done("unpack --model-dir old --out-dir out --max-shard-size 300K", home.path());
    std::fs::write(home.path().join("out/notes.txt"), "mine").unwrap();
    done("unpack --model-dir new --out-dir out --overwrite", home.path());
    done("unpack --model-dir new --out-dir fresh", home.path());
    std::fs::write(home.path().join("fresh/notes.txt"), "mine").unwrap();
    assert!(files(&home.path().join("out")) == files(&home.path().join("fresh")));
    std::fs::create_dir(home.path().join("out/original")).unwrap();
    let refused = run("unpack --model-dir old --out-dir out --overwrite", home.path());
    assert!(refused.status.code() == Some(2) && said(&refused).contains("original"), "{}", said(&refused));
    let hidden = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with(".iec-");
    assert!(!std::fs::read_dir(home.path()).unwrap().flatten().any(|entry| hidden(&entry)));
}

#[test]
fn check_refuses_damaged_weights_before_the_first_token() {
    let pack = packed("stories260k");
    let dir = pack.path().parent().unwrap();
    let name = pack.path().file_name().unwrap().to_str().unwrap();
    let checked = format!("run --check --prompt Once --max-new 2 --quiet --model-dir {name}");
    done(&checked, dir);
    let path = pack.path().join("model.ie.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[70_000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    done(&checked.replace("--check ", ""), dir);
    let refused = run(&checked, dir);
    assert!(refused.status.code() == Some(4) && refused.stdout.is_empty(), "{}", said(&refused));
    assert!(said(&refused).contains("sha256"), "{}", said(&refused));
    let drafted = run(&format!("{checked} --draft-model-dir {name}"), dir);
    assert_eq!(drafted.status.code(), Some(4), "{}", said(&drafted));
}

#[test]
fn the_removal_of_a_binary_can_be_repeated() {
    let home = two_packs();
    let reduce = "dedup --even-if-larger --remove-original --model-dir old";
    done(reduce, home.path());
    let before = files(&home.path().join("old"));
    done(reduce, home.path());
    assert!(files(&home.path().join("old")) == before);
    // The lock file of a killed `dedup --remove` does not stay in a directory without a pack.
    std::fs::create_dir(home.path().join("gone")).unwrap();
    std::fs::write(home.path().join("gone/.iec-lock"), "").unwrap();
    assert_eq!(run("dedup --remove --model-dir gone", home.path()).status.code(), Some(2));
    assert!(!home.path().join("gone/.iec-lock").exists());
}
