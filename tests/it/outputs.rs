//! Tests output paths: every command that writes a file is run with every kind of file system object as its target,
//! and no command overwrites its inputs or a pack from which others are rebuilt.

use crate::common::{fixture, iec};
use std::fs;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

/// Commands that write one file, `{O}`. `{S}` is a checkpoint, `{P}` its pack, `{T}` a text, `{Q}` a file of
/// questions.
const WRITERS: &[&str] = &[
    "ptq --hf-dir {S} --bits 8 --out {O}",
    "ptq --model-dir {P} --bits 8 --out - --report {O}",
    "calib --model-dir {P} --text {T} --max-tokens 64 --window 32 --out {O}",
    "verify --model-dir {P} --hashes --out {O}",
    "run --model-dir {P} --prompt a --max-new 2 --ignore-eos --trace-ids {O}",
    "eval --model-dir {P} --choices {Q} --details {O}",
    "tensor-map --model-dir {P} --out {O}",
    "export-gguf --model-dir {P} --out {O}",
];

/// Command that appends to a file, with the same placeholders as [`WRITERS`].
const ADDS: &str = "bench --model-dir {P} --prompt-len 4 --max-new 2 --warmup 0 --performance-md {O}";

/// Returns a directory with a pack and its checkpoint, which is created once and must not be modified.
fn shared() -> &'static Path {
    static SHARED: OnceLock<TempDir> = OnceLock::new();
    let dir = SHARED.get_or_init(|| {
        let dir = TempDir::new().unwrap();
        copy(&fixture("stories260k"), &dir.path().join("S"));
        let made = iec_in(dir.path(), "pack -q --hf-dir S --out-dir P", &[]);
        assert!(made.status.success(), "{made:?}");
        fs::write(dir.path().join("T"), "Once upon a time there was a girl. ".repeat(40)).unwrap();
        fs::write(dir.path().join("Q"), "{\"query\":\"Once\",\"choices\":[\" upon\",\" x\"],\"answer\":0}\n").unwrap();
        dir
    });
    dir.path()
}

fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-r").arg(from).arg(to).status().unwrap().success());
}

/// Runs `iec` in `dir` with the words of `line` and further arguments.
fn iec_in(dir: &Path, line: &str, more: &[&str]) -> Output {
    iec().current_dir(dir).args(line.split_whitespace()).args(more).output().unwrap()
}

/// Returns the command line of a writer with its placeholders replaced.
fn words(form: &str, out: &str) -> String {
    let mut line = form.replace("{O}", out);
    for name in ["S", "P", "T", "Q"] {
        line = line.replace(&format!("{{{name}}}"), &shared().join(name).display().to_string());
    }
    line
}

/// Runs a writer in `dir`.
fn write(form: &str, dir: &Path, out: &str, more: &[&str]) -> Output {
    iec_in(dir, &words(form, out), more)
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Reads the names and contents of all regular files below `dir`.
fn contents(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.symlink_metadata().unwrap() {
            m if m.is_dir() => found.extend(contents(&path)),
            m if m.is_file() => found.push((path.clone(), fs::read(&path).unwrap())),
            _ => {}
        }
    }
    found.sort();
    found
}

/// Runs a case with every writer and reports all that fail.
fn each_writer(forms: impl IntoIterator<Item = &'static str>, case: impl Fn(&str, &Path) -> Result<(), String>) {
    let wrong = forms.into_iter().filter_map(|form| {
        let dir = TempDir::new().unwrap();
        case(form, dir.path()).err().map(|why| format!("{form}: {why}"))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn expect(holds: bool, output: &Output) -> Result<(), String> {
    if holds { Ok(()) } else { Err(format!("{:?}: {}", output.status.code(), said(output))) }
}

fn all() -> impl Iterator<Item = &'static str> {
    WRITERS.iter().copied().chain([ADDS])
}

#[test]
fn an_existing_file_is_replaced_only_when_that_was_asked_for() {
    each_writer(WRITERS.iter().copied(), |form, dir| {
        let file = dir.join("f");
        fs::write(&file, "old").unwrap();
        let before = contents(dir);
        let refused = write(form, dir, "f", &[]);
        let told = said(&refused).contains("exists already") && said(&refused).contains("--overwrite");
        expect(refused.status.code() == Some(2) && told && contents(dir) == before, &refused)?;
        let replaced = write(form, dir, "f", &["--overwrite"]);
        expect(replaced.status.success() && fs::read(&file).unwrap().len() > 3, &replaced)
    });
}

#[test]
fn through_a_link_its_target_is_written() {
    each_writer(all(), |form, dir| {
        let more: &[&str] = if form == ADDS { &[] } else { &["--overwrite"] };
        fs::create_dir(dir.join("far")).unwrap();
        fs::write(dir.join("far/f"), "old").unwrap();
        symlink("far/f", dir.join("link")).unwrap();
        symlink("far/new", dir.join("dangling")).unwrap();
        for (link, target) in [("link", "far/f"), ("dangling", "far/new")] {
            let output = write(form, dir, link, more);
            let kept = dir.join(link).is_symlink();
            let written = fs::read(dir.join(target)).is_ok_and(|bytes| bytes.len() > 3);
            expect(output.status.success() && kept && written, &output)?;
        }
        Ok(())
    });
}

#[test]
fn a_pipe_a_device_and_a_descriptor_are_written_to() {
    each_writer(all(), |form, dir| {
        let fifo = dir.join("fifo");
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let reader = std::thread::spawn({
            let fifo = fifo.clone();
            move || fs::read(fifo).unwrap().len()
        });
        let output = write(form, dir, "fifo", &[]);
        let is_fifo = fifo.symlink_metadata().unwrap().file_type().is_fifo();
        expect(output.status.success() && is_fifo && reader.join().unwrap() > 3, &output)?;

        // As root, the test uses a device node of its own, so that a failing test cannot destroy /dev/null.
        let null = dir.join("null");
        let made = Command::new("mknod").arg(&null).args(["c", "1", "3"]).output().unwrap().status.success();
        let device = if made { null } else { PathBuf::from("/dev/null") };
        let output = write(form, dir, device.to_str().unwrap(), &[]);
        let is_device = device.symlink_metadata().unwrap().file_type().is_char_device();
        expect(output.status.success() && is_device, &output)?;

        // Output to a descriptor that the shell has opened for appending follows the existing contents.
        if form != ADDS {
            fs::write(dir.join("log"), "before\n").unwrap();
            let line = words(form, "/dev/fd/7");
            let program = assert_cmd::cargo::cargo_bin("iec");
            let shell = format!("exec 7>>log; '{}' {line}", program.display());
            let mut shell_command = Command::new("sh");
            let output = shell_command.current_dir(dir).env("IEC_DEVICE", "cpu").args(["-c", &shell]).output().unwrap();
            let log = fs::read(dir.join("log")).unwrap();
            expect(output.status.success() && log.starts_with(b"before\n") && log.len() > 12, &output)?;
        }
        let left: Vec<PathBuf> = contents(dir).into_iter().map(|(path, _)| path).collect();
        if left.iter().all(|path| path.ends_with("log")) { Ok(()) } else { Err(format!("left {left:?}")) }
    });
}

#[test]
fn stdout_is_an_output_where_nothing_else_is_printed() {
    let takes =
        |form: &str| ["ptq --hf", "calib", "tensor-map", "export-gguf"].iter().any(|name| form.starts_with(name));
    each_writer(all(), |form, dir| {
        let output = write(form, dir, "-", &[]);
        if takes(form) {
            expect(output.status.success() && output.stdout.len() > 3, &output)?;
            let twice = write(form, dir, "-", &["--json"]);
            expect(twice.status.code() == Some(2) && said(&twice).contains("stdout"), &twice)?;
        } else {
            expect(output.status.code() == Some(2) && said(&output).contains("stdout"), &output)?;
        }
        if contents(dir).is_empty() { Ok(()) } else { Err("left files".into()) }
    });
}

#[test]
fn what_can_never_be_written_is_refused_before_the_work() {
    each_writer(all(), |form, dir| {
        fs::create_dir(dir.join("dir")).unwrap();
        let output = write(form, dir, "dir", &[]);
        expect(output.status.code() == Some(2) && said(&output).contains("found a directory"), &output)?;
        let output = write(form, dir, "missing/f", &[]);
        expect(output.status.code() == Some(1) && said(&output).contains("missing"), &output)?;
        let _socket = std::os::unix::net::UnixListener::bind(dir.join("socket")).unwrap();
        let output = write(form, dir, "socket", &[]);
        expect(output.status.code() == Some(2) && said(&output).contains("a socket"), &output)?;
        if contents(dir).is_empty() { Ok(()) } else { Err("left files".into()) }
    });
}

#[test]
fn no_command_writes_over_what_it_reads() {
    let cases = [
        "ptq --hf-dir S --bits 8 --out S/config.json --overwrite",
        "ptq --hf-dir S --bits 8 --out S/m.json",
        "ptq --hf-dir S --bits 8 --out m.json --report S/below/page.html",
        "ptq --model-dir P --bits 8 --out P/model.ie.bin --overwrite",
        "ptq --hf-dir S --rules rules --out rules --overwrite",
        "verify --model-dir P --hashes --out P/model.ie.bin --overwrite",
        "verify --model-dir P --hf-dir S --max-new 1 --out S/report.json",
        "run --model-dir P --prompt a --max-new 1 --trace-ids P/model.ie.bin --overwrite",
        "run --model-dir P --prompts-file tx --max-new 1 --trace-ids link --overwrite",
        "tensor-map --model-dir P --out P/model.ie.json --overwrite",
        "tensor-map --model-dir linked --out P/tokenizer.json --overwrite",
        "calib --model-dir P --text tx --max-tokens 64 --window 32 --out tx --overwrite",
        "calib --model-dir P --text tx --max-tokens 64 --window 32 --out hard --overwrite",
        "calib --hf-dir S --text tx --max-tokens 64 --window 32 --out S/stats",
        "export-gguf --model-dir P --out P/model.ie.bin --overwrite",
        "eval --model-dir P --choices Q --details Q --overwrite",
        "bench --model-dir P --prompt-len 4 --max-new 2 --performance-md P/model.ie.json",
        "pack --hf-dir S --tokenizer P/tokenizer.json --out-dir P --overwrite",
        "pack --hf-dir S --out-dir S/pack",
        "q4 --hf-dir S --manifest q/q4_manifest.expanded.json --out-dir q --overwrite",
        "synth --config c/config.json --out-dir c --overwrite",
        "unpack --model-dir P --out-dir P/checkpoint",
    ];
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["S", "P", "T", "Q"] {
        copy(&shared().join(name), &at(name));
    }
    fs::create_dir(at("S/below")).unwrap();
    copy(&at("T"), &at("tx"));
    copy(&fixture("stories260k").join("config.json"), &at("rules"));
    fs::create_dir(at("c")).unwrap();
    copy(&at("S/config.json"), &at("c/config.json"));
    let made = iec_in(dir.path(), "q4 -q --hf-dir S --out-dir q", &[]);
    assert!(made.status.success(), "{}", said(&made));
    symlink("P", at("linked")).unwrap();
    symlink("tx", at("link")).unwrap();
    fs::hard_link(at("tx"), at("hard")).unwrap();
    let before = contents(dir.path());
    let mut wrong = Vec::new();
    for line in cases {
        let output = iec_in(dir.path(), line, &[]);
        let told = ["an input", "a file of the pack", "the checkpoint"].iter().any(|text| said(&output).contains(text));
        if output.status.code() != Some(2) || !told {
            wrong.push(format!("{line}: {:?}: {}", output.status.code(), said(&output)));
        }
        if contents(dir.path()) != before {
            panic!("{line} changed files: {}", said(&output));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_pack_that_others_are_rebuilt_from_is_never_replaced() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let run = |line: &str| iec_in(dir.path(), line, &["-q"]);
    let done = |line: &str| {
        let output = run(line);
        assert!(output.status.success(), "{line}: {}", said(&output));
    };
    copy(&fixture("llama-gqa"), &at("S"));
    copy(&fixture("gguf").join("stories260k-mixed.gguf"), &at("g.gguf"));
    done("pack --hf-dir S --out-dir other");
    done("pack --hf-dir S --out-dir base");
    done("pack --hf-dir S --out-dir base --overwrite --part 1/1");
    done("pack --hf-dir S --out-dir member");
    done("dedup --model-dir other --even-if-larger --remove-original");
    done("dedup --model-dir member --base base --even-if-larger --remove-original");
    let before = contents(&at("base"));
    let mut wrong = Vec::new();
    for (line, code) in [
        ("import-gguf g.gguf --out-dir base --overwrite", 4),
        ("q4 --append-attn --model-dir base", 4),
        ("pack --hf-dir S --dtype bf16 --out-dir base --overwrite", 4),
        ("pack --hf-dir S --dtype bf16 --out-dir base --overwrite --part 1/2", 4),
        ("merge --out-dir base", 4),
        ("dedup --remove --model-dir base", 4),
        ("unpack --model-dir member --out-dir base --overwrite", 2),
        ("synth --config S/config.json --out-dir base --overwrite", 2),
    ] {
        let output = run(line);
        if output.status.code() != Some(code) || contents(&at("base")) != before {
            wrong.push(format!("{line}: {:?}: {}", output.status.code(), said(&output)));
            fs::remove_dir_all(at("base")).unwrap();
            before.iter().for_each(|(path, bytes)| {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, bytes).unwrap();
            });
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // Callers of the library are subject to the same check.
    let options = iec::convert::pack::PackOptions {
        hf_dir: at("S"),
        out_dir: at("base"),
        overwrite: true,
        ..iec::convert::pack::PackOptions::default()
    };
    assert_eq!(iec::convert::pack::pack(&options).unwrap_err().cause().exit_code(), 4);
    let layout = iec::iebin::writer::Layout::new(Vec::new()).unwrap();
    let bin = iec::output::AtomicFile::create(&at("base").join("model.ie.bin")).unwrap();
    let work = at("base").join(".iec-0123456789abcdef.partial");
    fs::create_dir(&work).unwrap();
    let replaced = iec::iebin::writer::commit(layout, bin, &work, Default::default(), Vec::new(), || Ok(()));
    assert_eq!(replaced.unwrap_err().cause().exit_code(), 4);
    fs::remove_dir_all(&work).unwrap();
    assert_eq!(contents(&at("base")), before);
    done("dedup --verify --model-dir member");
    // The base may be rewritten with its own bytes; once the member is removed, it may be overwritten freely.
    done("dedup --restore --model-dir member");
    done("dedup --remove --model-dir member");
    done("import-gguf g.gguf --out-dir base --overwrite");
}

#[test]
fn members_of_a_pack_that_are_no_regular_files_are_not_replaced() {
    for line in [
        "pack --hf-dir S --out-dir P --overwrite",
        "import-gguf g.gguf --out-dir P --overwrite",
        "q4 --append-attn --model-dir P",
    ] {
        for link in [true, false] {
            let dir = TempDir::new().unwrap();
            let at = |name: &str| dir.path().join(name);
            copy(&fixture("llama-gqa"), &at("S"));
            copy(&fixture("gguf").join("stories260k-mixed.gguf"), &at("g.gguf"));
            assert!(iec_in(dir.path(), "pack -q --hf-dir S --out-dir P", &[]).status.success());
            fs::rename(at("P/model.ie.bin"), at("elsewhere")).unwrap();
            if link {
                symlink("../elsewhere", at("P/model.ie.bin")).unwrap();
            } else if line.starts_with("q4") {
                continue;
            } else {
                assert!(Command::new("mkfifo").arg(at("P/model.ie.bin")).status().unwrap().success());
            }
            let kind = at("P/model.ie.bin").symlink_metadata().unwrap().file_type();
            let before = fs::read(at("elsewhere")).unwrap();
            let output = iec_in(dir.path(), line, &[]);
            assert_eq!(output.status.code(), Some(2), "{line}: {}", said(&output));
            assert_eq!(at("P/model.ie.bin").symlink_metadata().unwrap().file_type(), kind, "{line}");
            assert_eq!(fs::read(at("elsewhere")).unwrap(), before, "{line}");
        }
    }
}

#[test]
fn files_of_q4_are_replaced_only_when_that_was_asked_for() {
    let dir = TempDir::new().unwrap();
    let line = format!("q4 -q --hf-dir {} --out-dir q", shared().join("S").display());
    let run = |more: &[&str]| iec_in(dir.path(), &line, more);
    assert!(run(&[]).status.success());
    let before = contents(dir.path());
    let refused = run(&[]);
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    assert!(said(&refused).contains("exists already"), "{}", said(&refused));
    assert_eq!(contents(dir.path()), before);
    assert!(run(&["--overwrite"]).status.success());
}

#[test]
fn a_checkpoint_is_found_by_every_way_of_writing_its_path() {
    let dir = TempDir::new().unwrap();
    copy(&fixture("stories260k"), &dir.path().join("S"));
    for missing in ["nope", "./nope"] {
        let output = iec_in(dir.path(), &format!("pack --hf-dir {missing} --out-dir packs/x"), &[]);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains(&format!("{missing}: No such file")), "{}", said(&output));
    }
    let output = iec_in(&dir.path().join("S"), "pack --hf-dir model.safetensors --out-dir ../p", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let output = iec_in(&dir.path().join("S"), "pack --hf-dir model.safetensors --out-dir p", &[]);
    assert!(output.status.code() == Some(2) && said(&output).contains("inside the checkpoint"), "{}", said(&output));
}
