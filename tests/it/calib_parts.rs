//! Tests `iec calib --part` and the merge of its parts: the statistics have the same bytes however the work is divided.

use crate::calib::{killed, text};
use crate::common::{fixture, iec, packed};
use crate::resume::partial;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Model and text of a calibration, and a directory for its statistics.
struct Setup {
    dir: TempDir,
    model: TempDir,
    text: PathBuf,
}

impl Setup {
    fn new() -> Setup {
        Setup { dir: TempDir::new().unwrap(), model: packed("stories260k"), text: text("tinystories_valid_30k.txt") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn arguments(&self, out: &Path, more: &[&str]) -> Vec<String> {
        let mut words = vec!["calib".to_string(), "--json".to_string(), "--window".to_string(), "64".to_string()];
        for (option, path) in [("--model-dir", self.model.path()), ("--text", &self.text), ("--out", out)] {
            words.extend([option.to_string(), path.display().to_string()]);
        }
        words.extend(more.iter().map(|word| word.to_string()));
        words
    }

    /// Runs `iec calib` to its end and returns its summary.
    fn calib(&self, out: &Path, more: &[&str]) -> Value {
        summary(iec().args(self.arguments(out, more)))
    }

    /// Returns the statistics of an undivided run.
    fn whole(&self, more: &[&str]) -> Vec<u8> {
        let dir = TempDir::new().unwrap();
        let out = dir.path().join("stats");
        self.calib(&out, more);
        std::fs::read(out).unwrap()
    }
}

fn summary(command: &mut assert_cmd::Command) -> Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Merges parts; returns the exit code and stderr.
fn merge(option: &str, path: &Path) -> (i32, String) {
    let output = iec().args(["merge", "--json", option]).arg(path).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

/// Asserts that a merge is refused with exit code 1 and a message with these words, and that no statistics are written.
fn refused(out: &Path, words: &[&str]) {
    let (code, stderr) = merge("--out", out);
    assert_eq!(code, 1, "{stderr}");
    assert!(words.iter().all(|word| stderr.contains(word)), "{words:?}: {stderr}");
    assert!(!out.exists());
}

fn entries(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

#[test]
fn any_number_of_parts_threads_and_passes_gives_the_same_bytes() {
    let setup = Setup::new();
    let out = setup.path("stats");
    for kind in [&[][..], &["--hessian"]] {
        let expected = setup.whole(&[kind, &["--threads", "1"]].concat());
        assert!(setup.whole(&[kind, &["--threads", "2", "--memory", "100K"]].concat()) == expected, "{kind:?}");
        // The last count is larger than the number of shards.
        for count in [1, 2, 3, 5, 20] {
            let mut shards = 0;
            for number in (1..=count).rev() {
                let part = format!("{number}/{count}");
                let [threads, memory] = if number % 2 == 0 { ["1", "1K"] } else { ["2", "1M"] };
                let how = ["--part", &part, "--threads", threads, "--memory", memory];
                let done = setup.calib(&out, &[kind, &how].concat());
                assert_eq!(done["part"], part);
                shards += done["shards"].as_u64().unwrap();
                assert_eq!(entries(setup.dir.path()), 1, "a part names nothing");
            }
            assert_eq!(shards, 16, "{count}");
            let (option, path) = if count % 2 == 0 { ("--out", &*out) } else { ("--out-dir", setup.dir.path()) };
            let (code, stderr) = merge(option, path);
            assert_eq!(code, 0, "{kind:?} {count}: {stderr}");
            assert!(std::fs::read(&out).unwrap() == expected, "{kind:?} {count}");
            assert_eq!(entries(setup.dir.path()), 1, "{kind:?} {count}: something is left");
            std::fs::remove_file(&out).unwrap();
        }
    }
}

#[test]
fn few_windows_leave_shards_and_parts_without_work() {
    let setup = Setup::new();
    let out = setup.path("stats");
    let few = ["--hessian", "--max-tokens", "300"];
    let expected = setup.whole(&few);
    for part in ["1/3", "2/3", "3/3"] {
        setup.calib(&out, &[&few[..], &["--part", part]].concat());
    }
    assert_eq!(merge("--out", &out).0, 0);
    assert!(std::fs::read(&out).unwrap() == expected);
}

#[test]
fn parts_that_are_missing_cut_short_or_damaged_are_named() {
    let setup = Setup::new();
    let out = setup.path("stats");
    for kind in [&[][..], &["--hessian"]] {
        let run = |part: &str, more: &[&str]| setup.calib(&out, &[kind, &["--part", part], more].concat());
        run("1/3", &[]);
        refused(&out, &["not finished: part 2/3 (`layer 0 of shard", "more), 3/3 ("]);
        run("3/3", &[]);
        run("2/3", &[]);
        let parts = partial(setup.dir.path());

        let journal = parts.join("part-2-of-3.journal");
        let lines = std::fs::read_to_string(&journal).unwrap();
        std::fs::write(&journal, &lines[..lines.len() - 5]).unwrap();
        refused(&out, &["not finished: part 2/3 (`"]);
        let again = run("2/3", &[]);
        let known = again["taken_over_tokens"].as_u64().unwrap();
        assert!(0 < known && known < again["tokens"].as_u64().unwrap(), "{again}");

        let data = parts.join("part-3-of-3.shards");
        let good = std::fs::read(&data).unwrap();
        let mut flipped = good.clone();
        let at = flipped.iter().rposition(|b| *b != 0).unwrap();
        flipped[at] ^= 1;
        for bytes in [&flipped[..], &good[..at], &[]] {
            std::fs::write(&data, bytes).unwrap();
            refused(
                &out,
                &["the data of part 3/3 differ from the hashes in its journal", "run part 3/3 again with --fresh"],
            );
        }
        run("3/3", &["--fresh"]);
        let (code, stderr) = merge("--out", &out);
        assert_eq!(code, 0, "{stderr}");
        assert!(std::fs::read(&out).unwrap() == setup.whole(kind), "{kind:?}");
        std::fs::remove_file(&out).unwrap();
    }
}

#[test]
fn parts_of_other_texts_models_outputs_or_commands_are_not_merged() {
    let mut setup = Setup::new();
    let out = setup.path("stats");
    refused(&out, &["found no parts"]);
    let copy = TempDir::new().unwrap();
    let text = copy.path().join("text");
    std::fs::copy(&setup.text, &text).unwrap();
    setup.text = text.clone();
    setup.calib(&out, &["--part", "1/1", "--max-tokens", "2000"]);
    refused(&setup.path("other"), &["found parts of 1 other outputs, but none whose output is `other`"]);
    std::fs::File::options().write(true).open(&text).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    refused(&out, &["made from other input files"]);
    // The same output from the changed text and with another option.
    setup.calib(&out, &["--part", "1/1", "--max-tokens", "2000"]);
    refused(&out, &["parts of 2 different conversions"]);

    // Parts of several outputs in one directory are merged by the name of the output.
    let [first, second] = ["a", "b"].map(|name| setup.path(&format!("several/{name}")));
    std::fs::create_dir(setup.path("several")).unwrap();
    setup.calib(&first, &["--part", "1/1", "--max-tokens", "2000"]);
    setup.calib(&second, &["--part", "1/1", "--max-tokens", "3000"]);
    let (code, stderr) = merge("--out-dir", &setup.path("several"));
    assert!(code == 1 && stderr.contains("parts of 2 different conversions"), "{stderr}");
    for (out, tokens) in [(first, "2000"), (second, "3000")] {
        assert_eq!(merge("--out", &out).0, 0);
        assert!(std::fs::read(&out).unwrap() == setup.whole(&["--max-tokens", tokens]));
    }

    let out = setup.path("hostile/stats");
    std::fs::create_dir(out.parent().unwrap()).unwrap();
    setup.calib(&out, &["--part", "1/1", "--max-tokens", "2000"]);
    let command = partial(out.parent().unwrap()).join("command.json");
    let good: Value = serde_json::from_slice(&std::fs::read(&command).unwrap()).unwrap();
    let mut changed = good.clone();
    changed["options"]["texts"] = json!(7);
    std::fs::write(&command, changed.to_string()).unwrap();
    refused(&out, &["the command of iec", "cannot be read"]);
    let mut changed = good.clone();
    changed["options"]["window"] = json!(32);
    std::fs::write(&command, changed.to_string()).unwrap();
    refused(&out, &["made from other input files"]);
    std::fs::write(&command, good.to_string()).unwrap();
    assert_eq!(merge("--out", &out).0, 0);

    let streamed = iec().args(setup.arguments(Path::new("/dev/stdout"), &["--part", "1/2"])).output().unwrap();
    assert_eq!(streamed.status.code(), Some(2));
}

#[test]
fn a_killed_part_goes_on_and_the_whole_command_takes_over_parts() {
    let mut setup = Setup::new();
    let long = setup.path("long.txt");
    std::fs::write(&long, std::fs::read_to_string(&setup.text).unwrap().repeat(4)).unwrap();
    setup.text = long;
    let home = TempDir::new().unwrap();
    let out = home.path().join("stats");
    for kind in [&[][..], &["--hessian", "--memory", "1K"]] {
        let expected = setup.whole(kind);
        let options = [kind, &["--part", "1/2", "--checkpoint-every", "1"]].concat();
        let ready = |partial: &Path| {
            let journal = std::fs::read_to_string(partial.join("part-1-of-2.journal"));
            journal.is_ok_and(|journal| journal.contains("\"layer 0 of shard"))
        };
        assert!(killed(&setup.arguments(&out, &options), home.path(), ready), "{kind:?}: it was too fast to be killed");
        let again = setup.calib(&out, &options);
        assert!(again["taken_over_tokens"].as_u64().unwrap() > 0, "{kind:?}: {again}");
        let whole = setup.calib(&out, kind);
        assert!(whole["taken_over_tokens"].as_u64().unwrap() > 0, "{kind:?}: {whole}");
        assert!(std::fs::read(&out).unwrap() == expected, "{kind:?}");
        std::fs::remove_file(&out).unwrap();
        assert_eq!(entries(home.path()), 0, "{kind:?}: something is left");
    }
}

#[test]
fn tasks_of_an_array_share_the_pack_of_a_checkpoint() {
    let setup = Setup::new();
    let out = setup.path("stats");
    let checkpoint = fixture("llama-gqa");
    let command = |out: &Path, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_iec"));
        command.args(["calib", "--window", "64", "--max-tokens", "900", "--hessian", "--hf-dir"]).arg(&checkpoint);
        command.arg("--text").arg(&setup.text).arg("--out").arg(out).args(more);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let array = (1..=3).map(|task: usize| {
        let mut command = command(&out, &["--parts", "auto"]);
        command.env("SLURM_ARRAY_TASK_ID", task.to_string()).env("SLURM_ARRAY_TASK_COUNT", "3").spawn().unwrap()
    });
    let running: Vec<_> = array.collect();
    running.into_iter().for_each(|mut task| assert!(task.wait().unwrap().success()));
    assert!(partial(setup.dir.path()).join("pack/model.ie.json").exists());
    assert_eq!(merge("--out", &out).0, 0);
    let whole = setup.path("whole");
    assert!(command(&whole, &[]).status().unwrap().success());
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&whole).unwrap());
    assert_eq!(entries(setup.dir.path()), 2, "something is left");
}
