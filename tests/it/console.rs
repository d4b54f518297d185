//! Tests closed and full stdout and stderr: every form of every command ends as documented and never panics.

use crate::common::{fixture, iec};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Command lines that print, and their exit codes when the output is read. `{S}` is a checkpoint, `{P}` its pack,
/// `{O}` a fresh directory, `{C}` a fresh copy of the pack, `{D}` one of the deduplicated pack, `{J}` one of a
/// directory of finished parts.
const FORMS: &[(&str, i32)] = &[
    ("--version", 0),
    ("help", 0),
    ("pack --help", 0),
    ("pack --json --hf-dir {S} --out-dir {O}/p", 0),
    ("pack --dry-run --hf-dir {S} --out-dir {O}/p", 0),
    ("pack --dry-run --json --hf-dir {S} --out-dir {O}/p", 0),
    ("pack --json --hf-dir {S}/nope --out-dir {O}/p", 1),
    ("pack --nope", 2),
    ("calib --json --model-dir {P} --text {T} --max-tokens 64 --window 32 --out {O}/c", 0),
    ("ptq --json --hf-dir {S} --bits 8 --out {O}/m.json", 0),
    ("ptq --dry-run --hf-dir {S} --bits 8 --out {O}/m.json", 0),
    ("ptq --dry-run --json --hf-dir {S} --bits 8 --out {O}/m.json", 0),
    ("ptq --dry-run --hf-dir {S} --target-bpw 6 --out {O}/m.json", 0),
    ("q4 --json --hf-dir {S} --out-dir {O}/q", 0),
    ("q4 --dry-run --hf-dir {S} --out-dir {O}/q", 0),
    ("q4 --append-attn --json --model-dir {C}", 0),
    ("merge --json --out-dir {J}", 0),
    ("dedup --json --even-if-larger --model-dir {C}", 0),
    ("dedup --json --verify --model-dir {D}", 0),
    ("dedup --json --restore --model-dir {D}", 0),
    ("dedup --json --remove --model-dir {D}", 0),
    ("tensor-map --json --model-dir {C}", 0),
    ("tensor-map --out - --model-dir {P}", 0),
    ("inspect {P}", 0),
    ("inspect {S} --json --tensors", 0),
    ("inspect {G}", 0),
    ("import-gguf {G} --json --out-dir {O}/p", 0),
    ("export-gguf --json --model-dir {P} --out {O}/g", 0),
    ("export-hf --json --format fp8 --model-dir {P} --out-dir {O}/h", 0),
    ("--version -v", 0),
    ("pack --json --bits 8 {S} --out-dir {O}/p", 0),
    ("run --plan {P}", 0),
    ("run --plan --json {P}", 0),
    ("recipes", 0),
    ("simulate --requests 20 --json --out {O}/page.html", 0),
    ("simulate --requests 20 --out -", 0),
    ("recipes int4", 0),
    ("recipes --json", 0),
    ("completions bash", 0),
    ("man", 0),
    ("man --json --out-dir {O}/man1", 0),
    ("run --model-dir {P} --prompt a --max-new 8 --ignore-eos --logprobs 2", 0),
    ("run --json --model-dir {P} --prompt a --max-new 2 --ignore-eos", 0),
    ("run --json --model-dir {P} --prompt a --ctx 1", 2),
    ("list", 0),
    ("list --json", 0),
    ("show {P}", 0),
    ("show {S} --json", 0),
    ("rm --all --json", 0),
    ("rm nope", 1),
    ("chat --model-dir {P} --chat-template alpaca --prompt a --max-new 4", 0),
    ("chat --model-dir {P} --chat-template alpaca --json", 0),
    ("chat --model-dir {P}", 1),
    ("serve --check --model-dir {P}", 0),
    ("serve --check --model-dir {P} --max-n 0", 2),
    ("run --model-dir {P} --prompt a --choice x,y", 0),
    ("run --json --model-dir {P} --prompt a --regex (", 2),
    ("bench --model-dir {P} --prompt-len 4 --max-new 2 --runs 1 --warmup 0", 0),
    ("verify --model-dir {P} --hashes", 0),
    ("verify --model-dir {P} --hashes --json", 0),
    ("eval --model-dir {P} --text {T} --ctx 64 --windows 1", 0),
    ("eval --model-dir {P} --text {T} --ctx 64 --windows 1 --json", 0),
    ("eval --model-dir {P} --loglikelihood {L}", 0),
    ("devices", 0),
    ("devices --json", 0),
    ("verify-source --hf-dir {S}", 0),
    ("verify-source --json --hf-dir {S}", 0),
    ("unpack --json --model-dir {P} --out-dir {O}/s", 0),
    ("sign --json --new-key {O}/key", 0),
    ("synth --json --config {S}/config.json --out-dir {O}/s", 0),
    ("pull a/b --local-dir {O}/s", 1),
    ("demo", 0),
    ("demo --json", 0),
];

/// Input files of the command lines.
struct Files {
    dir: TempDir,
}

impl Files {
    fn make() -> Files {
        let dir = TempDir::new().unwrap();
        let at = |name: &str| dir.path().join(name);
        let source = fixture("stories260k");
        iec().args(["pack", "-q", "--hf-dir"]).arg(&source).arg("--out-dir").arg(at("P")).assert().success();
        copy(&at("P"), &at("D"));
        let reduce = ["dedup", "-q", "--even-if-larger", "--remove-original", "--model-dir"];
        iec().args(reduce).arg(at("D")).assert().success();
        iec()
            .args(["pack", "-q", "--part", "1/1", "--hf-dir"])
            .arg(&source)
            .arg("--out-dir")
            .arg(at("J"))
            .assert()
            .success();
        iec().args(["export-gguf", "-q", "--model-dir"]).arg(at("P")).arg("--out").arg(at("G")).assert().success();
        std::fs::write(at("L"), "{\"context\":\"Once\",\"continuation\":\" upon a time\"}\n").unwrap();
        Files { dir }
    }

    /// Splits a command line into words with its placeholders replaced; copies and outputs are below `fresh`.
    fn words(&self, form: &str, fresh: &Path) -> Vec<String> {
        let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/text/tinystories_valid_30k.txt");
        let shown = |path: PathBuf| path.display().to_string();
        for (mark, name) in [("{C}", "P"), ("{D}", "D"), ("{J}", "J")] {
            if form.contains(mark) {
                copy(&self.dir.path().join(name), &fresh.join("copy"));
            }
        }
        let mut words = form.to_string();
        for (mark, path) in [
            ("{S}", fixture("stories260k")),
            ("{T}", text),
            ("{P}", self.dir.path().join("P")),
            ("{G}", self.dir.path().join("G")),
            ("{L}", self.dir.path().join("L")),
            ("{O}", fresh.to_path_buf()),
            ("{C}", fresh.join("copy")),
            ("{D}", fresh.join("copy")),
            ("{J}", fresh.join("copy")),
        ] {
            words = words.replace(mark, &shown(path));
        }
        words.split_whitespace().map(String::from).collect()
    }
}

fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-r").arg(from).arg(to).status().unwrap().success());
}

/// Returns the writing end of a pipe whose reading end is closed.
fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn full_device() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

/// Runs every command line with its streams replaced and fails with a list of those that do not end as `judge`
/// expects.
fn each_form(more: &[&str], streams: impl Fn(&mut Command), judge: impl Fn(i32, i32, &str) -> bool) {
    let files = Files::make();
    let mut wrong = Vec::new();
    for (form, code) in FORMS {
        let fresh = TempDir::new().unwrap();
        let words = files.words(form, fresh.path());
        // The shell closes a stream of the program, which `Command` cannot.
        let mut command = Command::new("sh");
        command.args(["-c", r#"eval "exec \"\$@\" $CLOSED""#, "sh"]).arg(assert_cmd::cargo::cargo_bin("iec"));
        command.args(more).args(words).env("IEC_DEVICE", "cpu").stdin(Stdio::null());
        // No server listens at this address.
        command.env("HF_ENDPOINT", "http://127.0.0.1:1").env("IEC_CACHE", fresh.path().join("cache"));
        streams(&mut command);
        let output = command.spawn().unwrap().wait_with_output().unwrap();
        let found = output.status.code().unwrap_or(-1);
        let said = String::from_utf8_lossy(&output.stderr);
        if !judge(*code, found, &said) {
            wrong.push(format!("{form}: {found} instead of {code}: {said}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {} forms:\n{}", wrong.len(), FORMS.len(), wrong.join("\n"));
}

#[test]
fn every_command_has_a_form() {
    let help = String::from_utf8(iec().arg("--help").assert().success().get_output().stdout.clone()).unwrap();
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let commands: Vec<&str> =
        lines.filter(|line| !line.starts_with("    ")).filter_map(|line| line.split_whitespace().next()).collect();
    let has_form = |name: &&&str| FORMS.iter().any(|(form, _)| form.split_whitespace().next() == Some(name));
    let missing: Vec<_> = commands.iter().filter(|name| !has_form(name)).collect();
    assert!(commands.len() >= 20 && missing.is_empty(), "{missing:?} of {commands:?}");
}

#[test]
fn a_reader_that_leaves_ends_every_command_with_success_and_without_a_word() {
    let silent = |code, found, said: &str| found == code && (code != 0 || said.is_empty());
    let closed = |command: &mut Command| {
        command.stdout(closed_pipe()).stderr(Stdio::piped());
    };
    each_form(&["-q"], closed, silent);
}

#[test]
fn a_full_disk_under_stdout_is_an_error_of_every_command() {
    let told = |code, found, said: &str| match code {
        0 => found == 1 && said.contains("stdout: No space left"),
        code => found == code && !said.contains("panicked"),
    };
    let full = |command: &mut Command| {
        command.stdout(full_device()).stderr(Stdio::piped());
    };
    each_form(&["-q"], full, told);
}

#[test]
fn lost_notes_change_no_exit_code() {
    for lost in [closed_pipe, full_device] {
        let streams = |command: &mut Command| {
            command.stdout(Stdio::null()).stderr(lost());
        };
        each_form(&["-v", "-v"], streams, |code, found, _| found == code);
    }
}

#[test]
fn a_stream_that_is_closed_at_the_start_counts_as_the_null_device() {
    for closed in [">&-", "2>&-", "<&- >&- 2>&-"] {
        let streams = |command: &mut Command| {
            command.env("CLOSED", closed).stdout(Stdio::null()).stderr(Stdio::null());
        };
        each_form(&["-v", "-v"], streams, |code, found, _| found == code);
    }
}
