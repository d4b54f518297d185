//! Tests inputs that are not regular files: a named pipe, a device, a socket or a directory in the place of a model
//! file is refused at once, and texts may come from pipes.

use crate::common::{fixture, iec};
use assert_cmd::cargo::cargo_bin;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Command lines that read a file, and the name of that file. `{S}` is a copy of a checkpoint, `{P}` one of its pack,
/// `{D}` one of the deduplicated pack, `{F}` a directory of other inputs, `{O}` a fresh
/// directory.
const READERS: &[(&str, &str)] = &[
    ("pack --hf-dir {S} --out-dir {O}/p", "S/model.safetensors"),
    ("pack --hf-dir {S} --out-dir {O}/p", "S/config.json"),
    ("pack --hf-dir {S} --out-dir {O}/p", "S/tokenizer.json"),
    ("pack --hf-dir {S} --out-dir {O}/p", "S/tokenizer_config.json"),
    ("pack --hf-dir {S} --out-dir {O}/p", "S/generation_config.json"),
    ("pack --hf-dir {S} --out-dir {O}/p", "S/chat_template.jinja"),
    ("pack --hf-dir {F} --out-dir {O}/p", "F/model.safetensors.index.json"),
    ("pack --hf-dir {F} --out-dir {O}/p", "F/pytorch_model.bin"),
    ("pack --hf-dir {S}/model.safetensors --config {F}/file --out-dir {O}/p", "F/file"),
    ("pack --hf-dir {S} --tokenizer {F}/file --out-dir {O}/p", "F/file"),
    ("pack --hf-dir {S} --q4-map {F}/file --out-dir {O}/p", "F/file"),
    ("ptq --hf-dir {S} --bits 8 --calib {F}/file --out {O}/m.json", "F/file"),
    ("inspect {F}/file", "F/file"),
    ("inspect {S}", "S/model.safetensors"),
    ("import-gguf {F}/file --out-dir {O}/p", "F/file"),
    ("synth --config {F}/file --out-dir {O}/s", "F/file"),
    ("run --model-dir {P} --prompt a", "P/model.ie.json"),
    ("run --model-dir {P} --prompt a", "P/model.ie.bin"),
    ("run --model-dir {P} --prompt a", "P/tokenizer.json"),
    ("run --model-dir {P} --prompt a --template auto", "P/chat_template.jinja"),
    ("run --model-dir {D} --prompt a", "D/model.dedup.json"),
    ("run --model-dir {D} --prompt a", "D/model.dedup.masks.bin"),
    ("verify --model-dir {P} --hf-dir {S}", "S/config.json"),
    ("verify --model-dir {P} --hf-dir {S}", "S/model.safetensors"),
    ("verify --model-dir {P} --hashes", "P/tokenizer.json"),
    ("unpack --model-dir {P} --out-dir {O}/s", "P/config.json"),
    ("export-gguf --model-dir {P} --out {O}/g", "P/tokenizer.json"),
];

/// Function that creates something at a path.
type Make = fn(&Path);

/// Things that are not regular files.
const KINDS: &[(&str, Make)] = &[
    ("a named pipe", make_pipe),
    ("a directory", |path| std::fs::create_dir(path).unwrap()),
    ("a socket", |path| drop(UnixListener::bind(path).unwrap())),
];

/// Time in which a command that reads nothing ends, even on a busy machine.
const SOON: Duration = Duration::from_secs(60);

fn make_pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
}

/// Copies a directory without its subdirectories.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// Packs the checkpoint as `P` and deduplicates a copy as `D`.
fn packs(dir: &Path) {
    let pack = dir.join("P");
    iec().args(["pack", "-q", "--hf-dir"]).arg(fixture("stories260k")).arg("--out-dir").arg(&pack).assert().success();
    copy(&pack, &dir.join("D"));
    let reduce = ["dedup", "-q", "--even-if-larger", "--remove-original", "--model-dir"];
    iec().args(reduce).arg(dir.join("D")).assert().success();
}

fn words(form: &str, dir: &Path) -> Vec<String> {
    let at = |name: &str| dir.join(name).display().to_string();
    let places = ["S", "P", "D", "F", "O"].map(|name| (format!("{{{name}}}"), at(name)));
    let line = places.iter().fold(form.to_string(), |line, (mark, place)| line.replace(mark, place));
    line.split_whitespace().map(String::from).collect()
}

#[test]
fn what_is_not_a_regular_file_is_refused_by_every_reader() {
    let made = TempDir::new().unwrap();
    packs(made.path());
    let mut wrong = Vec::new();
    for (form, file) in READERS {
        // A directory is something else to inspect.
        for (kind, make) in KINDS.iter().filter(|(kind, _)| !form.starts_with("inspect {F}") || *kind != "a directory")
        {
            let dir = TempDir::new().unwrap();
            copy(&fixture("stories260k"), &dir.path().join("S"));
            for name in ["P", "D"] {
                copy(&made.path().join(name), &dir.path().join(name));
            }
            for name in ["F", "O"] {
                std::fs::create_dir(dir.path().join(name)).unwrap();
            }
            std::fs::copy(dir.path().join("S/config.json"), dir.path().join("F/config.json")).unwrap();
            let path = dir.path().join(file);
            let _ = std::fs::remove_file(&path);
            make(&path);
            let output = iec().args(words(form, dir.path())).timeout(SOON).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            let name = path.file_name().unwrap().to_str().unwrap();
            if !matches!(output.status.code(), Some(1..=4)) || !said.contains(kind) || !said.contains(name) {
                wrong.push(format!("{form}, {file} is {kind}: {:?}: {said}", output.status.code()));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), READERS.len() * KINDS.len(), wrong.join("\n"));
}

/// Starts a command and writes a text into the pipe that it reads.
fn fed(arguments: &[&str], pack: &Path, pipe: PathBuf, text: &'static str) -> String {
    let mut command = Command::new(cargo_bin("iec"));
    command.args(arguments).arg(&pipe).arg("--model-dir").arg(pack).env("IEC_DEVICE", "cpu");
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let writing = std::thread::spawn(move || std::fs::write(pipe, text).unwrap());
    let output = child.wait_with_output().unwrap();
    writing.join().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn texts_may_come_from_pipes() {
    let dir = TempDir::new().unwrap();
    packs(dir.path());
    let pipe = dir.path().join("pipe");
    make_pipe(&pipe);
    let run = ["run", "--max-new", "1", "--prompts-file"];
    let text = fed(&run, &dir.path().join("P"), pipe.clone(), "Once upon\nOnce");
    assert!(text.contains("== prompt 1 =="), "{text}");
    let lines = "{\"context\":\"Once\",\"continuation\":\" upon\"}\n";
    assert!(fed(&["eval", "--loglikelihood"], &dir.path().join("P"), pipe, lines).contains("logprob"));
    let stdin = ["run", "--max-new", "1", "--prompts-file", "/dev/stdin", "--model-dir"];
    iec().args(stdin).arg(dir.path().join("P")).write_stdin("a\nb\n").assert().success();
}

#[test]
fn a_link_whose_target_is_missing_is_not_a_missing_file() {
    let made = TempDir::new().unwrap();
    packs(made.path());
    let mut wrong = Vec::new();
    for (form, file) in [
        ("pack --hf-dir {S} --out-dir {O}/p", "S/tokenizer.json"),
        ("pack --hf-dir {S} --out-dir {O}/p", "S/config.json"),
        ("pack --hf-dir {S} --out-dir {O}/p", "S/generation_config.json"),
        ("pack --hf-dir {S} --out-dir {O}/p", "S/model.safetensors"),
        ("run --model-dir {P} --prompt a", "P/tokenizer.json"),
        ("run --model-dir {P} --prompt a", "P/model.ie.bin"),
        ("run --model-dir {D} --prompt a", "D/model.dedup.json"),
        ("run --model-dir {P} --prompt a --template auto", "P/chat_template.jinja"),
        ("export-gguf --model-dir {P} --out {O}/g", "P/tokenizer.json"),
        ("unpack --model-dir {P} --out-dir {O}/s", "P/tokenizer.json"),
    ] {
        let dir = TempDir::new().unwrap();
        copy(&fixture("stories260k"), &dir.path().join("S"));
        for name in ["P", "D"] {
            copy(&made.path().join(name), &dir.path().join(name));
        }
        std::fs::create_dir(dir.path().join("O")).unwrap();
        let path = dir.path().join(file);
        let _ = std::fs::remove_file(&path);
        std::os::unix::fs::symlink("/nonexistent", &path).unwrap();
        let output = iec().args(words(form, dir.path())).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let named = said.contains(path.file_name().unwrap().to_str().unwrap());
        if output.status.success() || !named || !said.contains("found a link to /nonexistent, which does not exist") {
            wrong.push(format!("{form}, {file}: {:?}: {said}", output.status.code()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
