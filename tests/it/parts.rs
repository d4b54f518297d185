//! Tests `--part`, `--parts` and `iec merge`: a conversion divided among several processes gives the same bytes.

use crate::checkpoint::{copy_of, files};
use crate::common::{fixture, iec};
use crate::resume::{Sources, partial, prepare, run, undisturbed};
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

fn merge(out: &Path) -> (i32, String, String) {
    let output = iec().args(["merge", "--json", "--out-dir"]).arg(out).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// Returns a count that JSON gives as a number or as the length of a list.
fn number_of(tensors: &Value) -> u64 {
    tensors.as_u64().unwrap_or_else(|| tensors.as_array().unwrap().len() as u64)
}

fn run_part(command: &[&str], part: &str, checkpoint: &Path, out: &Path) -> Value {
    run(&[command, &["--part", part]].concat(), checkpoint, out)
}

#[test]
fn any_number_of_parts_gives_the_same_bytes() {
    let dir = TempDir::new().unwrap();
    let manifest = dir.path().join("rules.json");
    let rules = json!({"version": 1, "rules": [
        {"include": "self_attn.o", "bits": 6},
        {"include": "self_attn", "scheme": "q4_0", "method": "rtn"},
        {"include": "mlp", "scheme": "int4", "symmetric": false, "method": "rtn"},
    ]});
    std::fs::write(&manifest, rules.to_string()).unwrap();
    let manifest = manifest.to_str().unwrap();
    let sources = Sources::new(&fixture("llama-gqa"));
    for command in [
        &["pack"][..],
        &["pack", "--q4-map", manifest],
        &["q4", "--manifest", manifest],
        &["import-gguf"],
        &["export-gguf"],
        &["unpack", "--max-shard-size", "200k"],
        &["export-hf", "--format", "fp8", "--max-shard-size", "100k"],
        &["append"],
    ] {
        let source = sources.of(command);
        let expected = undisturbed(command, &source);
        // The last count is larger than the number of tasks.
        for count in [1, 2, 3, 7, 40] {
            let out = dir.path().join("out");
            prepare(command, &source, &out);
            let before = std::fs::read_dir(&out).into_iter().flatten().count();
            let mut tensors = 0;
            for number in (1..=count).rev() {
                let summary = run_part(command, &format!("{number}/{count}"), &source, &out);
                assert_eq!(summary["part"], format!("{number}/{count}"));
                tensors += number_of(&summary["tensors"]);
                assert!(std::fs::read_dir(&out).unwrap().count() == before + 1, "a part names nothing");
            }
            let (code, stdout, stderr) = merge(&out);
            assert_eq!(code, 0, "{command:?} {count}: {stderr}");
            let summary: Value = serde_json::from_str(&stdout).unwrap();
            assert_eq!(number_of(&summary["tensors"]), tensors, "{command:?}");
            // `append` reports only the matrices that it quantized as `tensors`, but counts the copied tensors, too,
            // as resumed: 30 in total.
            let resumed = summary["resumed_tensors"].as_u64().unwrap();
            assert!(resumed == tensors || command[0] == "append" && resumed == 30, "{command:?}: {summary}");
            assert!(files(&out) == expected, "{command:?} {count}");
            std::fs::remove_dir_all(&out).unwrap();
        }
    }
}

#[test]
fn parts_that_are_missing_cut_short_or_damaged_are_named() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let checkpoint = fixture("llama-gqa");
    for command in ["pack", "q4"] {
        let expected = undisturbed(&[command], &checkpoint);
        let refused = |words: &[&str]| {
            let (code, _, stderr) = merge(&out);
            assert_eq!(code, 1, "{stderr}");
            assert!(words.iter().all(|word| stderr.contains(word)), "{words:?}: {stderr}");
            // No file has its final name, and the data of all parts are kept.
            assert_eq!(std::fs::read_dir(&out).unwrap().count(), 1);
        };
        run_part(&[command], "1/3", &checkpoint, &out);
        refused(&["part 2/3 (", "more), 3/3 ("]);
        run_part(&[command], "3/3", &checkpoint, &out);
        run_part(&[command], "2/3", &checkpoint, &out);
        let parts = partial(&out);

        let journal = parts.join("part-2-of-3.journal");
        let text = std::fs::read_to_string(&journal).unwrap();
        std::fs::write(&journal, &text[..text.len() - 5]).unwrap();
        refused(&["not finished: part 2/3 (`"]);
        let again = run_part(&[command], "2/3", &checkpoint, &out);
        assert!(again["resumed_tensors"].as_u64().unwrap() + 1 >= again["tensors"].as_u64().unwrap());

        let data = parts.join(if command == "pack" { "part-3-of-3.model.ie.bin" } else { "part-3-of-3.model.q4.bin" });
        let mut bytes = std::fs::read(&data).unwrap();
        let at = bytes.iter().rposition(|b| *b != 0).unwrap();
        bytes[at] ^= 1;
        std::fs::write(&data, &bytes).unwrap();
        refused(&["the data of part 3/3 differ from the hashes in its journal", "run part 3/3 again with --fresh"]);
        run(&[command, "--part", "3/3", "--fresh"], &checkpoint, &out);

        assert_eq!(merge(&out).0, 0);
        assert!(files(&out) == expected);
        std::fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn parts_of_other_weights_or_several_conversions_are_not_merged() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    let checkpoint = copy_of("llama-gqa");
    std::fs::create_dir(&out).unwrap();
    let (code, _, stderr) = merge(&out);
    assert!(code == 1 && stderr.contains("found no parts"), "{stderr}");

    run_part(&["pack"], "1/1", checkpoint.path(), &out);
    let shard = std::fs::File::options().write(true).open(checkpoint.path().join("model-00001-of-00002.safetensors"));
    shard.unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    let (code, stdout, stderr) = merge(&out);
    assert!(code == 1 && stderr.contains("made from other input files"), "{stderr}");
    assert!(serde_json::from_str::<Value>(&stdout).unwrap()["error"]["message"].is_string());

    run_part(&["pack", "--dtype", "fp16"], "1/1", checkpoint.path(), &out);
    let (code, _, stderr) = merge(&out);
    assert!(code == 1 && stderr.contains("parts of 2 different conversions"), "{stderr}");
}

#[test]
fn the_whole_command_takes_over_what_parts_have_done() {
    let dir = TempDir::new().unwrap();
    let checkpoint = fixture("llama-gqa");
    for command in ["pack", "q4"] {
        let out = dir.path().join("out");
        let done = run_part(&[command], "2/3", &checkpoint, &out)["tensors"].clone();
        assert_eq!(run(&[command], &checkpoint, &out)["resumed_tensors"], done);
        assert!(files(&out) == undisturbed(&[command], &checkpoint));
        std::fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn a_job_array_tells_each_process_its_part_when_asked() {
    let dir = TempDir::new().unwrap();
    let checkpoint = fixture("llama-gqa");
    let expected = undisturbed(&["pack"], &checkpoint);
    let slurm = |id: &'static str| vec![("SLURM_ARRAY_TASK_ID", id), ("SLURM_ARRAY_TASK_COUNT", "2")];
    let kubernetes = |index: &'static str| vec![("JOB_COMPLETION_INDEX", index)];
    for (parts, tasks) in
        [("2", [slurm("1"), slurm("2")]), ("auto", [slurm("1"), slurm("2")]), ("2", [kubernetes("0"), kubernetes("1")])]
    {
        let out = dir.path().join("out");
        for variables in tasks {
            let mut part = iec();
            part.args(["pack", "--parts", parts, "--hf-dir"]).arg(&checkpoint).arg("--out-dir").arg(&out);
            part.envs(variables).assert().success();
        }
        assert_eq!(merge(&out).0, 0);
        assert!(files(&out) == expected, "{parts}");
        std::fs::remove_dir_all(&out).unwrap();
    }
    // Without `--part` or `--parts`, a Slurm task packs everything.
    let out = dir.path().join("whole");
    let mut whole = iec();
    whole.args(["pack", "--hf-dir"]).arg(&checkpoint).arg("--out-dir").arg(&out).envs(slurm("2")).assert().success();
    assert!(files(&out) == expected);
    for (arguments, words) in [
        (&["--parts", "2"][..], "neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX"),
        (&["--parts", "two"], "expected a number or auto"),
        (&["--part", "3/2"], "expected K/N with K from 1 to N"),
        (&["--part", "1/2", "--parts", "2"], "cannot be used with"),
    ] {
        let mut refused = iec();
        refused.args(["pack", "--hf-dir"]).arg(&checkpoint).arg("--out-dir").arg(dir.path().join("no")).args(arguments);
        let said = refused.assert().code(2);
        let stderr = String::from_utf8_lossy(&said.get_output().stderr);
        assert!(stderr.contains(words), "{arguments:?}: {stderr}");
    }
}

/// Checks that a path that is not UTF-8 works for whole conversions but is refused with `--part`, whose JSON record
/// cannot contain it.
#[test]
fn a_path_that_is_not_utf_8_is_converted_whole_and_refused_in_parts() {
    use std::os::unix::ffi::OsStrExt;
    let dir = TempDir::new().unwrap();
    let checkpoint = dir.path().join(std::ffi::OsStr::from_bytes(b"model-\xff"));
    std::fs::rename(copy_of("llama-gqa").keep(), &checkpoint).unwrap();
    let pack = |out: &str, arguments: &[&str]| {
        let mut command = iec();
        command.args(["pack", "--hf-dir"]).arg(&checkpoint).arg("--out-dir").arg(dir.path().join(out)).args(arguments);
        command.assert()
    };
    pack("whole", &[]).success();
    let refused = pack("part", &["--part", "1/2"]).code(2);
    let stderr = String::from_utf8_lossy(&refused.get_output().stderr);
    assert!(stderr.contains("not UTF-8"), "{stderr}");
}
