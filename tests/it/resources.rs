//! Tests refused memory, address space and threads, where every command ends by itself with exit code 0 or 6, and
//! files that are truncated while they are mapped.

use crate::common::{fixture, iec, packed};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Exit code for refused memory, address space and threads.
const OUT_OF_MEMORY: i32 = 6;

/// Runs the binary with an address space of at most `kib` KiB.
fn limited(kib: u64, words: &[&str]) -> Output {
    let mut command = Command::new("bash");
    command.args(["-c", "ulimit -c 0; ulimit -v \"$0\" && exec \"$@\"", &kib.to_string()]);
    command.arg(assert_cmd::cargo::cargo_bin("iec")).args(words).stdin(Stdio::null());
    command.env("IEC_DEVICE", "cpu").env_remove("RUST_BACKTRACE").output().expect("bash runs")
}

/// Returns the smallest address space in KiB, in steps of 1 MiB, in which the program starts.
fn least_address_space() -> u64 {
    let starts = |mib: &u64| limited(mib << 10, &["--version"]).status.success();
    (4..512).find(starts).expect("the program starts in 512 MiB") << 10
}

/// Checks that a command succeeded, or that it said in a line, perhaps with a line of help, what was refused.
fn check(output: &Output, what: &str) -> bool {
    let said = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => true,
        Some(OUT_OF_MEMORY) => {
            // Two threads may be refused at the same time. The line does not begin with this where the standard library
            // has begun to report a thread without a stack. The standard library and the C library report what they
            // were refused in their own words.
            let own = said.replace("fatal runtime error: ", "").replace("Fatal glibc error: ", "");
            let errors = own.matches("error: ").count();
            assert!((1..=2).contains(&errors), "{what}: {said}");
            false
        }
        _ => panic!("{what}: {}: {said}", output.status),
    }
}

/// Checkpoint, pack, text and outputs of the commands.
struct Files {
    pack: TempDir,
    out: TempDir,
}

impl Files {
    fn new() -> Files {
        let files = Files { pack: packed("stories260k"), out: tempfile::tempdir().unwrap() };
        std::fs::write(files.out.path().join("text.txt"), "Once upon a time there was a cat. ".repeat(40)).unwrap();
        files
    }

    /// Splits a command line at blanks and fills in `{S}`, the checkpoint, `{P}`, its pack, and `{O}`, a directory.
    fn words(&self, line: &str) -> Vec<String> {
        let path = |path: &Path| path.to_str().unwrap().to_string();
        let filled = line.replace("{S}", &path(&fixture("stories260k"))).replace("{P}", &path(self.pack.path()));
        filled.replace("{O}", &path(self.out.path())).split(' ').map(str::to_string).collect()
    }
}

#[test]
fn every_command_ends_with_0_or_6_in_any_address_space() {
    let files = Files::new();
    let least = least_address_space();
    for line in [
        "inspect {P}",
        "run --model-dir {P} --prompt abc --max-new 4 --ignore-eos --threads 3",
        "pack --hf-dir {S} --out-dir {O}/p --overwrite --threads 3",
        "ptq --hf-dir {S} --bits 8 --out {O}/m.json --overwrite --threads 3",
        "calib --model-dir {P} --text {O}/text.txt --max-tokens 64 --window 32 --out {O}/c --overwrite --threads 3",
    ] {
        let words = files.words(line);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        // Steps that grow: 256 KiB where the start of the program is refused, some MiB where large buffers are.
        let (mut more, mut refused, mut done) = (0, 0, 0);
        while done < 3 && more < 1 << 20 {
            match check(&limited(least + more, &words), &format!("{line} in {} KiB", least + more)) {
                true => done += 1,
                false => refused += 1,
            }
            more += 256.max(more / 8);
        }
        assert!(refused > 0 && done > 0, "{line}: {refused} refused, {done} succeeded");
    }
    let leftovers = std::fs::read_dir(files.out.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let leftovers: Vec<_> = leftovers.filter(|name| name.to_string_lossy().starts_with(".iec-")).collect();
    assert!(leftovers.is_empty(), "{leftovers:?}");
}

#[test]
fn a_prompt_that_never_ends_is_refused() {
    let pack = packed("stories260k");
    std::fs::write(pack.path().join("chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    for mode in [&[][..], &["--chat"]] {
        let start = Instant::now();
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("iec"));
        command.args(["run", "--model-dir"]).arg(pack.path()).args(mode).env("IEC_DEVICE", "cpu");
        let output = command.stdin(std::fs::File::open("/dev/zero").unwrap()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("standard input: found more than 64 MiB of text"), "{said}");
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }
    let mut command = iec();
    command.args(["run", "--prompts-file", "/dev/zero", "--model-dir"]).arg(pack.path());
    let output = command.timeout(Duration::from_secs(20)).output().unwrap();
    assert!(matches!(output.status.code(), Some(1 | 2)), "{output:?}");
}

#[test]
fn a_synthetic_prompt_beyond_the_context_is_refused_at_once() {
    let pack = packed("stories260k");
    for counts in [&["--prompt-len", "1000000000"][..], &["--prompt-len", "2", "--depth", "1000000000"]] {
        let mut command = iec();
        command.args(["bench", "--model-dir"]).arg(pack.path()).args(counts);
        let output = command.timeout(Duration::from_secs(10)).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("expected at most 512 tokens"), "{said}");
    }
}

#[test]
fn a_batch_beyond_the_memory_is_refused_at_once() {
    let mut command = iec();
    command.args(["bench", "--prompt-len", "1", "--batch", "1000000000000"]).timeout(Duration::from_secs(10));
    let said = command.assert().code(OUT_OF_MEMORY).get_output().stderr.clone();
    assert!(String::from_utf8_lossy(&said).contains("no memory for --batch 1000000000000"));
}

#[test]
fn a_thousand_threads_are_not_started() {
    let pack = packed("stories260k");
    let notes = |threads: &str| {
        let mut command = iec();
        command.args(["run", "--prompt", "a", "--max-new", "2", "--threads", threads, "--model-dir"]).arg(pack.path());
        String::from_utf8(command.assert().success().get_output().stderr.clone()).unwrap()
    };
    let (few, many) = (notes("2"), notes("1000"));
    assert!(!few.contains("are started"), "{few}");
    let started =
        many.strip_prefix("--threads 1000: ").and_then(|rest| rest.split_once(" are started, 4 per processor"));
    let started: usize = started.expect(&many).0.parse().unwrap();
    assert_eq!(started, 4 * std::thread::available_parallelism().unwrap().get(), "{many}");
}

#[test]
fn a_pack_that_is_truncated_while_it_is_mapped_ends_in_an_error() {
    for store in ["model.ie.bin", "model.dedup.defaults.bin"] {
        let pack = packed("stories260k");
        std::fs::write(pack.path().join("chat_template.jinja"), "{{ messages[0].content }}").unwrap();
        if store != "model.ie.bin" {
            iec().args(["dedup", "--even-if-larger", "--model-dir"]).arg(pack.path()).assert().success();
            std::fs::remove_file(pack.path().join("model.ie.bin")).unwrap();
        }
        let file = pack.path().join(store);
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("iec"));
        command.args(["run", "--chat", "--max-new", "4", "--model-dir"]).arg(pack.path()).env("IEC_DEVICE", "cpu");
        let streams = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = streams.spawn().unwrap();
        let maps = format!("/proc/{}/maps", child.id());
        let start = Instant::now();
        while !std::fs::read_to_string(&maps).unwrap().contains(store) {
            assert!(start.elapsed() < Duration::from_secs(60), "{store} is not mapped");
            std::thread::sleep(Duration::from_millis(5));
        }
        // The description is read before, and the weights after the message.
        std::thread::sleep(Duration::from_millis(500));
        std::fs::File::options().write(true).open(&file).unwrap().set_len(64).unwrap();
        child.stdin.take().unwrap().write_all(b"Once upon a time\n").unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{store}: {}: {said}", output.status);
        let expected = format!("error: {}: found no data where the file had some", file.display());
        assert!(said.contains(&expected), "{store}: {said}");
    }
}
