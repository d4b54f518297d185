//! Tests that interrupted conversions can be resumed: wherever a run is killed, partial output cannot be opened as a
//! model, and running the same command again produces the same bytes as an uninterrupted run.

use crate::checkpoint::{copy_of, files};
use crate::common::{fixture, iec};
use iec::sha256::{Digest, Sha256, hex};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

pub type Files = BTreeMap<PathBuf, Vec<u8>>;

/// Returns the arguments of a conversion from `source` into `out`. The pseudo-command `append` stands for `q4
/// --append-attn` on a copy of the pack `source`.
fn arguments(command: &[&str], source: &Path, out: &Path) -> Vec<OsString> {
    let (name, rest) = command.split_first().unwrap();
    let file = out.join("model.gguf");
    let (head, from, to): (&[&str], &Path, (&str, &Path)) = match *name {
        "import-gguf" => (&["import-gguf"], source, ("--out-dir", out)),
        "export-gguf" => (&["export-gguf", "--model-dir"], source, ("--out", &file)),
        "unpack" | "export-hf" => (&[*name, "--model-dir"], source, ("--out-dir", out)),
        "append" => (&["q4", "--append-attn", "--model-dir"], out, ("--chunk-rows", Path::new("256"))),
        name => (&[name, "--hf-dir"], source, ("--out-dir", out)),
    };
    let mut arguments: Vec<OsString> = head.iter().map(OsString::from).collect();
    arguments.extend([from.into(), to.0.into(), to.1.into()]);
    arguments.extend(rest.iter().map(OsString::from));
    arguments
}

/// Prepares `out` for a conversion: a copy of the pack for `append`, an empty directory for `export-gguf`.
pub fn prepare(command: &[&str], source: &Path, out: &Path) {
    match command[0] {
        "append" => copy_dir(source, out),
        "export-gguf" => std::fs::create_dir_all(out).unwrap(),
        _ => {}
    }
}

/// Inputs of conversions from packs and GGUF files: an unquantized pack and the GGUF file exported from it.
pub struct Sources {
    dir: TempDir,
    checkpoint: PathBuf,
}

impl Sources {
    pub fn new(checkpoint: &Path) -> Sources {
        let dir = TempDir::new().unwrap();
        run(&["pack"], checkpoint, &dir.path().join("pack"));
        let model = dir.path().join("pack");
        iec()
            .args(["export-gguf", "--model-dir"])
            .arg(model)
            .arg("--out")
            .arg(dir.path().join("m.gguf"))
            .assert()
            .success();
        Sources { dir, checkpoint: checkpoint.to_path_buf() }
    }

    /// Returns the path of the input that `command` reads.
    pub fn of(&self, command: &[&str]) -> PathBuf {
        match command[0] {
            "import-gguf" => self.dir.path().join("m.gguf"),
            "export-gguf" | "export-hf" | "unpack" | "append" => self.dir.path().join("pack"),
            _ => self.checkpoint.clone(),
        }
    }
}

/// Runs a conversion to its end and returns its summary.
pub fn run(command: &[&str], source: &Path, out: &Path) -> Value {
    let mut iec = iec();
    iec.args(arguments(command, source, out)).arg("--json");
    let output = iec.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the files that an uninterrupted run writes.
pub fn undisturbed(command: &[&str], checkpoint: &Path) -> Files {
    let dir = TempDir::new().unwrap();
    prepare(command, checkpoint, dir.path());
    run(command, checkpoint, dir.path());
    files(dir.path())
}

fn paths(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect()
}

/// Returns the hidden directory of partial output and asserts that there is exactly one.
pub fn partial(out: &Path) -> PathBuf {
    let hidden = hidden(out);
    assert_eq!(hidden.len(), 1, "{hidden:?}");
    hidden.into_iter().next().unwrap()
}

fn hidden(out: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(out).into_iter().flatten().map(|e| e.unwrap().path());
    entries.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(".iec-")).collect()
}

/// Creates the state of a run that has finished all tasks but committed nothing, and returns the directory of partial
/// output. It is the output of `--part 1/1` with its files renamed.
fn all_but_committed(command: &[&str], checkpoint: &Path, out: &Path) -> PathBuf {
    run(&[command, &["--part", "1/1"]].concat(), checkpoint, out);
    let dir = partial(out);
    for entry in std::fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        if let Some(name) = path.file_name().unwrap().to_str().unwrap().strip_prefix("part-1-of-1.") {
            std::fs::rename(&path, dir.join(name)).unwrap();
        }
    }
    std::fs::remove_file(dir.join("command.json")).unwrap();
    dir
}

/// Writes a rules file that quantizes tensors with four different schemes and returns its path.
fn rules(dir: &Path) -> String {
    let rules = json!({"version": 1, "rules": [
        {"include": "self_attn", "scheme": "q4_0", "method": "rtn"},
        {"include": "up_proj", "scheme": "int4", "symmetric": false, "group_size": "row", "method": "rtn"},
        {"include": "down_proj", "scheme": "int8"},
        {"include": "gate_proj", "scheme": "int5", "group_size": "row"},
    ]});
    let path = dir.join("rules.json");
    std::fs::write(&path, rules.to_string()).unwrap();
    path.to_str().unwrap().to_string()
}

/// Copies files with their modification times, by which conversions recognize unchanged inputs.
fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let copy = to.join(path.file_name().unwrap());
        std::fs::copy(&path, &copy).unwrap();
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        std::fs::File::options().write(true).open(&copy).unwrap().set_modified(modified).unwrap();
    }
}

#[test]
fn a_run_continues_from_every_line_of_its_journal() {
    let scratch = TempDir::new().unwrap();
    let manifest = rules(scratch.path());
    let sources = Sources::new(&fixture("llama-gqa"));
    for command in [
        &["pack", "--q4-map", &manifest][..],
        &["q4", "--manifest", &manifest],
        &["import-gguf"],
        &["export-gguf"],
        &["unpack", "--max-shard-size", "200k"],
        &["export-hf", "--format", "fp8", "--max-shard-size", "100k"],
        &["append"],
    ] {
        let checkpoint = sources.of(command);
        let expected = undisturbed(command, &checkpoint);
        let source = scratch.path().join(command.join(" "));
        prepare(command, &checkpoint, &source);
        let complete = all_but_committed(command, &checkpoint, &source);
        let journal = std::fs::read_to_string(complete.join("journal")).unwrap();
        let lines: Vec<&str> = journal.split_inclusive('\n').collect();
        assert!(lines.len() > 15, "{journal}");
        // To save time, the journal is cut after the first lines, the last lines and every fourth line in between;
        // each cut is also tested with a torn (partial) line behind it.
        let points = (0..=lines.len()).filter(|n| n % 4 == 1 || *n < 3 || *n + 2 > lines.len());
        for (n, torn) in points.flat_map(|n| [(n, false), (n, true)]) {
            let out = scratch.path().join("out");
            let dir = out.join(complete.file_name().unwrap());
            prepare(command, &checkpoint, &out);
            copy_dir(&complete, &dir);
            let mut text = lines[..n].concat();
            let tasks = text.matches(r#"{"task":"tensor "#).count() as u64;
            if torn {
                text += lines.get(n).map_or("0123", |line| &line[..line.len() / 2]);
            }
            std::fs::write(dir.join("journal"), text).unwrap();
            if n < lines.len() / 2 {
                // Data of tasks that the journal does not list as finished may have any content or be missing.
                for path in paths(&dir).iter().filter(|path| tasks == 0 && !path.ends_with("journal")) {
                    let len = std::fs::metadata(path).unwrap().len();
                    std::fs::write(path, vec![0xa5; (len / 2) as usize]).unwrap();
                }
            }
            let summary = run(command, &checkpoint, &out);
            assert_eq!(summary["resumed_tensors"], tasks, "{command:?} {n} lines, torn: {torn}");
            assert!(files(&out) == expected, "{command:?} {n} lines, torn: {torn}");
            std::fs::remove_dir_all(&out).unwrap();
        }
    }
}

#[test]
fn damaged_data_are_made_again() {
    let scratch = TempDir::new().unwrap();
    let checkpoint = fixture("llama-gqa");
    for (command, data) in [("pack", "model.ie.bin"), ("q4", "model.q4.bin"), ("q4", "model.q4.scales.fp16.bin")] {
        let expected = undisturbed(&[command], &checkpoint);
        for damage in ["flip", "cut", "remove"] {
            let out = scratch.path().join("out");
            let path = all_but_committed(&[command], &checkpoint, &out).join(data);
            let mut bytes = std::fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            match damage {
                "flip" => bytes[middle] ^= 1,
                _ => bytes.truncate(middle),
            }
            std::fs::write(&path, bytes).unwrap();
            if damage == "remove" {
                std::fs::remove_file(&path).unwrap();
            }
            let summary = run(&[command], &checkpoint, &out);
            let (resumed, all) = (summary["resumed_tensors"].as_u64().unwrap(), summary["tensors"].as_u64().unwrap());
            match damage {
                "flip" => assert_eq!(resumed, all - 1),
                "cut" => assert!(0 < resumed && resumed < all),
                _ => assert_eq!(resumed, 0),
            }
            assert!(files(&out) == expected, "{command} {damage}");
            std::fs::remove_dir_all(&out).unwrap();
        }
    }
}

#[test]
fn a_commit_that_was_cut_short_is_completed() {
    let scratch = TempDir::new().unwrap();
    let checkpoint = fixture("llama-gqa");
    for (command, renamed) in [
        ("pack", &["model.ie.bin"][..]),
        ("q4", &["model.q4.bin"]),
        ("q4", &["model.q4.bin", "model.q4.scales.fp16.bin"]),
    ] {
        let expected = undisturbed(&[command], &checkpoint);
        for marked in [true, false] {
            let out = scratch.path().join("out");
            let dir = all_but_committed(&[command], &checkpoint, &out);
            for name in renamed {
                std::fs::rename(dir.join(name), out.join(name)).unwrap();
            }
            if command == "pack" {
                std::fs::copy(checkpoint.join("config.json"), out.join("config.json")).unwrap();
            }
            let mut journal = std::fs::read_to_string(dir.join("journal")).unwrap();
            if marked {
                journal += &line(r#"{"task":"commit","result":null}"#);
            }
            std::fs::write(dir.join("journal"), journal).unwrap();
            iec().arg("inspect").arg(&out).assert().failure();
            if command == "pack" && !marked {
                // Without the commit marker in the journal, `pack` must treat these files as unrelated and refuse to
                // overwrite them.
                let mut pack = iec();
                pack.args(["pack", "--hf-dir"]).arg(&checkpoint).arg("--out-dir").arg(&out).assert().code(2);
            } else {
                let summary = run(&[command], &checkpoint, &out);
                assert_eq!(summary["resumed_tensors"] == summary["tensors"], marked, "{command} {renamed:?}");
                assert!(files(&out) == expected);
            }
            std::fs::remove_dir_all(&out).unwrap();
        }
    }
}

#[test]
fn other_inputs_options_or_a_wish_to_begin_anew_are_not_mixed_with_what_is_there() {
    let scratch = TempDir::new().unwrap();
    let checkpoint = copy_of("llama-gqa");
    let shard = checkpoint.path().join("model-00002-of-00002.safetensors");
    let touch = || {
        let file = std::fs::File::options().write(true).open(&shard).unwrap();
        file.set_modified(std::time::SystemTime::now() + Duration::from_secs(7)).unwrap();
    };
    for (changed, arguments) in [
        ("nothing", &["pack"][..]),
        ("options", &["pack", "--dtype", "fp16"]),
        ("inputs", &["pack"]),
        ("fresh", &["pack", "--fresh"]),
    ] {
        let out = scratch.path().join("out");
        let before = all_but_committed(&["pack"], checkpoint.path(), &out);
        if changed == "inputs" {
            touch();
        }
        let mut command = iec();
        command.args(arguments).args(["--json", "--hf-dir"]).arg(checkpoint.path()).arg("--out-dir").arg(&out);
        let output = command.output().unwrap();
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        let resumes = changed == "nothing";
        assert_eq!(summary["resumed_tensors"] == summary["tensors"], resumes, "{changed}");
        assert!(resumes || summary["resumed_tensors"] == 0, "{changed}");
        let told = String::from_utf8(output.stderr).unwrap().contains(before.to_str().unwrap());
        assert_eq!(told, matches!(changed, "options" | "inputs"), "{changed}");
        // Once the output is complete, no partial output of the interrupted run remains.
        assert!(files(&out) == undisturbed(&arguments[..arguments.len().min(3)], checkpoint.path()), "{changed}");
        std::fs::remove_dir_all(&out).unwrap();
    }
}

/// Generates a checkpoint of about 10 MB with 113 tensors in one shard.
fn many_tensors() -> TempDir {
    let dir = TempDir::new().unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 160, "num_attention_heads": 4, "vocab_size": 2048,
        "num_hidden_layers": 12, "intermediate_size": 480, "torch_dtype": "bfloat16"
    });
    let path = dir.path().join("in.json");
    std::fs::write(&path, config.to_string()).unwrap();
    let out = dir.path().join("checkpoint");
    iec().args(["synth", "--config"]).arg(path).arg("--out-dir").arg(out).assert().success();
    dir
}

fn start(command: &[&str], source: &Path, out: &Path) -> Child {
    Command::new(assert_cmd::cargo::cargo_bin("iec"))
        .args(arguments(command, source, out))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until the journal has at least `lines` lines; returns false if the process ended before.
fn journal_grows_to(lines: usize, out: &Path, child: &mut Child) -> bool {
    loop {
        let journal = hidden(out).first().and_then(|dir| std::fs::read(dir.join("journal")).ok()).unwrap_or_default();
        if journal.iter().filter(|b| **b == b'\n').count() >= lines {
            return true;
        }
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn a_killed_run_leaves_nothing_that_opens_and_the_next_one_gives_the_same_bytes() {
    let model = many_tensors();
    let checkpoint = model.path().join("checkpoint");
    let scratch = TempDir::new().unwrap();
    let manifest = rules(scratch.path());
    let sources = Sources::new(&checkpoint);
    let mut seed = 1u64;
    for (command, commit_point) in [
        (&["pack"][..], "model.ie.json"),
        (&["pack", "--q4-map", &manifest], "model.ie.json"),
        (&["q4", "--manifest", &manifest], "q4_manifest.expanded.json"),
        (&["import-gguf"], "model.ie.json"),
        (&["export-gguf"], "model.gguf"),
        (&["unpack", "--max-shard-size", "3M"], "config.json"),
        (&["export-hf", "--format", "fp8", "--max-shard-size", "3M"], "config.json"),
        (&["append"], ""),
    ] {
        let checkpoint = sources.of(command);
        let expected = undisturbed(command, &checkpoint);
        let out = scratch.path().join("out");
        prepare(command, &checkpoint, &out);
        let killed = [command, &["--checkpoint-every", "1"]].concat();
        let (mut lines, mut survived) = (1, 0);
        // The process is killed and restarted until it completes, each time some journal lines later plus a random
        // delay below 3 ms.
        loop {
            let mut child = start(&killed, &checkpoint, &out);
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let alive = journal_grows_to(lines, &out, &mut child);
            std::thread::sleep(Duration::from_micros((seed >> 33) % 3000));
            child.kill().unwrap();
            child.wait().unwrap();
            lines += 1 + (seed >> 40) as usize % 12;
            let in_place = commit_point.is_empty();
            if (in_place && named(&out) == expected) || (!in_place && out.join(commit_point).exists()) {
                break;
            }
            survived += usize::from(alive);
            if in_place {
                continue;
            }
            let half = iec().arg("inspect").arg(&out).output().unwrap();
            assert!(!half.status.success(), "{command:?}: {}", String::from_utf8_lossy(&half.stdout));
        }
        // A process killed between the last rename and its exit may leave its journal behind; no later run needs it.
        for dir in hidden(&out) {
            std::fs::remove_dir_all(dir).unwrap();
        }
        assert!(files(&out) == expected, "{command:?}");
        assert!(survived > 0, "{command:?} was never killed on its way");
        std::fs::remove_dir_all(&out).unwrap();
    }
}

/// Returns the files that have their final names, that is, those outside the hidden directories.
fn named(out: &Path) -> Files {
    let entries = std::fs::read_dir(out).unwrap().map(|e| e.unwrap().path()).filter(|path| path.is_file());
    entries.map(|path| (path.file_name().unwrap().into(), std::fs::read(&path).unwrap())).collect()
}

/// Formats a journal line: a prefix of the SHA-256 of the text, then the text.
fn line(text: &str) -> String {
    format!("{} {text}\n", &hex(Sha256::new_with_prefix(text))[..16])
}

#[test]
fn a_killed_measurement_goes_on_with_what_it_has_measured() {
    let model = many_tensors();
    let checkpoint = model.path().join("checkpoint");
    let start = |out: &Path| {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("iec"));
        command.args(["ptq", "--quiet", "--bits", "8", "--checkpoint-every", "1", "--hf-dir"]).arg(&checkpoint);
        command.arg("--out").arg(out.join("m.json")).stderr(Stdio::null()).spawn().unwrap()
    };
    let (undisturbed, killed, changed) = (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
    assert!(start(undisturbed.path()).wait().unwrap().success());
    // The process is killed when its journal has five lines. If it completed before, nothing can be resumed, so it is
    // started again.
    loop {
        let mut child = start(killed.path());
        let alive = journal_grows_to(5, killed.path(), &mut child);
        child.kill().unwrap();
        child.wait().unwrap();
        if alive && !killed.path().join("m.json").exists() && !hidden(killed.path()).is_empty() {
            break;
        }
        std::fs::remove_file(killed.path().join("m.json")).unwrap();
    }
    let dir = partial(killed.path());
    let other = changed.path().join(dir.file_name().unwrap());
    copy_dir(&dir, &other);
    assert!(start(killed.path()).wait().unwrap().success());
    assert!(files(killed.path()) == files(undisturbed.path()));

    // The resumed run must take results from the journal: change a value there and check that it appears in the
    // output.
    let journal = std::fs::read_to_string(other.join("journal")).unwrap();
    let record = journal.lines().find(|line| line.contains(r#""task":"tensor "#)).unwrap();
    let text = &record[17..];
    let at = text.find(r#""max_abs_error":"#).unwrap() + 16;
    let end = at + text[at..].find(['}', ',']).unwrap();
    let marked = format!("{}0.12345{}", &text[..at], &text[end..]);
    std::fs::write(other.join("journal"), journal.replace(&format!("{record}\n"), &line(&marked))).unwrap();
    assert!(start(changed.path()).wait().unwrap().success());
    let manifest = std::fs::read_to_string(changed.path().join("m.json")).unwrap();
    assert_eq!(manifest.matches("0.12345").count(), 1);
    assert_eq!(files(changed.path()).len(), 1);
}

#[test]
fn a_manifest_does_not_end_what_others_have_begun_beside_it() {
    let dir = TempDir::new().unwrap();
    let checkpoint = fixture("llama-gqa");
    let partial = all_but_committed(&["pack"], &checkpoint, dir.path());
    let mut ptq = iec();
    ptq.args(["ptq", "--bits", "8", "--fresh", "--hf-dir"])
        .arg(&checkpoint)
        .arg("--out")
        .arg(dir.path().join("m.json"));
    ptq.assert().success();
    assert_eq!(hidden(dir.path()), [partial]);
    assert_eq!(run(&["pack"], &checkpoint, dir.path())["resumed_tensors"], 30);
}

/// Creates a checkpoint of some small tensors followed by a large embedding. All weights are a hole in a sparse file.
pub fn checkpoint_with_a_hole(vocab: usize, hidden: usize) -> TempDir {
    let dir = TempDir::new().unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "num_attention_heads": hidden / 128, "vocab_size": vocab,
        "num_hidden_layers": 1, "intermediate_size": 64, "tie_word_embeddings": true
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let layer = "model.layers.0";
    let mut tensors = Vec::new();
    for name in [format!("{layer}.input_layernorm"), format!("{layer}.post_attention_layernorm"), "model.norm".into()] {
        tensors.push((name, vec![hidden]));
    }
    tensors.extend(["q", "k", "v", "o"].map(|n| (format!("{layer}.self_attn.{n}_proj"), vec![hidden, hidden])));
    tensors.extend(["gate", "up"].map(|n| (format!("{layer}.mlp.{n}_proj"), vec![64, hidden])));
    tensors.push((format!("{layer}.mlp.down_proj"), vec![hidden, 64]));
    tensors.push(("model.embed_tokens".to_string(), vec![vocab, hidden]));
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let bytes = 2 * shape.iter().product::<usize>();
        header.insert(name + ".weight", json!({"dtype": "BF16", "shape": shape, "data_offsets": [end, end + bytes]}));
        end += bytes;
    }
    let header = Value::Object(header).to_string();
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
    dir
}

#[test]
fn a_signal_ends_a_conversion_so_that_it_can_be_continued() {
    // The small tensors come first, so that the journal has lines long before the conversion ends.
    let checkpoint = checkpoint_with_a_hole(1 << 18, 1024);
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let dir = TempDir::new().unwrap();
        let out = dir.path().join("pack");
        let mut child = start(&["pack", "--checkpoint-every", "1"], checkpoint.path(), &out);
        assert!(journal_grows_to(2, &out, &mut child), "packing ended before it could be interrupted");
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.ends_with("error: interrupted; run the same command again to continue\n"), "{said}");
        assert_eq!(std::fs::read_dir(&out).unwrap().count(), 1);
        let mut dry = iec();
        dry.args(["pack", "--dry-run", "--json", "--hf-dir"]).arg(checkpoint.path()).arg("--out-dir").arg(&out);
        let plan: Value = serde_json::from_slice(&dry.output().unwrap().stdout).unwrap();
        assert!(plan["disk"]["finished_tasks"].as_u64().unwrap() > 0);
    }
}

#[test]
fn a_checkpoint_that_changes_while_it_is_packed_is_refused() {
    let checkpoint = checkpoint_with_a_hole(1 << 18, 1024);
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("pack");
    let mut child = start(&["pack", "--checkpoint-every", "1"], checkpoint.path(), &out);
    assert!(journal_grows_to(2, &out, &mut child), "packing ended before its input could be changed");
    let weights = checkpoint.path().join("model.safetensors");
    let file = std::fs::File::options().write(true).open(&weights).unwrap();
    file.write_all_at(&[1], file.metadata().unwrap().len() - 1).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.contains("was changed while it was read"), "{said}");
    assert!(!out.join("model.ie.json").exists());
}

#[test]
fn two_processes_do_not_work_on_the_same_conversion() {
    let checkpoint = fixture("llama-gqa");
    let dir = TempDir::new().unwrap();
    let partial = all_but_committed(&["pack"], &checkpoint, dir.path());
    let journal = std::fs::File::open(partial.join("journal")).unwrap();
    journal.lock().unwrap();
    let mut pack = iec();
    pack.args(["pack", "--hf-dir"]).arg(&checkpoint).arg("--out-dir").arg(dir.path());
    let refused = pack.output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && said.contains("another process is running"), "{said}");
    journal.unlock().unwrap();
    assert_eq!(run(&["pack"], &checkpoint, dir.path())["resumed_tensors"], 30);
}
