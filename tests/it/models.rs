//! Tests models that are no packs: checkpoints, GGUF files and models of the Hugging Face cache are packed once into
//! the cache, which `iec list`, `show` and `rm` manage.

use crate::checkpoint::{copy_of, edited};
use crate::common::{fixture, iec, packed};
use assert_cmd::Command;
use serde_json::Value;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

const STORIES: &str = "stories260k";
/// Note that a model was packed.
const PACKED: &str = "into the cache";

/// An empty cache.
struct Cache {
    dir: TempDir,
}

/// Exit code, stdout and stderr of a command.
struct Said {
    code: i32,
    out: String,
    err: String,
}

impl Cache {
    fn new() -> Cache {
        Cache { dir: TempDir::new().unwrap() }
    }

    fn iec(&self) -> Command {
        let mut command = iec();
        command.env("IEC_CACHE", self.dir.path());
        command
    }

    fn said(&self, command: &mut Command) -> Said {
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Said { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
    }

    /// Generates eight tokens with a model.
    fn run(&self, model: &Path, more: &[&str]) -> Said {
        let mut command = self.iec();
        command.args(["run", "--prompt", "Once upon a time", "--max-new", "8", "--model-dir"]).arg(model).args(more);
        self.said(&mut command)
    }

    fn list(&self) -> Vec<Value> {
        let said = self.said(self.iec().args(["list", "--json"]));
        assert_eq!(said.code, 0, "{}", said.err);
        serde_json::from_str::<Value>(&said.out).unwrap()["models"].as_array().unwrap().clone()
    }

    /// Returns the directory of the only entry.
    fn only(&self) -> PathBuf {
        let list = self.list();
        assert_eq!(list.len(), 1, "{list:?}");
        PathBuf::from(list[0]["dir"].as_str().unwrap())
    }
}

/// Returns the text that the pack of a fixture gives.
fn expected(name: &str) -> String {
    let pack = packed(name);
    let said = Cache::new().run(pack.path(), &[]);
    assert_eq!(said.code, 0, "{}", said.err);
    said.out
}

fn set_age(entry: &Path, seconds: u64) {
    let lock = std::fs::File::options().append(true).open(entry.join("cache.lock")).unwrap();
    lock.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
}

#[test]
fn a_checkpoint_is_packed_once_and_gives_the_text_of_its_pack() {
    let cache = Cache::new();
    let first = cache.run(&fixture(STORIES), &[]);
    assert_eq!((first.code, &first.out), (0, &expected(STORIES)), "{}", first.err);
    assert!(first.err.contains(PACKED) && first.err.contains("`iec list`"), "{}", first.err);
    let second = cache.run(&fixture(STORIES), &[]);
    assert!(second.out == first.out && !second.err.contains(PACKED), "{}", second.err);
    // The same directory under another name is the same source.
    let link = cache.dir.path().join("link");
    symlink(fixture(STORIES), &link).unwrap();
    assert!(!cache.run(&link, &[]).err.contains(PACKED));
    let list = cache.list();
    assert_eq!((list.len(), &list[0]["kind"], &list[0]["weights"]), (1, &"checkpoint".into(), &"source".into()));
    assert_eq!(list[0]["source"], fixture(STORIES).canonicalize().unwrap().to_str().unwrap());
    assert!(list[0]["name"].as_str().unwrap().starts_with("stories260k-"), "{list:?}");
    // Its name, with or without the hash, names the model, too.
    for name in [list[0]["name"].as_str().unwrap(), STORIES] {
        let named = cache.run(Path::new(name), &[]);
        assert!(named.out == first.out && !named.err.contains(PACKED), "{}", named.err);
    }
}

#[test]
fn bench_eval_and_verify_take_a_checkpoint() {
    let cache = Cache::new();
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/text/tinystories_valid_30k.txt");
    let source = fixture(STORIES);
    let (source, text) = (source.to_str().unwrap(), text.to_str().unwrap());
    for (line, expected) in [
        (&["bench", "--prompt-len", "4", "--max-new", "2", "--warmup", "0", "--json"][..], "\"stories260k\""),
        (&["eval", "--ctx", "64", "--windows", "1", "--json", "--text", text], "perplexity"),
        (&["verify", "--hashes", "--json"], "tensors"),
    ] {
        let said = cache.said(cache.iec().args(line).args(["--model-dir", source]));
        assert_eq!(said.code, 0, "{line:?}: {}", said.err);
        assert!(said.out.contains(expected.trim_matches('"')), "{line:?}: {}", said.out);
    }
    assert_eq!(cache.list().len(), 1);
}

#[test]
fn a_gguf_file_is_imported_once() {
    let cache = Cache::new();
    let pack = packed(STORIES);
    let home = TempDir::new().unwrap();
    let file = home.path().join("tiny.gguf");
    iec().args(["export-gguf", "-q", "--model-dir"]).arg(pack.path()).arg("--out").arg(&file).assert().success();
    for (model, is_new) in [(&file, true), (&file, false), (&home.path().to_path_buf(), false)] {
        let said = cache.run(model, &[]);
        assert_eq!((said.code, said.out), (0, expected(STORIES)), "{}", said.err);
        assert_eq!(said.err.contains(PACKED), is_new, "{}", said.err);
    }
    let list = cache.list();
    assert_eq!((list.len(), &list[0]["kind"]), (1, &"gguf".into()));
}

#[test]
fn a_model_of_the_hugging_face_cache_is_found_by_its_name() {
    let (cache, hub) = (Cache::new(), TempDir::new().unwrap());
    let repo = hub.path().join("models--tests--model");
    let snapshot = repo.join("snapshots").join("0123456789abcdef0123456789abcdef01234567");
    std::fs::create_dir_all(snapshot.parent().unwrap()).unwrap();
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs/main"), snapshot.file_name().unwrap().as_encoded_bytes()).unwrap();
    std::fs::create_dir(&snapshot).unwrap();
    for (name, bytes) in crate::checkpoint::files(&fixture(STORIES)) {
        std::fs::write(snapshot.join(name), bytes).unwrap();
    }
    let run = |model: &str| {
        let mut command = cache.iec();
        command.env("HF_HUB_CACHE", hub.path()).args([
            "run",
            "--prompt",
            "Once",
            "--max-new",
            "2",
            "--model-dir",
            model,
        ]);
        cache.said(&mut command)
    };
    for (model, is_new) in [("tests/model", true), ("tests/model@main", false), ("tests/model", false)] {
        let said = run(model);
        assert!(said.code == 0 && said.err.contains(PACKED) == is_new, "{model}: {}", said.err);
    }
    let list = cache.list();
    assert_eq!((list.len(), &list[0]["repo"]), (1, &"tests/model".into()));
    assert!(list[0]["name"].as_str().unwrap().starts_with("model-"));
    let missing = run("tests/other");
    assert_eq!(missing.code, 3);
    assert!(missing.err.contains(&format!("`{}`", crate::common::download_of("tests/other"))), "{}", missing.err);
    assert_eq!(run("tests/model@old").code, 3);
    // A model that is not in the cache of the Hub any more is still known by its name.
    std::fs::remove_dir_all(&repo).unwrap();
    assert_eq!(run("tests/model").code, 0);
}

#[test]
fn a_changed_source_is_packed_again_and_replaces_its_entry() {
    let cache = Cache::new();
    let source = copy_of(STORIES);
    let first = cache.run(source.path(), &[]);
    let old = cache.only();
    // Other weights: all of the last norm are zero.
    let changed = edited(STORIES, |tensors| tensors.get_mut("model.norm.weight").unwrap().bytes.fill(0));
    std::fs::copy(changed.path().join("model.safetensors"), source.path().join("model.safetensors")).unwrap();
    let second = cache.run(source.path(), &[]);
    assert!(second.code == 0 && second.err.contains(PACKED), "{}", second.err);
    assert_ne!(second.out, first.out);
    assert!(cache.only() != old && !old.exists());
}

#[test]
fn a_pack_or_a_gguf_file_of_floats_is_quantized_for_a_quantized_precision() {
    let (cache, pack) = (Cache::new(), packed(STORIES));
    let gguf = cache.dir.path().join("stories.gguf");
    iec().args(["export-gguf", "--out"]).arg(&gguf).arg("--model-dir").arg(pack.path()).assert().success();
    for (precision, sources) in [("int4", &[pack.path(), &gguf][..]), ("int8", &[pack.path()])] {
        let options = ["--precision", precision];
        // The same floats give the same codes wherever they come from.
        let expected = cache.run(&fixture(STORIES), &options).out;
        for source in sources {
            let first = cache.run(source, &options);
            assert!(first.code == 0 && first.err.contains("matrices pass the gate"), "{precision}: {}", first.err);
            let again = cache.run(source, &options);
            assert!(again.code == 0 && !again.err.contains(PACKED), "{precision}: {}", again.err);
            assert_eq!((&first.out, &again.out), (&expected, &expected), "{precision} {}", source.display());
        }
    }
    // Without a precision, the pack itself runs.
    let plain = cache.run(pack.path(), &[]);
    assert!(plain.out == self::expected(STORIES) && !plain.err.contains(PACKED), "{}", plain.err);
    // Weights that are quantized already are not quantized again.
    let quantized = cache.list().iter().find(|entry| entry["weights"] == "int4").unwrap()["dir"].clone();
    let refused = cache.run(Path::new(quantized.as_str().unwrap()), &["--precision", "int8"]);
    assert!(refused.code == 5 && refused.err.contains("precision `int8` is not available"), "{}", refused.err);
}

#[test]
fn a_quantized_precision_quantizes_a_float_checkpoint_under_the_gate() {
    let cache = Cache::new();
    for (precision, weights, is_new) in
        [("int4", "int4", true), ("int4w", "int4", false), ("int8", "int8", true), ("fp32", "source", true)]
    {
        let said = cache.run(&fixture(STORIES), &["--precision", precision, "--json"]);
        assert_eq!(said.code, 0, "{precision}: {}", said.err);
        let line: Value = serde_json::from_str(&said.out).unwrap();
        assert_eq!(line["precision"], precision);
        assert_eq!(said.err.contains(PACKED), is_new, "{}", said.err);
        assert_eq!(said.err.contains("pass the gate"), is_new && weights != "source", "{}", said.err);
        assert_eq!(cache.list()[0]["weights"], weights);
    }
    assert_eq!(cache.list().len(), 3);
    // Random weights with an outlier in each group do not reach the cosine of the gate in 4 bits.
    let noise = edited(STORIES, |tensors| {
        let tensor = tensors.get_mut("model.layers.0.mlp.up_proj.weight").unwrap();
        let values = tensor.bytes.chunks_exact_mut(4).enumerate();
        values.for_each(|(i, value)| {
            let random = (i as u32).wrapping_mul(2_654_435_761) as f32 / u32::MAX as f32 - 0.5;
            value.copy_from_slice(&f32::to_le_bytes(if i % 32 == 0 { 2.5 } else { random }));
        });
    });
    let refused = cache.run(noise.path(), &["--precision", "int4"]);
    assert_eq!(refused.code, 4, "{}", refused.err);
    assert!(refused.err.contains("layers.0.mlp.up") && refused.err.contains("--keep-failing"), "{}", refused.err);
    assert_eq!(cache.list().len(), 3, "a refused quantization leaves no entry");
}

#[test]
fn mxfp4_weights_are_not_quantized_again() {
    let cache = Cache::new();
    for precision in ["int4", "auto"] {
        let mut command = cache.iec();
        command.args(["run", "--prompt", "a", "--max-new", "1", "--precision", precision, "--model-dir"]);
        let said = cache.said(command.arg(fixture("gptoss-mxfp4")));
        assert_eq!(said.code, 0, "{}", said.err);
    }
    assert_eq!(cache.list().len(), 1);
    assert_eq!(cache.list()[0]["weights"], "source");
}

/// Change of the files of an entry.
type Damage<'a> = &'a dyn Fn(&Path);

#[test]
fn a_damaged_entry_is_made_again() {
    let cache = Cache::new();
    let first = cache.run(&fixture(STORIES), &[]);
    let entry = cache.only();
    let damage: [(&str, Damage); 5] = [
        ("cut", &|entry| {
            let binary = std::fs::File::options().write(true).open(entry.join("model.ie.bin")).unwrap();
            binary.set_len(100).unwrap();
        }),
        ("no tokenizer", &|entry| std::fs::remove_file(entry.join("tokenizer.json")).unwrap()),
        ("other description", &|entry| {
            let path = entry.join("model.ie.json");
            let text = std::fs::read_to_string(&path).unwrap().replacen("10000", "10001", 1);
            std::fs::write(&path, text).unwrap();
        }),
        ("record", &|entry| std::fs::write(entry.join("cache.json"), "{").unwrap()),
        ("no record", &|entry| std::fs::remove_file(entry.join("cache.json")).unwrap()),
    ];
    for (name, damage) in damage {
        damage(&entry);
        let said = cache.run(&fixture(STORIES), &[]);
        assert_eq!((said.code, &said.out), (0, &first.out), "{name}: {}", said.err);
        assert!(said.err.contains(PACKED), "{name}: {}", said.err);
        assert_eq!(said.err.contains("damaged"), name != "no record", "{name}: {}", said.err);
        assert_eq!(cache.only(), entry);
    }
}

#[test]
fn the_limit_removes_the_least_recently_used_model() {
    let cache = Cache::new();
    for (name, age) in [("qwen2", 300), ("qwen3", 200), ("phi3", 100)] {
        let mut command = cache.iec();
        command.args(["run", "--prompt", "a", "--max-new", "1", "--model-dir"]).arg(fixture(name));
        assert_eq!(cache.said(&mut command).code, 0);
        set_age(Path::new(cache.list()[0]["dir"].as_str().unwrap()), age);
    }
    let bytes = |list: &[Value]| -> u64 { list.iter().map(|entry| entry["bytes"].as_u64().unwrap()).sum() };
    let names = || cache.list().iter().map(|entry| entry["name"].as_str().unwrap().to_string()).collect::<Vec<_>>();
    let starts = |expected: &[&str]| {
        let names = names();
        names.len() == expected.len() && names.iter().zip(expected).all(|(name, start)| name.starts_with(start))
    };
    assert!(starts(&["phi3", "qwen3", "qwen2"]), "{:?}", names());
    // Room for the new model and the two models used last.
    let run = |limit: u64| {
        let mut command = cache.iec();
        command.env("IEC_CACHE_MAX", limit.to_string()).args(["run", "--prompt", "a", "--max-new", "1", "--model-dir"]);
        cache.said(command.arg(fixture("gemma2")))
    };
    let before = cache.list();
    let other = Cache::new();
    let mut command = other.iec();
    command.args(["run", "--prompt", "a", "--max-new", "1", "--model-dir"]).arg(fixture("gemma2"));
    assert_eq!(other.said(&mut command).code, 0);
    let said = run(bytes(&before[..2]) + bytes(&other.list()) + 1000);
    assert!(said.code == 0 && said.err.contains("removed qwen2-"), "{}", said.err);
    assert!(starts(&["gemma2", "phi3", "qwen3"]), "{:?}", names());
    let wrong = cache.said(cache.iec().env("IEC_CACHE_MAX", "much").arg("list"));
    assert!(wrong.code == 2 && wrong.err.contains("IEC_CACHE_MAX"), "{}", wrong.err);
}

#[test]
fn concurrent_starts_pack_a_model_once() {
    let cache = Cache::new();
    let children: Vec<_> = (0..4)
        .map(|_| {
            let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("iec"));
            command.env("IEC_CACHE", cache.dir.path()).env("IEC_DEVICE", "cpu");
            command
                .args(["run", "--prompt", "Once upon a time", "--max-new", "8", "--model-dir"])
                .arg(fixture(STORIES));
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let expected = expected(STORIES);
    let packers = outputs.iter().filter(|output| String::from_utf8_lossy(&output.stderr).contains(PACKED)).count();
    assert_eq!(packers, 1);
    assert!(outputs.iter().all(|output| output.status.success() && output.stdout == expected.as_bytes()));
    cache.only();
}

#[test]
fn a_cache_that_cannot_be_written_is_an_error_that_names_the_variable() {
    for place in ["/proc/iec-cache", "/dev/null/cache"] {
        let mut command = iec();
        command.env("IEC_CACHE", place).args(["run", "--prompt", "a", "--model-dir"]).arg(fixture(STORIES));
        let said = Cache::new().said(&mut command);
        assert!(said.code == 1 && said.err.contains("IEC_CACHE") && said.err.contains(place), "{}", said.err);
    }
    let mut command = iec();
    command.env_remove("IEC_CACHE").env_remove("HOME").args(["run", "--prompt", "a", "--model-dir"]);
    let said = Cache::new().said(command.arg(fixture(STORIES)));
    assert!(said.code == 2 && said.err.contains("none of IEC_CACHE"), "{}", said.err);
}

#[test]
fn rm_removes_entries_and_leaves_those_in_use() {
    let cache = Cache::new();
    cache.run(&fixture(STORIES), &[]);
    cache.run(&fixture(STORIES), &["--precision", "int8"]);
    let missing = cache.said(cache.iec().args(["rm", "storie"]));
    assert!(missing.code == 1 && missing.err.contains("stories260k-"), "{}", missing.err);
    let list = cache.list();
    let (first, second) = (list[0]["name"].as_str().unwrap(), list[1]["name"].as_str().unwrap());
    // A process that generates many tokens uses the second entry until its reader leaves.
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("iec"));
    command.env("IEC_CACHE", cache.dir.path()).env("IEC_DEVICE", "cpu");
    command.args(["run", "--model-dir", second, "--prompt", "Once", "--max-new", "1"]).stdin(Stdio::piped());
    let lock = Path::new(list[1]["dir"].as_str().unwrap()).join("cache.lock");
    let used = std::fs::File::open(&lock).unwrap();
    used.try_lock_shared().unwrap();
    let refused = cache.said(cache.iec().args(["rm", "--all", "--json"]));
    assert!(refused.code == 1 && refused.err.contains("another process uses"), "{}", refused.err);
    let answer: Value = serde_json::from_str(refused.out.lines().next().unwrap()).unwrap();
    assert_eq!(answer["removed"], serde_json::json!([first]));
    assert!(answer["bytes"].as_u64().unwrap() > 100_000);
    assert_eq!(command.status().unwrap().code(), Some(0), "readers share an entry");
    // Dropping it would leave the lock to a process that another test is starting.
    used.unlock().unwrap();
    let source = fixture(STORIES);
    let removed = cache.said(cache.iec().arg("rm").arg(&source));
    assert!(removed.code == 0 && removed.err.contains(second) && removed.err.contains("freed"), "{}", removed.err);
    assert!(cache.list().is_empty() && source.join("config.json").exists());
    assert_eq!(cache.said(cache.iec().args(["rm", "--all"])).code, 0);
    assert_eq!(cache.said(cache.iec().arg("rm")).code, 2);
}

#[test]
fn interrupted_packing_starts_over_by_itself() {
    let cache = Cache::new();
    cache.run(&fixture(STORIES), &[]);
    let entry = cache.only();
    // The state after a process was killed while it packed: no record, a directory of partial work, an old temporary.
    for name in ["cache.json", "model.ie.json"] {
        std::fs::remove_file(entry.join(name)).unwrap();
    }
    std::fs::create_dir(entry.join(".iec-0123456789abcdef.partial")).unwrap();
    std::fs::write(entry.join(".iec-0123456789abcdef.partial/model.ie.bin"), "half").unwrap();
    assert_eq!(cache.list()[0]["state"], "incomplete");
    let shown = cache.said(cache.iec().arg("list"));
    assert!(shown.out.contains("incomplete"), "{}", shown.out);
    let name = entry.file_name().unwrap();
    assert_eq!(cache.run(Path::new(name), &[]).code, 3);
    let said = cache.run(&fixture(STORIES), &[]);
    assert!(said.code == 0 && said.err.contains(PACKED), "{}", said.err);
    assert_eq!(cache.list()[0]["state"], "complete");
    let names: Vec<_> = std::fs::read_dir(&entry).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().starts_with(".iec-")), "{names:?}");
}

#[test]
fn show_describes_a_model_under_every_name_and_packs_nothing() {
    let cache = Cache::new();
    let source = fixture(STORIES);
    let show = |model: &Path| {
        let said = cache.said(cache.iec().args(["show", "--json"]).arg(model));
        assert_eq!(said.code, 0, "{}", said.err);
        serde_json::from_str::<Value>(&said.out).unwrap()
    };
    let before = show(&source);
    assert!(before["cache"].is_null() && cache.list().is_empty());
    assert_eq!(before["chat_template"], false);
    cache.run(&source, &[]);
    let entry = cache.only();
    for model in [&source, Path::new(STORIES), Path::new(entry.file_name().unwrap())] {
        let found = show(model);
        assert_eq!(found["cache"]["dir"], entry.to_str().unwrap());
        assert_eq!((&found["kind"], &found["context"]), (&"IEBIN pack".into(), &before["context"]));
        assert!(found["context"].as_u64().unwrap() > 0 && found["total"]["weights"] == before["total"]["weights"]);
    }
    let text = cache.said(cache.iec().arg("show").arg(&source)).out;
    for part in ["Hugging Face checkpoint", "cache entry", "source", "chat template", "parameters", "positions"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(cache.said(cache.iec().args(["show", "/nonexistent"])).code, 3);
}

#[test]
fn a_wrong_kind_of_model_is_named_with_the_way_on() {
    let cache = Cache::new();
    let home = TempDir::new().unwrap();
    let empty = home.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let pack = packed(STORIES);
    let source = fixture(STORIES);
    for (model, found, way) in [
        (empty.clone(), "found no model in this directory", "name a pack"),
        (source.join("config.json"), "found the configuration of a checkpoint", "name its directory"),
        (pack.path().join("model.ie.bin"), "found the weights of a pack", "name its directory"),
        (
            PathBuf::from("no/model"),
            "found no file or directory of this name",
            crate::common::download_of("no/model").as_str(),
        ),
        (PathBuf::from("./no/such/model"), "found no file or directory of this name", "iec list"),
    ] {
        let said = cache.run(&model, &[]);
        assert_eq!(said.code, 3, "{}", said.err);
        assert!(said.err.contains(found) && said.err.contains(way), "{}", said.err);
    }
    assert_eq!(cache.run(&pack.path().join("model.ie.json"), &[]).code, 0);
    assert!(cache.list().is_empty());
}

#[test]
fn outputs_do_not_replace_the_files_of_the_source() {
    let cache = Cache::new();
    let source = copy_of(STORIES);
    for name in ["tokenizer.json", "trace.jsonl"] {
        let trace = source.path().join(name);
        let said = cache.run(source.path(), &["--overwrite", "--trace-ids", trace.to_str().unwrap()]);
        assert_eq!(said.code, 2, "{}", said.err);
    }
    assert!(cache.list().is_empty(), "outputs are checked before the model is packed");
}
