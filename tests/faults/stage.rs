//! Directories in which scenarios are run, and the results of their undisturbed runs.

use crate::call::Call;
use crate::scenario::Scenario;
use crate::state::{self, State};
use crate::tracer::{self, Decision, Observer, Outcome};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use tempfile::TempDir;

/// Name of the directory in which a scenario runs, and of the copy of its initial state.
const WORK: &str = "work";
const TEMPLATE: &str = "template";

/// Directory for everything that these tests write: in memory (`/dev/shm`) if possible, because syncing is fast there.
static HOME: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let is_usable = tempfile::tempfile_in(memory).is_ok();
    let place = if is_usable { memory.to_path_buf() } else { std::env::temp_dir() };
    place.canonicalize().expect("temporary directories exist")
});

/// Creates an empty directory that is removed when the result is dropped.
pub fn directory() -> TempDir {
    tempfile::Builder::new().prefix("iec-faults-").tempdir_in(&*HOME).expect("a temporary directory")
}

/// Returns the program with the arguments of `line`, to be run in `root`.
pub fn program(line: &str, root: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_iec"));
    command
        .args(line.split(' '))
        .args(["--threads", "1", "--quiet"])
        .current_dir(root)
        .env_clear()
        .envs(std::env::vars().filter(|(name, _)| matches!(name.as_str(), "PATH" | "HOME" | "LD_LIBRARY_PATH")))
        .env("TMPDIR", &*HOME)
        .env("IEC_CACHE", root.join("cache"))
        .env("IEC_DEVICE", "cpu");
    command
}

/// Runs a command line without disturbing it.
pub fn run(line: &str, root: &Path) -> Outcome {
    let output = program(line, root).output().expect("the program starts");
    let said = [output.stdout, output.stderr].concat();
    let exit = output.status.code().ok_or_else(|| std::os::unix::process::ExitStatusExt::signal(&output.status));
    Outcome { exit: exit.map_err(|signal| signal.unwrap_or(0)), said: String::from_utf8_lossy(&said).into_owned() }
}

/// Runs a command line that must succeed.
pub fn done(line: &str, root: &Path) {
    let outcome = run(line, root);
    assert_eq!(outcome.exit, Ok(0), "{line}: {}", outcome.said);
}

/// Creates the directory that all scenarios start from. It stays until the next run of the tests replaces it.
fn base() -> &'static Path {
    static BASE: LazyLock<PathBuf> = LazyLock::new(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("faults");
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).expect("writable");
        let path = |name: &str| dir.join(name);
        let shape = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/stories260k");
        let read = |name: &str| std::fs::read(shape.join(name)).expect("the embedded model");
        let mut config: serde_json::Value = serde_json::from_slice(&read("config.json")).expect("JSON");
        for (key, value) in [
            ("hidden_size", json!(32)),
            ("intermediate_size", json!(64)),
            ("num_attention_heads", json!(4)),
            ("num_key_value_heads", json!(2)),
            ("num_hidden_layers", json!(1)),
            ("torch_dtype", json!("bfloat16")),
        ] {
            config[key] = value;
        }
        std::fs::write(path("config.json"), config.to_string()).expect("writable");
        for (seed, name) in [("1", "source"), ("2", "other")] {
            done(&format!("synth --config config.json --seed {seed} --out-dir {name}"), &dir);
            std::fs::write(path(name).join("tokenizer.json"), read("tokenizer.json")).expect("writable");
        }
        let question = json!({"query": "Once upon a", "choices": ["time", "stone"], "answer": 0});
        for (name, text) in [
            ("text", "Once upon a time there was a little girl. ".repeat(20)),
            ("more", "The big red ball was in the park. ".repeat(20)),
            ("questions", format!("{question}\n")),
        ] {
            std::fs::write(path(name), text).expect("writable");
        }
        write_adapter(&path("adapter"));
        let key = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/keys/ed25519.pem");
        std::fs::copy(key, path("key.pem")).expect("a key");
        dir
    });
    &BASE
}

/// Writes an adapter of rank 2 for the query matrix of the model.
fn write_adapter(dir: &Path) {
    std::fs::create_dir_all(dir).expect("writable");
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": "source"});
    std::fs::write(dir.join("adapter_config.json"), config.to_string()).expect("writable");
    let bytes: Vec<u8> = (0..64_u8).flat_map(|i| (f32::from(i) / 256.0).to_le_bytes()).collect();
    let factor = |shape: &[usize]| TensorView::new(Dtype::F32, shape.to_vec(), &bytes).expect("64 numbers");
    let name = |part: &str| format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight");
    let tensors = [(name("A"), factor(&[2, 32])), (name("B"), factor(&[32, 2]))];
    serialize_to_file(tensors, None, &dir.join("adapter_model.safetensors")).expect("writable");
}

/// A scenario with its initial directory and the results of undisturbed runs.
#[derive(Debug)]
pub struct Prepared {
    pub scenario: Scenario,
    home: TempDir,
    pub old: State,
    pub new: State,
    /// Complete states between the old and the new one ([`Scenario::between`]).
    pub between: Vec<State>,
    /// Calls of the undisturbed run.
    pub calls: Vec<Call>,
    /// Exit code of a second run after a complete one.
    pub again: Result<i32, i32>,
}

/// Collects all calls of a run.
#[derive(Default)]
struct Listing(Vec<Call>);

impl Observer for Listing {
    fn before(&mut self, call: &Call) -> Decision {
        self.0.push(call.clone());
        Decision::Make
    }
}

impl Prepared {
    /// Runs the commands before a scenario, and the scenario itself without disturbance.
    pub fn new(scenario: Scenario) -> Prepared {
        let home = directory();
        let work = home.path().join(WORK);
        state::copy(base(), &work);
        scenario.before.iter().for_each(|line| done(line, &work));
        state::copy(&work, &home.path().join(TEMPLATE));
        let (again, calls) = (Ok(0), Vec::new());
        let mut made =
            Prepared { scenario, home, old: State::read(&work), new: State::default(), between: vec![], calls, again };
        let mut listing = Listing::default();
        let outcome = tracer::run(&mut program(scenario.line, &work), &work, &mut listing);
        assert_eq!(outcome.exit, Ok(0), "{}: {}", scenario.name, outcome.said);
        if scenario.after.is_empty() {
            made.again = run(scenario.line, &work).exit;
        }
        scenario.after.iter().for_each(|line| done(line, &work));
        (made.new, made.calls) = (State::read(&work), listing.0);
        let remains = state::remains(&work);
        assert!(remains.is_empty(), "{}: {remains:?} are left", scenario.name);
        for line in scenario.between {
            done(line, &made.fresh());
            made.between.push(State::read(&work));
        }
        made
    }

    /// Restores the initial state of the directory in which the command runs, and returns its path, which is always the
    /// same, because some commands record it.
    pub fn fresh(&self) -> PathBuf {
        let (work, template) = (self.home.path().join(WORK), self.home.path().join(TEMPLATE));
        std::fs::remove_dir_all(&work).expect("the directory can be removed");
        state::copy(&template, &work);
        work
    }

    /// Returns all states that readers may see, the new one last.
    pub fn states(&self) -> Vec<&State> {
        std::iter::once(&self.old).chain(&self.between).chain([&self.new]).collect()
    }
}
