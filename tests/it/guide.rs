//! Runs the commands of each page of the guide from top to bottom, as a reader does, in a directory where the models
//! and files that the page assumes are small ones of the same kind. What a command of the page writes is not there
//! before.

use crate::common::{fixture, iec};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;

/// Pages with commands, except adapters.md, whose adapters tests/it/adapters.rs has, and monitoring.md, which is about
/// a feature that the usual build does not have.
const PAGES: &[&str] = &[
    "predecessor.md",
    "checkpoints.md",
    "models.md",
    "chat.md",
    "first-model.md",
    "sampling.md",
    "speculation.md",
    "structured-output.md",
    "quantization.md",
    "measuring.md",
    "deduplication.md",
    "gguf-and-safetensors.md",
    "gpt-oss.md",
    "long-conversions.md",
    "gpus.md",
    "scheduler.md",
    "serve.md",
    "operate.md",
    "scripts-and-errors.md",
];

/// Beginnings of commands that are not run, with the test that runs the like.
const NOT_RUN: [(&str, &str); 5] = [
    ("iec pull", "downloads; tests/it/pull.rs has a hub of its own"),
    ("iec synth --like", "writes gigabytes; tests/it/synth.rs writes one layer"),
    ("iec verify-source", "needs the hashes of a download; tests/it/hub.rs"),
    ("iec eval --run-code", "needs a sandbox; tests/it/suite.rs has commands"),
    ("iec pack --hf-dir OLD_PACK", "tests/it/predecessor.rs makes such packs"),
];

/// Commands that may also end with another code on a machine without a GPU or with noise.
const OTHER_CODES: [(&str, i32); 2] = [("--device cuda", 5), ("bench --compare", 4)];

/// Words of the guide, and what stands for them with a tiny model: it loses more, has less text and odd shapes.
const SMALLER: [(&str, &str); 7] = [
    ("kl=0.02", "kl=0.9"),
    ("ppl=+1%", "ppl=+90%"),
    ("top1=93%", "top1=40%"),
    ("arc_easy.jsonl:-0.5%", "arc_easy.jsonl:-100%"),
    ("gsm8k.jsonl:-1%", "gsm8k.jsonl:-100%"),
    ("--max-tokens 50000", "--max-tokens 2000"),
    ("--out tinyllama-q4_0.gguf", "--out tinyllama-q4_0.gguf --dequantize"),
];

/// Returns true if a line is a call of `iec`, perhaps after variables.
fn calls_iec(line: &str) -> bool {
    let mut words = line.split(' ').skip_while(|word| {
        word.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
    });
    words.next() == Some("iec") && line.contains("iec ")
}

/// Returns the commands of a page: lines of code blocks that call `iec`, continued lines joined.
fn commands(page: &str) -> Vec<String> {
    let (mut code, mut found) = (false, Vec::<String>::new());
    let mut continued = false;
    for line in page.lines().map(str::trim) {
        if line.starts_with("```") {
            code = !code;
        } else if code && continued {
            let command = found.last_mut().unwrap();
            *command = format!("{} {line}", command.trim_end_matches('\\'));
            continued = line.ends_with('\\');
        } else if code && (calls_iec(line) || line.contains("| iec ")) {
            found.push(line.to_string());
            continued = line.ends_with('\\');
        }
    }
    found
}

/// Creates a checkpoint, packs and texts under the names that the guide uses.
fn furnish(dir: &Path) {
    let copy = |from: &Path, to: &str| {
        let to = dir.join(to);
        std::fs::create_dir_all(&to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    };
    let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).unwrap();
    let template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}";
    let models = [
        ("tinyllama", "stories260k"),
        ("gpt-oss-20b", "gptoss-trained"),
        ("deepseek-v3", "deepseek3"),
        ("qwen3.5-4b", "qwen35"),
        ("qwen3-awq", "awq"),
        ("deepseek-fp8", "fp8-block"),
    ];
    for (name, model) in models {
        copy(&fixture(model), &format!("models/{name}"));
        write(&format!("models/{name}/chat_template.jinja"), template);
    }
    let snapshot = "hf/hub/models--openai--gpt-oss-20b";
    copy(&dir.join("models/gpt-oss-20b"), &format!("{snapshot}/snapshots/0123456789abcdef0123456789abcdef01234567"));
    std::fs::create_dir_all(dir.join(snapshot).join("refs")).unwrap();
    write(&format!("{snapshot}/refs/main"), "0123456789abcdef0123456789abcdef01234567");
    for name in ["packs", "reports", "docs", "q4", "manifests", "benchmarks"] {
        std::fs::create_dir_all(dir.join(name)).unwrap();
    }
    let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(repository.join("tests/text/tinystories_valid_30k.txt")).unwrap();
    let half = text.floor_char_boundary(text.len() / 2);
    write("heldout.txt", &text[..half]);
    write("calibration.txt", &text[half..]);
    write("prompts.txt", "Once upon a time\nThe sun\n");
    write("manifests/prompts_10.txt", "Once upon a time\nLily\n");
    let person =
        r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}"#;
    write("person.json", person);
    write("keys.toml", &format!("[[key]]\nname = \"alice\"\nsha256 = \"{}\"\n", "ab".repeat(32)));
    write("sum.lark", "start: number (\" + \" number)~1..3\nnumber: /[1-9][0-9]{0,2}/\n");
    write("examples.txt", "Question: 1 + 1?\nAnswer: 2\n\n");
    let choices = r#"{"query": "The sun is", "choices": ["hot", "a dog"], "answer": 0}"#;
    ["hellaswag_val.jsonl", "benchmarks/any.jsonl", "arc_easy.jsonl"].iter().for_each(|name| write(name, choices));
    write("gsm8k.jsonl", "{\"question\": \"How many?\", \"answer\": \"#### 2\"}");
    write(
        "gsm8k_test.jsonl",
        r#"{"question": "Ann has 3 apples and buys 4. How many?", "answer": "3 + 4 = 7\n#### 7"}"#,
    );
    write("requests.jsonl", r#"{"context": "The sky is", "continuation": " blue"}"#);
    write(
        "settings.jsonl",
        "{\"prompt\": \"Once\", \"max_new\": 4, \"seed\": 7}\n{\"prompt\": \"Is it hot?\", \"choice\": [\"yes\", \"no\"]}\n",
    );
    write("docs/PERFORMANCE.md", "# Speed\n");
    write("mixed.json", r#"{"version": 1, "rules": [{"include": "mlp", "bits": 4}]}"#);
    let run = |line: &str| {
        let status = iec().args(line.split(' ')).current_dir(dir).output().unwrap();
        assert!(status.status.success(), "{line}: {}", String::from_utf8_lossy(&status.stderr));
    };
    for name in ["tinyllama", "tinyllama-tuned", "chat", "code", "gpt-oss"] {
        run(&format!("pack --hf-dir models/tinyllama --out-dir packs/{name}"));
    }
    run("ptq --hf-dir models/tinyllama --bits 4 --out gguf.json");
    run("pack --hf-dir models/tinyllama --q4-map gguf.json --out-dir packs/gguf");
    run("export-gguf --model-dir packs/gguf --out model.Q4_K_M.gguf --dequantize");
    run("pack --hf-dir models/tinyllama --q4-map gguf.json --out-dir packs/tinyllama-q4");
    run("ptq --hf-dir models/gpt-oss-20b --bits 4 --out gpt-oss.q4.json");
    run("pack --hf-dir models/gpt-oss-20b --out-dir packs/gpt-oss-20b");
}

/// Returns the paths that the commands of a page write.
fn outputs(commands: &[String]) -> Vec<PathBuf> {
    const OPTIONS: [&str; 4] = ["--out-dir", "--out", "--trace-ids", "--new-key"];
    let mut found = Vec::new();
    for command in commands {
        let words: Vec<&str> = command.split_whitespace().collect();
        let after = words.windows(2).filter(|pair| OPTIONS.contains(&pair[0]) || pair[0] == ">").map(|pair| pair[1]);
        found.extend(after.filter(|path| !path.starts_with('/') && *path != "-").map(PathBuf::from));
    }
    found
}

/// Removes a file or a directory.
fn remove(path: &Path) {
    if path.is_dir() { std::fs::remove_dir_all(path).unwrap() } else { drop(std::fs::remove_file(path)) }
}

/// Runs a line as a shell would, with the binary under its name.
fn shell(line: &str, dir: &Path) -> Output {
    let binary = assert_cmd::cargo::cargo_bin("iec");
    let path = format!("{}:{}", binary.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut sh = Command::new("sh");
    sh.args(["-c", line]).current_dir(dir).env_clear().env("PATH", path).env("HF_HOME", dir.join("hf"));
    sh.env("HOME", dir).env("IEC_DEVICE", "cpu").stdin(std::process::Stdio::null()).output().unwrap()
}

/// Runs the commands of a page; returns their number and the failures.
fn follow(page: &str, furnished: &Path) -> (usize, Vec<String>) {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide").join(page)).unwrap();
    let is_run = |line: &String| !NOT_RUN.iter().any(|(beginning, _)| line.starts_with(beginning));
    let commands: Vec<String> = commands(&text).into_iter().filter(is_run).collect();
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("guide");
    assert!(Command::new("cp").arg("-r").arg(furnished).arg(&dir).status().unwrap().success());
    outputs(&commands).iter().for_each(|path| remove(&dir.join(path)));
    let mut failures = Vec::new();
    for line in &commands {
        let line = SMALLER.iter().fold(line.clone(), |line, (large, small)| line.replace(large, small));
        // A server does not end by itself; tests/it/serve starts servers.
        let checks = line.starts_with("iec serve") && !line.contains("--check");
        let line = if checks { format!("{line} --check") } else { line };
        let output = shell(&line, &dir);
        let code = output.status.code().unwrap_or(-1);
        let allowed = OTHER_CODES.iter().any(|(part, other)| line.contains(part) && code == *other);
        if code != 0 && !allowed {
            failures.push(format!("{page}: {line}\n  exit {code}: {}", String::from_utf8_lossy(&output.stderr)));
        }
        if line.contains("--report-root") {
            let reports = std::fs::read_dir(dir.join("reports")).unwrap().map(|entry| entry.unwrap().path());
            let lines = reports.into_iter().find(|path| path.extension().is_some_and(|e| e == "jsonl")).unwrap();
            ["BEFORE", "AFTER"].iter().for_each(|name| {
                std::fs::copy(&lines, dir.join(format!("reports/{name}.jsonl"))).unwrap();
            });
        }
    }
    (commands.len(), failures)
}

#[test]
fn every_page_of_the_guide_can_be_followed_from_top_to_bottom() {
    let dir = tempfile::tempdir().unwrap();
    furnish(dir.path());
    let (pages, found) = (Mutex::new(PAGES.iter()), Mutex::new((0, Vec::new())));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(page) = { pages.lock().unwrap().next() } {
                    let (count, failures) = follow(page, dir.path());
                    let mut found = found.lock().unwrap();
                    found.0 += count;
                    found.1.extend(failures);
                }
            });
        }
    });
    let (count, failures) = found.into_inner().unwrap();
    assert!(failures.is_empty(), "{} of {count} commands failed:\n{}", failures.len(), failures.join("\n"));
    assert!(count > 50, "only {count} commands found");
}
