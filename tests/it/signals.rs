//! Tests signals: the first SIGINT, SIGTERM or SIGHUP ends a command wherever it waits, and leaves nothing behind.

use crate::common::{fixture, iec};
use assert_cmd::cargo::cargo_bin;
use rustix::fs::{CWD, FileType, Mode, OFlags, fcntl_setfl, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{PipeReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Signals and the exit codes that the guide lists.
const SIGNALS: [(Signal, i32); 3] = [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)];
/// Time after which a command that must end counts as hanging.
const LONG: Duration = Duration::from_secs(30);

/// Commands that wait: `{P}` is a pack, `{N}` a named pipe that nobody opens.
const WAITING: &[&str] = &[
    "run --model-dir {P}",
    "run --model-dir {P} --chat",
    "run --model-dir {P} --prompts-file {N}",
    "run --model-dir {P} --prompts-file /dev/stdin",
    "run --model-dir {P} --prompt a --max-new 2 --trace-ids {N}",
    "eval --model-dir {P} --text {N}",
    "eval --model-dir {P} --loglikelihood {N}",
    "tensor-map --model-dir {P} --out {N}",
    "dedup --model-dir {L} --even-if-larger",
    "inspect {P} --tensors --json",
];

fn pack(out: &Path) {
    iec().args(["pack", "-q", "--hf-dir"]).arg(fixture("stories260k")).arg("--out-dir").arg(out).assert().success();
}

/// Returns a pipe that is full, so that writing to it waits.
fn full_pipe() -> (PipeReader, Stdio) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
    while writer.write(&[0; 4096]).is_ok() {}
    fcntl_setfl(&writer, OFlags::empty()).unwrap();
    (reader, writer.into())
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

fn field(child: &Child, name: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_string()
}

/// Returns true if this process ignores the signal, as it does under `nohup`; its commands then ignore the signal, too.
pub fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() >> (signal.as_raw() - 1) & 1 == 1
}

/// Returns true when the command has installed its signal handlers.
fn catches_signals(child: &Child) -> bool {
    let caught = u64::from_str_radix(&field(child, "SigCgt:"), 16).unwrap_or(0);
    caught >> (Signal::INT.as_raw() - 1) & 1 == 1
}

/// Waits until the command sleeps; returns false if it ends instead.
fn waits(child: &mut Child) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < LONG && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(100));
        if catches_signals(child) && field(child, "State:").starts_with('S') {
            return true;
        }
    }
    false
}

/// Returns the exit code of a command that must end soon; `None` if it had to be killed.
fn end_of(child: &mut Child) -> Option<i32> {
    let begin = Instant::now();
    while begin.elapsed() < LONG {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn the_first_signal_ends_every_wait_and_nothing_is_left() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    pack(&at("P"));
    pack(&at("L"));
    mknodat(CWD, at("N"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    std::fs::write(at("P").join("chat_template.jinja"), "{{ messages[0]['content'] }}").unwrap();
    let (before, mut wrong) = ([names(dir.path()), names(&at("P")), names(&at("L"))], Vec::new());
    // Another command changes this pack as long as the lock is held.
    let lock = std::fs::File::create(at("L").join(".iec-lock")).unwrap();
    lock.lock().unwrap();
    for form in WAITING {
        for (signal, code) in SIGNALS.into_iter().filter(|(signal, _)| !is_ignored(*signal)) {
            let marks = ["P", "N", "L"].map(|name| (format!("{{{name}}}"), at(name).display().to_string()));
            let line = marks.iter().fold(form.to_string(), |line, (mark, path)| line.replace(mark, path));
            let (_reader, stdout) = full_pipe();
            let mut command = Command::new(cargo_bin("iec"));
            command.args(line.split_whitespace()).env("IEC_DEVICE", "cpu").stdin(Stdio::piped()).stdout(stdout);
            let mut child = command.stderr(Stdio::null()).spawn().unwrap();
            assert!(waits(&mut child), "{form}");
            send(&child, signal);
            let found = end_of(&mut child);
            if found != Some(code) {
                wrong.push(format!("{form}, {signal:?}: {found:?} instead of {code}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    drop(lock);
    std::fs::remove_file(at("L").join(".iec-lock")).unwrap();
    assert_eq!([names(dir.path()), names(&at("P")), names(&at("L"))], before);
}

#[test]
fn a_command_started_with_nohup_survives_its_terminal() {
    let dir = TempDir::new().unwrap();
    pack(&dir.path().join("P"));
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(cargo_bin("iec"));
    command.args(["run", "--max-new", "1", "--model-dir"]).arg(dir.path().join("P"));
    command.env("IEC_DEVICE", "cpu").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    assert!(waits(&mut child));
    send(&child, Signal::HUP);
    std::thread::sleep(Duration::from_millis(200));
    child.stdin.take().unwrap().write_all(b"Once").unwrap();
    assert_eq!(end_of(&mut child), Some(0));
}

/// Adds a tensor of 1 GiB to a pack, which takes a second to hash and no space on the disk.
fn add_large_tensor(pack: &Path) {
    let json = pack.join("model.ie.json");
    let mut description: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let nbytes = 1 << 30;
    let offset = description["total_bytes"].as_u64().unwrap().next_multiple_of(4096);
    description["total_bytes"] = (offset + nbytes).into();
    description["tensors"].as_array_mut().unwrap().push(serde_json::json!({
        "name": "large", "dtype": "F32", "shape": [1 << 14, 1 << 14], "nbytes": nbytes, "offset": offset,
        "sha256": "0".repeat(64),
    }));
    description.as_object_mut().unwrap().remove("sha256");
    std::fs::write(&json, description.to_string()).unwrap();
    let binary = std::fs::File::options().write(true).open(pack.join("model.ie.bin")).unwrap();
    binary.set_len(offset + nbytes).unwrap();
}

#[test]
fn an_interrupted_check_calls_no_tensor_damaged() {
    let dir = TempDir::new().unwrap();
    let at = dir.path().join("P");
    pack(&at);
    add_large_tensor(&at);
    let mut command = Command::new(cargo_bin("iec"));
    command.args(["tensor-map", "--strict", "--threads", "1", "--model-dir"]).arg(&at);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    while !catches_signals(&child) {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(50));
    send(&child, Signal::INT);
    assert_eq!(end_of(&mut child), Some(130));
    let said = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert!(said.contains("interrupted") && !said.contains("differ from"), "{said}");
    assert!(!at.join("tensor_map.json").exists());
}
